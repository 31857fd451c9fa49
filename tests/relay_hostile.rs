//! Peers that do harm by what they leave undone: each is bounded, answered or cut, and the others notice nothing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/server.rs"]
mod server;

use std::time::Duration;

use aep_sidecar::relay::Limits;
use aep_sidecar::relay::limits::Times;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use server::{Server, comments, event, messages};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

/// A relay that waits for its peers only shortly.
async fn impatient(times: Times) -> Server {
    Server::start(Limits { times, ..Limits::default() }, None).await
}

const SOON: Duration = Duration::from_millis(200);

/// Reads until the other side closes; a reset is as good.
async fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_head_that_never_ends_is_cut() {
    let server = impatient(Times { head: SOON, ..Times::default() }).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(b"GET /stream HTTP/1.1\r\nhost: h\r\nx-slow: ").await.unwrap();
    let started = tokio::time::Instant::now();
    // A byte now and then resets nothing: the head as a whole has its time.
    let mut trickle = tokio::time::interval(SOON / 10);
    let cut = loop {
        trickle.tick().await;
        if stream.write_all(b"x").await.is_err() {
            break true;
        }
        if started.elapsed() > SOON * 100 {
            break false;
        }
    };
    assert!(cut);
    assert_eq!(server.client.get(server.url("/healthz")).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_body_that_stops_is_answered() {
    let server = impatient(Times { body: SOON, ..Times::default() }).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = "POST /events HTTP/1.1\r\nhost: h\r\naep-version: 0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"aep\"";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body-timeout"), "{answer}");
    assert_eq!(server.held().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_silent_stream_is_pinged() {
    let server = impatient(Times { stream_ping: SOON, ..Times::default() }).await;
    let mut stream = server.stream("").await;
    for _ in 0..4 {
        assert_eq!(stream.comment().await.as_deref(), Some("ping"));
    }
}

async fn socket(
    server: &Server,
) -> tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>> {
    tokio_tungstenite::connect_async(format!("ws://{}/socket", server.address)).await.unwrap().0
}

/// The text messages until the close, and its code.
async fn to_the_close(
    socket: &mut tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>>,
) -> (Vec<Value>, u16) {
    let mut frames = Vec::new();
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Text(text) => frames.push(serde_json::from_str(&text).unwrap()),
            Message::Close(Some(frame)) => return (frames, frame.code.into()),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_peer_that_never_says_hello_is_closed() {
    let server = impatient(Times { head: SOON, ..Times::default() }).await;
    let mut mute = socket(&server).await;
    let (frames, code) = to_the_close(&mut mute).await;
    assert_eq!((frames, code), (vec![json!({"type": "error", "code": "hello-required"})], 1002));
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_pinged_then_closed() {
    let times = Times { socket_ping: SOON, silence: SOON * 5, ..Times::default() };
    let server = impatient(times).await;
    let mut silent = socket(&server).await;
    silent.send(Message::text(r#"{"type":"hello","versions":["0.1"],"role":"consumer"}"#)).await.unwrap();
    let (frames, code) = to_the_close(&mut silent).await;
    assert_eq!(frames[0]["type"], "hello");
    assert!(frames.iter().any(|frame| frame["type"] == "ping" && frame["t"].is_u64()), "{frames:?}");
    assert_eq!(frames.last().unwrap(), &json!({"type": "closing", "reason": "silent", "delivered": []}));
    assert_eq!(code, 1008);
    // One that answers lives on.
    let mut lively = socket(&server).await;
    lively.send(Message::text(r#"{"type":"hello","versions":["0.1"],"role":"consumer"}"#)).await.unwrap();
    let mut pings = 0;
    while pings < 12 {
        let Message::Text(text) = lively.next().await.unwrap().unwrap() else { panic!("closed") };
        if text.contains("\"ping\"") {
            pings += 1;
            lively.send(Message::text(r#"{"type":"pong"}"#)).await.unwrap();
        }
    }
}

#[tokio::test]
async fn half_a_frame_is_silence() {
    let server = impatient(Times { silence: SOON, ..Times::default() }).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let handshake = "GET /socket HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    stream.write_all(handshake.as_bytes()).await.unwrap();
    let hello = br#"{"type":"hello","versions":["0.1"]}"#;
    // A masked text frame of 35 bytes under the mask 0, then the start of one that announces a mebibyte.
    let mut frames = vec![0x81, 0x80 | u8::try_from(hello.len()).unwrap(), 0, 0, 0, 0];
    frames.extend_from_slice(hello);
    frames.extend_from_slice(&[0x81, 0xff, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, b'{']);
    stream.write_all(&frames).await.unwrap();
    let mut answer = Vec::new();
    let _reset = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 101") && answer.contains(r#""reason":"silent""#), "{answer}");
}

#[tokio::test]
async fn a_stream_that_nobody_reads_is_given_up() {
    let server = impatient(Times { write: SOON, ..Times::default() }).await;
    let mut deaf = TcpStream::connect(server.address).await.unwrap();
    deaf.write_all(b"GET /stream HTTP/1.1\r\nhost: h\r\n\r\n").await.unwrap();
    while server.hub.metrics().subscribers.get() == 0 {
        tokio::task::yield_now().await;
    }
    let padding = "x".repeat(100_000);
    let mut n = 0;
    // More than sockets hold, until the reader is gone.
    while server.hub.metrics().subscribers.get() > 0 {
        n += 1;
        server
            .ingest(&[
                event("s", n).replace("run.started\"", &format!("run.started\",\"acme\":\"{padding}\""))
            ])
            .await;
        assert!(n < 10_000, "the reader is still there");
    }
}

#[tokio::test]
async fn five_hundred_sessions_replay_whole_over_both_bindings() {
    let server = Server::open().await;
    for session in 0..500 {
        let lines: Vec<String> = (0..20).map(|n| event(&format!("s{session}"), n)).collect();
        server.ingest(&lines).await;
    }
    let url = server.url("/stream?from=all&live=0");
    let text = server.client.get(url).send().await.unwrap().text().await.unwrap();
    assert_eq!(comments(&text), ["ping", "replay-complete"]);
    let in_order = |lines: &[String]| {
        let mut next = std::collections::BTreeMap::new();
        for line in lines {
            let event: Value = serde_json::from_str(line).unwrap();
            let next = next.entry(event["session"].as_str().unwrap().to_owned()).or_insert(0);
            assert_eq!(event["seq"].as_u64(), Some(*next));
            *next += 1;
        }
        assert_eq!((next.len(), next.values().sum::<u64>()), (500, 10_000));
    };
    in_order(&messages(&text).into_iter().map(|message| message.data).collect::<Vec<_>>());
    let mut reader = socket(&server).await;
    for frame in [
        r#"{"type":"hello","versions":["0.1"]}"#,
        r#"{"type":"subscribe","id":"a","filter":{},"from":"all"}"#,
    ] {
        reader.send(Message::text(frame)).await.unwrap();
    }
    let mut lines = Vec::new();
    while lines.len() < 10_002 {
        if let Message::Text(text) = reader.next().await.unwrap().unwrap() {
            lines.push(text.to_string());
        }
    }
    in_order(&lines[2..]);
}

/// Says hello and sends frames; the socket's other answers are left to the caller.
async fn hello(
    server: &Server,
) -> tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>> {
    let mut peer = socket(server).await;
    // A sign of life below the protocol may come first.
    peer.send(Message::Ping("x".into())).await.unwrap();
    peer.send(Message::text(r#"{"type":"hello","versions":["0.1"]}"#)).await.unwrap();
    while !matches!(peer.next().await.unwrap().unwrap(), Message::Text(text) if text.contains("\"hello\"")) {}
    peer
}

async fn frame(
    peer: &mut tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>>,
) -> Value {
    loop {
        if let Message::Text(text) = peer.next().await.unwrap().unwrap() {
            return serde_json::from_str(&text).unwrap();
        }
    }
}

#[tokio::test]
async fn what_is_sent_back_is_bounded() {
    let server = Server::open().await;
    let mut peer = hello(&server).await;
    let long = "x".repeat(100_000);
    for request in [
        json!({"type": "ping", "t": long}),
        json!({"type": "subscribe", "id": long, "filter": {}}),
        json!({"type": "roster", "id": long}),
    ] {
        peer.send(Message::text(request.to_string())).await.unwrap();
        assert_eq!(frame(&mut peer).await["code"], "limit-exceeded");
    }
    let filter = json!({"type": "subscribe", "id": "a", "filter": {"agent": long}});
    peer.send(Message::text(filter.to_string())).await.unwrap();
    assert_eq!(frame(&mut peer).await["code"], "invalid-filter");
    let mut greedy = socket(&server).await;
    let control =
        json!({"type": "hello", "versions": ["0.1"], "capabilities": {"control": {"x": "x".repeat(5000)}}});
    greedy.send(Message::text(control.to_string())).await.unwrap();
    assert_eq!(frame(&mut greedy).await["code"], "hello-required");
}

#[tokio::test]
async fn a_close_is_answered() {
    let server = Server::open().await;
    let mut peer = hello(&server).await;
    peer.close(None).await.unwrap();
    let mut answered = false;
    while let Some(message) = peer.next().await {
        answered |= matches!(message, Ok(Message::Close(_)));
    }
    assert!(answered, "a browser reports anything else as unclean");
}

#[tokio::test]
async fn a_reader_with_a_backlog_is_pinged_and_not_silent() {
    let times = Times { socket_ping: SOON / 4, silence: SOON * 5, ..Times::default() };
    let server = impatient(times).await;
    let padding = "x".repeat(20_000);
    for batch in 0..100_u64 {
        let lines: Vec<String> = (0..20)
            .map(|n| {
                event("s", batch * 20 + n).replace("\"agent\"", &format!("\"acme\":\"{padding}\",\"agent\""))
            })
            .collect();
        server.ingest(&lines).await;
    }
    let mut reader = hello(&server).await;
    reader.send(Message::text(r#"{"type":"subscribe","id":"a","filter":{},"from":"all"}"#)).await.unwrap();
    // Forty megabytes at a pace, saying nothing: it takes longer than silence is allowed.
    let mut pace = tokio::time::interval(Duration::from_millis(1));
    let (mut events, mut pings) = (0, 0);
    while events < 2000 {
        pace.tick().await;
        let frame = frame(&mut reader).await;
        match frame["type"].as_str().unwrap() {
            "run.started" => events += 1,
            "ping" => pings += 1,
            "subscribed" => {}
            other => panic!("{other} after {events} events"),
        }
    }
    assert!(pings > 0);
}

#[tokio::test]
async fn naming_sessions_by_the_thousand_costs_little() {
    let server = Server::open().await;
    let names: Vec<String> = (0..5000).map(|n| format!("s{n}")).collect();
    let body = json!({"live": 0, "filter": {"session": names}}).to_string();
    let request =
        server.client.post(server.url("/stream")).header("content-type", "application/json").body(body);
    let text = request.send().await.unwrap().text().await.unwrap();
    assert_eq!(comments(&text), ["ping", "replay-complete"]);
}
