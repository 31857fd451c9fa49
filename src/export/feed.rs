//! Where events come from.

pub mod file;

use std::future::Future;

use crate::aep::Event;

/// A resumable stream of events, already filtered and lowered to the export's capture ceiling.
///
/// A feed may give an event again; duplicates are told by `(source, id)` downstream.
pub trait Feed: Send {
    /// The next events in the order they arrived, at least one; `None` at the end of the feed, for good.
    ///
    /// A feed bounds its batches: the pipeline holds one batch beyond its own bounds.
    ///
    /// # Errors
    /// When the feed can't go on. What it gave before is still delivered.
    ///
    /// # Cancel safety
    /// Must be cancel safe: dropping the future before it is ready loses no event.
    fn next(&mut self) -> impl Future<Output = Result<Option<Vec<Event>>, FeedError>> + Send;
}

/// Why a feed can't go on.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// Reading failed.
    #[error("the feed can't be read")]
    Read(#[from] std::io::Error),
    /// The other side ended the feed for good, or refused it.
    #[error("the feed is closed: {0}")]
    Closed(String),
}
