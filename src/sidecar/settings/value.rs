//! The forms of values.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::aep::cloudevents::Overrides;
use crate::aep::{Capture, Filter};
use crate::export::sink::options::{Endpoint, Proxies};
use crate::export::{Mode, SinkName, SpoolSync};
use crate::relay::Token;

/// A variable's value, or what is wrong with it. Reading one never fails, so that every complaint is heard.
#[derive(Debug, Default)]
pub(super) enum Field<T> {
    /// The variable isn't set.
    #[default]
    Unset,
    /// Its value.
    Read(T),
    /// What it must be, to follow its name in a message.
    Wrong(String),
}

impl<'de, T: Setting> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        let text = String::deserialize(reader)?;
        Ok(match T::read(text.trim()) {
            Ok(value) => Self::Read(value),
            Err(complaint) => Self::Wrong(complaint),
        })
    }
}

/// A type that a variable's text is read into.
pub trait Setting: Sized {
    /// Reads the text.
    ///
    /// # Errors
    /// What the value must be, to follow the variable's name; repeats the text only where it is no secret.
    fn read(text: &str) -> Result<Self, String>;
}

/// A size in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size(pub(super) usize);

/// A time in whole milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Millis(pub(super) Duration);

/// Names of sinks, at least one, each once.
#[derive(Debug, Clone)]
pub(super) struct SinkNames(pub(super) Vec<SinkName>);

/// Where a relay is, without anything secret.
#[derive(Debug, Clone)]
pub(super) struct RelayUrl(pub(super) reqwest::Url);

/// Where a proxy is. Shown without anything: it may hold a password.
#[derive(Clone)]
pub(super) struct ProxyUrl(pub(super) reqwest::Url);

impl std::fmt::Debug for ProxyUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ProxyUrl")
    }
}

/// Through which proxy a sink is reached, whatever the environment says.
#[derive(Debug, Clone)]
pub(super) enum ProxyChoice {
    /// Through none.
    None,
    /// Through this one.
    One(ProxyUrl),
}

/// Where probes and scrapers are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminAddress {
    /// Nowhere.
    Off,
    /// There, if that is free.
    Default(SocketAddr),
    /// There, as was asked.
    At(SocketAddr),
}

impl Default for AdminAddress {
    /// Port 9464 on loopback.
    fn default() -> Self {
        Self::Default(SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9464))
    }
}

/// The form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

fn must(what: &str, text: &str) -> String {
    format!("must be {what}, not {:?}", crate::aep::event::quoted(text))
}

impl Setting for IpAddr {
    fn read(text: &str) -> Result<Self, String> {
        if text == "localhost" {
            return Ok(Self::V4(std::net::Ipv4Addr::LOCALHOST));
        }
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        bare.parse().map_err(|_| must("an IP address, for example 127.0.0.1 or ::", text))
    }
}

impl Setting for AdminAddress {
    fn read(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let address = text.parse().ok().or_else(|| {
            let port = text.strip_prefix("localhost:")?.parse().ok()?;
            Some(SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), port))
        });
        address
            .map(Self::At)
            .ok_or_else(|| must("an IP address with a port, for example 127.0.0.1:9464, or off", text))
    }
}

impl Setting for u16 {
    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| must("a port from 0 to 65535", text))
    }
}

impl Setting for bool {
    fn read(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" => Ok(true),
            "false" | "0" | "no" => Ok(false),
            _ => Err(must("true or false", text)),
        }
    }
}

impl Setting for NonZeroUsize {
    fn read(text: &str) -> Result<Self, String> {
        /// More of anything than a machine holds, and few enough to compute with.
        const MOST: usize = 1_000_000_000;
        let count = text.parse().ok().filter(|count: &Self| count.get() <= MOST);
        count.ok_or_else(|| must("a whole number from 1 to 1000000000", text))
    }
}

impl Setting for Size {
    fn read(text: &str) -> Result<Self, String> {
        let bytes =
            text.parse::<bytesize::ByteSize>().ok().and_then(|size| usize::try_from(size.as_u64()).ok());
        bytes
            .filter(|bytes| *bytes > 0)
            .map(Self)
            .ok_or_else(|| must("a size, for example 1048576, 512KiB or 16MiB", text))
    }
}

impl Setting for Duration {
    fn read(text: &str) -> Result<Self, String> {
        /// Longer than any wait that makes sense, and short enough to compute with.
        const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
        let duration = humantime::parse_duration(text).ok().filter(|duration| *duration <= LONGEST);
        duration.ok_or_else(|| {
            must("a duration with its unit of at most a year, for example 500ms, 5s or 2m", text)
        })
    }
}

impl Setting for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        Ok(Self::from(text))
    }
}

impl Setting for String {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl Setting for LogFormat {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(must("auto, text or json", text)),
        }
    }
}

impl Setting for Capture {
    fn read(text: &str) -> Result<Self, String> {
        Self::from_name(text).ok_or_else(|| must("none, metadata, redacted or full", text))
    }
}

impl Setting for Filter {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| format!("must be an attr-match filter: {error}"))
    }
}

impl Setting for Token {
    fn read(text: &str) -> Result<Self, String> {
        Self::new(text).map_err(|error| error.to_string())
    }
}

impl Setting for crate::export::Target {
    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: crate::export::TargetError| error.to_string())
    }
}

impl Setting for Mode {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "structured" => Ok(Self::Structured),
            "binary" => Ok(Self::Binary),
            "batch" => Ok(Self::Batch),
            _ => Err(must("structured, binary or batch", text)),
        }
    }
}

impl Setting for SpoolSync {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "write" => Ok(Self::Write),
            "fsync" => Ok(Self::Fsync),
            "off" => Ok(Self::Off),
            _ => Err(must("write, fsync or off", text)),
        }
    }
}

impl Setting for Millis {
    fn read(text: &str) -> Result<Self, String> {
        let millis = text.parse().ok().filter(|millis| *millis <= 60_000);
        let millis = millis.ok_or_else(|| must("milliseconds from 0 to 60000", text))?;
        Ok(Self(Duration::from_millis(millis)))
    }
}

impl Setting for SinkNames {
    fn read(text: &str) -> Result<Self, String> {
        let mut names: Vec<SinkName> = Vec::new();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let read: SinkName = name.parse().map_err(|error| {
                format!(
                    "must be names separated by commas, and {:?} {error}",
                    crate::aep::event::quoted(name)
                )
            })?;
            if names.contains(&read) {
                return Err(format!("names {read} twice"));
            }
            names.push(read);
        }
        if names.is_empty() { Err("must name at least one sink".to_owned()) } else { Ok(Self(names)) }
    }
}

impl Setting for RelayUrl {
    fn read(text: &str) -> Result<Self, String> {
        // Never repeated: it may hold a password.
        let url = reqwest::Url::parse(text).ok().filter(|url| {
            matches!(url.scheme(), "http" | "https")
                && url.has_host()
                && url.query().is_none()
                && url.username().is_empty()
                && url.password().is_none()
        });
        url.map(Self).ok_or_else(|| {
            "must be the relay's http:// or https:// URL, without user, password and query".to_owned()
        })
    }
}

impl Setting for ProxyUrl {
    fn read(text: &str) -> Result<Self, String> {
        let must = "must be a proxy's URL: http://host:port, https://… or socks5://…";
        Proxies::url(text).map(Self).ok_or_else(|| must.to_owned())
    }
}

impl Setting for ProxyChoice {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            _ => ProxyUrl::read(text).map(Self::One).map_err(|must| format!("{must}, or none")),
        }
    }
}

impl Setting for Endpoint {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| "must be an http:// or https:// URL".to_owned())
    }
}

impl Setting for Overrides {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_carry_units() {
        assert_eq!(Duration::read("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(Duration::read("2m"), Ok(Duration::from_secs(120)));
        assert!(
            Duration::read("5").is_err() && Duration::read("").is_err() && Duration::read("-5s").is_err()
        );
        assert_eq!(Size::read("16MiB").map(|size| size.0), Ok(16 << 20));
        assert_eq!(Size::read("1048576").map(|size| size.0), Ok(1 << 20));
        assert!(Size::read("0").is_err() && Size::read("16 apples").is_err() && Size::read("-1").is_err());
    }
}
