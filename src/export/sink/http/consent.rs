//! Asking an endpoint whether it wants events, and how many a minute.
//!
//! Spec: HTTP Web Hooks for Event Delivery 1.0.2 §4.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, Url};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::answer::{Verdict, failure, judged, verdict};
use super::own::Own;
use crate::export::sink::{DeliveryError, Reason};

/// Who asks, in the question and in every request after it.
pub(super) const ORIGIN: HeaderName = HeaderName::from_static("webhook-request-origin");
const RATE: HeaderName = HeaderName::from_static("webhook-request-rate");
const ALLOWED_ORIGIN: HeaderName = HeaderName::from_static("webhook-allowed-origin");
const ALLOWED_RATE: HeaderName = HeaderName::from_static("webhook-allowed-rate");
/// How long a consent is good for.
const LASTS: Duration = Duration::from_hours(1);
const MINUTE: Duration = Duration::from_mins(1);

/// An endpoint's consent, and the pace that it asked for.
pub(super) struct Consent {
    pub(super) origin: HeaderValue,
    rate: Option<NonZeroU32>,
    /// Until when it is good. Held while the question is asked, so that it is asked once.
    until: Mutex<Option<Instant>>,
    /// Set when an answer gave reason to ask again.
    doubted: AtomicBool,
    /// When the next request may go out; changed by each that does, and by each consent.
    pace: parking_lot::Mutex<Pace>,
}

struct Pace {
    /// Between two requests, where there is a limit.
    interval: Duration,
    next: Instant,
}

impl Consent {
    pub(super) fn new(own: &Own) -> Self {
        Self {
            origin: own.origin.clone(),
            rate: own.rate,
            until: Mutex::new(None),
            doubted: AtomicBool::new(false),
            pace: parking_lot::Mutex::new(Pace { interval: Duration::ZERO, next: Instant::now() }),
        }
    }

    /// An answer of the endpoint gives reason to ask again.
    pub(super) fn doubt(&self) {
        self.doubted.store(true, Ordering::Relaxed);
    }

    /// Asks, unless a consent is good still. Dropping the future leaves no trace.
    pub(super) async fn given(
        &self,
        client: &Client,
        url: &Url,
        headers: HeaderMap,
    ) -> Result<(), DeliveryError> {
        let mut until = self.until.lock().await;
        if until.is_some_and(|until| Instant::now() < until) && !self.doubted.load(Ordering::Relaxed) {
            return Ok(());
        }
        *until = None;
        let mut request =
            client.request(Method::OPTIONS, url.clone()).headers(headers).header(ORIGIN, self.origin.clone());
        if let Some(rate) = self.rate {
            request = request.header(RATE, HeaderValue::from(rate.get()));
        }
        let response = request.send().await.map_err(|error| DeliveryError::from(failure(&error)))?;
        let allowed = response.headers().get(ALLOWED_ORIGIN).map(HeaderValue::as_bytes);
        let consents =
            allowed.is_some_and(|value| value == b"*" || value.eq_ignore_ascii_case(self.origin.as_bytes()));
        let rate = response.headers().get(ALLOWED_RATE).and_then(|rate| rate.to_str().ok());
        let rate = rate.and_then(|rate| rate.trim().parse::<NonZeroU32>().ok());
        let verdict = verdict(response.status().as_u16());
        match verdict {
            Verdict::Transient(_) => return Err(judged(response, verdict).await),
            // No status is a consent, and none but these says more than that there is none.
            Verdict::Misconfigured(reason @ (Reason::Unauthorized | Reason::NotFound)) if !consents => {
                return Err(DeliveryError::Misconfigured { reason });
            }
            _ if !consents => return Err(DeliveryError::Misconfigured { reason: Reason::NoConsent }),
            _ => {}
        }
        let now = Instant::now();
        self.doubted.store(false, Ordering::Relaxed);
        *until = now.checked_add(LASTS);
        self.pace.lock().interval = rate.map_or(Duration::ZERO, |rate| MINUTE / rate.get());
        tracing::info!(rate = rate.map(NonZeroU32::get), "the sink consents to being sent events");
        Ok(())
    }

    /// Waits for the request's turn. A turn that isn't taken, the future having been dropped, is lost.
    pub(super) async fn turn(&self) {
        let at = {
            let mut pace = self.pace.lock();
            let at = pace.next.max(Instant::now());
            pace.next = at.checked_add(pace.interval).unwrap_or(at);
            at
        };
        tokio::time::sleep_until(at).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_keep_the_pace_that_was_asked_for() {
        let consent = Consent::new(&Own::read(&BTreeMap::new()).unwrap());
        let start = Instant::now();
        for _ in 0..5 {
            consent.turn().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "there is no limit");
        consent.pace.lock().interval = Duration::from_secs(1);
        for n in 0..5 {
            consent.turn().await;
            assert_eq!(start.elapsed(), Duration::from_secs(n));
        }
    }
}
