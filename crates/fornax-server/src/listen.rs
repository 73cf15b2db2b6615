//! Connections: accepting them, time limits on them, and ending them in good order. Knows HTTP as hyper does, no
//! endpoint.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::Options;
use crate::app::App;
use crate::half::{Half, Peer};
use crate::patient::{self, Patient};

/// Connections at once; more wait in the system's queue.
const CONNECTIONS: usize = 16_384;

/// Tells a server to end: no new connections, those that work finish.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Default for Stop {
    fn default() -> Stop {
        Stop::new()
    }
}

impl Stop {
    /// A new one; its clones all mean the same server.
    pub fn new() -> Stop {
        Stop(Arc::new(watch::Sender::new(false)))
    }

    /// Ends the server. It goes on with what it has begun, for as long as its options allow.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }

    fn listen(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// Resolves when the server is to end.
    pub(crate) async fn wait(&self) {
        let mut listen = self.listen();
        let _ = listen.wait_for(|stop| *stop).await;
    }
}

/// Serves until it is told to stop; returns when every connection has ended or `drain` is over.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    router: Router,
    stop: Stop,
    drain: Duration,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.wait() => break,
            next = next => next,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, router, stop) = (app.clone(), router.clone(), stop.clone());
                tokio::spawn(async move {
                    app.metrics.connected();
                    connection(stream, &app.options, router, stop).await;
                    app.metrics.disconnected();
                    drop(place);
                });
            }
            Err(e) => refused(&e).await,
        }
    }
    drop(listener);
    let all = u32::try_from(CONNECTIONS).unwrap_or(u32::MAX);
    let drained = tokio::time::timeout(drain, places.acquire_many(all)).await;
    if drained.is_err() {
        tracing::warn!("connections were still open after {} s", drain.as_secs());
    }
}

/// Out of file descriptors, or a client that left at once: neither is the end.
async fn refused(error: &io::Error) {
    if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
        tracing::warn!("could not accept a connection: {error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn connection(stream: TcpStream, options: &Options, router: Router, stop: Stop) {
    // Events are small and must not wait for each other.
    let _ = stream.set_nodelay(true);
    patient::watch(&stream, options.stall_timeout);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(options.head_timeout).keep_alive(true);
    let peer = Peer::default();
    let stream = Half::new(stream, peer.clone());
    let stream = TokioIo::new(Patient::new(stream, options.stall_timeout));
    let served = http.serve_connection(stream, Known(TowerToHyperService::new(router), peer));
    tokio::pin!(served);
    tokio::select! {
        ended = served.as_mut() => return log_end(ended),
        () = stop.wait() => {}
    }
    served.as_mut().graceful_shutdown();
    log_end(served.await);
}

/// Requests that know the connection they came on.
struct Known(TowerToHyperService<Router>, Peer);

impl Service<Request<Incoming>> for Known {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.1.clone());
        self.0.call(request)
    }
}

fn log_end(ended: hyper::Result<()>) {
    if let Err(e) = ended {
        tracing::debug!("a connection ended early: {e}");
    }
}
