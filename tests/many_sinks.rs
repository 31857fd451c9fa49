//! Sinks don't wait for each other: beside one that refuses connections, or never answers, the others get everything
//! at once, and it gets everything in order once it works again. Each has its own filter and its own capture ceiling.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/emitter.rs"]
mod emitter;
#[path = "harness/process.rs"]
mod process;
#[path = "harness/sink.rs"]
mod sink;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use emitter::id;
use process::Sidecar;
use serde_json::json;
use sink::{Answer, Arrival, Key, Sink, disorder, repeats};
use tokio::net::TcpSocket;

const PATIENCE: Duration = Duration::from_secs(60);

const SOURCE: &str = "aep://h/agent/a";

const SESSIONS: usize = 10;

/// Each session has `tool.failed` events, with content, in turn with others.
const ROUNDS: u64 = 30;

fn is_tool(seq: u64) -> bool {
    seq.is_multiple_of(2)
}

fn event(session: &str, seq: u64) -> String {
    let id = id(session, seq);
    let kind = if is_tool(seq) { "tool.failed" } else { "run.finished" };
    let data = if is_tool(seq) {
        format!(r#"{{"error":{{"type":"E","message":"secret {seq}"}}}}"#)
    } else {
        format!(r#"{{"summary":"secret {seq}"}}"#)
    };
    format!(
        r#"{{"aep":"0.1","id":"{id}","type":"{kind}","time":"2026-07-03T10:00:00Z","source":"{SOURCE}","agent":"a","session":"{session}","seq":{seq},"capture":"full","data":{data}}}"#
    )
}

fn keys(wanted: impl Fn(u64) -> bool) -> BTreeSet<Key> {
    let all = (0..SESSIONS).flat_map(|n| (0..ROUNDS).map(move |seq| (format!("s{n}"), seq)));
    all.filter(|(_, seq)| wanted(*seq)).map(|(session, seq)| (SOURCE.to_owned(), id(&session, seq))).collect()
}

/// `gated` gets tools without their content, `whole` gets everything.
fn start(directory: &Path, gated: &str, whole: &str) -> Sidecar {
    let variables = [
        ("CE_SINKS", "gated,whole"),
        ("CE_SINK_GATED_URL", gated),
        ("CE_SINK_GATED_FILTER", r#"{"type":"tool.*"}"#),
        ("CE_SINK_GATED_CAPTURE", "metadata"),
        ("CE_SINK_WHOLE_URL", whole),
        ("CE_RETRY_INITIAL", "5ms"),
        ("CE_RETRY_MAX", "50ms"),
        ("AEP_DRAIN", "2s"),
    ];
    Sidecar::start(directory, &variables)
}

async fn post_all(sidecar: &Sidecar) {
    for seq in 0..ROUNDS {
        let lines: Vec<String> = (0..SESSIONS).map(|n| event(&format!("s{n}"), seq)).collect();
        sidecar.post(&lines).await;
    }
}

fn keys_of(arrivals: &[Arrival]) -> BTreeSet<Key> {
    arrivals.iter().map(Arrival::key).collect()
}

/// Everything there was for this sink, in order, with its content.
fn is_what_whole_gets(arrivals: &[Arrival]) {
    assert_eq!(keys_of(arrivals), keys(|_| true));
    assert_eq!(disorder(arrivals), Vec::<String>::new());
    for arrival in arrivals {
        assert_eq!(arrival.event["aepcapture"], "full", "{}", arrival.event);
        let secret = format!("secret {}", arrival.seq);
        let data = if is_tool(arrival.seq) {
            json!({"error": {"type": "E", "message": secret}})
        } else {
            json!({ "summary": secret })
        };
        assert_eq!(arrival.event["data"], data, "{}", arrival.event);
    }
}

/// The tools there were, in order, without their content.
fn is_what_gated_gets(arrivals: &[Arrival]) {
    assert_eq!(keys_of(arrivals), keys(is_tool));
    assert_eq!(disorder(arrivals), Vec::<String>::new());
    for arrival in arrivals {
        assert_eq!(arrival.event["type"], "dev.aep.tool.failed", "{}", arrival.event);
        // The default level is left out, or told.
        let level = arrival.event.get("aepcapture").map_or("metadata", |level| level.as_str().unwrap());
        assert_eq!(level, "metadata", "{}", arrival.event);
        assert_eq!(arrival.event["data"], json!({"error": {"type": "E"}}), "{}", arrival.event);
    }
}

/// A port on which connections are refused until it is listened on. It is nobody else's meanwhile.
fn refusing() -> (TcpSocket, String) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}/", socket.local_addr().unwrap());
    (socket, url)
}

#[derive(Debug, Clone, Copy)]
enum End {
    Stopped,
    Killed,
}

fn end(mut sidecar: Sidecar, how: End) {
    match how {
        End::Stopped => drop(sidecar.stop()),
        End::Killed => sidecar.process.kill(),
    }
}

/// What is allowed to come again: after a stop nothing, after a kill what may not have been noted yet.
fn allowed(how: End) -> usize {
    match how {
        End::Stopped => 0,
        End::Killed => 16,
    }
}

/// `gated` refuses connections; `whole` is well.
async fn beside_one_that_refuses(how: End) {
    let directory = tempfile::tempdir().unwrap();
    let whole = Sink::start().await;
    let (port, url) = refusing();
    let sidecar = start(directory.path(), &url, &whole.url);
    post_all(&sidecar).await;
    let missing = whole.has(PATIENCE, keys(|_| true)).await;
    assert!(missing.is_empty(), "held up by another sink: {missing:?}");
    assert_eq!(repeats(&whole.arrivals()), Vec::<Key>::new());
    end(sidecar, how);
    whole.killed().await;

    let gated = Sink::on(port.listen(1024).unwrap());
    let sidecar = start(directory.path(), &url, &whole.url);
    let missing = gated.has(PATIENCE, keys(is_tool)).await;
    assert!(missing.is_empty(), "{} never arrive: {missing:?}", missing.len());
    sidecar.stop();
    is_what_gated_gets(&gated.arrivals());
    is_what_whole_gets(&whole.arrivals());
    assert_eq!(repeats(&gated.arrivals()), Vec::<Key>::new());
    let repeats = repeats(&whole.arrivals());
    assert!(repeats.len() <= allowed(how), "{repeats:?}");
}

#[tokio::test]
async fn a_sink_that_refuses_connections_holds_up_no_other_and_gets_all_after_a_stop() {
    beside_one_that_refuses(End::Stopped).await;
}

#[tokio::test]
async fn a_sink_that_refuses_connections_holds_up_no_other_and_gets_all_after_a_kill() {
    beside_one_that_refuses(End::Killed).await;
}

/// `whole` never answers; `gated` is well.
async fn beside_one_that_never_answers(how: End) {
    let directory = tempfile::tempdir().unwrap();
    let (gated, whole) = (Sink::start().await, Sink::start().await);
    whole.behaves(|_| Answer::Hang);
    let sidecar = start(directory.path(), &gated.url, &whole.url);
    post_all(&sidecar).await;
    let missing = gated.has(PATIENCE, keys(is_tool)).await;
    assert!(missing.is_empty(), "held up by another sink: {missing:?}");
    assert_eq!(repeats(&gated.arrivals()), Vec::<Key>::new());
    // It was asked, and has taken nothing yet.
    whole.refuses(1).await;
    assert_eq!(whole.taken(), 0);
    end(sidecar, how);
    gated.killed().await;
    whole.killed().await;

    whole.behaves(|_| Answer::Take);
    let sidecar = start(directory.path(), &gated.url, &whole.url);
    let missing = whole.has(PATIENCE, keys(|_| true)).await;
    assert!(missing.is_empty(), "{} never arrive: {missing:?}", missing.len());
    sidecar.stop();
    is_what_gated_gets(&gated.arrivals());
    is_what_whole_gets(&whole.arrivals());
    assert_eq!(repeats(&whole.arrivals()), Vec::<Key>::new());
    let repeats = repeats(&gated.arrivals());
    assert!(repeats.len() <= allowed(how), "{repeats:?}");
}

#[tokio::test]
async fn a_sink_that_never_answers_holds_up_no_other_and_gets_all_after_a_stop() {
    beside_one_that_never_answers(End::Stopped).await;
}

#[tokio::test]
async fn a_sink_that_never_answers_holds_up_no_other_and_gets_all_after_a_kill() {
    beside_one_that_never_answers(End::Killed).await;
}

/// Without a restart too.
#[tokio::test]
async fn a_sink_that_comes_to_life_is_caught_up_with() {
    let directory = tempfile::tempdir().unwrap();
    let whole = Sink::start().await;
    let (port, url) = refusing();
    let sidecar = start(directory.path(), &url, &whole.url);
    post_all(&sidecar).await;
    assert_eq!(whole.has(PATIENCE, keys(|_| true)).await, BTreeSet::new());
    let gated = Sink::on(port.listen(1024).unwrap());
    assert_eq!(gated.has(PATIENCE, keys(is_tool)).await, BTreeSet::new());
    sidecar.stop();
    is_what_gated_gets(&gated.arrivals());
    is_what_whole_gets(&whole.arrivals());
    assert_eq!(repeats(&gated.arrivals()), Vec::<Key>::new());
    assert_eq!(repeats(&whole.arrivals()), Vec::<Key>::new());
}
