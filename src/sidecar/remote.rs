//! Another relay's events, exported: the sidecar as that relay's consumer.
//!
//! An event and the position it moves its session to are one record of the spool, so that a restart resumes after
//! what was kept, neither before it nor beyond.

use std::io;
use std::time::Duration;

use tokio::time::Instant;

use super::admin::{Admin, Health, Stopping};
use super::app::{self, AppError};
use super::schemas;
use super::settings::Settings;
use crate::aep::Event;
use crate::aep::event::quoted;
use crate::client::{self, ConfigError, ResumePoint, Status, SubscribeConfig, Subscription, Update};
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
struct RelayFeed(Subscription);

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
        let resume = export.positions().into_iter().map(|saved| ResumePoint {
            source: saved.source,
            session: saved.session,
            position: saved.position,
        });
        let subscription = Subscription::new(relay, resume, client_metrics).map_err(RemoteError)?;
        let status = subscription.status();
        let feed: super::admin::Check = Box::new(move || match status.current() {
            Status::Live | Status::Draining => None,
            Status::Connecting => Some("feed: connecting to AEP_RELAY".to_owned()),
            Status::Failing(cause) => Some(format!("feed: AEP_RELAY: {}", cause.as_str())),
        });
        let health = Health::new(export.intake().state(), counters).and(feed);
        let health = app::bound(health, &settings.export);
        let stopping = health.stopping();
        let admin = app::listen_for_admins(settings.admin, health).await?;
        tracing::info!(relay = %relay.relay, "exporting from another relay");
        let drain = settings.drain;
        Ok(Self { feed: RelayFeed(subscription), export, sync, admin, stopping, drain })
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
        loop {
            match self.0.next().await {
                Update::Events(events) => return Ok(Some(events)),
                Update::Lost(lost) => tracing::error!(
                    session = %quoted(&lost.session),
                    %lost,
                    "the relay no longer has events that weren't read yet: they are lost to the sinks"
                ),
            }
        }
    }
}
