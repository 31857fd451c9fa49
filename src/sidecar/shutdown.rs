//! What runs for long, and how it stops.
//!
//! | task | owns | stopped by | its error |
//! |---|---|---|---|
//! | accept loop | the listener | `stop` | logged, it goes on |
//! | a task a connection | the connection | its peer, or `stop` after the request in flight | logged at debug |
//! | a task a refused body | the rest of the body | its end, a bound, 10 s | none |
//! | a task a watched file or pair | what it last read of it | `stop` | logged, what was read before stays |
//! | the export | the feed, the sink, the checkpoint | the end of its feed, or `give_up` | ends the process |
//!
//! The order of a stop: no connection is accepted any more and idle ones close; requests in flight finish; readers
//! are sent home with what these brought; then, since nothing can be admitted any more, the export's feed ends with
//! the last admitted event and the export delivers the rest. All of it within `AEP_DRAIN`; what isn't delivered by then
//! stays undelivered, and nothing becomes a dead letter for it.

use std::io;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The signals and the tasks of one process.
#[derive(Debug, Clone, Default)]
pub struct Shutdown {
    /// Cancelled first: nothing new is taken in.
    pub stop: CancellationToken,
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
