//! HTTP over the engine: the protocols of OpenAI and Anthropic, for any number of clients at once.
//! It knows requests, texts and tokens; it knows no device and no kernel.
//!
//! A request passes the [gate](mod@gate), is checked against the one description of the interface, becomes an order
//! to the engine, and its updates become pieces that the protocol writes. The engine's thread only sends token ids
//! through a channel; characters, stop strings, calls and JSON are made in the request's own task, which cancels the
//! request when it is dropped: because the client left, or nothing more is wanted.

#![forbid(unsafe_code)]

mod api;
mod app;
mod backend;
mod gate;
mod half;
mod json;
mod listen;
mod live;
mod metrics;
mod order;
mod patient;
mod reasoning;
mod refusal;
mod schema;
mod sse;
mod tokens;
mod tools;
mod turn;
mod whole;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

pub use backend::{Backend, Served};
pub use listen::Stop;

use crate::app::App;

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keys of which a request must bring one; none are needed where there are none.
    pub keys: Vec<String>,
    /// Origins whose pages may use the server; `*` for all.
    pub cors: Vec<String>,
    /// Whether the address is one that only this machine reaches; the Host of requests is then checked, unless
    /// keys are.
    pub loopback: bool,
    /// A request that takes longer fails.
    pub request_timeout: Option<Duration>,
    /// How long requests that run may go on when the server ends.
    pub drain: Duration,
    /// A connection that has not brought a whole head by then is closed; so is one that is idle.
    pub head_timeout: Duration,
    /// A body that takes longer is not coming.
    pub body_timeout: Duration,
    /// A client that takes nothing of its answer for so long has left.
    pub stall_timeout: Duration,
    /// An engine that has work and finishes no step for so long is called stuck.
    pub stuck_after: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            keys: Vec::new(),
            cors: Vec::new(),
            loopback: true,
            request_timeout: None,
            drain: Duration::from_secs(30),
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(30),
            stuck_after: Duration::from_secs(60),
        }
    }
}

/// Serves `models` on `listener` until `stop` says so; then waits for what runs, and ends the engines.
///
/// # Errors
/// When the listener or the threads cannot be had.
pub fn serve(
    listener: TcpListener,
    models: Vec<Served>,
    options: Options,
    stop: &Stop,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("fornax-http")
        .worker_threads(2)
        .max_blocking_threads(4)
        .build()?;
    let drain = options.drain;
    let app = Arc::new(App::new(models, options));
    let router = api::router(&app);
    app.prepare_grammars();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        listen::serve(listener, app.clone(), router, stop.clone(), drain).await;
        io::Result::Ok(())
    })?;
    for served in &app.models {
        served.engine.shutdown(Duration::ZERO);
    }
    // A task that still waits for an engine waits in vain.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// Calls `stop` when the process is asked to end (Ctrl-C, SIGTERM); a second time, the process ends at once.
///
/// # Errors
/// When signals cannot be listened to.
pub fn stop_on_signals(stop: &Stop) -> io::Result<()> {
    let stop = stop.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("fornax-signals".into()).spawn(move || {
        runtime.block_on(async {
            for round in 0.. {
                if signalled().await.is_err() {
                    return;
                }
                if round > 0 {
                    std::process::exit(130);
                }
                stop.stop();
            }
        });
    })?;
    Ok(())
}

#[cfg(unix)]
async fn signalled() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed,
        _ = terminate.recv() => Ok(()),
    }
}

#[cfg(not(unix))]
async fn signalled() -> io::Result<()> {
    tokio::signal::ctrl_c().await
}
