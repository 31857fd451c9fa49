//! A durable queue of accepted events, numbered as they come and read by several cursors.
//!
//! An [`append`](Spool::append) that has returned is kept as [`SpoolSync`] says, until every [`Hold`] has
//! moved past it. A [`Reader`] sees what is committed and nothing else, in order, each event once.
//!
//! # Files
//! `<state directory>/spool/<number>.log`, the number of the segment's first event in 20 digits. All integers
//! are little-endian.
//!
//! ```text
//! segment   header, record…
//! header    "AEPSPOOL" | version u32 = 1 | first u64 | follows u64 | crc32 u32 of what stands before it
//! record    length u32 | crc32 u32 | number u64 | kind u8 | payload
//! ```
//!
//! `length` counts what follows the checksum, and the checksum covers the same. `follows` is the number after
//! the last event of the segment before: numbers from there to `first` were never given.
//!
//! | kind | payload | number |
//! |---|---|---|
//! | 0 | an event, as received | its own |
//! | 1 | resume positions, `[["source","session",epoch,seq],…]` | of the next event; takes none |
//!
//! # Invariants
//! - Numbers only grow. A number is given again only when its append was never acknowledged.
//! - Only the last segment is written to, by one writer, at its end. The others never change.
//! - An event and its position are one record, so that neither is there without the other. A positions record
//!   at the head of a segment says what the segments before it said, so that these can be removed.
//! - After a failed append the segment is cut back before the next one. Where that can't be done, or where a
//!   sync has failed, a new segment is begun: a sync that is tried again may claim what it hasn't done. What
//!   the old one holds from the new one's first number on is ignored.
//! - No payload holds a zero byte, and numbers are below 2^56, so that nothing in a payload passes for the
//!   start of a record, whoever wrote it.
//! - Segments are removed from the front, whole, when every hold has passed them.
//!
//! # At the start
//! Segments are told by their headers; only the last is read whole, and its torn end cut off. As many events
//! as the dedupe memory takes are read back from the end. Damage is found by reading: what follows it is still
//! given, what is missing is counted and logged once, and the file is kept as `*.damaged-<n>` when its turn
//! to be removed comes.
//!
//! | question | file |
//! |---|---|
//! | what is in a file? | `format` |
//! | how is damage passed? | `scan` |
//! | what is done at the start? | `recover` |
//! | what is taken, and when is it full? | `core` |
//! | which files may go? | `segments` |
//! | how is it written, and what when that fails? | `writer`, `log` |
//! | how is it read? | `reader` |

mod core;
mod files;
mod format;
mod holds;
mod log;
mod metrics;
mod positions;
mod reader;
mod recent;
mod recover;
mod scan;
mod segments;
mod shared;
#[cfg(test)]
mod tests;
mod trouble;
mod waiters;
mod writer;

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use holds::Hold;
pub use metrics::SpoolMetrics;
pub use positions::{MAX_NAMES, MAX_SESSIONS, ResumePosition};
pub use reader::{Batch, Reader};

use self::core::Entry;
use crate::aep::Event;
use crate::export::state_dir::{StateDir, StateDirError};
use shared::Shared;
use trouble::{Opens, refused};

/// What an acknowledged append survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SpoolSync {
    /// The death of the process.
    Write,
    /// The death of the machine too, as far as its disk keeps what it has synced.
    Fsync,
    /// Neither: events are held in memory only.
    Off,
}

/// How a spool works and what it may take.
#[derive(Debug, Clone)]
pub struct SpoolConfig {
    /// What an acknowledged append survives.
    pub sync: SpoolSync,
    /// The most bytes of all files, history and damaged ones included; of events, in memory. An append of
    /// more than half of it is never taken.
    pub max_bytes: u64,
    /// How many bytes of segments that are done with are kept as history, as long as the space isn't needed.
    pub keep_bytes: u64,
    /// How many bytes of the last events are kept in memory, for readers that keep up.
    pub recent_bytes: usize,
    /// How many of the last events duplicates are told by.
    pub dedupe: NonZeroUsize,
    /// Whether positions are saved at the head of each segment, so that they outlast the segments before.
    pub keeps_positions: bool,
}

impl SpoolConfig {
    /// How long a segment becomes, in bytes, unless a single event is longer.
    fn segment_size(&self) -> u64 {
        /// The longest segment, in bytes.
        const LONGEST: u64 = 16 << 20;
        (self.max_bytes / 8).min(LONGEST)
    }

    /// The most that the head of a segment takes, in bytes.
    fn head_size(&self) -> u64 {
        scan::wide(format::HEADER.saturating_add(format::RECORD).saturating_add(self.snapshot_size()))
    }

    /// The most that the positions at the head of a segment take, in bytes.
    fn snapshot_size(&self) -> usize {
        if self.keeps_positions { usize::try_from(self.segment_size() / 8).unwrap_or(usize::MAX) } else { 0 }
    }
}

/// Why a spool can't be opened. What its files hold is never a reason.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The state directory can't be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// Its folder can't be listed.
    #[error("spool folder {path:?} can't be read")]
    List {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// What became of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Appended {
    /// Events that are new.
    pub new: usize,
    /// Events that were there already.
    pub duplicates: usize,
}

/// Nothing of an append was acknowledged; it may be tried again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the spool takes no events now: {reason}")]
pub struct Unavailable {
    /// Why.
    pub reason: UnavailableReason,
    /// When it is worth trying again, at the earliest.
    pub retry_after: Duration,
}

/// Why a spool takes no events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnavailableReason {
    /// Its bound is reached by events that aren't done with, or the disk is full.
    Full,
    /// The append is more than half of all the space there is. Trying again is no use.
    TooLarge,
    /// Too many events wait for the disk.
    Behind,
    /// The disk fails; the system's words for it.
    Failing(Arc<str>),
    /// It was closed.
    Closed,
}

impl fmt::Display for UnavailableReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("it is full"),
            Self::TooLarge => f.write_str("they are more than half of its space"),
            Self::Behind => f.write_str("too many wait for the disk"),
            Self::Failing(why) => write!(f, "the disk fails: {why}"),
            Self::Closed => f.write_str("it is closed"),
        }
    }
}

/// Whether a spool takes events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpoolState {
    /// It does.
    Writable,
    /// Its bound is reached by events that aren't done with, or the disk is full.
    Full,
    /// The disk fails; the system's words for it.
    Failing(Arc<str>),
}

/// A durable queue of events. Clones share it.
#[derive(Clone)]
pub struct Spool(Arc<Shared>);

impl fmt::Debug for Spool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spool")
            .field("first", &self.first())
            .field("end", &self.end())
            .finish_non_exhaustive()
    }
}

impl Spool {
    /// Opens the spool in a state directory that nothing else uses. Blocks.
    ///
    /// # Errors
    /// When the directory can't be created, written to or locked, or the spool's folder can't be listed.
    pub fn at(
        path: &Path,
        config: SpoolConfig,
        floor: u64,
        metrics: SpoolMetrics,
    ) -> Result<Self, SpoolError> {
        Self::open(Some(Arc::new(StateDir::open(path)?)), config, floor, metrics)
    }

    /// Opens the spool of a state directory; in memory without one, or with [`SpoolSync::Off`]. Blocks. No new
    /// event gets a number below `floor`. Nothing is freed before the first append or a hold's advance: whoever
    /// still needs what is there takes a [`hold`](Self::hold) before.
    ///
    /// # Errors
    /// When the spool's folder can't be listed. Damaged files are no error.
    pub(crate) fn open(
        dir: Option<Arc<StateDir>>,
        config: SpoolConfig,
        floor: u64,
        metrics: SpoolMetrics,
    ) -> Result<Self, SpoolError> {
        let dir = dir.filter(|_| config.sync != SpoolSync::Off);
        let path = dir.as_ref().map(|dir| dir.file("spool"));
        let files = dir.map(|dir| Arc::new(files::Disk::new(dir)) as Arc<dyn files::Files>);
        Self::open_files(files, config, floor, metrics)
            .map_err(|source| SpoolError::List { path: path.unwrap_or_default(), source })
    }

    fn open_files(
        files: Option<Arc<dyn files::Files>>,
        config: SpoolConfig,
        floor: u64,
        metrics: SpoolMetrics,
    ) -> std::io::Result<Self> {
        Ok(Self(Arc::new(recover::open(files, config, floor, metrics)?)))
    }

    /// Appends events that aren't known yet, in order, each under the next number. Returns when all of them,
    /// known ones included, are committed.
    ///
    /// # Errors
    /// When they can't be kept now. All or some of them may have become committed all the same, if the failure
    /// came after a part of them was written; they are known then when the append is tried again.
    ///
    /// # Cancel safety
    /// When it is dropped, the events may be appended or not.
    pub async fn append(&self, events: Vec<Event>) -> Result<Appended, Unavailable> {
        let entries = events
            .into_iter()
            .map(|event| Entry { fingerprint: self.0.key.event(event.key()), event })
            .collect();
        let (appended, waiting) = self.0.admit(entries, Instant::now())?;
        if let Some(outcome) = waiting {
            // Whoever holds the other end always answers.
            outcome.await.unwrap_or_else(|_| Err(refused(UnavailableReason::Closed)))?;
        }
        self.0.metrics.duplicates.inc_by(scan::wide(appended.duplicates));
        Ok(appended)
    }

    /// Reads from a number on, or from the oldest event held when that is later.
    #[must_use]
    pub fn reader(&self, from: u64) -> Reader {
        Reader::new(Arc::clone(&self.0), from)
    }

    /// Holds the events from a number on, for as long as the spool is open.
    #[must_use]
    pub fn hold(&self, from: u64) -> Hold {
        Hold::new(Arc::clone(&self.0), from)
    }

    /// The number of the oldest event held; [`end`](Self::end) when there is none.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.0.core.lock().first()
    }

    /// The number of the event that is committed next.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.0.core.lock().end
    }

    /// The highest position of each session of everything that was ever appended, the least recently active
    /// session first; of the last [`MAX_SESSIONS`] sessions.
    #[must_use]
    pub fn positions(&self) -> Vec<ResumePosition> {
        self.0.positions.lock().iter().cloned().collect()
    }

    /// Whether it takes events, now and whenever that changes.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<SpoolState> {
        self.0.state.subscribe()
    }

    /// Returns when an append is worth trying again: never, once the spool is closed. While the disk fails, this
    /// tries it.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is lost when it is dropped.
    pub async fn room(&self) {
        self.opens().await;
        if self.0.core.lock().closed {
            // Whoever tries again and again would keep the thread.
            std::future::pending().await
        }
    }

    /// Returns when an append is worth trying again, or the spool is closed.
    async fn opens(&self) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // A change after this line isn't missed.
            changed.as_mut().enable();
            let opens = self.0.core.lock().opens();
            match opens {
                Opens::Now => return,
                Opens::WithAChange => changed.await,
                Opens::WithAWriteFrom(at) => {
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep_until(at) => self.0.probe().await,
                    }
                }
            }
        }
    }

    /// Tries the disk again whenever it fails, so that [`state`](Self::state) recovers though nobody appends.
    /// Returns when the spool is closed.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is lost when it is dropped.
    pub async fn tend(&self) {
        loop {
            self.opens().await;
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let (closed, opens) = {
                let core = self.0.core.lock();
                (core.closed, core.opens())
            };
            match opens {
                _ if closed => return,
                Opens::Now => changed.await,
                // It failed just now.
                Opens::WithAChange | Opens::WithAWriteFrom(_) => {}
            }
        }
    }

    /// Takes no more events, and returns when those that were taken are committed or have failed. Readers go
    /// on.
    ///
    /// # Cancel safety
    /// Cancel safe: it stays closed, and what is under way goes on.
    pub async fn close(&self) {
        self.0.close();
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.0.core.lock().is_idle() {
                return;
            }
            changed.await;
        }
    }
}
