//! Sockets whose other end may be gone without a word, or takes nothing of what it asked for. Knows bytes, no HTTP.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// A connection that is quiet for so long is asked whether it is still there.
const QUIET: Duration = Duration::from_secs(30);
/// Between two such questions; after as many without an answer it is gone.
const AGAIN: Duration = Duration::from_secs(10);
const QUESTIONS: u32 = 3;

/// Has the system find out about machines that vanished: while nothing is sent, and while what was sent is not
/// acknowledged. Where it cannot, only the limits of [`Patient`] hold.
pub(crate) fn watch(stream: &TcpStream, stall: Duration) {
    let socket = SockRef::from(stream);
    let asks = TcpKeepalive::new().with_time(QUIET).with_interval(AGAIN);
    #[cfg(not(any(target_os = "openbsd", target_os = "solaris")))]
    let asks = asks.with_retries(QUESTIONS);
    let _ = socket.set_tcp_keepalive(&asks);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(stall.max(QUIET)));
    #[cfg(not(target_os = "linux"))]
    let _ = stall;
}

/// A stream on which a write fails that makes no progress for so long.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write waits.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> Patient<S> {
        Patient { stream, limit, waits: None }
    }

    /// What a write came to; an error in place of waiting where it has waited for too long.
    fn timed<T>(
        &mut self,
        cx: &mut Context<'_>,
        wrote: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.waits = None;
            return wrote;
        }
        let limit = self.limit;
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + limit)));
        ready!(waits.as_mut().poll(cx));
        let said = "the client takes nothing of its answer";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, said)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write(cx, data);
        self.timed(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, data);
        self.timed(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn now<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(work)
    }

    #[test]
    fn a_write_that_waits_for_too_long_fails_and_a_slow_reader_does_not() {
        const LIMIT: Duration = Duration::from_millis(400);
        now(async {
            let (here, mut there) = duplex(8);
            let mut here = Patient::new(here, LIMIT);
            // Longer than the limit in all, never for one write.
            let reads = async {
                let mut byte = [0; 8];
                for _ in 0..8 {
                    tokio::time::sleep(LIMIT / 4).await;
                    there.read_exact(&mut byte).await.expect("eight more");
                }
                there
            };
            let (wrote, there) = tokio::join!(here.write_all(&[7; 64]), reads);
            wrote.expect("a reader that is slow");
            let began = Instant::now();
            let e = here.write_all(&[7; 64]).await.expect_err("nobody reads");
            assert_eq!(e.kind(), io::ErrorKind::TimedOut);
            assert!(began.elapsed() >= LIMIT);
            drop(there);
        });
    }
}
