//! What a subscription takes and gives.

use std::fmt;

use crate::aep::{Event, Position};

/// A saved position: everything up to it was handled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePoint {
    /// The emitter.
    pub source: Box<str>,
    /// The session.
    pub session: Box<str>,
    /// The highest position that was handled.
    pub position: Position,
}

/// What a subscription gives.
#[derive(Debug, Clone)]
pub enum Update {
    /// Events in the order they were read, at least one, at most 256; no event is added to a mebibyte of them.
    /// A session's come in the order of one connection; a drain's and the live stream's are mixed.
    Events(Vec<Event>),
    /// Something of a session can't be had any more.
    Lost(Lost),
}

/// What can't be had any more of a session: told once, for the caller to log and count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// The session.
    pub session: Box<str>,
    /// Everything up to here was taken before.
    pub after: Option<Position>,
    /// What the relay still has begins here; `None` when it takes no position of this session at all, so that
    /// nothing may be lost, or anything.
    pub earliest: Option<Position>,
}

impl fmt::Display for Lost {
    /// The positions only: a session's name is for a log's fields.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |position: Option<Position>| position.map_or_else(|| "?".to_owned(), |at| at.to_string());
        write!(f, "events after {} and before {}", show(self.after), show(self.earliest))
    }
}
