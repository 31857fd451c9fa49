//! CloudEvents to a Kafka topic: one record an event, acknowledged by every replica in sync.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | every replica in sync has the record | delivered | the next event of the session goes out |
//! | refused, unreachable, DNS, connect time-out, disconnected, until the attempt is over | transient | the reason is the last one that a broker's connection gave |
//! | no leader, too few replicas, an internal error of the broker, until the attempt is over | transient | librdkafka goes on within the attempt, then the event is retried |
//! | throttled, or the producer's queue is full | transient | the sink pauses |
//! | TLS fails for another reason than a certificate | transient | the sink pauses |
//! | the idempotent producer fails for good | transient | the event is retried with a new producer |
//! | larger than `message.max.bytes`, or than the topic takes | rejected | a verdict on the event: dead letter |
//! | the broker calls the record invalid | rejected | as above |
//! | user or password wrong, mechanism not enabled, no permission for topic or cluster | misconfigured | the sink pauses and is probed with a new producer, which reads password and certificates again |
//! | a certificate isn't trusted, or the client's isn't | misconfigured | as above |
//! | the topic, or the partition, isn't there | misconfigured | as above |
//! | the broker can't do what is asked of it, any other error | misconfigured | as above |
//!
//! A broker judges all records of a request together, those of other sessions too. A verdict counts when the record
//! was alone; until then it is only the reason to send it alone.
//!
//! Order: the producer is idempotent, so that its own retries neither reorder nor repeat. A session's events go one
//! after another, also when several were handed over together: were the second to fail, the third must not be there.
//! An attempt that was given up may still have its record in the producer's queue; the next one stands behind it.
//!
//! Spec: CloudEvents Kafka binding §3.

mod outcome;
mod settings;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer, PurgeConfig};
use tokio::sync::{RwLock, watch};

use self::outcome::{Health, Outcome, Watch};
use self::settings::{Identity, Settings};
use super::{Brokers, BuildError, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions};
use crate::aep::cloudevents::{CloudEvent, TYPE_PREFIX, Value};
use crate::aep::envelope::Scalar;

/// How long an attempt is waited for beyond its bound: librdkafka looks for records whose time is over once a second.
const GRACE: Duration = Duration::from_secs(2);

/// Delivers to a Kafka topic.
pub struct KafkaSink {
    topic: String,
    mode: Mode,
    attempt: Duration,
    settings: Settings,
    /// Guards the connection in use, which is replaced when it is broken or when what it was made with has changed.
    connection: Mutex<Option<Arc<Connection>>>,
    /// Held together by deliveries side by side, and alone by one that must know its records to be the only ones.
    turns: RwLock<()>,
}

impl fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSink").field("topic", &self.topic).finish_non_exhaustive()
    }
}

impl KafkaSink {
    /// A sink to a topic. Nothing is connected to before the first delivery.
    ///
    /// # Errors
    /// When an option can't be used, a certificate can't be read, or the mode is [`Mode::Batch`].
    pub fn new(brokers: &Brokers, options: &SinkOptions) -> Result<Self, BuildError> {
        if options.mode == Mode::Batch {
            return Err(BuildError::setting("MODE", "must be structured or binary: Kafka has no batch mode"));
        }
        Ok(Self {
            topic: brokers.topic.clone(),
            mode: options.mode,
            attempt: options.times.attempt,
            settings: Settings::of(brokers, options)?,
            connection: Mutex::new(None),
            turns: RwLock::new(()),
        })
    }

    /// The connection to send with, made now if there is none or what it was made with has changed.
    fn connection(&self) -> Result<Arc<Connection>, DeliveryError> {
        let identity = self.settings.identity();
        let mut slot = self.connection.lock();
        match &*slot {
            Some(connection) if connection.made_with == identity => Ok(Arc::clone(connection)),
            // What is under way on the old one ends there.
            Some(_) | None => {
                let connection = Arc::new(Connection::new(&self.settings, identity)?);
                *slot = Some(Arc::clone(&connection));
                Ok(connection)
            }
        }
    }

    /// Gives a connection up, with all that is in its queue: the next attempt is made with a new one.
    fn give_up(&self, connection: &Arc<Connection>) {
        let mut slot = self.connection.lock();
        if slot.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection)) {
            *slot = None;
        }
        // Else a record could go out behind later ones of its session that the new connection delivers.
        connection.purge();
    }

    async fn attempt(&self, connection: &Connection, records: &[Record]) -> Result<(), Outcome> {
        let together = {
            let _shared = self.turns.read().await;
            connection.send(&self.topic, by_key(records)).await
        };
        match together {
            Err(Outcome::Suspected(_)) => {
                let _alone = self.turns.write().await;
                let is_alone = connection.is_idle();
                match connection.send(&self.topic, vec![records.iter().collect()]).await {
                    // An attempt that was given up has left a record behind.
                    Err(Outcome::Suspected(_)) if !is_alone => Err(Outcome::Transient(Reason::Unavailable)),
                    outcome => outcome,
                }
            }
            outcome => outcome,
        }
    }
}

impl Sink for KafkaSink {
    /// One record an event, those of a session one after another.
    ///
    /// # Cancel safety
    /// The records of a future that is dropped stay in the producer's queue until their time is over.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut records = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            records.push(Record::of(CloudEvent::of(event)?, self.mode));
        }
        let connection = self.connection()?;
        let bound = self.attempt.saturating_add(GRACE);
        let outcome = match tokio::time::timeout(bound, self.attempt(&connection, &records)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(outcome)) => outcome,
            Err(_) => Outcome::Unanswered,
        };
        let (error, is_broken) = connection.judge(outcome);
        if is_broken {
            self.give_up(&connection);
        }
        Err(error)
    }
}

/// One event, as it is sent.
struct Record {
    key: String,
    payload: Vec<u8>,
    headers: OwnedHeaders,
}

impl Record {
    fn of(event: CloudEvent<'_>, mode: Mode) -> Self {
        let key = key(event);
        let header = |headers: OwnedHeaders, key: &str, value: &str| {
            headers.insert(Header { key, value: Some(value.as_bytes()) })
        };
        if mode == Mode::Structured {
            let content_type = "application/cloudevents+json; charset=UTF-8";
            let headers = header(OwnedHeaders::new_with_capacity(1), "content-type", content_type);
            return Self { key, payload: event.structured(), headers };
        }
        let mut headers = OwnedHeaders::new_with_capacity(24);
        event.attributes(|name, value| {
            let mut add = |name: &str, text: &str| {
                headers = header(std::mem::take(&mut headers), name, text);
            };
            match value {
                Value::Word(text) if name == "datacontenttype" => add("content-type", text),
                Value::Word(text) | Value::String { text, .. } => add(&format!("ce_{name}"), text),
                Value::Type(text) => add(&format!("ce_{name}"), &format!("{TYPE_PREFIX}{text}")),
                Value::Integer(value) => add(&format!("ce_{name}"), &value.to_string()),
                Value::Digits(value) => add(&format!("ce_{name}"), &value.to_string()),
                Value::Boolean(value) => add(&format!("ce_{name}"), &value.to_string()),
            }
        });
        // Without data it is empty and not null, which would delete the key from a compacted topic.
        let payload = event.event().data().map(|data| data.as_bytes().to_vec()).unwrap_or_default();
        Self { key, payload, headers }
    }
}

/// The record's key, which decides its partition: what the event says, or its session.
///
/// Spec: CloudEvents partitioning extension.
fn key(event: CloudEvent<'_>) -> String {
    let event = event.event();
    match (event.extension("partitionkey"), event.session()) {
        (Some(Scalar::String(key)), _) => key.to_owned(),
        (Some(Scalar::Integer(key)), _) => key.to_string(),
        (Some(Scalar::Boolean(key)), _) => key.to_string(),
        (None, Some(session)) => format!("{}|{session}", event.source()),
        (None, None) => event.source().to_owned(),
    }
}

/// The records of each key, in their order.
fn by_key(records: &[Record]) -> Vec<Vec<&Record>> {
    let mut groups: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
    for record in records {
        groups.entry(&record.key).or_default().push(record);
    }
    groups.into_values().collect()
}

/// A producer with its connections to the brokers.
struct Connection {
    /// Taken out when it is dropped.
    producer: Option<FutureProducer<Watch>>,
    /// What the brokers' connections said; changed by librdkafka's callbacks, and by what is delivered.
    health: Arc<watch::Sender<Health>>,
    made_with: Identity,
}

impl Connection {
    fn new(settings: &Settings, identity: Identity) -> Result<Self, DeliveryError> {
        let health = Arc::new(watch::Sender::new(Health::default()));
        let watch = Watch::new(Arc::clone(&health));
        match settings.config(&identity).create_with_context(watch) {
            Ok(producer) => Ok(Self { producer: Some(producer), health, made_with: identity }),
            Err(error) => {
                // It could be made when the sink was built: what has changed since are password and certificates.
                let must = settings.refusal(error);
                tracing::warn!(error = %must, "the Kafka producer can't be made");
                Err(DeliveryError::Misconfigured { reason: Reason::Certificate })
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.producer.as_ref().is_none_or(|producer| producer.in_flight_count() == 0)
    }

    fn purge(&self) {
        if let Some(producer) = &self.producer {
            producer.purge(PurgeConfig::default().queue().inflight());
        }
    }

    /// Sends groups side by side, the records of each one after another, and returns once all have an outcome, or
    /// none can have one.
    async fn send(&self, topic: &str, groups: Vec<Vec<&Record>>) -> Result<(), Outcome> {
        let mut health = self.health.subscribe();
        let all = join_all(groups.into_iter().map(|group| async move {
            for record in group {
                self.send_one(topic, record).await?;
            }
            Ok(())
        }));
        let broken = async { drop(health.wait_for(Health::is_broken).await) };
        let outcomes = tokio::select! {
            biased;
            outcomes = all => outcomes,
            () = broken => return Err(Outcome::Unanswered),
        };
        // A verdict on an event is worth nothing while another one must be sent again anyway.
        outcomes.into_iter().max_by_key(Outcome::weight).unwrap_or(Ok(()))
    }

    async fn send_one(&self, topic: &str, record: &Record) -> Result<(), Outcome> {
        let Some(producer) = &self.producer else { return Err(Outcome::Unanswered) };
        let sent = producer.send_result(
            FutureRecord::to(topic)
                .key(record.key.as_str())
                .payload(record.payload.as_slice())
                .headers(record.headers.clone()),
        );
        let answer = match sent {
            Ok(answer) => answer,
            Err((error, _)) => return Err(Outcome::of_enqueueing(&error)),
        };
        match answer.await {
            Ok(Ok(_)) => {
                self.health.send_if_modified(Health::delivered);
                Ok(())
            }
            Ok(Err((error, _))) => Outcome::of_delivery(&error),
            Err(_) => Err(Outcome::Unanswered),
        }
    }

    /// What an attempt's end says, and whether the connection is of no more use.
    fn judge(&self, outcome: Outcome) -> (DeliveryError, bool) {
        let fatal = self.producer.as_ref().and_then(|producer| producer.client().fatal_error());
        let health = *self.health.borrow();
        outcome.settled(health, fatal.map(|(code, _)| code))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(producer) = self.producer.take() else { return };
        // It joins librdkafka's threads, up to half a second.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(producer))),
            Err(_) => drop(producer),
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::message::Headers as _;

    use super::*;
    use crate::aep::Event;

    fn record(members: &str, mode: Mode) -> Record {
        let event = Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a"{members}}}"#
        ))
        .unwrap();
        Record::of(CloudEvent::of(&event).unwrap(), mode)
    }

    #[test]
    fn the_key_is_the_partition_key_or_the_session() {
        for (members, key) in [
            (r#","session":"s","seq":1"#, "aep://h|s"),
            (r#","session":"s","seq":1,"partitionkey":"p""#, "p"),
            (r#","session":"s","seq":1,"partitionkey":7"#, "7"),
        ] {
            assert_eq!(record(members, Mode::Structured).key, key);
        }
    }

    #[test]
    fn binary_mode_has_attributes_as_headers_in_utf8() {
        let record =
            record(r#","session":"é 1","seq":5000000000,"acme":true,"data":{"z":1.0}"#, Mode::Binary);
        let headers: Vec<(String, String)> = (0..record.headers.count())
            .map(|n| record.headers.get(n))
            .map(|h| (h.key.to_owned(), String::from_utf8(h.value.unwrap().to_vec()).unwrap()))
            .collect();
        for (name, value) in [
            ("ce_specversion", "1.0"),
            ("ce_type", "dev.aep.run.started"),
            ("ce_aepsessionid", "é 1"),
            ("ce_aepsequence", "5000000000"),
            ("ce_acme", "true"),
            ("content-type", "application/json"),
        ] {
            assert!(headers.contains(&(name.to_owned(), value.to_owned())), "{name} in {headers:?}");
        }
        assert!(!headers.iter().any(|(name, _)| name == "ce_datacontenttype"));
        assert_eq!(record.payload, br#"{"z":1.0}"#);
    }

    #[test]
    fn records_of_a_key_keep_their_order() {
        let records = [("a", 1), ("b", 1), ("a", 2)].map(|(session, seq)| {
            record(&format!(r#","session":"{session}","seq":{seq}"#), Mode::Structured)
        });
        let groups: Vec<Vec<*const Record>> = by_key(&records)
            .into_iter()
            .map(|group| group.into_iter().map(std::ptr::from_ref).collect())
            .collect();
        assert_eq!(groups, [vec![&raw const records[0], &raw const records[2]], vec![&raw const records[1]]]);
    }
}
