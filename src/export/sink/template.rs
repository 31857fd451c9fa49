//! Text with names of attributes in braces, for subjects, topics and routing keys: `aep.{agent}.{type}`.

use std::fmt;

use super::BuildError;
use crate::aep::Event;
use crate::aep::envelope::{Attribute, Scalar, is_extension_name};

/// Text with names of attributes in braces.
#[derive(Debug)]
pub(super) struct Template {
    text: String,
    /// With `_` for every value: what comes of it.
    shape: String,
    parts: Vec<Part>,
}

#[derive(Debug)]
enum Part {
    Text(String),
    Value(Name),
}

/// What can stand in braces.
#[derive(Debug)]
enum Name {
    Aep,
    Core(Attribute),
    Seq,
    Epoch,
    Severity,
    Capture,
    Extension(String),
}

impl Name {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "aep" => Self::Aep,
            "id" => Self::Core(Attribute::Id),
            "type" => Self::Core(Attribute::Type),
            "subject" => Self::Core(Attribute::Subject),
            "time" => Self::Core(Attribute::Time),
            "source" => Self::Core(Attribute::Source),
            "agent" => Self::Core(Attribute::Agent),
            "session" => Self::Core(Attribute::Session),
            "run" => Self::Core(Attribute::Run),
            "step" => Self::Core(Attribute::Step),
            "cause" => Self::Core(Attribute::Cause),
            "traceparent" => Self::Core(Attribute::Traceparent),
            "seq" => Self::Seq,
            "epoch" => Self::Epoch,
            "severity" => Self::Severity,
            "capture" => Self::Capture,
            name if is_extension_name(name) => Self::Extension(name.to_owned()),
            _ => return None,
        })
    }

    fn write(&self, event: &Event, out: &mut String, write_value: impl Fn(&str, &mut String)) {
        match self {
            // A type is made of tokens of `[a-z0-9_-]` with dots between them, which has a meaning nowhere else.
            Self::Core(Attribute::Type) => out.push_str(event.event_type()),
            Self::Core(attribute) => write_value(event.string(*attribute).unwrap_or_default(), out),
            Self::Aep => write_value(crate::aep::VERSION, out),
            Self::Seq => write_value(&event.seq().map(|n| n.to_string()).unwrap_or_default(), out),
            Self::Epoch => write_value(&event.declared_epoch().unwrap_or_default().to_string(), out),
            Self::Severity => write_value(event.severity().as_str(), out),
            Self::Capture => write_value(event.capture().as_str(), out),
            Self::Extension(name) => match event.extension(name) {
                None => write_value("", out),
                Some(Scalar::String(text)) => write_value(text, out),
                Some(Scalar::Integer(value)) => write_value(&value.to_string(), out),
                Some(Scalar::Boolean(value)) => write_value(&value.to_string(), out),
            },
        }
    }
}

impl Template {
    /// Reads a template; `what` it is a template of is named in errors.
    pub(super) fn parse(what: &str, text: &str) -> Result<Self, BuildError> {
        let wrong = |must: String| BuildError::setting(what, must);
        let mut parts = Vec::new();
        let mut shape = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) =
                after.split_once('}').ok_or_else(|| wrong("must close every { with a }".to_owned()))?;
            let value = Name::parse(name).ok_or_else(|| {
                wrong(format!(
                    "must name attributes of events in its braces, like {{agent}} or {{type}}: {name:?} is none"
                ))
            })?;
            shape.push_str(before);
            shape.push('_');
            parts.extend([Part::Text(before.to_owned()), Part::Value(value)]);
            rest = after;
        }
        shape.push_str(rest);
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self { text: text.to_owned(), shape, parts })
    }

    /// What comes of it with `_` for every value.
    pub(super) fn shape(&self) -> &str {
        &self.shape
    }

    /// What comes of it with an event's values, each written by `write_value`; an absent one is empty.
    pub(super) fn render(&self, event: &Event, write_value: impl Fn(&str, &mut String)) -> String {
        let mut out = String::with_capacity(self.text.len().saturating_add(32));
        for part in &self.parts {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Value(name) => name.write(event, &mut out, &write_value),
            }
        }
        out
    }
}

/// Writes a value in which each of the characters that mustn't stand there is a `_`; so is nothing at all.
pub(super) fn write_safe(value: &str, out: &mut String, is_unsafe: impl Fn(char) -> bool) {
    if value.is_empty() {
        out.push('_');
    }
    out.extend(value.chars().map(|c| if is_unsafe(c) { '_' } else { c }));
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
