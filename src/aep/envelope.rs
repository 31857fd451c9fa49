//! The envelope: which attributes an event may carry, and what each of their values must look like.
//!
//! Layout. An `Envelope` holds no text of its own. Every attribute is a `Span` into the event's text, which
//! is the received bytes followed by the decoded form of the few strings that were written with escapes. A
//! span within the received bytes stands between its two quotes; one past them has its quoted original
//! recorded in `escaped`. So an attribute's value is a slice, its exact JSON is a slice, and an event is one
//! allocation of text plus this struct.

mod form;
mod read;

use super::capture::Capture;
use super::event_type::Scope;
use super::severity::Severity;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extension_names_are_short_lower_case_and_not_core() {
        assert!(is_extension_name("acmeregion") && is_extension_name("a") && is_extension_name("0"));
        for illegal in ["", "acme_ext", "Acme", "acmeveryveryverylongext1", "id", "data", "seq", "é"] {
            assert!(!is_extension_name(illegal), "{illegal}");
        }
    }
}
