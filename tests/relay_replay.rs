//! From replay to live without a gap and without a duplicate: the hub against a model, over many interleavings of
//! ingest and reading, and under real concurrency.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, clippy::string_slice, reason = "a result of another shape fails the test")]

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use aep_sidecar::aep::{Event, Filter, Position, Registry, ResumeToken};
use aep_sidecar::relay::hub::Before;
use aep_sidecar::relay::{From, Hub, Limits, Metrics, Step, Subscriber, Subscription, Then};
use proptest::prelude::*;

fn event(session: &str, seq: Option<u64>, id: &str) -> Event {
    let (event_type, seq) = match seq {
        Some(seq) => ("run.started", format!(r#","seq":{seq}"#)),
        None => ("attention.routed", String::new()),
    };
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{id}","type":"{event_type}","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"{session}"{seq}}}"#
    ))
    .unwrap()
}

fn hub(limits: Limits) -> Hub {
    Hub::new(limits, Arc::new(Registry::core()), Metrics::default())
}

fn token(session: &str, seq: u64) -> ResumeToken {
    ResumeToken { session: session.to_owned(), position: Some(Position::new(0, seq)) }
}

fn subscribe(hub: &Hub, from: From, then: Then) -> Subscriber {
    hub.subscribe(Subscription { from, then, ..Subscription::default() })
}

/// What a reader saw.
#[derive(Debug, Default)]
struct Seen {
    ids: Vec<String>,
    /// Markers: session, earliest position, and how many events had been delivered before.
    markers: Vec<(String, Position, usize)>,
    behind: bool,
    complete: bool,
}

impl Seen {
    fn take(&mut self, step: Step) {
        match step {
            Step::Events(events) => self.ids.extend(events.iter().map(|event| event.id().to_owned())),
            Step::Run(block, range) => {
                self.ids.extend(block.events()[range].iter().map(|event| event.id().to_owned()));
            }
            Step::Exhausted { session, earliest } => {
                self.markers.push((session.to_string(), earliest, self.ids.len()));
            }
            Step::Complete => self.complete = true,
            Step::Behind => self.behind = true,
        }
    }

    fn drain(&mut self, reader: &mut Subscriber) {
        while let Some(step) = reader.ready() {
            self.take(step);
        }
    }
}

fn replay(hub: &Hub, from: From) -> Seen {
    let mut seen = Seen::default();
    seen.drain(&mut subscribe(hub, from, Then::End));
    assert!(seen.complete);
    seen
}

#[test]
fn replay_is_strictly_after_and_in_order() {
    let hub = hub(Limits::default());
    hub.admit(vec![
        event("s", Some(3), "3"),
        event("s", Some(1), "1"),
        event("s", Some(2), "2"),
        event("t", Some(9), "9"),
    ]);
    assert_eq!(replay(&hub, From::Tokens(vec![token("s", 1)])).ids, ["2", "3"]);
    assert_eq!(replay(&hub, From::All).ids, ["1", "2", "3", "9"]);
    assert_eq!(replay(&hub, From::Tokens(vec![token("t", 9), token("s", 2), token("s", 1)])).ids, ["2", "3"]);
    assert_eq!(replay(&hub, From::Now).ids, Vec::<String>::new());
}

#[test]
fn the_marker_is_exact() {
    let limits = Limits { buffer: 3, max_sessions: 2, ..Limits::default() };
    let hub = hub(limits);
    // Held: 10, 20, 30. Nothing evicted: gaps are legal and draw no marker.
    hub.admit([10, 20, 30].map(|n| event("s", Some(n), &n.to_string())).to_vec());
    assert_eq!(replay(&hub, From::Tokens(vec![token("s", 5)])).markers, []);
    // 10 is evicted: below it a marker, at it or above none.
    hub.admit(vec![event("s", Some(40), "40")]);
    let seen = replay(&hub, From::Tokens(vec![token("s", 9)]));
    assert_eq!(seen.markers, [("s".to_owned(), Position::new(0, 20), 0)]);
    assert_eq!(seen.ids, ["20", "30", "40"]);
    for at in [10, 15, 25, 40, 99] {
        assert_eq!(replay(&hub, From::Tokens(vec![token("s", at)])).markers, [], "{at}");
    }
    // Forgotten whole: the earliest is after what was evicted.
    hub.admit(vec![event("t", Some(1), "t1"), event("u", Some(1), "u1")]);
    let seen = replay(&hub, From::Tokens(vec![token("s", 30)]));
    assert_eq!((seen.markers, seen.ids.len()), (vec![("s".to_owned(), Position::new(0, 41), 0)], 0));
    assert_eq!(replay(&hub, From::Tokens(vec![token("s", 40)])).markers, []);
    // Never seen: no error, no marker.
    assert_eq!(replay(&hub, From::Tokens(vec![token("never", 0)])).markers, []);
    // All asks for what is held.
    assert_eq!(replay(&hub, From::All).markers, []);
}

#[test]
fn what_a_restart_has_lost_draws_a_marker_and_what_it_restored_none() {
    let events = || vec![event("s", Some(10), "10"), event("s", Some(12), "12"), event("t", Some(0), "t0")];
    // With something unknown before them.
    let unknown = hub(Limits::default());
    unknown.restore(events(), Before::Unknown);
    for (session, position) in [("s", 12), ("t", 0), ("gone", 7)] {
        unknown.assume_evicted(session, Position::new(0, position));
    }
    let seen = replay(&unknown, From::Tokens(vec![token("s", 8)]));
    assert_eq!(seen.markers, [("s".to_owned(), Position::new(0, 10), 0)]);
    assert_eq!(seen.ids, ["10", "12"]);
    for at in [9, 10, 11, 12] {
        assert_eq!(replay(&unknown, From::Tokens(vec![token("s", at)])).markers, [], "{at}");
    }
    let seen = replay(&unknown, From::Tokens(vec![token("gone", 3)]));
    assert_eq!(seen.markers, [("gone".to_owned(), Position::new(0, 8), 0)]);
    assert_eq!(replay(&unknown, From::Tokens(vec![token("gone", 7)])).markers, []);
    let first = ResumeToken { session: "t".to_owned(), position: None };
    assert_eq!(replay(&unknown, From::Tokens(vec![first])).markers, [], "nothing comes before the first");
    // Restored whole.
    let whole = hub(Limits::default());
    whole.restore(events(), Before::Nothing);
    let seen = replay(&whole, From::Tokens(vec![token("s", 3)]));
    assert_eq!((seen.markers, seen.ids.len()), (vec![], 2));
}

#[test]
fn a_bounded_replay_serves_sessions_that_the_filter_names() {
    let hub = hub(Limits::default());
    hub.admit(vec![
        event("s", Some(1), "s1"),
        event("t", Some(1), "t1"),
        event("t", Some(2), "t2"),
        event("u", Some(1), "u1"),
    ]);
    let filter = Filter::parse(r#"{"session":["s","t"]}"#).unwrap();
    let ask = |from, then| {
        let mut seen = Seen::default();
        seen.drain(&mut hub.subscribe(Subscription {
            filter: filter.clone(),
            from,
            then,
            ..Subscription::default()
        }));
        seen.ids
    };
    assert_eq!(ask(From::Now, Then::End), ["s1", "t1", "t2"]);
    assert_eq!(ask(From::Tokens(vec![token("t", 1)]), Then::End), ["t2", "s1"]);
    assert_eq!(ask(From::Tokens(vec![token("t", 1)]), Then::Live), ["t2"]);
    assert_eq!(ask(From::All, Then::Live), ["s1", "t1", "t2"]);
}

#[test]
fn a_redelivery_is_fanned_out_again_and_held_once() {
    let hub = hub(Limits::default());
    let mut reader = subscribe(&hub, From::Now, Then::Live);
    hub.admit(vec![event("s", Some(1), "1")]);
    hub.admit(vec![event("s", Some(1), "1")]);
    let mut seen = Seen::default();
    seen.drain(&mut reader);
    assert_eq!(seen.ids, ["1", "1"]);
    assert_eq!(replay(&hub, From::All).ids, ["1"]);
    assert_eq!((hub.metrics().admitted.get(), hub.metrics().duplicates.get()), (2, 1));
}

#[test]
fn agent_scoped_events_are_live_only() {
    let hub = hub(Limits::default());
    let mut reader = subscribe(&hub, From::All, Then::Live);
    let idle = r#"{"aep":"0.1","id":"i","type":"agent.idle","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a"}"#;
    hub.admit(vec![Event::parse_str(idle).unwrap()]);
    let mut seen = Seen::default();
    seen.drain(&mut reader);
    assert_eq!(seen.ids, ["i"]);
    assert_eq!(replay(&hub, From::All).ids, Vec::<String>::new());
}

#[test]
fn a_reader_far_behind_catches_up_from_what_is_held() {
    // The log holds next to nothing, the histories everything.
    let hub = hub(Limits { window_bytes: 1, ..Limits::default() });
    let mut reader = subscribe(&hub, From::Now, Then::Live);
    let mut seen = Seen::default();
    for n in 0..3000_u64 {
        hub.admit(vec![event(if n % 2 == 0 { "s" } else { "t" }, Some(n), &n.to_string())]);
        if n % 1000 == 0 {
            seen.take(reader.ready().unwrap());
        }
    }
    seen.drain(&mut reader);
    assert_eq!((seen.ids.len(), seen.behind, seen.markers.len()), (3000, false, 0));
    assert_eq!(seen.ids.iter().collect::<HashSet<_>>().len(), 3000);
    for parity in 0..2 {
        let lane: Vec<u64> =
            seen.ids.iter().map(|id| id.parse().unwrap()).filter(|n: &u64| n % 2 == parity).collect();
        assert!(lane.is_sorted());
    }
}

#[test]
fn a_reader_past_what_is_held_is_sent_to_resume() {
    let hub = hub(Limits { window_bytes: 1, buffer: 10, ..Limits::default() });
    let mut reader = subscribe(&hub, From::Now, Then::Live);
    hub.admit(vec![event("s", Some(0), "0")]);
    let mut seen = Seen::default();
    seen.drain(&mut reader);
    for n in 1..100 {
        hub.admit(vec![event("s", Some(n), &n.to_string())]);
    }
    seen.drain(&mut reader);
    assert!(seen.behind && seen.ids == ["0"]);
    let resumed = replay(&hub, From::Tokens(vec![token("s", 0)]));
    assert_eq!((resumed.markers, resumed.ids.len()), (vec![("s".to_owned(), Position::new(0, 90), 0)], 10));
    assert_eq!(hub.metrics().readers_behind.get(), 1);
}

#[test]
fn what_is_given_up_during_a_replay_of_everything_is_told() {
    let hub = hub(Limits { max_sessions: 3, ..Limits::default() });
    hub.admit((0..3).map(|n| event(&format!("s{n}"), Some(1), &n.to_string())).collect());
    let mut reader = subscribe(&hub, From::All, Then::End);
    let mut seen = Seen::default();
    seen.take(reader.ready().unwrap());
    assert_eq!(seen.ids, ["0"]);
    // Before their turn, the others are forgotten.
    hub.admit((0..3).map(|n| event(&format!("t{n}"), Some(1), &format!("t{n}"))).collect());
    seen.drain(&mut reader);
    let told: Vec<&str> = seen.markers.iter().map(|(session, ..)| session.as_str()).collect();
    assert_eq!((told, seen.ids.len()), (vec!["s1", "s2"], 1));
}

/// One thing that happens.
#[derive(Debug, Clone)]
enum Move {
    /// A batch arrives: session and position of each event; no position for one without `seq`.
    Admit(Vec<(u8, Option<u64>)>),
    /// A reader takes a few steps.
    Read(usize, usize),
    /// A reader starts.
    Start(Start),
}

#[derive(Debug, Clone)]
enum Start {
    Now,
    All,
    Tokens(Vec<(u8, u64)>),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let arrival = (0..4_u8, prop::option::weighted(0.85, 0..30_u64));
    let one = prop_oneof![
        4 => prop::collection::vec(arrival, 1..6).prop_map(Move::Admit),
        4 => (0..4_usize, 1..4_usize).prop_map(|(reader, steps)| Move::Read(reader, steps)),
        1 => Just(Move::Start(Start::Now)),
        1 => Just(Move::Start(Start::All)),
        1 => prop::collection::vec((0..4_u8, 0..30_u64), 0..3).prop_map(|tokens| Move::Start(Start::Tokens(tokens))),
    ];
    prop::collection::vec(one, 1..60)
}

/// What is known of one arrival.
#[derive(Debug)]
struct Arrival {
    id: String,
    session: String,
    seq: Option<u64>,
}

struct Reader {
    subscriber: Subscriber,
    seen: Seen,
    start: Start,
    /// How many had arrived when it started.
    arrived: usize,
}

/// Runs the moves and lets every reader finish. Every event has an id of its own, so no arrival is a duplicate.
fn play(hub: &Hub, moves: Vec<Move>) -> (Vec<Arrival>, Vec<Reader>) {
    let mut arrivals = Vec::new();
    let mut readers: Vec<Reader> = Vec::new();
    for one in moves {
        match one {
            Move::Admit(batch) => {
                let mut events = Vec::new();
                for (session, seq) in batch {
                    let id = format!("e{}", arrivals.len());
                    let session = format!("s{session}");
                    events.push(event(&session, seq, &id));
                    arrivals.push(Arrival { id, session, seq });
                }
                hub.admit(events);
            }
            Move::Read(reader, steps) => {
                if let Some(reader) = readers.get_mut(reader) {
                    for _ in 0..steps {
                        if let Some(step) = reader.subscriber.ready() {
                            reader.seen.take(step);
                        }
                    }
                }
            }
            Move::Start(start) => {
                let from = match &start {
                    Start::Now => From::Now,
                    Start::All => From::All,
                    Start::Tokens(tokens) => {
                        From::Tokens(tokens.iter().map(|(s, seq)| token(&format!("s{s}"), *seq)).collect())
                    }
                };
                let subscriber = subscribe(hub, from, Then::Live);
                readers.push(Reader { subscriber, seen: Seen::default(), start, arrived: arrivals.len() });
            }
        }
    }
    for reader in &mut readers {
        reader.seen.drain(&mut reader.subscriber);
    }
    (arrivals, readers)
}

/// The position at which each arrival stands: its own, or that of the event of its session before it.
fn standing(arrivals: &[Arrival]) -> Vec<Option<u64>> {
    let mut last: BTreeMap<&str, Option<u64>> = BTreeMap::new();
    arrivals
        .iter()
        .map(|arrival| {
            let at = arrival.seq.or(last.get(&*arrival.session).copied().flatten());
            last.insert(&arrival.session, at);
            at
        })
        .collect()
}

/// The arrivals before its start that a reader asked to see again, in order within each session.
fn asked(reader: &Reader, arrivals: &[Arrival]) -> Vec<usize> {
    let at = standing(arrivals);
    let mut lowest: BTreeMap<String, u64> = BTreeMap::new();
    if let Start::Tokens(tokens) = &reader.start {
        for (session, seq) in tokens {
            lowest.entry(format!("s{session}")).and_modify(|low| *low = (*low).min(*seq)).or_insert(*seq);
        }
    }
    let mut wanted: Vec<usize> = (0..reader.arrived)
        .filter(|n| match &reader.start {
            Start::Now => false,
            Start::All => true,
            Start::Tokens(_) => lowest.get(&arrivals[*n].session).is_some_and(|low| match arrivals[*n].seq {
                Some(seq) => seq > *low,
                None => at[*n] >= Some(*low),
            }),
        })
        .collect();
    wanted.sort_by_key(|n| (at[*n], *n));
    wanted
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_missed_and_nothing_comes_twice(moves in moves(), tiny_log: bool) {
        let hub = hub(Limits { window_bytes: if tiny_log { 1 } else { 1 << 20 }, ..Limits::default() });
        let (arrivals, readers) = play(&hub, moves);
        for reader in &readers {
            prop_assert!(!reader.seen.behind && reader.seen.markers.is_empty());
            let replayed = asked(reader, &arrivals);
            let (first, rest) = reader.seen.ids.split_at(replayed.len());
            // Sessions are replayed one after the other, each in order.
            for session in ["s0", "s1", "s2", "s3"] {
                let of = |n: &&usize| arrivals[**n].session == session;
                let expected: Vec<&str> = replayed.iter().filter(of).map(|n| &*arrivals[*n].id).collect();
                let got: Vec<&str> = first.iter().map(String::as_str).filter(|id| expected.contains(id)).collect();
                prop_assert_eq!(got, expected);
            }
            // From the start on, everything that arrives comes once; in arrival order while the log holds it.
            let live: Vec<&str> = arrivals[reader.arrived..].iter().map(|arrival| &*arrival.id).collect();
            let mut got: Vec<&str> = rest.iter().map(String::as_str).collect();
            if tiny_log {
                got.sort_by_key(|id| id[1..].parse::<usize>().unwrap());
            }
            prop_assert_eq!(got, live);
        }
    }

    #[test]
    fn what_is_missing_was_announced(moves in moves(), buffer in 1..6_usize, max_sessions in 1..4_usize, tiny_log: bool) {
        let window_bytes = if tiny_log { 1 } else { 1 << 20 };
        let hub = hub(Limits { buffer, max_sessions, window_bytes, ..Limits::default() });
        let (arrivals, readers) = play(&hub, moves);
        let at = standing(&arrivals);
        for reader in &readers {
            let got: BTreeSet<&str> = reader.seen.ids.iter().map(String::as_str).collect();
            prop_assert_eq!(got.len(), reader.seen.ids.len(), "nothing comes twice");
            if reader.seen.behind {
                continue;
            }
            for arrival in &arrivals[reader.arrived..] {
                prop_assert!(got.contains(&*arrival.id), "live events come: {:?}", arrival);
            }
            if let Start::Tokens(_) = reader.start {
                for n in asked(reader, &arrivals) {
                    let arrival = &arrivals[n];
                    let announced = reader.seen.markers.iter().any(|(session, _, _)| *session == arrival.session);
                    prop_assert!(got.contains(&*arrival.id) || announced || at[n].is_none() || arrival.seq.is_none(),
                        "missing without a word: {:?}", arrival);
                }
            }
        }
    }
}

#[test]
fn concurrent_ingest_and_subscribing_leave_no_gap() {
    const SESSIONS: u32 = 4;
    const EVENTS: u64 = 4000;
    let hub = hub(Limits { window_bytes: 64 * 1024, ..Limits::default() });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for session in 0..SESSIONS {
            let hub = hub.clone();
            tasks.spawn(async move {
                for seq in 0..EVENTS {
                    let name = format!("s{session}");
                    hub.admit(vec![event(&name, Some(seq), &format!("{name}-{seq}"))]);
                    if seq % 64 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            });
        }
        for n in 0..24 {
            let hub = hub.clone();
            tasks.spawn(async move {
                for _ in 0..n * 20 {
                    tokio::task::yield_now().await;
                }
                let mut reader = subscribe(&hub, From::All, Then::Live);
                let mut seen = Seen::default();
                while seen.ids.len() < usize::try_from(u64::from(SESSIONS) * EVENTS).unwrap() {
                    seen.take(reader.next().await.unwrap());
                    assert!(!seen.behind);
                }
                let mut next = vec![0; usize::try_from(SESSIONS).unwrap()];
                for id in &seen.ids {
                    let (session, seq) = id[1..].split_once('-').unwrap();
                    let next: &mut u64 = &mut next[session.parse::<usize>().unwrap()];
                    assert_eq!(seq.parse::<u64>().unwrap(), *next, "of {session}");
                    *next += 1;
                }
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
        }
    });
}
