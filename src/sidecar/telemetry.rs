//! Logs, on stderr: stdout belongs to CloudEvents.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use super::settings::LogFormat;

/// Libraries that log what passes through them at their finer levels: events, headers, bodies.
const QUIET: [&str; 7] =
    ["h2", "hyper", "hyper_util", "reqwest", "rustls", "tokio_tungstenite", "tungstenite"];

/// Libraries that log as errors what the export expects, counts and logs itself: a lost connection, a refusal. One of
/// them logs the messages that come back, too, with all that is in them.
const SILENT: [&str; 3] = ["async_nats", "lapin", "lapin::returned_messages"];

/// Why logging can't start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The filter has another form.
    #[error("AEP_LOG must be a filter like info or aep_sidecar::relay=debug: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// A logger is there already.
    #[error("logging is set up already")]
    Twice,
}

/// Starts logging for the whole process.
///
/// # Errors
/// When the filter can't be read, or logging was started before.
pub fn start(filter: &str, format: LogFormat) -> Result<(), TelemetryError> {
    let mut filter = EnvFilter::builder().parse(filter)?;
    for library in QUIET {
        filter = filter.add_directive(format!("{library}=info").parse()?);
    }
    for library in SILENT {
        filter = filter.add_directive(format!("{library}=off").parse()?);
    }
    let json = match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = if json {
        builder.json().flatten_event(true).with_current_span(false).try_init()
    } else {
        builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    started.map_err(|_| TelemetryError::Twice)
}
