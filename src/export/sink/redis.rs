//! Redis: one entry an event in a stream.
//!
//! An entry has the field `event`, a structured CloudEvent, and `id`, `source` and `type` of it as fields of their
//! own, to filter by without reading JSON. Events that go together are added in one transaction: all or none.
//! Redis drops no duplicates: after a lost answer an event may be there twice.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | the server answered with the entry's identifier | delivered | the next event of the session goes out |
//! | `OOM`, `LOADING`, `MISCONF`, `NOREPLICAS`, `BUSY`, `MASTERDOWN`, `CLUSTERDOWN`, `TRYAGAIN`, too many clients | transient (`unavailable`) | the sink pauses, one probe at a time |
//! | `READONLY` | transient (`unavailable`) | as above, and a new connection looks for the primary |
//! | an event larger than the server's `proto-max-bulk-len`, known before sending | rejected (`too-large`) | dead letter; a batch is split |
//! | `NOAUTH`, `WRONGPASS`, `NOPERM`, `DENIED` (protected mode), login refused | misconfigured (`unauthorized`) | the sink pauses; no event is thrown away |
//! | `WRONGTYPE`: the key holds something else; no such database | misconfigured (`not-found`) | as above |
//! | `MOVED`, `ASK`: another node of a cluster holds the stream | misconfigured (`status-3xx`) | as above: redirects are never followed |
//! | any other error | misconfigured (`protocol`) | as above |
//! | a certificate isn't trusted, or the client's isn't | misconfigured (`certificate`) | as above |
//! | refused, unreachable, DNS, connect time-out, TLS failure | transient | the sink pauses, one probe at a time |
//! | the connection ended before the answer, no answer in time | transient (`connection-lost`, `timeout`) | the event is retried over a new connection |

mod connection;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError};
use reqwest::Url;
use tokio::time::Instant;

use self::connection::{Access, Connection};
use super::link::Link;
use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions, own};
use crate::aep::cloudevents::{CloudEvent, TYPE_PREFIX};

/// The server's port where the URL names none.
const PORT: u16 = 6379;

/// Adds to a Redis stream. Over one connection, which is made when an event needs it.
pub struct RedisSink {
    link: Link<Connection>,
    access: Arc<Access>,
    stream: String,
    /// About how many entries the stream keeps.
    longest: Option<NonZeroU64>,
    /// How long an attempt may take.
    attempt: Duration,
}

impl fmt::Debug for RedisSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSink").finish_non_exhaustive()
    }
}

impl RedisSink {
    /// A sink to `redis://host/stream` or `rediss://host/stream`. Connects to nothing yet. Its own options are
    /// `maxlen`, about how many entries the stream keeps, and `database`, a number.
    ///
    /// # Errors
    /// When the mode, an option or a file can't be used.
    pub fn new(url: &Url, options: &SinkOptions) -> Result<Self, BuildError> {
        own::refuse_unknown(options, &["maxlen", "database"])?;
        own::check_files(options)?;
        if options.mode != Mode::Structured {
            return Err(BuildError::setting("MODE", "must be structured for Redis"));
        }
        let number = |name: &str| {
            options.own.get(name).map(|text| {
                let wrong =
                    |_| BuildError::setting(format!("OPT_{}", name.to_ascii_uppercase()), "must be a number");
                text.parse::<u32>().map_err(wrong)
            })
        };
        let longest = match number("maxlen").transpose()?.map(u64::from).map(NonZeroU64::new) {
            Some(None) => return Err(BuildError::setting("OPT_MAXLEN", "must be 1 or more")),
            longest => longest.flatten(),
        };
        let (user, password) = own::user(url, &options.credentials);
        Ok(Self {
            link: Link::new(),
            access: Arc::new(Access {
                host: url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
                port: url.port().unwrap_or(PORT),
                tls: (url.scheme() == "rediss").then(|| options.tls.clone()),
                user,
                password,
                database: number("database").transpose()?.unwrap_or(0),
            }),
            stream: own::path(url)?,
            longest,
            attempt: options.times.attempt,
        })
    }

    fn entry(&self, mapped: &CloudEvent<'_>) -> Cmd {
        let event = mapped.event();
        let mut entry = redis::cmd("XADD");
        entry.arg(&self.stream);
        if let Some(longest) = self.longest {
            entry.arg("MAXLEN").arg("~").arg(longest.get());
        }
        entry.arg("*").arg("event").arg(mapped.structured());
        entry.arg("id").arg(event.id()).arg("source").arg(event.source());
        entry.arg("type").arg(format!("{TYPE_PREFIX}{}", event.event_type()));
        entry
    }
}

impl Sink for RedisSink {
    /// Adds the events, several in one transaction, and waits for the entries' identifiers.
    ///
    /// # Cancel safety
    /// A future that is dropped leaves events that may have been added; added again they are there twice.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut entries = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            entries.push(self.entry(&CloudEvent::of(event)?));
        }
        let late = || DeliveryError::Transient { reason: Reason::Timeout, retry_after: None };
        let deadline = Instant::now().checked_add(self.attempt).unwrap_or_else(Instant::now);
        let connect = self.link.connection(|| Connection::open(&self.access));
        let connection = tokio::time::timeout_at(deadline, connect).await.map_err(|_| late())??;
        tokio::time::timeout_at(deadline, connection.add(&entries)).await.unwrap_or_else(|_| {
            connection.give_up();
            Err(late())
        })
    }
}

/// The table at the head of this file, of what a server said or didn't.
fn verdict(error: RedisError) -> DeliveryError {
    let text = error.to_string();
    let code = error.code().map(str::to_owned);
    let kind = error.kind();
    // What spoilt a transaction stands within.
    let first = error.into_server_errors().and_then(|all| {
        all.first()
            .map(|(_, error)| (error.code().to_owned(), error.details().unwrap_or_default().to_owned()))
    });
    let (code, said) = match (first, code) {
        (Some(first), _) => first,
        (None, Some(code)) => (code, text),
        (None, None) => (String::new(), text),
    };
    answer(&code, &said).unwrap_or(match kind {
        redis::ErrorKind::Io | redis::ErrorKind::Parse => {
            DeliveryError::Transient { reason: Reason::ConnectionLost, retry_after: None }
        }
        redis::ErrorKind::AuthenticationFailed => {
            DeliveryError::Misconfigured { reason: Reason::Unauthorized }
        }
        _ => DeliveryError::Misconfigured { reason: Reason::Protocol },
    })
}

/// The part of the table that is told by what the server said: an error's first word, and the rest.
fn answer(code: &str, said: &str) -> Option<DeliveryError> {
    let unavailable = DeliveryError::Transient { reason: Reason::Unavailable, retry_after: None };
    let misconfigured = |reason| DeliveryError::Misconfigured { reason };
    Some(match code {
        "OOM" | "LOADING" | "MISCONF" | "NOREPLICAS" | "BUSY" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN"
        | "READONLY" => unavailable,
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" => misconfigured(Reason::Unauthorized),
        "WRONGTYPE" => misconfigured(Reason::NotFound),
        "MOVED" | "ASK" => misconfigured(Reason::Redirect),
        _ if said.contains("max number of clients") => unavailable,
        _ if said.contains("DB index") => misconfigured(Reason::NotFound),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aep::Event;

    fn sink(url: &str, own: &[(&str, &str)], mode: Mode) -> Result<RedisSink, BuildError> {
        let own = own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        RedisSink::new(&Url::parse(url).unwrap(), &SinkOptions { own, mode, ..SinkOptions::default() })
    }

    #[test]
    fn what_cannot_be_used_is_told_without_secrets() {
        let url = "redis://:hunter2@h/events";
        let refused = |own: &[(&str, &str)], mode| sink(url, own, mode).unwrap_err().to_string();
        assert_eq!(
            refused(&[("max.len", "hunter2")], Mode::Structured),
            "OPT_MAX_LEN is no option here, only OPT_MAXLEN, OPT_DATABASE are"
        );
        assert_eq!(refused(&[("maxlen", "hunter2")], Mode::Structured), "OPT_MAXLEN must be a number");
        assert_eq!(refused(&[("maxlen", "0")], Mode::Structured), "OPT_MAXLEN must be 1 or more");
        assert_eq!(refused(&[], Mode::Binary), "MODE must be structured for Redis");
        let built = sink(url, &[("maxlen", "7"), ("database", "3")], Mode::Structured).unwrap();
        assert!(!format!("{built:?} {:?}", built.access).contains("hunter2"));
    }

    #[test]
    fn an_entry_is_the_event_and_what_to_filter_by() {
        let event = Event::parse_str(
            r#"{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":1}"#,
        );
        let event = event.unwrap();
        let mapped = CloudEvent::of(&event).unwrap();
        let packed = |own: &[(&str, &str)]| {
            let sink = sink("redis://h/a%20b", own, Mode::Structured).unwrap();
            String::from_utf8(sink.entry(&mapped).get_packed_command()).unwrap()
        };
        let plain = packed(&[]);
        assert!(plain.starts_with("*11\r\n$4\r\nXADD\r\n$3\r\na b\r\n$1\r\n*\r\n$5\r\nevent\r\n"), "{plain}");
        assert!(plain.ends_with(
            "$2\r\nid\r\n$1\r\ne\r\n$6\r\nsource\r\n$7\r\naep://h\r\n$4\r\ntype\r\n$19\r\ndev.aep.run.started\r\n"
        ));
        assert!(packed(&[("maxlen", "7")]).contains("\r\n$6\r\nMAXLEN\r\n$1\r\n~\r\n$1\r\n7\r\n$1\r\n*\r\n"));
    }

    #[test]
    fn every_answer_has_its_verdict() {
        for code in
            ["OOM", "LOADING", "READONLY", "MISCONF", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN"]
        {
            assert_eq!(answer(code, "").unwrap().reason(), Reason::Unavailable, "{code}");
        }
        for (code, said, reason) in [
            ("NOAUTH", "", Reason::Unauthorized),
            ("WRONGPASS", "", Reason::Unauthorized),
            ("NOPERM", "", Reason::Unauthorized),
            ("DENIED", "Redis is running in protected mode", Reason::Unauthorized),
            ("WRONGTYPE", "", Reason::NotFound),
            ("ERR", "DB index is out of range", Reason::NotFound),
            ("MOVED", "3999 127.0.0.1:6381", Reason::Redirect),
            ("ERR", "max number of clients reached", Reason::Unavailable),
        ] {
            assert_eq!(answer(code, said).unwrap().reason(), reason, "{code} {said}");
        }
        assert_eq!(answer("ERR", "unknown command"), None);
    }
}
