//! The export as a service: it is opened, and runs until what feeds it ends or it is told to stop.
//!
//! Each sink runs on a task of its own, which reads the spool, attempts side by side, and has at most one write of
//! its cursor and one of dead letters under way, on the runtime's threads for blocking work. Whatever waits is
//! bounded: by bytes in the spool, by events and bytes between the spool and a sink.

mod outlet;
mod run;

use std::sync::Arc;

use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use self::outlet::{Outlet, Place};
use self::run::Run;
use super::breaker::SinkStatus;
use super::config::{ExportConfig, SinkName};
use super::cursor;
use super::feed::{Feed, FeedError};
use super::intake::Intake;
use super::metrics::Metrics;
use super::sink::{AnySink, BuildError, Reason};
use super::spool::{Reader, ResumePosition, Spool, SpoolError, SpoolSync, UnavailableReason};
use super::state_dir::StateDir;
use crate::aep::{Event, Filter, Registry};

pub use super::state_dir::StateDirError;

/// What an export came to, over all sinks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Events that a sink acknowledged.
    pub delivered: u64,
    /// Events that weren't taken since they were known already.
    pub duplicates: u64,
    /// Events that became dead letters.
    pub dead_letters: u64,
    /// Events that a sink wasn't done with when the export was stopped. With a state directory they are delivered
    /// after a restart.
    pub unhandled: u64,
}

/// Why an export can't start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The state directory can't be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The spool can't be opened.
    #[error(transparent)]
    Spool(#[from] SpoolError),
    /// A sink's cursor can't be kept.
    #[error("the cursor of sink {sink} can't be kept: {error}")]
    Cursor {
        /// The sink.
        sink: SinkName,
        /// Why.
        error: std::io::Error,
    },
    /// A sink can't be built.
    #[error("sink {sink}: {error}")]
    Sink {
        /// The sink.
        sink: SinkName,
        /// Why.
        #[source]
        error: BuildError,
    },
    /// The feed failed. What it gave before was handled.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// A sink went away for good.
    #[error("the sink is closed: {reason}")]
    Closed {
        /// Why.
        reason: Reason,
        /// What was done until then.
        summary: Summary,
    },
    /// A sink's task ended by itself, which it never should.
    #[error("a sink's task has failed")]
    Task(#[source] JoinError),
}

/// What ends a run.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// Cancelled once nothing more comes into the spool: the sinks deliver the rest.
    pub finish: CancellationToken,
    /// Cancelled by then when what a sink doesn't take is to be left on disk, where the spool is: no attempt is
    /// repeated, and a paused sink isn't waited for. It goes out after the next start.
    pub leave: CancellationToken,
    /// Cancelled when the rest is to be left: nothing is begun any more.
    pub give_up: CancellationToken,
}

/// An export that is ready to run.
#[derive(Debug)]
pub struct Export {
    spool: Spool,
    outlets: Vec<Outlet>,
    wanted: Arc<[Filter]>,
    metrics: Metrics,
}

impl Ends {
    /// Gives up when `give_up` is cancelled.
    #[must_use]
    pub fn giving_up_at(give_up: CancellationToken) -> Self {
        Self { give_up, ..Self::default() }
    }
}

impl Export {
    /// Takes the state directory, opens the spool, reads the cursors and builds the sinks. Blocks on the file system.
    ///
    /// # Errors
    /// When the state directory can't be created or written to, or is in use, or a sink can't be built. Damaged
    /// files are no error.
    pub fn open(
        config: &ExportConfig,
        registry: &Arc<Registry>,
        metrics: Metrics,
    ) -> Result<Self, ExportError> {
        let mut sinks = Vec::with_capacity(config.sinks.len());
        for sink in &config.sinks {
            let built = AnySink::build(&sink.target, &sink.options);
            sinks.push(built.map_err(|error| ExportError::Sink { sink: sink.name.clone(), error })?);
        }
        Self::open_with(config, sinks, registry, metrics)
    }

    /// As [`Export::open`], with sinks that were built elsewhere, in the order of the configured ones.
    ///
    /// # Errors
    /// As [`Export::open`].
    pub fn open_with(
        config: &ExportConfig,
        sinks: Vec<AnySink>,
        registry: &Arc<Registry>,
        metrics: Metrics,
    ) -> Result<Self, ExportError> {
        let dir = config.state_dir.as_deref().map(StateDir::open).transpose()?.map(Arc::new);
        // In memory, numbers begin anew: cursors of events on disk mean nothing to them.
        let disk = dir.clone().filter(|_| config.spool.sync != SpoolSync::Off);
        if let (Some(dir), None) = (&dir, &disk)
            && dir.file("spool").is_dir()
        {
            tracing::error!(
                "AEP_SPOOL_SYNC is off, and the state directory holds a spool: events that were accepted before and aren't delivered stay there until it is write or fsync again"
            );
        }
        let names: Vec<_> = config.sinks.iter().map(|sink| sink.name.as_str()).collect();
        let (floor, others) = disk.as_deref().map(|dir| cursor::furthest(dir, &names)).unwrap_or_default();
        let spool = Spool::open(disk.clone(), config.spool.clone(), floor, metrics.spool.clone())?;
        for (name, cursor) in others.into_iter().filter(|(_, cursor)| cursor.next() < spool.end()) {
            let behind = spool.end().saturating_sub(cursor.next());
            tracing::warn!(sink = name, behind, "a sink isn't configured any more: nothing is kept for it");
        }
        let mut outlets = Vec::with_capacity(sinks.len());
        for (sink_config, sink) in config.sinks.iter().zip(sinks) {
            let place = Place { spool: &spool, disk: disk.as_ref(), dir: dir.as_deref() };
            outlets.push(Outlet::open(sink_config, config.drain, sink, place, registry, &metrics)?);
        }
        let wanted = config.sinks.iter().map(|sink| sink.filter.clone()).collect();
        Ok(Self { spool, outlets, wanted, metrics })
    }

    /// The way in. What is kept before the export runs is delivered when it does.
    #[must_use]
    pub fn intake(&self) -> Intake {
        Intake::new(self.spool.clone(), Arc::clone(&self.wanted))
    }

    /// Reads the last events that the spool holds, about as many as `bytes` have room for.
    #[must_use]
    pub fn last_events(&self, bytes: u64) -> Reader {
        let held = u64::try_from(self.metrics.spool.held_bytes.get()).unwrap_or(0);
        let (first, end) = (self.spool.first(), self.spool.end());
        let each = held.checked_div(end.saturating_sub(first)).unwrap_or(1).max(1);
        self.spool.reader(first.max(end.saturating_sub(bytes / each)))
    }

    /// The positions to resume a feed from, the least recently active session first. A feed should resume a little
    /// below them: what it gives twice is dropped as duplicate, what it skips is missed.
    #[must_use]
    pub fn positions(&self) -> Vec<ResumePosition> {
        self.spool.positions()
    }

    /// The sinks' states, to be read while the export runs.
    #[must_use]
    pub fn statuses(&self) -> Vec<(SinkName, SinkStatus)> {
        self.outlets.iter().map(|outlet| (outlet.name.clone(), outlet.lanes.status())).collect()
    }

    /// Delivers what is in the spool and what comes into it. Ends when `ends.finish` is cancelled and all is
    /// handled or left on disk, or soon after `ends.give_up` is: then nothing is begun or tried again; what can be delivered at the
    /// first attempt still is, for at most the configured drain. Stopping makes no dead letter.
    ///
    /// # Errors
    /// When a sink is closed for good.
    ///
    /// # Cancel safety
    /// A future that is dropped loses no event, as after a crash; events in flight may arrive twice.
    pub async fn run(self, ends: Ends) -> Result<Summary, ExportError> {
        let Self { spool, outlets, metrics, .. } = self;
        let mut runs = JoinSet::new();
        for outlet in outlets {
            let span = tracing::info_span!("sink", sink = %outlet.name);
            runs.spawn(Run::new(outlet).until_done(spool.clone(), ends.clone()).instrument(span));
        }
        let (mut summary, mut closed, mut failed) = (Summary::default(), None, None);
        let mut tending = std::pin::pin!(spool.tend());
        let mut tended = false;
        loop {
            let done = tokio::select! {
                done = runs.join_next() => done,
                () = tending.as_mut(), if !tended => {
                    tended = true;
                    continue;
                }
            };
            match done {
                None => break,
                Some(Ok(done)) => {
                    summary.delivered = summary.delivered.saturating_add(done.summary.delivered);
                    summary.dead_letters = summary.dead_letters.saturating_add(done.summary.dead_letters);
                    summary.unhandled = summary.unhandled.saturating_add(done.summary.unhandled);
                    if done.closed.is_some() {
                        closed = done.closed;
                        ends.give_up.cancel();
                    }
                }
                Some(Err(error)) => {
                    failed = Some(error);
                    ends.give_up.cancel();
                }
            }
        }
        spool.close().await;
        summary.duplicates = metrics.spool.duplicates.get();
        match (failed, closed) {
            (Some(error), _) => Err(ExportError::Task(error)),
            (None, Some(reason)) => Err(ExportError::Closed { reason, summary }),
            (None, None) => Ok(summary),
        }
    }

    /// Keeps the feed's events and delivers them until the feed ends and all are handled. When `ends.finish` is
    /// cancelled, nothing more is pulled; for the rest as [`Export::run`].
    ///
    /// # Errors
    /// When the feed fails, after its events were handled, and when a sink is closed for good.
    ///
    /// # Cancel safety
    /// As [`Export::run`].
    pub async fn run_feed(self, mut feed: impl Feed, ends: Ends) -> Result<Summary, ExportError> {
        let intake = self.intake();
        let Ends { finish, give_up, .. } = ends.clone();
        let pump = async move {
            let pumped = tokio::select! {
                pumped = pump(&mut feed, &intake) => pumped,
                () = finish.cancelled() => Ok(()),
                () = give_up.cancelled() => Ok(()),
            };
            finish.cancel();
            pumped
        };
        let (pumped, ran) = tokio::join!(pump, self.run(ends));
        let summary = ran?;
        pumped?;
        Ok(summary)
    }
}

/// Keeps what the feed gives, and doesn't pull while the spool is full.
async fn pump(feed: &mut impl Feed, intake: &Intake) -> Result<(), FeedError> {
    while let Some(events) = feed.next().await? {
        let mut left = events.as_slice();
        let mut count = left.len();
        while !left.is_empty() {
            let (now, later) = left.split_at(count.min(left.len()));
            match intake.keep_all(now).await {
                Ok(_) => left = later,
                Err(refused) if refused.reason == UnavailableReason::TooLarge => match now {
                    [one] => {
                        too_large(one);
                        left = later;
                    }
                    _ => count = now.len().div_ceil(2),
                },
                Err(refused) if refused.reason == UnavailableReason::Closed => return Ok(()),
                Err(_) => intake.room().await,
            }
        }
    }
    Ok(())
}

fn too_large(event: &Event) {
    tracing::error!(
        id = event.id(),
        source = event.source(),
        bytes = event.as_bytes().len(),
        "an event is larger than half of AEP_SPOOL_MAX_BYTES and is lost to the sinks"
    );
}
