//! An event: the bytes that were received, and what its envelope says.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::capture::Capture;
use super::envelope::{Attribute, Envelope, Extension, Scalar};
use super::event_type::{EventType, Scope};
use super::json::{JsonError, MAX_NESTING};
use super::position::{EventKey, Position, SessionKey};
use super::severity::Severity;

/// One legal event. Cloning shares it.
///
/// The text is what came in, byte for byte, but for line breaks between tokens, which become spaces: every
/// binding frames events by lines. `data` is never parsed here.
///
/// ```
/// use aep_sidecar::aep::{Event, Severity};
///
/// let wire = br#"{"aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:14:01Z",
///   "source":"aep://host/agent/demo","agent":"demo","session":"s1","seq":0,"data":{"trigger":"user"}}"#;
/// let event = Event::parse(wire)?;
/// assert_eq!(event.id(), "e1");
/// assert_eq!(event.severity(), Severity::Info); // the default
/// assert_eq!(event.data(), Some(r#"{"trigger":"user"}"#));
/// assert!(!event.as_str().contains('\n'));
/// # Ok::<(), aep_sidecar::aep::EventError>(())
/// ```
///
/// Spec: AEP-0001 §5.
#[derive(Clone)]
pub struct Event(Arc<Inner>);

struct Inner {
    /// The received bytes, then the decoded strings (see [`Envelope`]).
    text: Box<str>,
    /// Where the received bytes end.
    received: usize,
    envelope: Envelope,
}

/// The most extension attributes of one event: every reader's filter is matched against them.
pub const MOST_EXTENSIONS: usize = 128;

/// Why bytes aren't a legal event. Names the attribute; never repeats `data`.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// Not one JSON object in UTF-8.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// Arrays and objects nest too deep.
    #[error("nests deeper than {MAX_NESTING} levels")]
    TooDeep,
    /// Longer than 256 MiB.
    #[error("longer than 256 MiB")]
    TooLong,
    /// More extension attributes than an event may have.
    #[error("more than {MOST_EXTENSIONS} extension attributes")]
    TooManyExtensions,
    /// A member stands twice: two readers would see two different events.
    #[error("{0} stands twice")]
    Twice(String),
    /// A required attribute isn't there.
    #[error("{0} is required")]
    Missing(&'static str),
    /// An attribute is there that the type's scope forbids.
    #[error("{name} is not allowed in {scope}")]
    Forbidden {
        /// The attribute.
        name: &'static str,
        /// What kind of event it is.
        scope: &'static str,
    },
    /// An attribute's name or value is out of form.
    #[error("{name} must {must}")]
    Attribute {
        /// The attribute, shortened.
        name: String,
        /// What it must be or do.
        must: &'static str,
    },
}

impl EventError {
    /// The wire code: `invalid-json` when the text couldn't be read at all, else `invalid-event`.
    ///
    /// Spec: AEP-0003 §3.2.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Json(JsonError::Syntax(_) | JsonError::Utf8(_)) => "invalid-json",
            _ => "invalid-event",
        }
    }
}

impl Event {
    /// Reads one event. White space around it is dropped.
    ///
    /// # Errors
    /// When the bytes aren't one legal event, saying which attribute is at fault.
    pub fn parse(bytes: &[u8]) -> Result<Self, EventError> {
        let text = std::str::from_utf8(bytes).map_err(|error| JsonError::Utf8(error.valid_up_to()))?;
        Self::parse_str(text)
    }

    /// Reads one event from text that is known to be UTF-8.
    ///
    /// # Errors
    /// As [`Event::parse`].
    pub fn parse_str(text: &str) -> Result<Self, EventError> {
        /// Far above any body that is taken, and far below what the envelope's spans can address, so that an
        /// event that was taken can be rewritten.
        const LONGEST: usize = 256 << 20;
        let text = text.trim_matches([' ', '\t', '\r', '\n']);
        if text.len() > LONGEST {
            return Err(EventError::TooLong);
        }
        Self::read(text)
    }

    /// Reads trimmed text, of whatever length spans can address.
    pub(super) fn read(text: &str) -> Result<Self, EventError> {
        let (envelope, decoded) = Envelope::read(text)?;
        let mut owned = String::with_capacity(text.len() + decoded.len());
        // A line break inside a string is illegal JSON, so each of these stands between tokens.
        let mut rest = text;
        while let Some(at) = memchr::memchr2(b'\n', b'\r', rest.as_bytes()) {
            let (line, tail) = rest.split_at(at);
            owned.push_str(line);
            owned.push(' ');
            rest = tail.get(1..).unwrap_or_default();
        }
        owned.push_str(rest);
        owned.push_str(&decoded);
        Ok(Self(Arc::new(Inner { text: owned.into_boxed_str(), received: text.len(), envelope })))
    }

    /// The event as received, on one line.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.text.get(..self.0.received).unwrap_or_default()
    }

    /// The event as received, on one line.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.as_str().as_bytes()
    }

    /// The value of a string attribute, `None` when absent.
    #[must_use]
    pub fn string(&self, attribute: Attribute) -> Option<&str> {
        self.0.envelope.string(attribute, &self.0.text)
    }

    /// The exact JSON of a string attribute, quotes included; `None` when absent.
    #[must_use]
    pub fn string_json(&self, attribute: Attribute) -> Option<&str> {
        self.0.envelope.string_json(attribute, &self.0.text)
    }

    fn required(&self, attribute: Attribute) -> &str {
        // Parsing refuses events without it.
        self.string(attribute).unwrap_or_default()
    }

    /// `id`, unique per source.
    #[must_use]
    pub fn id(&self) -> &str {
        self.required(Attribute::Id)
    }

    /// `type`, as text.
    #[must_use]
    pub fn event_type(&self) -> &str {
        self.required(Attribute::Type)
    }

    /// `subject`.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        self.string(Attribute::Subject)
    }

    /// `time`, verbatim.
    #[must_use]
    pub fn time(&self) -> &str {
        self.required(Attribute::Time)
    }

    /// `source`, verbatim.
    #[must_use]
    pub fn source(&self) -> &str {
        self.required(Attribute::Source)
    }

    /// `agent`.
    #[must_use]
    pub fn agent(&self) -> &str {
        self.required(Attribute::Agent)
    }

    /// `session`; agent-scoped events have none.
    #[must_use]
    pub fn session(&self) -> Option<&str> {
        self.string(Attribute::Session)
    }

    /// `seq`; commands, `attention.routed` and agent-scoped events have none.
    #[must_use]
    pub fn seq(&self) -> Option<u64> {
        self.0.envelope.seq()
    }

    /// `epoch` as declared, `None` when absent.
    #[must_use]
    pub fn declared_epoch(&self) -> Option<u64> {
        self.0.envelope.epoch()
    }

    /// `(epoch, seq)`, the epoch defaulting to 0; `None` for an event without `seq`.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        self.seq().map(|seq| Position::new(self.declared_epoch().unwrap_or(0), seq))
    }

    /// `severity`, defaulting to `info`.
    #[must_use]
    pub fn severity(&self) -> Severity {
        self.declared_severity().unwrap_or_default()
    }

    /// `severity` as declared, `None` when absent.
    #[must_use]
    pub fn declared_severity(&self) -> Option<Severity> {
        self.0.envelope.severity()
    }

    /// `capture`, defaulting to `metadata`.
    #[must_use]
    pub fn capture(&self) -> Capture {
        self.declared_capture().unwrap_or_default()
    }

    /// `capture` as declared, `None` when absent.
    #[must_use]
    pub fn declared_capture(&self) -> Option<Capture> {
        self.0.envelope.capture()
    }

    /// `data`, its exact JSON; `None` when absent.
    #[must_use]
    pub fn data(&self) -> Option<&str> {
        self.0.envelope.data(&self.0.text)
    }

    /// The extension attributes in the order received.
    pub fn extensions(&self) -> impl Iterator<Item = Extension<'_>> {
        self.0.envelope.extensions(&self.0.text)
    }

    /// The value of one extension attribute.
    #[must_use]
    pub fn extension(&self, name: &str) -> Option<Scalar<'_>> {
        self.extensions().find(|extension| extension.name == name).map(|extension| extension.value)
    }

    /// What the type says about the event's scope.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.0.envelope.scope()
    }

    /// `(source, id)`, by which duplicates are told.
    #[must_use]
    pub fn key(&self) -> EventKey<'_> {
        EventKey { source: self.source(), id: self.id() }
    }

    /// `(source, session)`, under which per-session state is kept.
    #[must_use]
    pub fn session_key(&self) -> SessionKey<'_> {
        SessionKey { source: self.source(), session: self.session().unwrap_or_default() }
    }

    /// The type, parsed.
    #[must_use]
    pub fn parsed_type(&self) -> Option<EventType<'_>> {
        EventType::parse(self.event_type())
    }

    /// Memory that holding this event takes, in bytes, shared by all its clones.
    #[must_use]
    pub fn memory(&self) -> usize {
        /// The two counters of an `Arc`.
        const COUNTERS: usize = 16;
        COUNTERS + size_of::<Inner>() + self.0.text.len() + self.0.envelope.heap_bytes()
    }
}

impl fmt::Debug for Event {
    /// Identity only: `data` never reaches a debug print.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("type", &self.event_type())
            .field("source", &self.source())
            .field("id", &self.id())
            .field("position", &self.position())
            .finish_non_exhaustive()
    }
}

impl PartialEq for Event {
    /// Equal when received as the same bytes.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.as_str() == other.as_str()
    }
}

impl Eq for Event {}

/// The events of an NDJSON text: every line that isn't blank, with its index among them, counted from 0.
/// Lines end by `\n` or `\r\n`.
///
/// Spec: AEP-0003 §3.2.
pub fn lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\r')))
        .enumerate()
}

/// At most 64 characters of `text` for an error message, control characters escaped.
#[must_use]
pub fn quoted(text: &str) -> Cow<'_, str> {
    const LONGEST: usize = 64;
    if text.len() <= LONGEST && !text.contains(|c: char| c.is_control() || c == '"') {
        return Cow::Borrowed(text);
    }
    let mut out: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        out.push('…');
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CORE: &str = r#""aep":"0.1","id":"e1","type":"run.started","time":"2026-07-03T10:14:01Z","source":"aep://h/agent/a","agent":"a","session":"s1","seq":3"#;

    fn with(members: &str) -> String {
        format!("{{{CORE}{members}}}")
    }

    fn refusal(text: &str) -> (String, &'static str) {
        let error = Event::parse(text.as_bytes()).expect_err(text);
        (error.to_string(), error.code())
    }

    #[test]
    fn what_is_kept_is_what_was_received() {
        let text = with(r#", "acme" : 5.0,"data":{"b":1.0,"a":[ 1e2 , 12345678901234567890 ]}"#);
        let event = Event::parse_str(&format!("\r\n\t {text} \n")).unwrap();
        assert_eq!(event.as_str(), text);
        assert_eq!(event.data(), Some(r#"{"b":1.0,"a":[ 1e2 , 12345678901234567890 ]}"#));
        assert_eq!(event.extension("acme"), Some(Scalar::Integer(5)));
        assert_eq!(event.extensions().next().unwrap().json, "5.0");
    }

    #[test]
    fn line_breaks_between_tokens_become_spaces() {
        let text = with(",\r\n\"data\":{\n\"a\":\"b\\n\"\r}");
        let event = Event::parse_str(&text).unwrap();
        assert_eq!(event.as_str(), with(",  \"data\":{ \"a\":\"b\\n\" }"));
        assert_eq!(event.data(), Some("{ \"a\":\"b\\n\" }"));
    }

    #[test]
    fn escapes_are_decoded_and_their_json_kept() {
        let text = with(r#","subject":"a\"b\u00e9","\u0061cme":"\ud83d\ude00","run":"plain""#);
        let event = Event::parse_str(&text).unwrap();
        assert_eq!(event.as_str(), text);
        assert_eq!(event.subject(), Some("a\"bé"));
        assert_eq!(event.string_json(Attribute::Subject), Some(r#""a\"b\u00e9""#));
        assert_eq!(event.string_json(Attribute::Run), Some(r#""plain""#));
        assert_eq!(event.extension("acme"), Some(Scalar::String("😀")));
        assert_eq!(event.extensions().next().unwrap().json, r#""\ud83d\ude00""#);
    }

    #[test]
    fn an_escaped_type_is_the_type_it_spells() {
        let text =
            with("").replace("run.started", r"\u0061gent.idle").replace(r#","session":"s1","seq":3"#, "");
        let event = Event::parse_str(&text).unwrap();
        assert_eq!(event.event_type(), "agent.idle");
        assert_eq!(event.scope(), Scope::Agent);
    }

    #[test]
    fn defaults_apply() {
        let event = Event::parse_str(&with("")).unwrap();
        assert_eq!(event.position(), Some(Position::new(0, 3)));
        assert_eq!((event.severity(), event.capture()), (Severity::Info, Capture::Metadata));
        assert_eq!((event.declared_severity(), event.declared_capture()), (None, None));
    }

    #[test]
    fn duplicate_members_are_refused_however_they_are_spelled() {
        for duplicate in [
            r#","id":"e2""#,
            r#","i\u0064":"e2""#,
            r#","seq":4"#,
            r#","aep":"0.1""#,
            r#","acme":1,"acme":2"#,
            r#","acme":1,"\u0061cme":2"#,
            r#","\u0061cme":1,"acme":2"#,
            r#","data":{},"data":{}"#,
            r#","severity":"info","severity":"info""#,
            r#","capture":"none","capture":"none""#,
            r#","epoch":0,"epoch":0"#,
        ] {
            let (text, code) = refusal(&with(duplicate));
            assert!(text.contains("twice") && code == "invalid-event", "{duplicate}: {text}");
        }
        let many: String = (0..50).map(|n| format!(",\"e{n}\":1")).collect();
        assert!(Event::parse_str(&with(&many)).is_ok());
        assert!(refusal(&with(&format!("{many},\"e3\":1"))).0.contains("e3 stands twice"));
        assert!(refusal(&with(&format!("{many},\"e49\":1"))).0.contains("e49 stands twice"));
    }

    #[test]
    fn null_is_never_legal() {
        for name in
            ["subject", "run", "step", "epoch", "cause", "traceparent", "severity", "capture", "data", "acme"]
        {
            let (text, code) = refusal(&with(&format!(",\"{name}\":null")));
            assert!(text.starts_with(name) && code == "invalid-event", "{text}");
        }
    }

    #[test]
    fn integers_are_exact_and_integral_numbers_are_integers() {
        for (json, seq) in [
            ("9007199254740991", 9_007_199_254_740_991),
            ("5.0", 5),
            ("5e0", 5),
            ("0", 0),
            ("-0", 0),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            let text = with("").replace("\"seq\":3", &format!("\"seq\":{json}"));
            assert_eq!(Event::parse_str(&text).unwrap().seq(), Some(seq), "{json}");
        }
        for json in ["-1", "5.5", "\"5\"", "true", "9223372036854775808", "1e400", "[5]"] {
            let text = with("").replace("\"seq\":3", &format!("\"seq\":{json}"));
            assert_eq!(refusal(&text).1, "invalid-event", "{json}");
        }
    }

    #[test]
    fn unreadable_text_is_invalid_json_and_the_rest_invalid_event() {
        for text in [
            "",
            "{",
            "nonsense",
            "{}x",
            "{\"a\":NaN}",
            "{\"a\":1,}",
            "{'a':1}",
            "{\"a\":\"\u{1}\"}",
            "\u{feff}{}",
        ] {
            assert_eq!(refusal(text).1, "invalid-json", "{text:?}");
        }
        assert_eq!(refusal(&format!("{}{}", with(""), with(""))).1, "invalid-json");
        for text in ["[]", "5", "\"x\"", "null", "{}"] {
            assert_eq!(refusal(text).1, "invalid-event", "{text:?}");
        }
        let mut bytes = with("").into_bytes();
        bytes[20] = 0xff;
        let error = Event::parse(&bytes).unwrap_err();
        assert_eq!(error.code(), "invalid-json");
        assert_eq!(error.to_string(), "not valid UTF-8 after byte 20");
    }

    #[test]
    fn nesting_is_bounded_and_nothing_overflows() {
        let nested =
            |depth: usize| with(&format!(",\"data\":{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth)));
        assert!(Event::parse_str(&nested(MAX_NESTING - 2)).is_ok());
        assert_eq!(
            refusal(&nested(MAX_NESTING - 1)),
            ("nests deeper than 100 levels".into(), "invalid-event")
        );
        assert_eq!(refusal(&nested(3_000_000)).1, "invalid-event");
        let elsewhere = with(&format!(",\"acme\":{}{}", "[".repeat(1_000_000), "]".repeat(1_000_000)));
        assert_eq!(refusal(&elsewhere).1, "invalid-event");
        assert!(Event::parse(&vec![b'['; 5_000_000]).is_err());
        assert!(Event::parse("{\"a\":".repeat(1_000_000).as_bytes()).is_err());
    }

    #[test]
    fn a_debug_print_shows_identity_and_no_data() {
        let event = Event::parse_str(&with(r#","data":{"prompt":"secret"}"#)).unwrap();
        let text = format!("{event:?}");
        assert!(text.contains("e1") && !text.contains("secret"), "{text}");
    }

    #[test]
    fn ndjson_lines_are_counted_without_blank_ones() {
        let text = b"\n {\"a\":1} \r\n\r\n  \t\n{\"b\":2}";
        let got: Vec<_> =
            lines(text).map(|(n, line)| (n, std::str::from_utf8(line).unwrap().trim())).collect();
        assert_eq!(got, [(0, "{\"a\":1}"), (1, "{\"b\":2}")]);
        assert_eq!(lines(b"\n\n").count(), 0);
    }
}
