//! What survives a restart.
//!
//! Two things are kept of the events that the sink acknowledged, or that became dead letters: their
//! fingerprints, so that a feed that gives them again doesn't have them delivered again, and the highest
//! position per session up to which everything given was handled, from which a feed resumes. Only the
//! fingerprints decide on delivery: a late event below a saved position still goes out. What was in flight
//! when the process died isn't in the checkpoint, and is delivered again.
//!
//! # Files
//!
//! | file | what |
//! |---|---|
//! | `checkpoint` | a snapshot of everything, generation *g* |
//! | `checkpoint.previous` | the snapshot before it |
//! | `checkpoint.journal` | what was handled since the snapshot of generation *g* |
//! | `*.damaged-<n>` | a file that couldn't be read, kept for a look; the last four of each name |
//!
//! Integers are little-endian; a string is its length in bytes (u32) and its UTF-8.
//!
//! ```text
//! snapshot: "aepckpt1"  length of body u64  CRC-32 of body u32  body
//!     body: generation u64  fingerprint key 16 bytes
//!           number of sessions u32, then, least recent first: source string, session string, epoch u64, seq u64
//!           number of events u64, then, least recent first: fingerprint u128
//! journal:  "aepjrnl1"  generation u64  fingerprint key 16 bytes  CRC-32 of the 32 bytes before u32
//!           then records: length of payload u32  CRC-32 of the length's bytes and the payload u32  payload
//! payload:  fingerprint u128  0 u8
//!        or fingerprint u128  1 u8  source string  session string  epoch u64  seq u64
//! ```
//!
//! # Invariants
//!
//! 1. Every record is true by itself: that event was handled, everything of that session up to that position
//!    was handled. Applying a record twice, or to an older snapshot, is harmless.
//! 2. A snapshot is written under another name, flushed to disk and renamed; the one before stays as
//!    `checkpoint.previous`. Whatever the moment of a crash, one of the two is whole.
//! 3. A journal counts when its generation isn't below the snapshot's; an older one is part of the snapshot
//!    already. It is replaced only once the new snapshot is durable.
//! 4. A journal's incomplete last record was being written in a crash, and is cut off.
//! 5. A file that can't be read is set aside, counted and survived: by the snapshot before it, else by
//!    starting empty. What is lost are acknowledgements, so that events may be delivered twice, never missed.
//!
//! A batch of acknowledgements is one `write` to the journal. It isn't flushed to disk: it survives the death
//! of the process, and that of the machine only once the system has written it.

mod format;
mod keeper;
mod store;

use std::num::NonZeroUsize;

use lru::LruCache;

pub(crate) use keeper::Keeper;

use super::seen::{Fingerprint, FingerprintKey, Seen};
use crate::aep::{Event, Position};

/// How many sessions' positions are kept; the least recently active is forgotten first.
pub const MAX_SESSIONS: usize = 10_000;

/// How long a source and a session's name may be together, in bytes, for the session's position to be kept.
/// A session beyond it is resumed from its start and its events told by their fingerprints.
pub const MAX_NAMES: usize = 4096;

/// A session's position that a feed resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPosition {
    /// The emitter.
    pub source: Box<str>,
    /// The session's name.
    pub session: Box<str>,
    /// Everything that the feed gave up to here was handled.
    pub position: Position,
}

/// One handled event, as the journal says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) event: Fingerprint,
    pub(crate) position: Option<SavedPosition>,
}

impl Record {
    /// `position` is the one that the event's session has reached, when it is known to.
    pub(crate) fn of(event: &Event, fingerprint: Fingerprint, position: Option<Position>) -> Self {
        let names = event.session_key();
        let short = names.source.len().saturating_add(names.session.len()) <= MAX_NAMES;
        let position = position.filter(|_| short && !names.session.is_empty()).map(|position| {
            SavedPosition { source: names.source.into(), session: names.session.into(), position }
        });
        Self { event: fingerprint, position }
    }
}

/// What is known of handled events, in memory.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub(crate) seen: Seen,
    /// By `(source, session)`; never longer than [`MAX_SESSIONS`].
    sessions: LruCache<Fingerprint, SavedPosition>,
}

impl Checkpoint {
    pub(crate) fn new(bound: NonZeroUsize, key: FingerprintKey) -> Self {
        Self { seen: Seen::new(bound, key), sessions: LruCache::unbounded() }
    }

    /// Takes in a record.
    pub(crate) fn apply(&mut self, record: Record) {
        self.seen.insert(record.event);
        if let Some(saved) = record.position {
            self.save(saved);
        }
    }

    /// A position never goes back.
    fn save(&mut self, saved: SavedPosition) {
        let names = crate::aep::position::SessionKey { source: &saved.source, session: &saved.session };
        let session = self.seen.key().session(names);
        match self.sessions.get_mut(&session) {
            Some(known) => known.position = known.position.max(saved.position),
            None => {
                self.sessions.put(session, saved);
                if self.sessions.len() > MAX_SESSIONS {
                    self.sessions.pop_lru();
                }
            }
        }
    }

    /// The saved positions, the least recently active session first.
    pub(crate) fn positions(&self) -> impl Iterator<Item = &SavedPosition> {
        self.sessions.iter().rev().map(|(_, saved)| saved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(event: u128, session: &str, seq: u64) -> Record {
        let position = SavedPosition {
            source: "aep://h".into(),
            session: session.into(),
            position: Position::new(0, seq),
        };
        Record { event: Fingerprint(event), position: Some(position) }
    }

    #[test]
    fn a_position_never_goes_back() {
        let mut checkpoint = Checkpoint::new(NonZeroUsize::MIN, FingerprintKey([0; 16]));
        for (event, seq) in [(1, 5), (2, 3), (3, 4)] {
            checkpoint.apply(record(event, "s", seq));
        }
        let saved: Vec<_> = checkpoint.positions().map(|saved| saved.position.seq).collect();
        assert_eq!(saved, [5]);
    }

    #[test]
    fn sessions_are_bounded_and_the_least_active_goes_first() {
        let mut checkpoint = Checkpoint::new(NonZeroUsize::MIN, FingerprintKey([0; 16]));
        for n in 0..=MAX_SESSIONS {
            checkpoint.apply(record(0, &n.to_string(), 1));
            checkpoint.apply(record(0, "0", 1));
        }
        assert_eq!(checkpoint.positions().count(), MAX_SESSIONS);
        assert!(checkpoint.positions().any(|saved| &*saved.session == "0"));
        assert!(!checkpoint.positions().any(|saved| &*saved.session == "1"));
    }

    #[test]
    fn long_names_and_sessionless_events_save_no_position() {
        let event = |session: &str| {
            Event::parse_str(&format!(
                r#"{{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":1}}"#
            ))
            .unwrap()
        };
        let record = |event: &Event| Record::of(event, Fingerprint(1), Some(Position::new(0, 1)));
        assert!(record(&event("s")).position.is_some());
        assert!(record(&event(&"s".repeat(MAX_NAMES))).position.is_none());
    }
}
