//! What the sinks share in reading their own part of the configuration.

use percent_encoding::percent_decode_str;
use reqwest::Url;

use super::options::Credentials;
use super::{BuildError, Secret, SinkOptions};

/// Refuses options of the protocol's own that none of `known` names.
pub(super) fn refuse_unknown(options: &SinkOptions, known: &[&str]) -> Result<(), BuildError> {
    let variable = |name: &str| format!("OPT_{}", name.to_ascii_uppercase().replace('.', "_"));
    match options.own.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let known: Vec<_> = known.iter().map(|name| variable(name)).collect();
            Err(BuildError::setting(
                variable(name),
                format!("is no option here, only {} are", known.join(", ")),
            ))
        }
    }
}

/// The URL's path without its first slash, its percent-encoding undone: parsing encodes what no URL can hold.
#[cfg(any(feature = "mqtt", feature = "nats", feature = "redis"))]
pub(super) fn path(url: &Url) -> Result<String, BuildError> {
    let path = url.path().trim_matches('/');
    match percent_decode_str(path).decode_utf8() {
        Ok(path) => Ok(path.into_owned()),
        Err(_) => {
            Err(BuildError::setting("the URL's path", "must be UTF-8 once its percent-encoding is undone"))
        }
    }
}

/// A part of a URL, its percent-encoding undone.
fn decoded(part: &str) -> String {
    percent_decode_str(part).decode_utf8_lossy().into_owned()
}

/// User name and password: the URL's, else those of the settings.
pub(super) fn user(url: &Url, credentials: &Credentials) -> (Option<String>, Option<Secret>) {
    let user = match decoded(url.username()) {
        none if none.is_empty() => credentials.username.clone(),
        user => Some(user),
    };
    let password = url.password().map(|password| Secret::fixed(&decoded(password)));
    (user, password.or_else(|| credentials.password.clone()))
}

/// Whether the certificates that are named can be read: better said now than at the first connection.
pub(super) fn check_files(options: &SinkOptions) -> Result<(), BuildError> {
    let tls = &options.tls;
    let identity = tls.identity.iter().flat_map(|(certificate, key)| [certificate, key]);
    for path in tls.ca.iter().chain(identity) {
        if let Err(error) = std::fs::File::open(path) {
            return Err(BuildError::File { path: path.clone(), error });
        }
    }
    Ok(())
}
