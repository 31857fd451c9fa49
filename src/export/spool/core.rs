//! The spool's state, held under one lock: what waits, what is committed, what may be freed. No I/O.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::format::{HEADER, record_length};
use super::log::Log;
use super::scan::wide;
use super::segments::Segments;
use super::{Appended, SpoolConfig, SpoolState, Unavailable, UnavailableReason};
use crate::aep::Event;
use crate::export::retry::RetryPolicy;
use crate::export::seen::{Fingerprint, Seen};

/// How many bytes of accepted events wait for the disk at most; a single append may exceed it when nothing
/// else waits.
const MAX_WAITING: u64 = 64 << 20;
/// How many bytes are written at once, unless one event has more.
const MAX_GROUP: u64 = 4 << 20;
/// After which time an append that is refused for want of room is worth trying again.
const ROOM_AFTER: Duration = Duration::from_secs(5);
/// How long the first failure of the disk keeps appends away; doubles with every further one.
const BACK_OFF: RetryPolicy = RetryPolicy { initial: Duration::from_secs(1), max: Duration::from_secs(30) };

/// An event on its way in.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) fingerprint: Fingerprint,
    pub(super) event: Event,
}

/// How an append learns what became of it.
pub(super) type Outcome = Result<(), Unavailable>;

#[derive(Debug)]
struct Waiter {
    /// The highest number that is waited for; `None` waits for the next write, whatever it is.
    number: Option<u64>,
    done: oneshot::Sender<Outcome>,
}

/// Why nothing is taken now, and what ends that.
#[derive(Debug, Clone)]
struct Trouble {
    reason: UnavailableReason,
    ends: Ends,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// With room for this many bytes.
    WithRoom(u64),
    /// With a write that works, tried from this time on.
    WithWrite(Instant),
}

/// What the writer is to do next.
#[derive(Debug)]
pub(super) enum Task {
    Write {
        /// The number of the first event.
        first: u64,
        entries: Vec<Entry>,
        /// Whether a new segment is to be begun for them.
        segment: NextSegment,
    },
    /// Write something to see whether it works, the next event's number being this.
    Probe(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextSegment {
    Begin,
    Same,
}

/// The spool's state.
#[derive(Debug)]
pub(super) struct Core {
    /// The events committed last.
    pub(super) seen: Seen,
    /// Events that are accepted and not committed, with their numbers.
    uncommitted: HashMap<Fingerprint, u64>,
    /// Those of them that the writer hasn't taken yet. Bounded by [`MAX_WAITING`].
    pending: VecDeque<Entry>,
    /// How many the writer has taken.
    writing: u64,
    /// Bytes of all uncommitted events' records.
    pub(super) waiting_bytes: u64,
    /// One for each append and probe under way.
    waiters: Vec<Waiter>,
    /// Whether a write is wanted though no event waits.
    probe: bool,
    /// The number that is committed next.
    pub(super) end: u64,
    /// The last committed events; with a log they are bounded by `recent_bytes`, else they are all there is.
    recent: VecDeque<Event>,
    /// Memory of these, in bytes.
    recent_bytes: u64,
    /// Empty without a log.
    pub(super) segments: Segments,
    /// How far each hold is, by its id.
    holds: BTreeMap<u64, u64>,
    next_hold: u64,
    /// The writer, while it is idle. `None` while it works, and without a log.
    pub(super) log: Option<Box<Log>>,
    pub(super) has_log: bool,
    trouble: Option<Trouble>,
    /// Writes that failed since the last one that worked.
    failures: u32,
    /// How many files are being removed.
    pub(super) removing: usize,
    /// Whether a job removes files.
    pub(super) removes: bool,
    /// Whether the last removal failed.
    pub(super) removal_fails: bool,
    pub(super) closed: bool,
}

impl Core {
    pub(super) fn new(seen: Seen, end: u64, segments: Segments, log: Option<Box<Log>>) -> Self {
        Self {
            seen,
            uncommitted: HashMap::new(),
            pending: VecDeque::new(),
            writing: 0,
            waiting_bytes: 0,
            waiters: Vec::new(),
            probe: false,
            end,
            recent: VecDeque::new(),
            recent_bytes: 0,
            segments,
            holds: BTreeMap::new(),
            next_hold: 0,
            has_log: log.is_some(),
            log,
            trouble: None,
            failures: 0,
            removing: 0,
            removes: false,
            removal_fails: false,
            closed: false,
        }
    }

    /// The number of the oldest event in memory.
    pub(super) fn recent_first(&self) -> u64 {
        self.end.saturating_sub(wide(self.recent.len()))
    }

    /// The number of the oldest event held.
    pub(super) fn first(&self) -> u64 {
        self.segments.first().map_or_else(|| self.recent_first(), |first| first.min(self.recent_first()))
    }

    /// Events before this number are done with by every hold.
    pub(super) fn done(&self) -> u64 {
        self.holds.values().copied().min().unwrap_or(u64::MAX)
    }

    /// What an event takes of the space, in bytes.
    pub(super) fn cost(&self, event: &Event) -> u64 {
        if self.has_log { record_length(event.as_bytes().len()) } else { wide(event.memory()) }
    }

    /// Takes events in, all or none: what was new, and what tells when all of them are committed; `None` when
    /// they already are.
    pub(super) fn admit(
        &mut self,
        entries: Vec<Entry>,
        config: &SpoolConfig,
        now: Instant,
    ) -> Result<(Appended, Option<oneshot::Receiver<Outcome>>), Unavailable> {
        if self.closed {
            return Err(Unavailable { reason: UnavailableReason::Closed, retry_after: ROOM_AFTER });
        }
        let (mut new, mut duplicates, mut wait_for, mut bytes) = (Vec::new(), 0_usize, None, 0_u64);
        let first = self.end.saturating_add(self.writing).saturating_add(wide(self.pending.len()));
        for entry in entries {
            if let Some(number) = self.uncommitted.get(&entry.fingerprint) {
                wait_for = wait_for.max(Some(*number));
                duplicates = duplicates.saturating_add(1);
            } else if self.seen.recall(entry.fingerprint) {
                duplicates = duplicates.saturating_add(1);
            } else {
                let number = first.saturating_add(wide(new.len()));
                self.uncommitted.insert(entry.fingerprint, number);
                wait_for = Some(number);
                bytes = bytes.saturating_add(self.cost(&entry.event));
                new.push(entry);
            }
        }
        if !new.is_empty()
            && let Err(refused) = self.check(bytes, config, now)
        {
            for entry in &new {
                self.uncommitted.remove(&entry.fingerprint);
            }
            return Err(refused);
        }
        let appended = Appended { new: new.len(), duplicates };
        self.waiting_bytes = self.waiting_bytes.saturating_add(bytes);
        self.pending.extend(new);
        Ok((appended, wait_for.map(|number| self.wait(Some(number)))))
    }

    fn wait(&mut self, number: Option<u64>) -> oneshot::Receiver<Outcome> {
        let (done, outcome) = oneshot::channel();
        self.waiters.push(Waiter { number, done });
        outcome
    }

    /// Whether new events of so many bytes can be taken.
    fn check(&mut self, bytes: u64, config: &SpoolConfig, now: Instant) -> Result<(), Unavailable> {
        let wanted = bytes.saturating_add(self.overhead(bytes, config));
        if wanted > config.max_bytes / 2 {
            return Err(Unavailable { reason: UnavailableReason::TooLarge, retry_after: BACK_OFF.max });
        }
        if let Some(Trouble { reason, ends: Ends::WithWrite(at) }) = &self.trouble
            && let Some(retry_after) = at.checked_duration_since(now).filter(|wait| !wait.is_zero())
        {
            return Err(Unavailable { reason: reason.clone(), retry_after });
        }
        if self.waiting_bytes > 0 && self.waiting_bytes.saturating_add(bytes) > MAX_WAITING {
            return Err(Unavailable { reason: UnavailableReason::Behind, retry_after: BACK_OFF.initial });
        }
        if !self.has_room(wanted, config) {
            return Err(self.full(wanted));
        }
        Ok(())
    }

    /// What is written beside the records of so many bytes: the heads of segments.
    fn overhead(&self, bytes: u64, config: &SpoolConfig) -> u64 {
        let head = wide(HEADER).saturating_add(wide(config.snapshot_size()));
        let segments = bytes.checked_div(config.segment_size()).unwrap_or(0).saturating_add(1);
        if self.has_log { head.saturating_mul(segments) } else { 0 }
    }

    /// Whether so many more bytes can be taken, when everything that needn't be held is given up.
    fn has_room(&mut self, wanted: u64, config: &SpoolConfig) -> bool {
        let wanted = wanted.saturating_add(self.waiting_bytes);
        if self.has_log {
            let fits = |held: u64| held.saturating_add(wanted) <= config.max_bytes;
            fits(self.segments.size()) || fits(self.segments.needed(self.done()))
        } else {
            self.trim(config.max_bytes.saturating_sub(wanted));
            self.recent_bytes.saturating_add(wanted) <= config.max_bytes
        }
    }

    /// There is no room for so many bytes.
    fn full(&mut self, wanted: u64) -> Unavailable {
        let reason = UnavailableReason::Full;
        if self.trouble.is_none() {
            self.trouble = Some(Trouble { reason: reason.clone(), ends: Ends::WithRoom(wanted) });
        }
        Unavailable { reason, retry_after: ROOM_AFTER }
    }

    pub(super) fn state(&self) -> SpoolState {
        match self.trouble.as_ref().map(|trouble| &trouble.reason) {
            None => SpoolState::Writable,
            Some(UnavailableReason::Failing(why)) => SpoolState::Failing(Arc::clone(why)),
            Some(_) => SpoolState::Full,
        }
    }

    /// When an append is worth trying.
    pub(super) fn opens(&self) -> Opens {
        match &self.trouble {
            _ if self.closed => Opens::Now,
            Some(Trouble { ends: Ends::WithRoom(_), .. }) => Opens::WithAChange,
            Some(Trouble { ends: Ends::WithWrite(at), .. }) => Opens::WithAWriteFrom(*at),
            None if self.waiting_bytes > MAX_WAITING / 2 => Opens::WithAChange,
            None => Opens::Now,
        }
    }

    /// Asks for a write, to see whether it works.
    pub(super) fn probe(&mut self) -> oneshot::Receiver<Outcome> {
        self.probe = true;
        self.wait(None)
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        !self.removes && self.log.is_some() == self.has_log
    }

    /// Whether the writer has something to do.
    pub(super) fn has_task(&self) -> bool {
        self.probe || !self.pending.is_empty()
    }

    /// The writer's next task, which fits into `left` bytes of the segment that is open; `None` means that
    /// one has to be begun, `whole` is what a new one has.
    pub(super) fn next_task(&mut self, left: Option<u64>, whole: u64) -> Option<Task> {
        let probe = std::mem::take(&mut self.probe);
        let Some(front) = self.pending.front() else {
            return probe.then_some(Task::Probe(self.end));
        };
        let least = record_length(front.event.as_bytes().len());
        let (segment, room) = match left {
            Some(left) if least <= left => (NextSegment::Same, left),
            _ => (NextSegment::Begin, whole),
        };
        let (mut entries, mut bytes) = (Vec::new(), 0_u64);
        while let Some(next) = self.pending.front() {
            bytes = bytes.saturating_add(record_length(next.event.as_bytes().len()));
            if !entries.is_empty() && bytes > room.min(MAX_GROUP) {
                break;
            }
            entries.extend(self.pending.pop_front());
        }
        self.writing = wide(entries.len());
        Some(Task::Write { first: self.end, entries, segment })
    }

    /// Everything that waits is committed at once; for a spool without a log.
    pub(super) fn commit_all(&mut self, config: &SpoolConfig) -> (Vec<Event>, Vec<oneshot::Sender<Outcome>>) {
        let entries: Vec<_> = self.pending.drain(..).collect();
        let events = entries.iter().map(|entry| entry.event.clone()).collect();
        let waiting = self.commit(entries, config);
        (events, waiting)
    }

    /// These entries, the first that wait, are committed: who is to be told.
    pub(super) fn commit(
        &mut self,
        entries: Vec<Entry>,
        config: &SpoolConfig,
    ) -> Vec<oneshot::Sender<Outcome>> {
        for Entry { fingerprint, event } in entries {
            self.waiting_bytes = self.waiting_bytes.saturating_sub(self.cost(&event));
            self.uncommitted.remove(&fingerprint);
            self.seen.insert(fingerprint);
            self.recent_bytes = self.recent_bytes.saturating_add(wide(event.memory()));
            self.recent.push_back(event);
            self.end = self.end.saturating_add(1);
        }
        self.writing = 0;
        self.works();
        self.trim(wide(config.recent_bytes).min(config.max_bytes));
        let end = self.end;
        self.take_waiters(|waiter| waiter.number.is_none_or(|number| number < end))
    }

    /// A write has worked.
    fn works(&mut self) {
        self.failures = 0;
        if let Some(Trouble { ends: Ends::WithWrite(_), .. }) = self.trouble {
            self.trouble = None;
        }
    }

    /// A probe has worked: who is to be told.
    pub(super) fn probed(&mut self) -> Vec<oneshot::Sender<Outcome>> {
        self.works();
        self.take_waiters(|waiter| waiter.number.is_none())
    }

    /// A write has failed, and with it everything that waits, whose numbers are free again: who is to be told
    /// what.
    pub(super) fn fail(
        &mut self,
        reason: &UnavailableReason,
        now: Instant,
    ) -> (Vec<oneshot::Sender<Outcome>>, Unavailable) {
        self.failures = self.failures.saturating_add(1);
        let retry_after = BACK_OFF.ceiling(self.failures);
        let at = now.checked_add(retry_after).unwrap_or(now);
        self.trouble = Some(Trouble { reason: reason.clone(), ends: Ends::WithWrite(at) });
        (self.drop_waiting(), Unavailable { reason: reason.clone(), retry_after })
    }

    /// There was no room for a write of so many bytes after all: who is to be told what.
    pub(super) fn no_room(&mut self, wanted: u64) -> (Vec<oneshot::Sender<Outcome>>, Unavailable) {
        let waiting = self.drop_waiting();
        (waiting, self.full(wanted))
    }

    fn drop_waiting(&mut self) -> Vec<oneshot::Sender<Outcome>> {
        self.pending.clear();
        self.uncommitted.clear();
        (self.writing, self.waiting_bytes) = (0, 0);
        self.take_waiters(|_| true)
    }

    fn take_waiters(&mut self, done: impl Fn(&Waiter) -> bool) -> Vec<oneshot::Sender<Outcome>> {
        let (told, waiting) = std::mem::take(&mut self.waiters).into_iter().partition(done);
        self.waiters = waiting;
        told.into_iter().map(|waiter: Waiter| waiter.done).collect()
    }

    /// Forgets the oldest events in memory until they take `most` bytes, as far as they needn't be held there.
    fn trim(&mut self, most: u64) {
        let done = self.done();
        while self.recent_bytes > most
            && (self.has_log || self.recent_first() < done)
            && let Some(event) = self.recent.pop_front()
        {
            self.recent_bytes = self.recent_bytes.saturating_sub(wide(event.memory()));
        }
    }

    /// Gives up what is done with and needn't be kept.
    pub(super) fn free(&mut self, config: &SpoolConfig) {
        if self.has_log {
            let done = self.done();
            // One segment's room is made before it is needed.
            let most = config.max_bytes.saturating_sub(config.segment_size());
            self.segments.give_up(done, config.keep_bytes, most);
        } else {
            self.trim(wide(config.recent_bytes));
        }
        if let Some(Trouble { ends: Ends::WithRoom(wanted), .. }) = self.trouble
            && self.has_room(wanted, config)
        {
            self.trouble = None;
        }
    }

    /// Events in memory from a number on, at most `count` and, but for the first, `bytes`.
    pub(super) fn recent(&self, from: u64, count: usize, bytes: usize) -> Vec<(u64, Event)> {
        let skip = usize::try_from(from.saturating_sub(self.recent_first())).unwrap_or(usize::MAX);
        let mut left = bytes;
        let mut events = Vec::new();
        for (number, event) in (from..).zip(self.recent.range(skip.min(self.recent.len())..)).take(count) {
            let size = event.as_bytes().len();
            if size > left && !events.is_empty() {
                break;
            }
            left = left.saturating_sub(size);
            events.push((number, event.clone()));
        }
        events
    }

    /// Bytes held, in files or else in memory.
    pub(super) fn held_bytes(&self) -> u64 {
        if self.has_log { self.segments.size() } else { self.recent_bytes }
    }

    pub(super) fn hold(&mut self, from: u64) -> u64 {
        let id = self.next_hold;
        self.next_hold = id.saturating_add(1);
        self.holds.insert(id, from);
        id
    }

    pub(super) fn advance(&mut self, hold: u64, number: u64) {
        if let Some(held) = self.holds.get_mut(&hold) {
            *held = number.max(*held);
        }
    }

    pub(super) fn release(&mut self, hold: u64) {
        self.holds.remove(&hold);
    }
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
