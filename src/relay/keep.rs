//! What makes accepted events last.
//!
//! The relay's own memory ends with the process. Who needs more keeps the events elsewhere first: an event counts as
//! accepted once it is kept, and only then goes to histories and readers.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::aep::Event;

/// A future without a name.
pub type Boxed<'f, T> = Pin<Box<dyn Future<Output = T> + Send + 'f>>;

/// Keeps events before they are admitted.
pub trait Keep: Debug + Send + Sync {
    /// Keeps the events: all that have to be, or it fails. Events that are kept already are no error.
    ///
    /// # Errors
    /// When they can't be kept now.
    ///
    /// # Cancel safety
    /// When it is dropped, the events may be kept or not.
    fn keep<'k>(&'k self, events: &'k [Event]) -> Boxed<'k, Result<(), NotKept>>;

    /// Returns when it is worth trying again.
    fn room(&self) -> Boxed<'_, ()>;
}

/// Why events can't be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotKept {
    /// Not now.
    #[error("{reason}")]
    Now {
        /// Why, for people.
        reason: &'static str,
        /// When to try again, at the earliest.
        retry_after: Duration,
    },
    /// Never: they are more than is ever kept together.
    #[error("more than {max_bytes} bytes are never kept together")]
    TooLarge {
        /// The bound, in bytes.
        max_bytes: usize,
    },
}
