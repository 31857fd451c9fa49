//! What the file sink leaves in its directory: every event once, whole lines only, through full disks, torn files and
//! wrong permissions.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]
#![cfg(feature = "file")]

#[path = "harness/harness.rs"]
mod harness;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aep_sidecar::aep::cloudevents::CloudEvent;
use aep_sidecar::aep::{Event, Registry};
use aep_sidecar::export::{
    Ends, Export, ExportConfig, Feed, FeedError, Metrics, Reason, RetryPolicy, SinkState, Summary, Target,
};

/// The name of the one sink.
const SINK: &str = "default";
/// The longest that a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

struct Once(Option<Vec<Event>>);

impl Feed for Once {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        Ok(self.0.take())
    }
}

fn events(session: &str, count: u64) -> Vec<Event> {
    let event = |seq| {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}}}"#
        ))
    };
    (0..count).map(|seq| event(seq).unwrap()).collect()
}

fn config(directory: &Path, own: &[(&str, &str)]) -> ExportConfig {
    let target = Target::parse(&format!("file://{}", directory.display())).unwrap();
    let mut config = ExportConfig::new(target);
    config.sinks[0].retry = RetryPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    config.sinks[0].options.own =
        own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    config
}

fn open(config: &ExportConfig, metrics: &Metrics) -> Export {
    Export::open(config, &Arc::new(Registry::core()), metrics.clone()).unwrap()
}

async fn export(config: &ExportConfig, events: Vec<Event>) -> Summary {
    let run = open(config, &Metrics::default()).run_feed(Once(Some(events)), Ends::default());
    tokio::time::timeout(PATIENCE, run).await.expect("the export ends").unwrap()
}

fn delivered(count: usize) -> Summary {
    Summary { delivered: u64::try_from(count).unwrap(), ..Summary::default() }
}

/// The files of events, the oldest first.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    files.sort();
    files
}

fn lines(directory: &Path) -> Vec<String> {
    let text: String = files(directory).iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    assert!(text.is_empty() || text.ends_with('\n'), "whole lines only");
    text.lines().map(str::to_owned).collect()
}

fn mapped(events: &[Event]) -> Vec<String> {
    let line = |event| String::from_utf8(CloudEvent::of(event).unwrap().structured()).unwrap();
    events.iter().map(line).collect()
}

/// Runs until the sink is told to be in trouble for `reason`, lets that be mended, and runs to the end.
async fn mended(
    config: &ExportConfig,
    events: Vec<Event>,
    expected: SinkState,
    mend: impl FnOnce(),
) -> Summary {
    let metrics = Metrics::default();
    let export = open(config, &metrics);
    let (_, status) = export.statuses().remove(0);
    let run = export.run_feed(Once(Some(events)), Ends::default());
    let trouble = async {
        while status.current() != expected {
            tokio::task::yield_now().await;
        }
        assert_eq!(metrics.sink(SINK).delivered.get(), 0);
        mend();
    };
    let both = async { tokio::join!(run, trouble).0.unwrap() };
    tokio::time::timeout(PATIENCE, both)
        .await
        .unwrap_or_else(|_| panic!("{expected:?} or its end never comes"))
}

#[tokio::test]
async fn every_event_is_a_line_in_the_order_of_arrival() {
    let text = match harness::conformance("every_event_is_a_line_in_the_order_of_arrival") {
        Some(dir) => harness::read(&dir.join("fixtures/golden/golden.jsonl")),
        None => harness::corpus("events.jsonl"),
    };
    let sent: Vec<Event> = text.lines().map(|line| Event::parse_str(line).unwrap()).collect();
    let dir = tempfile::tempdir().unwrap();
    let directory = dir.path().join("not/yet/there");
    assert_eq!(export(&config(&directory, &[]), sent.clone()).await, delivered(sent.len()));
    assert_eq!(lines(&directory), mapped(&sent));
    assert_eq!(files(&directory).len(), 1);
    let name = files(&directory)[0].file_name().unwrap().to_str().unwrap().to_owned();
    assert!(name.starts_with("events-20") && name.ends_with("Z.jsonl") && name.len() == 33, "{name}");

    // The next process goes on with the file.
    let more = events("more", 3);
    assert_eq!(export(&config(&directory, &[]), more.clone()).await, delivered(3));
    assert_eq!(lines(&directory), [mapped(&sent), mapped(&more)].concat());
    assert_eq!(files(&directory).len(), 1);
}

#[tokio::test]
async fn a_file_has_its_bound_and_so_many_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let with = |own| config(dir.path(), own);
    for n in 0..5 {
        let sent = events(&n.to_string(), 10);
        assert_eq!(export(&with(&[("rotate.bytes", "1KiB"), ("keep", "3")]), sent).await, delivered(10));
    }
    assert_eq!(files(dir.path()).len(), 3);
    let kept: Vec<String> = (2..5).flat_map(|n| mapped(&events(&n.to_string(), 10))).collect();
    assert_eq!(lines(dir.path()), kept);
}

#[tokio::test]
async fn what_a_crash_tore_is_mended_and_the_event_comes_again() {
    let dir = tempfile::tempdir().unwrap();
    let sent = events("s", 4);
    assert_eq!(export(&config(dir.path(), &[]), sent[..2].to_vec()).await, delivered(2));
    let path = files(dir.path()).remove(0);
    let torn = std::fs::read_to_string(&path).unwrap() + mapped(&sent)[2].get(..40).unwrap();
    std::fs::write(&path, torn).unwrap();
    assert_eq!(export(&config(dir.path(), &[]), sent[2..].to_vec()).await, delivered(2));
    assert_eq!(lines(dir.path()), mapped(&sent));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_full_disk_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    // Writing to this device fails as on a full disk.
    let full = dir.path().join("events-20260703T101401.500Z.jsonl");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    let sent = events("s", 3);
    let mend = || std::fs::remove_file(&full).unwrap();
    let summary =
        mended(&config(dir.path(), &[]), sent.clone(), SinkState::Paused(Reason::Write), mend).await;
    assert_eq!(summary, delivered(3));
    assert_eq!(lines(dir.path()), mapped(&sent));
}

#[tokio::test]
async fn a_path_that_is_a_file_is_for_a_person_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for below in ["", "deeper/still"] {
        let place = dir.path().join("place");
        std::fs::write(&place, "").unwrap();
        let directory = if below.is_empty() { place.clone() } else { place.join(below) };
        let sent = events("s", 3);
        let mend = || std::fs::remove_file(&place).unwrap();
        let expected = SinkState::Misconfigured(Reason::NotFound);
        assert_eq!(mended(&config(&directory, &[]), sent.clone(), expected, mend).await, delivered(3));
        assert_eq!(lines(&directory), mapped(&sent));
        std::fs::remove_dir_all(&place).unwrap();
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn no_permission_is_for_a_person() {
    // Where not even root may create a directory: forbidden, or read-only.
    let config = config(Path::new("/sys/aep-events"), &[]);
    let metrics = Metrics::default();
    let export = open(&config, &metrics);
    let (_, status) = export.statuses().remove(0);
    tokio::select! {
        _ = export.run_feed(Once(Some(events("s", 1))), Ends::default()) => panic!("it can't"),
        told = tokio::time::timeout(PATIENCE, async {
            while status.current() != SinkState::Misconfigured(Reason::Unauthorized) {
                tokio::task::yield_now().await;
            }
        }) => assert!(told.is_ok(), "{:?}", status.current()),
    }
}

#[tokio::test]
async fn a_directory_has_one_writer_and_the_next_one_waits() {
    let dir = tempfile::tempdir().unwrap();
    let lock = std::fs::File::create(dir.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let sent = events("s", 3);
    let summary =
        mended(&config(dir.path(), &[]), sent.clone(), SinkState::Paused(Reason::Write), || drop(lock)).await;
    assert_eq!(summary, delivered(3));
    assert_eq!(lines(dir.path()), mapped(&sent));
}

#[test]
fn an_option_that_no_file_sink_has_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let opened = Export::open(
        &config(dir.path(), &[("compression", "gzip")]),
        &Arc::new(Registry::core()),
        Metrics::default(),
    );
    let complaint = opened.unwrap_err().to_string();
    assert!(complaint.contains("OPT_COMPRESSION is no option of file sinks: OPT_KEEP"), "{complaint}");
}
