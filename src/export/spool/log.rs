//! Writes the log: one segment open at its end, and the rules for what a failed write leaves behind.

use std::io;
use std::sync::Arc;

use super::files::{Files, SpoolFile};
use super::format::{Header, Kind, segment_name, write_record};
use super::scan::wide;

/// How much of the write buffer is kept between writes, in bytes.
const KEPT_BUFFER: usize = 4 << 20;

/// The end of the log, for blocking work. Only ever one writes.
#[derive(Debug)]
pub(super) struct Log {
    files: Arc<dyn Files>,
    /// Whether what is written must survive the machine.
    durable: bool,
    open: Option<Open>,
    buffer: Vec<u8>,
}

/// The segment that is written to.
#[derive(Debug)]
struct Open {
    /// Its first number.
    first: u64,
    file: Box<dyn SpoolFile>,
    /// Length of what was committed, in bytes.
    length: u64,
    tail: Tail,
}

/// What stands behind what was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tail {
    Clean,
    /// A part of a failed append, to be cut off before the next one.
    Torn,
    /// It can't be told or can't be changed: a failed sync may have lost what the system says is written. The
    /// segment is left as it is.
    Lost,
}

impl Log {
    /// With no segment open: the first write begins one.
    pub(super) fn new(files: Arc<dyn Files>, durable: bool) -> Self {
        Self { files, durable, open: None, buffer: Vec::new() }
    }

    /// Goes on with a segment that is `length` bytes long.
    pub(super) fn resume(&mut self, first: u64, file: Box<dyn SpoolFile>, length: u64) {
        self.open = Some(Open { first, file, length, tail: Tail::Clean });
    }

    /// Makes the open segment fit to be appended to. Its length in bytes when it is; a new one has to be begun
    /// when it isn't.
    pub(super) fn length(&mut self) -> Option<u64> {
        let open = self.open.as_mut()?;
        if open.tail == Tail::Torn {
            open.tail = match open.file.truncate(open.length) {
                Ok(()) => Tail::Clean,
                Err(error) => {
                    tracing::warn!(file = segment_name(open.first), %error, "torn end can't be cut off");
                    Tail::Lost
                }
            };
        }
        (open.tail == Tail::Clean).then_some(open.length)
    }

    /// Whether the open segment is the one that begins with this number.
    pub(super) fn begins_with(&self, first: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.first == first)
    }

    /// The head of a new segment: its header and, unless it is empty, a snapshot of positions.
    pub(super) fn head(header: Header, snapshot: &[u8]) -> Vec<u8> {
        let mut head = Vec::new();
        header.write(&mut head);
        if !snapshot.is_empty() {
            write_record(&mut head, header.first, Kind::Positions, snapshot);
        }
        head
    }

    /// Begins a new segment with this head. What a failure leaves of it is removed.
    pub(super) fn begin(&mut self, first: u64, head: &[u8]) -> io::Result<()> {
        let name = segment_name(first);
        if self.begins_with(first) {
            // It holds no event: a new file takes its name.
            self.open = None;
        }
        let created = match self.files.create(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.files.remove(&name).and_then(|()| self.files.create(&name))
            }
            other => other,
        };
        let mut file = created?;
        let mut written = file.append(head);
        if self.durable {
            written = written.and_then(|()| file.sync()).and_then(|()| self.files.sync());
        }
        if let Err(error) = written {
            drop(file);
            if let Err(error) = self.files.remove(&name) {
                tracing::warn!(file = name, %error, "half-made segment can't be removed");
            }
            return Err(error);
        }
        self.open = Some(Open { first, file, length: wide(head.len()), tail: Tail::Clean });
        Ok(())
    }

    /// Appends what `fill` writes as one write: the segment's new length, in bytes.
    pub(super) fn append(&mut self, fill: impl FnOnce(&mut Vec<u8>)) -> io::Result<u64> {
        self.buffer.clear();
        self.buffer.shrink_to(KEPT_BUFFER);
        fill(&mut self.buffer);
        let Some(open) = self.open.as_mut() else {
            return Err(io::Error::other("no segment is open"));
        };
        if let Err(error) = open.file.append(&self.buffer) {
            open.tail = Tail::Torn;
            return Err(error);
        }
        if self.durable
            && let Err(error) = open.file.sync()
        {
            open.tail = Tail::Lost;
            // What isn't acknowledged isn't to be found at the next start and taken for durable.
            if let Err(error) = open.file.truncate(open.length) {
                tracing::warn!(file = segment_name(open.first), %error, "unsynced end can't be cut off");
            }
            return Err(error);
        }
        open.length = open.length.saturating_add(wide(self.buffer.len()));
        Ok(open.length)
    }

    /// After a write that may have ended anywhere: a new segment is begun for the next one.
    pub(super) fn abandon(&mut self) {
        if let Some(open) = self.open.as_mut() {
            open.tail = Tail::Lost;
        }
    }
}
