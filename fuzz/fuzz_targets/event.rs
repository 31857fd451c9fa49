//! Any bytes are a legal event or refused; a legal one reads back as itself, and lowering keeps every ceiling.
//! Run with `cargo +nightly fuzz run event`.
#![no_main]

use aep_sidecar::aep::capture::down_level;
use aep_sidecar::aep::{Capture, Event, Registry};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static REGISTRY: LazyLock<Registry> = LazyLock::new(Registry::core);

fuzz_target!(|bytes: &[u8]| {
    let Ok(event) = Event::parse(bytes) else { return };
    assert_eq!(Event::parse(event.as_bytes()).expect("a legal event stays legal"), event);
    assert!(!event.as_str().contains(['\n', '\r']));
    for ceiling in Capture::ALL {
        let lowered = down_level(&event, ceiling, &REGISTRY);
        assert!(lowered.capture() <= ceiling);
        assert_eq!(down_level(&lowered, ceiling, &REGISTRY), lowered);
    }
});
