//! An HTTP endpoint in raw bytes, with or without TLS, that answers as it is told and remembers what it was asked.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "every test crate has its own copy and uses its own part of it"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of tests fails by panicking"
)]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// What was asked.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(header, _)| header == name);
        let first = found.next().map(|(_, value)| value.as_str());
        assert!(found.next().is_none(), "{name} is there twice");
        first
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// What is answered.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
}

impl Answer {
    pub fn status(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: String::new() }
    }

    pub fn json(status: u16, body: impl Into<String>) -> Self {
        Self { body: body.into(), ..Self::status(status) }.with("content-type", "application/json")
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

type Script = Arc<dyn Fn(usize, &Request) -> Answer + Send + Sync>;

/// The endpoint; it ends with this value.
pub struct Endpoint {
    pub address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    _server: JoinSet<()>,
}

impl Endpoint {
    /// Answers the request number `n`, counted from 0, by `script(n, request)`.
    pub async fn start(script: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), None, script)
    }

    /// The same behind TLS.
    pub async fn secure(
        config: rustls::ServerConfig,
        script: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), Some(config), script)
    }

    pub fn on(
        listener: TcpListener,
        tls: Option<rustls::ServerConfig>,
        script: impl Fn(usize, &Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (log, script): (_, Script) = (Arc::clone(&requests), Arc::new(script));
        let acceptor = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (log, script, acceptor) = (Arc::clone(&log), Arc::clone(&script), acceptor.clone());
                connections.spawn(async move {
                    match acceptor {
                        None => converse(stream, &log, &script).await,
                        // A failed handshake is the client's to tell.
                        Some(acceptor) => match acceptor.accept(stream).await {
                            Ok(stream) => converse(stream, &log, &script).await,
                            Err(_) => None,
                        },
                    };
                });
            }
        });
        Self { address, requests, _server: server }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

async fn converse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    log: &Mutex<Vec<Request>>,
    script: &Script,
) -> Option<()> {
    loop {
        let request = read(&mut stream).await?;
        let Answer { status, headers, body } = {
            let mut log = log.lock().unwrap();
            log.push(request.clone());
            script(log.len() - 1, &request)
        };
        let mut head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).await.ok()?;
        stream.write_all(body.as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
    }
}

async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Option<Request> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.lines();
    let mut first = lines.next().unwrap().split(' ');
    let (method, path) = (first.next().unwrap().to_owned(), first.next().unwrap().to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let mut body = vec![0; length.map_or(0, |(_, length)| length.parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some(Request { method, path, headers, body })
}

/// A certificate authority that lasts as long as a test.
pub struct Authority {
    issuer: rcgen::CertifiedIssuer<'static, rcgen::KeyPair>,
}

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().unwrap();
        Self { issuer: rcgen::CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A pair for `localhost`, or a client that calls itself so.
    pub fn pair(&self) -> Pair {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// A server that shows one of its pairs, and asks for one of the other authority's where there is one.
    pub fn server(&self, clients_of: Option<&Self>) -> rustls::ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = match clients_of {
            None => builder.with_no_client_auth(),
            Some(clients) => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(clients.issuer.der().clone()).unwrap();
                let verifier =
                    rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let pair = self.pair();
        let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
        builder.with_single_cert(vec![certificate], key).unwrap()
    }
}
