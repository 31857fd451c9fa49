//! The project's own corpus: the rules of events, filters, capture ceilings and the mapping to CloudEvents, by
//! example, whether or not the public fixtures are there.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a corpus of another shape fails the test")]

#[path = "harness/harness.rs"]
mod harness;

use std::collections::BTreeMap;

use aep_sidecar::aep::capture::down_level;
use aep_sidecar::aep::cloudevents::{self, CloudEvent, HeaderValues, inverse};
use aep_sidecar::aep::event_type::CATEGORIES;
use aep_sidecar::aep::{Capture, Event, Filter, Registry, Scope, Severity};
use harness::{Json, cases, corpus, member, members, string};
use serde_json::Value;

fn events() -> BTreeMap<String, Event> {
    let events = corpus("events.jsonl");
    let read = |line| Event::parse_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    events.lines().map(read).map(|event| (event.id().to_owned(), event)).collect()
}

#[test]
fn events_are_legal_and_forwarded_byte_for_byte() {
    for line in corpus("events.jsonl").lines() {
        let event = Event::parse(line.as_bytes()).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(event.as_str(), line);
        assert_eq!(event.data().map(str::to_owned), member(line, "data"));
        assert_eq!(Some(event.agent().to_owned()), string(line, "agent"));
    }
    assert_eq!(events().len(), corpus("events.jsonl").lines().count(), "ids are unique");
}

#[test]
fn the_corpus_covers_every_scope_category_and_level() {
    let events = events();
    assert!(events.len() >= 40);
    for scope in [Scope::Agent, Scope::Command, Scope::Foreign, Scope::Session] {
        assert!(events.values().any(|event| event.scope() == scope), "{scope:?}");
    }
    for category in CATEGORIES.into_iter().chain(["x"]) {
        let is = |event: &Event| event.event_type().split('.').next() == Some(category);
        assert!(events.values().any(is), "{category}");
    }
    for severity in Severity::ALL {
        assert!(events.values().any(|event| event.declared_severity() == Some(severity)), "{severity}");
    }
    for capture in Capture::ALL {
        assert!(events.values().any(|event| event.declared_capture() == Some(capture)), "{capture}");
    }
}

#[test]
fn invalid_events_are_refused_by_name() {
    let cases = corpus("invalid.jsonl");
    assert!(cases.lines().count() >= 40);
    for case in cases.lines() {
        let case: BTreeMap<String, String> = serde_json::from_str(case).unwrap();
        let Err(error) = Event::parse(case["text"].as_bytes()) else {
            panic!("{} is accepted", case["name"])
        };
        assert_eq!(error.code(), case["code"], "{}: {error}", case["name"]);
        assert!(error.to_string().contains(&case["detail"]), "{}: {error}", case["name"]);
    }
}

#[test]
fn filters_match_what_they_say() {
    let events = events();
    let corpus: Value = serde_json::from_str(&corpus("filters.json")).unwrap();
    for case in corpus["match"].as_array().unwrap() {
        let filter = Filter::parse(&case["filter"].to_string()).unwrap();
        for (ids, expected) in [("matches", true), ("misses", false)] {
            for id in case[ids].as_array().unwrap() {
                let id = id.as_str().unwrap();
                let event = events.get(id).unwrap_or_else(|| panic!("no event {id}"));
                assert_eq!(filter.matches(event), expected, "{} of {id}", case["name"]);
            }
        }
    }
    for case in corpus["invalid"].as_array().unwrap() {
        let Err(error) = Filter::parse(&case["filter"].to_string()) else {
            panic!("{} is accepted", case["name"])
        };
        assert!(error.to_string().contains(case["detail"].as_str().unwrap()), "{}: {error}", case["name"]);
    }
}

#[test]
fn ceilings_are_kept() {
    for case in cases(&corpus("downlevel.json"), "cases") {
        let text = |name| string(&case, name);
        let name = text("name").unwrap();
        let event_type = text("type").unwrap();
        let seq = if event_type.starts_with("control.") { "" } else { r#","seq":3"# };
        let subject = text("subject").map_or(String::new(), |subject| format!(r#","subject":"{subject}""#));
        let data = member(&case, "data").filter(|data| data != "null");
        let data = data.map_or(String::new(), |data| format!(r#","data":{data}"#));
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"lower","type":"{event_type}"{subject},"time":"2026-03-14T08:00:00Z","source":"aep://mill.example/a","agent":"weaver","session":"loom-1"{seq},"capture":"{}"{data}}}"#,
            text("capture").unwrap()
        ))
        .unwrap_or_else(|error| panic!("{name}: {error}"));
        let ceiling = Capture::from_name(&text("ceiling").unwrap()).unwrap();
        let lowered = down_level(&event, ceiling, &Registry::core());
        assert_eq!(lowered.capture().as_str(), text("expect_capture").unwrap(), "{name}");
        let expected = member(&case, "expect_data").filter(|data| data != "null");
        assert_eq!(lowered.data().map(Json::read), expected.as_deref().map(Json::read), "{name}");
    }
}

#[test]
fn events_map_to_the_expected_cloudevents_in_every_mode() {
    let (events, expected) = (corpus("events.jsonl"), corpus("cloudevents.jsonl"));
    assert_eq!(events.lines().count(), expected.lines().count());
    let events: Vec<Event> = events.lines().map(|line| Event::parse_str(line).unwrap()).collect();
    let mapped: Vec<CloudEvent<'_>> = events.iter().map(|event| CloudEvent::of(event).unwrap()).collect();
    for (mapped, expected) in mapped.iter().zip(expected.lines()) {
        assert_eq!(String::from_utf8(mapped.structured()).unwrap(), expected);
        // Binary mode says the same attributes, as text.
        let binary = mapped.binary(HeaderValues::Verbatim);
        assert_eq!(String::from_utf8(binary.body).unwrap(), member(expected, "data").unwrap_or_default());
        let named = members(expected).into_iter().filter(|(name, _)| name != "data").map(|(name, _)| {
            if name == "datacontenttype" { "content-type".to_owned() } else { format!("ce-{name}") }
        });
        assert!(binary.headers.iter().map(|(name, _)| name.clone()).eq(named), "{expected}");
    }
    let array = expected.lines().collect::<Vec<_>>().join(",");
    assert_eq!(String::from_utf8(cloudevents::batch(&mapped)).unwrap(), format!("[{array}]"));
    let back = inverse::batch(format!("[{array}]").as_bytes(), &[]).unwrap();
    for (event, back) in events.iter().zip(back) {
        let back = back.unwrap();
        assert!(back.dropped.is_empty());
        assert_eq!(back.event.key(), event.key());
        assert_eq!(back.event.position(), event.position());
        assert_eq!(back.event.data(), event.data());
        assert_eq!(back.event.extensions().count(), event.extensions().count());
    }
}
