//! `GET /events`, `GET /.well-known/aep` and `GET /healthz`: what this relay is, and that it runs.

use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, StatusCode, Uri};
use serde::Serialize;

use super::Relay;
use super::refusal::{Refusal, json};
use crate::aep::Capture;
use crate::relay::auth::Permission;

/// The discovery document: the endpoints and capabilities that exist, no others.
///
/// Spec: AEP-0003 §3.4.
#[derive(Debug, Serialize)]
struct Discovery {
    aep: [&'static str; 1],
    role: &'static str,
    endpoints: Endpoints,
    capabilities: Capabilities,
}

#[derive(Debug, Serialize)]
struct Endpoints {
    events: &'static str,
    stream: &'static str,
}

#[derive(Debug, Serialize)]
struct Capabilities {
    filters: [&'static str; 1],
    replay: Replay,
    capture: [&'static str; 4],
    control: Control,
    experimental: Empty,
}

#[derive(Debug, Serialize)]
struct Replay {
    /// Events held of one session.
    buffer: usize,
    all: bool,
}

#[derive(Debug, Serialize)]
struct Control {
    accepts: [&'static str; 0],
}

#[derive(Debug, Serialize)]
struct Empty {}

/// The answer of `/healthz`. How much is going on is told to who may see everything.
#[derive(Debug, Serialize)]
struct Health {
    ok: bool,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    counts: Option<Counts>,
}

#[derive(Debug, Serialize)]
struct Counts {
    sessions: usize,
    subscribers: i64,
    uptime_s: u64,
}

/// `GET /events`, `GET /.well-known/aep`.
pub(super) async fn discovery(
    State(relay): State<Relay>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refusal> {
    relay.authenticate(&headers, &uri)?;
    let document = Discovery {
        aep: [crate::aep::VERSION],
        role: "collector",
        endpoints: Endpoints { events: "/events", stream: "/stream" },
        capabilities: Capabilities {
            filters: ["attr-match"],
            replay: Replay { buffer: relay.limits().buffer, all: true },
            capture: Capture::ALL.map(Capture::as_str),
            control: Control { accepts: [] },
            experimental: Empty {},
        },
    };
    Ok(json(StatusCode::OK, &document))
}

/// `GET /healthz`: open to everyone. The counts are of all sessions, so who may see only some isn't told.
pub(super) async fn health(State(relay): State<Relay>, headers: HeaderMap, uri: Uri) -> Response {
    let principal = relay.authorize(&headers, &uri, Permission::Read);
    let sees_all = principal.is_ok_and(|principal| principal.bound().is_none());
    let counts = sees_all.then(|| Counts {
        sessions: relay.hub().held().sessions,
        subscribers: relay.hub().metrics().subscribers.get(),
        uptime_s: relay.uptime().as_secs(),
    });
    json(StatusCode::OK, &Health { ok: true, counts })
}
