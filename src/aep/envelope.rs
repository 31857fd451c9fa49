//! The envelope: which attributes an event may carry, and what each of their values must look like.
//!
//! Layout. An `Envelope` holds no text of its own. Every attribute is a `Span` into the event's text, which
//! is the received bytes followed by the decoded form of the few strings that were written with escapes. A
//! span within the received bytes stands between its two quotes; one past them has its quoted original
//! recorded in `escaped`. So an attribute's value is a slice, its exact JSON is a slice, and an event is one
//! allocation of text plus this struct.

use std::collections::HashSet;

use super::capture::Capture;
use super::event::EventError;
use super::event_type::{EventType, Scope};
use super::json::{self, Kind, MAX_NESTING, Name};
use super::position::Position;
use super::severity::Severity;
use serde_json::value::RawValue;

/// A stretch of an event's text, in bytes. Events are shorter than 4 GiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    len: u32,
}

impl Span {
    /// An attribute that the event doesn't carry.
    const ABSENT: Self = Self { start: u32::MAX, len: 0 };

    fn is_absent(self) -> bool {
        self.start == u32::MAX
    }

    /// Widens a string's contents to the string with its quotes.
    fn quoted(self) -> Self {
        Self { start: self.start.saturating_sub(1), len: self.len.saturating_add(2) }
    }

    /// The text under the span; `None` when the attribute is absent.
    pub(super) fn of(self, text: &str) -> Option<&str> {
        let start = usize::try_from(self.start).ok()?;
        let len = usize::try_from(self.len).ok()?;
        text.get(start..start.checked_add(len)?)
    }
}

/// A string attribute of the core envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attribute {
    /// Unique per `source`.
    Id,
    /// `{category}.{token}…`
    Type,
    /// The entity acted upon.
    Subject,
    /// RFC 3339, for display.
    Time,
    /// URI of the emitter.
    Source,
    /// Logical name of the agent.
    Agent,
    /// Session grouping key.
    Session,
    /// Run within the session.
    Run,
    /// Phase within the run.
    Step,
    /// `id` of the causing event.
    Cause,
    /// W3C trace context.
    Traceparent,
}

impl Attribute {
    /// How many there are.
    const COUNT: usize = 11;

    /// The attribute's name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Id => "id",
            Self::Type => "type",
            Self::Subject => "subject",
            Self::Time => "time",
            Self::Source => "source",
            Self::Agent => "agent",
            Self::Session => "session",
            Self::Run => "run",
            Self::Step => "step",
            Self::Cause => "cause",
            Self::Traceparent => "traceparent",
        }
    }
}

/// Whether `name` is one of the seventeen members that the core envelope defines.
///
/// Spec: AEP-0001 §5.1.
#[must_use]
pub fn is_core(name: &str) -> bool {
    matches!(
        name,
        "aep"
            | "id"
            | "type"
            | "subject"
            | "time"
            | "source"
            | "agent"
            | "session"
            | "run"
            | "step"
            | "seq"
            | "epoch"
            | "cause"
            | "traceparent"
            | "severity"
            | "capture"
            | "data"
    )
}

/// Whether `name` has the form of an extension attribute, `[a-z0-9]{1,20}`, and no core meaning.
///
/// Spec: AEP-0001 §5.4.
#[must_use]
pub fn is_extension_name(name: &str) -> bool {
    (1..=20).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        && !is_core(name)
}

/// The value of an extension attribute, or of a filter's equality predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scalar<'a> {
    /// A JSON string, decoded.
    String(&'a str),
    /// An integral JSON number.
    Integer(i64),
    /// `true` or `false`.
    Boolean(bool),
}

/// An extension attribute of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extension<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its value, decoded.
    pub value: Scalar<'a>,
    /// Its value's exact JSON.
    pub json: &'a str,
}

#[derive(Debug, Clone, Copy)]
enum Value {
    String(Span),
    Integer(i64),
    Boolean(bool),
}

#[derive(Debug, Clone, Copy)]
struct ExtensionSpans {
    name: Span,
    json: Span,
    value: Value,
}

/// What the envelope of one event says. Read through [`Event`](super::event::Event).
#[derive(Debug)]
pub(super) struct Envelope {
    strings: [Span; Attribute::COUNT],
    data: Span,
    seq: Option<u64>,
    epoch: Option<u64>,
    severity: Option<Severity>,
    capture: Option<Capture>,
    scope: Scope,
    extensions: Box<[ExtensionSpans]>,
    /// For strings written with escapes: the start of their decoded form, and the quoted original.
    escaped: Box<[(u32, Span)]>,
}

impl Envelope {
    /// Reads and checks the envelope of the event in `text`. The second value is what the event's text needs
    /// after its received bytes: the decoded strings.
    pub(super) fn read(text: &str) -> Result<(Self, String), EventError> {
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

    pub(super) fn string<'t>(&self, attribute: Attribute, text: &'t str) -> Option<&'t str> {
        self.span(attribute).of(text)
    }

    /// The exact JSON of a string attribute, quotes included.
    pub(super) fn string_json<'t>(&self, attribute: Attribute, text: &'t str) -> Option<&'t str> {
        self.json_of(self.span(attribute)).of(text)
    }

    fn span(&self, attribute: Attribute) -> Span {
        self.strings.get(attribute as usize).copied().unwrap_or(Span::ABSENT)
    }

    fn json_of(&self, contents: Span) -> Span {
        if contents.is_absent() {
            return contents;
        }
        self.escaped
            .iter()
            .find_map(|(start, json)| (*start == contents.start).then_some(*json))
            .unwrap_or_else(|| contents.quoted())
    }

    pub(super) fn data<'t>(&self, text: &'t str) -> Option<&'t str> {
        self.data.of(text)
    }

    pub(super) fn seq(&self) -> Option<u64> {
        self.seq
    }

    pub(super) fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    pub(super) fn severity(&self) -> Option<Severity> {
        self.severity
    }

    pub(super) fn capture(&self) -> Option<Capture> {
        self.capture
    }

    pub(super) fn scope(&self) -> Scope {
        self.scope
    }

    pub(super) fn extensions<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Extension<'t>> {
        self.extensions.iter().map(move |extension| Extension {
            name: extension.name.of(text).unwrap_or_default(),
            json: extension.json.of(text).unwrap_or_default(),
            value: match extension.value {
                Value::String(span) => Scalar::String(span.of(text).unwrap_or_default()),
                Value::Integer(integer) => Scalar::Integer(integer),
                Value::Boolean(boolean) => Scalar::Boolean(boolean),
            },
        })
    }

    /// Heap memory held beside the event's text, in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        size_of_val(&*self.extensions) + size_of_val(&*self.escaped)
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
                    Some(super::VERSION) => Ok(()),
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

/// `^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`
fn is_traceparent(text: &str) -> bool {
    let mut parts = text.split('-');
    [2, 32, 16, 2].into_iter().all(|len| {
        parts.next().is_some_and(|part| {
            part.len() == len && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        })
    }) && parts.next().is_none()
}

/// RFC 3339 `date-time`: lower-case `t` and `z` are legal, so is a leap second; a zone name isn't.
fn is_rfc3339(text: &str) -> bool {
    let Some((date, rest)) = text.split_at_checked(10) else { return false };
    let Some(rest) = rest.strip_prefix(['T', 't']) else { return false };
    let Some((clock, rest)) = rest.split_at_checked(8) else { return false };
    let [Some(year), Some(month), Some(day)] = fields(date, '-', [4, 2, 2]) else { return false };
    let [Some(hour), Some(minute), Some(second)] = fields(clock, ':', [2, 2, 2]) else { return false };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return false,
    };
    if !(1..=days).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return false;
    }
    let offset = match rest.strip_prefix('.') {
        None => rest,
        Some(fraction) => {
            let rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.len() == fraction.len() {
                return false;
            }
            rest
        }
    };
    if offset == "Z" || offset == "z" {
        return true;
    }
    let Some(offset) = offset.strip_prefix(['+', '-']) else { return false };
    let [Some(hour), Some(minute)] = fields(offset, ':', [2, 2]) else { return false };
    hour <= 23 && minute <= 59
}

/// Exactly `N` numbers of the given widths, separated by `separator`.
fn fields<const N: usize>(text: &str, separator: char, widths: [usize; N]) -> [Option<u32>; N] {
    let mut parts = text.split(separator);
    let numbers = widths.map(|width| {
        let part = parts.next()?;
        let digits = part.len() == width && part.bytes().all(|b| b.is_ascii_digit());
        if digits { part.parse().ok() } else { None }
    });
    if parts.next().is_some() { [None; N] } else { numbers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_checked_as_rfc_3339_says() {
        for legal in [
            "2026-07-03T10:14:00Z",
            "2026-07-03t10:14:00z",
            "2026-07-03T10:14:00.000Z",
            "2024-02-29T00:00:00+23:59",
            "2026-12-31T23:59:60Z",
            "2026-07-03T10:14:00.123456789012-00:00",
            "0000-01-01T00:00:00Z",
        ] {
            assert!(is_rfc3339(legal), "{legal}");
        }
        for illegal in [
            "",
            "2026-07-03",
            "2026-07-03T10:14:00",
            "2026-07-03 10:14:00Z",
            "2026-07-03T10:14Z",
            "2026-7-3T10:14:00Z",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-07-32T00:00:00Z",
            "2026-07-03T24:00:00Z",
            "2026-07-03T10:60:00Z",
            "2026-07-03T10:14:61Z",
            "2026-07-03T10:14:00.Z",
            "2026-07-03T10:14:00+2:00",
            "2026-07-03T10:14:00+24:00",
            "2026-07-03T10:14:00UTC",
            "2026-07-03T10:14:00Z ",
            "2026-07-03T10:14:00ZZ",
            "２026-07-03T10:14:00Z",
            "2026-07-03T10:14:00+0000",
            "1900-02-29T00:00:00Z",
        ] {
            assert!(!is_rfc3339(illegal), "{illegal}");
        }
    }

    #[test]
    fn traceparents_are_lower_case_hex_of_exact_lengths() {
        assert!(is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        for illegal in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "zz-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
        ] {
            assert!(!is_traceparent(illegal), "{illegal}");
        }
    }

    #[test]
    fn extension_names_are_short_lower_case_and_not_core() {
        assert!(is_extension_name("acmeregion") && is_extension_name("a") && is_extension_name("0"));
        for illegal in ["", "acme_ext", "Acme", "acmeveryveryverylongext1", "id", "data", "seq", "é"] {
            assert!(!is_extension_name(illegal), "{illegal}");
        }
    }
}
