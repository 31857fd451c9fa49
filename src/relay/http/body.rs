//! Bodies of requests: read whole within bounds, decompressed within bounds.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::BytesMut;
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;

use super::Relay;
use super::refusal::Refusal;
use crate::relay::limits::Limits;

/// Bodies from this size on are read off the threads that serve connections.
pub(super) const LARGE: usize = 128 * 1024;
/// When to come back after the memory for bodies was used up.
pub(super) const BUSY: Duration = Duration::from_secs(1);

/// How a body is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
    Zstd,
}

impl Encoding {
    /// What the headers say.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, Refusal> {
        Ok(match headers.get(header::CONTENT_ENCODING).map(|value| value.as_bytes().trim_ascii()) {
            None => Encoding::Identity,
            Some(value) if value.eq_ignore_ascii_case(b"identity") => Encoding::Identity,
            Some(value) if value.eq_ignore_ascii_case(b"gzip") || value.eq_ignore_ascii_case(b"x-gzip") => {
                Encoding::Gzip
            }
            Some(value) if value.eq_ignore_ascii_case(b"zstd") => Encoding::Zstd,
            Some(_) => return Err(Refusal::Encoding),
        })
    }
}

/// Memory for request bodies, over all requests.
#[derive(Debug, Clone, Default)]
pub(super) struct Budget(Arc<AtomicUsize>);

/// A request's share of the [`Budget`], given back when dropped.
#[derive(Debug)]
pub(super) struct Share {
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

/// The body as it was before it was compressed.
pub(super) fn decompressed<'b>(
    bytes: &'b [u8],
    encoding: Encoding,
    limits: &Limits,
    share: &mut Share,
) -> Result<Cow<'b, [u8]>, Refusal> {
    match encoding {
        Encoding::Identity => Ok(Cow::Borrowed(bytes)),
        Encoding::Gzip => {
            decompress(flate2::read::MultiGzDecoder::new(bytes), limits.max_body, share).map(Cow::Owned)
        }
        Encoding::Zstd => {
            let mut reader =
                zstd::stream::read::Decoder::with_buffer(bytes).map_err(|_| Refusal::Compression)?;
            // Wide enough for what every decoder takes, and no wider than a body may be long.
            let window = limits.max_body.next_power_of_two().trailing_zeros().clamp(23, 27);
            reader.window_log_max(window).map_err(|_| Refusal::Compression)?;
            decompress(reader, limits.max_body, share).map(Cow::Owned)
        }
    }
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
pub(super) async fn read_body(
    relay: &Relay,
    body: Body,
    headers: &HeaderMap,
) -> Result<(BytesMut, Share), Refusal> {
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
