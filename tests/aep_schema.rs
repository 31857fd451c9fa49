//! The public envelope schema as outside judge of what a legal event is. Skipped, and said so, where it is absent.
//!
//! Reader and schema agree but for these, each of which a test holds:
//!
//! | what | the schema | the reader |
//! |---|---|---|
//! | `time` | `format: date-time`, as one library reads it: a leap second only at 23:59 UTC | RFC 3339: at any minute |
//! | `source` | `format: uri`: absolute, ASCII | kept verbatim; no white space, no control characters |
//! | a member that stands twice | can't see it | refused |
//! | integers | of any size | up to 2^63 − 1, extensions from −2^63 |
//! | nesting | of any depth | 100 levels |
//! | half a surrogate pair, 1e400 in `data` | can't be read into a tree | carried verbatim |
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "an index out of bounds fails the test")]

#[path = "harness/harness.rs"]
mod harness;

use std::cell::Cell;

use aep_sidecar::aep::Event;
use harness::generate::{self, Draft};
use harness::{conformance, corpus, read};
use jsonschema::Validator;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::TestRunner;
use serde_json::Value;

/// The judge, formats included; `None` where the fixtures are absent.
fn envelope_schema(test: &str) -> Option<Validator> {
    let schema = read(&conformance(test)?.join("schemas/aep-event.schema.json"));
    let schema = serde_json::from_str(&schema).unwrap();
    Some(jsonschema::options().should_validate_formats(true).build(&schema).unwrap())
}

/// What the schema says; `None` for text that has no tree.
fn verdict(schema: &Validator, text: &str) -> Option<bool> {
    serde_json::from_str::<Value>(text).ok().map(|tree| schema.is_valid(&tree))
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

#[test]
fn generated_events_are_legal_by_the_schema() {
    let Some(schema) = envelope_schema("generated_events_are_legal_by_the_schema") else { return };
    runner(512)
        .run(&generate::event(), |draft| {
            let text = draft.text();
            prop_assert!(Event::parse_str(&text).is_ok());
            prop_assert_ne!(verdict(&schema, &text), Some(false), "{}", text);
            Ok(())
        })
        .unwrap();
}

/// Names and values, legal for some attribute and illegal for others.
fn mutation() -> impl Strategy<Value = (Index, Option<&'static str>, Option<&'static str>)> {
    let names = [
        "aep",
        "id",
        "type",
        "subject",
        "time",
        "source",
        "agent",
        "session",
        "run",
        "step",
        "seq",
        "epoch",
        "cause",
        "traceparent",
        "severity",
        "capture",
        "data",
        "acme",
        "acme_ext",
        "Acme",
        "",
        "é",
        "a-b",
        "0",
        "aaaaaaaaaaaaaaaaaaaa",
        "aaaaaaaaaaaaaaaaaaaaa",
    ];
    let values = [
        "null",
        "true",
        "false",
        "0",
        "-0",
        "5.0",
        "5e1",
        "-1",
        "1.5",
        "\"\"",
        "\"x\"",
        "\"0.1\"",
        "\"0.2\"",
        "[]",
        "{}",
        "\"debug\"",
        "\"Debug\"",
        "\"fatal\"",
        "\"none\"",
        "\"full\"",
        "\"2026-07-03T10:00:00Z\"",
        "\"2026-07-03\"",
        "\"2026-02-29T10:00:00Z\"",
        "\"tool.completed\"",
        "\"tool\"",
        "\"tool.\"",
        "\"Tool.x\"",
        "\"tool.x\\n\"",
        "\"agent.x\"",
        "\"control.pause\"",
        "\"control.pauses\"",
        "\"attention.routed\"",
        "\"x.a.control.b\"",
        "\"x.a.control\"",
        "\"x.a.b\"",
        "\"x..b.c\"",
        "\"x.a-b.c.d\"",
        "\"x.a.b-c.d\"",
        "\"banana.x\"",
        "\"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\"",
        "\"00-4BF92F3577B34DA6A3CE929D0E0E4736-00F067AA0BA902B7-01\"",
        "\"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\\n\"",
    ];
    (
        any::<Index>(),
        prop::option::of(select(names.to_vec())),
        prop::option::weighted(0.8, select(values.to_vec())),
    )
}

/// Puts the value under the name, or under one of the names that are there; without a value, takes it away.
fn mutate(draft: &mut Draft, (at, name, value): (Index, Option<&str>, Option<&str>)) {
    let name = match name {
        Some(name) => name.to_owned(),
        None if draft.members.is_empty() => return,
        None => draft.members[at.index(draft.members.len())].0.clone(),
    };
    // Any text without white space is a source to the reader.
    if name == "source" && value.is_some_and(|json| json.starts_with('"') && json.len() > 2) {
        return;
    }
    draft.members.retain(|(known, _)| *known != name);
    if let Some(json) = value {
        draft.members.push((name, json.to_owned()));
    }
}

#[test]
fn an_altered_event_is_legal_when_the_schema_says_so() {
    let Some(schema) = envelope_schema("an_altered_event_is_legal_when_the_schema_says_so") else { return };
    let (legal, illegal) = (Cell::new(0), Cell::new(0));
    runner(4096)
        .run(&(generate::event(), vec(mutation(), 1..4)), |(mut draft, mutations)| {
            for mutation in mutations {
                mutate(&mut draft, mutation);
            }
            let text = draft.text();
            let Some(by_schema) = verdict(&schema, &text) else { return Ok(()) };
            let here = Event::parse_str(&text);
            prop_assert_eq!(here.is_ok(), by_schema, "{}: {:?}", text, here);
            let count = if by_schema { &legal } else { &illegal };
            count.set(count.get() + 1);
            Ok(())
        })
        .unwrap();
    let (legal, illegal) = (legal.get(), illegal.get());
    assert!(legal > 200 && illegal > 200, "{legal} legal, {illegal} illegal");
}

#[test]
fn the_corpus_is_legal_by_the_schema() {
    let Some(schema) = envelope_schema("the_corpus_is_legal_by_the_schema") else { return };
    let mut judged = 0;
    for line in corpus("events.jsonl").lines() {
        let id = harness::string(line, "id").unwrap();
        // What the table above names.
        if id.starts_with("only-here-") {
            assert_ne!(verdict(&schema, line), Some(true), "{line}");
        } else {
            assert_eq!(verdict(&schema, line), Some(true), "{line}");
            judged += 1;
        }
    }
    assert!(judged >= 40);
}

#[test]
fn reader_and_schema_differ_as_documented() {
    let Some(schema) = envelope_schema("reader_and_schema_differ_as_documented") else { return };
    let event = |members: &str, time: &str, source: &str| {
        format!(
            r#"{{"aep":"0.1","id":"e","type":"run.started","time":"{time}","source":"{source}","agent":"a","session":"s","seq":1{members}}}"#
        )
    };
    let plain = |members: &str| event(members, "2026-07-03T10:00:00Z", "aep://h");
    let deep = format!(r#","data":{{"a":{}{}}}"#, "[".repeat(99), "]".repeat(99));
    for (text, by_schema, here) in [
        (plain(""), Some(true), true),
        (event("", "2026-07-03T10:00:60Z", "aep://h"), Some(false), true),
        (event("", "2026-07-03T10:00:00Z", "host/agent"), Some(false), true),
        (event("", "2026-07-03T10:00:00Z", "aep://hôte/é"), Some(false), true),
        (plain(r#","acme":"x","acme":"x""#), Some(true), false),
        (plain(r#","epoch":9223372036854775808"#), Some(true), false),
        (plain(r#","acme":-9223372036854775809"#), Some(true), false),
        (plain(&deep), Some(true), false),
        (plain(r#","data":{"a":1e400}"#), None, true),
        (plain(r#","data":{"a":"\ud800"}"#), None, true),
    ] {
        assert_eq!(verdict(&schema, &text), by_schema, "{text}");
        assert_eq!(Event::parse_str(&text).is_ok(), here, "{text}");
    }
}
