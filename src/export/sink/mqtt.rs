//! MQTT 5: one message an event, published with quality of service 1.
//!
//! The server drops no duplicates: after a lost acknowledgement a message may be there twice. What it does with a
//! message beyond taking it is its own affair: it goes to who is subscribed at that moment, and to sessions that the
//! server keeps.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | the server acknowledged (PUBACK), also with 0x10, that nobody is subscribed | delivered | the next event of the session goes out |
//! | a message larger than the server's Maximum Packet Size, known before sending; a topic over 64 KiB; 0x95 | rejected (`too-large`) | dead letter; a batch is split |
//! | payload format invalid (0x99) | rejected (`protocol`) | as above |
//! | in binary mode, an attribute with characters that MQTT can't carry | rejected (`mapping`) | as above |
//! | quota exceeded (0x97), server unavailable, busy or not saying why (0x80, 0x83, 0x88, 0x89, 0x96, 0x9F) | transient (`unavailable`) | the sink pauses, one probe at a time |
//! | login refused, not authorized, banned (0x86, 0x87, 0x8A, 0x8C) | misconfigured (`unauthorized`) | the sink pauses; no event is thrown away |
//! | topic name invalid (0x90) | misconfigured (`not-found`) | as above |
//! | use another server, server moved (0x9C, 0x9D) | misconfigured (`status-3xx`) | as above: redirects are never followed |
//! | the server has no MQTT 5 or no quality of service 1, or doesn't take the client identifier (0x84, 0x85, 0x9B); any other refusal | misconfigured (`protocol`) | as above |
//! | a certificate isn't trusted, or the client's isn't | misconfigured (`certificate`) | as above |
//! | refused, unreachable, DNS, connect time-out, TLS failure | transient | the sink pauses, one probe at a time |
//! | the connection ended before the acknowledgement, another client took the identifier over; no acknowledgement in time | transient (`connection-lost`, `timeout`) | the event is retried over a new connection |
//!
//! A server may end the connection with a verdict on a message instead of refusing that alone. Whose it was is known
//! when nothing else was under way; else what was under way is retried one by one, until the culprit is found.

mod connection;
mod judge;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use reqwest::Url;
use rumqttc::{Publish, PublishProperties, QoS};
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::connection::{Access, Connection};
use super::dial::Address;
use super::link::Link;
use super::rounds::rounds;
use super::template::{Template, write_safe};
use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions, own};
use crate::aep::Event;
use crate::aep::cloudevents::{CloudEvent, DATA, STRUCTURED, TYPE_PREFIX, Value};

/// The server's port where the URL names none.
const PORT: u16 = 1883;
/// The same with TLS.
const TLS_PORT: u16 = 8883;
/// The longest text that MQTT has, in bytes.
const LONGEST: usize = 65_535;

/// Publishes to an MQTT server. Over one connection, which is made when an event needs it.
pub struct MqttSink {
    link: Link<Connection>,
    access: Arc<Access>,
    topic: Template,
    mode: Mode,
    /// How long an attempt may take.
    attempt: Duration,
    /// Set when the server ended a connection with a verdict on one of the messages under way, until it is known which:
    /// as long, attempts take turns.
    suspicion: AtomicBool,
    /// Whose turn it is.
    turn: Mutex<()>,
}

impl fmt::Debug for MqttSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MqttSink").finish_non_exhaustive()
    }
}

impl MqttSink {
    /// A sink to `mqtt://host/topic` or `mqtts://host/topic`. Connects to nothing yet. Its own option is `client.id`,
    /// the client identifier, `aep-sidecar-` and eight random digits unless said otherwise.
    ///
    /// # Errors
    /// When the topic, the mode, an option or a file can't be used.
    pub fn new(url: &Url, options: &SinkOptions) -> Result<Self, BuildError> {
        own::refuse_unknown(options, &["client.id"])?;
        own::check_files(options)?;
        if options.mode == Mode::Batch {
            return Err(BuildError::setting("MODE", "must be structured or binary for MQTT"));
        }
        let topic = Template::parse("the URL's topic", &own::path(url)?)?;
        let is_bad = |c: char| matches!(c, '+' | '#' | '}') || cannot_be_carried(c);
        if topic.shape().is_empty() || topic.shape().len() > LONGEST || topic.shape().contains(is_bad) {
            return Err(BuildError::setting(
                "the URL's topic",
                "must be a topic's name, without wildcards and control characters",
            ));
        }
        let client_id = match options.own.get("client.id") {
            None => format!("aep-sidecar-{:08x}", fastrand::u32(..)),
            Some(id) if id.is_empty() || id.len() > LONGEST || id.contains(cannot_be_carried) => {
                return Err(BuildError::setting(
                    "OPT_CLIENT_ID",
                    "must be a client identifier that the server takes and no other client has",
                ));
            }
            Some(id) => id.clone(),
        };
        let (user, password) = own::user(url, &options.credentials);
        let tls = url.scheme() == "mqtts";
        Ok(Self {
            link: Link::new(),
            access: Arc::new(Access {
                address: Address::of(
                    url,
                    if tls { TLS_PORT } else { PORT },
                    tls.then(|| options.tls.clone()),
                ),
                client_id,
                user,
                password,
            }),
            topic,
            mode: options.mode,
            attempt: options.times.attempt,
            suspicion: AtomicBool::new(false),
            turn: Mutex::new(()),
        })
    }

    fn message(&self, event: &Event) -> Result<Publish, DeliveryError> {
        let mapped = CloudEvent::of(event)?;
        let topic = self.topic.render(event, write_level);
        if topic.len() > LONGEST {
            return Err(judge::too_large("its topic is longer than 64 KiB"));
        }
        let mut properties = PublishProperties::default();
        let payload = match self.mode {
            Mode::Structured | Mode::Batch => {
                properties.content_type = Some(STRUCTURED.to_owned());
                mapped.structured()
            }
            Mode::Binary => {
                properties.content_type = event.data().map(|_| DATA.to_owned());
                properties.user_properties = user_properties(&mapped)?;
                event.data().map(|data| data.as_bytes().to_vec()).unwrap_or_default()
            }
        };
        let mut message = Publish::new(topic, QoS::AtLeastOnce, Bytes::from(payload), Some(properties));
        // Any but none, which would have it measured without one.
        message.pkid = 1;
        Ok(message)
    }

    async fn attempt(&self, delivery: &Delivery, messages: Vec<Publish>) -> Result<(), DeliveryError> {
        let late = || judge::transient(Reason::Timeout);
        let deadline = Instant::now().checked_add(self.attempt).unwrap_or_else(Instant::now);
        let connect = self.link.connection(|| Connection::open(&self.access));
        let connection = tokio::time::timeout_at(deadline, connect).await.map_err(|_| late())??;
        let publish = connection.publish(rounds(delivery, messages));
        tokio::time::timeout_at(deadline, publish)
            .await
            .unwrap_or_else(|_| {
                connection.give_up();
                Err(judge::Failure::from(late()))
            })
            .map_err(|failure| {
                if failure.suspicious {
                    self.suspicion.store(true, Ordering::Relaxed);
                }
                failure.error
            })
    }
}

impl Sink for MqttSink {
    /// Publishes the events, and waits for the acknowledgement of each.
    ///
    /// # Cancel safety
    /// A future that is dropped leaves events that may have been taken; published again they are there twice.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut messages = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            messages.push(self.message(event)?);
        }
        if !self.suspicion.load(Ordering::Relaxed) {
            return self.attempt(delivery, messages).await;
        }
        let _turn = self.turn.lock().await;
        let outcome = self.attempt(delivery, messages).await;
        if matches!(outcome, Err(DeliveryError::Rejected { .. })) {
            self.suspicion.store(false, Ordering::Relaxed);
        }
        outcome
    }
}

/// Whether servers may end the connection over a text with it.
///
/// Spec: MQTT 5.0 §1.5.4.
fn cannot_be_carried(c: char) -> bool {
    let code = u32::from(c);
    c.is_control() || (0xFDD0..=0xFDEF).contains(&code) || code & 0xFFFE == 0xFFFE
}

/// Writes a value as part of one level of a topic. What would end the level, match several or can't be carried becomes
/// `_`; so does nothing at all, and a `$` at the start, where topics of the server's own have it.
fn write_level(value: &str, topic: &mut String) {
    let start = topic.len();
    write_safe(value, topic, |c| matches!(c, '/' | '+' | '#') || cannot_be_carried(c));
    if start == 0 && topic.starts_with('$') {
        topic.replace_range(..1, "_");
    }
}

/// The attributes as user properties.
///
/// Spec: CloudEvents MQTT binding §3.1.3.
fn user_properties(mapped: &CloudEvent<'_>) -> Result<Vec<(String, String)>, DeliveryError> {
    let mut properties = Vec::with_capacity(20);
    let mut wrong = None;
    mapped.attributes(|name, value| {
        let text = match value {
            // It is the message's own content type.
            Value::Word(_) if name == "datacontenttype" => return,
            Value::Word(text) | Value::String { text, .. } => text.to_owned(),
            Value::Type(text) => format!("{TYPE_PREFIX}{text}"),
            Value::Integer(value) => value.to_string(),
            Value::Digits(value) => value.to_string(),
            Value::Boolean(value) => value.to_string(),
        };
        if text.contains(cannot_be_carried) {
            let detail = format!("the attribute {name} has characters that MQTT can't carry");
            wrong = Some(judge::refused(Reason::Mapping, &detail));
        } else if text.len() > LONGEST {
            wrong = Some(judge::too_large(&format!("the attribute {name} is longer than 64 KiB")));
        }
        properties.push((name.to_owned(), text));
    });
    wrong.map_or(Ok(properties), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sink(url: &str, own: &[(&str, &str)], mode: Mode) -> Result<MqttSink, BuildError> {
        let own = own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        MqttSink::new(&Url::parse(url).unwrap(), &SinkOptions { own, mode, ..SinkOptions::default() })
    }

    fn event(members: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","session":"s","seq":1{members}}}"#
        ))
        .unwrap()
    }

    fn topic(path: &str, members: &str) -> String {
        let sink = sink(&format!("mqtt://h/{path}"), &[], Mode::Structured).unwrap();
        String::from_utf8(sink.message(&event(members)).unwrap().topic.to_vec()).unwrap()
    }

    #[test]
    fn values_are_levels() {
        assert_eq!(topic("aep/{agent}/{type}", r#","agent":"a.b""#), "aep/a.b/run.started");
        assert_eq!(topic("aep/{agent}", r##","agent":"a/+#\u0000\u0085\uffff\n b""##), "aep/a_______ b");
        assert_eq!(topic("{agent}/{run}", r#","agent":"$SYS""#), "_SYS/_");
        assert_eq!(topic("x{agent}", r#","agent":"$SYS""#), "x$SYS");
        assert_eq!(topic("$aws/rules/r", r#","agent":"a""#), "$aws/rules/r", "who writes it means it");
        let long = event(&format!(r#","agent":"{}""#, "a".repeat(LONGEST)));
        let sink = sink("mqtt://h/x/{agent}", &[], Mode::Structured).unwrap();
        assert_eq!(sink.message(&long).unwrap_err().reason(), Reason::TooLarge);
    }

    #[test]
    fn what_cannot_be_used_is_told_without_secrets() {
        let url = "mqtt://me:hunter2@h/t";
        let refused = |url, own: &[(&str, &str)], mode| sink(url, own, mode).unwrap_err().to_string();
        assert_eq!(
            refused(url, &[("clientid", "hunter2")], Mode::Structured),
            "OPT_CLIENTID is no option here, only OPT_CLIENT_ID are"
        );
        assert_eq!(refused(url, &[], Mode::Batch), "MODE must be structured or binary for MQTT");
        assert!(refused(url, &[("client.id", "")], Mode::Structured).starts_with("OPT_CLIENT_ID must be"));
        for wrong in ["a/+", "a/%23", "a/%00", "a/}"] {
            let url = format!("mqtt://h/{wrong}");
            let error = sink(&url, &[], Mode::Structured).unwrap_err().to_string();
            assert!(error.starts_with("the URL's topic must be"), "{error}");
        }
        let built = sink(url, &[], Mode::Structured).unwrap();
        assert!(!format!("{built:?} {:?}", built.access).contains("hunter2"));
        assert_eq!(built.access.client_id.len(), 20, "what every server takes has 23 at most");
    }

    #[test]
    fn binary_mode_has_attributes_as_user_properties() {
        let sink = sink("mqtt://h/t", &[], Mode::Binary).unwrap();
        let message = sink.message(&event(r#","agent":"a é","data":{"z":1.0},"b":true"#)).unwrap();
        let properties = message.properties.unwrap();
        assert_eq!(
            (&message.payload[..], properties.content_type.as_deref()),
            (&br#"{"z":1.0}"#[..], Some(DATA))
        );
        let has = |name: &str, value: &str| {
            properties.user_properties.contains(&(name.to_owned(), value.to_owned()))
        };
        assert!(has("specversion", "1.0") && has("type", "dev.aep.run.started") && has("aepagentid", "a é"));
        assert!(has("aepsequence", "1") && has("b", "true"));
        assert!(properties.user_properties.iter().all(|(name, _)| name != "datacontenttype"));
        let bare = sink.message(&event(r#","agent":"a""#)).unwrap();
        assert!(bare.payload.is_empty() && bare.properties.unwrap().content_type.is_none());
        let error = sink.message(&event(r#","agent":"a\n""#)).unwrap_err();
        assert_eq!(
            error,
            judge::refused(Reason::Mapping, "the attribute aepagentid has characters that MQTT can't carry")
        );
    }
}
