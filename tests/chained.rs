//! One sidecar's sink is another's inlet: what the second replays is what the first does, in each content mode.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]

#[path = "harness/harness.rs"]
mod harness;
#[path = "harness/process.rs"]
mod process;

use std::collections::BTreeMap;

use aep_sidecar::aep::cloudevents::CloudEvent;
use aep_sidecar::aep::{Event, Scope};
use process::Sidecar;
use serde_json::Value;

/// Opens the second one's inlet.
const TOKEN: &str = "t0p";

/// What an event has, beside its extension attributes.
const ATTRIBUTES: [&str; 19] = [
    "aep",
    "id",
    "type",
    "time",
    "source",
    "subject",
    "agent",
    "session",
    "run",
    "step",
    "seq",
    "epoch",
    "cause",
    "severity",
    "capture",
    "traceparent",
    "tracestate",
    "data",
    "to",
];

/// The members of an event: `data` as its exact text, the others by their value.
type Members = BTreeMap<String, Value>;

/// The histories by source and session, between which no order is kept.
type Histories = BTreeMap<[String; 2], Vec<Members>>;

async fn histories(sidecar: &Sidecar) -> Histories {
    let stream = sidecar.client.get(sidecar.url("/stream?from=all&live=0")).bearer_auth(TOKEN);
    let text = stream.send().await.unwrap().text().await.unwrap();
    assert!(text.ends_with(": replay-complete\n\n"), "{text}");
    let mut histories = Histories::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let members = harness::members(line).into_iter().map(|(name, text)| {
            let value = if name == "data" { Value::String(text) } else { value(&text) };
            (name, value)
        });
        let members = Members::from_iter(members);
        let lane = ["source", "session"].map(|name| members.get(name).unwrap().to_string());
        histories.entry(lane).or_default().push(members);
    }
    histories
}

/// A value other than that of `data`. `5.0` is the integer 5.
fn value(text: &str) -> Value {
    let value: Value = serde_json::from_str(text).unwrap();
    #[expect(clippy::cast_possible_truncation, reason = "only what has no fraction is written so")]
    value.as_f64().filter(|_| value.is_f64()).map_or(value, |float| Value::from(float as i64))
}

/// What a corpus has that goes by HTTP and by a CloudEvent: commands flow elsewhere, and an extension attribute
/// may have the name of one that the mapping writes.
fn carried(lines: &str) -> Vec<String> {
    let lines = lines.lines().filter(|line| !line.trim().is_empty());
    let carried = lines.filter(|line| {
        let event = Event::parse_str(line).unwrap();
        event.scope() != Scope::Command && CloudEvent::of(&event).is_ok()
    });
    carried.map(str::to_owned).collect()
}

/// A header's value is text: integers and booleans of extension attributes arrive as strings.
fn as_binary_carries(histories: &mut Histories) {
    for event in histories.values_mut().flatten() {
        for (name, value) in event {
            if !ATTRIBUTES.contains(&name.as_str()) && !value.is_string() {
                *value = Value::String(value.to_string());
            }
        }
    }
}

/// A CloudEvent's integer has 32 bits: a larger one in an extension attribute arrives as a string.
fn as_json_carries(histories: &mut Histories) {
    for event in histories.values_mut().flatten() {
        for (name, value) in event {
            let large = value.as_i64().is_some_and(|value| i32::try_from(value).is_err());
            if !ATTRIBUTES.contains(&name.as_str()) && large {
                *value = Value::String(value.to_string());
            }
        }
    }
}

async fn chained(test: &str, mode: &str, adapt: fn(&mut Histories)) {
    let mut corpora = vec![("own", harness::corpus("events.jsonl"))];
    if let Some(fixtures) = harness::conformance(test) {
        corpora.push(("golden", harness::read(&fixtures.join("fixtures/golden/golden.jsonl"))));
    }
    for (name, corpus) in corpora {
        let lines = carried(&corpus);
        assert!(lines.len() > 30, "{name}: {}", lines.len());
        let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let second = Sidecar::start(directories[1].path(), &[("AEP_TOKEN", TOKEN)]);
        let inlet = second.url("/cloudevents");
        let variables = [("CE_SINK", inlet.as_str()), ("CE_MODE", mode), ("CE_TOKEN", TOKEN)];
        let first = Sidecar::start(directories[0].path(), &variables);
        first.post(&lines).await;
        let mut sent = histories(&first).await;
        assert!(sent.values().map(Vec::len).sum::<usize>() > 30, "{name}");
        // Within its drain, all of it is delivered.
        let log = first.stop().join("\n");
        adapt(&mut sent);
        let arrived = histories(&second).await;
        assert!(arrived.keys().eq(sent.keys()), "{name}: {log}");
        for (lane, sent) in sent {
            assert_eq!(arrived.get(&lane), Some(&sent), "{name}: {lane:?}: {log}");
        }
        second.stop();
    }
}

#[tokio::test]
async fn in_structured_mode() {
    chained("in_structured_mode", "structured", as_json_carries).await;
}

#[tokio::test]
async fn in_batch_mode() {
    chained("in_batch_mode", "batch", as_json_carries).await;
}

#[tokio::test]
async fn in_binary_mode() {
    chained("in_binary_mode", "binary", as_binary_carries).await;
}
