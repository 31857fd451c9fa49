//! What goes into a request line.
//!
//! Positions ride in the query, since servers take nothing else everywhere; a request line has its limits, so
//! that a resume set is cut to what fits.
//!
//! Spec: AEP-0003 §3.3.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;

use super::config::{ConfigError, SubscribeConfig};
use super::positions::Asked;
use crate::aep::Position;

/// The longest request line, in bytes: servers of this protocol take 64 KiB of headers.
pub(super) const LONGEST_LINE: usize = 60 * 1024;
/// How much of it the URL and the filter may take.
pub(super) const LONGEST_FIXED: usize = 24 * 1024;
/// The method, the version, `&live=0` and what stands around positions.
const LINE_SLACK: usize = 64;

/// What a query carries as it is.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b':')
    .remove(b',')
    .remove(b'/');

/// Where a stream starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum From {
    /// With the next event.
    Now,
    /// With the earliest held event of every session.
    All,
    /// After these positions.
    Positions(Vec<Asked>),
}

impl From {
    /// The positions that are asked for.
    pub(super) fn asked(&self) -> &[Asked] {
        match self {
            Self::Now | Self::All => &[],
            Self::Positions(asked) => asked,
        }
    }
}

/// What follows the replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// Events as they arrive.
    Live,
    /// The end.
    End,
}

/// What is the same in every request.
#[derive(Debug)]
pub(super) struct Target {
    /// With `/stream`.
    url: Url,
    /// The encoded filter and ceiling.
    fixed: String,
    overlap: u64,
}

impl Target {
    pub(super) fn new(config: &SubscribeConfig) -> Result<Self, ConfigError> {
        let mut url = config.relay.clone();
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(ConfigError::Url);
        }
        let secret = !url.username().is_empty() || url.password().is_some();
        if secret || url.query().is_some() || url.fragment().is_some() {
            return Err(ConfigError::UrlParts);
        }
        let path = format!("{}/stream", url.path().trim_end_matches('/'));
        url.set_path(&path);
        let mut fixed = String::new();
        if let Some(filter) = &config.filter {
            fixed += "filter=";
            fixed.extend(utf8_percent_encode(filter.as_str(), PLAIN));
        }
        if let Some(ceiling) = config.ceiling {
            if !fixed.is_empty() {
                fixed.push('&');
            }
            fixed += "capture=";
            fixed += ceiling.as_str();
        }
        if url.as_str().len().saturating_add(fixed.len()) > LONGEST_FIXED {
            return Err(ConfigError::TooLong);
        }
        Ok(Self { url, fixed, overlap: config.overlap })
    }

    /// How many of the first `most` sessions fit a request line.
    pub(super) fn fitting(&self, sessions: &[Asked], most: usize) -> usize {
        let mut room = LONGEST_LINE
            .saturating_sub(self.url.as_str().len())
            .saturating_sub(self.fixed.len())
            .saturating_sub(LINE_SLACK);
        let mut fitting = 0;
        for asked in sessions.iter().take(most) {
            let Some(rest) = room.checked_sub(self.entry(asked).len().saturating_add(1)) else { break };
            room = rest;
            fitting += 1;
        }
        fitting
    }

    /// The URL of a request.
    pub(super) fn url(&self, from: &From, then: Then) -> Url {
        let mut query = self.fixed.clone();
        let mut add = |text: &str| {
            if !query.is_empty() {
                query.push('&');
            }
            query.push_str(text);
        };
        match from {
            From::Now => {}
            From::All => add("from=all"),
            From::Positions(asked) => {
                let entries: Vec<_> = asked.iter().map(|asked| self.entry(asked)).collect();
                add(&format!("from=%5B{}%5D", entries.join(",")));
            }
        }
        if then == Then::End {
            add("live=0");
        }
        let mut url = self.url.clone();
        url.set_query((!query.is_empty()).then_some(&query));
        url
    }

    /// One encoded element of `from`.
    fn entry(&self, asked: &Asked) -> String {
        let Position { epoch, seq } = asked.after;
        // What arrived late below the position is asked for again, within the epoch.
        let seq = seq.min(Position::MAX_PART).saturating_sub(self.overlap);
        let epoch = epoch.min(Position::MAX_PART);
        let session = serde_json::Value::from(&*asked.session).to_string();
        let mut entry = String::from("%7B%22session%22:");
        entry.extend(utf8_percent_encode(&session, PLAIN));
        entry += &format!(",%22epoch%22:{epoch},%22seq%22:{seq}%7D");
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aep::Capture;
    use crate::client::FilterText;

    fn config(url: &str) -> SubscribeConfig {
        SubscribeConfig::new(url.parse().unwrap())
    }

    fn asked(session: &str, seq: u64) -> Asked {
        Asked { session: session.into(), after: Position::new(2, seq) }
    }

    fn query(url: &Url) -> Vec<(String, String)> {
        url.query_pairs().map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
    }

    #[test]
    fn a_request_says_everything_in_its_query() {
        let mut config = config("http://h:1/prefix/");
        config.filter = Some(FilterText::parse(r#"{"agent":"a&b+c=%é #"}"#).unwrap());
        config.ceiling = Some(Capture::Metadata);
        let target = Target::new(&config).unwrap();
        let url = target.url(&From::Positions(vec![asked("a b\"\n&", 150), asked("t", 3)]), Then::End);
        assert_eq!(url.path(), "/prefix/stream");
        let pairs = query(&url);
        let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let from = r#"[{"session":"a b\"\n&","epoch":2,"seq":50},{"session":"t","epoch":2,"seq":0}]"#;
        assert_eq!(
            pairs,
            [("filter", r#"{"agent":"a&b+c=%é #"}"#), ("capture", "metadata"), ("from", from), ("live", "0")]
        );
        assert_eq!(target.url(&From::Now, Then::Live).query(), Some(target.fixed.as_str()));
        let plain = Target::new(&SubscribeConfig::new("http://h".parse().unwrap())).unwrap();
        assert_eq!(plain.url(&From::Now, Then::Live).as_str(), "http://h/stream");
        assert_eq!(plain.url(&From::All, Then::End).as_str(), "http://h/stream?from=all&live=0");
    }

    #[test]
    fn a_request_line_has_an_end() {
        let target = Target::new(&config("http://h")).unwrap();
        let sessions: Vec<_> = (0..2000).map(|n| asked(&format!("session number {n}"), u64::MAX)).collect();
        assert_eq!(target.fitting(&sessions, 10), 10);
        let fitting = target.fitting(&sessions, usize::MAX);
        let url = target.url(&From::Positions(sessions[..fitting].to_vec()), Then::End);
        let line = url.as_str().len() + "GET  HTTP/1.1".len();
        assert!(line <= LONGEST_LINE && line > LONGEST_LINE - 300, "{line}");
    }

    #[test]
    fn a_url_that_holds_secrets_is_refused() {
        for url in ["http://user@h", "http://:pw@h", "http://h?access_token=x", "http://h#x"] {
            assert!(matches!(Target::new(&config(url)), Err(ConfigError::UrlParts)), "{url}");
        }
        for url in ["ftp://h", "mailto:a@b", "unix:/run/aep"] {
            assert!(matches!(Target::new(&config(url)), Err(ConfigError::Url)), "{url}");
        }
    }

    #[test]
    fn a_filter_leaves_room_for_positions() {
        let mut config = config("http://h");
        let filter = format!(r#"{{"agent":"{}"}}"#, "a".repeat(LONGEST_FIXED));
        config.filter = Some(FilterText::parse(&filter).unwrap());
        assert!(matches!(Target::new(&config), Err(ConfigError::TooLong)));
    }
}
