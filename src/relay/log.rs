//! The arrival log: what live readers read, each by a cursor of its own.
//!
//! Events are numbered as they arrive. Those that arrived together form a [`Block`], which readers share; its
//! SSE messages are built once, by the first reader that needs them. A reader costs a number. The log keeps
//! the newest blocks up to a bound in bytes; a reader whose cursor falls behind the oldest block finds what
//! it missed in the sessions' histories.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::aep::{Event, Scope, sse};

/// Events that arrived together, in order.
#[derive(Debug)]
pub struct Block {
    first: u64,
    events: Box<[Event]>,
    messages: OnceLock<Messages>,
}

/// The SSE messages of a block, back to back.
#[derive(Debug)]
struct Messages {
    bytes: Bytes,
    /// Where each message ends.
    ends: Box<[usize]>,
}

impl Block {
    fn new(first: u64, events: Box<[Event]>) -> Self {
        Self { first, events, messages: OnceLock::new() }
    }

    /// The events.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The arrival number of the first event.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The arrival number after the last event.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    /// The SSE messages of the events in `range`, shared by all readers.
    #[must_use]
    pub fn messages(&self, range: &Range<usize>) -> Bytes {
        let messages = self.messages.get_or_init(|| {
            /// What framing adds to an ordinary event.
            const FRAMING: usize = 96;
            let size = self.events.iter().map(|event| event.as_bytes().len() + FRAMING).sum();
            let mut bytes = Vec::with_capacity(size);
            let ends = self
                .events
                .iter()
                .map(|event| {
                    sse::write_message(event, &mut bytes);
                    bytes.len()
                })
                .collect();
            bytes.shrink_to_fit();
            Messages { bytes: bytes.into(), ends }
        });
        let end_of = |n: usize| n.checked_sub(1).and_then(|n| messages.ends.get(n)).copied().unwrap_or(0);
        messages.bytes.slice(end_of(range.start)..end_of(range.end))
    }

    /// Bytes that keeping the block may take: its events once as received and once as messages.
    fn weight(&self) -> usize {
        self.events.iter().map(|event| event.memory() + event.as_bytes().len()).sum()
    }
}

/// The newest blocks.
#[derive(Debug)]
pub struct Log {
    blocks: VecDeque<Arc<Block>>,
    /// The number that the next event gets.
    next: u64,
    bytes: usize,
    /// Bound of `bytes`; the newest block is kept whatever its size.
    max_bytes: usize,
    /// The highest arrival number among evicted events that no history holds.
    live_only_evicted: Option<u64>,
}

/// What a reader finds at its cursor.
#[derive(Debug)]
pub enum Read {
    /// Blocks that hold the cursor and what comes after it; none when it is at the end.
    Blocks(Vec<Arc<Block>>),
    /// What was at the cursor is no longer in the log.
    Behind,
}

impl Log {
    /// An empty log of at most `max_bytes`.
    #[must_use]
    pub fn new(max_bytes: usize) -> Self {
        Self { blocks: VecDeque::new(), next: 0, bytes: 0, max_bytes, live_only_evicted: None }
    }

    /// The number that the next event to arrive will get.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Appends events that arrived together. Returns the blocks that had to go, to be dropped outside of any
    /// lock.
    pub fn append(&mut self, events: Box<[Event]>) -> Vec<Arc<Block>> {
        let block = Arc::new(Block::new(self.next, events));
        self.next = block.end();
        self.bytes += block.weight();
        self.blocks.push_back(block);
        let mut gone = Vec::new();
        while self.bytes > self.max_bytes && self.blocks.len() > 1 {
            let Some(oldest) = self.blocks.pop_front() else { break };
            self.bytes = self.bytes.saturating_sub(oldest.weight());
            let live_only = oldest.events.iter().rposition(|event| event.scope() == Scope::Agent);
            if let Some(n) = live_only {
                self.live_only_evicted = Some(oldest.first + n as u64);
            }
            gone.push(oldest);
        }
        gone
    }

    /// The blocks from the one at `cursor` on, until they hold `max_bytes` or the log ends.
    #[must_use]
    pub fn read(&self, cursor: u64, max_bytes: usize) -> Read {
        let oldest = self.blocks.front().map_or(self.next, |block| block.first);
        if cursor < oldest {
            return Read::Behind;
        }
        let start = self.blocks.partition_point(|block| block.end() <= cursor);
        let mut bytes = 0;
        let blocks = self
            .blocks
            .range(start..)
            .take_while(|block| {
                let room = bytes < max_bytes;
                bytes += block.weight();
                room
            })
            .cloned()
            .collect();
        Read::Blocks(blocks)
    }

    /// The events in the log that arrived at or after `arrival` and that no history holds.
    #[must_use]
    pub fn live_only(&self, arrival: u64) -> Vec<Event> {
        let blocks = self.blocks.iter().filter(|block| block.end() > arrival);
        let numbered = blocks.flat_map(|block| block.events.iter().zip(block.first..));
        numbered
            .filter(|(event, n)| *n >= arrival && event.scope() == Scope::Agent)
            .map(|(event, _)| event.clone())
            .collect()
    }

    /// Whether an event that arrived at or after `arrival` is gone from here and was never in a history.
    #[must_use]
    pub fn has_lost_since(&self, arrival: u64) -> bool {
        self.live_only_evicted >= Some(arrival)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seq: u64) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"{seq}","type":"run.started","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"s","seq":{seq}}}"#
        ))
        .unwrap()
    }

    fn events(range: Range<u64>) -> Box<[Event]> {
        range.map(event).collect()
    }

    #[test]
    fn a_reader_finds_what_is_at_its_cursor() {
        let mut log = Log::new(usize::MAX);
        log.append(events(0..3));
        log.append(events(3..4));
        log.append(events(4..9));
        for (cursor, first) in
            [(0, Some(0)), (2, Some(0)), (3, Some(3)), (4, Some(4)), (8, Some(4)), (9, None)]
        {
            let Read::Blocks(blocks) = log.read(cursor, usize::MAX) else { panic!("not behind") };
            assert_eq!(blocks.first().map(|block| block.first()), first, "{cursor}");
            assert_eq!(blocks.last().map_or(9, |block| block.end()), 9);
        }
        let Read::Blocks(blocks) = log.read(0, 1) else { panic!("not behind") };
        assert_eq!(blocks.len(), 1, "at least one block, whatever its size");
    }

    #[test]
    fn old_blocks_go_and_a_reader_there_is_told() {
        let one = Block::new(0, events(0..1)).weight();
        let mut log = Log::new(one * 2);
        for n in 0..5 {
            log.append(events(n..n + 1));
        }
        assert!(matches!(log.read(2, 1), Read::Behind));
        assert!(matches!(log.read(3, 1), Read::Blocks(_)));
        assert!(!log.has_lost_since(0), "these are in a history");
    }

    #[test]
    fn messages_are_slices_of_one_buffer() {
        let block = Block::new(0, events(0..3));
        let all = block.messages(&(0..3));
        let (one, rest) = (block.messages(&(0..1)), block.messages(&(1..3)));
        assert_eq!([&one[..], &rest[..]].concat(), all);
        assert_eq!(one.as_ptr(), all.as_ptr());
        assert!(block.messages(&(1..1)).is_empty());
    }
}
