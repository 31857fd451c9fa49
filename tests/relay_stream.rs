//! `/stream` at the wire: replay, live, resume, ceilings, refusals, slow readers and the end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/server.rs"]
mod server;

use aep_sidecar::relay::Limits;
use serde_json::{Value, json};
use server::{Server, Stream, comments, event, event_with, messages};

fn encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

async fn text(server: &Server, query: &str) -> String {
    let response = server.client.get(server.url(&format!("/stream{query}"))).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.text().await.unwrap()
}

#[tokio::test]
async fn a_live_event_arrives_to_the_byte() {
    let server = Server::open().await;
    let mut stream = server.stream("").await;
    let headers = stream.response.headers().clone();
    for (name, value) in [
        ("content-type", "text/event-stream"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
        ("access-control-allow-origin", "*"),
    ] {
        assert_eq!(headers[name], value);
    }
    assert!(!headers.contains_key("content-encoding"));
    assert_eq!(stream.comment().await.as_deref(), Some("ping"), "something at once, to pass every buffer");
    let line = event_with("a:b", 7, r#","epoch":2,"data":{"z":1.0,"é":"\u00e9"}"#);
    server.ingest(std::slice::from_ref(&line)).await;
    let message = stream.message().await.unwrap();
    assert_eq!((message.event.as_str(), message.id.as_deref()), ("run.started", Some("a:b:2:7")));
    assert_eq!(message.data, line);
}

#[tokio::test]
async fn filter_and_ceiling_apply_to_replay_and_live() {
    let server = Server::open().await;
    let failed = |seq| {
        event_with("s", seq, r#","capture":"full","data":{"error":{"type":"E","message":"hunter2"}}"#)
            .replace("run.started", "tool.failed")
    };
    server.ingest(&[event("s", 1), failed(2)]).await;
    let query = format!("?from=all&capture=metadata&filter={}", encoded(r#"{"type":["tool.*"]}"#));
    let mut stream = server.stream(&query).await;
    let replayed = stream.message().await.unwrap();
    server.ingest(&[event("s", 3), failed(4), event("s", 5)]).await;
    let live = stream.message().await.unwrap();
    for (message, seq) in [(replayed, 2), (live, 4)] {
        let data: Value = serde_json::from_str(&message.data).unwrap();
        assert_eq!((&data["seq"], &data["capture"]), (&json!(seq), &json!("metadata")));
        assert_eq!(data["data"], json!({"error": {"type": "E"}}));
    }
}

#[tokio::test]
async fn resume_by_from_and_by_last_event_id() {
    let server = Server::open().await;
    server.ingest(&[event("a:b", 1), event("a:b", 2), event("t", 1), event("a:b", 3)]).await;
    let seqs = |text: &str| -> Vec<String> {
        messages(text).into_iter().map(|message| message.id.unwrap()).collect()
    };
    let from = encoded(r#"[{"session":"a:b","epoch":0,"seq":1},{"session":"t","epoch":0,"seq":1}]"#);
    assert_eq!(seqs(&text(&server, &format!("?live=0&from={from}")).await), ["a:b:0:2", "a:b:0:3"]);
    let response = server.client.get(server.url("/stream?live=0")).header("last-event-id", "a:b:0:2");
    assert_eq!(seqs(&response.send().await.unwrap().text().await.unwrap()), ["a:b:0:3"]);
    // `from` takes precedence.
    let response =
        server.client.get(server.url("/stream?live=0&from=all")).header("last-event-id", "a:b:0:2");
    assert_eq!(seqs(&response.send().await.unwrap().text().await.unwrap()).len(), 4);
}

#[tokio::test]
async fn a_bounded_replay_says_that_it_is_complete() {
    let server = Server::start(Limits { buffer: 2, ..Limits::default() }, None).await;
    server.ingest(&(1..=4).map(|n| event("s", n)).collect::<Vec<_>>()).await;
    let from = encoded(r#"[{"session":"s","epoch":0,"seq":1}]"#);
    let got = text(&server, &format!("?live=0&from={from}")).await;
    assert_eq!(comments(&got), ["ping", "replay-exhausted s 0:3", "replay-complete"]);
    assert!(got.find("replay-exhausted").unwrap() < got.find("event:").unwrap());
    assert!(got.ends_with(": replay-complete\n\n"));
    assert_eq!(messages(&got).len(), 2);
    assert_eq!(server.hub.metrics().replays_exhausted.get(), 1);
}

#[tokio::test]
async fn a_post_means_the_same_and_takes_any_length() {
    let server = Server::open().await;
    server.ingest(&[event("s", 1), event("s", 2)]).await;
    let mut from: Vec<Value> = (0..499)
        .map(|n| json!({"session": format!("{n}{}", "x".repeat(400)), "epoch": 0, "seq": 0}))
        .collect();
    from.push(json!({"session": "s", "epoch": 0, "seq": 1}));
    let body = json!({"from": from, "live": 0, "filter": {"agent": "a"}}).to_string();
    assert!(body.len() > 128 * 1024);
    let request =
        server.client.post(server.url("/stream")).header("content-type", "application/json").body(body);
    let got = request.send().await.unwrap().text().await.unwrap();
    assert_eq!(
        messages(&got).iter().map(|message| message.id.as_deref()).collect::<Vec<_>>(),
        [Some("s:0:2")]
    );
    let wrong = server.client.post(server.url("/stream")).body("{}");
    assert_eq!(wrong.send().await.unwrap().status(), 415);
    for body in ["", "[]", r#"{"from":[null]}"#, r#"{"filter":{"seq":1}}"#] {
        let wrong =
            server.client.post(server.url("/stream")).header("content-type", "application/json").body(body);
        assert_eq!(wrong.send().await.unwrap().status(), 400, "{body}");
    }
}

#[tokio::test]
async fn a_request_line_of_nearly_64_kib_is_taken() {
    let server = Server::open().await;
    let from: Vec<Value> = (0..520)
        .map(|n| json!({"session": format!("{n}{}", "x".repeat(60)), "epoch": 0, "seq": 0}))
        .collect();
    let query = format!("/stream?live=0&from={}", encoded(&json!(from).to_string()));
    let query: String = query.chars().take(65_000).collect();
    assert_eq!(query.len(), 65_000);
    let answer =
        server.raw(format!("GET {query} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").as_bytes()).await;
    // Cut off in the middle, so it is refused, but it was read.
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("invalid-from"), "{answer}");
    let longer = format!("GET /stream?x={} HTTP/1.1\r\nhost: h\r\n\r\n", "x".repeat(70_000));
    assert!(server.raw(longer.as_bytes()).await.starts_with("HTTP/1.1 414"));
}

#[tokio::test]
async fn everything_malformed_is_refused_before_a_stream_byte() {
    let server = Server::start(Limits { max_from: 2, ..Limits::default() }, None).await;
    for (query, error) in [
        (format!("?filter={}", encoded(r#"{"seq":1}"#)), "invalid-filter"),
        (format!("?filter={}", encoded("not json")), "invalid-filter"),
        ("?filter=".to_owned(), "invalid-filter"),
        ("?capture=everything".to_owned(), "invalid-capture"),
        ("?from=yesterday".to_owned(), "invalid-from"),
        (format!("?from={}", encoded("[null]")), "invalid-from"),
        (format!("?from={}", encoded(r#"[{"session":1,"epoch":0,"seq":1}]"#)), "invalid-from"),
        (format!("?from={}", encoded(r#"{"session":"s","epoch":0,"seq":1}"#)), "invalid-from"),
        (format!("?from={}", encoded(r#"[{"session":"s","epoch":0,"seq":1e300}]"#)), "invalid-from"),
        (
            format!(
                "?from={}",
                encoded(&json!(vec![json!({"session":"s","epoch":0,"seq":1}); 3]).to_string())
            ),
            "limit-exceeded",
        ),
        ("?live=maybe".to_owned(), "invalid-live"),
    ] {
        let response = server.client.get(server.url(&format!("/stream{query}"))).send().await.unwrap();
        assert_eq!(response.status(), 400, "{query}");
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.headers()["access-control-allow-origin"], "*");
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!(body["error"], json!(error), "{query}");
        assert!(!body["detail"].as_str().unwrap().is_empty());
    }
    let response = server.client.get(server.url("/stream")).header("last-event-id", "no position");
    assert_eq!(response.send().await.unwrap().status(), 400);
    assert_eq!(server.hub.metrics().subscribers.get(), 0);
}

#[tokio::test]
async fn ten_thousand_events_replay_whole_to_a_reader_that_dawdles() {
    let server = Server::open().await;
    let padding = "x".repeat(350);
    let lines: Vec<String> =
        (0..10_000).map(|n| event_with("s", n, &format!(r#","data":{{"p":"{padding}"}}"#))).collect();
    assert!(lines[5000].len() > 490);
    for batch in lines.chunks(5000) {
        server.ingest(batch).await;
    }
    let from = encoded(r#"[{"session":"s","epoch":0,"seq":0}]"#);
    let mut stream = server.stream(&format!("?live=0&from={from}")).await;
    for (n, line) in lines.iter().enumerate().skip(1) {
        // Others get their turn, and the socket's buffers fill.
        if n % 500 == 0 {
            server.ingest(&[event("other", n as u64)]).await;
        }
        assert_eq!(&stream.message().await.unwrap().data, line);
    }
    assert_eq!(stream.comment().await.as_deref(), Some("replay-complete"));
    assert_eq!(stream.block().await, None);
}

#[tokio::test]
async fn a_reader_that_never_reads_slows_nobody_and_can_resume() {
    let limits = Limits { window_bytes: 256 * 1024, buffer: 1_000_000, ..Limits::default() };
    let server = Server::start(limits, None).await;
    let stalled = server.stream("").await;
    let mut reader = server.stream("").await;
    let padding = "x".repeat(1000);
    let mut last = 0;
    for batch in 0..100_u64 {
        let lines: Vec<String> = (0..100)
            .map(|n| event_with("s", batch * 100 + n, &format!(r#","data":{{"p":"{padding}"}}"#)))
            .collect();
        server.ingest(&lines).await;
        for line in &lines {
            assert_eq!(&reader.message().await.unwrap().data, line);
            last += 1;
        }
    }
    assert_eq!(last, 10_000);
    // The stalled one finds everything, in order, from the histories.
    let mut stalled: Stream = stalled;
    for n in 0..10_000_u64 {
        let message = stalled.message().await.unwrap();
        assert_eq!(message.id.unwrap(), format!("s:0:{n}"));
    }
    assert_eq!(server.hub.metrics().readers_behind.get(), 0);
}

#[tokio::test]
async fn a_reader_past_the_window_is_ended_in_order() {
    let limits = Limits { window_bytes: 1, buffer: 10, ..Limits::default() };
    let server = Server::start(limits, None).await;
    let mut stream = server.stream("").await;
    let padding = "x".repeat(50_000);
    for n in 0..2000 {
        server.ingest(&[event_with("s", n, &format!(r#","data":{{"p":"{padding}"}}"#))]).await;
    }
    let mut last = None;
    while let Some(message) = stream.message().await {
        last = message.id;
    }
    // Sockets hold a little; the rest is behind.
    assert_eq!(server.hub.metrics().readers_behind.get(), 1);
    let response = server.client.get(server.url("/stream?live=0")).header("last-event-id", last.unwrap());
    let resumed = response.send().await.unwrap().text().await.unwrap();
    assert!(comments(&resumed).contains(&"replay-exhausted s 0:1990".to_owned()), "{:?}", comments(&resumed));
    assert_eq!(messages(&resumed).len(), 10);
}

#[tokio::test]
async fn a_drain_ends_streams_in_order() {
    let server = Server::open().await;
    let mut stream = server.stream("").await;
    server.ingest(&[event("s", 1)]).await;
    server.stop.cancel();
    server.hub.close();
    assert_eq!(stream.message().await.unwrap().id.as_deref(), Some("s:0:1"));
    assert_eq!(stream.comment().await.as_deref(), Some("shutting-down"));
    assert_eq!(stream.block().await, None, "a clean end, not a reset");
    server.tracker.close();
    server.tracker.wait().await;
    assert!(tokio::net::TcpStream::connect(server.address).await.is_err(), "nothing is accepted any more");
}

#[tokio::test]
async fn a_session_with_control_characters_forges_nothing() {
    let server = Server::open().await;
    let session = "s\n\ndata: forged\nid: x";
    server.ingest(&[event(session, 1)]).await;
    let got = text(&server, "?from=all&live=0").await;
    let found = messages(&got);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].data.as_str(), &found[0].id), (event(session, 1).as_str(), &None));
}
