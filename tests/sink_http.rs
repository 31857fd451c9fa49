//! What the HTTP sink puts on the wire: content modes, who it says it is, signatures, consent, compression, TLS,
//! proxies and HTTP/2.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test that meets the unexpected fails, also in its helpers"
)]

#[path = "harness/harness.rs"]
mod harness;
#[path = "harness/web.rs"]
mod web;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aep_sidecar::aep::cloudevents::{CloudEvent, Overrides};
use aep_sidecar::aep::{Event, Registry};
use aep_sidecar::export::sink::options::{Endpoint as Url, OAuth, Proxies};
use aep_sidecar::export::sink::{Secret, SinkOptions};
use aep_sidecar::export::{
    Ends, Export, ExportConfig, Feed, FeedError, Metrics, Mode, Reason, RetryPolicy, Summary, Target,
};
use base64::Engine as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use web::{Answer, Authority, Endpoint, Request};

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

fn event(session: &str, seq: u64, members: &str) -> Event {
    Event::parse_str(&format!(
        r#"{{"aep":"0.1","id":"{session}-{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"{session}","seq":{seq}{members}}}"#
    ))
    .unwrap()
}

fn events(session: &str, count: u64) -> Vec<Event> {
    (0..count).map(|seq| event(session, seq, "")).collect()
}

/// Every event of the public fixtures, or of the project's own corpus where these are absent.
fn golden(test: &str) -> Vec<Event> {
    let text = match harness::conformance(test) {
        Some(dir) => harness::read(&dir.join("fixtures/golden/golden.jsonl")),
        None => harness::corpus("events.jsonl"),
    };
    text.lines().map(|line| Event::parse_str(line).unwrap()).collect()
}

fn config(target: &str, change: impl FnOnce(&mut SinkOptions)) -> ExportConfig {
    let mut config = ExportConfig::new(Target::parse(target).unwrap());
    config.sinks[0].retry = RetryPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(10) };
    change(&mut config.sinks[0].options);
    config
}

/// Exports to the end, within reason.
async fn export(config: &ExportConfig, events: Vec<Event>) -> (Summary, Metrics) {
    let metrics = Metrics::default();
    let summary = tokio::time::timeout(PATIENCE, run(config, events, metrics.clone())).await;
    (summary.expect("the export ends"), metrics)
}

async fn run(config: &ExportConfig, events: Vec<Event>, metrics: Metrics) -> Summary {
    let export = Export::open(config, &Arc::new(Registry::core()), metrics).unwrap();
    export.run_feed(Once(Some(events)), Ends::default()).await.unwrap()
}

/// What is wrong with the options.
fn refused(target: &str, change: impl FnOnce(&mut SinkOptions)) -> String {
    let config = config(target, change);
    let opened = Export::open(&config, &Arc::new(Registry::core()), Metrics::default());
    opened.unwrap_err().to_string()
}

fn delivered(count: usize) -> Summary {
    Summary { delivered: u64::try_from(count).unwrap(), ..Summary::default() }
}

fn own(options: &mut SinkOptions, name: &str, value: &str) {
    options.own.insert(name.to_owned(), value.to_owned());
}

/// Waits until something holds.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{what}");
}

async fn taking() -> Endpoint {
    Endpoint::start(|_, _| Answer::status(202)).await
}

/// What arrived, as JSON: each event once, each session in order.
fn arrived(bodies: impl IntoIterator<Item = Value>, sent: &[Event]) {
    let expected: Vec<Value> = sent
        .iter()
        .map(|event| serde_json::from_slice(&CloudEvent::of(event).unwrap().structured()).unwrap())
        .collect();
    let lanes = |events: Vec<Value>| {
        let mut lanes: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for event in events {
            lanes.entry(format!("{} {}", event["source"], event["aepsessionid"])).or_default().push(event);
        }
        lanes
    };
    assert_eq!(lanes(bodies.into_iter().collect()), lanes(expected));
}

#[tokio::test]
async fn every_event_arrives_once_in_structured_and_in_batch_mode() {
    let sent = golden("every_event_arrives_once_in_structured_and_in_batch_mode");
    let endpoint = taking().await;
    let (summary, _) = export(&config(&endpoint.url("/in"), |_| {}), sent.clone()).await;
    assert_eq!(summary, delivered(sent.len()));
    arrived(endpoint.requests().iter().map(Request::json), &sent);

    let endpoint = taking().await;
    let (summary, _) =
        export(&config(&endpoint.url("/in"), |options| options.mode = Mode::Batch), sent.clone()).await;
    assert_eq!(summary, delivered(sent.len()));
    let batches: Vec<Vec<Value>> =
        endpoint.requests().iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect();
    assert!(batches.len() < sent.len());
    arrived(batches.concat(), &sent);
}

/// A receiver made of the public CloudEvents SDK's extractor.
async fn sdk() -> (String, Arc<Mutex<Vec<cloudevents::Event>>>, JoinSet<()>) {
    let taken = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&taken);
    let take = move |event: cloudevents::Event| {
        log.lock().unwrap().push(event);
        std::future::ready(http::StatusCode::ACCEPTED)
    };
    let router = axum::Router::new().route("/", axum::routing::post(take));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let mut server = JoinSet::new();
    server.spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, taken, server)
}

#[tokio::test]
async fn every_event_in_binary_mode_is_one_to_the_public_sdk() {
    let sent = golden("every_event_in_binary_mode_is_one_to_the_public_sdk");
    let (url, taken, _server) = sdk().await;
    let (summary, _) = export(&config(&url, |options| options.mode = Mode::Binary), sent.clone()).await;
    assert_eq!(summary, delivered(sent.len()));
    // The SDK doesn't undo the binding's percent-encoding, and has no types in this mode but texts.
    let plain = |value: &Value| match value {
        Value::String(text) => percent_encoding::percent_decode_str(text).decode_utf8().unwrap().into_owned(),
        other => other.to_string(),
    };
    let bodies = taken.lock().unwrap().iter().map(|event| serde_json::to_value(event).unwrap()).collect();
    let bodies: Vec<Value> = bodies;
    assert_eq!(bodies.len(), sent.len());
    for event in &sent {
        let expected: Value = serde_json::from_slice(&CloudEvent::of(event).unwrap().structured()).unwrap();
        let same = |body: &&Value| {
            plain(&body["id"]) == expected["id"] && plain(&body["source"]) == expected["source"]
        };
        let found: Vec<&Value> = bodies.iter().filter(same).collect();
        assert_eq!(found.len(), 1, "{expected}");
        for (name, value) in expected.as_object().unwrap() {
            let body = &found[0][name];
            match name.as_str() {
                "data" => {
                    let bytes = found[0]["data_base64"].as_str().unwrap();
                    let bytes = base64::engine::general_purpose::STANDARD.decode(bytes).unwrap();
                    assert_eq!(&serde_json::from_slice::<Value>(&bytes).unwrap(), value);
                }
                // It is rewritten to UTC by the SDK.
                "time" => assert!(body.is_string()),
                _ => assert_eq!(plain(body), plain(value), "{name} of {expected}"),
            }
        }
    }
}

#[tokio::test]
async fn binary_headers_are_encoded_unless_asked_otherwise() {
    for (values, subject) in [("encoded", "caf%C3%A9%20%25"), ("verbatim", "café %")] {
        let endpoint = taking().await;
        let config = config(&endpoint.url("/"), |options| {
            options.mode = Mode::Binary;
            own(options, "header.values", values);
        });
        let sent = vec![event("s", 0, r#","subject":"café %","data":{"z":1.0}"#), event("s", 1, "")];
        assert_eq!(export(&config, sent).await.0, delivered(2));
        let [first, second] = &endpoint.requests()[..] else { panic!("two requests") };
        assert_eq!(first.header("ce-subject"), Some(subject));
        assert_eq!(
            (first.header("content-type"), &*first.body),
            (Some("application/json"), &br#"{"z":1.0}"#[..])
        );
        assert_eq!((second.header("content-type"), &*second.body), (None, &b""[..]));
        assert_eq!(second.header("ce-type"), Some("dev.aep.run.started"));
    }
}

#[tokio::test]
async fn a_receiver_that_dies_and_comes_back_loses_nothing() {
    let sent = golden("a_receiver_that_dies_and_comes_back_loses_nothing");
    let half = sent.len() / 2;
    let (died, death) = tokio::sync::oneshot::channel();
    let died = Mutex::new(Some(died));
    let first = Endpoint::start(move |n, _| {
        if n + 1 == half {
            died.lock().unwrap().take().unwrap().send(()).unwrap();
        }
        Answer::status(200)
    })
    .await;
    let (address, target) = (first.address, first.url("/"));
    let config = config(&target, |_| {});
    let restart = async {
        death.await.unwrap();
        let before = first.requests();
        drop(first);
        let listener = loop {
            // Its connections end after it.
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        (before, Endpoint::on(listener, None, |_, _| Answer::status(200)))
    };
    let ((summary, _), (before, second)) = tokio::join!(export(&config, sent.clone()), restart);
    assert_eq!(summary, delivered(sent.len()));
    // What was under way when it died comes again.
    let mut known = std::collections::HashSet::new();
    let all = before.iter().chain(&second.requests()).map(Request::json).collect::<Vec<_>>();
    let once = all.into_iter().filter(|event| known.insert((event["source"].clone(), event["id"].clone())));
    arrived(once.collect::<Vec<_>>(), &sent);
}

#[tokio::test]
async fn secrets_are_read_again_from_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let (token, headers) = (dir.path().join("token"), dir.path().join("headers"));
    std::fs::write(&token, "one\n").unwrap();
    std::fs::write(&headers, r#"{"X-Key":"a"}"#).unwrap();
    let paths = (token.clone(), headers.clone());
    let endpoint = Endpoint::start(move |_, request| match request.header("authorization") {
        Some("Bearer two") if request.header("x-key") == Some("b") => Answer::status(200),
        _ => {
            std::fs::write(&token, "two\n").unwrap();
            std::fs::write(&headers, r#"{"X-Key":"b"}"#).unwrap();
            Answer::status(401)
        }
    })
    .await;
    let config = config(&endpoint.url("/"), |options| {
        options.credentials.token = Some(Secret::in_file(paths.0, "one"));
        options.web.headers = Some(Secret::in_file(paths.1, r#"{"X-Key":"a"}"#));
    });
    let (summary, metrics) = export(&config, events("s", 1)).await;
    assert_eq!(summary, delivered(1));
    assert!(metrics.retries(SINK, Reason::Unauthorized) >= 1);
    assert_eq!(endpoint.requests()[0].header("authorization"), Some("Bearer one"));
}

/// A token endpoint that gives `token-1`, `token-2`, …
async fn issuer(life: u64) -> Endpoint {
    Endpoint::start(move |n, _| {
        let body =
            json!({"access_token": format!("token-{}", n + 1), "token_type": "bearer", "expires_in": life});
        Answer::json(200, body.to_string())
    })
    .await
}

fn client(options: &mut SinkOptions, issuer: &Endpoint) {
    options.web.oauth = Some(OAuth {
        token_url: Url::parse(&issuer.url("/token")).unwrap(),
        client_id: "me:too".to_owned(),
        client_secret: Secret::fixed("s&cret"),
        scope: Some("events write".to_owned()),
    });
}

#[tokio::test]
async fn one_token_does_for_everyone_and_is_asked_for_by_the_book() {
    let (issuer, endpoint) = (issuer(3600).await, taking().await);
    let sent = (0..50).map(|n| event(&n.to_string(), 0, "")).collect();
    let with_client = config(&endpoint.url("/"), |options| {
        client(options, &issuer);
        own(options, "oauth.audience", "sink");
    });
    assert_eq!(export(&with_client, sent).await.0, delivered(50));
    assert!(
        endpoint.requests().iter().all(|request| request.header("authorization") == Some("Bearer token-1"))
    );
    let [asked] = &issuer.requests()[..] else { panic!("asked more than once") };
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("POST", "/token"));
    let form = "grant_type=client_credentials&scope=events%20write&audience=sink";
    assert_eq!(String::from_utf8(asked.body.clone()).unwrap(), form);
    let basic = base64::engine::general_purpose::STANDARD.encode("me%3Atoo:s%26cret");
    assert_eq!(asked.header("authorization"), Some(&*format!("Basic {basic}")));

    let posting = config(&endpoint.url("/"), |options| {
        client(options, &issuer);
        own(options, "oauth.auth", "post");
    });
    assert_eq!(export(&posting, events("s", 1)).await.0, delivered(1));
    let asked = issuer.requests().pop().unwrap();
    let form = String::from_utf8(asked.body.clone()).unwrap();
    assert!(form.ends_with("&client_id=me%3Atoo&client_secret=s%26cret"), "{form}");
    assert_eq!(asked.header("authorization"), None);
}

#[tokio::test]
async fn a_token_that_has_ended_is_replaced() {
    let (issuer, endpoint) = (issuer(0).await, taking().await);
    let config = config(&endpoint.url("/"), |options| client(options, &issuer));
    assert_eq!(export(&config, events("s", 3)).await.0, delivered(3));
    let shown: Vec<_> = endpoint
        .requests()
        .iter()
        .map(|request| request.header("authorization").unwrap().to_owned())
        .collect();
    assert_eq!(shown, ["Bearer token-1", "Bearer token-2", "Bearer token-3"]);
}

#[tokio::test]
async fn a_token_that_is_refused_costs_one_free_try() {
    let issuer = issuer(3600).await;
    let endpoint = Endpoint::start(|_, request| match request.header("authorization") {
        Some("Bearer token-2") => Answer::status(200),
        _ => Answer::status(401),
    })
    .await;
    let with_client = config(&endpoint.url("/"), |options| client(options, &issuer));
    let (summary, metrics) = export(&with_client, events("s", 2)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::Unauthorized)), (delivered(2), 0));
    assert_eq!((issuer.requests().len(), endpoint.requests().len()), (2, 3));

    // A second refusal is the sink's.
    let endpoint = Endpoint::start(|n, _| Answer::status(if n < 2 { 401 } else { 200 })).await;
    let with_client = config(&endpoint.url("/"), |options| client(options, &issuer));
    let (summary, metrics) = export(&with_client, events("s", 1)).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::Unauthorized)), (delivered(1), 1));
}

#[tokio::test]
async fn a_token_endpoint_that_gives_none_holds_the_sink_and_loses_nothing() {
    for (answer, reason) in [
        (Answer::json(401, r#"{"error":"invalid_client"}"#), Reason::TokenRefused),
        (Answer::json(200, "<html>"), Reason::TokenRefused),
        (Answer::status(503), Reason::TokenEndpoint),
        (Answer::status(429), Reason::TokenEndpoint),
    ] {
        let issuer = Endpoint::start(move |n, _| match n {
            0 => answer.clone(),
            _ => Answer::json(200, r#"{"access_token":"t"}"#),
        })
        .await;
        let endpoint = taking().await;
        let config = config(&endpoint.url("/"), |options| client(options, &issuer));
        let (summary, metrics) = export(&config, events("s", 2)).await;
        assert_eq!((summary, metrics.retries(SINK, reason)), (delivered(2), 1), "{reason}");
        assert_eq!(endpoint.requests().len(), 2, "nothing goes out without a token");
    }
    // Nothing listens there.
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let endpoint = taking().await;
    let config = config(&endpoint.url("/"), |options| {
        client(options, &endpoint);
        options.web.oauth.as_mut().unwrap().token_url = Url::parse(&format!("http://{address}/")).unwrap();
    });
    let metrics = Metrics::default();
    tokio::select! {
        _ = run(&config, events("s", 1), metrics.clone()) => panic!("it can't"),
        () = eventually("it is told", || metrics.retries(SINK, Reason::TokenEndpoint) > 2) => {}
    }
    assert!(endpoint.requests().is_empty());
}

/// Two secrets, and the text that configures both.
fn secrets() -> ([String; 2], String) {
    let one = |byte: u8| format!("whsec_{}", base64::engine::general_purpose::STANDARD.encode([byte; 32]));
    let both = [one(1), one(2)];
    let text = both.join(" ");
    (both, text)
}

/// Whether the public Standard Webhooks library takes each request for signed with each secret; `None`, and a line on
/// stderr, where it can't be had.
#[allow(clippy::explicit_write, reason = "what eprintln! says is shown for failures only")]
fn verified(requests: &[Request], secrets: &[String]) -> Option<()> {
    use std::io::Write as _;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_BIN_EXE_aep-sidecar")).ancestors().nth(2).unwrap().to_owned();
    let made = std::process::Command::new(root.join("scripts/sdk-venv"))
        .arg(target.join("sdk-venv"))
        .output()
        .unwrap();
    if !made.status.success() {
        let why = String::from_utf8_lossy(&made.stderr).into_owned();
        writeln!(std::io::stderr(), "SKIPPED: signatures_are_good_to_the_public_library: {why}").unwrap();
        return None;
    }
    let python = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim_end());
    let mut child = std::process::Command::new(python)
        .arg(root.join("tests/sdk/verify_webhooks.py"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for request in requests {
        let headers: BTreeMap<_, _> = request.headers.iter().cloned().collect();
        let body = base64::engine::general_purpose::STANDARD.encode(&request.body);
        writeln!(stdin, "{}", json!({"headers": headers, "body": body, "secrets": secrets})).unwrap();
    }
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    assert_eq!(said.trim(), format!("verified {}", requests.len() * secrets.len()));
    Some(())
}

#[tokio::test]
async fn signatures_are_good_to_the_public_library() {
    let (secrets, text) = secrets();
    let mut requests = Vec::new();
    for (mode, compression) in [
        (Mode::Structured, "none"),
        (Mode::Structured, "gzip"),
        (Mode::Binary, "none"),
        (Mode::Batch, "zstd"),
    ] {
        let endpoint = Endpoint::start(|n, _| Answer::status(if n == 0 { 503 } else { 200 })).await;
        let config = config(&endpoint.url("/"), |options| {
            options.mode = mode;
            options.web.signing = Some(Secret::fixed(&text));
            own(options, "compression", compression);
        });
        let sent = vec![event("s", 0, r#","data":{"é":1}"#), event("s", 1, r#","data":{}"#)];
        assert_eq!(export(&config, sent).await.0, delivered(2));
        let these = endpoint.requests();
        let ids: Vec<_> = these.iter().map(|request| request.header("webhook-id").unwrap()).collect();
        assert_eq!(ids[0], ids[1], "an id is the same at the next attempt");
        if mode != Mode::Batch {
            assert_ne!(ids[1], ids[2]);
        }
        requests.extend(these);
    }
    verified(&requests, &secrets);
}

#[tokio::test]
async fn nothing_is_sent_without_the_consent_that_is_asked_for() {
    let endpoint = Endpoint::start(|n, request| match (request.method.as_str(), n) {
        ("OPTIONS", 0) => Answer::status(200).with("allow", "POST"),
        ("OPTIONS", 1) => Answer::status(200).with("webhook-allowed-origin", "someone.else"),
        ("OPTIONS", 2) => Answer::status(405),
        ("OPTIONS", 3) => Answer::status(503),
        ("OPTIONS", _) => Answer::status(200)
            .with("webhook-allowed-origin", "agents.example.com")
            .with("webhook-allowed-rate", "60000"),
        _ => Answer::status(200),
    })
    .await;
    let config = config(&endpoint.url("/in?key=k"), |options| {
        options.web.asks_consent = true;
        options.credentials.token = Some(Secret::fixed("t"));
        own(options, "webhook.origin", "agents.example.com");
        own(options, "webhook.rate", "120000");
    });
    let (summary, metrics) = export(&config, events("s", 3)).await;
    assert_eq!(summary, delivered(3));
    assert_eq!((metrics.retries(SINK, Reason::NoConsent), metrics.retries(SINK, Reason::Status5xx)), (3, 1));
    let requests = endpoint.requests();
    let methods: Vec<&str> = requests.iter().map(|request| request.method.as_str()).collect();
    assert_eq!(methods, ["OPTIONS", "OPTIONS", "OPTIONS", "OPTIONS", "OPTIONS", "POST", "POST", "POST"]);
    for request in &requests {
        assert_eq!(request.path, "/in?key=k");
        assert_eq!(request.header("webhook-request-origin"), Some("agents.example.com"));
        assert_eq!(request.header("authorization"), Some("Bearer t"));
    }
    assert_eq!(requests[0].header("webhook-request-rate"), Some("120000"));
}

#[tokio::test]
async fn consent_is_asked_for_again_after_an_answer_that_gives_reason_to() {
    let endpoint = Endpoint::start(|_, request| match request.method.as_str() {
        "OPTIONS" => Answer::status(204).with("webhook-allowed-origin", "*"),
        _ if request.json()["id"] == "s-1" => Answer::status(400),
        _ => Answer::status(200),
    })
    .await;
    let config = config(&endpoint.url("/"), |options| options.web.asks_consent = true);
    let (summary, _) = export(&config, events("s", 4)).await;
    assert_eq!(summary, Summary { delivered: 3, dead_letters: 1, ..Summary::default() });
    let methods: Vec<String> = endpoint.requests().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["OPTIONS", "POST", "POST", "OPTIONS", "POST", "POST"]);
}

#[tokio::test]
async fn bodies_are_compressed_as_asked() {
    let large = format!(r#","data":{{"text":"{}"}}"#, "abcdefgh".repeat(20_000));
    let sent = vec![event("s", 0, ""), event("s", 1, &large)];
    for coding in ["gzip", "zstd"] {
        let endpoint = taking().await;
        let config = config(&endpoint.url("/"), |options| own(options, "compression", coding));
        assert_eq!(export(&config, sent.clone()).await.0, delivered(2));
        let bodies = endpoint.requests().into_iter().map(|request| {
            assert_eq!(request.header("content-encoding"), Some(coding));
            let mut body = Vec::new();
            match coding {
                "gzip" => {
                    flate2::read::GzDecoder::new(&*request.body).read_to_end(&mut body).unwrap();
                }
                _ => body = zstd::stream::decode_all(&*request.body).unwrap(),
            }
            serde_json::from_slice(&body).unwrap()
        });
        arrived(bodies.collect::<Vec<_>>(), &sent);
        assert!(endpoint.requests()[1].body.len() < 10_000);
    }
}

#[tokio::test]
async fn compression_that_is_not_understood_is_no_events_fault() {
    let endpoint = Endpoint::start(|n, _| Answer::status(if n == 0 { 415 } else { 200 })).await;
    let compressing = config(&endpoint.url("/"), |options| own(options, "compression", "gzip"));
    assert_eq!(export(&compressing, events("s", 1)).await.0, delivered(1));
    let endpoint = Endpoint::start(|_, _| Answer::status(415)).await;
    let (summary, _) = export(&config(&endpoint.url("/"), |_| {}), events("s", 1)).await;
    assert_eq!(summary, Summary { dead_letters: 1, ..Summary::default() });
}

#[tokio::test]
async fn a_private_authority_is_trusted_once_its_file_says_so() {
    let (right, wrong) = (Authority::new("right"), Authority::new("wrong"));
    let endpoint = Endpoint::secure(right.server(None), |_, _| Answer::status(200)).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ca.pem");
    std::fs::write(&path, wrong.pem()).unwrap();
    let target = format!("https://localhost:{}/", endpoint.address.port());
    let with_ca = config(&target, |options| options.tls.ca = Some(path.clone()));
    let metrics = Metrics::default();
    let renewal = async {
        eventually("it isn't trusted", || metrics.retries(SINK, Reason::Certificate) > 0).await;
        // What can't be used changes nothing, and neither does its absence.
        std::fs::write(&path, "-----BEGIN CERTIFICATE-----\nno").unwrap();
        let before = metrics.retries(SINK, Reason::Certificate);
        eventually("it goes on", || metrics.retries(SINK, Reason::Certificate) > before).await;
        std::fs::write(&path, right.pem()).unwrap();
    };
    let run = run(&with_ca, events("s", 2), metrics.clone());
    let (summary, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(run, renewal) }).await.unwrap();
    assert_eq!(summary, delivered(2));

    std::fs::write(&path, "no certificate").unwrap();
    let complaint = refused(&target, |options| options.tls.ca = Some(path.clone()));
    assert!(complaint.ends_with("CA must hold certificates as PEM"), "{complaint}");
    let complaint = refused(&target, |options| options.tls.ca = Some("/does/not/exist".into()));
    assert!(complaint.contains("/does/not/exist"), "{complaint}");
}

#[tokio::test]
async fn a_clients_certificate_is_shown_and_renewed() {
    let (servers, clients, strangers) =
        (Authority::new("servers"), Authority::new("clients"), Authority::new("strangers"));
    let endpoint = Endpoint::secure(servers.server(Some(&clients)), |_, _| Answer::status(200)).await;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (ca, certificate, key) = (path("ca.pem"), path("tls.crt"), path("tls.key"));
    std::fs::write(&ca, servers.pem()).unwrap();
    let show = |pair: web::Pair| {
        std::fs::write(&certificate, pair.certificate).unwrap();
        std::fs::write(&key, pair.key).unwrap();
    };
    show(strangers.pair());
    let target = format!("https://localhost:{}/", endpoint.address.port());
    let tls = |options: &mut SinkOptions| {
        options.tls.ca = Some(ca.clone());
        options.tls.identity = Some((certificate.clone(), key.clone()));
    };
    let with_pair = config(&target, tls);
    let metrics = Metrics::default();
    let renewal = async {
        eventually("it isn't accepted", || metrics.retries(SINK, Reason::Certificate) > 0).await;
        show(clients.pair());
    };
    let run = run(&with_pair, events("s", 2), metrics.clone());
    let (summary, ()) = tokio::time::timeout(PATIENCE, async { tokio::join!(run, renewal) }).await.unwrap();
    assert_eq!(summary, delivered(2));

    // Without one, and with one whose key is another's.
    let metrics = Metrics::default();
    let without = config(&target, |options| options.tls.ca = Some(ca.clone()));
    tokio::select! {
        _ = self::run(&without, events("s", 1), metrics.clone()) => panic!("it can't"),
        () = eventually("it isn't accepted", || metrics.retries(SINK, Reason::Certificate) > 0) => {}
    }
    std::fs::write(&key, clients.pair().key).unwrap();
    let complaint = refused(&target, tls);
    assert!(complaint.ends_with("CERT and KEY must be a certificate and its own key, as PEM"), "{complaint}");
}

#[tokio::test]
async fn certificates_that_a_platform_gives_are_trusted_too() {
    let authority = Authority::new("platform");
    let endpoint = Endpoint::secure(authority.server(None), |_, _| Answer::status(200)).await;
    let target = format!("https://localhost:{}/", endpoint.address.port());
    let config = config(&target, |options| {
        options.web.also_trusted = Some(authority.pem());
        options.web.overrides = Overrides::parse(r#"{"extensions":{"team":"blue"}}"#).unwrap();
    });
    let sent = vec![event("s", 0, r#","team":"red""#)];
    assert_eq!(export(&config, sent).await.0, delivered(1));
    assert_eq!(endpoint.requests()[0].json()["team"], "blue");
}

#[tokio::test]
async fn a_proxy_is_gone_through_unless_the_address_is_excepted() {
    let (proxy, endpoint) = (taking().await, taking().await);
    let through = |except: &str| {
        let url = Proxies::url(&format!("http://user:pass@{}", proxy.address));
        Proxies { http: url, https: None, except: except.to_owned() }
    };
    let proxied =
        |target: &str, except: &str| config(target, |options| options.web.proxies = through(except));
    let far = "http://sink.example.invalid/in?key=k";
    for (target, except) in [(far, ""), (far, "10.0.0.0/8, example.com"), (&*endpoint.url("/"), "10.0.0.0/8")]
    {
        assert_eq!(export(&proxied(target, except), events("s", 1)).await.0, delivered(1));
        let seen = proxy.requests().pop().unwrap();
        assert_eq!(seen.path, target, "the whole URL is asked for");
        assert_eq!(seen.header("proxy-authorization"), Some("Basic dXNlcjpwYXNz"));
    }
    assert!(endpoint.requests().is_empty());
    let localhost = format!("http://localhost:{}/", endpoint.address.port());
    let cases = [
        (endpoint.url("/"), "127.0.0.0/8"),
        (endpoint.url("/"), "10.0.0.1,127.0.0.1"),
        (endpoint.url("/"), "*"),
        (localhost, "example.com, localhost"),
    ];
    let so_far = proxy.requests().len();
    for (target, except) in cases {
        assert_eq!(export(&proxied(&target, except), events("s", 1)).await.0, delivered(1), "{except}");
    }
    assert_eq!((endpoint.requests().len(), proxy.requests().len()), (4, so_far));
}

#[tokio::test]
async fn a_tunnel_is_asked_for_by_name_and_a_proxy_that_wants_to_know_who_asks_is_for_a_person() {
    let proxy = Endpoint::start(|n, _| Answer::status(if n == 0 { 502 } else { 407 })).await;
    let config = config("https://sink.example.invalid/", |options| {
        options.web.proxies = Proxies::all(Proxies::url(&format!("{}", proxy.address)).unwrap());
        options.web.also_trusted = Some(Authority::new("any").pem());
    });
    let metrics = Metrics::default();
    tokio::select! {
        _ = run(&config, events("s", 1), metrics.clone()) => panic!("it can't"),
        () = eventually("it is told", || metrics.retries(SINK, Reason::Unauthorized) > 0) => {}
    }
    assert_eq!(metrics.retries(SINK, Reason::Unreachable), 1);
    let asked = proxy.requests().remove(0);
    assert_eq!((asked.method.as_str(), asked.path.as_str()), ("CONNECT", "sink.example.invalid:443"));
}

/// Serves HTTP/2 on a stream: takes `most` requests, then says goodbye.
async fn serve_h2(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    taken: Arc<Mutex<Vec<Value>>>,
    most: usize,
) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    let mut served = 0;
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let mut body = request.into_body();
        // The connection has to be driven for the body to come.
        let read = async {
            let mut bytes = Vec::new();
            while let Some(Ok(chunk)) = body.data().await {
                bytes.extend(chunk);
            }
            bytes
        };
        let bytes = tokio::select! {
            bytes = read => bytes,
            _ = std::future::poll_fn(|context| connection.poll_closed(context)) => return,
        };
        taken.lock().unwrap().push(serde_json::from_slice(&bytes).unwrap());
        let answer = http::Response::builder().status(200).body(()).unwrap();
        respond.send_response(answer, true).unwrap();
        served += 1;
        if served == most {
            connection.graceful_shutdown();
        }
    }
}

#[tokio::test]
async fn http_2_is_spoken_without_asking_and_goes_on_after_a_goodbye() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = format!("http://{}/", listener.local_addr().unwrap());
    let taken = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&taken);
    let mut server = JoinSet::new();
    server.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.spawn(serve_h2(stream, Arc::clone(&log), 5));
        }
    });
    let config = config(&target, |options| own(options, "http2", "prior-knowledge"));
    let sent = events("s", 23);
    let (summary, metrics) = export(&config, sent.clone()).await;
    assert_eq!((summary, metrics.retries(SINK, Reason::Protocol)), (delivered(23), 0));
    arrived(taken.lock().unwrap().clone(), &sent);
}

#[tokio::test]
async fn http_2_is_spoken_where_a_tls_server_chooses_it() {
    let authority = Authority::new("h2");
    for (http2, alpn, expected) in
        [("auto", &[b"h2".to_vec()][..], 1), ("off", &[b"h2".to_vec(), b"http/1.1".to_vec()], 0)]
    {
        let mut server_config = authority.server(None);
        server_config.alpn_protocols = alpn.to_vec();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(server_config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = format!("https://localhost:{}/", listener.local_addr().unwrap().port());
        let taken = Arc::new(Mutex::new(Vec::new()));
        let (log, chosen) = (Arc::clone(&taken), Arc::new(Mutex::new(Vec::new())));
        let choices = Arc::clone(&chosen);
        let mut server = JoinSet::new();
        server.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
                choices.lock().unwrap().push(protocol.clone());
                if protocol.as_deref() == Some(b"h2") {
                    serve_h2(stream, Arc::clone(&log), usize::MAX).await;
                }
            }
        });
        let config = config(&target, |options| {
            options.web.also_trusted = Some(authority.pem());
            own(options, "http2", http2);
        });
        if expected == 1 {
            assert_eq!(export(&config, events("s", 1)).await.0, delivered(1));
            assert_eq!(chosen.lock().unwrap()[0].as_deref(), Some(&b"h2"[..]));
        } else {
            tokio::select! {
                _ = run(&config, events("s", 1), Metrics::default()) => panic!("nobody answers"),
                () = eventually("it connects", || !chosen.lock().unwrap().is_empty()) => {}
            }
            assert_ne!(chosen.lock().unwrap()[0].as_deref(), Some(&b"h2"[..]));
        }
        assert_eq!(taken.lock().unwrap().len(), expected);
    }
}

#[test]
fn an_option_that_no_http_sink_has_is_refused() {
    let complaint = refused("http://h/", |options| own(options, "linger.ms", "1"));
    assert!(complaint.contains("OPT_LINGER_MS is no option of HTTP sinks: OPT_COMPRESSION"), "{complaint}");
    let complaint = refused("http://h/", |options| options.web.signing = Some(Secret::fixed("hunter2")));
    assert!(
        complaint.contains("WEBHOOK_SECRET must be whsec_") && !complaint.contains("hunter2"),
        "{complaint}"
    );
}
