//! What can be set of a sink beside where it is.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;

use super::secret::Secret;
use crate::aep::cloudevents::Overrides;

/// What can be set of a sink beside where it is. Each sink says what it uses; what it doesn't is ignored, but for
/// [`SinkOptions::own`], whose unknown names are errors.
#[derive(Clone, Default)]
pub struct SinkOptions {
    /// How events are written.
    pub mode: Mode,
    /// How long it waits and keeps.
    pub times: Times,
    /// Who it says it is.
    pub credentials: Credentials,
    /// Whom it trusts.
    pub tls: Tls,
    /// What only HTTP sinks know.
    pub web: Web,
    /// Options of the one protocol, by name: lower case, with dots.
    pub own: BTreeMap<String, String>,
}

impl fmt::Debug for SinkOptions {
    /// Of the protocol's own options the names: a value may be a secret, the password of a key for instance.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, times, credentials, tls, web, own } = self;
        f.debug_struct("SinkOptions")
            .field("mode", mode)
            .field("times", times)
            .field("credentials", credentials)
            .field("tls", tls)
            .field("web", web)
            .field("own", &own.keys())
            .finish()
    }
}

/// How events are written to a sink that knows more than one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// One CloudEvent, attributes and data in one JSON object.
    #[default]
    Structured,
    /// Attributes as headers or properties, data as the body.
    Binary,
    /// A JSON array of structured CloudEvents.
    Batch,
}

/// How long a sink waits and keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Bounds one attempt as a whole.
    pub attempt: Duration,
    /// Requests use no connection that is older, so that a change of the name's addresses is seen.
    pub connection: Duration,
}

impl Default for Times {
    /// 30 s an attempt, 5 min a connection.
    fn default() -> Self {
        Self { attempt: Duration::from_secs(30), connection: Duration::from_mins(5) }
    }
}

/// Who a sink's client says it is.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// A bearer token.
    pub token: Option<Secret>,
    /// A user's name; what the URL says otherwise.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<Secret>,
}

/// Certificates, in PEM files that are read again when they change, where the protocol's client can do that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Whose certificates are trusted, instead of the system's.
    pub ca: Option<PathBuf>,
    /// The client's own certificate with its chain, and its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// What only HTTP sinks know.
#[derive(Debug, Clone, Default)]
pub struct Web {
    /// Headers of every request: a JSON object of names to texts.
    pub headers: Option<Secret>,
    /// Where bearer tokens are had from, instead of a fixed one.
    pub oauth: Option<OAuth>,
    /// What requests are signed with, as Standard Webhooks has it: secrets separated by spaces.
    pub signing: Option<Secret>,
    /// Whether the endpoint is asked for its consent before anything is sent to it.
    pub asks_consent: bool,
    /// Through which proxies it is reached.
    pub proxies: Proxies,
    /// Extension attributes of every CloudEvent.
    pub overrides: Overrides,
    /// Certificates as PEM text whose owners are trusted beside the others.
    pub also_trusted: Option<String>,
}

/// An OAuth 2.0 client that has tokens in its own name.
///
/// Spec: RFC 6749 §4.4.
#[derive(Debug, Clone)]
pub struct OAuth {
    /// The token endpoint.
    pub token_url: Endpoint,
    /// The client's name.
    pub client_id: String,
    /// The client's secret.
    pub client_secret: Secret,
    /// What the tokens are asked for; what the endpoint gives by itself without one.
    pub scope: Option<String>,
}

/// An `http://` or `https://` URL that shows neither user, password nor query.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint(Url);

impl Endpoint {
    /// Reads it; `None` when the text is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let url = Url::parse(text).ok()?;
        (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(Self(url))
    }

    /// The whole URL.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.0
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.0.origin().ascii_serialization(), self.0.path())
    }
}

/// Through which proxies what is reached. Nothing but what is said here counts.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// For `http://` URLs.
    pub http: Option<Url>,
    /// For `https://` URLs.
    pub https: Option<Url>,
    /// What is reached without one, separated by commas: `*`, names with all their subdomains, addresses, and networks
    /// such as `10.0.0.0/8`. Addresses and networks concern URLs that hold an address; no name is looked up for them.
    pub except: String,
}

impl Proxies {
    /// One for everything.
    #[must_use]
    pub fn all(url: Url) -> Self {
        Self { http: Some(url.clone()), https: Some(url), except: String::new() }
    }

    /// Reads a proxy's URL, which is `http://…` unless it says so; `None` when the text is none.
    #[must_use]
    pub fn url(text: &str) -> Option<Url> {
        let with_scheme = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let url = Url::parse(&with_scheme).ok()?;
        let known = matches!(url.scheme(), "http" | "https" | "socks4" | "socks4a" | "socks5" | "socks5h");
        (known && url.has_host()).then_some(url)
    }
}

impl fmt::Debug for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |url: &Option<Url>| url.as_ref().and_then(Url::host_str).map(str::to_owned);
        f.debug_struct("Proxies")
            .field("http", &shown(&self.http))
            .field("https", &shown(&self.https))
            .field("except", &self.except)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_shows_no_password() {
        let proxies = Proxies::all(Proxies::url("http://user:hunter2@proxy:3128").unwrap());
        let shown = format!("{proxies:?}");
        assert!(shown.contains("proxy") && !shown.contains("hunter2"), "{shown}");
        assert_eq!(Proxies::url("proxy:3128"), Proxies::url("http://proxy:3128"));
        assert!(Proxies::url("ftp://proxy").is_none() && Proxies::url("").is_none());
        let endpoint = Endpoint::parse("https://user:hunter2@h/token?key=hunter2").unwrap();
        assert_eq!(format!("{endpoint:?}"), "https://h/token");
        assert!(Endpoint::parse("h/token").is_none());
    }
}
