//! Capture levels, and lowering an event to a ceiling.
//!
//! A ceiling is a promise to whoever set it. Lowering rewrites only what it must: attributes and the members
//! of `data` that stay keep their bytes and their order.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde_json::value::RawValue;

use super::event::Event;
use super::json::{self, Kind, Name};
use super::registry::{Gates, Registry};

/// How much operation content an event carries, in total order.
///
/// Spec: AEP-0001 §8.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Capture {
    /// Envelope only.
    None,
    /// Names, ids, counts, durations; no free text. The level of an event that names none.
    #[default]
    Metadata,
    /// Free text that has passed the emitter's redaction.
    Redacted,
    /// Verbatim content.
    Full,
}

impl Capture {
    /// Every level, lowest first.
    pub const ALL: [Self; 4] = [Self::None, Self::Metadata, Self::Redacted, Self::Full];

    /// The level's name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Metadata => "metadata",
            Self::Redacted => "redacted",
            Self::Full => "full",
        }
    }

    /// The level of that exact name, `None` for any other text.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.as_str() == name)
    }
}

impl fmt::Display for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The event at or below `ceiling`: itself, shared, when it already is, else a rewritten copy.
///
/// A `full` event under a `redacted` ceiling becomes `metadata`: `redacted` claims that the emitter's
/// redaction ran, which dropping fields can't prove. A type that isn't registered loses its `data`, for
/// nobody has said what of it is content. A field whose value has another shape than its schema says is
/// dropped where something beneath it is gated.
///
/// Spec: AEP-0001 §8.2, AEP-0002 §5.1, §5.3.
#[must_use]
pub fn down_level(event: &Event, ceiling: Capture, registry: &Registry) -> Event {
    if ceiling >= event.capture() {
        return event.clone();
    }
    let level = match (event.capture(), ceiling) {
        (Capture::Full, Capture::Redacted) => Capture::Metadata,
        _ => ceiling,
    };
    let data = match (level, event.data(), registry.gates(event.event_type())) {
        (Capture::Metadata | Capture::Redacted, Some(data), Some(gates)) => {
            lower_data(event, data, gates, level)
        }
        _ => None,
    };
    // What was legal stays so: one attribute's value changed to another legal one, `data` shrank or was made anew.
    let lowered = Event::read(&rewrite(event, level, data.as_deref()));
    debug_assert!(lowered.is_ok(), "a lowered event is a legal event");
    lowered.or_else(|_| Event::read(&rewrite(event, level, None))).unwrap_or_else(|_| event.clone())
}

/// The event's text with another `capture` and other `data`; every other byte as it was.
fn rewrite(event: &Event, level: Capture, data: Option<&str>) -> String {
    let mut out = String::with_capacity(event.as_str().len() + 32);
    let mut open = Object::start(&mut out);
    let mut named = false;
    let read = json::members::<()>(event.as_str(), |name, value| {
        match &*name {
            "capture" => {
                named = true;
                open.member(&name, &quoted_level(level));
            }
            "data" => {
                if let Some(data) = data {
                    open.member(&name, data);
                }
            }
            _ => open.member(&name, value.get()),
        }
        Ok(())
    });
    debug_assert!(read.is_ok(), "an event's text is one object");
    if !named {
        open.member("capture", &quoted_level(level));
    }
    open.end();
    out
}

fn quoted_level(level: Capture) -> String {
    format!("\"{level}\"")
}

/// `data` without what is gated above `level`; `None` when nothing sensible is left of it.
fn lower_data(event: &Event, data: &str, gates: Gates<'_>, level: Capture) -> Option<String> {
    if gates.level() > level {
        return None;
    }
    let exceptions =
        if level < Capture::Redacted { Exceptions::of(event.event_type()) } else { Exceptions::None };
    let mut out = String::with_capacity(data.len());
    let mut made = HashSet::new();
    let first: Override<'_> = &mut |name, value, out| match exceptions.concern(name) {
        // What is made anew is made once, however often it stands there.
        Some(name) if !made.insert(name) => Verdict::Drop,
        Some(_) => exceptions.apply(event, data, name, value, out),
        None => Verdict::Gated,
    };
    object(data, gates, level, &mut out, first)?;
    Some(out)
}

/// What to do with a member before the gates are looked at.
enum Verdict {
    /// The gates decide.
    Gated,
    /// It is dropped.
    Drop,
    /// It was written already.
    Written,
}

type Override<'o> = &'o mut dyn FnMut(&str, &RawValue, &mut Object<'_>) -> Verdict;

/// Copies the object in `text` without what is gated above `level`.
fn object(text: &str, gates: Gates<'_>, level: Capture, out: &mut String, first: Override<'_>) -> Option<()> {
    let mut open = Object::start(out);
    let read = json::members::<()>(text, |name, value| {
        match first(&name, value, &mut open) {
            Verdict::Drop | Verdict::Written => return Ok(()),
            Verdict::Gated => {}
        }
        let field = gates.field(&name);
        if field.level() > level {
            return Ok(());
        }
        if !field.gates_below(level) {
            open.member(&name, value.get());
        } else if let Some(kept) = nested(value, field, level) {
            open.member(&name, &kept);
        }
        Ok(())
    });
    open.end();
    read.ok().map(|_| ())
}

/// A value beneath which something is gated: pruned where its shape is the declared one, `None` otherwise.
fn nested(value: &RawValue, gates: Gates<'_>, level: Capture) -> Option<String> {
    let mut out = String::with_capacity(value.get().len());
    match json::kind(value) {
        Kind::Object if gates.has_fields() => {
            object(value.get(), gates, level, &mut out, &mut |_, _, _| Verdict::Gated)?;
        }
        Kind::Array if gates.has_items() => {
            let items = gates.items();
            out.push('[');
            // Items that are gated as such all go, whatever stands beneath them.
            let elements = if items.level() > level { Vec::new() } else { json::elements(value)? };
            for element in elements {
                let Some(kept) = nested(element, items, level) else { continue };
                if out.len() > 1 {
                    out.push(',');
                }
                out.push_str(&kept);
            }
            out.push(']');
        }
        _ => return None,
    }
    Some(out)
}

/// The fields that carry text at `metadata` by exception. A hop can't tell whether what they hold was made
/// from structure alone, so it makes them anew.
///
/// Spec: AEP-0002 §5.3.
#[derive(Clone, Copy)]
enum Exceptions {
    None,
    Request,
    Answer,
}

impl Exceptions {
    fn of(event_type: &str) -> Self {
        match event_type {
            "attention.requested" => Self::Request,
            "attention.answered" | "control.attention.respond" => Self::Answer,
            _ => Self::None,
        }
    }

    /// The name, when the field is one of these.
    fn concern(self, name: &str) -> Option<&'static str> {
        let fields: &[&str] = match self {
            Self::None => &[],
            Self::Request => &["prompt", "options", "fields"],
            Self::Answer => &["answer"],
        };
        fields.iter().find(|field| **field == name).copied()
    }

    fn apply(self, event: &Event, data: &str, name: &str, value: &RawValue, out: &mut Object<'_>) -> Verdict {
        let kept = match (self, name) {
            (Self::Request, "prompt") => Some(prompt(event, data)),
            (Self::Request, "options") => labelled(value, None),
            (Self::Request, "fields") => labelled(value, Some("choices")),
            (Self::Answer, "answer") => return answer(value, name, out),
            _ => return Verdict::Gated,
        };
        match kept {
            Some(json) => {
                out.member(name, &json);
                Verdict::Written
            }
            None => Verdict::Drop,
        }
    }
}

/// `{agent} requests {kind}`, and the subject when there is one.
fn prompt(event: &Event, data: &str) -> String {
    let mut kind = None;
    let read = json::members::<()>(data, |name, value| {
        if name == "kind" {
            kind = json::string(value);
        }
        Ok(())
    });
    debug_assert!(read.is_ok(), "data is an object");
    let kind = kind.as_deref().unwrap_or("attention");
    let mut text = format!("{} requests {kind}", event.agent());
    if let Some(subject) = event.subject() {
        text.push_str(": ");
        text.push_str(subject);
    }
    quoted(&text)
}

/// An array of `{id, label, …}` with every label replaced by its id, likewise within `inner`. What has another
/// shape is dropped.
fn labelled(value: &RawValue, inner: Option<&str>) -> Option<String> {
    let mut out = String::from("[");
    for element in json::elements(value)? {
        if json::kind(element) != Kind::Object {
            continue;
        }
        let mut id = None;
        json::members::<()>(element.get(), |name, value| {
            if name == "id" {
                id = match json::kind(value) {
                    Kind::String => Some(value.get().to_owned()),
                    Kind::Number => Some(format!("\"{}\"", value.get())),
                    Kind::Object | Kind::Array | Kind::Boolean | Kind::Null => None,
                };
            }
            Ok(())
        })
        .ok()?
        .ok()?;
        if out.len() > 1 {
            out.push(',');
        }
        let mut open = Object::start(&mut out);
        // Each once, however often it stands there.
        let (mut label, mut nested) = (false, false);
        json::members::<()>(element.get(), |name, value| {
            if name == "label" {
                if let Some(id) = &id
                    && !std::mem::replace(&mut label, true)
                {
                    open.member(&name, id);
                }
            } else if inner == Some(&*name) {
                if !std::mem::replace(&mut nested, true)
                    && let Some(kept) = labelled(value, None)
                {
                    open.member(&name, &kept);
                }
            } else {
                open.member(&name, value.get());
            }
            Ok(())
        })
        .ok()?
        .ok()?;
        open.end();
    }
    out.push(']');
    Some(out)
}

/// An answer without its text, its values reduced to numbers and booleans.
fn answer(value: &RawValue, name: &str, out: &mut Object<'_>) -> Verdict {
    if json::kind(value) != Kind::Object {
        return Verdict::Drop;
    }
    let mut kept = String::new();
    let mut open = Object::start(&mut kept);
    let read = json::members::<()>(value.get(), |name, value| {
        match &*name {
            "text" => {}
            "values" => {
                if let Some(values) = structural(value) {
                    open.member(&name, &values);
                }
            }
            _ => open.member(&name, value.get()),
        }
        Ok(())
    });
    open.end();
    if read.is_err() {
        return Verdict::Drop;
    }
    out.member(name, &kept);
    Verdict::Written
}

/// The members of an object that are numbers or booleans.
fn structural(value: &RawValue) -> Option<String> {
    let mut out = String::new();
    let mut open = Object::start(&mut out);
    let read = json::members::<()>(value.get(), |name, value| {
        if matches!(json::kind(value), Kind::Number | Kind::Boolean) {
            open.member(&name, value.get());
        }
        Ok(())
    });
    open.end();
    read.ok().map(|_| out)
}

fn quoted(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len() + 2);
    json::write_string(&mut out, text);
    String::from_utf8(out).unwrap_or_default()
}

/// An object being written.
struct Object<'o> {
    out: &'o mut String,
    first: bool,
}

impl<'o> Object<'o> {
    fn start(out: &'o mut String) -> Self {
        out.push('{');
        Self { out, first: true }
    }

    fn member(&mut self, name: &str, json: &str) {
        if !std::mem::replace(&mut self.first, false) {
            self.out.push(',');
        }
        let plain = name.bytes().all(|b| b >= b' ' && b != b'"' && b != b'\\');
        let name: Name<'_> = if plain { Cow::Owned(format!("\"{name}\"")) } else { Cow::Owned(quoted(name)) };
        self.out.push_str(&name);
        self.out.push(':');
        self.out.push_str(json);
    }

    fn end(self) {
        self.out.push('}');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(event_type: &str, capture: &str, data: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e1","type":"{event_type}","subject":"Bash","time":"2026-07-03T10:00:00Z","source":"aep://h/agent/a","agent":"bot","session":"s1","seq":1,"acme":5.0,"capture":"{capture}","data":{data}}}"#
        ))
        .unwrap()
    }

    fn lowered(event_type: &str, capture: &str, ceiling: Capture, data: &str) -> (Capture, Option<String>) {
        let out = down_level(&event(event_type, capture, data), ceiling, &Registry::core());
        (out.capture(), out.data().map(str::to_owned))
    }

    #[test]
    fn at_or_above_its_level_an_event_is_shared_unchanged() {
        let original = event("tool.completed", "redacted", r#"{"result_redacted":"x"}"#);
        for ceiling in [Capture::Redacted, Capture::Full] {
            assert_eq!(down_level(&original, ceiling, &Registry::core()), original);
        }
    }

    #[test]
    fn what_stays_keeps_its_bytes_and_order() {
        let out = down_level(
            &event("tool.completed", "full", r#"{"status" : "ok","result":"secret","n":1.0,"m":[ 1e2 ]}"#),
            Capture::Metadata,
            &Registry::core(),
        );
        assert_eq!(
            out.as_str(),
            r#"{"aep":"0.1","id":"e1","type":"tool.completed","subject":"Bash","time":"2026-07-03T10:00:00Z","source":"aep://h/agent/a","agent":"bot","session":"s1","seq":1,"acme":5.0,"capture":"metadata","data":{"status":"ok","n":1.0,"m":[ 1e2 ]}}"#
        );
    }

    #[test]
    fn none_drops_data_and_an_absent_capture_is_named() {
        let text = event("tool.completed", "metadata", r#"{"status":"ok"}"#)
            .as_str()
            .replace(r#""capture":"metadata","#, "");
        let out = down_level(&Event::parse_str(&text).unwrap(), Capture::None, &Registry::core());
        assert_eq!((out.declared_capture(), out.data()), (Some(Capture::None), None));
    }

    #[test]
    fn full_under_redacted_lands_on_metadata() {
        let (capture, data) = lowered(
            "tool.completed",
            "full",
            Capture::Redacted,
            r#"{"result":"s","result_redacted":"s","status":"ok"}"#,
        );
        assert_eq!((capture, data.as_deref()), (Capture::Metadata, Some(r#"{"status":"ok"}"#)));
    }

    #[test]
    fn unregistered_types_lose_their_data() {
        assert_eq!(
            lowered("x.acme.session.blob", "full", Capture::Metadata, r#"{"a":1}"#),
            (Capture::Metadata, None)
        );
        assert_eq!(
            lowered("message.user.submitted", "full", Capture::Metadata, r#"{"a":1}"#),
            (Capture::Metadata, None)
        );
    }

    #[test]
    fn an_escaped_member_name_hides_nothing() {
        let (_, data) = lowered(
            "tool.failed",
            "redacted",
            Capture::Metadata,
            r#"{"\u0065rror":{"m\u0065ssage":"secret","type":"E"}}"#,
        );
        assert_eq!(data.as_deref(), Some(r#"{"error":{"type":"E"}}"#));
    }

    #[test]
    fn a_repeated_member_hides_nothing() {
        let (_, data) = lowered(
            "tool.completed",
            "full",
            Capture::Metadata,
            r#"{"status":"a","result":"s","status":"b","result":"s"}"#,
        );
        assert_eq!(data.as_deref(), Some(r#"{"status":"a","status":"b"}"#));
    }

    #[test]
    fn another_shape_than_declared_hides_nothing() {
        for shape in [r#"{"error":"secret"}"#, r#"{"error":[{"message":"secret"}]}"#, r#"{"error":null}"#] {
            assert_eq!(
                lowered("tool.failed", "redacted", Capture::Metadata, shape).1.as_deref(),
                Some("{}"),
                "{shape}"
            );
        }
        let (_, data) = lowered(
            "resource.retrieval.returned",
            "full",
            Capture::Metadata,
            r#"{"documents":["secret",{"id":"d","content":"secret"},["secret"]],"count":1}"#,
        );
        assert_eq!(data.as_deref(), Some(r#"{"documents":[{"id":"d"}],"count":1}"#));
        for options in [r#"{"options":"secret"}"#, r#"{"fields":{"label":"secret"}}"#] {
            assert_eq!(
                lowered("attention.requested", "redacted", Capture::Metadata, options).1.as_deref(),
                Some("{}")
            );
        }
    }

    #[test]
    fn a_gate_on_items_or_on_data_itself_goes_for_all_beneath() {
        let mut registry = Registry::core();
        for (schema, kept) in [
            (
                r#"{"properties":{"list":{"items":{"x-aep-capture":"full","properties":{"id":{}}}}}}"#,
                Some(r#"{"list":[],"n":1}"#),
            ),
            (r#"{"x-aep-capture":"redacted","properties":{"n":{}}}"#, None),
        ] {
            registry.add_schema("x.acme.session.blob", schema).unwrap();
            let original = event("x.acme.session.blob", "full", r#"{"list":[{"id":"secret"}],"n":1}"#);
            assert_eq!(down_level(&original, Capture::Metadata, &registry).data(), kept);
        }
    }

    #[test]
    fn a_request_is_described_from_its_structure() {
        let (_, data) = lowered(
            "attention.requested",
            "redacted",
            Capture::Metadata,
            r#"{"prompt":"secret","options":[{"id":"a","label":"secret"},{"label":"secret"},"secret",{"id":2,"label":"secret"}]}"#,
        );
        assert_eq!(
            data.as_deref(),
            Some(
                r#"{"prompt":"bot requests attention: Bash","options":[{"id":"a","label":"a"},{},{"id":2,"label":"2"}]}"#
            )
        );
        let (_, data) = lowered(
            "attention.requested",
            "redacted",
            Capture::Metadata,
            r#"{"kind":"form","prompt":["secret"]}"#,
        );
        assert_eq!(data.as_deref(), Some(r#"{"kind":"form","prompt":"bot requests form: Bash"}"#));
    }

    #[test]
    fn what_is_made_anew_is_made_once() {
        let many = |member: &str| vec![member; 2000].join(",");
        let (_, data) = lowered(
            "attention.requested",
            "redacted",
            Capture::Metadata,
            &format!("{{{}}}", many(r#""prompt":"x""#)),
        );
        assert_eq!(data.as_deref(), Some(r#"{"prompt":"bot requests attention: Bash"}"#));
        let id = "i".repeat(100_000);
        let options = format!(r#"{{"options":[{{"id":"{id}",{}}}]}}"#, many(r#""label":"x""#));
        let (_, data) = lowered("attention.requested", "redacted", Capture::Metadata, &options);
        assert!(data.unwrap().len() < 3 * id.len());
    }

    #[test]
    fn answers_keep_numbers_and_booleans_only() {
        let (_, data) = lowered(
            "attention.answered",
            "redacted",
            Capture::Metadata,
            r#"{"answer":{"option":"2","text":"secret","values":{"a":"secret","b":true,"c":3,"d":["secret"],"e":{"x":1},"f":null}},"via":"control"}"#,
        );
        assert_eq!(
            data.as_deref(),
            Some(r#"{"answer":{"option":"2","values":{"b":true,"c":3}},"via":"control"}"#)
        );
        assert_eq!(
            lowered("attention.answered", "redacted", Capture::Metadata, r#"{"answer":"secret"}"#)
                .1
                .as_deref(),
            Some("{}")
        );
    }
}
