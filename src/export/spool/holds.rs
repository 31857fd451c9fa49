//! Cursors that hold space.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::shared::Shared;

/// A cursor that holds space: events from its number on are kept. Dropping it releases nothing: a sink that stops,
/// however it comes to that, leaves what it hasn't delivered to the next start.
#[derive(Debug)]
pub struct Hold {
    shared: Arc<Shared>,
    id: u64,
}

impl Hold {
    pub(super) fn new(shared: Arc<Shared>, from: u64) -> Self {
        let id = shared.core.lock().holds.add(from);
        Self { shared, id }
    }

    /// Everything below `number` is done with. It never goes back.
    pub fn advance(&self, number: u64) {
        self.shared.advance(self.id, number);
    }
}

/// How far each hold is.
#[derive(Debug, Default)]
pub(super) struct Holds {
    by_id: BTreeMap<u64, u64>,
    next_id: u64,
}

impl Holds {
    /// Events before this number are done with by every hold.
    pub(super) fn done(&self) -> u64 {
        self.by_id.values().copied().min().unwrap_or(u64::MAX)
    }

    fn add(&mut self, from: u64) -> u64 {
        let id = self.next_id;
        self.next_id = id.saturating_add(1);
        self.by_id.insert(id, from);
        id
    }

    /// Whether that changed what is done with.
    pub(super) fn advance(&mut self, id: u64, number: u64) -> bool {
        let before = self.done();
        if let Some(held) = self.by_id.get_mut(&id) {
            *held = number.max(*held);
        }
        self.done() != before
    }
}
