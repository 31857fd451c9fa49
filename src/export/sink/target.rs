//! Where events go, as configured.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use reqwest::Url;

use super::options::Mode;

/// Where events go. The URL's scheme says by which protocol.
#[derive(Clone, PartialEq, Eq)]
pub enum Target {
    /// `http://…`, `https://…`: an HTTP endpoint, whose URL may hold a user name and a password.
    Http(Url),
    /// `kafka://broker,broker/topic`.
    Kafka(Brokers),
    /// `nats://host/subject`, `tls://…`.
    Nats(Url),
    /// `mqtt://host/topic`, `mqtts://…`.
    Mqtt(Url),
    /// `amqp://host/exchange/key`, `amqps://…`.
    Amqp(Url),
    /// `redis://host/stream`, `rediss://…`.
    Redis(Url),
    /// `file:///directory`.
    File(PathBuf),
    /// `stdout`: standard output, one line an event.
    Stdout,
    /// Nowhere yet: what is to be bound from outside isn't. Events wait. No text is read as this.
    Unbound,
}

/// The brokers of a Kafka cluster, and a topic.
#[derive(Clone, PartialEq, Eq)]
pub struct Brokers {
    /// `host:port`, separated by commas.
    pub hosts: String,
    /// The topic.
    pub topic: String,
}

/// Why a text names no sink. Never repeats the text, which may hold a password or a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The scheme names no sink.
    #[error(
        "must be a URL that starts with http:, https:, kafka:, nats:, mqtt:, mqtts:, amqp:, amqps:, redis:, rediss: or file:, or stdout"
    )]
    Scheme,
    /// There is no host.
    #[error("must be a URL with a host")]
    Host,
    /// `kafka:` without brokers or topic.
    #[error("must be kafka://broker:port,broker:port/topic")]
    Kafka,
    /// What the events are sent to isn't named.
    #[error("must name a {0} in its path")]
    Path(&'static str),
    /// `file:` without an absolute path.
    #[error("must be file:///directory")]
    File,
}

impl Target {
    /// Reads a sink's text. `stdout`, `stdout:` and `-` are standard output.
    ///
    /// # Errors
    /// When it names no sink, without repeating it.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let text = text.trim();
        if matches!(text, "stdout" | "stdout:" | "stdout://" | "-") {
            return Ok(Self::Stdout);
        }
        // Several hosts make it no URL.
        if let Some(rest) = text.strip_prefix("kafka://") {
            return kafka(rest);
        }
        let url = Url::parse(text).map_err(|_| match text.split_once("://") {
            Some((
                "http" | "https" | "nats" | "tls" | "mqtt" | "mqtts" | "amqp" | "amqps" | "redis" | "rediss",
                _,
            )) => TargetError::Host,
            _ => TargetError::Scheme,
        })?;
        let named = |what| match url.path().trim_matches('/') {
            "" => Err(TargetError::Path(what)),
            _ if !url.has_host() => Err(TargetError::Host),
            _ => Ok(url.clone()),
        };
        match url.scheme() {
            "http" | "https" if url.has_host() => Ok(Self::Http(url)),
            "http" | "https" => Err(TargetError::Host),
            "nats" | "tls" => named("subject").map(Self::Nats),
            "mqtt" | "mqtts" => named("topic").map(Self::Mqtt),
            "amqp" | "amqps" => named("exchange and a routing key").map(Self::Amqp),
            "redis" | "rediss" => named("stream").map(Self::Redis),
            "file" => match url.to_file_path() {
                Ok(path) if path.parent().is_some() => Ok(Self::File(path)),
                _ => Err(TargetError::File),
            },
            _ => Err(TargetError::Scheme),
        }
    }

    /// Whether it takes events in one line, each after the one before.
    #[must_use]
    pub fn is_one_line_of_events(&self) -> bool {
        matches!(self, Self::Stdout | Self::File(_))
    }

    /// How many events go together: as many as were asked for, or as suits the sink.
    #[must_use]
    pub fn batch(&self, mode: Mode, asked: Option<NonZeroUsize>) -> usize {
        /// Lines that are written, and flushed, at once.
        const LINES: usize = 256;
        /// Events in one array unless asked otherwise.
        const ARRAY: usize = 100;
        match (self, mode) {
            (Self::Stdout | Self::File(_), _) => LINES,
            (Self::Http(_), Mode::Batch) => asked.map_or(ARRAY, NonZeroUsize::get),
            (Self::Http(_), Mode::Structured | Mode::Binary) => 1,
            _ => asked.map_or(1, NonZeroUsize::get),
        }
    }
}

fn kafka(rest: &str) -> Result<Target, TargetError> {
    let (hosts, topic) = rest.split_once('/').ok_or(TargetError::Kafka)?;
    let topic = topic.trim_matches('/');
    let is_host = |host: &str| {
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte))
    };
    let is_topic = |topic: &str| {
        !topic.is_empty()
            && topic.len() <= 249
            && topic.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    if hosts.split(',').all(is_host) && is_topic(topic) {
        Ok(Target::Kafka(Brokers { hosts: hosts.to_owned(), topic: topic.to_owned() }))
    } else {
        Err(TargetError::Kafka)
    }
}

impl std::str::FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        Self::parse(text)
    }
}

impl fmt::Display for Target {
    /// Without user name, password, query and fragment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(url) => write!(f, "{}{}", url.origin().ascii_serialization(), url.path()),
            Self::Kafka(Brokers { hosts, topic }) => write!(f, "kafka://{hosts}/{topic}"),
            Self::Nats(url) | Self::Mqtt(url) | Self::Amqp(url) | Self::Redis(url) => {
                write!(f, "{}://{}", url.scheme(), url.host_str().unwrap_or_default())?;
                if let Some(port) = url.port() {
                    write!(f, ":{port}")?;
                }
                // As it was written: a subject's template has braces, which no URL can hold.
                f.write_str(&url.path().replace("%7B", "{").replace("%7D", "}"))
            }
            Self::File(path) => write!(f, "file://{}", path.display()),
            Self::Stdout => f.write_str("stdout"),
            Self::Unbound => f.write_str("unbound"),
        }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({self})")
    }
}

impl fmt::Debug for Brokers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Brokers({}/{})", self.hosts, self.topic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_told_by_its_scheme() {
        for (text, shown) in [
            ("stdout", "stdout"),
            (" - ", "stdout"),
            ("https://h/p", "https://h/p"),
            ("kafka://a:9092,b:9092/topic", "kafka://a:9092,b:9092/topic"),
            ("nats://h/aep.{agent}", "nats://h/aep.{agent}"),
            ("mqtts://h:8883/a/b", "mqtts://h:8883/a/b"),
            ("amqp://h/exchange/key", "amqp://h/exchange/key"),
            ("redis://h/stream", "redis://h/stream"),
            ("file:///var/events", "file:///var/events"),
        ] {
            assert_eq!(Target::parse(text).map(|target| target.to_string()), Ok(shown.to_owned()));
        }
        for (text, error) in [
            ("ftp://h", TargetError::Scheme),
            ("", TargetError::Scheme),
            ("h:80", TargetError::Scheme),
            ("http://", TargetError::Host),
            ("kafka://h", TargetError::Kafka),
            ("kafka://h/a b", TargetError::Kafka),
            ("kafka:///t", TargetError::Kafka),
            ("nats://h", TargetError::Path("subject")),
            ("redis://h/", TargetError::Path("stream")),
            ("file://", TargetError::File),
        ] {
            assert_eq!(Target::parse(text), Err(error), "{text}");
        }
    }

    #[test]
    fn nothing_secret_is_ever_printed() {
        for (text, shown) in [
            ("https://user:hunter2@h:8443/p?token=hunter2#hunter2", "https://h:8443/p"),
            ("amqp://user:hunter2@h:1/e/k", "amqp://h:1/e/k"),
        ] {
            let target = Target::parse(text).unwrap();
            assert_eq!(target.to_string(), shown);
            assert_eq!(format!("{target:?}"), format!("Target({shown})"));
        }
        for wrong in [
            "user:hunter2@h",
            "hunter2",
            "ftp://hunter2@h",
            "http://hunter2@h:port",
            "hunter2://h",
            "kafka://u:hunter2@h/",
        ] {
            let error = Target::parse(wrong).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
