//! A running sink.

use std::collections::VecDeque;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::outlet::Outlet;
use super::{Ends, Summary};
use crate::aep::Event;
use crate::aep::capture::down_level;
use crate::export::breaker::Permit;
use crate::export::dead_letter::{self, Kept, Letter};
use crate::export::lane::{Departure, Parcel};
use crate::export::retry::wall_clock;
use crate::export::seen::{Fingerprint, FingerprintKey};
use crate::export::sink::{Delivery, DeliveryError, Reason, Sink};
use crate::export::spool::{Batch, Spool};

/// The lane that all events share when the sink is one line of events.
const ONE_LANE: Fingerprint = Fingerprint(0);

pub(super) struct Run {
    outlet: Outlet,
    /// Of the lanes' names.
    key: FingerprintKey,
    /// What is left of the last batch from the spool.
    backlog: VecDeque<(u64, Event)>,
    /// The number after the last one that was looked at, and that after the last batch.
    looked: u64,
    fetched: u64,
    in_flight: FuturesUnordered<Pin<Box<dyn Future<Output = Arrival> + Send>>>,
    summary: Summary,
    /// Nothing more comes into the spool.
    finishing: bool,
    /// What the sink doesn't take now is left to the next start.
    leaving: bool,
    /// When the drain is over, once it has begun.
    stopping: Option<Instant>,
    closed: Option<Reason>,
}

/// What a run came to.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) summary: Summary,
    /// The sink went away for good.
    pub(super) closed: Option<Reason>,
}

/// The end of an attempt.
struct Arrival {
    parcel: Parcel,
    permit: Permit,
    delivery: Delivery,
    first_attempt: SystemTime,
    result: Result<(), DeliveryError>,
}

impl Run {
    pub(super) fn new(outlet: Outlet) -> Self {
        let place = outlet.reader.place();
        Self {
            outlet,
            key: FingerprintKey::random(),
            backlog: VecDeque::new(),
            looked: place,
            fetched: place,
            in_flight: FuturesUnordered::new(),
            summary: Summary::default(),
            finishing: false,
            leaving: false,
            stopping: None,
            closed: None,
        }
    }

    pub(super) async fn until_done(mut self, spool: Spool, ends: Ends) -> Done {
        loop {
            let now = Instant::now();
            self.admit(now);
            self.launch(now);
            self.outlet.keeper.start(now);
            self.outlet.outbox.start();
            self.outlet.hold.advance(self.outlet.keeper.settled());
            self.gauge(&spool);
            if self.is_done(now) {
                break;
            }
            let pulls = self.stopping.is_none() && self.backlog.is_empty() && self.outlet.lanes.has_room();
            let wake = self.wakes_at();
            tokio::select! {
                () = ends.give_up.cancelled(), if self.stopping.is_none() => self.stop(),
                () = ends.finish.cancelled(), if !self.finishing => self.finish(&ends),
                Some(arrival) = self.in_flight.next() => self.settle(arrival),
                batch = self.outlet.outbox.finished() => self.posted(batch),
                () = self.outlet.keeper.finished() => {}
                batch = self.outlet.reader.next(), if pulls => self.pulled(batch),
                () = until(wake) => {}
            }
        }
        self.end(&spool).await
    }

    /// Leaves everything as a restart wants to find it. Attempts that are cut off here stay unhandled.
    async fn end(mut self, spool: &Spool) -> Done {
        self.in_flight.clear();
        if self.outlet.outbox.is_sending() {
            let deadline = self.stopping.unwrap_or_else(Instant::now);
            if let Ok(batch) = timeout_at(deadline, self.outlet.outbox.finished()).await {
                self.posted(batch);
            }
        }
        self.outlet.keeper.close().await;
        self.outlet.hold.advance(self.outlet.keeper.settled());
        self.gauge(spool);
        let held = self.outlet.lanes.held().0.saturating_add(self.backlog.len());
        let unread = spool.end().saturating_sub(self.fetched);
        self.summary.unhandled = u64::try_from(held).unwrap_or(u64::MAX).saturating_add(unread);
        Done { summary: self.summary, closed: self.closed }
    }

    fn is_done(&self, now: Instant) -> bool {
        let idle = self.in_flight.is_empty() && self.outlet.outbox.is_idle();
        match self.stopping {
            _ if self.closed.is_some() => true,
            Some(deadline) => idle || deadline <= now,
            None if !self.finishing || !idle => false,
            None => {
                let lanes = &self.outlet.lanes;
                let read = self.backlog.is_empty() && !self.outlet.reader.ready();
                // What a restart finds again needn't be waited for.
                let left =
                    self.leaving && lanes.is_stuck() && (read || !lanes.has_room() || !lanes.is_flowing());
                left || (read && lanes.held().0 == 0)
            }
        }
    }

    /// Nothing more comes into the spool. What may be left on disk is tried once more at most.
    fn finish(&mut self, ends: &Ends) {
        self.finishing = true;
        self.leaving = self.outlet.lasting && ends.leave.is_cancelled();
        if self.leaving {
            self.outlet.lanes.stop();
        } else {
            self.outlet.lanes.hurry();
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        match self.stopping {
            Some(deadline) => Some(deadline),
            None => {
                let Outlet { lanes, keeper, .. } = &self.outlet;
                [lanes.wakes_at(keeper.in_doubt()), keeper.wakes_at()].into_iter().flatten().min()
            }
        }
    }

    fn stop(&mut self) {
        let now = Instant::now();
        self.stopping = Some(now.checked_add(self.outlet.drain).unwrap_or(now));
        self.outlet.lanes.stop();
        tracing::info!(pending = self.outlet.lanes.held().0, "the sink's deliveries are stopping");
    }

    fn pulled(&mut self, batch: Batch) {
        self.backlog.extend(batch.events);
        self.fetched = batch.next;
    }

    /// Moves events into the lanes as long as there is room, but for those that are done with or not wanted.
    fn admit(&mut self, now: Instant) {
        while self.outlet.lanes.has_room()
            && let Some((number, event)) = self.backlog.pop_front()
        {
            let Outlet { filter, ceiling, lanes, keeper, one_lane, .. } = &mut self.outlet;
            let wanted = !keeper.cursor().is_done(number) && filter.matches(&event);
            let end = if wanted { number } else { number.saturating_add(1) };
            if self.looked < end {
                // Numbers in between were lost to damage: nothing will come for them.
                keeper.skip(self.looked..end);
            }
            self.looked = number.saturating_add(1);
            if !wanted {
                continue;
            }
            let event = match ceiling {
                Some((ceiling, registry)) => down_level(&event, *ceiling, registry),
                None => event,
            };
            let lane = if *one_lane { ONE_LANE } else { self.key.session(event.session_key()) };
            lanes.admit(lane, number, event, now);
        }
        if self.backlog.is_empty() && self.looked < self.fetched {
            self.outlet.keeper.skip(self.looked..self.fetched);
            self.looked = self.fetched;
        }
    }

    /// Sends whatever may be sent.
    fn launch(&mut self, now: Instant) {
        while let Some(departure) = self.outlet.lanes.next(now, wall_clock(), self.outlet.keeper.in_doubt()) {
            let sink = Arc::clone(&self.outlet.sink);
            self.in_flight.push(Box::pin(async move {
                let Departure { parcel, permit, delivery, first_attempt } = departure;
                let result = sink.deliver(&delivery).await;
                Arrival { parcel, permit, delivery, first_attempt, result }
            }));
        }
    }

    fn settle(&mut self, arrival: Arrival) {
        let Arrival { parcel, permit, delivery, first_attempt, result } = arrival;
        let now = Instant::now();
        let lanes = &mut self.outlet.lanes;
        match result {
            Ok(()) => {
                trace(&delivery, "delivered");
                let count = u64::try_from(delivery.events.len()).unwrap_or(u64::MAX);
                self.summary.delivered = self.summary.delivered.saturating_add(count);
                self.outlet.metrics.delivered.inc_by(count);
                lanes.answered(permit);
                lanes.grow();
                self.handled(&parcel, now);
            }
            Err(DeliveryError::Rejected { reason, status, detail }) => {
                match reason {
                    Reason::Mapping => lanes.withdrawn(permit, now),
                    _ => lanes.answered(permit),
                }
                let Delivery { events, attempt: attempts } = delivery;
                match <[Event; 1]>::try_from(events) {
                    Ok([event]) => {
                        let (first, last) = (first_attempt, wall_clock());
                        let letter = Letter { event, reason, status, detail, attempts, first, last };
                        self.outlet.outbox.post(parcel, letter);
                    }
                    Err(_) => {
                        self.outlet.metrics.batches_split.inc();
                        lanes.split(&parcel, reason, now);
                    }
                }
            }
            Err(error @ (DeliveryError::Transient { .. } | DeliveryError::Misconfigured { .. })) => {
                trace(&delivery, error.reason().as_str());
                self.outlet.metrics.retried(error.reason());
                lanes.failed(&parcel, permit, &error, now);
            }
            Err(DeliveryError::Closed { reason }) => self.closed = Some(reason),
        }
    }

    /// Letters are kept, or not.
    fn posted(&mut self, batch: dead_letter::Batch) {
        let now = Instant::now();
        for (parcel, letter, kept) in batch.letters {
            if kept == Kept::Yes {
                self.summary.dead_letters = self.summary.dead_letters.saturating_add(1);
                self.outlet.metrics.dead_lettered(letter.reason);
                self.handled(&parcel, now);
            } else {
                self.outlet.metrics.retried(Reason::DeadLetterStore);
                self.outlet.lanes.back_off(&parcel, now);
            }
        }
        self.outlet.metrics.dead_letters_dropped.inc_by(batch.dropped);
    }

    /// The events of the parcel are done with, for good.
    fn handled(&mut self, parcel: &Parcel, now: Instant) {
        let numbers = self.outlet.lanes.handled(parcel, now);
        self.outlet.keeper.delivered(numbers.into_iter());
    }

    fn gauge(&self, spool: &Spool) {
        let (events, bytes) = self.outlet.lanes.held();
        let metrics = &self.outlet.metrics;
        metrics.pending_events.set(i64::try_from(events).unwrap_or(i64::MAX));
        metrics.pending_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        metrics.paused.set(i64::from(!self.outlet.lanes.is_flowing()));
        let lag = spool.end().saturating_sub(self.outlet.keeper.cursor().next());
        metrics.lag_events.set(i64::try_from(lag).unwrap_or(i64::MAX));
    }
}

/// Per event, and only where somebody looks.
fn trace(delivery: &Delivery, outcome: &str) {
    if tracing::enabled!(tracing::Level::TRACE) {
        for event in &delivery.events {
            tracing::trace!(id = event.id(), attempt = delivery.attempt, outcome, "attempt");
        }
    }
}

async fn until(wake: Option<Instant>) {
    match wake {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
