//! The real binary as a Knative source: what a SinkBinding sets is where events go.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]

#[path = "harness/process.rs"]
mod process;
#[path = "harness/web.rs"]
mod web;

use std::time::Duration;

use process::Sidecar;
use web::{Answer, Authority, Endpoint};

/// The longest that a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

fn event(seq: u64) -> String {
    format!(
        r#"{{"aep":"0.1","id":"e{seq}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":{seq},"team":"red"}}"#
    )
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{what}");
}

#[tokio::test]
async fn events_go_where_a_sink_binding_says_as_it_says() {
    let authority = Authority::new("cluster");
    let broker = Endpoint::secure(authority.server(None), |_, _| Answer::status(202)).await;
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "projected\n").unwrap();
    let sidecar = Sidecar::start(
        dir.path(),
        &[
            ("K_SINK", &format!("https://localhost:{}/ns/broker", broker.address.port())),
            ("K_CE_OVERRIDES", r#"{"extensions":{"team":"blue","zone":"eu"}}"#),
            ("K_CA_CERTS", &authority.pem()),
            ("CE_OIDC_TOKEN_FILE", token.to_str().unwrap()),
            ("AEP_EXPECT_K_SINK", "true"),
        ],
    );
    sidecar.post(&[event(0)]).await;
    eventually("it arrives", || broker.requests().len() == 1).await;
    let request = broker.requests().remove(0);
    assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/ns/broker"));
    assert_eq!(request.header("authorization"), Some("Bearer projected"));
    let body = request.json();
    assert_eq!((&body["id"], &body["team"], &body["zone"]), (&"e0".into(), &"blue".into(), &"eu".into()));
    sidecar.stop();
}

#[tokio::test]
async fn without_the_binding_that_is_expected_events_wait_and_the_reason_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let unbound = [("AEP_EXPECT_K_SINK", "true"), ("AEP_ADMIN_ADDR", "127.0.0.1:0")];
    let sidecar = Sidecar::start(dir.path(), &unbound);
    let ready = sidecar.client.get(sidecar.admin("/readyz")).send().await.unwrap();
    assert_eq!(ready.status(), 503);
    let said = ready.text().await.unwrap();
    assert!(said.contains("K_SINK is not set"), "{said}");
    assert_eq!(sidecar.client.get(sidecar.admin("/livez")).send().await.unwrap().status(), 200);
    sidecar.post(&[event(0), event(1)]).await;
    assert!(sidecar.stop().is_empty(), "nothing goes to stdout instead");

    let broker = Endpoint::start(|_, _| Answer::status(202)).await;
    let url = broker.url("/");
    let bound = [unbound[0], unbound[1], ("K_SINK", url.as_str())];
    let sidecar = Sidecar::start(dir.path(), &bound);
    eventually("what waited arrives", || broker.requests().len() == 2).await;
    let ready = sidecar.client.get(sidecar.admin("/readyz")).send().await.unwrap();
    assert_eq!(ready.status(), 200);
    sidecar.stop();
}
