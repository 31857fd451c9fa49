//! Every session's history, bounded in sessions, in events and in bytes.
//!
//! Policy when full. A session's buffer gives up its oldest event. Past the number of sessions, the least
//! recently *written* session is forgotten whole; past the bytes over all sessions, the least recently
//! written one gives up its oldest events until enough is free. How far a forgotten session had got is
//! remembered for ten times as many sessions as are held, so that a resume below it is told of its loss.

use std::sync::Arc;

use lru::LruCache;

use super::buffer::{Buffer, Edge};
use super::limits::Limits;
use crate::aep::{Event, Position};

/// What came of offering an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is held now.
    Held,
    /// One with its `(source, id)` was held already.
    Duplicate,
}

/// The held sessions, and the memory of forgotten ones.
#[derive(Debug)]
pub struct History {
    limits: Limits,
    /// By name, in order of their last write.
    sessions: LruCache<Arc<str>, Buffer>,
    /// Where sessions ended that were forgotten whole.
    forgotten: LruCache<Arc<str>, Edge>,
    /// Memory of all held events.
    bytes: usize,
    /// The highest arrival number among events of sessions that were forgotten whole.
    forgotten_arrival: Option<u64>,
}

/// Events that were given up, to be dropped outside of any lock.
#[derive(Debug, Default)]
pub struct Evicted {
    /// The events.
    pub events: Vec<Event>,
    /// How many sessions were forgotten whole.
    pub sessions: u64,
}

impl History {
    /// An empty history.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            sessions: LruCache::unbounded(),
            // Bounded by hand: a bounded one would take the room for all of them at once.
            forgotten: LruCache::unbounded(),
            bytes: 0,
            forgotten_arrival: None,
        }
    }

    /// Offers an event of `session`. What had to give way goes to `evicted`.
    pub fn admit(&mut self, session: &str, event: &Event, arrival: u64, evicted: &mut Evicted) -> Admission {
        if !self.sessions.contains(session) {
            let name: Arc<str> = session.into();
            let known = self.forgotten.pop(session);
            self.sessions.put(name, Buffer::resumed(known));
        }
        // Reading marks the session as the most recently written.
        let Some(buffer) = self.sessions.get_mut(session) else { return Admission::Duplicate };
        if !buffer.admit(event, arrival) {
            return Admission::Duplicate;
        }
        self.bytes += event.memory();
        while buffer.len() > self.limits.buffer {
            let Some(oldest) = buffer.evict() else { break };
            self.bytes = self.bytes.saturating_sub(oldest.memory());
            evicted.events.push(oldest);
        }
        while self.sessions.len() > self.limits.max_sessions {
            self.forget_one(evicted);
        }
        while self.bytes > self.limits.buffer_bytes && !self.sessions.is_empty() {
            self.shrink_one(evicted);
        }
        Admission::Held
    }

    /// Takes note that a session may have had events up to `position` that aren't here, unless it is known.
    pub fn assume(&mut self, session: &str, position: Position) {
        if self.sessions.contains(session) || self.forgotten.contains(session) {
            return;
        }
        // Nothing that arrives from now on was among them.
        self.forgotten.put(session.into(), Edge { place: (Some(position), 0), arrival: 0 });
        if self.forgotten.len() > self.limits.remembered() {
            self.forgotten.pop_lru();
        }
    }

    /// Forgets the least recently written session.
    fn forget_one(&mut self, evicted: &mut Evicted) {
        let Some((name, mut buffer)) = self.sessions.pop_lru() else { return };
        if let Some(end) = buffer.end() {
            self.forgotten.put(name, end);
            if self.forgotten.len() > self.limits.remembered() {
                self.forgotten.pop_lru();
            }
            self.forgotten_arrival = self.forgotten_arrival.max(Some(end.arrival));
        }
        while let Some(event) = buffer.evict() {
            self.bytes = self.bytes.saturating_sub(event.memory());
            evicted.events.push(event);
        }
        evicted.sessions += 1;
    }

    /// Takes one event from the least recently written session.
    fn shrink_one(&mut self, evicted: &mut Evicted) {
        let Some((name, _)) = self.sessions.peek_lru() else { return };
        let name = Arc::clone(name);
        let Some(buffer) = self.sessions.peek_mut(&name) else { return };
        if let Some(event) = buffer.evict() {
            self.bytes = self.bytes.saturating_sub(event.memory());
            evicted.events.push(event);
        }
        if buffer.is_empty() {
            self.forget_one(evicted);
        }
    }

    /// What is held of a session.
    #[must_use]
    pub fn session(&self, session: &str) -> Option<&Buffer> {
        self.sessions.peek(session)
    }

    /// The names of the held sessions, the least recently written first.
    #[must_use]
    pub fn names(&self) -> Vec<Arc<str>> {
        self.sessions.iter().rev().map(|(name, _)| Arc::clone(name)).collect()
    }

    /// How far `session` can't be replayed any more.
    #[must_use]
    pub fn evicted(&self, session: &str) -> Option<Edge> {
        match self.sessions.peek(session) {
            Some(buffer) => buffer.evicted(),
            None => self.forgotten.peek(session).copied(),
        }
    }

    /// Whether an event that arrived at or after `arrival` went with a session that was forgotten whole.
    #[must_use]
    pub fn has_forgotten_since(&self, arrival: u64) -> bool {
        self.forgotten_arrival >= Some(arrival)
    }

    /// How many sessions are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether no session is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Memory of all held events, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(session: &str, seq: u64, size: usize) -> Event {
        let padding = "x".repeat(size);
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq},"data":{{"p":"{padding}"}}}}"#
        ))
        .unwrap()
    }

    /// The `seq` up to which a session can't be replayed.
    fn position(history: &History, session: &str) -> Option<u64> {
        Some(history.evicted(session)?.place.0?.seq)
    }

    fn history(limits: Limits, events: &[(&str, u64)]) -> History {
        let mut history = History::new(limits);
        for (n, (session, seq)) in events.iter().enumerate() {
            history.admit(session, &event(session, *seq, 0), n as u64, &mut Evicted::default());
        }
        history
    }

    #[test]
    fn the_least_recently_written_session_is_forgotten_and_remembered() {
        let limits = Limits { max_sessions: 2, ..Limits::default() };
        let mut history = history(limits, &[("a", 1), ("b", 1), ("a", 2), ("c", 1)]);
        assert!(history.session("b").is_none());
        assert_eq!(position(&history, "b"), Some(1));
        assert_eq!(position(&history, "a"), None);
        assert!(history.has_forgotten_since(1) && !history.has_forgotten_since(2));
        history.admit("b", &event("b", 7, 0), 9, &mut Evicted::default());
        assert_eq!(position(&history, "b"), Some(1), "also once it is back");
    }

    #[test]
    fn bytes_are_bounded_whatever_the_size_of_events() {
        let limits = Limits { buffer_bytes: 100_000, ..Limits::default() };
        let mut history = History::new(limits);
        for n in 0..1000 {
            let size = if n % 10 == 0 { 20_000 } else { 10 };
            history.admit(
                &format!("s{}", n % 7),
                &event(&format!("s{}", n % 7), n, size),
                n,
                &mut Evicted::default(),
            );
            assert!(history.bytes() <= 100_000);
        }
        let counted: usize = history
            .names()
            .iter()
            .flat_map(|name| history.session(name).unwrap().after(None).map(|held| held.event.memory()))
            .sum();
        assert_eq!(counted, history.bytes());
        history.admit("big", &event("big", 1, 200_000), 2000, &mut Evicted::default());
        assert!(history.is_empty() && history.bytes() == 0, "an event larger than the bound is not held");
        assert_eq!(position(&history, "big"), Some(1));
    }

    #[test]
    fn memory_of_forgotten_sessions_is_bounded() {
        let limits = Limits { max_sessions: 2, ..Limits::default() };
        let mut history = History::new(limits);
        for n in 0..100_u64 {
            history.admit(&format!("s{n}"), &event(&format!("s{n}"), n, 0), n, &mut Evicted::default());
        }
        assert_eq!(history.forgotten.len(), 20);
        assert_eq!(position(&history, "s97"), Some(97));
        assert_eq!(position(&history, "s1"), None);
    }
}
