//! Whatever has happened to the files of the state directory, the binary starts: what isn't in the damaged places is
//! delivered, what is missing is said, and it ends in order.
//!
//! Twenty drawn damages by default. `DAMAGE_SEEDS=200 cargo test --test damage` draws two hundred; `DAMAGE_SEED`,
//! which a failure names, sets the first of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/emitter.rs"]
mod emitter;
#[path = "harness/process.rs"]
mod process;
#[path = "harness/sink.rs"]
mod sink;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use emitter::{event, id, is_whole};
use process::Sidecar;
use sink::{Answer, Key, Sink, disorder};

const PATIENCE: Duration = Duration::from_secs(60);

const SOURCE: &str = "aep://h/agent/a";

const SESSIONS: usize = 6;

/// How many bytes before an event's own its record may begin, and a file's heading before its first record.
const HEADING: usize = 64;

/// A number from the environment.
fn variable(name: &str) -> Option<u64> {
    let text = std::env::var_os(name)?.into_string().unwrap();
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

fn start(directory: &Path, sink: &Sink) -> Sidecar {
    let variables = [
        ("AEP_STATE_DIR", "state"),
        ("AEP_ADMIN_ADDR", "127.0.0.1:0"),
        // Segments of 32 KiB: several.
        ("AEP_SPOOL_MAX_BYTES", "256KiB"),
        ("AEP_SPOOL_KEEP_BYTES", "64KiB"),
        ("AEP_DRAIN", "2s"),
        ("CE_SINK", sink.url.as_str()),
        ("CE_RETRY_INITIAL", "5ms"),
        ("CE_RETRY_MAX", "50ms"),
    ];
    Sidecar::start(directory, &variables)
}

fn session(n: usize) -> String {
    format!("s{n}")
}

/// A state directory with events that the sink hasn't taken.
struct Leftover {
    directory: tempfile::TempDir,
    /// What is undelivered, with the bytes as they were posted.
    undelivered: BTreeMap<Key, String>,
    /// The number after the last event of each session.
    next: u64,
}

enum End {
    Stopped,
    Killed,
}

async fn leftover(end: End) -> Leftover {
    let directory = tempfile::tempdir().unwrap();
    let sink = Sink::start().await;
    let mut sidecar = start(directory.path(), &sink);
    let round = |seq: u64| -> Vec<String> {
        (0..SESSIONS).map(|n| event(SOURCE, &session(n), seq, 20 + n * 10)).collect()
    };
    let (delivered, refused, next) = (8, 9, 32);
    for seq in 0..delivered {
        sidecar.post(&round(seq)).await;
    }
    let taken = |seqs: Range<u64>| {
        seqs.flat_map(|seq| (0..SESSIONS).map(move |n| (SOURCE.to_owned(), id(&session(n), seq))))
    };
    assert_eq!(sink.has(PATIENCE, taken(0..delivered)).await, BTreeSet::new());
    // One round of dead letters, so that there is a file of them.
    sink.behaves(|_| Answer::Refuse(400));
    sidecar.post(&round(delivered)).await;
    sink.refuses(SESSIONS).await;
    sink.behaves(|_| Answer::Refuse(503));
    let mut undelivered = BTreeMap::new();
    for seq in refused..next {
        let lines = round(seq);
        sidecar.post(&lines).await;
        undelivered.extend(taken(seq..seq + 1).zip(lines));
    }
    match end {
        End::Stopped => drop(sidecar.stop()),
        End::Killed => sidecar.process.kill(),
    }
    Leftover { directory, undelivered, next }
}

/// The files of a folder and its folders, but the lock.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else if entry.file_name() != "lock" {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Where `text` stands in `bytes`.
fn place(bytes: &[u8], text: &str) -> Option<Range<usize>> {
    memchr::memmem::find(bytes, text.as_bytes()).map(|start| start..start + text.len())
}

/// Damages files, and tells how and which of `events` are hit.
fn damage(
    state: &Path,
    events: &BTreeMap<Key, String>,
    rng: &mut fastrand::Rng,
) -> (Vec<String>, BTreeSet<Key>) {
    let mut said = Vec::new();
    let mut hit = BTreeSet::new();
    for _ in 0..rng.usize(1..4) {
        let files = files(state);
        let path = rng.choice(&files).unwrap();
        let mut bytes = fs::read(path).unwrap();
        if bytes.is_empty() {
            continue;
        }
        let places: Vec<(&Key, Range<usize>)> =
            events.iter().filter_map(|(key, text)| Some((key, place(&bytes, text)?))).collect();
        let at = rng.usize(..bytes.len());
        let hurt = match rng.u32(..4) {
            0 => {
                // A cut right after a record leaves nothing that tells of it.
                let at = if places.iter().any(|(_, place)| place.end == at) { at + 1 } else { at };
                bytes.truncate(at);
                at..usize::MAX
            }
            1 => {
                let end = (at + rng.usize(1..2000)).min(bytes.len());
                bytes[at..end].fill(0);
                at..end
            }
            2 => {
                let end = (at + rng.usize(1..200)).min(bytes.len());
                bytes[at..end].fill_with(|| rng.u8(..));
                at..end
            }
            _ => {
                bytes[at] ^= 1 << rng.u32(..8);
                at..at + 1
            }
        };
        let name = path.strip_prefix(state).unwrap().display();
        said.push(format!("{name}, of {} bytes: {hurt:?}", fs::metadata(path).unwrap().len()));
        let touched =
            |place: &Range<usize>| hurt.start < place.end && place.start.saturating_sub(HEADING) < hurt.end;
        hit.extend(places.iter().filter(|(_, place)| touched(place)).map(|(key, _)| (*key).clone()));
        fs::write(path, bytes).unwrap();
    }
    (said, hit)
}

/// Whether a line says that something isn't as it was left.
fn tells_of_loss(line: &str) -> bool {
    let line = line.to_lowercase();
    let loud = ["\"level\":\"warn\"", "\"level\":\"error\""].iter().any(|level| line.contains(level));
    loud && ["damage", "cut", "lost", "torn"].iter().any(|word| line.contains(word))
}

/// Damages a copy and starts on it: how many events are missing, or what is wrong with that.
async fn recovers(leftover: &Leftover, seed: u64) -> Result<usize, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    copy(&leftover.directory.path().join("state"), &state);
    let (done, hit) = damage(&state, &leftover.undelivered, &mut rng);

    let sink = Sink::start().await;
    let mut sidecar = start(directory.path(), &sink);
    let ready = sidecar.client.get(sidecar.admin("/readyz")).send().await.unwrap();
    let ready = (ready.status().as_u16(), ready.text().await.unwrap());
    // Within a session events go out in order: after this one's last, nothing is left of it.
    let last: Vec<String> = (0..SESSIONS).map(|n| event(SOURCE, &session(n), leftover.next, 1)).collect();
    sidecar.post(&last).await;
    let last = (0..SESSIONS).map(|n| (SOURCE.to_owned(), id(&session(n), leftover.next)));
    let stuck = sink.has(PATIENCE, last).await;
    sidecar.process.terminate();
    let exit = sidecar.process.wait().code();
    let log = sidecar.process.told_in_all();

    let arrivals = sink.arrivals();
    let arrived: BTreeSet<Key> = arrivals.iter().map(sink::Arrival::key).collect();
    let missing: BTreeSet<Key> =
        leftover.undelivered.keys().filter(|key| !arrived.contains(*key)).cloned().collect();
    let unhurt: Vec<&Key> = missing.difference(&hit).collect();
    let altered = arrivals.iter().filter(|arrival| !is_whole(&arrival.event)).count();
    let disorder = disorder(&arrivals);
    let mut wrong = Vec::new();
    if ready.0 != 200 {
        wrong.push(format!("it isn't ready: {}", ready.1));
    }
    if !stuck.is_empty() {
        wrong.push(format!("what comes in afterwards stays: {stuck:?}"));
    }
    if exit != Some(0) {
        wrong.push(format!("it exits with {exit:?}"));
    }
    if !unhurt.is_empty() {
        wrong.push(format!("{} are missing, though not damaged: {unhurt:?}", unhurt.len()));
    }
    if !missing.is_empty() && !log.iter().any(|line| tells_of_loss(line)) {
        wrong.push(format!("{} are missing and nothing says so", missing.len()));
    }
    if altered > 0 || !disorder.is_empty() {
        wrong.push(format!("{altered} are altered, out of order are {disorder:?}"));
    }
    if wrong.is_empty() {
        return Ok(missing.len());
    }
    Err(format!("DAMAGE_SEED={seed}, {done:#?}: {wrong:#?}; log: {log:#?}"))
}

#[tokio::test]
#[allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
async fn damaged_files_cost_what_is_in_the_damaged_places_and_it_is_said() {
    let seeds = variable("DAMAGE_SEEDS").unwrap_or(20);
    let first = variable("DAMAGE_SEED").unwrap_or_else(|| fastrand::u64(..u64::MAX / 2));
    let leftovers = [leftover(End::Stopped).await, leftover(End::Killed).await];
    let (mut missing, mut wrong) = (Vec::new(), Vec::new());
    for seed in first..first + seeds {
        let of = usize::try_from(seed % 2).unwrap();
        match recovers(&leftovers[of], seed).await {
            Ok(count) => missing.push(count),
            Err(why) => wrong.push(why),
        }
    }
    let hurt = missing.iter().filter(|missing| **missing > 0).count();
    let (last, all) = (first + seeds - 1, missing.iter().sum::<usize>());
    writeln!(
        std::io::stderr(),
        "damage: seeds {first} to {last}: events are missing after {hurt} of {seeds}, {all} in all; {} are wrong",
        wrong.len()
    )
    .unwrap();
    assert!(wrong.is_empty(), "{} of {seeds} are wrong: {}", wrong.len(), wrong.join("\n"));
    assert!(seeds < 20 || hurt > 0, "twenty damages hit no event: the test damages nothing");
}

/// Without any damage, nothing is missing and nothing is said.
async fn undamaged(end: End) {
    let leftover = leftover(end).await;
    let sink = Sink::start().await;
    let sidecar = start(leftover.directory.path(), &sink);
    let last: Vec<String> = (0..SESSIONS).map(|n| event(SOURCE, &session(n), leftover.next, 1)).collect();
    sidecar.post(&last).await;
    // Within a session events go out in order: after this one's last, nothing is left of it.
    let last = (0..SESSIONS).map(|n| (SOURCE.to_owned(), id(&session(n), leftover.next)));
    assert_eq!(sink.has(PATIENCE, last).await, BTreeSet::new());
    let arrived: BTreeSet<Key> = sink.arrivals().iter().map(sink::Arrival::key).collect();
    let missing = leftover.undelivered.keys().filter(|key| !arrived.contains(*key)).count();
    let told = sidecar.process.told();
    assert_eq!(missing, 0, "of {}: {told:#?}", leftover.undelivered.len());
    assert!(!told.iter().any(|line| tells_of_loss(line)), "{told:#?}");
    sidecar.stop();
}

#[tokio::test]
async fn what_a_kill_has_left_is_delivered_whole_and_without_a_word() {
    undamaged(End::Killed).await;
}

#[tokio::test]
async fn what_a_stop_has_left_is_delivered_whole_and_without_a_word() {
    undamaged(End::Stopped).await;
}
