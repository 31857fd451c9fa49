//! What whoever runs the process sets for any process alike: the sink that Knative binds, and proxies.

use std::path::{Path, PathBuf};

use super::Complaints;
use super::value::{Field, ProxyUrl};
use crate::aep::cloudevents::Overrides;
use crate::export::Target;
use crate::export::sink::options::Proxies;
use crate::export::sink::{Secret, SinkOptions};

/// Where a Knative source finds its token, where there is one.
pub(super) const OIDC_TOKEN_FILE: &str = "/oidc/token";

/// The variables.
pub(super) struct RawSurroundings {
    pub(super) k_sink: Field<Target>,
    pub(super) k_ce_overrides: Field<Overrides>,
    pub(super) k_ca_certs: Field<String>,
    pub(super) oidc_token_file: Field<PathBuf>,
    pub(super) expect_k_sink: Field<bool>,
    pub(super) http_proxy: Field<ProxyUrl>,
    pub(super) https_proxy: Field<ProxyUrl>,
    pub(super) all_proxy: Field<ProxyUrl>,
    pub(super) no_proxy: Field<String>,
}

/// The same, read.
#[derive(Debug, Clone)]
pub(super) struct Surroundings {
    /// Where events go when no variable of the sidecar's own says so.
    pub(super) bound: Option<Target>,
    overrides: Overrides,
    also_trusted: Option<String>,
    token: Option<Secret>,
    pub(super) proxies: Proxies,
}

impl Surroundings {
    pub(super) fn read(read: &mut Complaints, raw: RawSurroundings) -> Self {
        let expected = read.or("AEP_EXPECT_K_SINK", raw.expect_k_sink, false);
        let sink = read.take("K_SINK", raw.k_sink);
        if sink.as_ref().is_some_and(|sink| !matches!(sink, Target::Http(_))) {
            read.wrong.push("K_SINK must be a URL that starts with http: or https:".to_owned());
        }
        let all = read.take("ALL_PROXY", raw.all_proxy).map(|ProxyUrl(url)| url);
        let mut proxy = |name, field| read.take(name, field).map(|ProxyUrl(url)| url).or_else(|| all.clone());
        let proxies = Proxies {
            http: proxy("HTTP_PROXY", raw.http_proxy),
            https: proxy("HTTPS_PROXY", raw.https_proxy),
            except: read.or("NO_PROXY", raw.no_proxy, String::new()),
        };
        Self {
            bound: sink.or(expected.then_some(Target::Unbound)),
            overrides: read.or("K_CE_OVERRIDES", raw.k_ce_overrides, Overrides::default()),
            also_trusted: read.take("K_CA_CERTS", raw.k_ca_certs),
            token: token(read, raw.oidc_token_file),
            proxies,
        }
    }

    /// What holds for the bound sink, beside what holds for all.
    pub(super) fn bind(&self, options: &mut SinkOptions) {
        options.web.overrides = self.overrides.clone();
        options.web.also_trusted.clone_from(&self.also_trusted);
        if options.web.oauth.is_none() && options.credentials.token.is_none() {
            options.credentials.token.clone_from(&self.token);
        }
    }
}

/// The token is read again like any secret. Where it isn't mounted, and none is named, there is none.
fn token(read: &mut Complaints, file: Field<PathBuf>) -> Option<Secret> {
    let named = read.take("CE_OIDC_TOKEN_FILE", file);
    let path = named.clone().unwrap_or_else(|| PathBuf::from(OIDC_TOKEN_FILE));
    match std::fs::read_to_string(&path) {
        Ok(text) => Some(Secret::in_file(path, text.trim())),
        Err(error) => {
            // The default as it stands in the table is no more asked for than none.
            if named.is_some_and(|named| named != Path::new(OIDC_TOKEN_FILE)) {
                read.wrong.push(format!("CE_OIDC_TOKEN_FILE={}: {error}", path.display()));
            }
            None
        }
    }
}
