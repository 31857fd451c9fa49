//! `POST /events`: one event, or a batch of lines; all of it or nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::BytesMut;
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use serde::Serialize;

use super::refusal::{Refusal, json};
use super::{Relay, media_type};
use crate::aep::{Event, Scope, event};
use crate::relay::auth::Permission;
use crate::relay::limits::Limits;

/// The header that names the protocol version.
const VERSION: &str = "aep-version";
/// Bodies from this size on are read off the threads that serve connections.
const LARGE: usize = 128 * 1024;
/// When to come back after the memory for bodies was used up.
const BUSY: Duration = Duration::from_secs(1);

/// How a body holds events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    /// `application/json`
    One,
    /// `application/x-ndjson`
    Lines,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    Identity,
    Gzip,
    Zstd,
}

/// The answer to an accepted request.
#[derive(Debug, Serialize)]
struct Accepted {
    accepted: usize,
}

/// Memory for request bodies, over all requests.
#[derive(Debug, Clone, Default)]
pub(super) struct Budget(Arc<AtomicUsize>);

/// A request's share of the [`Budget`], given back when dropped.
#[derive(Debug)]
struct Share {
    budget: Budget,
    bytes: usize,
    max: usize,
}

impl Share {
    fn of(relay: &Relay) -> Self {
        Self { budget: relay.budget().clone(), bytes: 0, max: relay.limits().ingest_bytes }
    }

    fn grow(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.bytes += bytes;
        if self.budget.0.fetch_add(bytes, Ordering::Relaxed) + bytes > self.max {
            return Err(Refusal::Unavailable {
                reason: "too many request bodies in memory",
                retry_after: BUSY,
            });
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
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
    let limits = *relay.limits();
    let (bytes, mut share) = read_body(&relay, body, &parts.headers).await?;
    // The share is held until the events are accepted: they may have to wait for that.
    let (mut events, _share) = if bytes.len() >= LARGE || encoding != Encoding::Identity {
        let read = move || parse(&bytes, format, encoding, &limits, &mut share).map(|events| (events, share));
        // Only a panic or the runtime's end fails the join.
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|_| Refusal::Unavailable { reason: "shutting down", retry_after: BUSY })??
    } else {
        (parse(&bytes, format, encoding, &limits, &mut share)?, share)
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
    let encoding = match headers.get(header::CONTENT_ENCODING).map(|value| value.as_bytes().trim_ascii()) {
        None => Encoding::Identity,
        Some(value) if value.eq_ignore_ascii_case(b"identity") => Encoding::Identity,
        Some(value) if value.eq_ignore_ascii_case(b"gzip") || value.eq_ignore_ascii_case(b"x-gzip") => {
            Encoding::Gzip
        }
        Some(value) if value.eq_ignore_ascii_case(b"zstd") => Encoding::Zstd,
        Some(_) => return Err(Refusal::Encoding),
    };
    Ok((format, encoding))
}

fn content_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Reads the whole body. On a refusal with more to come, the rest of the body is given back.
async fn collect(
    mut body: Body,
    announced: Option<usize>,
    limits: &Limits,
    share: &mut Share,
) -> Result<BytesMut, (Refusal, Option<Body>)> {
    let max_body = limits.max_body;
    if announced.is_some_and(|length| length > max_body) {
        return Err((Refusal::PayloadTooLarge { max_bytes: max_body }, Some(body)));
    }
    let mut bytes = BytesMut::with_capacity(announced.unwrap_or(0).min(LARGE));
    loop {
        match tokio::time::timeout(limits.times.body, body.frame()).await {
            Err(_) => return Err((Refusal::BodyTimeout, None)),
            Ok(None) => return Ok(bytes),
            Ok(Some(Err(_))) => return Err((Refusal::BodyIncomplete, None)),
            Ok(Some(Ok(frame))) => {
                // Trailers carry no events.
                let Ok(data) = frame.into_data() else { continue };
                if bytes.len() + data.len() > max_body {
                    return Err((Refusal::PayloadTooLarge { max_bytes: max_body }, Some(body)));
                }
                if let Err(refusal) = share.grow(data.len()) {
                    return Err((refusal, Some(body)));
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

/// Reads the events of a body: every one of them legal and none of them a command, or a refusal.
fn parse(
    bytes: &[u8],
    format: Format,
    encoding: Encoding,
    limits: &Limits,
    share: &mut Share,
) -> Result<Vec<Event>, Refusal> {
    let decompressed;
    let bytes = match encoding {
        Encoding::Identity => bytes,
        Encoding::Gzip => {
            decompressed = decompress(flate2::read::MultiGzDecoder::new(bytes), limits.max_body, share)?;
            &decompressed
        }
        Encoding::Zstd => {
            let mut reader =
                zstd::stream::read::Decoder::with_buffer(bytes).map_err(|_| Refusal::Compression)?;
            // Wide enough for what every decoder takes, and no wider than a body may be long.
            let window = limits.max_body.next_power_of_two().trailing_zeros().clamp(23, 27);
            reader.window_log_max(window).map_err(|_| Refusal::Compression)?;
            decompressed = decompress(reader, limits.max_body, share)?;
            &decompressed
        }
    };
    let events = match format {
        Format::One => vec![Event::parse(bytes).map_err(|error| Refusal::Event { error, line: 0 })?],
        Format::Lines => parse_lines(bytes, limits.max_batch)?,
    };
    match events.iter().position(|event| event.scope() == Scope::Command) {
        Some(line) => Err(Refusal::CommandOverHttp { line }),
        None => Ok(events),
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

/// Decompresses piece by piece, each counted before it is held.
fn decompress(
    mut reader: impl std::io::Read,
    max_body: usize,
    share: &mut Share,
) -> Result<Vec<u8>, Refusal> {
    let mut out = Vec::new();
    let mut piece = [0; 16 * 1024];
    loop {
        let read = reader.read(&mut piece).map_err(|_| Refusal::Compression)?;
        if read == 0 {
            return Ok(out);
        }
        if out.len() + read > max_body {
            return Err(Refusal::PayloadTooLarge { max_bytes: max_body });
        }
        share.grow(read)?;
        out.extend_from_slice(piece.get(..read).unwrap_or_default());
    }
}

/// Reads the whole body. A refused one is answered at once; what is still being sent is read for a while, so that its
/// sender gets to see why.
async fn read_body(relay: &Relay, body: Body, headers: &HeaderMap) -> Result<(BytesMut, Share), Refusal> {
    let mut share = Share::of(relay);
    match collect(body, content_length(headers), relay.limits(), &mut share).await {
        Ok(bytes) => Ok((bytes, share)),
        Err((refusal, rest)) => {
            if let Some(rest) = rest {
                relay.discard(rest);
            }
            Err(refusal)
        }
    }
}

/// For bodies that are one JSON document of the sidecar's own, such as a subscription.
pub(super) async fn read_document(relay: &Relay, body: Body, headers: &HeaderMap) -> Result<String, Refusal> {
    let (bytes, _share) = read_body(relay, body, headers).await?;
    String::from_utf8(bytes.into())
        .map_err(|_| Refusal::Parameter { name: "body", must: "be a JSON object in UTF-8".into() })
}
