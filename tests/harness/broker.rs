//! A broker from the system's packages as a process of the test, and an export into it.
#![allow(unreachable_pub, reason = "every test crate has this as a module of its own")]
#![allow(dead_code, reason = "each test crate uses its own part of this")]
#![allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of tests fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use aep_sidecar::aep::{Event, Registry};
use aep_sidecar::export::{
    Ends, Export, ExportConfig, ExportError, Feed, FeedError, Metrics, RetryPolicy, SinkConfig, SinkState,
    SinkStatus, Summary, Target,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The name of the one sink.
pub const SINK: &str = "default";
/// The longest that a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program on the PATH; `None`, and a line on stderr naming the test, when it isn't there.
pub fn find(test: &str, program: &str) -> Option<PathBuf> {
    #[allow(clippy::disallowed_methods, reason = "settings.rs reads the sidecar's environment, not a test's")]
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Daemons stand where the path of a plain user doesn't lead.
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let found = folders.map(|folder| folder.join(program)).find(|path| path.is_file());
    if found.is_none() {
        // Past what the test runner captures: a test that shows nothing must say so.
        writeln!(std::io::stderr(), "SKIPPED: {test}: no {program} on the PATH").unwrap();
    }
    found
}

/// A port that nothing listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A broker that ends with this value.
#[derive(Debug)]
pub struct Broker {
    program: PathBuf,
    arguments: Vec<String>,
    pub port: u16,
    child: Option<Child>,
}

impl Broker {
    /// One that listens on `port` once it is started.
    pub fn new(program: PathBuf, port: u16, arguments: Vec<String>) -> Self {
        Self { program, arguments, port, child: None }
    }

    /// Starts it, again where it was killed, and waits until it listens.
    pub async fn start(&mut self) {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().unwrap());
        let port = self.port;
        until("the broker listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()).await;
    }

    /// Ends it as a supervisor does, and waits until it has.
    pub async fn terminate(&mut self) {
        if let Some(child) = &mut self.child {
            let sent = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status().unwrap();
            assert!(sent.success());
            until("the broker ends", || child.try_wait().unwrap().is_some()).await;
        }
        self.child = None;
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until something holds that must come to hold.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        ticks.tick().await;
    }
}

/// The public golden events; the project's own corpus, and a line on stderr, where they aren't.
pub fn golden(test: &str) -> Vec<Event> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let public = root.join("../shared/aep/fixtures/golden/golden.jsonl");
    let text = std::fs::read_to_string(&public).unwrap_or_else(|_| {
        writeln!(std::io::stderr(), "SKIPPED: {test}: no {}: tests/corpus instead", public.display())
            .unwrap();
        std::fs::read_to_string(root.join("tests/corpus/events.jsonl")).unwrap()
    });
    let events: Vec<_> =
        text.lines().filter(|line| !line.is_empty()).map(|l| Event::parse_str(l).unwrap()).collect();
    assert!(!events.is_empty());
    events
}

/// One event of a session.
pub fn event(session: &str, seq: u64) -> Event {
    event_with(session, seq, "")
}

/// One event of a session, with more members.
pub fn event_with(session: &str, seq: u64, members: &str) -> Event {
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}{members}}}"#
    ))
    .unwrap()
}

/// The identifiers of each session's events, in order.
pub fn sessions<'e>(events: impl IntoIterator<Item = &'e Event>) -> BTreeMap<(String, String), Vec<String>> {
    let mut sessions = BTreeMap::<_, Vec<_>>::new();
    for event in events {
        let key = event.session_key();
        sessions
            .entry((key.source.to_owned(), key.session.to_owned()))
            .or_default()
            .push(event.id().to_owned());
    }
    sessions
}

/// An export to one sink that tries again soon.
pub fn config(url: &str, change: impl FnOnce(&mut SinkConfig)) -> ExportConfig {
    let mut config = ExportConfig::new(Target::parse(url).unwrap());
    let sink = &mut config.sinks[0];
    sink.retry = RetryPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(50) };
    change(sink);
    config
}

/// A feed of what is sent to it.
struct Sent(mpsc::Receiver<Vec<Event>>);

impl Feed for Sent {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        Ok(self.0.recv().await)
    }
}

/// An export under way.
#[derive(Debug)]
pub struct Running {
    pub metrics: Metrics,
    status: SinkStatus,
    feed: mpsc::Sender<Vec<Event>>,
    task: JoinSet<Result<Summary, ExportError>>,
}

impl Running {
    pub fn start(config: &ExportConfig) -> Self {
        let metrics = Metrics::default();
        let export = Export::open(config, &Arc::new(Registry::core()), metrics.clone()).unwrap();
        let status = export.statuses().remove(0).1;
        let (feed, events) = mpsc::channel(1);
        let mut task = JoinSet::new();
        task.spawn(export.run_feed(Sent(events), Ends::default()));
        Self { metrics, status, feed, task }
    }

    pub async fn send(&self, events: Vec<Event>) {
        self.feed.send(events).await.unwrap();
    }

    pub fn state(&self) -> SinkState {
        self.status.current()
    }

    pub fn delivered(&self) -> u64 {
        self.metrics.sink(SINK).delivered.get()
    }

    /// Waits until the sink is in that state.
    pub async fn reaches(&self, state: SinkState) {
        let mut seen = BTreeSet::new();
        let reached = async {
            until(&format!("{state:?}"), || {
                seen.insert(format!("{:?}", self.state()));
                self.state() == state
            })
            .await;
        };
        if tokio::time::timeout(PATIENCE / 2, reached).await.is_err() {
            panic!("{state:?} isn't among {seen:?}");
        }
    }

    /// Waits until so many events are delivered.
    pub async fn has_delivered(&self, count: u64) {
        until(&format!("{count} delivered"), || self.delivered() >= count).await;
    }

    /// Ends the feed and waits for the rest to be handled.
    pub async fn finish(self) -> Summary {
        let Self { feed, mut task, .. } = self;
        drop(feed);
        tokio::time::timeout(PATIENCE, task.join_next()).await.unwrap().unwrap().unwrap().unwrap()
    }
}

/// Exports to the end.
pub async fn export(config: &ExportConfig, events: Vec<Event>) -> (Summary, Metrics) {
    let running = Running::start(config);
    let metrics = running.metrics.clone();
    running.send(events).await;
    (running.finish().await, metrics)
}

/// So many delivered, and nothing else.
pub fn delivered(count: usize) -> Summary {
    Summary { delivered: u64::try_from(count).unwrap(), ..Summary::default() }
}

/// Writes, as PEM: `ca.pem` with `server.pem` and `server.key` for localhost and `client.pem` and `client.key`, and
/// `other.pem`, which signed none of them.
pub fn certificates(dir: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
    let write = |name: &str, text: String| std::fs::write(dir.join(name), text).unwrap();
    let authority = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        write(&format!("{name}.pem"), params.self_signed(&key).unwrap().pem());
        Issuer::new(params, key)
    };
    let (ca, _other) = (authority("ca"), authority("other"));
    for (name, host) in [("server", "localhost"), ("client", "client")] {
        let mut params = CertificateParams::new([host.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        write(&format!("{name}.pem"), params.signed_by(&key, &ca).unwrap().pem());
        write(&format!("{name}.key"), key.serialize_pem());
    }
}
