//! What the export promises, against a receiver that answers as badly as it likes.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::future::Future;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aep_sidecar::aep::cloudevents::CloudEvent;
use aep_sidecar::aep::{Event, Position, Registry};
use aep_sidecar::export::feed::file::FileFeed;
use aep_sidecar::export::sink::StdoutSink;
use aep_sidecar::export::{
    AnySink, Ends, Export, ExportConfig, ExportError, Feed, FeedError, Metrics, Mode, Reason, RetryPolicy,
    SinkConfig, SinkState, SpoolConfig, Summary, Target, retry,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The name of the one sink.
const SINK: &str = "default";

/// What the receiver does with a request.
enum Answer {
    Status(u16),
    /// Exactly these bytes, then the connection is closed.
    Raw(String),
    /// The head of a 200, then a body without end.
    Endless,
    /// No byte, and the connection is closed.
    Close,
    /// No byte, and the connection stays open.
    Never,
}

fn with_header(status: u16, header: &str) -> Answer {
    Answer::Raw(format!("HTTP/1.1 {status} X\r\n{header}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"))
}

#[derive(Clone)]
struct Request {
    head: String,
    body: String,
}

impl Request {
    fn id(&self) -> String {
        let event: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        event["id"].as_str().unwrap().to_owned()
    }
}

/// An HTTP server in raw bytes; it ends with this value.
struct Receiver {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    connections: Arc<AtomicUsize>,
    _server: JoinSet<()>,
}

impl Receiver {
    /// Answers the request number `n`, counted from 0, by `script(n, request)`.
    async fn new(script: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap(), script)
    }

    fn at(listener: TcpListener, script: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static) -> Self {
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, script) = (Arc::clone(&requests), Arc::new(script));
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                connections.spawn(serve(stream, Arc::clone(&log), Arc::clone(&script)));
            }
        });
        Self { address, requests, connections, _server: server }
    }

    fn target(&self) -> Target {
        Target::parse(&format!("http://{}/events", self.address)).unwrap()
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn ids(&self) -> Vec<String> {
        self.requests().iter().map(Request::id).collect()
    }
}

async fn serve<S: Fn(usize, &Request) -> Answer>(
    mut stream: TcpStream,
    log: Arc<Mutex<Vec<Request>>>,
    script: Arc<S>,
) {
    while let Some(request) = read(&mut stream).await {
        let answer = {
            let mut log = log.lock().unwrap();
            log.push(request.clone());
            script(log.len() - 1, &request)
        };
        let written = match answer {
            Answer::Status(status) => {
                let head = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
                stream.write_all(head.as_bytes()).await
            }
            Answer::Raw(text) => {
                stream.write_all(text.as_bytes()).await.unwrap();
                return;
            }
            Answer::Endless => {
                stream.write_all(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
                while stream.write_all(b"5\r\nhello\r\n").await.is_ok() {}
                return;
            }
            Answer::Close => return,
            Answer::Never => std::future::pending().await,
        };
        if written.is_err() {
            return;
        }
    }
}

async fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).await.ok()?;
    Some(Request { head, body: String::from_utf8(body).unwrap() })
}

fn event(session: &str, seq: u64) -> Event {
    event_with(session, seq, "")
}

fn event_with(session: &str, seq: u64, members: &str) -> Event {
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}{members}}}"#
    ))
    .unwrap()
}

fn events(session: &str, count: u64) -> Vec<Event> {
    (0..count).map(|seq| event(session, seq)).collect()
}

/// A feed of batches. After them it ends, or stays silent.
struct Batches {
    batches: VecDeque<Vec<Event>>,
    then_silent: bool,
}

impl Batches {
    fn of(events: Vec<Event>) -> Self {
        Self { batches: [events].into(), then_silent: false }
    }

    fn open(events: Vec<Event>) -> Self {
        Self { batches: [events].into(), then_silent: true }
    }
}

impl Feed for Batches {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        match self.batches.pop_front() {
            None if self.then_silent => std::future::pending().await,
            batch => Ok(batch),
        }
    }
}

fn config(target: Target) -> ExportConfig {
    with_sink(target, |sink| {
        sink.retry = RetryPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    })
}

fn with_sink(target: Target, change: impl FnOnce(&mut SinkConfig)) -> ExportConfig {
    let mut config = ExportConfig::new(target);
    change(&mut config.sinks[0]);
    config
}

/// Keeps its state there, and more than it would in memory.
fn at(dir: &Path, config: ExportConfig) -> ExportConfig {
    ExportConfig { state_dir: Some(dir.to_owned()), ..config }
}

fn open(config: &ExportConfig, metrics: &Metrics) -> Result<Export, ExportError> {
    Export::open(config, &Arc::new(Registry::core()), metrics.clone())
}

/// Opens it after one that was dropped, of which a write may be under way: the lock ends with it.
async fn reopen(config: &ExportConfig) -> Export {
    loop {
        match open(config, &Metrics::default()) {
            Err(ExportError::StateDir(_)) => tokio::task::yield_now().await,
            opened => return opened.unwrap(),
        }
    }
}

fn open_with(config: &ExportConfig, sink: AnySink) -> Export {
    Export::open_with(config, vec![sink], &Arc::new(Registry::core()), Metrics::default()).unwrap()
}

/// Exports to the end.
async fn export(config: &ExportConfig, events: Vec<Event>) -> (Summary, Metrics) {
    let metrics = Metrics::default();
    let export = open(config, &metrics).unwrap();
    let summary = export.run_feed(Batches::of(events), Ends::default()).await.unwrap();
    (summary, metrics)
}

fn delivered(count: u64) -> Summary {
    Summary { delivered: count, ..Summary::default() }
}

/// Lets other tasks run until something holds.
async fn eventually(mut holds: impl FnMut() -> bool) {
    while !holds() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_event_is_one_structured_post() {
    let receiver = Receiver::new(|_, _| Answer::Status(202)).await;
    let target = Target::parse(&format!("http://me:pass@{}/in?key=k", receiver.address)).unwrap();
    let (summary, metrics) = export(&config(target), events("s", 3)).await;
    assert_eq!((summary, metrics.sink(SINK).delivered.get()), (delivered(3), 3));
    assert_eq!(receiver.ids(), ["s-0", "s-1", "s-2"]);
    let Request { head, body } = receiver.requests().remove(0);
    assert!(head.starts_with("post /in?key=k http/1.1\r\n"), "{head}");
    assert!(head.contains("\r\ncontent-type: application/cloudevents+json; charset=utf-8\r\n"), "{head}");
    assert!(head.contains("\r\nauthorization: basic bwu6cgfzcw==\r\n"), "{head}");
    assert!(
        head.contains(concat!("\r\nuser-agent: aep-sidecar/", env!("CARGO_PKG_VERSION"), "\r\n")),
        "{head}"
    );
    assert_eq!(body.as_bytes(), CloudEvent::of(&event("s", 0)).unwrap().structured());
}

#[tokio::test]
async fn every_attempt_has_the_same_bytes() {
    let receiver =
        Receiver::new(|n, _| Answer::Status([500, 502, 503, 504].get(n).copied().unwrap_or(200))).await;
    let (summary, metrics) = export(&config(receiver.target()), events("s", 1)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::Status5xx)), (delivered(1), 4));
    let bodies: Vec<_> = receiver.requests().into_iter().map(|request| request.body).collect();
    assert_eq!(bodies.len(), 5);
    assert!(bodies.iter().all(|body| *body == bodies[0]));
}

#[tokio::test]
async fn retry_after_is_waited_for() {
    for dated in [false, true] {
        let receiver = Receiver::new(move |n, _| match n {
            0 if dated => {
                // A date has whole seconds, so that this is a wait of one to two.
                let date = retry::wall_clock() + Duration::from_secs(2);
                with_header(429, &format!("retry-after: {}", httpdate::fmt_http_date(date)))
            }
            0 => with_header(429, "retry-after: 1"),
            _ => Answer::Status(200),
        })
        .await;
        let start = Instant::now();
        let (summary, metrics) = export(&config(receiver.target()), events("s", 2)).await;
        assert_eq!((summary, metrics.retries(SINK, Reason::Throttled)), (delivered(2), 1));
        assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_senseless_retry_after_is_ignored() {
    let values = ["-1", "soon", "99999999999999999999", "Fri, 03 Jul 1970 10:00:00 GMT"];
    let receiver = Receiver::new(move |n, _| match values.get(n) {
        Some(value) => with_header(503, &format!("retry-after: {value}")),
        None => Answer::Status(200),
    })
    .await;
    let (summary, _) = export(&config(receiver.target()), events("s", 1)).await;
    assert_eq!((summary, receiver.requests().len()), (delivered(1), 5));
}

#[tokio::test]
async fn a_missing_path_pauses_the_sink_and_loses_nothing() {
    let receiver = Receiver::new(|n, _| Answer::Status([404, 403, 401].get(n).copied().unwrap_or(200))).await;
    let sessions = ["a", "b", "c"].map(|session| events(session, 4)).concat();
    let mut one_at_a_time = config(receiver.target());
    one_at_a_time.sinks[0].concurrency = NonZeroUsize::MIN;
    let (summary, metrics) = export(&one_at_a_time, sessions).await;
    assert_eq!(summary, delivered(12));
    assert_eq!(
        (metrics.retries(SINK, Reason::NotFound), metrics.retries(SINK, Reason::Unauthorized)),
        (1, 2)
    );
    assert_eq!(&receiver.ids()[..3], ["a-0", "b-0", "c-0"], "lanes take turns probing");
}

#[tokio::test]
async fn a_refused_event_is_a_dead_letter_and_the_next_ones_flow() {
    let dir = tempfile::tempdir().unwrap();
    let receiver = Receiver::new(|_, request| match request.id().as_str() {
        "s-1" => Answer::Raw("HTTP/1.1 400 X\r\ncontent-length: 16\r\n\r\n<h1>no\r\n\x1b\0</h1>".to_owned()),
        _ => Answer::Status(200),
    })
    .await;
    let mut feed = events("s", 3);
    feed.insert(2, event_with("s", 7, r#","dataschema":"x""#));
    let config = at(dir.path(), config(receiver.target()));
    let (summary, metrics) = export(&config, feed.clone()).await;
    assert_eq!(summary, Summary { delivered: 2, dead_letters: 2, ..Summary::default() });
    assert_eq!(
        (metrics.dead_letters(SINK, Reason::Status4xx), metrics.dead_letters(SINK, Reason::Mapping)),
        (1, 1)
    );
    assert_eq!(receiver.ids(), ["s-0", "s-1", "s-2"]);
    let text = std::fs::read_to_string(dir.path().join("dead-letters/default.jsonl")).unwrap();
    let letters: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(letters.len(), 2);
    assert_eq!(letters[0]["event"]["id"], "s-1");
    assert_eq!(letters[0]["status"], 400);
    assert_eq!(letters[0]["detail"], "<h1>no    </h1>");
    assert_eq!(letters[0]["sink"], receiver.target().to_string());
    assert_eq!(letters[1]["reason"], "mapping");
    // Handled is handled: nothing is sent or recorded again.
    let (summary, _) = export(&config, feed).await;
    assert_eq!(summary, Summary { duplicates: 4, ..Summary::default() });
}

#[tokio::test]
async fn a_connection_closed_before_the_whole_head_is_tried_again() {
    let receiver = Receiver::new(|n, _| match n {
        0 => Answer::Raw("HTTP/1.1 200 OK\r\ncontent-le".to_owned()),
        1 => Answer::Close,
        _ => Answer::Status(200),
    })
    .await;
    let (summary, metrics) = export(&config(receiver.target()), events("s", 1)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::ConnectionLost)), (delivered(1), 2));
}

#[tokio::test]
async fn a_status_is_the_acknowledgement_whatever_becomes_of_the_body() {
    let receiver = Receiver::new(|n, _| match n {
        0 => Answer::Raw("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc".to_owned()),
        1 => Answer::Endless,
        _ => Answer::Raw("HTTP/1.1 200 OK\r\n\r\nabc".to_owned()),
    })
    .await;
    let (summary, _) = export(&config(receiver.target()), events("s", 3)).await;
    assert_eq!((summary, receiver.ids().len()), (delivered(3), 3));
}

#[tokio::test]
async fn a_stale_connection_costs_no_retry() {
    let receiver = Receiver::new(|n, _| match n {
        1 => Answer::Close,
        _ => Answer::Status(200),
    })
    .await;
    let (summary, metrics) = export(&config(receiver.target()), events("s", 2)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::ConnectionLost)), (delivered(2), 0));
}

#[tokio::test]
async fn a_receiver_that_never_answers_is_timed_out() {
    let receiver = Receiver::new(|n, _| if n == 0 { Answer::Never } else { Answer::Status(200) }).await;
    let mut config = config(receiver.target());
    config.sinks[0].options.times.attempt = Duration::from_millis(50);
    let (summary, metrics) = export(&config, events("s", 1)).await;
    assert_eq!(summary, delivered(1));
    assert!(metrics.retries(SINK, Reason::Timeout) >= 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let elsewhere = Receiver::new(|_, _| Answer::Status(200)).await;
    let location = elsewhere.address;
    let receiver = Receiver::new(move |n, _| match n {
        0 => with_header(302, &format!("location: http://{location}/")),
        1 => with_header(307, &format!("location: http://{location}/")),
        _ => Answer::Status(200),
    })
    .await;
    let (summary, metrics) = export(&config(receiver.target()), events("s", 1)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::Redirect)), (delivered(1), 2));
    assert!(elsewhere.requests().is_empty());
}

#[tokio::test]
async fn a_sink_that_was_down_gets_everything_in_order() {
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let metrics = Metrics::default();
    let target = Target::parse(&format!("http://{address}/")).unwrap();
    let export = open(&config(target), &metrics).unwrap();
    let (_, status) = export.statuses().remove(0);
    let sessions = ["a", "b", "c"].map(|session| events(session, 20)).concat();
    let mut running = JoinSet::new();
    running.spawn(export.run_feed(Batches::of(sessions), Ends::default()));
    eventually(|| metrics.retries(SINK, Reason::Refused) >= 5).await;
    assert_eq!(status.current(), SinkState::Paused(Reason::Refused));
    let receiver = Receiver::at(TcpListener::bind(address).await.unwrap(), |_, _| Answer::Status(200));
    assert_eq!(running.join_next().await.unwrap().unwrap().unwrap(), delivered(60));
    assert_eq!(status.current(), SinkState::Flowing);
    for session in ["a", "b", "c"] {
        let ids: Vec<_> = receiver.ids().into_iter().filter(|id| id.starts_with(session)).collect();
        assert_eq!(ids, (0..20).map(|seq| format!("{session}-{seq}")).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_poisoned_session_holds_up_no_other() {
    let stop = CancellationToken::new();
    let token = stop.clone();
    let receiver = Receiver::new(move |_, request| match request.id().as_str() {
        id if id.starts_with("poison") => Answer::Status(500),
        id => {
            if id == "well-49" {
                token.cancel();
            }
            Answer::Status(200)
        }
    })
    .await;
    let mut feed = events("poison", 3);
    feed.extend(events("well", 50));
    let export = open(&config(receiver.target()), &Metrics::default()).unwrap();
    let summary = export.run_feed(Batches::open(feed), Ends::giving_up_at(stop)).await.unwrap();
    assert_eq!(summary, Summary { delivered: 50, unhandled: 3, ..Summary::default() });
    assert!(!receiver.ids().contains(&"poison-1".to_owned()), "order is kept");
}

/// Runs until the receiver has seen the event `last`, which it never answers.
async fn run_until(dir: &Path, feed: Vec<Event>, last: &'static str) -> (Summary, Vec<String>) {
    let stop = CancellationToken::new();
    let token = stop.clone();
    let receiver = Receiver::new(move |_, request| {
        if request.id() == last {
            token.cancel();
            return Answer::Never;
        }
        Answer::Status(200)
    })
    .await;
    let config = ExportConfig { drain: Duration::from_millis(10), ..at(dir, config(receiver.target())) };
    let export = open(&config, &Metrics::default()).unwrap();
    let summary = export.run_feed(Batches::open(feed), Ends::giving_up_at(stop)).await.unwrap();
    (summary, receiver.ids())
}

#[tokio::test]
async fn after_a_restart_only_what_was_not_acknowledged_goes_out() {
    let dir = tempfile::tempdir().unwrap();
    let (summary, _) = run_until(dir.path(), events("s", 3), "s-2").await;
    assert_eq!(summary, Summary { delivered: 2, unhandled: 1, ..Summary::default() });

    let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
    let config = at(dir.path(), config(receiver.target()));
    let opened = open(&config, &Metrics::default()).unwrap();
    let [saved] = &opened.positions()[..] else { unreachable!("one session") };
    assert_eq!((&*saved.source, &*saved.session, saved.position), ("aep://h", "s", Position::new(0, 2)));
    drop(opened);
    let (summary, _) = export(&config, events("s", 4)).await;
    assert_eq!(summary, Summary { delivered: 2, duplicates: 3, ..Summary::default() });
    assert_eq!(receiver.ids(), ["s-2", "s-3"]);

    // A late event below the saved position that was never delivered.
    let late = Event::parse_str(&event("s", 0).as_str().replace("s-0", "late")).unwrap();
    let (summary, _) = export(&config, vec![late, event("s", 3)]).await;
    assert_eq!(summary, Summary { delivered: 1, duplicates: 1, ..Summary::default() });
    assert_eq!(receiver.ids().last().unwrap(), "late");
}

#[tokio::test]
async fn a_killed_export_redelivers_what_was_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let receiver =
        Receiver::new(|_, r| if r.id() == "s-2" { Answer::Never } else { Answer::Status(200) }).await;
    let running = open(&at(dir.path(), config(receiver.target())), &Metrics::default()).unwrap();
    tokio::select! {
        _ = running.run_feed(Batches::of(events("s", 3)), Ends::default()) => unreachable!("s-2 hangs"),
        () = eventually(|| receiver.ids().len() == 3) => {}
    }
    let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
    let state = at(dir.path(), config(receiver.target()));
    // Nothing is fed again: what was kept is delivered.
    let run = reopen(&state).await.run_feed(Batches::of(Vec::new()), Ends::default());
    let summary = run.await.unwrap();
    assert!((1..=3).contains(&summary.delivered), "{summary:?}");
    assert_eq!(receiver.ids().last().unwrap(), "s-2");
}

#[tokio::test]
async fn stopping_with_the_sink_down_is_quick_and_makes_no_dead_letter() {
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (metrics, stop) = (Metrics::default(), CancellationToken::new());
    let target = Target::parse(&format!("http://{address}/")).unwrap();
    let hour = Duration::from_secs(3600);
    let config = ExportConfig {
        drain: hour,
        ..with_sink(target, |sink| sink.retry = RetryPolicy { initial: hour, max: hour })
    };
    let export = open(&config, &metrics).unwrap();
    let stopper = async {
        eventually(|| metrics.retries(SINK, Reason::Refused) >= 1).await;
        stop.cancel();
    };
    let (summary, ()) =
        tokio::join!(export.run_feed(Batches::of(events("s", 5)), Ends::giving_up_at(stop.clone())), stopper);
    assert_eq!(summary.unwrap(), Summary { unhandled: 5, ..Summary::default() });
}

#[tokio::test]
async fn stopping_delivers_what_is_pending_while_the_sink_works() {
    let stop = CancellationToken::new();
    let token = stop.clone();
    let receiver = Receiver::new(move |_, _| {
        token.cancel();
        Answer::Status(200)
    })
    .await;
    let export = open(&config(receiver.target()), &Metrics::default()).unwrap();
    let summary = export.run_feed(Batches::open(events("s", 20)), Ends::giving_up_at(stop)).await.unwrap();
    assert_eq!(summary, delivered(20));
}

#[tokio::test]
async fn speaking_tls_to_a_plain_server_is_a_tls_failure() {
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = Target::parse(&format!("https://{}/", plain.local_addr().unwrap())).unwrap();
    let mut server = JoinSet::new();
    server.spawn(async move {
        while let Ok((mut stream, _)) = plain.accept().await {
            drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await);
            drop(stream.read_to_end(&mut Vec::new()).await);
        }
    });
    let (metrics, stop) = (Metrics::default(), CancellationToken::new());
    let Ok(export) = open(&config(target), &metrics) else {
        return; // a machine without any trusted root certificate
    };
    let stopper = async {
        eventually(|| metrics.retries(SINK, Reason::Tls) >= 2).await;
        stop.cancel();
    };
    let (summary, ()) =
        tokio::join!(export.run_feed(Batches::of(events("s", 2)), Ends::giving_up_at(stop.clone())), stopper);
    assert_eq!(summary.unwrap(), Summary { unhandled: 2, ..Summary::default() });
}

#[tokio::test]
async fn under_any_mix_of_failures_nothing_is_lost_and_order_is_kept() {
    for seed in 0..8 {
        let random = Mutex::new(fastrand::Rng::with_seed(seed));
        let receiver = Receiver::new(move |_, request| {
            let mut random = random.lock().unwrap();
            if request.id().ends_with('7') {
                return Answer::Status(422);
            }
            match random.u8(0..12) {
                0 => Answer::Status(500),
                1 => Answer::Status(404),
                2 => Answer::Status(429),
                3 => Answer::Close,
                4 => Answer::Raw("HTTP/1.1 200 O".to_owned()),
                5 => Answer::Raw("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n".to_owned()),
                _ => Answer::Status(200),
            }
        })
        .await;
        let dir = tempfile::tempdir().unwrap();
        let sessions = ["a", "b", "c", "d"].map(|session| events(session, 20)).concat();
        let state = at(dir.path(), config(receiver.target()));
        let (summary, _) = export(&state, sessions.clone()).await;
        assert_eq!(summary, Summary { delivered: 72, dead_letters: 8, ..Summary::default() }, "seed {seed}");
        for session in ["a", "b", "c", "d"] {
            let mut ids: Vec<_> = receiver.ids().into_iter().filter(|id| id.starts_with(session)).collect();
            ids.dedup();
            let expected: Vec<_> = (0..20).map(|seq| format!("{session}-{seq}")).collect();
            assert_eq!(ids, expected, "seed {seed}");
        }
        let (summary, _) = export(&state, sessions).await;
        assert_eq!(summary, Summary { duplicates: 80, ..Summary::default() }, "seed {seed}");
    }
}

#[tokio::test]
async fn a_duplicate_is_delivered_once_pending_or_not() {
    let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
    let twice = [events("s", 3), events("s", 3)].concat();
    let metrics = Metrics::default();
    let export = open(&config(receiver.target()), &metrics).unwrap();
    let feed = Batches { batches: [twice.clone(), twice].into(), then_silent: false };
    let summary = export.run_feed(feed, Ends::default()).await.unwrap();
    assert_eq!(summary, Summary { delivered: 3, duplicates: 9, ..Summary::default() });
    assert_eq!(metrics.spool.duplicates.get(), 9);
}

/// A feed that checks how far ahead of the sink it is read.
struct Watched {
    next: u64,
    bound: u64,
    metrics: Metrics,
}

impl Feed for Watched {
    fn next(&mut self) -> impl Future<Output = Result<Option<Vec<Event>>, FeedError>> + Send {
        assert!(self.next < self.metrics.sink(SINK).delivered.get() + self.bound, "read beyond the bound");
        self.next += 1;
        let batch = (self.next <= 100).then(|| vec![event(&(self.next % 7).to_string(), self.next)]);
        async move { Ok(batch) }
    }
}

#[tokio::test]
async fn a_full_pipeline_stops_reading_the_feed() {
    let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
    let metrics = Metrics::default();
    let mut config = config(receiver.target());
    config.spool = SpoolConfig { max_bytes: 5 * 1024, keep_bytes: 0, ..config.spool };
    let export = open(&config, &metrics).unwrap();
    // An event takes more than 150 bytes.
    let feed = Watched { next: 0, bound: 35, metrics: metrics.clone() };
    let summary = export.run_feed(feed, Ends::default()).await.unwrap();
    assert_eq!(summary, delivered(100));
    let sink = metrics.sink(SINK);
    assert_eq!((sink.pending_events.get(), sink.pending_bytes.get()), (0, 0));
}

#[tokio::test]
async fn a_file_goes_to_standard_output_in_its_own_order() {
    let mut text = String::new();
    for seq in 0..50 {
        writeln!(text, "{}\nnot an event", event(&(seq % 3).to_string(), seq).as_str()).unwrap();
    }
    let feed = FileFeed::new(std::io::Cursor::new(text), NonZeroUsize::new(1 << 20).unwrap());
    let progress = feed.progress();
    let (mut reader, writer) = tokio::io::duplex(1 << 20);
    let export = open_with(&config(Target::Stdout), AnySink::Stdout(StdoutSink::new(writer)));
    assert_eq!(export.run_feed(feed, Ends::default()).await.unwrap(), delivered(50));
    let mut lines = String::new();
    reader.read_to_string(&mut lines).await.unwrap();
    let expected: Vec<_> = (0..50).map(|seq| format!("{}-{seq}", seq % 3)).collect();
    let ids: Vec<_> =
        lines.lines().map(|body| Request { head: String::new(), body: body.to_owned() }.id()).collect();
    assert_eq!(ids, expected);
    assert_eq!((progress.events(), progress.bad_lines()), (50, 50));
}

#[tokio::test]
async fn a_closed_standard_output_ends_the_export() {
    let (reader, writer) = tokio::io::duplex(64);
    drop(reader);
    let export = open_with(&config(Target::Stdout), AnySink::Stdout(StdoutSink::new(writer)));
    let error = export.run_feed(Batches::open(events("s", 2)), Ends::default()).await.unwrap_err();
    let ExportError::Closed { reason: Reason::BrokenPipe, summary } = error else { unreachable!("{error}") };
    assert_eq!(summary, Summary { unhandled: 2, ..Summary::default() });
}

#[tokio::test]
async fn a_state_directory_serves_one_export_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = at(dir.path(), config(Target::Stdout));
    let _first = open(&config, &Metrics::default()).unwrap();
    let error = open(&config, &Metrics::default()).unwrap_err();
    assert!(error.to_string().contains(&*dir.path().to_string_lossy()), "{error}");
    assert!(error.to_string().ends_with("is in use by another process"), "{error}");
}

/// The ids in a batch.
fn batch(request: &Request) -> Vec<String> {
    let events: Vec<serde_json::Value> = serde_json::from_str(&request.body).unwrap();
    events.iter().map(|event| event["id"].as_str().unwrap().to_owned()).collect()
}

fn batches(target: Target, batch: usize) -> ExportConfig {
    let mut config = config(target);
    config.sinks[0].options.mode = Mode::Batch;
    config.sinks[0].batch = NonZeroUsize::new(batch);
    config.sinks[0].linger = Duration::from_secs(3600);
    config
}

#[tokio::test]
async fn events_go_in_batches_each_session_in_order() {
    let receiver = Receiver::new(|n, _| Answer::Status(if n % 5 == 1 { 503 } else { 200 })).await;
    let sessions = ["a", "b", "c"].map(|session| events(session, 30)).concat();
    let (summary, _) = export(&batches(receiver.target(), 8), sessions).await;
    assert_eq!(summary, delivered(90));
    let mut ids = Vec::new();
    for (n, request) in receiver.requests().into_iter().enumerate() {
        assert!(
            request.head.contains("\r\ncontent-type: application/cloudevents-batch+json; charset=utf-8\r\n")
        );
        assert!(batch(&request).len() <= 8);
        if n % 5 != 1 {
            ids.extend(batch(&request));
        }
    }
    for session in ["a", "b", "c"] {
        let of_session: Vec<_> = ids.iter().filter(|id| id.starts_with(session)).collect();
        assert_eq!(of_session.len(), 30);
        assert!(of_session.iter().enumerate().all(|(seq, id)| **id == format!("{session}-{seq}")), "{ids:?}");
    }
}

#[tokio::test]
async fn a_batch_that_is_too_large_is_halved_and_an_event_that_is_becomes_a_dead_letter() {
    let receiver = Receiver::new(|_, request| match request.body.len() {
        0..=1500 => Answer::Status(200),
        _ => Answer::Status(413),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let mut feed = events("s", 20);
    feed.insert(10, event_with("s", 100, &format!(r#","data":{{"p":"{}"}}"#, "x".repeat(2000))));
    let (summary, metrics) = export(&at(dir.path(), batches(receiver.target(), 16)), feed).await;
    assert_eq!(summary, Summary { delivered: 20, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 1);
    assert!(metrics.sink(SINK).batches_split.get() >= 2);
    let taken = receiver.requests().into_iter().filter(|request| request.body.len() <= 1500);
    let ids: Vec<_> = taken.flat_map(|request| batch(&request)).collect();
    assert_eq!(ids, (0..20).map(|seq| format!("s-{seq}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_poisoned_event_costs_its_batch_nothing() {
    let receiver = Receiver::new(|_, request| {
        Answer::Status(if batch(request).contains(&"s-13".to_owned()) { 422 } else { 200 })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (summary, _) = export(&at(dir.path(), batches(receiver.target(), 32)), events("s", 32)).await;
    assert_eq!(summary, Summary { delivered: 31, dead_letters: 1, ..Summary::default() });
    let text = std::fs::read_to_string(dir.path().join("dead-letters/default.jsonl")).unwrap();
    assert!(text.contains(r#""id":"s-13""#) && text.lines().count() == 1);
}

#[tokio::test]
async fn dead_letters_can_go_to_another_sink() {
    let letters = Receiver::new(|n, _| Answer::Status(if n < 2 { 500 } else { 200 })).await;
    let receiver =
        Receiver::new(|_, request| Answer::Status(if request.id() == "s-1" { 400 } else { 200 })).await;
    let mut config = config(receiver.target());
    config.sinks[0].dead_letter_sink = Some(letters.target());
    let (summary, metrics) = export(&config, events("s", 3)).await;
    assert_eq!(summary, Summary { delivered: 2, dead_letters: 1, ..Summary::default() });
    assert_eq!(
        metrics.retries(SINK, Reason::DeadLetterStore),
        2,
        "the event stays until its letter is taken"
    );
    let letter: serde_json::Value = serde_json::from_str(&letters.requests()[2].body).unwrap();
    assert_eq!((&letter["id"], &letter["deadlettersink"]), (&"s-1".into(), &"default".into()));
    assert_eq!(
        (&letter["deadletterreason"], &letter["deadletterstatus"]),
        (&"status-4xx".into(), &400.into())
    );
    assert_eq!(receiver.ids().last().unwrap(), "s-2");
}

#[tokio::test]
async fn what_the_dead_letter_sink_refuses_too_is_kept_in_a_file() {
    let letters =
        Receiver::new(|_, request| Answer::Status(if request.id() == "s-1" { 422 } else { 200 })).await;
    let receiver =
        Receiver::new(|_, request| Answer::Status(if request.id() == "s-0" { 200 } else { 400 })).await;
    let dir = tempfile::tempdir().unwrap();
    let mut config = at(dir.path(), config(receiver.target()));
    config.sinks[0].dead_letter_sink = Some(letters.target());
    let mut feed = events("s", 3);
    // What can't be mapped for the one can't be for the other.
    feed.push(event_with("s", 7, r#","dataschema":"x""#));
    let (summary, _) = export(&config, feed).await;
    assert_eq!(summary, Summary { delivered: 1, dead_letters: 3, ..Summary::default() });
    assert_eq!(letters.ids(), ["s-1", "s-2"]);
    let text = std::fs::read_to_string(dir.path().join("dead-letters/default.jsonl")).unwrap();
    let kept: Vec<_> = text.lines().collect();
    let of = |n: usize, id: &str| kept[n].contains(&format!(r#""id":"{id}""#));
    assert!(kept.len() == 2 && of(0, "s-1") && of(1, "s-7"), "{kept:?}");
}

#[tokio::test]
async fn an_export_that_never_ran_gives_nothing_up() {
    let dir = tempfile::tempdir().unwrap();
    let dead = Target::parse("http://127.0.0.1:1/").unwrap();
    let mut config = at(dir.path(), config(dead));
    config.spool = SpoolConfig { max_bytes: 256 << 10, keep_bytes: 0, ..config.spool };
    let filled = open(&config, &Metrics::default()).unwrap();
    // Several segments.
    let kept = events("s", 900);
    for events in kept.chunks(90) {
        filled.intake().keep(events).await.unwrap();
    }
    drop(filled);
    for _ in 0..2 {
        let again = reopen(&config).await;
        assert_eq!(again.intake().keep(&kept[..1]).await.unwrap().duplicates, 1);
        drop(again);
    }
    let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
    config.sinks[0].target = receiver.target();
    let run = reopen(&config).await.run_feed(Batches::of(Vec::new()), Ends::default());
    assert_eq!(run.await.unwrap().delivered, 900);
}

#[tokio::test]
async fn an_old_connection_is_not_used_again() {
    for (age, connections) in [(Duration::from_secs(3600), 1), (Duration::ZERO, 3)] {
        let receiver = Receiver::new(|_, _| Answer::Status(200)).await;
        let mut config = config(receiver.target());
        config.sinks[0].options.times.connection = age;
        let (summary, _) = export(&config, events("s", 3)).await;
        assert_eq!((summary, receiver.connections()), (delivered(3), connections));
    }
}
