//! A relay on a free port, and clients that show what is on the wire.
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

use std::net::SocketAddr;
use std::sync::Arc;

use aep_sidecar::aep::Registry;
use aep_sidecar::relay::http::{Ends, Relay, serve};
use aep_sidecar::relay::metrics::Code;
use aep_sidecar::relay::{Access, Hub, Keep, Limits, Metrics, Token};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A relay that serves on loopback.
#[derive(Debug)]
pub struct Server {
    pub address: SocketAddr,
    pub hub: Hub,
    pub stop: CancellationToken,
    pub tracker: TaskTracker,
    pub client: reqwest::Client,
}

impl Server {
    pub async fn start(limits: Limits, token: Option<&str>) -> Self {
        Self::start_with(limits, Access::new(token.map(|token| Token::new(token).unwrap()))).await
    }

    pub async fn start_with(limits: Limits, access: Access) -> Self {
        let hub = Hub::new(limits, Arc::new(Registry::core()), Metrics::default());
        Self::serve(hub, limits, access).await
    }

    /// One that keeps events in `keep` first.
    pub async fn start_keeping(limits: Limits, keep: Arc<dyn Keep>) -> Self {
        let hub = Hub::keeping(limits, Arc::new(Registry::core()), Metrics::default(), keep);
        Self::serve(hub, limits, Access::new(None)).await
    }

    async fn serve(hub: Hub, limits: Limits, access: Access) -> Self {
        // Any provider will do: the tests speak plain HTTP.
        let _installed = rustls::crypto::ring::default_provider().install_default();
        let tracker = TaskTracker::new();
        let stop = CancellationToken::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let relay = Relay::new(hub.clone(), limits, access, tracker.clone());
        let ends = Ends { orderly: stop.clone(), ..Ends::default() };
        tracker.spawn(serve(relay, listener, None, tracker.clone(), ends));
        Self { address, hub, stop, tracker, client: reqwest::Client::new() }
    }

    pub async fn open() -> Self {
        Self::start(Limits::default(), None).await
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn post(&self, content_type: &str, body: impl Into<reqwest::Body>) -> reqwest::RequestBuilder {
        self.client
            .post(self.url("/events"))
            .header("aep-version", "0.1")
            .header("content-type", content_type)
            .body(body)
    }

    /// Posts lines and expects them to be taken.
    pub async fn ingest(&self, lines: &[String]) {
        let response = self.post("application/x-ndjson", lines.join("\n")).send().await.unwrap();
        assert_eq!(response.status(), 202, "{}", response.text().await.unwrap());
    }

    /// Every held event, in the order of a replay.
    pub async fn held(&self) -> Vec<String> {
        let url = self.url("/stream?from=all&live=0");
        let text = self.client.get(url).send().await.unwrap().text().await.unwrap();
        messages(&text).into_iter().map(|message| message.data).collect()
    }

    /// How many refusals of that code were counted.
    pub fn refused(&self, code: &'static str) -> u64 {
        self.hub.metrics().refusals.get_or_create(&Code { code }).get()
    }

    /// Sends bytes as they are and reads until the other side closes.
    pub async fn raw(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    pub async fn stream(&self, query: &str) -> Stream {
        Stream::of(self.client.get(self.url(&format!("/stream{query}"))).send().await.unwrap())
    }
}

/// One SSE message.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Message {
    pub event: String,
    pub data: String,
    pub id: Option<String>,
}

/// An open event stream.
#[derive(Debug)]
pub struct Stream {
    pub response: reqwest::Response,
    text: String,
}

impl Stream {
    pub fn of(response: reqwest::Response) -> Self {
        Self { response, text: String::new() }
    }

    /// The next block of lines up to a blank one; `None` at the end.
    pub async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_owned();
                self.text = rest.to_owned();
                return Some(block);
            }
            let chunk = self.response.chunk().await.unwrap()?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// The next message; comments are passed over.
    pub async fn message(&mut self) -> Option<Message> {
        loop {
            let block = self.block().await?;
            if let Some(message) = messages(&format!("{block}\n\n")).pop() {
                return Some(message);
            }
        }
    }

    /// The next comment, which must come before any message.
    pub async fn comment(&mut self) -> Option<String> {
        let block = self.block().await?;
        Some(block.strip_prefix(": ").unwrap_or_else(|| panic!("not a comment: {block}")).to_owned())
    }
}

/// The messages in a stream's text, read as a browser reads them.
pub fn messages(text: &str) -> Vec<Message> {
    let mut found = Vec::new();
    let mut message = Message::default();
    let mut data = Vec::new();
    for line in text.split('\n') {
        if line.is_empty() {
            if !data.is_empty() {
                message.data = data.join("\n");
                found.push(std::mem::take(&mut message));
                data.clear();
            }
            continue;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut message.event),
            "data" => data.push(value.to_owned()),
            "id" => message.id = Some(value.to_owned()),
            _ => {}
        }
    }
    found
}

/// The comments in a stream's text.
pub fn comments(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix(": ")).map(str::to_owned).collect()
}

/// An event of a session.
pub fn event(session: &str, seq: u64) -> String {
    event_with(session, seq, "")
}

/// An event of a session with more members.
pub fn event_with(session: &str, seq: u64, members: &str) -> String {
    let session = serde_json::to_string(session).unwrap();
    format!(
        r#"{{"aep":"0.1","id":"{seq}","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h/agent/a","agent":"a","session":{session},"seq":{seq}{members}}}"#
    )
}
