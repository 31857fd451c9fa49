//! A relay that breaks off, refuses and evicts at random: whatever it still holds in the end was given, and what
//! it doesn't was given or told as lost.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/fake.rs"]
mod fake;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use fake::{Asked, Conn, Fake, Reader, SOURCE};
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// How far below the highest position an event may arrive late; less than the overlap.
const LATE: u64 = 8;

#[derive(Debug, Clone, Copy)]
struct Plan {
    seed: u64,
    sessions: usize,
    events: usize,
    /// The most positions in a request.
    max_from: usize,
    max_resume: usize,
    /// Events held of a session.
    held: usize,
    /// Whether events arrive late, and sessions begin after the subscription.
    disorder: bool,
}

/// What the relay has.
#[derive(Debug)]
struct World {
    plan: Plan,
    random: fastrand::Rng,
    /// What is held of each session, and the highest that was evicted.
    held: BTreeMap<usize, (BTreeSet<u64>, u64)>,
    /// Everything in the order of its arrival.
    arrived: Vec<(usize, u64)>,
    /// Whether it behaves from now on.
    calm: bool,
}

impl World {
    fn admit(&mut self, session: usize, seq: u64) {
        let bound = self.plan.held;
        let (held, evicted) = self.held.entry(session).or_default();
        self.arrived.push((session, seq));
        if seq > *evicted {
            held.insert(seq);
        }
        if held.len() > bound {
            *evicted = held.pop_first().unwrap();
        }
    }

    /// Once in `times`, unless it behaves.
    fn chance(&mut self, times: u32) -> bool {
        !self.calm && self.random.u32(..times) == 0
    }

    /// The replay, message by message.
    fn replay(&self, asked: &Asked) -> Vec<String> {
        let mut out = Vec::new();
        let mut messages = Vec::new();
        for (session, (held, evicted)) in &self.held {
            let after = match asked {
                Asked::Now => continue,
                Asked::All => 0,
                Asked::After(entries) => match entries.iter().find(|(name, ..)| *name == name_of(*session)) {
                    Some((_, _, seq)) => *seq,
                    None => continue,
                },
            };
            if *asked != Asked::All && *evicted > after {
                let earliest = held.first().copied().unwrap_or(evicted + 1);
                out.push(format!(": replay-exhausted {} 0:{earliest}\n\n", name_of(*session)));
            }
            messages.extend(held.iter().filter(|seq| **seq > after).map(|seq| message(*session, *seq)));
        }
        out.extend(messages);
        out
    }
}

fn name_of(session: usize) -> String {
    format!("session {session}")
}

fn message(session: usize, seq: u64) -> String {
    let name = name_of(session);
    format!(
        "event: run.started\ndata: {{\"aep\":\"0.1\",\"id\":\"{name}-{seq}\",\"type\":\"run.started\",\"time\":\"2026-07-03T10:00:00Z\",\"source\":\"{SOURCE}\",\"agent\":\"a\",\"session\":\"{name}\",\"seq\":{seq}}}\n\n"
    )
}

type Shared = Arc<(Mutex<World>, watch::Sender<usize>)>;

async fn serve(mut conn: Conn, shared: Shared) {
    let (world, arrivals) = &*shared;
    let asked = conn.asked();
    let is_live = conn.is_live();
    let (refusal, replay, mut cursor, mut patience) = {
        let mut world = world.lock();
        let refusal = match &asked {
            Asked::After(entries) if entries.len() > world.plan.max_from => Some(400),
            _ if world.chance(6) => Some([503, 429, 500][world.random.usize(..3)]),
            _ => None,
        };
        let patience = if world.calm { usize::MAX } else { world.random.usize(..60) };
        (refusal, world.replay(&asked), world.arrived.len(), patience)
    };
    if let Some(status) = refusal {
        return conn.refuse(status).await;
    }
    if !conn.open_in_chunks().await {
        return;
    }
    let mut news = arrivals.subscribe();
    let mut queue = replay;
    loop {
        for text in std::mem::take(&mut queue) {
            if patience == 0 {
                // Within a message, and without a last word.
                conn.send(&text.as_bytes()[..text.len() / 2]).await;
                return;
            }
            patience -= 1;
            if !conn.send(text.as_bytes()).await {
                return;
            }
        }
        if !is_live {
            return conn.complete().await;
        }
        {
            let world = world.lock();
            queue.extend(world.arrived[cursor..].iter().map(|(session, seq)| message(*session, *seq)));
            cursor = world.arrived.len();
        }
        // Marked as seen before it is looked at, so that none is slept through.
        if queue.is_empty() && news.changed().await.is_err() {
            return;
        }
    }
}

/// Emits everything, at random, then makes the relay behave.
async fn emit(shared: &Shared) {
    let (world, arrivals) = &**shared;
    let plan = world.lock().plan;
    let mut next: Vec<u64> = vec![1; plan.sessions];
    let mut late: Vec<(usize, u64)> = Vec::new();
    for n in 0..plan.events {
        let pauses = {
            let mut world = world.lock();
            // Later sessions begin later.
            let open = if plan.disorder { 1 + n * plan.sessions / plan.events } else { plan.sessions };
            let session = world.random.usize(..open);
            let seq = next[session];
            next[session] += 1;
            if plan.disorder && world.random.u32(..6) == 0 {
                late.push((session, seq));
            } else {
                world.admit(session, seq);
            }
            for (session, seq) in std::mem::take(&mut late) {
                if next[session] - seq >= LATE || world.random.u32(..4) == 0 {
                    world.admit(session, seq);
                } else {
                    late.push((session, seq));
                }
            }
            world.random.usize(..30)
        };
        arrivals.send_replace(n);
        for _ in 0..pauses {
            tokio::task::yield_now().await;
        }
    }
    let mut world = world.lock();
    for (session, seq) in late {
        world.admit(session, seq);
    }
    world.calm = true;
    arrivals.send_replace(plan.events);
}

async fn play(plan: Plan) {
    let fake = Arc::new(Fake::open().await);
    let random = fastrand::Rng::with_seed(plan.seed);
    let world = World { plan, random, held: BTreeMap::new(), arrived: Vec::new(), calm: false };
    let shared: Shared = Arc::new((Mutex::new(world), watch::Sender::new(0)));
    let tracker = TaskTracker::new();
    let (listening, serving) = (Arc::clone(&fake), Arc::clone(&shared));
    let servers = tracker.clone();
    let acceptor = tracker.spawn(async move {
        loop {
            let conn = listening.accept().await;
            servers.spawn(serve(conn, Arc::clone(&serving)));
        }
    });
    let mut config = fake.config();
    config.max_resume = plan.max_resume;
    config.overlap = if plan.disorder { LATE + 2 } else { 0 };
    let names: Vec<String> = (0..plan.sessions).map(name_of).collect();
    let known: Vec<(&str, u64)> =
        if plan.disorder { Vec::new() } else { names.iter().map(|name| (name.as_str(), 0)).collect() };
    let mut reader = Reader::new(&config, &known);
    reader.during(emit(&shared)).await;

    let held: HashSet<String> = {
        let world = shared.0.lock();
        let all = world.held.iter();
        all.flat_map(|(session, (held, _))| held.iter().map(|seq| format!("{}:{seq}", name_of(*session))))
            .collect()
    };
    let missing = |reader: &Reader| {
        let given: HashSet<&String> = reader.given.iter().collect();
        held.iter().filter(|event| !given.contains(event)).count()
    };
    while missing(&reader) > 0 {
        let update = tokio::time::timeout(Duration::from_secs(5), reader.subscription.next()).await;
        let update = update.unwrap_or_else(|_| {
            panic!("{} of {} never came: {:?}", missing(&reader), held.len(), reader.subscription)
        });
        reader.record(update);
    }
    acceptor.abort();

    if !plan.disorder {
        let mut highest: BTreeMap<&str, u64> = BTreeMap::new();
        for event in &reader.given {
            let (session, seq) = event.rsplit_once(':').unwrap();
            let (seq, last) = (seq.parse::<u64>().unwrap(), highest.entry(session).or_default());
            let lost = |seq| {
                reader.lost.iter().any(|lost| {
                    let after = lost.after.unwrap().seq;
                    &*lost.session == session && after < seq && seq < lost.earliest.unwrap().seq
                })
            };
            for between in *last + 1..seq {
                assert!(lost(between), "{session}:{between} was neither given, in order, nor told as lost");
            }
            *last = seq.max(*last);
        }
    }
}

fn plan() -> impl Strategy<Value = Plan> {
    (any::<u64>(), 1..12_usize, 1..300_usize, 1..8_usize, 1..20_usize, 3..40_usize, any::<bool>()).prop_map(
        |(seed, sessions, events, max_from, max_resume, held, disorder)| {
            // One request resumes every session where order is looked at: a drain comes beside the live stream.
            let (max_from, max_resume) = if disorder { (max_from, max_resume) } else { (20, 20) };
            Plan { seed, sessions, events, max_from, max_resume, held, disorder }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 0, ..ProptestConfig::default() })]
    #[test]
    fn what_is_held_is_given_and_what_is_not_is_told(plan in plan()) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(play(plan));
    }
}
