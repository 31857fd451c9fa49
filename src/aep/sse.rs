//! Server-sent events: one event in, one message out, whatever an attribute holds.
//!
//! A message is `event:`, `data:`, `id:` and a blank line. The type's grammar and JSON's keep line breaks out
//! of the first two; a session is any string, so `id:` is left out where it would break the frame or be
//! ignored by a browser, and such a session resumes by `from` instead.

use super::event::Event;
use super::position::Position;

/// A silence-breaking comment.
pub const PING: &[u8] = b": ping\n\n";
/// The end of a `live=0` stream.
pub const REPLAY_COMPLETE: &[u8] = b": replay-complete\n\n";
/// The end of a stream whose server is going away.
pub const SHUTTING_DOWN: &[u8] = b": shutting-down\n\n";
/// Appends the message of `event` to `out`.
///
/// Spec: AEP-0003 §3.3.
pub fn write_message(event: &Event, out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(event.event_type().as_bytes());
    out.extend_from_slice(b"\ndata: ");
    out.extend_from_slice(event.as_bytes());
    if let (Some(session), Some(position)) = (event.session(), event.position())
        && !session.contains(is_control)
    {
        out.extend_from_slice(b"\nid: ");
        out.extend_from_slice(session.as_bytes());
        out.push(b':');
        out.extend_from_slice(position.to_string().as_bytes());
    }
    out.extend_from_slice(b"\n\n");
}

/// Appends the marker that something before `earliest` can't be replayed any more. Control characters of the
/// session, which would break the comment, become U+FFFD.
///
/// Spec: AEP-0003 §3.3, §5.
pub fn write_replay_exhausted(session: &str, earliest: Position, out: &mut Vec<u8>) {
    let session = session.replace(is_control, "\u{fffd}");
    out.extend_from_slice(format!(": replay-exhausted {session} {earliest}\n\n").as_bytes());
}

fn is_control(c: char) -> bool {
    c.is_control()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(session: &str, tail: &str) -> String {
        let session = serde_json::to_string(session).unwrap();
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":{session},"seq":7{tail}}}"#
        ))
        .unwrap();
        let mut out = Vec::new();
        write_message(&event, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_message_has_type_data_and_position() {
        let text = message("a:b", r#","epoch":2"#);
        let mut lines = text.split('\n');
        assert_eq!(lines.next(), Some("event: run.started"));
        assert!(lines.next().unwrap().starts_with("data: {\"aep\":\"0.1\""));
        assert_eq!(lines.collect::<Vec<_>>(), ["id: a:b:2:7", "", ""]);
    }

    #[test]
    fn a_session_that_would_break_the_frame_has_no_id() {
        for session in ["a\nb", "a\rb", "a\0b", "\u{85}", "\n\ndata: forged"] {
            let text = message(session, "");
            assert!(!text.contains("\nid:"), "{text:?}");
            assert_eq!(text.matches('\n').count(), 3, "{text:?}");
        }
    }

    #[test]
    fn a_marker_is_one_comment() {
        let mut out = Vec::new();
        write_replay_exhausted("a\nb", Position::new(1, 5), &mut out);
        assert_eq!(out, ": replay-exhausted a\u{fffd}b 1:5\n\n".as_bytes());
    }

    #[test]
    fn an_agent_scoped_event_has_no_id() {
        let event = Event::parse_str(r#"{"aep":"0.1","id":"e1","type":"agent.idle","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a"}"#).unwrap();
        let mut out = Vec::new();
        write_message(&event, &mut out);
        assert!(!String::from_utf8(out).unwrap().contains("\nid:"));
    }
}
