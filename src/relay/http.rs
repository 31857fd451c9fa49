//! The HTTP bindings: routes, and what they share.

mod body;
mod cloudevents;
mod connection;
mod discovery;
mod ingest;
mod parameters;
pub mod refusal;
mod socket;
mod stream;
mod tls;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, get};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

pub use connection::{Ends, serve};
use refusal::{Refusal, Refused};
pub use tls::{Tls, TlsError};

use super::auth::{self, Access, Permission, Principal};
use super::hub::Hub;
use super::limits::Limits;

/// How long and how far the rest of a refused body is read.
const DISCARD: (Duration, usize) = (Duration::from_secs(10), 64 * 1024 * 1024);

/// What every route needs. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Relay(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    hub: Hub,
    limits: Limits,
    /// Decides about every request but `/healthz` and preflights.
    access: Access,
    /// Request bodies in memory, in bytes.
    budget: body::Budget,
    started: Instant,
    /// Holds a token for each request that may still admit events.
    ingests: TaskTracker,
    /// Holds the tasks that read the rest of refused bodies.
    tracker: TaskTracker,
}

impl Relay {
    /// The bindings of `hub`. `tracker` holds the short tasks that outlive a request.
    #[must_use]
    pub fn new(hub: Hub, limits: Limits, access: Access, tracker: TaskTracker) -> Self {
        let budget = body::Budget::default();
        let (started, ingests) = (Instant::now(), TaskTracker::new());
        Self(Arc::new(Shared { hub, limits, access, budget, started, ingests, tracker }))
    }

    /// The relay's core.
    #[must_use]
    pub fn hub(&self) -> &Hub {
        &self.0.hub
    }

    /// Returns once no request is under way that may still admit events. For use when no new ones come in.
    pub async fn settled(&self) {
        self.0.ingests.close();
        self.0.ingests.wait().await;
    }

    fn limits(&self) -> &Limits {
        &self.0.limits
    }

    fn budget(&self) -> &body::Budget {
        &self.0.budget
    }

    fn uptime(&self) -> Duration {
        self.0.started.elapsed()
    }

    /// Checks the token in the `Authorization` header, or in the query for browsers, which can't set headers on
    /// an event stream.
    ///
    /// Spec: AEP-0003 §8.1.
    fn authenticate(&self, headers: &HeaderMap, uri: &Uri) -> Result<Principal, Refusal> {
        let access = &self.0.access;
        if !access.is_guarded() {
            return Ok(Principal::anyone());
        }
        let from_header =
            headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(auth::bearer);
        let principal = match from_header {
            Some(candidate) => access.bearer_of(candidate),
            None => parameters::pairs(uri.query().unwrap_or_default())
                .filter(|(name, _)| name == "access_token")
                .find_map(|(_, value)| access.bearer_of(&value?)),
        };
        principal.ok_or(Refusal::Unauthorized)
    }

    /// As [`Relay::authenticate`], for a principal that may do that.
    fn authorize(
        &self,
        headers: &HeaderMap,
        uri: &Uri,
        permission: Permission,
    ) -> Result<Principal, Refusal> {
        let principal = self.authenticate(headers, uri)?;
        if principal.may(permission) { Ok(principal) } else { Err(Refusal::Forbidden { permission }) }
    }

    /// A token that makes a stop wait for whoever holds it.
    fn tracked(&self) -> TaskTrackerToken {
        self.0.tracker.token()
    }

    /// Reads the rest of a refused body for a while: a peer that is cut off while it sends may never see why.
    fn discard(&self, body: axum::body::Body) {
        if http_body::Body::is_end_stream(&body) {
            return;
        }
        let (time, bytes) = DISCARD;
        self.0.tracker.spawn(async move {
            // Whichever comes first, the body's end, the bound or the time, the connection is done for.
            let _either = tokio::time::timeout(time, stream::drain(body, bytes)).await;
        });
    }
}

/// The routes.
fn router(relay: Relay) -> Router {
    Router::new()
        .route("/events", MethodRouter::new().get(discovery::discovery).post(ingest::ingest))
        .route("/cloudevents", MethodRouter::new().post(cloudevents::ingest))
        .route("/.well-known/aep", get(discovery::discovery))
        .route("/stream", MethodRouter::new().get(stream::get).post(stream::post))
        .route("/socket", get(socket::upgrade))
        .route("/connections", get(discovery::connections))
        .route("/healthz", get(discovery::health))
        .fallback(|| async { Refusal::NotFound })
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(relay.clone(), around))
        .with_state(relay)
}

async fn method_not_allowed(uri: Uri) -> Refusal {
    let allow = match uri.path() {
        "/events" | "/stream" => "GET, POST, OPTIONS",
        "/cloudevents" => "POST, OPTIONS",
        _ => "GET, OPTIONS",
    };
    Refusal::MethodNotAllowed { allow }
}

/// Around every route: preflights are answered to anyone, every answer can be read by a browser, every refusal
/// is counted.
async fn around(State(relay): State<Relay>, request: Request, next: Next) -> Response {
    let mut response =
        if request.method() == Method::OPTIONS { preflight(&request) } else { next.run(request).await };
    if let Some(Refused(code)) = response.extensions().get() {
        relay.hub().metrics().refused(code);
    }
    response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    response
}

fn preflight(request: &Request) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    for (name, value) in [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, last-event-id, aep-version"),
        (header::ACCESS_CONTROL_MAX_AGE, "86400"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if request.uri().path() == "/cloudevents" {
        cloudevents::answer_handshake(request.headers(), response.headers_mut());
    }
    response
}

/// The media type of a body: without parameters, in lower case.
fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_ascii_lowercase())
}
