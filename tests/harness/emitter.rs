//! Emitters that know which of their events were acknowledged, and send the others again until they are.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "every test crate has its own copy and uses its own part of it"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a helper of tests fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};
use tokio_util::sync::CancellationToken;

/// How long an emitter waits before it tries again.
const PAUSE: Duration = Duration::from_millis(20);

/// How events are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One a POST.
    Single,
    /// Several a POST, a line each.
    Batch,
    /// On a WebSocket, several and then a ping: its pong says that what came before it was admitted.
    Socket,
}

/// `(source, session)`.
pub type Lane = (String, String);

/// What was sent and what was acknowledged: of each session, the events from 0 up to a count.
#[derive(Debug, Default)]
pub struct Ledger {
    sent: Mutex<BTreeMap<Lane, u64>>,
    acknowledged: Mutex<BTreeMap<Lane, u64>>,
    total: watch::Sender<u64>,
}

impl Ledger {
    /// Every event that was sent at least once.
    pub fn sent(&self) -> u64 {
        self.sent.lock().values().sum()
    }

    /// How many events of each session are acknowledged.
    pub fn acknowledged(&self) -> BTreeMap<Lane, u64> {
        self.acknowledged.lock().clone()
    }

    /// How many are acknowledged.
    pub fn total(&self) -> u64 {
        *self.total.borrow()
    }

    /// Waits until that many are.
    pub async fn reaches(&self, total: u64) {
        self.total.subscribe().wait_for(|now| *now >= total).await.unwrap();
    }

    fn count(counts: &Mutex<BTreeMap<Lane, u64>>, group: &[Sent]) {
        let mut counts = counts.lock();
        for event in group {
            let count = counts.entry(event.lane.clone()).or_default();
            assert_eq!(*count, event.seq, "events are sent in order");
            *count += 1;
        }
    }
}

#[derive(Debug, Clone)]
struct Sent {
    lane: Lane,
    seq: u64,
    line: String,
}

/// The id of an event.
pub fn id(session: &str, seq: u64) -> String {
    format!("{session}-{seq}")
}

/// An event whose content can be told to be its own.
pub fn event(source: &str, session: &str, seq: u64, words: usize) -> String {
    let (id, pad) = (id(session, seq), format!("{seq:08x}").repeat(words));
    format!(
        r#"{{"aep":"0.1","id":"{id}","type":"tool.completed","time":"2026-07-03T10:00:00Z","source":"{source}","agent":"a","session":"{session}","seq":{seq},"capture":"full","data":{{"status":"success","pad":"{pad}"}}}}"#
    )
}

/// Whether the CloudEvent of such an event has the content it was sent with.
pub fn is_whole(ce: &serde_json::Value) -> bool {
    let (Some(seq), Some(pad), Some(session)) = (
        ce.get("aepsequence").and_then(serde_json::Value::as_u64),
        ce.pointer("/data/pad").and_then(serde_json::Value::as_str),
        ce.get("aepsessionid").and_then(serde_json::Value::as_str),
    ) else {
        return false;
    };
    let word = format!("{seq:08x}");
    ce.get("id").and_then(serde_json::Value::as_str) == Some(&id(session, seq))
        && pad.len() % 8 == 0
        && pad == word.repeat(pad.len() / 8)
}

/// One emitter with sessions of its own.
#[derive(Debug)]
pub struct Emitter {
    way: Way,
    source: String,
    token: String,
    /// Each with the next number.
    sessions: Vec<(String, u64)>,
    rng: fastrand::Rng,
    ledger: Arc<Ledger>,
    client: reqwest::Client,
    socket: Option<(String, WebSocketStream<MaybeTlsStream<TcpStream>>)>,
    pings: u64,
}

/// It wasn't acknowledged.
#[derive(Debug)]
struct Unacknowledged;

impl Emitter {
    pub fn new(
        way: Way,
        source: String,
        sessions: Vec<String>,
        token: &str,
        rng: fastrand::Rng,
        ledger: Arc<Ledger>,
    ) -> Self {
        let sessions = sessions.into_iter().map(|session| (session, 0)).collect();
        let token = token.to_owned();
        // For plain HTTP: one for TLS reads every root certificate first.
        let client = reqwest::Client::builder().tls_certs_only([]).build().unwrap();
        Self { way, source, token, sessions, rng, ledger, client, socket: None, pings: 0 }
    }

    /// Sends until `stop`, to whatever `address` holds; ends when everything it has sent is acknowledged.
    pub async fn run(mut self, mut address: watch::Receiver<String>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let group = self.group();
            Ledger::count(&self.ledger.sent, &group);
            loop {
                let at = address.borrow_and_update().clone();
                let sent = match self.way {
                    Way::Single | Way::Batch => self.post(&at, &group).await,
                    Way::Socket => self.say(at, &group).await,
                };
                match sent {
                    Ok(()) => break,
                    // A new address is tried at once.
                    Err(Unacknowledged) => drop(tokio::time::timeout(PAUSE, address.changed()).await),
                }
            }
            Ledger::count(&self.ledger.acknowledged, &group);
            self.ledger.total.send_modify(|total| *total += u64::try_from(group.len()).unwrap());
        }
    }

    fn group(&mut self) -> Vec<Sent> {
        let size = match self.way {
            Way::Single => 1,
            Way::Batch => self.rng.usize(1..20),
            Way::Socket => self.rng.usize(1..10),
        };
        let mut group = Vec::with_capacity(size);
        for _ in 0..size {
            let at = self.rng.usize(..self.sessions.len());
            let Some((session, next)) = self.sessions.get_mut(at) else { break };
            let words = self.rng.usize(..80);
            let line = event(&self.source, session, *next, words);
            group.push(Sent { lane: (self.source.clone(), session.clone()), seq: *next, line });
            *next += 1;
        }
        group
    }

    async fn post(&self, address: &str, group: &[Sent]) -> Result<(), Unacknowledged> {
        let lines: Vec<&str> = group.iter().map(|event| event.line.as_str()).collect();
        let form = if self.way == Way::Single { "application/json" } else { "application/x-ndjson" };
        let request = self.client.post(format!("http://{address}/events")).bearer_auth(&self.token);
        let request = request.header("aep-version", "0.1").header("content-type", form);
        let response = request.body(lines.join("\n")).send().await.map_err(|_| Unacknowledged)?;
        match response.status().as_u16() {
            202 => Ok(()),
            // A port that was freed may have become somebody else's: the token tells.
            401 | 503 => Err(Unacknowledged),
            status => panic!("{status}: {:?}", response.text().await),
        }
    }

    async fn say(&mut self, address: String, group: &[Sent]) -> Result<(), Unacknowledged> {
        let mut socket = match self.socket.take() {
            Some((at, socket)) if at == address => socket,
            _ => {
                let url = format!("ws://{address}/socket?access_token={}", self.token);
                let connected = tokio_tungstenite::connect_async(url).await;
                let (mut socket, _) = connected.map_err(|_| Unacknowledged)?;
                let hello = Message::text(r#"{"type":"hello","versions":["0.1"]}"#);
                socket.send(hello).await.map_err(|_| Unacknowledged)?;
                socket
            }
        };
        self.pings += 1;
        let ping = format!(r#"{{"type":"ping","t":"group {}"}}"#, self.pings);
        let pong = format!("\"group {}\"", self.pings);
        for text in group.iter().map(|event| event.line.as_str()).chain([ping.as_str()]) {
            socket.feed(Message::text(text)).await.map_err(|_| Unacknowledged)?;
        }
        socket.flush().await.map_err(|_| Unacknowledged)?;
        loop {
            match socket.next().await {
                Some(Ok(Message::Text(text))) if text.contains(&pong) => break,
                Some(Ok(Message::Text(text))) if text.contains(r#""type":"error""#) => panic!("{text}"),
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(Unacknowledged),
                Some(Ok(_)) => {}
            }
        }
        self.socket = Some((address, socket));
        Ok(())
    }
}
