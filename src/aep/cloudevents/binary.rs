//! Binary mode: context attributes as headers, `data` as the body.

use super::{CloudEvent, DATA, TYPE_PREFIX, Value};

/// How characters that the HTTP binding wants encoded are written in header values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeaderValues {
    /// Percent-encoded, as the HTTP binding says.
    #[default]
    Encoded,
    /// As they are in UTF-8, for receivers that don't decode. Control characters, which no header can hold,
    /// are encoded all the same.
    Verbatim,
}

/// An event in binary mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// The context attributes as `ce-…` headers, and `content-type` when there is `data`.
    pub headers: Vec<(String, String)>,
    /// `data` to the byte; empty when there is none.
    pub body: Vec<u8>,
}

impl CloudEvent<'_> {
    /// The event in binary mode for HTTP.
    ///
    /// Spec: CloudEvents HTTP binding §3.1.
    #[must_use]
    pub fn binary(&self, values: HeaderValues) -> Binary {
        let mut headers = Vec::with_capacity(20);
        self.attributes(|name, value| {
            let text = match value {
                Value::Word(text) if name == "datacontenttype" => {
                    headers.push(("content-type".to_owned(), text.to_owned()));
                    return;
                }
                Value::Word(text) | Value::String { text, .. } => encode(text, values),
                Value::Type(text) => format!("{TYPE_PREFIX}{text}"),
                Value::Integer(value) => value.to_string(),
                Value::Digits(value) => value.to_string(),
                Value::Boolean(value) => value.to_string(),
            };
            headers.push((format!("ce-{name}"), text));
        });
        debug_assert_eq!(DATA, "application/json");
        let body = self.event().data().map(|data| data.as_bytes().to_vec()).unwrap_or_default();
        Binary { headers, body }
    }
}

/// Space, `"`, `%` and everything outside of U+0021–U+007E, as the UTF-8 bytes' hex digits.
fn encode(text: &str, values: HeaderValues) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        let plain = match values {
            HeaderValues::Encoded => matches!(c, '\u{21}'..='\u{7e}') && c != '"' && c != '%',
            HeaderValues::Verbatim => !c.is_control(),
        };
        if plain {
            out.push(c);
        } else {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a `String` can't fail.
                let _infallible = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// The inverse of percent-encoding. A `%` that isn't followed by two hex digits stands for itself, as the
/// HTTP binding asks of receivers. `None` when the result isn't UTF-8.
pub(super) fn decode(value: &str) -> Option<String> {
    // A quoted value is unquoted first: HTTP binding §3.1.3.2.
    let mut unquoted = String::with_capacity(value.len());
    let value = match value.strip_prefix('"').and_then(|v| v.strip_suffix('"')) {
        None => value,
        Some(inner) => {
            let mut chars = inner.chars();
            while let Some(c) = chars.next() {
                unquoted.push(if c == '\\' { chars.next()? } else { c });
            }
            &unquoted
        }
    };
    percent_encoding::percent_decode_str(value).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aep::Event;

    #[test]
    fn values_are_encoded_as_the_http_binding_says() {
        assert_eq!(encode("Euro € 😀", HeaderValues::Encoded), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        assert_eq!(encode("a\"b%c\u{7f}\n", HeaderValues::Encoded), "a%22b%25c%7F%0A");
        assert_eq!(encode("Euro € \n", HeaderValues::Verbatim), "Euro € %0A");
        for text in ["Euro € 😀", "a\"b%c", "%41", "100%", "a b"] {
            assert_eq!(decode(&encode(text, HeaderValues::Encoded)).as_deref(), Some(text));
        }
        assert_eq!(decode("100%").as_deref(), Some("100%"));
        assert_eq!(decode("\"a \\\" b\"").as_deref(), Some("a \" b"));
        assert_eq!(decode("%ff"), None);
    }

    #[test]
    fn an_event_without_data_has_no_content_type() {
        let text = r#"{"aep":"0.1","id":"e 1","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s1","seq":5000000000}"#;
        let event = Event::parse_str(text).unwrap();
        let binary = CloudEvent::of(&event).unwrap().binary(HeaderValues::Encoded);
        assert!(binary.headers.iter().all(|(name, _)| name != "content-type") && binary.body.is_empty());
        assert!(binary.headers.contains(&("ce-id".into(), "e%201".into())));
        assert!(binary.headers.contains(&("ce-aepsequence".into(), "5000000000".into())));
        assert!(binary.headers.contains(&("ce-type".into(), "dev.aep.run.started".into())));
    }
}
