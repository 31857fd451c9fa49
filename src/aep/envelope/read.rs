//! Reading an envelope: every member once, each in its form, all of them fit for the type's scope.

use std::collections::HashSet;

use serde_json::value::RawValue;

use super::form::{is_rfc3339, is_traceparent};
use super::{Attribute, Envelope, ExtensionSpans, Span, Value, is_extension_name};
use crate::aep::capture::Capture;
use crate::aep::event::{EventError, MOST_EXTENSIONS};
use crate::aep::event_type::{EventType, Scope};
use crate::aep::json::{self, Kind, MAX_NESTING, Name};
use crate::aep::position::Position;
use crate::aep::severity::Severity;

impl Envelope {
    /// Reads and checks the envelope of the event in `text`. The second value is what the event's text needs
    /// after its received bytes: the decoded strings.
    pub(in crate::aep) fn read(text: &str) -> Result<(Self, String), EventError> {
        if u32::try_from(text.len()).map_or(true, |len| len > u32::MAX / 2) {
            return Err(EventError::TooLong);
        }
        let mut reader = Reader {
            text,
            decoded: String::new(),
            names: HashSet::new(),
            aep: false,
            extensions: Vec::new(),
            escaped: Vec::new(),
            envelope: Self {
                strings: [Span::ABSENT; Attribute::COUNT],
                data: Span::ABSENT,
                seq: None,
                epoch: None,
                severity: None,
                capture: None,
                scope: Scope::Session,
                extensions: Box::default(),
                escaped: Box::default(),
            },
        };
        json::members(text, |name, value| reader.member(name, value))??;
        reader.finish()
    }
}

struct Reader<'a> {
    text: &'a str,
    decoded: String,
    /// Extension names so far, once there are more than a few.
    names: HashSet<Name<'a>>,
    aep: bool,
    extensions: Vec<ExtensionSpans>,
    escaped: Vec<(u32, Span)>,
    envelope: Envelope,
}

impl<'a> Reader<'a> {
    fn member(&mut self, name: Name<'a>, value: &'a RawValue) -> Result<(), EventError> {
        let attribute = match &*name {
            "id" => Attribute::Id,
            "type" => Attribute::Type,
            "subject" => Attribute::Subject,
            "time" => Attribute::Time,
            "source" => Attribute::Source,
            "agent" => Attribute::Agent,
            "session" => Attribute::Session,
            "run" => Attribute::Run,
            "step" => Attribute::Step,
            "cause" => Attribute::Cause,
            "traceparent" => Attribute::Traceparent,
            _ => return self.other(name, value),
        };
        let contents = json::string(value).ok_or_else(|| must(attribute.as_str(), "be a string"))?;
        check(attribute, &contents)?;
        let span = self.keep(value, contents);
        match self.envelope.strings.get_mut(attribute as usize) {
            Some(slot) if slot.is_absent() => *slot = span,
            _ => return Err(twice(&name)),
        }
        Ok(())
    }

    fn other(&mut self, name: Name<'a>, value: &'a RawValue) -> Result<(), EventError> {
        match &*name {
            "aep" => {
                if std::mem::replace(&mut self.aep, true) {
                    return Err(twice("aep"));
                }
                match json::string(value).as_deref() {
                    Some(crate::aep::VERSION) => Ok(()),
                    _ => Err(must("aep", "be \"0.1\", the one version spoken here")),
                }
            }
            "seq" => set_once(&mut self.envelope.seq, "seq", counter("seq", value)?),
            "epoch" => set_once(&mut self.envelope.epoch, "epoch", counter("epoch", value)?),
            "severity" => {
                let level =
                    json::string(value).as_deref().and_then(Severity::from_name).ok_or_else(|| {
                        must("severity", "be one of debug, info, notice, warning, error, critical")
                    })?;
                set_once(&mut self.envelope.severity, "severity", level)
            }
            "capture" => {
                let level = json::string(value)
                    .as_deref()
                    .and_then(Capture::from_name)
                    .ok_or_else(|| must("capture", "be one of none, metadata, redacted, full"))?;
                set_once(&mut self.envelope.capture, "capture", level)
            }
            "data" => {
                if !self.envelope.data.is_absent() {
                    return Err(twice("data"));
                }
                if json::kind(value) != Kind::Object {
                    return Err(must("data", "be an object"));
                }
                // `data` is one level below the event.
                if json::nests_deeper_than(value.get(), MAX_NESTING - 1) {
                    return Err(EventError::TooDeep);
                }
                self.envelope.data = self.borrowed(value.get());
                Ok(())
            }
            _ => self.extension(name, value),
        }
    }

    fn extension(&mut self, name: Name<'a>, value: &'a RawValue) -> Result<(), EventError> {
        /// Up to here a scan is cheaper than a set.
        const FEW: usize = 8;
        if !is_extension_name(&name) {
            return Err(must(&name, "match [a-z0-9]{1,20}, the form of an extension attribute's name"));
        }
        if self.extensions.len() == MOST_EXTENSIONS {
            return Err(EventError::TooManyExtensions);
        }
        let text = self.text;
        let known = if self.extensions.len() < FEW {
            self.extensions.iter().any(|e| name_of(e, text, &self.decoded) == Some(&*name))
        } else {
            if self.names.is_empty() {
                for extension in &self.extensions {
                    let name = name_of(extension, text, &self.decoded).unwrap_or_default().to_owned();
                    self.names.insert(Name::Owned(name));
                }
            }
            !self.names.insert(name.clone())
        };
        if known {
            return Err(twice(&name));
        }
        let scalar = match json::kind(value) {
            Kind::String => {
                let contents = json::string(value)
                    .ok_or_else(|| must(&name, "be a string of whole Unicode characters"))?;
                Value::String(self.keep(value, contents))
            }
            Kind::Boolean => Value::Boolean(value.get() == "true"),
            Kind::Number => Value::Integer(
                json::integer(value.get())
                    .ok_or_else(|| must(&name, "be a string, an integer of 64 bits or a boolean"))?,
            ),
            Kind::Object | Kind::Array | Kind::Null => {
                return Err(must(&name, "be a string, an integer or a boolean"));
            }
        };
        let name = match name {
            Name::Borrowed(name) => self.borrowed(name),
            Name::Owned(name) => self.decode(&name),
        };
        let json = self.borrowed(value.get());
        self.extensions.push(ExtensionSpans { name, json, value: scalar });
        Ok(())
    }

    /// The span of a string's contents: in the text where it was written plainly, else of its decoded form.
    fn keep(&mut self, value: &'a RawValue, contents: Name<'a>) -> Span {
        match contents {
            Name::Borrowed(contents) => self.borrowed(contents),
            Name::Owned(contents) => {
                let span = self.decode(&contents);
                let json = self.borrowed(value.get());
                self.escaped.push((span.start, json));
                span
            }
        }
    }

    fn decode(&mut self, contents: &str) -> Span {
        let start = offset(self.text.len() + self.decoded.len());
        self.decoded.push_str(contents);
        Span { start, len: offset(contents.len()) }
    }

    /// The span of a slice of `self.text`.
    fn borrowed(&self, slice: &str) -> Span {
        let start = (slice.as_ptr() as usize).wrapping_sub(self.text.as_ptr() as usize);
        debug_assert!(start <= self.text.len(), "the slice stands in the event's text");
        Span { start: offset(start), len: offset(slice.len()) }
    }

    fn finish(mut self) -> Result<(Envelope, String), EventError> {
        if !self.aep {
            return Err(EventError::Missing("aep"));
        }
        for attribute in
            [Attribute::Id, Attribute::Type, Attribute::Time, Attribute::Source, Attribute::Agent]
        {
            if self.envelope.span(attribute).is_absent() {
                return Err(EventError::Missing(attribute.as_str()));
            }
        }
        self.envelope.extensions = self.extensions.into_boxed_slice();
        self.envelope.escaped = self.escaped.into_boxed_slice();
        // Types have no escapes worth a look into the decoded text: read from whichever holds it.
        let span = self.envelope.span(Attribute::Type);
        let owned;
        let text = match span.of(self.text) {
            Some(text) => text,
            None => {
                owned = [self.text, &self.decoded].concat();
                span.of(&owned).unwrap_or_default()
            }
        };
        let scope = EventType::parse(text).map_or(Scope::Session, EventType::scope);
        self.envelope.scope = scope;
        self.envelope.check_scope()?;
        Ok((self.envelope, self.decoded))
    }
}

impl Envelope {
    /// Which session attributes the type's scope demands and forbids.
    fn check_scope(&self) -> Result<(), EventError> {
        let has = |attribute| !self.span(attribute).is_absent();
        let forbidden = |name, scope: &'static str| Err(EventError::Forbidden { name, scope });
        match self.scope {
            Scope::Agent => {
                for attribute in [Attribute::Session, Attribute::Run, Attribute::Step] {
                    if has(attribute) {
                        return forbidden(attribute.as_str(), "an agent-scoped event");
                    }
                }
                if self.seq.is_some() {
                    return forbidden("seq", "an agent-scoped event");
                }
            }
            Scope::Command | Scope::Foreign => {
                if !has(Attribute::Session) {
                    return Err(EventError::Missing("session"));
                }
                if self.seq.is_some() {
                    let scope = if self.scope == Scope::Command { "a command" } else { "attention.routed" };
                    return forbidden("seq", scope);
                }
            }
            Scope::Session => {
                if !has(Attribute::Session) {
                    return Err(EventError::Missing("session"));
                }
                if self.seq.is_none() {
                    return Err(EventError::Missing("seq"));
                }
            }
        }
        Ok(())
    }
}

fn name_of<'t>(extension: &ExtensionSpans, text: &'t str, decoded: &'t str) -> Option<&'t str> {
    extension.name.of(text).or_else(|| {
        let start = usize::try_from(extension.name.start).ok()?.checked_sub(text.len())?;
        decoded.get(start..start.checked_add(usize::try_from(extension.name.len).ok()?)?)
    })
}

/// Texts are shorter than 2 GiB and their decoded strings no longer than they, so every offset fits.
fn offset(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn must(name: &str, what: &'static str) -> EventError {
    EventError::Attribute { name: shortened(name), must: what }
}

fn twice(name: &str) -> EventError {
    EventError::Twice(shortened(name))
}

/// At most 32 characters of a peer's text, control characters escaped: enough to find it by.
fn shortened(name: &str) -> String {
    let mut out: String = name.chars().take(32).flat_map(char::escape_debug).collect();
    if name.chars().nth(32).is_some() {
        out.push('…');
    }
    out
}

fn set_once<T>(slot: &mut Option<T>, name: &'static str, value: T) -> Result<(), EventError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(twice(name)),
    }
}

/// `seq` or `epoch`.
fn counter(name: &'static str, value: &RawValue) -> Result<u64, EventError> {
    let integer = match json::kind(value) {
        Kind::Number => json::integer(value.get()).and_then(|integer| u64::try_from(integer).ok()),
        _ => None,
    };
    integer
        .filter(|integer| *integer <= Position::MAX_PART)
        .ok_or_else(|| must(name, "be an integer from 0 to 9223372036854775807"))
}

fn check(attribute: Attribute, value: &str) -> Result<(), EventError> {
    if value.is_empty() {
        return Err(must(attribute.as_str(), "not be empty"));
    }
    match attribute {
        Attribute::Type if EventType::parse(value).is_none() => Err(must(
            "type",
            "be {category}.{token}… with a registered category, or x.{vendor}.{category}.{token}…",
        )),
        Attribute::Time if !is_rfc3339(value) => {
            Err(must("time", "be an RFC 3339 date-time with an offset, like 2026-07-03T10:14:00Z"))
        }
        Attribute::Source if value.chars().any(|c| c.is_whitespace() || c.is_control()) => {
            Err(must("source", "be a URI: no white space, no control characters"))
        }
        Attribute::Traceparent if !is_traceparent(value) => {
            Err(must("traceparent", "be a W3C traceparent, {2}-{32}-{16}-{2} lower-case hex digits"))
        }
        _ => Ok(()),
    }
}
