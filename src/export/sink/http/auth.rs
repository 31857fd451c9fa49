//! Who a request says it is from.
//!
//! Of what is configured the first of these counts: an OAuth client, a token, a user in the URL, a user in variables.
//! Further headers come on top; one of them may be `authorization` where none of these is configured.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};

use super::connections::Connections;
use super::derived::Derived;
use super::oauth::TokenSource;
use super::own::Own;
use crate::export::sink::{BuildError, DeliveryError, Reason, Secret, SinkOptions};

/// Headers whose names only the sink itself may write.
const TAKEN: [&str; 12] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "webhook-id",
    "webhook-request-origin",
    "webhook-signature",
    "webhook-timestamp",
];

/// Who the requests are from.
pub(super) struct Auth {
    who: Who,
    headers: Option<Derived<HeaderMap>>,
}

/// Boxed where it is much the larger one.
enum Who {
    Nobody,
    Bearer(Secret),
    Basic { user: String, password: Option<Secret> },
    Client(Box<TokenSource>),
}

impl Auth {
    /// What the options say, and the URL, which is left without user and password.
    pub(super) fn new(url: &mut Url, options: &SinkOptions, own: &Own) -> Result<Self, BuildError> {
        let user = (!url.username().is_empty() || url.password().is_some())
            .then(|| (decoded(url.username()), url.password().map(|text| Secret::fixed(&decoded(text)))));
        if url.set_username("").and(url.set_password(None)).is_err() {
            // Only a URL without a host has no place for them, and a target has one.
            return Err(BuildError::setting("URL", "must have a host"));
        }
        let credentials = &options.credentials;
        let who = if let Some(client) = &options.web.oauth {
            let connections = Connections::of_token_endpoint(client.token_url.url(), options)?;
            Who::Client(Box::new(TokenSource::new(client.clone(), own, connections)))
        } else if let Some(token) = &credentials.token {
            Who::Bearer(token.clone())
        } else if let Some((user, password)) = user {
            Who::Basic { user, password }
        } else if let Some(user) = &credentials.username {
            Who::Basic { user: user.clone(), password: credentials.password.clone() }
        } else {
            Who::Nobody
        };
        let headers = options.web.headers.clone();
        let auth =
            Self { who, headers: headers.map(|secret| Derived::new(secret, "HEADERS", read)).transpose()? };
        match (&auth.who, auth.fixed()) {
            (Who::Bearer(_), None) => {
                return Err(BuildError::setting("TOKEN", "must be of printable ASCII characters"));
            }
            (Who::Basic { user, .. }, _) if user.contains(':') => {
                return Err(BuildError::setting("USERNAME", "must hold no colon"));
            }
            _ => {}
        }
        let named =
            auth.headers.as_ref().is_some_and(|headers| headers.current().contains_key(AUTHORIZATION));
        if named && !matches!(auth.who, Who::Nobody) {
            return Err(BuildError::setting(
                "HEADERS",
                "must not name authorization where a token, a user or an OAuth client is set",
            ));
        }
        Ok(auth)
    }

    /// The headers of a request that is about to be made; waits for a token where one is to be had first.
    pub(super) async fn current(&self) -> Result<HeaderMap, DeliveryError> {
        let mut headers =
            self.headers.as_ref().map(|headers| (*headers.current()).clone()).unwrap_or_default();
        match &self.who {
            Who::Nobody => {}
            Who::Client(source) => {
                headers.insert(AUTHORIZATION, source.current().await?);
            }
            Who::Bearer(_) | Who::Basic { .. } => {
                let value =
                    self.fixed().ok_or(DeliveryError::Misconfigured { reason: Reason::Unauthorized })?;
                headers.insert(AUTHORIZATION, value);
            }
        }
        Ok(headers)
    }

    /// These were answered 401. Whether others may be had at once.
    pub(super) async fn refused(&self, headers: &HeaderMap) -> bool {
        match (&self.who, headers.get(AUTHORIZATION)) {
            (Who::Client(source), Some(value)) => source.refused(value).await,
            _ => false,
        }
    }

    /// What needs no asking for.
    fn fixed(&self) -> Option<HeaderValue> {
        let text = match &self.who {
            Who::Nobody | Who::Client(_) => return None,
            Who::Bearer(token) => format!("Bearer {}", token.current()),
            Who::Basic { user, password } => basic(user, password.as_ref()),
        };
        sensitive(&text)
    }
}

/// Basic authentication.
pub(super) fn basic(user: &str, password: Option<&Secret>) -> String {
    let password = password.map(Secret::current).unwrap_or_default();
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}

/// A header's value that isn't shown.
pub(super) fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Reads a JSON object of names to texts.
fn read(text: &str) -> Result<HeaderMap, &'static str> {
    const MUST: &str = "must be a JSON object of header names to texts";
    let named: std::collections::BTreeMap<String, String> = serde_json::from_str(text).map_err(|_| MUST)?;
    let mut headers = HeaderMap::with_capacity(named.len());
    for (name, value) in named {
        let name: HeaderName = name.parse().map_err(|_| MUST)?;
        if TAKEN.contains(&name.as_str()) || name.as_str().starts_with("ce-") {
            return Err("must not name a header that the sink itself writes");
        }
        headers.insert(name, sensitive(&value).ok_or(MUST)?);
    }
    Ok(headers)
}

/// A part of a URL, its percent-encoding undone.
fn decoded(part: &str) -> String {
    percent_encoding::percent_decode_str(part).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth(url: &str, change: impl FnOnce(&mut SinkOptions)) -> Result<(Auth, Url), String> {
        let mut options = SinkOptions::default();
        change(&mut options);
        let own = Own::read(&options.own).unwrap();
        let mut url = Url::parse(url).unwrap();
        Auth::new(&mut url, &options, &own).map(|auth| (auth, url)).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn the_urls_user_leaves_the_url_and_gives_way_to_a_token() {
        let (from_url, url) = auth("http://us%40er:hunter2@h/p?q", |_| {}).unwrap();
        assert_eq!(url.as_str(), "http://h/p?q");
        let value = &from_url.current().await.unwrap()[AUTHORIZATION];
        assert_eq!(*value, format!("Basic {}", STANDARD.encode("us@er:hunter2")));
        assert!(value.is_sensitive());
        let token = |options: &mut SinkOptions| options.credentials.token = Some(Secret::fixed("t"));
        let (bearer, _) = auth("http://user:hunter2@h/", token).unwrap();
        assert_eq!(bearer.current().await.unwrap()[AUTHORIZATION], "Bearer t");
    }

    #[test]
    fn what_can_be_no_header_is_refused_without_being_repeated() {
        let wrong = |change: fn(&mut SinkOptions)| auth("http://h/", change).map(|_| ()).unwrap_err();
        let headers = |text: &str| Some(Secret::fixed(text));
        for error in [
            wrong(|options| options.credentials.token = Some(Secret::fixed("hunter2\n"))),
            wrong(|options| options.credentials.username = Some("hunter2:x".to_owned())),
        ] {
            assert!(!error.contains("hunter2"), "{error}");
        }
        for text in [
            "",
            "[]",
            r#"{"a":1}"#,
            r#"{"a b":"hunter2"}"#,
            r#"{"a":"hunter2\n"}"#,
            r#"{"Content-Type":"hunter2"}"#,
            r#"{"ce-id":"hunter2"}"#,
        ] {
            let error =
                auth("http://h/", |options| options.web.headers = headers(text)).map(|_| ()).unwrap_err();
            assert!(error.starts_with("HEADERS must") && !error.contains("hunter2"), "{text}: {error}");
        }
        let both = auth("http://u:p@h/", |o| o.web.headers = headers(r#"{"Authorization":"x"}"#));
        assert!(both.map(|_| ()).unwrap_err().contains("must not name authorization"));
        assert!(
            auth("http://h/", |o| o.web.headers = headers(r#"{"Authorization":"x","x-key":"k"}"#)).is_ok()
        );
    }
}
