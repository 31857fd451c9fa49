//! Reads a segment's records one after the other, and finds its way past damage.

use std::io;

use super::files::SpoolFile;
use super::format::{HEADER, Kind, Prefix, RECORD};

/// How much is read at once, in bytes, unless a record is longer.
const CHUNK: usize = 256 << 10;

/// A place in a segment.
#[derive(Debug)]
pub(super) struct Scan {
    file: Box<dyn SpoolFile>,
    /// What was read and isn't done with; begins at `base`.
    buffer: Vec<u8>,
    /// Offset of the buffer in the file.
    base: u64,
    /// Where in the buffer the next record begins.
    at: usize,
    /// The number that comes next when nothing is lost.
    expected: u64,
    /// Where the last intact record ends, in the file.
    good: u64,
}

/// What comes next in a segment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<'s> {
    /// An event, by its bytes. `lost` numbers before it are missing.
    Event { number: u64, lost: u64, payload: &'s [u8] },
    /// A snapshot of resume positions.
    Positions(&'s [u8]),
    /// Nothing more. The last `lost` numbers are missing, and `rest` bytes are no record.
    End { lost: u64, rest: u64 },
}

/// How much of a segment is to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Length of what was committed, in bytes.
    pub(super) length: u64,
    /// The number after the last event; what claims a higher one was never acknowledged.
    pub(super) end: u64,
}

impl Scan {
    /// From the start of a segment whose first event has the number `first`.
    pub(super) fn new(file: Box<dyn SpoolFile>, first: u64) -> Self {
        let base = wide(HEADER);
        Self { file, buffer: Vec::new(), base, at: 0, expected: first, good: base }
    }

    /// The number that comes next when nothing is lost.
    pub(super) fn expected(&self) -> u64 {
        self.expected
    }

    /// Where the next record begins, in the file.
    pub(super) fn offset(&self) -> u64 {
        self.base.saturating_add(wide(self.at))
    }

    /// Where the last intact record ends, in the file.
    pub(super) fn good(&self) -> u64 {
        self.good
    }

    /// The next of an extent, which may have grown since the last call.
    pub(super) fn next(&mut self, extent: Extent) -> io::Result<Found<'_>> {
        let mut skipped: u64 = 0;
        loop {
            let Some(prefix) = self.record(extent, skipped > 0)? else {
                if self.available(RECORD, extent.length)? < RECORD {
                    let rest = extent.length.saturating_sub(self.offset()).saturating_add(skipped);
                    let lost = extent.end.saturating_sub(self.expected);
                    // What is appended later begins at the extent's end.
                    self.jump(extent.length);
                    self.expected = self.expected.max(extent.end);
                    return Ok(Found::End { lost, rest });
                }
                self.at = self.at.saturating_add(1);
                skipped = skipped.saturating_add(1);
                continue;
            };
            let start = self.at.saturating_add(RECORD);
            self.at = self.at.saturating_add(prefix.length);
            self.good = self.offset();
            skipped = 0;
            let lost = prefix.number.saturating_sub(self.expected);
            match prefix.kind {
                // Not this segment's: the end of an append that failed, whose numbers were given again.
                Some(Kind::Event) if prefix.number < self.expected || prefix.number >= extent.end => continue,
                Some(Kind::Event) => self.expected = prefix.number.saturating_add(1),
                Some(Kind::Positions) => {}
                None => continue,
            }
            let payload = self.buffer.get(start..self.at).unwrap_or_default();
            return Ok(match prefix.kind {
                Some(Kind::Event) => Found::Event { number: prefix.number, lost, payload },
                Some(Kind::Positions) | None => Found::Positions(payload),
            });
        }
    }

    /// Whether an intact record begins here. While searching, a record must also have a number that can come
    /// next: an event's bytes hold no zero byte, so that nothing in them passes for the start of a record.
    fn record(&mut self, extent: Extent, searching: bool) -> io::Result<Option<Prefix>> {
        if self.available(RECORD, extent.length)? < RECORD {
            return Ok(None);
        }
        let Some(prefix) = Prefix::read(self.rest()) else { return Ok(None) };
        if searching && !(self.expected..=extent.end).contains(&prefix.number) {
            return Ok(None);
        }
        if wide(prefix.length) > extent.length.saturating_sub(self.offset())
            || self.available(prefix.length, extent.length)? < prefix.length
        {
            return Ok(None);
        }
        let intact = self.rest().get(..prefix.length).is_some_and(|record| prefix.is_intact(record));
        Ok(intact.then_some(prefix))
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.at..).unwrap_or_default()
    }

    /// Reads until `wanted` bytes are there from here on, or the extent ends: how many are.
    fn available(&mut self, wanted: usize, length: u64) -> io::Result<usize> {
        let here = self.buffer.len().saturating_sub(self.at);
        if here >= wanted {
            return Ok(here);
        }
        let end = self.base.saturating_add(wide(self.buffer.len()));
        let left = usize::try_from(length.saturating_sub(end)).unwrap_or(usize::MAX);
        if left == 0 {
            return Ok(here);
        }
        self.buffer.drain(..self.at);
        self.base = self.base.saturating_add(wide(self.at));
        self.at = 0;
        let mut filled = self.buffer.len();
        let target = filled.saturating_add(wanted.saturating_sub(here).max(CHUNK).min(left));
        self.buffer.resize(target, 0);
        while let Some(free) = self.buffer.get_mut(filled..).filter(|free| !free.is_empty()) {
            let read = self.file.read_at(end.saturating_add(wide(filled.saturating_sub(here))), free);
            match read {
                Ok(0) => break,
                Ok(more) => filled = filled.saturating_add(more),
                Err(error) => {
                    self.buffer.truncate(here);
                    return Err(error);
                }
            }
        }
        self.buffer.truncate(filled);
        Ok(filled)
    }

    /// Goes on at an offset.
    fn jump(&mut self, offset: u64) {
        self.buffer.clear();
        (self.base, self.at) = (offset, 0);
    }
}

/// A length as an offset.
pub(super) fn wide(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}
