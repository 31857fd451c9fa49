//! Who waits for a write.

use tokio::sync::oneshot;

use super::Unavailable;

/// How an append learns what became of it.
pub(super) type Outcome = Result<(), Unavailable>;

/// One for each append and probe under way: their number is bounded by the callers'.
#[derive(Debug, Default)]
pub(super) struct Waiters(Vec<Waiter>);

#[derive(Debug)]
struct Waiter {
    awaits: Awaits,
    done: oneshot::Sender<Outcome>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaits {
    /// That the event of this number is committed.
    Event(u64),
    /// The next write, whatever it is.
    Write,
}

/// Those that are to be told.
#[derive(Debug)]
#[must_use = "somebody waits"]
pub(super) struct Told(Vec<Waiter>);

impl Waiters {
    pub(super) fn add(&mut self, awaits: Awaits) -> oneshot::Receiver<Outcome> {
        let (done, outcome) = oneshot::channel();
        self.0.push(Waiter { awaits, done });
        outcome
    }

    /// After a write that worked: those who wait for it, or for an event before `end`.
    pub(super) fn written(&mut self, end: u64) -> Told {
        let (told, waiting) =
            std::mem::take(&mut self.0).into_iter().partition(|waiter| match waiter.awaits {
                Awaits::Event(number) => number < end,
                Awaits::Write => true,
            });
        self.0 = waiting;
        Told(told)
    }

    /// After a write that failed: everybody.
    pub(super) fn failed(&mut self) -> Told {
        Told(std::mem::take(&mut self.0))
    }
}

impl Told {
    /// Tells them. Not to be done under a lock.
    pub(super) fn tell(self, outcome: &Outcome) {
        for waiter in self.0 {
            // Whoever has stopped waiting needn't know.
            drop(waiter.done.send(outcome.clone()));
        }
    }
}
