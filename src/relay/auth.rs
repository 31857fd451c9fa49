//! Who may: the bearer check, and what each token permits.
//!
//! A request without a token that counts is nobody's; what [`Access`] makes of one that does is a [`Principal`],
//! who may do some things, may see some events, and may be revoked while a stream is open.

mod tokens;

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;

pub use tokens::{EntryError, Tokens, TokensError};

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
    /// Every permission.
    pub const EVERY: [Self; 3] = [Self::Emit, Self::Read, Self::Control];

    /// The permission of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::EVERY.into_iter().find(|permission| permission.as_str() == name)
    }

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

/// Which of the [`Permission`]s there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Permissions {
    emit: bool,
    read: bool,
    control: bool,
}

impl Permissions {
    /// Every permission.
    pub const ALL: Self = Self { emit: true, read: true, control: true };

    /// Whether the permission is among these.
    #[must_use]
    pub const fn hold(self, permission: Permission) -> bool {
        match permission {
            Permission::Emit => self.emit,
            Permission::Read => self.read,
            Permission::Control => self.control,
        }
    }

    /// These and one more.
    #[must_use]
    pub const fn with(mut self, permission: Permission) -> Self {
        match permission {
            Permission::Emit => self.emit = true,
            Permission::Read => self.read = true,
            Permission::Control => self.control = true,
        }
        self
    }
}

/// Who makes a request, as far as its token tells.
#[derive(Debug, Clone)]
pub struct Principal {
    permissions: Permissions,
    bound: Option<Arc<Filter>>,
    /// Cancelled by [`Access::replace`] once the token no longer means this.
    revoked: CancellationToken,
}

impl Principal {
    /// Anyone, where no token is configured: may emit and read. Control needs authentication, on loopback too.
    ///
    /// Spec: AEP-0004 §4.1.
    #[must_use]
    pub fn anyone() -> Self {
        let permissions = Permissions::default().with(Permission::Emit).with(Permission::Read);
        Self { permissions, bound: None, revoked: CancellationToken::new() }
    }

    /// The bearer of the one token that may do everything.
    #[must_use]
    pub fn operator() -> Self {
        Self { permissions: Permissions::ALL, bound: None, revoked: CancellationToken::new() }
    }

    /// Whether the principal may do that.
    #[must_use]
    pub fn may(&self, permission: Permission) -> bool {
        self.permissions.hold(permission)
    }

    /// What the principal may see at most; `None` for everything.
    #[must_use]
    pub fn bound(&self) -> Option<&Filter> {
        self.bound.as_deref()
    }

    /// The subscription as far as the principal may see it.
    #[must_use]
    pub fn within(&self, subscription: Subscription) -> Subscription {
        match self.bound() {
            Some(bound) => subscription.within(bound),
            None => subscription,
        }
    }

    /// Whether the principal's token no longer counts, or no longer counts for the same.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.revoked.is_cancelled()
    }

    /// Returns once the principal's token no longer counts, or no longer counts for the same.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn revoked(&self) {
        self.revoked.cancelled().await;
    }
}

/// Who may: the operator's token, and the listed ones as they are now. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Access(Arc<Doors>);

#[derive(Debug)]
struct Doors {
    /// Permits everything, for as long as the process runs.
    operator: Option<Token>,
    /// Guards which list is current; [`Access::replace`] swaps it. `None` until there was one.
    listed: RwLock<Option<Arc<Tokens>>>,
}

/// What became of the tokens when a list replaced another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replaced {
    /// Tokens that count now.
    pub listed: usize,
    /// Tokens that counted and don't any more, or mean something else now.
    pub revoked: usize,
}

impl Access {
    /// Admits the bearer of `operator` to everything. Without one, and until there is a list, everyone may read
    /// and emit.
    #[must_use]
    pub fn new(operator: Option<Token>) -> Self {
        Self(Arc::new(Doors { operator, listed: RwLock::new(None) }))
    }

    /// Makes `tokens` the listed ones. Whose token isn't listed any more, or is listed for something else, is
    /// revoked; whose entry is the same goes on undisturbed.
    ///
    /// # Errors
    /// When the operator's token is among them; what was listed before stays.
    pub fn replace(&self, mut tokens: Tokens) -> Result<Replaced, TokensError> {
        if let Some(operator) = &self.0.operator {
            tokens.refuse(operator)?;
        }
        let listed = tokens.len();
        let mut current = self.0.listed.write();
        let revoked = current.as_deref().map(|before| tokens.take_over(before)).unwrap_or_default();
        *current = Some(Arc::new(tokens));
        drop(current);
        // Only now, so that who comes back at once is judged by the new list.
        for principal in &revoked {
            principal.cancel();
        }
        Ok(Replaced { listed, revoked: revoked.len() })
    }

    /// Whether a token is demanded.
    #[must_use]
    pub fn is_guarded(&self) -> bool {
        self.0.operator.is_some() || self.0.listed.read().is_some()
    }

    /// Who bears `candidate`, in time that doesn't depend on which token it is; `None` for a token that isn't
    /// known.
    #[must_use]
    pub fn bearer_of(&self, candidate: &str) -> Option<Principal> {
        let listed = self.0.listed.read().clone();
        let operator = self.0.operator.as_ref().is_some_and(|token| token.matches(candidate));
        let listed = listed.and_then(|tokens| tokens.bearer_of(candidate));
        if operator { Some(Principal::operator()) } else { listed }
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

    fn tokens(text: &str) -> Tokens {
        Tokens::parse(text).unwrap()
    }

    const DASHBOARD: &str = r#"{"tokens":[
        {"name":"dashboard","token":"d4sh","scopes":["read"],"filter":{"agent":"a"}},
        {"name":"agent","token":"ag3nt","scopes":["emit"]}
    ]}"#;

    #[test]
    fn without_any_token_everyone_may_emit_and_read_but_not_control() {
        let anyone = Principal::anyone();
        assert!(anyone.may(Permission::Emit) && anyone.may(Permission::Read));
        assert!(!anyone.may(Permission::Control));
        assert!(!Access::new(None).is_guarded());
    }

    #[test]
    fn a_bearer_may_what_its_token_permits() {
        let access = Access::new(Some(Token::new("s3cret").unwrap()));
        assert_eq!(access.replace(tokens(DASHBOARD)).unwrap(), Replaced { listed: 2, revoked: 0 });
        let operator = access.bearer_of("s3cret").unwrap();
        assert!(Permission::EVERY.into_iter().all(|permission| operator.may(permission)));
        assert!(operator.bound().is_none());
        let dashboard = access.bearer_of("d4sh").unwrap();
        assert_eq!(Permission::EVERY.map(|permission| dashboard.may(permission)), [false, true, false]);
        assert_eq!(dashboard.bound(), Some(&Filter::parse(r#"{"agent":"a"}"#).unwrap()));
        let agent = access.bearer_of("ag3nt").unwrap();
        assert_eq!(Permission::EVERY.map(|permission| agent.may(permission)), [true, false, false]);
        for unknown in ["", "d4s", "d4shh", "dashboard"] {
            assert!(access.bearer_of(unknown).is_none(), "{unknown:?}");
        }
    }

    #[test]
    fn an_empty_list_admits_no_one() {
        let access = Access::new(None);
        access.replace(tokens(r#"{"tokens":[]}"#)).unwrap();
        assert!(access.is_guarded());
        assert!(access.bearer_of("").is_none());
    }

    #[tokio::test]
    async fn who_is_gone_or_changed_is_revoked_and_who_stays_is_not() {
        let access = Access::new(None);
        let of =
            |token: &str, members: &str| format!(r#"{{"name":"{token}-name","token":"{token}",{members}}}"#);
        let list = |entries: &[String]| tokens(&format!(r#"{{"tokens":[{}]}}"#, entries.join(",")));
        let read = r#""scopes":["read"]"#;
        let before = ["same", "gone", "widened", "bounded", "renamed"].map(|token| of(token, read));
        access.replace(list(&before)).unwrap();
        let principal = |token: &str| access.bearer_of(token).unwrap();
        let same = principal("same");
        let others = ["gone", "widened", "bounded", "renamed"].map(principal);
        let after = [
            of("widened", r#""scopes":["read","emit"]"#),
            of("bounded", r#""scopes":["read"],"filter":{"agent":"a"}"#),
            of("renamed", read).replace("-name", "-other"),
            of("same", r#" "scopes" : [ "read" ], "filter" : {}"#),
        ];
        assert_eq!(access.replace(list(&after)).unwrap(), Replaced { listed: 4, revoked: 4 });
        for other in &others {
            other.revoked().await;
        }
        assert!(!same.is_revoked());
        // It is still the one that a later list revokes.
        access.replace(list(&[])).unwrap();
        same.revoked().await;
        assert!(access.bearer_of("same").is_none());
    }

    #[test]
    fn the_operators_token_can_not_be_listed_for_less() {
        let access = Access::new(Some(Token::new("d4sh").unwrap()));
        let error = access.replace(tokens(DASHBOARD)).unwrap_err().to_string();
        assert_eq!(error, r#"tokens[0] ("dashboard"): token is AEP_TOKEN's, which permits everything"#);
        assert!(access.bearer_of("ag3nt").is_none());
    }

    #[test]
    fn nothing_of_access_prints_a_token() {
        let access = Access::new(Some(Token::new("s3cret").unwrap()));
        access.replace(tokens(DASHBOARD)).unwrap();
        let printed = format!("{access:?} {:?}", access.bearer_of("d4sh"));
        for token in ["s3cret", "d4sh", "ag3nt"] {
            assert!(!printed.contains(token), "{printed}");
        }
    }
}
