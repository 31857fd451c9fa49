//! CloudEvents over HTTP: one POST an event in structured mode, or one a batch.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};
use tokio::time::Instant;

use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions, Times, sanitised};
use crate::aep::cloudevents::{self, CloudEvent};
use crate::export::retry::{parse_retry_after, wall_clock};

/// How long a connection may take to be made, its TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an unused connection is kept: less than common servers and balancers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often an unused or silent connection is checked.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How much of an answer's body is read, in bytes.
const MAX_BODY: usize = 1024;
/// How long an answer's body is waited for once its head is there.
const BODY_TIMEOUT: Duration = Duration::from_secs(1);

/// Delivers to an HTTP endpoint. Redirects are never followed.
pub struct HttpSink {
    /// Guards the client that requests go through, which is replaced by a fresh one when it is too old.
    client: Mutex<Aging>,
    times: Times,
    mode: Mode,
    /// Without user name and password.
    url: Url,
    credentials: Option<(String, Option<String>)>,
    /// Whether the endpoint has answered before, so that a connection may have been kept open since.
    answered: AtomicBool,
}

/// A client with its connections, and since when it has been used.
struct Aging {
    client: Client,
    since: Instant,
}

impl fmt::Debug for HttpSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSink").finish_non_exhaustive()
    }
}

impl HttpSink {
    /// A sink to `url`. A user name and a password in the URL become basic authentication.
    ///
    /// # Errors
    /// When the client can't be built, for want of trusted root certificates for instance.
    pub fn new(mut url: Url, options: &SinkOptions) -> Result<Self, BuildError> {
        let (mode, times) = (options.mode, options.times);
        let credentials = (!url.username().is_empty() || url.password().is_some())
            .then(|| (decoded(url.username()), url.password().map(decoded)));
        if url.set_username("").and(url.set_password(None)).is_err() {
            // Only a URL without a host has no place for them, and a target has one.
            tracing::error!("the sink's URL takes no credentials");
        }
        let client = client(&url, times.attempt).map_err(BuildError::Http)?;
        let client = Mutex::new(Aging { client, since: Instant::now() });
        Ok(Self { client, times, mode, url, credentials, answered: AtomicBool::new(false) })
    }

    /// The client that a request goes through. Requests under way on an old one's connections go on.
    fn client(&self) -> Client {
        let mut aging = self.client.lock();
        if aging.since.elapsed() >= self.times.connection {
            // It could be built once; should it fail now, old connections are better than none.
            if let Ok(fresh) = client(&self.url, self.times.attempt) {
                *aging = Aging { client: fresh, since: Instant::now() };
            }
        }
        aging.client.clone()
    }

    async fn post(&self, body: Bytes) -> Result<Response, reqwest::Error> {
        let content_type = match self.mode {
            Mode::Structured | Mode::Binary => "application/cloudevents+json; charset=UTF-8",
            Mode::Batch => "application/cloudevents-batch+json; charset=UTF-8",
        };
        let mut request = self
            .client()
            .post(self.url.clone())
            .body(body)
            .header(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some((user, password)) = &self.credentials {
            request = request.basic_auth(user, password.as_deref());
        }
        request.send().await
    }

    fn body(&self, delivery: &Delivery) -> Result<Vec<u8>, DeliveryError> {
        let mut mapped = Vec::with_capacity(delivery.events.len());
        for event in &delivery.events {
            mapped.push(CloudEvent::of(event)?);
        }
        match (self.mode, mapped.as_slice()) {
            (Mode::Structured | Mode::Binary, [one]) => Ok(one.structured()),
            (Mode::Batch, all) => Ok(cloudevents::batch(all)),
            // Sinks in this mode are given one at a time.
            (Mode::Structured | Mode::Binary, _) => Err(DeliveryError::Rejected {
                reason: Reason::TooLarge,
                status: None,
                detail: "structured mode holds one event".to_owned(),
            }),
        }
    }
}

/// A client without connections yet.
fn client(url: &Url, timeout: Duration) -> Result<Client, reqwest::Error> {
    // An error only means that a provider is installed already.
    drop(rustls::crypto::ring::default_provider().install_default());
    let mut client = Client::builder()
        .user_agent(concat!("aep-sidecar/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(timeout)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .tcp_keepalive(KEEP_ALIVE)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .http2_keep_alive_timeout(KEEP_ALIVE)
        .dns_resolver(SystemResolver);
    if url.scheme() == "http" {
        // Root certificates aren't needed, and may not be there.
        client = client.tls_certs_only([]);
    }
    client.build().map_err(reqwest::Error::without_url)
}

impl Sink for HttpSink {
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let body = Bytes::from(self.body(delivery)?);
        let mut answer = self.post(body.clone()).await;
        if let Err(error) = &answer
            && failure(error) == Failure::Transient(Reason::ConnectionLost)
            && self.answered.load(Ordering::Relaxed)
        {
            // Perhaps a connection that was kept open had gone stale: one more attempt is free.
            answer = self.post(body).await;
        }
        match answer {
            Ok(response) => {
                self.answered.store(true, Ordering::Relaxed);
                judge(response).await
            }
            Err(error) => Err(failure(&error).into()),
        }
    }
}

/// What a status says about the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Delivered,
    Rejected(Reason),
    Misconfigured(Reason),
    Transient(Reason),
}

/// The table at the head of [`super`].
fn verdict(status: u16) -> Verdict {
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

async fn judge(response: Response) -> Result<(), DeliveryError> {
    let status: StatusCode = response.status();
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| parse_retry_after(value, wall_clock()));
    // Also when the body isn't wanted: a connection is used again only once its body has been read.
    let detail = body(response).await;
    match verdict(status.as_u16()) {
        Verdict::Delivered => Ok(()),
        Verdict::Rejected(reason) => {
            Err(DeliveryError::Rejected { reason, status: Some(status.as_u16()), detail })
        }
        Verdict::Misconfigured(reason) => Err(DeliveryError::Misconfigured { reason }),
        Verdict::Transient(reason) => Err(DeliveryError::Transient { reason, retry_after }),
    }
}

/// The start of the body. One that ends early, never comes or never ends is cut.
async fn body(mut response: Response) -> String {
    let mut body = Vec::new();
    let read = async {
        while body.len() < MAX_BODY
            && let Ok(Some(chunk)) = response.chunk().await
        {
            body.extend(chunk.iter().take(MAX_BODY.saturating_sub(body.len())));
        }
    };
    // When the time is over, what came until then is the body.
    drop(tokio::time::timeout(BODY_TIMEOUT, read).await);
    sanitised(&String::from_utf8_lossy(&body))
}

/// What an attempt without an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    Transient(Reason),
    Misconfigured(Reason),
}

impl From<Failure> for DeliveryError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Transient(reason) => Self::Transient { reason, retry_after: None },
            Failure::Misconfigured(reason) => Self::Misconfigured { reason },
        }
    }
}

fn failure(error: &reqwest::Error) -> Failure {
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
pub(super) enum Phase {
    ConnectTimeout,
    Connect,
    Timeout,
    Exchange,
}

pub(super) fn failure_in(phase: Phase, error: &(dyn Error + 'static)) -> Failure {
    let (mut refused, mut unreachable, mut lost) = (false, false, false);
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if current.is::<UnknownHost>() {
            return Failure::Transient(Reason::Dns);
        }
        if let Some(tls) = current.downcast_ref::<rustls::Error>() {
            return tls_failure(tls);
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

/// Resolves with the system's resolver, at every new connection, with an error that can be told.
struct SystemResolver;

#[derive(Debug, thiserror::Error)]
#[error("the host's name can't be resolved")]
struct UnknownHost(#[source] io::Error);

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            match tokio::net::lookup_host((name.as_str(), 0)).await {
                Ok(found) => Ok(Box::new(found.collect::<Vec<_>>().into_iter()) as Addrs),
                Err(error) => Err(Box::new(UnknownHost(error)).into()),
            }
        })
    }
}

/// A part of a URL, its percent-encoding undone.
fn decoded(part: &str) -> String {
    percent_encoding::percent_decode_str(part).decode_utf8_lossy().into_owned()
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
    fn credentials_leave_the_url() {
        let url = Url::parse("http://us%40er:hunter2@h/p?q").unwrap();
        let sink = HttpSink::new(url, &SinkOptions::default()).unwrap();
        assert_eq!(sink.url.as_str(), "http://h/p?q");
        assert_eq!(sink.credentials, Some(("us@er".to_owned(), Some("hunter2".to_owned()))));
        assert!(!format!("{sink:?}").contains("hunter2"));
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
