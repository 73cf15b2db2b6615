//! Serves the tests' tiny model on the slow reference device, for tests in other languages where the program itself is
//! not built: `tiny_server PORT`. It says where it listens as the program does.

#[path = "../tests/it/fixture.rs"]
mod fixture;

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use fornax_engine::serve::{Engine, ServeOptions};
use fornax_plan::KvType;
use fornax_plan::reference::ReferenceDevice;
use fornax_server::{Options, Served, Stop};

const CONTEXT: u32 = 2048;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port = std::env::args().nth(1).map_or(Ok(0), |port| port.parse::<u16>())?;
    let model = fixture::model(CONTEXT);
    let options = ServeOptions {
        context: CONTEXT,
        kv_tokens: Some(16_384),
        kv_type: KvType::F32,
        ..ServeOptions::default()
    };
    let engine = Arc::new(Engine::start(model.clone(), &ReferenceDevice::default(), options)?);
    let served = Served { alias: "tiny".into(), model, engine, context: CONTEXT, created: 0 };
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    writeln!(std::io::stderr(), "listening on http://{}", listener.local_addr()?)?;
    let stop = Stop::new();
    fornax_server::stop_on_signals(&stop)?;
    let options = Options { request_timeout: Some(Duration::from_secs(60)), ..Options::default() };
    fornax_server::serve(listener, vec![served], options, &stop)?;
    Ok(())
}
