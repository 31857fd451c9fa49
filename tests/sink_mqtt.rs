//! Events at an MQTT server, read back with its own command-line client.
#![cfg(feature = "mqtt")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "harness/broker.rs"]
mod broker;

use std::io::{BufRead as _, BufReader};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use aep_sidecar::aep::Event;
use aep_sidecar::aep::cloudevents::{CloudEvent, inverse};
use aep_sidecar::export::sink::options::Tls;
use aep_sidecar::export::sink::{Delivery, DeliveryError, Secret, Sink as _, SinkOptions};
use aep_sidecar::export::{AnySink, Mode, Reason, SinkState, Summary, Target};
use broker::{Broker, Running, SINK, config, delivered, event, event_with, export, find, golden, sessions};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;

/// What `mosquitto_sub -F %j` says of a message.
#[derive(Debug)]
struct Message(Value);

impl Message {
    fn topic(&self) -> &str {
        self.0["topic"].as_str().unwrap()
    }

    fn payload(&self) -> &str {
        self.0["payload"].as_str().unwrap()
    }

    fn content_type(&self) -> Option<&str> {
        self.0["properties"]["content-type"].as_str()
    }

    fn property(&self, name: &str) -> Option<&str> {
        self.0["properties"]["user-properties"][name].as_str()
    }

    fn event(&self) -> Event {
        inverse::structured(self.payload().as_bytes(), &[]).unwrap().event
    }
}

/// A server that keeps what its sessions haven't read when it is stopped.
struct Mosquitto {
    broker: Broker,
    dir: TempDir,
}

impl Mosquitto {
    /// With a listener on a free port, and `settings` in which `DIR` is its directory.
    async fn start(test: &str, settings: &str) -> Option<Self> {
        let program = find(test, "mosquitto")?;
        find(test, "mosquitto_sub")?;
        let dir = tempfile::tempdir().unwrap();
        let port = broker::free_port();
        let file = dir.path().join("mosquitto.conf");
        let text = format!(
            "listener {port} 127.0.0.1\nuser root\npersistence true\npersistence_location {}/\nmax_queued_messages 0\n{}",
            dir.path().display(),
            settings.replace("DIR", dir.path().to_str().unwrap())
        );
        std::fs::write(&file, text).unwrap();
        broker::certificates(dir.path());
        let run = |program: &str, arguments: &[&str]| {
            assert!(
                Command::new(program).args(arguments).current_dir(dir.path()).status().unwrap().success()
            );
        };
        run("mosquitto_passwd", &["-c", "-b", "passwords", "writer", "secret"]);
        run("mosquitto_passwd", &["-b", "passwords", "reader", "secret"]);
        std::fs::write(
            dir.path().join("acl"),
            "user reader\ntopic read #\ntopic write mark\nuser writer\ntopic write aep/#\n",
        )
        .unwrap();
        let mut broker = Broker::new(program, port, vec!["-c".to_owned(), file.to_str().unwrap().to_owned()]);
        broker.start().await;
        Some(Self { broker, dir })
    }

    fn url(&self, rest: &str) -> String {
        format!("mqtt://127.0.0.1:{}/{rest}", self.broker.port)
    }

    fn client(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        let port = self.broker.port.to_string();
        command.args(["-V", "mqttv5", "-p", &port, "-q", "1", "-u", "reader", "-P", "secret"]);
        command.args(arguments);
        command
    }

    /// A session that is kept, subscribed to everything.
    fn subscribe(&self) {
        let session = ["-i", "reader", "-c", "-x", "100000", "-t", "#"];
        assert!(self.client("mosquitto_sub", &session).arg("-E").status().unwrap().success());
    }

    /// So many messages that the session was sent, in the order they came.
    fn read(&self, count: usize) -> Vec<Message> {
        let session = ["-i", "reader", "-c", "-x", "100000", "-t", "#", "-F", "%j", "-W", "60"];
        let output =
            self.client("mosquitto_sub", &session).args(["-C", &count.to_string()]).output().unwrap();
        assert!(output.status.success(), "fewer than {count}: {output:?}");
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(|line| Message(serde_json::from_str(line).unwrap())).collect()
    }

    /// Publishes what stands after everything before.
    fn mark(&self) {
        let mark = self.client("mosquitto_pub", &["-t", "mark", "-m", "mark"]).output().unwrap();
        // It succeeds too where the server refuses.
        assert!(mark.status.success() && mark.stderr.is_empty(), "{mark:?}");
    }

    /// The first of each event that the session was sent. To be called once.
    fn read_once(&self) -> Vec<Event> {
        self.mark();
        let session = ["-i", "reader", "-c", "-x", "100000", "-t", "#", "-F", "%j", "-W", "60"];
        let mut reader = self.client("mosquitto_sub", &session).stdout(Stdio::piped()).spawn().unwrap();
        let mut events: Vec<Event> = Vec::new();
        let mut marked = false;
        for line in BufReader::new(reader.stdout.take().unwrap()).lines() {
            let message = Message(serde_json::from_str(&line.unwrap()).unwrap());
            marked = message.topic() == "mark";
            if marked {
                break;
            }
            let event = message.event();
            if !events.iter().any(|known| known.id() == event.id()) {
                events.push(event);
            }
        }
        reader.kill().unwrap();
        reader.wait().unwrap();
        assert!(marked, "no mark after {} events", events.len());
        events
    }

    /// Everything that the session was sent.
    fn read_all(&self, expected: usize) -> Vec<Message> {
        self.mark();
        let mut messages = self.read(expected + 1);
        assert_eq!(messages.pop().unwrap().topic(), "mark", "no more than {expected}");
        messages
    }

    fn with(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Stops it in order: it writes down what it has on that occasion only.
    async fn stop(&mut self) {
        self.broker.terminate().await;
    }
}

#[tokio::test]
async fn every_event_is_published_once_on_its_topic() {
    let test = "every_event_is_published_once_on_its_topic";
    let Some(server) = Mosquitto::start(test, "allow_anonymous true\n").await else { return };
    server.subscribe();
    let events = golden(test);
    for batch in [1, 7] {
        let config = config(&server.url("aep/{agent}/{type}"), |sink| sink.batch = NonZeroUsize::new(batch));
        let (summary, _) = export(&config, events.clone()).await;
        assert_eq!(summary, delivered(events.len()));
        let messages = server.read_all(events.len());
        let arrived: Vec<_> = messages.iter().map(Message::event).collect();
        assert_eq!(sessions(&arrived), sessions(&events));
        for event in &events {
            let mapped = String::from_utf8(CloudEvent::of(event).unwrap().structured()).unwrap();
            let message = messages.iter().find(|message| message.payload() == mapped).unwrap();
            assert_eq!(message.content_type(), Some("application/cloudevents+json"));
            let agent = event.agent().replace(['/', '+', '#'], "_");
            assert_eq!(message.topic(), format!("aep/{agent}/{}", event.event_type()));
        }
    }
}

#[tokio::test]
async fn binary_mode_has_attributes_as_user_properties() {
    let test = "binary_mode_has_attributes_as_user_properties";
    let Some(server) = Mosquitto::start(test, "allow_anonymous true\n").await else { return };
    server.subscribe();
    let dir = tempfile::tempdir().unwrap();
    let with_data = event_with("s", 1, r#","subject":"a é: \"c\"","data":{"z":1.0},"b":true"#);
    // MQTT has no control characters; a server may hang up on them.
    let cannot = event_with("s", 2, r#","subject":"a\r\nb""#);
    let bare = event("s", 3);
    let mut config = config(&server.url("aep"), |sink| sink.options.mode = Mode::Binary);
    config.state_dir = Some(dir.path().to_owned());
    let (summary, metrics) = export(&config, vec![with_data, cannot, bare]).await;
    assert_eq!(summary, Summary { delivered: 2, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::Mapping), 1);
    let messages = server.read_all(2);
    let [with_data, bare] = &messages[..] else { panic!("{messages:?}") };
    assert_eq!((with_data.payload(), with_data.content_type()), (r#"{"z":1.0}"#, Some("application/json")));
    for (name, value) in [
        ("specversion", "1.0"),
        ("id", "s-1"),
        ("source", "aep://h"),
        ("type", "dev.aep.run.started"),
        ("subject", "a é: \"c\""),
        ("time", "2026-07-03T10:14:01Z"),
        ("aepversion", "0.1"),
        ("aepagentid", "a"),
        ("aepsessionid", "s"),
        ("aepsequence", "1"),
        ("b", "true"),
    ] {
        assert_eq!(with_data.property(name), Some(value), "{name}");
    }
    assert_eq!(with_data.property("datacontenttype"), None);
    assert_eq!((bare.property("id"), bare.content_type()), (Some("s-3"), None));
}

#[tokio::test]
async fn a_server_stopped_in_the_middle_loses_nothing() {
    let test = "a_server_stopped_in_the_middle_loses_nothing";
    let Some(mut server) = Mosquitto::start(test, "allow_anonymous true\n").await else { return };
    server.subscribe();
    let running = Running::start(&config(&server.url("aep"), |sink| sink.batch = NonZeroUsize::new(3)));
    let events: Vec<_> =
        (0..200).flat_map(|seq| ["a", "b", "c", "d"].map(|session| event(session, seq))).collect();
    let (before, after) = events.split_at(400);
    running.send(before.to_vec()).await;
    running.has_delivered(50).await;
    server.stop().await;
    running.send(after.to_vec()).await;
    running.reaches(SinkState::Paused(Reason::Refused)).await;
    server.broker.start().await;
    assert_eq!(running.finish().await, delivered(800));
    // What had no acknowledgement before the stop may be there twice.
    assert_eq!(sessions(&server.read_once()), sessions(&events));
}

#[tokio::test]
async fn what_is_too_large_is_a_dead_letter_and_costs_the_others_nothing() {
    let test = "what_is_too_large_is_a_dead_letter_and_costs_the_others_nothing";
    let settings = "allow_anonymous true\nmax_packet_size 20000\nmessage_size_limit 2000\n";
    let Some(server) = Mosquitto::start(test, settings).await else { return };
    server.subscribe();
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&server.url("aep"), |_| {});
    config.state_dir = Some(dir.path().to_owned());
    let large = |session: &str, size: usize| {
        event_with(session, 50, &format!(r#","data":{{"p":"{}"}}"#, "x".repeat(size)))
    };
    let mut events: Vec<_> =
        (0..100).flat_map(|seq| ["a", "b", "c"].map(|session| event(session, seq))).collect();
    // One that is known to be before it is sent, and two of which the server says so by an acknowledgement that isn't
    // of the protocol, with others under way.
    events[150] = large("a", 30_000);
    events[151] = large("b", 3000);
    events[152] = large("c", 3000);
    let running = Running::start(&config);
    let metrics = running.metrics.clone();
    running.send(events.clone()).await;
    assert_eq!(running.finish().await, Summary { delivered: 297, dead_letters: 3, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 3);
    events.drain(150..153);
    assert_eq!(sessions(&server.read_once()), sessions(&events));
}

#[tokio::test]
async fn credentials_and_permissions_pause_the_sink_until_they_are_right() {
    let test = "credentials_and_permissions_pause_the_sink_until_they_are_right";
    let settings = "allow_anonymous false\npassword_file DIR/passwords\nacl_file DIR/acl\n";
    let Some(server) = Mosquitto::start(test, settings).await else { return };
    server.subscribe();
    // A password that is put right while the sink waits.
    let password = server.with("password");
    std::fs::write(&password, "wrong").unwrap();
    let running = Running::start(&config(&server.url("aep"), |sink| {
        sink.options.credentials.username = Some("writer".to_owned());
        sink.options.credentials.password = Some(Secret::in_file(password.clone(), "wrong"));
    }));
    running.send(vec![event("s", 0), event("s", 1)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Unauthorized)).await;
    std::fs::write(&password, "secret").unwrap();
    let metrics = running.metrics.clone();
    assert_eq!(running.finish().await, delivered(2));
    assert_eq!(metrics.dead_letters(SINK, Reason::Unauthorized), 0);
    assert_eq!(server.read_all(2).len(), 2);
    // A topic that the user may not publish on.
    let url = server.url("elsewhere").replace("mqtt://", "mqtt://writer:secret@");
    let running = Running::start(&config(&url, |_| {}));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Unauthorized)).await;
    assert_eq!(running.delivered(), 0);
}

#[tokio::test]
async fn tls_is_spoken_with_whom_is_trusted() {
    let test = "tls_is_spoken_with_whom_is_trusted";
    let settings = "allow_anonymous true\ncafile DIR/ca.pem\ncertfile DIR/server.pem\nkeyfile DIR/server.key\nrequire_certificate true\n";
    let Some(server) = Mosquitto::start(test, settings).await else { return };
    let url = format!("mqtts://localhost:{}/aep", server.broker.port);
    let with = |ca: &str, client: bool| {
        let identity = client.then(|| (server.with("client.pem"), server.with("client.key")));
        config(&url, |sink| sink.options.tls = Tls { ca: Some(server.with(ca)), identity })
    };
    let (summary, _) = export(&with("ca.pem", true), vec![event("s", 0)]).await;
    assert_eq!(summary, delivered(1));
    let running = Running::start(&with("other.pem", true));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Certificate)).await;
}

/// A server that takes connections and says nothing, as one does whose machine hangs.
#[tokio::test]
async fn a_silent_server_is_hung_up_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = Target::parse(&format!("mqtt://{}/a/b", listener.local_addr().unwrap())).unwrap();
    let sink = AnySink::build(&target, &SinkOptions::default()).unwrap();
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = Vec::new();
        // Ends when the other side has closed, for good or with a reset.
        let _end = stream.read_to_end(&mut heard).await;
        heard
    };
    let delivery = Delivery::of(event("s", 1));
    let (outcome, heard) = tokio::join!(sink.deliver(&delivery), server);
    assert_eq!(outcome, Err(DeliveryError::Transient { reason: Reason::ConnectTimeout, retry_after: None }));
    assert!(heard.starts_with(&[0x10]), "{heard:?}");
}
