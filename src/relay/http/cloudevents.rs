//! `POST /cloudevents`: CloudEvents that are events of ours, admitted as if posted to `/events`; all of a body or
//! nothing of it.
//!
//! The content mode is told by the content type, as the HTTP binding has it: structured, a batch, or else binary. So
//! one sidecar's sink can be another's inlet, and a bus can feed a relay. `OPTIONS /cloudevents` answers the
//! handshake of CloudEvents web hooks: whoever has a token may send, as fast as they can.

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue, Request};

use super::Relay;
use super::body::{self, Encoding};
use super::ingest::{Received, take_in};
use super::refusal::Refusal;
use crate::aep::Event;
use crate::aep::cloudevents::inverse;
use crate::relay::auth::Permission;
use crate::relay::limits::Limits;

/// Who asks whether it may send.
const ORIGIN: HeaderName = HeaderName::from_static("webhook-request-origin");
/// How fast it asks to.
const RATE: HeaderName = HeaderName::from_static("webhook-request-rate");
/// Who may.
const ALLOWED_ORIGIN: HeaderName = HeaderName::from_static("webhook-allowed-origin");
/// How fast.
const ALLOWED_RATE: HeaderName = HeaderName::from_static("webhook-allowed-rate");

/// `POST /cloudevents`.
///
/// Spec: AEP-0005 §2, CloudEvents HTTP binding §3.
pub(super) async fn ingest(State(relay): State<Relay>, request: Request<Body>) -> Result<Response, Refusal> {
    let _settles = relay.0.ingests.token();
    let (parts, body) = request.into_parts();
    let admitted = relay
        .authorize(&parts.headers, &parts.uri, Permission::Emit)
        .and_then(|_| Ok((Encoding::of(&parts.headers)?, Headers::read(&parts.headers)?)));
    let (encoding, headers) = match admitted {
        Ok(read) => read,
        Err(refusal) => {
            relay.discard(body);
            return Err(refusal);
        }
    };
    let (bytes, share) = body::read_body(&relay, body, &parts.headers).await?;
    let read = move |bytes: &[u8], limits: &Limits| parse(&headers, bytes, limits.max_batch);
    take_in(&relay, Received { bytes, encoding, share }, read).await
}

/// Adds to an answer to `OPTIONS` what a web hook's sender waits for, when it is one that asks.
///
/// Spec: CloudEvents web hooks §4.
pub(super) fn answer_handshake(asked: &HeaderMap, answer: &mut HeaderMap) {
    if !asked.contains_key(ORIGIN) {
        return;
    }
    answer.insert(ALLOWED_ORIGIN, HeaderValue::from_static("*"));
    if asked.contains_key(RATE) {
        answer.insert(ALLOWED_RATE, HeaderValue::from_static("*"));
    }
}

/// The headers that binary mode reads.
struct Headers(Vec<(String, String)>);

impl Headers {
    fn read(headers: &HeaderMap) -> Result<Self, Refusal> {
        let mut read = Vec::new();
        for (name, value) in headers {
            if name != http::header::CONTENT_TYPE && !name.as_str().starts_with("ce-") {
                continue;
            }
            let value = std::str::from_utf8(value.as_bytes())
                .map_err(|_| Refusal::Parameter { name: "headers", must: format!("{name} must be UTF-8") })?;
            read.push((name.as_str().to_owned(), value.to_owned()));
        }
        Ok(Self(read))
    }
}

fn parse(headers: &Headers, bytes: &[u8], max: usize) -> Result<Vec<Event>, Refusal> {
    let headers = headers.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let read = inverse::http(headers, bytes, &[]).map_err(|error| Refusal::CloudEvent { error, line: 0 })?;
    if read.len() > max {
        return Err(Refusal::TooManyEvents { max, count: read.len() });
    }
    let mut events = Vec::with_capacity(read.len());
    for (line, inverse) in read.into_iter().enumerate() {
        let inverse = inverse.map_err(|error| Refusal::CloudEvent { error, line })?;
        if !inverse.dropped.is_empty() {
            tracing::debug!(
                count = inverse.dropped.len(),
                "attributes of a CloudEvent that an event can't carry were dropped"
            );
        }
        events.push(inverse.event);
    }
    Ok(events)
}
