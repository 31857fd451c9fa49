//! The subject that an event is published on: a template over its attributes.

use std::fmt;

use super::super::BuildError;
use super::super::template::{self, write_safe};
use crate::aep::Event;

/// The longest subject, in bytes: servers end a connection whose control line, which holds the subject, is longer
/// than 4 KiB.
pub(super) const LONGEST: usize = 3072;

/// `aep.{agent}.{type}`: text, and names of attributes in braces.
#[derive(Debug)]
pub(super) struct Template(template::Template);

/// Writes a value as part of one token. What would end the token, match several or not be allowed becomes `_`; so
/// does nothing at all, and a `$` at the start, where subjects of the server's own have it.
fn write_token(value: &str, subject: &mut String) {
    let value = match value.strip_prefix('$') {
        Some(rest) if subject.is_empty() => {
            subject.push('_');
            if rest.is_empty() {
                return;
            }
            rest
        }
        _ => value,
    };
    write_safe(value, subject, |c| matches!(c, '.' | '*' | '>') || c.is_whitespace() || c.is_control());
}

impl Template {
    pub(super) fn parse(text: &str) -> Result<Self, BuildError> {
        let template = template::Template::parse("the URL's subject", text)?;
        let shape = template.shape();
        let is_bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>' | '}');
        if shape.split('.').any(str::is_empty) || shape.contains(is_bad) || shape.starts_with('$') {
            return Err(BuildError::setting(
                "the URL's subject",
                "must be tokens with dots between them, without spaces, wildcards and a $ at the start",
            ));
        }
        Ok(Self(template))
    }

    /// The event's subject; `None` when it is longer than [`LONGEST`].
    pub(super) fn subject(&self, event: &Event) -> Option<String> {
        let subject = self.0.render(event, write_token);
        (subject.len() <= LONGEST).then_some(subject)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
