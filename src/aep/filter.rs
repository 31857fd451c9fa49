//! attr-match: which events a subscription wants, told from the envelope alone.
//!
//! A filter is parsed once, and one that exists is legal: whatever isn't understood is refused rather than
//! ignored, since a filter that matched more than it says would show a reader what it must not see.

use serde_json::value::RawValue;

use super::envelope::{Attribute, Scalar, is_core, is_extension_name};
use super::event::{Event, quoted};
use super::json::{self, JsonError, Kind, Name};
use super::severity::Severity;

/// A conjunction of predicates on envelope attributes. The empty filter matches every event.
///
/// ```
/// use aep_sidecar::aep::Filter;
///
/// let filter = Filter::parse(r#"{"type":["attention.*","error.*"],"severity":{"gte":"notice"}}"#)?;
/// assert!(!filter.matches_everything());
/// assert!(Filter::parse(r#"{"seq":5}"#).is_err()); // positions are for resuming, not for filtering
/// # Ok::<(), aep_sidecar::aep::FilterError>(())
/// ```
///
/// Spec: AEP-0003 §6.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    predicates: Vec<(Key, Predicate)>,
}

/// The longest filter, in bytes of JSON: it is kept as long as its subscription.
pub const LONGEST: usize = 64 * 1024;
/// The most keys of a filter.
pub const MOST_KEYS: usize = 128;

/// Why a filter is refused. Names the key at fault.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Longer than any filter may be.
    #[error("filter: longer than {LONGEST} bytes")]
    TooLong,
    /// More keys than any filter may have.
    #[error("filter: more than {MOST_KEYS} keys")]
    TooManyKeys,
    /// Not one JSON object.
    #[error("filter: {0}")]
    Json(#[from] JsonError),
    /// A key stands twice.
    #[error("filter: {0:?} stands twice")]
    Twice(String),
    /// A core attribute that filters can't name.
    #[error("filter: {0:?} is not filterable")]
    NotFilterable(String),
    /// Neither a core attribute nor a legal extension name.
    #[error("filter: {0:?} is neither a filterable attribute nor a legal extension name")]
    UnknownKey(String),
    /// A predicate out of form.
    #[error("filter: {key:?} must {must}")]
    Predicate {
        /// The key.
        key: String,
        /// What its predicate must be.
        must: &'static str,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Key {
    String(Attribute),
    Type,
    Epoch,
    Severity,
    Capture,
    Extension(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Predicate {
    /// Equal to any of these.
    AnyOf(Alternatives),
    /// Within inclusive bounds; on severity only.
    Between(Severity, Severity),
}

/// Values to be equal to, sorted for search: a reader may name thousands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Alternatives {
    strings: Vec<Box<str>>,
    /// Type patterns, their `*` cut off: `attention.`
    prefixes: Vec<Box<str>>,
    integers: Vec<i64>,
    boolean: [bool; 2],
}

impl Alternatives {
    fn sort(mut self) -> Self {
        self.strings.sort_unstable();
        self.prefixes.sort_unstable();
        self.integers.sort_unstable();
        self.strings.dedup();
        self
    }

    fn contain(&self, value: Scalar<'_>) -> bool {
        match value {
            Scalar::String(text) => self.strings.binary_search_by(|s| (**s).cmp(text)).is_ok(),
            Scalar::Integer(integer) => self.integers.binary_search(&integer).is_ok(),
            Scalar::Boolean(boolean) => self.boolean.get(usize::from(boolean)) == Some(&true),
        }
    }

    fn contain_type(&self, text: &str) -> bool {
        self.contain(Scalar::String(text))
            || (!self.prefixes.is_empty()
                && memchr::memchr_iter(b'.', text.as_bytes()).any(|dot| {
                    let prefix = text.get(..=dot).unwrap_or_default();
                    self.prefixes.binary_search_by(|p| (**p).cmp(prefix)).is_ok()
                }))
    }
}

impl Filter {
    /// Reads a filter.
    ///
    /// # Errors
    /// When any part of it isn't understood, naming the key.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        if text.len() > LONGEST {
            return Err(FilterError::TooLong);
        }
        let mut predicates: Vec<(Key, Predicate)> = Vec::new();
        let mut names = std::collections::BTreeSet::new();
        json::members(text, |name, value| {
            let key = key(&name)?;
            if !names.insert(name.to_string()) {
                return Err(FilterError::Twice(quoted(&name).into_owned()));
            }
            if predicates.len() == MOST_KEYS {
                return Err(FilterError::TooManyKeys);
            }
            let predicate = predicate(&key, &name, value)?;
            predicates.push((key, predicate));
            Ok(())
        })??;
        Ok(Self { predicates })
    }

    /// Whether the event matches every predicate.
    #[must_use]
    pub fn matches(&self, event: &Event) -> bool {
        self.predicates.iter().all(|(key, predicate)| match (key, predicate) {
            (Key::Severity, Predicate::Between(least, most)) => (*least..=*most).contains(&event.severity()),
            (_, Predicate::Between(..)) => false,
            (Key::Severity, Predicate::AnyOf(any)) => any.contain(Scalar::String(event.severity().as_str())),
            (Key::Capture, Predicate::AnyOf(any)) => any.contain(Scalar::String(event.capture().as_str())),
            (Key::Epoch, Predicate::AnyOf(any)) => i64::try_from(event.declared_epoch().unwrap_or(0))
                .is_ok_and(|epoch| any.contain(Scalar::Integer(epoch))),
            (Key::Type, Predicate::AnyOf(any)) => any.contain_type(event.event_type()),
            (Key::String(attribute), Predicate::AnyOf(any)) => {
                event.string(*attribute).is_some_and(|text| any.contain(Scalar::String(text)))
            }
            (Key::Extension(name), Predicate::AnyOf(any)) => {
                event.extension(name).is_some_and(|value| any.contain(value))
            }
        })
    }

    /// The filter that matches what both match.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.predicates.extend_from_slice(&other.predicates);
        self
    }

    /// Whether this is the empty filter.
    #[must_use]
    pub fn matches_everything(&self) -> bool {
        self.predicates.is_empty()
    }

    /// The sessions that the filter names by equality, each once, `None` when it names none: no event of another
    /// session can match.
    #[must_use]
    pub fn sessions(&self) -> Option<impl Iterator<Item = &str>> {
        let mut named = self.predicates.iter().filter_map(|(key, predicate)| match (key, predicate) {
            (Key::String(Attribute::Session), Predicate::AnyOf(any)) => Some(any),
            _ => None,
        });
        // A conjunction may name sessions more than once: an event's session is then among all of them.
        let first = named.next()?;
        let others: Vec<&Alternatives> = named.collect();
        Some(first.strings.iter().map(|session| &**session).filter(move |session| {
            others.iter().all(|alternatives| alternatives.contain(Scalar::String(session)))
        }))
    }

    /// Whether an event of that session can match.
    #[must_use]
    pub fn admits_session(&self, session: &str) -> bool {
        self.predicates.iter().all(|(key, predicate)| match (key, predicate) {
            (Key::String(Attribute::Session), Predicate::AnyOf(any)) => any.contain(Scalar::String(session)),
            _ => true,
        })
    }
}

fn key(name: &Name<'_>) -> Result<Key, FilterError> {
    Ok(match &**name {
        "id" => Key::String(Attribute::Id),
        "type" => Key::Type,
        "subject" => Key::String(Attribute::Subject),
        "source" => Key::String(Attribute::Source),
        "agent" => Key::String(Attribute::Agent),
        "session" => Key::String(Attribute::Session),
        "run" => Key::String(Attribute::Run),
        "step" => Key::String(Attribute::Step),
        "cause" => Key::String(Attribute::Cause),
        "epoch" => Key::Epoch,
        "severity" => Key::Severity,
        "capture" => Key::Capture,
        name if is_core(name) => return Err(FilterError::NotFilterable(name.to_owned())),
        name if is_extension_name(name) => Key::Extension(name.to_owned()),
        name => return Err(FilterError::UnknownKey(quoted(name).into_owned())),
    })
}

fn predicate(key: &Key, name: &str, value: &RawValue) -> Result<Predicate, FilterError> {
    match (json::kind(value), key) {
        (Kind::Object, Key::Severity) => bounds(value),
        (Kind::Array, _) => {
            let elements = json::elements(value).unwrap_or_default();
            if elements.is_empty() {
                return Err(must(name, "name at least one alternative"));
            }
            let mut any = Alternatives::default();
            for element in elements {
                alternative(key, name, element, &mut any)?;
            }
            Ok(Predicate::AnyOf(any.sort()))
        }
        _ => {
            let mut any = Alternatives::default();
            alternative(key, name, value, &mut any)?;
            Ok(Predicate::AnyOf(any))
        }
    }
}

fn alternative(key: &Key, name: &str, value: &RawValue, any: &mut Alternatives) -> Result<(), FilterError> {
    match json::kind(value) {
        Kind::String => {
            let text =
                json::string(value).ok_or_else(|| must(name, "be a string of whole Unicode characters"))?;
            if !text.contains('*') {
                any.strings.push(text.into());
            } else if *key != Key::Type {
                return Err(must(name, "hold no \"*\": patterns are for \"type\" only"));
            } else if let Some(prefix) = text.strip_suffix('*').filter(|prefix| is_prefix(prefix)) {
                any.prefixes.push(prefix.into());
            } else {
                return Err(must(name, "use \"*\" only as \"prefix.*\""));
            }
        }
        Kind::Number => {
            let integer = json::integer(value.get());
            any.integers
                .push(integer.ok_or_else(|| must(name, "be an integer of 64 bits where it is a number"))?);
        }
        Kind::Boolean => {
            if let Some(slot) = any.boolean.get_mut(usize::from(value.get() == "true")) {
                *slot = true;
            }
        }
        Kind::Object | Kind::Array | Kind::Null => {
            return Err(must(name, "be a string, an integer, a boolean, or an array of these"));
        }
    }
    Ok(())
}

/// `([a-z0-9_-]+\.)+`
fn is_prefix(text: &str) -> bool {
    text.strip_suffix('.').is_some_and(|text| {
        text.split('.').all(|token| {
            !token.is_empty() && token.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
        })
    })
}

fn bounds(value: &RawValue) -> Result<Predicate, FilterError> {
    let (mut least, mut most) = (None, None);
    json::members(value.get(), |name, value| {
        let slot = match &*name {
            "gte" => &mut least,
            "lte" => &mut most,
            _ => return Err(must("severity", "hold no bound but \"gte\" and \"lte\"")),
        };
        let level = json::string(value).as_deref().and_then(Severity::from_name).ok_or_else(|| {
            must("severity", "be bounded by one of debug, info, notice, warning, error, critical")
        })?;
        match slot.replace(level) {
            None => Ok(()),
            Some(_) => Err(must("severity", "hold each bound once")),
        }
    })??;
    Ok(Predicate::Between(least.unwrap_or(Severity::Debug), most.unwrap_or(Severity::Critical)))
}

fn must(key: &str, must: &'static str) -> FilterError {
    FilterError::Predicate { key: quoted(key).into_owned(), must }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(members: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"e1","type":"tool.completed","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s1","seq":1{members}}}"#
        ))
        .unwrap()
    }

    fn matches(filter: &str, members: &str) -> bool {
        Filter::parse(filter).unwrap().matches(&event(members))
    }

    #[test]
    fn equality_has_no_coercion() {
        assert!(matches(r#"{"acme":5}"#, r#","acme":5"#));
        assert!(matches(r#"{"acme":5}"#, r#","acme":5.0"#));
        assert!(!matches(r#"{"acme":"5"}"#, r#","acme":5"#));
        assert!(!matches(r#"{"acme":1}"#, r#","acme":true"#));
        assert!(matches(r#"{"acme":[false,"x"]}"#, r#","acme":false"#));
        assert!(!matches(r#"{"acme":"X"}"#, r#","acme":"x""#));
    }

    #[test]
    fn patterns_need_another_token() {
        assert!(matches(r#"{"type":"tool.*"}"#, ""));
        assert!(!matches(r#"{"type":"tool.completed.*"}"#, ""));
        assert!(!matches(r#"{"type":"too.*"}"#, ""));
        assert!(matches(r#"{"type":["run.*","tool.completed"]}"#, ""));
    }

    #[test]
    fn defaults_apply_before_matching() {
        assert!(matches(r#"{"severity":"info","capture":"metadata","epoch":0}"#, ""));
        assert!(!matches(r#"{"severity":"info"}"#, r#","severity":"debug""#));
        assert!(matches(r#"{"severity":{"gte":"notice","lte":"error"}}"#, r#","severity":"error""#));
        assert!(!matches(r#"{"severity":{"gte":"error","lte":"notice"}}"#, r#","severity":"warning""#));
        assert!(!matches(r#"{"run":"r"}"#, ""));
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for filter in [
            "",
            "[]",
            "null",
            "{",
            r#"{"seq":1}"#,
            r#"{"time":"x"}"#,
            r#"{"aep":"0.1"}"#,
            r#"{"data":{}}"#,
            r#"{"traceparent":"x"}"#,
            r#"{"NotAnAttr":"y"}"#,
            r#"{"":1}"#,
            r#"{"aaaaaaaaaaaaaaaaaaaaa":1}"#,
            r#"{"type":"*"}"#,
            r#"{"type":".*"}"#,
            r#"{"type":"a*"}"#,
            r#"{"type":"a.*.b"}"#,
            r#"{"type":"a..*"}"#,
            r#"{"agent":"claude*"}"#,
            r#"{"agent":[]}"#,
            r#"{"agent":null}"#,
            r#"{"agent":[null]}"#,
            r#"{"agent":{"gte":"info"}}"#,
            r#"{"agent":[["a"]]}"#,
            r#"{"epoch":1.5}"#,
            r#"{"severity":{"gt":"info"}}"#,
            r#"{"severity":{"gte":"fatal"}}"#,
            r#"{"severity":[{"gte":"info"}]}"#,
            r#"{"agent":"a","agent":"b"}"#,
            r#"{"agent":"a","\u0061gent":"b"}"#,
            r#"{"severity":{"gte":"info","gte":"info"}}"#,
            r#"{"a":1} x"#,
            r#"{"acme":99999999999999999999}"#,
        ] {
            assert!(Filter::parse(filter).is_err(), "{filter}");
        }
    }

    #[test]
    fn size_is_bounded() {
        let keys = |n: usize| {
            format!("{{{}}}", (0..n).map(|n| format!(r#""e{n}":1"#)).collect::<Vec<_>>().join(","))
        };
        assert!(Filter::parse(&keys(MOST_KEYS)).is_ok());
        assert!(matches!(Filter::parse(&keys(MOST_KEYS + 1)), Err(FilterError::TooManyKeys)));
        let long = format!(r#"{{"agent":"{}"}}"#, "a".repeat(LONGEST));
        assert!(matches!(Filter::parse(&long), Err(FilterError::TooLong)));
    }

    #[test]
    fn refusals_name_the_key() {
        let error = Filter::parse(r#"{"agent":"claude*"}"#).unwrap_err().to_string();
        assert_eq!(error, r#"filter: "agent" must hold no "*": patterns are for "type" only"#);
    }

    #[test]
    fn named_sessions_are_known() {
        let filter = Filter::parse(r#"{"session":["b","a"],"agent":"x"}"#).unwrap();
        assert_eq!(filter.sessions().unwrap().collect::<Vec<_>>(), ["a", "b"]);
        assert!(Filter::parse("{}").unwrap().sessions().is_none());
        let filter = Filter::parse(r#"{"session":["a","a"]}"#).unwrap();
        assert_eq!(filter.sessions().unwrap().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_conjunction_matches_what_both_match() {
        let filters = [
            "{}",
            r#"{"session":"s1"}"#,
            r#"{"session":["s0","s1"]}"#,
            r#"{"session":"s2"}"#,
            r#"{"type":"tool.*"}"#,
            r#"{"type":"run.*"}"#,
            r#"{"severity":{"gte":"notice"}}"#,
            r#"{"severity":"error"}"#,
            r#"{"acme":5}"#,
        ];
        let events = [event(""), event(r#","severity":"error""#), event(r#","acme":5"#)];
        for (left, right) in filters.iter().flat_map(|left| filters.map(|right| (left, right))) {
            let (one, other) = (Filter::parse(left).unwrap(), Filter::parse(right).unwrap());
            let both = one.clone().and(&other);
            for event in &events {
                let expected = one.matches(event) && other.matches(event);
                assert_eq!(both.matches(event), expected, "{left} and {right}");
            }
        }
    }

    #[test]
    fn a_conjunction_names_the_sessions_that_both_name() {
        let sessions = |left: &str, right: &str| -> Option<Vec<String>> {
            let both = Filter::parse(left).unwrap().and(&Filter::parse(right).unwrap());
            both.sessions().map(|names| names.map(str::to_owned).collect())
        };
        assert_eq!(sessions(r#"{"session":["a","b"]}"#, r#"{"session":["c","b"]}"#).unwrap(), ["b"]);
        assert_eq!(sessions(r#"{"session":"a"}"#, r#"{"session":"b"}"#).unwrap(), [""; 0]);
        assert_eq!(sessions(r#"{"session":"a"}"#, "{}").unwrap(), ["a"]);
        assert_eq!(sessions(r#"{"agent":"x"}"#, r#"{"session":"b"}"#).unwrap(), ["b"]);
        assert_eq!(sessions(r#"{"agent":"x"}"#, "{}"), None);
    }
}
