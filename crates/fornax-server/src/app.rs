//! What every handler can reach: the models, the options, the metrics. Knows no endpoint.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body as HttpBody;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use fornax_engine::constrain::{Compiled, Constrainer, Grammar};
use serde_json::Value;

use crate::Options;
use crate::backend::Served;
use crate::half::Peer;
use crate::json;
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::schema::Body;

/// More than any text of that many tokens can need: long tokens, escapes of six bytes a character, and
/// the request around it.
const BODY_BYTES_LEAST: usize = 8 << 20;
const BODY_BYTES_PER_TOKEN: usize = 256;
/// Bodies above this are worked on beside the tasks, not among them.
pub(crate) const LARGE: usize = 16 << 10;

/// The server's state.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) models: Vec<Arc<Served>>,
    constrainers: Vec<Constrainer>,
    pub(crate) options: Options,
    pub(crate) metrics: Arc<Metrics>,
    body_bytes: usize,
}

impl App {
    pub(crate) fn new(models: Vec<Served>, options: Options) -> App {
        let context = models.iter().map(|m| m.context as usize).max().unwrap_or(0);
        let constrainers = models.iter().map(|m| Constrainer::new(m.model.tokenizer()));
        App {
            constrainers: constrainers.collect(),
            models: models.into_iter().map(Arc::new).collect(),
            options,
            metrics: Arc::new(Metrics::new()),
            body_bytes: BODY_BYTES_LEAST.max(context.saturating_mul(BODY_BYTES_PER_TOKEN)),
        }
    }

    /// The model that a request names; the first where it names none.
    ///
    /// # Errors
    /// 404, naming what is there.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<Arc<Served>, Refusal> {
        let found = match name {
            None => self.models.first(),
            Some(name) => self.models.iter().find(|m| m.alias == name),
        };
        found.cloned().ok_or_else(|| {
            let known: Vec<&str> = self.models.iter().map(|m| m.alias.as_str()).collect();
            let name: String = name.unwrap_or_default().chars().take(200).collect();
            let said = format!("there is no model {name:?}; there is {}", known.join(", "));
            Refusal {
                param: Some("model".into()),
                ..Refusal::new(StatusCode::NOT_FOUND, said).with_code("model_not_found")
            }
        })
    }

    /// Reads every model's tokens as grammars need them, on a thread of its own: the first request with
    /// a grammar would wait for it.
    pub(crate) fn prepare_grammars(self: &Arc<App>) {
        let app = Arc::clone(self);
        let read = move || app.constrainers.iter().for_each(|c| drop(c.prepare()));
        // Without a thread the first grammar does it.
        drop(std::thread::Builder::new().name("fornax-grammars".into()).spawn(read));
    }

    /// Makes a grammar ready for a model.
    ///
    /// # Errors
    /// 400, with what cannot be enforced.
    pub(crate) async fn compile(
        self: &Arc<App>,
        served: &Arc<Served>,
        grammar: Grammar,
        param: &'static str,
    ) -> Result<Compiled, Refusal> {
        let (app, served) = (self.clone(), served.clone());
        // A large schema takes a while; other requests' tasks go on.
        let compiled = tokio::task::spawn_blocking(move || {
            let at = app.models.iter().position(|m| Arc::ptr_eq(m, &served)).unwrap_or(0);
            app.constrainers[at].compile(&grammar)
        });
        match compiled.await {
            Ok(Ok(compiled)) => Ok(compiled),
            Ok(Err(e)) => Err(Refusal::field(param, e.to_string()).with_code("invalid_grammar")),
            Err(_) => Err(Refusal::failed("compiling the grammar failed")),
        }
    }

    /// When a request that comes now must be done.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.options.request_timeout.map(|limit| Instant::now() + limit)
    }

    /// Reads a request's body and checks it against the description called `name`.
    ///
    /// # Errors
    /// 400, 408, 413 or 415.
    pub(crate) async fn read(&self, request: Request, name: &'static str) -> Result<Body, Refusal> {
        let bytes = self.bytes(request).await?;
        beside(bytes.len() > LARGE, move || Body::check(parsed(&bytes)?, name)).await
    }

    async fn bytes(&self, request: Request) -> Result<Vec<u8>, Refusal> {
        let (parts, body) = request.into_parts();
        if let Some(kind) = parts.headers.get(header::CONTENT_TYPE) {
            let kind = kind.to_str().unwrap_or("something unreadable");
            let essence = kind.split(';').next().unwrap_or_default().trim();
            if !essence.eq_ignore_ascii_case("application/json") {
                let kind: String = kind.chars().take(100).collect();
                let said = format!("the content type is {kind:?}, expected application/json");
                return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, said));
            }
        }
        let announced = parts.headers.get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|n| n > self.body_bytes as u64) {
            return Err(self.too_large());
        }
        match tokio::time::timeout(self.options.body_timeout, self.collect(body)).await {
            Ok(bytes) => {
                if let (Ok(_), Some(peer)) = (&bytes, parts.extensions.get::<Peer>()) {
                    peer.came_whole();
                }
                bytes
            }
            Err(_) => {
                let seconds = self.options.body_timeout.as_secs();
                let said = format!("the body did not come within {seconds} s");
                Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, said))
            }
        }
    }

    async fn collect(&self, mut body: HttpBody) -> Result<Vec<u8>, Refusal> {
        let mut bytes = Vec::new();
        loop {
            let frame = std::future::poll_fn(|cx| {
                http_body::Body::poll_frame(std::pin::Pin::new(&mut body), cx)
            });
            match frame.await {
                None => return Ok(bytes),
                Some(Err(_)) => {
                    return Err(Refusal::field("", "the body ended before it was complete"));
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        if bytes.len() + data.len() > self.body_bytes {
                            return Err(self.too_large());
                        }
                        bytes.extend_from_slice(&data);
                    }
                }
            }
        }
    }

    fn too_large(&self) -> Refusal {
        let said = format!(
            "the body has more than {} bytes, which is more than the context can need",
            self.body_bytes
        );
        Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, said)
    }
}

fn parsed(bytes: &[u8]) -> Result<Value, Refusal> {
    json::read(bytes).map_err(|why| Refusal::field("", why).with_code("invalid_json"))
}

/// Runs `work` here, or beside the tasks where it takes long.
///
/// # Errors
/// Those of `work`; 500 if it panics, which is a bug and must not end the server.
pub(crate) async fn beside<T: Send + 'static>(
    long: bool,
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    if !long {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(Refusal::failed("an internal error; the log says more")),
    }
}
