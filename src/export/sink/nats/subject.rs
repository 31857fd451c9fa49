//! The subject that an event is published on: a template over its attributes.

use std::fmt;

use super::super::BuildError;
use crate::aep::Event;
use crate::aep::envelope::{Attribute, Scalar, is_extension_name};

/// The longest subject, in bytes: servers end a connection whose control line, which holds the subject, is longer
/// than 4 KiB.
pub(super) const LONGEST: usize = 3072;

/// `aep.{agent}.{type}`: text, and names of attributes in braces.
#[derive(Debug)]
pub(super) struct Template {
    text: String,
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

    fn write(&self, event: &Event, subject: &mut String) {
        match self {
            // A type is made of tokens of `[a-z0-9_-]`, which are the subject's tokens.
            Self::Core(Attribute::Type) => subject.push_str(event.event_type()),
            Self::Core(attribute) => write_token(event.string(*attribute).unwrap_or_default(), subject),
            Self::Aep => write_token(crate::aep::VERSION, subject),
            Self::Seq => write_token(&event.seq().map(|n| n.to_string()).unwrap_or_default(), subject),
            Self::Epoch => write_token(&event.declared_epoch().unwrap_or_default().to_string(), subject),
            Self::Severity => write_token(event.severity().as_str(), subject),
            Self::Capture => write_token(event.capture().as_str(), subject),
            Self::Extension(name) => match event.extension(name) {
                None => write_token("", subject),
                Some(Scalar::String(text)) => write_token(text, subject),
                Some(Scalar::Integer(value)) => write_token(&value.to_string(), subject),
                Some(Scalar::Boolean(value)) => write_token(&value.to_string(), subject),
            },
        }
    }
}

/// Writes a value as part of one token. What would end the token, match several or not be allowed becomes `_`; so
/// does nothing at all, and a `$` at the start, where subjects of the server's own have it.
fn write_token(value: &str, subject: &mut String) {
    if value.is_empty() {
        subject.push('_');
    }
    for c in value.chars() {
        let reserved = c == '$' && subject.is_empty();
        let unsafe_here = reserved || matches!(c, '.' | '*' | '>') || c.is_whitespace() || c.is_control();
        subject.push(if unsafe_here { '_' } else { c });
    }
}

impl Template {
    pub(super) fn parse(text: &str) -> Result<Self, BuildError> {
        let wrong = |must: String| BuildError::setting("the URL's subject", must);
        let mut parts = Vec::new();
        // With `_` for every value: what a subject looks like.
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
        let is_bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>' | '}');
        if shape.split('.').any(str::is_empty) || shape.contains(is_bad) || shape.starts_with('$') {
            return Err(wrong(
                "must be tokens with dots between them, without spaces, wildcards and a $ at the start"
                    .to_owned(),
            ));
        }
        Ok(Self { text: text.to_owned(), parts })
    }

    /// The event's subject; `None` when it is longer than [`LONGEST`].
    pub(super) fn subject(&self, event: &Event) -> Option<String> {
        let mut subject = String::with_capacity(self.text.len().saturating_add(32));
        for part in &self.parts {
            match part {
                Part::Text(text) => subject.push_str(text),
                Part::Value(name) => name.write(event, &mut subject),
            }
        }
        (subject.len() <= LONGEST).then_some(subject)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(members: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e.1","type":"tool.call.started","time":"2026-07-03T10:14:01Z","source":"aep://h","session":"s","seq":7{members}}}"#
        ))
        .unwrap()
    }

    fn subject(template: &str, members: &str) -> String {
        Template::parse(template).unwrap().subject(&event(members)).unwrap()
    }

    #[test]
    fn values_are_tokens_and_types_are_several() {
        let agent = r#","agent":"a""#;
        assert_eq!(subject("aep.{agent}.{type}", agent), "aep.a.tool.call.started");
        assert_eq!(subject("plain", agent), "plain");
        assert_eq!(
            subject("{aep}.{seq}.{epoch}.{severity}.{capture}.x-{id}", agent),
            "0_1.7.0.info.metadata.x-e_1"
        );
        assert_eq!(subject("{run}.{tenant}", agent), "_._");
        assert_eq!(subject("{tenant}.{n}.{b}", r#","agent":"a","tenant":"t","n":-5,"b":true"#), "t.-5.true");
        assert_eq!(subject("x.{source}", agent), "x.aep://h");
    }

    #[test]
    fn what_has_a_meaning_in_subjects_becomes_an_underscore() {
        let nasty = r#","agent":"a.b *>\t\u2028\u0000é\r\n$""#;
        assert_eq!(subject("x.{agent}", nasty), "x.a_b______é__$");
        assert_eq!(subject("{agent}.API", r#","agent":"$JS""#), "_JS.API");
        let long = format!(r#","agent":"{}""#, "a".repeat(LONGEST));
        assert_eq!(Template::parse("x.{agent}").unwrap().subject(&event(&long)), None);
    }

    #[test]
    fn a_template_that_makes_no_subject_is_refused() {
        for wrong in [
            "",
            ".a",
            "a.",
            "a..b",
            "a b",
            "a.*",
            "a.>",
            "a.{",
            "a.}",
            "a.{}",
            "a.{data}",
            "a.{Agent}",
            "a.{no-name}",
            "$JS.API.x",
        ] {
            let error = Template::parse(wrong).unwrap_err().to_string();
            assert!(error.starts_with("the URL's subject must "), "{wrong}: {error}");
        }
    }
}
