//! One session's history: ordered, deduped, bounded.
//!
//! Invariants:
//! - `held` is sorted by [`Place`]; a place is unique, since arrival numbers are.
//! - an event with a position stands at it; one without stands at the position of the event that arrived
//!   before it, and after every event that was there by then.
//! - `keys` holds exactly the events in `held`.
//! - every evicted event's place and arrival are at most those of `evicted`.

use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use crate::aep::{Event, Position};

/// Where an event stands in its session's history. `None` is before every position.
pub type Place = (Option<Position>, u64);

/// How far a history has been given up: the highest place and the highest arrival number among evicted events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The highest place.
    pub place: Place,
    /// The highest arrival number.
    pub arrival: u64,
}

impl Edge {
    /// The edge that also covers an event.
    fn with(edge: Option<Self>, held: &Held) -> Self {
        let (place, arrival) = (held.place(), held.arrival);
        edge.map_or(Self { place, arrival }, |edge| Self {
            place: edge.place.max(place),
            arrival: edge.arrival.max(arrival),
        })
    }
}

/// An event in a session's history.
#[derive(Debug, Clone)]
pub struct Held {
    /// The event.
    pub event: Event,
    /// Its arrival number.
    pub arrival: u64,
    /// The position at which it stands: its own, or that of the event before it.
    at: Option<Position>,
}

impl Held {
    /// Where it stands.
    #[must_use]
    pub fn place(&self) -> Place {
        (self.at, self.arrival)
    }
}

/// An event, equal to every other with its `(source, id)`.
#[derive(Debug)]
struct Keyed(Event);

impl Hash for Keyed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.key().hash(state);
    }
}

impl PartialEq for Keyed {
    fn eq(&self, other: &Self) -> bool {
        self.0.key() == other.0.key()
    }
}

impl Eq for Keyed {}

/// What is held of one session, and the edge of what isn't any more.
#[derive(Debug, Default)]
pub struct Buffer {
    held: VecDeque<Held>,
    keys: HashSet<Keyed>,
    /// The position of the last event to arrive.
    last: Option<Position>,
    /// How far it has been given up.
    evicted: Option<Edge>,
}

impl Buffer {
    /// A buffer for a session that was held before and forgotten.
    #[must_use]
    pub fn resumed(evicted: Option<Edge>) -> Self {
        Self { evicted, ..Self::default() }
    }

    /// Takes an event at its place. `false` when one with its `(source, id)` is held already.
    ///
    /// Spec: AEP-0003 §5 (admission dedupes), AEP-0001 §7.2 (backfill is ordered).
    pub fn admit(&mut self, event: &Event, arrival: u64) -> bool {
        if !self.keys.insert(Keyed(event.clone())) {
            return false;
        }
        let at = event.position().or(self.last);
        self.last = at;
        let held = Held { event: event.clone(), arrival, at };
        let place = held.place();
        match self.held.back() {
            Some(last) if last.place() > place => {
                let index = self.held.partition_point(|other| other.place() < place);
                self.held.insert(index, held);
            }
            _ => self.held.push_back(held),
        }
        true
    }

    /// Gives up the oldest event.
    pub fn evict(&mut self) -> Option<Event> {
        let oldest = self.held.pop_front()?;
        self.keys.remove(&Keyed(oldest.event.clone()));
        self.evicted = Some(Edge::with(self.evicted, &oldest));
        Some(oldest.event)
    }

    /// How many events are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How far it has been given up.
    #[must_use]
    pub fn evicted(&self) -> Option<Edge> {
        self.evicted
    }

    /// How far it would be given up if all of it were.
    #[must_use]
    pub fn end(&self) -> Option<Edge> {
        self.held.iter().fold(self.evicted, |edge, held| Some(Edge::with(edge, held)))
    }

    /// The events held at places after `place`, in order; all of them when there is none.
    pub fn after(&self, place: Option<Place>) -> impl Iterator<Item = &Held> {
        let start = place.map_or(0, |place| self.held.partition_point(|held| held.place() <= place));
        self.held.range(start..)
    }

    /// The events held strictly after `position`, past every event that has it as its own; all of them after `None`. An event without a position that stands there is replayed, since one who has processed the
    /// position may not have seen what came after it.
    pub fn strictly_after(&self, position: Option<Position>) -> impl Iterator<Item = &Held> {
        let start = self.held.partition_point(|held| held.at < position);
        self.held.range(start..).filter(move |held| position.is_none() || held.event.position() != position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str, seq: Option<u64>) -> Event {
        let (event_type, seq) = match seq {
            Some(seq) => ("run.started", format!(",\"seq\":{seq}")),
            None => ("attention.routed", String::new()),
        };
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{id}","type":"{event_type}","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s"{seq}}}"#
        ))
        .unwrap()
    }

    fn buffer(events: &[(&str, Option<u64>)]) -> Buffer {
        let mut buffer = Buffer::default();
        for (n, (id, seq)) in events.iter().enumerate() {
            buffer.admit(&event(id, *seq), n as u64);
        }
        buffer
    }

    fn ids<'b>(held: impl Iterator<Item = &'b Held>) -> Vec<&'b str> {
        held.map(|held| held.event.id()).collect()
    }

    #[test]
    fn backfill_is_ordered_by_position() {
        let buffer = buffer(&[("5", Some(5)), ("2", Some(2)), ("9", Some(9)), ("3", Some(3))]);
        assert_eq!(ids(buffer.after(None)), ["2", "3", "5", "9"]);
    }

    #[test]
    fn a_duplicate_is_admitted_once() {
        let mut buffer = buffer(&[("a", Some(1))]);
        assert!(!buffer.admit(&event("a", Some(2)), 9));
        assert_eq!(buffer.len(), 1);
        buffer.evict();
        assert!(buffer.admit(&event("a", Some(2)), 10), "an evicted event may be admitted again");
    }

    #[test]
    fn events_without_seq_keep_their_arrival_place() {
        let buffer =
            buffer(&[("r0", None), ("1", Some(1)), ("r1", None), ("r2", None), ("2", Some(2)), ("r3", None)]);
        assert_eq!(ids(buffer.after(None)), ["r0", "1", "r1", "r2", "2", "r3"]);
        assert_eq!(ids(buffer.strictly_after(Some(Position::new(0, 1)))), ["r1", "r2", "2", "r3"]);
        assert_eq!(ids(buffer.strictly_after(Some(Position::new(0, 2)))), ["r3"]);
        assert_eq!(ids(buffer.strictly_after(Some(Position::new(0, 0)))), ["1", "r1", "r2", "2", "r3"]);
    }

    #[test]
    fn eviction_remembers_its_edge() {
        let mut buffer = buffer(&[("5", Some(5)), ("1", Some(1)), ("2", Some(2))]);
        let edge = |seq, place_arrival, arrival| {
            Some(Edge { place: (Some(Position::new(0, seq)), place_arrival), arrival })
        };
        assert_eq!((buffer.evicted(), buffer.end()), (None, edge(5, 0, 2)));
        buffer.evict();
        assert_eq!(buffer.evicted(), edge(1, 1, 1));
        buffer.evict();
        assert_eq!(buffer.evicted(), edge(2, 2, 2));
        buffer.evict();
        assert_eq!((buffer.evict(), buffer.evicted(), buffer.end()), (None, edge(5, 0, 2), edge(5, 0, 2)));
    }
}
