//! The sinks: `CE_SINK` for one, `CE_SINKS` and each one's own variables for several.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::surroundings::Surroundings;
use super::table::{VARIABLES, Variable};
use super::value::{Field, Millis, ProxyChoice, ProxyUrl, Setting as _, SinkNames, Size};
use super::{Complaints, Given, nonzero};
use crate::aep::{Capture, Filter};
use crate::export::sink::options::{Credentials, Endpoint, OAuth, Proxies, Tls, Web};
use crate::export::sink::{Secret, SinkOptions, Times};
use crate::export::{Mode, RetryPolicy, SinkConfig, SinkName, Target};

/// What the names of a protocol's own options start with, after the sink's prefix.
const OPTION: &str = "OPT_";

/// What can be set of each sink, for all of them as `CE_…` and for one as `CE_SINK_<NAME>_…`.
#[derive(Debug, Deserialize, Default)]
#[serde(default)]
pub(super) struct RawSink {
    pub(super) url: Field<Target>,
    pub(super) filter: Field<Filter>,
    pub(super) capture: Field<Capture>,
    pub(super) mode: Field<Mode>,
    pub(super) batch_max: Field<NonZeroUsize>,
    pub(super) batch_ms: Field<Millis>,
    pub(super) timeout: Field<Duration>,
    pub(super) connection_max_age: Field<Duration>,
    pub(super) retry_initial: Field<Duration>,
    pub(super) retry_max: Field<Duration>,
    pub(super) concurrency: Field<NonZeroUsize>,
    pub(super) max_pending: Field<NonZeroUsize>,
    pub(super) max_pending_bytes: Field<Size>,
    pub(super) dead_letter_bytes: Field<Size>,
    pub(super) dead_letter_sink: Field<Target>,
    pub(super) token: Field<String>,
    pub(super) username: Field<String>,
    pub(super) password: Field<String>,
    pub(super) headers: Field<String>,
    pub(super) oauth_token_url: Field<Endpoint>,
    pub(super) oauth_client_id: Field<String>,
    pub(super) oauth_client_secret: Field<String>,
    pub(super) oauth_scope: Field<String>,
    pub(super) webhook_secret: Field<String>,
    pub(super) webhook_validate: Field<bool>,
    pub(super) proxy: Field<ProxyChoice>,
    pub(super) ca: Field<PathBuf>,
    pub(super) cert: Field<PathBuf>,
    pub(super) key: Field<PathBuf>,
}

/// The same, read.
#[derive(Debug, Clone)]
struct Values {
    options: SinkOptions,
    client: Client,
    batch: Option<NonZeroUsize>,
    linger: Duration,
    retry: RetryPolicy,
    concurrency: NonZeroUsize,
    max_pending: NonZeroUsize,
    max_pending_bytes: NonZeroUsize,
    max_dead_letters: u64,
    dead_letter_sink: Option<Target>,
}

/// The parts of an OAuth client, some set for all sinks and some for one.
#[derive(Debug, Clone, Default)]
struct Client {
    token_url: Option<Endpoint>,
    id: Option<String>,
    secret: Option<Secret>,
    scope: Option<String>,
}

impl Default for Values {
    fn default() -> Self {
        Self {
            options: SinkOptions::default(),
            client: Client::default(),
            batch: None,
            linger: Duration::from_millis(50),
            retry: RetryPolicy::default(),
            concurrency: nonzero(16),
            max_pending: nonzero(1000),
            max_pending_bytes: nonzero(16 << 20),
            max_dead_letters: 64 << 20,
            dead_letter_sink: None,
        }
    }
}

impl Values {
    /// What is set under `prefix`, and this where nothing is.
    fn with(&self, read: &mut Complaints, prefix: &str, raw: RawSink, given: &Given) -> Self {
        let Given { set, files } = given;
        let name = |suffix: &str| format!("{prefix}{suffix}");
        Self {
            batch: read.take(&name("BATCH_MAX"), raw.batch_max).or(self.batch),
            linger: read.or(&name("BATCH_MS"), raw.batch_ms, Millis(self.linger)).0,
            options: SinkOptions {
                mode: read.or(&name("MODE"), raw.mode, self.options.mode),
                times: Times {
                    attempt: read.or(&name("TIMEOUT"), raw.timeout, self.options.times.attempt),
                    connection: read.or(
                        &name("CONNECTION_MAX_AGE"),
                        raw.connection_max_age,
                        self.options.times.connection,
                    ),
                },
                credentials: Credentials {
                    token: secret(read, files, &name("TOKEN"), raw.token)
                        .or_else(|| self.options.credentials.token.clone()),
                    username: read
                        .take(&name("USERNAME"), raw.username)
                        .or_else(|| self.options.credentials.username.clone()),
                    password: secret(read, files, &name("PASSWORD"), raw.password)
                        .or_else(|| self.options.credentials.password.clone()),
                },
                tls: Tls {
                    ca: read.take(&name("CA"), raw.ca).or_else(|| self.options.tls.ca.clone()),
                    identity: read
                        .both((&name("CERT"), raw.cert), (&name("KEY"), raw.key), |cert, key| (cert, key))
                        .or_else(|| self.options.tls.identity.clone()),
                },
                web: Web {
                    headers: secret(read, files, &name("HEADERS"), raw.headers)
                        .or_else(|| self.options.web.headers.clone()),
                    signing: secret(read, files, &name("WEBHOOK_SECRET"), raw.webhook_secret)
                        .or_else(|| self.options.web.signing.clone()),
                    asks_consent: read.or(
                        &name("WEBHOOK_VALIDATE"),
                        raw.webhook_validate,
                        self.options.web.asks_consent,
                    ),
                    proxies: match read.take(&name("PROXY"), raw.proxy) {
                        None => self.options.web.proxies.clone(),
                        Some(ProxyChoice::None) => Proxies::default(),
                        Some(ProxyChoice::One(ProxyUrl(url))) => Proxies::all(url),
                    },
                    ..self.options.web.clone()
                },
                own: own(&self.options.own, prefix, set),
            },
            client: Client {
                token_url: read
                    .take(&name("OAUTH_TOKEN_URL"), raw.oauth_token_url)
                    .or_else(|| self.client.token_url.clone()),
                id: read
                    .take(&name("OAUTH_CLIENT_ID"), raw.oauth_client_id)
                    .or_else(|| self.client.id.clone()),
                secret: secret(read, files, &name("OAUTH_CLIENT_SECRET"), raw.oauth_client_secret)
                    .or_else(|| self.client.secret.clone()),
                scope: read.take(&name("OAUTH_SCOPE"), raw.oauth_scope).or_else(|| self.client.scope.clone()),
            },
            retry: RetryPolicy {
                initial: read.or(&name("RETRY_INITIAL"), raw.retry_initial, self.retry.initial),
                max: read.or(&name("RETRY_MAX"), raw.retry_max, self.retry.max),
            },
            concurrency: read.or(&name("CONCURRENCY"), raw.concurrency, self.concurrency),
            max_pending: read.or(&name("MAX_PENDING"), raw.max_pending, self.max_pending),
            max_pending_bytes: nonzero(read.size(
                &name("MAX_PENDING_BYTES"),
                raw.max_pending_bytes,
                self.max_pending_bytes.get(),
            )),
            max_dead_letters: read
                .take(&name("DEAD_LETTER_BYTES"), raw.dead_letter_bytes)
                .and_then(|Size(bytes)| u64::try_from(bytes).ok())
                .unwrap_or(self.max_dead_letters),
            dead_letter_sink: read
                .take(&name("DEAD_LETTER_SINK"), raw.dead_letter_sink)
                .or_else(|| self.dead_letter_sink.clone()),
        }
    }

    /// Puts the parts of the OAuth client together.
    fn whole(mut self, read: &mut Complaints, prefix: &str) -> Self {
        let Client { token_url, id, secret, scope } = std::mem::take(&mut self.client);
        self.options.web.oauth = match (token_url, id, secret) {
            (Some(token_url), Some(client_id), Some(client_secret)) => {
                Some(OAuth { token_url, client_id, client_secret, scope })
            }
            (None, None, None) => None,
            _ => {
                read.wrong.push(format!(
                    "{prefix}OAUTH_TOKEN_URL, {prefix}OAUTH_CLIENT_ID and {prefix}OAUTH_CLIENT_SECRET go together: set all or none"
                ));
                None
            }
        };
        self
    }

    fn sink(self, name: SinkName, target: Target, filter: Filter, ceiling: Option<Capture>) -> SinkConfig {
        let Self { options, batch, linger, retry, concurrency, max_pending, max_pending_bytes, .. } = self;
        SinkConfig {
            options,
            batch,
            linger,
            retry,
            concurrency,
            max_pending,
            max_pending_bytes,
            filter,
            ceiling,
            max_dead_letters: self.max_dead_letters,
            dead_letter_sink: self.dead_letter_sink,
            ..SinkConfig::new(name, target)
        }
    }
}

/// What the variables that name sinks say.
pub(super) struct Named {
    pub(super) sink: Field<Target>,
    pub(super) sinks: Field<SinkNames>,
    /// What holds for every sink that doesn't say otherwise.
    pub(super) common: RawSink,
    /// What is said to any process.
    pub(super) surroundings: Surroundings,
}

/// A secret, which is read again where it came from a file.
fn secret(
    read: &mut Complaints,
    files: &BTreeMap<String, PathBuf>,
    name: &str,
    field: Field<String>,
) -> Option<Secret> {
    let text = read.take(name, field)?;
    Some(match files.get(name) {
        Some(path) => Secret::in_file(path.clone(), &text),
        None => Secret::fixed(&text),
    })
}

/// The options of one protocol: `{prefix}OPT_QUEUE_BUFFERING_MAX_MS` is `queue.buffering.max.ms`.
fn own(
    common: &BTreeMap<String, String>,
    prefix: &str,
    set: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let prefix = format!("{prefix}{OPTION}");
    let named = set.iter().filter_map(|(name, value)| {
        let name = name.strip_prefix(&prefix)?.to_ascii_lowercase().replace('_', ".");
        Some((name, value.clone()))
    });
    common.clone().into_iter().chain(named).collect()
}

/// Reads the sinks. `set` holds the variables of each, `filter` and `ceiling` hold for all.
pub(super) fn sinks(
    read: &mut Complaints,
    named: Named,
    given: &Given,
    filter: &Filter,
    ceiling: Option<Capture>,
) -> Vec<SinkConfig> {
    let set = &given.set;
    let surroundings = named.surroundings;
    let mut common = Values::default();
    common.options.web.proxies.clone_from(&surroundings.proxies);
    let common = common.with(read, "CE_", named.common, given);
    let one = read.take("CE_SINK", named.sink);
    let Some(SinkNames(names)) = read.take("CE_SINKS", named.sinks) else {
        let mut common = common.whole(read, "CE_");
        let target = match (one, surroundings.bound.clone()) {
            (Some(target), _) => target,
            (None, Some(bound)) => {
                surroundings.bind(&mut common.options);
                bound
            }
            (None, None) => Target::Stdout,
        };
        return vec![common.sink(SinkName::default(), target, filter.clone(), ceiling)];
    };
    if one.is_some() {
        read.wrong.push("CE_SINK and CE_SINKS are both set: set one".to_owned());
    }
    let mut sinks = Vec::with_capacity(names.len());
    for name in names {
        let prefix = prefix(&name);
        let own = set
            .iter()
            .filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?.to_owned(), value.clone())));
        let mut raw: RawSink = match envy::from_iter(own) {
            Ok(raw) => raw,
            Err(error) => {
                read.wrong.push(error.to_string());
                RawSink::default()
            }
        };
        let target = read.take(&format!("{prefix}URL"), std::mem::take(&mut raw.url));
        let own_filter =
            read.or(&format!("{prefix}FILTER"), std::mem::take(&mut raw.filter), Filter::default());
        let own_ceiling = read.take(&format!("{prefix}CAPTURE"), std::mem::take(&mut raw.capture));
        let values = common.with(read, &prefix, raw, given).whole(read, &prefix);
        match target {
            Some(target) => {
                let ceiling = ceiling.into_iter().chain(own_ceiling).min();
                sinks.push(values.sink(name, target, own_filter.and(filter), ceiling));
            }
            None if set.contains_key(&format!("{prefix}URL")) => {}
            None => read.wrong.push(format!("{prefix}URL is not set: CE_SINKS names {name}")),
        }
    }
    sinks
}

/// What the names of a sink's own variables start with.
fn prefix(name: &SinkName) -> String {
    format!("CE_SINK_{}_", name.as_str().to_ascii_uppercase().replace('-', "_"))
}

/// The variable that `name` is for one of the sinks that `CE_SINKS=names` configures.
pub(super) fn of_one(name: &str, names: &str) -> Option<&'static Variable> {
    // What is wrong with the names is said when they are read.
    let SinkNames(names) = SinkNames::read(names).ok()?;
    names.iter().find_map(|sink| {
        let suffix = name.strip_prefix(&prefix(sink))?;
        let suffix = if suffix.starts_with(OPTION) { "OPT_<OPTION>" } else { suffix };
        VARIABLES.iter().find(|variable| variable.suffix() == Some(suffix))
    })
}
