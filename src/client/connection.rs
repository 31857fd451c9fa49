//! One request: from opening it to the end of its stream.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, RETRY_AFTER,
};
use reqwest::{Certificate, Client, Response, Url};
use tokio::time::{Instant, sleep_until, timeout};

use super::config::{ConfigError, Secret, SubscribeConfig};
use super::sse::{Item, Parser};
use super::status::Cause;

/// How long a connection may take to be made, its TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the head of an answer may take.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an unused connection is kept: less than common servers and balancers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often a silent connection is checked below the stream's own heartbeat.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// The longest wait that a server can ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(5);
/// How much of an error's text goes to the log, in characters.
const LONGEST_ERROR: usize = 200;

/// Why a request has no stream.
#[derive(Debug)]
pub(super) enum Failure {
    /// This request isn't taken; one that asks for less may be.
    Refused(u16),
    /// Nothing that can be asked for changes it.
    Failed {
        cause: Cause,
        /// How long the server wants to be left alone.
        retry_after: Option<Duration>,
        /// For the log.
        detail: String,
    },
}

/// A request under way. Boxed, so that it outlives the call that started it.
pub(super) type Opening = Pin<Box<dyn Future<Output = Result<Wire, Failure>> + Send>>;

/// The HTTP client of a subscription.
pub(super) struct Http {
    client: Client,
    token: Option<Secret>,
    longest_event: usize,
    heartbeat: Duration,
}

impl Http {
    pub(super) fn new(config: &SubscribeConfig) -> Result<Self, ConfigError> {
        // An error only means that a provider is installed already.
        drop(rustls::crypto::ring::default_provider().install_default());
        let mut client = Client::builder()
            .user_agent(concat!("aep-sidecar/", env!("CARGO_PKG_VERSION")))
            // A redirect would take the token along.
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .tcp_keepalive(KEEP_ALIVE)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .http2_keep_alive_timeout(KEEP_ALIVE);
        if let Some(pem) = &config.ca {
            let trusted = Certificate::from_pem_bundle(pem).ok().filter(|trusted| !trusted.is_empty());
            client = client.tls_certs_only(trusted.ok_or(ConfigError::Certificates)?);
        } else if config.relay.scheme() == "http" {
            // Root certificates aren't needed, and may not be there.
            client = client.tls_certs_only([]);
        }
        let client = client.build().map_err(|error| ConfigError::Client(error.without_url()))?;
        let token = config.token.clone();
        Ok(Self { client, token, longest_event: config.longest_event, heartbeat: config.heartbeat })
    }

    /// Starts a request.
    pub(super) fn open(&self, url: Url) -> Opening {
        let mut request = self.client.get(url).header(ACCEPT, "text/event-stream");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token.header());
        }
        let (longest, heartbeat) = (self.longest_event, self.heartbeat);
        Box::pin(async move {
            match timeout(HEAD_TIMEOUT, request.send()).await {
                Ok(Ok(response)) => judge(response).map(|response| Wire::new(response, longest, heartbeat)),
                Ok(Err(error)) => Err(unanswered(&error)),
                Err(_) => Err(failed(Cause::Silent, None, "no answer")),
            }
        })
    }
}

fn failed(cause: Cause, retry_after: Option<Duration>, detail: impl fmt::Display) -> Failure {
    Failure::Failed { cause, retry_after, detail: detail.to_string() }
}

fn judge(response: Response) -> Result<Response, Failure> {
    let status = response.status().as_u16();
    let retry_after = header(response.headers(), RETRY_AFTER)
        .and_then(|text| text.parse().ok())
        .map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    let cause = match status {
        200 if is_event_stream(response.headers()) => return Ok(response),
        401 | 403 | 407 | 511 => Cause::Unauthorized,
        404 | 405 | 410 => Cause::NotFound,
        408 | 421 | 425 | 429 => Cause::Unavailable,
        400..=499 => return Err(Failure::Refused(status)),
        500..=599 => Cause::Unavailable,
        _ => Cause::NotAStream,
    };
    Err(failed(cause, retry_after, status))
}

fn header(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim)
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let media_type = header(headers, CONTENT_TYPE).and_then(|text| text.split(';').next());
    let encoding = header(headers, CONTENT_ENCODING).unwrap_or("identity");
    media_type.is_some_and(|media_type| media_type.trim().eq_ignore_ascii_case("text/event-stream"))
        && encoding.eq_ignore_ascii_case("identity")
}

fn unanswered(error: &reqwest::Error) -> Failure {
    let untrusted = causes(error).any(|cause| {
        matches!(cause.downcast_ref::<rustls::Error>(), Some(rustls::Error::InvalidCertificate(_)))
    });
    let cause = match (untrusted, error.is_connect(), error.is_timeout()) {
        (true, ..) => Cause::Untrusted,
        (false, true, _) => Cause::Unreachable,
        (false, false, true) => Cause::Silent,
        (false, false, false) => Cause::Broken,
    };
    failed(cause, None, root(error))
}

/// What an error comes from, outermost first. No URL stands in it.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |&error| match error.downcast_ref::<io::Error>() {
        // An I/O error's source is that of the error it wraps, not the wrapped error.
        Some(io) => io.get_ref().map(|wrapped| wrapped as &(dyn Error + 'static)),
        None => error.source(),
    })
}

/// The innermost cause of an error, shortened.
fn root(error: &reqwest::Error) -> String {
    let text = causes(error).last().map(ToString::to_string).unwrap_or_default();
    text.chars().flat_map(char::escape_debug).take(LONGEST_ERROR).collect()
}

/// An open stream.
#[derive(Debug)]
pub(super) struct Wire {
    response: Response,
    parser: Parser,
    /// Bytes at hand, not yet read.
    input: Bytes,
    heartbeat: Duration,
    /// When the silence has lasted too long.
    deadline: Instant,
}

/// How a stream ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) cause: Cause,
    /// For the log.
    pub(super) detail: String,
}

impl Wire {
    fn new(response: Response, longest: usize, heartbeat: Duration) -> Self {
        let mut wire = Self {
            response,
            parser: Parser::new(longest),
            input: Bytes::new(),
            heartbeat,
            deadline: Instant::now(),
        };
        wire.heard();
        wire
    }

    fn heard(&mut self) {
        let now = Instant::now();
        // A heartbeat past the clock's end never comes.
        self.deadline =
            now.checked_add(self.heartbeat).unwrap_or_else(|| now + Duration::from_hours(24 * 365));
    }

    /// The silence of the last `away` was the reader's own.
    pub(super) fn forgive(&mut self, away: Duration) {
        self.deadline = self.deadline.checked_add(away).unwrap_or(self.deadline);
    }

    /// The next thing at hand.
    pub(super) fn item(&mut self) -> Option<Item<'_>> {
        self.parser.next(&mut self.input)
    }

    /// Waits until more is at hand, or for the end.
    ///
    /// # Cancel safety
    /// Cancel safe: what arrived stays.
    pub(super) async fn more(&mut self) -> Result<(), End> {
        let chunk = tokio::select! {
            biased;
            chunk = self.response.chunk() => chunk,
            () = sleep_until(self.deadline) => {
                return Err(End { cause: Cause::Silent, detail: "past the heartbeat".to_owned() });
            }
        };
        match chunk {
            Ok(Some(chunk)) => {
                self.heard();
                self.input = chunk;
                Ok(())
            }
            Ok(None) => Err(End { cause: Cause::Ended, detail: String::new() }),
            Err(error) => Err(End { cause: Cause::Broken, detail: root(&error) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, headers: &[(&str, &str)]) -> Result<Response, Failure> {
        let mut builder = http::Response::builder().status(status);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        judge(builder.body("").unwrap().into())
    }

    #[test]
    fn only_an_event_stream_is_a_stream() {
        for media_type in ["text/event-stream", "Text/Event-Stream; charset=utf-8"] {
            assert!(answer(200, &[("content-type", media_type)]).is_ok());
        }
        let not_a_stream = |status, headers: &[(&str, &str)]| {
            matches!(answer(status, headers), Err(Failure::Failed { cause: Cause::NotAStream, .. }))
        };
        assert!(not_a_stream(200, &[]));
        assert!(not_a_stream(200, &[("content-type", "text/html")]));
        assert!(not_a_stream(200, &[("content-type", "text/event-stream"), ("content-encoding", "gzip")]));
        for status in [204, 301, 302, 307, 308] {
            assert!(not_a_stream(status, &[("content-type", "text/event-stream")]), "{status}");
        }
    }

    #[test]
    fn every_status_has_its_meaning() {
        for status in [400, 406, 413, 414, 422, 431] {
            assert!(matches!(answer(status, &[]), Err(Failure::Refused(_))), "{status}");
        }
        for (status, expected) in [
            (401, Cause::Unauthorized),
            (403, Cause::Unauthorized),
            (404, Cause::NotFound),
            (405, Cause::NotFound),
            (429, Cause::Unavailable),
            (500, Cause::Unavailable),
            (503, Cause::Unavailable),
        ] {
            let Err(Failure::Failed { cause, .. }) = answer(status, &[]) else { panic!("{status}") };
            assert_eq!(cause, expected, "{status}");
        }
    }

    #[test]
    fn a_wait_is_bounded() {
        for (text, expected) in [("7", Some(7)), ("999999", Some(300)), ("soon", None)] {
            let Err(Failure::Failed { retry_after, .. }) = answer(503, &[("retry-after", text)]) else {
                panic!("{text}")
            };
            assert_eq!(retry_after, expected.map(Duration::from_secs), "{text}");
        }
    }
}
