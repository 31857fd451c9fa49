//! What the integration tests share: where the public fixtures and the project's own corpus stand, and a reader
//! of JSON that keeps what `serde_json::Value` loses, the order of members and the text of numbers.
#![allow(unreachable_pub, reason = "every test crate has this as a module of its own")]
#![allow(dead_code, reason = "each test crate uses its own part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of tests fails by panicking")]
#![allow(clippy::panic, clippy::print_stderr, reason = "a helper of tests fails by panicking and says why")]

pub mod generate;

use std::fmt;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The folder of the public conformance fixtures: the one that `AEP_CONFORMANCE_DIR` names, else `../shared/aep`
/// beside the project. `None`, and a line on stderr naming the test, when it isn't there.
pub fn conformance(test: &str) -> Option<PathBuf> {
    #[allow(clippy::disallowed_methods, reason = "settings.rs reads the sidecar's environment, not a test's")]
    let named = std::env::var_os("AEP_CONFORMANCE_DIR");
    let folder = named.map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/aep"),
        |folder| PathBuf::from(&folder),
    );
    if folder.is_dir() {
        return Some(folder);
    }
    // Past what the test runner captures: a test that shows nothing must say so.
    let said =
        writeln!(std::io::stderr(), "SKIPPED: {test}: no conformance fixtures in {}", folder.display());
    said.unwrap();
    None
}

/// The text of a file of the project's own corpus.
pub fn corpus(file: &str) -> String {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(file))
}

/// The text of a file; panics with its name when it can't be read.
pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// JSON as it was written, less white space and string escapes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Json {
    /// Members in the order they stand.
    Object(Vec<(String, Json)>),
    /// Elements.
    Array(Vec<Json>),
    /// Characters.
    String(String),
    /// A number's exact text, `true`, `false` or `null`.
    Word(String),
}

impl Json {
    /// Reads one JSON value.
    pub fn read(text: &str) -> Self {
        let raw: &RawValue = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        match raw.get().as_bytes().first() {
            Some(b'{') => Self::Object(
                members(text).into_iter().map(|(name, value)| (name, Self::read(&value))).collect(),
            ),
            Some(b'[') => {
                let elements: Vec<&RawValue> = serde_json::from_str(text).unwrap();
                Self::Array(elements.into_iter().map(|element| Self::read(element.get())).collect())
            }
            Some(b'"') => Self::String(serde_json::from_str(text).unwrap()),
            _ => Self::Word(raw.get().to_owned()),
        }
    }

    /// The same with every object's members in the order of their names.
    pub fn sorted(self) -> Self {
        match self {
            Self::Object(members) => {
                let mut members: Vec<_> =
                    members.into_iter().map(|(name, value)| (name, value.sorted())).collect();
                members.sort();
                Self::Object(members)
            }
            Self::Array(elements) => Self::Array(elements.into_iter().map(Self::sorted).collect()),
            plain => plain,
        }
    }
}

/// The members of the object in `text`, in order, each with its value's exact text.
pub fn members(text: &str) -> Vec<(String, String)> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, String)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((name, value)) = map.next_entry::<String, Box<RawValue>>()? {
                members.push((name, value.get().to_owned()));
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_str(text)
        .deserialize_map(Members)
        .unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The value of one member of the object in `text`, as its exact text.
pub fn member(text: &str, name: &str) -> Option<String> {
    members(text).into_iter().find_map(|(known, value)| (known == name).then_some(value))
}

/// The elements of the array that is one member of the object in `text`, as their exact texts.
pub fn cases(text: &str, name: &str) -> Vec<String> {
    let array = member(text, name).unwrap_or_else(|| panic!("no member {name:?}"));
    let elements: Vec<Box<RawValue>> = serde_json::from_str(&array).unwrap();
    elements.into_iter().map(|element| element.get().to_owned()).collect()
}

/// A string member of the object in `text`.
pub fn string(text: &str, name: &str) -> Option<String> {
    member(text, name).map(|json| serde_json::from_str(&json).unwrap_or_else(|_| panic!("{name}: {json}")))
}
