//! `GET` and `POST /stream`: events as server-sent events.
//!
//! The response's body is a subscriber that is read as fast as the peer takes it: what is at hand is gathered
//! into one write, and a peer that doesn't read holds nothing but its place.

use std::convert::Infallible;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use http::{HeaderName, HeaderValue, Request, header};
use http_body_util::BodyExt as _;

use super::refusal::Refusal;
use super::{Relay, body, media_type, parameters};
use crate::aep::sse;
use crate::relay::auth::{Permission, Principal};
use crate::relay::limits::WRITE_SIZE;
use crate::relay::subscriber::{Step, Subscriber, Subscription};

/// `GET /stream`.
pub(super) async fn get(State(relay): State<Relay>, request: Request<Body>) -> Result<Response, Refusal> {
    let principal = relay.authorize(request.headers(), request.uri(), Permission::Read)?;
    let query = request.uri().query().unwrap_or_default();
    let subscription = parameters::from_query(query, request.headers(), relay.limits().max_from)?;
    Ok(open(&relay, principal, subscription))
}

/// `POST /stream`: the same parameters as a JSON body, for resume sets that outgrow a request line.
pub(super) async fn post(State(relay): State<Relay>, request: Request<Body>) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let admitted =
        relay.authorize(&parts.headers, &parts.uri, Permission::Read).and_then(|principal| match media_type(
            &parts.headers,
        )
        .as_deref()
        {
            Some("application/json") => Ok(principal),
            _ => Err(Refusal::MediaType { expected: "application/json" }),
        });
    let principal = match admitted {
        Ok(principal) => principal,
        Err(refusal) => {
            relay.discard(body);
            return Err(refusal);
        }
    };
    let text = body::read_document(&relay, body, &parts.headers).await?;
    let subscription = parameters::from_body(&text, &parts.headers, relay.limits().max_from)?;
    Ok(open(&relay, principal, subscription))
}

fn open(relay: &Relay, principal: Principal, subscription: Subscription) -> Response {
    let subscriber = relay.hub().subscribe(principal.within(subscription));
    relay.hub().metrics().subscribers.inc();
    let reader = Reader { relay: relay.clone(), principal, subscriber, state: Stage::New };
    let pieces = stream::unfold(reader, |mut reader| async {
        let piece = reader.next().await?;
        Some((Ok::<_, Infallible>(piece), reader))
    });
    let mut response = Response::new(Body::from_stream(pieces));
    for (name, value) in [
        (header::CONTENT_TYPE, "text/event-stream"),
        // No intermediary may hold back or compress what must arrive at once.
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    New,
    Open,
    Ended,
}

struct Reader {
    relay: Relay,
    principal: Principal,
    subscriber: Subscriber,
    state: Stage,
}

impl Reader {
    /// The next piece to write, `None` at the end of the stream.
    async fn next(&mut self) -> Option<Bytes> {
        match self.state {
            Stage::Ended => return None,
            Stage::New => {
                self.state = Stage::Open;
                // The first bytes, at once: a proxy may hold the headers back until there are some.
                return Some(Bytes::from_static(sse::PING));
            }
            Stage::Open => {}
        }
        // History can be asked for again; what is going away has time for news only.
        if self.relay.hub().is_closing() && self.subscriber.is_replaying() {
            self.state = Stage::Ended;
            return Some(Bytes::from_static(sse::SHUTTING_DOWN));
        }
        let step = tokio::select! {
            biased;
            // First, or a reader with much to read would never be stopped.
            () = self.principal.revoked() => None,
            step = self.subscriber.next() => step,
            () = tokio::time::sleep(self.relay.limits().times.stream_ping) => return Some(Bytes::from_static(sse::PING)),
            () = self.relay.hub().closing() => {
                self.state = Stage::Ended;
                return Some(Bytes::from_static(sse::SHUTTING_DOWN));
            }
        };
        let Some(step) = step else {
            self.state = Stage::Ended;
            return None;
        };
        let mut piece = Piece::default();
        self.write(step, &mut piece);
        while self.state == Stage::Open && piece.len() < WRITE_SIZE {
            let Some(step) = self.subscriber.ready() else { break };
            self.write(step, &mut piece);
        }
        Some(piece.finish())
    }

    fn write(&mut self, step: Step, piece: &mut Piece) {
        if step.is_last() {
            self.state = Stage::Ended;
        }
        match step {
            Step::Run(block, range) => piece.push(block.messages(&range)),
            Step::Events(events) => piece.build(|out| {
                for event in &events {
                    sse::write_message(event, out);
                }
            }),
            Step::Exhausted { session, earliest } => {
                piece.build(|out| sse::write_replay_exhausted(&session, earliest, out));
            }
            Step::Complete => piece.push(Bytes::from_static(sse::REPLAY_COMPLETE)),
            Step::Behind => {}
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.relay.hub().metrics().subscribers.dec();
    }
}

/// Bytes for one write. A single shared run of messages is passed on as it is; only several are copied together.
#[derive(Default)]
struct Piece {
    shared: Option<Bytes>,
    gathered: BytesMut,
}

impl Piece {
    fn len(&self) -> usize {
        self.gathered.len() + self.shared.as_ref().map_or(0, Bytes::len)
    }

    fn push(&mut self, bytes: Bytes) {
        if self.len() == 0 {
            self.shared = Some(bytes);
        } else {
            self.gather();
            self.gathered.extend_from_slice(&bytes);
        }
    }

    fn build(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut out = Vec::new();
        write(&mut out);
        self.push(out.into());
    }

    fn gather(&mut self) {
        if let Some(shared) = self.shared.take() {
            self.gathered.extend_from_slice(&shared);
        }
    }

    fn finish(self) -> Bytes {
        match self.shared {
            Some(shared) => shared,
            None => self.gathered.freeze(),
        }
    }
}

/// Reads what is left of a body that was refused, up to a bound, so that its sender gets to the answer.
pub(super) async fn drain(mut body: Body, mut bytes: usize) {
    while let Some(Ok(frame)) = body.frame().await {
        let len = frame.data_ref().map_or(0, Bytes::len);
        match bytes.checked_sub(len) {
            Some(left) => bytes = left,
            None => return,
        }
    }
}
