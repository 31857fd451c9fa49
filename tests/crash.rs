//! The binary under load is killed again and again while its sink fails at random: nothing that it acknowledged is
//! lost, no session's order is broken, and nothing comes twice but what was under way at a kill or what the sink
//! itself left without an answer.
//!
//! Ten kills by default. `CRASH_KILLS=100 cargo test --test crash` kills a hundred times; `CRASH_SEED`, which every
//! run prints, draws the same load and the same kills again (the machine still has its own part in the timing).
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/emitter.rs"]
mod emitter;
#[path = "harness/process.rs"]
mod process;
#[path = "harness/sink.rs"]
mod sink;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use emitter::{Emitter, Ledger, Way, id, is_whole};
use process::Sidecar;
use sink::{Answer, Arrival, Outcome, Sink};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Deliveries under way at one time: `CE_CONCURRENCY`.
const UNDER_WAY: usize = 16;

/// Emitters, each with three sessions.
const EMITTERS: usize = 8;

/// How long something that must happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is done to a sidecar.
#[derive(Debug)]
struct Plan {
    kills: usize,
    seed: u64,
    /// What an acknowledged event is said to survive; drawn anew for each life.
    syncs: &'static [&'static str],
    /// How long the last of the events may take to arrive.
    patience: Duration,
}

/// What came of it.
#[derive(Debug)]
struct Figures {
    seed: u64,
    kills: usize,
    posted: u64,
    acknowledged: u64,
    /// Different events that arrived.
    delivered: usize,
    /// Acknowledged events that never arrived.
    lost: Vec<String>,
    /// First arrivals against the order of their session.
    disorder: Vec<String>,
    /// Events that arrived with another content than they were sent with.
    altered: Vec<String>,
    /// Repeats of events that the sink took without an answer.
    unanswered: usize,
    /// How often it did that.
    withheld: usize,
    /// Repeats of events under way at a kill, for each kill.
    at_kills: BTreeMap<usize, usize>,
    /// Repeats of other events.
    unexplained: Vec<String>,
    exit: Option<i32>,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kills, at_kills) = (self.kills, self.at_kills.values().sum::<usize>());
        write!(
            f,
            "seed {}: {kills} kills, {} posted, {} acknowledged, {} delivered, {} lost, {} out of order, {} altered, {} duplicates ({at_kills} at kills, at most {} at one; {} left unanswered by the sink; {} unexplained), {} allowed",
            self.seed,
            self.posted,
            self.acknowledged,
            self.delivered,
            self.lost.len(),
            self.disorder.len(),
            self.altered.len(),
            at_kills + self.unanswered + self.unexplained.len(),
            self.at_kills.values().max().unwrap_or(&0),
            self.unanswered,
            self.unexplained.len(),
            kills * UNDER_WAY + self.withheld,
        )
    }
}

impl Figures {
    #[allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
    fn show(&self) {
        writeln!(std::io::stderr(), "crash: {self}").unwrap();
    }
}

/// A number from the environment.
fn variable(name: &str) -> Option<u64> {
    let text = std::env::var_os(name)?.into_string().unwrap();
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text:?}")))
}

/// How the sink behaves during one life: mostly well, badly, or hardly at all.
fn mood(mut rng: fastrand::Rng) -> impl FnMut(&serde_json::Value) -> Answer + Send {
    let failing = *rng.choice(&[2, 15, 60]).unwrap();
    move |_| {
        if rng.u32(..100) >= failing {
            return Answer::Take;
        }
        match rng.u32(..6) {
            0 => Answer::Refuse(500),
            1 => Answer::Refuse(503),
            2 => Answer::Refuse(429),
            3 => Answer::TakeAndReset,
            _ => Answer::TakeAfter(Duration::from_millis(rng.u64(1..40))),
        }
    }
}

async fn campaign(plan: Plan) -> Figures {
    let mut rng = fastrand::Rng::with_seed(plan.seed);
    let directory = tempfile::tempdir().unwrap();
    let sink = Sink::start().await;
    let token = format!("{:032x}", rng.u128(..));
    let mut sidecar = start(directory.path(), &sink, &token, rng.choice(plan.syncs).unwrap());
    let (address, current) = watch::channel(sidecar.address.clone());
    let (ledger, stop) = (Arc::new(Ledger::default()), CancellationToken::new());
    let mut emitters = JoinSet::new();
    for n in 0..EMITTERS {
        let way = [Way::Single, Way::Batch, Way::Socket][n % 3];
        // Some sessions of different emitters share their name.
        let sessions = [n, n + EMITTERS, n + 1].map(|session| format!("s{session}")).to_vec();
        let source = format!("aep://h/agent/e{n}");
        let emitter = Emitter::new(way, source, sessions, &token, rng.fork(), Arc::clone(&ledger));
        emitters.spawn(emitter.run(current.clone(), stop.clone()));
    }
    for _ in 0..plan.kills {
        sink.behaves(mood(rng.fork()));
        if rng.u32(..10) < 7 {
            let acknowledged = ledger.total() + rng.u64(..200);
            happens("acknowledgements", ledger.reaches(acknowledged)).await;
        } else {
            let taken = sink.taken() + rng.usize(..60);
            assert!(sink.until(PATIENCE, |arrivals| arrivals.len() >= taken).await, "nothing arrives");
        }
        sidecar.process.kill();
        sink.killed().await;
        sidecar = start(directory.path(), &sink, &token, rng.choice(plan.syncs).unwrap());
        address.send_replace(sidecar.address.clone());
    }
    sink.behaves(|_| Answer::Take);
    stop.cancel();
    happens("the last acknowledgements", async {
        while let Some(ended) = emitters.join_next().await {
            ended.unwrap();
        }
    })
    .await;
    let acknowledged = ledger.acknowledged();
    let keys = acknowledged.iter().flat_map(|((source, session), count)| {
        (0..*count).map(move |seq| (source.clone(), id(session, seq)))
    });
    let lost = sink.has(plan.patience, keys).await;
    sidecar.process.terminate();
    let exit = sidecar.process.wait().code();
    sink.killed().await;
    judge(&plan, &ledger, &sink.arrivals(), lost, exit)
}

fn start(directory: &std::path::Path, sink: &Sink, token: &str, sync: &str) -> Sidecar {
    let variables = [
        ("CE_SINK", sink.url.as_str()),
        ("AEP_TOKEN", token),
        ("AEP_SPOOL_SYNC", sync),
        // Segments of 512 KiB, so that some are finished and removed.
        ("AEP_SPOOL_MAX_BYTES", "4MiB"),
        ("AEP_SPOOL_KEEP_BYTES", "512KiB"),
        ("AEP_DRAIN", "10s"),
        ("CE_CONCURRENCY", "16"),
        ("CE_RETRY_INITIAL", "5ms"),
        ("CE_RETRY_MAX", "50ms"),
        // Far above what the sink takes its time for: no answer of its comes too late.
        ("CE_TIMEOUT", "30s"),
    ];
    Sidecar::start(directory, &variables)
}

async fn happens<T>(what: &str, event: impl Future<Output = T>) -> T {
    let in_time = tokio::time::timeout(PATIENCE, event).await;
    in_time.unwrap_or_else(|_| panic!("{what} don't come"))
}

fn judge(
    plan: &Plan,
    ledger: &Ledger,
    arrivals: &[Arrival],
    lost: BTreeSet<sink::Key>,
    exit: Option<i32>,
) -> Figures {
    // What may have been under way at the end of each life: what was without an answer, and the last answers, which
    // the sidecar may not have noted yet. Two deliveries may be answered in one order and noted in the other.
    let mut answers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for arrival in arrivals {
        if let Outcome::Answered(number) = arrival.outcome {
            answers.entry(arrival.life).or_default().push(number);
        }
    }
    answers.values_mut().for_each(|numbers| numbers.sort_unstable());
    let under_way = |arrival: &Arrival| match arrival.outcome {
        Outcome::Answered(number) => {
            let numbers = &answers[&arrival.life];
            numbers.len() - numbers.partition_point(|earlier| *earlier < number) <= 2 * UNDER_WAY
        }
        Outcome::Unanswered | Outcome::Withheld => true,
    };
    let mut last: BTreeMap<sink::Key, &Arrival> = BTreeMap::new();
    let (mut unanswered, mut at_kills, mut unexplained) = (0, BTreeMap::new(), Vec::new());
    for arrival in arrivals {
        let Some(before) = last.insert(arrival.key(), arrival) else { continue };
        if before.outcome == Outcome::Withheld {
            unanswered += 1;
        } else if before.life < arrival.life && under_way(before) {
            *at_kills.entry(before.life).or_insert(0) += 1;
        } else {
            let (id, source, outcome) = (&arrival.id, &arrival.source, before.outcome);
            unexplained.push(format!(
                "{id} of {source} in life {} after life {}, {outcome:?}",
                arrival.life, before.life
            ));
        }
    }
    Figures {
        seed: plan.seed,
        kills: plan.kills,
        posted: ledger.sent(),
        acknowledged: ledger.total(),
        delivered: last.len(),
        lost: lost.into_iter().map(|(source, id)| format!("{id} of {source}")).collect(),
        disorder: sink::disorder(arrivals),
        altered: arrivals.iter().filter(|a| !is_whole(&a.event)).map(|a| a.event.to_string()).collect(),
        unanswered,
        withheld: arrivals.iter().filter(|arrival| arrival.outcome == Outcome::Withheld).count(),
        at_kills,
        unexplained,
        exit,
    }
}

/// The first few of them.
fn some(wrong: &[String]) -> &[String] {
    &wrong[..wrong.len().min(20)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_acknowledged_survives_every_kill_in_order_and_once() {
    let kills = usize::try_from(variable("CRASH_KILLS").unwrap_or(10)).unwrap();
    let seed = variable("CRASH_SEED").unwrap_or_else(|| fastrand::u64(..));
    let plan = Plan { kills, seed, syncs: &["write", "write", "fsync"], patience: 2 * PATIENCE };
    let figures = campaign(plan).await;
    figures.show();
    assert_eq!(figures.exit, Some(0), "{figures}");
    assert!(figures.lost.is_empty(), "{figures}: lost {:#?}", some(&figures.lost));
    assert!(figures.disorder.is_empty(), "{figures}: {:#?}", some(&figures.disorder));
    assert!(figures.altered.is_empty(), "{figures}: {:#?}", some(&figures.altered));
    assert!(figures.unexplained.is_empty(), "{figures}: {:#?}", some(&figures.unexplained));
    assert!(
        figures.at_kills.values().all(|repeats| *repeats <= UNDER_WAY),
        "{figures}: {:?}",
        figures.at_kills
    );
    assert_eq!(figures.posted, figures.acknowledged, "emitters go on until all is acknowledged");
}

/// The same judge of a sidecar that keeps nothing: it must find it out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losses_of_a_sidecar_that_holds_events_in_memory_are_seen() {
    let seed = variable("CRASH_SEED").unwrap_or_else(|| fastrand::u64(..));
    let plan = Plan { kills: 3, seed, syncs: &["off"], patience: Duration::from_secs(1) };
    let figures = campaign(plan).await;
    figures.show();
    assert!(!figures.lost.is_empty(), "{figures}");
}
