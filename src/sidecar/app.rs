//! Build, wire, start, and run until told to stop.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::Instant;

use super::admin::{Admin, Health, Stopping};
use super::bridge::Bridge;
use super::remote::RemoteError;
use super::schemas::{self, SchemasError};
use super::settings::{AdminAddress, ExportSettings, Settings, TlsFiles};
use super::shutdown::Shutdown;
use super::watch::{Watch, WatchError};
use crate::aep::json::JsonError;
use crate::export::{self, Ends, Export, ExportConfig, ExportError, SpoolConfig, SpoolSync, Summary, Target};
use crate::relay::auth::{Replaced, TokensError};
use crate::relay::http::{Relay, Tls, TlsError, serve};
use crate::relay::hub::Before;
use crate::relay::{self, Access, Hub, Tokens};

/// What is left of the time for a stop when deliveries are no longer started.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

/// What part of the time for a stop requests in flight have, before the readers are sent home without them.
const SETTLING: u32 = 4;

/// Why the sidecar can't start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The address can't be listened on.
    #[error("can't listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The admin address can't be listened on.
    #[error("AEP_ADMIN_ADDR: can't listen on {address}: {error}")]
    Admin {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The operator's schemas can't be used.
    #[error(transparent)]
    Schemas(#[from] SchemasError),
    /// The tokens file can't be read.
    #[error("AEP_TOKENS_FILE: {0}")]
    Tokens(#[source] WatchError),
    /// The tokens file can't be used.
    #[error("AEP_TOKENS_FILE: {}: {error}", path.display())]
    TokensFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: TokensError,
    },
    /// The certificate or its key can't be read.
    #[error("AEP_TLS_CERT and AEP_TLS_KEY: {0}")]
    TlsFiles(#[source] WatchError),
    /// The certificate and its key can't be used.
    #[error("AEP_TLS_CERT and AEP_TLS_KEY: {0}")]
    Tls(#[from] TlsError),
    /// The export can't start, or had to end.
    #[error("export: {0}")]
    Export(#[from] ExportError),
    /// The other relay can't be subscribed to.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// Signals can't be listened to.
    #[error("can't listen for signals: {0}")]
    Signals(io::Error),
    /// The sinks didn't take everything within the time for a stop, and nothing is kept on disk.
    #[error(
        "stopped before the sinks took everything, and AEP_SPOOL_SYNC is off: {0} accepted events are lost"
    )]
    Undelivered(u64),
    /// A stop took longer than it may.
    #[error("the stop took longer than AEP_DRAIN={0:?}")]
    Overdue(Duration),
}

/// A sidecar that listens, not yet running.
#[derive(Debug)]
pub struct App {
    relay: Relay,
    listener: TcpListener,
    access: Access,
    tokens: Option<Watch<1>>,
    certificate: Option<(Tls, Watch<2>)>,
    export: Export,
    sync: SpoolSync,
    admin: Option<Admin>,
    stopping: Stopping,
    shutdown: Shutdown,
    drain: Duration,
}

impl App {
    /// Binds, opens and wires everything.
    ///
    /// # Errors
    /// When the address, the state directory, the schemas, the tokens or the certificate can't be used.
    pub async fn start(settings: Settings) -> Result<Self, AppError> {
        settings.warn_of_unknown();
        let registry = Arc::new(schemas::load(settings.schemas.as_deref())?);
        let access = Access::new(settings.token);
        let tokens = match settings.tokens_file {
            Some(path) => Some(open_tokens(&access, path)?),
            None => None,
        };
        let certificate = settings.tls.map(open_certificate).transpose()?;
        let shutdown = Shutdown::default();
        let config = config(&settings.export, settings.drain);
        let sync = config.spool.sync;
        warn_of_memory(sync);
        let (export_metrics, relay_metrics) = (export::Metrics::default(), relay::Metrics::default());
        let mut counters = prometheus_client::registry::Registry::default();
        export_metrics.register(&mut counters);
        relay_metrics.register(counters.sub_registry_with_prefix("aep"));
        let export = Export::open(&config, &registry, export_metrics)?;
        let health = bound(Health::new(export.intake().state(), counters), &settings.export);
        let stopping = health.stopping();
        let admin = listen_for_admins(settings.admin, health).await?;
        let bridge = Arc::new(Bridge::new(export.intake(), config.spool.max_bytes));
        let hub = Hub::keeping(settings.limits, registry, relay_metrics, bridge);
        let everything = export.intake().wants_everything();
        refill(&hub, &export, settings.limits.buffer_bytes, everything).await;
        let listener = TcpListener::bind(settings.listen)
            .await
            .map_err(|error| AppError::Listen { address: settings.listen, error })?;
        if !access.is_guarded() {
            tracing::warn!(
                "AEP_TOKEN is not set: anyone who reaches this port may read and emit, commands are refused"
            );
        }
        let relay = Relay::new(hub, settings.limits, access.clone(), shutdown.connections.clone());
        let drain = settings.drain;
        Ok(Self {
            relay,
            listener,
            access,
            tokens,
            certificate,
            export,
            sync,
            admin,
            stopping,
            shutdown,
            drain,
        })
    }

    /// Where the sidecar listens.
    ///
    /// # Errors
    /// When the operating system doesn't tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Runs until `signal` is ready, or the export can't go on; then stops in order.
    ///
    /// # Errors
    /// When the export can't go on, or the stop takes longer than it may.
    pub async fn run(
        mut self,
        signal: impl Future<Output = io::Result<&'static str>>,
    ) -> Result<(), AppError> {
        let admin = serve_admins(self.admin.take());
        // Probes are answered to the end of a stop.
        tokio::select! {
            ended = self.run_until(signal) => ended,
            () = admin => Ok(()),
        }
    }

    async fn run_until(self, signal: impl Future<Output = io::Result<&'static str>>) -> Result<(), AppError> {
        let Self {
            relay,
            listener,
            access,
            tokens,
            certificate,
            export,
            sync,
            stopping,
            shutdown,
            drain,
            ..
        } = self;
        let hub = relay.hub().clone();
        if let Some(watch) = tokens {
            let list = move |[text]: &[Vec<u8>; 1]| list(&access, text).map_err(|error| error.to_string());
            shutdown.connections.spawn(watch.run(list, shutdown.ends.orderly.clone()));
        }
        let tls = certificate.map(|(tls, watch)| {
            let renewed = tls.clone();
            let renew = move |[certificate, key]: &[Vec<u8>; 2]| {
                renewed.replace(certificate, key).map_err(|error| error.to_string())
            };
            shutdown.connections.spawn(watch.run(renew, shutdown.ends.orderly.clone()));
            tls
        });
        let accept = serve(relay.clone(), listener, tls, shutdown.connections.clone(), shutdown.ends.clone());
        let accept = shutdown.connections.spawn(accept);
        let export = export.run(Ends {
            finish: shutdown.finish.clone(),
            leave: shutdown.finish.clone(),
            give_up: shutdown.give_up.clone(),
        });
        let mut export = std::pin::pin!(export);
        tokio::select! {
            ended = export.as_mut() => {
                // Its feed has not ended, so this is an error; readers still get an orderly end.
                shutdown.ends.orderly.cancel();
                hub.close();
                shutdown.connections.close();
                let _in_time = tokio::time::timeout(drain, shutdown.connections.wait()).await;
                return ended.map(|_| ()).map_err(AppError::from);
            }
            signal = signal => {
                let signal = signal.map_err(AppError::Signals)?;
                tracing::info!(signal, "stopping");
                stopping.begun();
            }
        }
        let deadline = Instant::now() + drain;
        shutdown.ends.orderly.cancel();
        // The readers get what requests in flight still bring. One that takes too long is refused afterwards.
        let _settled = tokio::time::timeout(drain / SETTLING, relay.settled()).await;
        hub.close();
        shutdown.connections.close();
        let rest = async {
            if accept.await.is_err() {
                tracing::error!("the accept loop has panicked");
            }
            if tokio::time::timeout(drain / SETTLING, shutdown.connections.wait()).await.is_err() {
                tracing::warn!("connections that take no goodbye are cut");
                shutdown.ends.cut.cancel();
                shutdown.connections.wait().await;
            }
            shutdown.finish.cancel();
        };
        // The export goes on meanwhile: what requests in flight admit is still exported.
        let stop = async { tokio::join!(rest, export).1 };
        let mut stop = std::pin::pin!(stop);
        let ended = tokio::select! {
            ended = stop.as_mut() => Ok(ended),
            () = tokio::time::sleep_until(deadline.checked_sub(LAST_WORDS).unwrap_or(deadline)) => {
                shutdown.finish.cancel();
                shutdown.give_up.cancel();
                tokio::time::timeout_at(deadline, stop).await
            }
        };
        match ended {
            Ok(ended) => stopped(ended?, sync),
            Err(_) => Err(AppError::Overdue(drain)),
        }
    }
}

/// Ready only once there is a sink, where Knative is to bind one.
pub(super) fn bound(health: Health, settings: &ExportSettings) -> Health {
    if !settings.sinks.iter().any(|sink| sink.target == Target::Unbound) {
        return health;
    }
    tracing::error!("K_SINK is not set: events wait in the spool until the process starts with it");
    health.and(Box::new(|| {
        Some("sink: K_SINK is not set: is there a SinkBinding whose subject this pod is of?".to_owned())
    }))
}

/// Says what a stop came to.
pub(super) fn stopped(summary: Summary, sync: SpoolSync) -> Result<(), AppError> {
    tracing::info!(delivered = summary.delivered, undelivered = summary.unhandled, "stopped");
    if summary.unhandled > 0 && sync == SpoolSync::Off {
        return Err(AppError::Undelivered(summary.unhandled));
    }
    // The rest is in the spool, and goes out after the next start.
    Ok(())
}

pub(super) fn warn_of_memory(sync: SpoolSync) {
    if sync == SpoolSync::Off {
        tracing::warn!(
            "AEP_SPOOL_SYNC is off: accepted events are held in memory, and what the sinks don't have is lost when the process ends"
        );
    }
}

/// Answers probes and scrapers, where there is a listener for them, until dropped.
pub(super) async fn serve_admins(admin: Option<Admin>) {
    match admin {
        Some(admin) => admin.serve().await,
        None => std::future::pending().await,
    }
}

/// Where the default is taken already, by another sidecar on the machine perhaps, there are no answers; where an
/// address was asked for, that is an error.
pub(super) async fn listen_for_admins(
    address: AdminAddress,
    health: Health,
) -> Result<Option<Admin>, AppError> {
    let (address, asked) = match address {
        AdminAddress::Off => return Ok(None),
        AdminAddress::Default(address) => (address, false),
        AdminAddress::At(address) => (address, true),
    };
    let bound = Admin::bind(address, health).await.and_then(|admin| Ok((admin.address()?, admin)));
    match bound {
        Ok((address, admin)) => {
            tracing::info!(%address, "admin listening");
            Ok(Some(admin))
        }
        Err(error) if asked => Err(AppError::Admin { address, error }),
        Err(error) => {
            tracing::warn!(%address, %error, "no probes and metrics: set AEP_ADMIN_ADDR to a free address, or to off");
            Ok(None)
        }
    }
}

/// Reads the tokens file for the first time.
fn open_tokens(access: &Access, path: PathBuf) -> Result<Watch<1>, AppError> {
    let watch = Watch::open("AEP_TOKENS_FILE", [path.clone()]).map_err(AppError::Tokens)?;
    let [text] = watch.contents();
    list(access, text).map_err(|error| AppError::TokensFile { path, error })?;
    Ok(watch)
}

/// Makes the tokens of a file's text the listed ones.
fn list(access: &Access, text: &[u8]) -> Result<(), TokensError> {
    let text = std::str::from_utf8(text).map_err(|error| JsonError::Utf8(error.valid_up_to()))?;
    let Replaced { listed, revoked } = access.replace(Tokens::parse(text)?)?;
    tracing::info!(listed, revoked, "tokens are listed");
    Ok(())
}

/// Reads the certificate and its key for the first time.
fn open_certificate(files: TlsFiles) -> Result<(Tls, Watch<2>), AppError> {
    let TlsFiles { certificate, key } = files;
    let watch =
        Watch::open("AEP_TLS_CERT and AEP_TLS_KEY", [certificate, key]).map_err(AppError::TlsFiles)?;
    let [certificate, key] = watch.contents();
    let tls = Tls::new(certificate, key)?;
    Ok((tls, watch))
}

/// How long a batch for the histories is waited for.
const REFILL: Duration = Duration::from_secs(2);

/// Gives the relay's histories what the spool still holds, so that readers resume across a restart. `everything` is
/// whether the spool was given all that the relay admitted.
async fn refill(hub: &Hub, export: &Export, bytes: usize, everything: bool) {
    let mut reader = export.last_events(u64::try_from(bytes).unwrap_or(u64::MAX));
    let whole = everything && reader.place() == 0;
    let before = if whole { Before::Nothing } else { Before::Unknown };
    let mut count = 0;
    while reader.ready() {
        // Whoever emits needn't wait for a file that can't be read now.
        let Ok(batch) = tokio::time::timeout(REFILL, reader.next()).await else {
            tracing::warn!("the spool can't be read now: histories begin without what it holds");
            break;
        };
        let events: Vec<_> = batch.events.into_iter().map(|(_, event)| event).collect();
        count += events.len();
        hub.restore(events, before);
    }
    if !whole || reader.ready() {
        // A reader that resumes one of these learns that it has missed something.
        for saved in export.positions() {
            hub.assume_evicted(&saved.session, saved.position);
        }
    }
    if count > 0 {
        tracing::info!(events = count, "histories are refilled from the spool");
    }
}

/// The export's part of the settings. Deliveries under way when the time for a stop is nearly up are waited for
/// a little longer.
pub(crate) fn config(settings: &ExportSettings, drain: Duration) -> ExportConfig {
    /// How many bytes of the last events are kept in memory, for sinks that keep up. The relay's histories hold most
    /// of these events anyway.
    const RECENT: usize = 16 << 20;
    ExportConfig {
        sinks: settings.sinks.clone(),
        state_dir: Some(settings.state_dir.clone()),
        spool: SpoolConfig {
            sync: settings.sync,
            max_bytes: settings.spool_bytes,
            keep_bytes: settings.history_bytes.min(settings.spool_bytes / 2),
            recent_bytes: RECENT,
            dedupe: settings.dedupe,
            keeps_positions: true,
        },
        // With time left for the last write of the cursors.
        drain: LAST_WORDS.min(drain) / 2,
    }
}
