//! Another relay's events, exported: the sidecar as that relay's consumer.
//!
//! An event and the position it moves its session to are one record of the spool, so that a restart resumes after
//! what was kept, neither before it nor beyond.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::admin::{Admin, Health, Stopping};
use super::app::{self, AppError};
use super::schemas;
use super::settings::Settings;
use crate::aep::Event;
use crate::aep::event::quoted;
use crate::client::{
    self, ConfigError, ResumePoint, Status, StatusHandle, SubscribeConfig, Subscription, Update,
};
use crate::export::{self, Ends, Export, Feed, FeedError, SpoolSync};

/// A sidecar that exports from another relay, not yet running.
#[derive(Debug)]
pub struct RemoteApp {
    feed: RelayFeed,
    export: Export,
    sync: SpoolSync,
    admin: Option<Admin>,
    stopping: Stopping,
    drain: Duration,
}

/// Why a subscription to another relay can't be made.
#[derive(Debug, thiserror::Error)]
#[error("AEP_RELAY: {0}")]
pub struct RemoteError(#[from] ConfigError);

/// A subscription as a feed.
#[derive(Debug)]
struct RelayFeed {
    subscription: Subscription,
    status: StatusHandle,
    owing: Owing,
}

/// A file that is there while something that the relay had before is still owed.
///
/// Positions follow from the events in the spool, and live events are kept while what came before them is still being
/// read. A sidecar that ends then must not resume from its positions: with the file there, it reads everything that
/// the relay has, and the spool drops what it knows.
#[derive(Debug)]
struct Owing {
    /// `None` where positions don't outlast the process anyway.
    path: Option<PathBuf>,
    /// Whether the file is there.
    noted: bool,
    /// Whether the events given last are the last ones owed.
    settled: bool,
}

impl Owing {
    fn new(path: Option<PathBuf>) -> Self {
        let noted = path.as_ref().is_some_and(|path| path.exists());
        Self { path, noted, settled: false }
    }

    /// What was given before is kept.
    fn kept(&mut self) {
        if std::mem::take(&mut self.settled)
            && self.noted
            && let Some(path) = &self.path
        {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, "a restart now would read everything from the relay again");
                }
                _ => self.noted = false,
            }
        }
    }

    /// Events are about to be given. Returns once the file says what it has to.
    async fn about_to_give(&mut self, status: Status) {
        /// Between attempts to write the file.
        const PAUSE: Duration = Duration::from_secs(1);
        self.settled = status == Status::Live;
        while !self.settled
            && !self.noted
            && let Some(path) = &self.path
        {
            match std::fs::File::create(path).and_then(|file| file.sync_all()) {
                Ok(()) => self.noted = true,
                Err(error) => {
                    tracing::warn!(%error, "the state directory can't be written to: nothing is read from the relay");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

impl RemoteApp {
    /// Opens the export and prepares the subscription that `relay` describes.
    ///
    /// # Errors
    /// When the state directory, the schemas, the admin address or the relay's configuration can't be used.
    pub async fn start(settings: Settings, relay: &SubscribeConfig) -> Result<Self, AppError> {
        settings.warn_of_unknown();
        let registry = std::sync::Arc::new(schemas::load(settings.schemas.as_deref())?);
        let config = app::config(&settings.export, settings.drain);
        let sync = config.spool.sync;
        app::warn_of_memory(sync);
        let (export_metrics, client_metrics) = (export::Metrics::default(), client::Metrics::default());
        let mut counters = prometheus_client::registry::Registry::default();
        export_metrics.register(&mut counters);
        client_metrics.register(&mut counters);
        let export = Export::open(&config, &registry, export_metrics)?;
        let path = settings.export.state_dir.join("catching-up");
        let owing = Owing::new(Some(path).filter(|_| sync != SpoolSync::Off));
        let resume = export.positions().into_iter().filter(|_| !owing.noted).map(|saved| ResumePoint {
            source: saved.source,
            session: saved.session,
            position: saved.position,
        });
        let subscription = Subscription::new(relay, resume, client_metrics).map_err(RemoteError)?;
        let status = subscription.status();
        let feed = RelayFeed { subscription, status: status.clone(), owing };
        let connected: super::admin::Check = Box::new(move || match status.current() {
            Status::Live | Status::Draining => None,
            Status::Connecting => Some("feed: connecting to AEP_RELAY".to_owned()),
            Status::Failing(cause) => Some(format!("feed: AEP_RELAY: {}", cause.as_str())),
        });
        let health = Health::new(export.intake().state(), counters).and(connected);
        let health = app::bound(health, &settings.export);
        let stopping = health.stopping();
        let admin = app::listen_for_admins(settings.admin, health).await?;
        tracing::info!(relay = %relay.relay, "exporting from another relay");
        let drain = settings.drain;
        Ok(Self { feed, export, sync, admin, stopping, drain })
    }

    /// Runs until `signal` is ready, or the export can't go on; then stops in order: nothing more is read from the
    /// relay, what is in the spool is delivered within the time for a stop, and the rest stays there.
    ///
    /// # Errors
    /// When the export can't go on, or the stop takes longer than it may.
    pub async fn run(self, signal: impl Future<Output = io::Result<&'static str>>) -> Result<(), AppError> {
        let Self { feed, export, sync, admin, stopping, drain } = self;
        let ends = Ends::default();
        let mut export = std::pin::pin!(export.run_feed(feed, ends.clone()));
        let mut admin = std::pin::pin!(app::serve_admins(admin));
        tokio::select! {
            ended = export.as_mut() => return app::stopped(ended?, sync),
            () = admin.as_mut() => return Ok(()),
            signal = signal => {
                let signal = signal.map_err(AppError::Signals)?;
                tracing::info!(signal, "stopping");
            }
        }
        stopping.begun();
        ends.leave.cancel();
        ends.finish.cancel();
        let deadline = Instant::now() + drain;
        let last_words = deadline.checked_sub(app::LAST_WORDS).unwrap_or(deadline);
        let ended = tokio::select! {
            ended = tokio::time::timeout_at(last_words, export.as_mut()) => ended,
            () = admin.as_mut() => return Ok(()),
        };
        let ended = match ended {
            Ok(ended) => ended,
            Err(_) => {
                ends.give_up.cancel();
                let ended = tokio::time::timeout_at(deadline, export).await;
                ended.map_err(|_| AppError::Overdue(drain))?
            }
        };
        app::stopped(ended?, sync)
    }
}

impl Feed for RelayFeed {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        self.owing.kept();
        loop {
            match self.subscription.next().await {
                Update::Events(events) => {
                    self.owing.about_to_give(self.status.current()).await;
                    return Ok(Some(events));
                }
                Update::Lost(lost) => tracing::error!(
                    session = %quoted(&lost.session),
                    %lost,
                    "the relay no longer has events that weren't read yet: they are lost to the sinks"
                ),
            }
        }
    }
}
