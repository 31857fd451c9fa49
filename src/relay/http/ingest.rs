//! `POST /events`: one event, or a batch of lines; all of it or nothing.

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::BytesMut;
use http::{HeaderMap, Request, StatusCode};
use serde::Serialize;

use super::body::{self, BUSY, Encoding, LARGE, Share};
use super::refusal::{Refusal, json};
use super::{Relay, media_type};
use crate::aep::{Event, Scope, event};
use crate::relay::auth::Permission;
use crate::relay::limits::Limits;

/// The header that names the protocol version.
const VERSION: &str = "aep-version";

/// How a body holds events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// `application/json`
    One,
    /// `application/x-ndjson`
    Lines,
}

/// A body as it came in.
pub(super) struct Received {
    pub(super) bytes: BytesMut,
    pub(super) encoding: Encoding,
    /// What it takes of the memory for bodies.
    pub(super) share: Share,
}

/// The answer to an accepted request.
#[derive(Debug, Serialize)]
struct Accepted {
    accepted: usize,
}

/// `POST /events`.
///
/// Spec: AEP-0003 §3.2.
pub(super) async fn ingest(State(relay): State<Relay>, request: Request<Body>) -> Result<Response, Refusal> {
    let _settles = relay.0.ingests.token();
    let (parts, body) = request.into_parts();
    let admitted = relay
        .authorize(&parts.headers, &parts.uri, Permission::Emit)
        .and_then(|_| read_headers(&parts.headers));
    let (format, encoding) = match admitted {
        Ok(read) => read,
        Err(refusal) => {
            relay.discard(body);
            return Err(refusal);
        }
    };
    let (bytes, share) = body::read_body(&relay, body, &parts.headers).await?;
    let read = move |bytes: &[u8], limits: &Limits| parse(bytes, format, limits);
    take_in(&relay, Received { bytes, encoding, share }, read).await
}

/// Takes in what `read` finds in a body: every event of it, or none.
pub(super) async fn take_in(
    relay: &Relay,
    Received { bytes, encoding, mut share }: Received,
    read: impl FnOnce(&[u8], &Limits) -> Result<Vec<Event>, Refusal> + Send + 'static,
) -> Result<Response, Refusal> {
    let limits = *relay.limits();
    let large = bytes.len() >= LARGE || encoding != Encoding::Identity;
    let read = move || {
        let events = read(&body::decompressed(&bytes, encoding, &limits, &mut share)?, &limits)?;
        match events.iter().position(|event| event.scope() == Scope::Command) {
            Some(line) => Err(Refusal::CommandOverHttp { line }),
            // The share is held until the events are accepted: they may have to wait for that.
            None => Ok((events, share)),
        }
    };
    let (mut events, _share) = if large {
        // Only a panic or the runtime's end fails the join.
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|_| Refusal::Unavailable { reason: "shutting down", retry_after: BUSY })??
    } else {
        read()?
    };
    if relay.hub().is_closing() {
        // The readers are gone: who took these events in now would keep them to itself.
        return Err(Refusal::Unavailable { reason: "shutting down", retry_after: BUSY });
    }
    let accepted = events.len();
    relay.hub().accept(&mut events).await?;
    Ok(json(StatusCode::ACCEPTED, &Accepted { accepted }))
}

fn read_headers(headers: &HeaderMap) -> Result<(Format, Encoding), Refusal> {
    if headers
        .get(VERSION)
        .is_none_or(|version| version.as_bytes().trim_ascii() != crate::aep::VERSION.as_bytes())
    {
        return Err(Refusal::VersionUnsupported);
    }
    let format = match media_type(headers).as_deref() {
        Some("application/json") => Format::One,
        Some("application/x-ndjson") => Format::Lines,
        _ => return Err(Refusal::MediaType { expected: "application/json or application/x-ndjson" }),
    };
    Ok((format, Encoding::of(headers)?))
}

/// Reads the events of a body: every one of them legal, or a refusal.
fn parse(bytes: &[u8], format: Format, limits: &Limits) -> Result<Vec<Event>, Refusal> {
    match format {
        Format::One => {
            let event = Event::parse(bytes).map_err(|error| Refusal::Event { error, line: 0 })?;
            Ok(vec![event])
        }
        Format::Lines => parse_lines(bytes, limits.max_batch),
    }
}

fn parse_lines(bytes: &[u8], max: usize) -> Result<Vec<Event>, Refusal> {
    let count = event::lines(bytes).count();
    if count > max {
        return Err(Refusal::TooManyEvents { max, count });
    }
    let mut events = Vec::with_capacity(count);
    for (line, bytes) in event::lines(bytes) {
        events.push(Event::parse(bytes).map_err(|error| Refusal::Event { error, line })?);
    }
    Ok(events)
}
