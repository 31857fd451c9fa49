//! Reading JSON strictly: members in order with their exact bytes, integers without rounding, nesting bounded.
//!
//! `serde_json` does the parsing; this module adds what a relay needs on top and a general reader doesn't:
//! where each value stands in the text, so that it can be forwarded verbatim, and which numbers are integers
//! in the JSON sense (`5`, `5.0`, `5e0`), exactly.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The deepest nesting of arrays and objects accepted in one event, the event itself included.
///
/// What builds a tree from JSON stops at 128 levels in common readers, and a mapping may wrap an event once
/// or twice; so nothing that is accepted here is refused further down for its depth.
pub const MAX_NESTING: usize = 100;

/// A member's name: borrowed unless it was written with escapes.
pub type Name<'a> = Cow<'a, str>;

/// Why a text isn't a JSON object. The text of this error never repeats input.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// Not JSON at all; where, and what a reader expected there.
    #[error("{0}")]
    Syntax(#[source] serde_json::Error),
    /// JSON, but not an object.
    #[error("expected a JSON object")]
    NotAnObject,
    /// Not UTF-8.
    #[error("not valid UTF-8 after byte {0}")]
    Utf8(usize),
}

/// Calls `member` for every member of the object in `text`, in order, with its value's exact bytes. The
/// visitor may stop early by an error of its own, which comes back in `Ok(Err(…))`.
///
/// # Errors
/// When `text` isn't exactly one JSON object (trailing white space is allowed, anything else isn't).
pub fn members<'a, E>(
    text: &'a str,
    mut member: impl FnMut(Name<'a>, &'a RawValue) -> Result<(), E>,
) -> Result<Result<(), E>, JsonError> {
    let mut outcome = Ok(());
    let visitor = MembersVisitor {
        member: |name: Name<'a>, value: &'a RawValue| {
            // The rest is still read after a failure, so that a syntax error further on wins.
            if outcome.is_ok() {
                outcome = member(name, value);
            }
        },
    };
    let mut reader = serde_json::Deserializer::from_str(text);
    match reader.deserialize_map(visitor).and_then(|()| reader.end()) {
        Ok(()) => Ok(outcome),
        // The visitor's only data error is a type mismatch at the top; its text would quote the input.
        Err(error) if error.is_data() => Err(JsonError::NotAnObject),
        Err(error) => Err(JsonError::Syntax(error)),
    }
}

struct MembersVisitor<F> {
    member: F,
}

impl<'de, F: FnMut(Name<'de>, &'de RawValue)> Visitor<'de> for MembersVisitor<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(BorrowedName(name)) = map.next_key()? {
            (self.member)(name, map.next_value()?);
        }
        Ok(())
    }
}

/// `Cow<str>` that borrows where it can, which serde's own doesn't.
struct BorrowedName<'a>(Name<'a>);

impl<'de> serde::Deserialize<'de> for BorrowedName<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = BorrowedName<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member name")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(BorrowedName(Cow::Borrowed(text)))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(BorrowedName(Cow::Owned(text.to_owned())))
            }
        }
        reader.deserialize_str(NameVisitor)
    }
}

/// The kinds of JSON value, told by the first byte of a value's exact text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `{…}`
    Object,
    /// `[…]`
    Array,
    /// `"…"`
    String,
    /// a number
    Number,
    /// `true` or `false`
    Boolean,
    /// `null`
    Null,
}

/// The kind of a value that `serde_json` has already accepted.
#[must_use]
pub fn kind(value: &RawValue) -> Kind {
    match value.get().as_bytes().first() {
        Some(b'{') => Kind::Object,
        Some(b'[') => Kind::Array,
        Some(b'"') => Kind::String,
        Some(b't' | b'f') => Kind::Boolean,
        Some(b'n') => Kind::Null,
        _ => Kind::Number,
    }
}

/// The contents of a JSON string, borrowed unless it was written with escapes. `None` when the value isn't a
/// string, or escapes half of a surrogate pair.
#[must_use]
pub fn string(value: &RawValue) -> Option<Cow<'_, str>> {
    let text = value.get();
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Some(Cow::Borrowed(inner));
    }
    serde_json::from_str::<String>(text).ok().map(Cow::Owned)
}

/// The elements of a JSON array with their exact bytes. `None` when the value isn't an array.
#[must_use]
pub fn elements(value: &RawValue) -> Option<Vec<&RawValue>> {
    if kind(value) != Kind::Array {
        return None;
    }
    serde_json::from_str(value.get()).ok()
}

/// The exact value of a number written without a fraction, or with one that is zero: `5`, `5.0`, `50e-1`.
/// `None` for text that isn't a JSON number, isn't integral, or doesn't fit 64 signed bits.
#[must_use]
pub fn integer(text: &str) -> Option<i64> {
    if let Ok(plain) = text.parse::<i64>() {
        // `str::parse` takes a leading `+` and leading zeros, JSON doesn't; text from a JSON reader has neither.
        return Some(plain);
    }
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        // An exponent that doesn't fit can only belong to zero or to something that is no integer of ours.
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()),
        None => (unsigned, Some(0)),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits = [whole, fraction].concat();
    let significant = digits.trim_start_matches('0');
    if significant.is_empty() {
        return Some(0);
    }
    // value = significant × 10^scale
    let trimmed = significant.trim_end_matches('0');
    let dropped = significant.len() - trimmed.len();
    let scale = exponent?
        .checked_sub(i64::try_from(fraction.len()).ok()?)?
        .checked_add(i64::try_from(dropped).ok()?)?;
    let scale = u32::try_from(scale).ok().filter(|scale| *scale <= 18)?;
    if trimmed.len() > 19 {
        return None;
    }
    let magnitude = trimmed.parse::<i128>().ok()?.checked_mul(10_i128.checked_pow(scale)?)?;
    i64::try_from(if negative { -magnitude } else { magnitude }).ok()
}

/// Whether arrays and objects in `text` nest deeper than `limit`. `text` is JSON that a reader has accepted.
#[must_use]
pub fn nests_deeper_than(text: &str, limit: usize) -> bool {
    let mut bytes = text.as_bytes();
    let mut depth = 0_usize;
    while let Some((&byte, rest)) = bytes.split_first() {
        bytes = rest;
        match byte {
            b'{' | b'[' => {
                depth += 1;
                if depth > limit {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => bytes = after_string(bytes),
            _ => {}
        }
    }
    false
}

/// What follows the string whose contents start at `bytes`.
fn after_string(mut bytes: &[u8]) -> &[u8] {
    while let Some(at) = memchr::memchr2(b'"', b'\\', bytes) {
        let escaped = bytes.get(at) == Some(&b'\\');
        bytes = bytes.get(at + if escaped { 2 } else { 1 }..).unwrap_or_default();
        if !escaped {
            return bytes;
        }
    }
    &[]
}

/// Appends `text` to `out` as a JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    // Writing to a `Vec` can't fail, and a `&str` always serializes.
    if serde_json::to_writer(&mut *out, text).is_err() {
        out.extend_from_slice(b"\"\"");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integral_numbers_are_exact() {
        for (text, value) in [
            ("0", Some(0)),
            ("-0", Some(0)),
            ("-0.0", Some(0)),
            ("5", Some(5)),
            ("5.0", Some(5)),
            ("5e0", Some(5)),
            ("5E+2", Some(500)),
            ("50e-1", Some(5)),
            ("0.5e1", Some(5)),
            ("1.50e2", Some(150)),
            ("9007199254740991", Some((1 << 53) - 1)),
            ("9007199254740993.0", Some((1 << 53) + 1)),
            ("9223372036854775807", Some(i64::MAX)),
            ("9223372036854775807.000", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("1e19", None),
            ("1e400", None),
            ("0e99999999999999999999", Some(0)),
            ("1e99999999999999999999", None),
            ("1e-99999999999999999999", None),
            ("5.5", None),
            ("5e-1", None),
            ("1e18", Some(1_000_000_000_000_000_000)),
        ] {
            assert_eq!(integer(text), value, "{text}");
        }
    }

    #[test]
    fn nesting_is_counted_outside_of_strings() {
        assert!(!nests_deeper_than(r#"{"a":"[[[[\"[[[","b":[1]}"#, 2));
        assert!(nests_deeper_than("[[[]]]", 2));
        assert!(!nests_deeper_than("[[],[],[[]]]", 3));
        let deep = "[".repeat(5_000_000);
        assert!(nests_deeper_than(&deep, MAX_NESTING));
    }

    #[test]
    fn members_keep_their_bytes_and_order() {
        let mut seen = Vec::new();
        members::<()>(r#" {"b": 1.0 ,"a\u0062":[ 1 ], "b":"x"} "#, |name, value| {
            seen.push((name.into_owned(), value.get().to_owned()));
            Ok(())
        })
        .unwrap()
        .unwrap();
        assert_eq!(
            seen,
            [("b".into(), "1.0".into()), ("ab".into(), "[ 1 ]".into()), ("b".into(), "\"x\"".into())]
        );
    }

    #[test]
    fn errors_never_repeat_input() {
        for text in ["\"secret\"", "[\"secret\"]", "12345", "{\"a\":secret}", "{\"a\":1} secret"] {
            let error = members::<()>(text, |_, _| Ok(())).unwrap_err().to_string();
            assert!(!error.contains("secret") && !error.contains("12345"), "{error}");
        }
    }
}
