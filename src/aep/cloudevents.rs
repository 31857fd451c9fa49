//! Events as CloudEvents 1.0, and back.
//!
//! Forward ([`CloudEvent`]) the mapping copies: `data`, `time` and every string are the bytes that were
//! received, in the order of members that the public fixtures have. Inverse ([`inverse`]) it rebuilds the
//! event's text and reads it as any other, so what comes back is legal or refused.
//!
//! | AEP | CloudEvents |
//! |---|---|
//! | `id` `source` `subject` `time` `data` `traceparent` | the same |
//! | `type` | `dev.aep.` + `type` |
//! | `aep` | `aepversion` |
//! | `agent` `session` `run` `step` | `aepagentid` `aepsessionid` `aeprunid` `aepstep` |
//! | `seq` `epoch` | `aepsequence` `aepepoch` |
//! | `cause` `severity` `capture` | `aepcausationid` `aepseverity` `aepcapture` |
//! | extension attributes | the same |
//!
//! A CloudEvents Integer has 32 bits. A larger one is carried as a String of its digits; the inverse reads
//! `aepsequence` and `aepepoch` from either form.
//!
//! Spec: AEP-0005 §1–§2, CloudEvents 1.0.2 §3, JSON format §2–§4, HTTP binding §3.

mod binary;
pub mod inverse;
mod overrides;
pub mod sdk;

pub use binary::{Binary, HeaderValues};
pub use inverse::{Inverse, InverseError};
pub use overrides::{Overrides, OverridesError};

use super::envelope::{Attribute, Scalar};
use super::event::Event;

/// What every mapped type starts with.
pub const TYPE_PREFIX: &str = "dev.aep.";
/// The media type of one event in structured mode.
pub const STRUCTURED: &str = "application/cloudevents+json";
/// The media type of a batch.
pub const BATCH: &str = "application/cloudevents-batch+json";
/// The media type of `data`, which is always JSON.
pub const DATA: &str = "application/json";

/// The mapped core attributes: name in an event, name in a CloudEvent, in the order they are written.
const MAPPED: [(&str, &str); 10] = [
    ("aep", "aepversion"),
    ("agent", "aepagentid"),
    ("session", "aepsessionid"),
    ("run", "aeprunid"),
    ("step", "aepstep"),
    ("seq", "aepsequence"),
    ("epoch", "aepepoch"),
    ("cause", "aepcausationid"),
    ("severity", "aepseverity"),
    ("capture", "aepcapture"),
];

/// Why an event has no CloudEvent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// An extension attribute has the name of an attribute that the mapping itself writes. One of the two
    /// would overwrite the other, so the event can't be carried.
    #[error("extension attribute {0:?} has the name of a CloudEvents attribute that the mapping writes")]
    Collision(String),
}

/// The value of a CloudEvents context attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'e> {
    /// A String, and its exact JSON.
    String {
        /// The characters.
        text: &'e str,
        /// As received, quotes included.
        json: &'e str,
    },
    /// A word of the protocol's own, which needs no escaping.
    Word(&'e str),
    /// `dev.aep.` and the event's type, which needs no escaping.
    Type(&'e str),
    /// An Integer.
    Integer(i32),
    /// An integer beyond 32 bits, carried as a String of its digits.
    Digits(i64),
    /// A Boolean.
    Boolean(bool),
}

/// An event that can be carried as a CloudEvent.
///
/// ```
/// use aep_sidecar::aep::{Event, cloudevents::CloudEvent};
///
/// let event = Event::parse_str(r#"{"aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://host/agent/demo","agent":"demo","session":"s1","seq":0}"#)?;
/// let mapped = CloudEvent::of(&event)?;
/// assert_eq!(
///     String::from_utf8(mapped.structured())?,
///     r#"{"specversion":"1.0","id":"e1","source":"aep://host/agent/demo","type":"dev.aep.run.started","time":"2026-07-03T10:14:01Z","aepversion":"0.1","aepagentid":"demo","aepsessionid":"s1","aepsequence":0}"#
/// );
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct CloudEvent<'e> {
    event: &'e Event,
    /// What stands instead of the event's own extension attributes of the same names, and after the others.
    overrides: Option<&'e Overrides>,
}

impl<'e> CloudEvent<'e> {
    /// The event's CloudEvent.
    ///
    /// # Errors
    /// When an extension attribute collides with an attribute that the mapping writes.
    pub fn of(event: &'e Event) -> Result<Self, MappingError> {
        match event.extensions().find(|extension| is_written_by_mapping(extension.name)) {
            None => Ok(Self { event, overrides: None }),
            Some(extension) => Err(MappingError::Collision(extension.name.to_owned())),
        }
    }

    /// The same with these extension attributes, whatever the event had of their names.
    #[must_use]
    pub fn overridden(self, overrides: &'e Overrides) -> Self {
        Self { overrides: Some(overrides), ..self }
    }

    /// The event that is carried.
    #[must_use]
    pub fn event(&self) -> &'e Event {
        self.event
    }

    /// Calls `each` with every context attribute, in the order they are written.
    pub fn attributes(&self, mut each: impl FnMut(&'e str, Value<'e>)) {
        let event = self.event;
        let string = |attribute| {
            Some(Value::String { text: event.string(attribute)?, json: event.string_json(attribute)? })
        };
        each("specversion", Value::Word("1.0"));
        for (name, attribute) in [("id", Attribute::Id), ("source", Attribute::Source)] {
            if let Some(value) = string(attribute) {
                each(name, value);
            }
        }
        each("type", Value::Type(event.event_type()));
        for (name, attribute) in [("subject", Attribute::Subject), ("time", Attribute::Time)] {
            if let Some(value) = string(attribute) {
                each(name, value);
            }
        }
        if event.data().is_some() {
            each("datacontenttype", Value::Word(DATA));
        }
        for (name, mapped) in MAPPED {
            let value = match name {
                "aep" => Some(Value::Word(super::VERSION)),
                "agent" => string(Attribute::Agent),
                "session" => string(Attribute::Session),
                "run" => string(Attribute::Run),
                "step" => string(Attribute::Step),
                "cause" => string(Attribute::Cause),
                "seq" => event.seq().and_then(|seq| i64::try_from(seq).ok()).map(integer),
                "epoch" => event.declared_epoch().and_then(|epoch| i64::try_from(epoch).ok()).map(integer),
                "severity" => event.declared_severity().map(|level| Value::Word(level.as_str())),
                _ => event.declared_capture().map(|level| Value::Word(level.as_str())),
            };
            if let Some(value) = value {
                each(mapped, value);
            }
        }
        let overrides = self.overrides.map_or(&[][..], Overrides::all);
        let is_overridden = |name: &str| overrides.iter().any(|one| one.name == name);
        if let Some(value) = string(Attribute::Traceparent)
            && !is_overridden("traceparent")
        {
            each("traceparent", value);
        }
        for extension in event.extensions().filter(|extension| !is_overridden(extension.name)) {
            let value = match extension.value {
                Scalar::String(text) => Value::String { text, json: extension.json },
                Scalar::Integer(value) => integer(value),
                Scalar::Boolean(value) => Value::Boolean(value),
            };
            each(extension.name, value);
        }
        for one in overrides {
            each(&one.name, Value::String { text: &one.text, json: &one.json });
        }
    }

    /// Appends the event in structured mode: one JSON object on one line.
    pub fn write_structured(&self, out: &mut Vec<u8>) {
        let mut open = b'{';
        self.attributes(|name, value| {
            out.push(open);
            open = b',';
            out.push(b'"');
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":");
            write_json(value, out);
        });
        if let Some(data) = self.event.data() {
            out.extend_from_slice(b",\"data\":");
            out.extend_from_slice(data.as_bytes());
        }
        out.push(b'}');
    }

    /// The event in structured mode, of media type [`STRUCTURED`].
    #[must_use]
    pub fn structured(&self) -> Vec<u8> {
        /// What the mapping adds to an ordinary event.
        const ADDED: usize = 192;
        let mut out = Vec::with_capacity(self.event.as_bytes().len() + ADDED);
        self.write_structured(&mut out);
        out
    }
}

/// Events as one JSON array, of media type [`BATCH`].
#[must_use]
pub fn batch(events: &[CloudEvent<'_>]) -> Vec<u8> {
    let mut out = vec![b'['];
    for (n, event) in events.iter().enumerate() {
        if n > 0 {
            out.push(b',');
        }
        event.write_structured(&mut out);
    }
    out.push(b']');
    out
}

/// Whether an extension attribute of that name would stand where the mapping writes its own.
fn is_written_by_mapping(name: &str) -> bool {
    matches!(name, "specversion" | "datacontenttype" | "dataschema")
        || MAPPED.iter().any(|(_, mapped)| *mapped == name)
}

fn integer<'e>(value: i64) -> Value<'e> {
    i32::try_from(value).map_or(Value::Digits(value), Value::Integer)
}

fn write_json(value: Value<'_>, out: &mut Vec<u8>) {
    let mut word = |parts: &[&str]| {
        out.push(b'"');
        for part in parts {
            out.extend_from_slice(part.as_bytes());
        }
        out.push(b'"');
    };
    match value {
        Value::Word(text) => word(&[text]),
        Value::Type(text) => word(&[TYPE_PREFIX, text]),
        Value::Digits(value) => word(&[&value.to_string()]),
        Value::String { json, .. } => out.extend_from_slice(json.as_bytes()),
        Value::Integer(value) => out.extend_from_slice(value.to_string().as_bytes()),
        Value::Boolean(value) => out.extend_from_slice(if value { b"true" } else { b"false" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(members: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:14:01.500+02:00","source":"aep://h","agent":"a","session":"s1","seq":1{members}}}"#
        ))
        .unwrap()
    }

    fn structured(members: &str) -> String {
        String::from_utf8(CloudEvent::of(&event(members)).unwrap().structured()).unwrap()
    }

    #[test]
    fn data_and_strings_are_copied_to_the_byte() {
        let text = structured(r#","subject":"a\u00e9\/b","data":{"z":1.0,"a":12345678901234567890}"#);
        assert!(text.contains(r#""subject":"a\u00e9\/b""#), "{text}");
        assert!(text.ends_with(r#","data":{"z":1.0,"a":12345678901234567890}}"#), "{text}");
        assert!(text.contains(r#""time":"2026-07-03T10:14:01.500+02:00""#), "{text}");
    }

    #[test]
    fn integers_beyond_32_bits_are_strings_of_digits() {
        for (value, json) in [
            ("2147483647", "2147483647"),
            ("2147483648", "\"2147483648\""),
            ("1751537640000", "\"1751537640000\""),
            ("5.0", "5"),
        ] {
            let text = structured(&format!(r#","epoch":{value},"acme":{value}"#));
            assert!(text.contains(&format!(r#""aepepoch":{json}"#)), "{text}");
            assert!(text.contains(&format!(r#""acme":{json}"#)), "{text}");
        }
        assert!(structured(r#","acme":-2147483648"#).contains(r#""acme":-2147483648"#));
        assert!(structured(r#","acme":-2147483649"#).contains(r#""acme":"-2147483649""#));
    }

    #[test]
    fn a_colliding_extension_is_refused_by_name() {
        for name in [
            "specversion",
            "datacontenttype",
            "dataschema",
            "aepversion",
            "aepsessionid",
            "aepsequence",
            "aepcapture",
        ] {
            let event = event(&format!(r#","{name}":"x""#));
            assert_eq!(CloudEvent::of(&event).unwrap_err(), MappingError::Collision(name.to_owned()));
        }
        assert!(CloudEvent::of(&event(r#","aepfuture":"x","partitionkey":"k""#)).is_ok());
    }

    #[test]
    fn a_batch_is_an_array() {
        let (one, two) = (event(""), event(r#","data":{}"#));
        let events = [CloudEvent::of(&one).unwrap(), CloudEvent::of(&two).unwrap()];
        assert_eq!(batch(&[]), b"[]");
        let text = String::from_utf8(batch(&events)).unwrap();
        assert_eq!(text, format!("[{},{}]", structured(""), structured(r#","data":{}"#)));
    }
}
