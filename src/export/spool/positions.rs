//! The highest position of each session, as the spool has taken it.

use lru::LruCache;

use crate::aep::json::write_string;
use crate::aep::position::SessionKey;
use crate::aep::{Event, Position};
use crate::export::seen::{Fingerprint, FingerprintKey};

/// How many sessions' positions are kept; the least recently active is forgotten first.
pub const MAX_SESSIONS: usize = 10_000;

/// How long a source and a session's name may be together, in bytes, for the session's position to be kept.
/// A session beyond it is resumed from its start and its events told by their fingerprints.
pub const MAX_NAMES: usize = 4096;

/// A session's highest position that the spool has taken, from which a feed resumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePosition {
    /// The emitter.
    pub source: Box<str>,
    /// The session's name.
    pub session: Box<str>,
    /// No event of the session that was taken stands higher.
    pub position: Position,
}

impl ResumePosition {
    /// The most that it takes in a snapshot, in bytes.
    fn size(&self) -> usize {
        /// Two numbers of 20 digits and the punctuation.
        const REST: usize = 48;
        let escaped = |name: &str| -> usize {
            name.bytes()
                .map(|byte| if byte < 0x20 { 6 } else { 1 + usize::from(matches!(byte, b'"' | b'\\')) })
                .sum()
        };
        escaped(&self.source).saturating_add(escaped(&self.session)).saturating_add(REST)
    }
}

/// Positions by session, bounded in number and bytes.
#[derive(Debug)]
pub(super) struct Positions {
    key: FingerprintKey,
    /// By `(source, session)`; never longer than [`MAX_SESSIONS`].
    sessions: LruCache<Fingerprint, ResumePosition>,
    /// What the sessions take in a snapshot, in bytes; kept at or below `max_size`.
    size: usize,
    max_size: usize,
}

impl Positions {
    /// None known yet. A snapshot takes `max_size` bytes at most.
    pub(super) fn new(key: FingerprintKey, max_size: usize) -> Self {
        Self { key, sessions: LruCache::unbounded(), size: 0, max_size }
    }

    /// Takes in an event's position.
    pub(super) fn reach(&mut self, event: &Event) {
        if let Some(position) = event.position() {
            self.reach_position(event.session_key(), position);
        }
    }

    /// Takes in a position of a session. It never goes back.
    pub(super) fn reach_position(&mut self, names: SessionKey<'_>, position: Position) {
        let SessionKey { source, session } = names;
        if session.is_empty() || source.len().saturating_add(session.len()) > MAX_NAMES {
            return;
        }
        let key = self.key.session(names);
        if let Some(known) = self.sessions.get_mut(&key) {
            known.position = known.position.max(position);
        } else {
            self.add(key, ResumePosition { source: source.into(), session: session.into(), position });
        }
    }

    fn add(&mut self, key: Fingerprint, added: ResumePosition) {
        self.size = self.size.saturating_add(added.size());
        self.sessions.put(key, added);
        while self.sessions.len() > MAX_SESSIONS || self.size > self.max_size {
            let Some((_, forgotten)) = self.sessions.pop_lru() else { break };
            self.size = self.size.saturating_sub(forgotten.size());
        }
    }

    /// The positions, the least recently active session first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &ResumePosition> {
        self.sessions.iter().rev().map(|(_, saved)| saved)
    }

    /// The payload of a positions record: `[["source","session",epoch,seq],…]`, the least recently active
    /// session first. As JSON it holds no zero byte, whatever the names are.
    pub(super) fn snapshot(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.size.saturating_add(2));
        out.push(b'[');
        for saved in self.iter() {
            if out.len() > 1 {
                out.push(b',');
            }
            out.push(b'[');
            write_string(&mut out, &saved.source);
            out.push(b',');
            write_string(&mut out, &saved.session);
            out.extend_from_slice(format!(",{},{}]", saved.position.epoch, saved.position.seq).as_bytes());
        }
        out.push(b']');
        out
    }

    /// Takes in a snapshot. What isn't one is left aside.
    pub(super) fn read(&mut self, snapshot: &[u8]) {
        type Saved = (Box<str>, Box<str>, u64, u64);
        let saved: Vec<Saved> = serde_json::from_slice(snapshot).unwrap_or_default();
        for (source, session, epoch, seq) in saved {
            let names = SessionKey { source: &source, session: &session };
            self.reach_position(names, Position::new(epoch, seq));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(session: &str, seq: u64) -> Event {
        let session = serde_json::to_string(session).unwrap();
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":{session},"seq":{seq}}}"#
        ))
        .unwrap()
    }

    fn positions(max_size: usize) -> Positions {
        Positions::new(FingerprintKey([3; 16]), max_size)
    }

    #[test]
    fn a_position_never_goes_back_and_survives_a_snapshot() {
        let mut known = positions(1 << 20);
        for (session, seq) in [("a", 5), ("a", 3), ("b\u{0}\n\"", 1), ("a", 4)] {
            known.reach(&event(session, seq));
        }
        let snapshot = known.snapshot();
        assert!(snapshot.iter().all(|byte| *byte >= 0x20));
        let mut read = positions(1 << 20);
        read.read(&snapshot);
        let list = |known: &Positions| known.iter().cloned().collect::<Vec<_>>();
        assert_eq!(list(&read), list(&known));
        assert_eq!(list(&read)[1].position, Position::new(0, 5));
        assert_eq!(&*list(&read)[0].session, "b\u{0}\n\"");
    }

    #[test]
    fn sessions_are_bounded_and_the_least_active_goes_first() {
        let mut known = positions(1 << 30);
        for n in 0..=MAX_SESSIONS {
            known.reach(&event(&n.to_string(), 1));
            known.reach(&event("0", 1));
        }
        assert_eq!(known.iter().count(), MAX_SESSIONS);
        assert!(known.iter().any(|saved| &*saved.session == "0"));
        assert!(!known.iter().any(|saved| &*saved.session == "1"));
        let mut small = positions(200);
        (0..10).for_each(|n| small.reach(&event(&n.to_string(), n)));
        assert!(small.snapshot().len() <= 200);
        assert!(small.iter().any(|saved| &*saved.session == "9"));
    }

    #[test]
    fn long_names_save_no_position() {
        let mut known = positions(1 << 20);
        known.reach(&event(&"s".repeat(MAX_NAMES), 1));
        assert_eq!(known.iter().count(), 0);
    }

    #[test]
    fn what_is_no_snapshot_changes_nothing() {
        let mut known = positions(1 << 20);
        known.reach(&event("a", 1));
        for bytes in [b"".as_slice(), b"[[1]]", b"\xff"] {
            known.read(bytes);
        }
        assert_eq!(known.iter().count(), 1);
    }
}
