//! A sink that accepts connections and never answers costs neither memory nor connections, however much there is
//! for it: what waits, waits on disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]

#[path = "harness/process.rs"]
mod process;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use process::Sidecar;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

const PATIENCE: Duration = Duration::from_secs(120);

const CONCURRENCY: usize = 4;

/// A server that reads what it gets and says nothing.
struct Silent {
    url: String,
    /// Connections, in all.
    accepted: watch::Receiver<usize>,
    /// The most that were open at one time.
    peak: Arc<AtomicUsize>,
}

impl Silent {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let (count, accepted) = watch::channel(0);
        let (open, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let highest = peak.clone();
        let (tasks, connections) = (TaskTracker::new(), TaskTracker::new());
        tasks.spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let open = open.clone();
                highest.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                connections.spawn(async move {
                    let mut buffer = vec![0; 1 << 16];
                    while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
                    open.fetch_sub(1, Ordering::SeqCst);
                });
                count.send_modify(|count| *count += 1);
            }
        });
        Self { url, accepted, peak }
    }

    /// Waits for so many more connections.
    async fn accepts(&mut self, more: usize) {
        let enough = *self.accepted.borrow() + more;
        let waited = tokio::time::timeout(PATIENCE, self.accepted.wait_for(|count| *count >= enough)).await;
        waited.unwrap_or_else(|_| panic!("not asked {more} times more")).unwrap();
    }
}

/// The resident memory of a process, in bytes.
fn resident(id: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// `count` events of 2 KB in one batch, of 16 sessions.
fn batch(from: usize, count: usize) -> Vec<String> {
    let text = "x".repeat(2_000);
    let line = |n: usize| {
        format!(
            r#"{{"aep":"0.1","id":"e{n}","type":"progress.status","time":"2026-07-03T10:00:00Z","source":"aep://h/agent/a","agent":"a","session":"s{}","seq":{n},"capture":"full","data":{{"text":"{text}"}}}}"#,
            n % 16
        )
    };
    (from..from + count).map(line).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sink_that_never_answers_costs_no_memory_and_no_connections() {
    let mut sink = Silent::start().await;
    let directory = tempfile::tempdir().unwrap();
    let concurrency = CONCURRENCY.to_string();
    let sidecar = Sidecar::start(
        directory.path(),
        &[
            ("CE_SINK", sink.url.as_str()),
            ("CE_CONCURRENCY", &concurrency),
            ("CE_TIMEOUT", "50ms"),
            ("CE_RETRY_INITIAL", "1ms"),
            ("CE_RETRY_MAX", "20ms"),
            ("AEP_BUFFER", "8"),
            ("AEP_WINDOW_BYTES", "4MiB"),
            ("CE_MAX_PENDING_BYTES", "1MiB"),
            ("AEP_DEDUPE", "1000"),
            ("AEP_DRAIN", "100ms"),
        ],
    );
    let process = sidecar.process.id();
    // Buffers have the size that they will have, and the sink is known for what it is.
    for round in 0..20 {
        sidecar.post(&batch(round * 500, 500)).await;
    }
    sink.accepts(3 * CONCURRENCY).await;
    let before = resident(process);
    for round in 20..100 {
        sidecar.post(&batch(round * 500, 500)).await;
    }
    sink.accepts(3 * CONCURRENCY).await;
    let grown = resident(process).saturating_sub(before);
    // 40 000 events of 2 KB came in between.
    assert!(grown < 10_000_000, "{grown} bytes more");
    // One that was hung up on may not be known to be closed yet when the next one comes.
    let peak = sink.peak.load(Ordering::SeqCst);
    assert!(peak <= 2 * CONCURRENCY, "{peak} connections");
}
