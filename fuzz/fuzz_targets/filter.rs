//! Any text is a filter or refused, and a filter answers for any event: the input is both, split at its first
//! line break. Run with `cargo +nightly fuzz run filter`.
#![no_main]

use aep_sidecar::aep::{Event, Filter};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (filter, event) = text.split_once('\n').unwrap_or((text, ""));
    let Ok(filter) = Filter::parse(filter) else { return };
    let Ok(event) = Event::parse_str(event) else { return };
    let matches = filter.matches(&event);
    assert!(matches || !filter.matches_everything());
    if let Some(mut sessions) = filter.sessions() {
        assert!(!matches || sessions.any(|session| Some(session) == event.session()));
    }
});
