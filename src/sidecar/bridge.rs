//! The embedded relay's way into the export: what a sink wants is in the spool before the relay admits it.

use crate::aep::Event;
use crate::export::Intake;
use crate::export::spool::{Unavailable, UnavailableReason};
use crate::relay::keep::{Boxed, Keep, NotKept};

/// Keeps accepted events for the sinks.
#[derive(Debug)]
pub struct Bridge {
    intake: Intake,
    /// How many bytes may come together, at most.
    max_bytes: usize,
}

impl Bridge {
    /// Keeps what a sink of `intake` wants; `spool_bytes` is all the space there is.
    #[must_use]
    pub fn new(intake: Intake, spool_bytes: u64) -> Self {
        Self { intake, max_bytes: usize::try_from(spool_bytes / 2).unwrap_or(usize::MAX) }
    }
}

impl Keep for Bridge {
    fn keep<'k>(&'k self, events: &'k [Event]) -> Boxed<'k, Result<(), NotKept>> {
        Box::pin(async {
            match self.intake.keep(events).await {
                Ok(_) => Ok(()),
                Err(Unavailable { reason, retry_after }) => {
                    let reason = match reason {
                        UnavailableReason::TooLarge => {
                            return Err(NotKept::TooLarge { max_bytes: self.max_bytes });
                        }
                        UnavailableReason::Full => "the spool is full: a sink doesn't keep up",
                        UnavailableReason::Behind => "too many events wait for the disk",
                        UnavailableReason::Failing(_) => "the spool can't be written to",
                        UnavailableReason::Closed => "shutting down",
                    };
                    Err(NotKept::Now { reason, retry_after })
                }
            }
        })
    }

    fn room(&self) -> Boxed<'_, ()> {
        Box::pin(self.intake.room())
    }
}
