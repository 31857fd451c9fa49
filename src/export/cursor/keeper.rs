//! Keeps a sink's cursor up to date on disk. Delivery waits for it only as far as it must for a crash to forget no
//! more acknowledgements than deliveries may be under way, and not at all while the disk fails.

use std::ops::Range;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Cursor, CursorFile};
use crate::export::metrics::SinkMetrics;
use crate::export::retry::RetryPolicy;

/// The cursor and its file. One write is under way at a time; what is done meanwhile goes with the next one.
#[derive(Debug)]
pub(crate) struct Keeper {
    cursor: Cursor,
    /// Up to where everything is done with and written down, or can't be written down for now.
    settled: u64,
    files: Files,
    /// The cursor has changed since the last write began.
    changed: bool,
    /// Deliveries done since then.
    unwritten: usize,
    /// Deliveries in the write that is under way.
    writing: usize,
    /// Failed writes since the last one that worked, and when the next is due.
    failures: u32,
    retry_at: Option<Instant>,
    metrics: SinkMetrics,
}

#[derive(Debug)]
enum Files {
    /// Nothing is kept.
    None,
    Idle(CursorFile),
    Writing(JoinHandle<(CursorFile, Cursor, std::io::Result<()>)>),
}

impl Keeper {
    /// Keeps `cursor` in `file`; without one, in memory only.
    pub(crate) fn new(cursor: Cursor, file: Option<CursorFile>, metrics: SinkMetrics) -> Self {
        Self {
            settled: cursor.next(),
            cursor,
            changed: file.is_some(),
            files: file.map_or(Files::None, Files::Idle),
            unwritten: 0,
            writing: 0,
            failures: 0,
            retry_at: None,
            metrics,
        }
    }

    pub(crate) fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Up to where the spool may forget.
    pub(crate) fn settled(&self) -> u64 {
        self.settled
    }

    /// Deliveries that are done with.
    pub(crate) fn delivered(&mut self, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            self.skip(number..number.saturating_add(1));
            if !matches!(self.files, Files::None) {
                self.unwritten = self.unwritten.saturating_add(1);
            }
        }
    }

    /// Events that need no delivery: looked at again after a crash.
    pub(crate) fn skip(&mut self, numbers: Range<u64>) {
        self.cursor.done(numbers);
        self.changed = true;
        if matches!(self.files, Files::None) {
            self.settled = self.cursor.next();
        }
    }

    /// How many acknowledgements a crash would forget now. While the disk can't be written to, none are counted:
    /// nothing waits for it then.
    pub(crate) fn in_doubt(&self) -> usize {
        if self.failures > 0 { 0 } else { self.unwritten.saturating_add(self.writing) }
    }

    /// Starts the next write when there is something to write and no write is under way.
    pub(crate) fn start(&mut self, now: Instant) {
        if self.changed && self.retry_at.is_none_or(|at| at <= now) {
            self.write();
        }
    }

    fn write(&mut self) {
        let mut file = match std::mem::replace(&mut self.files, Files::None) {
            Files::Idle(file) => file,
            other => {
                self.files = other;
                return;
            }
        };
        self.changed = false;
        self.writing = std::mem::take(&mut self.unwritten);
        let cursor = self.cursor.clone();
        self.files = Files::Writing(tokio::task::spawn_blocking(move || {
            let result = file.write(&cursor);
            (file, cursor, result)
        }));
    }

    /// When a failed write is tried again.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        self.retry_at.filter(|_| matches!(self.files, Files::Idle(_)))
    }

    /// Waits for the write that is under way; for ever when there is none.
    ///
    /// # Cancel safety
    /// Cancel safe: the write goes on, and is waited for by the next call.
    pub(crate) async fn finished(&mut self) {
        let Files::Writing(task) = &mut self.files else {
            return std::future::pending().await;
        };
        let Ok((file, written, result)) = task.await else {
            // The runtime is going down.
            self.files = Files::None;
            return;
        };
        self.files = Files::Idle(file);
        match result {
            Ok(()) => {
                self.settled = written.next();
                self.writing = 0;
                self.retry_at = None;
                if std::mem::take(&mut self.failures) > 0 {
                    tracing::info!("the sink's cursor can be written again");
                }
            }
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &std::io::Error) {
        if self.failures == 0 {
            tracing::error!(
                %error,
                "the sink's cursor can't be written; delivery goes on, and a crash now would repeat deliveries"
            );
        }
        self.metrics.cursor_failures.inc();
        self.failures = self.failures.saturating_add(1);
        self.unwritten = self.unwritten.saturating_add(std::mem::take(&mut self.writing));
        self.changed = true;
        // What everyone is done with may be just what fills the disk.
        self.settled = self.cursor.next();
        let wait = RetryPolicy::default().ceiling(self.failures);
        self.retry_at = Instant::now().checked_add(wait);
    }

    /// Writes what isn't written yet, if it can be.
    pub(crate) async fn close(&mut self) {
        if matches!(self.files, Files::Writing(_)) {
            self.finished().await;
        }
        if self.changed {
            self.write();
            if matches!(self.files, Files::Writing(_)) {
                self.finished().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::export::state_dir::StateDir;

    fn open(dir: &Arc<StateDir>) -> Keeper {
        let found = CursorFile::open(Arc::clone(dir), "s").unwrap();
        let cursor = found.cursor.map_or(Cursor::at(0), Result::unwrap);
        Keeper::new(cursor, Some(found.file), SinkMetrics::default())
    }

    #[tokio::test]
    async fn what_is_delivered_counts_as_under_way_until_it_is_written() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Arc::new(StateDir::open(temp.path()).unwrap());
        let mut keeper = open(&dir);
        keeper.delivered([0, 2].into_iter());
        assert_eq!((keeper.in_doubt(), keeper.settled()), (2, 0));
        keeper.start(Instant::now());
        keeper.delivered([1].into_iter());
        assert_eq!(keeper.in_doubt(), 3);
        keeper.finished().await;
        assert_eq!((keeper.in_doubt(), keeper.settled()), (1, 1));
        keeper.close().await;
        assert_eq!((keeper.in_doubt(), keeper.settled()), (0, 3));
        drop(keeper);
        assert_eq!(open(&dir).cursor(), &Cursor::at(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_fails_holds_nothing_up_and_is_tried_again() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Arc::new(StateDir::open(temp.path()).unwrap());
        let mut keeper = open(&dir);
        fs::create_dir(dir.file("sinks/s.cursor.new")).unwrap();
        keeper.delivered([0].into_iter());
        keeper.start(Instant::now());
        keeper.finished().await;
        assert_eq!((keeper.in_doubt(), keeper.settled()), (0, 1), "space may be freed");
        let again = keeper.wakes_at().unwrap();
        keeper.start(Instant::now());
        assert_eq!(keeper.wakes_at(), Some(again), "not before its time");
        fs::remove_dir(dir.file("sinks/s.cursor.new")).unwrap();
        keeper.start(again);
        keeper.finished().await;
        assert_eq!(keeper.wakes_at(), None);
        drop(keeper);
        assert_eq!(open(&dir).cursor(), &Cursor::at(1));
    }

    #[test]
    fn without_a_file_everything_is_settled_at_once() {
        let mut keeper = Keeper::new(Cursor::at(0), None, SinkMetrics::default());
        keeper.delivered([0].into_iter());
        assert_eq!((keeper.in_doubt(), keeper.settled()), (0, 1));
    }
}
