//! Where events go, and what an answer means.
//!
//! An attempt ends in one of four ways, told apart by what is to be done next. Nothing is retried by default:
//! every case is named.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | 2xx, whatever becomes of the body | delivered | the next event of the session goes out |
//! | 1xx as an answer, 3xx | misconfigured | redirects are never followed: the sink pauses and is probed |
//! | 400, 406, 409, 411 to 417 but for 416, 422, 431, 494 | rejected | a verdict on the event: dead letter; on a batch: it is split |
//! | 401, 402, 403, 404, 405, 407, 410, 421, 426, 451, any other 4xx; 501, 505, 511 | misconfigured | as above; no event is thrown away |
//! | 408, 425, 429, any other 5xx | transient | retried; `Retry-After` pauses the sink |
//! | 600 and above | misconfigured | as above |
//! | refused, unreachable, DNS, connect time-out | transient | the sink pauses, one probe at a time |
//! | closed or reset before the whole head of an answer, time-out | transient | the event is retried |
//! | 415 to a compressed body | misconfigured | as above: it is the compression that isn't understood |
//! | a certificate isn't trusted, or the client's isn't | misconfigured | as above |
//! | other TLS failures | transient | the sink pauses |
//! | the token endpoint refuses the client, or gives no token | misconfigured | as above |
//! | the token endpoint doesn't answer, or with 408, 425, 429 or another 5xx | transient | the sink pauses |
//! | the endpoint was asked for its consent and doesn't give it | misconfigured | as above |
//! | no sink is bound where one is expected | misconfigured | events wait in the spool |
//! | standard output closed | closed | the pipeline ends |
//!
//! A response body is read up to 1 KiB, for a dead letter's `detail` only.

#[cfg(feature = "amqp")]
pub mod amqp;
#[cfg(any(feature = "amqp", feature = "mqtt"))]
mod dial;
#[cfg(feature = "file")]
pub mod file;
pub mod http;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(any(feature = "amqp", feature = "mqtt", feature = "nats", feature = "redis"))]
mod link;
#[cfg(feature = "mqtt")]
pub mod mqtt;
#[cfg(feature = "nats")]
pub mod nats;
pub mod options;
#[cfg(any(feature = "amqp", feature = "mqtt", feature = "nats", feature = "redis"))]
mod own;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(any(feature = "amqp", feature = "mqtt"))]
mod rounds;
mod secret;
pub mod stdout;
mod target;
#[cfg(any(feature = "amqp", feature = "mqtt", feature = "nats"))]
mod template;

use std::fmt;
use std::future::Future;
use std::time::Duration;

use crate::aep::Event;
use crate::aep::cloudevents::MappingError;

#[cfg(feature = "amqp")]
pub use self::amqp::AmqpSink;
#[cfg(feature = "file")]
pub use self::file::FileSink;
pub use self::http::HttpSink;
#[cfg(feature = "kafka")]
pub use self::kafka::KafkaSink;
#[cfg(feature = "mqtt")]
pub use self::mqtt::MqttSink;
#[cfg(feature = "nats")]
pub use self::nats::NatsSink;
pub use self::options::{Mode, SinkOptions, Times};
#[cfg(feature = "redis")]
pub use self::redis::RedisSink;
pub use self::secret::Secret;
pub use self::stdout::StdoutSink;
pub use self::target::{Brokers, Target, TargetError};

/// Events on their way to a sink, together: one, or a batch.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The events, at least one, those of a session in their order. A sink maps each to the same bytes on every
    /// attempt.
    pub events: Vec<Event>,
    /// The attempt with the most often tried of them, counted from 1.
    pub attempt: u32,
}

impl Delivery {
    /// The first attempt with one event.
    #[must_use]
    pub fn of(event: Event) -> Self {
        Self { events: vec![event], attempt: 1 }
    }
}

/// A destination.
pub trait Sink: Send + Sync {
    /// Delivers the events, all or none, and returns once the sink has acknowledged them.
    ///
    /// A batch of several that is [`DeliveryError::Rejected`] says nothing of any one of them.
    ///
    /// # Errors
    /// What was wrong, as what is to be done about it.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the events arrived: they must be delivered again.
    fn deliver(&self, delivery: &Delivery) -> impl Future<Output = Result<(), DeliveryError>> + Send;
}

/// Why an attempt failed, as what is to be done next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeliveryError {
    /// The same event may be accepted later.
    #[error("transient failure: {reason}")]
    Transient {
        /// Why.
        reason: Reason,
        /// How long the sink asked to be left alone.
        retry_after: Option<Duration>,
    },
    /// The sink won't take this event, ever: a dead letter.
    #[error("rejected: {reason}")]
    Rejected {
        /// Why.
        reason: Reason,
        /// The HTTP status, when there is one.
        status: Option<u16>,
        /// What the sink said, at most 1 KiB, without control characters.
        detail: String,
    },
    /// The sink would refuse every event until someone changes something: it pauses.
    #[error("misconfigured: {reason}")]
    Misconfigured {
        /// Why.
        reason: Reason,
    },
    /// The sink is gone and can't come back: the pipeline ends.
    #[error("closed: {reason}")]
    Closed {
        /// Why.
        reason: Reason,
    },
}

impl DeliveryError {
    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::Transient { reason, .. }
            | Self::Rejected { reason, .. }
            | Self::Misconfigured { reason }
            | Self::Closed { reason } => *reason,
        }
    }
}

impl From<MappingError> for DeliveryError {
    fn from(error: MappingError) -> Self {
        Self::Rejected { reason: Reason::Mapping, status: None, detail: sanitised(&error.to_string()) }
    }
}

/// Declares the closed set of reasons with their labels.
macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident $label:literal,)*) => {
        /// Why an attempt failed: a closed set, fit for a metric's label.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its label.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $label,)* }
            }
        }
    };
}

reasons! {
    /// Nothing listens there.
    Refused "refused",
    /// No connection within the connect time-out.
    ConnectTimeout "connect-timeout",
    /// The host or its network can't be reached.
    Unreachable "unreachable",
    /// The host's name isn't known, or the name server doesn't answer.
    Dns "dns",
    /// A TLS handshake failed for another reason than a certificate.
    Tls "tls",
    /// A certificate isn't trusted.
    Certificate "certificate",
    /// The connection ended before the whole head of an answer.
    ConnectionLost "connection-lost",
    /// No answer within the time-out.
    Timeout "timeout",
    /// The answer isn't of the protocol, or the request can't be made.
    Protocol "protocol",
    /// 429.
    Throttled "throttled",
    /// A redirect.
    Redirect "status-3xx",
    /// 401, 402, 403, 407, 511; credentials or a permission refused.
    Unauthorized "unauthorized",
    /// 404, 410; what the events are sent to isn't there.
    NotFound "not-found",
    /// 413, or larger than the destination takes.
    TooLarge "too-large",
    /// Another status from 400 to 499.
    Status4xx "status-4xx",
    /// A status from 500 to 599.
    Status5xx "status-5xx",
    /// The destination is there and says that it can't take anything now: full, loading, without a leader.
    Unavailable "unavailable",
    /// A status outside 200 to 599.
    StatusOther "status-other",
    /// The OAuth token endpoint can't be reached, or isn't well.
    TokenEndpoint "token-endpoint",
    /// The OAuth token endpoint refuses the client.
    TokenRefused "token-refused",
    /// The endpoint doesn't consent to being sent events.
    NoConsent "no-consent",
    /// No sink is bound.
    NoSink "no-sink",
    /// The event can't be mapped to a CloudEvent.
    Mapping "mapping",
    /// The destination says that the event isn't valid.
    Invalid "invalid",
    /// The reader of standard output has gone.
    BrokenPipe "broken-pipe",
    /// Writing to the destination failed.
    Write "write",
    /// The event's dead letter couldn't be written.
    DeadLetterStore "dead-letter-store",
}

impl Reason {
    /// Whether no event could have arrived: every other one would fail the same way now.
    #[must_use]
    pub const fn concerns_every_event(self) -> bool {
        matches!(
            self,
            Self::Refused
                | Self::ConnectTimeout
                | Self::Unreachable
                | Self::Dns
                | Self::Tls
                | Self::Throttled
                | Self::Unavailable
                | Self::TokenEndpoint
                | Self::Write
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One of the known sinks.
#[derive(Debug)]
pub enum AnySink {
    /// Over HTTP. Boxed: it is much the larger one.
    Http(Box<HttpSink>),
    /// To a Kafka topic.
    #[cfg(feature = "kafka")]
    Kafka(Box<KafkaSink>),
    /// To standard output.
    Stdout(StdoutSink),
    /// To NATS.
    #[cfg(feature = "nats")]
    Nats(Box<NatsSink>),
    /// To an MQTT server.
    #[cfg(feature = "mqtt")]
    Mqtt(Box<MqttSink>),
    /// To an AMQP server.
    #[cfg(feature = "amqp")]
    Amqp(Box<AmqpSink>),
    /// To Redis.
    #[cfg(feature = "redis")]
    Redis(Box<RedisSink>),
    /// To files.
    #[cfg(feature = "file")]
    File(FileSink),
    /// To nowhere yet.
    Unbound,
}

/// Why a sink can't be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The HTTP client can't be built, for want of trusted root certificates for instance.
    #[error("the HTTP client can't be built")]
    Http(#[source] reqwest::Error),
    /// This binary was built without the sink.
    #[error("this build has no {scheme} sink: build with --features {feature}")]
    Feature {
        /// The URL's scheme.
        scheme: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// A part of the configuration can't be used.
    #[error("{what} {must}")]
    Setting {
        /// Which part: what its variable's name ends in, or a part of the URL.
        what: String,
        /// What it must be.
        must: String,
    },
    /// A file can't be read.
    #[error("{path}: {error}", path = .path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

impl BuildError {
    /// A part of the configuration can't be used.
    #[allow(dead_code, reason = "without any feature no sink is left that has options of its own")]
    pub(crate) fn setting(what: impl Into<String>, must: impl Into<String>) -> Self {
        Self::Setting { what: what.into(), must: must.into() }
    }
}

impl AnySink {
    /// The sink of a target. Connects to nothing yet.
    ///
    /// # Errors
    /// When its options can't be used, or this build has no such sink.
    pub fn build(target: &Target, options: &SinkOptions) -> Result<Self, BuildError> {
        match target {
            Target::Http(url) => HttpSink::new(url.clone(), options).map(Box::new).map(Self::Http),
            Target::Stdout => Ok(Self::Stdout(StdoutSink::stdout())),
            #[cfg(feature = "kafka")]
            Target::Kafka(brokers) => KafkaSink::new(brokers, options).map(Box::new).map(Self::Kafka),
            #[cfg(not(feature = "kafka"))]
            Target::Kafka(_) => Err(BuildError::Feature { scheme: "kafka", feature: "kafka" }),
            #[cfg(feature = "nats")]
            Target::Nats(url) => NatsSink::new(url, options).map(Box::new).map(Self::Nats),
            #[cfg(not(feature = "nats"))]
            Target::Nats(_) => Err(BuildError::Feature { scheme: "nats", feature: "nats" }),
            #[cfg(feature = "mqtt")]
            Target::Mqtt(url) => MqttSink::new(url, options).map(Box::new).map(Self::Mqtt),
            #[cfg(not(feature = "mqtt"))]
            Target::Mqtt(_) => Err(BuildError::Feature { scheme: "mqtt", feature: "mqtt" }),
            #[cfg(feature = "amqp")]
            Target::Amqp(url) => AmqpSink::new(url, options).map(Box::new).map(Self::Amqp),
            #[cfg(not(feature = "amqp"))]
            Target::Amqp(_) => Err(BuildError::Feature { scheme: "amqp", feature: "amqp" }),
            #[cfg(feature = "redis")]
            Target::Redis(url) => RedisSink::new(url, options).map(Box::new).map(Self::Redis),
            #[cfg(not(feature = "redis"))]
            Target::Redis(_) => Err(BuildError::Feature { scheme: "redis", feature: "redis" }),
            #[cfg(feature = "file")]
            Target::File(directory) => FileSink::new(directory.clone(), options).map(Self::File),
            #[cfg(not(feature = "file"))]
            Target::File(_) => Err(BuildError::Feature { scheme: "file", feature: "file" }),
            Target::Unbound => Ok(Self::Unbound),
        }
    }
}

impl Sink for AnySink {
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        match self {
            Self::Http(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "kafka")]
            Self::Kafka(sink) => sink.deliver(delivery).await,
            Self::Stdout(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "nats")]
            Self::Nats(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "mqtt")]
            Self::Mqtt(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "amqp")]
            Self::Amqp(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "redis")]
            Self::Redis(sink) => sink.deliver(delivery).await,
            #[cfg(feature = "file")]
            Self::File(sink) => sink.deliver(delivery).await,
            Self::Unbound => Err(DeliveryError::Misconfigured { reason: Reason::NoSink }),
        }
    }
}

/// Text from outside, fit for a log or a file: control characters become spaces, at most 1 KiB.
pub(crate) fn sanitised(text: &str) -> String {
    /// The longest text, in bytes.
    const MAX: usize = 1024;
    let mut out = String::with_capacity(text.len().min(MAX));
    for character in text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if out.len().saturating_add(character.len_utf8()) > MAX {
            break;
        }
        out.push(character);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_distinct() {
        let labels: std::collections::HashSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
    }

    #[test]
    fn text_from_outside_is_bounded_and_printable() {
        assert_eq!(sanitised(" <h1>\r\n\u{1b}[31mno\0</h1>\n"), "<h1>   [31mno </h1>");
        assert_eq!(sanitised(&"é".repeat(2000)).len(), 1024);
    }
}
