//! Letters on their way to disk.

use tokio::task::JoinHandle;

use super::{DeadLetters, Letter};
use crate::export::seen::Fingerprint;

/// Writes dead letters, one batch at a time; what is posted meanwhile goes with the next one.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: State,
    waiting: Vec<(Fingerprint, Letter)>,
}

#[derive(Debug)]
enum State {
    Idle(DeadLetters),
    Writing(JoinHandle<(DeadLetters, Batch)>),
    /// The runtime is going down.
    Gone,
}

/// Letters that were written, or not, with their lanes.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) letters: Vec<(Fingerprint, Letter)>,
    /// How many older ones were dropped for them, or why they couldn't be written.
    pub(crate) result: std::io::Result<u64>,
}

impl Outbox {
    pub(crate) fn new(letters: DeadLetters) -> Self {
        Self { state: State::Idle(letters), waiting: Vec::new() }
    }

    /// Takes the letter of the event in flight in `lane`. There is one a lane, and so a bounded number.
    pub(crate) fn post(&mut self, lane: Fingerprint, letter: Letter) {
        self.waiting.push((lane, letter));
    }

    /// Whether every letter has been written, or has failed to be.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.is_writing()
    }

    pub(crate) fn is_writing(&self) -> bool {
        matches!(self.state, State::Writing(_))
    }

    /// Starts writing when there is a letter and no write is under way.
    pub(crate) fn start(&mut self) {
        if self.waiting.is_empty() || !matches!(self.state, State::Idle(_)) {
            return;
        }
        if let State::Idle(mut store) = std::mem::replace(&mut self.state, State::Gone) {
            let letters = std::mem::take(&mut self.waiting);
            self.state = State::Writing(tokio::task::spawn_blocking(move || {
                let result = store.write(letters.iter().map(|(_, letter)| letter));
                (store, Batch { letters, result })
            }));
        }
    }

    /// Waits for the write that is under way; for ever when there is none.
    ///
    /// # Cancel safety
    /// Cancel safe: the write goes on, and is waited for by the next call.
    pub(crate) async fn finished(&mut self) -> Batch {
        if let State::Writing(task) = &mut self.state {
            if let Ok((store, batch)) = task.await {
                self.state = State::Idle(store);
                return batch;
            }
            self.state = State::Gone;
        }
        std::future::pending().await
    }
}
