//! What librdkafka's mock cluster lacks: TLS and SASL, in front of one of its brokers.
//!
//! A gate passes Kafka's frames on. It says of itself what the broker says of itself, so that it isn't gone around,
//! and answers what concerns SASL in the broker's stead.

#![allow(unreachable_pub, reason = "it is a module of one test")]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac, pbkdf2};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

const API_VERSIONS: u16 = 18;
const SASL_HANDSHAKE: u16 = 17;
const SASL_AUTHENTICATE: u16 = 36;
/// The error code of a mechanism that isn't enabled.
const UNSUPPORTED_MECHANISM: u16 = 33;
/// The error code of a wrong password.
const SASL_AUTHENTICATION_FAILED: u16 = 58;

/// Who may enter.
#[derive(Clone, Default)]
pub struct Door {
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// A user and a password, for SCRAM-SHA-512 or PLAIN.
    pub user: Option<(String, Arc<Mutex<String>>)>,
}

pub struct Gate {
    pub address: SocketAddr,
    /// Sessions that were let in by their password.
    pub entered: Arc<AtomicUsize>,
    _server: JoinSet<()>,
}

impl Gate {
    pub async fn new(broker: &str, door: Door) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let broker: SocketAddr = broker.parse().unwrap();
        let entered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&entered);
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (door, count) = (door.clone(), Arc::clone(&count));
                open.spawn(async move {
                    match door.tls.clone() {
                        None => pass(stream, address, broker, door, count).await,
                        Some(tls) => match TlsAcceptor::from(tls).accept(stream).into_fallible().await {
                            Ok(stream) => pass(stream, address, broker, door, count).await,
                            Err((_, mut stream)) => {
                                // Closed with something unread it is reset, and the alert may be lost.
                                stream.shutdown().await.ok()?;
                                stream.read_to_end(&mut Vec::new()).await.ok()?;
                                None
                            }
                        },
                    }
                });
            }
        });
        Self { address, entered, _server: server }
    }
}

async fn frame(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let length = from.read_u32().await.ok()?;
    let mut frame = vec![0; length as usize];
    from.read_exact(&mut frame).await.ok()?;
    Some(frame)
}

async fn write(to: &tokio::sync::Mutex<impl AsyncWrite + Unpin>, frame: &[u8]) -> Option<()> {
    let mut whole = u32::try_from(frame.len()).unwrap().to_be_bytes().to_vec();
    whole.extend_from_slice(frame);
    let mut to = to.lock().await;
    to.write_all(&whole).await.ok()?;
    to.flush().await.ok()
}

fn u16_at(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

async fn pass(
    stream: impl AsyncRead + AsyncWrite,
    gate: SocketAddr,
    broker: SocketAddr,
    door: Door,
    entered: Arc<AtomicUsize>,
) -> Option<()> {
    let (mut from_client, to_client) = tokio::io::split(stream);
    let (mut from_broker, to_broker) = TcpStream::connect(broker).await.ok()?.into_split();
    let (to_client, to_broker) = (tokio::sync::Mutex::new(to_client), tokio::sync::Mutex::new(to_broker));
    // The correlation ids of requests for the versions that the broker has.
    let versions = Mutex::new(HashSet::new());
    let requests = async {
        let mut login = Login::default();
        let mut inside = door.user.is_none();
        while let Some(request) = frame(&mut from_client).await {
            let (api, version) = (u16_at(&request, 0), u16_at(&request, 2));
            let id = request[4..8].to_vec();
            // The body stands behind the client's id.
            let body = &request[10 + usize::from(u16_at(&request, 8))..];
            match (api, &door.user) {
                (API_VERSIONS, _) => {
                    versions.lock().unwrap().insert(id);
                    write(&to_broker, &request).await?;
                }
                (SASL_HANDSHAKE, Some(_)) => {
                    login.mechanism = String::from_utf8(body[2..].to_vec()).unwrap();
                    let known = ["PLAIN", "SCRAM-SHA-512"];
                    let error = if known.contains(&&*login.mechanism) { 0 } else { UNSUPPORTED_MECHANISM };
                    let mut answer = [id, error.to_be_bytes().to_vec(), vec![0, 0, 0, 2]].concat();
                    for mechanism in known {
                        answer.extend([0, u8::try_from(mechanism.len()).unwrap()]);
                        answer.extend(mechanism.as_bytes());
                    }
                    write(&to_client, &answer).await?;
                }
                (SASL_AUTHENTICATE, Some((user, password))) => {
                    let said = login.step(&body[4..], user, &password.lock().unwrap().clone());
                    let (error, said) = match said {
                        Ok((said, done)) => {
                            if done {
                                inside = true;
                                entered.fetch_add(1, Ordering::SeqCst);
                            }
                            (0, said)
                        }
                        Err(()) => (SASL_AUTHENTICATION_FAILED, String::new()),
                    };
                    let mut answer = id;
                    answer.extend(error.to_be_bytes());
                    answer.extend([0xff, 0xff]);
                    answer.extend(u32::try_from(said.len()).unwrap().to_be_bytes());
                    answer.extend(said.as_bytes());
                    if version >= 1 {
                        answer.extend(0_u64.to_be_bytes());
                    }
                    write(&to_client, &answer).await?;
                    if error != 0 {
                        return None;
                    }
                }
                _ if !inside => return None,
                _ => write(&to_broker, &request).await?,
            }
        }
        None
    };
    let answers = async {
        let own = |port: u16| [b"127.0.0.1".as_slice(), &u32::from(port).to_be_bytes()].concat();
        let (broker, gate) = (own(broker.port()), own(gate.port()));
        while let Some(mut answer) = frame(&mut from_broker).await {
            for at in 0..answer.len().saturating_sub(broker.len() - 1) {
                if answer[at..].starts_with(&broker) {
                    answer[at..at + broker.len()].copy_from_slice(&gate);
                }
            }
            let is_versions = versions.lock().unwrap().remove(&answer[..4]);
            // The versions stand in an array, unless the request was of a version that the broker doesn't know.
            if is_versions && door.user.is_some() && u16_at(&answer, 4) == 0 {
                let count = u32::from_be_bytes(answer[6..10].try_into().unwrap()) + 2;
                answer[6..10].copy_from_slice(&count.to_be_bytes());
                let more = [SASL_HANDSHAKE, 0, 1, SASL_AUTHENTICATE, 0, 1].map(u16::to_be_bytes).concat();
                answer.splice(10..10, more);
            }
            write(&to_client, &answer).await?;
        }
        None::<()>
    };
    tokio::select! {
        ended = requests => ended,
        ended = answers => ended,
    }
}

/// One client's proof that it knows the password.
#[derive(Default)]
struct Login {
    mechanism: String,
    /// SCRAM's first messages, once they have been exchanged.
    first: Option<(String, String)>,
}

impl Login {
    /// What is answered, and whether the client is in.
    ///
    /// Spec: RFC 4616, RFC 5802 §3.
    fn step(&mut self, said: &[u8], user: &str, password: &str) -> Result<(String, bool), ()> {
        const SALT: &[u8] = b"salt of the gate";
        let rounds = NonZeroU32::new(4096).unwrap();
        let said = std::str::from_utf8(said).unwrap();
        if self.mechanism == "PLAIN" {
            let right = said == format!("\0{user}\0{password}");
            return if right { Ok((String::new(), true)) } else { Err(()) };
        }
        assert_eq!(self.mechanism, "SCRAM-SHA-512");
        let Some((client, server)) = self.first.take() else {
            let client = said.strip_prefix("n,,").unwrap();
            let nonce = client.split_once(",r=").unwrap().1;
            let server = format!("r={nonce}gate,s={},i={rounds}", BASE64.encode(SALT));
            self.first = Some((client.to_owned(), server.clone()));
            return Ok((server, false));
        };
        let (without_proof, proof) = said.rsplit_once(",p=").unwrap();
        let text = format!("{client},{server},{without_proof}");
        let mut salted = [0; digest::SHA512_OUTPUT_LEN];
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA512, rounds, SALT, password.as_bytes(), &mut salted);
        let sign = |key: &[u8], text: &str| {
            hmac::sign(&hmac::Key::new(hmac::HMAC_SHA512, key), text.as_bytes()).as_ref().to_vec()
        };
        let client_key = sign(&salted, "Client Key");
        let signature = sign(digest::digest(&digest::SHA512, &client_key).as_ref(), &text);
        let expected: Vec<u8> = client_key.iter().zip(&signature).map(|(key, sign)| key ^ sign).collect();
        if !client.starts_with(&format!("n={user},")) || BASE64.decode(proof).unwrap() != expected {
            return Err(());
        }
        Ok((format!("v={}", BASE64.encode(sign(&sign(&salted, "Server Key"), &text))), true))
    }
}
