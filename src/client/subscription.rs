//! A subscription that outlives its connections.
//!
//! Two requests at most are open: the live stream, and beside it one drain at a time of what was missed.
//!
//! ```text
//!          ┌────────── wait ◄──────────┐
//!          ▼                           │ ended, silent, refused, unreachable
//!   open the live stream ──────────► live ──► events
//!     from=newest sessions             │ once it is open, so that nothing falls between
//!     (nothing known: from=all)        ▼
//!                       drain the older sessions, then the history ──► events
//! ```
//!
//! A refused resume set is halved and asked for again at once: on the live stream down to no position at all,
//! the rest going to the drains; there down to single sessions, of which one that is refused is forgotten and
//! told as lost. Only when the relay refuses a request without any position is the subscription itself at
//! fault. After an outage the whole history is read once ([`super::CatchUp`]) for the sessions that began in
//! it: what was resumed by position is dropped as it is read. A relay that refuses that is gone without.
//!
//! Attempts are spaced by exponential back-off with full jitter, which something new resets, not a connection
//! nor the events of an overlap. A server's `retry:` and `Retry-After` can only make a wait longer, the first
//! up to the longest back-off, the second up to five minutes.
//!
//! Spec: AEP-0001 §7.6, AEP-0003 §5.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::config::{CatchUp, ConfigError, Patience, SubscribeConfig};
use super::connection::{End, Failure, Http};
use super::drains::{Drains, Job};
use super::lane::{Lane, Outbox, Step};
use super::metrics::{ByCause, Metrics};
use super::positions::{Origin, Positions};
use super::request::{From, Target, Then};
use super::status::{Board, Cause, Status, StatusHandle};
use super::update::{Lost, ResumePoint, Update};

/// A relay's events, from where a consumer left off, for as long as it is asked for them.
pub struct Subscription {
    http: Http,
    target: Target,
    patience: Patience,
    max_resume: usize,
    catch_up: CatchUp,
    metrics: Metrics,
    board: Board,
    random: fastrand::Rng,
    positions: Positions,
    /// What the caller has, or is about to have.
    out: Outbox,
    live: Lane,
    /// Where the live stream starts, or is to start.
    from: From,
    /// The most sessions that the live stream resumes: halved when the relay refuses more.
    live_limit: usize,
    /// Whether the relay refused to give everything it has at the start.
    all_is_refused: bool,
    /// Whether a session may have begun and gone unseen.
    outage: bool,
    drain: Lane,
    drains: Drains,
    /// Which lane is read first, in turns.
    drain_first: bool,
    /// What the log says is wrong already.
    logged: Option<Cause>,
    /// When the caller last stopped listening: silence that nobody listens to isn't the relay's.
    left: Arc<Mutex<Instant>>,
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription")
            .field("live", &self.live)
            .field("drain", &self.drain)
            .finish_non_exhaustive()
    }
}

/// Says when the caller stops listening, by taking an update or by dropping the future.
struct Listening(Arc<Mutex<Instant>>);

impl Drop for Listening {
    fn drop(&mut self) {
        *self.0.lock() = Instant::now();
    }
}

impl Subscription {
    /// A subscription that starts after the saved positions, given with the most recently advanced last; with
    /// none it starts with everything that the relay has. At most 10 000 positions are kept, the most recent
    /// ones. Nothing is sent before [`Subscription::next`].
    ///
    /// # Errors
    /// When the configuration can't work: the URL, the size of the filter, the certificates.
    pub fn new(
        config: &SubscribeConfig,
        resume: impl IntoIterator<Item = ResumePoint>,
        metrics: Metrics,
    ) -> Result<Self, ConfigError> {
        let positions = Positions::new(resume);
        let mut live = Lane::idle();
        live.wait(Duration::ZERO);
        Ok(Self {
            http: Http::new(config)?,
            target: Target::new(config)?,
            patience: config.patience,
            max_resume: config.max_resume,
            catch_up: config.catch_up,
            metrics,
            board: Board::new(),
            random: fastrand::Rng::new(),
            outage: !positions.is_empty(),
            positions,
            out: Outbox::default(),
            live,
            from: From::Now,
            live_limit: config.max_resume,
            all_is_refused: false,
            drain: Lane::idle(),
            drains: Drains::new(config.max_resume),
            drain_first: false,
            logged: None,
            left: Arc::new(Mutex::new(Instant::now())),
        })
    }

    /// A view of what the subscription is doing.
    #[must_use]
    pub fn status(&self) -> StatusHandle {
        self.board.handle()
    }

    /// The next events, or the next loss. To ask is to say that the update before was handled: sessions are
    /// resumed after what it held. It never gives up; what is wrong is in [`Subscription::status`].
    ///
    /// An event may come more than once, told by `(source, id)`.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future before it is ready loses no event, and what is under way goes on with
    /// the next call.
    pub async fn next(&mut self) -> Update {
        for (event, origin) in self.out.taken() {
            let rose = self.positions.take(&event, origin);
            if rose && origin != Origin::Live {
                self.drains.advance();
            }
        }
        let away = self.left.lock().elapsed();
        self.live.forgive(away);
        self.drain.forgive(away);
        let _listening = Listening(Arc::clone(&self.left));
        loop {
            if let Some(lost) = self.out.lost.pop_front() {
                return Update::Lost(lost);
            }
            self.read();
            if !self.out.events.is_empty() {
                return Update::Events(self.out.events.iter().map(|(event, _)| event.clone()).collect());
            }
            if self.out.lost.is_empty() {
                self.turn().await;
            }
        }
    }

    /// Takes what is at hand.
    fn read(&mut self) {
        let Self { live, drain, positions, metrics, out, .. } = self;
        let origin = self.drains.origin();
        self.drain_first = !self.drain_first;
        if self.drain_first {
            drain.read(origin, positions, metrics, out);
            live.read(Origin::Live, positions, metrics, out);
        } else {
            live.read(Origin::Live, positions, metrics, out);
            drain.read(origin, positions, metrics, out);
        }
    }

    /// Waits for one thing to happen and goes on from it. Everything that was read has been taken by now.
    async fn turn(&mut self) {
        if self.drain.is_complete() {
            self.drains.hear_complete();
            return self.drained();
        }
        // A stream that always has something at hand, and nothing to give, mustn't keep the thread.
        tokio::task::coop::consume_budget().await;
        tokio::select! {
            step = self.live.step() => self.on_live(step),
            step = self.drain.step() => self.on_drain(step),
        }
    }

    fn on_live(&mut self, step: Step) {
        match step {
            Step::Due => self.connect(),
            Step::Opened => self.opened(),
            Step::More => {}
            Step::Failed(Failure::Refused(status)) => self.refused(status),
            Step::Failed(Failure::Failed { cause, retry_after, detail }) => {
                self.disconnected(cause, retry_after.unwrap_or_default(), &detail);
                self.board.set(Status::Failing(cause));
            }
            Step::Ended(End { cause, detail }) => {
                let cause = if self.live.is_shutting_down() { Cause::ShuttingDown } else { cause };
                self.outage = true;
                self.disconnected(cause, Duration::ZERO, &detail);
                self.board.set(Status::Connecting);
            }
        }
    }

    /// Opens the live stream with as many of the newest sessions as it takes; the others wait for a drain.
    fn connect(&mut self) {
        let mut newest = self.positions.newest();
        self.from = if newest.is_empty() {
            if self.all_is_refused { From::Now } else { From::All }
        } else {
            let fitting = self.target.fitting(&newest, self.live_limit);
            self.drains.wait_for_live(newest.split_off(fitting));
            if newest.is_empty() { From::Now } else { From::Positions(newest) }
        };
        let url = self.target.url(&self.from, Then::Live);
        self.live.open(self.http.open(url), self.from.asked());
    }

    fn opened(&mut self) {
        self.logged = None;
        self.all_is_refused = false;
        let history = self.outage && self.from != From::All && self.catch_up != CatchUp::Off;
        self.positions.open(self.from.asked(), history);
        self.drains.begin(history);
        tracing::info!(
            resumed = self.from.asked().len(),
            draining = self.drains.waiting(),
            history,
            "subscribed to the relay"
        );
        self.drain_next();
    }

    /// A 4xx on the live stream: less is asked for, at once. When there is nothing less, the request is wrong.
    fn refused(&mut self, status: u16) {
        match &self.from {
            From::All => self.all_is_refused = true,
            From::Positions(asked) => {
                self.live_limit = asked.len() / 2;
                self.metrics.refused_resumes.inc();
                tracing::debug!(status, limit = self.live_limit, "the relay takes fewer positions");
            }
            From::Now => {
                self.all_is_refused = false;
                self.live_limit = self.max_resume;
                self.disconnected(Cause::Refused, Duration::ZERO, &status.to_string());
                return self.board.set(Status::Failing(Cause::Refused));
            }
        }
        self.connect();
    }

    /// There is no live stream: what is under way beside it waits as well, until there is one again.
    fn disconnected(&mut self, cause: Cause, least: Duration, detail: &str) {
        self.metrics.disconnects.get_or_create(&ByCause { cause }).inc();
        self.drain.close();
        self.drains.abandon();
        let least = if cause.is_misconfiguration() { self.patience.max.max(least) } else { least };
        let wait = self.live.back_off(self.patience, least, &mut self.random);
        self.log(cause, wait, detail);
    }

    /// Says what is wrong when that is new.
    fn log(&mut self, cause: Cause, wait: Duration, detail: &str) {
        let reason = cause.as_str();
        if self.logged.replace(cause) == Some(cause) {
            tracing::debug!(reason, detail, ?wait, "the relay still can't be read");
        } else if cause.is_misconfiguration() {
            tracing::error!(reason, detail, "the relay can't be read until a person mends it");
        } else if matches!(cause, Cause::Ended | Cause::ShuttingDown) {
            tracing::info!(reason, "the relay ended the stream");
        } else {
            tracing::warn!(reason, detail, ?wait, "the relay can't be read: more attempts follow");
        }
    }

    fn on_drain(&mut self, step: Step) {
        match step {
            Step::Due => self.open_drain(),
            Step::Opened | Step::More => {}
            Step::Failed(Failure::Refused(status)) => self.drain_refused(status),
            Step::Failed(Failure::Failed { cause, retry_after, detail }) => {
                self.retry_drain(cause, retry_after.unwrap_or_default(), &detail);
            }
            Step::Ended(End { cause: Cause::Ended, .. })
                if !self.drain.is_shutting_down() && self.drains.ends_complete() =>
            {
                self.drained();
            }
            Step::Ended(End { cause, detail }) => self.retry_drain(cause, Duration::ZERO, &detail),
        }
    }

    /// Goes on with the next drain, if there is one.
    fn drain_next(&mut self) {
        match self.drains.next_due(self.catch_up) {
            Some(wait) => {
                self.drain.wait(wait);
                self.board.set(Status::Draining);
            }
            None => {
                self.drain.close();
                self.positions.settle_all();
                self.outage = false;
                self.board.set(Status::Live);
            }
        }
    }

    fn open_drain(&mut self) {
        let from = match self.drains.take(&self.target) {
            Some(Job::Resume(asked)) => From::Positions(asked),
            Some(Job::History) => From::All,
            None => return self.drain_next(),
        };
        let opening = self.http.open(self.target.url(&from, Then::End));
        self.drain.open(opening, from.asked());
    }

    /// Everything that was asked for in a drain has been taken.
    fn drained(&mut self) {
        match self.drains.finish() {
            Some(Job::Resume(asked)) => self.positions.settle(&asked),
            Some(Job::History) | None => {}
        }
        self.drain.succeed();
        self.drain_next();
    }

    fn drain_refused(&mut self, status: u16) {
        if self.drains.origin() == Origin::Resume {
            self.metrics.refused_resumes.inc();
        }
        let Some(refused) = self.drains.refuse() else { return self.drain_next() };
        // One session, and the relay takes no position of it.
        tracing::warn!(status, "the relay refuses to resume a session: some of it may be lost");
        self.positions.forget(&refused.session);
        self.metrics.losses.inc();
        let (session, after) = (refused.session, Some(refused.after));
        self.out.lost.push_back(Lost { session, after, earliest: None });
        // Each of them is a request: a relay that refuses them all isn't to be flooded.
        self.drain.back_off(self.patience, Duration::ZERO, &mut self.random);
        self.board.set(Status::Draining);
    }

    fn retry_drain(&mut self, cause: Cause, least: Duration, detail: &str) {
        self.metrics.drain_failures.get_or_create(&ByCause { cause }).inc();
        self.drains.put_back(&self.positions);
        let least = if cause.is_misconfiguration() { self.patience.max.max(least) } else { least };
        let wait = self.drain.back_off(self.patience, least, &mut self.random);
        tracing::debug!(reason = cause.as_str(), detail, ?wait, "missed events can't be read yet");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_can_move_between_threads() {
        fn is_send<T: Send>(_: &T) {}
        let config = SubscribeConfig::new("http://127.0.0.1:1".parse().unwrap());
        let mut subscription = Subscription::new(&config, [], Metrics::default()).unwrap();
        is_send(&subscription);
        is_send(&subscription.next());
    }

    #[test]
    fn certificates_that_are_none_are_refused() {
        let mut config = SubscribeConfig::new("https://h".parse().unwrap());
        for pem in ["", "garbage", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"] {
            config.ca = Some(pem.into());
            let refused = Subscription::new(&config, [], Metrics::default()).unwrap_err();
            assert!(matches!(refused, ConfigError::Certificates), "{pem:?}: {refused}");
        }
    }
}
