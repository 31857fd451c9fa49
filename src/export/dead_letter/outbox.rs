//! Letters on their way to where they are kept.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::{DeadLetters, Letter};
use crate::export::lane::Parcel;
use crate::export::sink::{AnySink, Delivery, DeliveryError, Sink};

/// Where dead letters go.
#[derive(Debug)]
pub(crate) enum Desk {
    /// Into files.
    Files(DeadLetters),
    /// To another sink, with why they were refused; what that one refuses too, into files.
    Sink {
        /// The sink.
        to: Arc<AnySink>,
        /// The name of the sink that refused them.
        from: String,
        /// For what `to` refuses.
        files: DeadLetters,
    },
}

/// Sends dead letters where they are kept, one batch at a time; what is posted meanwhile goes with the next one.
pub(crate) struct Outbox {
    state: State,
    waiting: Vec<(Parcel, Letter)>,
}

/// `None` when the runtime is going down.
type Sending = Pin<Box<dyn Future<Output = Option<(Desk, Batch)>> + Send>>;

enum State {
    Idle(Desk),
    Sending(Sending),
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
    pub(crate) letters: Vec<(Parcel, Letter, Kept)>,
    /// How many older ones were dropped for them.
    pub(crate) dropped: u64,
}

/// Whether a letter is where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    Yes,
    No,
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
                Desk::Sink { to, from, files } => Box::pin(deliver(to, from, files, letters)),
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

async fn write(files: DeadLetters, letters: Vec<(Parcel, Letter)>) -> Option<(Desk, Batch)> {
    let (files, batch) = write_to(files, letters).await?;
    Some((Desk::Files(files), batch))
}

async fn write_to(mut files: DeadLetters, letters: Vec<(Parcel, Letter)>) -> Option<(DeadLetters, Batch)> {
    let write = move || {
        let written = files.write(letters.iter().map(|(_, letter)| letter));
        let kept = if written.is_ok() { Kept::Yes } else { Kept::No };
        let letters = letters.into_iter().map(|(parcel, letter)| (parcel, letter, kept)).collect();
        (files, Batch { letters, dropped: written.unwrap_or(0) })
    };
    tokio::task::spawn_blocking(write).await.ok()
}

async fn deliver(
    to: Arc<AnySink>,
    from: String,
    files: DeadLetters,
    letters: Vec<(Parcel, Letter)>,
) -> Option<(Desk, Batch)> {
    let (mut settled, mut refused) = (Vec::new(), Vec::new());
    for (parcel, letter) in letters {
        match to.deliver(&Delivery::of(letter.annotated(&from))).await {
            Ok(()) => settled.push((parcel, letter, Kept::Yes)),
            Err(DeliveryError::Rejected { reason, .. }) => {
                tracing::warn!(%reason, "the dead letter sink refuses a letter; it is kept in a file");
                refused.push((parcel, letter));
            }
            Err(error) => {
                tracing::warn!(%error, "the dead letter sink takes no letter now; its event is kept and retried");
                settled.push((parcel, letter, Kept::No));
            }
        }
    }
    let (files, mut batch) = if refused.is_empty() {
        (files, Batch { letters: Vec::new(), dropped: 0 })
    } else {
        write_to(files, refused).await?
    };
    batch.letters.append(&mut settled);
    Some((Desk::Sink { to, from, files }, batch))
}
