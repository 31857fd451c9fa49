//! What is asked of a relay, and with which patience.

use std::fmt;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderValue;

use super::request::LONGEST_FIXED;
use crate::aep::{Capture, Filter, FilterError};

/// A bearer token that can be sent and never printed.
#[derive(Clone)]
pub struct Secret(HeaderValue);

impl Secret {
    /// Takes a token, white space around it cut off.
    ///
    /// # Errors
    /// When it is empty or holds what an `Authorization` header can't carry.
    pub fn new(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(ConfigError::Token);
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {text}")).map_err(|_| ConfigError::Token)?;
        value.set_sensitive(true);
        Ok(Self(value))
    }

    pub(super) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A legal filter, as the text that goes over the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterText(Box<str>);

impl FilterText {
    /// Takes a filter.
    ///
    /// # Errors
    /// When [`Filter::parse`] refuses it.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        Filter::parse(text)?;
        Ok(Self(text.into()))
    }

    /// The filter as JSON.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether the whole history is read once after an outage, for the sessions that began in it.
///
/// A resume set can only name sessions that are known. What is known already is dropped as it is read, so that
/// the price is one pass over what the relay holds, not duplicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CatchUp {
    /// Never: what sessions sent that began during an outage isn't given.
    Off,
    /// After every outage, but not sooner than this after the pass before.
    AtMostEvery(Duration),
}

/// How long the next attempt is waited for: capped exponential back-off with full jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// The longest wait after the first failure; it doubles with every further one.
    pub initial: Duration,
    /// What it never exceeds.
    pub max: Duration,
}

impl Patience {
    /// A random wait between zero and the ceiling of the failure number `failure`, counted from 1.
    pub(super) fn delay(self, failure: u32, random: &mut fastrand::Rng) -> Duration {
        let doubled = self.initial.saturating_mul(2_u32.saturating_pow(failure.saturating_sub(1)));
        let ceiling = u64::try_from(doubled.min(self.max).as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(random.u64(0..=ceiling))
    }
}

/// What is asked of a relay, and with which patience.
#[derive(Debug, Clone)]
pub struct SubscribeConfig {
    /// Where the relay is, without `/stream`. A path is kept: the relay may stand behind a prefix.
    pub relay: Url,
    /// Shown to the relay as a bearer token; never in a URL.
    pub token: Option<Secret>,
    /// Which events; `None` wants all of them.
    pub filter: Option<FilterText>,
    /// The highest capture level to be shown.
    pub ceiling: Option<Capture>,
    /// How far below a session's highest position it is resumed, in `seq`, so that what arrived late below it
    /// is given too. Late events of an earlier epoch aren't covered.
    pub overlap: u64,
    /// The most sessions that one request resumes.
    pub max_resume: usize,
    /// How long a stream may be silent before it counts as dead. Servers break silence every 25 seconds.
    pub heartbeat: Duration,
    /// The wait between attempts.
    pub patience: Patience,
    /// Whether the history is read after an outage.
    pub catch_up: CatchUp,
    /// The longest event that is taken, in bytes; a longer one is skipped without being held.
    pub longest_event: usize,
    /// Certificates in PEM that are trusted instead of the system's.
    pub ca: Option<Vec<u8>>,
}

impl SubscribeConfig {
    /// Everything from the relay at `relay`, with the defaults: an overlap of 100, 500 sessions a request,
    /// 60 seconds of silence, waits from 200 ms to 30 s, a catch-up at most every 10 seconds, events up to
    /// 16 MiB.
    #[must_use]
    pub fn new(relay: Url) -> Self {
        Self {
            relay,
            token: None,
            filter: None,
            ceiling: None,
            overlap: 100,
            max_resume: 500,
            heartbeat: Duration::from_mins(1),
            patience: Patience { initial: Duration::from_millis(200), max: Duration::from_secs(30) },
            catch_up: CatchUp::AtMostEvery(Duration::from_secs(10)),
            longest_event: 16 << 20,
            ca: None,
        }
    }
}

/// Why a subscription can't be built.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The URL isn't one of a relay.
    #[error("the relay's URL must start with http:// or https:// and name a host")]
    Url,
    /// A secret where it would be logged by every hop.
    #[error("the relay's URL must hold no user name, password, query or fragment")]
    UrlParts,
    /// The token isn't one.
    #[error("the token must be printable ASCII without spaces, and not empty")]
    Token,
    /// No room would be left for positions.
    #[error("the URL and the filter must take at most {LONGEST_FIXED} bytes together once encoded")]
    TooLong,
    /// The certificates can't be read, or there are none.
    #[error("the certificates must be at least one, in PEM")]
    Certificates,
    /// The client can't be built, for want of trusted root certificates for instance.
    #[error("the HTTP client can't be built")]
    Client(#[source] reqwest::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_printed() {
        let mut config = SubscribeConfig::new("http://h".parse().unwrap());
        config.token = Some(Secret::new(" hunter2\n").unwrap());
        assert!(!format!("{config:?}").contains("hunter2"));
        assert!(!format!("{:?}", config.token.as_ref().unwrap().header()).contains("hunter2"));
        assert_eq!(config.token.unwrap().header().as_bytes(), b"Bearer hunter2");
    }

    #[test]
    fn what_no_header_carries_is_no_token() {
        for text in ["", " ", "a b", "a\nb", "é"] {
            assert!(matches!(Secret::new(text), Err(ConfigError::Token)), "{text:?}");
        }
    }

    #[test]
    fn waits_double_to_their_cap_and_never_overflow() {
        let patience = Patience { initial: Duration::from_millis(200), max: Duration::from_secs(30) };
        let mut random = fastrand::Rng::with_seed(1);
        for (failure, ceiling) in [(0, 200), (1, 200), (2, 400), (3, 800), (9, 30_000), (u32::MAX, 30_000)] {
            let longest = (0..500).map(|_| patience.delay(failure, &mut random)).max().unwrap();
            let ceiling = Duration::from_millis(ceiling);
            assert!(longest <= ceiling && longest > ceiling / 10 * 8, "{failure}: {longest:?}");
        }
        let endless = Patience { initial: Duration::MAX, max: Duration::MAX };
        assert!(endless.delay(u32::MAX, &mut random) <= Duration::MAX);
    }
}
