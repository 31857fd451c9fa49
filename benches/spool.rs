//! What the spool costs: appends by batch and durability, reads from memory and from disk, the start with a
//! full spool. `cargo bench --bench spool`.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::path::Path;

use aep_sidecar::aep::Event;
use aep_sidecar::export::spool::{Spool, SpoolConfig, SpoolMetrics, SpoolSync};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};

const SYNCS: [(&str, SpoolSync); 3] =
    [("memory", SpoolSync::Off), ("write", SpoolSync::Write), ("fsync", SpoolSync::Fsync)];

fn config(sync: SpoolSync, recent_bytes: usize) -> SpoolConfig {
    SpoolConfig {
        sync,
        max_bytes: 2 << 30,
        keep_bytes: 0,
        recent_bytes,
        dedupe: NonZeroUsize::new(100_000).unwrap(),
        keeps_positions: true,
    }
}

fn open(path: &Path, config: SpoolConfig) -> Spool {
    Spool::at(path, config, 0, SpoolMetrics::default()).unwrap()
}

/// 500 bytes.
fn event(id: u64) -> Event {
    let text = format!(
        r#"{{"aep":"0.1","id":"{id:020}","type":"tool.completed","time":"2026-07-03T10:14:01Z","source":"aep://host/agent/demo","agent":"demo","session":"session-{}","seq":{id},"data":{{"text":""#,
        id % 50
    );
    let rest = 500_usize.saturating_sub(text.len()).saturating_sub(3);
    Event::parse_str(&format!("{text}{}\"}}}}", "x".repeat(rest))).unwrap()
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

/// Events that were never there before.
struct Fresh(u64);

impl Fresh {
    fn take(&mut self, count: u64) -> Vec<Event> {
        let first = self.0;
        self.0 += count;
        (first..self.0).map(event).collect()
    }
}

fn append(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("append");
    for (name, sync) in SYNCS {
        let temp = tempfile::tempdir().unwrap();
        // Nothing holds space: what was appended is freed as it goes.
        let spool = open(temp.path(), config(sync, 1 << 20));
        let mut fresh = Fresh(0);
        for batch in [1, 50, 500] {
            group.throughput(Throughput::Elements(batch));
            group.bench_function(BenchmarkId::new(name, batch), |bencher| {
                bencher.iter_batched(
                    || fresh.take(batch),
                    |events| runtime.block_on(spool.append(events)).unwrap(),
                    BatchSize::SmallInput,
                );
            });
        }
        group.throughput(Throughput::Elements(64));
        group.bench_function(BenchmarkId::new(name, "64 at once"), |bencher| {
            bencher.iter_batched(
                || fresh.take(64),
                |events| {
                    let appends = events.into_iter().map(|event| spool.append(vec![event]));
                    runtime.block_on(join_all(appends))
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

fn fill(runtime: &Runtime, spool: &Spool, count: u64) {
    let mut fresh = Fresh(0);
    while fresh.0 < count {
        runtime.block_on(spool.append(fresh.take(1000))).unwrap();
    }
}

fn read(criterion: &mut Criterion) {
    const EVENTS: u64 = 100_000;
    let runtime = runtime();
    let mut group = criterion.benchmark_group("read");
    group.throughput(Throughput::Elements(EVENTS)).sample_size(10);
    for (name, sync) in [("memory", SpoolSync::Off), ("disk", SpoolSync::Write)] {
        let temp = tempfile::tempdir().unwrap();
        let spool = open(temp.path(), config(sync, 0));
        let _hold = spool.hold(0);
        fill(&runtime, &spool, EVENTS);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut reader = spool.reader(0);
                runtime.block_on(async {
                    while reader.ready() {
                        black_box(reader.next().await);
                    }
                });
            });
        });
    }
    group.finish();
}

fn start(criterion: &mut Criterion) {
    let runtime = runtime();
    let temp = tempfile::tempdir().unwrap();
    let config = config(SpoolSync::Write, 0);
    let spool = open(temp.path(), config.clone());
    let hold = spool.hold(0);
    fill(&runtime, &spool, (1 << 30) / 517);
    runtime.block_on(spool.close());
    drop((hold, spool, runtime));
    let mut group = criterion.benchmark_group("start");
    group.sample_size(10);
    for dedupe in [1, 100_000, 1_000_000] {
        let config = SpoolConfig { dedupe: NonZeroUsize::new(dedupe).unwrap(), ..config.clone() };
        group.bench_function(BenchmarkId::new("1 GiB, dedupe", dedupe), |bencher| {
            bencher.iter(|| open(temp.path(), config.clone()));
        });
    }
    group.finish();
}

criterion_group!(benches, append, read, start);
criterion_main!(benches);
