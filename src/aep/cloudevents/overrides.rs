//! Extension attributes that whoever deploys the exporter puts on every CloudEvent.

use serde::Deserialize;

use super::is_written_by_mapping;

/// Extension attributes that every CloudEvent gets, whatever it had of the same name.
///
/// ```
/// use aep_sidecar::aep::cloudevents::Overrides;
///
/// let overrides = Overrides::parse(r#"{"extensions":{"team":"blue"}}"#)?;
/// assert_eq!(overrides.names().collect::<Vec<_>>(), ["team"]);
/// # Ok::<(), aep_sidecar::aep::cloudevents::OverridesError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Overrides(Vec<Override>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Override {
    pub(super) name: String,
    pub(super) text: String,
    /// The text as JSON, quotes included.
    pub(super) json: String,
}

/// Why a text holds no overrides.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OverridesError {
    /// It isn't JSON of that form.
    #[error("must be JSON such as {{\"extensions\":{{\"team\":\"blue\"}}}}, with texts as values")]
    Form,
    /// The name is none that an extension attribute can have.
    #[error("must not name {0:?}: an extension attribute's name is of lower-case letters and digits")]
    Name(String),
    /// The name is that of an attribute that says which event it is.
    #[error("must not name {0:?}, which the event's own mapping writes")]
    Taken(String),
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    extensions: std::collections::BTreeMap<String, String>,
}

/// The context attributes that are no extensions.
const CORE: [&str; 8] =
    ["id", "source", "type", "subject", "time", "specversion", "datacontenttype", "dataschema"];

impl Overrides {
    /// Reads `{"extensions":{"name":"text"}}`.
    ///
    /// An attribute that the event's mapping to a CloudEvent writes can't be overridden: it would be another event's.
    ///
    /// # Errors
    /// When it has another form, or names what is no extension attribute's name.
    ///
    /// Spec: Knative Eventing `CloudEventOverrides`, CloudEvents 1.0.2 §3.
    pub fn parse(text: &str) -> Result<Self, OverridesError> {
        // An array would be read member by member.
        let object = text.trim_start().starts_with('{').then_some(text).ok_or(OverridesError::Form)?;
        let raw: Raw = serde_json::from_str(object).map_err(|_| OverridesError::Form)?;
        let mut overrides = Vec::with_capacity(raw.extensions.len());
        for (name, text) in raw.extensions {
            let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            if name.is_empty() || name == "data" || !name.bytes().all(legal) {
                return Err(OverridesError::Name(name));
            }
            if CORE.contains(&name.as_str()) || is_written_by_mapping(&name) {
                return Err(OverridesError::Taken(name));
            }
            let json = serde_json::Value::from(text.as_str()).to_string();
            overrides.push(Override { name, text, json });
        }
        Ok(Self(overrides))
    }

    /// The names of the attributes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|one| one.name.as_str())
    }

    pub(super) fn all(&self) -> &[Override] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CloudEvent, HeaderValues};
    use super::*;
    use crate::aep::Event;

    #[test]
    fn an_override_stands_where_the_event_had_its_own() {
        let event = Event::parse_str(
            r#"{"aep":"0.1","id":"e","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s","seq":1,"team":"red","other":1,"data":{}}"#,
        )
        .unwrap();
        let overrides = Overrides::parse(r#"{"extensions":{"team":"bl\"ue","zone":"é"}}"#).unwrap();
        let mapped = CloudEvent::of(&event).unwrap().overridden(&overrides);
        let text = String::from_utf8(mapped.structured()).unwrap();
        assert!(text.ends_with(r#","other":1,"team":"bl\"ue","zone":"é","data":{}}"#), "{text}");
        assert_eq!(text.matches("\"team\"").count(), 1);
        let headers = mapped.binary(HeaderValues::Encoded).headers;
        assert!(headers.contains(&("ce-team".into(), "bl%22ue".into())), "{headers:?}");
    }

    #[test]
    fn what_is_no_extension_is_refused() {
        for (text, error) in [
            ("", OverridesError::Form),
            ("[]", OverridesError::Form),
            (r#"{"extensions":{"n":1}}"#, OverridesError::Form),
            (r#"{"extensions":{"":"x"}}"#, OverridesError::Name(String::new())),
            (r#"{"extensions":{"Team":"x"}}"#, OverridesError::Name("Team".into())),
            (r#"{"extensions":{"data":"x"}}"#, OverridesError::Name("data".into())),
            (r#"{"extensions":{"id":"x"}}"#, OverridesError::Taken("id".into())),
            (r#"{"extensions":{"aepsessionid":"x"}}"#, OverridesError::Taken("aepsessionid".into())),
        ] {
            assert_eq!(Overrides::parse(text), Err(error), "{text}");
        }
        assert_eq!(Overrides::parse("{}"), Ok(Overrides::default()));
    }
}
