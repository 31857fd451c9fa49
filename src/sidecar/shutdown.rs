//! What runs for long, and how it stops.
//!
//! | task | owns | stopped by | its error |
//! |---|---|---|---|
//! | accept loop | the listener | `ends` | logged, it goes on |
//! | a task a connection | the connection | its peer, or `ends` after the request in flight | logged at debug |
//! | a task a refused body | the rest of the body | its end, a bound, 10 s | none |
//! | a task a watched file or pair | what it last read of it | `ends` | logged, what was read before stays |
//! | the export | the tasks of the sinks; with another relay, the subscription | the end of these | ends the process |
//! | a task a sink | its cursor, its lanes, its dead letters | `finish` once all is delivered, else `give_up` | a sink that is gone for good ends the export |
//! | the admin listener | its address, what is counted | the end of everything else | logged |
//!
//! The spool's writer, the writes of cursors and of dead letters, and the removal of spool files run on the threads for
//! blocking work, each only as long as there is something to do; what is under way at the end is waited for.
//!
//! The order of a stop: the sidecar is no longer ready; no connection is accepted any more and idle ones close;
//! requests in flight finish; readers are sent home with what these brought; then, since nothing can be admitted any
//! more, `finish` is cancelled and the sinks deliver the rest of the spool. A request that takes longer than a quarter
//! of `AEP_DRAIN` is refused, and a reader that doesn't take its goodbye is cut after another one, so that neither
//! can hold up the rest. A second before `AEP_DRAIN` is over, `give_up` is cancelled: no delivery is begun any more,
//! those under way have half a second, and the cursors are written. What isn't delivered by then stays in the spool,
//! and nothing becomes a dead letter for it. Probes and scrapers are answered to the end.
//!
//! With another relay as the feed there is nothing to accept: no more is read from it, and the sinks deliver what was.

use std::io;

use crate::relay::http::Ends;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The signals and the tasks of one process.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Connections end first, in order: nothing new is taken in.
    pub ends: Ends,
    /// Cancelled once nothing can be admitted any more.
    pub finish: CancellationToken,
    /// Cancelled when the time for a stop is nearly up: deliveries under way are all that is waited for.
    pub give_up: CancellationToken,
    /// Connections, what outlives a request, and watched files.
    pub connections: TaskTracker,
}

/// Returns at the first SIGTERM or SIGINT.
///
/// # Errors
/// When the signals can't be listened to.
pub async fn signal() -> io::Result<&'static str> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            _ = terminate.recv() => Ok("SIGTERM"),
            _ = interrupt.recv() => Ok("SIGINT"),
        }
    }
    #[cfg(not(unix))]
    {
        tokio::signal::ctrl_c().await?;
        Ok("interrupt")
    }
}
