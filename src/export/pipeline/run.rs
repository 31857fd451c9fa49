//! A running export.

use std::collections::{HashSet, VecDeque};
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{ExportConfig, ExportError, Summary};
use crate::aep::Event;
use crate::export::breaker::Permit;
use crate::export::checkpoint::{Keeper, Record};
use crate::export::dead_letter::{Letter, Outbox};
use crate::export::feed::{Feed, FeedError};
use crate::export::lane::{Departure, Handled, Lanes};
use crate::export::metrics::Metrics;
use crate::export::reached::Reached;
use crate::export::retry::wall_clock;
use crate::export::seen::Fingerprint;
use crate::export::sink::{AnySink, Delivery, DeliveryError, Reason, Sink};

/// The lane that all events share when the sink is one line of events.
const ONE_LANE: Fingerprint = Fingerprint(0);

pub(super) struct Run {
    metrics: Metrics,
    sink: Arc<AnySink>,
    lanes: Lanes,
    keeper: Keeper,
    outbox: Outbox,
    drain: Duration,
    one_lane: bool,
    reached: Reached,
    /// The events in the lanes.
    pending: HashSet<Fingerprint>,
    /// What is left of the feed's last batch.
    backlog: VecDeque<Event>,
    in_flight: FuturesUnordered<Pin<Box<dyn Future<Output = Arrival> + Send>>>,
    summary: Summary,
    /// The feed has ended, with or without an error.
    ended: bool,
    feed_error: Option<FeedError>,
    /// When the drain is over, once it has begun.
    stopping: Option<Instant>,
    closed: Option<Reason>,
}

/// The end of an attempt.
struct Arrival {
    lane: Fingerprint,
    permit: Permit,
    delivery: Delivery,
    first_attempt: SystemTime,
    result: Result<(), DeliveryError>,
}

impl Run {
    pub(super) fn new(
        config: &ExportConfig,
        metrics: Metrics,
        sink: Arc<AnySink>,
        lanes: Lanes,
        keeper: Keeper,
        outbox: Outbox,
    ) -> Self {
        Self {
            metrics,
            sink,
            lanes,
            keeper,
            outbox,
            drain: config.drain,
            one_lane: config.sink.is_one_line_of_events(),
            reached: Reached::default(),
            pending: HashSet::new(),
            backlog: VecDeque::new(),
            in_flight: FuturesUnordered::new(),
            summary: Summary::default(),
            ended: false,
            feed_error: None,
            stopping: None,
            closed: None,
        }
    }

    pub(super) async fn until_done(
        mut self,
        mut feed: impl Feed,
        shutdown: CancellationToken,
    ) -> Result<Summary, ExportError> {
        loop {
            let now = Instant::now();
            self.admit();
            self.launch(now);
            self.keeper.start(now);
            self.outbox.start();
            self.gauge();
            if self.is_done(now) {
                break;
            }
            let pulls =
                !self.ended && self.stopping.is_none() && self.backlog.is_empty() && self.lanes.has_room();
            let wake = self.wakes_at();
            tokio::select! {
                () = shutdown.cancelled(), if self.stopping.is_none() => self.stop(),
                Some(arrival) = self.in_flight.next() => self.settle(arrival),
                batch = self.outbox.finished() => self.posted(batch.letters, batch.result),
                () = self.keeper.finished() => {}
                batch = async { feed.next().await }, if pulls => self.pulled(batch),
                () = until(wake) => {}
            }
        }
        // Attempts that are cut off here stay unhandled, and are delivered after a restart.
        self.in_flight.clear();
        if self.outbox.is_writing() {
            let batch = self.outbox.finished().await;
            self.posted(batch.letters, batch.result);
        }
        self.keeper.close().await;
        self.gauge();
        let left = self.lanes.held().0.saturating_add(self.backlog.len());
        self.summary.unhandled = u64::try_from(left).unwrap_or(u64::MAX);
        match (self.closed, self.feed_error) {
            (Some(reason), _) => Err(ExportError::Closed { reason, summary: self.summary }),
            (None, Some(error)) => Err(error.into()),
            (None, None) => Ok(self.summary),
        }
    }

    fn is_done(&self, now: Instant) -> bool {
        let idle = self.in_flight.is_empty() && self.outbox.is_idle();
        match self.stopping {
            _ if self.closed.is_some() => true,
            Some(deadline) => idle || deadline <= now,
            None => self.ended && idle && self.backlog.is_empty() && self.lanes.held().0 == 0,
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        match self.stopping {
            Some(deadline) => Some(deadline),
            None => [self.lanes.wakes_at(), self.keeper.wakes_at()].into_iter().flatten().min(),
        }
    }

    fn stop(&mut self) {
        let now = Instant::now();
        self.stopping = Some(now.checked_add(self.drain).unwrap_or(now));
        self.lanes.stop();
        tracing::info!(pending = self.lanes.held().0, "export is stopping");
    }

    fn pulled(&mut self, batch: Result<Option<Vec<Event>>, FeedError>) {
        match batch {
            Ok(Some(events)) => self.backlog.extend(events),
            Ok(None) => self.ended = true,
            Err(error) => {
                self.ended = true;
                self.feed_error = Some(error);
            }
        }
    }

    /// Moves events into the lanes as long as there is room, but for those known already.
    fn admit(&mut self) {
        while self.lanes.has_room()
            && let Some(event) = self.backlog.pop_front()
        {
            let fingerprint = self.keeper.checkpoint.seen.fingerprint(&event);
            if self.pending.contains(&fingerprint) || self.keeper.checkpoint.seen.recall(fingerprint) {
                self.summary.duplicates = self.summary.duplicates.saturating_add(1);
                self.metrics.duplicates.inc();
                continue;
            }
            let session = self.session(&event);
            if let Some(position) = event.position() {
                self.reached.admitted(session, position);
            }
            self.pending.insert(fingerprint);
            self.lanes.admit(if self.one_lane { ONE_LANE } else { session }, event, fingerprint);
        }
    }

    fn session(&self, event: &Event) -> Fingerprint {
        self.keeper.checkpoint.seen.key().session(event.session_key())
    }

    /// Sends whatever may be sent.
    fn launch(&mut self, now: Instant) {
        while let Some(departure) = self.lanes.next(now, wall_clock(), self.keeper.in_doubt()) {
            let sink = Arc::clone(&self.sink);
            self.in_flight.push(Box::pin(async move {
                let Departure { lane, permit, delivery, first_attempt } = departure;
                let result = sink.deliver(&delivery).await;
                Arrival { lane, permit, delivery, first_attempt, result }
            }));
        }
    }

    fn settle(&mut self, arrival: Arrival) {
        let Arrival { lane, permit, delivery, first_attempt, result } = arrival;
        let now = Instant::now();
        match result {
            Ok(()) => {
                tracing::trace!(id = delivery.event.id(), attempt = delivery.attempt, "delivered");
                self.summary.delivered = self.summary.delivered.saturating_add(1);
                self.metrics.delivered.inc();
                self.lanes.answered(permit);
                self.handled(lane);
            }
            Err(DeliveryError::Rejected { reason, status, detail }) => {
                match reason {
                    Reason::Mapping => self.lanes.withdrawn(permit, now),
                    _ => self.lanes.answered(permit),
                }
                let Delivery { event, attempt: attempts } = delivery;
                let (first, last) = (first_attempt, wall_clock());
                self.outbox.post(lane, Letter { event, reason, status, detail, attempts, first, last });
            }
            Err(error @ (DeliveryError::Transient { .. } | DeliveryError::Misconfigured { .. })) => {
                tracing::trace!(id = delivery.event.id(), attempt = delivery.attempt, %error, "not delivered");
                self.metrics.retried(error.reason());
                self.lanes.failed(lane, permit, &error, now);
            }
            Err(DeliveryError::Closed { reason }) => self.closed = Some(reason),
        }
    }

    /// Letters were written, or not.
    fn posted(&mut self, letters: Vec<(Fingerprint, Letter)>, result: std::io::Result<u64>) {
        let now = Instant::now();
        for (lane, letter) in letters {
            if result.is_ok() {
                self.summary.dead_letters = self.summary.dead_letters.saturating_add(1);
                self.metrics.dead_lettered(letter.reason);
                self.handled(lane);
            } else {
                self.metrics.retried(Reason::DeadLetterStore);
                self.lanes.back_off(lane, now);
            }
        }
        self.metrics.dead_letters_dropped.inc_by(result.unwrap_or(0));
    }

    /// The event in flight in that lane is done with, for good.
    fn handled(&mut self, lane: Fingerprint) {
        if let Some(Handled { event, fingerprint }) = self.lanes.handled(lane) {
            self.pending.remove(&fingerprint);
            let session = self.session(&event);
            let reached = event.position().and_then(|position| self.reached.handled(session, position));
            self.keeper.record(Record::of(&event, fingerprint, reached));
        }
    }

    fn gauge(&self) {
        let (events, bytes) = self.lanes.held();
        self.metrics.pending_events.set(i64::try_from(events).unwrap_or(i64::MAX));
        self.metrics.pending_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        self.metrics.sink_paused.set(i64::from(!self.lanes.is_flowing()));
    }
}

async fn until(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
