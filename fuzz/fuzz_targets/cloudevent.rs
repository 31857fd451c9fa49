//! Any bytes are a CloudEvent in one of the three modes or refused; what an event maps to gives it back. Run
//! with `cargo +nightly fuzz run cloudevent`.
#![no_main]

use aep_sidecar::aep::Event;
use aep_sidecar::aep::cloudevents::{BATCH, CloudEvent, HeaderValues, STRUCTURED, inverse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for media in [STRUCTURED, BATCH] {
        let read = inverse::http([("content-type", media)], bytes, &[]);
        for inverse in read.into_iter().flatten().flatten() {
            gives_itself_back(&inverse.event);
        }
    }
    // A header a line, then a blank line and the body.
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    let headers = head.lines().filter_map(|line| line.split_once(':'));
    if let Ok(inverse) = inverse::binary(headers, body.as_bytes(), &[]) {
        gives_itself_back(&inverse.event);
    }
    if let Ok(event) = Event::parse(bytes) {
        gives_itself_back(&event);
    }
});

fn gives_itself_back(event: &Event) {
    let Ok(mapped) = CloudEvent::of(event) else { return };
    let structured = inverse::structured(&mapped.structured(), &[]).expect("what is mapped maps back").event;
    let binary = mapped.binary(HeaderValues::Encoded);
    let headers = binary.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let binary = inverse::binary(headers, &binary.body, &[]).expect("what is mapped maps back").event;
    for back in [structured, binary] {
        assert_eq!((back.key(), back.session_key()), (event.key(), event.session_key()));
        assert_eq!((back.position(), back.event_type()), (event.position(), event.event_type()));
        assert_eq!((back.data(), back.time()), (event.data(), event.time()));
        assert_eq!(back.extensions().count(), event.extensions().count());
    }
}
