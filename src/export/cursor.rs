//! A sink's place in the spool: which events it is done with.
//!
//! An event is done with when the sink acknowledged it, when it became a dead letter, or when the sink doesn't want
//! it. Everything below [`Cursor::next`] is done with; beyond it, the sessions that got further than the slowest
//! one are kept as ranges, so that a restart delivers again only what was in flight.
//!
//! # File
//!
//! `sinks/<name>.cursor` holds one state after another; the last whole one counts. Integers are little-endian.
//!
//! ```text
//! file:   "aepcurs1"  then records
//! record: length of payload u32  CRC-32 of the length's bytes and the payload u32  payload
//! payload: next u64  number of ranges u32  then for each range: first u64  end u64
//! ```
//!
//! # Invariants
//!
//! 1. Every record is a whole state, so that a torn or damaged one costs no more than what came after the record
//!    before it: these events are delivered again.
//! 2. A record is written only after what it says has happened. A file that can't be read at all makes the sink
//!    start with the oldest event held: events may come twice, none is missed.
//! 3. Past [`file::LONGEST`] the file is replaced by one with the last state only: written under another name,
//!    flushed to disk, renamed.
//! 4. Numbers are given once: the spool never gives a new event a number that any cursor file has seen as done.

mod file;
mod keeper;

use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) use file::{CursorFile, furthest};
pub(crate) use keeper::Keeper;

/// Which numbers are done with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Every number below it is done with.
    next: u64,
    /// What is done with beyond `next`: starts to ends, neither touching another nor `next`.
    beyond: BTreeMap<u64, u64>,
}

impl Cursor {
    /// Everything below `next` is done with.
    pub(crate) fn at(next: u64) -> Self {
        Self { next, beyond: BTreeMap::new() }
    }

    /// The lowest number that isn't done with.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The number after the highest one that is done with.
    pub(crate) fn end(&self) -> u64 {
        self.beyond.last_key_value().map_or(self.next, |(_, end)| *end)
    }

    /// Whether a number is done with.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        number < self.next || self.beyond.range(..=number).next_back().is_some_and(|(_, end)| number < *end)
    }

    /// These are done with.
    pub(crate) fn done(&mut self, numbers: Range<u64>) {
        let Range { mut start, mut end } = numbers;
        if start >= end {
            return;
        }
        // What overlaps or touches becomes one range.
        while let Some((&first, &last)) = self.beyond.range(..=end).next_back()
            && last >= start
        {
            self.beyond.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        if start <= self.next {
            self.next = self.next.max(end);
        } else {
            self.beyond.insert(start, end);
        }
    }

    /// What is done with beyond [`Cursor::next`].
    fn beyond(&self) -> impl ExactSizeIterator<Item = Range<u64>> {
        self.beyond.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_agrees_with_a_set_of_numbers(start in 0_u64..5, steps in prop::collection::vec((0_u64..60, 0_u64..6), 0..60)) {
            let (mut cursor, mut done) = (Cursor::at(start), (0..start).collect::<BTreeSet<_>>());
            for (first, length) in steps {
                cursor.done(first..first + length);
                done.extend(first..first + length);
                for number in 0..70 {
                    prop_assert_eq!(cursor.is_done(number), done.contains(&number));
                }
                prop_assert_eq!(cursor.next(), (0..).find(|n| !done.contains(n)).unwrap());
                prop_assert_eq!(cursor.end(), done.last().map_or(0, |last| last + 1));
                let ranges: Vec<_> = cursor.beyond().collect();
                prop_assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "{:?}", ranges);
                prop_assert!(ranges.first().is_none_or(|first| first.start > cursor.next()));
            }
        }
    }
}
