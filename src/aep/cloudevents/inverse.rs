//! CloudEvents back to events.

use std::collections::BTreeSet;

use serde_json::value::RawValue;

use super::binary::decode;
use super::{BATCH, DATA, MAPPED, STRUCTURED, TYPE_PREFIX};
use crate::aep::envelope::is_extension_name;
use crate::aep::event::{Event, EventError, quoted};
use crate::aep::json::{self, JsonError, Kind};

/// An event that came in as a CloudEvent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inverse {
    /// The event.
    pub event: Event,
    /// Attributes that an event can't carry, by name: dropped.
    pub dropped: Vec<String>,
}

/// Why a CloudEvent isn't an event.
#[derive(Debug, thiserror::Error)]
pub enum InverseError {
    /// Not a JSON object, or not an array of them in a batch.
    #[error("not a CloudEvent: {0}")]
    Json(#[from] JsonError),
    /// A batch that isn't an array.
    #[error("not a batch of CloudEvents: expected a JSON array")]
    NotABatch,
    /// A `type` outside of `dev.aep.`: another protocol's event, which this mapping doesn't guess at.
    #[error("foreign CloudEvent: its type {0:?} doesn't start with \"dev.aep.\"")]
    Foreign(String),
    /// A required attribute isn't there.
    #[error("{0} is required")]
    Missing(&'static str),
    /// An attribute stands twice.
    #[error("{0} stands twice")]
    Twice(String),
    /// An attribute out of form.
    #[error("{name} must {must}")]
    Attribute {
        /// The attribute.
        name: String,
        /// What it must be.
        must: &'static str,
    },
    /// Not a media type of CloudEvents.
    #[error("unsupported content type {0:?}")]
    ContentType(String),
    /// What it maps to isn't a legal event.
    #[error("not an AEP event: {0}")]
    Event(#[from] EventError),
}

/// The attributes of a CloudEvent as they were found, each with the JSON of its value.
#[derive(Default)]
struct Parts {
    attributes: Vec<(String, String)>,
    data: Option<String>,
}

/// Reads one CloudEvent in structured mode. Attributes named in `strip` are left out: an exporter that was
/// asked to add some (`partitionkey`, say) names them here.
///
/// # Errors
/// When it isn't a CloudEvent, is a foreign one, or maps to no legal event.
pub fn structured(text: &[u8], strip: &[&str]) -> Result<Inverse, InverseError> {
    let text = std::str::from_utf8(text).map_err(|error| JsonError::Utf8(error.valid_up_to()))?;
    read_structured(text, strip)
}

/// Reads a batch.
///
/// # Errors
/// When it isn't an array; each element has a result of its own.
pub fn batch(text: &[u8], strip: &[&str]) -> Result<Vec<Result<Inverse, InverseError>>, InverseError> {
    let text = std::str::from_utf8(text).map_err(|error| JsonError::Utf8(error.valid_up_to()))?;
    let elements: Vec<&RawValue> = serde_json::from_str(text).map_err(|error| {
        if error.is_data() { InverseError::NotABatch } else { JsonError::Syntax(error).into() }
    })?;
    Ok(elements.into_iter().map(|element| read_structured(element.get(), strip)).collect())
}

/// Reads one CloudEvent in binary mode, from its headers and body. Header names are matched in any case.
///
/// # Errors
/// As [`structured`].
pub fn binary<'h>(
    headers: impl IntoIterator<Item = (&'h str, &'h str)>,
    body: &[u8],
    strip: &[&str],
) -> Result<Inverse, InverseError> {
    let mut parts = Parts::default();
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        let (name, value) = match name.strip_prefix("ce-") {
            Some(name) => {
                let value = decode(value).ok_or_else(|| must(name, "be percent-encoded UTF-8"))?;
                (name.to_owned(), value)
            }
            None if name == "content-type" => ("datacontenttype".to_owned(), value.to_owned()),
            None => continue,
        };
        if parts.attributes.iter().any(|(known, _)| *known == name) {
            return Err(InverseError::Twice(name));
        }
        let mut json = Vec::with_capacity(value.len() + 2);
        json::write_string(&mut json, &value);
        parts.attributes.push((name, String::from_utf8(json).unwrap_or_default()));
    }
    if !body.is_empty() {
        let text = std::str::from_utf8(body).map_err(|error| JsonError::Utf8(error.valid_up_to()))?;
        // Read once on its own, so that a body can't close the object it is put into.
        let whole: &RawValue = serde_json::from_str(text).map_err(JsonError::Syntax)?;
        parts.data = Some(whole.get().to_owned());
    }
    parts.rebuild(strip)
}

/// Reads what an HTTP request carries, in whichever of the three content modes its `content-type` says.
///
/// # Errors
/// As the mode's own function.
pub fn http<'h>(
    headers: impl IntoIterator<Item = (&'h str, &'h str)> + Clone,
    body: &[u8],
    strip: &[&str],
) -> Result<Vec<Result<Inverse, InverseError>>, InverseError> {
    let content_type =
        headers.clone().into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    let media = media_type(content_type.map(|(_, value)| value).unwrap_or_default());
    // The batch's name starts with the single one's.
    if media == BATCH {
        batch(body, strip)
    } else if media == STRUCTURED {
        Ok(vec![structured(body, strip)])
    } else if media.starts_with("application/cloudevents") {
        Err(InverseError::ContentType(quoted(&media).into_owned()))
    } else {
        Ok(vec![binary(headers, body, strip)])
    }
}

/// The media type without its parameters, in lower case.
fn media_type(value: &str) -> String {
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

fn read_structured(text: &str, strip: &[&str]) -> Result<Inverse, InverseError> {
    let mut parts = Parts::default();
    let mut names = BTreeSet::new();
    json::members(text, |name, value| {
        if !names.insert(name.to_string()) {
            return Err(InverseError::Twice(quoted(&name).into_owned()));
        }
        match &*name {
            "data" => parts.data = Some(value.get().to_owned()),
            // JSON format §2.1: a null attribute is an absent one.
            _ if json::kind(value) == Kind::Null => {}
            "data_base64" => return Err(must("data_base64", "not be used: data is a JSON object")),
            _ => parts.attributes.push((name.into_owned(), value.get().to_owned())),
        }
        Ok(())
    })??;
    parts.rebuild(strip)
}

impl Parts {
    fn json(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, json)| json.as_str())
    }

    fn string(&self, name: &str) -> Option<String> {
        serde_json::from_str(self.json(name)?).ok()
    }

    fn rebuild(self, strip: &[&str]) -> Result<Inverse, InverseError> {
        match self.string("specversion").as_deref() {
            Some("1.0") => {}
            Some(_) => return Err(must("specversion", "be \"1.0\"")),
            None => return Err(InverseError::Missing("specversion")),
        }
        let event_type = self.string("type").ok_or(InverseError::Missing("type"))?;
        let Some(event_type) = event_type.strip_prefix(TYPE_PREFIX) else {
            return Err(InverseError::Foreign(quoted(&event_type).into_owned()));
        };
        if self.data.is_some()
            && let Some(content_type) = self.string("datacontenttype")
            && media_type(&content_type) != DATA
        {
            return Err(must("datacontenttype", "be application/json, for data is a JSON object"));
        }
        let mut out = Vec::with_capacity(256);
        let mut member = |name: &str, json: &str| {
            out.push(if out.is_empty() { b'{' } else { b',' });
            json::write_string(&mut out, name);
            out.push(b':');
            out.extend_from_slice(json.as_bytes());
        };
        member("aep", self.json("aepversion").unwrap_or("\"0.1\""));
        let mut type_json = Vec::new();
        json::write_string(&mut type_json, event_type);
        for name in ["id", "type", "subject", "time", "source"] {
            if name == "type" {
                member(name, &String::from_utf8_lossy(&type_json));
            } else if let Some(json) = self.json(name) {
                member(name, json);
            }
        }
        for (name, mapped) in MAPPED.into_iter().filter(|(name, _)| *name != "aep") {
            if let Some(json) = self.json(mapped) {
                member(name, &counter(name, json));
            }
        }
        if let Some(json) = self.json("traceparent") {
            member("traceparent", json);
        }
        let mut dropped = Vec::new();
        for (name, json) in &self.attributes {
            let name = name.as_str();
            let known = matches!(
                name,
                "specversion"
                    | "id"
                    | "source"
                    | "type"
                    | "subject"
                    | "time"
                    | "datacontenttype"
                    | "traceparent"
            ) || MAPPED.iter().any(|(_, mapped)| *mapped == name);
            if known || strip.contains(&name) {
                continue;
            }
            if name != "dataschema" && is_extension_name(name) && is_scalar(json) {
                member(name, json);
            } else {
                dropped.push(quoted(name).into_owned());
            }
        }
        if let Some(data) = &self.data {
            member("data", data);
        }
        out.push(b'}');
        Ok(Inverse { event: Event::parse(&out)?, dropped })
    }
}

/// `seq` and `epoch` from either form: a number, or a string of digits.
fn counter(name: &str, json: &str) -> String {
    if matches!(name, "seq" | "epoch")
        && let Ok(digits) = serde_json::from_str::<String>(json)
        && !digits.is_empty()
        && digits.bytes().all(|b| b.is_ascii_digit())
    {
        let plain = digits.trim_start_matches('0');
        return if plain.is_empty() { "0".to_owned() } else { plain.to_owned() };
    }
    json.to_owned()
}

/// A string, an integer or a boolean.
fn is_scalar(json: &str) -> bool {
    match json.as_bytes().first() {
        Some(b'"' | b't' | b'f') => true,
        Some(b'-' | b'0'..=b'9') => json::integer(json).is_some(),
        _ => false,
    }
}

fn must(name: &str, must: &'static str) -> InverseError {
    InverseError::Attribute { name: quoted(name).into_owned(), must }
}

#[cfg(test)]
mod tests {
    use super::super::{CloudEvent, HeaderValues};
    use super::*;

    const EVENT: &str = r#"{"aep":"0.1","id":"e 1","type":"run.started","subject":"é \"x\"","time":"2026-07-03T10:14:01.000Z","source":"aep://h","session":"s1","agent":"a","seq":5000000000,"epoch":0,"acme":"v","data":{"z":1.0}}"#;

    #[test]
    fn structured_and_binary_give_the_event_back() {
        let event = Event::parse_str(EVENT).unwrap();
        let mapped = CloudEvent::of(&event).unwrap();
        let back = structured(&mapped.structured(), &[]).unwrap();
        assert_eq!(back.dropped, Vec::<String>::new());
        assert_eq!(back.event.position(), event.position());
        assert_eq!(back.event.data(), event.data());
        assert_eq!(back.event.subject(), event.subject());
        let binary_form = mapped.binary(HeaderValues::Encoded);
        let headers = binary_form.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let back = http(headers, &binary_form.body, &[]).unwrap().pop().unwrap().unwrap();
        assert_eq!(back.event.subject(), event.subject());
        assert_eq!(back.event.position(), event.position());
        assert_eq!(back.event.data(), event.data());
    }

    #[test]
    fn foreign_events_are_refused() {
        let error =
            structured(br#"{"specversion":"1.0","id":"1","source":"/x","type":"com.example.thing"}"#, &[])
                .unwrap_err();
        assert!(matches!(error, InverseError::Foreign(_)));
    }

    #[test]
    fn what_an_event_cannot_carry_is_dropped_by_name() {
        let event = Event::parse_str(EVENT).unwrap();
        let mut ce = String::from_utf8(CloudEvent::of(&event).unwrap().structured()).unwrap();
        ce.insert_str(
            1,
            r#""dataschema":"http://x","aep_bad":"x","seq":3,"ratio":1.5,"partitionkey":"k","gone":null,"#,
        );
        let back = structured(ce.as_bytes(), &["partitionkey"]).unwrap();
        assert_eq!(back.dropped, ["dataschema", "aep_bad", "seq", "ratio"]);
        assert!(back.event.extension("partitionkey").is_none() && back.event.extension("gone").is_none());
    }

    #[test]
    fn wrong_forms_are_refused_by_name() {
        for (text, expected) in [
            (r#"{"id":"1"}"#, "specversion is required"),
            (r#"{"specversion":"0.3","id":"1"}"#, "specversion must be \"1.0\""),
            (r#"{"specversion":"1.0","id":"1"}"#, "type is required"),
            (r#"{"specversion":"1.0","specversion":"1.0"}"#, "specversion stands twice"),
            (
                r#"{"specversion":"1.0","type":"dev.aep.run.started","data_base64":"e30="}"#,
                "data_base64 must not be used: data is a JSON object",
            ),
            (
                r#"{"specversion":"1.0","type":"dev.aep.run.started","datacontenttype":"text/xml","data":"<x/>"}"#,
                "datacontenttype must be application/json, for data is a JSON object",
            ),
            (r#"{"specversion":"1.0","type":"dev.aep.run.started"}"#, "not an AEP event: id is required"),
        ] {
            assert_eq!(structured(text.as_bytes(), &[]).unwrap_err().to_string(), expected);
        }
        assert!(matches!(batch(b"{}", &[]), Err(InverseError::NotABatch)));
        assert!(http([("content-type", "application/cloudevents+avro")], b"", &[]).is_err());
    }

    #[test]
    fn a_batch_has_one_result_an_element() {
        let event = Event::parse_str(EVENT).unwrap();
        let one = CloudEvent::of(&event).unwrap();
        let mut text = super::super::batch(&[one, one]);
        text.pop();
        text.extend_from_slice(b",{}]");
        let results =
            http([("Content-Type", "application/cloudevents-batch+json; charset=utf-8")], &text, &[])
                .unwrap();
        assert_eq!(results.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, false]);
    }
}
