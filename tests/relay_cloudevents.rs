//! `POST /cloudevents` at the wire: the three content modes, what is refused, and the handshake of web hooks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/server.rs"]
mod server;

use std::io::Write as _;

use aep_sidecar::aep::Event;
use aep_sidecar::aep::cloudevents::{CloudEvent, HeaderValues, batch};
use aep_sidecar::relay::Limits;
use serde_json::{Value, json};
use server::{Server, event, event_with};

const STRUCTURED: &str = "application/cloudevents+json; charset=UTF-8";
const BATCH: &str = "application/cloudevents-batch+json";

fn post(server: &Server, content_type: &str, body: impl Into<reqwest::Body>) -> reqwest::RequestBuilder {
    server.client.post(server.url("/cloudevents")).header("content-type", content_type).body(body)
}

async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_str(&response.text().await.unwrap()).unwrap())
}

fn structured(event: &str) -> Vec<u8> {
    CloudEvent::of(&Event::parse_str(event).unwrap()).unwrap().structured()
}

/// The same attributes, whatever their order.
fn same(held: &[String], posted: &[String]) {
    let values = |texts: &[String]| -> Vec<Value> {
        texts.iter().map(|text| serde_json::from_str(text).unwrap()).collect()
    };
    assert_eq!(values(held), values(posted));
}

#[tokio::test]
async fn an_event_is_admitted_from_each_content_mode() {
    let server = Server::open().await;
    let texts: Vec<_> =
        (1..=4).map(|seq| event_with("s", seq, r#","subject":"é %","acme":"7","data":{"z":1.0}"#)).collect();
    let events: Vec<_> = texts.iter().map(|text| Event::parse_str(text).unwrap()).collect();
    let mapped: Vec<_> = events.iter().map(|event| CloudEvent::of(event).unwrap()).collect();
    let accepted = |count: usize| (202, json!({"accepted": count}));
    assert_eq!(answer(post(&server, STRUCTURED, mapped[0].structured())).await, accepted(1));
    let binary = mapped[1].binary(HeaderValues::Encoded);
    let mut request = server.client.post(server.url("/cloudevents")).body(binary.body);
    for (name, value) in binary.headers {
        request = request.header(name, value);
    }
    assert_eq!(answer(request).await, accepted(1));
    assert_eq!(answer(post(&server, BATCH, batch(&mapped[2..]))).await, accepted(2));
    same(&server.held().await, &texts);
    assert_eq!(answer(post(&server, BATCH, "[]")).await, accepted(0));
}

#[tokio::test]
async fn a_foreign_type_is_refused_and_the_batch_with_it() {
    let server = Server::open().await;
    let foreign = r#"{"specversion":"1.0","id":"1","source":"/s","type":"com.example.made"}"#;
    let (status, body) = answer(post(&server, STRUCTURED, foreign)).await;
    assert_eq!((status, &body["error"], &body["line"]), (422, &json!("foreign-event"), &json!(0)));
    assert!(body["detail"].as_str().unwrap().contains("com.example.made"), "{body}");
    let good = String::from_utf8(structured(&event("s", 1))).unwrap();
    let (status, body) = answer(post(&server, BATCH, format!("[{good},{foreign}]"))).await;
    assert_eq!((status, &body["line"]), (422, &json!(1)));
    assert_eq!(server.held().await, Vec::<String>::new());
    assert_eq!(server.refused("foreign-event"), 2);
}

#[tokio::test]
async fn what_is_no_cloudevent_of_ours_is_told_apart() {
    let server = Server::open().await;
    let without_agent = String::from_utf8(structured(&event("s", 1))).unwrap();
    let without_agent = without_agent.replace("aepagentid", "aepagentidx");
    for (content_type, body, status, code) in [
        (STRUCTURED, "{", 400, "invalid-json"),
        (STRUCTURED, r#"{"specversion":"1.0"}"#, 400, "invalid-event"),
        (STRUCTURED, &without_agent, 400, "invalid-event"),
        (BATCH, "{}", 400, "invalid-event"),
        ("application/cloudevents+avro", "x", 415, "unsupported-media-type"),
        ("text/plain", "x", 400, "invalid-json"),
        ("text/plain", "", 400, "invalid-event"),
    ] {
        let (answered, error) = answer(post(&server, content_type, body.to_owned())).await;
        assert_eq!((answered, &error["error"]), (status, &json!(code)), "{content_type} {body} {error}");
    }
    assert_eq!(server.held().await, Vec::<String>::new());
}

#[tokio::test]
async fn commands_are_refused_as_over_events() {
    let server = Server::open().await;
    let command = r#"{"aep":"0.1","id":"c","type":"control.cancel","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s"}"#;
    let (status, body) = answer(post(&server, STRUCTURED, structured(command))).await;
    assert_eq!((status, &body["error"]), (403, &json!("unauthorized")));
}

#[tokio::test]
async fn the_same_token_and_the_same_bounds_hold() {
    let limits = Limits { max_body: 2_000, max_batch: 2, ..Limits::default() };
    let server = Server::start(limits, Some("t")).await;
    let body = structured(&event("s", 1));
    assert_eq!(answer(post(&server, STRUCTURED, body.clone())).await.0, 401);
    let with = |content_type: &str, body: Vec<u8>| post(&server, content_type, body).bearer_auth("t");
    assert_eq!(answer(with(STRUCTURED, body.clone())).await.0, 202);
    let one = String::from_utf8(body).unwrap();
    let three = format!("[{one},{one},{one}]");
    let (status, error) = answer(with(BATCH, three.into_bytes())).await;
    assert_eq!((status, &error["max"], &error["count"]), (413, &json!(2), &json!(3)));
    assert_eq!(answer(with(STRUCTURED, vec![b' '; 2_001])).await.0, 413);
    // Compressed, within the bound and beyond it.
    let compressed = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let gzip = |body: &[u8]| with(STRUCTURED, compressed(body)).header("content-encoding", "gzip");
    assert_eq!(answer(gzip(&structured(&event("s", 2)))).await.0, 202);
    assert_eq!(answer(gzip(&vec![b' '; 100_000])).await.0, 413);
    assert_eq!(server.refused("payload-too-large"), 2);
}

#[tokio::test]
async fn a_web_hook_gets_its_handshake() {
    let server = Server::start(Limits::default(), Some("t")).await;
    let ask = |path: &str| server.client.request(reqwest::Method::OPTIONS, server.url(path));
    let asked = ask("/cloudevents")
        .header("WebHook-Request-Origin", "eventemitter.example.com")
        .header("WebHook-Request-Rate", "120");
    let response = asked.send().await.unwrap();
    assert!(response.status().is_success());
    assert_eq!(response.headers()["webhook-allowed-origin"], "*");
    assert_eq!(response.headers()["webhook-allowed-rate"], "*");
    let response = ask("/cloudevents").send().await.unwrap();
    assert!(!response.headers().contains_key("webhook-allowed-origin"), "a browser's preflight");
    let response = ask("/events").header("WebHook-Request-Origin", "x").send().await.unwrap();
    assert!(!response.headers().contains_key("webhook-allowed-origin"));
    let got = server.client.get(server.url("/cloudevents")).send().await.unwrap();
    assert_eq!((got.status().as_u16(), got.headers()["allow"].to_str().unwrap()), (405, "POST, OPTIONS"));
}
