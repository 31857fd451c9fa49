//! CloudEvents as JSON lines in files of a directory: `events-20260703T101401.500Z.jsonl`, one structured CloudEvent a
//! line, the newest file the one that is written to.
//!
//! | what happened | outcome | what is done |
//! |---|---|---|
//! | written, and flushed to the disk | delivered | the next lines go out |
//! | the disk or a quota is full, any other failure of a write or a flush | transient | the sink pauses |
//! | another process writes to the directory | transient | the sink pauses |
//! | a write takes longer than an attempt may | transient | the events are retried once it has ended |
//! | no permission, a read-only file system | misconfigured | the sink pauses; no event is thrown away |
//! | the path is that of a file, or leads through one | misconfigured | as above |
//! | the event can't be mapped | rejected | dead letter |
//!
//! Invariants. A line whose delivery was acknowledged is whole, on the disk, and never touched again. What follows the
//! last newline of a file is of an attempt that was never acknowledged, and is cut off before the next line is written.
//! An attempt that failed after its lines were written leaves them behind where they can't be taken back: they are
//! there twice then. One process writes at a time: it holds a lock on `.lock` in the directory.

mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use self::writer::{Rotation, Writer};
use super::{BuildError, Delivery, DeliveryError, Reason, Sink, SinkOptions, Times};
use crate::aep::cloudevents::CloudEvent;
use crate::export::retry::wall_clock;

/// Every option's name.
const NAMES: [&str; 3] = ["keep", "rotate.after", "rotate.bytes"];

/// Appends to files in a directory.
pub struct FileSink {
    times: Times,
    /// Guards the files for one delivery at a time. Locked only on threads that may block, and never waited for: who
    /// finds it locked finds an earlier attempt that still hangs.
    writer: Arc<Mutex<Writer>>,
}

impl fmt::Debug for FileSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSink").finish_non_exhaustive()
    }
}

impl FileSink {
    /// A sink to a directory, which is created with the first delivery.
    ///
    /// # Errors
    /// When an option can't be used.
    pub fn new(directory: PathBuf, options: &SinkOptions) -> Result<Self, BuildError> {
        let writer = Writer::new(directory, rotation(&options.own)?);
        Ok(Self { times: options.times, writer: Arc::new(Mutex::new(writer)) })
    }
}

impl Sink for FileSink {
    /// One write and one flush to the disk.
    ///
    /// # Cancel safety
    /// A future that is dropped leaves open whether the lines are written; none is torn.
    async fn deliver(&self, delivery: &Delivery) -> Result<(), DeliveryError> {
        let mut lines = Vec::new();
        for event in &delivery.events {
            CloudEvent::of(event)?.write_structured(&mut lines);
            lines.push(b'\n');
        }
        let writer = Arc::clone(&self.writer);
        let write = tokio::task::spawn_blocking(move || match writer.try_lock() {
            Some(mut writer) => writer.append(&lines, wall_clock()).map_err(|error| outcome(&error)),
            None => Err(LATE),
        });
        match tokio::time::timeout(self.times.attempt, write).await {
            Ok(written) => written.unwrap_or(Err(FAILED)),
            Err(_) => Err(LATE),
        }
    }
}

const LATE: DeliveryError = DeliveryError::Transient { reason: Reason::Timeout, retry_after: None };
const FAILED: DeliveryError = DeliveryError::Transient { reason: Reason::Write, retry_after: None };

/// The table above.
fn outcome(error: &io::Error) -> DeliveryError {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            DeliveryError::Misconfigured { reason: Reason::Unauthorized }
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory | io::ErrorKind::AlreadyExists => {
            DeliveryError::Misconfigured { reason: Reason::NotFound }
        }
        _ => FAILED,
    }
}

fn rotation(own: &BTreeMap<String, String>) -> Result<Rotation, BuildError> {
    let variable = |name: &str| format!("OPT_{}", name.to_ascii_uppercase().replace('.', "_"));
    if let Some(unknown) = own.keys().find(|name| !NAMES.contains(&name.as_str())) {
        let known = NAMES.map(variable).join(", ");
        return Err(BuildError::setting(variable(unknown), format!("is no option of file sinks: {known}")));
    }
    let one = |name| own.get(name).map(|value| value.trim());
    let must = |name, must: &str| BuildError::setting(variable(name), format!("must be {must}"));
    let bytes = match one("rotate.bytes") {
        None => 64 << 20,
        Some(text) => text
            .parse::<bytesize::ByteSize>()
            .ok()
            .map(|size| size.as_u64())
            .filter(|bytes| *bytes > 0)
            .ok_or_else(|| must("rotate.bytes", "a size, for example 64MiB"))?,
    };
    let after = match one("rotate.after") {
        None => Duration::from_hours(1),
        Some(text) => humantime::parse_duration(text)
            .ok()
            .filter(|after| !after.is_zero())
            .ok_or_else(|| must("rotate.after", "a duration with its unit, for example 1h"))?,
    };
    let keep = match one("keep") {
        None => None,
        Some(text) => {
            let keep: Option<NonZeroUsize> = text.parse().ok();
            Some(keep.ok_or_else(|| must("keep", "how many files are kept, from 1 on"))?)
        }
    };
    Ok(Rotation { bytes, after, keep })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_its_outcome() {
        for (kind, expected) in [
            (io::ErrorKind::StorageFull, FAILED),
            (io::ErrorKind::QuotaExceeded, FAILED),
            (io::ErrorKind::WouldBlock, FAILED),
            (io::ErrorKind::Other, FAILED),
            (io::ErrorKind::PermissionDenied, DeliveryError::Misconfigured { reason: Reason::Unauthorized }),
            (
                io::ErrorKind::ReadOnlyFilesystem,
                DeliveryError::Misconfigured { reason: Reason::Unauthorized },
            ),
            (io::ErrorKind::NotADirectory, DeliveryError::Misconfigured { reason: Reason::NotFound }),
        ] {
            assert_eq!(outcome(&io::Error::from(kind)), expected, "{kind:?}");
        }
    }

    #[test]
    fn options_have_units_and_defaults() {
        let read = |name: &str, value: &str| {
            rotation(&[(name.to_owned(), value.to_owned())].into()).map_err(|error| error.to_string())
        };
        let default = rotation(&BTreeMap::new()).unwrap();
        assert_eq!((default.bytes, default.after.as_secs(), default.keep), (64 << 20, 3600, None));
        assert_eq!(read("rotate.bytes", "1MiB").unwrap().bytes, 1 << 20);
        assert_eq!(read("keep", "7").unwrap().keep, NonZeroUsize::new(7));
        for (name, value) in [("keep", "0"), ("rotate.after", "60"), ("rotate.bytes", "0"), ("mode", "x")] {
            assert!(read(name, value).unwrap_err().starts_with("OPT_"), "{name}={value}");
        }
    }
}
