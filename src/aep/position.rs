//! Where an event stands in its session, and how it is told from every other event.

use std::fmt;

/// A place in a session's order: `(epoch, seq)`, compared lexicographically as integers.
///
/// Spec: AEP-0001 §7.3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position {
    /// Restart generation of the emitter's counter.
    pub epoch: u64,
    /// The emitter's counter within that generation.
    pub seq: u64,
}

impl Position {
    /// The highest position below this one; `None` for the lowest of all.
    #[must_use]
    pub fn before(self) -> Option<Self> {
        match (self.epoch, self.seq) {
            (0, 0) => None,
            (epoch, 0) => Some(Self { epoch: epoch - 1, seq: u64::MAX }),
            (epoch, seq) => Some(Self { epoch, seq: seq - 1 }),
        }
    }

    /// The largest `epoch` or `seq` that is read: 2^63 − 1, what a signed 64-bit reader can hold.
    pub const MAX_PART: u64 = i64::MAX as u64;

    /// The position `(epoch, seq)`.
    #[must_use]
    pub const fn new(epoch: u64, seq: u64) -> Self {
        Self { epoch, seq }
    }

    /// The position before the first one of `epoch`: what `(epoch, -1)` means. `None` is before every position.
    #[must_use]
    pub const fn before_epoch(epoch: u64) -> Option<Self> {
        match epoch.checked_sub(1) {
            Some(epoch) => Some(Self { epoch, seq: u64::MAX }),
            None => None,
        }
    }

    /// The least position greater than this one.
    #[must_use]
    pub const fn successor(self) -> Self {
        match self.seq.checked_add(1) {
            Some(seq) => Self { epoch: self.epoch, seq },
            None => Self { epoch: self.epoch.saturating_add(1), seq: 0 },
        }
    }
}

impl fmt::Display for Position {
    /// `{epoch}:{seq}`, as in an SSE `id` and in the replay-exhausted comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.seq)
    }
}

/// The last position of a session that a consumer has processed; replay starts strictly after it.
///
/// Spec: AEP-0001 §7.6.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ResumeToken {
    /// The session, by its bare name.
    pub session: String,
    /// The last processed position; `None` stands before every one.
    pub position: Option<Position>,
}

impl ResumeToken {
    /// Reads `{session}:{epoch}:{seq}`, the form of an SSE `id`. The session may itself contain colons, so
    /// the two numbers are split off from the right. `None` when the text has another form.
    ///
    /// Spec: AEP-0003 §3.3.
    #[must_use]
    pub fn from_event_id(text: &str) -> Option<Self> {
        let (rest, seq) = text.rsplit_once(':')?;
        let (session, epoch) = rest.rsplit_once(':')?;
        if session.is_empty() {
            return None;
        }
        Some(Self { session: session.to_owned(), position: Some(Position::new(part(epoch)?, part(seq)?)) })
    }
}

/// A plain decimal number no larger than [`Position::MAX_PART`]; no sign, no white space.
fn part(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|n| *n <= Position::MAX_PART)
}

/// What makes two deliveries the same event: `(source, id)`.
///
/// Spec: AEP-0001 §7.4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventKey<'a> {
    /// The emitter.
    pub source: &'a str,
    /// The emitter's id for the event.
    pub id: &'a str,
}

/// What per-session state is kept under: `(source, session)`. Distinct emitters that use one session name
/// have distinct sessions.
///
/// Spec: AEP-0001 §5.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionKey<'a> {
    /// The emitter.
    pub source: &'a str,
    /// The session's name; empty for an agent-scoped event, which has none.
    pub session: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_lexicographic_and_exact_past_2_pow_40() {
        // `epoch * 2^40 + seq` in a double would make these equal or swap them.
        assert!(Position::new(0, (1 << 40) + 5) < Position::new(1, 0));
        assert!(Position::new(1 << 50, 1) < Position::new(1 << 50, 2));
        assert!(Position::new(2, 0) > Position::new(1, u64::MAX));
    }

    #[test]
    fn event_id_splits_from_the_right() {
        let token = ResumeToken::from_event_id("a:b:c:3:187").unwrap();
        assert_eq!(token.session, "a:b:c");
        assert_eq!(token.position, Some(Position::new(3, 187)));
    }

    #[test]
    fn malformed_event_ids_are_refused() {
        for wrong in
            ["", "s", "s:1", ":1:2", "s:x:2", "s:1:", "s:1:-2", "s:1:+2", "s: 1:2", "s:1:9223372036854775808"]
        {
            assert_eq!(ResumeToken::from_event_id(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn successor_is_the_next_position() {
        assert_eq!(Position::new(4, 7).successor(), Position::new(4, 8));
        assert_eq!(Position::new(4, u64::MAX).successor(), Position::new(5, 0));
    }
}
