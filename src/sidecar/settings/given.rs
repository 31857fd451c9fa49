//! What the environment holds for this process.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use super::sinks;
use super::table::{VARIABLES, Variable};

/// Variables that have their names from elsewhere.
const OTHERS: [&str; 7] =
    ["K_SINK", "K_CE_OVERRIDES", "K_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];
/// Those of them that are also written in lower case.
const PROXIES: [&str; 4] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];

/// The variables that are ours.
pub(super) struct Given {
    /// By name, with the secrets that files hold.
    pub(super) set: BTreeMap<String, String>,
    /// Where the secrets that files hold were read.
    pub(super) files: BTreeMap<String, PathBuf>,
}

/// The variables that are ours, secrets read from their files, and those that look like ours but aren't.
pub(super) fn collect(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    wrong: &mut Vec<String>,
) -> (Given, Vec<(String, &'static str)>) {
    let mut set = BTreeMap::new();
    let mut files = Vec::new();
    let mut unknown = Vec::new();
    let ours = ours(variables);
    let sinks = ours.get("CE_SINKS").and_then(|names| names.to_str()).unwrap_or_default().to_owned();
    let known = |name: &str| known(name).or_else(|| sinks::of_one(name, &sinks));
    for (name, value) in ours {
        let secret_of =
            name.strip_suffix("_FILE").filter(|of| known(of).is_some_and(|variable| variable.secret));
        if let Some(secret) = secret_of {
            if !value.is_empty() {
                files.push((secret.to_owned(), PathBuf::from(value)));
            }
        } else if known(&name).is_some() {
            match value.into_string() {
                // An empty variable is one that isn't set, as templates leave it.
                Ok(value) if value.is_empty() => {}
                Ok(value) if is_service_link(&value) => wrong.push(format!(
                    "{name} holds a Kubernetes service link, not a setting: set enableServiceLinks: false on the pod"
                )),
                Ok(value) => {
                    set.insert(name, value);
                }
                Err(_) => wrong.push(format!("{name} must be UTF-8")),
            }
        } else if !is_service_variable(&name) {
            let near = nearest(&name);
            unknown.push((name, near));
        }
    }
    let mut read = BTreeMap::new();
    for (name, path) in files {
        if set.contains_key(&name) {
            wrong.push(format!("{name} and {name}_FILE are both set: set one"));
            continue;
        }
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                set.insert(name.clone(), text.trim().to_owned());
                read.insert(name, path);
            }
            Err(error) => wrong.push(format!("{name}_FILE={}: {error}", path.display())),
        }
    }
    unknown.sort();
    (Given { set, files: read }, unknown)
}

/// What is ours by its name, and what others set for any process to read.
fn ours(variables: impl IntoIterator<Item = (OsString, OsString)>) -> BTreeMap<String, OsString> {
    let (mut ours, mut lower) = (BTreeMap::new(), Vec::new());
    for (name, value) in variables {
        let Ok(name) = name.into_string() else { continue };
        let upper = name.to_ascii_uppercase();
        if name.starts_with("AEP_") || name.starts_with("CE_") || OTHERS.contains(&name.as_str()) {
            ours.insert(name, value);
        } else if PROXIES.contains(&upper.as_str()) {
            lower.push((upper, value));
        }
    }
    for (name, value) in lower {
        ours.entry(name).or_insert(value);
    }
    ours
}

fn known(name: &str) -> Option<&'static Variable> {
    let name = if name.starts_with("CE_OPT_") { "CE_OPT_<OPTION>" } else { name };
    VARIABLES.iter().find(|variable| variable.name == name)
}

fn nearest(name: &str) -> &'static str {
    let distance = |variable: &&Variable| strsim::damerau_levenshtein(name, variable.name);
    VARIABLES.iter().min_by_key(distance).map_or("", |variable| variable.name)
}

/// What Kubernetes sets for a service named `aep`, say: `AEP_PORT=tcp://10.0.0.1:8787`.
fn is_service_link(value: &str) -> bool {
    value.starts_with("tcp://") || value.starts_with("udp://")
}

/// The other variables that Kubernetes sets for each service.
fn is_service_variable(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name
            .split_once("_PORT")
            .is_some_and(|(_, rest)| rest.is_empty() || rest.contains("_TCP") || rest.contains("_UDP"))
}
