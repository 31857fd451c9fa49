//! Letters on their way to where they are kept.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::{DeadLetters, Letter};
use crate::export::lane::Parcel;
use crate::export::sink::{AnySink, Delivery, Sink};

/// Where dead letters go.
#[derive(Debug)]
pub(crate) enum Desk {
    /// Into files.
    Files(DeadLetters),
    /// To another sink, with why they were refused.
    Sink {
        /// The sink.
        to: Arc<AnySink>,
        /// The name of the sink that refused them.
        from: String,
    },
}

/// Sends dead letters where they are kept, one batch at a time; what is posted meanwhile goes with the next one.
pub(crate) struct Outbox {
    state: State,
    waiting: Vec<(Parcel, Letter)>,
}

/// What becomes of the desk and its letters; nothing when the runtime is going down.
type UnderWay = Pin<Box<dyn Future<Output = Option<(Desk, Batch)>> + Send>>;

enum State {
    Idle(Desk),
    Sending(UnderWay),
    /// The runtime is going down.
    Gone,
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

/// Letters that were kept, or not.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) letters: Vec<(Parcel, Letter)>,
    /// How many of them, from the first one on, are kept.
    pub(crate) kept: usize,
    /// How many older ones were dropped for them.
    pub(crate) dropped: u64,
}

impl Outbox {
    pub(crate) fn new(desk: Desk) -> Self {
        Self { state: State::Idle(desk), waiting: Vec::new() }
    }

    /// Takes the letter of a parcel in flight. There is one a lane, and so a bounded number.
    pub(crate) fn post(&mut self, parcel: Parcel, letter: Letter) {
        self.waiting.push((parcel, letter));
    }

    /// Whether every letter is kept, or couldn't be.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && !self.is_sending()
    }

    pub(crate) fn is_sending(&self) -> bool {
        matches!(self.state, State::Sending(_))
    }

    /// Starts when there is a letter and nothing is under way.
    pub(crate) fn start(&mut self) {
        if self.waiting.is_empty() || !matches!(self.state, State::Idle(_)) {
            return;
        }
        if let State::Idle(desk) = std::mem::replace(&mut self.state, State::Gone) {
            let letters = std::mem::take(&mut self.waiting);
            self.state = State::Sending(match desk {
                Desk::Files(files) => Box::pin(write(files, letters)),
                Desk::Sink { to, from } => Box::pin(deliver(to, from, letters)),
            });
        }
    }

    /// Waits for what is under way; for ever when there is nothing.
    ///
    /// # Cancel safety
    /// Cancel safe: it goes on, and is waited for by the next call.
    pub(crate) async fn finished(&mut self) -> Batch {
        if let State::Sending(sending) = &mut self.state {
            if let Some((desk, batch)) = sending.await {
                self.state = State::Idle(desk);
                return batch;
            }
            self.state = State::Gone;
        }
        std::future::pending().await
    }
}

async fn write(mut files: DeadLetters, letters: Vec<(Parcel, Letter)>) -> Option<(Desk, Batch)> {
    let write = move || {
        let written = files.write(letters.iter().map(|(_, letter)| letter));
        let kept = if written.is_ok() { letters.len() } else { 0 };
        (Desk::Files(files), Batch { letters, kept, dropped: written.unwrap_or(0) })
    };
    tokio::task::spawn_blocking(write).await.ok()
}

async fn deliver(to: Arc<AnySink>, from: String, letters: Vec<(Parcel, Letter)>) -> Option<(Desk, Batch)> {
    let mut kept = 0;
    for (_, letter) in &letters {
        if let Err(error) = to.deliver(&Delivery::of(letter.annotated(&from))).await {
            tracing::warn!(sink = from, %error, "the dead letter sink takes no letter; its event is kept and retried");
            break;
        }
        kept += 1;
    }
    Some((Desk::Sink { to, from }, Batch { letters, kept, dropped: 0 }))
}
