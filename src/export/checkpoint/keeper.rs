//! Keeps the checkpoint up to date on disk. Delivery waits for it only as far as it must for a crash to forget
//! no more acknowledgements than deliveries may be under way, and not at all while the disk fails.

use std::num::NonZeroUsize;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::store::{Store, encode};
use super::{Checkpoint, Record};
use crate::export::metrics::Metrics;
use crate::export::retry::RetryPolicy;
use crate::export::seen::FingerprintKey;
use crate::export::state_dir::StateDir;

/// How many records the journal takes, at least, before a snapshot replaces it.
const MIN_JOURNAL: usize = 10_000;
/// How many records wait for the disk. Beyond it they are left to the next snapshot.
const MAX_UNWRITTEN: usize = 10_000;

/// The checkpoint and its files. One write is under way at a time; what is recorded meanwhile goes with the
/// next one, in one write.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) checkpoint: Checkpoint,
    files: Files,
    /// Encoded records that aren't written yet.
    unwritten: Vec<u8>,
    unwritten_count: usize,
    /// Records in the write that is under way.
    writing_count: usize,
    /// Records in the journal.
    journal_count: usize,
    journal_bound: usize,
    /// Records were left to the next snapshot.
    needs_snapshot: bool,
    /// Failed writes since the last one that worked, and when the next is due.
    failures: u32,
    retry_at: Option<Instant>,
    metrics: Metrics,
}

#[derive(Debug)]
enum Files {
    /// Nothing is kept.
    None,
    Idle(Store),
    Writing(JoinHandle<Written>),
}

#[derive(Debug)]
struct Written {
    store: Store,
    job: Job,
    result: std::io::Result<()>,
}

#[derive(Debug)]
struct Job {
    /// The records that are to be durable after it.
    records: Vec<u8>,
    count: usize,
    /// A snapshot that holds them, to be written instead of them.
    snapshot: Option<Vec<u8>>,
}

impl Keeper {
    /// Reads the checkpoint in `dir`; without one it is kept in memory only. `bound` is how many events are
    /// remembered.
    pub(crate) fn open(dir: Option<Arc<StateDir>>, bound: NonZeroUsize, metrics: Metrics) -> Self {
        let mut keeper = Self {
            checkpoint: Checkpoint::new(bound, FingerprintKey::random()),
            files: Files::None,
            unwritten: Vec::new(),
            unwritten_count: 0,
            writing_count: 0,
            journal_count: 0,
            journal_bound: bound.get().max(MIN_JOURNAL),
            needs_snapshot: false,
            failures: 0,
            retry_at: None,
            metrics,
        };
        if let Some(dir) = dir {
            let loaded = Store::open(dir, bound);
            keeper.checkpoint = loaded.checkpoint;
            keeper.journal_count = loaded.records;
            keeper.metrics.damaged_files.inc_by(loaded.damaged);
            if let Some(error) = loaded.write_error {
                keeper.failed(&error, None);
            }
            keeper.files = Files::Idle(loaded.store);
        }
        keeper
    }

    /// Takes in what was handled.
    pub(crate) fn record(&mut self, record: Record) {
        if !matches!(self.files, Files::None) {
            encode(&record, &mut self.unwritten);
            self.unwritten_count = self.unwritten_count.saturating_add(1);
            self.bound_unwritten();
        }
        self.checkpoint.apply(record);
    }

    fn bound_unwritten(&mut self) {
        if self.unwritten_count > MAX_UNWRITTEN {
            (self.unwritten, self.unwritten_count) = (Vec::new(), 0);
            self.needs_snapshot = true;
        }
    }

    /// How many acknowledgements a crash would forget now. While the disk can't be written to, none are counted:
    /// nothing waits for it then.
    pub(crate) fn in_doubt(&self) -> usize {
        if self.failures > 0 { 0 } else { self.unwritten_count.saturating_add(self.writing_count) }
    }

    /// Starts the next write when there is something to write and no write is under way.
    pub(crate) fn start(&mut self, now: Instant) {
        if self.retry_at.is_none_or(|at| at <= now) {
            self.start_with(Ending::Continue);
        }
    }

    fn start_with(&mut self, ending: Ending) {
        let mut store = match std::mem::replace(&mut self.files, Files::None) {
            Files::Idle(store) => store,
            other => {
                self.files = other;
                return;
            }
        };
        let snapshot = ending == Ending::Final
            || self.needs_snapshot
            || !store.takes_records()
            || self.journal_count >= self.journal_bound;
        if !snapshot && self.unwritten.is_empty() {
            self.files = Files::Idle(store);
            return;
        }
        let mut job = Job {
            records: std::mem::take(&mut self.unwritten),
            count: std::mem::take(&mut self.unwritten_count),
            snapshot: snapshot.then(|| store.snapshot(&self.checkpoint)),
        };
        self.writing_count = job.count;
        self.files = Files::Writing(tokio::task::spawn_blocking(move || {
            let result = match job.snapshot.take() {
                Some(bytes) => {
                    let result = store.replace_by(bytes);
                    // Says which kind of write it was.
                    job.snapshot = Some(Vec::new());
                    result
                }
                None => store.append(&job.records),
            };
            Written { store, job, result }
        }));
    }

    /// When a failed write is tried again.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        match self.files {
            Files::Idle(_) => self.retry_at,
            Files::None | Files::Writing(_) => None,
        }
    }

    /// Waits for the write that is under way; for ever when there is none.
    ///
    /// # Cancel safety
    /// Cancel safe: the write goes on, and is waited for by the next call.
    pub(crate) async fn finished(&mut self) {
        let Files::Writing(task) = &mut self.files else {
            return std::future::pending().await;
        };
        let Ok(Written { store, job, result }) = task.await else {
            // The runtime is going down.
            self.files = Files::None;
            return;
        };
        self.files = Files::Idle(store);
        self.writing_count = 0;
        match result {
            Ok(()) => {
                if job.snapshot.is_some() {
                    self.journal_count = 0;
                    self.needs_snapshot = false;
                } else {
                    self.journal_count = self.journal_count.saturating_add(job.count);
                }
                self.retry_at = None;
                if std::mem::take(&mut self.failures) > 0 {
                    tracing::info!("checkpoint can be written again");
                }
            }
            Err(error) => {
                let since = std::mem::replace(&mut self.unwritten, job.records);
                self.unwritten.extend_from_slice(&since);
                self.unwritten_count = self.unwritten_count.saturating_add(job.count);
                self.bound_unwritten();
                self.failed(&error, Some(Instant::now()));
            }
        }
    }

    fn failed(&mut self, error: &std::io::Error, now: Option<Instant>) {
        self.metrics.checkpoint_failures.inc();
        if self.failures == 0 {
            tracing::error!(
                %error,
                "checkpoint can't be written; delivery goes on, and a restart would deliver events twice"
            );
        }
        self.failures = self.failures.saturating_add(1);
        let wait = RetryPolicy::default().ceiling(self.failures);
        self.retry_at = now.and_then(|now| now.checked_add(wait));
    }

    /// Waits for the write that is under way, and writes a last snapshot.
    pub(crate) async fn close(&mut self) {
        if matches!(self.files, Files::Writing(_)) {
            self.finished().await;
        }
        self.start_with(Ending::Final);
        if matches!(self.files, Files::Writing(_)) {
            self.finished().await;
        }
    }
}

/// Whether a write is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Continue,
    Final,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::seen::Fingerprint;

    fn open(path: &std::path::Path) -> (Keeper, Metrics) {
        let (dir, metrics) = (StateDir::open(path).unwrap(), Metrics::default());
        (Keeper::open(Some(Arc::new(dir)), NonZeroUsize::new(100_000).unwrap(), metrics.clone()), metrics)
    }

    fn record(event: u128) -> Record {
        Record { event: Fingerprint(event), position: None }
    }

    #[tokio::test]
    async fn what_was_written_is_there_after_a_kill() {
        let temp = tempfile::tempdir().unwrap();
        let (mut keeper, _) = open(temp.path());
        for n in 0..1000 {
            keeper.record(record(n));
            keeper.start(Instant::now());
        }
        // One write for the first record, one for all the others.
        keeper.finished().await;
        keeper.start(Instant::now());
        keeper.finished().await;
        drop(keeper);
        let (mut keeper, metrics) = open(temp.path());
        assert!((0..1000).all(|n| keeper.checkpoint.seen.recall(Fingerprint(n))));
        assert_eq!((keeper.journal_count, metrics.damaged_files.get()), (1000, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failing_disk_never_loses_records_and_heals() {
        let temp = tempfile::tempdir().unwrap();
        let (mut keeper, metrics) = open(temp.path());
        keeper.needs_snapshot = true;
        let obstacle = temp.path().join("checkpoint.new");
        std::fs::create_dir(&obstacle).unwrap();
        keeper.record(record(1));
        keeper.start(Instant::now());
        keeper.finished().await;
        assert_eq!((metrics.checkpoint_failures.get(), keeper.unwritten_count), (1, 1));
        keeper.start(Instant::now());
        assert!(matches!(keeper.files, Files::Idle(_)), "waits before the next try");
        for n in 2..=30_000 {
            keeper.record(record(n));
        }
        assert!(keeper.unwritten_count <= MAX_UNWRITTEN, "bounded");
        std::fs::remove_dir(&obstacle).unwrap();
        tokio::time::sleep_until(keeper.wakes_at().unwrap()).await;
        keeper.start(Instant::now());
        keeper.finished().await;
        drop(keeper);
        let (mut keeper, _) = open(temp.path());
        assert!((1..=30_000).all(|n| keeper.checkpoint.seen.recall(Fingerprint(n))));
    }

    #[tokio::test]
    async fn without_a_directory_nothing_is_written() {
        let mut keeper = Keeper::open(None, NonZeroUsize::MIN, Metrics::default());
        keeper.record(record(1));
        keeper.start(Instant::now());
        keeper.close().await;
        assert!(keeper.unwritten.is_empty());
        assert!(keeper.checkpoint.seen.recall(Fingerprint(1)));
    }
}
