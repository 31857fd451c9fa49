//! What a stream's answer means.

use serde::Deserialize;

use super::super::{DeliveryError, Reason, sanitised};

/// A stream's answer to a publication.
///
/// Spec: NATS JetStream wire API, `io.nats.jetstream.api.v1.pub_ack_response`.
#[derive(Deserialize)]
struct Answer {
    error: Option<Refusal>,
    stream: Option<String>,
}

#[derive(Deserialize)]
struct Refusal {
    /// After HTTP's.
    code: u16,
    /// Which one exactly; absent before server 2.7.
    #[serde(default)]
    err_code: u32,
    #[serde(default)]
    description: String,
}

/// Success when it says that the message is stored, now or before.
pub(super) fn answer(bytes: &[u8]) -> Result<(), DeliveryError> {
    match serde_json::from_slice(bytes) {
        Ok(Answer { error: Some(refusal), .. }) => Err(verdict(&refusal)),
        Ok(Answer { stream: Some(_), .. }) => Ok(()),
        // Someone else answers on that subject.
        Ok(_) | Err(_) => Err(DeliveryError::Misconfigured { reason: Reason::Protocol }),
    }
}

/// The table at the head of [`super`].
fn verdict(refusal: &Refusal) -> DeliveryError {
    match (refusal.err_code, refusal.code) {
        // Message or header larger than the stream takes.
        (10_054 | 10_097, _) | (_, 413) => refused(Reason::TooLarge, &refusal.description),
        // JetStream isn't enabled, for the account or at all; no such stream.
        (10_039 | 10_076 | 10_059, _) | (_, 404) => DeliveryError::Misconfigured { reason: Reason::NotFound },
        (_, 401 | 403) => DeliveryError::Misconfigured { reason: Reason::Unauthorized },
        // The account's resources are used up: as a full stream, for another code.
        (10_002, _) | (_, 408 | 429 | 500..=599) => {
            DeliveryError::Transient { reason: Reason::Unavailable, retry_after: None }
        }
        (_, 400..=499) => DeliveryError::Misconfigured { reason: Reason::Status4xx },
        _ => DeliveryError::Misconfigured { reason: Reason::StatusOther },
    }
}

/// A verdict about the event.
pub(super) fn refused(reason: Reason, detail: &str) -> DeliveryError {
    DeliveryError::Rejected { reason, status: None, detail: sanitised(detail) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_its_verdict() {
        let transient = |reason| Err(DeliveryError::Transient { reason, retry_after: None });
        let misconfigured = |reason| Err(DeliveryError::Misconfigured { reason });
        for (text, outcome) in [
            (r#"{"stream":"S","seq":7}"#, Ok(())),
            (r#"{"stream":"S","seq":7,"duplicate":true}"#, Ok(())),
            (
                r#"{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"stream":"S","seq":0}"#,
                transient(Reason::Unavailable),
            ),
            (r#"{"error":{"code":503,"err_code":10008}}"#, transient(Reason::Unavailable)),
            (r#"{"error":{"code":400,"err_code":10002}}"#, transient(Reason::Unavailable)),
            (
                r#"{"error":{"code":400,"err_code":10054,"description":"message\nsize"}}"#,
                Err(refused(Reason::TooLarge, "message size")),
            ),
            (r#"{"error":{"code":503,"err_code":10039}}"#, misconfigured(Reason::NotFound)),
            (r#"{"error":{"code":400,"err_code":10109}}"#, misconfigured(Reason::Status4xx)),
            (r#"{"error":{"code":301}}"#, misconfigured(Reason::StatusOther)),
            ("{}", misconfigured(Reason::Protocol)),
            ("hello", misconfigured(Reason::Protocol)),
        ] {
            assert_eq!(answer(text.as_bytes()), outcome, "{text}");
        }
    }
}
