//! What it means that a server refuses a connection or a message, or ends a connection: the table at the head of
//! [`super`].

use rumqttc::{
    ConnectReturnCode, ConnectionError, DisconnectReasonCode, Error as MqttError, PubAckReason, StateError,
};

use super::super::dial::lost;
use super::super::{DeliveryError, Reason, sanitised};

/// The reason code for a packet that is too large, which some servers put where the specification doesn't list it.
const PACKET_TOO_LARGE: u8 = 0x95;

/// Why an attempt failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    /// As the export is told.
    pub(super) error: DeliveryError,
    /// Whether another attempt of those under way is to blame, perhaps.
    pub(super) suspicious: bool,
}

impl From<DeliveryError> for Failure {
    fn from(error: DeliveryError) -> Self {
        Self { error, suspicious: false }
    }
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// For everything that was under way.
    For(DeliveryError),
    /// Because of one message, which the server will never take.
    Verdict(DeliveryError),
}

impl End {
    /// What an attempt fails with: the verdict concerns it when there was no other.
    pub(super) fn failure(self, alone: bool) -> Failure {
        match self {
            Self::For(error) => error.into(),
            Self::Verdict(error) if alone => error.into(),
            Self::Verdict(_) => Failure { error: transient(Reason::ConnectionLost), suspicious: true },
        }
    }
}

pub(super) fn transient(reason: Reason) -> DeliveryError {
    DeliveryError::Transient { reason, retry_after: None }
}

fn misconfigured(reason: Reason) -> DeliveryError {
    DeliveryError::Misconfigured { reason }
}

pub(super) fn refused(reason: Reason, detail: &str) -> DeliveryError {
    DeliveryError::Rejected { reason, status: None, detail: sanitised(detail) }
}

pub(super) fn too_large(detail: &str) -> DeliveryError {
    refused(Reason::TooLarge, detail)
}

/// Success when the server has taken the message.
pub(super) fn acknowledgement(reason: PubAckReason) -> Result<(), DeliveryError> {
    Err(match reason {
        PubAckReason::Success | PubAckReason::NoMatchingSubscribers => return Ok(()),
        PubAckReason::NotAuthorized => misconfigured(Reason::Unauthorized),
        PubAckReason::TopicNameInvalid => misconfigured(Reason::NotFound),
        PubAckReason::PayloadFormatInvalid => refused(Reason::Protocol, "payload format invalid (0x99)"),
        PubAckReason::QuotaExceeded
        | PubAckReason::UnspecifiedError
        | PubAckReason::ImplementationSpecificError => transient(Reason::Unavailable),
        // Of the connection's, not the message's.
        PubAckReason::PacketIdentifierInUse => transient(Reason::ConnectionLost),
    })
}

/// Why a connection can't be made.
pub(super) fn connecting(error: &ConnectionError) -> DeliveryError {
    match error {
        ConnectionError::ConnectionRefused(code)
        | ConnectionError::MqttState(StateError::ConnFail { reason: code }) => refusal(*code),
        ConnectionError::Timeout(_) => transient(Reason::ConnectTimeout),
        ConnectionError::Io(error) | ConnectionError::MqttState(StateError::Io(error)) => lost(error),
        ConnectionError::MqttState(StateError::ServerDisconnect { reason_code, .. }) => {
            match disconnected(*reason_code) {
                End::For(DeliveryError::Transient { reason: Reason::ConnectionLost, .. }) => {
                    transient(Reason::Unreachable)
                }
                End::For(error) => error,
                End::Verdict(_) => misconfigured(Reason::Protocol),
            }
        }
        ConnectionError::MqttState(StateError::ConnectionAborted | StateError::AwaitPingResp) => {
            transient(Reason::Unreachable)
        }
        // The other side speaks something else.
        _ => misconfigured(Reason::Protocol),
    }
}

/// Why a connection that was made has ended.
pub(super) fn ended(error: &ConnectionError) -> End {
    match error {
        ConnectionError::MqttState(StateError::ServerDisconnect { reason_code, .. }) => {
            disconnected(*reason_code)
        }
        ConnectionError::MqttState(StateError::Deserialization(MqttError::InvalidConnectReturnCode(
            PACKET_TOO_LARGE,
        ))) => End::Verdict(too_large("packet too large (0x95)")),
        _ => End::For(transient(Reason::ConnectionLost)),
    }
}

fn disconnected(code: DisconnectReasonCode) -> End {
    use DisconnectReasonCode as Code;
    End::For(match code {
        Code::PacketTooLarge => return End::Verdict(too_large("packet too large (0x95)")),
        Code::PayloadFormatInvalid => {
            return End::Verdict(refused(Reason::Protocol, "payload format invalid (0x99)"));
        }
        Code::NotAuthorized => misconfigured(Reason::Unauthorized),
        Code::TopicNameInvalid => misconfigured(Reason::NotFound),
        Code::UseAnotherServer | Code::ServerMoved => misconfigured(Reason::Redirect),
        Code::MalformedPacket | Code::ProtocolError | Code::QoSNotSupported => {
            misconfigured(Reason::Protocol)
        }
        Code::ServerBusy
        | Code::QuotaExceeded
        | Code::MessageRateTooHigh
        | Code::ConnectionRateExceeded
        | Code::ImplementationSpecificError => transient(Reason::Unavailable),
        _ => transient(Reason::ConnectionLost),
    })
}

fn refusal(code: ConnectReturnCode) -> DeliveryError {
    use ConnectReturnCode as Code;
    match code {
        Code::BadUserNamePassword | Code::NotAuthorized | Code::Banned | Code::BadAuthenticationMethod => {
            misconfigured(Reason::Unauthorized)
        }
        Code::ServiceUnavailable
        | Code::ServerUnavailable
        | Code::ServerBusy
        | Code::QuotaExceeded
        | Code::ConnectionRateExceeded
        | Code::UnspecifiedError
        | Code::ImplementationSpecificError => transient(Reason::Unavailable),
        Code::UseAnotherServer | Code::ServerMoved => misconfigured(Reason::Redirect),
        _ => misconfigured(Reason::Protocol),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_acknowledgement_has_its_verdict() {
        for (reason, verdict) in [
            (PubAckReason::Success, Ok(())),
            (PubAckReason::NoMatchingSubscribers, Ok(())),
            (PubAckReason::NotAuthorized, Err(misconfigured(Reason::Unauthorized))),
            (PubAckReason::TopicNameInvalid, Err(misconfigured(Reason::NotFound))),
            (PubAckReason::QuotaExceeded, Err(transient(Reason::Unavailable))),
            (
                PubAckReason::PayloadFormatInvalid,
                Err(refused(Reason::Protocol, "payload format invalid (0x99)")),
            ),
        ] {
            assert_eq!(acknowledgement(reason), verdict, "{reason:?}");
        }
    }

    #[test]
    fn a_verdict_concerns_who_is_alone() {
        let end = disconnected(DisconnectReasonCode::PacketTooLarge);
        assert_eq!(end.clone().failure(true), too_large("packet too large (0x95)").into());
        let other = Failure { error: transient(Reason::ConnectionLost), suspicious: true };
        assert_eq!(end.failure(false), other);
        let shutdown = disconnected(DisconnectReasonCode::ServerShuttingDown);
        assert_eq!(shutdown.failure(true), transient(Reason::ConnectionLost).into());
    }
}
