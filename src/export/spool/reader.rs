//! Reads committed events in order: from memory when the reader keeps up, else from the files.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::scan::{Found, Scan};
use super::segments::{Place, Segment};
use super::shared::Shared;
use crate::aep::Event;

/// The most events of one batch.
const MAX_EVENTS: usize = 256;
/// The most bytes of one batch, unless a single event has more.
const MAX_BYTES: usize = 1 << 20;
/// How often a file that can't be read is tried, before what it holds is given up.
const ATTEMPTS: u32 = 5;
/// Errors after which a file is still there, to be read when they have passed: no memory, no permission, too many open
/// files of the system or the process, a stale handle of a network file system. Linux's numbers.
const PASSING: [i32; 5] = [12, 13, 23, 24, 116];
/// How long a reader waits before it tries again.
const BETWEEN_ATTEMPTS: Duration = Duration::from_secs(1);

/// Events in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Events and their numbers, at most 256 of them and about 1 MiB. Empty when everything up to `next` is
    /// lost.
    pub events: Vec<(u64, Event)>,
    /// The number that the next batch begins at. Numbers before it that are missing from `events` are lost to
    /// damage, were freed since nothing held them, or were never given.
    pub next: u64,
}

/// A cursor over the committed events. It holds no space: what it hasn't read yet is kept by a
/// [`Hold`](super::Hold).
pub struct Reader {
    shared: Arc<Shared>,
    next: u64,
    /// Where it is in which segment, told by its first number.
    place: Option<(u64, Scan)>,
    committed: watch::Receiver<u64>,
    /// The read that is under way, and of which segment.
    job: Option<(Segment, JoinHandle<io::Result<Read>>)>,
    /// Reads that failed since the last one that worked.
    failures: u32,
    /// When the next one may be tried, after one that failed: kept here, so that a call that is dropped doesn't
    /// shorten the wait.
    retry_at: Option<Instant>,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").field("next", &self.next).finish_non_exhaustive()
    }
}

/// What a read has brought.
struct Read {
    scan: Scan,
    batch: Batch,
    losses: Vec<Loss>,
}

/// Events that are missing from a segment.
struct Loss {
    /// Where, in the file.
    offset: u64,
    events: u64,
    why: &'static str,
}

impl Reader {
    pub(super) fn new(shared: Arc<Shared>, from: u64) -> Self {
        let committed = shared.committed.subscribe();
        Self { shared, next: from, place: None, committed, job: None, failures: 0, retry_at: None }
    }

    /// Whether something that is committed and held hasn't been read yet, so that [`next`](Self::next) needn't
    /// wait for an append.
    #[must_use]
    pub fn ready(&self) -> bool {
        let core = self.shared.core.lock();
        self.next.max(core.first()) < core.end
    }

    /// The number that the next batch begins at.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.next
    }

    /// The next events, as soon as there are any.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is skipped when it is dropped.
    pub async fn next(&mut self) -> Batch {
        loop {
            if let Some((segment, job)) = &mut self.job {
                let result = job.await;
                let segment = segment.clone();
                self.job = None;
                let error = match result {
                    Ok(Ok(read)) => return self.take(&segment, read),
                    Ok(Err(error)) => error,
                    Err(error) if error.is_panic() => io::Error::other("the read has panicked"),
                    // The runtime is going down.
                    Err(_) => return std::future::pending().await,
                };
                self.place = None;
                if self.is_held(&segment) {
                    if let Some(batch) = self.failed(&segment, &error) {
                        return batch;
                    }
                    self.retry_at = Instant::now().checked_add(BETWEEN_ATTEMPTS);
                }
                continue;
            }
            if let Some(at) = self.retry_at {
                tokio::time::sleep_until(at).await;
                self.retry_at = None;
            }
            self.committed.mark_unchanged();
            if let Some(batch) = self.start() {
                return batch;
            }
            if self.job.is_none() && self.committed.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// A batch from memory, or else starts a read, or else there is nothing yet.
    fn start(&mut self) -> Option<Batch> {
        let segment = {
            let core = self.shared.core.lock();
            self.next = self.next.max(core.first());
            if self.next >= core.end {
                return None;
            }
            let mut segment = None;
            while self.next < core.recent_first() {
                match core.segments.place(self.next) {
                    Place::In(found) => {
                        segment = Some(found);
                        break;
                    }
                    Place::Before(number) => self.next = number.min(core.recent_first()),
                    Place::Past => self.next = core.recent_first(),
                }
            }
            let Some(segment) = segment else {
                let skip = self.next.saturating_sub(core.recent_first());
                let skip = usize::try_from(skip).unwrap_or(usize::MAX);
                let events = core.recent.batch(skip, MAX_EVENTS, MAX_BYTES);
                let events: Vec<_> = (self.next..).zip(events).collect();
                self.next = events.last().map_or(core.end, |(number, _)| number.saturating_add(1));
                self.place = None;
                return Some(Batch { events, next: self.next });
            };
            segment
        };
        let scan = self.place.take().filter(|(first, _)| *first == segment.first).map(|(_, scan)| scan);
        let (shared, from) = (Arc::clone(&self.shared), self.next);
        let read_from = segment.clone();
        let job = tokio::task::spawn_blocking(move || read(&shared, &read_from, scan, from));
        self.job = Some((segment, job));
        None
    }

    fn take(&mut self, segment: &Segment, read: Read) -> Batch {
        let Read { scan, batch, losses } = read;
        for loss in &losses {
            self.report(segment, loss);
        }
        self.failures = 0;
        self.place = Some((segment.first, scan));
        self.next = batch.next;
        batch
    }

    /// Whether a segment is still where the reader is: it may have been freed meanwhile.
    fn is_held(&self, segment: &Segment) -> bool {
        let place = self.shared.core.lock().segments.place(self.next);
        matches!(place, Place::In(found) if found.first == segment.first)
    }

    /// After a read that failed: what is given up, when that is due.
    fn failed(&mut self, segment: &Segment, error: &io::Error) -> Option<Batch> {
        self.failures = self.failures.saturating_add(1);
        if self.failures == 1 {
            tracing::warn!(file = segment.name(), %error, "spool file can't be read; tried again");
        }
        let gone = error.kind() == io::ErrorKind::NotFound;
        let is_there = error.raw_os_error().is_some_and(|code| PASSING.contains(&code));
        if is_there || (self.failures < ATTEMPTS && !gone) {
            return None;
        }
        self.failures = 0;
        let events = segment.end.saturating_sub(self.next);
        self.report(segment, &Loss { offset: segment.reported, events, why: "the file can't be read" });
        self.next = segment.end;
        Some(Batch { events: Vec::new(), next: self.next })
    }

    /// Counts and logs a loss, unless another reader has.
    fn report(&self, segment: &Segment, loss: &Loss) {
        if self.shared.core.lock().segments.report(segment.first, loss.offset) {
            self.shared.metrics.lost_events.inc_by(loss.events);
            tracing::error!(
                file = segment.name(),
                events = loss.events,
                offset = loss.offset,
                reason = loss.why,
                "events of the spool are lost"
            );
        }
    }
}

/// Reads a batch of a segment, from a number on. Blocks.
fn read(shared: &Shared, segment: &Segment, scan: Option<Scan>, from: u64) -> io::Result<Read> {
    let mut scan = match (scan, &shared.files) {
        (Some(scan), _) => scan,
        (None, Some(files)) => Scan::new(files.open(&segment.name())?, segment.first),
        (None, None) => return Err(io::ErrorKind::NotFound.into()),
    };
    let (mut events, mut bytes, mut losses) = (Vec::new(), 0_usize, Vec::new());
    let next = loop {
        let offset = scan.offset();
        match scan.next(segment.extent())? {
            Found::Event { number, lost, payload } => {
                if lost > 0 && number > from {
                    // What lies before the reader's place was another's to miss.
                    let lost = lost.min(number.saturating_sub(from));
                    losses.push(Loss { offset, events: lost, why: "the file is damaged" });
                }
                if number < from {
                    continue;
                }
                match Event::parse(payload) {
                    Ok(event) => events.push((number, event)),
                    // Behind the loss before it, if there was one.
                    Err(_) => losses.push(Loss {
                        offset: offset.saturating_add(1),
                        events: 1,
                        why: "a record is no legal event",
                    }),
                }
                bytes = bytes.saturating_add(payload.len());
                if events.len() >= MAX_EVENTS || bytes >= MAX_BYTES {
                    break scan.expected();
                }
            }
            Found::Positions(_) => {}
            Found::End { lost, .. } => {
                if lost > 0 {
                    let events = lost.min(segment.end.saturating_sub(from));
                    losses.push(Loss { offset, events, why: "the file is damaged" });
                }
                break segment.end;
            }
        }
    };
    Ok(Read { scan, batch: Batch { events, next }, losses })
}
