//! Up to which position a session is done with.

use std::collections::{HashMap, VecDeque};

use super::seen::Fingerprint;
use crate::aep::Position;

/// Follows the sessions that have events pending. Within a session, events are handled in the order they were
/// admitted.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    sessions: HashMap<Fingerprint, Session>,
}

#[derive(Debug, Default)]
struct Session {
    /// Of the pending positions, each that is less than all admitted after it, in order: the first is the
    /// least of all.
    minima: VecDeque<Position>,
    /// The highest one handled since the session last had nothing pending.
    handled: Option<Position>,
}

impl Reached {
    /// An event at that position is pending from now on.
    pub(crate) fn admitted(&mut self, session: Fingerprint, position: Position) {
        let minima = &mut self.sessions.entry(session).or_default().minima;
        while minima.pop_back_if(|last| *last > position).is_some() {}
        minima.push_back(position);
    }

    /// It is handled: the highest position handled, unless one at or below it is still pending.
    pub(crate) fn handled(&mut self, session: Fingerprint, position: Position) -> Option<Position> {
        let state = self.sessions.get_mut(&session)?;
        state.minima.pop_front_if(|least| *least == position);
        state.handled = state.handled.max(Some(position));
        let reached =
            state.handled.filter(|handled| state.minima.front().is_none_or(|least| least > handled));
        if state.minima.is_empty() {
            self.sessions.remove(&session);
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_position_is_reached_when_nothing_below_it_is_pending() {
        let mut reached = Reached::default();
        let at = |seq| Position::new(0, seq);
        for seq in [5, 3, 4, 9] {
            reached.admitted(Fingerprint(1), at(seq));
        }
        let in_order = [5, 3, 4, 9].map(|seq| reached.handled(Fingerprint(1), at(seq)).map(|p| p.seq));
        assert_eq!(in_order, [None, None, Some(5), Some(9)]);
        assert!(reached.sessions.is_empty());
    }

    proptest! {
        #[test]
        fn it_agrees_with_looking_at_everything_pending(
            steps in prop::collection::vec(prop::option::of(0_u64..8), 0..60),
        ) {
            let (mut reached, mut pending, mut highest) = (Reached::default(), VecDeque::new(), None);
            for step in steps {
                match step {
                    Some(seq) => {
                        reached.admitted(Fingerprint(1), Position::new(0, seq));
                        pending.push_back(seq);
                    }
                    None => if let Some(seq) = pending.pop_front() {
                        highest = highest.max(Some(seq));
                        let expected = highest.filter(|h| pending.iter().all(|p| p > h));
                        let got = reached.handled(Fingerprint(1), Position::new(0, seq)).map(|p| p.seq);
                        prop_assert_eq!(got, expected);
                        if pending.is_empty() {
                            highest = None;
                        }
                    }
                }
            }
        }
    }
}
