//! What the spool promises, on the real file system and on a model of one.

use std::num::NonZeroUsize;

mod claims;
mod crash;
mod damage;
mod model;

use super::*;
use crate::aep::Position;

fn event(id: &str) -> Event {
    in_session(id, "s", 1)
}

fn in_session(id: &str, session: &str, seq: u64) -> Event {
    let session = serde_json::to_string(session).unwrap();
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{id}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":{session},"seq":{seq}}}"#
    ))
    .unwrap()
}

fn events(ids: impl IntoIterator<Item = u64>) -> Vec<Event> {
    ids.into_iter().map(|id| event(&id.to_string())).collect()
}

fn config(sync: SpoolSync) -> SpoolConfig {
    SpoolConfig {
        sync,
        max_bytes: 64 << 10,
        keep_bytes: 0,
        recent_bytes: 2000,
        dedupe: NonZeroUsize::new(1000).unwrap(),
        keeps_positions: true,
    }
}

fn directory() -> (tempfile::TempDir, Arc<StateDir>) {
    let temp = tempfile::tempdir().unwrap();
    let dir = Arc::new(StateDir::open(temp.path()).unwrap());
    (temp, dir)
}

fn open(dir: &Arc<StateDir>, config: SpoolConfig, floor: u64) -> (Spool, SpoolMetrics) {
    let metrics = SpoolMetrics::default();
    (Spool::open(Some(Arc::clone(dir)), config, floor, metrics.clone()).unwrap(), metrics)
}

/// Waits until nothing is under way.
async fn settled(spool: &Spool) {
    loop {
        let changed = spool.0.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        if spool.0.core.lock().is_idle() {
            return;
        }
        changed.await;
    }
}

/// Everything committed, from a number on.
async fn read(spool: &Spool, from: u64) -> Vec<(u64, String)> {
    let mut reader = spool.reader(from);
    let mut all = Vec::new();
    while reader.ready() {
        let batch = reader.next().await;
        all.extend(batch.events.iter().map(|(number, event)| (*number, event.id().to_owned())));
    }
    all
}

fn numbered(ids: impl IntoIterator<Item = u64>) -> Vec<(u64, String)> {
    ids.into_iter().map(|id| (id, id.to_string())).collect()
}

#[tokio::test]
async fn what_was_appended_is_read_in_order_in_every_mode() {
    for sync in [SpoolSync::Off, SpoolSync::Write, SpoolSync::Fsync] {
        let (_temp, dir) = directory();
        let (spool, metrics) = open(&dir, config(sync), 0);
        let _hold = spool.hold(0);
        for n in 0..20 {
            let appended = spool.append(events(n * 5..n * 5 + 5)).await.unwrap();
            assert_eq!(appended, Appended { new: 5, duplicates: 0 });
        }
        assert_eq!(read(&spool, 0).await, numbered(0..100), "{sync:?}");
        assert_eq!(read(&spool, 57).await, numbered(57..100), "{sync:?}");
        assert_eq!((spool.first(), spool.end(), metrics.events.get()), (0, 100, 100));
    }
}

#[tokio::test]
async fn what_was_appended_is_there_after_a_restart_and_still_known() {
    for sync in [SpoolSync::Write, SpoolSync::Fsync] {
        let (_temp, dir) = directory();
        let (spool, _) = open(&dir, config(sync), 0);
        let hold = spool.hold(0);
        spool.append((0..100).map(|n| in_session(&n.to_string(), "s", n)).collect()).await.unwrap();
        // As the death of the process leaves it: the hold is gone, and nothing was freed for that.
        std::mem::forget(hold);
        drop(spool);
        let (spool, metrics) = open(&dir, config(sync), 0);
        let _hold = spool.hold(0);
        let appended = spool.append(events(90..110)).await.unwrap();
        assert_eq!(appended, Appended { new: 10, duplicates: 10 });
        assert_eq!(read(&spool, 0).await, numbered(0..110));
        assert_eq!(spool.positions()[0].position, Position::new(0, 99));
        assert_eq!((metrics.cut_bytes.get(), metrics.lost_events.get()), (0, 0));
    }
}
