//! The grammar of `type`, and what a type says about the event's scope.

use std::fmt;

/// The thirteen closed categories of core types.
///
/// Spec: AEP-0002 §3.
pub const CATEGORIES: [&str; 13] = [
    "agent",
    "session",
    "run",
    "progress",
    "tool",
    "delegation",
    "attention",
    "resource",
    "error",
    "state",
    "assessment",
    "message",
    "control",
];

/// Which of the session attributes an event must and must not carry.
///
/// Spec: AEP-0001 §5.2, AEP-0004 §2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// `agent.*`: about the emitter; no `session`, `run`, `step` or `seq`. Live only, never held.
    Agent,
    /// An inbound command: `session` without `seq`. Flows on an authenticated WebSocket only.
    Command,
    /// `attention.routed`: about a session whose counter its emitter doesn't own; `session` without `seq`.
    Foreign,
    /// Everything else: `session` and `seq`.
    Session,
}

/// A legal `type`: parsed once, so that one which exists is within the grammar.
///
/// Spec: AEP-0001 §6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventType<'a>(&'a str);

impl<'a> EventType<'a> {
    /// Reads `{category}.{token}(.{token})*` or `x.{vendor}.{category}.{token}(.{token})*`.
    /// `None` for anything else.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let (first, rest) = text.split_once('.')?;
        let legal = if first == "x" {
            let (vendor, rest) = rest.split_once('.')?;
            let vendor_is_legal = !vendor.is_empty() && vendor.bytes().all(|b| is_token(b) || b == b'-');
            vendor_is_legal && rest.contains('.') && tokens(rest)
        } else {
            CATEGORIES.contains(&first) && tokens(rest)
        };
        legal.then_some(Self(text))
    }

    /// The text as received.
    #[must_use]
    pub const fn as_str(self) -> &'a str {
        self.0
    }

    /// What the type says about the event's scope.
    #[must_use]
    pub fn scope(self) -> Scope {
        match self.0 {
            "control.attention.respond" | "control.cancel" | "control.pause" | "control.resume" => {
                Scope::Command
            }
            "attention.routed" => Scope::Foreign,
            text if text.starts_with("agent.") => Scope::Agent,
            text => {
                let vendor_category =
                    text.strip_prefix("x.").and_then(|rest| rest.split_once('.')).map(|(_, rest)| rest);
                if vendor_category.is_some_and(|rest| rest.starts_with("control.")) {
                    Scope::Command
                } else {
                    Scope::Session
                }
            }
        }
    }
}

impl fmt::Display for EventType<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

fn is_token(byte: u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_')
}

/// One or more non-empty dot-separated tokens.
fn tokens(text: &str) -> bool {
    text.split('.').all(|token| !token.is_empty() && token.bytes().all(is_token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_and_vendor_types_are_read() {
        for text in [
            "tool.completed",
            "run.step.started",
            "agent.presence",
            "x.claude-code.session.config_change",
            "x.acme.foo.bar.baz_2",
            "control.accepted",
            "tool.0",
        ] {
            assert_eq!(EventType::parse(text).map(EventType::as_str), Some(text));
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in [
            "",
            "tool",
            "tool.",
            ".tool",
            "tool..x",
            "banana.peeled",
            "tool.Completed",
            "tool.com-pleted",
            "x.acme.foo",
            "x.acme",
            "x..foo.bar",
            "x.acme..bar",
            "x.Acme.foo.bar",
            "x.acme.foo.",
            "tool.completed ",
            "tool.completed\n",
            "toolé.x",
            "x.ac-me.fo-o.bar",
            "*",
            "tool.*",
        ] {
            assert_eq!(EventType::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn scope_follows_the_type() {
        for (text, scope) in [
            ("agent.presence", Scope::Agent),
            ("control.cancel", Scope::Command),
            ("control.pause", Scope::Command),
            ("control.resume", Scope::Command),
            ("control.attention.respond", Scope::Command),
            ("x.acme.control.reboot", Scope::Command),
            ("control.accepted", Scope::Session),
            ("control.rejected", Scope::Session),
            ("x.acme.agent.presence", Scope::Session),
            ("x.control.foo.bar", Scope::Session),
            ("attention.routed", Scope::Foreign),
            ("attention.requested", Scope::Session),
        ] {
            assert_eq!(EventType::parse(text).unwrap().scope(), scope, "{text}");
        }
    }
}
