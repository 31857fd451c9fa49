//! AMQP 0-9-1, as RabbitMQ speaks it: one message an event, published to an exchange.
//!
//! A message is persistent, so that a durable queue keeps it over a restart; mandatory, so that one that no queue takes
//! comes back; and confirmed, so that it is known to be where its queues keep it. The server drops no duplicates:
//! after a lost confirm a message may be there twice, with the same `message-id`.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | the server confirmed, and a queue took it | delivered | the next event of the session goes out |
//! | no queue takes the routing key; no such exchange or virtual host | misconfigured (`not-found`) | the sink pauses and is probed; the log says to bind a queue |
//! | larger than the server's `max_message_size`; a routing key over 255 bytes; in binary mode, attributes larger than a frame | rejected (`too-large`) | dead letter; a batch is split |
//! | not confirmed but refused: a queue full with `reject-publish`, no leader; the server out of memory or disk, or at its limit of connections or channels; an internal error | transient (`unavailable`) | the sink pauses, one probe at a time |
//! | login refused; no permission | misconfigured (`unauthorized`) | the sink pauses; no event is thrown away |
//! | any other code the server closes with | misconfigured (`protocol`) | as above |
//! | a certificate isn't trusted, or the client's isn't | misconfigured (`certificate`) | as above |
//! | refused, unreachable, DNS, connect time-out, TLS failure | transient | the sink pauses, one probe at a time |
//! | the connection ended before the confirm, by the server's own shutdown too; no confirm in time | transient (`connection-lost`, `timeout`) | the event is retried over a new connection |

mod connection;
mod judge;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use reqwest::Url;
use tokio::time::Instant;

use self::connection::{Access, Connection};
use super::dial::Address;
use super::link::Link;
use super::rounds::rounds;
use super::template::{Template, write_safe};
use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Secret, Sink, SinkOptions, own};
use crate::aep::Event;
use crate::aep::cloudevents::{CloudEvent, STRUCTURED, TYPE_PREFIX, Value};

/// The server's port where the URL names none.
const PORT: u16 = 5672;
/// The same with TLS.
const TLS_PORT: u16 = 5671;
/// The longest name that AMQP has: exchanges, routing keys, message identifiers, in bytes.
const LONGEST: usize = 255;
/// Who logs in where nobody is named, as servers have it.
const GUEST: &str = "guest";
/// Kept over a restart.
const PERSISTENT: u8 = 2;

/// Publishes to an exchange. Over one connection, which is made when an event needs it.
pub struct AmqpSink {
    link: Link<Connection>,
    access: Arc<Access>,
    /// Empty: the default one, whose routing keys are names of queues.
    exchange: ShortString,
    key: Template,
    mode: Mode,
    /// How long an attempt may take.
    attempt: Duration,
    /// Whether the log said that no queue takes the events, since one last did.
    told: AtomicBool,
}

/// An event, ready to be published.
struct Message {
    key: ShortString,
    properties: BasicProperties,
    /// How long the properties are at most, in bytes.
    head: usize,
    payload: Vec<u8>,
}

impl fmt::Debug for AmqpSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpSink").finish_non_exhaustive()
    }
}

impl AmqpSink {
    /// A sink to `amqp://host/exchange/routing.key` or `amqps://…`. The exchange `-` is the default one, whose routing
    /// keys are names of queues. Connects to nothing yet. Its own option is `vhost`, the virtual host, `/` unless said
    /// otherwise.
    ///
    /// # Errors
    /// When exchange, routing key, the mode, an option or a file can't be used.
    pub fn new(url: &Url, options: &SinkOptions) -> Result<Self, BuildError> {
        own::refuse_unknown(options, &["vhost"])?;
        own::check_files(options)?;
        if options.mode == Mode::Batch {
            return Err(BuildError::setting("MODE", "must be structured or binary for AMQP"));
        }
        let (exchange, key) = exchange_and_key(url)?;
        let vhost = options.own.get("vhost").map_or("/", String::as_str);
        if vhost.is_empty() || vhost.len() > LONGEST {
            return Err(BuildError::setting(
                "OPT_VHOST",
                "must be a virtual host's name, of at most 255 bytes",
            ));
        }
        let (user, password) = own::user(url, &options.credentials);
        let nobody = user.is_none();
        let tls = url.scheme() == "amqps";
        Ok(Self {
            link: Link::new(),
            access: Arc::new(Access {
                address: Address::of(
                    url,
                    if tls { TLS_PORT } else { PORT },
                    tls.then(|| options.tls.clone()),
                ),
                vhost: vhost.to_owned(),
                user: user.unwrap_or_else(|| GUEST.to_owned()),
                password: password.or_else(|| nobody.then(|| Secret::fixed(GUEST))),
            }),
            exchange,
            key,
            mode: options.mode,
            attempt: options.times.attempt,
            told: AtomicBool::new(false),
        })
    }

    fn message(&self, event: &Event) -> Result<Message, DeliveryError> {
        let mapped = CloudEvent::of(event)?;
        let key = ShortString::try_new(self.key.render(event, write_word))
            .map_err(|_| judge::too_large("its routing key is longer than 255 bytes"))?;
        let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
        // What every message has, and the frame around it.
        let mut head: usize = 128;
        if let Ok(id) = ShortString::try_new(message_id(event.source(), event.id())) {
            head = head.saturating_add(LONGEST);
            properties = properties.with_message_id(id);
        }
        let payload = match self.mode {
            Mode::Structured | Mode::Batch => {
                properties = properties.with_content_type(STRUCTURED.into());
                mapped.structured()
            }
            Mode::Binary => {
                let (headers, size) = headers(&mapped);
                head = head.saturating_add(size);
                properties = properties.with_headers(headers);
                match event.data() {
                    None => Vec::new(),
                    Some(data) => {
                        properties = properties.with_content_type("application/json".into());
                        data.as_bytes().to_vec()
                    }
                }
            }
        };
        Ok(Message { key, properties, head, payload })
    }

    /// Says once what a person is to do.
    fn tell(&self, outcome: &Result<(), DeliveryError>) {
        match outcome {
            Ok(()) => self.told.store(false, Ordering::Relaxed),
            Err(DeliveryError::Misconfigured { reason: Reason::NotFound })
                if !self.told.swap(true, Ordering::Relaxed) =>
            {
                tracing::error!(
                    exchange = %self.exchange,
                    routing_key = %self.key,
                    virtual_host = %self.access.vhost,
                    "no queue takes what is published there: create the exchange and bind a queue to it"
                );
            }
            Err(_) => {}
        }
    }
}

impl Sink for AmqpSink {
    /// Publishes the events, and waits until the server has confirmed each.
    ///
    /// # Cancel safety
    /// A future that is dropped leaves events that may have been taken; published again they are there twice.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut messages = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            messages.push(self.message(event)?);
        }
        let late = || DeliveryError::Transient { reason: Reason::Timeout, retry_after: None };
        let deadline = Instant::now().checked_add(self.attempt).unwrap_or_else(Instant::now);
        let connect = self.link.connection(|| Connection::open(&self.access));
        let connection = tokio::time::timeout_at(deadline, connect).await.map_err(|_| late())??;
        let publish = connection.publish(&self.exchange, rounds(delivery, messages));
        let outcome = tokio::time::timeout_at(deadline, publish)
            .await
            .unwrap_or_else(|_| Err(connection.give_up().unwrap_or_else(late)));
        self.tell(&outcome);
        outcome
    }
}

/// The two parts of the URL's path. What follows the exchange is the routing key, slashes and all.
fn exchange_and_key(url: &Url) -> Result<(ShortString, Template), BuildError> {
    let decoded = |part: &str| {
        let part = percent_decode_str(part).decode_utf8();
        part.map(std::borrow::Cow::into_owned).map_err(|_| {
            BuildError::setting("the URL's path", "must be UTF-8 once its percent-encoding is undone")
        })
    };
    let path = url.path().trim_start_matches('/');
    let (exchange, key) = path.split_once('/').unwrap_or((path, ""));
    let exchange = match decoded(exchange)? {
        default if default == "-" || default == "amq.default" => String::new(),
        exchange => exchange,
    };
    let key = Template::parse("the URL's routing key", &decoded(key)?)?;
    let is_bad = |c: char| c.is_control() || c == '}';
    if key.shape().len() > LONGEST || key.shape().contains(is_bad) {
        return Err(BuildError::setting(
            "the URL's routing key",
            "must be at most 255 bytes, without control characters",
        ));
    }
    if exchange.is_empty() && key.shape().is_empty() {
        return Err(BuildError::setting(
            "the URL's path",
            "must name a queue after the default exchange, as in /-/queue",
        ));
    }
    let exchange = ShortString::try_new(exchange)
        .map_err(|_| BuildError::setting("the URL's exchange", "must be at most 255 bytes"))?;
    Ok((exchange, key))
}

/// Writes a value as one word of a routing key. What would end the word or stands for several becomes `_`; so does
/// nothing at all.
fn write_word(value: &str, key: &mut String) {
    write_safe(value, key, |c| matches!(c, '.' | '*' | '#') || c.is_whitespace() || c.is_control());
}

/// What a message identifier's two parts have percent-encoded, so that no two events share one.
const IN_MESSAGE_ID: &AsciiSet = &CONTROLS.add(b'%').add(b'|');

/// `source`, a bar, `id`.
fn message_id(source: &str, id: &str) -> String {
    // What isn't ASCII is encoded too.
    format!("{}|{}", utf8_percent_encode(source, IN_MESSAGE_ID), utf8_percent_encode(id, IN_MESSAGE_ID))
}

/// The attributes as headers, each of the type that it has, and how long they are at most, in bytes.
///
/// Spec: CloudEvents AMQP binding §3.1.
fn headers(mapped: &CloudEvent<'_>) -> (FieldTable, usize) {
    /// Lengths, types, and a number.
    const AROUND: usize = 16;
    let mut headers = FieldTable::default();
    let mut size: usize = 0;
    mapped.attributes(|name, value| {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let value = match value {
            // It is the message's own content type.
            Value::Word(_) if name == "datacontenttype" => return,
            Value::Word(value) | Value::String { text: value, .. } => {
                size = size.saturating_add(value.len());
                text(value)
            }
            Value::Type(value) => {
                size = size.saturating_add(value.len()).saturating_add(TYPE_PREFIX.len());
                text(&format!("{TYPE_PREFIX}{value}"))
            }
            Value::Integer(value) => AMQPValue::LongLongInt(i64::from(value)),
            Value::Digits(value) => {
                size = size.saturating_add(20);
                text(&value.to_string())
            }
            Value::Boolean(value) => AMQPValue::Boolean(value),
        };
        let name = format!("cloudEvents:{name}");
        size = size.saturating_add(name.len()).saturating_add(AROUND);
        // Attributes' names have 20 characters at most.
        if let Ok(name) = ShortString::try_new(name) {
            headers.insert(name, value);
        }
    });
    (headers, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sink(url: &str, own: &[(&str, &str)], mode: Mode) -> Result<AmqpSink, BuildError> {
        let own = own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        AmqpSink::new(&Url::parse(url).unwrap(), &SinkOptions { own, mode, ..SinkOptions::default() })
    }

    fn event(members: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e|1","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","session":"s","seq":1{members}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn a_path_is_an_exchange_and_a_routing_key() {
        let agent = event(r#","agent":"a.b #*\u0000c""#);
        for (path, exchange, key) in [
            ("events/aep.{agent}.{type}", "events", "aep.a_b____c.run.started"),
            ("events", "events", ""),
            ("events/", "events", ""),
            ("e%2Fx/a/b", "e/x", "a/b"),
            ("-/queue", "", "queue"),
            ("amq.default/queue", "", "queue"),
            ("amq.topic/x.{run}", "amq.topic", "x._"),
        ] {
            let sink = sink(&format!("amqp://h/{path}"), &[], Mode::Structured).unwrap();
            let message = sink.message(&agent).unwrap();
            assert_eq!((sink.exchange.as_str(), message.key.as_str()), (exchange, key), "{path}");
        }
        let long = event(&format!(r#","agent":"{}""#, "a".repeat(256)));
        let sink = sink("amqp://h/e/{agent}", &[], Mode::Structured).unwrap();
        assert_eq!(sink.message(&long).err().unwrap().reason(), Reason::TooLarge);
    }

    #[test]
    fn what_cannot_be_used_is_told_without_secrets() {
        let url = "amqp://me:hunter2@h/e/k";
        let refused = |url, own: &[(&str, &str)], mode| sink(url, own, mode).unwrap_err().to_string();
        assert_eq!(
            refused(url, &[("v.host", "hunter2")], Mode::Structured),
            "OPT_V_HOST is no option here, only OPT_VHOST are"
        );
        assert_eq!(refused(url, &[], Mode::Batch), "MODE must be structured or binary for AMQP");
        assert!(refused(url, &[("vhost", "")], Mode::Structured).starts_with("OPT_VHOST must be"));
        assert!(refused("amqp://h/-", &[], Mode::Structured).contains("must name a queue"));
        assert!(refused("amqp://h/e/{nope!}", &[], Mode::Structured).contains("\"nope!\" is none"));
        let built = sink(url, &[], Mode::Structured).unwrap();
        assert!(!format!("{built:?} {:?}", built.access).contains("hunter2"));
    }

    #[test]
    fn a_guest_logs_in_where_nobody_is_named() {
        let access = |url| {
            let access = sink(url, &[], Mode::Structured).unwrap().access;
            let password = access.password.as_ref().map(|password| password.current().to_string());
            (access.user.clone(), password, access.address.port)
        };
        let guest = || ("guest".to_owned(), Some("guest".to_owned()));
        assert_eq!(access("amqp://h/e/k"), (guest().0, guest().1, 5672));
        assert_eq!(access("amqps://h/e/k"), (guest().0, guest().1, 5671));
        assert_eq!(access("amqp://u%40:p@h:1/e/k"), ("u@".to_owned(), Some("p".to_owned()), 1));
        assert_eq!(access("amqp://u@h:1/e/k"), ("u".to_owned(), None, 1), "not with the guest's password");
    }

    #[test]
    fn a_message_is_persistent_and_has_an_identity() {
        let event = event(r#","agent":"a","data":{"z":1.0},"n":7,"b":true,"epoch":5000000000"#);
        let structured = sink("amqp://h/e/k", &[], Mode::Structured).unwrap().message(&event).unwrap();
        assert_eq!(structured.payload, CloudEvent::of(&event).unwrap().structured());
        assert_eq!(*structured.properties.delivery_mode(), Some(2));
        assert_eq!(structured.properties.content_type().as_ref().unwrap().as_str(), STRUCTURED);
        assert_eq!(structured.properties.message_id().as_ref().unwrap().as_str(), "aep://h|e%7C1");
        assert!(structured.properties.headers().is_none());
        let binary = sink("amqp://h/e/k", &[], Mode::Binary).unwrap().message(&event).unwrap();
        assert_eq!(binary.payload, br#"{"z":1.0}"#);
        assert_eq!(binary.properties.content_type().as_ref().unwrap().as_str(), "application/json");
        let headers = binary.properties.headers().clone().unwrap();
        let header = |name: &str| headers.inner().get(name).cloned();
        assert_eq!(header("cloudEvents:specversion"), Some(AMQPValue::LongString("1.0".into())));
        assert_eq!(header("cloudEvents:type"), Some(AMQPValue::LongString("dev.aep.run.started".into())));
        assert_eq!(header("cloudEvents:aepsequence"), Some(AMQPValue::LongLongInt(1)));
        assert_eq!(header("cloudEvents:aepepoch"), Some(AMQPValue::LongString("5000000000".into())));
        assert_eq!(header("cloudEvents:n"), Some(AMQPValue::LongLongInt(7)));
        assert_eq!(header("cloudEvents:b"), Some(AMQPValue::Boolean(true)));
        assert_eq!(header("cloudEvents:datacontenttype"), None);
    }
}
