//! One connection to a NATS server, which ends rather than being remade behind the sink's back.
//!
//! The client library would connect again by itself and send what it still held, when other attempts with the same
//! events have been made and answered. It is kept from that: it may log in once, and what was under way when the
//! connection ended fails.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::client::{PublishErrorKind, RequestErrorKind};
use async_nats::{
    Auth, AuthError, Client, ConnectError, ConnectErrorKind, ConnectOptions, Event, Request, RequestError,
    ServerAddr, ServerError,
};
use bytes::Bytes;
use tokio::sync::{broadcast, watch};

use super::super::http::{Phase, failure_in};
use super::super::link::{self, CONNECT_TIMEOUT};
use super::super::options::Tls;
use super::super::{DeliveryError, Reason, Secret};
use super::{Message, judge};

/// How often a silent server is asked whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// What the server says of a publication that isn't allowed, before the subject in quotes.
const PUBLISH_DENIED: &str = "Permissions Violation for Publish to \"";
/// How many refused subjects are kept for whoever waits for an answer.
const DENIED: usize = 256;

/// Where a server is, and how to be let in.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: ServerAddr,
    pub(super) login: Login,
    pub(super) tls: Tls,
}

/// Who the sink says it is. Secrets are read again at every connection.
#[derive(Debug)]
pub(super) enum Login {
    Nobody,
    Token(Secret),
    User(String, Option<Secret>),
    /// A file with a JWT and the seed of its key.
    Credentials(PathBuf),
}

impl Login {
    /// The answer to the server's nonce.
    fn auth(&self, nonce: &[u8]) -> Result<Auth, AuthError> {
        let mut auth = Auth::new();
        match self {
            Self::Nobody => {}
            Self::Token(token) => auth.token = Some(token.current().to_string()),
            Self::User(name, password) => {
                auth.username = Some(name.clone());
                auth.password = password.as_ref().map(|password| password.current().to_string());
            }
            Self::Credentials(path) => {
                let text = std::fs::read_to_string(path).map_err(AuthError::new)?;
                let (jwt, key) = read_credentials(&text)
                    .ok_or_else(|| AuthError::new("the credentials hold no JWT and seed"))?;
                auth.signature = Some(key.sign(nonce).map_err(AuthError::new)?);
                auth.jwt = Some(jwt.to_owned());
            }
        }
        Ok(auth)
    }
}

/// The JWT and the key of a `.creds` file: each is the line after one that starts with `-----BEGIN`.
pub(super) fn read_credentials(text: &str) -> Option<(&str, nkeys::KeyPair)> {
    let mut lines = text.lines().map(str::trim);
    let mut block = |named: &str| {
        lines.find(|line| line.starts_with("-----BEGIN") && line.contains(named))?;
        lines.find(|line| !line.is_empty())
    };
    let (jwt, seed) = (block("JWT")?, block("SEED")?);
    Some((jwt, nkeys::KeyPair::from_seed(seed).ok()?))
}

/// A connection that was made, and what has become of it.
pub(super) struct Connection {
    client: Client,
    signs: Arc<Signs>,
    /// Set when an attempt had no answer in time: the next one goes over a new connection.
    silent: AtomicBool,
}

/// What the server and the connection say beside answers.
struct Signs {
    /// Whether it can still be used; changed by the library's events only.
    health: watch::Sender<Health>,
    /// Subjects that may not be published on, as the server says so.
    denied: broadcast::Sender<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Up,
    /// The connection has ended.
    Lost,
    /// Answers can't be subscribed to.
    Deaf,
}

impl Signs {
    fn now(&self, health: Health) {
        let _before = self.health.send_replace(health);
    }

    fn note(&self, event: Event) {
        match event {
            Event::Disconnected | Event::Closed => self.now(Health::Lost),
            Event::ServerError(ServerError::Other(text)) => {
                if let Some(subject) = text.strip_prefix(PUBLISH_DENIED) {
                    let subject = subject.split('"').next().unwrap_or_default();
                    // Nobody need be waiting.
                    drop(self.denied.send(subject.to_owned()));
                } else if text.starts_with("Permissions Violation") {
                    self.now(Health::Deaf);
                }
            }
            Event::Connected
            | Event::LameDuckMode
            | Event::Draining
            | Event::SlowConsumer(_)
            | Event::ServerError(ServerError::AuthorizationViolation | ServerError::SlowConsumer(_))
            | Event::ClientError(_) => {}
        }
    }
}

impl link::Connection for Connection {
    fn is_usable(&self) -> bool {
        *self.signs.health.borrow() == Health::Up && !self.silent.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Connects and logs in.
    pub(super) async fn open(access: &Arc<Access>) -> Result<Self, DeliveryError> {
        // An error only means that a provider is installed already.
        drop(rustls::crypto::ring::default_provider().install_default());
        let signs =
            Arc::new(Signs { health: watch::channel(Health::Up).0, denied: broadcast::channel(DENIED).0 });
        let (login, used) = (Arc::clone(access), AtomicBool::new(false));
        let heard = Arc::clone(&signs);
        let mut options = ConnectOptions::with_auth_callback(move |nonce| {
            let auth = if used.swap(true, Ordering::Relaxed) {
                Err(AuthError::new("a connection that has ended is not made again"))
            } else {
                login.login.auth(&nonce)
            };
            std::future::ready(auth)
        })
        .event_callback(move |event| {
            heard.note(event);
            std::future::ready(())
        })
        .name(concat!("aep-sidecar/", env!("CARGO_PKG_VERSION")))
        .require_tls(access.server.tls_required())
        .ignore_discovered_servers()
        .max_reconnects(1)
        .ping_interval(PING_INTERVAL)
        .connection_timeout(CONNECT_TIMEOUT);
        if let Some(ca) = &access.tls.ca {
            options = options.add_root_certificates(ca.clone());
        }
        if let Some((certificate, key)) = &access.tls.identity {
            options = options.add_client_certificate(certificate.clone(), key.clone());
        }
        match tokio::time::timeout(CONNECT_TIMEOUT, options.connect(access.server.clone())).await {
            Ok(Ok(client)) => Ok(Self { client, signs, silent: AtomicBool::new(false) }),
            Ok(Err(error)) => Err(connect_failure(&error)),
            Err(_) => Err(transient(Reason::ConnectTimeout)),
        }
    }

    /// No attempt is to go over it any more.
    pub(super) fn give_up(&self) {
        self.silent.store(true, Ordering::Relaxed);
    }

    /// Publishes one after another, each once the stream has acknowledged the one before.
    pub(super) async fn publish_in_order(&self, messages: Vec<Message>) -> Result<(), DeliveryError> {
        for Message { subject, headers, payload } in messages {
            let mut watched = self.watch();
            let request = Request::new().headers(headers).payload(payload).timeout(None);
            tokio::select! {
                biased;
                answer = self.client.send_request(subject.clone(), request) => match answer {
                    Ok(message) => judge::answer(&message.payload)?,
                    Err(error) => return Err(request_failure(&error)),
                },
                error = watched.failure(|denied| denied == subject) => return Err(error),
            }
        }
        Ok(())
    }

    /// Publishes all, in order, and waits until the server has read them. Nobody answers for their arrival.
    pub(super) async fn publish_and_flush(&self, messages: Vec<Message>) -> Result<(), DeliveryError> {
        let mut watched = self.watch();
        let mut subjects = Vec::with_capacity(messages.len());
        for Message { subject, headers, payload } in messages {
            subjects.push(subject.clone());
            self.client.publish_with_headers(subject, headers, payload).await.map_err(|error| match error
                .kind()
            {
                PublishErrorKind::MaxPayloadExceeded => too_large(),
                PublishErrorKind::InvalidSubject => judge::refused(Reason::Protocol, "invalid subject"),
                PublishErrorKind::Send => transient(Reason::ConnectionLost),
            })?;
        }
        // The server reads in order and answers at once when nobody listens on a subject. Refusals of what was
        // published reach this task by another way than that answer, hence the second round.
        for _ in 0..2 {
            let nobody = self.client.new_inbox();
            let request = Request::new().payload(Bytes::new()).timeout(None);
            tokio::select! {
                biased;
                error = watched.failure(|denied| subjects.iter().any(|subject| subject == denied)) => {
                    return Err(error);
                }
                answer = self.client.send_request(nobody, request) => match answer.map_err(|error| error.kind()) {
                    Ok(_) | Err(RequestErrorKind::NoResponders) => {}
                    Err(_) => return Err(transient(Reason::ConnectionLost)),
                },
            }
        }
        Ok(())
    }

    fn watch(&self) -> Watched {
        Watched { denied: self.signs.denied.subscribe(), health: self.signs.health.subscribe() }
    }
}

/// What may come instead of an answer.
struct Watched {
    denied: broadcast::Receiver<String>,
    health: watch::Receiver<Health>,
}

impl Watched {
    /// Waits until no answer can come any more: the connection has ended, or a subject that `concerns` the attempt
    /// is denied.
    async fn failure(&mut self, concerns: impl Fn(&str) -> bool) -> DeliveryError {
        loop {
            tokio::select! {
                biased;
                denied = self.denied.recv() => match denied {
                    Ok(denied) if concerns(&denied) => return unauthorized(),
                    // Of refusals that were missed, the attempt's time-out takes care.
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return transient(Reason::ConnectionLost),
                },
                health = self.health.wait_for(|health| *health != Health::Up) => {
                    return match health.as_deref() {
                        Ok(Health::Deaf) => unauthorized(),
                        Ok(Health::Up | Health::Lost) | Err(_) => transient(Reason::ConnectionLost),
                    };
                }
            }
        }
    }
}

fn transient(reason: Reason) -> DeliveryError {
    DeliveryError::Transient { reason, retry_after: None }
}

fn unauthorized() -> DeliveryError {
    DeliveryError::Misconfigured { reason: Reason::Unauthorized }
}

fn too_large() -> DeliveryError {
    judge::refused(Reason::TooLarge, "larger than the server's max_payload")
}

fn request_failure(error: &RequestError) -> DeliveryError {
    match error.kind() {
        RequestErrorKind::NoResponders => DeliveryError::Misconfigured { reason: Reason::NotFound },
        RequestErrorKind::MaxPayloadExceeded => too_large(),
        RequestErrorKind::InvalidSubject => judge::refused(Reason::Protocol, "invalid subject"),
        RequestErrorKind::TimedOut => transient(Reason::Timeout),
        RequestErrorKind::Other => transient(Reason::ConnectionLost),
    }
}

fn connect_failure(error: &ConnectError) -> DeliveryError {
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => unauthorized(),
        ConnectErrorKind::Dns => transient(Reason::Dns),
        ConnectErrorKind::TimedOut => transient(Reason::ConnectTimeout),
        ConnectErrorKind::ServerParse => DeliveryError::Misconfigured { reason: Reason::Protocol },
        // Not the handshake, which is I/O, but what it needs: files, and a name to check.
        ConnectErrorKind::Tls => DeliveryError::Misconfigured { reason: Reason::Certificate },
        ConnectErrorKind::Io | ConnectErrorKind::MaxReconnects => {
            let text = error.to_string().to_ascii_lowercase();
            // `User Authentication Expired`, `User Authentication Revoked`, `Account Authentication Expired`.
            if ["authentication expired", "authentication revoked"].iter().any(|what| text.contains(what)) {
                return unauthorized();
            }
            failure_in(Phase::Connect, error).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_a_jwt_and_a_seed() {
        let key = nkeys::KeyPair::new_user();
        let text = format!(
            "-----BEGIN NATS USER JWT-----\r\neyJ0.e30.x\r\n------END NATS USER JWT------\r\n\r\n*** IMPORTANT ***\r\n\
             -----BEGIN USER NKEY SEED-----\r\n{}\r\n------END USER NKEY SEED------\r\n",
            key.seed().unwrap()
        );
        let (jwt, read) = read_credentials(&text).unwrap();
        assert_eq!((jwt, read.public_key()), ("eyJ0.e30.x", key.public_key()));
        assert!(read_credentials("eyJ0.e30.x").is_none());
        assert!(read_credentials(&text.replace("SEED", "KEY")).is_none());
    }
}
