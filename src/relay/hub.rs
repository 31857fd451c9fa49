//! The one way into the relay and the one way out.
//!
//! One lock guards the log and the histories together, so that registering a subscriber and fixing what it
//! will replay is a single step, and so is admitting events to both. It is held for the bookkeeping of a
//! batch, never across I/O, parsing, filtering or dropping.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::control::{Connections, Unrouted};
use super::history::{Admission, Evicted, History};
use super::keep::{Keep, NotKept};
use super::limits::Limits;
use super::log::Log;
use super::metrics::Metrics;
use super::subscriber::{Subscriber, Subscription};
use crate::aep::{Event, Position, Registry, Scope};

/// The relay's core. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Hub(Arc<Shared>);

/// What the hub and its subscribers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// The number that the next event will get; changes wake live readers.
    pub(super) head: watch::Sender<u64>,
    pub(super) registry: Arc<Registry>,
    pub(super) metrics: Metrics,
    connections: Connections,
    /// Where events go before they are admitted.
    keep: Option<Arc<dyn Keep>>,
    /// Cancelled when every reader is to be sent home.
    closing: CancellationToken,
}

/// What the lock guards.
#[derive(Debug)]
pub(super) struct State {
    pub(super) log: Log,
    pub(super) history: History,
}

/// What is known of the time before restored events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// They are all that there was.
    Nothing,
    /// There may have been others.
    Unknown,
}

/// Why a command was not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// It goes to nobody.
    Unrouted(Unrouted),
    /// It can't be kept.
    NotKept(NotKept),
}

impl From<Unrouted> for Refused {
    fn from(unrouted: Unrouted) -> Self {
        Self::Unrouted(unrouted)
    }
}

impl From<NotKept> for Refused {
    fn from(not_kept: NotKept) -> Self {
        Self::NotKept(not_kept)
    }
}

/// How much the hub holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Sessions with a history.
    pub sessions: usize,
    /// Memory of the events in them, in bytes.
    pub bytes: usize,
}

impl Hub {
    /// An empty hub. `registry` says what each type's `data` holds, for readers with a capture ceiling.
    #[must_use]
    pub fn new(limits: Limits, registry: Arc<Registry>, metrics: Metrics) -> Self {
        Self::build(limits, registry, metrics, None)
    }

    /// As [`Hub::new`]; what is accepted is kept there first.
    #[must_use]
    pub fn keeping(limits: Limits, registry: Arc<Registry>, metrics: Metrics, keep: Arc<dyn Keep>) -> Self {
        Self::build(limits, registry, metrics, Some(keep))
    }

    fn build(limits: Limits, registry: Arc<Registry>, metrics: Metrics, keep: Option<Arc<dyn Keep>>) -> Self {
        let state = State { log: Log::new(limits.window_bytes), history: History::new(limits) };
        let closing = CancellationToken::new();
        let connections = Connections::new(limits.remembered());
        let (head, _) = watch::channel(0);
        let state = Mutex::new(state);
        Self(Arc::new(Shared { state, head, registry, metrics, connections, keep, closing }))
    }

    /// Takes events in, once they are kept: on success `events` is empty, else as it was.
    ///
    /// # Errors
    /// When they can't be kept.
    ///
    /// # Cancel safety
    /// When it is dropped, `events` is as it was, and none is admitted. They may be kept: trying again keeps none
    /// twice.
    pub async fn accept(&self, events: &mut Vec<Event>) -> Result<(), NotKept> {
        if let Some(keep) = &self.0.keep
            && !events.is_empty()
        {
            keep.keep(events).await?;
        }
        self.admit(std::mem::take(events));
        Ok(())
    }

    /// Returns when it is worth trying again to have events accepted.
    pub async fn room(&self) {
        if let Some(keep) = &self.0.keep {
            keep.room().await;
        }
    }

    /// Admits events that last already: each into its session's history, unless one with its `(source, id)` is held there, and
    /// all of them to the readers. Agent-scoped events go to the readers only.
    ///
    /// Spec: AEP-0003 §5.
    pub fn admit(&self, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let (count, duplicates) = (events.len() as u64, self.enter(events));
        self.0.metrics.admitted.inc_by(count);
        self.0.metrics.duplicates.inc_by(duplicates);
    }

    /// How many were duplicates.
    fn enter(&self, events: Vec<Event>) -> u64 {
        let metrics = &self.0.metrics;
        let mut evicted = Evicted::default();
        let mut duplicates = 0;
        let mut state = self.0.state.lock();
        let State { log, history } = &mut *state;
        for (event, arrival) in events.iter().zip(log.next()..) {
            let (Some(session), Scope::Session | Scope::Foreign | Scope::Command) =
                (event.session(), event.scope())
            else {
                continue;
            };
            if history.admit(session, event, arrival, &mut evicted) == Admission::Duplicate {
                duplicates += 1;
            }
        }
        let gone = log.append(events.into_boxed_slice());
        let head = log.next();
        drop(state);
        // Admissions on other threads may have got further by now: the head never goes back.
        self.0.head.send_if_modified(|seen| {
            let further = head > *seen;
            *seen = head.max(*seen);
            further
        });
        metrics.evicted.inc_by(evicted.events.len() as u64);
        metrics.sessions_forgotten.inc_by(evicted.sessions);
        drop((gone, evicted));
        duplicates
    }

    /// Gives the histories events that were admitted before a restart, in their order. With [`Before::Unknown`],
    /// something may have come before a session's first one.
    pub fn restore(&self, events: Vec<Event>, before: Before) {
        if before == Before::Unknown {
            let mut state = self.0.state.lock();
            for event in &events {
                let position = event.position().and_then(Position::before);
                if let (Some(session), Some(position)) = (event.session(), position) {
                    state.history.assume(session, position);
                }
            }
        }
        self.enter(events);
    }

    /// Takes note that a session had events up to `position` before a restart, which aren't held any more unless
    /// they were restored.
    pub fn assume_evicted(&self, session: &str, position: Position) {
        self.0.state.lock().history.assume(session, position);
    }

    /// Registers a reader: what it replays and where it goes live are fixed in one step, so that between the
    /// two no event is missed and none comes twice.
    #[must_use]
    pub fn subscribe(&self, subscription: Subscription) -> Subscriber {
        Subscriber::start(Arc::clone(&self.0), subscription)
    }

    /// Takes a command in: to the one connection that claims its session, into the session's history and to the
    /// readers. A command that is not routed enters neither, and isn't kept.
    ///
    /// # Errors
    /// When it isn't routed, or can't be kept.
    ///
    /// # Cancel safety
    /// When it is dropped, the command was routed and admitted, or neither.
    ///
    /// Spec: AEP-0004 §4.
    pub async fn command(&self, command: &Event) -> Result<(), Refused> {
        let route = self.0.connections.route(command)?;
        if let Some(keep) = &self.0.keep {
            keep.keep(std::slice::from_ref(command)).await?;
        }
        route.send(command.clone());
        self.admit(vec![command.clone()]);
        Ok(())
    }

    /// Who is connected.
    #[must_use]
    pub fn connections(&self) -> &Connections {
        &self.0.connections
    }

    /// Changes with every arrival: for a reader of several subscriptions, which looks at all of them when it does.
    #[must_use]
    pub fn arrivals(&self) -> watch::Receiver<u64> {
        self.0.head.subscribe()
    }

    /// How much is held.
    #[must_use]
    pub fn held(&self) -> Held {
        let state = self.0.state.lock();
        Held { sessions: state.history.len(), bytes: state.history.bytes() }
    }

    /// Sends every reader home: the bindings end their streams in order.
    pub fn close(&self) {
        self.0.closing.cancel();
    }

    /// Whether readers are being sent home.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.0.closing.is_cancelled()
    }

    /// Returns once readers are being sent home.
    pub async fn closing(&self) {
        self.0.closing.cancelled().await;
    }

    /// The relay's counters.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }
}
