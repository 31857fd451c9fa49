//! The main job with nothing replaced: the real binary, and a receiver made of other people's code as judge.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/harness.rs"]
mod harness;
#[path = "harness/process.rs"]
mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::{Output, Stdio};

use aep_sidecar::aep::{Event, Filter, Scope};
use futures_util::{SinkExt as _, StreamExt as _};
use process::{Judge, Sidecar, command};
use serde_json::Value;
use tokio_tungstenite::tungstenite::Message;

/// `(source, id)`.
type Key = (String, String);

fn event(session: &str, seq: u64) -> String {
    format!(
        r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h/agent/a","agent":"a","session":"{session}","seq":{seq}}}"#
    )
}

fn key(ce: &Value) -> Key {
    (ce["source"].as_str().unwrap().to_owned(), ce["id"].as_str().unwrap().to_owned())
}

/// The corpora: the project's own, and the public one where it is.
fn corpora(test: &str) -> Vec<(&'static str, Vec<String>)> {
    let lines =
        |text: String| text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect();
    let mut corpora = vec![("own", lines(harness::corpus("events.jsonl")))];
    if let Some(fixtures) = harness::conformance(test) {
        corpora.push(("golden", lines(harness::read(&fixtures.join("fixtures/golden/golden.jsonl")))));
    }
    corpora
}

/// The lines that HTTP takes: commands flow elsewhere.
fn postable(lines: &[String]) -> Vec<String> {
    lines.iter().filter(|line| Event::parse_str(line).unwrap().scope() != Scope::Command).cloned().collect()
}

fn selected(lines: &[String], filter: &str) -> BTreeSet<Key> {
    let filter = Filter::parse(filter).unwrap();
    let events = lines.iter().map(|line| Event::parse_str(line).unwrap());
    events
        .filter(|event| filter.matches(event))
        .map(|event| (event.source().to_owned(), event.id().to_owned()))
        .collect()
}

#[tokio::test]
async fn a_corpus_arrives_once_across_redelivery_and_sigkill() {
    for (name, lines) in corpora("a_corpus_arrives_once_across_redelivery_and_sigkill") {
        let filter =
            r#"{"type":["run.*","tool.*","attention.*","session.*","x.*"],"severity":{"gte":"info"}}"#;
        let lines = postable(&lines);
        let expected = selected(&lines, filter);
        assert!(expected.len() > 10 && expected.len() < lines.len(), "{name}: the filter selects");
        let judge = Judge::start("127.0.0.1:0");
        let directory = tempfile::tempdir().unwrap();
        let variables = [("CE_SINK", judge.url.as_str()), ("AEP_FILTER", filter), ("CE_CONCURRENCY", "2")];
        let mut sidecar = Sidecar::start(directory.path(), &variables);
        sidecar.post(&lines).await;
        let first: Vec<Value> = expected.iter().map(|_| judge.event()).collect();
        let got: BTreeSet<Key> = first.iter().map(key).collect();
        assert_eq!(got, expected, "{name}: every selected event, once, valid to the SDK");
        // Again: nothing but the event after it.
        sidecar.post(&lines).await;
        sidecar.post(&[event("sentinel", 1)]).await;
        assert_eq!(judge.event()["id"], "sentinel-1");
        // And again after a SIGKILL: at most what was under way.
        sidecar.process.kill();
        let sidecar = Sidecar::start(directory.path(), &variables);
        sidecar.post(&lines).await;
        sidecar.post(&[event("sentinel", 2)]).await;
        sidecar.stop();
        let mut judge = judge;
        judge.process.terminate();
        judge.process.wait();
        let again: Vec<Key> =
            judge.process.rest().iter().map(|line| key(&serde_json::from_str(line).unwrap())).collect();
        assert!(again.iter().any(|(_, id)| id == "sentinel-2"), "{again:?}");
        assert!(again.len() <= 1 + 2, "{name}: acknowledged events came again: {again:?}");
    }
}

#[tokio::test]
async fn a_late_event_below_what_was_delivered_still_goes_out_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    sidecar.post(&[event("s", 5), event("s", 6)]).await;
    assert_eq!(sidecar.stop().len(), 2);
    let sidecar = Sidecar::start(directory.path(), &[]);
    sidecar.post(&[event("s", 6), event("s", 3), event("s", 5), event("s", 7)]).await;
    let ids: Vec<Value> = sidecar
        .stop()
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, ["s-3", "s-7"]);
}

#[tokio::test]
async fn a_sink_that_is_down_gets_everything_in_order_once_it_is_up() {
    // A port that nothing listens on: it was free a moment ago, and nobody else asks for it.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let directory = tempfile::tempdir().unwrap();
    let url = format!("http://{address}/");
    let variables = [("CE_SINK", url.as_str()), ("CE_RETRY_MAX", "300ms"), ("AEP_DRAIN", "60s")];
    let sidecar = Sidecar::start(directory.path(), &variables);
    for batch in 0..20 {
        let lines: Vec<String> = (0..50).map(|n| event(&format!("s{}", n % 5), batch * 10 + n / 5)).collect();
        sidecar.post(&lines).await;
    }
    sidecar.process.logged("paused");
    let judge = Judge::start(&address);
    let mut next: BTreeMap<String, u64> = BTreeMap::new();
    for _ in 0..1000 {
        let ce = judge.event();
        let next = next.entry(ce["aepsessionid"].as_str().unwrap().to_owned()).or_default();
        assert_eq!(ce["aepsequence"].as_u64(), Some(*next), "of {}", ce["aepsessionid"]);
        *next += 1;
    }
    assert_eq!(next.values().sum::<u64>(), 1000);
    sidecar.stop();
}

#[tokio::test]
async fn a_stop_under_load_delivers_everything_that_was_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    let mut accepted = 0;
    let mut seq = 0;
    loop {
        let lines: Vec<String> = (seq..seq + 20).map(|n| event("s", n)).collect();
        seq += 20;
        if seq == 2000 {
            sidecar.process.terminate();
        }
        match sidecar.try_post(&lines).await {
            Ok(response) if response.status() == 202 => accepted += 20,
            _ => break,
        }
    }
    let delivered: Vec<u64> = {
        let mut sidecar = sidecar;
        assert_eq!(sidecar.process.wait().code(), Some(0));
        let lines = sidecar.process.rest();
        lines
            .iter()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["aepsequence"].as_u64().unwrap())
            .collect()
    };
    assert!(delivered.len() >= accepted, "{accepted} accepted, {} delivered", delivered.len());
    assert!(delivered.iter().enumerate().all(|(n, seq)| *seq == n as u64));
}

#[tokio::test]
async fn readers_of_a_stopping_sidecar_end_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    let mut stream = sidecar.client.get(sidecar.url("/stream")).send().await.unwrap();
    sidecar.post(&[event("s", 1)]).await;
    let mut text = String::new();
    while !text.contains("id: s:0:1") {
        text.push_str(std::str::from_utf8(&stream.chunk().await.unwrap().unwrap()).unwrap());
    }
    sidecar.process.terminate();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(text.ends_with(": shutting-down\n\n"), "{text}");
    assert_eq!(sidecar.stop_after_signal(), Some(0));
}

#[tokio::test]
async fn a_stop_under_load_leaves_no_reader_with_a_gap() {
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[]);
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let mut stream = sidecar.client.get(sidecar.url("/stream")).send().await.unwrap();
        readers.spawn(async move {
            let mut text = String::new();
            while let Some(chunk) = stream.chunk().await.unwrap() {
                text.push_str(std::str::from_utf8(&chunk).unwrap());
            }
            text
        });
    }
    let mut accepted = 0;
    loop {
        if accepted == 1000 {
            sidecar.process.terminate();
        }
        let lines: Vec<String> = (accepted..accepted + 20).map(|n| event("s", n)).collect();
        match sidecar.try_post(&lines).await {
            Ok(response) if response.status() == 202 => accepted += 20,
            _ => break,
        }
    }
    // What was accepted, every reader has: it can resume anywhere without a gap.
    while let Some(text) = readers.join_next().await {
        let text = text.unwrap();
        let ids = text.lines().filter_map(|line| line.strip_prefix("id: s:0:"));
        let seqs: Vec<u64> = ids.map(|seq| seq.parse().unwrap()).collect();
        assert!(seqs.iter().enumerate().all(|(n, seq)| *seq == n as u64));
        assert!(seqs.len() as u64 >= accepted, "{accepted} accepted, {} read", seqs.len());
        assert!(text.ends_with(": shutting-down\n\n"));
    }
    assert_eq!(sidecar.stop_after_signal(), Some(0));
}

#[tokio::test]
async fn a_reader_that_never_reads_does_not_hold_up_a_stop() {
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(directory.path(), &[("AEP_DRAIN", "4s")]);
    let mut deaf = std::net::TcpStream::connect(&sidecar.address).unwrap();
    deaf.write_all(b"GET /stream HTTP/1.1\r\nhost: h\r\n\r\n").unwrap();
    let padding = "x".repeat(100_000);
    let padded = |n| event("s", n).replace(r#""seq":"#, &format!(r#""acme":"{padding}","seq":"#));
    for batch in 0..20 {
        let lines: Vec<String> = (batch * 10..batch * 10 + 10).map(padded).collect();
        sidecar.post(&lines).await;
    }
    sidecar.process.terminate();
    sidecar.process.logged("are cut");
    assert_eq!(sidecar.stop_after_signal(), Some(0));
}

impl Sidecar {
    fn stop_after_signal(mut self) -> Option<i32> {
        self.process.wait().code()
    }
}

fn export(input: &str, variables: &[(&str, &str)]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let mut child = command(directory.path(), variables)
        .args(["export", "--from-file", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "an export from a file keeps no state"
    );
    output
}

#[test]
fn a_file_is_exported_whole_with_the_order_of_members_and_the_bytes_of_data() {
    let expected = harness::corpus("cloudevents.jsonl");
    let output = export(&harness::corpus("events.jsonl"), &[]);
    let (mut got, mut want): (Vec<_>, Vec<_>) =
        (std::str::from_utf8(&output.stdout).unwrap().lines().collect(), expected.lines().collect());
    // Sessions go side by side; within one, order is tested elsewhere.
    got.sort_unstable();
    want.sort_unstable();
    assert_eq!(got, want);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some(fixtures) = harness::conformance("a_file_is_exported_whole") else { return };
    let golden = fixtures.join("fixtures/golden/golden.jsonl");
    let directory = tempfile::tempdir().unwrap();
    let output =
        command(directory.path(), &[]).arg("export").arg("--from-file").arg(&golden).output().unwrap();
    assert!(output.status.success());
    let mapped = String::from_utf8(output.stdout).unwrap();
    let expected = harness::read(&fixtures.join("fixtures/ce-roundtrip/ce-expected.jsonl"));
    assert_eq!(mapped.lines().count(), 64);
    for (got, want) in mapped.lines().zip(expected.lines()) {
        // The fixture's writer escaped characters and shortened fractions; order and bytes are judged elsewhere.
        let read = |text| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(read(got), read(want));
    }
}

#[test]
fn bad_lines_are_reported_by_number_and_the_good_ones_still_go_out() {
    let input =
        format!("{}\n\nnonsense\n{}\n{{\"aep\":\"0.1\"}}\n{}", event("s", 1), event("s", 2), event("s", 3));
    let output = export(&input, &[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::str::from_utf8(&output.stdout).unwrap().lines().count(), 3);
    assert!(stderr.contains("line 3: expected ident at line 1 column 2"), "{stderr}");
    assert!(stderr.contains("line 5: id is required"), "{stderr}");
    assert!(stderr.contains("3 events read, 3 delivered") && stderr.contains("2 bad lines"), "{stderr}");
}

#[test]
fn an_export_is_filtered_lowered_and_deduped() {
    let secret = event("s", 1).replace("run.started", "tool.failed").replace(
        r#""seq":1"#,
        r#""seq":1,"capture":"redacted","data":{"error":{"type":"E","message":"hunter2"}}"#,
    );
    let input = format!("{secret}\n{}\n{secret}\n", event("s", 2));
    let output = export(&input, &[("AEP_FILTER", r#"{"type":"tool.*"}"#), ("AEP_CAPTURE", "metadata")]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(stdout.lines().count(), 1);
    assert!(stdout.contains(r#""data":{"error":{"type":"E"}}"#) && !stdout.contains("hunter2"), "{stdout}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("1 delivered, 1 not selected, 1 duplicates"));
    assert!(output.status.success());
}

#[test]
fn an_export_goes_to_the_sink_where_there_is_one() {
    let mut judge = Judge::start("127.0.0.1:0");
    let input: String = (0..20).map(|n| event("s", n) + "\n").collect();
    let output = export(&input, &[("CE_SINK", &judge.url)]);
    assert!(output.status.success() && output.stdout.is_empty());
    for n in 0..20 {
        assert_eq!(judge.event()["aepsequence"].as_u64(), Some(n));
    }
    judge.process.kill();
}

#[test]
fn a_wrong_environment_is_told_whole_with_exit_code_64() {
    let directory = tempfile::tempdir().unwrap();
    let variables =
        [("AEP_PORT", "http"), ("CE_SINK", "ftp://user:hunter2@h"), ("AEP_FILTER", r#"{"seq":1}"#)];
    let output = command(directory.path(), &variables).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64));
    for name in ["AEP_PORT must be", "CE_SINK must be", "AEP_FILTER must be"] {
        assert!(stderr.contains(name), "{stderr}");
    }
    assert!(!stderr.contains("hunter2"));
}

#[tokio::test]
async fn a_state_directory_serves_one_process() {
    let directory = tempfile::tempdir().unwrap();
    let first = Sidecar::start(directory.path(), &[]);
    let second = command(directory.path(), &[("AEP_PORT", "0")]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let stderr = String::from_utf8(second.stderr).unwrap();
    assert!(stderr.contains("aep-state") && stderr.contains("in use"), "{stderr}");
    first.stop();
}

#[tokio::test]
async fn secrets_and_data_stay_out_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let variables = [
        ("AEP_LOG", "trace"),
        ("AEP_TOKEN", "hunter2"),
        ("CE_SINK", "http://user:hunter2@127.0.0.1:9/?k=hunter2"),
    ];
    let mut sidecar = Sidecar::start(directory.path(), &variables);
    let line = event("s", 1).replace(r#""seq":1"#, r#""seq":1,"data":{"prompt":"hunter2"}"#);
    let url = sidecar.url("/events?access_token=hunter2");
    let request =
        sidecar.client.post(url).header("aep-version", "0.1").header("content-type", "application/json");
    assert_eq!(request.body(line).send().await.unwrap().status(), 202);
    let refused = sidecar
        .client
        .get(sidecar.url("/stream?filter=hunter2"))
        .bearer_auth("hunter2x")
        .send()
        .await
        .unwrap();
    assert!(!refused.text().await.unwrap().contains("hunter2"));
    let socket = format!("ws://{}/socket?access_token=hunter2", sidecar.address);
    let (mut socket, _) = tokio_tungstenite::connect_async(socket).await.unwrap();
    let emitted = event("s", 2).replace(r#""seq":2"#, r#""seq":2,"data":{"prompt":"hunter2"}"#);
    for text in [r#"{"type":"hello","versions":["0.1"]}"#, &emitted, r#"{"type":"ping","t":"done"}"#] {
        socket.send(Message::text(text)).await.unwrap();
    }
    // Answered once what was sent before it was taken in.
    while !matches!(socket.next().await.unwrap().unwrap(), Message::Text(text) if text.contains("done")) {}
    let mut log = vec![sidecar.process.logged("paused")];
    sidecar.process.kill();
    log.extend(sidecar.process.log());
    assert!(!log.iter().any(|line| line.contains("hunter2")), "{log:#?}");
}
