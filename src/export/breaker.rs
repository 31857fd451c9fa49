//! When the sink as a whole is left alone.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::retry::RetryPolicy;
use super::sink::{DeliveryError, Reason};

/// How many attempts fail in a row, whatever their events, before the sink pauses.
const MAX_FAILURES: u32 = 5;

/// Whether a sink takes events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SinkState {
    /// Events flow.
    Flowing,
    /// The sink is left alone, and probed with one event at a time.
    Paused(Reason),
    /// As paused, and it takes a person to change that.
    Misconfigured(Reason),
}

/// The sink's state, readable from elsewhere. Clones show the same.
#[derive(Debug, Clone)]
pub struct SinkStatus(
    /// Changed by the sink's breaker only.
    Arc<Mutex<SinkState>>,
);

impl SinkStatus {
    /// The state now.
    #[must_use]
    pub fn current(&self) -> SinkState {
        *self.0.lock()
    }
}

/// What an attempt was let through as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permit {
    /// One among others.
    Flow,
    /// The one that tries whether a paused sink works again.
    Probe,
}

/// One sink's breaker. It pauses the sink when no event can get through, or none does.
#[derive(Debug)]
pub(crate) struct Breaker {
    policy: RetryPolicy,
    phase: Phase,
    /// Failures since the last success.
    failures: u32,
    /// Pauses since the last success.
    pauses: u32,
    status: SinkStatus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Flowing,
    Paused { until: Instant },
    Probing,
}

impl Breaker {
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        let status = SinkStatus(Arc::new(Mutex::new(SinkState::Flowing)));
        Self { policy, phase: Phase::Flowing, failures: 0, pauses: 0, status }
    }

    pub(crate) fn status(&self) -> SinkStatus {
        self.status.clone()
    }

    pub(crate) fn is_flowing(&self) -> bool {
        self.phase == Phase::Flowing
    }

    /// Lets an attempt through, or not. A probe that is let through must be reported.
    pub(crate) fn permit(&mut self, now: Instant) -> Option<Permit> {
        match self.phase {
            Phase::Flowing => Some(Permit::Flow),
            Phase::Paused { until } if until <= now => {
                self.phase = Phase::Probing;
                Some(Permit::Probe)
            }
            Phase::Paused { .. } | Phase::Probing => None,
        }
    }

    /// When a pause ends.
    pub(crate) fn ends_at(&self) -> Option<Instant> {
        match self.phase {
            Phase::Paused { until } => Some(until),
            Phase::Flowing | Phase::Probing => None,
        }
    }

    /// The sink took an event, or refused it for its own sake: it works.
    pub(crate) fn answered(&mut self, permit: Permit) {
        if permit == Permit::Flow && self.phase != Phase::Flowing {
            // Sent before the pause: it says nothing about now.
            return;
        }
        (self.failures, self.pauses) = (0, 0);
        if self.phase != Phase::Flowing {
            self.phase = Phase::Flowing;
            *self.status.0.lock() = SinkState::Flowing;
            tracing::info!("sink takes events again");
        }
    }

    /// An attempt wasn't made after all. A probe that wasn't is due at once.
    pub(crate) fn withdrawn(&mut self, permit: Permit, now: Instant) {
        if permit == Permit::Probe {
            self.phase = Phase::Paused { until: now };
        }
    }

    /// An attempt failed.
    pub(crate) fn failed(
        &mut self,
        permit: Permit,
        error: &DeliveryError,
        now: Instant,
        random: &mut fastrand::Rng,
    ) {
        let (state, retry_after) = match *error {
            DeliveryError::Transient { reason, retry_after } => (SinkState::Paused(reason), retry_after),
            DeliveryError::Misconfigured { reason }
            | DeliveryError::Rejected { reason, .. }
            | DeliveryError::Closed { reason } => (SinkState::Misconfigured(reason), None),
        };
        if permit == Permit::Flow
            && let Phase::Paused { until } = &mut self.phase
        {
            // Sent before the pause: it can only make it longer.
            *until = (*until).max(now.checked_add(retry_after.unwrap_or_default()).unwrap_or(now));
            return;
        }
        if permit == Permit::Flow && self.phase == Phase::Probing {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        let pauses = permit == Permit::Probe
            || retry_after.is_some()
            || error.reason().concerns_every_event()
            || matches!(state, SinkState::Misconfigured(_))
            || self.failures >= MAX_FAILURES;
        if pauses {
            self.pauses = self.pauses.saturating_add(1);
            let wait = self.policy.delay(self.pauses, random).max(retry_after.unwrap_or_default());
            self.pause(state, wait, now);
        }
    }

    fn pause(&mut self, state: SinkState, wait: Duration, now: Instant) {
        self.phase = Phase::Paused { until: now.checked_add(wait).unwrap_or(now) };
        let before = std::mem::replace(&mut *self.status.0.lock(), state);
        if before != state {
            match state {
                SinkState::Misconfigured(reason) => tracing::error!(
                    %reason,
                    "sink is misconfigured; it is paused and probed, and no event is thrown away"
                ),
                SinkState::Paused(reason) => tracing::warn!(%reason, "sink is paused and probed"),
                SinkState::Flowing => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transient(reason: Reason, retry_after: Option<u64>) -> DeliveryError {
        DeliveryError::Transient { reason, retry_after: retry_after.map(Duration::from_secs) }
    }

    fn breaker() -> (Breaker, Instant, fastrand::Rng) {
        (Breaker::new(RetryPolicy::default()), Instant::now(), fastrand::Rng::with_seed(1))
    }

    #[test]
    fn five_failures_in_a_row_pause_the_sink_and_one_probe_goes_out() {
        let (mut breaker, now, mut random) = breaker();
        for _ in 0..4 {
            breaker.failed(Permit::Flow, &transient(Reason::Status5xx, None), now, &mut random);
        }
        assert!(breaker.is_flowing());
        breaker.answered(Permit::Flow);
        for _ in 0..5 {
            assert_eq!(breaker.permit(now), Some(Permit::Flow));
            breaker.failed(Permit::Flow, &transient(Reason::Status5xx, None), now, &mut random);
        }
        assert_eq!(breaker.status().current(), SinkState::Paused(Reason::Status5xx));
        let end = breaker.ends_at().unwrap();
        assert_eq!(breaker.permit(end), Some(Permit::Probe));
        assert_eq!(breaker.permit(end), None, "one probe only");
        breaker.answered(Permit::Flow);
        assert!(!breaker.is_flowing(), "an answer from before the pause opens nothing");
        breaker.answered(Permit::Probe);
        assert_eq!(breaker.permit(end), Some(Permit::Flow));
        assert_eq!(breaker.status().current(), SinkState::Flowing);
    }

    #[test]
    fn retry_after_is_kept_to_the_second_and_only_grows() {
        let (mut breaker, now, mut random) = breaker();
        breaker.failed(Permit::Flow, &transient(Reason::Throttled, Some(7)), now, &mut random);
        breaker.failed(Permit::Flow, &transient(Reason::Throttled, Some(9)), now, &mut random);
        breaker.failed(Permit::Flow, &transient(Reason::Throttled, Some(1)), now, &mut random);
        assert_eq!(breaker.ends_at(), Some(now + Duration::from_secs(9)));
        assert_eq!(breaker.permit(now + Duration::from_millis(8999)), None);
    }

    #[test]
    fn what_concerns_every_event_pauses_at_once() {
        for error in [
            transient(Reason::Refused, None),
            transient(Reason::Dns, None),
            DeliveryError::Misconfigured { reason: Reason::NotFound },
        ] {
            let (mut breaker, now, mut random) = breaker();
            breaker.failed(Permit::Flow, &error, now, &mut random);
            assert!(!breaker.is_flowing(), "{error}");
        }
    }
}
