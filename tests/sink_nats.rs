//! Events in a NATS stream, read back in the protocol's own bytes.
#![cfg(feature = "nats")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "harness/broker.rs"]
mod broker;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use aep_sidecar::aep::cloudevents::{CloudEvent, HeaderValues, inverse};
use aep_sidecar::export::sink::Secret;
use aep_sidecar::export::sink::options::Tls;
use aep_sidecar::export::{Mode, Reason, SinkConfig, SinkState, Summary};
use broker::{Broker, Running, SINK, config, delivered, event, event_with, export, find, golden, sessions};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpStream;

/// A message as it stands on the wire.
#[derive(Debug, Clone)]
struct Message {
    subject: String,
    headers: BTreeMap<String, String>,
    payload: Vec<u8>,
}

/// A client in raw bytes.
struct Wire {
    stream: BufStream<TcpStream>,
    requests: u32,
}

impl Wire {
    async fn connect(port: u16, login: Value) -> Self {
        let mut stream = BufStream::new(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
        let mut info = String::new();
        stream.read_line(&mut info).await.unwrap();
        assert!(info.starts_with("INFO "), "{info}");
        let mut hello = json!({"verbose": false, "headers": true, "no_responders": true});
        hello.as_object_mut().unwrap().extend(login.as_object().unwrap().clone());
        let mut wire = Self { stream, requests: 0 };
        wire.say(&format!("CONNECT {hello}\r\nSUB inbox.* 1\r\n")).await;
        wire.flush().await;
        wire
    }

    async fn say(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
        self.stream.flush().await.unwrap();
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.unwrap();
        line.trim_end().to_owned()
    }

    /// Waits until the server has read everything.
    async fn flush(&mut self) {
        self.say("PING\r\n").await;
        loop {
            match self.line().await.as_str() {
                "PONG" => return,
                line => assert!(!line.starts_with("-ERR") && !line.is_empty(), "{line}"),
            }
        }
    }

    async fn next(&mut self) -> Message {
        loop {
            let line = self.line().await;
            let words: Vec<_> = line.split(' ').collect();
            let number = |back: usize| words[words.len() - back].parse::<usize>().unwrap();
            let (head, whole) = match words[0] {
                "MSG" => (0, number(1)),
                "HMSG" => (number(2), number(1)),
                "PING" => {
                    self.say("PONG\r\n").await;
                    continue;
                }
                _ => panic!("{line}"),
            };
            let mut bytes = vec![0; whole + 2];
            self.stream.read_exact(&mut bytes).await.unwrap();
            bytes.truncate(whole);
            let payload = bytes.split_off(head);
            let text = String::from_utf8(bytes).unwrap();
            let headers = text.lines().skip(1).filter_map(|line| line.split_once(": "));
            let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            return Message { subject: words[1].to_owned(), headers, payload };
        }
    }

    async fn request(&mut self, subject: &str, body: &str) -> Message {
        self.requests += 1;
        let (reply, length) = (format!("inbox.{}", self.requests), body.len());
        self.say(&format!("PUB {subject} {reply} {length}\r\n{body}\r\n")).await;
        self.next().await
    }

    /// What the JetStream interface says.
    async fn api(&mut self, call: &str, body: Value) -> Value {
        let answer = self.request(&format!("$JS.API.{call}"), &body.to_string()).await;
        let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
        assert!(answer.get("error").is_none(), "{call}: {answer}");
        answer
    }

    /// A stream of all subjects that start with `aep`.
    async fn create(&mut self, more: Value) {
        let mut stream = json!({
            "name": "EVENTS", "subjects": ["aep.>"], "storage": "file", "allow_direct": true,
            "num_replicas": 1, "max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "max_age": 0,
            "max_msg_size": -1, "retention": "limits", "discard": "old",
        });
        stream.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.api("STREAM.CREATE.EVENTS", stream).await;
    }

    /// Everything in the stream, as it was published.
    async fn stored(&mut self) -> Vec<Message> {
        let state = self.api("STREAM.INFO.EVENTS", json!({})).await["state"].clone();
        let (first, last) = (state["first_seq"].as_u64().unwrap(), state["last_seq"].as_u64().unwrap());
        let mut messages = Vec::new();
        for seq in first..=last {
            let mut message =
                self.request("$JS.API.DIRECT.GET.EVENTS", &json!({"seq": seq}).to_string()).await;
            message.subject = message.headers["Nats-Subject"].clone();
            messages.push(message);
        }
        messages
    }
}

/// A server that keeps its streams when it is killed.
struct Nats {
    broker: Broker,
    dir: TempDir,
    /// How a test logs in.
    login: Value,
}

impl Nats {
    async fn start(test: &str, settings: &str) -> Option<Self> {
        let program = find(test, "nats-server")?;
        let dir = tempfile::tempdir().unwrap();
        let port = broker::free_port();
        let file = dir.path().join("nats.conf");
        let store = dir.path().join("streams");
        // With operators JetStream takes more accounts than these tests need.
        let jetstream = match settings.starts_with("operator") {
            true => String::new(),
            false => format!("jetstream {{ store_dir: {store:?} }}\n"),
        };
        let settings = settings.replace("DIR", dir.path().to_str().unwrap());
        let text = format!("listen: 127.0.0.1:{port}\n{jetstream}{settings}");
        std::fs::write(&file, text).unwrap();
        broker::certificates(dir.path());
        let mut broker = Broker::new(program, port, vec!["-c".to_owned(), file.to_str().unwrap().to_owned()]);
        broker.start().await;
        Some(Self { broker, dir, login: json!({}) })
    }

    async fn wire(&self) -> Wire {
        Wire::connect(self.broker.port, self.login.clone()).await
    }

    fn url(&self) -> String {
        format!("nats://127.0.0.1:{}/aep.{{agent}}.{{type}}", self.broker.port)
    }

    fn with(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

fn ids(messages: &[Message]) -> Vec<String> {
    messages
        .iter()
        .map(|message| inverse::structured(&message.payload, &[]).unwrap().event.id().to_owned())
        .collect()
}

/// The identifiers of each session's events, in the order of the stream.
fn stored_sessions(messages: &[Message]) -> BTreeMap<(String, String), Vec<String>> {
    let events: Vec<_> =
        messages.iter().map(|message| inverse::structured(&message.payload, &[]).unwrap().event).collect();
    sessions(&events)
}

#[tokio::test]
async fn every_event_is_stored_once_under_its_subject() {
    let test = "every_event_is_stored_once_under_its_subject";
    let Some(nats) = Nats::start(test, "").await else { return };
    let mut wire = nats.wire().await;
    wire.create(json!({})).await;
    let events = golden(test);
    // The second time the stream knows them all: an acknowledgement too.
    for batch in [1, 7] {
        let config = config(&nats.url(), |sink| sink.batch = NonZeroUsize::new(batch));
        let (summary, _) = export(&config, events.clone()).await;
        assert_eq!(summary, delivered(events.len()));
        let messages = wire.stored().await;
        assert_eq!(messages.len(), events.len());
        assert_eq!(stored_sessions(&messages), sessions(&events));
        for event in &events {
            let mapped = CloudEvent::of(event).unwrap().structured();
            let message = messages.iter().find(|message| message.payload == mapped).unwrap();
            assert_eq!(message.headers["content-type"], "application/cloudevents+json");
            assert_eq!(message.headers["Nats-Msg-Id"], format!("{}|{}", event.source(), event.id()));
            assert_eq!(message.subject, format!("aep.{}.{}", event.agent(), event.event_type()));
        }
    }
}

#[tokio::test]
async fn binary_mode_has_attributes_as_headers() {
    let test = "binary_mode_has_attributes_as_headers";
    let Some(nats) = Nats::start(test, "").await else { return };
    let mut wire = nats.wire().await;
    wire.create(json!({})).await;
    let mut events = golden(test);
    events.push(event_with("s p|a%c \u{e9}", 1, r#","subject":"a\r\nb: \"c\"","data":{"z":1.0}"#));
    let config = config(&nats.url(), |sink| sink.options.mode = Mode::Binary);
    let (summary, _) = export(&config, events.clone()).await;
    assert_eq!(summary, delivered(events.len()));
    let messages = wire.stored().await;
    for event in &events {
        let binary = CloudEvent::of(event).unwrap().binary(HeaderValues::Encoded);
        let has_all = |message: &&Message| {
            ["ce-id", "ce-source"].iter().all(|name| {
                let value = &binary.headers.iter().find(|(known, _)| known == name).unwrap().1;
                message.headers[*name] == *value
            })
        };
        let message = messages.iter().find(has_all).unwrap();
        for (name, value) in &binary.headers {
            assert_eq!(&message.headers[name], value);
        }
        assert_eq!(message.payload, binary.body);
    }
    let id = "aep://h|s%20p%7Ca%25c%20%C3%A9-1";
    assert!(messages.iter().any(|message| message.headers["Nats-Msg-Id"] == id), "{messages:?}");
}

#[tokio::test]
async fn a_server_killed_in_the_middle_loses_and_doubles_nothing() {
    let test = "a_server_killed_in_the_middle_loses_and_doubles_nothing";
    let Some(mut nats) = Nats::start(test, "").await else { return };
    nats.wire().await.create(json!({})).await;
    let running = Running::start(&config(&nats.url(), |sink| sink.batch = NonZeroUsize::new(3)));
    let events: Vec<_> =
        (0..100).flat_map(|seq| ["a", "b", "c", "d", "e"].map(|session| event(session, seq))).collect();
    for round in 1..=3_usize {
        running.send(events[(round - 1) * 150..round * 150].to_vec()).await;
        running.has_delivered(u64::try_from(round * 150 - 140).unwrap()).await;
        nats.broker.kill();
        running.send(vec![event("probe", u64::try_from(round).unwrap())]).await;
        running.reaches(SinkState::Paused(Reason::Refused)).await;
        nats.broker.start().await;
    }
    running.send(events[450..].to_vec()).await;
    assert_eq!(running.finish().await, delivered(events.len() + 3));
    let mut stored = stored_sessions(&nats.wire().await.stored().await);
    stored.remove(&("aep://h".to_owned(), "probe".to_owned())).unwrap();
    assert_eq!(stored, sessions(&events));
}

/// What is wrong brings the sink into that state, and loses nothing: all is delivered once it is mended.
struct Paused {
    running: Running,
}

impl Paused {
    async fn reaches(url: &str, state: SinkState, change: impl FnOnce(&mut SinkConfig)) -> Self {
        let running = Running::start(&config(url, change));
        running.send((0..5).map(|seq| event("s", seq)).collect()).await;
        running.reaches(state).await;
        assert_eq!(running.delivered(), 0);
        Self { running }
    }

    async fn flows(self) {
        assert_eq!(self.running.finish().await, delivered(5));
    }
}

#[tokio::test]
async fn without_a_stream_the_sink_pauses_until_there_is_one() {
    let test = "without_a_stream_the_sink_pauses_until_there_is_one";
    let Some(nats) = Nats::start(test, "").await else { return };
    let paused = Paused::reaches(&nats.url(), SinkState::Misconfigured(Reason::NotFound), |_| {}).await;
    let mut wire = nats.wire().await;
    wire.create(json!({})).await;
    paused.flows().await;
    assert_eq!(ids(&wire.stored().await), ["s-0", "s-1", "s-2", "s-3", "s-4"]);
}

#[tokio::test]
async fn a_full_stream_is_tried_again() {
    let Some(nats) = Nats::start("a_full_stream_is_tried_again", "").await else { return };
    let mut wire = nats.wire().await;
    wire.create(json!({"max_msgs": 1, "discard": "new"})).await;
    let full = "PUB aep.full 2\r\n{}\r\n";
    wire.say(full).await;
    wire.flush().await;
    let paused = Paused::reaches(&nats.url(), SinkState::Paused(Reason::Unavailable), |_| {}).await;
    wire.api("STREAM.DELETE.EVENTS", json!({})).await;
    wire.create(json!({})).await;
    paused.flows().await;
    assert_eq!(ids(&wire.stored().await), ["s-0", "s-1", "s-2", "s-3", "s-4"]);
}

#[tokio::test]
async fn what_is_too_large_is_a_dead_letter() {
    let Some(nats) = Nats::start("what_is_too_large_is_a_dead_letter", "max_payload: 4096").await else {
        return;
    };
    let mut wire = nats.wire().await;
    wire.create(json!({"max_msg_size": 2048})).await;
    let data = |bytes: usize| format!(r#","data":{{"x":"{}"}}"#, "x".repeat(bytes));
    let events = vec![
        event("s", 0),
        // For the server, and for the stream.
        event_with("s", 1, &data(5000)),
        event_with("s", 2, &data(3000)),
        event_with("s", 3, &data(1000)),
        // For a line of the protocol.
        event_with("s", 4, &format!(r#","tenant":"{}""#, "t".repeat(3100))),
        event("s", 5),
    ];
    let url = nats.url().replace("{type}", "{tenant}");
    for batch in [1, 4] {
        let config = config(&url, |sink| sink.batch = NonZeroUsize::new(batch));
        let (summary, metrics) = export(&config, events.clone()).await;
        assert_eq!(summary, Summary { delivered: 3, dead_letters: 3, ..Summary::default() });
        assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 3);
        assert_eq!(ids(&wire.stored().await), ["s-0", "s-3", "s-5"]);
    }
}

#[tokio::test]
async fn credentials_are_read_again_until_they_are_right() {
    let test = "credentials_are_read_again_until_they_are_right";
    let settings =
        "authorization { users: [ { user: me, password: hunter2 }, { user: wire, password: w } ] }";
    let Some(mut nats) = Nats::start(test, settings).await else { return };
    nats.login = json!({"user": "wire", "pass": "w"});
    nats.wire().await.create(json!({})).await;
    let unauthorized = SinkState::Misconfigured(Reason::Unauthorized);
    drop(Paused::reaches(&nats.url(), unauthorized, |_| {}).await);
    let file = nats.with("password");
    std::fs::write(&file, "wrong").unwrap();
    let credentials = |sink: &mut SinkConfig| {
        sink.options.credentials.username = Some("me".to_owned());
        sink.options.credentials.password = Some(Secret::in_file(file.clone(), "wrong"));
    };
    let paused = Paused::reaches(&nats.url(), unauthorized, credentials).await;
    std::fs::write(&file, "hunter2").unwrap();
    paused.flows().await;
    let url = nats.url().replace("nats://", "nats://me:hunter2@");
    assert_eq!(export(&config(&url, |_| {}), vec![event("t", 0)]).await.0, delivered(1));
}

#[tokio::test]
async fn a_token_logs_in() {
    let Some(mut nats) = Nats::start("a_token_logs_in", "authorization { token: hunter2 }").await else {
        return;
    };
    nats.login = json!({"auth_token": "hunter2"});
    nats.wire().await.create(json!({})).await;
    let wrong = |sink: &mut SinkConfig| sink.options.credentials.token = Some(Secret::fixed("wrong"));
    drop(Paused::reaches(&nats.url(), SinkState::Misconfigured(Reason::Unauthorized), wrong).await);
    let right = |sink: &mut SinkConfig| sink.options.credentials.token = Some(Secret::fixed("hunter2"));
    assert_eq!(export(&config(&nats.url(), right), vec![event("s", 0)]).await.0, delivered(1));
    let url = nats.url().replace("nats://", "nats://hunter2@");
    assert_eq!(export(&config(&url, |_| {}), vec![event("s", 1)]).await.0, delivered(1));
}

#[tokio::test]
async fn what_may_not_be_published_or_answered_pauses_the_sink() {
    let settings = r#"authorization { users: [
        { user: mute, password: p, permissions: { publish: { deny: "aep.>" } } },
        { user: deaf, password: p, permissions: { subscribe: { deny: "_INBOX.>" } } },
        { user: wire, password: w } ] }"#;
    let test = "what_may_not_be_published_or_answered_pauses_the_sink";
    let Some(mut nats) = Nats::start(test, settings).await else { return };
    nats.login = json!({"user": "wire", "pass": "w"});
    nats.wire().await.create(json!({})).await;
    for (user, jetstream) in [("mute", "true"), ("deaf", "true"), ("mute", "false"), ("deaf", "false")] {
        let url = nats.url().replace("nats://", &format!("nats://{user}:p@"));
        let core = |sink: &mut SinkConfig| {
            sink.options.own.insert("jetstream".to_owned(), jetstream.to_owned());
        };
        drop(Paused::reaches(&url, SinkState::Misconfigured(Reason::Unauthorized), core).await);
    }
}

#[tokio::test]
async fn without_jetstream_subscribers_hear_each_event() {
    let test = "without_jetstream_subscribers_hear_each_event";
    let Some(nats) = Nats::start(test, "").await else { return };
    let mut wire = nats.wire().await;
    wire.say("SUB aep.> 2\r\n").await;
    wire.flush().await;
    let events = golden(test);
    let config = config(&nats.url(), |sink| {
        sink.batch = NonZeroUsize::new(5);
        sink.options.own.insert("jetstream".to_owned(), "false".to_owned());
    });
    assert_eq!(export(&config, events.clone()).await.0, delivered(events.len()));
    let mut heard = Vec::new();
    while heard.len() < events.len() {
        heard.push(wire.next().await);
    }
    assert_eq!(stored_sessions(&heard), sessions(&events));
}

#[tokio::test]
async fn a_certificate_must_be_trusted_on_both_sides() {
    let settings = "tls { cert_file: 'DIR/server.pem', key_file: 'DIR/server.key', ca_file: 'DIR/ca.pem', verify: true }";
    let test = "a_certificate_must_be_trusted_on_both_sides";
    let Some(nats) = Nats::start(test, settings).await else { return };
    let url = format!("tls://localhost:{}/aep.{{type}}", nats.broker.port);
    let tls = |ca: &str, identity: bool| {
        let tls = Tls {
            ca: Some(nats.with(ca)),
            identity: identity.then(|| (nats.with("client.pem"), nats.with("client.key"))),
        };
        |sink: &mut SinkConfig| sink.options.tls = tls
    };
    let certificate = SinkState::Misconfigured(Reason::Certificate);
    drop(Paused::reaches(&url, certificate, tls("other.pem", true)).await);
    drop(Paused::reaches(&url, certificate, tls("ca.pem", false)).await);
    // It comes as far as to learn that there is no stream.
    drop(Paused::reaches(&url, SinkState::Misconfigured(Reason::NotFound), tls("ca.pem", true)).await);
}

#[tokio::test]
async fn a_credentials_file_logs_in() {
    let (operator, account, user) =
        (nkeys::KeyPair::new_operator(), nkeys::KeyPair::new_account(), nkeys::KeyPair::new_user());
    let (operator_key, account_key) = (operator.public_key(), account.public_key());
    let operator_jwt = jwt(&operator, &operator_key, &json!({"type": "operator", "version": 2}));
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1,
        "leaf": -1, "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let account_jwt =
        jwt(&operator, &account_key, &json!({"type": "account", "version": 2, "limits": limits}));
    let claims = json!({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1});
    let user_jwt = jwt(&account, &user.public_key(), &claims);
    let settings = format!(
        "operator: {operator_jwt}\nresolver: MEMORY\nresolver_preload: {{ {account_key}: {account_jwt} }}\n"
    );
    let Some(nats) = Nats::start("a_credentials_file_logs_in", &settings).await else { return };
    let write = |path: &Path, key: &nkeys::KeyPair| {
        let text = format!(
            "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
            key.seed().unwrap()
        );
        std::fs::write(path, text).unwrap();
    };
    let file = nats.with("me.creds");
    let credentials = |sink: &mut SinkConfig| {
        sink.options.own.insert("credentials".to_owned(), file.to_str().unwrap().to_owned());
        sink.options.own.insert("jetstream".to_owned(), "false".to_owned());
    };
    // Another's key, until the file is put right.
    write(&file, &nkeys::KeyPair::new_user());
    let paused =
        Paused::reaches(&nats.url(), SinkState::Misconfigured(Reason::Unauthorized), credentials).await;
    write(&file, &user);
    paused.flows().await;
}

/// A token that `signer` vouches for, as NATS has them.
fn jwt(signer: &nkeys::KeyPair, subject: &str, claims: &Value) -> String {
    let claims = json!({"jti": "x", "iat": 1_700_000_000, "iss": signer.public_key(), "name": "x", "sub": subject, "nats": claims});
    let head = base64url(json!({"typ": "JWT", "alg": "ed25519-nkey"}).to_string().as_bytes());
    let signed = format!("{head}.{}", base64url(claims.to_string().as_bytes()));
    let signature = base64url(&signer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

/// Without padding.
fn base64url(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_usize, |bits, byte| bits << 8 | usize::from(*byte))
            << (8 * (3 - chunk.len()));
        for digit in 0..=chunk.len() {
            out.push(char::from(DIGITS[bits >> (18 - 6 * digit) & 63]));
        }
    }
    out
}
