//! The writing half of a WebSocket connection.

use std::collections::{HashSet, VecDeque};

use axum::extract::ws::{Message, WebSocket};
use futures_util::stream::SplitSink;
use futures_util::{FutureExt as _, SinkExt as _};
use lru::LruCache;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::{Answer, Ending, Progress, millis};
use crate::aep::frame::{Delivered, Plain};
use crate::aep::{Event, Position};
use crate::relay::auth::Principal;
use crate::relay::http::Relay;
use crate::relay::limits::WRITE_SIZE;
use crate::relay::subscriber::{Step, Subscriber};

type Sink = SplitSink<WebSocket, Message>;

/// Writes what the peer is owed.
pub(super) struct Writer<'c> {
    relay: &'c Relay,
    principal: &'c Principal,
    answers: mpsc::Receiver<Answer>,
    commands: mpsc::Receiver<Event>,
    arrivals: watch::Receiver<u64>,
    /// Taken in turns.
    subscriptions: VecDeque<Subscription>,
    opened: Instant,
    progress: &'c Progress,
}

struct Subscription {
    id: String,
    subscriber: Subscriber,
    /// The last position given of each session, for the `closing` frame; of as many sessions as a resume may name.
    delivered: LruCache<String, Position>,
    most: usize,
}

impl<'c> Writer<'c> {
    pub(super) fn new(
        relay: &'c Relay,
        principal: &'c Principal,
        answers: mpsc::Receiver<Answer>,
        commands: mpsc::Receiver<Event>,
        progress: &'c Progress,
    ) -> Self {
        let arrivals = relay.hub().arrivals();
        let opened = Instant::now();
        Self {
            relay,
            principal,
            answers,
            commands,
            arrivals,
            subscriptions: VecDeque::new(),
            opened,
            progress,
        }
    }

    /// Writes until the connection is to end.
    pub(super) async fn run(&mut self, sink: &mut Sink) -> Ending {
        match self.write(sink).await {
            Ok(never) => match never {},
            Err(ending) => ending,
        }
    }

    async fn write(&mut self, sink: &mut Sink) -> Result<std::convert::Infallible, Ending> {
        let period = self.relay.limits().times.socket_ping;
        let mut ping = interval_at(Instant::now() + period, period);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // What was asked and what was commanded goes before what flows.
            while let Ok(answer) = self.answers.try_recv() {
                self.answer(sink, answer).await?;
            }
            while let Ok(command) = self.commands.try_recv() {
                feed(sink, command.as_str().into()).await?;
            }
            if self.relay.hub().is_closing() {
                return Err(Ending::Closing);
            }
            if self.principal.is_revoked() {
                return Err(Ending::Revoked);
            }
            if ping.tick().now_or_never().is_some() {
                self.ping(sink).await?;
            }
            // Seen before the subscriptions are, so that what arrives meanwhile wakes the loop again.
            self.arrivals.mark_unchanged();
            if self.piece(sink).await? > 0 {
                flush(sink).await?;
                self.progress.made();
                continue;
            }
            flush(sink).await?;
            tokio::select! {
                answer = self.answers.recv() => match answer {
                    Some(answer) => self.answer(sink, answer).await?,
                    None => return Err(Ending::Gone),
                },
                Some(command) = self.commands.recv() => feed(sink, command.as_str().into()).await?,
                changed = self.arrivals.changed() => if changed.is_err() { return Err(Ending::Closing) },
                _ = ping.tick() => self.ping(sink).await?,
                () = self.relay.hub().closing() => {}
                () = self.principal.revoked() => return Err(Ending::Revoked),
            }
        }
    }

    async fn ping(&self, sink: &mut Sink) -> Result<(), Ending> {
        feed(sink, Plain::Ping { t: millis(self.opened.elapsed()) }.to_text()).await
    }

    async fn answer(&mut self, sink: &mut Sink, answer: Answer) -> Result<(), Ending> {
        match answer {
            Answer::Frame(text, _share) => feed(sink, text).await,
            Answer::Roster { id } => {
                let mut entries = self.relay.hub().connections().roster();
                if let Some(bound) = self.principal.bound() {
                    // What a filter says of sessions it doesn't name can't be told without an event: they stay unseen.
                    let named: HashSet<&str> = bound.sessions().into_iter().flatten().collect();
                    entries.retain(|entry| named.contains(&*entry.session));
                }
                feed(sink, Plain::Roster { id: &id, entries }.to_text()).await?;
                flush(sink).await
            }
            Answer::Subscribed { id, subscriber } => {
                feed(sink, Plain::Subscribed { id: &id }.to_text()).await?;
                let most = self.relay.limits().max_from;
                // Bounded by hand: a bounded one would take the room for all sessions at once.
                let delivered = LruCache::unbounded();
                self.subscriptions.push_back(Subscription { id, subscriber: *subscriber, delivered, most });
                self.relay.hub().metrics().subscribers.inc();
                Ok(())
            }
            Answer::Unsubscribed { id } => {
                let before = self.subscriptions.len();
                self.subscriptions.retain(|subscription| subscription.id != id);
                if self.subscriptions.len() < before {
                    self.relay.hub().metrics().subscribers.dec();
                }
                feed(sink, Plain::Unsubscribed { id: &id }.to_text()).await
            }
        }
    }

    /// Writes a piece of what the subscriptions have at hand. How many bytes that was.
    async fn piece(&mut self, sink: &mut Sink) -> Result<usize, Ending> {
        let mut bytes = 0;
        for _ in 0..self.subscriptions.len() {
            let Some(subscription) = self.subscriptions.front_mut() else { break };
            while bytes < WRITE_SIZE {
                let Some(step) = subscription.subscriber.ready() else { break };
                bytes += subscription.step(sink, step).await?;
            }
            if bytes >= WRITE_SIZE {
                break;
            }
            self.subscriptions.rotate_left(1);
        }
        // The next piece starts with another one.
        if self.subscriptions.len() > 1 {
            self.subscriptions.rotate_left(1);
        }
        Ok(bytes)
    }

    /// What is still said before a deliberate close: live events at hand, then where every subscription stands.
    pub(super) async fn finish(&mut self, sink: &mut Sink, ending: Ending) {
        // A peer that is gone by now needs none of this.
        let _gone = self.last_words(sink, ending).await;
    }

    async fn last_words(&mut self, sink: &mut Sink, ending: Ending) -> Result<(), Ending> {
        while let Ok(answer) = self.answers.try_recv() {
            self.answer(sink, answer).await?;
        }
        if let Some(reason) = ending.reason() {
            if ending == Ending::Closing {
                for subscription in &mut self.subscriptions {
                    // History can be asked for again.
                    while !subscription.subscriber.is_replaying() {
                        let Some(step) = subscription.subscriber.ready() else { break };
                        subscription.step(sink, step).await?;
                    }
                }
            }
            let delivered = self.subscriptions.iter().flat_map(Subscription::positions).collect();
            feed(sink, Plain::Closing { reason, delivered }.to_text()).await?;
        }
        flush(sink).await
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        let count = i64::try_from(self.subscriptions.len()).unwrap_or(i64::MAX);
        self.relay.hub().metrics().subscribers.dec_by(count);
    }
}

impl Subscription {
    /// Writes one step. How many bytes that was.
    async fn step(&mut self, sink: &mut Sink, step: Step) -> Result<usize, Ending> {
        match step {
            Step::Events(events) => self.events(sink, &events).await,
            Step::Run(block, range) => self.events(sink, block.events().get(range).unwrap_or_default()).await,
            Step::Exhausted { session, earliest } => {
                let marker =
                    Plain::ReplayExhausted { sub: &self.id, session: &session, earliest: earliest.into() };
                let text = marker.to_text();
                let bytes = text.len();
                feed(sink, text).await?;
                Ok(bytes)
            }
            Step::Behind => Err(Ending::Behind),
            Step::Complete => Ok(0),
        }
    }

    async fn events(&mut self, sink: &mut Sink, events: &[Event]) -> Result<usize, Ending> {
        let mut bytes = 0;
        for event in events {
            feed(sink, event.as_str().into()).await?;
            bytes += event.as_bytes().len();
            if let (Some(session), Some(position)) = (event.session(), event.position()) {
                match self.delivered.get_mut(session) {
                    Some(last) => *last = position.max(*last),
                    None => {
                        self.delivered.put(session.to_owned(), position);
                        if self.delivered.len() > self.most {
                            self.delivered.pop_lru();
                        }
                    }
                }
            }
        }
        Ok(bytes)
    }

    fn positions(&self) -> impl Iterator<Item = Delivered> {
        self.delivered.iter().map(|(session, position)| Delivered {
            sub: self.id.clone(),
            session: session.clone(),
            place: (*position).into(),
        })
    }
}

async fn feed(sink: &mut Sink, text: String) -> Result<(), Ending> {
    sink.feed(Message::Text(text.into())).await.map_err(|_| Ending::Gone)
}

async fn flush(sink: &mut Sink) -> Result<(), Ending> {
    sink.flush().await.map_err(|_| Ending::Gone)
}
