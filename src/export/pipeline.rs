//! The export as a service: it is opened, and runs until its feed ends or it is told to stop.
//!
//! Everything runs within [`Export::run`], on one task: attempts side by side, at most one write of the
//! checkpoint and one of dead letters at a time, on the runtime's threads for blocking work. Whatever waits is
//! bounded: by events and bytes between feed and sink, by records before the disk.

mod run;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use self::run::Run;
use super::breaker::SinkStatus;
use super::checkpoint::{Keeper, SavedPosition};
use super::dead_letter::{self, DeadLetters, Outbox};
use super::feed::{Feed, FeedError};
use super::lane::{Bounds, Lanes};
use super::metrics::Metrics;
use super::retry::RetryPolicy;
use super::sink::{AnySink, Reason, Target, http};
use super::state_dir::StateDir;

pub use super::state_dir::StateDirError;

/// How an export is set up.
#[derive(Debug, Clone)]
pub struct ExportConfig {
    /// Where events go.
    pub sink: Target,
    /// How many handled events are remembered, to tell duplicates.
    pub dedupe: NonZeroUsize,
    /// Where the checkpoint and dead letters are kept; in memory only without one.
    pub state_dir: Option<PathBuf>,
    /// How long one attempt may take as a whole.
    pub timeout: Duration,
    /// How long to wait between attempts.
    pub retry: RetryPolicy,
    /// How many events are in flight at once, of different sessions.
    pub concurrency: NonZeroUsize,
    /// How many events are held between feed and sink; when full, the feed isn't read.
    pub max_pending: NonZeroUsize,
    /// How much memory these take, in bytes, beyond which the feed isn't read.
    pub max_pending_bytes: NonZeroUsize,
    /// How long events are still delivered after the order to stop.
    pub drain: Duration,
    /// How many bytes of dead letters are kept.
    pub max_dead_letters: u64,
}

impl ExportConfig {
    /// The defaults: 50 000 events remembered, nothing kept on disk, attempts of 30 s at most, 16 in flight,
    /// 1000 events or 16 MiB held, 10 s to stop, 64 MiB of dead letters.
    #[must_use]
    pub fn new(sink: Target) -> Self {
        const fn bound(n: usize) -> NonZeroUsize {
            NonZeroUsize::MIN.saturating_add(n.saturating_sub(1))
        }
        Self {
            sink,
            dedupe: bound(50_000),
            state_dir: None,
            timeout: Duration::from_secs(30),
            retry: RetryPolicy::default(),
            concurrency: bound(16),
            max_pending: bound(1000),
            max_pending_bytes: bound(16 << 20),
            drain: Duration::from_secs(10),
            max_dead_letters: dead_letter::DEFAULT_BOUND,
        }
    }
}

/// What an export came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Events that the sink acknowledged.
    pub delivered: u64,
    /// Events dropped since they were known already.
    pub duplicates: u64,
    /// Events that became dead letters.
    pub dead_letters: u64,
    /// Events taken from the feed and not handled when the export was stopped. They are delivered after a
    /// restart when the feed gives them again.
    pub unhandled: u64,
}

/// Why an export can't start or go on.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The state directory can't be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The sink can't be built.
    #[error(transparent)]
    Sink(#[from] http::BuildError),
    /// The feed failed. What it gave before was handled.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// The sink went away for good.
    #[error("the sink is closed: {reason}")]
    Closed {
        /// Why.
        reason: Reason,
        /// What was done until then.
        summary: Summary,
    },
}

/// An export that is ready to run.
#[derive(Debug)]
pub struct Export {
    config: ExportConfig,
    metrics: Metrics,
    sink: Arc<AnySink>,
    lanes: Lanes,
    keeper: Keeper,
    outbox: Outbox,
}

impl Export {
    /// Takes the state directory, reads the checkpoint and builds the sink. Blocks on the file system.
    ///
    /// # Errors
    /// When the state directory can't be created or written to, or is in use, or the sink can't be built. A
    /// damaged checkpoint is no error.
    pub fn open(config: ExportConfig, metrics: Metrics) -> Result<Self, ExportError> {
        let sink = AnySink::build(&config.sink, config.timeout)?;
        Self::open_with(config, sink, metrics)
    }

    /// As [`Export::open`], with a sink that was built elsewhere; the configured one only names it.
    ///
    /// # Errors
    /// As [`Export::open`].
    pub fn open_with(config: ExportConfig, sink: AnySink, metrics: Metrics) -> Result<Self, ExportError> {
        let dir = config.state_dir.as_deref().map(StateDir::open).transpose()?.map(Arc::new);
        let letters = DeadLetters::new(dir.clone(), config.sink.to_string(), config.max_dead_letters);
        let bounds = Bounds {
            concurrency: config.concurrency.get(),
            events: config.max_pending.get(),
            bytes: config.max_pending_bytes.get(),
        };
        Ok(Self {
            sink: Arc::new(sink),
            lanes: Lanes::new(bounds, config.retry),
            keeper: Keeper::open(dir, config.dedupe, metrics.clone()),
            outbox: Outbox::new(letters),
            config,
            metrics,
        })
    }

    /// The positions to resume from, the least recently active session first. A feed should resume a little
    /// below them: what it gives twice is dropped as duplicate, what it skips is missed.
    #[must_use]
    pub fn positions(&self) -> Vec<SavedPosition> {
        self.keeper.checkpoint.positions().cloned().collect()
    }

    /// The sink's state, to be read while the export runs.
    #[must_use]
    pub fn status(&self) -> SinkStatus {
        self.lanes.status()
    }

    /// Delivers the feed's events until it ends and all are handled, or `shutdown` is cancelled. After that
    /// nothing is pulled or tried again; what can be delivered at the first attempt still is, for at most the
    /// configured drain. Stopping makes no dead letter.
    ///
    /// # Errors
    /// When the feed fails, after its events were handled, and when the sink is closed for good.
    ///
    /// # Cancel safety
    /// A future that is dropped loses no event, as after a crash; events in flight may arrive twice.
    pub async fn run(self, feed: impl Feed, shutdown: CancellationToken) -> Result<Summary, ExportError> {
        let Self { config, metrics, sink, lanes, keeper, outbox } = self;
        Run::new(&config, metrics, sink, lanes, keeper, outbox).until_done(feed, shutdown).await
    }
}
