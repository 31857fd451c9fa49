//! What librdkafka is told.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::producer::BaseProducer;
use tokio::time::Instant;

use crate::export::sink::{Brokers, BuildError, Secret, SinkOptions, sanitised};

/// How often the certificates' files are looked at.
const EVERY: Duration = Duration::from_secs(2);
/// How long a connection may take to be made, its handshakes included, in milliseconds.
const CONNECT_TIMEOUT: &str = "5000";
/// The longest pause before a broker is connected to again, in milliseconds.
const RECONNECT: &str = "2000";
/// How long a topic may be unknown before that is believed, in milliseconds: a new one takes time to get around.
const PROPAGATION: u128 = 5000;

/// Properties that can't be set as options, and what to do instead.
const RESERVED: &[(&str, &str)] = &[
    ("bootstrap.servers", "is said by the sink's URL"),
    ("metadata.broker.list", "is said by the sink's URL"),
    ("message.timeout.ms", "is said by TIMEOUT"),
    ("delivery.timeout.ms", "is said by TIMEOUT"),
    ("sasl.username", "is said by USERNAME"),
    ("sasl.password", "is said by PASSWORD"),
    ("ssl.ca.location", "is said by CA"),
    ("ssl.certificate.location", "is said by CERT"),
    ("ssl.key.location", "is said by KEY"),
    ("acks", "is always all: an event is delivered once every replica in sync has it"),
    ("request.required.acks", "is always all: an event is delivered once every replica in sync has it"),
    ("enable.idempotence", "is always true: else retries reorder a session"),
    ("transactional.id", "can't be set: events aren't sent in transactions"),
    ("delivery.report.only.error", "can't be set: acknowledgements are needed"),
];

/// The configuration, but for what may change while running.
pub(super) struct Settings {
    config: ClientConfig,
    password: Option<Secret>,
    /// The files of certificates and key.
    files: Vec<PathBuf>,
    /// When the files were looked at, and when they had last been written; changed by whoever asks next.
    looked: Mutex<(Instant, Vec<Option<SystemTime>>)>,
}

/// What a connection was made with that may change.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Identity {
    password: Option<Arc<str>>,
    written: Vec<Option<SystemTime>>,
}

impl Settings {
    /// Reads the options, and has librdkafka try them without a broker.
    pub(super) fn of(brokers: &Brokers, options: &SinkOptions) -> Result<Self, BuildError> {
        let own = &options.own;
        for (name, instead) in RESERVED {
            if own.contains_key(*name) {
                return Err(BuildError::setting(option(name), *instead));
            }
        }
        let mut config = ClientConfig::new();
        config.set_log_level(RDKafkaLogLevel::Info);
        let attempt = options.times.attempt.as_millis().clamp(1, 2_147_483_647);
        config
            .set("bootstrap.servers", &brokers.hosts)
            .set("message.timeout.ms", attempt.to_string())
            .set("enable.idempotence", "true")
            .set("acks", "all");
        let propagation = (attempt / 2).min(PROPAGATION).to_string();
        let defaults: &[(&[&str], &str)] = &[
            (&["client.id"], "aep-sidecar"),
            // Few events are under way at one time: waiting for more is of no use.
            (&["linger.ms", "queue.buffering.max.ms"], "0"),
            // Java's, so that a key's partition is the one that other producers find.
            (&["partitioner"], "murmur2_random"),
            (&["queue.buffering.max.messages"], "10000"),
            (&["queue.buffering.max.kbytes"], "65536"),
            (&["socket.connection.setup.timeout.ms"], CONNECT_TIMEOUT),
            (&["socket.keepalive.enable"], "true"),
            (&["reconnect.backoff.max.ms"], RECONNECT),
            (&["topic.metadata.propagation.max.ms"], &propagation),
        ];
        for (names, value) in defaults {
            if let Some(name) = names.first()
                && !names.iter().any(|name| own.contains_key(*name))
            {
                config.set(*name, *value);
            }
        }
        let files = security(&mut config, options)?;
        for (name, value) in own {
            config.set(name, value);
        }
        let written = written(&files);
        let password =
            options.credentials.password.clone().filter(|_| options.credentials.username.is_some());
        let settings = Self { config, password, files, looked: Mutex::new((Instant::now(), written)) };
        settings.tried()
    }

    /// What may change, as it is now. Files are looked at at most every two seconds.
    pub(super) fn identity(&self) -> Identity {
        let mut looked = self.looked.lock();
        if !self.files.is_empty() && looked.0.elapsed() >= EVERY {
            *looked = (Instant::now(), written(&self.files));
        }
        Identity { password: self.password.as_ref().map(Secret::current), written: looked.1.clone() }
    }

    /// The whole configuration.
    pub(super) fn config(&self, identity: &Identity) -> ClientConfig {
        let mut config = self.config.clone();
        if let Some(password) = &identity.password {
            config.set("sasl.password", &**password);
        }
        config
    }

    /// What librdkafka has against the configuration, without the values of options.
    pub(super) fn refusal(&self, error: KafkaError) -> BuildError {
        match error {
            KafkaError::ClientConfig(_, text, name, value) => {
                let known = if text.contains("No such configuration property") {
                    "is no property that this build of librdkafka has".to_owned()
                } else {
                    // The text repeats the value, which may be a secret.
                    format!("can't be used: {}", sanitised(&hidden(&text, &value)))
                };
                BuildError::setting(option(&name), known)
            }
            KafkaError::ClientCreation(text) => {
                let secret = |name: &&str| {
                    name.contains("password") || name.contains("secret") || name.ends_with(".pem")
                };
                let names = self.config.config_map().into_keys().filter(secret);
                let values = names.filter_map(|name| self.config.get(name));
                let text = values.fold(text, |text, value| hidden(&text, value));
                BuildError::setting("the Kafka sink", format!("can't be set up: {}", sanitised(&text)))
            }
            _ => BuildError::setting("the Kafka sink", "can't be set up"),
        }
    }

    fn tried(self) -> Result<Self, BuildError> {
        let mut config = self.config(&self.identity());
        config.remove("bootstrap.servers");
        // What it logs is said by its error.
        config.set_log_level(RDKafkaLogLevel::Emerg);
        match config.create::<BaseProducer>() {
            Ok(producer) => {
                drop(producer);
                Ok(self)
            }
            Err(error) => Err(self.refusal(error)),
        }
    }
}

/// Sets who is spoken to and how, and returns the files of certificates and key.
fn security(config: &mut ClientConfig, options: &SinkOptions) -> Result<Vec<PathBuf>, BuildError> {
    let (own, credentials, tls) = (&options.own, &options.credentials, &options.tls);
    let protocol = own.get("security.protocol").map(|protocol| protocol.to_ascii_lowercase());
    let mechanism = ["sasl.mechanism", "sasl.mechanisms"].iter().find_map(|name| own.get(*name));
    let user = match (&credentials.username, &credentials.password) {
        (Some(user), Some(_)) => Some(user),
        (Some(_), None) => return Err(BuildError::setting("PASSWORD", "must be set: USERNAME is")),
        (None, Some(_)) => return Err(BuildError::setting("USERNAME", "must be set: PASSWORD is")),
        (None, None) => None,
    };
    if let Some(user) = user {
        config.set("sasl.username", user);
        if mechanism.is_none() {
            config.set("sasl.mechanisms", "SCRAM-SHA-512");
        }
        if protocol.as_ref().is_some_and(|protocol| !protocol.starts_with("sasl_")) {
            let must = "must be sasl_ssl or sasl_plaintext: USERNAME is set";
            return Err(BuildError::setting(option("security.protocol"), must));
        }
    }
    let mut files = Vec::new();
    let identity = tls
        .identity
        .iter()
        .flat_map(|(cert, key)| [("ssl.certificate.location", cert), ("ssl.key.location", key)]);
    for (property, path) in tls.ca.iter().map(|ca| ("ssl.ca.location", ca)).chain(identity) {
        std::fs::File::open(path).map_err(|error| BuildError::File { path: path.clone(), error })?;
        config.set(property, path.to_string_lossy());
        files.push(path.clone());
    }
    if !files.is_empty() && protocol.as_ref().is_some_and(|protocol| !protocol.ends_with("ssl")) {
        let must = "must be sasl_ssl or ssl: CA or CERT is set";
        return Err(BuildError::setting(option("security.protocol"), must));
    }
    let chosen = protocol.unwrap_or_else(|| {
        match (user.is_some(), files.is_empty()) {
            (true, false) => "sasl_ssl",
            (true, true) => "sasl_plaintext",
            (false, false) => "ssl",
            (false, true) => "plaintext",
        }
        .to_owned()
    });
    let scram = user.is_some() && mechanism.is_none_or(|name| name.starts_with("SCRAM"));
    if (scram || chosen.ends_with("ssl")) && !cfg!(feature = "kafka-tls") {
        return Err(BuildError::Feature { scheme: "kafka (TLS, SCRAM)", feature: "kafka-tls" });
    }
    config.set("security.protocol", chosen);
    Ok(files)
}

/// When each file was last written; `None` for one that can't be read.
fn written(files: &[PathBuf]) -> Vec<Option<SystemTime>> {
    files.iter().map(|file| std::fs::metadata(file).and_then(|data| data.modified()).ok()).collect()
}

/// What a property's variable ends in.
fn option(property: &str) -> String {
    format!("OPT_{}", property.to_ascii_uppercase().replace('.', "_"))
}

fn hidden(text: &str, value: &str) -> String {
    if value.is_empty() { text.to_owned() } else { text.replace(value, "…") }
}
