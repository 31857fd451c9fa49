//! Events of a delivery, ordered for destinations that take several at a time.

use super::Delivery;
use crate::aep::position::SessionKey;

/// The delivery's messages in rounds: the first of every session, the second of every session, and so on. Those of a
/// round may go side by side; a round goes once the one before is acknowledged, so that a later event of a session is
/// never stored when an earlier one isn't.
pub(super) fn rounds<M>(delivery: &Delivery, messages: Vec<M>) -> Vec<Vec<M>> {
    let mut seen: Vec<(SessionKey<'_>, usize)> = Vec::new();
    let mut rounds: Vec<Vec<M>> = Vec::new();
    for (event, message) in delivery.events.iter().zip(messages) {
        let key = event.session_key();
        let round = match seen.iter_mut().find(|(session, _)| *session == key) {
            Some((_, before)) => {
                *before = before.saturating_add(1);
                *before
            }
            None => {
                seen.push((key, 0));
                0
            }
        };
        match rounds.get_mut(round) {
            Some(round) => round.push(message),
            None => rounds.push(vec![message]),
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aep::Event;

    #[test]
    fn a_session_has_one_message_in_a_round_and_keeps_its_order() {
        let event = |session: &str, seq: u64| {
            Event::parse_str(&format!(
                r#"{{"aep":"0.1","id":"{session}{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}}}"#
            ))
            .unwrap()
        };
        let events = vec![event("a", 0), event("a", 1), event("b", 0), event("a", 2), event("b", 1)];
        let ids = events.iter().map(|event| event.id().to_owned()).collect();
        let delivery = Delivery { events, attempt: 1 };
        assert_eq!(rounds(&delivery, ids), [vec!["a0", "b0"], vec!["a1", "b1"], vec!["a2"]]);
    }
}
