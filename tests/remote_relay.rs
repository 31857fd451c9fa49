//! A sidecar that exports from another relay: whatever becomes of the relay, and of itself, each event that the relay
//! still held goes into its spool once, and once to its sink.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/fake.rs"]
mod fake;
#[path = "harness/process.rs"]
mod process;
#[path = "harness/sink.rs"]
mod sink;

use std::path::Path;
use std::time::Duration;

use fake::{Asked, Fake};
use process::{Process, Sidecar};
use sink::{Arrival, Key, Sink, disorder, repeats};

const PATIENCE: Duration = Duration::from_secs(60);

const SOURCE: &str = "aep://h/agent/a";

fn event(session: &str, seq: u64, id: &str) -> String {
    format!(
        r#"{{"aep":"0.1","id":"{id}","type":"run.started","time":"2026-07-03T10:00:00Z","source":"{SOURCE}","agent":"a","session":"{session}","seq":{seq}}}"#
    )
}

fn lines(sessions: std::ops::Range<usize>, seqs: std::ops::Range<u64>) -> Vec<String> {
    seqs.flat_map(|seq| sessions.clone().map(move |n| event(&format!("s{n}"), seq, &format!("s{n}-{seq}"))))
        .collect()
}

fn keys(lines: &[String]) -> Vec<Key> {
    let id = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap()["id"].clone();
    lines.iter().map(|line| (SOURCE.to_owned(), id(line).as_str().unwrap().to_owned())).collect()
}

/// The relay, whose readers may resume four sessions at once.
fn relay(directory: &Path, port: &str, buffer: &str) -> Sidecar {
    Sidecar::start(directory, &[("AEP_PORT", port), ("AEP_MAX_FROM", "4"), ("AEP_BUFFER", buffer)])
}

/// The sidecar that reads it.
fn consumer(directory: &Path, relay: &Sidecar, sink: &Sink) -> Process {
    let url = format!("http://{}", relay.address);
    let variables = [
        ("AEP_RELAY", url.as_str()),
        ("AEP_TOKEN", "t"),
        ("CE_SINK", sink.url.as_str()),
        ("CE_RETRY_MAX", "50ms"),
        ("AEP_ADMIN_ADDR", "127.0.0.1:0"),
    ];
    process::start(directory, &variables)
}

async fn arrived(sink: &Sink, lines: &[String]) {
    let missing = sink.has(PATIENCE, keys(lines)).await;
    assert!(missing.is_empty(), "missing: {missing:?}");
}

/// Without those that came late on purpose.
fn in_order(arrivals: &[Arrival]) -> Vec<String> {
    let arrivals: Vec<_> =
        arrivals.iter().filter(|arrival| !arrival.id.starts_with("late")).cloned().collect();
    disorder(&arrivals)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_comes_once_through_restarts_of_both() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sink = Sink::start().await;
    let mut emitting = relay(there.path(), "0", "10000");
    let port = emitting.address.rsplit(':').next().unwrap().to_owned();
    // There before anyone reads: a cold start takes everything.
    let before = lines(0..12, 0..20);
    emitting.post(&before).await;
    let mut reading = consumer(here.path(), &emitting, &sink);
    arrived(&sink, &before).await;

    // The relay is restarted. What it was sent before comes again, and late events below what was read.
    emitting.process.terminate();
    assert!(emitting.process.wait().success());
    let mut emitting = relay(there.path(), &port, "10000");
    let mut during = lines(0..12, 20..40);
    during.extend((0..12).map(|n| event(&format!("s{n}"), 7, &format!("late{n}"))));
    emitting.post(&before).await;
    emitting.post(&during).await;
    arrived(&sink, &during).await;

    // The reader is stopped; the relay goes on, is killed, goes on, and has new sessions.
    reading.terminate();
    assert!(reading.wait().success());
    let mut meanwhile = lines(0..20, 40..50);
    emitting.post(&meanwhile).await;
    emitting.process.kill();
    let emitting = relay(there.path(), &port, "10000");
    let more = lines(0..20, 50..60);
    emitting.post(&more).await;
    meanwhile.extend(more);
    let mut reading = consumer(here.path(), &emitting, &sink);
    arrived(&sink, &meanwhile).await;

    let arrivals = sink.arrivals();
    assert_eq!(repeats(&arrivals), Vec::<Key>::new());
    assert_eq!(arrivals.len(), before.len() + during.len() + meanwhile.len());
    assert_eq!(in_order(&arrivals), Vec::<String>::new());
    reading.terminate();
    assert!(reading.wait().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_relay_gave_up_meanwhile_is_told_and_counted() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sink = Sink::start().await;
    let emitting = relay(there.path(), "0", "5");
    let before = lines(0..1, 0..3);
    emitting.post(&before).await;
    let mut reading = consumer(here.path(), &emitting, &sink);
    arrived(&sink, &before).await;
    reading.terminate();
    assert!(reading.wait().success());
    // Of these only the last five are held.
    emitting.post(&lines(0..1, 3..20)).await;
    let reading = consumer(here.path(), &emitting, &sink);
    let told = reading.logged("no longer has events that weren't read yet");
    assert!(told.contains("\"ERROR\"") && told.contains("s0"), "{told}");
    arrived(&sink, &lines(0..1, 15..20)).await;
    assert_eq!(sink.arrivals().len(), 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_told_and_loses_nothing() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sink = Sink::start().await;
    let emitting = Sidecar::start(there.path(), &[("AEP_TOKEN", "t")]);
    let events = lines(0..2, 0..5);
    let posted = emitting
        .client
        .post(emitting.url("/events"))
        .bearer_auth("t")
        .header("aep-version", "0.1")
        .header("content-type", "application/x-ndjson")
        .body(events.join("\n"));
    assert_eq!(posted.send().await.unwrap().status(), 202);
    let url = format!("http://{}", emitting.address);
    let wrong = [("AEP_RELAY", url.as_str()), ("AEP_TOKEN", "hunter2"), ("CE_SINK", sink.url.as_str())];
    let mut refused = process::start(here.path(), &wrong);
    let told = refused.logged("unauthorized");
    assert!(!told.contains("hunter2"), "{told}");
    refused.terminate();
    assert!(refused.wait().success());
    let _reading = consumer(here.path(), &emitting, &sink);
    arrived(&sink, &events).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_in_the_midst_of_a_catch_up_makes_no_position_skip_what_was_owed() {
    let directory = tempfile::tempdir().unwrap();
    let (relay, sink) = (Fake::open().await, Sink::start().await);
    let url = relay.config().relay.to_string();
    let variables = [("AEP_RELAY", url.as_str()), ("CE_SINK", sink.url.as_str()), ("CE_RETRY_MAX", "50ms")];
    // Something is known, so that the next start resumes.
    let mut reading = process::start(directory.path(), &variables);
    let mut live = relay.streaming().await;
    assert_eq!(live.asked(), Asked::All);
    let old = [event("old", 10, "old-10")];
    live.event(&old[0]).await;
    arrived(&sink, &old).await;
    reading.terminate();
    assert!(reading.wait().success());
    // A session that began meanwhile is heard of live, while the history isn't read yet.
    let mut reading = process::start(directory.path(), &variables);
    let mut live = relay.streaming().await;
    assert_ne!(live.asked(), Asked::All);
    let history = relay.accept().await;
    let fresh: Vec<_> = (0..=500).map(|seq| event("fresh", seq, &format!("fresh-{seq}"))).collect();
    live.event(&fresh[500]).await;
    arrived(&sink, &fresh[500..]).await;
    reading.kill();
    drop((live, history));
    // The position of what was heard says nothing of what came before it.
    let _reading = process::start(directory.path(), &variables);
    let mut live = relay.streaming().await;
    assert_eq!(live.asked(), Asked::All);
    live.event(&old[0]).await;
    for line in &fresh {
        live.event(line).await;
    }
    arrived(&sink, &fresh).await;
}
