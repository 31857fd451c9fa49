//! The embedded relay as a feed: the export reads it as any consumer does.

use tokio_util::sync::CancellationToken;

use crate::aep::{Capture, Event, Filter};
use crate::export::{Feed, FeedError};
use crate::relay::{From, Hub, Step, Subscriber, Subscription, Then};

/// A subscription to the embedded relay that lasts as long as the process.
#[derive(Debug)]
pub struct Bridge {
    hub: Hub,
    filter: Filter,
    ceiling: Option<Capture>,
    subscriber: Subscriber,
    /// Cancelled once nothing more can be admitted: what is at hand then is the rest.
    finish: CancellationToken,
}

impl Bridge {
    /// Subscribes to what `hub` admits from now on. After `finish` is cancelled the feed ends with the last
    /// admitted event.
    #[must_use]
    pub fn new(hub: Hub, filter: Filter, ceiling: Option<Capture>, finish: CancellationToken) -> Self {
        let subscriber = subscribe(&hub, &filter, ceiling, From::Now);
        Self { hub, filter, ceiling, subscriber, finish }
    }
}

fn subscribe(hub: &Hub, filter: &Filter, ceiling: Option<Capture>, from: From) -> Subscriber {
    hub.subscribe(Subscription { filter: filter.clone(), ceiling, from, then: Then::Live })
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
                Some(Step::Exhausted { session, earliest }) => {
                    tracing::error!(%session, %earliest, "events were given up before they could be exported");
                }
                Some(Step::Complete | Step::Behind) | None => {
                    // Everything that is still held is read again; what was exported already is told by its key.
                    tracing::error!(
                        "the export fell behind everything that the relay holds: events are lost"
                    );
                    self.subscriber = subscribe(&self.hub, &self.filter, self.ceiling, From::All);
                }
            }
        }
    }
}
