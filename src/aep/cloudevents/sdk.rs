//! Typed hand-over to the CloudEvents SDK, for programs that embed this crate.

use cloudevents::event::{EventBuilder, EventBuilderError, EventBuilderV10};

use super::{CloudEvent, DATA, MappingError, TYPE_PREFIX, Value};
use crate::aep::event::Event;

/// Why an event can't be handed over to the SDK.
#[derive(Debug, thiserror::Error)]
pub enum SdkError {
    /// It has no CloudEvent.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The SDK refuses it.
    #[error("the CloudEvents SDK refuses the event: {0}")]
    Sdk(#[from] EventBuilderError),
    /// Its `data` doesn't parse into a tree.
    #[error("data can't be read into a tree: {0}")]
    Data(#[from] serde_json::Error),
}

impl TryFrom<&Event> for cloudevents::Event {
    type Error = SdkError;

    /// The SDK's own type rewrites `time` to UTC and `data` to a tree: use [`CloudEvent`] where bytes matter.
    fn try_from(event: &Event) -> Result<Self, SdkError> {
        let mut builder = EventBuilderV10::new();
        CloudEvent::of(event)?.attributes(|name, value| {
            let of = std::mem::take(&mut builder);
            builder = match (name, value) {
                ("specversion" | "datacontenttype", _) => of,
                ("id", Value::String { text, .. }) => of.id(text),
                ("source", Value::String { text, .. }) => of.source(text),
                ("type", Value::Type(text)) => of.ty(format!("{TYPE_PREFIX}{text}")),
                ("subject", Value::String { text, .. }) => of.subject(text),
                ("time", Value::String { text, .. }) => of.time(text),
                (name, Value::String { text, .. } | Value::Word(text) | Value::Type(text)) => {
                    of.extension(name, text.to_owned())
                }
                (name, Value::Integer(value)) => of.extension(name, i64::from(value)),
                (name, Value::Digits(value)) => of.extension(name, value.to_string()),
                (name, Value::Boolean(value)) => of.extension(name, value),
            };
        });
        if let Some(data) = event.data() {
            builder = builder.data(DATA, serde_json::from_str::<serde_json::Value>(data)?);
        }
        Ok(builder.build()?)
    }
}

#[cfg(test)]
mod tests {
    use cloudevents::AttributesReader as _;

    use super::*;

    #[test]
    fn the_sdk_takes_what_is_mapped() {
        let event = Event::parse_str(r#"{"aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h","agent":"a","session":"s1","seq":5000000000,"epoch":2,"acme":true,"data":{"a":1}}"#).unwrap();
        let typed = cloudevents::Event::try_from(&event).unwrap();
        assert_eq!((typed.id(), typed.ty()), ("e1", "dev.aep.run.started"));
        assert_eq!(typed.extension("aepsequence").unwrap().to_string(), "5000000000");
        assert_eq!(typed.extension("aepepoch").unwrap().to_string(), "2");
        assert_eq!(typed.extension("acme").unwrap().to_string(), "true");
    }
}
