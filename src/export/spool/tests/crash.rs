//! The spool against a plain list, with a crash, a failure or a loss of power anywhere.

use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroUsize;
use std::time::Duration;

use futures_util::future::join_all;
use proptest::prelude::*;

use super::model::{Fault, Model};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Appends at once: groups form as they will.
    Append(Vec<Vec<u16>>),
    /// A hold moves on, to a part of what there is.
    Advance(usize, u8),
    /// Something goes wrong, some operations from now.
    Fault(u64, Fault),
    /// The disk has so many bytes and no more.
    Capacity(Option<usize>),
    /// The process or the machine dies between two operations.
    Die,
    Close,
}

/// How the process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    Process,
    Machine,
}

fn fault() -> impl Strategy<Value = Fault> {
    let bytes = prop_oneof![Just(0), 0..400_usize, Just(usize::MAX)];
    (0..3_u8, bytes).prop_map(|(kind, bytes)| match kind {
        0 => Fault::Io(bytes),
        1 => Fault::NoSpace(bytes),
        _ => Fault::Crash(bytes),
    })
}

fn step() -> impl Strategy<Value = Step> {
    let batch = prop::collection::vec(0..200_u16, 1..12);
    prop_oneof![
        10 => prop::collection::vec(batch, 1..4).prop_map(Step::Append),
        4 => (0..2_usize, 0..=4_u8).prop_map(|(hold, part)| Step::Advance(hold, part)),
        6 => (0..12_u64, fault()).prop_map(|(after, fault)| Step::Fault(after, fault)),
        1 => prop::option::of(1000..12_000_usize).prop_map(Step::Capacity),
        1 => Just(Step::Die),
        1 => Just(Step::Close),
    ]
}

/// An event by its number: three sessions, positions that grow with it.
fn numbered(id: u16) -> Event {
    in_session(&id.to_string(), &(id % 3).to_string(), u64::from(id))
}

fn small(sync: SpoolSync) -> SpoolConfig {
    SpoolConfig {
        max_bytes: 12_000,
        keep_bytes: 3000,
        recent_bytes: 1500,
        dedupe: NonZeroUsize::new(100_000).unwrap(),
        ..config(sync)
    }
}

/// The spool and what is known of it.
struct Run {
    model: Model,
    random: fastrand::Rng,
    sync: SpoolSync,
    death: Death,
    spool: Spool,
    holds: Vec<Hold>,
    /// How far the holds are: what a cursor's owner has saved.
    held: Vec<u64>,
    /// What is committed and, as far as it is known, held.
    list: Vec<(u64, u16)>,
    /// What was acknowledged while the process died, under whatever number.
    acknowledged: HashSet<u16>,
    /// Everything that an append was tried with.
    tried: HashSet<u16>,
    /// The highest that was acknowledged, by session.
    reached: BTreeMap<u16, u16>,
}

impl Run {
    fn new(sync: SpoolSync, death: Death, seed: u64) -> Self {
        let model = Model::default();
        let spool = start(&model, sync, 0);
        Self {
            holds: vec![spool.hold(0), spool.hold(0)],
            held: vec![0, 0],
            model,
            random: fastrand::Rng::with_seed(seed),
            sync,
            death,
            spool,
            list: Vec::new(),
            acknowledged: HashSet::new(),
            tried: HashSet::new(),
            reached: BTreeMap::new(),
        }
    }

    fn done(&self) -> u64 {
        self.held[0].min(self.held[1])
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Append(batches) => self.append(batches).await,
            Step::Advance(hold, part) => {
                let (from, end) = (self.held[hold], self.spool.end());
                self.held[hold] = from + (end - from) * u64::from(part) / 4;
                self.holds[hold].advance(self.held[hold]);
            }
            Step::Fault(after, fault) => self.model.fault(after, fault),
            Step::Capacity(bytes) => self.model.set_capacity(bytes),
            Step::Die => self.restart().await,
            Step::Close => {
                self.spool.close().await;
                self.restart().await;
            }
        }
        settled(&self.spool).await;
        if self.model.is_dead() {
            self.restart().await;
        }
        if self.spool.state().borrow().clone() != SpoolState::Writable {
            // Faults come once and are over; want of room stays.
            drop(tokio::time::timeout(Duration::from_mins(2), self.spool.room()).await);
        }
    }

    async fn append(&mut self, batches: Vec<Vec<u16>>) {
        let end = self.spool.end();
        let known: HashSet<u16> = self.list.iter().map(|(_, id)| *id).collect();
        self.tried.extend(batches.iter().flatten());
        let appends =
            batches.iter().map(|batch| self.spool.append(batch.iter().map(|id| numbered(*id)).collect()));
        let outcomes = join_all(appends).await;
        settled(&self.spool).await;
        if self.model.is_dead() {
            // What is read now isn't to be trusted; what was acknowledged is.
            for (batch, _) in batches.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok()) {
                batch.iter().for_each(|id| self.reach(*id));
                self.acknowledged.extend(batch);
            }
            return;
        }
        let new = ids(&read(&self.spool, end).await);
        assert_eq!(new.first().map_or(end, |(number, _)| *number), end);
        let mut wanted = Vec::new();
        for id in batches.iter().flatten() {
            if !known.contains(id) && !wanted.contains(id) {
                wanted.push(*id);
            }
        }
        let found: Vec<u16> = new.iter().map(|(_, id)| *id).collect();
        self.list.extend(new);
        let listed: HashSet<u16> = self.list.iter().map(|(_, id)| *id).collect();
        for (batch, outcome) in batches.iter().zip(&outcomes) {
            if outcome.is_ok() {
                assert!(batch.iter().all(|id| listed.contains(id)), "acknowledged: {batch:?} in {listed:?}");
                batch.iter().for_each(|id| self.reach(*id));
            }
        }
        // What a batch leaves out that was refused may be given by a later one.
        if outcomes.iter().all(Result::is_ok) {
            assert_eq!(found, wanted, "in order, each once");
            assert!(found.is_empty() || self.model.size() <= 12_000, "{} bytes", self.model.size());
        }
    }

    fn reach(&mut self, id: u16) {
        let reached = self.reached.entry(id % 3).or_insert(id);
        *reached = id.max(*reached);
    }

    async fn restart(&mut self) {
        settled(&self.spool).await;
        let machine = self.death == Death::Machine && self.random.bool();
        if machine {
            self.model.lose_power(&mut self.random);
        }
        self.model.restart();
        // No cursor is ahead of what is appended from now on.
        self.spool = start(&self.model, self.sync, self.held[0].max(self.held[1]));
        self.holds = self.held.iter().map(|from| self.spool.hold(*from)).collect();
        let found = ids(&read(&self.spool, 0).await);
        assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "in order: {found:?}");
        let unique: HashSet<u16> = found.iter().map(|(_, id)| *id).collect();
        // A file that was removed may come back with a loss of power, behind the holds.
        let there: Vec<_> = found.iter().filter(|(number, _)| *number >= self.done()).copied().collect();
        let needed: HashSet<u16> = there.iter().map(|(_, id)| *id).collect();
        assert_eq!(needed.len(), there.len(), "once: {there:?}");
        assert!(unique.is_subset(&self.tried), "nothing that wasn't appended");
        if !machine || self.sync == SpoolSync::Fsync {
            let done = self.done();
            let needed: Vec<_> = self.list.iter().filter(|(number, _)| *number >= done).copied().collect();
            assert!(there.starts_with(&needed), "needed {needed:?}, found {there:?}");
            let freed = |id: &u16| self.list.iter().any(|(number, listed)| listed == id && *number < done);
            for id in self.acknowledged.drain() {
                assert!(unique.contains(&id) || freed(&id), "{id} was acknowledged: {found:?}");
            }
            self.check_positions();
        } else {
            self.reached.clear();
            self.acknowledged.clear();
        }
        self.list = found;
    }

    fn check_positions(&self) {
        for (session, reached) in &self.reached {
            let positions = self.spool.positions();
            let saved = positions.iter().find(|saved| saved.session.parse() == Ok(*session));
            let seq = saved.expect("a position of every session").position.seq;
            assert!(seq >= u64::from(*reached), "session {session}: {seq} < {reached}");
            assert!(self.tried.iter().any(|id| u64::from(*id) == seq && id % 3 == *session));
        }
    }
}

fn start(model: &Model, sync: SpoolSync, floor: u64) -> Spool {
    Spool::open_files(Some(Arc::new(model.clone())), small(sync), floor, SpoolMetrics::default()).unwrap()
}

fn ids(events: &[(u64, String)]) -> Vec<(u64, u16)> {
    events.iter().map(|(number, id)| (*number, id.parse().unwrap())).collect()
}

fn run(sync: SpoolSync, death: Death, seed: u64, steps: Vec<Step>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(async {
        let mut run = Run::new(sync, death, seed);
        for step in steps {
            run.step(step).await;
        }
        run.restart().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_death_of_the_process_loses_nothing(seed: u64, steps in prop::collection::vec(step(), 1..30)) {
        run(SpoolSync::Write, Death::Process, seed, steps);
    }

    #[test]
    fn a_loss_of_power_loses_nothing_that_was_synced(
        seed: u64,
        steps in prop::collection::vec(step(), 1..30),
    ) {
        run(SpoolSync::Fsync, Death::Machine, seed, steps);
    }

    #[test]
    fn a_loss_of_power_never_keeps_an_unsynced_spool_from_opening(
        seed: u64,
        steps in prop::collection::vec(step(), 1..30),
    ) {
        run(SpoolSync::Write, Death::Machine, seed, steps);
    }
}
