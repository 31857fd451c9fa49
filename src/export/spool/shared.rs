//! What all handles of a spool share, and how files are removed behind the holds.

use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use super::core::{Core, Entry};
use super::files::Files;
use super::log::Log;
use super::positions::Positions;
use super::scan::wide;
use super::segments::{Doomed, Fate};
use super::waiters::Outcome;
use super::writer::Writer;
use super::{Appended, SpoolConfig, SpoolMetrics, SpoolState, Unavailable};
use crate::export::seen::FingerprintKey;

/// One spool.
pub(super) struct Shared {
    pub(super) config: SpoolConfig,
    pub(super) metrics: SpoolMetrics,
    /// `None` in memory.
    pub(super) files: Option<Arc<dyn Files>>,
    pub(super) key: FingerprintKey,
    /// The state. Held without I/O and without await.
    pub(super) core: Mutex<Core>,
    /// Positions of what is committed; changed by the writer just before that is said. When both locks are
    /// held, this one was taken last.
    pub(super) positions: Mutex<Positions>,
    /// The number that is committed next.
    pub(super) committed: watch::Sender<u64>,
    pub(super) state: watch::Sender<SpoolState>,
    /// Told whenever something was committed, failed or removed.
    pub(super) changed: Notify,
    /// Told when a file is gone, for the writer.
    removed: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        config: SpoolConfig,
        metrics: SpoolMetrics,
        files: Option<Arc<dyn Files>>,
        core: Core,
        positions: Positions,
    ) -> Self {
        let shared = Self {
            config,
            metrics,
            files,
            key: core.seen.key(),
            committed: watch::Sender::new(core.end),
            core: Mutex::new(core),
            positions: Mutex::new(positions),
            state: watch::Sender::new(SpoolState::Writable),
            changed: Notify::new(),
            removed: Condvar::new(),
        };
        shared.publish(&shared.core.lock());
        shared
    }

    /// Takes events in and starts the writer: what was new, and what tells when all are committed.
    pub(super) fn admit(
        self: &Arc<Self>,
        entries: Vec<Entry>,
        now: Instant,
    ) -> Result<(Appended, Option<oneshot::Receiver<Outcome>>), Unavailable> {
        let mut core = self.core.lock();
        let admitted = core.admit(entries, &self.config, now);
        if admitted.is_err() {
            self.metrics.refused.inc();
        }
        if core.has_log {
            self.publish(&core);
            let log = if core.has_task() { core.log.take() } else { None };
            drop(core);
            self.start_writer(log);
            return admitted;
        }
        let (events, told) = core.commit_all(&self.config);
        let bytes = events.iter().map(|event| wide(event.as_bytes().len())).sum();
        {
            let mut positions = self.positions.lock();
            events.iter().for_each(|event| positions.reach(event));
        }
        self.metrics.events.inc_by(wide(events.len()));
        self.metrics.bytes.inc_by(bytes);
        self.publish(&core);
        drop(core);
        told.tell(&Ok(()));
        admitted
    }

    /// Tries a write, to see whether it works.
    pub(super) async fn probe(self: &Arc<Self>) {
        let (outcome, log) = {
            let mut core = self.core.lock();
            (core.probe(), core.log.take())
        };
        self.start_writer(log);
        // What it says is in the state.
        drop(outcome.await);
    }

    /// Starts the writer, when it was idle. Not under the lock: while the runtime is going down, the writer is
    /// dropped at once.
    fn start_writer(self: &Arc<Self>, log: Option<Box<Log>>) {
        if let Some(log) = log {
            let writer = Writer::new(Arc::clone(self), log);
            drop(tokio::task::spawn_blocking(move || writer.run()));
        }
    }

    /// Says what has changed.
    pub(super) fn publish(&self, core: &Core) {
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.metrics.held_bytes.set(gauge(core.held_bytes()));
        self.metrics.held_events.set(gauge(core.end.saturating_sub(core.first())));
        self.metrics.waiting_bytes.set(gauge(core.waiting_bytes));
        self.committed.send_if_modified(|end| std::mem::replace(end, core.end) != core.end);
        let state = core.state();
        self.state.send_if_modified(|known| {
            let changed = *known != state;
            if changed {
                match &state {
                    SpoolState::Writable => tracing::info!("spool takes events again"),
                    SpoolState::Full => tracing::warn!("spool is full and takes no events"),
                    SpoolState::Failing(error) => {
                        tracing::error!(%error, "spool can't be written to and takes no events");
                    }
                }
                known.clone_from(&state);
            }
            changed
        });
        self.changed.notify_waiters();
    }

    /// Moves a hold on, and frees what that releases.
    pub(super) fn advance(self: &Arc<Self>, hold: u64, number: u64) {
        {
            let mut core = self.core.lock();
            if !core.holds.advance(hold, number) {
                return;
            }
            core.free(&self.config);
            self.publish(&core);
        }
        self.remove_files();
    }

    pub(super) fn close(&self) {
        let mut core = self.core.lock();
        core.closed = true;
        self.publish(&core);
    }

    /// Starts removing what was given up. Outside of a runtime that is left to the next time.
    pub(super) fn remove_files(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        {
            let mut core = self.core.lock();
            if core.removes || !core.segments.any_doomed() {
                return;
            }
            core.removes = true;
        }
        let shared = Arc::clone(self);
        drop(runtime.spawn_blocking(move || {
            loop {
                let removal = shared.remove_next();
                let mut core = shared.core.lock();
                // What was given up meanwhile has found this job running.
                if removal == Some(Removal::Failed) || !core.segments.any_doomed() {
                    core.removes = false;
                    shared.publish(&core);
                    return;
                }
            }
        }));
    }

    /// Removes the next file that was given up. `None` when there is none. Blocks.
    fn remove_next(&self) -> Option<Removal> {
        let (doomed, aside) = {
            let mut core = self.core.lock();
            let doomed = core.segments.next_doomed()?;
            core.removing = core.removing.saturating_add(1);
            (doomed, core.segments.next_aside())
        };
        let aside_name = format!("{}.damaged-{aside}", doomed.name);
        let result = self.files.as_ref().map_or(Ok(()), |files| match doomed.fate {
            Fate::Remove | Fate::Forget => files.remove(&doomed.name),
            Fate::SetAside => files.rename(&doomed.name, &aside_name),
        });
        let mut core = self.core.lock();
        core.removing = core.removing.saturating_sub(1);
        let removal = match result {
            Ok(()) if doomed.fate == Fate::SetAside => {
                core.segments.put_aside(aside_name, aside, doomed.size);
                Removal::Done
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                if !std::mem::replace(&mut core.removal_fails, true) {
                    tracing::warn!(file = doomed.name, %error, "spool file can't be removed; tried again later");
                }
                core.segments.not_removed(doomed);
                Removal::Failed
            }
            _ => {
                self.gone(&mut core, &doomed);
                Removal::Done
            }
        };
        core.free(&self.config);
        self.publish(&core);
        self.removed.notify_all();
        Some(removal)
    }

    fn gone(&self, core: &mut Core, doomed: &Doomed) {
        core.removal_fails = false;
        core.segments.removed(doomed);
        if doomed.fate == Fate::Remove {
            self.metrics.freed_segments.inc();
        }
    }

    /// Makes room for so many bytes within the bound, by giving up history: whether there is. Blocks.
    pub(super) fn make_room(&self, bytes: u64) -> bool {
        let most = self.config.max_bytes.saturating_sub(bytes);
        loop {
            {
                let mut core = self.core.lock();
                if core.segments.size() <= most {
                    return true;
                }
                let done = core.holds.done();
                core.segments.give_up(done, u64::MAX, most);
                if !core.segments.any_doomed() && !self.wait_for_removal(&mut core) {
                    return false;
                }
            }
            if self.remove_next() == Some(Removal::Failed) {
                return false;
            }
        }
    }

    /// Gives up one file, if there is one that nobody needs. Blocks.
    pub(super) fn free_one(&self) -> bool {
        {
            let mut core = self.core.lock();
            if !core.segments.any_doomed() {
                let (done, size) = (core.holds.done(), core.segments.size());
                core.segments.give_up(done, u64::MAX, size.saturating_sub(1));
            }
            if !core.segments.any_doomed() {
                return self.wait_for_removal(&mut core);
            }
        }
        self.remove_next() == Some(Removal::Done)
    }

    /// Waits for a file that another thread removes: whether there was one.
    fn wait_for_removal(&self, core: &mut parking_lot::MutexGuard<'_, Core>) -> bool {
        if core.removing == 0 {
            return false;
        }
        self.removed.wait(core);
        true
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Removal {
    Done,
    Failed,
}
