//! `aep-sidecar dead-letters list|replay|drop`: what the sinks refused for good, seen, sent again, thrown away.
//!
//! All three work beside a running sidecar, in the same state directory.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::aep::capture::down_level;
use crate::aep::event::quoted;
use crate::aep::{Capture, Filter, Registry};
use crate::export::dead_letter::shelf::{Shelf, Shelved, Written};
use crate::export::sink::BuildError;
use crate::export::{AnySink, Delivery, DeliveryError, Sink as _, SinkConfig};
use crate::sidecar::Settings;
use crate::sidecar::schemas::{self, SchemasError};

/// After how many letters that arrived these are taken out: what a crash may send twice.
const CHUNK: usize = 64;

/// Shows, sends again or throws away the events that a sink refused for good.
#[derive(Debug, Args)]
pub struct DeadLettersArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List dead letters, the oldest first
    List {
        #[command(flatten)]
        which: Which,
        /// Print the letters as they are kept, one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Send the events to their sinks again, in order, and take out the letters of those that arrive
    #[command(after_help = "Exit code: 0, or 1 when an event was refused again or a sink takes none now.")]
    Replay {
        #[command(flatten)]
        which: Which,
    },
    /// Throw letters away
    Drop {
        #[command(flatten)]
        which: Which,
        /// All of them, when neither --id nor --reason chooses
        #[arg(long)]
        all: bool,
    },
}

/// Which letters.
#[derive(Debug, Args)]
struct Which {
    /// The sink's name; every sink's without one
    sink: Option<String>,
    /// Only of events with this id; may be repeated
    #[arg(long)]
    id: Vec<String>,
    /// Only with this reason, for example status-4xx
    #[arg(long)]
    reason: Option<String>,
}

/// Why the command can't be carried out.
#[derive(Debug, thiserror::Error)]
pub enum DeadLettersError {
    /// The letters can't be read or changed.
    #[error("dead letters in {directory}: {error}")]
    Files {
        /// The state directory.
        directory: String,
        /// Why.
        error: io::Error,
    },
    /// Nothing says which letters to throw away.
    #[error("say which letters to drop: --id, --reason or --all")]
    NothingChosen,
    /// The letters' sink isn't configured any more.
    #[error("sink {0:?} isn't configured: set CE_SINKS, or drop its letters")]
    UnknownSink(String),
    /// The operator's schemas can't be used.
    #[error(transparent)]
    Schemas(#[from] SchemasError),
    /// The sink can't be built.
    #[error("sink {sink}: {error}")]
    Sink {
        /// Its name.
        sink: String,
        /// Why.
        error: BuildError,
    },
}

/// Runs the command.
///
/// # Errors
/// When the letters or the sink can't be used.
pub async fn run(args: &DeadLettersArgs, settings: &Settings) -> Result<ExitCode, DeadLettersError> {
    let state = settings.export.state_dir.as_path();
    let files = |error| DeadLettersError::Files { directory: state.display().to_string(), error };
    match &args.command {
        Command::List { which, json } => {
            let listed = list(state, which, *json);
            // Whoever read the list has seen enough.
            let listed = listed.or_else(|error| match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(()),
                _ => Err(error),
            });
            listed.map(|()| ExitCode::SUCCESS).map_err(files)
        }
        Command::Drop { which, all } => {
            if which.is_everything() && !all {
                return Err(DeadLettersError::NothingChosen);
            }
            let mut dropped = 0;
            for name in which.sinks(state).map_err(files)? {
                dropped += Shelf::of(state, &name).remove(|letter| which.chooses(letter)).map_err(files)?;
            }
            say(&format!("{dropped} dead letters dropped"));
            Ok(ExitCode::SUCCESS)
        }
        Command::Replay { which } => {
            let registry = schemas::load(settings.schemas.as_deref())?;
            let mut all = Replayed::default();
            for name in which.sinks(state).map_err(files)? {
                let Some(config) = settings.export.sinks.iter().find(|sink| sink.name.as_str() == name)
                else {
                    return Err(DeadLettersError::UnknownSink(name));
                };
                let sink = build(config)?;
                let gate =
                    Gate { sink, filter: &config.filter, ceiling: config.ceiling, registry: &registry };
                let of_one = replay(&Shelf::of(state, &name), which, &gate, &name).await.map_err(files)?;
                all = all.and(of_one);
            }
            say(&format!(
                "{} events delivered, {} refused again, {} left",
                all.delivered, all.refused, all.left
            ));
            let whole = all.refused == 0 && all.left == 0;
            Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

impl Which {
    fn is_everything(&self) -> bool {
        self.id.is_empty() && self.reason.is_none()
    }

    /// The names of the sinks whose letters are meant.
    fn sinks(&self, state: &Path) -> io::Result<Vec<String>> {
        let mut names = Shelf::names(state)?;
        if let Some(sink) = &self.sink {
            names.retain(|name| name == sink);
            if names.is_empty() {
                say(&format!("sink {sink:?} has no dead letters"));
            }
        }
        Ok(names)
    }

    /// A line that is no letter is chosen when everything is.
    fn chooses(&self, letter: &Shelved) -> bool {
        if self.is_everything() {
            return true;
        }
        let Ok(written) = letter.read() else { return false };
        let by_reason = self.reason.as_ref().is_none_or(|reason| *reason == written.reason);
        let by_id = || written.event().is_ok_and(|event| self.id.iter().any(|id| id == event.id()));
        by_reason && (self.id.is_empty() || by_id())
    }
}

fn list(state: &Path, which: &Which, json: bool) -> io::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    for name in which.sinks(state)? {
        Shelf::of(state, &name).read(|letter| {
            if !which.chooses(&letter) {
                return Ok(());
            }
            match letter.read() {
                _ if json => writeln!(out, "{}", letter.line),
                Ok(written) => writeln!(out, "{}", line(&name, &written)),
                Err(_) => writeln!(out, "{name}  (an unfinished line)"),
            }
        })?;
    }
    out.flush()
}

/// A letter for people: never its data.
fn line(sink: &str, letter: &Written<'_>) -> String {
    let Written { reason, status, attempts, last, .. } = letter;
    let status = status.map_or_else(String::new, |status| format!(" {status}"));
    let event = letter.event().map_or_else(
        |_| "(no legal event)".to_owned(),
        |event| {
            let session =
                event.session().map_or_else(String::new, |session| format!(" in {}", quoted(session)));
            format!("{} {}{session}", quoted(event.id()), quoted(event.event_type()))
        },
    );
    format!("{last}  {sink}  {reason}{status}  attempts {attempts}  {event}")
}

/// A sink as it is configured now: a letter may be older than its filter and its ceiling.
struct Gate<'g> {
    sink: AnySink,
    filter: &'g Filter,
    ceiling: Option<Capture>,
    registry: &'g Registry,
}

/// What a replay came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Replayed {
    delivered: usize,
    refused: usize,
    /// Not tried: the sink takes none now, or doesn't want them any more, or they are no legal events.
    left: usize,
}

impl Replayed {
    fn and(self, other: Self) -> Self {
        Self {
            delivered: self.delivered + other.delivered,
            refused: self.refused + other.refused,
            left: self.left + other.left,
        }
    }
}

fn build(config: &SinkConfig) -> Result<AnySink, DeadLettersError> {
    AnySink::build(&config.target, &config.options)
        .map_err(|error| DeadLettersError::Sink { sink: config.name.to_string(), error })
}

async fn replay(shelf: &Shelf, which: &Which, gate: &Gate<'_>, name: &str) -> io::Result<Replayed> {
    let mut letters = Vec::new();
    shelf.read(|letter| {
        letters.extend(which.chooses(&letter).then_some(letter));
        Ok(())
    })?;
    let mut replayed = Replayed::default();
    let mut arrived: Vec<Shelved> = Vec::new();
    let mut left = letters.into_iter();
    while let Some(letter) = left.next() {
        let Some(event) = letter.read().ok().and_then(|written| written.event().ok()) else {
            replayed.left += 1;
            continue;
        };
        if !gate.filter.matches(&event) {
            say(&format!("{name}: no longer wanted by the sink's filter: {}", quoted(event.id())));
            replayed.left += 1;
            continue;
        }
        let event = match gate.ceiling {
            Some(ceiling) => down_level(&event, ceiling, gate.registry),
            None => event,
        };
        match gate.sink.deliver(&Delivery::of(event)).await {
            Ok(()) => {
                replayed.delivered += 1;
                arrived.push(letter);
                if arrived.len() >= CHUNK {
                    take(shelf, &mut arrived)?;
                }
            }
            Err(DeliveryError::Rejected { reason, .. }) => {
                replayed.refused += 1;
                say(&format!("{name}: refused again: {reason}"));
            }
            Err(error) => {
                say(&format!("{name}: {error}; the rest is left"));
                replayed.left += 1 + left.by_ref().count();
            }
        }
    }
    take(shelf, &mut arrived)?;
    Ok(replayed)
}

/// Takes out the letters that arrived, each once.
fn take(shelf: &Shelf, arrived: &mut Vec<Shelved>) -> io::Result<()> {
    shelf.remove(|letter| {
        let found = arrived.iter().position(|one| one == letter);
        found.is_some_and(|at| {
            arrived.swap_remove(at);
            true
        })
    })?;
    arrived.clear();
    Ok(())
}

/// A line on stderr, for a person.
fn say(line: &str) {
    // With stderr gone there is no one to tell.
    let _gone = writeln!(io::stderr(), "{line}");
}
