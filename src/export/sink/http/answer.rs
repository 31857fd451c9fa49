//! What an answer means, or that there is none: the table at the head of [`sink`](crate::export::sink).

use std::error::Error;
use std::io;
use std::time::Duration;

use reqwest::Response;
use reqwest::header::RETRY_AFTER;

use super::connections::UnknownHost;
use crate::export::retry::{parse_retry_after, wall_clock};
use crate::export::sink::{DeliveryError, Reason, sanitised};

/// How much of an answer's body is read for a dead letter, in bytes.
const MAX_BODY: usize = 1024;
/// How long an answer's body is waited for once its head is there.
const BODY_TIMEOUT: Duration = Duration::from_secs(1);

/// What the client says when a proxy wants to know who it is before it opens a tunnel.
const PROXY_ASKS: &str = "tunnel error: proxy authorization required";

/// What a status says about the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Delivered,
    Rejected(Reason),
    Misconfigured(Reason),
    Transient(Reason),
}

/// What the status means.
pub(super) fn verdict(status: u16) -> Verdict {
    match status {
        200..=299 => Verdict::Delivered,
        300..=399 => Verdict::Misconfigured(Reason::Redirect),
        413 => Verdict::Rejected(Reason::TooLarge),
        400 | 406 | 409 | 411 | 412 | 414 | 415 | 417 | 422 | 431 | 494 => {
            Verdict::Rejected(Reason::Status4xx)
        }
        401 | 402 | 403 | 407 | 511 => Verdict::Misconfigured(Reason::Unauthorized),
        404 | 410 => Verdict::Misconfigured(Reason::NotFound),
        408 | 425 => Verdict::Transient(Reason::Status4xx),
        429 => Verdict::Transient(Reason::Throttled),
        405 | 421 | 426 | 451 => Verdict::Misconfigured(Reason::Status4xx),
        400..=499 => Verdict::Misconfigured(Reason::Status4xx),
        501 | 505 => Verdict::Misconfigured(Reason::Status5xx),
        500..=599 => Verdict::Transient(Reason::Status5xx),
        0..=199 | 600..=u16::MAX => Verdict::Misconfigured(Reason::StatusOther),
    }
}

/// What an answer comes to. `compressed` tells whether the body that it answers was.
pub(super) async fn judge(response: Response, compressed: bool) -> Result<(), DeliveryError> {
    match verdict(response.status().as_u16()) {
        Verdict::Delivered => {
            // Also when it isn't wanted: a connection is used again only once its body has been read.
            drop(start_of_body(response, MAX_BODY).await);
            Ok(())
        }
        // Spec: RFC 9110 §15.5.16: the coding may be what is unsupported, and that is no event's fault.
        Verdict::Rejected(reason) if compressed && response.status().as_u16() == 415 => {
            Err(DeliveryError::Misconfigured { reason })
        }
        verdict => Err(judged(response, verdict).await),
    }
}

/// The error that an answer is.
pub(super) async fn judged(response: Response, verdict: Verdict) -> DeliveryError {
    let status = response.status().as_u16();
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| parse_retry_after(value, wall_clock()));
    let body = start_of_body(response, MAX_BODY).await;
    match verdict {
        Verdict::Rejected(reason) => DeliveryError::Rejected {
            reason,
            status: Some(status),
            detail: sanitised(&String::from_utf8_lossy(&body)),
        },
        Verdict::Misconfigured(reason) => DeliveryError::Misconfigured { reason },
        Verdict::Transient(reason) => DeliveryError::Transient { reason, retry_after },
        Verdict::Delivered => DeliveryError::Misconfigured { reason: Reason::StatusOther },
    }
}

/// The start of the body, in bytes. One that ends early, never comes or never ends is cut.
pub(super) async fn start_of_body(mut response: Response, most: usize) -> Vec<u8> {
    let mut body = Vec::new();
    let read = async {
        while body.len() < most
            && let Ok(Some(chunk)) = response.chunk().await
        {
            body.extend(chunk.iter().take(most.saturating_sub(body.len())));
        }
    };
    // When the time is over, what came until then is the body.
    drop(tokio::time::timeout(BODY_TIMEOUT, read).await);
    body
}

/// What an attempt without an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::export::sink) enum Failure {
    Transient(Reason),
    Misconfigured(Reason),
}

pub(super) fn failure(error: &reqwest::Error) -> Failure {
    let phase = match (error.is_timeout(), error.is_connect()) {
        (true, true) => Phase::ConnectTimeout,
        (true, false) => Phase::Timeout,
        (false, true) => Phase::Connect,
        (false, false) => Phase::Exchange,
    };
    failure_in(phase, error)
}

/// When an attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::export::sink) enum Phase {
    ConnectTimeout,
    Connect,
    Timeout,
    Exchange,
}

impl From<Failure> for DeliveryError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Transient(reason) => Self::Transient { reason, retry_after: None },
            Failure::Misconfigured(reason) => Self::Misconfigured { reason },
        }
    }
}

pub(in crate::export::sink) fn failure_in(phase: Phase, error: &(dyn Error + 'static)) -> Failure {
    let (mut refused, mut unreachable, mut lost) = (false, false, false);
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if current.is::<UnknownHost>() {
            return Failure::Transient(Reason::Dns);
        }
        if let Some(tls) = current.downcast_ref::<rustls::Error>() {
            return tls_failure(tls);
        }
        // The error's type can't be named from here, only what it says.
        if phase == Phase::Connect && current.to_string() == PROXY_ASKS {
            return Failure::Misconfigured(Reason::Unauthorized);
        }
        if let Some(h2) = current.downcast_ref::<h2::Error>() {
            lost |= h2.is_go_away() || h2.is_reset() || h2.is_io();
        }
        cause = current.source();
        if let Some(io) = current.downcast_ref::<io::Error>() {
            match io.kind() {
                io::ErrorKind::ConnectionRefused => refused = true,
                io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::AddrNotAvailable => unreachable = true,
                io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof => lost = true,
                _ => {}
            }
            // An I/O error's source is that of the error it wraps, not the wrapped error.
            cause = io.get_ref().map(|wrapped| wrapped as &(dyn Error + 'static));
        } else if let Some(http) = current.downcast_ref::<hyper::Error>() {
            lost |= http.is_incomplete_message() || http.is_canceled() || http.is_closed();
        }
    }
    Failure::Transient(match phase {
        Phase::ConnectTimeout => Reason::ConnectTimeout,
        Phase::Timeout => Reason::Timeout,
        Phase::Connect | Phase::Exchange if refused => Reason::Refused,
        Phase::Connect | Phase::Exchange if unreachable => Reason::Unreachable,
        // Closed during the TLS handshake, or by a proxy.
        Phase::Connect => Reason::Unreachable,
        Phase::Exchange if lost => Reason::ConnectionLost,
        Phase::Exchange => Reason::Protocol,
    })
}

fn tls_failure(error: &rustls::Error) -> Failure {
    use rustls::{AlertDescription as Alert, Error};
    match error {
        Error::InvalidCertificate(_)
        | Error::NoCertificatesPresented
        | Error::UnsupportedNameType
        | Error::InvalidCertRevocationList(_)
        | Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::CertificateRequired,
        ) => Failure::Misconfigured(Reason::Certificate),
        _ => Failure::Transient(Reason::Tls),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_verdict() {
        let is = |verdict_of: fn(Verdict) -> bool, statuses: &[u16]| {
            for status in statuses {
                assert!(verdict_of(verdict(*status)), "{status}: {:?}", verdict(*status));
            }
        };
        is(|v| v == Verdict::Delivered, &[200, 201, 202, 204, 299]);
        is(
            |v| matches!(v, Verdict::Rejected(_)),
            &[400, 406, 409, 411, 412, 413, 414, 415, 417, 422, 431, 494],
        );
        is(
            |v| matches!(v, Verdict::Misconfigured(_)),
            &[
                100, 199, 300, 301, 302, 304, 307, 308, 401, 402, 403, 404, 405, 407, 410, 416, 418, 421,
                423, 424, 426, 428, 451, 499, 501, 505, 600, 999,
            ],
        );
        is(|v| matches!(v, Verdict::Transient(_)), &[408, 425, 429, 500, 502, 503, 504, 507, 508, 520, 599]);
        assert_eq!(verdict(429), Verdict::Transient(Reason::Throttled));
    }

    #[test]
    fn a_failure_is_told_by_what_caused_it() {
        use rustls::{CertificateError, Error};
        let io = |kind| io::Error::from(kind);
        let tls = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let untrusted = tls(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        for (phase, error, expected) in [
            (Phase::Connect, io(io::ErrorKind::ConnectionRefused), Failure::Transient(Reason::Refused)),
            (Phase::Connect, io(io::ErrorKind::NetworkUnreachable), Failure::Transient(Reason::Unreachable)),
            (Phase::Connect, io(io::ErrorKind::UnexpectedEof), Failure::Transient(Reason::Unreachable)),
            (Phase::ConnectTimeout, io(io::ErrorKind::TimedOut), Failure::Transient(Reason::ConnectTimeout)),
            (Phase::Timeout, io(io::ErrorKind::TimedOut), Failure::Transient(Reason::Timeout)),
            (Phase::Exchange, io(io::ErrorKind::ConnectionReset), Failure::Transient(Reason::ConnectionLost)),
            (Phase::Exchange, io(io::ErrorKind::Other), Failure::Transient(Reason::Protocol)),
            (
                Phase::Connect,
                io::Error::other(UnknownHost(io(io::ErrorKind::Other))),
                Failure::Transient(Reason::Dns),
            ),
            // As the TLS layer wraps it: one I/O error within another.
            (Phase::Connect, io::Error::other(untrusted), Failure::Misconfigured(Reason::Certificate)),
            (Phase::Connect, tls(Error::DecryptError), Failure::Transient(Reason::Tls)),
        ] {
            assert_eq!(failure_in(phase, &error), expected, "{phase:?} {error:?}");
        }
    }

    #[test]
    fn certificate_failures_are_for_a_person() {
        use rustls::{AlertDescription, CertificateError, Error};
        for error in [
            Error::InvalidCertificate(CertificateError::Expired),
            Error::AlertReceived(AlertDescription::CertificateRequired),
        ] {
            assert_eq!(tls_failure(&error), Failure::Misconfigured(Reason::Certificate));
        }
        let other = Error::AlertReceived(AlertDescription::InternalError);
        assert_eq!(tls_failure(&other), Failure::Transient(Reason::Tls));
    }
}
