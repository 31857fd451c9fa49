//! `GET /socket`: events, subscriptions and commands over one WebSocket.
//!
//! A connection is two loops over the two halves of its socket. The reading one ([`listen`]) takes what the peer
//! sends and answers through a short queue; the writing one ([`write`]) owns the subscriptions, and writes what
//! they have at hand as fast as the peer takes it. A peer that doesn't read fills its own queue, stops being
//! listened to, and is cut off by the write time-out; nobody else notices.
//!
//! Spec: AEP-0003 §3.5, §4, §6.5.

mod listen;
mod write;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{FromRequestParts as _, State};
use axum::response::Response;
use futures_util::stream::SplitSink;
use futures_util::{SinkExt as _, StreamExt as _};
use http::request::Parts;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout};

use self::listen::Listener;
use self::write::Writer;
use super::Relay;
use super::discovery::capabilities;
use super::refusal::Refusal;
use crate::aep::frame::{Frame, Hello, Identity, Incoming, LONGEST_HELLO, Outgoing, Plain, Role};
use crate::relay::auth::Principal;
use crate::relay::limits::Times;
use crate::relay::subscriber::Subscriber;

/// Answers that wait for the peer to take them; when there are as many, the peer is not listened to.
const ANSWERS: usize = 64;
/// The same in bytes of text. A longer answer takes all of it.
const ANSWER_BYTES: usize = 256 * 1024;
/// The longest id of a subscription or a request, and the longest `t` of a ping, in bytes: they come back.
const LONGEST_ID: usize = 1024;
/// The name under which the relay says hello.
const AGENT: &str = "aep-sidecar";

/// What the reading half tells the writing half.
#[derive(Debug)]
enum Answer {
    /// A frame's text, and its share of [`ANSWER_BYTES`].
    Frame(String, OwnedSemaphorePermit),
    /// Who is connected, to be told as of when it is written: it may be long.
    Roster {
        /// The request's id.
        id: String,
    },
    /// A subscription has begun.
    Subscribed {
        /// Names it.
        id: String,
        /// Its place in the relay.
        subscriber: Box<Subscriber>,
    },
    /// A subscription is ended.
    Unsubscribed {
        /// Names it.
        id: String,
    },
}

/// Why a connection is closed by the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The peer closed it, or is gone: nothing is said any more.
    Gone,
    /// It broke the protocol; the error frame is written already.
    Violation {
        /// The close code.
        code: u16,
    },
    /// It said nothing for too long.
    Silent,
    /// It fell behind everything that is held.
    Behind,
    /// The relay is going away.
    Closing,
    /// Its token no longer counts.
    Revoked,
}

impl Ending {
    fn code(self) -> u16 {
        match self {
            Self::Gone => close_code::NORMAL,
            Self::Violation { code } => code,
            Self::Silent | Self::Revoked => close_code::POLICY,
            Self::Behind => close_code::AGAIN,
            Self::Closing => close_code::AWAY,
        }
    }

    /// The reason in the `closing` frame, for a close that the peer did nothing wrong for.
    fn reason(self) -> Option<&'static str> {
        match self {
            Self::Gone | Self::Violation { .. } => None,
            Self::Silent => Some("silent"),
            Self::Behind => Some("slow-consumer"),
            Self::Closing => Some("shutting-down"),
            Self::Revoked => Some("unauthorized"),
        }
    }
}

/// `GET /socket`.
pub(super) async fn upgrade(State(relay): State<Relay>, mut parts: Parts) -> Result<Response, Refusal> {
    let principal = relay.authenticate(&parts.headers, &parts.uri)?;
    let upgrade =
        WebSocketUpgrade::from_request_parts(&mut parts, &()).await.map_err(|_| Refusal::NotAHandshake)?;
    let max = relay.limits().max_body;
    // Held by the connection, so that a stop waits for it.
    let tracked = relay.tracked();
    Ok(upgrade.max_message_size(max).max_frame_size(max).on_upgrade(move |socket| async move {
        Box::pin(serve(relay, principal, socket)).await;
        drop(tracked);
    }))
}

async fn serve(relay: Relay, principal: Principal, mut socket: WebSocket) {
    let times = relay.limits().times;
    let opened = tokio::select! {
        opened = open(&relay, &mut socket) => opened,
        () = relay.hub().closing() => Err(Ending::Closing),
        () = principal.revoked() => Err(Ending::Revoked),
    };
    let hello = match opened {
        Ok(hello) => hello,
        Err(ending) => {
            let (mut sink, mut stream) = socket.split();
            say_goodbye(&mut sink, ending, &times).await;
            return await_close(&mut stream, &times).await;
        }
    };
    let (connection, commands) = relay.hub().connections().open(hello);
    let (answers, queue) = mpsc::channel(ANSWERS);
    let (mut sink, mut stream) = socket.split();
    let progress = Progress::default();
    let mut writer = Writer::new(&relay, &principal, queue, commands, &progress);
    let mut listener = Listener::new(&relay, &principal, connection, answers, &progress);
    // A writer that waits for its peer doesn't notice; it has this long to.
    let closing = async {
        relay.hub().closing().await;
        tokio::time::sleep(times.close).await;
    };
    let ending = tokio::select! {
        ending = listener.run(&mut stream) => ending,
        ending = writer.run(&mut sink) => ending,
        () = closing => Ending::Closing,
    };
    // What has been read is taken in if that can be: its sender doesn't know that it wasn't.
    if timeout(times.close, listener.take_in()).await.is_err() {
        tracing::warn!("events of a connection that ended could not be kept, and are not admitted");
    }
    // Claims end before the peer learns that the connection does.
    drop(listener);
    if ending == Ending::Gone {
        // The peer's close is answered by the library as the sink is closed.
        let _gone = timeout(times.close, sink.close()).await;
        return;
    }
    let said = async {
        writer.finish(&mut sink, ending).await;
        say_goodbye(&mut sink, ending, &times).await;
    };
    if timeout(times.close, said).await.is_ok() {
        await_close(&mut stream, &times).await;
    }
}

/// The exchange of `hello`.
async fn open(relay: &Relay, socket: &mut WebSocket) -> Result<Hello, Ending> {
    // Signs of life below the protocol may come at any time.
    let first = async {
        loop {
            match socket.recv().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                message => return message,
            }
        }
    };
    let first = match timeout(relay.limits().times.head, first).await {
        Err(_) => None,
        Ok(None | Some(Err(_) | Ok(Message::Close(_)))) => return Err(Ending::Gone),
        Ok(Some(Ok(Message::Text(text)))) if text.len() <= LONGEST_HELLO => match Incoming::read(&text) {
            Incoming::Frame(Frame::Hello(hello)) if !hello.declares_too_much() => Some(hello),
            _ => None,
        },
        Ok(Some(Ok(_))) => None,
    };
    let violation = Err(Ending::Violation { code: close_code::PROTOCOL });
    let Some(hello) = first else {
        relay.hub().metrics().refused("hello-required");
        send(socket, Plain::error("hello-required").to_text()).await?;
        return violation;
    };
    if !hello.versions.iter().any(|version| version == crate::aep::VERSION) {
        relay.hub().metrics().refused("version-unsupported");
        let versions = Some([crate::aep::VERSION]);
        let error =
            Plain::Error { id: None, code: "version-unsupported", detail: None, cause: None, versions };
        send(socket, error.to_text()).await?;
        return violation;
    }
    let answer = Outgoing::Hello {
        versions: [crate::aep::VERSION],
        role: Role::Both,
        identity: Identity { agent: AGENT },
        capabilities: capabilities(relay.limits()),
    };
    send(socket, answer.to_text()).await?;
    Ok(*hello)
}

async fn send(socket: &mut WebSocket, text: String) -> Result<(), Ending> {
    socket.send(Message::Text(text.into())).await.map_err(|_| Ending::Gone)
}

async fn say_goodbye(sink: &mut SplitSink<WebSocket, Message>, ending: Ending, times: &Times) {
    let frame = CloseFrame { code: ending.code(), reason: ending.reason().unwrap_or_default().into() };
    // A peer that is gone needs no goodbye.
    let _gone = timeout(times.close, sink.send(Message::Close(Some(frame)))).await;
}

/// Reads on until the peer has closed too, so that it gets to see ours.
async fn await_close(
    stream: &mut (impl futures_util::Stream<Item = Result<Message, axum::Error>> + Unpin),
    times: &Times,
) {
    let closed = async { while let Some(Ok(_)) = stream.next().await {} };
    // A peer that doesn't close in time is cut off.
    let _cut = timeout(times.close, closed).await;
}

/// When the peer last took something: one that is busy reading need not say anything.
#[derive(Debug, Clone)]
struct Progress(Arc<Mutex<Instant>>);

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Progress {
    fn made(&self) {
        *self.0.lock() = Instant::now();
    }

    fn last(&self) -> Instant {
        *self.0.lock()
    }
}

/// Milliseconds of a duration.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
