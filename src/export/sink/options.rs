//! What can be set of a sink beside where it is.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::secret::Secret;

/// What can be set of a sink beside where it is. Each sink says what it uses; what it doesn't is ignored, but for
/// [`SinkOptions::own`], whose unknown names are errors.
#[derive(Clone, Default)]
pub struct SinkOptions {
    /// How events are written.
    pub mode: Mode,
    /// How long it waits and keeps.
    pub times: Times,
    /// Who it says it is.
    pub credentials: Credentials,
    /// Whom it trusts.
    pub tls: Tls,
    /// Options of the one protocol, by name: lower case, with dots.
    pub own: BTreeMap<String, String>,
}

impl fmt::Debug for SinkOptions {
    /// Of the protocol's own options the names: a value may be a secret, the password of a key for instance.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, times, credentials, tls, own } = self;
        f.debug_struct("SinkOptions")
            .field("mode", mode)
            .field("times", times)
            .field("credentials", credentials)
            .field("tls", tls)
            .field("own", &own.keys())
            .finish()
    }
}

/// How events are written to a sink that knows more than one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// One CloudEvent, attributes and data in one JSON object.
    #[default]
    Structured,
    /// Attributes as headers or properties, data as the body.
    Binary,
    /// A JSON array of structured CloudEvents.
    Batch,
}

/// How long a sink waits and keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Bounds one attempt as a whole.
    pub attempt: Duration,
    /// Requests use no connection that is older, so that a change of the name's addresses is seen.
    pub connection: Duration,
}

impl Default for Times {
    /// 30 s an attempt, 5 min a connection.
    fn default() -> Self {
        Self { attempt: Duration::from_secs(30), connection: Duration::from_mins(5) }
    }
}

/// Who a sink's client says it is.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// A bearer token.
    pub token: Option<Secret>,
    /// A user's name; what the URL says otherwise.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<Secret>,
}

/// Certificates, in PEM files that are read again when they change, where the protocol's client can do that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Whose certificates are trusted, instead of the system's.
    pub ca: Option<PathBuf>,
    /// The client's own certificate with its chain, and its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
}
