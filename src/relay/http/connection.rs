//! The listener and its connections: bounded in number, timed out in every phase, closed in order.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Relay, Tls};
use crate::relay::limits::Times;

/// How long accepting pauses when the process is out of file handles.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// When connections end. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// Cancelled: no connection is accepted any more, and each one ends after its request in flight.
    pub orderly: CancellationToken,
    /// Cancelled after that: those that are still open are cut.
    pub cut: CancellationToken,
}

/// Accepts connections until their end, in order or by a cut. The tracker holds a task
/// for each connection. With `tls` nothing else is spoken: a peer that begins in plain HTTP is disconnected.
pub async fn serve(relay: Relay, listener: TcpListener, tls: Option<Tls>, tracker: TaskTracker, ends: Ends) {
    let router = super::router(relay.clone());
    let places = Arc::new(Semaphore::new(relay.limits().max_connections.min(Semaphore::MAX_PERMITS)));
    loop {
        let accepted = tokio::select! {
            biased;
            () = ends.orderly.cancelled() => return,
            accepted = accept(&listener, &places) => accepted,
        };
        let (stream, place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection can't be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = connection(stream, tls.clone(), router.clone(), relay.limits().times, ends.clone());
        let metrics = relay.hub().metrics().clone();
        tracker.spawn(async move {
            metrics.connections.inc();
            connection.await;
            metrics.connections.dec();
            drop(place);
        });
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _): (TcpStream, SocketAddr) = listener.accept().await?;
    Ok((stream, place))
}

async fn connection(stream: TcpStream, tls: Option<Tls>, router: Router, times: Times, ends: Ends) {
    if let Err(error) = prepare(&stream, times.write) {
        tracing::debug!(%error, "a connection's options can't be set");
    }
    let stream = WriteDeadline::new(stream, times.write);
    let Some(tls) = tls else { return speak(stream, router, times, ends).await };
    let shaken = tokio::select! {
        shaken = tls.accept(stream, times.head) => shaken,
        () = ends.orderly.cancelled() => return,
    };
    match shaken {
        Ok(stream) => speak(stream, router, times, ends).await,
        Err(error) => tracing::debug!(%error, "a handshake failed"),
    }
}

/// Speaks HTTP until the peer goes, or until the request in flight at the end is answered.
async fn speak<S>(stream: S, router: Router, times: Times, ends: Ends)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(stream);
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(times.head)
        .half_close(true)
        .serve_connection(io, TowerToHyperService::new(router))
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = ends.orderly.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection => ended,
                () = ends.cut.cancelled() => return,
            }
        }
    };
    if let Err(error) = ended {
        // Its text names a phase, never what was sent.
        tracing::debug!(%error, "a connection broke off");
    }
}

/// Small writes go out at once, and a peer that vanished is noticed.
fn prepare(stream: &TcpStream, patience: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&socket2::TcpKeepalive::new().with_time(patience))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(patience))?;
    Ok(())
}

/// A stream whose writes fail once the peer has taken nothing for a while.
struct WriteDeadline<S> {
    inner: S,
    after: Duration,
    /// Armed while a write waits for the peer.
    deadline: Pin<Box<Sleep>>,
    armed: bool,
}

impl<S> WriteDeadline<S> {
    fn new(inner: S, after: Duration) -> Self {
        Self { inner, after, deadline: Box::pin(tokio::time::sleep(after)), armed: false }
    }

    /// Passes a write's outcome on, and fails one that has waited too long.
    fn watch<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.armed = false;
            return outcome;
        }
        if !self.armed {
            self.armed = true;
            self.deadline.as_mut().reset(Instant::now() + self.after);
        }
        match self.deadline.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteDeadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteDeadline<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.watch(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(cx);
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_is_given_up() {
        let (near, _far) = tokio::io::duplex(8);
        let mut near = WriteDeadline::new(near, Duration::from_secs(90));
        let start = Instant::now();
        let error = near.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 90);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_peer_is_waited_for() {
        use tokio::io::AsyncReadExt as _;
        let (near, mut far) = tokio::io::duplex(8);
        let mut near = WriteDeadline::new(near, Duration::from_secs(90));
        let read = async {
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_secs(60)).await;
                far.read_exact(&mut [0; 8]).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(near.write_all(&[0; 64]), read);
        written.unwrap();
    }
}
