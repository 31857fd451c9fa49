//! Events in a Redis stream, read back with Redis's own command line.
#![cfg(feature = "redis")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "harness/broker.rs"]
mod broker;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::process::Command;

use aep_sidecar::aep::cloudevents::CloudEvent;
use aep_sidecar::aep::{Event, cloudevents};
use aep_sidecar::export::sink::options::Tls;
use aep_sidecar::export::sink::{Secret, Target};
use aep_sidecar::export::{Metrics, Reason, SinkConfig, SinkState, Summary};
use broker::{
    Broker, Running, SINK, config, delivered, event, event_with, export, find, golden, sessions, until,
};
use serde_json::Value;
use tempfile::TempDir;

/// A server that keeps what it acknowledged when it is killed.
struct Redis {
    broker: Broker,
    /// Options of the command line that lets a person in.
    login: Vec<String>,
    _dir: TempDir,
}

impl Redis {
    async fn start(test: &str, options: &[&str]) -> Option<Self> {
        let program = find(test, "redis-server")?;
        find(test, "redis-cli")?;
        let dir = tempfile::tempdir().unwrap();
        let port = broker::free_port();
        let mut arguments = vec!["--port".to_owned(), port.to_string(), "--dir".to_owned()];
        arguments.push(dir.path().to_str().unwrap().to_owned());
        arguments.extend(["--save", "", "--appendonly", "yes", "--appendfsync", "always"].map(str::to_owned));
        arguments.extend(options.iter().map(|option| (*option).to_owned()));
        let mut broker = Broker::new(program, port, arguments);
        broker.start().await;
        let redis = Self { broker, login: Vec::new(), _dir: dir };
        redis.is_up().await;
        Some(redis)
    }

    /// Waits until it answers for itself: while it loads its data it listens already.
    async fn is_up(&self) {
        until("redis answers", || !self.say(&["PING"]).starts_with("LOADING")).await;
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/events", self.broker.port)
    }

    /// What the command line says.
    fn say(&self, command: &[&str]) -> String {
        let output = Command::new("redis-cli")
            .args(["-p", &self.broker.port.to_string()])
            .args(&self.login)
            .args(command)
            .output()
            .unwrap();
        [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8(bytes).unwrap())
            .concat()
            .trim()
            .to_owned()
    }

    fn does(&self, command: &[&str]) {
        let said = self.say(command);
        assert!(["OK", "1"].contains(&said.as_str()), "{command:?}: {said}");
    }

    /// The stream's entries, each as its fields.
    fn entries(&self) -> Vec<BTreeMap<String, String>> {
        let text = self.say(&["--json", "XRANGE", "events", "-", "+"]);
        let entries: Vec<(String, Vec<String>)> =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let fields =
            |fields: Vec<String>| fields.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect();
        entries.into_iter().map(|(_, of_it)| fields(of_it)).collect()
    }

    /// The stream's events, as its CloudEvents say.
    fn events(&self) -> Vec<Event> {
        let back = |fields: &BTreeMap<String, String>| {
            cloudevents::inverse::structured(fields["event"].as_bytes(), &[]).unwrap()
        };
        self.entries().iter().map(|fields| back(fields).event).collect()
    }
}

/// The same without what comes again.
fn first_ones(ids: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    ids.into_iter().filter(|id| seen.insert(id.clone())).collect()
}

#[tokio::test]
async fn every_event_is_one_entry_with_fields_to_filter_by() {
    let Some(redis) = Redis::start("every_event_is_one_entry_with_fields_to_filter_by", &[]).await else {
        return;
    };
    let events = golden("every_event_is_one_entry_with_fields_to_filter_by");
    for (batch, maxlen) in [(1, None), (7, Some("100000"))] {
        redis.say(&["DEL", "events"]);
        let config = config(&redis.url(), |sink| {
            sink.batch = NonZeroUsize::new(batch);
            sink.options.own.extend(maxlen.map(|longest| ("maxlen".to_owned(), longest.to_owned())));
        });
        let (summary, _) = export(&config, events.clone()).await;
        assert_eq!(summary, delivered(events.len()));
        let entries = redis.entries();
        assert_eq!(entries.len(), events.len());
        for event in &events {
            let mapped = String::from_utf8(CloudEvent::of(event).unwrap().structured()).unwrap();
            let entry = entries.iter().find(|entry| entry["event"] == mapped).unwrap();
            let json: Value = serde_json::from_str(&mapped).unwrap();
            for name in ["id", "source", "type"] {
                assert_eq!(entry[name], json[name].as_str().unwrap());
            }
            assert_eq!(entry.len(), 4);
        }
        assert_eq!(sessions(&redis.events()), sessions(&events));
    }
}

#[tokio::test]
async fn a_stream_is_kept_about_as_long_as_asked() {
    let Some(redis) = Redis::start("a_stream_is_kept_about_as_long_as_asked", &[]).await else { return };
    let config =
        config(&redis.url(), |sink| drop(sink.options.own.insert("maxlen".to_owned(), "10".to_owned())));
    let (summary, _) = export(&config, (0..1000).map(|seq| event("s", seq)).collect()).await;
    assert_eq!(summary, delivered(1000));
    // Trimmed by whole nodes of 100 entries.
    let left: usize = redis.say(&["XLEN", "events"]).parse().unwrap();
    assert!((10..=200).contains(&left), "{left}");
}

#[tokio::test]
async fn a_server_killed_in_the_middle_loses_nothing() {
    let Some(mut redis) = Redis::start("a_server_killed_in_the_middle_loses_nothing", &[]).await else {
        return;
    };
    let running = Running::start(&config(&redis.url(), |sink| sink.batch = NonZeroUsize::new(3)));
    let events: Vec<_> =
        (0..100).flat_map(|seq| ["a", "b", "c", "d", "e"].map(|session| event(session, seq))).collect();
    for round in 1..=3_usize {
        running.send(events[(round - 1) * 150..round * 150].to_vec()).await;
        running.has_delivered(u64::try_from(round * 150 - 140).unwrap()).await;
        redis.broker.kill();
        running.reaches(SinkState::Paused(Reason::Refused)).await;
        redis.broker.start().await;
        redis.is_up().await;
    }
    running.send(events[450..].to_vec()).await;
    assert_eq!(running.finish().await, delivered(events.len()));
    let stored = sessions(&redis.events()).into_iter().map(|(session, ids)| (session, first_ones(ids)));
    assert_eq!(stored.collect::<BTreeMap<_, _>>(), sessions(&events));
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_waited_for() {
    let Some(mut redis) = Redis::start("a_server_that_is_not_there_yet_is_waited_for", &[]).await else {
        return;
    };
    redis.broker.kill();
    let running = Running::start(&config(&redis.url(), |_| {}));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Paused(Reason::Refused)).await;
    redis.broker.start().await;
    assert_eq!(running.finish().await, delivered(1));
}

/// What is wrong pauses the sink with that state, and once it is mended everything is delivered.
async fn pauses_until_mended(
    redis: &Redis,
    state: SinkState,
    change: impl FnOnce(&mut SinkConfig),
    mend: impl FnOnce(&Redis),
) {
    let running = Running::start(&config(&redis.url(), change));
    running.send((0..5).map(|seq| event("s", seq)).collect()).await;
    running.reaches(state).await;
    assert_eq!(running.delivered(), 0);
    mend(redis);
    assert_eq!(running.finish().await, delivered(5));
    assert_eq!(redis.events().len(), 5);
    redis.say(&["DEL", "events"]);
}

#[tokio::test]
async fn a_server_that_takes_nothing_now_is_tried_again() {
    let Some(redis) = Redis::start("a_server_that_takes_nothing_now_is_tried_again", &[]).await else {
        return;
    };
    let paused = SinkState::Paused(Reason::Unavailable);
    redis.does(&["CONFIG", "SET", "maxmemory", "1"]);
    pauses_until_mended(&redis, paused, |_| {}, |redis| redis.does(&["CONFIG", "SET", "maxmemory", "0"]))
        .await;
    // In a transaction the refusal stands within.
    redis.does(&["CONFIG", "SET", "maxmemory", "1"]);
    let batches = |sink: &mut SinkConfig| sink.batch = NonZeroUsize::new(5);
    pauses_until_mended(&redis, paused, batches, |redis| redis.does(&["CONFIG", "SET", "maxmemory", "0"]))
        .await;
    redis.does(&["REPLICAOF", "127.0.0.1", "1"]);
    pauses_until_mended(&redis, paused, |_| {}, |redis| redis.does(&["REPLICAOF", "NO", "ONE"])).await;
    redis.does(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let mend = |redis: &Redis| redis.does(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    pauses_until_mended(&redis, paused, |_| {}, mend).await;
}

#[tokio::test]
async fn what_takes_a_person_pauses_the_sink_and_loses_nothing() {
    let Some(redis) = Redis::start("what_takes_a_person_pauses_the_sink_and_loses_nothing", &[]).await else {
        return;
    };
    let misconfigured = SinkState::Misconfigured;
    redis.does(&["SET", "events", "a string"]);
    pauses_until_mended(
        &redis,
        misconfigured(Reason::NotFound),
        |_| {},
        |redis| redis.does(&["DEL", "events"]),
    )
    .await;
    redis.does(&["SET", "events", "a string"]);
    let batches = |sink: &mut SinkConfig| sink.batch = NonZeroUsize::new(5);
    pauses_until_mended(&redis, misconfigured(Reason::NotFound), batches, |redis| {
        redis.does(&["DEL", "events"])
    })
    .await;
    // A user who may log in and do nothing, until allowed to.
    redis.does(&["ACL", "SETUSER", "me", "on", ">hunter2", "resetkeys", "-@all"]);
    let user = |sink: &mut SinkConfig| {
        sink.options.credentials.username = Some("me".to_owned());
        sink.options.credentials.password = Some(Secret::fixed("hunter2"));
    };
    let mend = |redis: &Redis| redis.does(&["ACL", "SETUSER", "me", "~events", "+xadd"]);
    pauses_until_mended(&redis, misconfigured(Reason::Unauthorized), user, mend).await;
}

#[tokio::test]
async fn a_password_is_read_again_until_it_is_right() {
    let options = ["--requirepass", "hunter2"];
    let Some(mut redis) = Redis::start("a_password_is_read_again_until_it_is_right", &options).await else {
        return;
    };
    redis.login = ["--no-auth-warning", "-a", "hunter2"].map(str::to_owned).to_vec();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "wrong").unwrap();
    let password = |sink: &mut SinkConfig| {
        sink.options.credentials.password = Some(Secret::in_file(file.clone(), "wrong"));
    };
    let mend = |_: &Redis| std::fs::write(&file, "hunter2").unwrap();
    pauses_until_mended(&redis, SinkState::Misconfigured(Reason::Unauthorized), password, mend).await;
    // None at all is refused by the first command.
    let running = Running::start(&config(&redis.url(), |_| {}));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Unauthorized)).await;
    // In the URL.
    let url = redis.url().replace("redis://", "redis://:hunter2@");
    let (summary, _) = export(&config(&url, |_| {}), vec![event("s", 0)]).await;
    assert_eq!(summary, delivered(1));
    assert!(!format!("{:?}", Target::parse(&url).unwrap()).contains("hunter2"));
}

#[tokio::test]
async fn an_event_beyond_the_servers_bound_is_a_dead_letter() {
    let Some(redis) = Redis::start("an_event_beyond_the_servers_bound_is_a_dead_letter", &[]).await else {
        return;
    };
    redis.does(&["CONFIG", "SET", "proto-max-bulk-len", "1048576"]);
    let large = event_with("s", 1, &format!(r#","data":{{"x":"{}"}}"#, "x".repeat(1 << 21)));
    let events = vec![event("s", 0), large, event("s", 2)];
    let (summary, metrics): (_, Metrics) = export(&config(&redis.url(), |_| {}), events).await;
    assert_eq!(summary, Summary { delivered: 2, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 1);
    assert_eq!(redis.events().iter().map(|event| event.id().to_owned()).collect::<Vec<_>>(), ["s-0", "s-2"]);
}

#[tokio::test]
async fn a_database_is_chosen_by_number() {
    let Some(redis) = Redis::start("a_database_is_chosen_by_number", &[]).await else { return };
    let database = |number: &'static str| {
        move |sink: &mut SinkConfig| drop(sink.options.own.insert("database".to_owned(), number.to_owned()))
    };
    let (summary, _) = export(&config(&redis.url(), database("3")), vec![event("s", 0)]).await;
    assert_eq!((summary, redis.say(&["-n", "3", "XLEN", "events"])), (delivered(1), "1".to_owned()));
    let running = Running::start(&config(&redis.url(), database("99")));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::NotFound)).await;
}

#[tokio::test]
async fn a_certificate_must_be_trusted_on_both_sides() {
    let Some(program) = find("a_certificate_must_be_trusted_on_both_sides", "redis-server") else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    broker::certificates(dir.path());
    let port = broker::free_port();
    let mut arguments = vec!["--port".to_owned(), "0".to_owned(), "--tls-port".to_owned(), port.to_string()];
    for (option, name) in [
        ("--tls-cert-file", "server.pem"),
        ("--tls-key-file", "server.key"),
        ("--tls-ca-cert-file", "ca.pem"),
    ] {
        arguments.extend([option.to_owned(), file(name).to_str().unwrap().to_owned()]);
    }
    arguments.extend(["--save", ""].map(str::to_owned));
    let mut server = Broker::new(program, port, arguments);
    server.start().await;
    let url = format!("rediss://localhost:{port}/events");
    let tls = |ca: &str, identity: bool| Tls {
        ca: Some(file(ca)),
        identity: identity.then(|| (file("client.pem"), file("client.key"))),
    };
    for wrong in [tls("other.pem", true), tls("ca.pem", false)] {
        let running = Running::start(&config(&url, |sink| sink.options.tls = wrong));
        running.send(vec![event("s", 0)]).await;
        running.reaches(SinkState::Misconfigured(Reason::Certificate)).await;
    }
    let (summary, _) =
        export(&config(&url, |sink| sink.options.tls = tls("ca.pem", true)), vec![event("s", 0)]).await;
    assert_eq!(summary, delivered(1));
}
