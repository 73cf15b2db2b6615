//! Connections whose other end sends no more: who waits for an answer is told from who has left. A system sends the same
//! to say either; but who has left refuses what is sent to him, so he is sent something that means nothing. Knows bytes
//! and when a request is under way, nothing of what it is.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Sent before the head of an answer: every client of HTTP/1.1 passes over it.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// When to ask, after its last byte: an answer that comes at once needs no question, and clients count interim answers.
const ASK: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(100),
];
/// Between two looks whether a question was refused, at first and later.
const LOOK: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(500)];

/// Nothing is asked, or a request has not come whole.
const COMING: u8 = 0;
/// A request has come whole, and nothing of its answer has gone out.
const ASKED: u8 = 1;
/// Something of the answer has.
const ANSWERING: u8 = 2;

/// What a connection and the requests on it tell each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    stage: AtomicU8,
    /// The answer is to hold something that means nothing.
    ask: AtomicBool,
}

/// A request under way; over when it is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay(Peer);

impl Peer {
    /// A request's head is there.
    pub(crate) fn begin(&self) -> UnderWay {
        self.0.stage.store(COMING, Ordering::Relaxed);
        self.0.ask.store(false, Ordering::Relaxed);
        UnderWay(self.clone())
    }

    /// The request has come whole: its client need not send anything more.
    pub(crate) fn came_whole(&self) {
        self.0.stage.store(ASKED, Ordering::Relaxed);
    }

    fn stage(&self) -> u8 {
        self.0.stage.load(Ordering::Relaxed)
    }
}

impl UnderWay {
    /// Whether a part that means nothing is to go out now; once.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.0.ask.load(Ordering::Relaxed) && self.0.0.ask.swap(false, Ordering::Relaxed)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.0.stage.store(COMING, Ordering::Relaxed);
    }
}

/// Whether the other end has refused something.
pub(crate) trait Refused {
    fn is_refused(&self) -> bool;
}

impl Refused for TcpStream {
    fn is_refused(&self) -> bool {
        SockRef::from(self).take_error().map_or(true, |e| e.is_some())
    }
}

/// A stream whose end is not told while somebody may be waiting for an answer.
#[derive(Debug)]
pub(crate) struct Half<S> {
    stream: S,
    peer: Peer,
    far: Far,
    /// Nothing is on its way out.
    clear: bool,
}

#[derive(Debug)]
enum Far {
    Sends,
    /// It has sent its last byte.
    Quiet {
        since: Instant,
        asked: usize,
        look: Pin<Box<Sleep>>,
        /// To the look after the next.
        wait: Duration,
    },
    Gone,
}

impl<S> Half<S> {
    pub(crate) fn new(stream: S, peer: Peer) -> Half<S> {
        Half { stream, peer, far: Far::Sends, clear: true }
    }
}

impl<S: AsyncRead + AsyncWrite + Refused + Unpin> Half<S> {
    /// Sends what means nothing, where that is possible.
    fn ask(&mut self, cx: &mut Context<'_>) {
        if self.peer.stage() == ANSWERING {
            self.peer.0.ask.store(true, Ordering::Relaxed);
        } else if self.clear {
            // Nothing else is on its way, so that there is room for all of it. An error shows at the next look.
            let _ = Pin::new(&mut self.stream).poll_write(cx, INTERIM);
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Refused + Unpin> AsyncRead for Half<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let waited_for = this.peer.stage() != COMING;
            match &mut this.far {
                Far::Sends => {
                    let before = into.filled().len();
                    ready!(Pin::new(&mut this.stream).poll_read(cx, into))?;
                    if into.filled().len() > before || !waited_for {
                        return Poll::Ready(Ok(()));
                    }
                    let since = Instant::now();
                    let look = Box::pin(sleep_until(since + ASK[0]));
                    this.far = Far::Quiet { since, asked: 0, look, wait: LOOK[0] };
                }
                // The answer went out: now the end may be told.
                Far::Quiet { .. } if !waited_for => this.far = Far::Gone,
                Far::Quiet { since, asked, look, wait } => {
                    if this.stream.is_refused() {
                        this.far = Far::Gone;
                        continue;
                    }
                    ready!(look.as_mut().poll(cx));
                    let now = Instant::now();
                    if ASK.get(*asked).is_some_and(|after| now - *since >= *after) {
                        *asked += 1;
                        *wait = LOOK[0];
                        look.as_mut().reset(now + *wait);
                        this.ask(cx);
                    } else {
                        *wait = (2 * *wait).min(LOOK[1]);
                        look.as_mut().reset(now + *wait);
                    }
                }
                Far::Gone => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Half<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.goes_out();
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.goes_out();
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Asked for when everything was taken.
        self.clear = true;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S> Half<S> {
    fn goes_out(&mut self) {
        self.clear = false;
        let stage = &self.peer.0.stage;
        let _ = stage.compare_exchange(ASKED, ANSWERING, Ordering::Relaxed, Ordering::Relaxed);
    }
}
