//! A full disk, a full spool and a folder that can't be written to: events are refused with 503 and nothing that was
//! accepted is lost, readers and probes are served meanwhile, and it all goes on by itself once there is room.
//!
//! The disks are file systems of their own, which takes the right to mount.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/emitter.rs"]
mod emitter;
#[path = "harness/process.rs"]
mod process;
#[path = "harness/sink.rs"]
mod sink;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use emitter::{event, id};
use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use process::Sidecar;
use sink::{Answer, Key, Sink, disorder, repeats};
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(60);

/// How long is waited before something is tried again.
const PAUSE: Duration = Duration::from_millis(50);

const SOURCE: &str = "aep://h/agent/a";

/// A place in the tree that something is mounted on, until it is dropped.
#[derive(Debug)]
struct Mount(PathBuf);

impl Mount {
    /// Mounts with `mount`'s own arguments; `None`, and a line on stderr, where that isn't allowed.
    fn new(test: &str, arguments: &[&str], at: &Path) -> Option<Self> {
        mount(test, arguments, at).then(|| Self(at.to_owned()))
    }
}

#[allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
fn mount(test: &str, arguments: &[&str], at: &Path) -> bool {
    let why = match Command::new("mount").args(arguments).arg(at).output() {
        Ok(Output { status, .. }) if status.success() => return true,
        Ok(Output { stderr, .. }) => String::from_utf8_lossy(&stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    writeln!(std::io::stderr(), "SKIPPED: {test}: nothing can be mounted: {why}").unwrap();
    false
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Files that a killed process still holds don't keep it.
        let _unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A disk of 4 MiB.
struct Disk {
    // Unmounted before its place is removed.
    _mount: Mount,
    place: tempfile::TempDir,
    filler: Option<File>,
}

impl Disk {
    fn new(test: &str) -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let mount = Mount::new(test, &["-t", "tmpfs", "-o", "size=4m", "tmpfs"], place.path())?;
        Some(Self { _mount: mount, place, filler: None })
    }

    fn filler(&self) -> PathBuf {
        self.place.path().join("filler")
    }

    /// Takes all the space that is left.
    fn fill(&mut self) {
        let path = self.filler();
        let file = self.filler.get_or_insert_with(|| File::create(path).unwrap());
        loop {
            match file.write(&[1; 4096]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Gives it back.
    fn free(&mut self) {
        self.filler = None;
        std::fs::remove_file(self.filler()).unwrap();
    }
}

/// Posts numbered events of one session, and knows which were accepted.
#[derive(Debug, Default)]
struct Poster {
    next: u64,
    accepted: BTreeSet<Key>,
}

impl Poster {
    /// Posts the next event: whether it is accepted. A refusal must say when to try again.
    async fn post(&mut self, sidecar: &Sidecar) -> bool {
        let response = sidecar.try_post(&[event(SOURCE, "s", self.next, 50)]).await.unwrap();
        match response.status().as_u16() {
            202 => {
                self.accepted.insert((SOURCE.to_owned(), id("s", self.next)));
                self.next += 1;
                true
            }
            503 => {
                let after = response.headers().get("retry-after").map(|after| after.to_str().unwrap());
                let seconds = after.and_then(|after| after.parse::<u64>().ok());
                assert!(
                    seconds.is_some_and(|seconds| seconds <= 600),
                    "a refusal says when to try again: {after:?}"
                );
                false
            }
            status => panic!("{status}: {:?}", response.text().await),
        }
    }

    /// Posts `count` events, all of which must be accepted.
    async fn all(&mut self, sidecar: &Sidecar, count: usize) {
        for n in 0..count {
            assert!(self.post(sidecar).await, "event {n} of {count} is refused");
        }
    }

    /// Tries until one event is accepted.
    async fn accepted(&mut self, sidecar: &Sidecar) {
        let accepted = async {
            while !self.post(sidecar).await {
                tokio::time::sleep(PAUSE).await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, accepted).await;
        assert!(in_time.is_ok(), "with room again, events are still refused: {:#?}", sidecar.process.told());
    }
}

fn start(state: &Path, sink: &Sink, more: &[(&str, &str)]) -> Sidecar {
    let fixed = [
        ("AEP_STATE_DIR", state.to_str().unwrap()),
        ("AEP_ADMIN_ADDR", "127.0.0.1:0"),
        ("AEP_DRAIN", "10s"),
        ("CE_SINK", sink.url.as_str()),
        ("CE_RETRY_INITIAL", "5ms"),
        ("CE_RETRY_MAX", "50ms"),
    ];
    Sidecar::start(state.parent().unwrap(), &[&fixed, more].concat())
}

/// What `/readyz` answers.
async fn readiness(sidecar: &Sidecar) -> (u16, String) {
    let response = sidecar.client.get(sidecar.admin("/readyz")).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn becomes_ready(sidecar: &Sidecar) {
    let ready = async {
        while readiness(sidecar).await.0 != 200 {
            tokio::time::sleep(PAUSE).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, ready).await.is_ok(), "{:?}", readiness(sidecar).await);
}

/// The ids of the history.
async fn history(sidecar: &Sidecar) -> BTreeSet<Key> {
    let stream = sidecar.client.get(sidecar.url("/stream?from=all&live=0")).send().await.unwrap();
    assert_eq!(stream.status(), 200);
    let text = stream.text().await.unwrap();
    assert!(text.contains(": replay-complete"), "{text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    events.map(|event| (SOURCE.to_owned(), event["id"].as_str().unwrap().to_owned())).collect()
}

/// What must hold while events are refused: probes and readers are served, readers see what was accepted and
/// nothing else, and the sidecar says that it isn't ready and why.
async fn refuses_in_order(sidecar: &Sidecar, accepted: &BTreeSet<Key>) {
    let (status, reasons) = readiness(sidecar).await;
    assert_eq!(status, 503, "{reasons}");
    let reasons: serde_json::Value = serde_json::from_str(&reasons).unwrap();
    assert!(reasons.to_string().to_lowercase().contains("spool"), "{reasons}");
    let health = sidecar.client.get(sidecar.url("/healthz")).send().await.unwrap();
    assert_eq!(health.status(), 200);
    let live = sidecar.client.get(sidecar.admin("/livez")).send().await.unwrap();
    assert_eq!(live.status(), 200);
    assert_eq!(&history(sidecar).await, accepted);
}

/// Reads the stream until the event with that id.
async fn reads(stream: &mut reqwest::Response, id: &str) {
    let mut text = String::new();
    let read = async {
        while !text.contains(&format!("\"id\":\"{id}\"")) {
            text.push_str(std::str::from_utf8(&stream.chunk().await.unwrap().unwrap()).unwrap());
        }
    };
    tokio::time::timeout(PATIENCE, read).await.unwrap_or_else(|_| panic!("{id} is never read"));
}

/// Everything that was accepted reaches the sink, once and in order.
async fn arrives_once(sink: &Sink, accepted: &BTreeSet<Key>) {
    let missing = sink.has(PATIENCE, accepted.iter().cloned()).await;
    assert!(missing.is_empty(), "{} of {} are lost: {missing:?}", missing.len(), accepted.len());
    let arrivals = sink.arrivals();
    assert_eq!(repeats(&arrivals), Vec::<Key>::new());
    assert_eq!(disorder(&arrivals), Vec::<String>::new());
}

/// Fills the disk under a sidecar that takes events, until it refuses them.
async fn fill(disk: &mut Disk, poster: &mut Poster, sidecar: &Sidecar) {
    for _ in 0..1000 {
        disk.fill();
        if !poster.post(sidecar).await {
            return;
        }
    }
    panic!("a full disk refuses nothing");
}

#[tokio::test]
async fn a_full_disk_refuses_events_until_there_is_room_and_loses_none() {
    let Some(mut disk) = Disk::new("a_full_disk_refuses_events") else { return };
    let sink = Sink::start().await;
    let sidecar = start(&disk.place.path().join("state"), &sink, &[]);
    let mut stream = sidecar.client.get(sidecar.url("/stream")).send().await.unwrap();
    let mut poster = Poster::default();
    poster.all(&sidecar, 100).await;
    assert_eq!(readiness(&sidecar).await.0, 200);
    for round in 0..3 {
        fill(&mut disk, &mut poster, &sidecar).await;
        refuses_in_order(&sidecar, &poster.accepted).await;
        disk.free();
        poster.accepted(&sidecar).await;
        becomes_ready(&sidecar).await;
        poster.all(&sidecar, 50 * (round + 1)).await;
        reads(&mut stream, &id("s", poster.next - 1)).await;
    }
    arrives_once(&sink, &poster.accepted).await;
    // And the next process finds nothing to do again.
    sidecar.stop();
    let sidecar = start(&disk.place.path().join("state"), &sink, &[]);
    poster.all(&sidecar, 10).await;
    arrives_once(&sink, &poster.accepted).await;
    sidecar.stop();
}

#[tokio::test]
async fn a_kill_on_a_full_disk_loses_nothing() {
    let Some(mut disk) = Disk::new("a_kill_on_a_full_disk") else { return };
    let state = disk.place.path().join("state");
    let sink = Sink::start().await;
    let mut sidecar = start(&state, &sink, &[]);
    let mut poster = Poster::default();
    poster.all(&sidecar, 50).await;
    arrives_once(&sink, &poster.accepted).await;
    // What is accepted from here on is nowhere but in the spool.
    sink.behaves(|_| Answer::Refuse(503));
    poster.all(&sidecar, 200).await;
    for _ in 0..3 {
        fill(&mut disk, &mut poster, &sidecar).await;
        sidecar.process.kill();
        sink.killed().await;
        sidecar = start(&state, &sink, &[]);
        // Whatever it makes of the space that its start has freed: it tells the truth.
        fill(&mut disk, &mut poster, &sidecar).await;
        refuses_in_order(&sidecar, &poster.accepted).await;
        disk.free();
        poster.accepted(&sidecar).await;
        poster.all(&sidecar, 20).await;
    }
    sink.behaves(|_| Answer::Take);
    let missing = sink.has(PATIENCE, poster.accepted.iter().cloned()).await;
    assert!(missing.is_empty(), "{} of {} are lost: {missing:?}", missing.len(), poster.accepted.len());
    let arrivals = sink.arrivals();
    assert_eq!(disorder(&arrivals), Vec::<String>::new());
    // The sink took nothing around the kills. Of what it had taken before, a few may not have been noted yet.
    let (repeats, before) = (repeats(&arrivals), 50);
    assert!(repeats.len() <= 16, "{repeats:?}");
    assert!(
        repeats.iter().all(|(_, repeat)| (before - 16..before).any(|n| *repeat == id("s", n))),
        "{repeats:?}"
    );
    becomes_ready(&sidecar).await;
    sidecar.stop();
}

fn size(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).unwrap();
    files.filter_map(|file| file.unwrap().metadata().ok()).map(|file| file.len()).sum()
}

#[tokio::test]
async fn a_full_spool_refuses_events_and_reads_no_socket_until_the_sink_returns() {
    const BOUND: u64 = 256 << 10;
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let sink = Sink::start().await;
    sink.behaves(|_| Answer::Refuse(503));
    let bound = BOUND.to_string();
    let sidecar = start(&state, &sink, &[("AEP_SPOOL_MAX_BYTES", &bound), ("AEP_SPOOL_KEEP_BYTES", "32KiB")]);
    let socket = format!("ws://{}/socket", sidecar.address);
    let (mut socket, _) = tokio_tungstenite::connect_async(socket).await.unwrap();
    socket.send(Message::text(r#"{"type":"hello","versions":["0.1"]}"#)).await.unwrap();
    assert!(matches!(socket.next().await, Some(Ok(Message::Text(hello))) if hello.contains("hello")));
    let mut poster = Poster::default();
    for _ in 0..2 {
        let before = poster.next;
        while poster.post(&sidecar).await {
            assert!(size(&state.join("spool")) <= BOUND, "the bound holds");
            assert!(poster.next - before < 1000, "the bound refuses nothing");
        }
        refuses_in_order(&sidecar, &poster.accepted).await;
        // On the socket an event waits instead: it is neither refused nor acknowledged.
        let (waits, number) = (format!("w-{before}"), usize::try_from(before).unwrap());
        let line = event(SOURCE, &waits, 0, 50);
        socket.send(Message::text(line)).await.unwrap();
        socket.send(Message::text(format!(r#"{{"type":"ping","t":"after {number}"}}"#))).await.unwrap();
        for _ in 0..5 {
            assert!(!poster.post(&sidecar).await, "the spool is still full");
            assert!(socket.next().now_or_never().is_none(), "an event that isn't kept isn't acknowledged");
        }
        let taken = sink.taken();
        sink.behaves(|_| Answer::Take);
        let pong = tokio::time::timeout(PATIENCE, socket.next()).await;
        let pong =
            pong.unwrap_or_else(|_| panic!("the socket is never read again: {:#?}", sidecar.process.told()));
        assert!(
            matches!(&pong, Some(Ok(Message::Text(pong))) if pong.contains(&format!("after {number}"))),
            "{pong:?}"
        );
        poster.accepted.insert((SOURCE.to_owned(), id(&waits, 0)));
        poster.accepted(&sidecar).await;
        assert!(sink.until(PATIENCE, |arrivals| arrivals.len() > taken).await);
        arrives_once(&sink, &poster.accepted).await;
        becomes_ready(&sidecar).await;
        sink.behaves(|_| Answer::Refuse(503));
    }
    sink.behaves(|_| Answer::Take);
    sidecar.stop();
}

#[tokio::test]
async fn a_read_only_spool_folder_refuses_events_until_it_is_writable() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let spool = state.join("spool");
    let sink = Sink::start().await;
    // Small segments, so that a new one is soon to be begun.
    let variables = [("AEP_SPOOL_MAX_BYTES", "256KiB"), ("AEP_SPOOL_KEEP_BYTES", "64KiB")];
    let sidecar = start(&state, &sink, &variables);
    let mut poster = Poster::default();
    poster.all(&sidecar, 20).await;
    for _ in 0..2 {
        assert!(spool.is_dir(), "the folder that a mount goes over");
        // The folder over itself: files that are open stay writable, as they do when a disk goes read-only late.
        let test = "a_read_only_spool_folder_refuses_events";
        let Some(over) = Mount::new(test, &["--bind", spool.to_str().unwrap()], &spool) else { return };
        if !mount(test, &["-o", "remount,bind,ro"], &spool) {
            return;
        }
        let before = poster.next;
        while poster.post(&sidecar).await {
            assert!(poster.next - before < 1000, "nothing is refused");
        }
        refuses_in_order(&sidecar, &poster.accepted).await;
        drop(over);
        poster.accepted(&sidecar).await;
        becomes_ready(&sidecar).await;
        poster.all(&sidecar, 50).await;
    }
    arrives_once(&sink, &poster.accepted).await;
    sidecar.stop();
}
