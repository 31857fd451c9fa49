//! CloudEvents over HTTP: one POST an event in structured or binary mode, or one a batch.
//!
//! | question | file |
//! |---|---|
//! | what does an answer mean? | `answer` |
//! | what is in a request? | `content` |
//! | who is it from? | `auth`, `oauth` |
//! | how is it signed? | `signature` |
//! | does the endpoint want it, and how fast? | `consent` |
//! | through which connection does it go? | `connections` |
//! | what can be set? | `own`, and [`Web`](super::options::Web) |

mod answer;
mod auth;
mod connections;
mod consent;
mod content;
mod derived;
mod oauth;
mod own;
mod signature;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::header::HeaderMap;
use reqwest::{Response, StatusCode, Url};
use tokio::time::timeout;

use self::answer::{Failure, failure, judge};
#[cfg(any(feature = "amqp", feature = "mqtt", feature = "nats", feature = "redis"))]
pub(super) use self::answer::{Phase, failure_in};
use self::auth::Auth;
use self::connections::Connections;
use self::consent::Consent;
use self::content::Content;
use self::own::Own;
use self::signature::Signing;
use super::{BuildError, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions, Times};
use crate::aep::cloudevents::Overrides;
use crate::export::retry::wall_clock;

/// Delivers to an HTTP endpoint. Redirects are never followed.
pub struct HttpSink {
    connections: Connections,
    times: Times,
    mode: Mode,
    own: Own,
    overrides: Overrides,
    /// Without user name and password.
    url: Url,
    auth: Auth,
    signing: Option<Signing>,
    consent: Option<Consent>,
    /// Whether the endpoint has answered before, so that a connection may have been kept open since.
    answered: AtomicBool,
}

impl fmt::Debug for HttpSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpSink").finish_non_exhaustive()
    }
}

/// Every attempt with a delivery has these in common.
struct Request {
    content: Content,
    /// What a signature tells it by.
    id: String,
}

impl HttpSink {
    /// A sink to `url`. A user name and a password in the URL become basic authentication.
    ///
    /// # Errors
    /// When an option can't be used, or the client can't be built, for want of trusted root certificates for instance.
    pub fn new(mut url: Url, options: &SinkOptions) -> Result<Self, BuildError> {
        let own = Own::read(&options.own)?;
        let auth = Auth::new(&mut url, options, &own)?;
        let connections = Connections::new(&url, options, own.http2)?;
        Ok(Self {
            connections,
            times: options.times,
            mode: options.mode,
            overrides: options.web.overrides.clone(),
            auth,
            signing: options.web.signing.clone().map(Signing::new).transpose()?,
            consent: options.web.asks_consent.then(|| Consent::new(&own)),
            own,
            url,
            answered: AtomicBool::new(false),
        })
    }

    /// Waits until the endpoint consents, and it is the request's turn.
    async fn admission(&self) -> Result<(), DeliveryError> {
        let Some(consent) = &self.consent else { return Ok(()) };
        let asking = async {
            let headers = self.auth.current().await?;
            consent.given(&self.connections.current(), &self.url, headers).await
        };
        in_time(self.times, asking).await?;
        consent.turn().await;
        Ok(())
    }

    /// Sends it. A token that the endpoint doesn't accept is replaced once.
    async fn exchange(&self, request: &Request) -> Result<Response, DeliveryError> {
        let from = self.auth.current().await?;
        let response = self.post(request, &from).await?;
        if response.status() == StatusCode::UNAUTHORIZED && self.auth.refused(&from).await {
            let from = self.auth.current().await?;
            return self.post(request, &from).await;
        }
        Ok(response)
    }

    async fn post(&self, request: &Request, from: &HeaderMap) -> Result<Response, DeliveryError> {
        let mut answer = self.send(request, from).await;
        if let Err(error) = &answer
            && failure(error) == Failure::Transient(Reason::ConnectionLost)
            && self.answered.load(Ordering::Relaxed)
        {
            // Perhaps a connection that was kept open had gone stale: one more attempt is free.
            answer = self.send(request, from).await;
        }
        let response = answer.map_err(|error| DeliveryError::from(failure(&error)))?;
        self.answered.store(true, Ordering::Relaxed);
        Ok(response)
    }

    async fn send(&self, request: &Request, from: &HeaderMap) -> Result<Response, reqwest::Error> {
        let mut headers = request.content.headers.clone();
        headers.extend(from.clone());
        if let Some(consent) = &self.consent {
            headers.insert(consent::ORIGIN, consent.origin.clone());
        }
        let body = request.content.body.clone();
        if let Some(signing) = &self.signing {
            signing.sign(&request.id, wall_clock(), &body, &mut headers);
        }
        self.connections.current().post(self.url.clone()).headers(headers).body(body).send().await
    }
}

impl Sink for HttpSink {
    /// One request, and at most one more where a kept connection had gone stale or a token had ended. Waiting for the
    /// pace that the endpoint asked for doesn't count as part of the attempt.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let content = Content::of(delivery, self.mode, &self.own, &self.overrides).await?;
        let id = if self.signing.is_some() { signature::id(&delivery.events) } else { String::new() };
        let request = Request { content, id };
        self.admission().await?;
        let response = in_time(self.times, self.exchange(&request)).await?;
        let status = response.status();
        if let Some(consent) = &self.consent
            && status.is_client_error()
            && status != StatusCode::TOO_MANY_REQUESTS
        {
            consent.doubt();
        }
        // The head of an answer decides, however long its body takes.
        judge(response, self.own.compression.is_some()).await
    }
}

/// Bounds an attempt as a whole.
async fn in_time<T>(
    times: Times,
    attempt: impl Future<Output = Result<T, DeliveryError>>,
) -> Result<T, DeliveryError> {
    let late = DeliveryError::Transient { reason: Reason::Timeout, retry_after: None };
    timeout(times.attempt, attempt).await.unwrap_or(Err(late))
}
