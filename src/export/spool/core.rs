//! The spool's state, held under one lock: what waits, what is committed, what may be freed. No I/O.

use std::collections::{HashMap, VecDeque};

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::format::record_length;
use super::holds::Holds;
use super::log::Log;
use super::recent::Recent;
use super::scan::wide;
use super::segments::Segments;
use super::trouble::{Opens, Trouble, refused};
use super::waiters::{Awaits, Outcome, Told, Waiters};
use super::{Appended, SpoolConfig, SpoolState, Unavailable, UnavailableReason};
use crate::aep::Event;
use crate::export::seen::{Fingerprint, Seen};

/// How many bytes of accepted events wait for the disk at most; a single append may exceed it when nothing
/// else waits.
const MAX_WAITING: u64 = 64 << 20;
/// How many bytes are written at once, unless one event has more.
const MAX_GROUP: u64 = 4 << 20;
/// An event on its way in.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) fingerprint: Fingerprint,
    pub(super) event: Event,
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
    waiters: Waiters,
    /// Whether a write is wanted though no event waits.
    probe: bool,
    /// The number that is committed next.
    pub(super) end: u64,
    /// With a log these are bounded by `recent_bytes`, else they are all there is.
    pub(super) recent: Recent,
    /// Empty without a log.
    pub(super) segments: Segments,
    pub(super) holds: Holds,
    /// The writer, while it is idle. `None` while it works, and without a log.
    pub(super) log: Option<Box<Log>>,
    pub(super) has_log: bool,
    trouble: Trouble,
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
            waiters: Waiters::default(),
            probe: false,
            end,
            recent: Recent::default(),
            segments,
            holds: Holds::default(),
            has_log: log.is_some(),
            log,
            trouble: Trouble::default(),
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
            return Err(refused(UnavailableReason::Closed));
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
        Ok((appended, wait_for.map(|number| self.waiters.add(Awaits::Event(number)))))
    }

    /// Whether new events of so many bytes can be taken.
    fn check(&mut self, bytes: u64, config: &SpoolConfig, now: Instant) -> Result<(), Unavailable> {
        let wanted = bytes.saturating_add(self.overhead(bytes, config));
        if wanted > config.max_bytes / 2 {
            return Err(refused(UnavailableReason::TooLarge));
        }
        if let Some(unavailable) = self.trouble.refuses(now) {
            return Err(unavailable);
        }
        if self.waiting_bytes > 0 && self.waiting_bytes.saturating_add(bytes) > MAX_WAITING {
            return Err(refused(UnavailableReason::Behind));
        }
        if !self.has_room(wanted, config) {
            return Err(self.trouble.full(wanted));
        }
        Ok(())
    }

    /// What is written beside the records of so many bytes: the heads of segments.
    fn overhead(&self, bytes: u64, config: &SpoolConfig) -> u64 {
        let segments = bytes.checked_div(config.segment_size()).unwrap_or(0).saturating_add(1);
        if self.has_log { config.head_size().saturating_mul(segments) } else { 0 }
    }

    /// Whether so many more bytes can be taken, when everything that needn't be held is given up.
    fn has_room(&mut self, wanted: u64, config: &SpoolConfig) -> bool {
        let wanted = wanted.saturating_add(self.waiting_bytes);
        if self.has_log {
            let fits = |held: u64| held.saturating_add(wanted) <= config.max_bytes;
            fits(self.segments.size()) || fits(self.segments.needed(self.holds.done()))
        } else {
            self.trim(config.max_bytes.saturating_sub(wanted));
            self.recent.bytes().saturating_add(wanted) <= config.max_bytes
        }
    }

    pub(super) fn state(&self) -> SpoolState {
        self.trouble.state()
    }

    /// When an append is worth trying.
    pub(super) fn opens(&self) -> Opens {
        match self.trouble.opens() {
            _ if self.closed => Opens::Now,
            Opens::Now if self.waiting_bytes > MAX_WAITING / 2 => Opens::WithAChange,
            opens => opens,
        }
    }

    /// Asks for a write, to see whether it works.
    pub(super) fn probe(&mut self) -> oneshot::Receiver<Outcome> {
        self.probe = true;
        self.waiters.add(Awaits::Write)
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
    pub(super) fn commit_all(&mut self, config: &SpoolConfig) -> (Vec<Event>, Told) {
        let entries: Vec<_> = self.pending.drain(..).collect();
        let events = entries.iter().map(|entry| entry.event.clone()).collect();
        let told = self.commit(entries, config);
        (events, told)
    }

    /// These entries, the first that wait, are committed.
    pub(super) fn commit(&mut self, entries: Vec<Entry>, config: &SpoolConfig) -> Told {
        for Entry { fingerprint, event } in entries {
            self.waiting_bytes = self.waiting_bytes.saturating_sub(self.cost(&event));
            self.uncommitted.remove(&fingerprint);
            self.seen.insert(fingerprint);
            self.recent.push(event);
            self.end = self.end.saturating_add(1);
        }
        self.writing = 0;
        self.trim(wide(config.recent_bytes).min(config.max_bytes));
        self.works()
    }

    /// A write has worked.
    pub(super) fn works(&mut self) -> Told {
        self.trouble.works();
        self.waiters.written(self.end)
    }

    /// A write has failed, and with it everything that waits, whose numbers are free again.
    pub(super) fn fail(&mut self, reason: UnavailableReason, now: Instant) -> (Told, Unavailable) {
        (self.drop_waiting(), self.trouble.failed(reason, now))
    }

    /// There was no room for a write of so many bytes after all, and everything that waits has failed.
    pub(super) fn no_room(&mut self, wanted: u64, config: &SpoolConfig, now: Instant) -> (Told, Unavailable) {
        let told = self.drop_waiting();
        let unavailable = if self.has_room(wanted, config) {
            // Files that could go didn't: no hold that moves on would end that.
            self.trouble.failed(UnavailableReason::Full, now)
        } else {
            self.trouble.lacks_room(wanted)
        };
        (told, unavailable)
    }

    fn drop_waiting(&mut self) -> Told {
        self.pending.clear();
        self.uncommitted.clear();
        (self.writing, self.waiting_bytes) = (0, 0);
        self.waiters.failed()
    }

    /// Forgets the oldest events in memory until they take `most` bytes, as far as they needn't be held there.
    fn trim(&mut self, most: u64) {
        let done = self.holds.done();
        while self.recent.bytes() > most
            && (self.has_log || self.recent_first() < done)
            && self.recent.drop_oldest()
        {}
    }

    /// Gives up what is done with and needn't be kept.
    pub(super) fn free(&mut self, config: &SpoolConfig) {
        if self.has_log {
            let done = self.holds.done();
            // One segment's room is made before it is needed.
            let most = config.max_bytes.saturating_sub(config.segment_size());
            self.segments.give_up(done, config.keep_bytes, most);
        } else {
            self.trim(wide(config.recent_bytes));
        }
        self.look_for_room(config);
    }

    /// Ends a want of room that is over.
    pub(super) fn look_for_room(&mut self, config: &SpoolConfig) {
        if self.trouble.wants_room().is_some_and(|wanted| self.has_room(wanted, config)) {
            self.trouble.has_room();
        }
    }

    /// Bytes held, in files or else in memory.
    pub(super) fn held_bytes(&self) -> u64 {
        if self.has_log { self.segments.size() } else { self.recent.bytes() }
    }
}
