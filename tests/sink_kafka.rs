//! The Kafka sink, against librdkafka's mock cluster: real sockets and the real protocol, every answer to order.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "kafka/gate.rs"]
mod gate;
#[path = "harness/harness.rs"]
mod harness;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aep_sidecar::aep::cloudevents::CloudEvent;
use aep_sidecar::aep::{Event, Registry};
use aep_sidecar::export::sink::options::{Credentials, Times, Tls};
use aep_sidecar::export::sink::{BuildError, Secret};
use aep_sidecar::export::{
    AnySink, Delivery, DeliveryError, Ends, Export, ExportConfig, Feed, FeedError, Metrics, Mode, Reason,
    RetryPolicy, Sink, SinkOptions, Summary, Target,
};
use gate::{Door, Gate};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::{RDKafkaApiKey as Api, RDKafkaRespErr as Answer};
use tokio::net::TcpListener;
use tokio::time::Instant;

type Cluster = MockCluster<'static, DefaultProducerContext>;

/// The name of the one sink.
const SINK: &str = "default";
const TOPIC: &str = "aep-events";
/// How long a condition may take to hold.
const DEADLINE: Duration = Duration::from_secs(60);

fn cluster(brokers: i32, partitions: i32) -> Cluster {
    let cluster = MockCluster::new(brokers).unwrap();
    cluster.create_topic(TOPIC, partitions, brokers).unwrap();
    cluster
}

fn target(brokers: &str) -> Target {
    Target::parse(&format!("kafka://{brokers}/{TOPIC}")).unwrap()
}

/// Options with an attempt of that many seconds.
fn options(seconds: u64) -> SinkOptions {
    let times = Times { attempt: Duration::from_secs(seconds), ..Times::default() };
    SinkOptions { times, ..SinkOptions::default() }
}

fn with(mut options: SinkOptions, own: &[(&str, &str)]) -> SinkOptions {
    options.own.extend(own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    options
}

fn sink(brokers: &str, options: &SinkOptions) -> AnySink {
    AnySink::build(&target(brokers), options).unwrap()
}

fn event(session: &str, seq: u64, members: &str) -> Event {
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}{members}}}"#
    ))
    .unwrap()
}

async fn deliver(sink: &AnySink, event: Event) -> Result<(), DeliveryError> {
    sink.deliver(&Delivery::of(event)).await
}

fn transient(reason: Reason) -> Result<(), DeliveryError> {
    Err(DeliveryError::Transient { reason, retry_after: None })
}

fn misconfigured(reason: Reason) -> Result<(), DeliveryError> {
    Err(DeliveryError::Misconfigured { reason })
}

/// A record, as a consumer gets it.
#[derive(Debug)]
struct Received {
    partition: i32,
    key: String,
    headers: Vec<(String, String)>,
    payload: Option<Vec<u8>>,
}

/// Every record of the topic, each partition in its order.
fn received(brokers: &str, partitions: i32) -> Vec<Received> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "judge")
        .set("enable.auto.commit", "false")
        .create()
        .unwrap();
    let mut left = 0;
    let mut assigned = TopicPartitionList::new();
    for partition in 0..partitions {
        let (low, high) = consumer.fetch_watermarks(TOPIC, partition, DEADLINE).unwrap();
        left += high - low;
        assigned.add_partition_offset(TOPIC, partition, Offset::Beginning).unwrap();
    }
    consumer.assign(&assigned).unwrap();
    let start = Instant::now();
    let mut records = Vec::new();
    while left > 0 {
        assert!(start.elapsed() < DEADLINE, "{left} records can't be read");
        let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) else { continue };
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let headers = record.headers().unwrap();
        records.push(Received {
            partition: record.partition(),
            key: text(record.key().unwrap()),
            headers: headers.iter().map(|h| (h.key.to_owned(), text(h.value.unwrap()))).collect(),
            payload: record.payload().map(<[u8]>::to_vec),
        });
        left -= 1;
    }
    records
}

/// The ids of events that were delivered in structured mode, by session.
fn sessions(records: &[Received]) -> BTreeMap<String, Vec<String>> {
    let mut sessions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for record in records {
        let event: serde_json::Value = serde_json::from_slice(record.payload.as_ref().unwrap()).unwrap();
        let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
        sessions.entry(text("aepsessionid")).or_default().push(text("id"));
    }
    sessions
}

/// A feed of one batch.
struct Batch(VecDeque<Vec<Event>>);

impl Feed for Batch {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        Ok(self.0.pop_front())
    }
}

fn config(brokers: &str, options: SinkOptions) -> ExportConfig {
    let mut config = ExportConfig::new(target(brokers));
    config.sinks[0].options = options;
    config.sinks[0].retry = RetryPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    config
}

async fn export(config: &ExportConfig, events: Vec<Event>, metrics: &Metrics) -> Summary {
    let export = Export::open(config, &Arc::new(Registry::core()), metrics.clone()).unwrap();
    let run = export.run_feed(Batch([events].into()), Ends::default());
    tokio::time::timeout(DEADLINE, run).await.unwrap().unwrap()
}

/// Lets other tasks run until something holds.
async fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < DEADLINE);
        tokio::task::yield_now().await;
    }
}

/// The public fixtures, or the project's own corpus.
fn golden() -> Vec<Event> {
    let text = match harness::conformance("every_golden_event_to_kafka") {
        Some(folder) => harness::read(&folder.join("fixtures/golden/golden.jsonl")),
        None => harness::corpus("events.jsonl"),
    };
    let events: Vec<Event> = text.lines().map(|line| Event::parse_str(line).unwrap()).collect();
    events.into_iter().filter(|event| CloudEvent::of(event).is_ok()).collect()
}

#[tokio::test]
async fn every_event_arrives_once_as_it_was_mapped_and_each_session_in_order() {
    for (mode, batch) in [(Mode::Structured, 1), (Mode::Structured, 20), (Mode::Binary, 1)] {
        let cluster = cluster(3, 4);
        let brokers = cluster.bootstrap_servers();
        let events = golden();
        assert!(events.len() > 10 && events.iter().any(|event| event.data().is_none()));
        let mut config = config(&brokers, SinkOptions { mode, ..options(30) });
        config.sinks[0].batch = std::num::NonZeroUsize::new(batch);
        let summary = export(&config, events.clone(), &Metrics::default()).await;
        let count = u64::try_from(events.len()).unwrap();
        assert_eq!(summary, Summary { delivered: count, ..Summary::default() });

        let records = received(&brokers, 4);
        assert_eq!(records.len(), events.len());
        let mut by_key: HashMap<String, VecDeque<Received>> = HashMap::new();
        for record in records {
            by_key.entry(record.key.clone()).or_default().push_back(record);
        }
        assert!(by_key.values().all(|of_key| of_key.iter().all(|r| r.partition == of_key[0].partition)));
        for event in &events {
            let session = event.session().map_or_else(String::new, |session| format!("|{session}"));
            let key = format!("{}{session}", event.source());
            let record = by_key.get_mut(&key).unwrap().pop_front().unwrap();
            let mapped = CloudEvent::of(event).unwrap().structured();
            let payload = record.payload.unwrap();
            if mode == Mode::Structured {
                assert_eq!(payload, mapped);
                assert_eq!(
                    record.headers,
                    [("content-type".to_owned(), "application/cloudevents+json; charset=UTF-8".to_owned())]
                );
                let judged: cloudevents::Event = serde_json::from_slice(&payload).unwrap();
                assert_eq!(cloudevents::AttributesReader::id(&judged), event.id());
                continue;
            }
            assert_eq!(payload, event.data().unwrap_or_default().as_bytes());
            let mapped: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&mapped).unwrap();
            let expected: BTreeMap<String, String> = mapped
                .into_iter()
                .filter(|(name, _)| name != "data")
                .map(|(name, value)| {
                    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    match name.as_str() {
                        "datacontenttype" => ("content-type".to_owned(), text),
                        _ => (format!("ce_{name}"), text),
                    }
                })
                .collect();
            assert_eq!(record.headers.into_iter().collect::<BTreeMap<_, _>>(), expected);
        }
    }
}

#[tokio::test]
async fn a_broker_that_dies_and_comes_back_costs_no_event_and_no_order() {
    let cluster = cluster(1, 4);
    let brokers = cluster.bootstrap_servers();
    cluster.broker_round_trip_time(1, Duration::from_millis(10)).unwrap();
    let events: Vec<Event> =
        (0..40).flat_map(|seq| ["a", "b", "c", "d", "e"].map(|session| event(session, seq, ""))).collect();
    let metrics = Metrics::default();
    let config = config(&brokers, options(1));
    let outage = async {
        eventually(|| metrics.sink(SINK).delivered.get() >= 20).await;
        cluster.broker_down(1).unwrap();
        let failed = || Reason::ALL.iter().map(|reason| metrics.retries(SINK, *reason)).sum::<u64>();
        eventually(|| failed() >= 5).await;
        assert!(metrics.sink(SINK).delivered.get() < 200, "the outage is in the middle");
        cluster.broker_up(1).unwrap();
    };
    let (summary, ()) = tokio::join!(export(&config, events, &metrics), outage);
    assert_eq!(summary, Summary { delivered: 200, ..Summary::default() });
    for (session, mut ids) in sessions(&received(&brokers, 4)) {
        // What was under way when the broker died may be there twice, one right after the other.
        ids.dedup();
        assert_eq!(ids, (0..40).map(|seq| format!("{session}-{seq}")).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn an_answer_of_the_broker_is_told_by_its_code() {
    use Answer::*;
    let too_large = Err(DeliveryError::Rejected {
        reason: Reason::TooLarge,
        status: None,
        detail: "larger than message.max.bytes, or than the topic takes".to_owned(),
    });
    let invalid = Err(DeliveryError::Rejected {
        reason: Reason::Invalid,
        status: None,
        detail: "the broker calls the record invalid".to_owned(),
    });
    let cases: &[(Api, &[Answer], Result<(), DeliveryError>)] = &[
        (Api::Produce, &[RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE; 2], too_large),
        // Others' records were in the request: alone, this one is taken.
        (Api::Produce, &[RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE; 1], Ok(())),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_INVALID_RECORD; 2], invalid),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_INVALID_RECORD; 1], Ok(())),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED], misconfigured(Reason::Unauthorized)),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_UNSUPPORTED_FOR_MESSAGE_FORMAT], misconfigured(Reason::Protocol)),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS; 3], Ok(())),
        (
            Api::InitProducerId,
            &[RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED],
            misconfigured(Reason::Unauthorized),
        ),
        (Api::InitProducerId, &[RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH], transient(Reason::Unavailable)),
        (Api::Produce, &[RD_KAFKA_RESP_ERR_THROTTLING_QUOTA_EXCEEDED], transient(Reason::Throttled)),
    ];
    let cluster = cluster(1, 1);
    for (api, answers, outcome) in cases {
        cluster.request_errors(*api, answers);
        let sink = sink(&cluster.bootstrap_servers(), &options(10));
        assert_eq!(deliver(&sink, event("s", 1, "")).await, *outcome, "{api:?} {answers:?}");
        cluster.clear_request_errors(*api);
        // With the same sink, and nothing changed but the broker's answer.
        assert_eq!(deliver(&sink, event("s", 2, "")).await, Ok(()), "{api:?} {answers:?}");
    }
}

#[tokio::test]
async fn an_error_that_stays_ends_the_attempt() {
    let cluster = cluster(1, 1);
    let brokers = cluster.bootstrap_servers();
    cluster.request_errors(Api::Produce, &[Answer::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS; 1000]);
    let outcome = deliver(&sink(&brokers, &options(1)), event("s", 1, "")).await;
    assert!(matches!(outcome, Err(DeliveryError::Transient { .. })), "{outcome:?}");
    cluster.clear_request_errors(Api::Produce);

    cluster.topic_error(TOPIC, Answer::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART).unwrap();
    let sink = sink(&brokers, &options(20));
    assert_eq!(deliver(&sink, event("s", 1, "")).await, misconfigured(Reason::NotFound));
    cluster.topic_error(TOPIC, Answer::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED).unwrap();
    assert_eq!(deliver(&sink, event("s", 1, "")).await, misconfigured(Reason::Unauthorized));
    cluster.topic_error(TOPIC, Answer::RD_KAFKA_RESP_ERR_NO_ERROR).unwrap();
    let start = Instant::now();
    while deliver(&sink, event("s", 1, "")).await.is_err() {
        assert!(start.elapsed() < DEADLINE);
    }
}

#[tokio::test]
async fn an_event_larger_than_the_option_says_is_a_dead_letter() {
    let cluster = cluster(1, 1);
    let brokers = cluster.bootstrap_servers();
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(&brokers, with(options(10), &[("message.max.bytes", "1000")]));
    config.state_dir = Some(dir.path().to_owned());
    let large = event("s", 1, &format!(r#","data":{{"p":"{}"}}"#, "x".repeat(2000)));
    let metrics = Metrics::default();
    let summary = export(&config, vec![event("s", 0, ""), large, event("s", 2, "")], &metrics).await;
    assert_eq!(summary, Summary { delivered: 2, dead_letters: 1, ..Summary::default() });
    assert_eq!(metrics.dead_letters(SINK, Reason::TooLarge), 1);
    assert_eq!(sessions(&received(&brokers, 1))["s"], ["s-0", "s-2"]);
}

#[tokio::test]
async fn within_a_session_nothing_goes_out_behind_what_failed() {
    use Answer::{
        RD_KAFKA_RESP_ERR_NO_ERROR as FINE, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED as REFUSED,
    };
    let cluster = cluster(1, 1);
    let brokers = cluster.bootstrap_servers();
    let sink = sink(&brokers, &options(10));
    let events = (0..4).map(|seq| event("s", seq, "")).collect();
    let delivery = Delivery { events, attempt: 1 };
    cluster.request_errors(Api::Produce, &[FINE, REFUSED]);
    assert_eq!(sink.deliver(&delivery).await, misconfigured(Reason::Unauthorized));
    assert_eq!(sink.deliver(&delivery).await, Ok(()));
    assert_eq!(sessions(&received(&brokers, 1))["s"], ["s-0", "s-0", "s-1", "s-2", "s-3"]);
}

#[tokio::test]
async fn what_cant_be_reached_is_told_by_how() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = silent.local_addr().map(|address| (address.to_string(), silent)).unwrap();
    for (brokers, reason) in [
        (closed.as_str(), Reason::Refused),
        (silent.0.as_str(), Reason::Timeout),
        ("no-such-host.invalid:9092", Reason::Dns),
    ] {
        let sink = sink(brokers, &options(1));
        let start = Instant::now();
        assert_eq!(deliver(&sink, event("s", 1, "")).await, transient(reason), "{brokers}");
        assert!(start.elapsed() < Duration::from_secs(10), "an attempt is bounded");
    }
}

/// A certificate and key of its own, in files, and a TLS server that has them.
struct Certificate {
    dir: tempfile::TempDir,
    server: rustls::ServerConfig,
    strict: rustls::ServerConfig,
}

impl Certificate {
    fn new() -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let dir = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(dir.path().join("cert"), made.cert.pem()).unwrap();
        std::fs::write(dir.path().join("key"), made.signing_key.serialize_pem()).unwrap();
        let (chain, key) = (vec![made.cert.der().clone()], made.signing_key.serialize_der());
        let key = || rustls::pki_types::PrivatePkcs8KeyDer::from(key.clone()).into();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let known = rustls::server::WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
        let server = rustls::ServerConfig::builder().with_no_client_auth();
        let strict = rustls::ServerConfig::builder().with_client_cert_verifier(known);
        Self {
            server: server.with_single_cert(chain.clone(), key()).unwrap(),
            strict: strict.with_single_cert(chain, key()).unwrap(),
            dir,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn trusted(&self) -> Tls {
        Tls { ca: Some(self.file("cert")), identity: None }
    }
}

#[cfg(feature = "kafka-tls")]
#[tokio::test]
async fn certificates_are_checked_on_both_sides() {
    let cluster = cluster(1, 1);
    let (right, wrong) = (Certificate::new(), Certificate::new());
    let open = Door { tls: Some(Arc::new(right.server.clone())), user: None };
    let strict = Door { tls: Some(Arc::new(right.strict.clone())), user: None };
    let open = Gate::new(&cluster.bootstrap_servers(), open).await;
    let strict = Gate::new(&cluster.bootstrap_servers(), strict).await;
    let with_identity = Tls { identity: Some((right.file("cert"), right.file("key"))), ..right.trusted() };
    for (n, (gate, tls, outcome)) in [
        (&open, right.trusted(), Ok(())),
        (&open, wrong.trusted(), misconfigured(Reason::Certificate)),
        (&strict, with_identity, Ok(())),
        (&strict, right.trusted(), misconfigured(Reason::Certificate)),
    ]
    .into_iter()
    .enumerate()
    {
        let sink = sink(&gate.address.to_string(), &SinkOptions { tls, ..options(20) });
        let start = Instant::now();
        assert_eq!(deliver(&sink, event("s", 1, "")).await, outcome, "case {n}");
        assert!(start.elapsed() < Duration::from_secs(15), "case {n}: it doesn't wait for the attempt's end");
    }
    // A server without TLS.
    let plain = Gate::new(&cluster.bootstrap_servers(), Door::default()).await;
    let sink = sink(&plain.address.to_string(), &SinkOptions { tls: right.trusted(), ..options(1) });
    assert!(matches!(deliver(&sink, event("s", 1, "")).await, Err(DeliveryError::Transient { .. })));
}

#[cfg(feature = "kafka-tls")]
#[tokio::test]
async fn a_certificate_that_is_replaced_is_read_again() {
    let cluster = cluster(1, 1);
    let (right, wrong) = (Certificate::new(), Certificate::new());
    let door = Door { tls: Some(Arc::new(right.server.clone())), user: None };
    let gate = Gate::new(&cluster.bootstrap_servers(), door).await;
    let sink = sink(&gate.address.to_string(), &SinkOptions { tls: wrong.trusted(), ..options(20) });
    assert_eq!(deliver(&sink, event("s", 1, "")).await, misconfigured(Reason::Certificate));
    std::fs::copy(right.file("cert"), wrong.file("cert")).unwrap();
    assert_eq!(deliver(&sink, event("s", 1, "")).await, Ok(()));
}

#[cfg(feature = "kafka-tls")]
#[tokio::test]
async fn a_password_opens_the_door_and_a_wrong_one_pauses_the_sink() {
    let cluster = cluster(1, 1);
    let certificate = Certificate::new();
    for mechanism in [None, Some("PLAIN"), Some("SCRAM-SHA-256")] {
        let password = Arc::new(Mutex::new("hunter2".to_owned()));
        let user = Some(("me".to_owned(), Arc::clone(&password)));
        let door = Door { tls: Some(Arc::new(certificate.server.clone())), user };
        let gate = Gate::new(&cluster.bootstrap_servers(), door).await;
        let secret = certificate.file("password");
        std::fs::write(&secret, "wrong").unwrap();
        let credentials = Credentials {
            username: Some("me".to_owned()),
            password: Some(Secret::in_file(secret.clone(), "wrong")),
            token: None,
        };
        let options = SinkOptions { credentials, tls: certificate.trusted(), ..options(20) };
        let own: Vec<_> = mechanism.into_iter().map(|mechanism| ("sasl.mechanism", mechanism)).collect();
        let sink = sink(&gate.address.to_string(), &with(options, &own));
        let refused = deliver(&sink, event("s", 1, "")).await;
        assert_eq!(refused, misconfigured(Reason::Unauthorized), "{mechanism:?}");
        if mechanism == Some("SCRAM-SHA-256") {
            continue; // which the gate doesn't have
        }
        std::fs::write(&secret, "hunter2").unwrap();
        let start = Instant::now();
        // A secret's file is read every two seconds.
        while deliver(&sink, event("s", 1, "")).await.is_err() {
            assert!(start.elapsed() < DEADLINE);
        }
        assert!(gate.entered.load(Ordering::SeqCst) > 0, "the gate has seen the password");
    }
}

#[tokio::test]
async fn what_cant_be_meant_is_refused_when_the_sink_is_built() {
    let secret = "hunter2";
    let user = |username: Option<&str>, password: Option<&str>| Credentials {
        username: username.map(str::to_owned),
        password: password.map(Secret::fixed),
        token: None,
    };
    let credentials = |credentials| SinkOptions { credentials, ..options(10) };
    let nowhere = Tls { ca: Some(PathBuf::from("no-such-file")), identity: None };
    for (options, says) in [
        (SinkOptions { mode: Mode::Batch, ..options(10) }, "MODE must be structured or binary"),
        (with(options(10), &[("no.such.thing", secret)]), "OPT_NO_SUCH_THING is no property"),
        (with(options(10), &[("compression.codec", secret)]), "OPT_COMPRESSION_CODEC can't be used: "),
        (with(options(10), &[("linger.ms", "-77")]), "OPT_LINGER_MS can't be used: "),
        (with(options(10), &[("max.in.flight", "9")]), "the Kafka sink can't be set up: "),
        (with(options(10), &[("acks", "1")]), "OPT_ACKS is always all"),
        (with(options(10), &[("sasl.password", secret)]), "OPT_SASL_PASSWORD is said by PASSWORD"),
        (credentials(user(Some("me"), None)), "PASSWORD must be set"),
        (credentials(user(None, Some(secret))), "USERNAME must be set"),
        (
            with(credentials(user(Some("me"), Some(secret))), &[("security.protocol", "plaintext")]),
            "OPT_SECURITY_PROTOCOL must be sasl_ssl or sasl_plaintext",
        ),
        (
            with(credentials(user(Some("me"), Some(secret))), &[("sasl.mechanism", "NONE-SUCH")]),
            "the Kafka sink can't be set up: ",
        ),
        (SinkOptions { tls: nowhere, ..options(10) }, "no-such-file: "),
    ] {
        let error = AnySink::build(&target("127.0.0.1:1"), &options).unwrap_err();
        assert!(error.to_string().starts_with(says), "{error}");
        assert!(!format!("{error} {error:?}").contains(secret), "{error}");
        assert!(matches!(error, BuildError::Setting { .. } | BuildError::File { .. }), "{error:?}");
    }
}
