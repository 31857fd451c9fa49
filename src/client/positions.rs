//! What was taken of each session, and from where each is resumed.
//!
//! A position is kept per `(source, session)`, but a relay resumes by the session's bare name: where several
//! emitters share one, the lowest of their positions is asked for, so that none of them misses anything.
//!
//! A position promises that everything before it was given. While something of a session is still owed (its
//! resume waits for its turn, or it began in an outage and the history has not been read yet), what comes of it
//! live is remembered apart, and only counts once the debt is paid. When the connections end first, it is
//! forgotten, and the session resumed from where it really was.

use std::collections::{HashMap, HashSet};

use lru::LruCache;

use super::update::ResumePoint;
use crate::aep::{Event, Position};

/// How many positions are kept; the least recently advanced is forgotten first.
const MOST: usize = 10_000;
/// How long a source and a session's name may be together, in bytes, for a position to be kept.
const LONGEST_NAMES: usize = 4096;

/// Which request an event came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The live stream.
    Live,
    /// A replay after positions.
    Resume,
    /// A replay of everything held.
    History,
}

/// A session in a resume set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) session: Box<str>,
    /// Everything of it up to here was taken.
    pub(super) after: Position,
}

/// The positions, most recently advanced first.
#[derive(Debug)]
pub(super) struct Positions {
    /// By the names, joined by [`join`]. Never longer than [`MOST`].
    entries: LruCache<Box<str>, Entry>,
    /// The sessions that were resumed since the live stream was opened.
    resumed: HashSet<Box<str>>,
    /// Up to where a loss was told already, so that it isn't told again.
    told: LruCache<Box<str>, Position>,
    /// Whether the history is still to be read for sessions that are new.
    owing: bool,
    /// Where names are joined for a look-up.
    key: String,
}

#[derive(Debug, Default)]
struct Entry {
    /// Where the session's name ends in the key.
    session_len: usize,
    /// Everything up to here was taken.
    taken: Option<Position>,
    /// The highest position taken beyond what is owed.
    ahead: Option<Position>,
    /// Whether something before what comes live is still to be given.
    owed: bool,
}

impl Entry {
    fn settle(&mut self) {
        self.owed = false;
        self.taken = self.taken.max(self.ahead.take());
    }
}

fn join(key: &mut String, source: &str, session: &str) {
    key.clear();
    // Names hold any character: with the first one's length, read back from the last colon, no two pairs join
    // to the same key.
    key.push_str(session);
    key.push_str(source);
    key.push(':');
    key.push_str(&session.len().to_string());
}

impl Positions {
    /// The saved positions, most recently advanced last.
    pub(super) fn new(saved: impl IntoIterator<Item = ResumePoint>) -> Self {
        let mut positions = Self {
            entries: LruCache::unbounded(),
            resumed: HashSet::new(),
            told: LruCache::unbounded(),
            owing: false,
            key: String::new(),
        };
        for ResumePoint { source, session, position } in saved {
            positions.raise(&source, &session, position, Origin::Resume);
        }
        positions
    }

    /// Whether no session can be resumed.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.iter().all(|(_, entry)| entry.taken.is_none())
    }

    /// The sessions that can be resumed, most recently advanced first.
    pub(super) fn newest(&self) -> Vec<Asked> {
        let mut found: Vec<Asked> = Vec::new();
        let mut known: HashMap<&str, usize> = HashMap::new();
        for (key, entry) in &self.entries {
            let (Some(after), Some(session)) = (entry.taken, key.get(..entry.session_len)) else { continue };
            let at = *known.entry(session).or_insert(found.len());
            match found.get_mut(at) {
                Some(asked) => asked.after = asked.after.min(after),
                None => found.push(Asked { session: session.into(), after }),
            }
        }
        found
    }

    /// The live stream is open and resumes `live`: every other session is owed what it sent meanwhile, and so
    /// are new ones when the history is to be read.
    pub(super) fn open(&mut self, live: &[Asked], owing: bool) {
        self.owing = owing;
        self.resumed = live.iter().map(|asked| asked.session.clone()).collect();
        let mut unknown = Vec::new();
        for (key, entry) in self.entries.iter_mut() {
            entry.ahead = None;
            entry.owed = !key.get(..entry.session_len).is_some_and(|session| self.resumed.contains(session));
            if entry.taken.is_none() {
                unknown.push(key.clone());
            }
        }
        for key in unknown {
            self.entries.pop(&key);
        }
    }

    /// Everything of these sessions was given.
    pub(super) fn settle(&mut self, sessions: &[Asked]) {
        self.resumed.extend(sessions.iter().map(|asked| asked.session.clone()));
        let settled: HashSet<&str> = sessions.iter().map(|asked| &*asked.session).collect();
        for (key, entry) in self.entries.iter_mut() {
            // Another emitter under that name, not known when the resume began, still waits for the history.
            if entry.taken.is_some()
                && key.get(..entry.session_len).is_some_and(|name| settled.contains(name))
            {
                entry.settle();
            }
        }
    }

    /// Nothing is owed any more.
    pub(super) fn settle_all(&mut self) {
        self.owing = false;
        for (_, entry) in self.entries.iter_mut() {
            entry.settle();
        }
    }

    /// Asks for these sessions from where they are by now.
    pub(super) fn refresh(&self, asked: &mut [Asked]) {
        let known: HashMap<_, _> =
            self.newest().into_iter().map(|asked| (asked.session, asked.after)).collect();
        for asked in asked {
            asked.after = known.get(&asked.session).copied().unwrap_or(asked.after);
        }
    }

    /// The session can't be resumed: it is as if it had never been seen.
    pub(super) fn forget(&mut self, session: &str) {
        let keys: Vec<_> = self
            .entries
            .iter()
            .filter(|(key, entry)| key.get(..entry.session_len) == Some(session))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.entries.pop(&key);
        }
    }

    /// An event was taken: whether its session's position rose.
    pub(super) fn take(&mut self, event: &Event, origin: Origin) -> bool {
        match (event.session(), event.position()) {
            (Some(session), Some(position)) => self.raise(event.source(), session, position, origin),
            _ => false,
        }
    }

    fn raise(&mut self, source: &str, session: &str, position: Position, origin: Origin) -> bool {
        if source.len().saturating_add(session.len()) > LONGEST_NAMES {
            return false;
        }
        join(&mut self.key, source, session);
        let entry = match self.entries.peek_mut(self.key.as_str()) {
            Some(entry) => entry,
            None => {
                let entry = Entry { session_len: session.len(), owed: self.owing, ..Entry::default() };
                self.entries.put(self.key.as_str().into(), entry);
                if self.entries.len() > MOST {
                    self.entries.pop_lru();
                }
                let Some(entry) = self.entries.peek_mut(self.key.as_str()) else { return false };
                entry
            }
        };
        let counts = match origin {
            Origin::Live => !entry.owed,
            Origin::Resume => !entry.owed || entry.taken.is_some(),
            Origin::History => true,
        };
        let mark = if counts { &mut entry.taken } else { &mut entry.ahead };
        if mark.is_some_and(|mark| mark >= position) {
            return false;
        }
        *mark = Some(position);
        self.entries.promote(self.key.as_str());
        true
    }

    /// Whether the event is beyond everything known of its session, as opposed to an overlap.
    pub(super) fn is_news(&mut self, event: &Event) -> bool {
        let Some(session) = event.session() else { return true };
        let Some(position) = event.position() else { return false };
        join(&mut self.key, event.source(), session);
        self.entries
            .peek(self.key.as_str())
            .is_none_or(|entry| entry.taken.max(entry.ahead).is_none_or(|mark| mark < position))
    }

    /// Whether an event of the whole history wasn't asked for by a position already.
    pub(super) fn is_owed(&mut self, event: &Event) -> bool {
        let Some(session) = event.session() else { return true };
        if event.position().is_none() {
            // A command comes from whoever sent it: it goes with the session.
            return !self.resumed.contains(session);
        }
        join(&mut self.key, event.source(), session);
        self.entries.peek(self.key.as_str()).is_none_or(|entry| entry.owed)
    }

    /// Whether the loss of what was between `asked` and `earliest` is news. It is told once only.
    pub(super) fn lose(&mut self, asked: &Asked, earliest: Position) -> bool {
        if earliest <= asked.after.successor()
            || self.told.peek(&asked.session).is_some_and(|told| *told >= earliest)
        {
            return false;
        }
        self.told.put(asked.session.clone(), earliest);
        if self.told.len() > MOST {
            self.told.pop_lru();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(source: &str, session: &str, seq: u64) -> ResumePoint {
        ResumePoint { source: source.into(), session: session.into(), position: Position::new(0, seq) }
    }

    fn event(source: &str, session: &str, seq: u64) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:00:00Z","source":"{source}","agent":"a","session":"{session}","seq":{seq}}}"#
        ))
        .unwrap()
    }

    fn newest(positions: &Positions) -> Vec<(String, u64)> {
        positions.newest().into_iter().map(|asked| (asked.session.into(), asked.after.seq)).collect()
    }

    fn named(session: &str, seq: u64) -> (String, u64) {
        (session.to_owned(), seq)
    }

    #[test]
    fn positions_never_go_down_and_the_newest_is_first() {
        let mut positions = Positions::new([point("u:a", "s", 5), point("u:a", "t", 7)]);
        assert_eq!(newest(&positions), [named("t", 7), named("s", 5)]);
        assert!(!positions.take(&event("u:a", "s", 4), Origin::Live));
        assert_eq!(newest(&positions), [named("t", 7), named("s", 5)], "a late event advances nothing");
        assert!(positions.take(&event("u:a", "s", 6), Origin::Live));
        assert_eq!(newest(&positions), [named("s", 6), named("t", 7)]);
    }

    #[test]
    fn emitters_that_share_a_name_are_resumed_from_the_lower_position() {
        let positions = Positions::new([point("u:a", "s", 90), point("u:b", "s", 3)]);
        assert_eq!(newest(&positions), [named("s", 3)]);
        let positions = Positions::new([point("u:a", "s", 3), point("u:b", "s", 90)]);
        assert_eq!(newest(&positions), [named("s", 3)]);
    }

    #[test]
    fn what_comes_live_counts_only_once_nothing_is_owed() {
        let mut positions = Positions::new([point("u:a", "old", 5), point("u:a", "new", 5)]);
        let live = [Asked { session: "new".into(), after: Position::new(0, 5) }];
        let old = [Asked { session: "old".into(), after: Position::new(0, 5) }];
        positions.open(&live, false);
        positions.take(&event("u:a", "old", 50), Origin::Live);
        positions.take(&event("u:a", "new", 50), Origin::Live);
        assert!(newest(&positions).contains(&named("old", 5)));
        assert!(newest(&positions).contains(&named("new", 50)));
        positions.take(&event("u:a", "old", 6), Origin::Resume);
        assert!(newest(&positions).contains(&named("old", 6)), "what is paid counts at once");
        positions.settle(&old);
        assert!(newest(&positions).contains(&named("old", 50)));

        positions.open(&[], false);
        positions.take(&event("u:a", "old", 60), Origin::Live);
        positions.open(&[], false);
        positions.settle_all();
        assert!(newest(&positions).contains(&named("old", 50)), "a debt outlives the connection");
    }

    #[test]
    fn a_session_that_is_new_waits_for_the_history() {
        let mut positions = Positions::new([point("u:a", "s", 5)]);
        let live = positions.newest();
        positions.open(&live, true);
        positions.take(&event("u:a", "began", 9), Origin::Live);
        assert_eq!(newest(&positions), [named("s", 5)]);
        assert!(positions.is_owed(&event("u:a", "began", 1)));
        assert!(positions.is_owed(&event("u:a", "unseen", 1)));
        assert!(positions.is_owed(&event("u:b", "s", 1)), "another emitter of that name");
        assert!(!positions.is_owed(&event("u:a", "s", 6)));
        positions.take(&event("u:a", "began", 1), Origin::History);
        assert!(newest(&positions).contains(&named("began", 1)));
        positions.settle_all();
        assert!(newest(&positions).contains(&named("began", 9)));
    }

    #[test]
    fn an_overlap_is_no_news() {
        let mut positions = Positions::new([point("u:a", "s", 5)]);
        assert!(!positions.is_news(&event("u:a", "s", 5)));
        assert!(positions.is_news(&event("u:a", "s", 6)));
        assert!(positions.is_news(&event("u:a", "t", 0)));
    }

    #[test]
    fn a_loss_is_what_lies_between_and_is_told_once() {
        let mut positions = Positions::new([]);
        let asked = Asked { session: "s".into(), after: Position::new(0, 9) };
        for earliest in [0, 9, 10] {
            assert!(!positions.lose(&asked, Position::new(0, earliest)), "{earliest}: nothing lies between");
        }
        assert!(positions.lose(&asked, Position::new(0, 20)));
        assert!(!positions.lose(&asked, Position::new(0, 20)));
        assert!(positions.lose(&asked, Position::new(1, 0)));
    }

    #[test]
    fn memory_is_bounded() {
        let mut positions = Positions::new((0..MOST as u64 + 5).map(|n| point("u:a", &n.to_string(), 1)));
        assert_eq!(positions.entries.len(), MOST);
        assert!(!newest(&positions).contains(&named("4", 1)), "the oldest are forgotten");
        assert!(!positions.take(&event("u:a", &"s".repeat(LONGEST_NAMES), 1), Origin::Live));
        assert_eq!(positions.entries.len(), MOST);
    }
}
