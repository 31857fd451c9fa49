//! `GET /events`, `GET /.well-known/aep` and `GET /healthz`: what this relay is, and that it runs.

use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, StatusCode, Uri};
use serde::Serialize;

use super::Relay;
use super::refusal::{Refusal, json};
use crate::aep::Capture;
use crate::relay::auth::Permission;
use crate::relay::control::Description;
use crate::relay::limits::Limits;

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
    socket: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct Capabilities {
    filters: [&'static str; 1],
    replay: Replay,
    capture: [&'static str; 4],
    control: Control,
    roster: Empty,
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
    /// By WebSocket.
    connections: usize,
    uptime_s: u64,
}

/// The answer of `/connections`.
#[derive(Debug, Serialize)]
struct Connected {
    relay: Counts,
    connections: Vec<Description>,
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
        endpoints: Endpoints { events: "/events", stream: "/stream", socket: "/socket" },
        capabilities: capabilities(relay.limits()),
    };
    Ok(json(StatusCode::OK, &document))
}

/// What the relay can do, in the discovery document and in `hello`.
pub(super) fn capabilities(limits: &Limits) -> Capabilities {
    Capabilities {
        filters: ["attr-match"],
        replay: Replay { buffer: limits.buffer, all: true },
        capture: Capture::ALL.map(Capture::as_str),
        control: Control { accepts: [] },
        roster: Empty {},
        experimental: Empty {},
    }
}

/// `GET /connections`: who is connected by WebSocket, for people who run the relay.
pub(super) async fn connections(
    State(relay): State<Relay>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Refusal> {
    let principal = relay.authorize(&headers, &uri, Permission::Read)?;
    if principal.bound().is_some() {
        // Who is connected can't be judged by a filter on events.
        return Err(Refusal::Forbidden { permission: Permission::Read });
    }
    let connections = relay.hub().connections().describe();
    Ok(json(StatusCode::OK, &Connected { relay: counts(&relay), connections }))
}

fn counts(relay: &Relay) -> Counts {
    Counts {
        sessions: relay.hub().held().sessions,
        subscribers: relay.hub().metrics().subscribers.get(),
        connections: relay.hub().connections().len(),
        uptime_s: relay.uptime().as_secs(),
    }
}

/// `GET /healthz`: open to everyone. The counts are of all sessions, so who may see only some isn't told.
pub(super) async fn health(State(relay): State<Relay>, headers: HeaderMap, uri: Uri) -> Response {
    let principal = relay.authorize(&headers, &uri, Permission::Read);
    let sees_all = principal.is_ok_and(|principal| principal.bound().is_none());
    let counts = sees_all.then(|| counts(&relay));
    json(StatusCode::OK, &Health { ok: true, counts })
}
