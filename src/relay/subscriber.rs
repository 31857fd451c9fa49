//! A reader's way from replay to live.
//!
//! A subscriber is two numbers and a list of sessions. When it starts, the next arrival number is fixed as its
//! cursor: what arrived before it is replayed from the histories, session by session in the order of
//! positions, a piece at a time; what arrives from it on is read from the log. An event has one arrival
//! number, so none comes twice and none is missed, however slowly the reader takes it.
//!
//! A reader that falls behind the log's oldest block catches up from the histories by the same means: the
//! arrivals from its cursor up to a new one. Where something among these may have been given up, before or while
//! it catches up, it is told ([`Step::Behind`]) and, unless it asked to go on, its stream ends, so that it
//! resumes by positions and learns exactly what it lost.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use tokio::sync::watch;

use super::buffer::{Buffer, Edge, Held, Place};
use super::history::History;
use super::hub::{Shared, State};
use super::log::{Block, Read};
use crate::aep::capture::down_level;
use crate::aep::{Capture, Event, Filter, Position, ResumeToken};

/// What a reader asks for.
#[derive(Debug, Clone, Default)]
pub struct Subscription {
    /// Which events.
    pub filter: Filter,
    /// The highest capture level to show; `None` shows events as they were received.
    pub ceiling: Option<Capture>,
    /// Where to start.
    pub from: From,
    /// What follows the replay.
    pub then: Then,
    /// What to do when live events are lost to this reader.
    pub on_loss: OnLoss,
}

impl Subscription {
    /// The same, of what `bound` matches only. Where the bound names sessions, positions in others are dropped,
    /// so that not even their losses are told.
    #[must_use]
    pub fn within(mut self, bound: &Filter) -> Self {
        if let From::Tokens(tokens) = &mut self.from {
            tokens.retain(|token| bound.admits_session(&token.session));
        }
        self.filter = self.filter.and(bound);
        self
    }
}

/// Where a reader starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum From {
    /// With the next event.
    #[default]
    Now,
    /// With the earliest held event of every session.
    All,
    /// Strictly after these positions.
    Tokens(Vec<ResumeToken>),
}

/// What follows the replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Then {
    /// Events as they arrive.
    #[default]
    Live,
    /// The end.
    End,
}

/// What a reader wants when it fell behind everything that is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// The end of its stream, so that it resumes by positions and is told exactly what it lost.
    #[default]
    End,
    /// To be told, and to go on with what is still held.
    GoOn,
}

/// One step of what a reader gets.
#[derive(Debug, Clone)]
pub enum Step {
    /// Events to deliver, already filtered and down-levelled.
    Events(Vec<Event>),
    /// A run of events of a block, all of them wanted as they are.
    Run(Arc<Block>, Range<usize>),
    /// Something of `session` before `earliest` can't be replayed any more.
    Exhausted {
        /// The session.
        session: Arc<str>,
        /// The earliest position that can be.
        earliest: Position,
    },
    /// The replay is over and nothing follows.
    Complete,
    /// The reader fell behind everything that is held. The stream ends, unless it asked to go on.
    Behind,
}

impl Step {
    /// Whether nothing follows this step.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Complete | Self::Behind)
    }
}

/// How much a replay takes out of a history at a time.
const PIECE_EVENTS: usize = 512;
/// Bytes that a reader looks at in one go.
const PIECE_BYTES: usize = 256 * 1024;

/// A reader's live place in the relay.
#[derive(Debug)]
pub struct Subscriber {
    shared: Arc<Shared>,
    head: watch::Receiver<u64>,
    filter: Filter,
    ceiling: Option<Capture>,
    then: Then,
    on_loss: OnLoss,
    /// Arrivals before this are replayed, from it on they are live.
    cursor: u64,
    /// While the reader catches up: arrivals before this have reached it already.
    known: Option<u64>,
    /// Sessions yet to be replayed.
    replay: VecDeque<Lane>,
    /// Steps at hand.
    ready: VecDeque<Step>,
    done: bool,
}

/// A session that is being replayed.
#[derive(Debug)]
struct Lane {
    session: Arc<str>,
    start: Start,
    /// The loss that the reader has been told of: everything evicted up to here.
    told: Option<Edge>,
}

impl Lane {
    /// What is held of the session and not yet taken.
    fn rest<'b>(&self, buffer: &'b Buffer) -> Box<dyn Iterator<Item = &'b Held> + 'b> {
        match self.start {
            Start::Earliest => Box::new(buffer.after(None)),
            Start::Asked(position) => Box::new(buffer.strictly_after(position)),
            Start::Given(place) => Box::new(buffer.after(Some(place))),
        }
    }

    /// How far the session was given up, when that may have cost the reader something that it hasn't been told
    /// of. `known` is the arrival number before which a reader that catches up has everything.
    fn loss(&self, history: &History, known: Option<u64>) -> Option<Edge> {
        let edge = history.evicted(&self.session)?;
        let lost = match self.start {
            // More than had been when the replay was asked for.
            Start::Earliest => edge.arrival >= known.unwrap_or(0),
            Start::Asked(position) => edge.place.0 > position,
            Start::Given(place) => edge.place > place && edge.arrival >= known.unwrap_or(0),
        };
        (lost && self.told != Some(edge)).then_some(edge)
    }
}

/// Where in its session's history a replay stands.
#[derive(Debug, Clone, Copy)]
enum Start {
    /// Before everything.
    Earliest,
    /// Strictly after a position that the reader named; `None` is before every one.
    Asked(Option<Position>),
    /// After what it was given last.
    Given(Place),
}

impl Subscriber {
    pub(super) fn start(shared: Arc<Shared>, subscription: Subscription) -> Self {
        let Subscription { filter, ceiling, from, then, on_loss } = subscription;
        let head = shared.head.subscribe();
        let state = shared.state.lock();
        let replay = lanes(&state, &filter, from, then);
        let cursor = state.log.next();
        drop(state);
        Self {
            shared,
            head,
            filter,
            ceiling,
            then,
            on_loss,
            cursor,
            known: None,
            replay,
            ready: VecDeque::new(),
            done: false,
        }
    }

    /// The next step. After one that [is the last](Step::is_last) there is none.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Step> {
        loop {
            if let Some(step) = self.ready() {
                return Some(step);
            }
            if self.done {
                return None;
            }
            // The sender lives as long as `self.shared`, so this waits for the next arrival.
            if self.head.changed().await.is_err() {
                return None;
            }
        }
    }

    /// Whether what comes next is history rather than news.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        !self.replay.is_empty()
    }

    /// The next step that is at hand without waiting.
    pub fn ready(&mut self) -> Option<Step> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Some(step);
            }
            if self.done {
                return None;
            }
            let progress = if self.replay.is_empty() { self.read_log() } else { self.replay_piece() };
            match progress {
                Progress::Ended(step) => return self.end(step),
                Progress::Waits => return None,
                Progress::Made => {}
            }
        }
    }

    fn end(&mut self, step: Step) -> Option<Step> {
        self.done = true;
        Some(step)
    }

    /// Takes the next piece of the first session that is being replayed.
    fn replay_piece(&mut self) -> Progress {
        let Some(lane) = self.replay.front_mut() else { return Progress::Made };
        let arrivals = self.known.unwrap_or(0)..self.cursor;
        let mut events = Vec::new();
        let state = self.shared.state.lock();
        let buffer = state.history.session(&lane.session);
        let loss = lane.loss(&state.history, self.known);
        let earliest = loss.map(|edge| {
            let held = buffer.into_iter().flat_map(|buffer| lane.rest(buffer));
            let next = held.filter_map(|held| held.event.position()).next();
            next.unwrap_or_else(|| edge.place.0.map_or(Position::default(), Position::successor))
        });
        let finished = match buffer {
            None => true,
            Some(buffer) => take(lane.rest(buffer), &arrivals, lane, &mut events),
        };
        drop(state);
        if let (Some(edge), Some(earliest)) = (loss, earliest) {
            lane.told = Some(edge);
            if self.known.is_some() {
                // Not what was asked for, but what should have come live.
                if let Some(end) = self.lost() {
                    return end;
                }
            } else {
                self.shared.metrics.replays_exhausted.inc();
                let session = Arc::clone(&lane.session);
                self.ready.push_back(Step::Exhausted { session, earliest });
            }
        }
        if finished {
            self.replay.pop_front();
        }
        self.select(events);
        if self.replay.is_empty() && self.then == Then::End {
            self.ready.push_back(Step::Complete);
            self.done = true;
        }
        Progress::Made
    }

    /// What follows from live events being lost: the end of the stream, unless the reader wants to go on.
    fn lost(&mut self) -> Option<Progress> {
        self.shared.metrics.readers_behind.inc();
        match self.on_loss {
            OnLoss::End => Some(Progress::Ended(Step::Behind)),
            OnLoss::GoOn => {
                self.ready.push_back(Step::Behind);
                None
            }
        }
    }

    /// Queues what the subscription wants of replayed events.
    fn select(&mut self, mut events: Vec<Event>) {
        events.retain(|event| self.filter.matches(event));
        if let Some(ceiling) = self.ceiling {
            for event in &mut events {
                *event = down_level(event, ceiling, &self.shared.registry);
            }
        }
        if !events.is_empty() {
            self.ready.push_back(Step::Events(events));
        }
    }

    /// Reads the log at the cursor.
    fn read_log(&mut self) -> Progress {
        if self.then == Then::End {
            return Progress::Ended(Step::Complete);
        }
        self.head.mark_unchanged();
        let state = self.shared.state.lock();
        match state.log.read(self.cursor, PIECE_BYTES) {
            Read::Behind => {
                let lost =
                    state.log.has_lost_since(self.cursor) || state.history.has_forgotten_since(self.cursor);
                let behind = self.cursor;
                self.known = Some(behind);
                self.cursor = state.log.next();
                self.replay = lanes(&state, &self.filter, From::All, Then::Live);
                // What was given up before counts too: it should have come live.
                for lane in &mut self.replay {
                    lane.told = None;
                }
                let live_only = state.log.live_only(behind);
                drop(state);
                if lost && let Some(end) = self.lost() {
                    return end;
                }
                self.select(live_only);
                Progress::Made
            }
            Read::Blocks(blocks) => {
                drop(state);
                if blocks.is_empty() {
                    return Progress::Waits;
                }
                for block in blocks {
                    self.select_block(&block);
                }
                Progress::Made
            }
        }
    }

    /// Queues what the subscription wants of a block from the cursor on, and moves the cursor past it.
    fn select_block(&mut self, block: &Arc<Block>) {
        let start = usize::try_from(self.cursor.saturating_sub(block.first())).unwrap_or(usize::MAX);
        self.cursor = block.end();
        let mut run = start..start;
        for (n, event) in block.events().iter().enumerate().skip(start) {
            let as_it_is = self.ceiling.is_none_or(|ceiling| ceiling >= event.capture());
            if as_it_is && self.filter.matches(event) {
                run.end = n + 1;
                continue;
            }
            if !run.is_empty() {
                self.ready.push_back(Step::Run(Arc::clone(block), run));
            }
            run = n + 1..n + 1;
            if !as_it_is {
                self.select(vec![event.clone()]);
            }
        }
        if !run.is_empty() {
            self.ready.push_back(Step::Run(Arc::clone(block), run));
        }
    }
}

enum Progress {
    /// Look again.
    Made,
    /// Nothing at hand.
    Waits,
    /// Nothing more to come.
    Ended(Step),
}

/// The sessions that a reader wants replayed.
fn lanes(state: &State, filter: &Filter, from: From, then: Then) -> VecDeque<Lane> {
    let lane = |(session, start): (Arc<str>, Start)| {
        // Who asks for all that is held asks for nothing that was given up before.
        let told = match start {
            Start::Earliest => state.history.evicted(&session),
            Start::Asked(_) | Start::Given(_) => None,
        };
        Lane { session, start, told }
    };
    let mut lanes = VecDeque::new();
    match from {
        From::Now => {}
        From::All => {
            let named = filter.sessions().map(|names| names.map(Arc::from).collect::<Vec<Arc<str>>>());
            let names = named.unwrap_or_else(|| state.history.names());
            lanes.extend(names.into_iter().map(|name| lane((name, Start::Earliest))));
            return lanes;
        }
        From::Tokens(tokens) => {
            // A session named twice is replayed once, from the lower position.
            let mut asked: BTreeMap<String, Option<Position>> = BTreeMap::new();
            let mut order = Vec::with_capacity(tokens.len());
            for token in tokens {
                match asked.get_mut(&token.session) {
                    Some(position) => *position = token.position.min(*position),
                    None => {
                        order.push(token.session.clone());
                        asked.insert(token.session, token.position);
                    }
                }
            }
            lanes.extend(order.into_iter().filter_map(|session| {
                let position = *asked.get(&session)?;
                Some(lane((session.into(), Start::Asked(position))))
            }));
        }
    }
    if then == Then::End {
        // AEP-0003 §3.3: a bounded replay also serves the sessions that the filter names.
        let asked: HashSet<Arc<str>> = lanes.iter().map(|lane| Arc::clone(&lane.session)).collect();
        let named = filter.sessions().into_iter().flatten().filter(|name| !asked.contains(*name));
        lanes.extend(named.map(|name| lane((name.into(), Start::Earliest))));
    }
    lanes
}

/// Takes a piece of a session into `events`. Whether that was its last.
fn take<'b>(
    held: impl Iterator<Item = &'b Held>,
    arrivals: &Range<u64>,
    lane: &mut Lane,
    events: &mut Vec<Event>,
) -> bool {
    let mut bytes = 0;
    for (looked_at, held) in held.enumerate() {
        if looked_at == PIECE_EVENTS || bytes >= PIECE_BYTES {
            return false;
        }
        lane.start = Start::Given(held.place());
        if arrivals.contains(&held.arrival) {
            bytes += held.event.as_bytes().len();
            events.push(held.event.clone());
        }
    }
    true
}
