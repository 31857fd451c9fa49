//! What librdkafka says, and what is to be done about it.

use std::sync::Arc;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::watch;

use crate::export::sink::{DeliveryError, Reason, sanitised};

/// Why a broker can't be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) reason: Reason,
    /// Whether it stays until someone changes something.
    pub(super) lasts: bool,
}

/// What the brokers' connections said since a record was last delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Health {
    fault: Option<Fault>,
    /// Whether every broker was down at one time.
    all_down: bool,
    /// The producer will send nothing any more.
    fatal: bool,
}

impl Health {
    /// Whether there is no use in waiting for an answer. One broker of several is no reason: others may be right.
    pub(super) fn is_broken(&self) -> bool {
        self.fatal || self.all_down && self.fault.is_some_and(|fault| fault.lasts)
    }

    /// A record was delivered. Returns whether that changes anything.
    pub(super) fn delivered(&mut self) -> bool {
        let before = std::mem::replace(self, Self { fatal: self.fatal, ..Self::default() });
        before != *self
    }

    fn hears(&mut self, code: Code, text: &str) {
        match code {
            Code::AllBrokersDown => self.all_down = true,
            Code::Fatal => self.fatal = true,
            _ => self.fault = fault(code, text).or(self.fault),
        }
    }
}

/// What an error of a broker's connection says. librdkafka tells some apart in the text only.
fn fault(code: Code, text: &str) -> Option<Fault> {
    let passing = |reason| Some(Fault { reason, lasts: false });
    let lasting = |reason| Some(Fault { reason, lasts: true });
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    // With TLS 1.3 a server refuses the client's certificate when the client's handshake is over already.
    let certificate = ["certificate", "alert unknown ca"];
    match code {
        Code::Authentication | Code::SaslAuthenticationFailed | Code::UnsupportedSASLMechanism => {
            lasting(Reason::Unauthorized)
        }
        Code::SSL | Code::BrokerTransportFailure if has(&certificate) => lasting(Reason::Certificate),
        Code::SSL => passing(Reason::Tls),
        Code::Resolve => passing(Reason::Dns),
        Code::BrokerTransportFailure if has(&["Connection refused"]) => passing(Reason::Refused),
        Code::BrokerTransportFailure if has(&["setup timed out"]) => passing(Reason::ConnectTimeout),
        Code::BrokerTransportFailure if has(&["unreachable", "No route"]) => passing(Reason::Unreachable),
        Code::BrokerTransportFailure | Code::NetworkException => passing(Reason::ConnectionLost),
        _ => None,
    }
}

/// Listens to librdkafka. Its texts go to the debug log only; they name brokers, never credentials or records.
#[derive(Clone)]
pub(super) struct Watch(Arc<watch::Sender<Health>>);

impl Watch {
    pub(super) fn new(health: Arc<watch::Sender<Health>>) -> Self {
        Self(health)
    }
}

impl ClientContext for Watch {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, text: &str) {
        tracing::debug!(facility, text = sanitised(text), "librdkafka");
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, text: &str) {
        if let Some(code) = error.rdkafka_error_code() {
            tracing::debug!(?code, text = sanitised(text), "a broker's connection failed");
            self.0.send_modify(|health| health.hears(code, text));
        }
    }
}

/// How an attempt ended that didn't deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Try again.
    Transient(Reason),
    /// A verdict on the record.
    Rejected(Reason),
    /// A broker's verdict on a request, with others' records in it unless the record was alone.
    Suspected(Reason),
    /// It takes someone to change something.
    Misconfigured(Reason),
    /// No answer came: the connection's health says why.
    Unanswered,
}

impl Outcome {
    /// Which of several outcomes is that of all: the heaviest.
    pub(super) fn weight(outcome: &Result<(), Self>) -> u8 {
        match outcome {
            Ok(()) => 0,
            Err(Self::Rejected(_)) => 1,
            Err(Self::Suspected(_)) => 2,
            Err(Self::Transient(_)) => 3,
            Err(Self::Unanswered) => 4,
            Err(Self::Misconfigured(_)) => 5,
        }
    }

    /// Why a record wasn't taken into the producer's queue.
    pub(super) fn of_enqueueing(error: &KafkaError) -> Self {
        match error.rdkafka_error_code() {
            // librdkafka's own bound, applied to this record.
            Some(Code::MessageSizeTooLarge) => Self::Rejected(Reason::TooLarge),
            Some(code) => Self::of(code),
            None => Self::Misconfigured(Reason::Protocol),
        }
    }

    /// What became of a record in the producer's queue.
    pub(super) fn of_delivery(error: &KafkaError) -> Result<(), Self> {
        match error.rdkafka_error_code() {
            // The broker has it already, from a request whose answer was lost.
            Some(Code::DuplicateSequenceNumber) => Ok(()),
            Some(code) => Err(Self::of(code)),
            None => Err(Self::Misconfigured(Reason::Protocol)),
        }
    }

    /// The table at the head of [`super`].
    fn of(code: Code) -> Self {
        match code {
            Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => {
                Self::Suspected(Reason::TooLarge)
            }
            Code::InvalidRecord | Code::InvalidTimestamp => Self::Suspected(Reason::Invalid),
            Code::QueueFull | Code::ThrottlingQuotaExceeded => Self::Transient(Reason::Throttled),
            Code::MessageTimedOut
            | Code::OperationTimedOut
            | Code::TimedOutQueue
            | Code::RequestTimedOut
            | Code::BrokerTransportFailure
            | Code::NetworkException
            | Code::AllBrokersDown
            | Code::Resolve
            | Code::SSL
            | Code::BrokerDestroy
            | Code::DestroyBroker
            | Code::Fatal
            | Code::GaplessGuarantee
            | Code::Inconsistent
            | Code::Fenced => Self::Unanswered,
            // Another delivery has given the connection up.
            Code::PurgeQueue | Code::PurgeInflight => Self::Transient(Reason::ConnectionLost),
            Code::Unknown
            | Code::InvalidMessage
            | Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::BrokerNotAvailable
            | Code::ReplicaNotAvailable
            | Code::NotEnoughReplicas
            | Code::NotEnoughReplicasAfterAppend
            | Code::ISRInsufficient
            | Code::KafkaStorageError
            | Code::LogDirNotFound
            | Code::ReassignmentInProgress
            | Code::PreferredLeaderNotAvailable
            | Code::EligibleLeadersNotAvailable
            | Code::FencedLeaderEpoch
            | Code::UnknownLeaderEpoch
            | Code::StaleBrokerEpoch
            | Code::NotController
            | Code::ListenerNotFound
            | Code::OutOfOrderSequenceNumber
            | Code::InvalidProducerEpoch
            | Code::InvalidProducerIdMapping
            | Code::UnknownProducerId
            | Code::ProducerFenced => Self::Transient(Reason::Unavailable),
            Code::UnknownTopic
            | Code::UnknownTopicOrPartition
            | Code::UnknownTopicId
            | Code::UnknownPartition
            | Code::InvalidTopic => Self::Misconfigured(Reason::NotFound),
            Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::IllegalSASLState
            | Code::SecurityDisabled
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::TransactionalIdAuthorizationFailed
            | Code::DelegationTokenAuthDisabled
            | Code::DelegationTokenNotFound
            | Code::DelegationTokenAuthorizationFailed
            | Code::DelegationTokenExpired
            | Code::UnacceptableCredential => Self::Misconfigured(Reason::Unauthorized),
            // What isn't known to pass by itself pauses the sink, loudly; no event is thrown away.
            _ => Self::Misconfigured(Reason::Protocol),
        }
    }

    /// The outcome in the light of what the connection said, and whether the connection is of no more use.
    pub(super) fn settled(self, health: Health, fatal: Option<Code>) -> (DeliveryError, bool) {
        let transient = |reason| DeliveryError::Transient { reason, retry_after: None };
        let rejected = |reason: Reason| {
            let detail = match reason {
                Reason::TooLarge => "larger than message.max.bytes, or than the topic takes",
                _ => "the broker calls the record invalid",
            };
            DeliveryError::Rejected { reason, status: None, detail: detail.to_owned() }
        };
        if let Some(code) = fatal {
            // Some are a matter of permission, and would be back with the next producer.
            return match Self::of(code) {
                Self::Misconfigured(reason) => (DeliveryError::Misconfigured { reason }, true),
                _ => (transient(Reason::Unavailable), true),
            };
        }
        match (self, health.fault) {
            (Self::Transient(reason), _) => (transient(reason), false),
            (Self::Rejected(reason) | Self::Suspected(reason), _) => (rejected(reason), false),
            // Connections cache permissions, and librdkafka what it knows of the topic: the next probe starts anew.
            (Self::Misconfigured(reason), _) => (DeliveryError::Misconfigured { reason }, true),
            (Self::Unanswered, Some(Fault { reason, lasts: true })) => {
                (DeliveryError::Misconfigured { reason }, true)
            }
            (Self::Unanswered, Some(Fault { reason, lasts: false })) => (transient(reason), false),
            (Self::Unanswered, None) => (transient(Reason::Timeout), false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_broker_of_several_breaks_nothing() {
        let mut health = Health::default();
        health.hears(Code::Authentication, "");
        assert!(!health.is_broken());
        health.hears(Code::AllBrokersDown, "");
        assert!(health.is_broken());
        assert!(health.delivered() && !health.is_broken() && !health.delivered());
        health.hears(Code::BrokerTransportFailure, "Connect to ipv4#127.0.0.1:1 failed: Connection refused");
        health.hears(Code::AllBrokersDown, "");
        assert!(!health.is_broken(), "that passes");
        assert_eq!(health.fault, Some(Fault { reason: Reason::Refused, lasts: false }));
    }

    #[test]
    fn what_isnt_known_throws_no_event_away() {
        assert_eq!(Outcome::of(Code::InvalidGroupId), Outcome::Misconfigured(Reason::Protocol));
    }
}
