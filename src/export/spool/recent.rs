//! The last committed events, in memory.

use std::collections::VecDeque;

use super::scan::wide;
use crate::aep::Event;

/// The last committed events, their numbers without gaps. Bounded by its owner.
#[derive(Debug, Default)]
pub(super) struct Recent {
    events: VecDeque<Event>,
    /// Memory of these, in bytes.
    bytes: u64,
}

impl Recent {
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Memory of the events, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn push(&mut self, event: Event) {
        self.bytes = self.bytes.saturating_add(wide(event.memory()));
        self.events.push_back(event);
    }

    /// Drops the oldest event: whether there was one.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let Some(event) = self.events.pop_front() else { return false };
        self.bytes = self.bytes.saturating_sub(wide(event.memory()));
        true
    }

    /// Events after the first `skip`: at most `count` and, but for the first, `bytes`.
    pub(super) fn batch(&self, skip: usize, count: usize, bytes: usize) -> Vec<Event> {
        let mut left = bytes;
        let mut events = Vec::new();
        for event in self.events.range(skip.min(self.events.len())..).take(count) {
            let size = event.as_bytes().len();
            if size > left && !events.is_empty() {
                break;
            }
            left = left.saturating_sub(size);
            events.push(event.clone());
        }
        events
    }
}
