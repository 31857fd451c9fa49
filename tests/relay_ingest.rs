//! `POST /events` at the wire: what is taken, and every refusal with its status and body.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/server.rs"]
mod server;

use std::io::Write as _;

use aep_sidecar::relay::Limits;
use serde_json::{Value, json};
use server::{Server, event, event_with};

const ONE: &str = "application/json";
const LINES: &str = "application/x-ndjson";

async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    assert_eq!(response.headers()["access-control-allow-origin"], "*");
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
}

#[tokio::test]
async fn an_event_is_taken_and_held_to_the_byte() {
    let server = Server::open().await;
    let text = event_with("s", 1, r#", "acme" : 5.0,"data":{"z":1.0,"a":[ 12345678901234567890 ]}"#);
    assert_eq!(answer(server.post(ONE, text.clone())).await, (202, json!({"accepted": 1})));
    assert_eq!(server.held().await, [text]);
}

#[tokio::test]
async fn a_batch_is_taken_in_order_and_blank_lines_are_ignored() {
    let server = Server::open().await;
    let body = format!("\n{}\r\n\n  \n{}", event("s", 1), event("s", 2));
    assert_eq!(
        answer(server.post("Application/X-NDJSON; charset=utf-8", body)).await.1,
        json!({"accepted": 2})
    );
    assert_eq!(server.held().await, [event("s", 1), event("s", 2)]);
    assert_eq!(answer(server.post(LINES, "\n\n")).await, (202, json!({"accepted": 0})));
}

#[tokio::test]
async fn a_pretty_printed_event_is_one_line_on_the_stream() {
    let server = Server::open().await;
    let body = event_with("s", 1, ",\r\n  \"data\": {\n    \"a\": \"b\\n\"\n  }\n");
    assert_eq!(answer(server.post(ONE, format!("\n {body}\n"))).await.0, 202);
    assert_eq!(server.held().await, [body.replace(['\r', '\n'], " ")]);
}

#[tokio::test]
async fn a_version_is_required() {
    let server = Server::open().await;
    for version in [None, Some("0.2"), Some("1.0"), Some("")] {
        let mut request =
            server.client.post(server.url("/events")).header("content-type", ONE).body(event("s", 1));
        if let Some(version) = version {
            request = request.header("aep-version", version);
        }
        assert_eq!(answer(request).await, (426, json!({"versions": ["0.1"]})), "{version:?}");
    }
    assert_eq!(server.refused("version-unsupported"), 4);
}

#[tokio::test]
async fn other_media_types_are_refused() {
    let server = Server::open().await;
    for content_type in ["text/plain", "application/cloudevents+json", "application/jsonx", ""] {
        let (status, body) = answer(server.post(content_type, event("s", 1))).await;
        assert_eq!((status, &body["error"]), (415, &json!("unsupported-media-type")), "{content_type}");
    }
    let without = server.client.post(server.url("/events")).header("aep-version", "0.1").body(event("s", 1));
    assert_eq!(answer(without).await.0, 415);
}

#[tokio::test]
async fn one_bad_line_refuses_the_batch_whole() {
    let server = Server::open().await;
    for (bad, error, detail) in [
        ("{\"aep\":", "invalid-json", "EOF"),
        ("nonsense", "invalid-json", "expected"),
        ("[]", "invalid-event", "object"),
        (r#"{"aep":"0.1"}"#, "invalid-event", "id is required"),
        (&event_with("s", 9, r#","severity":"fatal""#), "invalid-event", "severity must be one of"),
        (&event_with("s", 9, r#","id":"x""#), "invalid-event", "id stands twice"),
        (&event_with("s", 9, r#","acme_ext":1"#), "invalid-event", "acme_ext must match"),
        (&event_with("s", 9, r#","data":[1]"#), "invalid-event", "data must be an object"),
        (&event("s", 9).replace("\"seq\":9", "\"seq\":-9"), "invalid-event", "seq must be an integer"),
    ] {
        let body = format!("{}\n\n{}\n{bad}\n{}", event("s", 1), event("s", 2), event("s", 3));
        let (status, body) = answer(server.post(LINES, body)).await;
        assert_eq!((status, &body["error"], &body["line"]), (400, &json!(error), &json!(2)), "{bad}");
        assert!(body["detail"].as_str().unwrap().contains(detail), "{body}");
    }
    let (_, body) = answer(server.post(ONE, "{\"aep\":\"0.1\"}")).await;
    assert_eq!(body["line"], json!(0));
    assert_eq!(server.held().await, Vec::<String>::new());
    assert_eq!(server.hub.metrics().admitted.get(), 0);
    assert_eq!((server.refused("invalid-json"), server.refused("invalid-event")), (2, 8));
}

#[tokio::test]
async fn invalid_utf_8_is_refused() {
    let server = Server::open().await;
    let mut body = event("s", 1).into_bytes();
    body[30] = 0xff;
    let (status, body) = answer(server.post(ONE, body)).await;
    assert_eq!((status, &body["error"]), (400, &json!("invalid-json")));
    assert!(body["detail"].as_str().unwrap().contains("UTF-8"));
}

#[tokio::test]
async fn an_error_text_never_repeats_data() {
    let server = Server::open().await;
    for body in [
        r#"{"data":{"prompt":"hunter2"}}"#.to_owned(),
        r#"{"data":{"prompt":"hunter2"#.to_owned(),
        r#""hunter2""#.to_owned(),
        event_with("s", 1, r#","data":{"hunter2":"hunter2"},"data":{}"#),
        event_with("s", 1, r#","data":"hunter2""#),
    ] {
        let (status, body) = answer(server.post(ONE, body)).await;
        assert!(status == 400 && !body.to_string().contains("hunter2"), "{body}");
    }
}

#[tokio::test]
async fn commands_over_http_are_forbidden() {
    let server = Server::open().await;
    let command = r#"{"aep":"0.1","id":"c","type":"control.cancel","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s"}"#;
    for (content_type, body, line) in [
        (ONE, command.to_owned(), 0),
        (LINES, format!("{}\n{command}", event("s", 1)), 1),
        (LINES, command.replace("control.cancel", "x.acme.control.reboot"), 0),
    ] {
        let (status, body) = answer(server.post(content_type, body)).await;
        assert_eq!((status, &body["error"], &body["line"]), (403, &json!("unauthorized"), &json!(line)));
    }
    assert_eq!(server.held().await, Vec::<String>::new());
    // An acknowledgement is an ordinary event, and so is attention.routed.
    let ack = event("s", 1).replace("run.started", "control.accepted");
    assert_eq!(answer(server.post(ONE, ack)).await.0, 202);
    let routed = command.replace("control.cancel", "attention.routed");
    assert_eq!(answer(server.post(ONE, routed)).await.0, 202);
    assert_eq!(server.held().await.len(), 2);
}

#[tokio::test]
async fn a_token_is_demanded_everywhere_but_for_health_and_preflights() {
    let server = Server::start(Limits::default(), Some("s3cret")).await;
    for path in [
        "/events",
        "/.well-known/aep",
        "/stream",
        "/stream?access_token=wrong",
        "/stream?access_token=s3cre%00",
    ] {
        let (status, body) = answer(server.client.get(server.url(path))).await;
        assert_eq!((status, &body["error"]), (401, &json!("unauthorized")), "{path}");
    }
    for value in ["Bearer wrong", "Basic s3cret", "s3cret", "Bearer"] {
        assert_eq!(
            answer(server.post(ONE, event("s", 1)).header("authorization", value)).await.0,
            401,
            "{value}"
        );
    }
    // A wrong header isn't mended by the query.
    let both =
        server.client.get(server.url("/events?access_token=s3cret")).header("authorization", "Bearer wrong");
    assert_eq!(answer(both).await.0, 401);
    for request in [
        server.client.get(server.url("/events?access_token=s3cret")),
        server.client.get(server.url("/events?x=1&access_token=%733cret")),
        server.client.get(server.url("/.well-known/aep")).header("authorization", "bEaReR s3cret"),
    ] {
        assert_eq!(answer(request).await.0, 200);
    }
    assert_eq!(answer(server.post(ONE, event("s", 1)).bearer_auth("s3cret")).await.0, 202);
    assert_eq!(answer(server.client.get(server.url("/healthz"))).await, (200, json!({"ok": true})));
    let (_, known) = answer(server.client.get(server.url("/healthz")).bearer_auth("s3cret")).await;
    assert_eq!(
        (&known["ok"], &known["sessions"], &known["subscribers"]),
        (&json!(true), &json!(1), &json!(0))
    );
    assert!(known["uptime_s"].is_u64());
    let preflight =
        server.client.request(reqwest::Method::OPTIONS, server.url("/stream")).send().await.unwrap();
    assert_eq!(preflight.status(), 204);
    let unauthorized = server.client.get(server.url("/stream")).send().await.unwrap();
    assert_eq!(unauthorized.headers()["www-authenticate"], "Bearer");
}

#[tokio::test]
async fn preflights_are_answered() {
    let server = Server::open().await;
    for path in ["/stream", "/connections", "/events"] {
        let response =
            server.client.request(reqwest::Method::OPTIONS, server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 204, "{path}");
        let headers = response.headers();
        assert_eq!(headers["access-control-allow-origin"], "*");
        assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
        let allowed = headers["access-control-allow-headers"].to_str().unwrap();
        for name in ["authorization", "content-type", "last-event-id", "aep-version"] {
            assert!(allowed.contains(name));
        }
    }
}

#[tokio::test]
async fn discovery_says_what_there_is() {
    let server = Server::start(Limits { buffer: 42, ..Limits::default() }, None).await;
    let (status, document) = answer(server.client.get(server.url("/events"))).await;
    assert_eq!(status, 200);
    assert_eq!(document["aep"], json!(["0.1"]));
    assert_eq!(document["role"], json!("collector"));
    assert_eq!(document["endpoints"]["events"], json!("/events"));
    assert_eq!(document["endpoints"]["stream"], json!("/stream"));
    let capabilities = &document["capabilities"];
    assert_eq!(capabilities["filters"], json!(["attr-match"]));
    assert_eq!(capabilities["replay"], json!({"buffer": 42, "all": true}));
    assert_eq!(capabilities["capture"], json!(["none", "metadata", "redacted", "full"]));
    assert_eq!(
        (&capabilities["control"], &capabilities["experimental"]),
        (&json!({"accepts": []}), &json!({}))
    );
    assert_eq!(answer(server.client.get(server.url("/.well-known/aep"))).await.1, document);
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_in_json() {
    let server = Server::open().await;
    let (status, body) = answer(server.client.get(server.url("/nothing"))).await;
    assert_eq!((status, &body["error"]), (404, &json!("not-found")));
    let response = server.client.put(server.url("/events")).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["allow"]),
        (405, &"GET, POST, OPTIONS".parse().unwrap())
    );
}

#[tokio::test]
async fn an_announced_length_over_the_bound_is_answered_before_the_upload() {
    let server = Server::start(Limits { max_body: 1000, ..Limits::default() }, None).await;
    // Not a byte of the body is sent: the answer comes all the same.
    let head = "POST /events HTTP/1.1\r\nhost: h\r\naep-version: 0.1\r\ncontent-type: application/json\r\ncontent-length: 1001\r\n\r\n";
    let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await.unwrap();
    let mut answer = [0; 4096];
    let n = tokio::io::AsyncReadExt::read(&mut stream, &mut answer).await.unwrap();
    let answer = std::str::from_utf8(&answer[..n]).unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.ends_with(r#"{"error":"payload-too-large","max_bytes":1000}"#), "{answer}");
}

#[tokio::test]
async fn an_upload_over_the_bound_gets_to_see_why() {
    let server = Server::start(Limits { max_body: 1000, ..Limits::default() }, None).await;
    // The client sends all of it before it reads: were the connection cut, it would see a reset instead.
    let big = 8 * 1024 * 1024;
    for head in
        [format!("content-length: {big}\r\n\r\n"), format!("transfer-encoding: chunked\r\n\r\n{big:x}\r\n")]
    {
        let mut request = format!(
            "POST /events HTTP/1.1\r\nhost: h\r\naep-version: 0.1\r\ncontent-type: application/json\r\n{head}"
        )
        .into_bytes();
        let tail = if head.contains("chunked") { "\r\n0\r\n\r\n" } else { "" };
        request.extend(std::iter::repeat_n(b' ', big));
        request.extend_from_slice(tail.as_bytes());
        let answer = server.raw(&request).await;
        assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
        assert!(answer.contains(r#"{"error":"payload-too-large","max_bytes":1000}"#), "{answer}");
    }
    assert_eq!(server.refused("payload-too-large"), 2);
}

#[tokio::test]
async fn a_body_at_the_bound_is_taken() {
    let text = event("s", 1);
    let server = Server::start(Limits { max_body: text.len(), ..Limits::default() }, None).await;
    assert_eq!(answer(server.post(ONE, text.clone())).await.0, 202);
    assert_eq!(answer(server.post(ONE, format!("{text} "))).await.0, 413);
}

#[tokio::test]
async fn too_many_events_are_refused_whole() {
    let server = Server::start(Limits { max_batch: 2, ..Limits::default() }, None).await;
    let lines: Vec<String> = (0..3).map(|n| event("s", n)).collect();
    assert_eq!(
        answer(server.post(LINES, lines.join("\n"))).await,
        (413, json!({"error": "too-many-events", "max": 2, "count": 3}))
    );
    assert_eq!(server.held().await, Vec::<String>::new());
    server.ingest(&lines[..2]).await;
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn compressed_bodies_are_taken_and_bounded_by_what_they_hold() {
    let server = Server::start(Limits { max_body: 100_000, ..Limits::default() }, None).await;
    let lines = format!("{}\n{}", event("s", 1), event("s", 2));
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
    for (encoding, body) in [
        ("gzip", gzip(lines.as_bytes())),
        ("x-gzip", gzip(lines.as_bytes())),
        ("ZSTD", zstd(lines.as_bytes())),
        ("identity", lines.clone().into_bytes()),
    ] {
        let request = server.post(LINES, body).header("content-encoding", encoding);
        assert_eq!(answer(request).await, (202, json!({"accepted": 2})), "{encoding}");
    }
    let bomb = vec![b' '; 50_000_000];
    for (encoding, body) in [("gzip", gzip(&bomb)), ("zstd", zstd(&bomb))] {
        assert!(body.len() < 100_000);
        let request = server.post(LINES, body).header("content-encoding", encoding);
        assert_eq!(answer(request).await, (413, json!({"error": "payload-too-large", "max_bytes": 100_000})));
    }
    let mut torn = gzip(lines.as_bytes());
    torn.truncate(torn.len() / 2);
    for (encoding, body) in [("gzip", torn), ("gzip", b"plain".to_vec()), ("zstd", b"plain".to_vec())] {
        let (status, body) = answer(server.post(LINES, body).header("content-encoding", encoding)).await;
        assert_eq!((status, &body["error"]), (400, &json!("invalid-encoding")));
    }
    let (status, body) = answer(server.post(LINES, "x").header("content-encoding", "br")).await;
    assert_eq!((status, &body["error"]), (415, &json!("unsupported-encoding")));
}

#[tokio::test]
async fn memory_for_bodies_is_bounded_over_all_requests() {
    let server = Server::start(Limits { ingest_bytes: 100, ..Limits::default() }, None).await;
    let response = server.post(ONE, event("s", 1)).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
    assert_eq!(body["error"], json!("unavailable"));
    // What was counted is given back.
    let server = Server::start(Limits { ingest_bytes: 400, ..Limits::default() }, None).await;
    for n in 0..20 {
        server.ingest(&[event("s", n)]).await;
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_ingests_nothing() {
    let server = Server::open().await;
    let text = format!("{}\n{}", event("s", 1), event("s", 2));
    let head = format!(
        "POST /events HTTP/1.1\r\nhost: h\r\naep-version: 0.1\r\ncontent-type: {LINES}\r\ncontent-length: {}\r\n\r\n",
        text.len() + 1
    );
    let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, format!("{head}{text}").as_bytes()).await.unwrap();
    tokio::io::AsyncWriteExt::shutdown(&mut stream).await.unwrap();
    let mut answer = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer).await.unwrap();
    assert!(!answer.starts_with("HTTP/1.1 202"), "{answer}");
    assert_eq!(server.held().await, Vec::<String>::new());
}

#[tokio::test]
async fn what_bodies_decompress_to_counts_as_memory() {
    let server = Server::start(Limits { ingest_bytes: 100_000, ..Limits::default() }, None).await;
    let body = gzip(&vec![b' '; 1_000_000]);
    let (status, body) = answer(server.post(LINES, body).header("content-encoding", "gzip")).await;
    assert_eq!((status, &body["error"]), (503, &json!("unavailable")));
    server.ingest(&[event("s", 1)]).await;
}

#[tokio::test]
async fn whatever_is_refused_the_sender_gets_to_see_why() {
    let server = Server::start(Limits::default(), Some("s3cret")).await;
    let big = 8 * 1024 * 1024;
    for (head, status) in [
        ("content-type: application/json\r\naep-version: 0.1\r\n", "401"),
        ("content-type: application/json\r\nauthorization: Bearer s3cret\r\n", "426"),
        ("content-type: text/plain\r\naep-version: 0.1\r\nauthorization: Bearer s3cret\r\n", "415"),
    ] {
        let mut request = format!(
            "POST /events HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{head}content-length: {big}\r\n\r\n"
        )
        .into_bytes();
        request.extend(std::iter::repeat_n(b' ', big));
        let answer = server.raw(&request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
}

#[tokio::test]
async fn extension_attributes_are_bounded() {
    let server = Server::open().await;
    let members = |n: usize| (0..n).map(|n| format!(",\"e{n}\":1")).collect::<String>();
    assert_eq!(answer(server.post(ONE, event_with("s", 1, &members(128)))).await.0, 202);
    let (status, body) = answer(server.post(ONE, event_with("s", 2, &members(129)))).await;
    assert_eq!((status, &body["error"]), (400, &json!("invalid-event")));
    assert_eq!(body["detail"], json!("more than 128 extension attributes"));
}
