//! `aep-sidecar export --from-file FILE`: the export of a file's events, through the same mapping and the same
//! sink as the running sidecar's.

use std::io::{IsTerminal as _, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncBufRead, BufReader};
use tokio_util::sync::CancellationToken;

use crate::export::feed::file::{BadLine, FileFeed, Progress};
use crate::export::{self, Ends, Export, ExportConfig, ExportError, SpoolConfig, SpoolSync, Summary};
use crate::sidecar::schemas::{self, SchemasError};
use crate::sidecar::{Settings, app};

/// How many bytes of events wait in memory for the sinks.
const MEMORY: u64 = 64 << 20;

/// Maps the events of a JSONL file to CloudEvents and delivers them.
#[derive(Debug, Args)]
#[command(
    after_help = "AEP_FILTER and AEP_CAPTURE choose what goes out, CE_SINK says where (stdout without it).\n\
    Every line that is no legal event is reported with its number; the others are still delivered.\n\
    Exit code: 0, or 1 when there was a bad line or an event couldn't be delivered."
)]
pub struct ExportArgs {
    /// The file, one event a line; - for standard input.
    #[arg(long, value_name = "FILE|-")]
    pub from_file: PathBuf,
}

/// Why an export from a file can't run.
#[derive(Debug, thiserror::Error)]
pub enum ExportFileError {
    /// The file can't be opened.
    #[error("{path}: {error}", path = .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The operator's schemas can't be used.
    #[error(transparent)]
    Schemas(#[from] SchemasError),
    /// The export can't start, or had to end.
    #[error(transparent)]
    Export(#[from] ExportError),
}

/// Runs the command until the file's end or `stop`.
///
/// # Errors
/// When the file, the schemas or the sink can't be used.
pub async fn run(
    args: &ExportArgs,
    settings: &Settings,
    stop: CancellationToken,
) -> Result<ExitCode, ExportFileError> {
    if args.from_file == Path::new("-") {
        return export(BufReader::new(tokio::io::stdin()), None, settings, stop).await;
    }
    let open = tokio::fs::File::open(&args.from_file).await;
    let file = open.map_err(|error| ExportFileError::Open { path: args.from_file.clone(), error })?;
    let size = file.metadata().await.ok().map(|metadata| metadata.len());
    export(BufReader::with_capacity(256 * 1024, file), size, settings, stop).await
}

async fn export(
    reader: impl AsyncBufRead + Unpin + Send,
    size: Option<u64>,
    settings: &Settings,
    stop: CancellationToken,
) -> Result<ExitCode, ExportFileError> {
    settings.warn_of_unknown();
    let registry = Arc::new(schemas::load(settings.schemas.as_deref())?);
    let longest = NonZeroUsize::new(settings.limits.max_body).unwrap_or(NonZeroUsize::MIN);
    let bar = progress_bar(size);
    let report = bar.clone();
    let mut feed = FileFeed::new(reader, longest)
        .filter(settings.export.filter.clone())
        .on_bad_line(move |bad| report_bad_line(&report, &bad));
    if let Some(ceiling) = settings.export.ceiling {
        feed = feed.ceiling(ceiling, Arc::clone(&registry));
    }
    let progress = feed.progress();
    // A file is exported whole every time: nothing is remembered from one run to the next.
    let config = app::config(&settings.export, settings.drain);
    let spool = SpoolConfig { sync: SpoolSync::Off, max_bytes: MEMORY, ..config.spool };
    let config = ExportConfig { state_dir: None, spool, ..config };
    let metrics = export::Metrics::default();
    let export = Export::open(&config, &registry, metrics.clone())?;
    let summary = {
        let run = export.run_feed(feed, Ends::giving_up_at(stop.clone()));
        let mut run = std::pin::pin!(run);
        let mut tick = tokio::time::interval(std::time::Duration::from_millis(100));
        loop {
            tokio::select! {
                summary = run.as_mut() => break summary?,
                _ = tick.tick() => bar.set_position(progress.bytes()),
            }
        }
    };
    bar.finish_and_clear();
    // With several sinks an event may be delivered more than once, and selected only once.
    let selected = metrics.spool.events.get() + summary.duplicates;
    Ok(report_summary(&summary, &progress, selected, stop.is_cancelled()))
}

/// On a terminal, a bar that moves with the bytes read.
fn progress_bar(size: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let template = match size {
        Some(_) => "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        None => "{spinner} {bytes} {bytes_per_sec}",
    };
    let bar = size.map_or_else(ProgressBar::no_length, ProgressBar::new);
    // The templates are the two above.
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

fn report_bad_line(bar: &ProgressBar, bad: &BadLine) {
    bar.suspend(|| say(&format!("{bad}")));
}

fn report_summary(summary: &Summary, progress: &Progress, selected: u64, stopped: bool) -> ExitCode {
    let bad = progress.bad_lines();
    let read = progress.events();
    let filtered = read.saturating_sub(selected);
    say(&format!(
        "{read} events read, {} delivered, {filtered} not selected, {} duplicates, {} refused, {} undelivered, {bad} bad lines",
        summary.delivered, summary.duplicates, summary.dead_letters, summary.unhandled
    ));
    let whole = bad == 0 && summary.dead_letters == 0 && summary.unhandled == 0 && !stopped;
    if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A line on stderr, for a person.
fn say(line: &str) {
    // With stderr gone there is no one to tell.
    let _gone = writeln!(std::io::stderr(), "{line}");
}
