//! Who may: the bearer check.

use std::fmt;

use subtle::ConstantTimeEq as _;

use super::subscriber::Subscription;
use crate::aep::Filter;

/// A secret that can be compared and never printed.
#[derive(Clone)]
pub struct Token(String);

/// Why a text can't be a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Nothing but white space.
    #[error("must not be empty")]
    Empty,
    /// No header could carry it.
    #[error("must be printable ASCII without spaces, so that an Authorization header can carry it")]
    Unprintable,
}

impl Token {
    /// Takes a token, white space around it cut off (secrets files end in a line break).
    ///
    /// # Errors
    /// When it is empty or holds what an `Authorization` header can't carry.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TokenError::Empty);
        }
        if !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(TokenError::Unprintable);
        }
        Ok(Self(text.to_owned()))
    }

    /// Whether `candidate` is this token, in time that depends on its length only.
    #[must_use]
    pub fn matches(&self, candidate: &str) -> bool {
        self.0.as_bytes().ct_eq(candidate.as_bytes()).into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// What a token lets its bearer do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Permission {
    /// Send events.
    Emit,
    /// See events, and who is connected.
    Read,
    /// Send commands to agents.
    Control,
}

impl Permission {
    /// The permission's name in a tokens file and in refusals.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Emit => "emit",
            Self::Read => "read",
            Self::Control => "control",
        }
    }
}

/// Who makes a request, as far as its token tells.
#[derive(Debug, Clone)]
pub struct Principal {
    authenticated: bool,
}

impl Principal {
    /// Anyone, where no token is configured: may emit and read. Control needs authentication, on loopback too.
    ///
    /// Spec: AEP-0004 §4.1.
    #[must_use]
    pub fn anyone() -> Self {
        Self { authenticated: false }
    }

    /// The bearer of the one token that may do everything.
    #[must_use]
    pub fn operator() -> Self {
        Self { authenticated: true }
    }

    /// Whether the principal may do that.
    #[must_use]
    pub fn may(&self, permission: Permission) -> bool {
        match permission {
            Permission::Emit | Permission::Read => true,
            Permission::Control => self.authenticated,
        }
    }

    /// What the principal may see at most; `None` for everything.
    #[must_use]
    pub fn bound(&self) -> Option<&Filter> {
        None
    }

    /// The subscription as far as the principal may see it.
    #[must_use]
    pub fn within(&self, subscription: Subscription) -> Subscription {
        subscription
    }

    /// Returns once the principal's token no longer counts.
    pub async fn revoked(&self) {
        std::future::pending().await
    }
}

/// The credentials of an `Authorization` header's value, when its scheme is Bearer.
///
/// Spec: RFC 6750 §2.1; the scheme is case-insensitive by RFC 9110 §11.1.
#[must_use]
pub fn bearer(value: &str) -> Option<&str> {
    let (scheme, credentials) = value.trim().split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| credentials.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_matches_itself_only_and_prints_nothing() {
        let token = Token::new(" s3cret\n").unwrap();
        assert!(token.matches("s3cret"));
        for wrong in ["", "s3cre", "s3cret ", "S3CRET", "s3crets"] {
            assert!(!token.matches(wrong), "{wrong:?}");
        }
        assert_eq!(format!("{token:?}"), "Token(…)");
    }

    #[test]
    fn tokens_that_no_header_can_carry_are_refused() {
        assert_eq!(Token::new(" \n").unwrap_err(), TokenError::Empty);
        for wrong in ["a b", "a\u{7f}", "é"] {
            assert_eq!(Token::new(wrong).unwrap_err(), TokenError::Unprintable);
        }
    }

    #[test]
    fn the_scheme_is_case_insensitive() {
        for value in ["Bearer t", "bearer t", "BEARER  t"] {
            assert_eq!(bearer(value), Some("t"));
        }
        for value in ["Basic t", "Bearer", "t", ""] {
            assert_eq!(bearer(value), None, "{value:?}");
        }
    }
}
