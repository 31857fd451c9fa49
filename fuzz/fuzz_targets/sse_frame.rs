//! Whatever an event holds, its message on an event stream is one message with that event as its data, and an id
//! resumes it. Run with `cargo +nightly fuzz run sse_frame`.
#![no_main]

use aep_sidecar::aep::{Event, ResumeToken, sse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // As an event, and as the session of one: the one attribute that reaches the frame and may hold anything.
    let session = serde_json::Value::from(text);
    let wrapped = format!(
        r#"{{"aep":"0.1","id":"f","type":"run.started","time":"2026-03-14T08:00:00Z","source":"aep://f","agent":"f","session":{session},"seq":1}}"#
    );
    for event in [Event::parse_str(text), Event::parse_str(&wrapped)].into_iter().flatten() {
        let mut out = Vec::new();
        sse::write_message(&event, &mut out);
        let out = std::str::from_utf8(&out).expect("a message is text");
        let lines: Vec<&str> = out.split(['\n', '\r']).collect();
        let (event_type, data) =
            (format!("event: {}", event.event_type()), format!("data: {event}", event = event.as_str()));
        assert_eq!(lines.get(..2), Some(&[&*event_type, &*data][..]));
        match lines.get(2..) {
            Some(["", ""]) => {}
            Some([id, "", ""]) => {
                let id = id.strip_prefix("id: ").expect("the third line is the id");
                let token = ResumeToken::from_event_id(id).expect("an id resumes");
                assert_eq!(Some(&*token.session), event.session());
                assert_eq!(Some(token.position), event.position());
            }
            other => panic!("not one message: {other:?}"),
        }
    }
    let _read = ResumeToken::from_event_id(text);
});
