//! A relay that does what a test says, byte by byte, and a reader of what a subscription makes of it.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "every test crate has its own copy and uses its own part of it"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of tests fails by panicking"
)]
#![allow(clippy::missing_panics_doc, reason = "a helper of tests fails by panicking")]

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use aep_sidecar::aep::Position;
use aep_sidecar::client::{
    CatchUp, Lost, Metrics, Patience, ResumePoint, Status, StatusHandle, SubscribeConfig, Subscription,
    Update,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// The source of every event here.
pub const SOURCE: &str = "aep://h/agent/a";

/// A listener whose connections are answered by hand.
#[derive(Debug)]
pub struct Fake {
    pub address: SocketAddr,
    listener: TcpListener,
}

/// A request, and the connection that its answer goes to.
#[derive(Debug)]
pub struct Conn {
    pub head: String,
    stream: TcpStream,
    chunked: bool,
}

/// Where a request wants its stream to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Now,
    All,
    /// Session, epoch and seq.
    After(Vec<(String, u64, u64)>),
}

impl Fake {
    pub async fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { address: listener.local_addr().unwrap(), listener }
    }

    /// A configuration that loses no time.
    pub fn config(&self) -> SubscribeConfig {
        config(self.address)
    }

    /// The next request. A connection that is given up before it has one is passed over.
    pub async fn accept(&self) -> Conn {
        loop {
            let (stream, _) = self.listener.accept().await.unwrap();
            if let Some(conn) = Conn::read(stream).await {
                return conn;
            }
        }
    }

    /// The next request, answered with an open stream.
    pub async fn streaming(&self) -> Conn {
        let mut conn = self.accept().await;
        conn.open().await;
        conn
    }
}

/// A configuration that loses no time.
pub fn config(address: SocketAddr) -> SubscribeConfig {
    let mut config = SubscribeConfig::new(format!("http://{address}").parse().unwrap());
    config.patience = Patience { initial: Duration::from_millis(1), max: Duration::from_millis(5) };
    config.catch_up = CatchUp::AtMostEvery(Duration::ZERO);
    config
}

impl Conn {
    async fn read(mut stream: TcpStream) -> Option<Self> {
        stream.set_nodelay(true).ok()?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        Some(Self { head: String::from_utf8(head).unwrap(), stream, chunked: false })
    }

    pub fn parameter(&self, name: &str) -> Option<String> {
        let target = self.head.split(' ').nth(1).unwrap();
        let url = reqwest::Url::parse(&format!("http://h{target}")).unwrap();
        url.query_pairs().find_map(|(known, value)| (known == name).then(|| value.into_owned()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (known, value) = line.split_once(": ")?;
            known.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub fn is_live(&self) -> bool {
        self.parameter("live").is_none()
    }

    pub fn asked(&self) -> Asked {
        match self.parameter("from").as_deref() {
            None => Asked::Now,
            Some("all") => Asked::All,
            Some(json) => {
                let entries: Vec<Value> = serde_json::from_str(json).unwrap();
                let part = |entry: &Value, name| entry[name].as_u64().unwrap();
                Asked::After(
                    entries
                        .iter()
                        .map(|entry| {
                            (
                                entry["session"].as_str().unwrap().to_owned(),
                                part(entry, "epoch"),
                                part(entry, "seq"),
                            )
                        })
                        .collect(),
                )
            }
        }
    }

    /// Opens the stream.
    pub async fn open(&mut self) -> bool {
        self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n").await
    }

    /// Opens the stream in chunks, so that an end that isn't one can be told from one.
    pub async fn open_in_chunks(&mut self) -> bool {
        let head =
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let sent = self.send(head).await;
        self.chunked = true;
        sent
    }

    /// Answers with a status and nothing else.
    pub async fn refuse(mut self, status: u16) {
        self.send(
            format!("HTTP/1.1 {status} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").as_bytes(),
        )
        .await;
    }

    /// Whether the other side still takes it.
    pub async fn send(&mut self, bytes: &[u8]) -> bool {
        if !self.chunked {
            return self.stream.write_all(bytes).await.is_ok();
        }
        let chunk = [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
        self.stream.write_all(&chunk).await.is_ok()
    }

    pub async fn event(&mut self, line: &str) -> bool {
        self.send(format!("data: {line}\n\n").as_bytes()).await
    }

    /// Ends a `live=0` stream.
    pub async fn complete(mut self) {
        self.send(b": replay-complete\n\n").await;
        if self.chunked {
            self.send(b"").await;
        }
    }

    /// Waits until the other side is gone.
    pub async fn closed(mut self) {
        let mut rest = Vec::new();
        // A reset is an end too.
        drop(self.stream.read_to_end(&mut rest).await);
    }
}

/// A subscription and everything that it gave.
#[derive(Debug)]
pub struct Reader {
    pub subscription: Subscription,
    pub status: StatusHandle,
    pub metrics: Metrics,
    /// `session:seq` of each event.
    pub given: Vec<String>,
    pub lost: Vec<Lost>,
}

impl Reader {
    pub fn new(config: &SubscribeConfig, resume: &[(&str, u64)]) -> Self {
        let metrics = Metrics::default();
        let points = resume.iter().map(|(session, seq)| ResumePoint {
            source: SOURCE.into(),
            session: (*session).into(),
            position: Position::new(0, *seq),
        });
        let subscription = Subscription::new(config, points, metrics.clone()).unwrap();
        let status = subscription.status();
        Self { subscription, status, metrics, given: Vec::new(), lost: Vec::new() }
    }

    pub fn record(&mut self, update: Update) {
        match update {
            Update::Events(events) => {
                assert!(!events.is_empty() && events.len() <= 256);
                self.given.extend(events.iter().map(|event| match (event.session(), event.seq()) {
                    (Some(session), Some(seq)) => format!("{session}:{seq}"),
                    (session, _) => format!("{}:{}", session.unwrap_or_default(), event.id()),
                }));
            }
            Update::Lost(lost) => self.lost.push(lost),
        }
    }

    /// Reads while the script is played.
    pub async fn during<T>(&mut self, script: impl Future<Output = T>) -> T {
        tokio::pin!(script);
        loop {
            tokio::select! {
                biased;
                outcome = &mut script => return outcome,
                update = self.subscription.next() => self.record(update),
            }
        }
    }

    /// Reads until that many events were given in all.
    pub async fn until(&mut self, events: usize) {
        while self.given.len() < events {
            let update = self.subscription.next().await;
            self.record(update);
        }
    }

    /// Reads until that many losses were told in all.
    pub async fn until_lost(&mut self, losses: usize) {
        while self.lost.len() < losses {
            let update = self.subscription.next().await;
            self.record(update);
        }
    }

    /// Reads until the status is that.
    pub async fn until_status(&mut self, status: Status) {
        let mut handle = self.status.clone();
        self.during(async move {
            while handle.current() != status {
                handle.changed().await.unwrap();
            }
        })
        .await;
    }
}
