//! The way into the spool.

use std::sync::Arc;

use tokio::sync::watch;

use super::spool::{Appended, Spool, SpoolState, Unavailable};
use crate::aep::{Event, Filter};

/// Appends the events that a sink wants to the spool. Clones append to the same one.
#[derive(Debug, Clone)]
pub struct Intake {
    spool: Spool,
    /// What each sink wants; an event that none wants isn't kept.
    wanted: Arc<[Filter]>,
}

impl Intake {
    pub(crate) fn new(spool: Spool, wanted: Arc<[Filter]>) -> Self {
        Self { spool, wanted }
    }

    /// Whether any sink wants the event.
    #[must_use]
    pub fn wants(&self, event: &Event) -> bool {
        self.wanted.iter().any(|filter| filter.matches(event))
    }

    /// Whether some sink wants every event there is.
    #[must_use]
    pub fn wants_everything(&self) -> bool {
        self.wanted.iter().any(Filter::matches_everything)
    }

    /// Keeps the events that a sink wants and that aren't known yet. Returns once they survive what the spool's
    /// sync says.
    ///
    /// # Errors
    /// When they can't be kept now. Some of them may be kept all the same, and are known when they come again.
    ///
    /// # Cancel safety
    /// When it is dropped, the events may be kept or not.
    pub async fn keep(&self, events: &[Event]) -> Result<Appended, Unavailable> {
        let wanted: Vec<Event> = events.iter().filter(|event| self.wants(event)).cloned().collect();
        if wanted.is_empty() {
            return Ok(Appended::default());
        }
        self.spool.append(wanted).await
    }

    /// Keeps every event, wanted or not, so that the positions that a feed resumes from move on with all of them.
    ///
    /// # Errors
    /// As [`Intake::keep`].
    pub(crate) async fn keep_all(&self, events: &[Event]) -> Result<Appended, Unavailable> {
        self.spool.append(events.to_vec()).await
    }

    /// Returns when it is worth trying again.
    pub async fn room(&self) {
        self.spool.room().await;
    }

    /// Whether the spool takes events, now and whenever that changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<SpoolState> {
        self.spool.state()
    }
}
