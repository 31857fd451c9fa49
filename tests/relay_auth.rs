//! Who may, at the wire: what each token permits and shows, and what happens to who is revoked, down to the
//! real binary whose tokens file is replaced while it runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/process.rs"]
mod process;
#[path = "harness/server.rs"]
mod server;

use std::path::Path;

use aep_sidecar::relay::{Access, Limits, Token, Tokens};
use process::Sidecar;
use serde_json::{Value, json};
use server::{Server, Stream, event, event_with};

const TOKENS: &str = r#"{"tokens":[
    {"name":"agent","token":"ag3nt","scopes":["emit"]},
    {"name":"reader","token":"re4d","scopes":["read"]},
    {"name":"billing","token":"b1ll","scopes":["read","emit"],"filter":{"agent":"billing"}},
    {"name":"one session","token":"0ne","scopes":["read"],"filter":{"session":["s","u"]}},
    {"name":"pager","token":"p4ge","scopes":["control"]}
]}"#;

fn encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// A server with an operator and with the tokens above.
async fn guarded(limits: Limits) -> (Server, Access) {
    let access = Access::new(Some(Token::new("s3cret").unwrap()));
    access.replace(Tokens::parse(TOKENS).unwrap()).unwrap();
    (Server::start_with(limits, access.clone()).await, access)
}

async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
}

async fn open(server: &Server, token: &str, query: &str) -> Stream {
    let request = server.client.get(server.url(&format!("/stream{query}"))).bearer_auth(token);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    Stream::of(response)
}

async fn ingest(server: &Server, lines: &[String]) {
    let request = server.post("application/x-ndjson", lines.join("\n")).bearer_auth("s3cret");
    assert_eq!(answer(request).await.0, 202);
}

/// What a bounded replay shows: the ids of events, and the names of markers.
async fn shown(server: &Server, token: &str, query: &str) -> Vec<String> {
    let request = server.client.get(server.url(&format!("/stream{query}"))).bearer_auth(token);
    let text = request.send().await.unwrap().text().await.unwrap();
    let told = text.lines().filter_map(|line| line.strip_prefix("id: ").or_else(|| line.strip_prefix(": ")));
    let names = told.map(|told| told.split(' ').next().unwrap().to_owned());
    names.filter(|name| name != "ping").collect()
}

fn of_agent(session: &str, seq: u64, agent: &str) -> String {
    event(session, seq).replace(r#""agent":"a""#, &format!(r#""agent":"{agent}""#))
}

#[tokio::test]
async fn each_token_permits_what_it_lists_and_an_unknown_one_nothing() {
    let (server, _) = guarded(Limits::default()).await;
    for (token, emit, read) in [
        (Some("s3cret"), 202, 200),
        (Some("ag3nt"), 202, 403),
        (Some("re4d"), 403, 200),
        (Some("b1ll"), 202, 200),
        (Some("p4ge"), 403, 403),
        (Some("reader"), 401, 401),
        (None, 401, 401),
    ] {
        let with = |request: reqwest::RequestBuilder| match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let (status, body) = answer(with(server.post("application/json", event("s", 1)))).await;
        assert_eq!(status, emit, "{token:?}");
        let expected = match emit {
            202 => json!({"accepted": 1}),
            403 => json!({"error": "forbidden", "detail": "this token does not permit emit"}),
            _ => json!({"error": "unauthorized", "detail": body["detail"]}),
        };
        assert_eq!(body, expected);
        let queries = [
            with(server.client.get(server.url("/stream?live=0"))),
            with(server.client.post(server.url("/stream")))
                .header("content-type", "application/json")
                .body(r#"{"live":0}"#),
        ];
        for request in queries {
            assert_eq!(request.send().await.unwrap().status(), read, "{token:?}");
        }
        // What the relay is may be known to whoever has a token.
        let discovery = with(server.client.get(server.url("/.well-known/aep"))).send().await.unwrap();
        assert_eq!(discovery.status(), if emit == 401 { 401 } else { 200 });
    }
    let by_query = server.client.get(server.url("/stream?live=0&access_token=re4d")).send().await.unwrap();
    assert_eq!(by_query.status(), 200);
    assert_eq!((server.refused("forbidden"), server.refused("unauthorized")), (6, 8));
}

#[tokio::test]
async fn a_refused_token_is_asked_for_and_a_weak_one_is_not() {
    let (server, _) = guarded(Limits::default()).await;
    for (token, challenged) in [("wrong", true), ("ag3nt", false)] {
        let response = server.client.get(server.url("/stream")).bearer_auth(token).send().await.unwrap();
        assert_eq!(response.headers().contains_key("www-authenticate"), challenged, "{token}");
    }
}

#[tokio::test]
async fn counts_are_told_to_who_may_see_everything() {
    let (server, _) = guarded(Limits::default()).await;
    for (token, told) in
        [("s3cret", true), ("re4d", true), ("b1ll", false), ("ag3nt", false), ("p4ge", false), ("x", false)]
    {
        let (status, body) = answer(server.client.get(server.url("/healthz")).bearer_auth(token)).await;
        assert_eq!((status, body.get("sessions").is_some()), (200, told), "{token}");
    }
}

#[tokio::test]
async fn a_bound_holds_for_replay_and_live_whatever_is_asked() {
    let (server, _) = guarded(Limits::default()).await;
    ingest(&server, &[of_agent("s", 1, "billing"), of_agent("s", 2, "other"), of_agent("t", 1, "billing")])
        .await;
    assert_eq!(shown(&server, "b1ll", "?from=all&live=0").await, ["s:0:1", "t:0:1", "replay-complete"]);
    let query = format!("?from=all&live=0&filter={}", encoded(r#"{"session":"s"}"#));
    assert_eq!(shown(&server, "b1ll", &query).await, ["s:0:1", "replay-complete"]);
    let query = format!("?from=all&live=0&filter={}", encoded(r#"{"agent":"other"}"#));
    assert_eq!(shown(&server, "b1ll", &query).await, ["replay-complete"]);
    assert_eq!(shown(&server, "s3cret", &query).await, ["s:0:2", "replay-complete"]);
    let mut stream = open(&server, "b1ll", "").await;
    assert_eq!(stream.comment().await.as_deref(), Some("ping"));
    ingest(&server, &[of_agent("s", 3, "other"), of_agent("s", 4, "billing")]).await;
    assert_eq!(stream.message().await.unwrap().id.as_deref(), Some("s:0:4"));
}

#[tokio::test]
async fn a_bound_by_session_tells_not_even_the_losses_of_others() {
    let (server, _) = guarded(Limits { buffer: 1, ..Limits::default() }).await;
    for seq in 1..4 {
        ingest(&server, &[event("s", seq), event("t", seq), event("u", seq)]).await;
    }
    let from = encoded(r#"[{"session":"t","seq":1},{"session":"s","seq":1}]"#);
    let told = shown(&server, "s3cret", &format!("?live=0&from={from}")).await;
    assert_eq!(told, ["replay-exhausted", "t:0:3", "replay-exhausted", "s:0:3", "replay-complete"]);
    let told = shown(&server, "0ne", &format!("?live=0&from={from}")).await;
    assert!(!told.iter().any(|id| id.starts_with("t:")), "{told:?}");
    assert_eq!(told, ["replay-exhausted", "s:0:3", "u:0:3", "replay-complete"]);
    assert_eq!(shown(&server, "0ne", "?from=all&live=0").await, ["s:0:3", "u:0:3", "replay-complete"]);
    let query = format!("?from=all&live=0&filter={}", encoded(r#"{"session":["t","u"]}"#));
    assert_eq!(shown(&server, "0ne", &query).await, ["u:0:3", "replay-complete"]);
}

#[tokio::test]
async fn who_is_revoked_is_sent_home_and_the_others_read_on() {
    let (server, access) = guarded(Limits::default()).await;
    let mut gone = open(&server, "re4d", "").await;
    let mut narrowed = open(&server, "b1ll", "").await;
    let mut same = open(&server, "0ne", "").await;
    let mut operator = open(&server, "s3cret", "").await;
    for stream in [&mut gone, &mut narrowed, &mut same, &mut operator] {
        assert_eq!(stream.comment().await.as_deref(), Some("ping"));
    }
    let list = r#"{"tokens":[
        {"name":"billing","token":"b1ll","scopes":["read"],"filter":{"agent":"billing"}},
        {"name":"one session","token":"0ne","scopes":["read"],"filter":{"session":["s","u"]}}
    ]}"#;
    access.replace(Tokens::parse(list).unwrap()).unwrap();
    // A clean end: the chunked body is complete.
    assert_eq!(gone.block().await, None);
    assert_eq!(narrowed.block().await, None);
    assert_eq!(server.hub.metrics().subscribers.get(), 2, "who is gone is no subscriber");
    ingest(&server, &[event("s", 1)]).await;
    assert_eq!(same.message().await.unwrap().id.as_deref(), Some("s:0:1"));
    assert_eq!(operator.message().await.unwrap().id.as_deref(), Some("s:0:1"));
    let status = |token: &'static str| {
        let request = server.client.get(server.url("/stream?live=0")).bearer_auth(token);
        async { request.send().await.unwrap().status().as_u16() }
    };
    assert_eq!((status("re4d").await, status("b1ll").await), (401, 200));
    let emit = server.post("application/json", event("s", 2)).bearer_auth("b1ll");
    assert_eq!(answer(emit).await.0, 403);
}

#[tokio::test]
async fn who_has_much_to_read_is_stopped_as_well() {
    let (server, access) = guarded(Limits::default()).await;
    let data = format!(r#","data":{{"text":"{}"}}"#, "x".repeat(10_000));
    for batch in 0..20 {
        let lines: Vec<_> = (0..100).map(|n| event_with("s", batch * 100 + n, &data)).collect();
        ingest(&server, &lines).await;
    }
    let mut stream = open(&server, "re4d", "?from=all").await;
    stream.message().await.unwrap();
    access.replace(Tokens::parse(r#"{"tokens":[]}"#).unwrap()).unwrap();
    let mut read = 1;
    while stream.message().await.is_some() {
        read += 1;
    }
    assert!(read < 2000, "all of it was read");
}

/// The real binary, and who of some tokens may emit there.
struct Running {
    sidecar: Sidecar,
    _state: tempfile::TempDir,
}

impl Running {
    fn start(file: &Path) -> Self {
        let state = tempfile::tempdir().unwrap();
        let sidecar = Sidecar::start(state.path(), &[("AEP_TOKENS_FILE", file.to_str().unwrap())]);
        Self { sidecar, _state: state }
    }

    async fn status(&self, token: &str) -> u16 {
        let request = self.sidecar.client.get(self.sidecar.url("/stream?live=0")).bearer_auth(token);
        request.send().await.unwrap().status().as_u16()
    }

    /// Waits until a change of the file has taken effect.
    fn reloaded(&self) {
        let line: Value = serde_json::from_str(&self.sidecar.process.logged("\"reloaded\"")).unwrap();
        assert_eq!(line["variables"], json!("AEP_TOKENS_FILE"));
    }
}

fn listing(tokens: &[&str]) -> String {
    let entries: Vec<Value> = tokens
        .iter()
        .map(|token| json!({"name": format!("name of {token}"), "token": token, "scopes": ["read"]}))
        .collect();
    json!({"tokens": entries}).to_string()
}

#[tokio::test]
async fn a_tokens_file_that_is_replaced_takes_effect() {
    let dir = tempfile::tempdir().unwrap();
    let (file, next) = (dir.path().join("tokens.json"), dir.path().join("next"));
    let replace = |text: &str| {
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &file).unwrap();
    };
    replace(&listing(&["one", "two"]));
    let running = Running::start(&file);
    assert_eq!((running.status("one").await, running.status("three").await), (200, 401));
    let anonymous = running.sidecar.client.get(running.sidecar.url("/stream?live=0")).send().await.unwrap();
    assert_eq!(anonymous.status(), 401);
    let request = running.sidecar.client.get(running.sidecar.url("/stream")).bearer_auth("two");
    let mut stream = Stream::of(request.send().await.unwrap());
    assert_eq!(stream.comment().await.as_deref(), Some("ping"));

    replace(&listing(&["one", "three"]));
    running.reloaded();
    assert_eq!(running.status("one").await, 200);
    assert_eq!((running.status("two").await, running.status("three").await), (401, 200));
    while let Some(comment) = stream.comment().await {
        assert_eq!(comment, "ping");
    }

    // What can't be used changes nothing, and is told without a token.
    replace(&listing(&["hunter2", "hunter2"]));
    let line = running.sidecar.process.logged("can't be reloaded");
    assert!(line.contains("another entry has this") && !line.contains("\\\"hunter2"), "{line}");
    assert_eq!(running.status("three").await, 200);
    std::fs::remove_file(&file).unwrap();
    running.sidecar.process.logged("can't be reloaded");
    assert_eq!(running.status("three").await, 200);
    replace(&listing(&["three"]));
    running.sidecar.process.logged("can be used again");
    running.reloaded();
    assert_eq!((running.status("one").await, running.status("three").await), (401, 200));
    running.sidecar.stop();
}

#[cfg(unix)]
#[tokio::test]
async fn a_mounted_secret_that_is_swapped_takes_effect() {
    use std::os::unix::fs::symlink;
    // As Kubernetes does it: tokens.json → ..data/tokens.json, and ..data → a directory that is new each time.
    let dir = tempfile::tempdir().unwrap();
    let swap = |version: &str, text: &str| {
        std::fs::create_dir(dir.path().join(version)).unwrap();
        std::fs::write(dir.path().join(version).join("tokens.json"), text).unwrap();
        symlink(version, dir.path().join("..data_tmp")).unwrap();
        std::fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
    };
    swap("..1", &listing(&["one"]));
    let file = dir.path().join("tokens.json");
    symlink("..data/tokens.json", &file).unwrap();
    let running = Running::start(&file);
    assert_eq!((running.status("one").await, running.status("two").await), (200, 401));
    swap("..2", &listing(&["two"]));
    std::fs::remove_dir_all(dir.path().join("..1")).unwrap();
    running.reloaded();
    assert_eq!((running.status("one").await, running.status("two").await), (401, 200));
    running.sidecar.stop();
}

#[test]
fn a_tokens_file_that_can_not_be_used_stops_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.json");
    let path = file.to_str().unwrap();
    for (text, problem) in [
        (None, "AEP_TOKENS_FILE: "),
        (Some("{}"), "must be an object with the one member"),
        (Some(r#"{"tokens":[{"name":"x","token":"hunter2"}]}"#), "scopes is required"),
    ] {
        if let Some(text) = text {
            std::fs::write(&file, text).unwrap();
        }
        let variables = [("AEP_TOKENS_FILE", path), ("AEP_PORT", "0")];
        let output = process::command(dir.path(), &variables).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && log.contains(problem) && log.contains(path), "{log}");
        assert!(!log.contains("hunter2"), "{log}");
    }
}
