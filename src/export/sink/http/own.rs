//! The options that HTTP sinks have of their own.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use reqwest::header::HeaderValue;

use crate::aep::cloudevents::HeaderValues;
use crate::export::sink::BuildError;

/// Every option's name.
const NAMES: [&str; 7] = [
    "compression",
    "header.values",
    "http2",
    "oauth.audience",
    "oauth.auth",
    "webhook.origin",
    "webhook.rate",
];

/// What is set of them.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) compression: Option<Compression>,
    pub(super) header_values: HeaderValues,
    pub(super) http2: Http2,
    pub(super) audience: Option<String>,
    pub(super) client_auth: ClientAuth,
    pub(super) origin: HeaderValue,
    pub(super) rate: Option<NonZeroU32>,
}

/// How bodies are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Gzip,
    Zstd,
}

/// When HTTP/2 is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Http2 {
    /// Where a TLS server chooses it.
    #[default]
    Auto,
    /// Always, without asking, also without TLS.
    PriorKnowledge,
    Never,
}

/// How a client proves itself to the token endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ClientAuth {
    /// By basic authentication.
    #[default]
    Basic,
    /// In the form.
    Post,
}

impl Own {
    /// Reads them.
    pub(super) fn read(own: &BTreeMap<String, String>) -> Result<Self, BuildError> {
        if let Some(unknown) = own.keys().find(|name| !NAMES.contains(&name.as_str())) {
            let known = NAMES.map(variable).join(", ");
            return Err(BuildError::setting(
                variable(unknown),
                format!("is no option of HTTP sinks: {known}"),
            ));
        }
        let one = |name| own.get(name).map(|value| value.trim());
        let must = |name, must: &str| BuildError::setting(variable(name), format!("must be {must}"));
        Ok(Self {
            compression: match one("compression") {
                None | Some("none") => None,
                Some("gzip") => Some(Compression::Gzip),
                Some("zstd") => Some(Compression::Zstd),
                Some(_) => return Err(must("compression", "none, gzip or zstd")),
            },
            header_values: match one("header.values") {
                None | Some("encoded") => HeaderValues::Encoded,
                Some("verbatim") => HeaderValues::Verbatim,
                Some(_) => return Err(must("header.values", "encoded or verbatim")),
            },
            http2: match one("http2") {
                None | Some("auto") => Http2::Auto,
                Some("prior-knowledge") => Http2::PriorKnowledge,
                Some("off") => Http2::Never,
                Some(_) => return Err(must("http2", "auto, prior-knowledge or off")),
            },
            audience: one("oauth.audience").map(str::to_owned),
            client_auth: match one("oauth.auth") {
                None | Some("basic") => ClientAuth::Basic,
                Some("post") => ClientAuth::Post,
                Some(_) => return Err(must("oauth.auth", "basic or post")),
            },
            // It names the system and none of its instances: so the host's name would be wrong.
            // Spec: HTTP Web Hooks for Event Delivery 1.0.2 §4.1.2.
            origin: HeaderValue::from_str(one("webhook.origin").unwrap_or("aep-sidecar"))
                .map_err(|_| must("webhook.origin", "a DNS name"))?,
            rate: one("webhook.rate")
                .map(|text| text.parse().map_err(|_| must("webhook.rate", "requests a minute, from 1 on")))
                .transpose()?,
        })
    }
}

/// What the name of an option's variable ends in.
fn variable(name: &str) -> String {
    format!("OPT_{}", name.to_ascii_uppercase().replace('.', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Own, String> {
        Own::read(&[(name.to_owned(), value.to_owned())].into()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_wrong_names_what_would_be_right() {
        assert_eq!(read("compression", "zstd").unwrap().compression, Some(Compression::Zstd));
        assert_eq!(read("http2", "prior-knowledge").unwrap().http2, Http2::PriorKnowledge);
        assert_eq!(read("webhook.rate", "120").unwrap().rate, NonZeroU32::new(120));
        for (name, value, complaint) in [
            ("compression", "br", "OPT_COMPRESSION must be none, gzip or zstd"),
            ("header.values", "raw", "OPT_HEADER_VALUES must be encoded or verbatim"),
            ("http2", "yes", "OPT_HTTP2 must be auto, prior-knowledge or off"),
            ("oauth.auth", "jwt", "OPT_OAUTH_AUTH must be basic or post"),
            ("webhook.rate", "0", "OPT_WEBHOOK_RATE must be requests a minute, from 1 on"),
            ("webhook.origin", "a\nb", "OPT_WEBHOOK_ORIGIN must be a DNS name"),
        ] {
            assert_eq!(read(name, value).unwrap_err(), complaint);
        }
        let complaint = read("linger.ms", "1").unwrap_err();
        assert!(complaint.starts_with("OPT_LINGER_MS is no option of HTTP sinks: OPT_COMPRESSION, OPT_H"));
    }
}
