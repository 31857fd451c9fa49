//! What whoever runs the sidecar asks it: is it alive, is it ready, what has it counted.
//!
//! A listener of its own, on loopback unless configured otherwise: these answers are for probes and scrapers, need no
//! token and hold no event.
//!
//! | path | answer |
//! |---|---|
//! | `/livez` | 200 as long as requests are answered at all |
//! | `/readyz` | 200, or 503 with the reasons, as JSON |
//! | `/metrics` | every counter, as OpenMetrics text |
//!
//! Ready means that events are taken: the spool can be written to and the relay listens, or the feed is connected. A
//! sink that takes nothing makes nobody unready: its events wait in the spool.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderValue, StatusCode, header};
use parking_lot::RwLock;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::export::SpoolState;

/// The media type of the counters.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Tells why the sidecar isn't ready; `None` when it is.
pub type Check = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// What is looked at to answer.
pub struct Health {
    /// Each of these must be satisfied.
    checks: Vec<Check>,
    registry: Registry,
    /// Set once a stop has begun.
    stopping: Arc<RwLock<bool>>,
}

impl std::fmt::Debug for Health {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Health").field("checks", &self.checks.len()).finish_non_exhaustive()
    }
}

/// Says that a stop has begun.
#[derive(Debug, Clone)]
pub struct Stopping(Arc<RwLock<bool>>);

impl Stopping {
    /// From now on the sidecar isn't ready.
    pub fn begun(&self) {
        *self.0.write() = true;
    }
}

#[derive(Debug, Serialize)]
struct Readiness {
    ready: bool,
    reasons: Vec<String>,
}

impl Health {
    /// Ready as long as the spool takes events.
    #[must_use]
    pub fn new(spool: watch::Receiver<SpoolState>, registry: Registry) -> Self {
        let spool: Check = Box::new(move || match &*spool.borrow() {
            SpoolState::Writable => None,
            SpoolState::Full => {
                Some("spool: full, since a sink doesn't keep up or the disk is full".to_owned())
            }
            SpoolState::Failing(why) => Some(format!("spool: can't be written to: {why}")),
        });
        Self { checks: vec![spool], registry, stopping: Arc::default() }
    }

    /// Ready only as long as `check` has no complaint, too.
    #[must_use]
    pub fn and(mut self, check: Check) -> Self {
        self.checks.push(check);
        self
    }

    /// The way to say that a stop has begun.
    #[must_use]
    pub fn stopping(&self) -> Stopping {
        Stopping(Arc::clone(&self.stopping))
    }

    fn readiness(&self) -> Readiness {
        let mut reasons: Vec<String> = self.checks.iter().filter_map(|check| check()).collect();
        if *self.stopping.read() {
            reasons.push("shutting down".to_owned());
        }
        Readiness { ready: reasons.is_empty(), reasons }
    }
}

/// The admin listener, not yet serving.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
    health: Arc<Health>,
}

impl Admin {
    /// Listens on `address`.
    ///
    /// # Errors
    /// When that can't be listened on.
    pub async fn bind(address: SocketAddr, health: Health) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, health: Arc::new(health) })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the operating system doesn't tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers until dropped.
    pub async fn serve(self) {
        let router = Router::new()
            .route("/livez", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .with_state(self.health);
        if let Err(error) = axum::serve(self.listener, router).await {
            tracing::error!(%error, "the admin listener has ended");
        }
        std::future::pending().await
    }
}

async fn ready(State(health): State<Arc<Health>>) -> Response {
    let readiness = health.readiness();
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, &readiness)
}

fn json(status: StatusCode, body: &impl Serialize) -> Response {
    // Strings and flags always serialize.
    let body = serde_json::to_vec(body).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    let mut body = String::new();
    // Writing to a `String` can't fail.
    if text::encode(&mut body, &health.registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    ([(header::CONTENT_TYPE, HeaderValue::from_static(OPEN_METRICS))], body).into_response()
}
