//! Which event goes next.
//!
//! Every `(source, session)` is a lane; events without a session share their source's lane. A lane has one
//! event in flight at most, so that its order is kept; different lanes are sent side by side. A lane whose
//! event failed waits by itself. When the sink pauses, all wait.
//!
//! Pure: it is told the time and the outcomes, and does no I/O.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::SystemTime;

use tokio::time::Instant;

use super::breaker::{Breaker, Permit, SinkStatus};
use super::retry::RetryPolicy;
use super::seen::Fingerprint;
use super::sink::{Delivery, DeliveryError};
use crate::aep::Event;

/// The bounds of [`Lanes`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Events in flight.
    pub(crate) concurrency: usize,
    /// Events held.
    pub(crate) events: usize,
    /// Memory of the events held, in bytes.
    pub(crate) bytes: usize,
}

/// All lanes of one sink.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: HashMap<Fingerprint, Lane>,
    /// Lanes that may send, in turn.
    ready: VecDeque<Fingerprint>,
    /// Lanes in a back-off, and when it ends.
    waiting: BTreeSet<(Instant, Fingerprint)>,
    in_flight: usize,
    /// Events held, those in flight included.
    events: usize,
    bytes: usize,
    bounds: Bounds,
    policy: RetryPolicy,
    random: fastrand::Rng,
    breaker: Breaker,
    /// Nothing is tried twice any more.
    stopping: bool,
}

#[derive(Debug, Default)]
struct Lane {
    /// The first one is the next to go, or in flight.
    queue: VecDeque<Held>,
    /// Failed attempts with the first event.
    failures: u32,
    attempts: u32,
    first_attempt: Option<SystemTime>,
}

#[derive(Debug)]
struct Held {
    event: Event,
    fingerprint: Fingerprint,
}

/// An event that is to be sent now.
#[derive(Debug)]
pub(crate) struct Departure {
    pub(crate) lane: Fingerprint,
    pub(crate) permit: Permit,
    pub(crate) delivery: Delivery,
    pub(crate) first_attempt: SystemTime,
}

/// An event that is done with.
#[derive(Debug)]
pub(crate) struct Handled {
    pub(crate) event: Event,
    pub(crate) fingerprint: Fingerprint,
}

impl Lanes {
    pub(crate) fn new(bounds: Bounds, policy: RetryPolicy) -> Self {
        Self {
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            waiting: BTreeSet::new(),
            in_flight: 0,
            events: 0,
            bytes: 0,
            bounds,
            policy,
            random: fastrand::Rng::new(),
            breaker: Breaker::new(policy),
            stopping: false,
        }
    }

    pub(crate) fn status(&self) -> SinkStatus {
        self.breaker.status()
    }

    pub(crate) fn is_flowing(&self) -> bool {
        self.breaker.is_flowing()
    }

    /// Ends all back-offs and pauses for good: what has failed stays held, and is never sent again.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
        self.waiting.clear();
    }

    /// Whether one more event is taken. An event larger than all memory allowed is taken by itself.
    pub(crate) fn has_room(&self) -> bool {
        self.events < self.bounds.events && self.bytes < self.bounds.bytes
    }

    /// Events held, and their memory in bytes.
    pub(crate) fn held(&self) -> (usize, usize) {
        (self.events, self.bytes)
    }

    /// Takes an event, as the last of its lane.
    pub(crate) fn admit(&mut self, id: Fingerprint, event: Event, fingerprint: Fingerprint) {
        self.events = self.events.saturating_add(1);
        self.bytes = self.bytes.saturating_add(event.memory());
        let lane = self.lanes.entry(id).or_default();
        if lane.queue.is_empty() {
            self.ready.push_back(id);
        }
        lane.queue.push_back(Held { event, fingerprint });
    }

    /// The next event to send, when one may be sent now. `in_doubt` is how many that were acknowledged still count
    /// as under way.
    pub(crate) fn next(&mut self, now: Instant, wall: SystemTime, in_doubt: usize) -> Option<Departure> {
        while let Some((until, id)) = self.waiting.first().copied()
            && until <= now
        {
            self.waiting.pop_first();
            self.ready.push_back(id);
        }
        if self.in_flight.saturating_add(in_doubt) >= self.bounds.concurrency || self.ready.is_empty() {
            return None;
        }
        if self.stopping && !self.breaker.is_flowing() {
            return None;
        }
        let permit = self.breaker.permit(now)?;
        let id = self.ready.pop_front()?;
        let lane = self.lanes.get_mut(&id)?;
        let event = lane.queue.front()?.event.clone();
        lane.attempts = lane.attempts.saturating_add(1);
        self.in_flight = self.in_flight.saturating_add(1);
        let first_attempt = *lane.first_attempt.get_or_insert(wall);
        Some(Departure {
            lane: id,
            permit,
            delivery: Delivery { event, attempt: lane.attempts },
            first_attempt,
        })
    }

    /// When [`Lanes::next`] may have something, other than after an outcome; `None` when only an outcome or a
    /// new event helps.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        if self.in_flight >= self.bounds.concurrency {
            return None;
        }
        let lane = self.waiting.first().map(|(until, _)| *until);
        if self.breaker.is_flowing() {
            return lane;
        }
        let pause = self.breaker.ends_at()?;
        if self.ready.is_empty() { lane.map(|lane| lane.max(pause)) } else { Some(pause) }
    }

    /// The sink answered, whatever about this event: it works.
    pub(crate) fn answered(&mut self, permit: Permit) {
        self.breaker.answered(permit);
    }

    /// The event never reached the sink, for its own sake: nothing is known of the sink.
    pub(crate) fn withdrawn(&mut self, permit: Permit, now: Instant) {
        self.breaker.withdrawn(permit, now);
    }

    /// The event in flight in that lane is done with.
    pub(crate) fn handled(&mut self, id: Fingerprint) -> Option<Handled> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let lane = self.lanes.get_mut(&id)?;
        let Held { event, fingerprint } = lane.queue.pop_front()?;
        self.events = self.events.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(event.memory());
        (lane.failures, lane.attempts, lane.first_attempt) = (0, 0, None);
        if lane.queue.is_empty() {
            self.lanes.remove(&id);
        } else {
            self.ready.push_back(id);
        }
        Some(Handled { event, fingerprint })
    }

    /// The attempt in that lane failed, and is to be repeated.
    pub(crate) fn failed(&mut self, id: Fingerprint, permit: Permit, error: &DeliveryError, now: Instant) {
        self.breaker.failed(permit, error, now, &mut self.random);
        if error.reason().concerns_every_event() {
            // The event isn't to blame. Its lane takes its turn behind the others.
            self.in_flight = self.in_flight.saturating_sub(1);
            if !self.stopping {
                self.ready.push_back(id);
            }
        } else {
            self.back_off(id, now);
        }
    }

    /// The lane waits before its next attempt, by no fault of the sink.
    pub(crate) fn back_off(&mut self, id: Fingerprint, now: Instant) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if !self.stopping
            && let Some(lane) = self.lanes.get_mut(&id)
        {
            lane.failures = lane.failures.saturating_add(1);
            let wait = self.policy.delay(lane.failures, &mut self.random);
            self.waiting.insert((now.checked_add(wait).unwrap_or(now), id));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::export::sink::Reason;

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn lanes(events: usize, bytes: usize) -> Lanes {
        let mut lanes = Lanes::new(Bounds { concurrency: 2, events, bytes }, RetryPolicy::default());
        lanes.random = fastrand::Rng::with_seed(3);
        lanes
    }

    fn admit(lanes: &mut Lanes, lane: u128, seq: u64) {
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{lane}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{lane}","seq":{seq}}}"#
        ))
        .unwrap();
        lanes.admit(Fingerprint(lane), event, Fingerprint(u128::from(seq)));
    }

    fn next(lanes: &mut Lanes, now: Instant) -> Option<(String, Permit)> {
        lanes.next(now, WALL, 0).map(|d| (d.delivery.event.id().to_owned(), d.permit))
    }

    #[test]
    fn one_event_a_lane_and_lanes_side_by_side() {
        let (mut lanes, now) = (lanes(10, usize::MAX), Instant::now());
        for (lane, seq) in [(1, 1), (1, 2), (2, 1), (3, 1)] {
            admit(&mut lanes, lane, seq);
        }
        assert_eq!(next(&mut lanes, now).unwrap().0, "1-1");
        assert_eq!(next(&mut lanes, now).unwrap().0, "2-1");
        assert_eq!(next(&mut lanes, now), None, "two in flight");
        lanes.handled(Fingerprint(1));
        assert_eq!(next(&mut lanes, now).unwrap().0, "3-1", "lanes take turns");
        lanes.handled(Fingerprint(2));
        assert_eq!(next(&mut lanes, now).unwrap().0, "1-2");
    }

    #[test]
    fn a_failure_holds_up_its_own_lane_only() {
        let (mut lanes, now) = (lanes(10, usize::MAX), Instant::now());
        admit(&mut lanes, 1, 1);
        for seq in 1..9 {
            admit(&mut lanes, 2, seq);
        }
        let poison = DeliveryError::Transient { reason: Reason::Status5xx, retry_after: None };
        next(&mut lanes, now).unwrap();
        lanes.failed(Fingerprint(1), Permit::Flow, &poison, now);
        for seq in 1..9 {
            assert_eq!(next(&mut lanes, now).unwrap().0, format!("2-{seq}"));
            lanes.answered(Permit::Flow);
            lanes.handled(Fingerprint(2));
        }
        let wake = lanes.wakes_at().unwrap();
        assert_eq!(next(&mut lanes, wake).unwrap().0, "1-1");
    }

    #[test]
    fn lanes_take_turns_probing() {
        let (mut lanes, mut now) = (lanes(10, usize::MAX), Instant::now());
        admit(&mut lanes, 1, 1);
        admit(&mut lanes, 2, 1);
        let refused = DeliveryError::Transient { reason: Reason::Refused, retry_after: None };
        let mut probed = Vec::new();
        for _ in 0..4 {
            let departure = lanes.next(now, WALL, 0).unwrap();
            assert!(lanes.next(now, WALL, 0).is_none() || departure.permit == Permit::Flow);
            probed.push(departure.lane.0);
            lanes.failed(departure.lane, departure.permit, &refused, now);
            if departure.permit == Permit::Flow {
                lanes.failed(Fingerprint(2), Permit::Flow, &refused, now);
            }
            now = lanes.wakes_at().unwrap().max(now + Duration::from_nanos(1));
        }
        assert_eq!(probed, [1, 1, 2, 1]);
    }

    #[test]
    fn with_all_in_flight_only_an_outcome_wakes() {
        let (mut lanes, now) = (lanes(10, usize::MAX), Instant::now());
        for lane in 1..=4 {
            admit(&mut lanes, lane, 1);
        }
        let (one, two) = (lanes.next(now, WALL, 0).unwrap(), lanes.next(now, WALL, 0).unwrap());
        let refused = DeliveryError::Transient { reason: Reason::Refused, retry_after: None };
        lanes.failed(one.lane, one.permit, &refused, now);
        let end = lanes.wakes_at().unwrap();
        let probe = lanes.next(end, WALL, 0).unwrap();
        assert_eq!((probe.permit, lanes.wakes_at()), (Permit::Probe, None));
        lanes.failed(probe.lane, probe.permit, &refused, end);
        assert!(lanes.wakes_at().is_some());
        lanes.handled(two.lane).unwrap();
    }

    #[test]
    fn events_and_bytes_are_bounded_and_given_back() {
        let (mut by_events, mut by_bytes) = (lanes(2, usize::MAX), lanes(10, 1));
        admit(&mut by_events, 1, 1);
        assert!(by_events.has_room());
        admit(&mut by_events, 1, 2);
        assert!(!by_events.has_room());
        admit(&mut by_bytes, 1, 1);
        assert!(!by_bytes.has_room());
        next(&mut by_bytes, Instant::now()).unwrap();
        by_bytes.handled(Fingerprint(1)).unwrap();
        assert_eq!(by_bytes.held(), (0, 0));
    }
}
