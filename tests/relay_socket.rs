//! `/socket` at the wire: hello, subscriptions, commands, roster, refusals, hostile peers and the end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/server.rs"]
mod server;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use aep_sidecar::aep::Event;
use aep_sidecar::relay::keep::Boxed;
use aep_sidecar::relay::{Access, Keep, Limits, NotKept, Token, Tokens};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use server::{Server, event, event_with, messages};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

/// A WebSocket peer.
struct Peer(WebSocketStream<MaybeTlsStream<TcpStream>>);

impl Peer {
    async fn connect(server: &Server, token: Option<&str>) -> Self {
        let mut request = format!("ws://{}/socket", server.address).into_client_request().unwrap();
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        Self(tokio_tungstenite::connect_async(request).await.unwrap().0)
    }

    /// Connects and says hello.
    async fn open(server: &Server, token: Option<&str>, role: &str) -> Self {
        Self::open_with(server, token, json!({"type": "hello", "versions": ["0.1"], "role": role})).await
    }

    async fn open_with(server: &Server, token: Option<&str>, hello: Value) -> Self {
        let mut peer = Self::connect(server, token).await;
        peer.send(&hello.to_string()).await;
        assert_eq!(peer.frame().await["type"], "hello");
        peer
    }

    async fn send(&mut self, text: &str) {
        self.0.send(Message::text(text)).await.unwrap();
    }

    async fn say(&mut self, frame: Value) {
        self.send(&frame.to_string()).await;
    }

    /// The next text message.
    async fn text(&mut self) -> String {
        loop {
            match self.0.next().await.unwrap().unwrap() {
                Message::Text(text) => return text.to_string(),
                Message::Close(frame) => panic!("closed: {frame:?}"),
                _ => {}
            }
        }
    }

    async fn frame(&mut self) -> Value {
        serde_json::from_str(&self.text().await).unwrap()
    }

    /// The code of the close that is next.
    async fn closed(&mut self) -> u16 {
        loop {
            match self.0.next().await {
                Some(Ok(Message::Close(Some(frame)))) => return frame.code.into(),
                Some(Ok(Message::Text(text))) => panic!("not closed, but {text}"),
                Some(Ok(_)) => {}
                other => panic!("closed without a code: {other:?}"),
            }
        }
    }

    async fn subscribe(&mut self, id: &str, members: Value) {
        let mut frame = json!({"type": "subscribe", "id": id, "filter": {}});
        frame.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        self.say(frame).await;
        assert_eq!(self.frame().await, json!({"type": "subscribed", "id": id}));
    }
}

fn command(event_type: &str, session: &str, id: &str) -> String {
    format!(
        r#"{{"aep":"0.1","id":"{id}","type":"{event_type}","time":"2026-07-03T10:00:00Z", "source":"aep://h/agent/mc","agent":"mc","session":"{session}"}}"#
    )
}

const TOKEN: Option<&str> = Some("s3cret");

#[tokio::test]
async fn hello_comes_first_and_selects_one_version() {
    let server = Server::open().await;
    let mut peer = Peer::connect(&server, None).await;
    peer.say(json!({"type": "hello", "versions": ["9.9", "0.1"], "role": "consumer", "new": 1, "capabilities": {"wombat": {}}})).await;
    let hello = peer.frame().await;
    assert_eq!(
        (&hello["type"], &hello["versions"], &hello["role"]),
        (&json!("hello"), &json!(["0.1"]), &json!("both"))
    );
    assert!(hello["identity"]["agent"].is_string());
    let discovery: Value = serde_json::from_str(
        &server.client.get(server.url("/events")).send().await.unwrap().text().await.unwrap(),
    )
    .unwrap();
    assert_eq!(hello["capabilities"], discovery["capabilities"]);
    assert_eq!(
        (&discovery["capabilities"]["roster"], &discovery["endpoints"]["socket"]),
        (&json!({}), &json!("/socket"))
    );
    // Another hello, and what isn't known, is ignored.
    peer.say(json!({"type": "hello", "versions": ["0.1"]})).await;
    peer.say(json!({"type": "wombat"})).await;
    peer.say(json!({"type": "ping", "t": {"any": 1.50}})).await;
    assert_eq!(peer.text().await, r#"{"type":"pong","t":{"any":1.5}}"#);
}

#[tokio::test]
async fn what_a_peer_sends_takes_effect_in_order() {
    let server = Server::open().await;
    let mut peer = Peer::open(&server, None, "both").await;
    let subscribe = json!({"type": "subscribe", "id": "1", "filter": {}}).to_string();
    // In one write, so that the relay has all of it at hand.
    for text in [event("s", 1), subscribe, event("s", 2)] {
        peer.0.feed(Message::text(text)).await.unwrap();
    }
    peer.0.flush().await.unwrap();
    assert_eq!(peer.frame().await, json!({"type": "subscribed", "id": "1"}));
    assert_eq!(peer.text().await, event("s", 2), "a subscription to what comes is not given what was");
}

#[tokio::test]
async fn anything_else_first_is_refused_and_closed() {
    let server = Server::open().await;
    for first in
        [r#"{"type":"subscribe","id":"1","filter":{}}"#, "nonsense", &event("s", 1), r#"{"type":"ping"}"#]
    {
        let mut peer = Peer::connect(&server, None).await;
        peer.send(first).await;
        assert_eq!(peer.text().await, r#"{"type":"error","code":"hello-required"}"#);
        assert_eq!(peer.closed().await, 1002, "{first}");
    }
    for versions in [json!(["0.2"]), json!([]), json!("0.1"), json!(null)] {
        let mut peer = Peer::connect(&server, None).await;
        peer.say(json!({"type": "hello", "versions": versions})).await;
        assert_eq!(peer.text().await, r#"{"type":"error","code":"version-unsupported","versions":["0.1"]}"#);
        assert_eq!(peer.closed().await, 1002);
    }
    assert_eq!(server.held().await, Vec::<String>::new());
    assert_eq!((server.refused("hello-required"), server.refused("version-unsupported")), (4, 4));
}

#[tokio::test]
async fn a_handshake_needs_the_token_and_plain_requests_are_refused() {
    let server = Server::start(Limits::default(), TOKEN).await;
    let request = format!("ws://{}/socket", server.address).into_client_request().unwrap();
    assert!(tokio_tungstenite::connect_async(request).await.is_err());
    let request =
        format!("ws://{}/socket?access_token=s3cret", server.address).into_client_request().unwrap();
    assert!(tokio_tungstenite::connect_async(request).await.is_ok());
    let response = server.client.get(server.url("/socket")).bearer_auth("s3cret").send().await.unwrap();
    assert_eq!(response.status(), 400);
    let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(body["error"], "websocket-required");
}

#[tokio::test]
async fn who_is_revoked_amid_a_replay_gets_no_more_of_it() {
    let access = Access::new(None);
    let list = |tokens: &[&str]| {
        let entry = |token: &&str| json!({"name": token, "token": token, "scopes": ["read", "emit"]});
        let entries: Vec<Value> = tokens.iter().map(entry).collect();
        Tokens::parse(&json!({"tokens": entries}).to_string()).unwrap()
    };
    access.replace(list(&["gone", "free"])).unwrap();
    let server = Server::start_with(Limits::default(), access.clone()).await;
    let data = format!(r#","data":{{"text":"{}"}}"#, "x".repeat(10_000));
    for batch in 0..20 {
        let lines: Vec<_> = (0..100).map(|n| event_with("s", batch * 100 + n, &data)).collect();
        let post = server.post("application/x-ndjson", lines.join("\n")).bearer_auth("free");
        assert_eq!(post.send().await.unwrap().status(), 202);
    }
    let mut reader = Peer::open(&server, Some("gone"), "consumer").await;
    reader.subscribe("all", json!({"from": "all"})).await;
    access.replace(list(&["free"])).unwrap();
    let mut events = 0;
    while reader.frame().await["type"] != "closing" {
        events += 1;
    }
    assert!(events < 2000, "all of it was read");
    assert_eq!(reader.closed().await, 1008);
}

#[tokio::test]
async fn events_arrive_to_the_byte_for_every_subscription_that_matches() {
    let server = Server::open().await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("all", json!({})).await;
    reader.subscribe("s", json!({"filter": {"session": "s"}})).await;
    reader.subscribe("t", json!({"filter": {"session": "t"}})).await;
    let mut emitter = Peer::open(&server, None, "emitter").await;
    let line = event_with("s", 7, r#", "data" : {"z":1.0,"é":"\u00e9"}"#);
    emitter.send(&line).await;
    assert_eq!((reader.text().await, reader.text().await), (line.clone(), line.clone()));
    reader.say(json!({"type": "unsubscribe", "id": "all"})).await;
    assert_eq!(reader.frame().await, json!({"type": "unsubscribed", "id": "all"}));
    let last = event("t", 1);
    emitter.send(&last).await;
    assert_eq!(reader.text().await, last, "once");
    reader.say(json!({"type": "ping", "t": 1})).await;
    assert_eq!(reader.frame().await["type"], "pong");
    assert_eq!(server.held().await, [line, last]);
}

#[tokio::test]
async fn replay_comes_after_subscribed_and_before_live() {
    let server = Server::start(Limits { buffer: 3, ..Limits::default() }, None).await;
    server.ingest(&(1..=5).map(|n| event("s", n)).collect::<Vec<_>>()).await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("r", json!({"from": [{"session": "s", "epoch": 0, "seq": 1}]})).await;
    let marker =
        json!({"type": "replay-exhausted", "sub": "r", "session": "s", "earliest": {"epoch": 0, "seq": 3}});
    assert_eq!(reader.frame().await, marker);
    server.ingest(&[event("s", 6)]).await;
    for seq in 3..=6 {
        assert_eq!(reader.text().await, event("s", seq));
    }
    reader.subscribe("all", json!({"from": "all"})).await;
    for seq in 4..=6 {
        assert_eq!(reader.text().await, event("s", seq));
    }
}

#[tokio::test]
async fn a_ceiling_holds_for_each_subscription() {
    let server = Server::open().await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("full", json!({})).await;
    reader.subscribe("low", json!({"capture": "metadata"})).await;
    let line = event_with("s", 1, r#","capture":"full","data":{"error":{"type":"E","message":"hunter2"}}"#)
        .replace("run.started", "tool.failed");
    server.ingest(std::slice::from_ref(&line)).await;
    let got = [reader.text().await, reader.text().await];
    assert!(got.contains(&line));
    let lowered = got.iter().find(|text| **text != line).unwrap();
    assert!(!lowered.contains("hunter2") && lowered.contains(r#""capture":"metadata""#), "{lowered}");
}

#[tokio::test]
async fn refusals_are_in_band_and_disturb_nothing() {
    let server = Server::start(Limits { max_from: 2, max_subscriptions: 2, ..Limits::default() }, None).await;
    let mut peer = Peer::open(&server, None, "consumer").await;
    peer.subscribe("keep", json!({})).await;
    let position = json!({"session": "s", "epoch": 0, "seq": 1});
    for (frame, code) in [
        (json!({"id": "x", "filter": {"seq": 1}}), "invalid-filter"),
        (json!({"id": "x", "filter": []}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "from": "yesterday"}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "from": {"session": "s"}}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "from": [null]}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "from": [{"session": 1}]}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "capture": "all"}), "invalid-filter"),
        (json!({"id": "x", "filter": {}, "from": [position, position, position]}), "limit-exceeded"),
        (json!({"id": "keep", "filter": {}}), "invalid-filter"),
    ] {
        let mut whole = json!({"type": "subscribe"});
        whole.as_object_mut().unwrap().extend(frame.as_object().unwrap().clone());
        peer.say(whole).await;
        let error = peer.frame().await;
        assert_eq!(
            (&error["type"], &error["id"], &error["code"]),
            (&json!("error"), &frame["id"], &json!(code)),
            "{frame}"
        );
        assert!(!error["detail"].as_str().unwrap().is_empty());
    }
    peer.say(json!({"type": "subscribe", "filter": {}})).await;
    assert_eq!(peer.frame().await["code"], "invalid-filter");
    peer.subscribe("second", json!({"filter": {"agent": "nobody"}})).await;
    for n in 0..10_000 {
        peer.say(json!({"type": "subscribe", "id": format!("n{n}"), "filter": {}})).await;
        let error = peer.frame().await;
        assert_eq!((&error["id"], &error["code"]), (&json!(format!("n{n}")), &json!("limit-exceeded")));
    }
    server.ingest(&[event("s", 1)]).await;
    assert_eq!(peer.text().await, event("s", 1), "the first subscription lives");
}

#[tokio::test]
async fn what_is_no_event_is_told_and_the_connection_lives() {
    let server = Server::open().await;
    let mut peer = Peer::open(&server, None, "both").await;
    peer.send("{nonsense").await;
    assert_eq!(peer.text().await, r#"{"type":"error","code":"bad-json"}"#);
    peer.send("[1]").await;
    assert_eq!(peer.frame().await["code"], "bad-json");
    peer.send(&event_with("s", 1, r#","severity":"fatal""#)).await;
    let error = peer.frame().await;
    assert_eq!((&error["code"], &error["cause"]), (&json!("invalid-event"), &json!("1")));
    assert!(error["detail"].as_str().unwrap().starts_with("severity must"));
    peer.send("{}").await;
    assert_eq!(peer.frame().await["code"], "invalid-event");
    peer.send(&event("s", 2)).await;
    peer.say(json!({"type": "ping", "t": 0})).await;
    assert_eq!(peer.frame().await, json!({"type": "pong", "t": 0}));
    assert_eq!(server.held().await, [event("s", 2)]);
}

#[tokio::test]
async fn a_binary_frame_ends_the_connection() {
    let server = Server::open().await;
    let mut peer = Peer::open(&server, None, "both").await;
    peer.0.send(Message::binary(event("s", 1))).await.unwrap();
    assert_eq!(peer.text().await, r#"{"type":"error","code":"binary-unsupported"}"#);
    assert_eq!(peer.closed().await, 1003);
    assert_eq!(server.held().await, Vec::<String>::new());
}

#[tokio::test]
async fn a_message_over_the_bound_ends_the_connection() {
    let server = Server::start(Limits { max_body: 10_000, ..Limits::default() }, None).await;
    let mut peer = Peer::open(&server, None, "both").await;
    peer.send(&" ".repeat(20_000)).await;
    assert_eq!(peer.text().await, r#"{"type":"error","code":"payload-too-large"}"#);
    assert_eq!(peer.closed().await, 1009);
}

#[tokio::test]
async fn a_command_is_forwarded_to_the_byte_held_and_shown() {
    let server = Server::start(Limits::default(), TOKEN).await;
    let mut target = Peer::open(&server, TOKEN, "emitter").await;
    target.send(&event("s", 1)).await;
    let mut watcher = Peer::open(&server, TOKEN, "consumer").await;
    watcher.subscribe("w", json!({"from": "all"})).await;
    assert_eq!(watcher.text().await, event("s", 1));
    let mut sender = Peer::open(&server, TOKEN, "consumer").await;
    let cancel = command("control.cancel", "s", "c1");
    sender.send(&cancel).await;
    assert_eq!(target.text().await, cancel);
    assert_eq!(watcher.text().await, cancel);
    target.send(&event("s", 2)).await;
    assert_eq!(watcher.text().await, event("s", 2));
    let stream =
        server.client.get(server.url("/stream?from=all&live=0")).bearer_auth("s3cret").send().await.unwrap();
    let held: Vec<String> =
        messages(&stream.text().await.unwrap()).into_iter().map(|message| message.data).collect();
    assert_eq!(held, [event("s", 1), cancel.clone(), event("s", 2)], "at its place, who commanded what");
    // A retry reaches the target again, so that it can acknowledge again; it is held once.
    sender.send(&cancel).await;
    assert_eq!(target.text().await, cancel);
    assert_eq!(server.hub.metrics().duplicates.get(), 1);
}

#[tokio::test]
async fn a_command_that_is_not_routed_is_nowhere_but_in_its_answer() {
    let server = Server::start(Limits::default(), TOKEN).await;
    let accepts = json!({"type": "hello", "versions": ["0.1"], "role": "emitter",
        "capabilities": {"control": {"accepts": ["control.cancel"]}}});
    let mut one = Peer::open_with(&server, TOKEN, accepts.clone()).await;
    one.send(&event("s", 1)).await;
    let mut watcher = Peer::open(&server, TOKEN, "consumer").await;
    watcher.subscribe("w", json!({"from": "all"})).await;
    assert_eq!(watcher.text().await, event("s", 1));
    let mut sender = Peer::open(&server, TOKEN, "consumer").await;
    let refused = async |sender: &mut Peer, text: &str| {
        sender.send(text).await;
        let error = sender.frame().await;
        assert_eq!(error["type"], "error");
        (error["code"].as_str().unwrap().to_owned(), error["cause"].as_str().unwrap().to_owned())
    };
    let answer = |code: &str, id: &str| (code.to_owned(), id.to_owned());
    assert_eq!(
        refused(&mut sender, &command("control.cancel", "nowhere", "c1")).await,
        answer("no-route", "c1")
    );
    assert_eq!(refused(&mut sender, &command("control.pause", "s", "c2")).await, answer("unsupported", "c2"));
    assert_eq!(
        refused(&mut sender, &command("x.acme.control.reboot", "s", "c3")).await,
        answer("unsupported", "c3")
    );
    let mut two = Peer::open_with(&server, TOKEN, accepts).await;
    two.send(&event("s", 2)).await;
    assert_eq!(watcher.text().await, event("s", 2));
    assert_eq!(refused(&mut sender, &command("control.cancel", "s", "c4")).await, answer("ambiguous", "c4"));
    // Claims end with the connection.
    two.0.close(None).await.unwrap();
    while two.0.next().await.is_some() {}
    let cancel = command("control.cancel", "s", "c5");
    sender.send(&cancel).await;
    assert_eq!(one.text().await, cancel);
    assert_eq!(watcher.text().await, cancel, "the first command that anyone sees");
    for code in ["no-route", "ambiguous"] {
        assert_eq!(server.refused(code), 1);
    }
    assert_eq!(server.refused("unsupported"), 2);
}

#[tokio::test]
async fn without_a_token_commands_are_refused_on_loopback_too() {
    let server = Server::open().await;
    let mut target = Peer::open(&server, None, "emitter").await;
    target.send(&event("s", 1)).await;
    let mut sender = Peer::open(&server, None, "both").await;
    sender.send(&command("control.cancel", "s", "c1")).await;
    let error = sender.frame().await;
    assert_eq!((&error["code"], &error["cause"]), (&json!("unauthorized"), &json!("c1")));
    assert_eq!(server.held().await, [event("s", 1)]);
}

#[tokio::test]
async fn what_claims_a_session_and_what_does_not() {
    let server = Server::start(Limits::default(), TOKEN).await;
    let mut consumer = Peer::open(&server, TOKEN, "consumer").await;
    consumer.send(&event("s", 1)).await;
    let mut router = Peer::open(&server, TOKEN, "both").await;
    router.send(&command("attention.routed", "s", "r1")).await;
    let mut sender = Peer::open(&server, TOKEN, "consumer").await;
    // What was sent before is taken in by the time that its sender's own question is answered.
    for peer in [&mut consumer, &mut router] {
        peer.say(json!({"type": "ping", "t": 0})).await;
        assert_eq!(peer.frame().await["type"], "pong");
    }
    sender.send(&command("control.cancel", "s", "c1")).await;
    assert_eq!(sender.frame().await["code"], "no-route");
}

#[tokio::test]
async fn the_roster_shows_claims_verbatim() {
    let server = Server::start(Limits::default(), TOKEN).await;
    let control = r#"{"accepts":["control.cancel"],"ack_window_ms":1e4,"vendor":{"b":1,"a":2}}"#;
    let hello = format!(
        r#"{{"type":"hello","versions":["0.1"],"role":"emitter","identity":{{"agent":"bot","instance":"i1","card":null}},"capabilities":{{"emits":["run"],"control":{control}}}}}"#
    );
    let mut emitter = Peer::connect(&server, TOKEN).await;
    emitter.send(&hello).await;
    emitter.frame().await;
    emitter.send(&event("s", 1)).await;
    emitter.say(json!({"type": "roster", "id": "r"})).await;
    let error = emitter.frame().await;
    assert_eq!(
        (&error["type"], &error["id"], &error["code"]),
        (&json!("error"), &json!("r"), &json!("unauthorized"))
    );
    let mut plain = Peer::open(&server, TOKEN, "both").await;
    plain.send(&event("s", 2)).await;
    plain.say(json!({"type": "roster", "id": "r-1"})).await;
    let text = plain.text().await;
    assert!(text.contains(control), "{text}");
    let roster: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&roster["type"], &roster["id"]), (&json!("roster"), &json!("r-1")));
    let entries = roster["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 2, "one for each claim, never merged");
    assert_eq!(
        (&entries[0]["agent"], &entries[0]["instance"], &entries[0]["emits"]),
        (&json!("bot"), &json!("i1"), &json!(["run"]))
    );
    assert_eq!(entries[1], json!({"session": "s"}));
    let answer = server.client.get(server.url("/connections")).bearer_auth("s3cret").send().await.unwrap();
    let connections: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
    assert_eq!(connections["relay"]["connections"], json!(2));
    assert_eq!(
        connections["connections"][0],
        json!({"role": "emitter", "identity": {"agent": "bot", "instance": "i1"}, "accepts": ["control.cancel"], "sessions": ["s"], "subscriptions": 0})
    );
    assert_eq!(server.client.get(server.url("/connections")).send().await.unwrap().status(), 401);
}

#[tokio::test]
async fn a_drain_says_where_every_subscription_stands() {
    let server = Server::open().await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("one", json!({})).await;
    reader.subscribe("two", json!({"filter": {"session": "t"}})).await;
    let mut emitter = Peer::open(&server, None, "emitter").await;
    for line in [event("s", 1), event("t", 4), event("s", 2)] {
        emitter.send(&line).await;
    }
    for _ in 0..4 {
        reader.text().await;
    }
    server.stop.cancel();
    server.hub.close();
    let closing = reader.frame().await;
    assert_eq!((&closing["type"], &closing["reason"]), (&json!("closing"), &json!("shutting-down")));
    let mut delivered: Vec<String> =
        closing["delivered"].as_array().unwrap().iter().map(Value::to_string).collect();
    delivered.sort();
    assert_eq!(
        delivered,
        [
            r#"{"epoch":0,"seq":2,"session":"s","sub":"one"}"#,
            r#"{"epoch":0,"seq":4,"session":"t","sub":"one"}"#,
            r#"{"epoch":0,"seq":4,"session":"t","sub":"two"}"#,
        ]
    );
    assert_eq!(reader.closed().await, 1001);
    assert_eq!(emitter.frame().await["type"], "closing");
    assert_eq!(emitter.closed().await, 1001);
    server.tracker.close();
    server.tracker.wait().await;
}

#[tokio::test]
async fn a_reader_past_what_is_held_gets_its_positions_and_is_closed() {
    let server = Server::start(Limits { window_bytes: 1, buffer: 10, ..Limits::default() }, None).await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("r", json!({})).await;
    let padding = "x".repeat(50_000);
    for n in 0..2000 {
        server.ingest(&[event_with("s", n, &format!(r#","data":{{"p":"{padding}"}}"#))]).await;
    }
    let mut last = None;
    let closing = loop {
        let frame = reader.frame().await;
        match frame["type"].as_str().unwrap() {
            "closing" => break frame,
            "ping" => {}
            _ => last = frame["seq"].as_u64(),
        }
    };
    assert_eq!(closing["reason"], "slow-consumer");
    assert_eq!(closing["delivered"], json!([{"sub": "r", "session": "s", "epoch": 0, "seq": last.unwrap()}]));
    assert_eq!(reader.closed().await, 1013);
}

#[tokio::test]
async fn ten_thousand_events_replay_whole_and_a_stalled_peer_slows_nobody() {
    let server = Server::open().await;
    let padding = "x".repeat(350);
    let lines: Vec<String> =
        (0..10_000).map(|n| event_with("s", n, &format!(r#","data":{{"p":"{padding}"}}"#))).collect();
    for batch in lines.chunks(5000) {
        server.ingest(batch).await;
    }
    let from = json!({"from": [{"session": "s", "epoch": 0, "seq": 0}]});
    let mut stalled = Peer::open(&server, None, "consumer").await;
    stalled.subscribe("r", from.clone()).await;
    let mut reader = Peer::open(&server, None, "consumer").await;
    reader.subscribe("r", from).await;
    for line in &lines[1..] {
        assert_eq!(&reader.text().await, line);
    }
    server.ingest(&[event("s", 10_000)]).await;
    assert_eq!(reader.text().await, event("s", 10_000));
    for line in &lines[1..] {
        assert_eq!(&stalled.text().await, line);
    }
    assert_eq!(stalled.text().await, event("s", 10_000));
}

#[tokio::test]
async fn a_hundred_thousand_claims_cost_their_claimant_only() {
    let limits = Limits { max_sessions: 50, ..Limits::default() };
    let server = Server::start(limits, TOKEN).await;
    let mut hostile = Peer::open(&server, TOKEN, "emitter").await;
    for n in 0..100_000 {
        hostile.0.feed(Message::text(event(&format!("s{n}"), 1))).await.unwrap();
    }
    hostile.say(json!({"type": "ping", "t": 0})).await;
    assert_eq!(hostile.frame().await["type"], "pong");
    assert_eq!(server.hub.connections().roster().len(), limits.remembered());
    assert_eq!(server.hub.held().sessions, 50);
    // The others go on.
    let mut target = Peer::open(&server, TOKEN, "emitter").await;
    target.send(&event("mine", 1)).await;
    target.say(json!({"type": "ping", "t": 0})).await;
    assert_eq!(target.frame().await["type"], "pong");
    let mut sender = Peer::open(&server, TOKEN, "consumer").await;
    let cancel = command("control.cancel", "mine", "c");
    sender.send(&cancel).await;
    assert_eq!(target.text().await, cancel);
}

const TOKENS: &str = r#"{"tokens":[
    {"name":"agent","token":"ag3nt","scopes":["emit"]},
    {"name":"billing","token":"b1ll","scopes":["read"],"filter":{"session":["s"]}},
    {"name":"pager","token":"p4ge","scopes":["control"]}
]}"#;

#[tokio::test]
async fn a_token_permits_what_it_lists_here_too() {
    let access = Access::new(Some(Token::new("s3cret").unwrap()));
    access.replace(Tokens::parse(TOKENS).unwrap()).unwrap();
    let server = Server::start_with(Limits::default(), access.clone()).await;
    let mut agent = Peer::open(&server, Some("ag3nt"), "both").await;
    let mut reader = Peer::open(&server, Some("b1ll"), "consumer").await;
    let mut pager = Peer::open(&server, Some("p4ge"), "consumer").await;
    // An emitter reads nothing.
    agent.say(json!({"type": "subscribe", "id": "x", "filter": {}})).await;
    assert_eq!(agent.frame().await["code"], "unauthorized");
    agent.say(json!({"type": "roster", "id": "x"})).await;
    assert_eq!(agent.frame().await["code"], "unauthorized");
    // A reader emits nothing, and sees what its bound matches.
    reader.send(&event("s", 9)).await;
    let error = reader.frame().await;
    assert_eq!((&error["code"], &error["cause"]), (&json!("unauthorized"), &json!("9")));
    reader.subscribe("all", json!({"from": "all"})).await;
    for line in [event("t", 1), event("s", 1)] {
        agent.send(&line).await;
    }
    assert_eq!(reader.text().await, event("s", 1));
    reader.say(json!({"type": "roster", "id": "r"})).await;
    assert_eq!(reader.frame().await["entries"], json!([{"session": "s"}]));
    reader.send(&command("control.cancel", "s", "c1")).await;
    assert_eq!(reader.frame().await["code"], "unauthorized");
    let answer = server.client.get(server.url("/connections")).bearer_auth("b1ll").send().await.unwrap();
    assert_eq!(answer.status(), 403);
    // A commander commands.
    let cancel = command("control.cancel", "s", "c2");
    pager.send(&cancel).await;
    assert_eq!(agent.text().await, cancel);
    assert_eq!(reader.text().await, cancel);
    // Whose token is withdrawn is sent away, the others go on.
    access
        .replace(Tokens::parse(r#"{"tokens":[{"name":"agent","token":"ag3nt","scopes":["emit"]}]}"#).unwrap())
        .unwrap();
    let closing = reader.frame().await;
    assert_eq!((&closing["type"], &closing["reason"]), (&json!("closing"), &json!("unauthorized")));
    assert_eq!(closing["delivered"], json!([{"sub": "all", "session": "s", "epoch": 0, "seq": 1}]));
    assert_eq!(reader.closed().await, 1008);
    agent.say(json!({"type": "ping", "t": 1})).await;
    assert_eq!(agent.frame().await, json!({"type": "pong", "t": 1}));
}

/// Keeps nothing before its gate is open, and never more than so many events together.
#[derive(Debug)]
struct Gate {
    open: watch::Sender<bool>,
    /// How many events may come together.
    most: usize,
    /// The ids of what was kept, as the relay had it kept.
    kept: Mutex<Vec<String>>,
    /// How many appends there were.
    count: watch::Sender<usize>,
}

impl Gate {
    fn of(most: usize) -> Arc<Self> {
        let (open, count) = (watch::Sender::new(false), watch::Sender::new(0));
        Arc::new(Self { open, most, kept: Mutex::default(), count })
    }
}

impl Keep for Gate {
    fn keep<'k>(&'k self, events: &'k [Event]) -> Boxed<'k, Result<(), NotKept>> {
        Box::pin(async move {
            self.count.send_modify(|count| *count += 1);
            if events.len() > self.most {
                return Err(NotKept::TooLarge { max_bytes: 1 });
            }
            self.open.subscribe().wait_for(|open| *open).await.unwrap();
            self.kept.lock().unwrap().extend(events.iter().map(|event| event.id().to_owned()));
            Ok(())
        })
    }

    fn room(&self) -> Boxed<'_, ()> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_too_large_together_outlast_the_end_of_their_connection() {
    let gate = Gate::of(1);
    let server = Server::start_keeping(Limits::default(), Arc::<Gate>::clone(&gate)).await;
    let mut peer = Peer::open(&server, None, "emitter").await;
    // One write, so that they are read together.
    for n in 0..3 {
        peer.0.feed(Message::text(event("s", n))).await.unwrap();
    }
    peer.0.flush().await.unwrap();
    // Refused together, and the first one by itself is under way.
    gate.count.subscribe().wait_for(|count| *count > 1).await.unwrap();
    server.hub.close();
    // The connection is given its time, and then ends; what it has read is taken in.
    let mut count = gate.count.subscribe();
    let again = tokio::time::timeout(Duration::from_secs(20), count.wait_for(|count| *count > 2)).await;
    assert!(again.is_ok_and(|found| found.is_ok()), "what was under way is gone");
    gate.open.send_replace(true);
    server.stop.cancel();
    server.tracker.close();
    server.tracker.wait().await;
    let mut kept = gate.kept.lock().unwrap().clone();
    kept.dedup();
    assert_eq!(kept.len(), 3, "{kept:?}");
}
