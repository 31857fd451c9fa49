//! Which events go next.
//!
//! Every `(source, session)` is a lane; events without a session share their source's lane. A lane has one parcel
//! in flight at most, so that its order is kept; different lanes are sent side by side, or together in one batch. A
//! lane whose event failed waits by itself. When the sink pauses, all wait.
//!
//! A batch that is refused says nothing of a single event in it: its events go again in smaller ones, down to one
//! by itself, whose refusal is a verdict. After that batches grow again: by count at once, by size only slowly,
//! since what was too large once will be so again.
//!
//! Pure: it is told the time and the outcomes, and does no I/O.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::breaker::{Breaker, Permit, SinkStatus};
use super::retry::RetryPolicy;
use super::seen::Fingerprint;
use super::sink::{Delivery, DeliveryError, Reason};
use crate::aep::Event;

/// How many batches in a row must arrive before one larger than what was once too large is tried.
const PATIENCE: u32 = 64;

/// The bounds of [`Lanes`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Parcels in flight.
    pub(crate) concurrency: usize,
    /// Events held.
    pub(crate) events: usize,
    /// Memory of the events held, in bytes.
    pub(crate) bytes: usize,
    /// Events in one parcel.
    pub(crate) batch: usize,
    /// How long an event may wait for others to go with.
    pub(crate) linger: Duration,
}

/// All lanes of one sink.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: HashMap<Fingerprint, Lane>,
    /// Lanes that may send, in turn.
    ready: VecDeque<Fingerprint>,
    /// Events in the ready lanes, and since when there have been some without a parcel's leaving.
    ready_events: usize,
    ready_since: Option<Instant>,
    /// Lanes in a back-off, and when it ends.
    waiting: BTreeSet<(Instant, Fingerprint)>,
    /// Parcels in flight, and the events in them.
    in_flight: usize,
    events_in_flight: usize,
    /// Events held, those in flight included.
    events: usize,
    bytes: usize,
    bounds: Bounds,
    size: BatchSize,
    policy: RetryPolicy,
    random: fastrand::Rng,
    breaker: Breaker,
    /// Nothing waits for company any more.
    hurried: bool,
    /// Nothing is tried twice any more.
    stopping: bool,
}

/// How large a batch may be for now.
#[derive(Debug)]
struct BatchSize {
    /// In events.
    count: usize,
    /// In bytes of the events' text, when one was too large.
    bytes: Option<usize>,
    /// Batches that arrived since `bytes` last changed.
    arrived: u32,
}

#[derive(Debug)]
struct Lane {
    state: State,
    /// The first ones are the next to go, or in flight.
    queue: VecDeque<Held>,
    /// Failed attempts with the first event.
    failures: u32,
    attempts: u32,
    first_attempt: Option<SystemTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In [`Lanes::ready`].
    Ready,
    /// In a back-off or in flight; or failed while stopping, and never sent again.
    Away,
}

/// Where a lane lines up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    First,
    Last,
}

#[derive(Debug)]
struct Held {
    number: u64,
    event: Event,
}

/// Events in flight together: the first ones of some lanes.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// Each lane, and how many of its events.
    parts: Vec<(Fingerprint, usize)>,
}

/// A parcel that is to be sent now.
#[derive(Debug)]
pub(crate) struct Departure {
    pub(crate) parcel: Parcel,
    pub(crate) permit: Permit,
    pub(crate) delivery: Delivery,
    /// When the first event of the parcel was first sent.
    pub(crate) first_attempt: SystemTime,
}

impl Lanes {
    pub(crate) fn new(bounds: Bounds, policy: RetryPolicy) -> Self {
        let bounds = Bounds { batch: bounds.batch.clamp(1, bounds.events.max(1)), ..bounds };
        Self {
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            ready_events: 0,
            ready_since: None,
            waiting: BTreeSet::new(),
            in_flight: 0,
            events_in_flight: 0,
            events: 0,
            bytes: 0,
            size: BatchSize { count: bounds.batch, bytes: None, arrived: 0 },
            bounds,
            policy,
            random: fastrand::Rng::new(),
            breaker: Breaker::new(policy),
            hurried: false,
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
        self.hurried = true;
        self.waiting.clear();
    }

    /// Whether nothing is in flight and nothing will go out by itself.
    pub(crate) fn is_stuck(&self) -> bool {
        self.in_flight == 0 && (self.ready.is_empty() || !self.breaker.is_flowing())
    }

    /// Nothing more will come to go with: batches leave as they are.
    pub(crate) fn hurry(&mut self) {
        self.hurried = true;
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
    pub(crate) fn admit(&mut self, id: Fingerprint, number: u64, event: Event, now: Instant) {
        self.events = self.events.saturating_add(1);
        self.bytes = self.bytes.saturating_add(event.memory());
        let held = Held { number, event };
        match self.lanes.entry(id) {
            Entry::Occupied(mut lane) => {
                let lane = lane.get_mut();
                lane.queue.push_back(held);
                if lane.state == State::Ready {
                    self.ready_events = self.ready_events.saturating_add(1);
                }
            }
            Entry::Vacant(lane) => {
                lane.insert(Lane {
                    state: State::Away,
                    queue: VecDeque::from([held]),
                    failures: 0,
                    attempts: 0,
                    first_attempt: None,
                });
                self.make_ready(id, now, Turn::Last);
            }
        }
    }

    fn make_ready(&mut self, id: Fingerprint, now: Instant, turn: Turn) {
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        lane.state = State::Ready;
        self.ready_events = self.ready_events.saturating_add(lane.queue.len());
        self.ready_since.get_or_insert(now);
        match turn {
            Turn::First => self.ready.push_front(id),
            Turn::Last => self.ready.push_back(id),
        }
    }

    /// When the next batch may leave, full or not.
    fn due(&self) -> Option<Instant> {
        let since = self.ready_since?;
        let full = self.ready_events >= self.size.count || !self.has_room();
        if full || self.hurried { Some(since) } else { since.checked_add(self.bounds.linger) }
    }

    /// Whether as much is under way as may be: with a full batch more, no more than all of them together hold.
    fn is_full(&self, in_doubt: usize) -> bool {
        let under_way = self.events_in_flight.saturating_add(in_doubt).saturating_add(self.size.count);
        self.in_flight >= self.bounds.concurrency
            || under_way > self.bounds.concurrency.saturating_mul(self.bounds.batch)
    }

    /// The next parcel to send, when one may be sent now. `in_doubt` is how many events that were acknowledged still
    /// count as under way.
    pub(crate) fn next(&mut self, now: Instant, wall: SystemTime, in_doubt: usize) -> Option<Departure> {
        while let Some((until, id)) = self.waiting.first().copied()
            && until <= now
        {
            self.waiting.pop_first();
            self.make_ready(id, now, Turn::Last);
        }
        if self.is_full(in_doubt)
            || self.due().is_none_or(|due| due > now)
            || (self.stopping && !self.breaker.is_flowing())
        {
            return None;
        }
        let permit = self.breaker.permit(now)?;
        let (parcel, events, attempt, first) = self.collect(wall);
        self.in_flight = self.in_flight.saturating_add(1);
        self.events_in_flight = self.events_in_flight.saturating_add(events.len());
        self.ready_since = if self.ready.is_empty() { None } else { Some(now) };
        Some(Departure { parcel, permit, delivery: Delivery { events, attempt }, first_attempt: first })
    }

    /// Takes the first events of the ready lanes, in turn, as many as a batch may hold.
    fn collect(&mut self, wall: SystemTime) -> (Parcel, Vec<Event>, u32, SystemTime) {
        let (mut parts, mut events, mut bytes) = (Vec::new(), Vec::new(), 0_usize);
        let (mut attempt, mut first) = (1, wall);
        while events.len() < self.size.count
            && let Some(id) = self.ready.front().copied()
            && let Some(lane) = self.lanes.get_mut(&id)
        {
            let before = events.len();
            for Held { event, .. } in lane.queue.iter().take(self.size.count.saturating_sub(before)) {
                bytes = bytes.saturating_add(event.as_bytes().len());
                if !events.is_empty() && self.size.bytes.is_some_and(|most| bytes > most) {
                    break;
                }
                events.push(event.clone());
            }
            let count = events.len().saturating_sub(before);
            if count == 0 {
                break;
            }
            self.ready.pop_front();
            self.ready_events = self.ready_events.saturating_sub(lane.queue.len());
            lane.state = State::Away;
            lane.attempts = lane.attempts.saturating_add(1);
            attempt = attempt.max(lane.attempts);
            first = first.min(*lane.first_attempt.get_or_insert(wall));
            parts.push((id, count));
        }
        (Parcel { parts }, events, attempt, first)
    }

    /// When [`Lanes::next`] may have something, other than after an outcome, a new event or fewer events in doubt;
    /// `None` when only these help.
    pub(crate) fn wakes_at(&self, in_doubt: usize) -> Option<Instant> {
        if self.is_full(in_doubt) || (self.stopping && !self.breaker.is_flowing()) {
            return None;
        }
        let lane = self.waiting.first().map(|(until, _)| *until);
        let due = self.due();
        let next = match (lane, due) {
            (Some(lane), Some(due)) => lane.min(due),
            (lane, due) => lane.or(due)?,
        };
        if self.breaker.is_flowing() { Some(next) } else { Some(next.max(self.breaker.ends_at()?)) }
    }

    /// The sink answered, whatever about this event: it works.
    pub(crate) fn answered(&mut self, permit: Permit) {
        self.breaker.answered(permit);
    }

    /// The parcel never reached the sink, for its own sake: nothing is known of the sink.
    pub(crate) fn withdrawn(&mut self, permit: Permit, now: Instant) {
        self.breaker.withdrawn(permit, now);
    }

    /// A parcel arrived: the next ones may be larger.
    pub(crate) fn grow(&mut self) {
        let size = &mut self.size;
        size.count = size.count.saturating_mul(2).min(self.bounds.batch);
        if let Some(bytes) = size.bytes {
            size.arrived = size.arrived.saturating_add(1);
            if size.arrived >= PATIENCE {
                (size.bytes, size.arrived) = (Some(bytes.saturating_mul(2)), 0);
            }
        }
    }

    /// The parcel in flight is done with: the numbers of its events.
    pub(crate) fn handled(&mut self, parcel: &Parcel, now: Instant) -> Vec<u64> {
        self.landed(parcel);
        let mut numbers = Vec::new();
        for (id, count) in &parcel.parts {
            let Some(lane) = self.lanes.get_mut(id) else { continue };
            for Held { number, event } in lane.queue.drain(..(*count).min(lane.queue.len())) {
                self.events = self.events.saturating_sub(1);
                self.bytes = self.bytes.saturating_sub(event.memory());
                numbers.push(number);
            }
            (lane.failures, lane.attempts, lane.first_attempt) = (0, 0, None);
            if lane.queue.is_empty() {
                self.lanes.remove(id);
            } else {
                self.make_ready(*id, now, Turn::Last);
            }
        }
        numbers
    }

    fn landed(&mut self, parcel: &Parcel) {
        self.in_flight = self.in_flight.saturating_sub(1);
        let count = parcel.parts.iter().map(|(_, count)| count).sum();
        self.events_in_flight = self.events_in_flight.saturating_sub(count);
    }

    /// The sink refused a parcel of several events: they go again at once, in smaller ones.
    pub(crate) fn split(&mut self, parcel: &Parcel, reason: Reason, now: Instant) {
        self.landed(parcel);
        let (mut count, mut bytes) = (0_usize, 0_usize);
        for (id, part) in parcel.parts.iter().rev() {
            if let Some(lane) = self.lanes.get(id) {
                count = count.saturating_add(*part);
                let part = lane.queue.iter().take(*part).map(|held| held.event.as_bytes().len());
                bytes = part.fold(bytes, usize::saturating_add);
            }
            self.make_ready(*id, now, Turn::First);
        }
        if reason == Reason::TooLarge {
            (self.size.bytes, self.size.arrived) = (Some(bytes / 2), 0);
        } else {
            self.size.count = (count / 2).max(1);
        }
    }

    /// The attempt with that parcel failed, and is to be repeated.
    pub(crate) fn failed(&mut self, parcel: &Parcel, permit: Permit, error: &DeliveryError, now: Instant) {
        self.breaker.failed(permit, error, now, &mut self.random);
        if !error.reason().concerns_every_event() {
            self.back_off(parcel, now);
            return;
        }
        // The events aren't to blame. Their lanes take their turn behind the others.
        self.landed(parcel);
        if !self.stopping {
            for (id, _) in &parcel.parts {
                self.make_ready(*id, now, Turn::Last);
            }
        }
    }

    /// The parcel's lanes wait before their next attempt.
    pub(crate) fn back_off(&mut self, parcel: &Parcel, now: Instant) {
        self.landed(parcel);
        if self.stopping {
            return;
        }
        let mut failures = 1;
        for (id, _) in &parcel.parts {
            if let Some(lane) = self.lanes.get_mut(id) {
                lane.failures = lane.failures.saturating_add(1);
                failures = failures.max(lane.failures);
            }
        }
        let wait = self.policy.delay(failures, &mut self.random);
        let until = now.checked_add(wait).unwrap_or(now);
        self.waiting.extend(parcel.parts.iter().map(|(id, _)| (until, *id)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn lanes(events: usize, bytes: usize, batch: usize) -> Lanes {
        let bounds = Bounds { concurrency: 2, events, bytes, batch, linger: Duration::from_millis(50) };
        let mut lanes = Lanes::new(bounds, RetryPolicy::default());
        lanes.random = fastrand::Rng::with_seed(3);
        lanes
    }

    fn admit(lanes: &mut Lanes, lane: u64, seq: u64, now: Instant) {
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{lane}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{lane}","seq":{seq}}}"#
        ))
        .unwrap();
        lanes.admit(Fingerprint(u128::from(lane)), lane * 100 + seq, event, now);
    }

    fn ids(departure: &Departure) -> Vec<&str> {
        departure.delivery.events.iter().map(Event::id).collect()
    }

    fn next(lanes: &mut Lanes, now: Instant) -> Departure {
        lanes.next(now, WALL, 0).unwrap()
    }

    fn idle(lanes: &mut Lanes, now: Instant) -> bool {
        lanes.next(now, WALL, 0).is_none()
    }

    fn transient(reason: Reason) -> DeliveryError {
        DeliveryError::Transient { reason, retry_after: None }
    }

    #[test]
    fn one_event_a_lane_and_lanes_side_by_side() {
        let (mut lanes, now) = (lanes(10, usize::MAX, 1), Instant::now());
        for (lane, seq) in [(1, 1), (1, 2), (2, 1), (3, 1)] {
            admit(&mut lanes, lane, seq, now);
        }
        let (one, two) = (next(&mut lanes, now), next(&mut lanes, now));
        assert_eq!((ids(&one), ids(&two)), (vec!["1-1"], vec!["2-1"]));
        assert!(idle(&mut lanes, now), "two in flight");
        assert_eq!(lanes.handled(&one.parcel, now), [101]);
        let three = next(&mut lanes, now);
        assert_eq!(ids(&three), ["3-1"], "lanes take turns");
        lanes.handled(&two.parcel, now);
        assert_eq!(ids(&next(&mut lanes, now)), ["1-2"]);
    }

    #[test]
    fn a_failure_holds_up_its_own_lane_only() {
        let (mut lanes, now) = (lanes(10, usize::MAX, 1), Instant::now());
        admit(&mut lanes, 1, 1, now);
        for seq in 1..9 {
            admit(&mut lanes, 2, seq, now);
        }
        let poison = next(&mut lanes, now);
        lanes.failed(&poison.parcel, Permit::Flow, &transient(Reason::Status5xx), now);
        for seq in 1..9 {
            let departure = next(&mut lanes, now);
            assert_eq!(ids(&departure), [format!("2-{seq}")]);
            lanes.answered(Permit::Flow);
            lanes.handled(&departure.parcel, now);
        }
        let wake = lanes.wakes_at(0).unwrap();
        let again = next(&mut lanes, wake);
        assert_eq!((ids(&again), again.delivery.attempt), (vec!["1-1"], 2));
    }

    #[test]
    fn lanes_take_turns_probing() {
        let (mut lanes, mut now) = (lanes(10, usize::MAX, 1), Instant::now());
        admit(&mut lanes, 1, 1, now);
        admit(&mut lanes, 2, 1, now);
        let refused = transient(Reason::Refused);
        let (one, two) = (next(&mut lanes, now), next(&mut lanes, now));
        lanes.failed(&one.parcel, one.permit, &refused, now);
        lanes.failed(&two.parcel, two.permit, &refused, now);
        let mut probed = Vec::new();
        for _ in 0..4 {
            now = lanes.wakes_at(0).unwrap().max(now + Duration::from_nanos(1));
            let probe = next(&mut lanes, now);
            assert!(probe.permit == Permit::Probe && idle(&mut lanes, now));
            probed.push(ids(&probe)[0].to_owned());
            lanes.failed(&probe.parcel, probe.permit, &refused, now);
        }
        assert_eq!(probed, ["1-1", "2-1", "1-1", "2-1"]);
    }

    #[test]
    fn with_all_in_flight_only_an_outcome_wakes() {
        let (mut lanes, now) = (lanes(10, usize::MAX, 1), Instant::now());
        for lane in 1..=4 {
            admit(&mut lanes, lane, 1, now);
        }
        let (one, two) = (next(&mut lanes, now), next(&mut lanes, now));
        let refused = transient(Reason::Refused);
        lanes.failed(&one.parcel, one.permit, &refused, now);
        let end = lanes.wakes_at(0).unwrap();
        let probe = next(&mut lanes, end);
        assert_eq!((probe.permit, lanes.wakes_at(0)), (Permit::Probe, None));
        lanes.failed(&probe.parcel, probe.permit, &refused, end);
        assert!(lanes.wakes_at(0).is_some());
        assert_eq!(lanes.handled(&two.parcel, end).len(), 1);
    }

    #[test]
    fn events_and_bytes_are_bounded_and_given_back() {
        let now = Instant::now();
        let (mut by_events, mut by_bytes) = (lanes(2, usize::MAX, 1), lanes(10, 1, 1));
        admit(&mut by_events, 1, 1, now);
        assert!(by_events.has_room());
        admit(&mut by_events, 1, 2, now);
        assert!(!by_events.has_room());
        admit(&mut by_bytes, 1, 1, now);
        assert!(!by_bytes.has_room());
        let departure = next(&mut by_bytes, now);
        by_bytes.handled(&departure.parcel, now);
        assert_eq!(by_bytes.held(), (0, 0));
    }

    #[test]
    fn a_batch_leaves_when_it_is_full_or_due_or_hurried() {
        let (mut lanes, now) = (lanes(100, usize::MAX, 4), Instant::now());
        for (lane, seq) in [(1, 1), (1, 2), (2, 1)] {
            admit(&mut lanes, lane, seq, now);
        }
        assert!(idle(&mut lanes, now));
        let due = lanes.wakes_at(0).unwrap();
        assert_eq!(due - now, Duration::from_millis(50));
        for (lane, seq) in [(2, 2), (2, 3)] {
            admit(&mut lanes, lane, seq, now);
        }
        let full = next(&mut lanes, now);
        assert_eq!(ids(&full), ["1-1", "1-2", "2-1", "2-2"]);
        admit(&mut lanes, 3, 1, now);
        assert!(idle(&mut lanes, now), "2-3 must wait for the batch that holds 2-2");
        let late = now + Duration::from_millis(50);
        let due = next(&mut lanes, late);
        assert_eq!(ids(&due), ["3-1"]);
        assert_eq!(lanes.handled(&full.parcel, late), [101, 102, 201, 202]);
        lanes.hurry();
        assert_eq!(ids(&next(&mut lanes, late)), ["2-3"]);
    }

    #[test]
    fn a_refused_batch_is_split_until_the_culprit_is_alone() {
        let (mut lanes, now) = (lanes(100, usize::MAX, 8), Instant::now());
        lanes.bounds.concurrency = 1;
        for (lane, seq) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)] {
            admit(&mut lanes, lane, seq, now);
        }
        lanes.hurry();
        let (mut arrived, mut refused, mut requests) = (Vec::new(), Vec::new(), 0);
        while let Some(departure) = lanes.next(now, WALL, 0) {
            requests += 1;
            let batch: Vec<_> = ids(&departure).into_iter().map(str::to_owned).collect();
            if !batch.contains(&"2-1".to_owned()) {
                lanes.grow();
                arrived.extend(batch);
            } else if batch.len() > 1 {
                lanes.split(&departure.parcel, Reason::Status4xx, now);
                continue;
            } else {
                refused.extend(batch);
            }
            lanes.handled(&departure.parcel, now);
        }
        assert_eq!(refused, ["2-1"]);
        arrived.sort();
        assert_eq!(arrived, ["1-1", "1-2", "1-3", "2-2", "3-1", "3-2", "3-3"]);
        assert!(requests <= 10, "{requests}");
        assert_eq!((lanes.size.count, lanes.held()), (8, (0, 0)));
    }

    #[test]
    fn what_was_too_large_is_halved_and_tried_again_only_slowly() {
        let (mut lanes, now) = (lanes(1_000, usize::MAX, 4), Instant::now());
        for seq in 0..90 {
            admit(&mut lanes, 1, seq, now);
        }
        let large = next(&mut lanes, now);
        let size: usize = large.delivery.events.iter().map(|event| event.as_bytes().len()).sum();
        lanes.split(&large.parcel, Reason::TooLarge, now);
        for _ in 0..PATIENCE / 2 {
            let half = next(&mut lanes, now);
            let bytes: usize = half.delivery.events.iter().map(|event| event.as_bytes().len()).sum();
            let count = half.delivery.events.len();
            assert!(bytes <= size / 2 && (1..=2).contains(&count), "{bytes} in {count}");
            lanes.grow();
            lanes.handled(&half.parcel, now);
        }
        assert_eq!(lanes.size.bytes, Some(size / 2));
    }

    #[test]
    fn after_a_stop_what_failed_is_never_sent_again() {
        let (mut lanes, now) = (lanes(10, usize::MAX, 1), Instant::now());
        admit(&mut lanes, 1, 1, now);
        admit(&mut lanes, 2, 1, now);
        let one = next(&mut lanes, now);
        lanes.stop();
        lanes.failed(&one.parcel, one.permit, &transient(Reason::Status5xx), now);
        assert_eq!(ids(&next(&mut lanes, now)), ["2-1"], "a first attempt is still made");
        assert!(idle(&mut lanes, now) && lanes.held().0 == 2);
    }

    #[test]
    fn who_may_send_nothing_isnt_woken_for_it() {
        let (mut lanes, now) = (lanes(10, usize::MAX, 1), Instant::now());
        for lane in 1..4 {
            admit(&mut lanes, lane, 1, now);
        }
        lanes.hurry();
        assert!(lanes.next(now, WALL, 2).is_none(), "two acknowledgements aren't written down");
        assert_eq!(lanes.wakes_at(2), None, "only their being written helps");
        let (one, two) = (next(&mut lanes, now), next(&mut lanes, now));
        lanes.failed(&one.parcel, one.permit, &transient(Reason::Refused), now);
        lanes.stop();
        let late = now + Duration::from_hours(1);
        assert!(idle(&mut lanes, late), "a pause isn't probed by who stops");
        assert_eq!(lanes.wakes_at(0), None, "only the other attempt's end helps");
        lanes.handled(&two.parcel, late);
    }
}
