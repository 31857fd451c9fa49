//! NATS: one message an event, stored by a JetStream stream.
//!
//! What an event's message is stored as, and once only: `Nats-Msg-Id` is the event's `source` and `id`, and the
//! stream drops a message whose identifier it has seen within its `duplicate_window`.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | a stream acknowledged, as new or as a duplicate | delivered | the next event of the session goes out |
//! | no stream takes the subject, JetStream isn't enabled | misconfigured (`not-found`) | the sink pauses and is probed; the log says to create a stream |
//! | larger than the server's `max_payload`, known before sending; than the stream's `max_msg_size`; a subject over 3 KiB | rejected (`too-large`) | dead letter; a batch is split |
//! | stream full with `discard: new`, no leader, no resources, any other answer with 408, 429 or 5xx | transient (`unavailable`) | the sink pauses, one probe at a time |
//! | login refused, expired or revoked; no permission to publish, or to receive the acknowledgement | misconfigured (`unauthorized`) | the sink pauses; no event is thrown away |
//! | any other answer with 4xx; an answer that is no acknowledgement | misconfigured (`status-4xx`, `protocol`) | as above |
//! | a certificate isn't trusted, or the client's isn't | misconfigured (`certificate`) | as above |
//! | refused, unreachable, DNS, connect time-out, TLS failure | transient | the sink pauses, one probe at a time |
//! | the connection ended before the acknowledgement, no answer in time | transient (`connection-lost`, `timeout`) | the event is retried over a new connection |

mod connection;
mod judge;
mod subject;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::{HeaderMap, ServerAddr};
use bytes::Bytes;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use reqwest::Url;
use tokio::time::Instant;

use self::connection::{Access, Connection, Login, read_credentials};
use self::subject::Template;
use super::link::Link;
use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Secret, Sink, SinkOptions, own};
use crate::aep::Event;
use crate::aep::cloudevents::{CloudEvent, HeaderValues, STRUCTURED};
use crate::aep::position::SessionKey;

/// The server's port where the URL names none.
const PORT: u16 = 4222;
/// By which a stream tells duplicates.
const MESSAGE_ID: &str = "Nats-Msg-Id";

/// Publishes to NATS. Over one connection, which is made when an event needs it.
pub struct NatsSink {
    link: Link<Connection>,
    access: Arc<Access>,
    subject: Template,
    mode: Mode,
    acknowledgement: Acknowledgement,
    /// How long an attempt may take.
    attempt: Duration,
    /// Whether the log said that no stream takes the events, since one last did.
    told: AtomicBool,
}

/// What a delivery is acknowledged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Acknowledgement {
    /// A stream, which has stored the message.
    Stream,
    /// The server, which has read it.
    Server,
}

/// An event, ready to be published.
struct Message {
    subject: String,
    headers: HeaderMap,
    payload: Bytes,
}

impl fmt::Debug for NatsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsSink").finish_non_exhaustive()
    }
}

impl NatsSink {
    /// A sink to `nats://host/subject` or `tls://host/subject`. Connects to nothing yet. Its own options are
    /// `jetstream` (`true` unless said otherwise) and `credentials`, the path of a `.creds` file.
    ///
    /// # Errors
    /// When the subject, the mode, an option or a file can't be used.
    pub fn new(url: &Url, options: &SinkOptions) -> Result<Self, BuildError> {
        own::refuse_unknown(options, &["jetstream", "credentials"])?;
        own::check_files(options)?;
        if options.mode == Mode::Batch {
            return Err(BuildError::setting("MODE", "must be structured or binary for NATS"));
        }
        let subject = Template::parse(&own::path(url)?)?;
        let host = url.host_str().unwrap_or_default();
        let server = format!("{}://{host}:{}", url.scheme(), url.port().unwrap_or(PORT));
        let server: ServerAddr =
            server.parse().map_err(|_| BuildError::setting("the URL's host", "must be a host's name"))?;
        let acknowledgement =
            if flag(options, "jetstream", true)? { Acknowledgement::Stream } else { Acknowledgement::Server };
        if acknowledgement == Acknowledgement::Server {
            tracing::warn!(
                "without JetStream an event that no subscriber hears when it is published is gone, and one that is sent twice arrives twice"
            );
        }
        Ok(Self {
            link: Link::new(),
            access: Arc::new(Access { server, login: login(url, options)?, tls: options.tls.clone() }),
            subject,
            mode: options.mode,
            acknowledgement,
            attempt: options.times.attempt,
            told: AtomicBool::new(false),
        })
    }

    fn message(&self, event: &Event) -> Result<Message, DeliveryError> {
        let mapped = CloudEvent::of(event)?;
        let subject = self
            .subject
            .subject(event)
            .ok_or_else(|| judge::refused(Reason::TooLarge, "its subject is longer than 3 KiB"))?;
        let mut headers = HeaderMap::new();
        headers.insert(MESSAGE_ID, message_id(event.source(), event.id()));
        let payload = match self.mode {
            Mode::Structured | Mode::Batch => {
                headers.insert("content-type", STRUCTURED);
                mapped.structured()
            }
            Mode::Binary => {
                let binary = mapped.binary(HeaderValues::Encoded);
                for (name, value) in binary.headers {
                    headers.insert(name, value);
                }
                binary.body
            }
        };
        Ok(Message { subject, headers, payload: payload.into() })
    }

    /// Those of a session one after another, since a later one must not be stored when an earlier one isn't;
    /// sessions side by side.
    async fn publish_to_streams(
        connection: &Connection,
        delivery: &Delivery,
        messages: Vec<Message>,
    ) -> Result<(), DeliveryError> {
        let mut sessions: Vec<(SessionKey<'_>, Vec<Message>)> = Vec::new();
        for (event, message) in delivery.events.iter().zip(messages) {
            let key = event.session_key();
            match sessions.iter_mut().find(|(session, _)| *session == key) {
                Some((_, of_it)) => of_it.push(message),
                None => sessions.push((key, vec![message])),
            }
        }
        let attempts = sessions.into_iter().map(|(_, messages)| connection.publish_in_order(messages));
        let outcomes = futures_util::future::join_all(attempts).await;
        // A verdict on one event comes last: while another fails for want of a server, it says nothing of the batch.
        let failure = outcomes.into_iter().filter_map(Result::err).min_by_key(|error| match error {
            DeliveryError::Misconfigured { .. } | DeliveryError::Closed { .. } => 0,
            DeliveryError::Transient { .. } => 1,
            DeliveryError::Rejected { .. } => 2,
        });
        failure.map_or(Ok(()), Err)
    }

    /// Says once what a person is to do.
    fn tell(&self, outcome: &Result<(), DeliveryError>) {
        match outcome {
            Ok(()) => self.told.store(false, Ordering::Relaxed),
            Err(DeliveryError::Misconfigured { reason: Reason::NotFound })
                if !self.told.swap(true, Ordering::Relaxed) =>
            {
                tracing::error!(
                    subject = %self.subject,
                    "no stream stores what is published on the sink's subject: create one, or set CE_OPT_JETSTREAM=false"
                );
            }
            Err(_) => {}
        }
    }
}

impl Sink for NatsSink {
    /// Publishes each event, and waits for the acknowledgement of each.
    ///
    /// # Cancel safety
    /// A future that is dropped leaves events that may have been stored; published again within the stream's
    /// `duplicate_window` they aren't stored twice.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut messages = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            messages.push(self.message(event)?);
        }
        let late = || DeliveryError::Transient { reason: Reason::Timeout, retry_after: None };
        let deadline = Instant::now().checked_add(self.attempt).unwrap_or_else(Instant::now);
        let connect = self.link.connection(|| Connection::open(&self.access));
        let connection = tokio::time::timeout_at(deadline, connect).await.map_err(|_| late())??;
        let publish = async {
            match self.acknowledgement {
                Acknowledgement::Stream => Self::publish_to_streams(&connection, delivery, messages).await,
                Acknowledgement::Server => connection.publish_and_flush(messages).await,
            }
        };
        let outcome = tokio::time::timeout_at(deadline, publish).await.unwrap_or_else(|_| {
            connection.give_up();
            Err(late())
        });
        self.tell(&outcome);
        outcome
    }
}

/// An option that is one of the two.
fn flag(options: &SinkOptions, name: &str, default: bool) -> Result<bool, BuildError> {
    match options.own.get(name).map(String::as_str) {
        None => Ok(default),
        Some("true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        Some(_) => {
            Err(BuildError::setting(format!("OPT_{}", name.to_ascii_uppercase()), "must be true or false"))
        }
    }
}

/// Who the sink says it is: a file of credentials, else what the URL says, else a token, else a user. A user name
/// without a password in the URL is a token, as NATS has it.
fn login(url: &Url, options: &SinkOptions) -> Result<Login, BuildError> {
    if let Some(path) = options.own.get("credentials") {
        let path = PathBuf::from(path);
        let text =
            std::fs::read_to_string(&path).map_err(|error| BuildError::File { path: path.clone(), error })?;
        return match read_credentials(&text) {
            Some(_) => Ok(Login::Credentials(path)),
            None => Err(BuildError::setting(
                "OPT_CREDENTIALS",
                "must be a file with a user's JWT and the seed of its key, as nsc writes it",
            )),
        };
    }
    let credentials = &options.credentials;
    let (user, password) = own::user(url, credentials);
    let in_url = !url.username().is_empty();
    Ok(match (&credentials.token, user, password) {
        (_, Some(token), None) if in_url => Login::Token(Secret::fixed(&token)),
        (Some(token), _, _) if !in_url => Login::Token(token.clone()),
        (_, Some(user), password) => Login::User(user, password),
        (_, None, _) => Login::Nobody,
    })
}

/// What a message identifier's two parts have percent-encoded: the bar between them, and what a header can't hold.
const IN_MESSAGE_ID: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'|');

/// `source`, a bar, `id`, encoded so that no two events share one.
fn message_id(source: &str, id: &str) -> String {
    format!("{}|{}", utf8_percent_encode(source, IN_MESSAGE_ID), utf8_percent_encode(id, IN_MESSAGE_ID))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sink(url: &str, change: impl FnOnce(&mut SinkOptions)) -> Result<NatsSink, BuildError> {
        let mut options = SinkOptions::default();
        change(&mut options);
        NatsSink::new(&Url::parse(url).unwrap(), &options)
    }

    fn refused(url: &str, change: impl FnOnce(&mut SinkOptions)) -> String {
        sink(url, change).unwrap_err().to_string()
    }

    fn with<'a>(name: &'a str, value: &'a str) -> impl FnOnce(&mut SinkOptions) + 'a {
        move |options| drop(options.own.insert(name.to_owned(), value.to_owned()))
    }

    #[test]
    fn message_ids_are_distinct_and_fit_a_header() {
        let pairs = [
            ("a|b", "c"),
            ("a", "b|c"),
            ("a%7Cb", "c"),
            ("a", "b%7Cc"),
            ("a ", "b"),
            ("a", " b"),
            ("é\r\n", "\0"),
        ];
        let ids: std::collections::HashSet<_> =
            pairs.iter().map(|(source, id)| message_id(source, id)).collect();
        assert_eq!(ids.len(), pairs.len());
        assert!(ids.iter().all(|id| id.bytes().all(|byte| byte.is_ascii_graphic())), "{ids:?}");
        assert_eq!(message_id("aep://h/a", "e1"), "aep://h/a|e1");
    }

    #[test]
    fn what_cannot_be_used_is_told_without_secrets() {
        let url = "nats://me:hunter2@h/aep.{agent}";
        assert!(sink(url, |_| {}).is_ok());
        assert_eq!(
            refused(url, with("jet.stream", "hunter2")),
            "OPT_JET_STREAM is no option here, only OPT_JETSTREAM, OPT_CREDENTIALS are"
        );
        assert_eq!(refused(url, with("jetstream", "hunter2")), "OPT_JETSTREAM must be true or false");
        assert_eq!(
            refused(url, |options| options.mode = Mode::Batch),
            "MODE must be structured or binary for NATS"
        );
        assert!(refused("nats://hunter2@h/a.{nope!}", |_| {}).starts_with("the URL's subject must name"));
        assert!(refused(url, with("credentials", "/no/such.creds")).starts_with("/no/such.creds: "));
        assert!(!format!("{:?}", sink(url, |_| {}).unwrap()).contains("hunter2"));
    }

    #[test]
    fn a_token_a_user_or_nobody_logs_in() {
        let login = |url, change: fn(&mut SinkOptions)| {
            let sink = sink(url, change).unwrap();
            format!("{:?}", sink.access.login)
        };
        assert_eq!(login("nats://h/s", |_| {}), "Nobody");
        assert_eq!(login("nats://t@h/s", |_| {}), "Token(Secret(…))");
        assert_eq!(login("nats://u%40:p@h/s", |_| {}), "User(\"u@\", Some(Secret(…)))");
        assert_eq!(
            login("nats://h/s", |options| options.credentials.username = Some("u".to_owned())),
            "User(\"u\", None)"
        );
        assert_eq!(
            login("nats://h/s", |options| options.credentials.token = Some(Secret::fixed("t"))),
            "Token(Secret(…))"
        );
        assert_eq!(
            login("nats://u:p@h/s", |options| options.credentials.token = Some(Secret::fixed("t"))),
            "User(\"u\", Some(Secret(…)))",
            "the URL is the sink's own"
        );
    }
}
