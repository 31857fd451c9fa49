//! Whether a subscription works.

use tokio::sync::watch;

/// What a subscription is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// On its way to the relay: at the start, and after a stream that worked has ended.
    Connecting,
    /// The live stream is open and nothing is owed.
    Live,
    /// The live stream is open; what was missed is still being read beside it.
    Draining,
    /// The last attempt failed; further ones follow.
    Failing(Cause),
}

/// Why a stream couldn't be opened, or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The token is missing, wrong, or not allowed to read: for a person to mend.
    Unauthorized,
    /// There is no relay at that URL: for a person to mend.
    NotFound,
    /// The request itself is refused: for a person to mend.
    Refused,
    /// The relay's certificate isn't trusted: for a person to mend.
    Untrusted,
    /// What answers isn't an event stream: for a person to mend.
    NotAStream,
    /// The relay can't answer now.
    Unavailable,
    /// No connection could be made.
    Unreachable,
    /// The connection broke.
    Broken,
    /// Nothing came for longer than the heartbeat allows, or no answer at all.
    Silent,
    /// The relay ended the stream.
    Ended,
    /// The relay said that it is shutting down.
    ShuttingDown,
}

impl Cause {
    /// The cause's name in metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not-found",
            Self::Refused => "refused",
            Self::Untrusted => "untrusted",
            Self::NotAStream => "not-a-stream",
            Self::Unavailable => "unavailable",
            Self::Unreachable => "unreachable",
            Self::Broken => "broken",
            Self::Silent => "silent",
            Self::Ended => "ended",
            Self::ShuttingDown => "shutting-down",
        }
    }

    /// Whether a person has to mend it: no number of attempts does.
    #[must_use]
    pub const fn is_misconfiguration(self) -> bool {
        matches!(
            self,
            Self::Unauthorized | Self::NotFound | Self::Refused | Self::Untrusted | Self::NotAStream
        )
    }
}

/// A cheap view of a subscription's status that outlives it.
#[derive(Debug, Clone)]
pub struct StatusHandle(watch::Receiver<Status>);

impl StatusHandle {
    /// The status now.
    #[must_use]
    pub fn current(&self) -> Status {
        *self.0.borrow()
    }

    /// The next change of status; `None` once the subscription is gone.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn changed(&mut self) -> Option<Status> {
        self.0.changed().await.ok()?;
        Some(*self.0.borrow_and_update())
    }
}

/// Where a subscription says what it is doing.
#[derive(Debug)]
pub(super) struct Board(watch::Sender<Status>);

impl Board {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(Status::Connecting))
    }

    pub(super) fn set(&self, status: Status) {
        self.0.send_if_modified(|current| std::mem::replace(current, status) != status);
    }

    pub(super) fn handle(&self) -> StatusHandle {
        StatusHandle(self.0.subscribe())
    }
}
