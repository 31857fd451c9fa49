//! Why the spool takes nothing now, and what ends that.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{SpoolState, Unavailable, UnavailableReason};
use crate::export::retry::RetryPolicy;

/// After which time an append that is refused for want of room is worth trying again.
const ROOM_AFTER: Duration = Duration::from_secs(5);
/// How long the first failure of the disk keeps appends away; doubles with every further one.
const BACK_OFF: RetryPolicy = RetryPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(30) };

/// The trouble there is, if any.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    now: Option<(UnavailableReason, Ends)>,
    /// Writes that failed since the last one that worked.
    failures: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// With room for this many bytes.
    WithRoom(u64),
    /// With a write that works, tried from this time on.
    WithWrite(Instant),
}

/// When an append is worth trying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opens {
    Now,
    /// When something is committed or freed.
    WithAChange,
    /// When a write works; it may be tried from this time on.
    WithAWriteFrom(Instant),
}

/// A refusal that no trouble stands behind.
pub(super) fn refused(reason: UnavailableReason) -> Unavailable {
    let retry_after = match reason {
        UnavailableReason::Behind => BACK_OFF.initial,
        UnavailableReason::Full => ROOM_AFTER,
        UnavailableReason::TooLarge | UnavailableReason::Failing(_) | UnavailableReason::Closed => {
            BACK_OFF.max
        }
    };
    Unavailable { reason, retry_after }
}

impl Trouble {
    /// What an append is told at once, so that a failing disk isn't tried with every one.
    pub(super) fn refuses(&self, now: Instant) -> Option<Unavailable> {
        let Some((reason, Ends::WithWrite(at))) = &self.now else { return None };
        let retry_after = at.checked_duration_since(now).filter(|wait| !wait.is_zero())?;
        Some(Unavailable { reason: reason.clone(), retry_after })
    }

    /// There is no room for so many bytes.
    pub(super) fn full(&mut self, wanted: u64) -> Unavailable {
        self.now.get_or_insert((UnavailableReason::Full, Ends::WithRoom(wanted)));
        refused(UnavailableReason::Full)
    }

    /// There turned out to be no room for so many bytes. Nothing was tried to be written, so that a failure
    /// before it says no more.
    pub(super) fn lacks_room(&mut self, wanted: u64) -> Unavailable {
        self.now = None;
        self.full(wanted)
    }

    /// For how many bytes room is wanted.
    pub(super) fn wants_room(&self) -> Option<u64> {
        match self.now {
            Some((_, Ends::WithRoom(wanted))) => Some(wanted),
            Some((_, Ends::WithWrite(_))) | None => None,
        }
    }

    /// There is room.
    pub(super) fn has_room(&mut self) {
        if self.wants_room().is_some() {
            self.now = None;
        }
    }

    /// A write has failed.
    pub(super) fn failed(&mut self, reason: UnavailableReason, now: Instant) -> Unavailable {
        self.failures = self.failures.saturating_add(1);
        let retry_after = BACK_OFF.ceiling(self.failures);
        let at = now.checked_add(retry_after).unwrap_or(now);
        self.now = Some((reason.clone(), Ends::WithWrite(at)));
        Unavailable { reason, retry_after }
    }

    /// A write has worked.
    pub(super) fn works(&mut self) {
        self.failures = 0;
        if self.wants_room().is_none() {
            self.now = None;
        }
    }

    pub(super) fn state(&self) -> SpoolState {
        match &self.now {
            None => SpoolState::Writable,
            Some((UnavailableReason::Failing(why), _)) => SpoolState::Failing(Arc::clone(why)),
            Some(_) => SpoolState::Full,
        }
    }

    pub(super) fn opens(&self) -> Opens {
        match self.now {
            None => Opens::Now,
            Some((_, Ends::WithRoom(_))) => Opens::WithAChange,
            Some((_, Ends::WithWrite(at))) => Opens::WithAWriteFrom(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failures_keep_appends_away_for_longer_and_longer_until_a_write_works() {
        let (mut trouble, failing) = (Trouble::default(), UnavailableReason::Failing("broken".into()));
        let now = Instant::now();
        let waits: Vec<u64> =
            (0..7).map(|_| trouble.failed(failing.clone(), now).retry_after.as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        assert!(trouble.refuses(now).is_some() && trouble.refuses(now + BACK_OFF.max).is_none());
        trouble.has_room();
        assert_eq!(trouble.state(), SpoolState::Failing("broken".into()), "room doesn't mend a disk");
        trouble.works();
        assert_eq!((trouble.state(), trouble.opens()), (SpoolState::Writable, Opens::Now));
        assert_eq!(trouble.failed(failing, now).retry_after, BACK_OFF.initial);
    }

    #[tokio::test(start_paused = true)]
    async fn a_want_of_room_is_ended_by_room_alone() {
        let mut trouble = Trouble::default();
        trouble.full(10);
        trouble.works();
        assert_eq!((trouble.wants_room(), trouble.opens()), (Some(10), Opens::WithAChange));
        trouble.has_room();
        assert_eq!(trouble.state(), SpoolState::Writable);
        // A try that finds no room isn't tried over and over.
        trouble.failed(UnavailableReason::Full, Instant::now());
        trouble.lacks_room(20);
        assert_eq!(trouble.opens(), Opens::WithAChange);
    }
}
