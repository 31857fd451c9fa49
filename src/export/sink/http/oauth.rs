//! Bearer tokens from an OAuth 2.0 token endpoint, by client credentials.
//!
//! A token is had before the first request and again shortly before it ends, by one request at a time, whoever needs
//! it. While the endpoint has none to give, an old one is used as long as it lasts.
//!
//! Spec: RFC 6749 §4.4 and §2.3.1.

use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response};
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::answer::{Failure, Verdict, failure, start_of_body, verdict};
use super::auth::{basic, sensitive};
use super::connections::Connections;
use super::own::{ClientAuth, Own};
use crate::export::retry::{parse_retry_after, wall_clock};
use crate::export::sink::options::OAuth;
use crate::export::sink::{DeliveryError, Reason, Secret};

/// How long before its end a token is replaced at the earliest.
const EARLY: Duration = Duration::from_secs(60);
/// How long a token is used whose end isn't told.
const UNTOLD: Duration = Duration::from_mins(5);
/// How long after a failed try an old token is used before the next try.
const PAUSE: Duration = Duration::from_secs(10);
/// The longest answer that is read, in bytes.
const LARGEST: usize = 64 << 10;
/// What a form's value shows as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Has tokens, and gives them out.
pub(super) struct TokenSource {
    client: OAuth,
    audience: Option<String>,
    by: ClientAuth,
    connections: Connections,
    /// Held while a token is asked for, so that one request does for everyone who waits.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    token: Option<Held>,
    /// When the last try failed, and why: an answer to everyone who was waiting by then.
    failed: Option<(Instant, DeliveryError)>,
}

struct Held {
    /// `Bearer …`.
    value: HeaderValue,
    replace_at: Instant,
    ends_at: Instant,
}

#[derive(Deserialize)]
struct Granted {
    access_token: String,
    #[serde(default)]
    token_type: Option<String>,
    /// Seconds; some endpoints write them as text.
    #[serde(default)]
    expires_in: Option<serde_json::Value>,
}

impl TokenSource {
    pub(super) fn new(client: OAuth, own: &Own, connections: Connections) -> Self {
        let audience = own.audience.clone();
        Self { client, audience, by: own.client_auth, connections, state: Mutex::default() }
    }

    /// A token's header value. Dropping the future leaves no trace.
    pub(super) async fn current(&self) -> Result<HeaderValue, DeliveryError> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        let now = Instant::now();
        if let Some(held) = &state.token
            && now < held.replace_at
        {
            return Ok(held.value.clone());
        }
        if let Some((at, error)) = &state.failed
            && *at >= asked
        {
            return Err(error.clone());
        }
        match self.ask(&self.connections.current()).await {
            Ok(held) => {
                let value = held.value.clone();
                *state = State { token: Some(held), failed: None };
                Ok(value)
            }
            Err(error) => {
                let now = Instant::now();
                if let Some(held) = &mut state.token
                    && now < held.ends_at
                {
                    tracing::warn!(reason = %error.reason(), "no new OAuth token can be had: the old one is used while it lasts");
                    held.replace_at = now.checked_add(PAUSE).unwrap_or(now).min(held.ends_at);
                    return Ok(held.value.clone());
                }
                state.failed = Some((now, error.clone()));
                Err(error)
            }
        }
    }

    /// The sink didn't accept a token: whoever comes next has another. Whether that may help.
    pub(super) async fn refused(&self, value: &HeaderValue) -> bool {
        let mut state = self.state.lock().await;
        if state.token.as_ref().is_some_and(|held| held.value == *value) {
            state.token = None;
        }
        true
    }

    async fn ask(&self, client: &Client) -> Result<Held, DeliveryError> {
        let (id, secret) = (&self.client.client_id, &self.client.client_secret);
        let mut form = vec![("grant_type", "client_credentials".to_owned())];
        form.extend(self.client.scope.clone().map(|scope| ("scope", scope)));
        form.extend(self.audience.clone().map(|audience| ("audience", audience)));
        let mut request = client
            .post(self.client.token_url.url().clone())
            .header(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"))
            .header(ACCEPT, HeaderValue::from_static("application/json"));
        match self.by {
            ClientAuth::Basic => {
                let secret = Secret::fixed(&encoded(&secret.current()));
                let value = basic(&encoded(id), Some(&secret));
                request = request.header(AUTHORIZATION, sensitive(&value).ok_or(REFUSED)?);
            }
            ClientAuth::Post => {
                form.push(("client_id", id.clone()));
                form.push(("client_secret", secret.current().to_string()));
            }
        }
        let form: Vec<String> =
            form.iter().map(|(name, value)| format!("{name}={}", encoded(value))).collect();
        match request.body(form.join("&")).send().await {
            Ok(response) => granted(response).await,
            Err(error) => Err(match failure(&error) {
                Failure::Transient(_) => {
                    DeliveryError::Transient { reason: Reason::TokenEndpoint, retry_after: None }
                }
                Failure::Misconfigured(reason) => DeliveryError::Misconfigured { reason },
            }),
        }
    }
}

/// The endpoint, or what it said, is none that gives tokens to this client.
const REFUSED: DeliveryError = DeliveryError::Misconfigured { reason: Reason::TokenRefused };

async fn granted(response: Response) -> Result<Held, DeliveryError> {
    let retry_after = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| parse_retry_after(value, wall_clock()));
    let asked = Instant::now();
    match verdict(response.status().as_u16()) {
        Verdict::Delivered => {}
        Verdict::Transient(_) => {
            return Err(DeliveryError::Transient { reason: Reason::TokenEndpoint, retry_after });
        }
        // A verdict on the request is one on the client: there is nothing else in it.
        Verdict::Rejected(_) | Verdict::Misconfigured(_) => return Err(REFUSED),
    }
    let body = start_of_body(response, LARGEST).await;
    let granted: Granted = serde_json::from_slice(&body).map_err(|_| REFUSED)?;
    if granted.token_type.is_some_and(|kind| !kind.eq_ignore_ascii_case("bearer")) {
        return Err(REFUSED);
    }
    let value = sensitive(&format!("Bearer {}", granted.access_token)).ok_or(REFUSED)?;
    let seconds = granted.expires_in.and_then(|seconds| {
        seconds.as_u64().or_else(|| seconds.as_str().and_then(|text| text.trim().parse().ok()))
    });
    /// Longer than any process runs, and short enough to compute with.
    const LONGEST: u64 = 10 * 365 * 24 * 60 * 60;
    let life = seconds.map_or(UNTOLD, |seconds| Duration::from_secs(seconds.min(LONGEST)));
    let after = |life| asked.checked_add(life).unwrap_or(asked);
    Ok(Held { value, replace_at: after(life.saturating_sub(EARLY.min(life / 5))), ends_at: after(life) })
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Response {
        http::Response::builder().status(status).body(body.to_owned()).unwrap().into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_is_replaced_shortly_before_its_end() {
        for (life, replaced, ends) in [
            ("3600", 3540, 3600),
            ("100", 80, 100),
            ("\"100\"", 80, 100),
            ("5", 4, 5),
            ("0", 0, 0),
            ("null", 240, 300),
        ] {
            let body = format!(r#"{{"access_token":"t","token_type":"Bearer","expires_in":{life}}}"#);
            let now = Instant::now();
            let held = granted(answer(200, &body)).await.unwrap();
            let seconds = |at: Instant| at.duration_since(now).as_secs();
            assert_eq!((seconds(held.replace_at), seconds(held.ends_at)), (replaced, ends), "{life}");
            assert!(held.value.is_sensitive());
        }
    }

    #[tokio::test]
    async fn what_gives_no_token_is_told_apart() {
        let transient = |retry_after| DeliveryError::Transient { reason: Reason::TokenEndpoint, retry_after };
        for (status, body, expected) in [
            (200, "{}", REFUSED),
            (200, "<html>", REFUSED),
            (200, r#"{"access_token":"a\nb"}"#, REFUSED),
            (200, r#"{"access_token":"t","token_type":"mac"}"#, REFUSED),
            (400, r#"{"error":"invalid_client"}"#, REFUSED),
            (401, "", REFUSED),
            (404, "", REFUSED),
            (302, "", REFUSED),
            (429, "", transient(None)),
            (500, "", transient(None)),
            (503, "", transient(None)),
        ] {
            let given = granted(answer(status, body)).await;
            assert_eq!(given.map(|_| ()), Err(expected), "{status} {body}");
        }
    }
}
