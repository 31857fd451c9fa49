//! The tokens file: who may what, beside the operator.
//!
//! ```json
//! {"tokens": [
//!   {"name": "agent",     "token": "…", "scopes": ["emit"]},
//!   {"name": "dashboard", "token": "…", "scopes": ["read"], "filter": {"agent": "billing"}}
//! ]}
//! ```
//!
//! Names and tokens are unique. `scopes` are of `emit`, `read` and `control`, at least one, none twice.
//! `filter` is an attr-match filter, for what may be read; without one, everything may be. What isn't understood
//! is refused: a misspelt `filter` that was ignored would show its bearer everything.
//!
//! No error repeats a token, nor anything else of the file but the name of an entry and the keys of a filter.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use super::{Permission, Permissions, Principal, Token, TokenError};
use crate::aep::event::quoted;
use crate::aep::json::{self, JsonError, Kind};
use crate::aep::{Filter, FilterError};

/// The longest name of an entry, in bytes.
const LONGEST_NAME: usize = 128;

/// Tokens, each with a name and with what it permits.
#[derive(Debug, Default)]
pub struct Tokens(Vec<Entry>);

/// Why a tokens file is refused.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// Not one JSON object.
    #[error("{0}")]
    Json(#[from] JsonError),
    /// An object with other members.
    #[error("must be an object with the one member \"tokens\", an array of objects")]
    Form,
    /// An entry is at fault.
    #[error("{entry}: {problem}")]
    Entry {
        /// Which: its index from 0, and its name where that is known.
        entry: String,
        /// What is wrong with it.
        problem: EntryError,
    },
}

/// What is wrong with an entry of a tokens file.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// Not an object.
    #[error("must be an object")]
    NotAnObject,
    /// A member that has no meaning. Its name isn't repeated: it may be a token in the wrong place.
    #[error("has a member other than name, token, scopes and filter")]
    UnknownMember,
    /// A member stands twice.
    #[error("{0} stands twice")]
    Twice(&'static str),
    /// A member is missing.
    #[error("{0} is required")]
    Missing(&'static str),
    /// The name has another form.
    #[error("name must be a string of 1 to 128 bytes without control characters")]
    Name,
    /// The token isn't a string.
    #[error("token must be a string")]
    NotAString,
    /// No token can be like this.
    #[error("token {0}")]
    Token(#[from] TokenError),
    /// The permissions have another form.
    #[error("scopes must be an array of at least one of \"emit\", \"read\" and \"control\", none twice")]
    Permissions,
    /// The filter isn't legal.
    #[error("{0}")]
    Filter(#[from] FilterError),
    /// A filter that has nothing to bound.
    #[error("filter bounds what is read, and \"read\" is not among the scopes")]
    NothingToBound,
    /// An entry before it has the name.
    #[error("another entry has this name")]
    NameTaken,
    /// An entry before it has the token.
    #[error("another entry has this token")]
    TokenTaken,
    /// The operator has the token.
    #[error("token is AEP_TOKEN's, which permits everything")]
    Operators,
}

/// A token, and who bears it.
struct Entry {
    name: String,
    token: Token,
    principal: Principal,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, token: _, principal } = self;
        f.debug_struct("Entry").field("name", name).field("principal", principal).finish_non_exhaustive()
    }
}

impl Tokens {
    /// Reads a tokens file.
    ///
    /// # Errors
    /// When any part of it isn't understood, naming the entry and never its token.
    pub fn parse(text: &str) -> Result<Self, TokensError> {
        let mut list = None;
        json::members(text, |name, value| {
            let elements = json::elements(value).filter(|_| name == "tokens").ok_or(TokensError::Form)?;
            list.replace(elements).map_or(Ok(()), |_| Err(TokensError::Form))
        })??;
        let mut entries = Vec::new();
        for (index, element) in list.ok_or(TokensError::Form)?.into_iter().enumerate() {
            entries.push(Entry::parse(index, element)?);
        }
        let tokens = Self(entries);
        tokens.refuse_duplicates()?;
        Ok(tokens)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: no one is admitted then.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn refuse_duplicates(&self) -> Result<(), TokensError> {
        let (mut names, mut tokens) = (BTreeSet::new(), BTreeSet::new());
        for (index, entry) in self.0.iter().enumerate() {
            if !names.insert(&entry.name) {
                return Err(at(index, Some(&entry.name), EntryError::NameTaken));
            }
            if !tokens.insert(&entry.token.0) {
                return Err(at(index, Some(&entry.name), EntryError::TokenTaken));
            }
        }
        Ok(())
    }

    /// Refuses the list when the operator's token is in it.
    pub(super) fn refuse(&self, operator: &Token) -> Result<(), TokensError> {
        match self.0.iter().enumerate().find(|(_, entry)| operator.matches(&entry.token.0)) {
            Some((index, entry)) => Err(at(index, Some(&entry.name), EntryError::Operators)),
            None => Ok(()),
        }
    }

    /// Who bears `candidate`. It is compared with every token, whichever it is.
    pub(super) fn bearer_of(&self, candidate: &str) -> Option<Principal> {
        let mut bearer = None;
        for entry in &self.0 {
            if entry.token.matches(candidate) {
                bearer = Some(&entry.principal);
            }
        }
        bearer.cloned()
    }

    /// Lets who stands in both lists for the same stay the same principal. Returns the others of `before`, to be
    /// revoked.
    pub(super) fn take_over(&mut self, before: &Self) -> Vec<CancellationToken> {
        let mut left: BTreeMap<&str, &Entry> =
            before.0.iter().map(|entry| (entry.name.as_str(), entry)).collect();
        for entry in &mut self.0 {
            if left.get(entry.name.as_str()).is_some_and(|old| entry.means_the_same(old))
                && let Some(old) = left.remove(entry.name.as_str())
            {
                entry.principal.revoked = old.principal.revoked.clone();
            }
        }
        left.into_values().map(|entry| entry.principal.revoked.clone()).collect()
    }
}

impl Entry {
    fn parse(index: usize, element: &RawValue) -> Result<Self, TokensError> {
        let [name, token, permissions, filter] =
            members(element).map_err(|problem| at(index, None, problem))?;
        let name = name.ok_or(EntryError::Missing("name")).and_then(read_name);
        let name = name.map_err(|problem| at(index, None, problem))?;
        match read(token, permissions, filter) {
            Ok((token, principal)) => Ok(Self { name, token, principal }),
            Err(problem) => Err(at(index, Some(&name), problem)),
        }
    }

    fn means_the_same(&self, other: &Self) -> bool {
        self.name == other.name
            && self.token.0 == other.token.0
            && self.principal.permissions == other.principal.permissions
            && self.principal.bound == other.principal.bound
    }
}

/// The members of an entry, in the order `name`, `token`, `scopes`, `filter`.
fn members(element: &RawValue) -> Result<[Option<&RawValue>; 4], EntryError> {
    let [mut name, mut token, mut permissions, mut filter] = [None; 4];
    let read = json::members(element.get(), |member, value| {
        let (slot, known) = match &*member {
            "name" => (&mut name, "name"),
            "token" => (&mut token, "token"),
            "scopes" => (&mut permissions, "scopes"),
            "filter" => (&mut filter, "filter"),
            _ => return Err(EntryError::UnknownMember),
        };
        slot.replace(value).map_or(Ok(()), |_| Err(EntryError::Twice(known)))
    });
    // The element was read once already: it can only be something else than an object.
    read.map_err(|_| EntryError::NotAnObject)??;
    Ok([name, token, permissions, filter])
}

fn read_name(value: &RawValue) -> Result<String, EntryError> {
    let name = json::string(value).ok_or(EntryError::Name)?;
    if name.is_empty() || name.len() > LONGEST_NAME || name.contains(char::is_control) {
        return Err(EntryError::Name);
    }
    Ok(name.into_owned())
}

fn read(
    token: Option<&RawValue>,
    permissions: Option<&RawValue>,
    filter: Option<&RawValue>,
) -> Result<(Token, Principal), EntryError> {
    let token = token.ok_or(EntryError::Missing("token"))?;
    let token = Token::new(&json::string(token).ok_or(EntryError::NotAString)?)?;
    let permissions = read_permissions(permissions.ok_or(EntryError::Missing("scopes"))?)?;
    let filter = filter.map(|filter| Filter::parse(filter.get())).transpose()?;
    if filter.is_some() && !permissions.hold(Permission::Read) {
        return Err(EntryError::NothingToBound);
    }
    let bound = filter.filter(|filter| !filter.matches_everything()).map(Arc::new);
    Ok((token, Principal { permissions, bound, revoked: CancellationToken::new() }))
}

fn read_permissions(value: &RawValue) -> Result<Permissions, EntryError> {
    if json::kind(value) != Kind::Array {
        return Err(EntryError::Permissions);
    }
    let mut permissions = Permissions::default();
    for element in json::elements(value).unwrap_or_default() {
        let permission = json::string(element).as_deref().and_then(Permission::from_name);
        let permission = permission.ok_or(EntryError::Permissions)?;
        if permissions.hold(permission) {
            return Err(EntryError::Permissions);
        }
        permissions = permissions.with(permission);
    }
    if permissions == Permissions::default() { Err(EntryError::Permissions) } else { Ok(permissions) }
}

fn at(index: usize, name: Option<&str>, problem: EntryError) -> TokensError {
    let entry = match name {
        Some(name) => format!("tokens[{index}] (\"{}\")", quoted(name)),
        None => format!("tokens[{index}]"),
    };
    TokensError::Entry { entry, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Tokens::parse(text).unwrap_err().to_string()
    }

    fn entry(members: &str) -> String {
        format!(r#"{{"tokens":[{{"name":"first","token":"one","scopes":["read"]}},{{{members}}}]}}"#)
    }

    #[test]
    fn a_file_of_another_form_is_refused() {
        for text in ["", "[]", "null", "{}", r#"{"tokens":{}}"#, r#"{"tokens":null}"#, r#"{"tokens":[]} x"#] {
            refused(text);
        }
        for text in [r#"{"tokens":[],"tokens":[]}"#, r#"{"tokens":[],"token":"s3cret"}"#, r#"{"s3cret":[]}"#]
        {
            assert!(refused(text).starts_with("must be an object with"), "{text}");
        }
        assert_eq!(refused(r#"{"tokens":["s3cret"]}"#), "tokens[0]: must be an object");
    }

    #[test]
    fn an_entry_at_fault_is_named_and_its_token_is_not() {
        let name = r#""name":"x","#;
        let token = r#""token":"s3cret","#;
        let read = r#""scopes":["read"]"#;
        for (members, problem) in [
            (format!("{token}{read}"), "tokens[1]: name is required"),
            (format!(r#""name":"",{token}{read}"#), "tokens[1]: name must be"),
            (format!(r#""name":"a\nb",{token}{read}"#), "tokens[1]: name must be"),
            (format!(r#""name":7,{token}{read}"#), "tokens[1]: name must be"),
            (format!("{name}{name}{token}{read}"), "tokens[1]: name stands twice"),
            (format!(r#"{name}{token}{read},"filer":{{}}"#), "tokens[1]: has a member other than"),
            (format!(r#"{name}"s3cret":1,{read}"#), "tokens[1]: has a member other than"),
            (format!("{name}{read}"), r#"tokens[1] ("x"): token is required"#),
            (format!(r#"{name}"token":["s3cret"],{read}"#), r#"tokens[1] ("x"): token must be a string"#),
            (format!(r#"{name}"token":"",{read}"#), r#"tokens[1] ("x"): token must not be empty"#),
            (format!(r#"{name}"token":"s3cret s3cret",{read}"#), r#"tokens[1] ("x"): token must be print"#),
            (format!(r#"{name}"token":"s3cret""#), r#"tokens[1] ("x"): scopes is required"#),
            (format!(r#"{name}{token}"scopes":[]"#), r#"tokens[1] ("x"): scopes must be"#),
            (format!(r#"{name}{token}"scopes":"read""#), r#"tokens[1] ("x"): scopes must be"#),
            (format!(r#"{name}{token}"scopes":["s3cret"]"#), r#"tokens[1] ("x"): scopes must be"#),
            (format!(r#"{name}{token}"scopes":["read","read"]"#), r#"tokens[1] ("x"): scopes must be"#),
            (
                format!(r#"{name}{token}{read},"filter":{{"seq":1}}"#),
                r#"tokens[1] ("x"): filter: "seq" is not filterable"#,
            ),
            (format!(r#"{name}{token}{read},"filter":null"#), r#"tokens[1] ("x"): filter: expected"#),
            (
                format!(r#"{name}{token}"scopes":["emit"],"filter":{{"agent":"a"}}"#),
                r#"tokens[1] ("x"): filter bounds what is read"#,
            ),
            (
                format!(r#""name":"first",{token}{read}"#),
                r#"tokens[1] ("first"): another entry has this name"#,
            ),
            (format!(r#"{name}"token":"one",{read}"#), r#"tokens[1] ("x"): another entry has this token"#),
        ] {
            let error = refused(&entry(&members));
            assert!(error.starts_with(problem), "{members}: {error}");
            assert!(!error.contains("s3cret") && !error.contains("one\""), "{error}");
        }
    }

    #[test]
    fn a_filter_of_everything_bounds_nothing() {
        let text = entry(r#""name":"x","token":"two","scopes":["control","read"],"filter":{}"#);
        let bearer = Tokens::parse(&text).unwrap().bearer_of("two").unwrap();
        assert!(bearer.bound().is_none());
    }
}
