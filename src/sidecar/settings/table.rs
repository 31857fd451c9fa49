//! The table of variables.

/// One environment variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// The form of its value.
    pub form: &'static str,
    /// What holds when it isn't set, as text.
    pub default: &'static str,
    /// Whether its value is a secret, which may also be read from the file that `{name}_FILE` names.
    pub secret: bool,
    /// Whether a sink of `CE_SINKS` has its own: `CE_TIMEOUT` is `CE_SINK_<NAME>_TIMEOUT` for one sink.
    pub per_sink: bool,
    /// What it does.
    pub doc: &'static str,
}

impl Variable {
    /// What its name for one sink ends in.
    pub(super) fn suffix(&self) -> Option<&'static str> {
        let of_one = self.name.strip_prefix("CE_SINK_<NAME>_");
        of_one.or_else(|| self.name.strip_prefix("CE_").filter(|_| self.per_sink))
    }

    const fn per_sink(self) -> Self {
        Self { per_sink: true, ..self }
    }
}

const fn variable(
    name: &'static str,
    form: &'static str,
    default: &'static str,
    doc: &'static str,
) -> Variable {
    Variable { name, form, default, secret: false, per_sink: false, doc }
}

const fn secret(name: &'static str, form: &'static str, doc: &'static str) -> Variable {
    Variable { name, form, default: "", secret: true, per_sink: false, doc }
}

/// Every variable, in the order of the documentation.
pub const VARIABLES: &[Variable] = &[
    variable("AEP_HOST", "IP address", "127.0.0.1", "Address to listen on."),
    variable("AEP_PORT", "port", "8787", "Port to listen on; 0 takes a free one."),
    variable(
        "AEP_ADMIN_ADDR",
        "address or off",
        "127.0.0.1:9464",
        "Where /livez, /readyz and /metrics are answered, without a token. Where the default is taken, nowhere.",
    ),
    secret(
        "AEP_TOKEN",
        "text",
        "Token that permits everything. Without it and without AEP_TOKENS_FILE, anyone who reaches the port may read and emit.",
    ),
    variable(
        "AEP_TOKENS_FILE",
        "file",
        "",
        "Further tokens as JSON, each with its scopes: {\"tokens\":[{\"name\":…,\"token\":…,\"scopes\":[\"emit\",\"read\",\"control\"],\"filter\":{…}}]}, where the filter bounds what may be read. Changes take effect while running.",
    ),
    variable(
        "AEP_ALLOW_UNAUTHENTICATED",
        "true or false",
        "false",
        "Allow listening beyond loopback without a token.",
    ),
    variable(
        "AEP_TLS_CERT",
        "file",
        "",
        "Certificate and its chain as PEM, to listen with TLS. Changes take effect while running.",
    ),
    variable("AEP_TLS_KEY", "file", "", "The certificate's private key as PEM."),
    variable("AEP_BUFFER", "count", "10000", "Events held of each session for replay."),
    variable(
        "AEP_MAX_SESSIONS",
        "count",
        "500",
        "Sessions held; past it, the least recently written one is forgotten.",
    ),
    variable("AEP_BUFFER_BYTES", "size", "256MiB", "Memory of held events over all sessions."),
    variable(
        "AEP_WINDOW_BYTES",
        "size",
        "64MiB",
        "Memory of the log that live readers share: how far one may fall behind before it is served from the held sessions.",
    ),
    variable("AEP_MAX_BODY", "size", "16MiB", "Largest request body, decompressed."),
    variable("AEP_MAX_BATCH", "count", "10000", "Most events in one request."),
    variable("AEP_MAX_FROM", "count", "AEP_MAX_SESSIONS", "Most resume positions in one subscription."),
    variable("AEP_MAX_SUBSCRIPTIONS", "count", "100", "Most subscriptions of one WebSocket connection."),
    variable(
        "AEP_INGEST_BYTES",
        "size",
        "128MiB",
        "Memory of request bodies at one time; past it, requests are answered 503.",
    ),
    variable(
        "AEP_MAX_CONNECTIONS",
        "count",
        "16384",
        "Connections open at one time; past it, new ones wait.",
    ),
    variable(
        "AEP_SCHEMAS",
        "directory",
        "",
        "Payload schemas of vendor types, one {type}.schema.json each, whose x-aep-capture annotations say what a capture ceiling keeps.",
    ),
    variable("AEP_FILTER", "JSON", "{}", "attr-match filter: which events are exported."),
    variable(
        "AEP_CAPTURE",
        "none, metadata, redacted or full",
        "full",
        "Capture ceiling: how much content an exported event may carry.",
    ),
    variable(
        "AEP_RELAY",
        "URL",
        "",
        "Export from this relay instead of the embedded one, which then isn't started: http(s)://host:port. AEP_TOKEN is what it is asked with.",
    ),
    variable(
        "AEP_RELAY_CA",
        "file",
        "",
        "Certificates as PEM that AEP_RELAY is trusted by, instead of the system's.",
    ),
    variable(
        "AEP_DEDUPE",
        "count",
        "50000",
        "Event keys (source, id) remembered, so that an event is exported once; after a restart, of the events that the spool still holds.",
    ),
    variable(
        "AEP_STATE_DIR",
        "directory",
        "aep-state",
        "Where the spool, the sinks' cursors and dead letters are kept across restarts.",
    ),
    variable(
        "AEP_SPOOL_SYNC",
        "write, fsync or off",
        "write",
        "What an accepted event survives until the sinks have it: write, the death of the process; fsync, that of the machine too; off, neither: it is held in memory.",
    ),
    variable(
        "AEP_SPOOL_MAX_BYTES",
        "size",
        "1GiB",
        "Bound of the spool; when what the slowest sink isn't done with fills it, events are refused with 503. With AEP_SPOOL_SYNC=off it is memory, and 64MiB unless set.",
    ),
    variable(
        "AEP_SPOOL_KEEP_BYTES",
        "size",
        "64MiB",
        "How much of what every sink is done with stays in the spool while there is room: for duplicates to be told and readers to resume after a restart.",
    ),
    variable(
        "AEP_EXPECT_K_SINK",
        "true or false",
        "false",
        "Whether Knative is to bind a sink. As long as neither K_SINK nor CE_SINK nor CE_SINKS is set, events wait in the spool, and the sidecar isn't ready.",
    ),
    variable(
        "AEP_DRAIN",
        "duration",
        "20s",
        "How long a stop may take before the process gives up and exits with 1.",
    ),
    variable(
        "AEP_LOG",
        "filter",
        "info",
        "What is logged, in the syntax of tracing's EnvFilter, for example debug or aep_sidecar::relay=debug.",
    ),
    variable(
        "AEP_LOG_FORMAT",
        "auto, text or json",
        "auto",
        "Form of the log on stderr; auto is text on a terminal and JSON elsewhere.",
    ),
    secret(
        "CE_SINK",
        "URL",
        "Where CloudEvents go: http(s)://… by POST, file:///directory as JSON lines. Without one, they go to stdout as JSON lines.",
    ),
    variable(
        "CE_SINKS",
        "names",
        "",
        "Several sinks, by name, separated by commas: lower-case letters, digits and hyphens. Each has its own variables, in which its name is in upper case with underscores, and its own place in the spool.",
    ),
    secret("CE_SINK_<NAME>_URL", "URL", "Where the CloudEvents of this sink go."),
    variable(
        "CE_SINK_<NAME>_FILTER",
        "JSON",
        "{}",
        "attr-match filter: which of the events that match AEP_FILTER this sink gets.",
    ),
    variable(
        "CE_SINK_<NAME>_CAPTURE",
        "none, metadata, redacted or full",
        "full",
        "Capture ceiling of this sink; the lower one of it and AEP_CAPTURE holds.",
    ),
    variable(
        "CE_MODE",
        "structured, binary or batch",
        "structured",
        "How events are written: one JSON object each; attributes as headers and data as the body; or several objects in a JSON array.",
    )
    .per_sink(),
    variable("CE_BATCH_MAX", "count", "100", "Most events in a batch.").per_sink(),
    variable(
        "CE_BATCH_MS",
        "milliseconds",
        "50",
        "How long an event may wait for others to go with, in a batch that isn't full.",
    )
    .per_sink(),
    variable("CE_TIMEOUT", "duration", "30s", "How long one delivery may take.").per_sink(),
    variable(
        "CE_CONNECTION_MAX_AGE",
        "duration",
        "5m",
        "How long a connection is used, so that a change of the name's addresses is seen.",
    )
    .per_sink(),
    variable(
        "CE_RETRY_INITIAL",
        "duration",
        "200ms",
        "Bound of the first pause before a delivery is tried again; doubled each time.",
    )
    .per_sink(),
    variable("CE_RETRY_MAX", "duration", "30s", "Longest such pause.").per_sink(),
    variable(
        "CE_CONCURRENCY",
        "count",
        "16",
        "Deliveries under way at one time; each session is in at most one.",
    )
    .per_sink(),
    variable(
        "CE_MAX_PENDING",
        "count",
        "1000",
        "Events held in memory for the sink; the rest waits in the spool.",
    )
    .per_sink(),
    variable("CE_MAX_PENDING_BYTES", "size", "16MiB", "The same, in memory.").per_sink(),
    variable(
        "CE_DEAD_LETTER_BYTES",
        "size",
        "64MiB",
        "Bound of the dead letters kept in files; past it the oldest are dropped.",
    )
    .per_sink(),
    secret(
        "CE_DEAD_LETTER_SINK",
        "URL",
        "Where events that the sink refused for good go instead of into a file, with the extension attributes deadlettersink, deadletterreason and deadletterstatus.",
    )
    .per_sink(),
    secret("CE_TOKEN", "text", "Bearer token that the sink is shown.").per_sink(),
    variable("CE_USERNAME", "text", "", "User name that the sink is told, unless its URL has one.").per_sink(),
    secret("CE_PASSWORD", "text", "The user's password.").per_sink(),
    secret(
        "CE_HEADERS",
        "JSON",
        "Headers of every request to an HTTP sink: {\"x-api-key\":\"…\"}.",
    )
    .per_sink(),
    variable(
        "CE_OAUTH_TOKEN_URL",
        "URL",
        "",
        "OAuth 2.0 token endpoint, from which an HTTP sink's bearer tokens are had by client credentials.",
    )
    .per_sink(),
    variable("CE_OAUTH_CLIENT_ID", "text", "", "The client's name.").per_sink(),
    secret("CE_OAUTH_CLIENT_SECRET", "text", "The client's secret.").per_sink(),
    variable("CE_OAUTH_SCOPE", "text", "", "What the tokens are asked for.").per_sink(),
    secret(
        "CE_WEBHOOK_SECRET",
        "text",
        "What requests to an HTTP sink are signed with, as Standard Webhooks has it: whsec_…, several separated by spaces.",
    )
    .per_sink(),
    variable(
        "CE_WEBHOOK_VALIDATE",
        "true or false",
        "false",
        "Whether an HTTP sink is asked for its consent by the CloudEvents webhook handshake before it is sent events.",
    )
    .per_sink(),
    secret(
        "CE_PROXY",
        "URL or none",
        "The proxy that an HTTP sink is reached through, whatever HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY say.",
    )
    .per_sink(),
    variable(
        "CE_CA",
        "file",
        "",
        "Certificates as PEM that the sink is trusted by, instead of the system's.",
    )
    .per_sink(),
    variable("CE_CERT", "file", "", "Certificate and its chain as PEM that the sink is shown.").per_sink(),
    variable("CE_KEY", "file", "", "The certificate's private key as PEM.").per_sink(),
    variable(
        "CE_OPT_<OPTION>",
        "text",
        "",
        "An option of the sink's protocol, its dots as underscores: CE_OPT_LINGER_MS is linger.ms for Kafka.",
    )
    .per_sink(),
    variable(
        "K_SINK",
        "URL",
        "",
        "Where CloudEvents go when neither CE_SINK nor CE_SINKS is set: what a Knative SinkBinding sets.",
    ),
    variable(
        "K_CE_OVERRIDES",
        "JSON",
        "",
        "Extension attributes of every CloudEvent that goes to K_SINK: {\"extensions\":{\"team\":\"blue\"}}.",
    ),
    variable(
        "K_CA_CERTS",
        "PEM",
        "",
        "Certificates that K_SINK is trusted by, beside the system's or CE_CA's.",
    ),
    variable(
        "CE_OIDC_TOKEN_FILE",
        "file",
        "/oidc/token",
        "Bearer token that K_SINK is shown, where the file is there, and neither CE_TOKEN nor an OAuth client is set. Changes take effect while running.",
    ),
    variable(
        "HTTP_PROXY",
        "URL",
        "",
        "The proxy that HTTP sinks with an http: URL are reached through. Also in lower case, as the next three.",
    ),
    variable("HTTPS_PROXY", "URL", "", "The same for https: URLs."),
    variable("ALL_PROXY", "URL", "", "The same for both, where the other isn't set."),
    variable(
        "NO_PROXY",
        "names",
        "",
        "What is reached without a proxy, separated by commas: names with their subdomains, addresses, networks such as 10.0.0.0/8, or *.",
    ),
];
