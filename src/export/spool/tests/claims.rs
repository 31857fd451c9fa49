//! One claim each, on a file system that does as it is told.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use super::model::{Fault, Model};
use super::*;
use crate::export::spool::writer::Writer;

fn open_model(model: &Model, config: SpoolConfig) -> (Spool, SpoolMetrics) {
    let metrics = SpoolMetrics::default();
    (Spool::open_files(Some(Arc::new(model.clone())), config, 0, metrics.clone()).unwrap(), metrics)
}

async fn append_all(spool: &Spool, ids: std::ops::Range<u64>) {
    for id in ids {
        spool.append(events([id])).await.unwrap();
    }
}

/// Polls once: whether it is done.
async fn is_done<F: Future + Unpin>(future: &mut F) -> bool {
    futures_util::poll!(future).is_ready()
}

/// Starts something that has to wait.
async fn started<F: Future>(future: F) -> Pin<Box<F>> {
    let mut future = Box::pin(future);
    assert!(!is_done(&mut future).await, "it waits");
    future
}

#[tokio::test]
async fn a_duplicate_of_what_is_being_written_waits_for_it() {
    let model = Model::default();
    let (spool, metrics) = open_model(&model, config(SpoolSync::Write));
    model.hold_writes();
    let first = started(spool.append(events([1]))).await;
    let duplicate = started(spool.append(events([1]))).await;
    model.let_writes_through();
    assert_eq!(first.await.unwrap(), Appended { new: 1, duplicates: 0 });
    assert_eq!(duplicate.await.unwrap(), Appended { new: 0, duplicates: 1 });
    assert_eq!((metrics.events.get(), metrics.duplicates.get(), spool.end()), (1, 1, 1));
}

#[tokio::test]
async fn what_comes_during_a_write_is_written_together() {
    let model = Model::default();
    let (spool, metrics) = open_model(&model, config(SpoolSync::Fsync));
    model.hold_writes();
    let mut appends = Vec::new();
    for n in 0..40 {
        appends.push(started(spool.append(events([n]))).await);
    }
    assert_eq!(spool.end(), 0, "readers see only what is committed");
    model.let_writes_through();
    for append in appends {
        append.await.unwrap();
    }
    assert!(metrics.writes.get() <= 3, "{} writes", metrics.writes.get());
    assert_eq!(read(&spool, 0).await, numbered(0..40));
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_fails_all_that_waits_and_its_numbers_are_given_again() {
    for fault in [Fault::Io(0), Fault::Io(30), Fault::Io(usize::MAX)] {
        let model = Model::default();
        let (spool, metrics) = open_model(&model, config(SpoolSync::Write));
        let _hold = spool.hold(0);
        spool.append(events([0])).await.unwrap();
        model.hold_writes();
        model.fault(0, fault);
        let (first, duplicate) =
            (started(spool.append(events([1]))).await, started(spool.append(events([1]))).await);
        let other = started(spool.append(events([2]))).await;
        model.let_writes_through();
        for append in [first, duplicate, other] {
            let error = append.await.unwrap_err();
            assert!(matches!(error.reason, UnavailableReason::Failing(_)), "{error}");
        }
        assert_eq!(metrics.write_failures.get(), 1);
        assert!(matches!(*spool.state().borrow(), SpoolState::Failing(_)));
        assert!(spool.append(events([3])).await.is_err(), "isn't tried at once");
        spool.room().await;
        assert_eq!(*spool.state().borrow(), SpoolState::Writable);
        assert_eq!(spool.append(events([2, 1])).await.unwrap().new, 2, "they aren't known");
        let all = [(0, "0".to_owned()), (1, "2".to_owned()), (2, "1".to_owned())];
        assert_eq!(read(&spool, 0).await, all);
        drop(spool);
        model.restart();
        let (spool, metrics) = open_model(&model, config(SpoolSync::Write));
        assert_eq!((read(&spool, 0).await, metrics.cut_bytes.get()), (all.to_vec(), 0), "cut back before");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_sync_is_not_tried_again_on_the_same_file() {
    let model = Model::default();
    let (spool, _) = open_model(&model, config(SpoolSync::Fsync));
    let _hold = spool.hold(0);
    spool.append(events([0])).await.unwrap();
    // The next operations are an append and its sync.
    model.fault(1, Fault::Io(0));
    spool.append(events([1])).await.unwrap_err();
    spool.room().await;
    spool.append(events([1])).await.unwrap();
    assert_eq!(model.names().len(), 2, "{:?}", model.names());
    // What the failed sync lost was never acknowledged.
    model.lose_power(&mut fastrand::Rng::with_seed(1));
    model.restart();
    let (spool, _) = open_model(&model, config(SpoolSync::Fsync));
    assert_eq!(read(&spool, 0).await, numbered(0..2));
}

/// Appends until there is no more room: how many events were taken.
async fn fill(spool: &Spool) -> u64 {
    for n in spool.end().. {
        match spool.append(events([n])).await {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.reason, UnavailableReason::Full);
                assert!(!error.retry_after.is_zero());
                return n;
            }
        }
    }
    0
}

#[tokio::test]
async fn a_full_spool_refuses_until_a_hold_moves_on() {
    for sync in [SpoolSync::Off, SpoolSync::Write] {
        let model = Model::default();
        let files = (sync != SpoolSync::Off).then(|| Arc::new(model.clone()) as Arc<dyn files::Files>);
        let metrics = SpoolMetrics::default();
        let spool = Spool::open_files(files, config(sync), 0, metrics.clone()).unwrap();
        let (hold, behind) = (spool.hold(0), spool.hold(0));
        for round in 0..3 {
            let taken = fill(&spool).await;
            assert!(taken > 50, "{sync:?}: {taken}");
            assert!(metrics.held_bytes.get() <= 64 << 10, "{sync:?}");
            assert_eq!(*spool.state().borrow(), SpoolState::Full);
            assert_eq!(metrics.refused.get(), round + 1);
            let mut room = Box::pin(spool.room());
            hold.advance(taken);
            assert!(!is_done(&mut room).await, "{sync:?}: the slowest hold decides");
            assert_eq!(read(&spool, spool.first()).await.len() as u64, taken - spool.first());
            behind.advance(taken);
            room.await;
            assert_eq!(*spool.state().borrow(), SpoolState::Writable);
        }
    }
}

#[tokio::test]
async fn an_append_that_can_never_be_taken_says_so() {
    for sync in [SpoolSync::Off, SpoolSync::Write] {
        let (_temp, dir) = directory();
        let (spool, _) = open(&dir, config(sync), 0);
        let error = spool.append(vec![in_session("1", &"x".repeat(40_000), 1)]).await.unwrap_err();
        assert_eq!(error.reason, UnavailableReason::TooLarge);
        assert_eq!(*spool.state().borrow(), SpoolState::Writable);
        // Longer than a segment, and still taken.
        spool.append(vec![in_session("2", &"x".repeat(20_000), 1)]).await.unwrap();
        assert_eq!(spool.end(), 1);
    }
}

#[tokio::test]
async fn a_full_disk_takes_history_first() {
    let model = Model::default();
    let (spool, metrics) =
        open_model(&model, SpoolConfig { keep_bytes: 1 << 20, ..config(SpoolSync::Write) });
    let hold = spool.hold(0);
    append_all(&spool, 0..150).await;
    hold.advance(150);
    settled(&spool).await;
    assert_eq!(spool.first(), 0, "kept as history");
    model.set_capacity(Some(model.size()));
    append_all(&spool, 150..200).await;
    assert!(spool.first() > 0 && metrics.freed_segments.get() > 0);
    assert_eq!(read(&spool, 150).await, numbered(150..200));
    assert_eq!(*spool.state().borrow(), SpoolState::Writable);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_others_have_filled_is_tried_again() {
    let model = Model::default();
    let (spool, _) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    spool.append(events([0])).await.unwrap();
    model.set_capacity(Some(model.size()));
    let error = spool.append(events([1])).await.unwrap_err();
    assert_eq!(error.reason, UnavailableReason::Full);
    assert!(tokio::time::timeout(Duration::from_mins(5), spool.room()).await.is_err());
    model.set_capacity(None);
    // Nobody appends: what tends to the spool finds out.
    let mut state = spool.state();
    tokio::select! {
        () = spool.tend() => unreachable!("it isn't closed"),
        state = state.wait_for(|state| *state == SpoolState::Writable) => drop(state.unwrap()),
    }
    assert_eq!(spool.append(events([1])).await.unwrap().new, 1);
}

#[tokio::test]
async fn too_much_that_waits_for_the_disk_is_refused() {
    let model = Model::default();
    let large = SpoolConfig { max_bytes: 1 << 30, ..config(SpoolSync::Write) };
    let (spool, metrics) = open_model(&model, large);
    let _hold = spool.hold(0);
    let event = |n: u64| vec![in_session(&n.to_string(), &"x".repeat(8 << 20), n)];
    model.hold_writes();
    let mut appends = Vec::new();
    let error = loop {
        let mut append = Box::pin(spool.append(event(appends.len() as u64)));
        if let Poll::Ready(refused) = futures_util::poll!(&mut append) {
            break refused.unwrap_err();
        }
        appends.push(append);
    };
    assert_eq!(error.reason, UnavailableReason::Behind);
    assert!((64 - 8..=64).contains(&(metrics.waiting_bytes.get() >> 20)));
    let mut room = Box::pin(spool.room());
    assert!(!is_done(&mut room).await);
    model.let_writes_through();
    for append in appends {
        append.await.unwrap();
    }
    room.await;
    assert_eq!(metrics.waiting_bytes.get(), 0);
}

#[tokio::test]
async fn readers_that_keep_up_never_touch_the_files() {
    let model = Model::default();
    let (spool, _) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    let mut reader = spool.reader(0);
    for n in 0..100 {
        let sent = event(&n.to_string());
        spool.append(vec![sent.clone()]).await.unwrap();
        let batch = reader.next().await;
        assert_eq!((batch.next, &batch.events[..]), (n + 1, &[(n, sent)][..]));
        assert!(!reader.ready());
    }
    assert_eq!(model.reads(), 0);
    assert_eq!(read(&spool, 0).await, numbered(0..100));
    assert!(model.reads() > 0, "one from the start does");
}

#[tokio::test]
async fn batches_are_bounded_and_a_reader_that_is_dropped_midway_skips_nothing() {
    let (_temp, dir) = directory();
    for sync in [SpoolSync::Write, SpoolSync::Off] {
        let large = SpoolConfig { max_bytes: 16 << 20, ..config(sync) };
        let (spool, _) = open(&dir, large, 0);
        let _hold = spool.hold(0);
        spool.append(events(0..1000)).await.unwrap();
        let mut reader = spool.reader(0);
        let mut found = Vec::new();
        while reader.ready() {
            // A read is started, and given up with the call; the next call takes it over.
            let batch = loop {
                let mut next = Box::pin(reader.next());
                if let Poll::Ready(batch) = futures_util::poll!(&mut next) {
                    break batch;
                }
                drop(next);
                tokio::task::yield_now().await;
            };
            assert!(batch.events.len() <= 256);
            found.extend(batch.events.into_iter().map(|(number, event)| (number, event.id().to_owned())));
        }
        assert_eq!(found, numbered(0..1000), "{sync:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_read_is_tried_again_and_at_last_given_up() {
    let model = Model::default();
    let (spool, metrics) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    append_all(&spool, 0..200).await;
    model.fail_reads(4);
    assert_eq!(read(&spool, 0).await, numbered(0..200));
    assert_eq!(metrics.lost_events.get(), 0);
    model.fail_reads(5);
    let found = read(&spool, 0).await;
    let lost = metrics.lost_events.get();
    assert!(lost > 0);
    assert_eq!(found, numbered(lost..200), "one file's events, and no others");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cant_be_read_gets_its_time_however_often_it_is_asked_for() {
    let model = Model::default();
    let (spool, metrics) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    append_all(&spool, 0..200).await;
    model.fail_reads(u64::MAX);
    let mut reader = spool.reader(0);
    // As a sink that has other things to do meanwhile: each call is dropped long before the next attempt is due.
    for _ in 0..20 {
        drop(tokio::time::timeout(Duration::from_millis(100), reader.next()).await);
    }
    assert_eq!(metrics.lost_events.get(), 0, "two seconds aren't five attempts a second apart");
    model.fail_reads(0);
    assert_eq!(reader.next().await.events.first().map(|(number, _)| *number), Some(0));
}

#[tokio::test]
async fn positions_outlast_the_events_that_said_them() {
    let (_temp, dir) = directory();
    let (spool, _) = open(&dir, config(SpoolSync::Write), 0);
    let hold = spool.hold(0);
    spool.append(vec![in_session("first", "quiet", 7)]).await.unwrap();
    for n in 0..300 {
        spool.append(vec![in_session(&n.to_string(), "busy", n)]).await.unwrap();
        hold.advance(spool.end());
    }
    spool.close().await;
    assert!(spool.first() > 0, "freed");
    let saved = |spool: &Spool| -> Vec<_> {
        let positions = spool.positions();
        positions.into_iter().map(|saved| (saved.session.to_string(), saved.position.seq)).collect()
    };
    let known = saved(&spool);
    assert_eq!(known, [("quiet".to_owned(), 7), ("busy".to_owned(), 299)]);
    let (spool, _) = open(&dir, config(SpoolSync::Write), 0);
    assert_eq!(saved(&spool), known);
}

#[tokio::test]
async fn a_hold_that_is_dropped_keeps_its_space() {
    let (_temp, dir) = directory();
    let (spool, _) = open(&dir, config(SpoolSync::Write), 0);
    let (one, other) = (spool.hold(0), spool.hold(0));
    append_all(&spool, 0..200).await;
    one.advance(100);
    drop(one);
    other.advance(200);
    settled(&spool).await;
    let first = spool.first();
    assert!(first > 0 && first <= 100, "{first}");
    drop(other);
    spool.close().await;
    assert_eq!(spool.append(events([200])).await.unwrap_err().reason, UnavailableReason::Closed);
    settled(&spool).await;
    assert_eq!(spool.first(), first);
    let (spool, _) = open(&dir, config(SpoolSync::Write), 150);
    assert_eq!(read(&spool, 100).await, numbered(100..200));
    assert_eq!(spool.end(), 200);
}

#[tokio::test]
async fn no_event_gets_a_number_below_the_floor() {
    let (_temp, dir) = directory();
    for (floor, end) in [(0, 3), (10, 13), (12, 16)] {
        let (spool, metrics) = open(&dir, config(SpoolSync::Write), floor);
        let hold = spool.hold(0);
        spool.append(events(floor * 10..floor * 10 + 3)).await.unwrap();
        assert_eq!(spool.end(), end);
        let found = read(&spool, 0).await;
        assert_eq!(
            found.len() as u64,
            u64::try_from(metrics.held_events.get()).unwrap() - (end - found.len() as u64)
        );
        assert_eq!(metrics.lost_events.get(), 0, "numbers that were never given aren't lost");
        spool.close().await;
        drop(hold);
    }
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_is_stopped_leaves_nobody_waiting() {
    let model = Model::default();
    let (spool, _) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    spool.append(events([0])).await.unwrap();
    settled(&spool).await;
    // As the end of the runtime does with a job that hasn't run yet.
    let log = spool.0.core.lock().log.take().unwrap();
    let append = started(spool.append(events([1]))).await;
    drop(Writer::new(Arc::clone(&spool.0), log));
    assert!(matches!(append.await.unwrap_err().reason, UnavailableReason::Failing(_)));
    spool.room().await;
    spool.append(events([1])).await.unwrap();
    assert_eq!(read(&spool, 0).await, numbered(0..2));
}

#[tokio::test]
async fn closing_waits_for_what_was_taken() {
    let model = Model::default();
    let (spool, _) = open_model(&model, config(SpoolSync::Write));
    let _hold = spool.hold(0);
    model.hold_writes();
    let append = started(spool.append(events([0]))).await;
    let close = started(spool.close()).await;
    model.let_writes_through();
    close.await;
    assert_eq!(spool.end(), 1);
    append.await.unwrap();
    assert_eq!(read(&spool, 0).await, numbered(0..1), "readers go on");
}

#[tokio::test(start_paused = true)]
async fn a_closed_spool_is_never_worth_another_try() {
    for sync in [SpoolSync::Off, SpoolSync::Write] {
        let (_temp, dir) = directory();
        let (spool, _) = open(&dir, config(sync), 0);
        spool.close().await;
        let room = tokio::time::timeout(Duration::from_mins(5), spool.room()).await;
        assert!(room.is_err(), "{sync:?}: who asks again at once would spin");
        spool.tend().await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn only_the_owner_may_read() {
    use std::os::unix::fs::PermissionsExt;
    let (_temp, dir) = directory();
    let (spool, _) = open(&dir, config(SpoolSync::Fsync), 0);
    spool.append(events([0])).await.unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = dir.file("spool");
    assert_eq!((mode(&folder), mode(&folder.join(format::segment_name(0)))), (0o700, 0o600));
}

#[test]
fn what_is_printed_holds_no_event() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (_temp, dir) = directory();
    let (spool, _) = open(&dir, config(SpoolSync::Write), 0);
    runtime.block_on(spool.append(vec![in_session("1", "secret", 1)])).unwrap();
    let printed = format!("{spool:?} {:?} {:?}", spool.reader(0), spool.hold(0));
    assert!(!printed.contains("secret"), "{printed}");
}
