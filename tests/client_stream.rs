//! A subscription at the wire: against the relay itself, and against relays that refuse, break off, forget,
//! repeat themselves, fall silent and talk nonsense.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/fake.rs"]
mod fake;
#[path = "harness/server.rs"]
mod server;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use aep_sidecar::aep::{Capture, Position, Registry};
use aep_sidecar::client::metrics::{ByCause, BySkip, Skip};
use aep_sidecar::client::{CatchUp, Cause, FilterText, Lost, Patience, Secret, Status};
use aep_sidecar::relay::http::{Ends, Relay, Tls, serve};
use aep_sidecar::relay::{self, Access, Hub, Limits};
use fake::{Asked, Fake, Reader, config};
use server::{Server, event, event_with};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

fn after(sessions: &[(&str, u64)]) -> Asked {
    Asked::After(sessions.iter().map(|(session, seq)| ((*session).to_owned(), 0, *seq)).collect())
}

fn lost(session: &str, after: u64, earliest: Option<u64>) -> Lost {
    let at = |seq| Position::new(0, seq);
    Lost { session: session.into(), after: Some(at(after)), earliest: earliest.map(at) }
}

fn disconnects(reader: &Reader, cause: Cause) -> u64 {
    reader.metrics.disconnects.get_or_create(&ByCause { cause }).get()
}

fn set(given: &[String]) -> BTreeSet<&str> {
    given.iter().map(String::as_str).collect()
}

// Against the relay itself.

#[tokio::test]
async fn a_cold_start_reads_everything_then_lives() {
    let server = Server::open().await;
    server.ingest(&[event("a b:c", 1), event("t", 1), event("a b:c", 2)]).await;
    let mut reader = Reader::new(&config(server.address), &[]);
    assert_eq!(reader.status.current(), Status::Connecting);
    reader.until(3).await;
    reader.until_status(Status::Live).await;
    server.ingest(&[event("a b:c", 3)]).await;
    reader.until(4).await;
    assert_eq!(set(&reader.given), ["a b:c:1", "a b:c:2", "a b:c:3", "t:1"].into());
    assert_eq!(reader.metrics.events.get(), 4);
}

#[tokio::test]
async fn a_start_resumes_drains_and_catches_up() {
    // Three positions in a request, twenty sessions to resume.
    let limits = Limits { max_from: 3, ..Limits::default() };
    let server = Server::start(limits, None).await;
    let names: Vec<String> = (0..20).map(|n| format!("s{n}")).collect();
    for name in &names {
        server.ingest(&(0..4).map(|seq| event(name, seq)).collect::<Vec<_>>()).await;
    }
    server.ingest(&[event("began", 0), event("began", 1)]).await;
    let resume: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let mut config = config(server.address);
    config.overlap = 0;
    let mut reader = Reader::new(&config, &resume);
    reader.until_status(Status::Live).await;
    let mut expected: Vec<String> =
        names.iter().flat_map(|name| [format!("{name}:2"), format!("{name}:3")]).collect();
    expected.extend(["began:0".to_owned(), "began:1".to_owned()]);
    reader.given.sort();
    expected.sort();
    assert_eq!(reader.given, expected, "each once: what was resumed is dropped from the history");
    assert!(reader.lost.is_empty());
    assert!(reader.metrics.refused_resumes.get() > 0);
}

#[tokio::test]
async fn what_the_relay_evicted_is_told() {
    let server = Server::start(Limits { buffer: 5, ..Limits::default() }, None).await;
    server.ingest(&(0..20).map(|seq| event("s", seq)).collect::<Vec<_>>()).await;
    server.ingest(&(0..5).map(|seq| event("t", seq)).collect::<Vec<_>>()).await;
    let mut reader = Reader::new(&config(server.address), &[("s", 3), ("t", 2)]);
    reader.until_status(Status::Live).await;
    assert_eq!(reader.lost, [lost("s", 3, Some(15))]);
    assert_eq!(reader.metrics.losses.get(), 1);
    assert_eq!(reader.given.iter().filter(|event| event.starts_with("s:")).count(), 5);
}

#[tokio::test]
async fn filter_ceiling_and_token_reach_the_relay() {
    let server = Server::start(Limits::default(), Some("hunter2")).await;
    let post = |lines: Vec<String>| {
        server.post("application/x-ndjson", lines.join("\n")).bearer_auth("hunter2").send()
    };
    let full = event_with("s", 1, r#","capture":"full","data":{"error":{"type":"E","message":"x"}}"#);
    post(vec![event("s", 0), full.replace("run.started", "tool.failed")]).await.unwrap();
    let mut config = config(server.address);
    config.token = Some(Secret::new("hunter2").unwrap());
    config.filter = Some(FilterText::parse(r#"{"type":["tool.*"]}"#).unwrap());
    config.ceiling = Some(Capture::Metadata);
    let mut reader = Reader::new(&config, &[]);
    let update = reader.subscription.next().await;
    let aep_sidecar::client::Update::Events(events) = update else { panic!("{update:?}") };
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].seq(), events[0].capture()), (Some(1), Capture::Metadata));
    assert_eq!(events[0].data(), Some(r#"{"error":{"type":"E"}}"#));
}

#[tokio::test]
async fn an_orderly_end_of_the_relay_is_known_as_one() {
    let server = Server::open().await;
    let mut reader = Reader::new(&config(server.address), &[]);
    reader.until_status(Status::Live).await;
    server.hub.close();
    reader.until_status(Status::Connecting).await;
    assert_eq!(disconnects(&reader, Cause::ShuttingDown), 1);
}

#[tokio::test]
async fn only_a_trusted_certificate_is_talked_to() {
    let pair = || {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    };
    let ((certificate, key), (other, _)) = (pair(), pair());
    let hub = Hub::new(Limits::default(), Arc::new(Registry::core()), relay::Metrics::default());
    let tracker = TaskTracker::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let relay = Relay::new(hub.clone(), Limits::default(), Access::new(None), tracker.clone());
    let tls = Tls::new(certificate.as_bytes(), key.as_bytes()).unwrap();
    tracker.spawn(serve(relay, listener, Some(tls), tracker.clone(), Ends::default()));
    let mut config = config(address);
    config.relay = format!("https://{address}").parse().unwrap();
    config.ca = Some(other.into_bytes());
    Reader::new(&config, &[]).until_status(Status::Failing(Cause::Untrusted)).await;
    config.ca = Some(certificate.into_bytes());
    Reader::new(&config, &[]).until_status(Status::Live).await;
}

// Requests.

#[tokio::test]
async fn a_request_carries_what_it_should_and_where() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.token = Some(Secret::new("hunter2").unwrap());
    config.overlap = 10;
    let mut reader = Reader::new(&config, &[("old", 5), ("a \"b\"\n", 50)]);
    let conn = reader.during(fake.accept()).await;
    assert_eq!(conn.header("accept"), Some("text/event-stream"));
    assert_eq!(conn.header("authorization"), Some("Bearer hunter2"));
    assert!(!conn.head.lines().next().unwrap().contains("hunter2"));
    assert!(conn.is_live());
    assert_eq!(conn.asked(), after(&[("a \"b\"\n", 40), ("old", 0)]), "newest first, a little below");
}

#[tokio::test]
async fn the_newest_ride_the_live_request_and_the_rest_is_drained_once_it_is_open() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.max_resume, config.overlap) = (2, 0);
    let mut reader = Reader::new(&config, &[("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]);
    reader
        .during(async {
            let mut live = fake.streaming().await;
            assert_eq!(live.asked(), after(&[("e", 1), ("d", 1)]));
            let drain = fake.streaming().await;
            assert_eq!((drain.is_live(), drain.asked()), (false, after(&[("c", 1), ("b", 1)])));
            live.event(&event("e", 2)).await;
            drain.complete().await;
            let mut drain = fake.streaming().await;
            assert_eq!(drain.asked(), after(&[("a", 1)]));
            drain.event(&event("a", 2)).await;
            drain.complete().await;
            let mut history = fake.streaming().await;
            assert_eq!((history.is_live(), history.asked()), (false, Asked::All));
            for line in [event("a", 1), event("e", 2), event("began", 0)] {
                history.event(&line).await;
            }
            history.complete().await;
            live.event(&event("e", 3)).await;
            live
        })
        .await;
    reader.until(4).await;
    assert_eq!(set(&reader.given), ["e:2", "a:2", "began:0", "e:3"].into());
    assert_eq!(reader.given.len(), 4);
    reader.until_status(Status::Live).await;
}

#[tokio::test]
async fn what_came_live_while_older_is_owed_is_no_position() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.max_resume, config.overlap) = (1, 0);
    let mut reader = Reader::new(&config, &[("owed", 1), ("new", 1)]);
    let (mut live, mut drain) = reader
        .during(async {
            let mut live = fake.streaming().await;
            let drain = fake.streaming().await;
            assert_eq!(drain.asked(), after(&[("owed", 1)]));
            live.event(&event("owed", 90)).await;
            (live, drain)
        })
        .await;
    reader.until(1).await;
    drain.event(&event("owed", 2)).await;
    reader.until(2).await;
    live.event(&event("new", 2)).await;
    reader.until(3).await;
    drop(live);
    // The drain was cut short: the session is where the drain was, whatever came live.
    let asked = reader
        .during(async {
            drain.closed().await;
            let _live = fake.streaming().await;
            fake.accept().await.asked()
        })
        .await;
    assert_eq!(asked, after(&[("owed", 2)]));
}

#[tokio::test]
async fn a_refused_set_is_halved_at_once_and_the_rest_drained() {
    for status in [400, 413, 414, 431] {
        let fake = Fake::open().await;
        let mut config = fake.config();
        // A wait would be noticed.
        config.patience = Patience { initial: Duration::from_hours(1), max: Duration::from_hours(1) };
        let names: Vec<String> = (0..9).map(|n| format!("s{n}")).collect();
        let resume: Vec<_> = names.iter().map(|name| (name.as_str(), 1)).collect();
        let mut reader = Reader::new(&config, &resume);
        let mut sizes = Vec::new();
        let mut drained = BTreeSet::new();
        reader
            .during(async {
                let mut streams = Vec::new();
                loop {
                    let mut conn = fake.accept().await;
                    match conn.asked() {
                        Asked::After(entries) if entries.len() > 2 => {
                            sizes.push(entries.len());
                            conn.refuse(status).await;
                        }
                        Asked::After(entries) => {
                            conn.open().await;
                            drained.extend(entries.into_iter().map(|(session, ..)| session));
                            if conn.is_live() { streams.push(conn) } else { conn.complete().await }
                        }
                        Asked::All => return conn.refuse(status).await,
                        Asked::Now => panic!("a set of two is taken"),
                    }
                }
            })
            .await;
        assert_eq!(sizes[..2], [9, 4]);
        assert_eq!(drained.len(), 9, "every session is asked for");
        assert!(reader.lost.is_empty());
        assert_eq!(reader.metrics.refused_resumes.get(), sizes.len() as u64);
    }
}

#[tokio::test]
async fn a_session_that_is_refused_alone_is_told_and_left_to_the_history() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[("good", 1), ("bad", 7)]);
    let mut positions = Vec::new();
    let live = reader
        .during(async {
            let mut live = None;
            loop {
                let mut conn = fake.accept().await;
                match conn.asked() {
                    Asked::After(entries) if entries.iter().any(|(session, ..)| session == "bad") => {
                        conn.refuse(400).await;
                    }
                    Asked::All => {
                        conn.open().await;
                        conn.event(&event("bad", 8)).await;
                        conn.event(&event("good", 1)).await;
                        conn.complete().await;
                        return live;
                    }
                    asked => {
                        conn.open().await;
                        positions.push(asked);
                        if conn.is_live() { live = Some(conn) } else { conn.complete().await }
                    }
                }
            }
        })
        .await;
    reader.until_status(Status::Live).await;
    assert!(live.is_some());
    assert_eq!(positions, [Asked::Now, after(&[("good", 0)])]);
    assert_eq!(reader.lost, [lost("bad", 7, None)]);
    assert_eq!(reader.given, ["bad:8"]);
}

#[tokio::test]
async fn a_relay_that_refuses_everything_costs_no_position() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[("s", 5)]);
    reader
        .during(async {
            fake.accept().await.refuse(400).await;
            let plain = fake.accept().await;
            assert_eq!(plain.asked(), Asked::Now);
            plain.refuse(400).await;
        })
        .await;
    reader.until_status(Status::Failing(Cause::Refused)).await;
    let again = reader.during(fake.accept()).await;
    assert_eq!(again.asked(), after(&[("s", 0)]), "the request was at fault, not the set");
    assert!(reader.lost.is_empty());
}

#[tokio::test]
async fn a_cold_start_without_all_is_live() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[]);
    let mut live = reader
        .during(async {
            let conn = fake.accept().await;
            assert_eq!(conn.asked(), Asked::All);
            conn.refuse(400).await;
            let conn = fake.streaming().await;
            assert_eq!((conn.is_live(), conn.asked()), (true, Asked::Now));
            conn
        })
        .await;
    live.event(&event("s", 3)).await;
    reader.until(1).await;
    assert_eq!(reader.status.current(), Status::Live);
}

#[tokio::test]
async fn without_catch_up_the_history_is_not_asked_for() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.catch_up = CatchUp::Off;
    let mut reader = Reader::new(&config, &[("s", 5)]);
    let mut live = reader.during(fake.streaming()).await;
    reader.until_status(Status::Live).await;
    live.event(&event("began", 3)).await;
    reader.until(1).await;
    drop(live);
    let asked = reader.during(fake.accept()).await.asked();
    assert_eq!(asked, after(&[("began", 0), ("s", 0)]));
}

// Ends and returns.

#[tokio::test]
async fn a_stream_that_breaks_within_an_event_is_resumed_before_it() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.overlap, config.catch_up) = (0, CatchUp::Off);
    let mut reader = Reader::new(&config, &[]);
    let text = format!("data: {}\n\ndata: {}\n\n", event("s", 1), event("s", 2));
    let first = text.find("\n\n").unwrap() + 2;
    let script = async {
        fake.streaming().await.send(&text.as_bytes()[..first]).await;
        // Cut before every byte of the second one.
        for cut in first..text.len() {
            let mut conn = fake.streaming().await;
            assert_eq!(conn.asked(), after(&[("s", 1)]), "cut at {cut}");
            conn.send(&text.as_bytes()[first..cut]).await;
        }
        let mut conn = fake.streaming().await;
        conn.send(&text.as_bytes()[first..]).await;
        conn
    };
    let _conn = reader.during(script).await;
    reader.until(2).await;
    assert_eq!(reader.given, ["s:1", "s:2"]);
}

#[tokio::test]
async fn a_server_that_closes_after_each_event_is_read_to_the_end() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.overlap, config.catch_up) = (0, CatchUp::Off);
    let mut reader = Reader::new(&config, &[("s", 0)]);
    reader
        .during(async {
            for seq in 1..=20 {
                let mut conn = fake.streaming().await;
                assert_eq!(conn.asked(), after(&[("s", seq - 1)]));
                conn.event(&event("s", seq)).await;
            }
            // Its request says that the last one was taken.
            assert_eq!(fake.accept().await.asked(), after(&[("s", 20)]));
        })
        .await;
    assert_eq!(reader.given.len(), 20);
}

#[tokio::test]
async fn late_and_repeated_events_are_given_and_lower_nothing() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.overlap, config.catch_up) = (3, CatchUp::Off);
    let mut reader = Reader::new(&config, &[("s", 9)]);
    let mut conn = reader.during(fake.streaming()).await;
    assert_eq!(conn.asked(), after(&[("s", 6)]));
    for seq in [7, 9, 10, 10, 4] {
        conn.event(&event("s", seq)).await;
    }
    reader.until(5).await;
    drop(conn);
    assert_eq!(reader.given, ["s:7", "s:9", "s:10", "s:10", "s:4"]);
    assert_eq!(reader.during(fake.accept()).await.asked(), after(&[("s", 7)]));
}

#[tokio::test]
async fn an_update_counts_once_the_next_is_asked_for() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.overlap, config.catch_up) = (0, CatchUp::Off);
    let mut reader = Reader::new(&config, &[("s", 1)]);
    let mut conn = reader.during(fake.streaming()).await;
    conn.event(&event("s", 2)).await;
    reader.until(1).await;
    conn.event(&event("s", 3)).await;
    reader.until(2).await;
    // Asked for again and dropped at once, which takes what was given and loses nothing.
    for _ in 0..100 {
        tokio::select! {
            biased;
            update = reader.subscription.next() => panic!("{update:?}"),
            () = std::future::ready(()) => {}
        }
    }
    drop(conn);
    assert_eq!(reader.during(fake.accept()).await.asked(), after(&[("s", 3)]));
}

#[tokio::test]
async fn a_marker_is_a_loss_only_beyond_what_was_saved() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.catch_up = CatchUp::Off;
    let mut reader = Reader::new(&config, &[("overlap", 150), ("next", 9), ("a b\n", 9), ("gone", 4)]);
    let mut conn = reader.during(fake.streaming()).await;
    let markers = [
        "overlap 0:120",
        "next 0:10",
        "a b\u{fffd} 0:12",
        "gone 1:0",
        "gone 2:0",
        "never asked 0:5",
        "gone",
        "gone x:y",
    ];
    for marker in markers {
        conn.send(format!(": replay-exhausted {marker}\n\n").as_bytes()).await;
    }
    conn.event(&event("gone", 9)).await;
    reader.until(1).await;
    let gone = Lost { earliest: Some(Position::new(1, 0)), ..lost("gone", 4, None) };
    assert_eq!(reader.lost, [lost("a b\n", 9, Some(12)), gone]);
    assert_eq!(reader.metrics.losses.get(), 2);
    // With nothing given of the session since, the same loss isn't told again.
    drop(conn);
    let mut conn = reader.during(fake.streaming()).await;
    conn.send(b": replay-exhausted a b\xef\xbf\xbd 0:12\n\n").await;
    conn.event(&event("gone", 10)).await;
    reader.until(2).await;
    assert_eq!(reader.lost.len(), 2);
}

#[tokio::test]
async fn a_drain_without_a_last_word_ends_when_nothing_new_comes() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.max_resume, config.overlap, config.catch_up) = (1, 0, CatchUp::Off);
    let mut reader = Reader::new(&config, &[("old", 1), ("new", 1)]);
    let _live = reader
        .during(async {
            let live = fake.streaming().await;
            let mut drain = fake.streaming().await;
            drain.event(&event("old", 2)).await;
            drop(drain);
            for _ in 0..3 {
                let drain = fake.streaming().await;
                assert_eq!(drain.asked(), after(&[("old", 2)]));
            }
            live
        })
        .await;
    reader.until_status(Status::Live).await;
    assert_eq!(reader.given, ["old:2"]);
}

#[tokio::test]
async fn a_relay_that_has_a_last_word_is_held_to_it() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    (config.max_resume, config.overlap, config.catch_up) = (1, 0, CatchUp::Off);
    let mut reader = Reader::new(&config, &[("oldest", 1), ("old", 1), ("new", 1)]);
    let _live = reader
        .during(async {
            let live = fake.streaming().await;
            fake.streaming().await.complete().await;
            for _ in 0..10 {
                assert_eq!(fake.streaming().await.asked(), after(&[("oldest", 1)]));
            }
            live
        })
        .await;
    assert_eq!(reader.status.current(), Status::Draining);
}

// What isn't as it should be.

#[tokio::test]
async fn line_ends_marks_and_pieces_make_no_difference() {
    for end in ["\n", "\r", "\r\n"] {
        let fake = Fake::open().await;
        let mut reader = Reader::new(&fake.config(), &[]);
        let mut text = String::from("\u{feff}: ping\n\n");
        for seq in 0..3 {
            let lines = event_with("s", seq, ",\n\"data\":{}");
            let data: Vec<_> = lines.split('\n').map(|line| format!("data: {line}")).collect();
            text += &format!("event: run.started\n{}\nid: s:0:{seq}\n\n", data.join("\n"));
        }
        // A carriage return ends the message only when no line feed can follow.
        text += ": ping\n";
        let text = text.replace('\n', end);
        let conn = reader
            .during(async {
                let mut conn = fake.streaming().await;
                for byte in text.as_bytes() {
                    conn.send(std::slice::from_ref(byte)).await;
                    tokio::task::yield_now().await;
                }
                conn
            })
            .await;
        reader.until(3).await;
        assert_eq!(reader.given, ["s:0", "s:1", "s:2"], "{end:?}");
        drop(conn);
    }
}

#[tokio::test]
async fn nonsense_is_skipped_and_counted() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.longest_event = 2000;
    let mut reader = Reader::new(&config, &[]);
    let mut conn = reader.during(fake.streaming()).await;
    let nonsense: &[&[u8]] = &[
        b"data: \xff\xfe\n\n",
        b"data: {}\n\n",
        b"data: {\"aep\":\"9\"}\n\n",
        b"\0\0\0\n\n",
        b"data\n\n",
        b": \xff\n",
        b"retry: 0\n",
        b"id: \n\n\n\n\r\r",
    ];
    for bytes in nonsense {
        conn.send(bytes).await;
    }
    let long = event_with("s", 1, &format!(r#","data":{{"x":"{}"}}"#, "x".repeat(100_000)));
    conn.event(&long).await;
    conn.event(&event("s", 2)).await;
    reader.until(1).await;
    assert_eq!(reader.given, ["s:2"]);
    let skipped = |reason| reader.metrics.skipped.get_or_create(&BySkip { reason }).get();
    assert_eq!((skipped(Skip::Illegal), skipped(Skip::TooLong)), (3, 1));
}

#[tokio::test]
async fn what_is_no_event_stream_is_not_read() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[]);
    let answers = [
        ("HTTP/1.1 200 OK\r\ncontent-type: text/html", Cause::NotAStream),
        ("HTTP/1.1 302 Found\r\nlocation: /elsewhere", Cause::NotAStream),
        ("HTTP/1.1 404 Not Found", Cause::NotFound),
        ("HTTP/1.1 503 Unavailable", Cause::Unavailable),
        ("nonsense", Cause::Broken),
    ];
    let mut conn = reader.during(fake.accept()).await;
    for (head, cause) in answers {
        assert!(conn.head.starts_with("GET /stream?from=all "), "no redirect is followed");
        let before = disconnects(&reader, cause);
        let body = format!("data: {}\n\n", event("s", 1));
        let head = format!("{head}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        conn.send(head.as_bytes()).await;
        conn.send(body.as_bytes()).await;
        conn = reader.during(fake.accept()).await;
        assert_eq!(disconnects(&reader, cause), before + 1, "{head}");
        assert_eq!(reader.status.current(), Status::Failing(cause), "{head}");
    }
    assert!(reader.given.is_empty());
}

// Time.

#[tokio::test(start_paused = true)]
async fn a_misconfiguration_is_tried_at_the_longest_interval() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.patience = Patience { initial: Duration::from_millis(200), max: Duration::from_secs(30) };
    let mut reader = Reader::new(&config, &[]);
    let start = Instant::now();
    for attempt in 0..3 {
        let conn = reader.during(fake.accept()).await;
        assert_eq!(start.elapsed().as_secs(), attempt * 30);
        conn.refuse(401).await;
        reader.until_status(Status::Failing(Cause::Unauthorized)).await;
    }
    let mut conn = reader.during(fake.streaming()).await;
    conn.event(&event("s", 1)).await;
    reader.until(1).await;
    assert_eq!(reader.status.current(), Status::Live);
}

#[tokio::test(start_paused = true)]
async fn silence_past_the_heartbeat_is_an_end_and_a_ping_is_not() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[]);
    let mut conn = reader.during(fake.streaming()).await;
    let start = Instant::now();
    reader
        .during(async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(45)).await;
                assert!(conn.send(b": ping\n\n").await);
            }
        })
        .await;
    assert_eq!(reader.status.current(), Status::Live);
    let again = reader.during(fake.streaming()).await;
    assert_eq!(start.elapsed().as_secs(), 10 * 45 + 60);
    assert_eq!(disconnects(&reader, Cause::Silent), 1);
    drop(again);
}

#[tokio::test(start_paused = true)]
async fn silence_that_nobody_listened_to_is_no_end() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[]);
    let mut conn = reader.during(fake.streaming()).await;
    conn.event(&event("s", 1)).await;
    reader.until(1).await;
    // The caller is busy for an hour; the relay goes on when it is back.
    tokio::time::advance(Duration::from_hours(1)).await;
    reader.during(tokio::time::sleep(Duration::from_secs(59))).await;
    conn.event(&event("s", 2)).await;
    reader.until(2).await;
    assert_eq!(disconnects(&reader, Cause::Silent), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_never_comes_is_given_up() {
    let fake = Fake::open().await;
    let mut reader = Reader::new(&fake.config(), &[]);
    let start = Instant::now();
    let silent = reader.during(fake.accept()).await;
    let next = reader.during(fake.accept()).await;
    assert_eq!(start.elapsed().as_secs(), 30);
    assert_eq!(reader.status.current(), Status::Failing(Cause::Silent));
    drop((silent, next));
}

#[tokio::test(start_paused = true)]
async fn only_something_new_resets_the_back_off() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.patience = Patience { initial: Duration::from_secs(1), max: Duration::from_hours(1) };
    config.catch_up = CatchUp::Off;
    let mut reader = Reader::new(&config, &[("s", 5)]);
    let mut waits = Vec::new();
    for _ in 0..12 {
        let start = Instant::now();
        let mut conn = reader.during(fake.streaming()).await;
        waits.push(start.elapsed());
        // An overlap is nothing new.
        conn.event(&event("s", 5)).await;
        let given = reader.given.len();
        reader.until(given + 1).await;
    }
    // Twelve failures in a row: the ceilings have doubled to half an hour. Jitter is full, so that one wait says
    // little; all of them below the first ceiling has a chance of 2^-55.
    assert!(waits.iter().max().unwrap() > &Duration::from_secs(1), "{waits:?}");
    let mut conn = reader.during(fake.streaming()).await;
    conn.event(&event("s", 6)).await;
    let given = reader.given.len();
    reader.until(given + 1).await;
    drop(conn);
    let start = Instant::now();
    let _conn = reader.during(fake.accept()).await;
    assert!(start.elapsed() <= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_server_can_ask_for_a_longer_wait_within_bounds() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.patience = Patience { initial: Duration::from_millis(1), max: Duration::from_secs(20) };
    let mut reader = Reader::new(&config, &[]);
    for (wish, wait) in [("5000", 5), ("99999999999999999999", 20)] {
        let mut conn = reader.during(fake.streaming()).await;
        conn.send(format!("retry: {wish}\n\n").as_bytes()).await;
        drop(conn);
        reader.until_status(Status::Connecting).await;
        let start = Instant::now();
        let conn = reader.during(fake.streaming()).await;
        assert_eq!(start.elapsed().as_secs(), wait);
        drop(conn);
        reader.until_status(Status::Connecting).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_history_is_read_at_most_that_often() {
    let fake = Fake::open().await;
    let mut config = fake.config();
    config.catch_up = CatchUp::AtMostEvery(Duration::from_secs(10));
    let mut reader = Reader::new(&config, &[("s", 5)]);
    let mut times = Vec::new();
    for _ in 0..3 {
        let live = reader.during(fake.streaming()).await;
        let history = reader.during(fake.streaming()).await;
        assert_eq!((live.is_live(), history.asked()), (true, Asked::All));
        times.push(Instant::now());
        history.complete().await;
        reader.until_status(Status::Live).await;
        drop(live);
        reader.until_status(Status::Connecting).await;
    }
    let apart: Vec<u64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert!(apart.iter().all(|seconds| (9..=10).contains(seconds)), "{apart:?}");
}
