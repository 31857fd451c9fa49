//! The writer: one blocking job at a time takes what waits, writes it in groups, and ends when nothing waits.

use std::io;
use std::sync::Arc;

use tokio::time::Instant;

use super::Shared;
use super::UnavailableReason;
use super::core::{Entry, NextSegment, Task};
use super::format::{Header, Kind, RECORD, record_length, write_record};
use super::log::Log;
use super::scan::wide;

/// The positions record that a probe writes: it saves none.
const NOTHING: &[u8] = b"[]";

/// A run of the writer. However it ends, the log is put back and nobody waits for ever.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    log: Option<Box<Log>>,
}

/// Why a write didn't happen.
enum Failure {
    Disk(io::Error),
    /// So many bytes are not to be had within the bound.
    NoRoom(u64),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Disk(error)
    }
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, log: Box<Log>) -> Self {
        Self { shared, log: Some(log) }
    }

    /// Writes until nothing waits. Blocks.
    pub(super) fn run(mut self) {
        while let Some(log) = self.log.as_mut() {
            let whole = self.shared.config.segment_size();
            let left = log.length().map(|length| whole.saturating_sub(length));
            let task = {
                let mut core = self.shared.core.lock();
                let task = core.next_task(left, whole.saturating_sub(self.shared.config.head_size()));
                if task.is_none() {
                    core.log = self.log.take();
                }
                task
            };
            match (task, self.log.as_mut()) {
                (Some(Task::Write { first, entries, segment }), Some(log)) => {
                    write(&self.shared, log, first, entries, segment);
                }
                (Some(Task::Probe(number)), Some(log)) => probe(&self.shared, log, number),
                _ => break,
            }
        }
        self.shared.changed.notify_waiters();
    }
}

impl Drop for Writer {
    /// The runtime is going down, or the writer has panicked.
    fn drop(&mut self) {
        if let Some(mut log) = self.log.take() {
            log.abandon();
            fail(&self.shared, &Failure::Disk(io::Error::other("the writer was stopped")), Some(log));
        }
    }
}

/// Writes a group and publishes it, or fails everything that waits.
fn write(shared: &Arc<Shared>, log: &mut Log, first: u64, entries: Vec<Entry>, segment: NextSegment) {
    let bytes = entries.iter().map(|entry| record_length(entry.event.as_bytes().len())).sum();
    let written = with_freed_space(shared, log, |log| {
        append(shared, log, first, segment, bytes, |out| {
            for (number, entry) in (first..).zip(&entries) {
                write_record(out, number, Kind::Event, entry.event.as_bytes());
            }
        })
    });
    let length = match written {
        Ok(length) => length,
        Err(failure) => return fail(shared, &failure, None),
    };
    let metrics = &shared.metrics;
    metrics.writes.inc();
    metrics.events.inc_by(wide(entries.len()));
    metrics.bytes.inc_by(entries.iter().map(|entry| wide(entry.event.as_bytes().len())).sum());
    {
        // An event and its position are on disk in one step; both are told of after it.
        let mut positions = shared.positions.lock();
        entries.iter().for_each(|entry| positions.reach(&entry.event));
    }
    let told = {
        let mut core = shared.core.lock();
        let end = first.saturating_add(wide(entries.len()));
        core.segments.grow(length, end);
        let told = core.commit(entries, &shared.config);
        core.free(&shared.config);
        shared.publish(&core);
        told
    };
    told.tell(&Ok(()));
    shared.remove_files();
}

/// Writes a record that says nothing.
fn probe(shared: &Arc<Shared>, log: &mut Log, number: u64) {
    let written = with_freed_space(shared, log, |log| {
        append(shared, log, number, NextSegment::Same, wide(RECORD + NOTHING.len()), |out| {
            write_record(out, number, Kind::Positions, NOTHING);
        })
    });
    match written {
        Ok(length) => {
            let told = {
                let mut core = shared.core.lock();
                core.segments.grow(length, number);
                let told = core.works();
                shared.publish(&core);
                told
            };
            told.tell(&Ok(()));
        }
        Err(failure) => fail(shared, &failure, None),
    }
}

/// Tries a write again for each file that can be given up, as long as the disk is full.
fn with_freed_space(
    shared: &Arc<Shared>,
    log: &mut Log,
    write: impl Fn(&mut Log) -> Result<u64, Failure>,
) -> Result<u64, Failure> {
    loop {
        match write(log) {
            Err(Failure::Disk(error)) if is_full(&error) && shared.free_one() => {}
            other => return other,
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// One write, within the bound: the segment's new length.
fn append(
    shared: &Arc<Shared>,
    log: &mut Log,
    first: u64,
    segment: NextSegment,
    bytes: u64,
    fill: impl FnOnce(&mut Vec<u8>),
) -> Result<u64, Failure> {
    // What is written again after a failure may have begun its segment already.
    let begins = segment == NextSegment::Begin && !log.begins_with(first);
    if log.length().is_none() || begins {
        begin(shared, log, first, bytes)?;
    } else if !shared.make_room(bytes) {
        return Err(Failure::NoRoom(bytes));
    }
    log.append(fill).map_err(|error| {
        shared.core.lock().segments.waste(bytes);
        Failure::Disk(error)
    })
}

/// Begins a segment, when there is room for so many bytes in it.
fn begin(shared: &Arc<Shared>, log: &mut Log, first: u64, bytes: u64) -> Result<(), Failure> {
    let snapshot =
        if shared.config.keeps_positions { shared.positions.lock().snapshot() } else { Vec::new() };
    let follows = {
        let core = shared.core.lock();
        core.segments.last().map_or(first, |last| last.end)
    };
    let head = Log::head(Header { first, follows }, &snapshot);
    let length = wide(head.len());
    let wanted = bytes.saturating_add(length);
    if !shared.make_room(wanted) {
        return Err(Failure::NoRoom(wanted));
    }
    log.begin(first, &head)?;
    let mut core = shared.core.lock();
    core.segments.begin(first, length);
    Ok(())
}

/// Everything that waits fails. The log is put back when it is given.
fn fail(shared: &Shared, failure: &Failure, log: Option<Box<Log>>) {
    let (told, unavailable) = {
        let mut core = shared.core.lock();
        core.log = log;
        let failed = match failure {
            Failure::NoRoom(wanted) => core.no_room(*wanted, &shared.config, Instant::now()),
            Failure::Disk(error) => {
                shared.metrics.write_failures.inc();
                let reason = if is_full(error) {
                    UnavailableReason::Full
                } else {
                    UnavailableReason::Failing(error.to_string().into())
                };
                core.fail(reason, Instant::now())
            }
        };
        shared.publish(&core);
        failed
    };
    told.tell(&Err(unavailable));
}
