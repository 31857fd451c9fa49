//! The reading half of a WebSocket connection.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{Message, WebSocket, close_code};
use futures_util::stream::SplitStream;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::value::RawValue;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, timeout, timeout_at};

use super::{ANSWER_BYTES, Answer, Ending, LONGEST_ID, Progress};
use crate::aep::event::quoted;
use crate::aep::frame::{Frame, Incoming, Plain};
use crate::aep::{Event, EventError, Scope};
use crate::relay::auth::{Permission, Principal};
use crate::relay::control::{Connection, Unrouted};
use crate::relay::http::refusal::Refusal;
use crate::relay::http::{Relay, parameters};
use crate::relay::hub::Refused;
use crate::relay::keep::NotKept;

/// Events that arrived together are taken in together, up to this many.
const BATCH: usize = 256;

/// How many bytes of events are read before they are taken in, and one more event at most.
const BATCH_BYTES: usize = 1024 * 1024;

/// How long a command waits to be kept.
const COMMAND: Duration = Duration::from_secs(5);

/// Takes what the peer sends.
pub(super) struct Listener<'c> {
    relay: &'c Relay,
    principal: &'c Principal,
    connection: Connection,
    answers: mpsc::Sender<Answer>,
    /// What is left of the bytes that answers may wait in.
    room: Arc<Semaphore>,
    progress: &'c Progress,
    /// The ids of the live subscriptions.
    subscriptions: HashSet<String>,
    /// Events that are read and not yet taken in, and their memory in bytes.
    events: Vec<Event>,
    bytes: usize,
}

impl<'c> Listener<'c> {
    pub(super) fn new(
        relay: &'c Relay,
        principal: &'c Principal,
        connection: Connection,
        answers: mpsc::Sender<Answer>,
        progress: &'c Progress,
    ) -> Self {
        let room = Arc::new(Semaphore::new(ANSWER_BYTES));
        Self {
            relay,
            principal,
            connection,
            answers,
            room,
            progress,
            subscriptions: HashSet::new(),
            events: Vec::new(),
            bytes: 0,
        }
    }

    /// Listens until the connection is to end.
    pub(super) async fn run(&mut self, stream: &mut SplitStream<WebSocket>) -> Ending {
        loop {
            let message = match self.events.is_empty() {
                true => match timeout(self.relay.limits().times.silence, stream.next()).await {
                    Ok(message) => message,
                    Err(_) if self.progress.last().elapsed() < self.relay.limits().times.silence => continue,
                    Err(_) => return Ending::Silent,
                },
                // What has been read is taken in as soon as nothing more is at hand.
                false => match self.has_room().then(|| stream.next().now_or_never()).flatten() {
                    Some(message) => message,
                    None => {
                        if let Err(ending) = self.take_in().await {
                            return ending;
                        }
                        continue;
                    }
                },
            };
            let ended = match message {
                None => Err(Ending::Gone),
                Some(Err(error)) => Err(self.broken(&error).await),
                Some(Ok(message)) => self.message(message).await,
            };
            if let Err(ending) = ended {
                return ending;
            }
        }
    }

    /// Whether more is read before what has been read is taken in: while that can't be kept, it waits in memory.
    fn has_room(&self) -> bool {
        self.events.len() < BATCH && self.bytes < BATCH_BYTES
    }

    /// Takes in what has been read. While it can't be kept, nothing more is read: the sender sees its connection fill
    /// up, and loses nothing.
    ///
    /// # Cancel safety
    /// What isn't taken in when it is dropped is taken in by the next call.
    pub(super) async fn take_in(&mut self) -> Result<(), Ending> {
        let hub = self.relay.hub();
        while !self.events.is_empty() {
            match hub.accept(&mut self.events).await {
                Ok(()) => {}
                Err(NotKept::Now { .. }) => hub.room().await,
                Err(NotKept::TooLarge { .. }) => {
                    // Together they may be too much, each by itself less.
                    while let Some(event) = self.events.first().cloned() {
                        self.take_in_one(event).await?;
                        self.events.remove(0);
                    }
                }
            }
        }
        self.bytes = 0;
        Ok(())
    }

    async fn take_in_one(&self, event: Event) -> Result<(), Ending> {
        let (hub, id, mut one) = (self.relay.hub(), event.id().to_owned(), vec![event]);
        loop {
            match hub.accept(&mut one).await {
                Ok(()) => return Ok(()),
                Err(NotKept::Now { .. }) => hub.room().await,
                Err(error @ NotKept::TooLarge { .. }) => {
                    let (code, detail) = ("payload-too-large", error.to_string());
                    let detail = Some(detail.as_str());
                    return self
                        .refuse(Plain::Error { id: None, code, detail, cause: Some(&id), versions: None })
                        .await;
                }
            }
        }
    }

    async fn message(&mut self, message: Message) -> Result<(), Ending> {
        match message {
            Message::Text(text) => self.text(&text).await,
            Message::Binary(_) => {
                self.refuse(Plain::error("binary-unsupported")).await?;
                Err(Ending::Violation { code: close_code::UNSUPPORTED })
            }
            Message::Ping(_) | Message::Pong(_) => Ok(()),
            Message::Close(_) => Err(Ending::Gone),
        }
    }

    /// What to do about a message that could not be read.
    async fn broken(&self, error: &axum::Error) -> Ending {
        // The library closes nothing by itself; a message past the bound is the one error worth an answer.
        let too_large = format!("{error:?}").contains("TooLong");
        if !too_large || self.refuse(Plain::error("payload-too-large")).await.is_err() {
            return Ending::Gone;
        }
        Ending::Violation { code: close_code::SIZE }
    }

    async fn text(&mut self, text: &str) -> Result<(), Ending> {
        match Incoming::read(text) {
            Incoming::Event(event) => self.event(event).await,
            Incoming::Frame(frame) => self.frame(frame).await,
            Incoming::BadJson => self.refuse(Plain::error("bad-json")).await,
            Incoming::InvalidEvent { error, id } => self.invalid(&error, id.as_deref()).await,
        }
    }

    async fn invalid(&self, error: &EventError, id: Option<&str>) -> Result<(), Ending> {
        let detail = error.to_string();
        let code = "invalid-event";
        self.refuse(Plain::Error { id: None, code, detail: Some(&detail), cause: id, versions: None }).await
    }

    async fn event(&mut self, event: Event) -> Result<(), Ending> {
        if event.scope() == Scope::Command {
            // In order with what was sent before it.
            self.take_in().await?;
            return self.command(event).await;
        }
        if !self.principal.may(Permission::Emit) {
            let (code, detail) = ("unauthorized", Some("this token does not permit emit"));
            return self
                .refuse(Plain::Error { id: None, code, detail, cause: Some(event.id()), versions: None })
                .await;
        }
        if let (Some(session), Scope::Session) = (event.session(), event.scope()) {
            self.connection.claim(session);
        }
        self.bytes = self.bytes.saturating_add(event.memory());
        self.events.push(event);
        Ok(())
    }

    async fn command(&self, event: Event) -> Result<(), Ending> {
        // Who gives an order waits for an answer; while nothing can be kept, that is that it goes nowhere.
        let patience = Instant::now() + COMMAND;
        let routed = loop {
            if !self.principal.may(Permission::Control) {
                break Err(Unrouted::Unauthorized);
            }
            match self.relay.hub().command(&event).await {
                Ok(()) => break Ok(()),
                Err(Refused::Unrouted(unrouted)) => break Err(unrouted),
                Err(Refused::NotKept(NotKept::Now { .. })) => {
                    if timeout_at(patience, self.relay.hub().room()).await.is_err() {
                        break Err(Unrouted::NotKept);
                    }
                }
                Err(Refused::NotKept(error @ NotKept::TooLarge { .. })) => {
                    let (code, detail) = ("payload-too-large", error.to_string());
                    let (detail, cause) = (Some(detail.as_str()), Some(event.id()));
                    return self.refuse(Plain::Error { id: None, code, detail, cause, versions: None }).await;
                }
            }
        };
        let Err(refused) = routed else { return Ok(()) };
        tracing::info!(
            code = refused.code(),
            source = %quoted(event.source()),
            id = %quoted(event.id()),
            session = %quoted(event.session().unwrap_or_default()),
            command = %quoted(event.event_type()),
            "a command was refused"
        );
        let (code, detail) = (refused.code(), Some(refused.detail()));
        self.refuse(Plain::Error { id: None, code, detail, cause: Some(event.id()), versions: None }).await
    }

    async fn frame(&mut self, frame: Frame) -> Result<(), Ending> {
        // In order with what was sent before it: a subscription begins after it, a pong says that it is in.
        self.take_in().await?;
        match frame {
            Frame::Subscribe { id, text } => self.subscribe(id, &text).await,
            Frame::Unsubscribe { id } => self.unsubscribe(id).await,
            Frame::Roster { id } => self.roster(id).await,
            Frame::Ping { t } if t.as_ref().is_some_and(|t| t.len() > LONGEST_ID) => {
                self.refuse_request(None, "limit-exceeded", "t: too long to be sent back").await
            }
            Frame::Ping { t } => {
                let t = t.and_then(|t| RawValue::from_string(t).ok());
                self.frame_text(Plain::Pong { t: t.as_deref() }.to_text()).await
            }
            Frame::Hello(_) | Frame::Other => Ok(()),
        }
    }

    /// The id of a request, when it is one that can be sent back.
    async fn id(&self, id: Option<String>) -> Result<Option<String>, Ending> {
        let (code, detail) = match id {
            Some(id) if id.len() <= LONGEST_ID => return Ok(Some(id)),
            Some(_) => ("limit-exceeded", "id: too long to be sent back"),
            None => ("invalid-filter", "id: must be a non-empty string"),
        };
        self.refuse_request(None, code, detail).await?;
        Ok(None)
    }

    async fn subscribe(&mut self, id: Option<String>, text: &str) -> Result<(), Ending> {
        let Some(id) = self.id(id).await? else { return Ok(()) };
        if !self.principal.may(Permission::Read) {
            return self.refuse_request(Some(&id), "unauthorized", "this token does not permit read").await;
        }
        if self.subscriptions.contains(&id) {
            return self.refuse_request(Some(&id), "invalid-filter", "id: a live subscription has it").await;
        }
        let max = self.relay.limits().max_subscriptions;
        if self.subscriptions.len() >= max {
            let detail = format!("AEP_MAX_SUBSCRIPTIONS allows {max} subscriptions");
            return self.refuse_request(Some(&id), "limit-exceeded", &detail).await;
        }
        let subscription = match parameters::from_frame(text, self.relay.limits().max_from) {
            Ok(subscription) => self.principal.within(subscription),
            Err(refusal) => {
                let code = match refusal {
                    Refusal::TooManyPositions { .. } => "limit-exceeded",
                    _ => "invalid-filter",
                };
                return self.refuse_request(Some(&id), code, &refusal.detail()).await;
            }
        };
        self.subscriptions.insert(id.clone());
        self.connection.set_subscriptions(self.subscriptions.len());
        let subscriber = Box::new(self.relay.hub().subscribe(subscription));
        self.answer(Answer::Subscribed { id, subscriber }).await
    }

    async fn unsubscribe(&mut self, id: Option<String>) -> Result<(), Ending> {
        let Some(id) = self.id(id).await? else { return Ok(()) };
        self.subscriptions.remove(&id);
        self.connection.set_subscriptions(self.subscriptions.len());
        self.answer(Answer::Unsubscribed { id }).await
    }

    async fn roster(&self, id: Option<String>) -> Result<(), Ending> {
        let Some(id) = self.id(id).await? else { return Ok(()) };
        if self.connection.is_emitter() || !self.principal.may(Permission::Read) {
            return self.refuse_request(Some(&id), "unauthorized", "the roster is for consumers").await;
        }
        self.answer(Answer::Roster { id }).await
    }

    async fn refuse_request(&self, id: Option<&str>, code: &'static str, detail: &str) -> Result<(), Ending> {
        self.refuse(Plain::Error { id, code, detail: Some(detail), cause: None, versions: None }).await
    }

    async fn refuse(&self, error: Plain<'_>) -> Result<(), Ending> {
        if let Plain::Error { code, .. } = &error {
            self.relay.hub().metrics().refused(closed(code));
        }
        self.frame_text(error.to_text()).await
    }

    async fn frame_text(&self, text: String) -> Result<(), Ending> {
        let bytes = u32::try_from(text.len().clamp(1, ANSWER_BYTES)).unwrap_or(u32::MAX);
        // Never closed while the listener lives.
        let share = Arc::clone(&self.room).acquire_many_owned(bytes).await.map_err(|_| Ending::Gone)?;
        self.answer(Answer::Frame(text, share)).await
    }

    async fn answer(&self, answer: Answer) -> Result<(), Ending> {
        self.answers.send(answer).await.map_err(|_| Ending::Gone)
    }
}

/// The code as a label: from the closed set.
fn closed(code: &str) -> &'static str {
    const CODES: [&str; 10] = [
        "ambiguous",
        "bad-json",
        "binary-unsupported",
        "invalid-event",
        "invalid-filter",
        "limit-exceeded",
        "no-route",
        "payload-too-large",
        "unauthorized",
        "unsupported",
    ];
    CODES.into_iter().find(|known| *known == code).unwrap_or("other")
}
