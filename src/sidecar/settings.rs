//! Every environment variable, in one table.
//!
//! [`VARIABLES`] is what `--help` and the configuration page show; [`Settings::read`] is what the process gets.
//! A test holds the two together. Every wrong variable is reported, not just the first.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

mod given;
mod sinks;
mod surroundings;
mod table;
mod value;

use given::{Given, collect};
use sinks::{Named, RawSink};
use surroundings::{RawSurroundings, Surroundings};
pub use table::{VARIABLES, Variable};
pub use value::{AdminAddress, LogFormat, Setting};
use value::{Field, Millis, ProxyChoice, ProxyUrl, RelayUrl, SinkNames, Size};

use crate::aep::cloudevents::Overrides;
use crate::aep::{Capture, Filter};
use crate::client::{FilterText, Secret, SubscribeConfig};
use crate::export::sink::options::Endpoint;
use crate::export::{Mode, SinkConfig, SpoolSync, Target};
use crate::relay::limits::Times;
use crate::relay::{Limits, Token};

/// What the process runs with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Where probes and scrapers are answered.
    pub admin: AdminAddress,
    /// The token that permits everything.
    pub token: Option<Token>,
    /// Where the other tokens are listed.
    pub tokens_file: Option<PathBuf>,
    /// What to listen with TLS with; without it, HTTP is plain.
    pub tls: Option<TlsFiles>,
    /// The relay's bounds.
    pub limits: Limits,
    /// Where schemas of vendor types are.
    pub schemas: Option<PathBuf>,
    /// What is exported, and how.
    pub export: ExportSettings,
    /// The relay that is exported from instead of the embedded one.
    pub remote: Option<SubscribeConfig>,
    /// How long a stop may take.
    pub drain: Duration,
    /// What is logged.
    pub log: String,
    /// In which form.
    pub log_format: LogFormat,
    /// Names that look like settings and are none, each with the nearest one that is.
    pub unknown: Vec<(String, &'static str)>,
}

/// Where a certificate and its key are.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate, followed by the rest of its chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What is exported, and how.
#[derive(Debug, Clone)]
pub struct ExportSettings {
    /// Which events.
    pub filter: Filter,
    /// How much of their content; `None` for all of it.
    pub ceiling: Option<Capture>,
    /// Keys remembered.
    pub dedupe: NonZeroUsize,
    /// Where state is kept.
    pub state_dir: PathBuf,
    /// What an accepted event survives.
    pub sync: SpoolSync,
    /// Bound of the spool, in bytes.
    pub spool_bytes: u64,
    /// How much of it may be history, in bytes.
    pub history_bytes: u64,
    /// Where CloudEvents go.
    pub sinks: Vec<SinkConfig>,
}

/// Everything that is wrong with the environment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.0.join("\n"))]
pub struct SettingsError(pub Vec<String>);

/// The variables as they are set: every field reads its own value and keeps its own complaint.
#[derive(Debug, Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Raw {
    aep_host: Field<IpAddr>,
    aep_port: Field<u16>,
    aep_admin_addr: Field<AdminAddress>,
    aep_token: Field<Token>,
    aep_tokens_file: Field<PathBuf>,
    aep_allow_unauthenticated: Field<bool>,
    aep_tls_cert: Field<PathBuf>,
    aep_tls_key: Field<PathBuf>,
    aep_buffer: Field<NonZeroUsize>,
    aep_max_sessions: Field<NonZeroUsize>,
    aep_buffer_bytes: Field<Size>,
    aep_window_bytes: Field<Size>,
    aep_max_body: Field<Size>,
    aep_max_batch: Field<NonZeroUsize>,
    aep_max_from: Field<NonZeroUsize>,
    aep_max_subscriptions: Field<NonZeroUsize>,
    aep_ingest_bytes: Field<Size>,
    aep_max_connections: Field<NonZeroUsize>,
    aep_schemas: Field<PathBuf>,
    aep_filter: Field<Filter>,
    aep_capture: Field<Capture>,
    aep_relay: Field<RelayUrl>,
    aep_relay_ca: Field<PathBuf>,
    aep_dedupe: Field<NonZeroUsize>,
    aep_state_dir: Field<PathBuf>,
    aep_spool_sync: Field<SpoolSync>,
    aep_spool_max_bytes: Field<Size>,
    aep_spool_keep_bytes: Field<Size>,
    aep_expect_k_sink: Field<bool>,
    aep_drain: Field<Duration>,
    aep_log: Field<String>,
    aep_log_format: Field<LogFormat>,
    ce_sink: Field<Target>,
    ce_sinks: Field<SinkNames>,
    ce_mode: Field<Mode>,
    ce_batch_max: Field<NonZeroUsize>,
    ce_batch_ms: Field<Millis>,
    ce_timeout: Field<Duration>,
    ce_connection_max_age: Field<Duration>,
    ce_retry_initial: Field<Duration>,
    ce_retry_max: Field<Duration>,
    ce_concurrency: Field<NonZeroUsize>,
    ce_max_pending: Field<NonZeroUsize>,
    ce_max_pending_bytes: Field<Size>,
    ce_dead_letter_bytes: Field<Size>,
    ce_dead_letter_sink: Field<Target>,
    ce_token: Field<String>,
    ce_username: Field<String>,
    ce_password: Field<String>,
    ce_headers: Field<String>,
    ce_oauth_token_url: Field<Endpoint>,
    ce_oauth_client_id: Field<String>,
    ce_oauth_client_secret: Field<String>,
    ce_oauth_scope: Field<String>,
    ce_webhook_secret: Field<String>,
    ce_webhook_validate: Field<bool>,
    ce_proxy: Field<ProxyChoice>,
    ce_ca: Field<PathBuf>,
    ce_cert: Field<PathBuf>,
    ce_key: Field<PathBuf>,
    k_sink: Field<Target>,
    k_ce_overrides: Field<Overrides>,
    k_ca_certs: Field<String>,
    ce_oidc_token_file: Field<PathBuf>,
    http_proxy: Field<ProxyUrl>,
    https_proxy: Field<ProxyUrl>,
    all_proxy: Field<ProxyUrl>,
    no_proxy: Field<String>,
}

impl Settings {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_env() -> Result<Self, SettingsError> {
        Self::read(std::env::vars_os())
    }

    /// Logs the names that look like settings and are none.
    pub fn warn_of_unknown(&self) {
        for (name, near) in &self.unknown {
            tracing::warn!(variable = name, nearest = near, "no such setting: it has no effect");
        }
    }

    /// Reads variables.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn read(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, SettingsError> {
        let mut wrong = Vec::new();
        let (given, unknown) = collect(variables, &mut wrong);
        let set = &given.set;
        let raw: Raw = match envy::from_iter(set.clone()) {
            Ok(raw) => raw,
            Err(error) => {
                wrong.push(error.to_string());
                Raw::default()
            }
        };
        let bounds = Limits::default();
        let mut read = Complaints { wrong };
        let host = read.or("AEP_HOST", raw.aep_host, IpAddr::V4(Ipv4Addr::LOCALHOST));
        let port = read.or("AEP_PORT", raw.aep_port, 8787);
        let admin = read.take("AEP_ADMIN_ADDR", raw.aep_admin_addr).unwrap_or_default();
        let token = read.take("AEP_TOKEN", raw.aep_token);
        let tokens_file = read.take("AEP_TOKENS_FILE", raw.aep_tokens_file);
        let tls = read.both(
            ("AEP_TLS_CERT", raw.aep_tls_cert),
            ("AEP_TLS_KEY", raw.aep_tls_key),
            |certificate, key| TlsFiles { certificate, key },
        );
        let open = read.or("AEP_ALLOW_UNAUTHENTICATED", raw.aep_allow_unauthenticated, false);
        let max_sessions = read.count("AEP_MAX_SESSIONS", raw.aep_max_sessions, bounds.max_sessions);
        let limits = Limits {
            buffer: read.count("AEP_BUFFER", raw.aep_buffer, bounds.buffer),
            max_sessions,
            buffer_bytes: read.size("AEP_BUFFER_BYTES", raw.aep_buffer_bytes, bounds.buffer_bytes),
            window_bytes: read.size("AEP_WINDOW_BYTES", raw.aep_window_bytes, bounds.window_bytes),
            max_body: read.size("AEP_MAX_BODY", raw.aep_max_body, bounds.max_body),
            max_batch: read.count("AEP_MAX_BATCH", raw.aep_max_batch, bounds.max_batch),
            max_from: read.count("AEP_MAX_FROM", raw.aep_max_from, max_sessions),
            max_subscriptions: read.count(
                "AEP_MAX_SUBSCRIPTIONS",
                raw.aep_max_subscriptions,
                bounds.max_subscriptions,
            ),
            ingest_bytes: read.size("AEP_INGEST_BYTES", raw.aep_ingest_bytes, bounds.ingest_bytes),
            max_connections: read.count(
                "AEP_MAX_CONNECTIONS",
                raw.aep_max_connections,
                bounds.max_connections,
            ),
            times: Times::default(),
        };
        let filter = read.or("AEP_FILTER", raw.aep_filter, Filter::default());
        let ceiling = read.take("AEP_CAPTURE", raw.aep_capture);
        let sync = read.or("AEP_SPOOL_SYNC", raw.aep_spool_sync, SpoolSync::Write);
        let spool_bytes = if sync == SpoolSync::Off { 64 << 20 } else { 1 << 30 };
        let spool_bytes = read.size("AEP_SPOOL_MAX_BYTES", raw.aep_spool_max_bytes, spool_bytes);
        let history_bytes = read.size("AEP_SPOOL_KEEP_BYTES", raw.aep_spool_keep_bytes, 64 << 20);
        let common = RawSink {
            mode: raw.ce_mode,
            batch_max: raw.ce_batch_max,
            batch_ms: raw.ce_batch_ms,
            timeout: raw.ce_timeout,
            connection_max_age: raw.ce_connection_max_age,
            retry_initial: raw.ce_retry_initial,
            retry_max: raw.ce_retry_max,
            concurrency: raw.ce_concurrency,
            max_pending: raw.ce_max_pending,
            max_pending_bytes: raw.ce_max_pending_bytes,
            dead_letter_bytes: raw.ce_dead_letter_bytes,
            dead_letter_sink: raw.ce_dead_letter_sink,
            token: raw.ce_token,
            username: raw.ce_username,
            password: raw.ce_password,
            headers: raw.ce_headers,
            oauth_token_url: raw.ce_oauth_token_url,
            oauth_client_id: raw.ce_oauth_client_id,
            oauth_client_secret: raw.ce_oauth_client_secret,
            oauth_scope: raw.ce_oauth_scope,
            webhook_secret: raw.ce_webhook_secret,
            webhook_validate: raw.ce_webhook_validate,
            proxy: raw.ce_proxy,
            ca: raw.ce_ca,
            cert: raw.ce_cert,
            key: raw.ce_key,
            ..RawSink::default()
        };
        let surroundings = RawSurroundings {
            k_sink: raw.k_sink,
            k_ce_overrides: raw.k_ce_overrides,
            k_ca_certs: raw.k_ca_certs,
            oidc_token_file: raw.ce_oidc_token_file,
            expect_k_sink: raw.aep_expect_k_sink,
            http_proxy: raw.http_proxy,
            https_proxy: raw.https_proxy,
            all_proxy: raw.all_proxy,
            no_proxy: raw.no_proxy,
        };
        let surroundings = Surroundings::read(&mut read, surroundings);
        let named = Named { sink: raw.ce_sink, sinks: raw.ce_sinks, common, surroundings };
        let export = ExportSettings {
            dedupe: read.or("AEP_DEDUPE", raw.aep_dedupe, nonzero(50_000)),
            state_dir: read.or("AEP_STATE_DIR", raw.aep_state_dir, PathBuf::from("aep-state")),
            sync,
            spool_bytes: u64::try_from(spool_bytes).unwrap_or(u64::MAX),
            history_bytes: u64::try_from(history_bytes).unwrap_or(u64::MAX),
            sinks: sinks::sinks(&mut read, named, &given, &filter, ceiling),
            filter,
            ceiling,
        };
        let remote = remote(&mut read, raw.aep_relay, raw.aep_relay_ca, set, &export, limits.max_body);
        let settings = Self {
            listen: SocketAddr::new(host, port),
            admin,
            token,
            tokens_file,
            tls,
            limits,
            schemas: read.take("AEP_SCHEMAS", raw.aep_schemas),
            export,
            remote,
            drain: read.or("AEP_DRAIN", raw.aep_drain, Duration::from_secs(20)),
            log: read.or("AEP_LOG", raw.aep_log, "info".to_owned()),
            log_format: read.or("AEP_LOG_FORMAT", raw.aep_log_format, LogFormat::Auto),
            unknown,
        };
        let guarded = settings.token.is_some() || settings.tokens_file.is_some();
        // Another relay's events are exported without listening.
        let guarded = guarded || settings.remote.is_some();
        if !guarded && !settings.listen.ip().is_loopback() && !open && read.wrong.is_empty() {
            read.wrong.push(format!(
                "AEP_HOST={} is reachable from other machines and AEP_TOKEN is not set: set AEP_TOKEN or AEP_TOKENS_FILE, or AEP_ALLOW_UNAUTHENTICATED=true if everyone may read and emit",
                settings.listen.ip()
            ));
        }
        if limits.ingest_bytes < limits.max_body {
            read.wrong.push(
                "AEP_INGEST_BYTES must be at least AEP_MAX_BODY, or the largest body is never taken".into(),
            );
        }
        if read.wrong.is_empty() { Ok(settings) } else { Err(SettingsError(read.wrong)) }
    }
}

/// What is asked of the relay that is exported from.
fn remote(
    read: &mut Complaints,
    relay: Field<RelayUrl>,
    ca: Field<PathBuf>,
    set: &BTreeMap<String, String>,
    export: &ExportSettings,
    max_event: usize,
) -> Option<SubscribeConfig> {
    let relay = read.take("AEP_RELAY", relay);
    let ca = read.take("AEP_RELAY_CA", ca).map(|path| std::fs::read(&path).map_err(|error| (path, error)));
    let ca = match ca.transpose() {
        Ok(ca) => ca,
        Err((path, error)) => {
            read.wrong.push(format!("AEP_RELAY_CA={}: {error}", path.display()));
            None
        }
    };
    let RelayUrl(url) = relay?;
    // What is wrong with these two is said elsewhere.
    let token = set.get("AEP_TOKEN").and_then(|text| Secret::new(text).ok());
    let filter = set.get("AEP_FILTER").and_then(|text| FilterText::parse(text.trim()).ok());
    // The highest of the sinks' ceilings, and none when one sink has none.
    let ceilings: Option<Vec<Capture>> = export.sinks.iter().map(|sink| sink.ceiling).collect();
    let ceiling = ceilings.and_then(|ceilings| ceilings.into_iter().max());
    Some(SubscribeConfig {
        token,
        filter,
        ceiling,
        ca,
        longest_event: max_event,
        ..SubscribeConfig::new(url)
    })
}

/// Collects what is wrong while values are taken.
struct Complaints {
    wrong: Vec<String>,
}

impl Complaints {
    fn take<T>(&mut self, name: &str, field: Field<T>) -> Option<T> {
        match field {
            Field::Unset => None,
            Field::Read(value) => Some(value),
            Field::Wrong(complaint) => {
                self.wrong.push(format!("{name} {complaint}"));
                None
            }
        }
    }

    /// Two variables that go together.
    fn both<A, B, T>(
        &mut self,
        (one, first): (&str, Field<A>),
        (other, second): (&str, Field<B>),
        together: impl FnOnce(A, B) -> T,
    ) -> Option<T> {
        match (self.take(one, first), self.take(other, second)) {
            (Some(first), Some(second)) => Some(together(first, second)),
            (None, None) => None,
            (Some(_), None) => {
                self.wrong.push(format!("{one} is set and {other} is not: set both or neither"));
                None
            }
            (None, Some(_)) => {
                self.wrong.push(format!("{other} is set and {one} is not: set both or neither"));
                None
            }
        }
    }

    fn or<T>(&mut self, name: &str, field: Field<T>, default: T) -> T {
        self.take(name, field).unwrap_or(default)
    }

    fn count(&mut self, name: &str, field: Field<NonZeroUsize>, default: usize) -> usize {
        self.take(name, field).map_or(default, NonZeroUsize::get)
    }

    fn size(&mut self, name: &str, field: Field<Size>, default: usize) -> usize {
        self.take(name, field).map_or(default, |Size(bytes)| bytes)
    }
}

fn nonzero(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, Vec<String>> {
        Settings::read(variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
            .map_err(|error| error.0)
    }

    /// The names of the fields that serde asks the environment for.
    fn fields<T: for<'de> Deserialize<'de>>() -> Vec<String> {
        struct Names<'n>(&'n mut Vec<String>);
        impl<'de> serde::Deserializer<'de> for Names<'_> {
            type Error = serde::de::value::Error;
            fn deserialize_any<V: serde::de::Visitor<'de>>(
                self,
                visitor: V,
            ) -> Result<V::Value, Self::Error> {
                visitor.visit_map(serde::de::value::MapDeserializer::<_, Self::Error>::new(
                    std::iter::empty::<(&str, &str)>(),
                ))
            }
            fn deserialize_struct<V: serde::de::Visitor<'de>>(
                self,
                _: &'static str,
                fields: &'static [&'static str],
                visitor: V,
            ) -> Result<V::Value, Self::Error> {
                self.0.extend(fields.iter().map(|name| name.to_ascii_uppercase()));
                Names(&mut Vec::new()).deserialize_any(visitor)
            }
            serde::forward_to_deserialize_any! {
                bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
                unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
            }
        }
        let mut names = Vec::new();
        T::deserialize(Names(&mut names)).unwrap();
        names
    }

    #[test]
    fn the_table_is_what_is_read() {
        let names = VARIABLES.iter().map(|variable| variable.name.to_owned());
        let table: Vec<_> = names.filter(|name| !name.contains('<')).collect();
        assert_eq!(table, fields::<Raw>());
        let suffixes = VARIABLES.iter().filter_map(Variable::suffix).filter(|suffix| !suffix.contains('<'));
        let of_one: Vec<_> = suffixes.map(str::to_owned).collect();
        assert_eq!(of_one, fields::<RawSink>());
    }

    #[test]
    fn the_tables_defaults_are_what_holds() {
        let by_default = format!("{:?}", read(&[]).unwrap());
        let stated: Vec<_> = VARIABLES
            .iter()
            .filter(|variable| !variable.default.is_empty() && !variable.name.contains('<'))
            .filter(|variable| variable.name != "AEP_MAX_FROM" && variable.name != "CE_BATCH_MAX")
            .map(|variable| (variable.name, variable.default))
            .collect();
        let mut settings = read(&stated).unwrap();
        assert_eq!(settings.export.ceiling.take(), Some(Capture::Full), "a ceiling of full is none");
        settings.export.sinks[0].ceiling = None;
        assert_eq!(settings.admin, AdminAddress::At("127.0.0.1:9464".parse().unwrap()), "asked for by name");
        settings.admin = AdminAddress::default();
        assert_eq!(format!("{settings:?}"), by_default);
    }

    #[test]
    fn everything_wrong_is_reported_at_once() {
        let wrong = read(&[
            ("AEP_PORT", "http"),
            ("AEP_BUFFER", "0"),
            ("AEP_DRAIN", "5"),
            ("AEP_MAX_BODY", "lots"),
            ("AEP_FILTER", r#"{"seq":1}"#),
            ("AEP_CAPTURE", "all"),
            ("CE_SINK", "ftp://h"),
            ("AEP_LOG_FORMAT", "xml"),
        ])
        .unwrap_err();
        for name in [
            "AEP_PORT ",
            "AEP_BUFFER ",
            "AEP_DRAIN ",
            "AEP_MAX_BODY ",
            "AEP_FILTER ",
            "AEP_CAPTURE ",
            "CE_SINK ",
            "AEP_LOG_FORMAT ",
        ] {
            assert_eq!(wrong.iter().filter(|line| line.starts_with(name)).count(), 1, "{name}: {wrong:?}");
        }
        assert_eq!(wrong.len(), 8, "{wrong:?}");
    }

    #[test]
    fn complaints_never_repeat_a_secret() {
        let wrong = read(&[("AEP_TOKEN", "two words"), ("CE_SINK", "https//user:hunter2@h/?key=hunter2")])
            .unwrap_err();
        assert_eq!(wrong.len(), 2);
        assert!(!wrong.join("").contains("words") && !wrong.join("").contains("hunter2"), "{wrong:?}");
        let settings =
            read(&[("AEP_TOKEN", "hunter2"), ("CE_SINK", "https://user:hunter2@h/?key=hunter2")]).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
    }

    #[test]
    fn secrets_may_come_from_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "s3cret\n").unwrap();
        let path = path.to_str().unwrap();
        assert!(read(&[("AEP_TOKEN_FILE", path)]).unwrap().token.unwrap().matches("s3cret"));
        assert!(read(&[("AEP_TOKEN_FILE", path), ("AEP_TOKEN", "x")]).unwrap_err()[0].contains("both set"));
        assert!(
            read(&[("AEP_TOKEN_FILE", "/does/not/exist")]).unwrap_err()[0].starts_with("AEP_TOKEN_FILE=")
        );
    }

    #[test]
    fn the_tokens_file_is_no_secret_of_another_variable() {
        let settings = read(&[("AEP_TOKENS_FILE", "/does/not/exist"), ("AEP_TOKEN", "t")]).unwrap();
        assert_eq!(settings.tokens_file, Some(PathBuf::from("/does/not/exist")));
        assert_eq!(settings.unknown, []);
    }

    #[test]
    fn a_certificate_needs_its_key() {
        let files = read(&[("AEP_TLS_CERT", "c.pem"), ("AEP_TLS_KEY", "k.pem")]).unwrap().tls.unwrap();
        assert_eq!((files.certificate, files.key), (PathBuf::from("c.pem"), PathBuf::from("k.pem")));
        for (set, missing) in [("AEP_TLS_CERT", "AEP_TLS_KEY"), ("AEP_TLS_KEY", "AEP_TLS_CERT")] {
            let wrong = read(&[(set, "x.pem")]).unwrap_err();
            assert_eq!(wrong, [format!("{set} is set and {missing} is not: set both or neither")]);
        }
    }

    #[test]
    fn several_sinks_have_their_own_and_what_holds_for_all() {
        let settings = read(&[
            ("CE_SINKS", "bus, audit-log"),
            ("CE_SINK_BUS_URL", "http://bus/"),
            ("CE_SINK_BUS_FILTER", r#"{"agent":"a"}"#),
            ("CE_SINK_BUS_MODE", "batch"),
            ("CE_SINK_BUS_BATCH_MS", "5"),
            ("CE_SINK_BUS_DEAD_LETTER_SINK", "http://graveyard/"),
            ("CE_SINK_AUDIT_LOG_URL", "stdout"),
            ("CE_SINK_AUDIT_LOG_CAPTURE", "full"),
            ("CE_TIMEOUT", "3s"),
            ("CE_SINK_AUDIT_LOG_TIMEOUT", "4s"),
            ("AEP_FILTER", r#"{"severity":{"gte":"notice"}}"#),
            ("AEP_CAPTURE", "metadata"),
        ])
        .unwrap();
        assert_eq!(settings.unknown, []);
        let [bus, audit] = &settings.export.sinks[..] else { panic!("two sinks") };
        assert_eq!((bus.name.as_str(), audit.name.as_str()), ("bus", "audit-log"));
        assert_eq!((bus.options.times.attempt.as_secs(), audit.options.times.attempt.as_secs()), (3, 4));
        assert_eq!((bus.options.mode, audit.options.mode), (Mode::Batch, Mode::Structured));
        assert_eq!((bus.linger.as_millis(), audit.linger.as_millis()), (5, 50));
        assert_eq!((bus.ceiling, audit.ceiling), (Some(Capture::Metadata), Some(Capture::Metadata)));
        assert!(bus.dead_letter_sink.is_some() && audit.dead_letter_sink.is_none());
        let both = Filter::parse(r#"{"agent":"a"}"#).unwrap().and(&settings.export.filter);
        assert_eq!(format!("{:?}", bus.filter), format!("{both:?}"));
    }

    #[test]
    fn what_is_wrong_with_a_sink_is_told_by_its_own_variable() {
        let wrong = read(&[
            ("CE_SINK", "http://h/"),
            ("CE_SINKS", "a,b"),
            ("CE_SINK_A_URL", "hunter2"),
            ("CE_SINK_A_FILTER", "{"),
            ("CE_SINK_A_TIMEOUT", "soon"),
        ])
        .unwrap_err();
        for start in [
            "CE_SINK and CE_SINKS are",
            "CE_SINK_A_URL must",
            "CE_SINK_A_FILTER must",
            "CE_SINK_A_TIMEOUT must",
            "CE_SINK_B_URL is not set",
        ] {
            assert_eq!(wrong.iter().filter(|line| line.starts_with(start)).count(), 1, "{start}: {wrong:?}");
        }
        assert_eq!(wrong.len(), 5, "{wrong:?}");
        for names in ["A", "a,a", ",", "a b"] {
            assert!(
                read(&[("CE_SINKS", names)]).unwrap_err()[0].starts_with("CE_SINKS must") || names == "a,a"
            );
        }
        let unknown =
            read(&[("CE_SINKS", "a"), ("CE_SINK_A_URL", "stdout"), ("CE_SINK_B_URL", "x")]).unwrap();
        assert_eq!(unknown.unknown[0].0, "CE_SINK_B_URL");
    }

    #[test]
    fn a_sinks_secrets_may_come_from_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("url");
        std::fs::write(&path, "http://h/p\n").unwrap();
        let settings = read(&[("CE_SINKS", "a"), ("CE_SINK_A_URL_FILE", path.to_str().unwrap())]).unwrap();
        assert_eq!(settings.export.sinks[0].target.to_string(), "http://h/p");
    }

    #[test]
    fn in_memory_the_spool_is_smaller() {
        assert_eq!(read(&[("AEP_SPOOL_SYNC", "off")]).unwrap().export.spool_bytes, 64 << 20);
        let set = [("AEP_SPOOL_SYNC", "off"), ("AEP_SPOOL_MAX_BYTES", "1MiB")];
        assert_eq!(read(&set).unwrap().export.spool_bytes, 1 << 20);
    }

    #[test]
    fn an_open_port_needs_a_token_or_a_word() {
        assert!(read(&[("AEP_HOST", "0.0.0.0")]).unwrap_err()[0].contains("AEP_TOKEN is not set"));
        assert!(read(&[("AEP_HOST", "::")]).is_err());
        assert!(read(&[("AEP_HOST", "0.0.0.0"), ("AEP_TOKEN", "t")]).is_ok());
        assert!(read(&[("AEP_HOST", "0.0.0.0"), ("AEP_TOKENS_FILE", "t")]).is_ok());
        assert!(read(&[("AEP_HOST", "0.0.0.0"), ("AEP_ALLOW_UNAUTHENTICATED", "true")]).is_ok());
        assert_eq!(read(&[("AEP_HOST", "[::1]"), ("AEP_PORT", "0")]).unwrap().listen.to_string(), "[::1]:0");
        assert_eq!(read(&[("AEP_HOST", "localhost")]).unwrap().listen.to_string(), "127.0.0.1:8787");
    }

    #[test]
    fn unknown_names_are_told_with_the_nearest_known_one() {
        let settings = read(&[("AEP_BUFER", "1"), ("CE_SINKK", "x"), ("PATH", "x")]).unwrap();
        assert_eq!(settings.unknown, [("AEP_BUFER".into(), "AEP_BUFFER"), ("CE_SINKK".into(), "CE_SINK")]);
    }

    #[test]
    fn what_kubernetes_sets_for_services_is_told_apart() {
        let settings = read(&[
            ("AEP_SIDECAR_SERVICE_HOST", "10.0.0.1"),
            ("AEP_SIDECAR_PORT", "tcp://10.0.0.1:1"),
            ("AEP_SIDECAR_PORT_8787_TCP_ADDR", "10.0.0.1"),
            ("AEP_SIDECAR_SERVICE_PORT_HTTP", "1"),
        ])
        .unwrap();
        assert_eq!(settings.unknown, []);
        assert!(read(&[("AEP_PORT", "tcp://10.0.0.1:8787")]).unwrap_err()[0].contains("enableServiceLinks"));
    }

    #[test]
    fn max_from_follows_max_sessions() {
        assert_eq!(read(&[("AEP_MAX_SESSIONS", "7")]).unwrap().limits.max_from, 7);
        assert_eq!(read(&[("AEP_MAX_SESSIONS", "7"), ("AEP_MAX_FROM", "3")]).unwrap().limits.max_from, 3);
    }

    #[test]
    fn an_empty_variable_is_not_set() {
        assert!(read(&[("AEP_TOKEN", ""), ("CE_SINK", ""), ("AEP_PORT", "")]).unwrap().token.is_none());
    }

    #[test]
    fn knative_binds_a_sink_where_none_is_set() {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "s3cret\n").unwrap();
        let bound = [
            ("K_SINK", "http://broker/ns"),
            ("K_CE_OVERRIDES", r#"{"extensions":{"team":"blue"}}"#),
            ("K_CA_CERTS", "pem"),
            ("CE_OIDC_TOKEN_FILE", token.to_str().unwrap()),
        ];
        let sink = read(&bound).unwrap().export.sinks.remove(0);
        assert_eq!((sink.name.as_str(), sink.target.to_string()), ("default", "http://broker/ns".to_owned()));
        assert_eq!(sink.options.web.overrides.names().collect::<Vec<_>>(), ["team"]);
        assert_eq!(sink.options.web.also_trusted.as_deref(), Some("pem"));
        assert_eq!(&*sink.options.credentials.token.unwrap().current(), "s3cret");
        let sink =
            read(&[&bound[..], &[("CE_SINK", "http://own/")]].concat()).unwrap().export.sinks.remove(0);
        assert_eq!(sink.target.to_string(), "http://own/");
        assert!(sink.options.credentials.token.is_none() && sink.options.web.also_trusted.is_none());
        let sink = read(&[&bound[..], &[("CE_TOKEN", "own")]].concat()).unwrap().export.sinks.remove(0);
        assert_eq!(&*sink.options.credentials.token.unwrap().current(), "own");
    }

    #[test]
    fn where_knative_is_to_bind_a_sink_none_is_nowhere() {
        let target = |variables: &[(&str, &str)]| read(variables).unwrap().export.sinks.remove(0).target;
        assert_eq!(target(&[("AEP_EXPECT_K_SINK", "true")]), Target::Unbound);
        assert_eq!(target(&[]), Target::Stdout);
        for own in [("K_SINK", "http://h/"), ("CE_SINK", "http://h/")] {
            assert_eq!(target(&[("AEP_EXPECT_K_SINK", "true"), own]).to_string(), "http://h/");
        }
        for (name, value) in [
            ("K_SINK", "kafka://h/t"),
            ("K_SINK", "broker"),
            ("K_CE_OVERRIDES", "team=blue"),
            ("CE_OIDC_TOKEN_FILE", "/does/not/exist"),
        ] {
            let wrong = read(&[(name, value)]).unwrap_err();
            assert!(wrong.len() == 1 && wrong[0].starts_with(name), "{wrong:?}");
        }
    }

    #[test]
    fn proxies_are_what_the_environment_says_unless_a_sink_says_otherwise() {
        let environment = [
            ("http_proxy", "http://user:hunter2@lower:1"),
            ("HTTPS_PROXY", "secure:2"),
            ("https_proxy", "http://not-this"),
            ("no_proxy", "10.0.0.0/8,.svc"),
            ("CE_SINKS", "a,b,c"),
            ("CE_SINK_A_URL", "http://a/"),
            ("CE_SINK_B_URL", "http://b/"),
            ("CE_SINK_B_PROXY", "none"),
            ("CE_SINK_C_URL", "http://c/"),
            ("CE_SINK_C_PROXY", "socks5://other:3"),
        ];
        let settings = read(&environment).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
        let proxies: Vec<_> = settings
            .export
            .sinks
            .iter()
            .map(|sink| &sink.options.web.proxies)
            .map(|proxies| {
                let host =
                    |url: &Option<reqwest::Url>| url.as_ref().map(|url| url.host_str().unwrap().to_owned());
                (host(&proxies.http), host(&proxies.https), proxies.except.as_str())
            })
            .collect();
        let some = |host: &str| Some(host.to_owned());
        assert_eq!(proxies[0], (some("lower"), some("secure"), "10.0.0.0/8,.svc"));
        assert_eq!(proxies[1], (None, None, ""));
        assert_eq!(proxies[2], (some("other"), some("other"), ""));
        let all = read(&[("ALL_PROXY", "all:1"), ("HTTP_PROXY", "http:1")]).unwrap();
        let all = &all.export.sinks[0].options.web.proxies;
        assert_eq!(all.http, reqwest::Url::parse("http://http:1").ok());
        assert_eq!(all.https, reqwest::Url::parse("http://all:1").ok());
        let wrong = read(&[("HTTP_PROXY", "ftp://hunter2"), ("CE_PROXY", "hunter2:x")]).unwrap_err();
        assert!(wrong.len() == 2 && !wrong.concat().contains("hunter2"), "{wrong:?}");
    }

    #[test]
    fn an_oauth_client_may_be_set_in_part_for_all_and_in_part_for_one() {
        let common = [
            ("CE_SINKS", "a"),
            ("CE_SINK_A_URL", "http://a/"),
            ("CE_OAUTH_TOKEN_URL", "https://id/token"),
            ("CE_OAUTH_SCOPE", "events"),
            ("CE_SINK_A_OAUTH_CLIENT_ID", "me"),
        ];
        let whole = [&common[..], &[("CE_SINK_A_OAUTH_CLIENT_SECRET", "hunter2")]].concat();
        let settings = read(&whole).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
        let client = settings.export.sinks[0].options.web.oauth.clone().unwrap();
        assert_eq!((client.client_id.as_str(), client.scope.as_deref()), ("me", Some("events")));
        let wrong = read(&common).unwrap_err();
        assert!(
            wrong.len() == 1 && wrong[0].contains("CE_SINK_A_OAUTH_CLIENT_SECRET go together"),
            "{wrong:?}"
        );
    }
}
