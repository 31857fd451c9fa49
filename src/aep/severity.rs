//! How urgent an event is.

use std::fmt;

/// One of six levels, in their total order.
///
/// Spec: AEP-0001 §8.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Severity {
    /// Of interest while developing.
    Debug,
    /// The level of an event that names none.
    #[default]
    Info,
    /// Normal, but worth a look.
    Notice,
    /// Something may be wrong.
    Warning,
    /// Something is wrong.
    Error,
    /// A person is needed now.
    Critical,
}

impl Severity {
    /// Every level, lowest first.
    pub const ALL: [Self; 6] =
        [Self::Debug, Self::Info, Self::Notice, Self::Warning, Self::Error, Self::Critical];

    /// The level's name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Error => "error",
            Self::Critical => "critical",
        }
    }

    /// The level of that exact name, `None` for any other text.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.as_str() == name)
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_the_specifications() {
        assert!(Severity::ALL.is_sorted());
        assert_eq!(Severity::default(), Severity::Info);
    }

    #[test]
    fn names_are_exact() {
        for level in Severity::ALL {
            assert_eq!(Severity::from_name(level.as_str()), Some(level));
        }
        for wrong in ["", "Info", "fatal", "info "] {
            assert_eq!(Severity::from_name(wrong), None);
        }
    }
}
