//! Server-sent events: framing, keep-alive comments, and a body that is fed by a task. Knows no protocol.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use http_body::Frame;
use serde_json::Value;
use tokio::sync::mpsc::{self, Receiver, Sender};

use crate::live::{Live, Piece};
use crate::refusal::Refusal;

/// A comment goes out after so long without an event, so that no proxy takes the stream for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The type of a stream of events.
pub(crate) const EVENTS: &str = "text/event-stream";
/// Means nothing to anybody.
pub(crate) const COMMENT: &[u8] = b": still here\n\n";
/// Events that wait for a slow reader before the task waits too.
const WAITING: usize = 64;

/// How a protocol writes an answer as events.
pub(crate) trait Events: Send + 'static {
    /// What comes before the first piece.
    fn open(&mut self, out: &mut Outgoing);
    /// One piece of a choice.
    fn piece(&mut self, choice: usize, piece: Piece, out: &mut Outgoing);
    /// After the last piece of the last choice.
    fn close(&mut self, out: &mut Outgoing);
    /// Instead of everything that would follow.
    fn failed(&mut self, refusal: &Refusal, out: &mut Outgoing);
}

/// Events as bytes.
#[derive(Debug, Default)]
pub(crate) struct Outgoing(Vec<u8>);

impl Outgoing {
    /// An event that is only data.
    pub(crate) fn data(&mut self, value: &Value) {
        self.0.extend_from_slice(b"data: ");
        // One line: serde_json escapes line breaks.
        self.0.extend_from_slice(value.to_string().as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }

    /// An event with a name.
    pub(crate) fn named(&mut self, name: &str, value: &Value) {
        self.0.extend_from_slice(format!("event: {name}\n").as_bytes());
        self.data(value);
    }

    /// What OpenAI's streams end with.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.0).into()
    }
}

/// Streams an answer. The head goes out at once; when the client leaves, the request is cancelled.
pub(crate) fn stream(live: Live, events: impl Events) -> Response {
    let (send, receive) = mpsc::channel(WAITING);
    tokio::spawn(feed(live, events, send));
    let mut response = Response::new(Body::new(Fed { receive }));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(EVENTS));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

async fn feed(mut live: Live, mut events: impl Events, send: Sender<Bytes>) {
    let mut out = Outgoing::default();
    events.open(&mut out);
    loop {
        if !out.0.is_empty() && send.send(out.take()).await.is_err() {
            return;
        }
        let next = tokio::select! {
            biased;
            // The client left: `live` is dropped, and with it the request.
            () = send.closed() => return,
            next = tokio::time::timeout(KEEP_ALIVE, live.next()) => next,
        };
        match next {
            Err(_) => out.0.extend_from_slice(COMMENT),
            Ok(Ok(Some((choice, piece)))) => events.piece(choice, piece, &mut out),
            Ok(Ok(None)) => {
                events.close(&mut out);
                break;
            }
            Ok(Err(refusal)) => {
                events.failed(&refusal, &mut out);
                break;
            }
        }
    }
    let _ = send.send(out.take()).await;
}

/// A body whose data a task sends.
#[derive(Debug)]
struct Fed {
    receive: Receiver<Bytes>,
}

impl http_body::Body for Fed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.receive.poll_recv(cx).map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}
