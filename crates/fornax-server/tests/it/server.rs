//! A server for one test, on a port of its own; ends with the test.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use fornax_engine::Model;
use fornax_engine::serve::{Engine, EngineHandle, ServeOptions};
use fornax_plan::KvType;
use fornax_plan::reference::ReferenceDevice;
use fornax_server::{Options, Served, Stop};
use serde_json::Value;

use crate::client::{self, Response};
use crate::fixture;
use crate::script::{Scripted, Shared};

/// Positions of one request in these tests.
pub(crate) const CONTEXT: u32 = 1024;

pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) stop: Stop,
    thread: Option<JoinHandle<()>>,
}

/// The model of all tests.
pub(crate) fn model() -> Arc<Model> {
    static ONE: OnceLock<Arc<Model>> = OnceLock::new();
    ONE.get_or_init(|| fixture::model(CONTEXT)).clone()
}

/// An engine that runs it.
pub(crate) fn engine(options: &ServeOptions) -> EngineHandle {
    let options = ServeOptions {
        context: CONTEXT,
        kv_tokens: options.kv_tokens.or(Some(8192)),
        kv_type: KvType::F32,
        ..options.clone()
    };
    Engine::start(model(), &ReferenceDevice::default(), options).expect("the fixture runs")
}

impl Server {
    pub(crate) fn new(models: Vec<Served>, options: Options) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let stop = Stop::new();
        let theirs = stop.clone();
        let thread = std::thread::spawn(move || {
            fornax_server::serve(listener, models, options, &theirs).expect("the server runs");
        });
        Server { addr, stop, thread: Some(thread) }
    }

    /// The tiny model on a real engine.
    pub(crate) fn real() -> Server {
        Server::new(
            vec![served("tiny", Arc::new(engine(&ServeOptions::default())))],
            Options::default(),
        )
    }

    /// What a script says.
    pub(crate) fn scripted() -> (Server, Arc<Scripted>) {
        Server::scripted_with(Options::default())
    }

    pub(crate) fn scripted_with(options: Options) -> (Server, Arc<Scripted>) {
        let scripted = Scripted::new(model());
        let served = served("tiny", Arc::new(Shared(scripted.clone())));
        (Server::new(vec![served], options), scripted)
    }

    pub(crate) fn get(&self, path: &str) -> Response {
        client::send(self.addr, &client::request("GET", path, &[], b""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Response {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub(crate) fn post_bytes(&self, path: &str, body: &[u8]) -> Response {
        let headers = [("content-type", "application/json")];
        client::send(self.addr, &client::request("POST", path, &headers, body))
    }

    /// The answer to a request that must succeed.
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
        response.json()
    }

    /// Ends the server and waits for it.
    pub(crate) fn end(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok(), "the server failed");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

pub(crate) fn served(alias: &str, engine: Arc<dyn fornax_server::Backend>) -> Served {
    Served { alias: alias.into(), model: model(), engine, context: CONTEXT, created: 1_700_000_000 }
}
