//! The embedded relay as a feed: the export reads it as any consumer does.

use tokio_util::sync::CancellationToken;

use crate::aep::{Capture, Event, Filter};
use crate::export::{Feed, FeedError};
use crate::relay::{From, Hub, OnLoss, Step, Subscriber, Subscription, Then};

/// A subscription to the embedded relay that lasts as long as the process.
#[derive(Debug)]
pub struct Bridge {
    subscriber: Subscriber,
    /// Cancelled once nothing more can be admitted: what is at hand then is the rest.
    finish: CancellationToken,
}

impl Bridge {
    /// Subscribes to what `hub` admits from now on. After `finish` is cancelled the feed ends with the last
    /// admitted event.
    #[must_use]
    pub fn new(hub: &Hub, filter: Filter, ceiling: Option<Capture>, finish: CancellationToken) -> Self {
        let on_loss = OnLoss::GoOn;
        let subscription = Subscription { filter, ceiling, from: From::Now, then: Then::Live, on_loss };
        Self { subscriber: hub.subscribe(subscription), finish }
    }
}

impl Feed for Bridge {
    async fn next(&mut self) -> Result<Option<Vec<Event>>, FeedError> {
        loop {
            let step = tokio::select! {
                biased;
                step = self.subscriber.next() => step,
                () = self.finish.cancelled() => match self.subscriber.ready() {
                    Some(step) => Some(step),
                    None => return Ok(None),
                },
            };
            match step {
                Some(Step::Events(events)) => return Ok(Some(events)),
                Some(Step::Run(block, range)) => {
                    return Ok(Some(block.events().get(range).unwrap_or_default().to_vec()));
                }
                Some(Step::Behind) => {
                    tracing::error!(
                        "the export fell behind what the relay holds: events are lost to the sink"
                    );
                }
                // A replay that nobody asked for, and the end of a subscription that has none.
                Some(Step::Exhausted { .. } | Step::Complete) => {}
                None => return Ok(None),
            }
        }
    }
}
