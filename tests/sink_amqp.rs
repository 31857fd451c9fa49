//! Events in RabbitMQ's queues, read back with a client of the test's own.
#![cfg(feature = "amqp")]
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "harness/broker.rs"]
mod broker;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use aep_sidecar::aep::Event;
use aep_sidecar::aep::cloudevents::{CloudEvent, inverse};
use aep_sidecar::export::sink::options::Tls;
use aep_sidecar::export::sink::{Delivery, DeliveryError, Secret, Sink as _, SinkOptions};
use aep_sidecar::export::{AnySink, Mode, Reason, SinkState, Summary, Target};
use broker::{Broker, Running, SINK, config, delivered, event, event_with, export, find, golden, sessions};
use lapin::message::BasicGetMessage;
use lapin::options::{
    BasicGetOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueuePurgeOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use tempfile::TempDir;
use tokio::io::AsyncReadExt as _;

/// What the server takes at most, in bytes.
const LARGEST: usize = 5000;

/// A server of its own, with a name server of its own, that keeps its queues when it is killed.
struct Rabbit {
    server: Broker,
    _names: Broker,
    dir: TempDir,
    tls_port: u16,
    environment: Vec<String>,
    /// Where its programs are.
    programs: PathBuf,
}

impl Rabbit {
    async fn start(test: &str) -> Option<Self> {
        // What is on the PATH changes the user first.
        find(test, "rabbitmq-server")?;
        let epmd = find(test, "epmd")?;
        let Some(programs) = programs() else { panic!("rabbitmq-server is there, but not its programs") };
        let dir = tempfile::tempdir().unwrap();
        broker::certificates(dir.path());
        let (port, tls_port) = (broker::free_port(), broker::free_port());
        let (names_port, distribution_port) = (broker::free_port(), broker::free_port());
        let path = dir.path().to_str().unwrap();
        let settings = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\n\
             listeners.ssl.1 = 127.0.0.1:{tls_port}\n\
             ssl_options.cacertfile = {path}/ca.pem\n\
             ssl_options.certfile = {path}/server.pem\n\
             ssl_options.keyfile = {path}/server.key\n\
             ssl_options.verify = verify_peer\n\
             ssl_options.fail_if_no_peer_cert = true\n\
             default_user = admin\n\
             default_pass = admin\n\
             max_message_size = {LARGEST}\n"
        );
        std::fs::write(dir.path().join("rabbit.conf"), settings).unwrap();
        std::fs::write(dir.path().join("plugins"), "[].\n").unwrap();
        let environment: Vec<String> = [
            format!("ERL_EPMD_PORT={names_port}"),
            // Else the program stays between the test and the server.
            "RUNNING_UNDER_SYSTEMD=1".to_owned(),
            "RABBITMQ_NODENAME=aep@localhost".to_owned(),
            format!("RABBITMQ_DIST_PORT={distribution_port}"),
            format!("HOME={path}"),
            format!("RABBITMQ_CONFIG_FILE={path}/rabbit"),
            format!("RABBITMQ_ENABLED_PLUGINS_FILE={path}/plugins"),
            format!("RABBITMQ_MNESIA_BASE={path}/mnesia"),
            format!("RABBITMQ_LOG_BASE={path}/log"),
            format!("RABBITMQ_CONF_ENV_FILE={path}/none"),
            format!("RABBITMQ_PID_FILE={path}/pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+S 1:1 +sbwt none".to_owned(),
        ]
        .into();
        let mut names = Broker::new(epmd, names_port, vec!["-port".to_owned(), names_port.to_string()]);
        names.start().await;
        let mut arguments = environment.clone();
        arguments.push(programs.join("rabbitmq-server").to_str().unwrap().to_owned());
        let mut server = Broker::new(PathBuf::from("/usr/bin/env"), port, arguments);
        server.start().await;
        Some(Self { server, _names: names, dir, tls_port, environment, programs })
    }

    /// Has the server do something.
    fn eval(&self, expression: &str) {
        let mut command = Command::new("/usr/bin/env");
        command.args(&self.environment).arg(self.programs.join("rabbitmqctl")).arg("eval").arg(expression);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    fn url(&self, path: &str) -> String {
        format!("amqp://admin:admin@127.0.0.1:{}/{path}", self.server.port)
    }

    async fn connect(&self) -> Reader {
        let url = format!("amqp://admin:admin@127.0.0.1:{}/%2f", self.server.port);
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Reader { channel, _connection: connection }
    }

    fn with(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Where the server's own programs are, whatever its version.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir(Path::new("/usr/lib/rabbitmq/lib")).ok()?;
    let mut found = versions.map(|version| version.unwrap().path().join("sbin"));
    found.find(|path| path.join("rabbitmq-server").is_file())
}

/// A client of the test's own.
struct Reader {
    channel: Channel,
    _connection: Connection,
}

impl Reader {
    async fn exchange(&self, name: &str) {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let kind = ExchangeKind::Topic;
        self.channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await.unwrap();
    }

    async fn queue(&self, name: &str, arguments: FieldTable) {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(name.into(), options, arguments).await.unwrap();
    }

    async fn bind(&self, queue: &str, exchange: &str, key: &str) {
        let (options, arguments) = (QueueBindOptions::default(), FieldTable::default());
        self.channel.queue_bind(queue.into(), exchange.into(), key.into(), options, arguments).await.unwrap();
    }

    /// Everything in a queue, which is then empty.
    async fn read(&self, queue: &str) -> Vec<BasicGetMessage> {
        let mut messages = Vec::new();
        while let Some(message) =
            self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap()
        {
            messages.push(message);
        }
        messages
    }
}

fn events(messages: &[BasicGetMessage]) -> Vec<Event> {
    messages.iter().map(|message| inverse::structured(&message.delivery.data, &[]).unwrap().event).collect()
}

/// The first of each event.
fn once(events: Vec<Event>) -> Vec<Event> {
    let mut known = std::collections::BTreeSet::new();
    events.into_iter().filter(|event| known.insert(event.id().to_owned())).collect()
}

#[tokio::test]
async fn events_are_mapped_and_every_refusal_has_its_class() {
    let test = "events_are_mapped_and_every_refusal_has_its_class";
    let Some(rabbit) = Rabbit::start(test).await else { return };
    let reader = rabbit.connect().await;
    reader.exchange("events").await;
    reader.queue("all", FieldTable::default()).await;
    reader.bind("all", "events", "aep.#").await;
    structured(&rabbit, &reader, golden(test)).await;
    binary(&rabbit, &reader).await;
    default_exchange(&rabbit, &reader).await;
    too_large(&rabbit, &reader).await;
    unroutable(&rabbit, &reader).await;
    no_exchange(&rabbit, &reader).await;
    full(&rabbit, &reader).await;
    out_of_memory(&rabbit, &reader).await;
    credentials(&rabbit, &reader).await;
    tls(&rabbit, &reader).await;
}

async fn structured(rabbit: &Rabbit, reader: &Reader, golden: Vec<Event>) {
    for batch in [1, 7] {
        let config = config(&rabbit.url("events/aep.{agent}.{type}"), |sink| {
            sink.batch = NonZeroUsize::new(batch);
        });
        let (summary, _) = export(&config, golden.clone()).await;
        assert_eq!(summary, delivered(golden.len()));
        let messages = reader.read("all").await;
        assert_eq!(messages.len(), golden.len());
        assert_eq!(sessions(&events(&messages)), sessions(&golden));
        for event in &golden {
            let mapped = CloudEvent::of(event).unwrap().structured();
            let message = messages.iter().find(|message| message.delivery.data == mapped).unwrap();
            let properties = &message.delivery.properties;
            assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/cloudevents+json");
            assert_eq!(*properties.delivery_mode(), Some(2));
            let id = format!("{}|{}", event.source(), event.id());
            assert_eq!(properties.message_id().as_ref().unwrap().as_str(), id);
            let agent = event.agent().replace(['.', '*', '#', ' '], "_");
            assert_eq!(message.delivery.routing_key.as_str(), format!("aep.{agent}.{}", event.event_type()));
        }
    }
}

async fn binary(rabbit: &Rabbit, reader: &Reader) {
    let config = config(&rabbit.url("events/aep"), |sink| sink.options.mode = Mode::Binary);
    let event = event_with("s", 1, r#","subject":"a\r\n\u0000é","data":{"z":1.0},"b":true,"n":-7"#);
    let (summary, _) = export(&config, vec![event, self::event("s", 2)]).await;
    assert_eq!(summary, delivered(2));
    let messages = reader.read("all").await;
    let properties = &messages[0].delivery.properties;
    assert_eq!(messages[0].delivery.data, br#"{"z":1.0}"#);
    assert_eq!(properties.content_type().as_ref().unwrap().as_str(), "application/json");
    let headers = properties.headers().as_ref().unwrap().inner();
    let text = |text: &str| AMQPValue::LongString(text.into());
    for (name, value) in [
        ("specversion", text("1.0")),
        ("id", text("s-1")),
        ("type", text("dev.aep.run.started")),
        ("subject", text("a\r\n\0é")),
        ("aepsessionid", text("s")),
        ("aepsequence", AMQPValue::LongLongInt(1)),
        ("n", AMQPValue::LongLongInt(-7)),
        ("b", AMQPValue::Boolean(true)),
    ] {
        assert_eq!(headers.get(format!("cloudEvents:{name}").as_str()), Some(&value), "{name}");
    }
    assert!(messages[1].delivery.data.is_empty());
    assert!(messages[1].delivery.properties.content_type().is_none());
}

async fn default_exchange(rabbit: &Rabbit, reader: &Reader) {
    let (summary, _) = export(&config(&rabbit.url("-/all"), |_| {}), vec![event("s", 1)]).await;
    assert_eq!(summary, delivered(1));
    assert_eq!(reader.read("all").await.len(), 1);
}

async fn too_large(rabbit: &Rabbit, reader: &Reader) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&rabbit.url("events/aep"), |sink| sink.batch = NonZeroUsize::new(8));
    config.state_dir = Some(dir.path().to_owned());
    let mut feed: Vec<_> =
        (0..20).flat_map(|seq| ["a", "b", "c"].map(|session| event(session, seq))).collect();
    feed[31] = event_with("b", 50, &format!(r#","data":{{"p":"{}"}}"#, "x".repeat(LARGEST)));
    let (summary, metrics) = export(&config, feed.clone()).await;
    assert_eq!(summary, Summary { delivered: 59, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 1);
    feed.remove(31);
    assert_eq!(sessions(&once(events(&reader.read("all").await))), sessions(&feed));
    // Attributes larger than a frame, which would end the connection.
    let mut config = self::config(&rabbit.url("events/aep"), |sink| sink.options.mode = Mode::Binary);
    config.state_dir = Some(dir.path().join("binary"));
    let large = event_with("s", 1, &format!(r#","subject":"{}""#, "x".repeat(140_000)));
    let (summary, metrics) = export(&config, vec![large, event("s", 2)]).await;
    assert_eq!(summary, Summary { delivered: 1, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 1);
    assert_eq!(reader.read("all").await.len(), 1);
}

async fn unroutable(rabbit: &Rabbit, reader: &Reader) {
    // Those of one session find no queue, while those of the other do and are confirmed beside them.
    reader.queue("known", FieldTable::default()).await;
    reader.bind("known", "events", "by.known").await;
    let running = Running::start(&config(&rabbit.url("events/by.{session}"), |_| {}));
    let feed: Vec<_> = (0..50).flat_map(|seq| ["known", "new"].map(|session| event(session, seq))).collect();
    running.send(feed.clone()).await;
    running.reaches(SinkState::Misconfigured(Reason::NotFound)).await;
    reader.queue("new", FieldTable::default()).await;
    reader.bind("new", "events", "by.new").await;
    assert_eq!(running.finish().await, delivered(100));
    let mut arrived = events(&reader.read("known").await);
    arrived.extend(events(&reader.read("new").await));
    assert_eq!(sessions(&once(arrived)), sessions(&feed));
}

async fn no_exchange(rabbit: &Rabbit, reader: &Reader) {
    let running = Running::start(&config(&rabbit.url("later/aep"), |_| {}));
    running.send(vec![event("s", 1), event("s", 2)]).await;
    running.reaches(SinkState::Misconfigured(Reason::NotFound)).await;
    reader.exchange("later").await;
    reader.bind("all", "later", "aep").await;
    assert_eq!(running.finish().await, delivered(2));
    assert_eq!(reader.read("all").await.len(), 2);
    let no_host = config(&rabbit.url("events/aep"), |sink| {
        sink.options.own.insert("vhost".to_owned(), "nowhere".to_owned());
    });
    let running = Running::start(&no_host);
    running.send(vec![event("s", 1)]).await;
    running.reaches(SinkState::Misconfigured(Reason::NotFound)).await;
}

async fn full(rabbit: &Rabbit, reader: &Reader) {
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(2));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    reader.queue("small", arguments).await;
    let running = Running::start(&config(&rabbit.url("-/small"), |_| {}));
    running.send((0..4).map(|seq| event("s", seq)).collect()).await;
    running.reaches(SinkState::Paused(Reason::Unavailable)).await;
    reader.channel.queue_purge("small".into(), QueuePurgeOptions::default()).await.unwrap();
    let metrics = running.metrics.clone();
    assert_eq!(running.finish().await, delivered(4));
    assert_eq!(metrics.sink(SINK).delivered.get(), 4);
}

async fn out_of_memory(rabbit: &Rabbit, reader: &Reader) {
    rabbit.eval("rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []}).");
    let running = Running::start(&config(&rabbit.url("events/aep"), |sink| {
        sink.options.times.attempt = Duration::from_secs(1);
    }));
    running.send(vec![event("s", 1), event("s", 2)]).await;
    running.reaches(SinkState::Paused(Reason::Unavailable)).await;
    rabbit.eval("rabbit_alarm:clear_alarm({resource_limit, memory, node()}).");
    assert_eq!(running.finish().await, delivered(2));
    assert_eq!(once(events(&reader.read("all").await)).len(), 2);
}

async fn credentials(rabbit: &Rabbit, reader: &Reader) {
    rabbit.eval(
        "rabbit_auth_backend_internal:add_user(<<\"writer\">>, <<\"secret\">>, <<\"test\">>), \
         rabbit_auth_backend_internal:set_permissions(<<\"writer\">>, <<\"/\">>, <<>>, <<\"^events$\">>, <<>>, <<\"test\">>).",
    );
    // A password that is put right while the sink waits.
    let password = rabbit.with("password");
    std::fs::write(&password, "wrong").unwrap();
    let port = rabbit.server.port;
    let running = Running::start(&config(&format!("amqp://127.0.0.1:{port}/events/aep"), |sink| {
        sink.options.credentials.username = Some("writer".to_owned());
        sink.options.credentials.password = Some(Secret::in_file(password.clone(), "wrong"));
    }));
    running.send(vec![event("s", 0), event("s", 1)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Unauthorized)).await;
    std::fs::write(&password, "secret").unwrap();
    assert_eq!(running.finish().await, delivered(2));
    assert_eq!(once(events(&reader.read("all").await)).len(), 2);
    // An exchange that the user may not publish to.
    let running =
        Running::start(&config(&format!("amqp://writer:secret@127.0.0.1:{port}/later/aep"), |_| {}));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Unauthorized)).await;
    assert_eq!(running.delivered(), 0);
}

async fn tls(rabbit: &Rabbit, reader: &Reader) {
    let url = format!("amqps://admin:admin@localhost:{}/events/aep", rabbit.tls_port);
    let with = |ca: &str| {
        let identity = Some((rabbit.with("client.pem"), rabbit.with("client.key")));
        config(&url, |sink| sink.options.tls = Tls { ca: Some(rabbit.with(ca)), identity })
    };
    let (summary, _) = export(&with("ca.pem"), vec![event("s", 0)]).await;
    assert_eq!(summary, delivered(1));
    assert_eq!(reader.read("all").await.len(), 1);
    let running = Running::start(&with("other.pem"));
    running.send(vec![event("s", 0)]).await;
    running.reaches(SinkState::Misconfigured(Reason::Certificate)).await;
}

#[tokio::test]
async fn a_server_killed_in_the_middle_loses_nothing() {
    let test = "a_server_killed_in_the_middle_loses_nothing";
    let Some(mut rabbit) = Rabbit::start(test).await else { return };
    let reader = rabbit.connect().await;
    reader.queue("all", FieldTable::default()).await;
    drop(reader);
    let running = Running::start(&config(&rabbit.url("-/all"), |sink| sink.batch = NonZeroUsize::new(3)));
    let feed: Vec<_> =
        (0..200).flat_map(|seq| ["a", "b", "c", "d"].map(|session| event(session, seq))).collect();
    let (before, after) = feed.split_at(400);
    running.send(before.to_vec()).await;
    running.has_delivered(50).await;
    rabbit.server.kill();
    running.send(after.to_vec()).await;
    running.reaches(SinkState::Paused(Reason::Refused)).await;
    rabbit.server.start().await;
    assert_eq!(running.finish().await, delivered(800));
    let reader = rabbit.connect().await;
    assert_eq!(sessions(&once(events(&reader.read("all").await))), sessions(&feed));
}

/// A server that takes connections and says nothing, as one does whose machine hangs.
#[tokio::test]
async fn a_silent_server_is_hung_up_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = Target::parse(&format!("amqp://{}/a/b", listener.local_addr().unwrap())).unwrap();
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
    assert!(heard.starts_with(b"AMQP"), "{heard:?}");
}
