//! Where and how the real binary listens: on IPv6, and with TLS whose certificate is renewed while it runs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking, in their helpers too")]
#![allow(clippy::indexing_slicing, reason = "a result of another shape fails the test")]
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

#[path = "harness/process.rs"]
mod process;

use std::path::{Path, PathBuf};

use process::Sidecar;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// A certificate of its own for `localhost`, and its key, as PEM.
fn pair() -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    (made.cert.pem(), made.signing_key.serialize_pem())
}

/// A sidecar that listens with TLS, and the files of its pair.
struct Secure {
    sidecar: Sidecar,
    certificate: PathBuf,
    key: PathBuf,
    _dir: tempfile::TempDir,
}

impl Secure {
    fn start((certificate, key): &(String, String)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["tls.crt", "tls.key"].map(|name| dir.path().join(name));
        let [certificate_path, key_path] = &paths;
        std::fs::write(certificate_path, certificate).unwrap();
        std::fs::write(key_path, key).unwrap();
        let sidecar = Sidecar::start(
            dir.path(),
            &[
                ("AEP_TLS_CERT", certificate_path.to_str().unwrap()),
                ("AEP_TLS_KEY", key_path.to_str().unwrap()),
            ],
        );
        let [certificate, key] = paths;
        Self { sidecar, certificate, key, _dir: dir }
    }

    fn port(&self) -> &str {
        self.sidecar.address.rsplit_once(':').unwrap().1
    }

    /// A new connection by a client that trusts nothing but one certificate.
    async fn get(&self, trusted: &str) -> reqwest::Result<reqwest::Response> {
        let root = reqwest::Certificate::from_pem(trusted.as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([root]).no_proxy().build().unwrap();
        client.get(format!("https://localhost:{}/healthz", self.port())).send().await
    }
}

fn replace(path: &Path, text: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, text).unwrap();
    std::fs::rename(&next, path).unwrap();
}

#[tokio::test]
async fn tls_is_spoken_with_the_configured_certificate() {
    let pair = pair();
    let secure = Secure::start(&pair);
    let response = secure.get(&pair.0).await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, reqwest::Version::HTTP_11));
    assert_eq!(response.text().await.unwrap().split(',').next(), Some(r#"{"ok":true"#));
    let (stranger, _) = self::pair();
    assert!(secure.get(&stranger).await.unwrap_err().is_connect());
    secure.sidecar.stop();
}

#[tokio::test]
async fn plain_http_to_a_tls_port_is_disconnected_without_an_answer() {
    let secure = Secure::start(&pair());
    let mut stream = TcpStream::connect(("127.0.0.1", secure.port().parse().unwrap())).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    // A reset is as good an end as any; TLS's own alert may come before it.
    let _ended = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_peer_that_does_not_shake_hands_holds_nobody_up_and_not_the_stop() {
    let pair = pair();
    let secure = Secure::start(&pair);
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(("127.0.0.1", secure.port().parse().unwrap())).await.unwrap());
    }
    assert_eq!(secure.get(&pair.0).await.unwrap().status(), 200);
    secure.sidecar.stop();
}

#[tokio::test]
async fn a_renewed_certificate_is_served_to_new_connections_and_a_broken_one_is_not() {
    let (old, new) = (pair(), pair());
    let secure = Secure::start(&old);
    replace(&secure.certificate, &new.0);
    let line = secure.sidecar.process.logged("can't be reloaded");
    assert!(line.contains("the key is not the certificate's"), "{line}");
    assert_eq!(secure.get(&old.0).await.unwrap().status(), 200);
    replace(&secure.key, &new.1);
    secure.sidecar.process.logged("\"reloaded\"");
    assert_eq!(secure.get(&new.0).await.unwrap().status(), 200);
    assert!(secure.get(&old.0).await.unwrap_err().is_connect());
    // A key that was cut off in the middle is neither served nor repeated in the log.
    let cut = new.1.get(..new.1.len() / 2).unwrap();
    replace(&secure.key, cut);
    let line = secure.sidecar.process.logged("can't be reloaded");
    let secret = cut.lines().nth(1).unwrap();
    assert!(line.contains("the key must be PEM") && !line.contains(secret), "{line}");
    assert_eq!(secure.get(&new.0).await.unwrap().status(), 200);
    replace(&secure.key, &new.1);
    secure.sidecar.process.logged("can be used again");
    secure.sidecar.stop();
}

#[test]
fn a_pair_that_can_not_be_used_stops_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let ((certificate, _), (_, key)) = (pair(), pair());
    std::fs::write(dir.path().join("c"), certificate).unwrap();
    std::fs::write(dir.path().join("k"), key).unwrap();
    for (name, code, problem) in [
        ("k", 1, "AEP_TLS_CERT and AEP_TLS_KEY: the key is not the certificate's"),
        ("missing", 1, "AEP_TLS_CERT and AEP_TLS_KEY: missing: "),
        ("", 64, "AEP_TLS_CERT is set and AEP_TLS_KEY is not"),
    ] {
        let variables = [("AEP_TLS_CERT", "c"), ("AEP_TLS_KEY", name), ("AEP_PORT", "0")];
        let output = process::command(dir.path(), &variables).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && log.contains(problem), "{log}");
    }
}

#[tokio::test]
async fn ipv6_is_listened_on() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("SKIPPED: ipv6_is_listened_on: this machine has no [::1]");
        return;
    }
    for host in ["::1", "[::1]"] {
        let dir = tempfile::tempdir().unwrap();
        let sidecar = Sidecar::start(dir.path(), &[("AEP_HOST", host)]);
        assert!(sidecar.address.starts_with("[::1]:"), "{}", sidecar.address);
        sidecar.post(&[r#"{"aep":"0.1","id":"1","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s","seq":1}"#.to_owned()]).await;
        let delivered = sidecar.stop();
        assert_eq!(delivered.len(), 1, "{delivered:?}");
    }
}
