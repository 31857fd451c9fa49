//! What it means that a server closes a connection or a channel, returns or refuses a message: the table at the head of
//! [`super`].

use lapin::{Confirmation, Error, ErrorKind};

use super::super::dial::lost;
use super::super::http::{Phase, failure_in};
use super::super::{DeliveryError, Reason, sanitised};

/// What was under way when an error came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum During {
    /// Connecting and logging in.
    Connect,
    /// Publishing.
    Publish,
}

pub(super) fn too_large(detail: &str) -> DeliveryError {
    DeliveryError::Rejected { reason: Reason::TooLarge, status: None, detail: sanitised(detail) }
}

pub(super) fn transient(reason: Reason) -> DeliveryError {
    DeliveryError::Transient { reason, retry_after: None }
}

/// Success when the server has taken the message, and a queue of it.
pub(super) fn confirmation(confirmation: Confirmation) -> Result<(), DeliveryError> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => {
            Err(code(returned.reply_code, returned.reply_text.as_str()))
        }
        Confirmation::Nack(None) => Err(transient(Reason::Unavailable)),
        Confirmation::NotRequested => Err(DeliveryError::Misconfigured { reason: Reason::Protocol }),
    }
}

pub(super) fn failure(during: During, error: &Error) -> DeliveryError {
    match error.kind() {
        ErrorKind::ProtocolError(error) => code(error.get_id(), error.get_message().as_str()),
        ErrorKind::IOError(error) => match during {
            During::Connect => lost(error.as_ref()),
            During::Publish => match failure_in(Phase::Exchange, error.as_ref()).into() {
                // The connection is gone, whatever the library calls that.
                DeliveryError::Transient { .. } => transient(Reason::ConnectionLost),
                verdict => verdict,
            },
        },
        ErrorKind::ChannelsLimitReached => transient(Reason::Unavailable),
        ErrorKind::InvalidProtocolVersion(_)
        | ErrorKind::AuthProviderError(_)
        | ErrorKind::ParsingError(_)
        | ErrorKind::SerialisationError(_)
        | ErrorKind::NoDefaultRuntime => DeliveryError::Misconfigured { reason: Reason::Protocol },
        // The connection or the channel has ended meanwhile.
        _ => transient(match during {
            During::Connect => Reason::Unreachable,
            During::Publish => Reason::ConnectionLost,
        }),
    }
}

/// What a server's code means. Some mean several things, which only the text tells apart.
///
/// Spec: AMQP 0-9-1 §1.2.
fn code(code: u16, text: &str) -> DeliveryError {
    let misconfigured = |reason| DeliveryError::Misconfigured { reason };
    match code {
        // RabbitMQ calls it a failed precondition.
        311 => too_large(text),
        406 if text.contains("message size") => too_large("larger than the server's max_message_size"),
        // Of a message that was returned: no route, no consumers.
        312 | 313 | 402 | 404 => misconfigured(Reason::NotFound),
        320 => transient(Reason::ConnectionLost),
        403 => misconfigured(Reason::Unauthorized),
        // Of a virtual host.
        530 if text.contains("not found") => misconfigured(Reason::NotFound),
        530 if text.contains("limit") || text.contains("is down") => transient(Reason::Unavailable),
        530 => misconfigured(Reason::Unauthorized),
        405 | 506 | 541 => transient(Reason::Unavailable),
        _ => misconfigured(Reason::Protocol),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_verdict() {
        let misconfigured = |reason| DeliveryError::Misconfigured { reason };
        for (id, text, verdict) in [
            (311, "CONTENT_TOO_LARGE", too_large("CONTENT_TOO_LARGE")),
            (
                406,
                "PRECONDITION_FAILED - message size 9 is larger than configured max size 8",
                too_large("larger than the server's max_message_size"),
            ),
            (406, "PRECONDITION_FAILED - invalid expiration", misconfigured(Reason::Protocol)),
            (312, "NO_ROUTE", misconfigured(Reason::NotFound)),
            (404, "NOT_FOUND - no exchange 'e' in vhost '/'", misconfigured(Reason::NotFound)),
            (403, "ACCESS_REFUSED - access to exchange 'e' refused", misconfigured(Reason::Unauthorized)),
            (530, "NOT_ALLOWED - vhost v not found", misconfigured(Reason::NotFound)),
            (530, "NOT_ALLOWED - access to vhost 'v' refused", misconfigured(Reason::Unauthorized)),
            (
                530,
                "NOT_ALLOWED - access to vhost 'v' refused for user 'u': connection limit (1) is reached",
                transient(Reason::Unavailable),
            ),
            (320, "CONNECTION_FORCED - broker forced connection closure", transient(Reason::ConnectionLost)),
            (541, "INTERNAL_ERROR", transient(Reason::Unavailable)),
            (501, "FRAME_ERROR", misconfigured(Reason::Protocol)),
        ] {
            assert_eq!(code(id, text), verdict, "{text}");
        }
    }

    #[test]
    fn a_message_that_is_not_confirmed_is_no_success() {
        assert_eq!(confirmation(Confirmation::Ack(None)), Ok(()));
        assert_eq!(confirmation(Confirmation::Nack(None)), Err(transient(Reason::Unavailable)));
        assert!(confirmation(Confirmation::NotRequested).is_err());
    }
}
