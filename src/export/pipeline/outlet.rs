//! A sink with everything that is its own: cursor, lanes, dead letters, counters.

use std::sync::Arc;
use std::time::Duration;

use super::ExportError;
use crate::aep::{Capture, Filter, Registry};
use crate::export::config::{SinkConfig, SinkName};
use crate::export::cursor::{Cursor, CursorFile, Keeper};
use crate::export::dead_letter::{DeadLetters, Desk, Outbox};
use crate::export::lane::{Bounds, Lanes};
use crate::export::metrics::{Metrics, SinkMetrics};
use crate::export::sink::options::Web;
use crate::export::sink::{AnySink, SinkOptions};
use crate::export::spool::{Hold, Reader, Spool};
use crate::export::state_dir::StateDir;

/// A sink that is ready to run.
#[derive(Debug)]
pub(super) struct Outlet {
    pub(super) name: SinkName,
    pub(super) sink: Arc<AnySink>,
    pub(super) filter: Filter,
    pub(super) ceiling: Option<(Capture, Arc<Registry>)>,
    pub(super) lanes: Lanes,
    /// Whether all events share one lane.
    pub(super) one_lane: bool,
    pub(super) keeper: Keeper,
    /// Whether what isn't delivered is there after a restart.
    pub(super) lasting: bool,
    pub(super) outbox: Outbox,
    pub(super) reader: Reader,
    /// Keeps in the spool what the sink isn't done with.
    pub(super) hold: Hold,
    pub(super) metrics: SinkMetrics,
    pub(super) drain: Duration,
}

/// Where a sink reads from, and where it keeps what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'p> {
    pub(super) spool: &'p Spool,
    /// For the cursor, unless events are held in memory only.
    pub(super) disk: Option<&'p Arc<StateDir>>,
    /// For dead letters.
    pub(super) dir: Option<&'p StateDir>,
}

impl Outlet {
    /// Reads the sink's cursor and finds its place in the spool. A sink that has no cursor yet starts with what comes
    /// from now on.
    pub(super) fn open(
        config: &SinkConfig,
        drain: Duration,
        sink: AnySink,
        Place { spool, disk, dir }: Place<'_>,
        registry: &Arc<Registry>,
        metrics: &Metrics,
    ) -> Result<Self, ExportError> {
        let (name, metrics) = (config.name.clone(), metrics.sink(config.name.as_str()));
        let one_lane = config.target.is_one_line_of_events();
        let bounds = Bounds {
            concurrency: if one_lane { 1 } else { config.concurrency.get() },
            events: config.max_pending.get(),
            bytes: config.max_pending_bytes.get(),
            batch: config.target.batch(config.options.mode, config.batch),
            linger: if one_lane { Duration::ZERO } else { config.linger },
        };
        let cursor_error = |error| ExportError::Cursor { sink: name.clone(), error };
        let (cursor, file) = match disk {
            None => (Cursor::at(spool.first()), None),
            Some(dir) => {
                let found = CursorFile::open(Arc::clone(dir), name.as_str()).map_err(cursor_error)?;
                metrics.damaged_files.inc_by(u64::from(found.damaged));
                let mut file = found.file;
                let cursor = match found.cursor {
                    Some(Ok(cursor)) => from_held(cursor, spool, &name),
                    // What is there is all that is certain.
                    Some(Err(_)) => Cursor::at(spool.first()),
                    None => {
                        // Written down before the first event comes: without it, a restart would take what came
                        // meanwhile for what was there before the sink.
                        let cursor = Cursor::at(spool.end());
                        file.write(&cursor).map_err(cursor_error)?;
                        cursor
                    }
                };
                (cursor, Some(file))
            }
        };
        let files = DeadLetters::new(
            dir.map(StateDir::path),
            name.as_str(),
            config.target.to_string(),
            config.max_dead_letters,
        );
        let desk = match &config.dead_letter_sink {
            Some(target) => {
                let to = AnySink::build(target, &alike(&config.options))
                    .map_err(|error| ExportError::Sink { sink: name.clone(), error })?;
                Desk::Sink { to: Arc::new(to), from: name.to_string(), files }
            }
            None => Desk::Files(files),
        };
        let start = cursor.next();
        Ok(Self {
            sink: Arc::new(sink),
            filter: config.filter.clone(),
            ceiling: config.ceiling.map(|ceiling| (ceiling, Arc::clone(registry))),
            lanes: Lanes::new(bounds, config.retry),
            one_lane,
            lasting: disk.is_some(),
            keeper: Keeper::new(cursor, file, metrics.clone()),
            outbox: Outbox::new(desk),
            reader: spool.reader(start),
            hold: spool.hold(start),
            metrics,
            drain,
            name,
        })
    }
}

/// What holds of a sink's options for the one that its dead letters go to.
fn alike(options: &SinkOptions) -> SinkOptions {
    let web = Web { proxies: options.web.proxies.clone(), ..Web::default() };
    SinkOptions { times: options.times, web, ..SinkOptions::default() }
}

/// The cursor, moved on to what the spool still holds.
fn from_held(mut cursor: Cursor, spool: &Spool, name: &SinkName) -> Cursor {
    let first = spool.first();
    if cursor.next() < first {
        // Either freed when every sink was done with it, before the last cursor was written, or gone with a file.
        tracing::warn!(
            sink = %name,
            from = cursor.next(),
            to = first,
            "the spool no longer holds events that a sink's saved cursor asks for; they were delivered, unless files of the spool were lost"
        );
        cursor.done(cursor.next()..first);
    }
    cursor
}
