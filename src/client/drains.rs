//! What is still to be read beside the live stream: the sessions that it didn't resume, then the history.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::config::CatchUp;
use super::positions::{Asked, Origin, Positions};
use super::request::Target;

/// One request beside the live stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Job {
    /// What came after these positions.
    Resume(Vec<Asked>),
    /// Everything held.
    History,
}

/// The requests to come and the one under way.
#[derive(Debug)]
pub(super) struct Drains {
    /// Sessions to be resumed, most recently advanced first.
    rest: VecDeque<Asked>,
    /// Whether the history is to be read.
    history: bool,
    /// When it was last begun to be read.
    last_history: Option<Instant>,
    /// The most sessions in a request.
    most: usize,
    /// How many are tried: halved by a refusal, doubled by a success.
    limit: usize,
    job: Option<Job>,
    /// Whether the attempt at the job raised a position.
    advanced: bool,
    /// Whether the relay has ever said that a replay is complete: then one that isn't said to be isn't.
    says_complete: bool,
    /// Attempts in a row that ended in order, without that word and without anything new.
    fruitless: u32,
}

/// How many fruitless attempts at a replay make it complete, where the relay doesn't say so.
const FRUITLESS: u32 = 3;

impl Drains {
    /// Nothing to read; `most` sessions in a request, but one at least.
    pub(super) fn new(most: usize) -> Self {
        let most = most.max(1);
        Self {
            rest: VecDeque::new(),
            history: false,
            last_history: None,
            most,
            limit: most,
            job: None,
            advanced: false,
            says_complete: false,
            fruitless: 0,
        }
    }

    /// These sessions are to be resumed once the live stream is open.
    pub(super) fn wait_for_live(&mut self, rest: Vec<Asked>) {
        self.rest = rest.into();
    }

    /// The live stream is open.
    pub(super) fn begin(&mut self, history: bool) {
        self.history = history;
        self.limit = self.most;
        self.job = None;
        self.fruitless = 0;
    }

    /// The live stream is gone: with the next one, everything is asked for anew.
    pub(super) fn abandon(&mut self) {
        self.rest.clear();
        self.history = false;
        self.job = None;
    }

    /// How many sessions wait.
    pub(super) fn waiting(&self) -> usize {
        self.rest.len()
    }

    /// What the request under way replays.
    pub(super) fn origin(&self) -> Origin {
        match self.job {
            Some(Job::History) => Origin::History,
            Some(Job::Resume(_)) | None => Origin::Resume,
        }
    }

    /// The attempt under way raised a position.
    pub(super) fn advance(&mut self) {
        self.advanced = true;
    }

    /// The relay said that the replay under way is complete.
    pub(super) fn hear_complete(&mut self) {
        self.says_complete = true;
    }

    /// The request under way ended in order, but without a last word: whether it brought everything. Not every
    /// server has that word, while any of them may be cut off behind a proxy that ends what it passes on in
    /// order.
    pub(super) fn ends_complete(&mut self) -> bool {
        if self.advanced || self.says_complete {
            self.fruitless = 0;
            return false;
        }
        self.fruitless += 1;
        self.fruitless >= FRUITLESS
    }

    /// When the next request is due; `None` when nothing is left to be read.
    pub(super) fn next_due(&self, catch_up: CatchUp) -> Option<Duration> {
        if !self.rest.is_empty() {
            return Some(Duration::ZERO);
        }
        let pace = match catch_up {
            CatchUp::AtMostEvery(pace) if self.history => pace,
            CatchUp::AtMostEvery(_) | CatchUp::Off => return None,
        };
        Some(self.last_history.map_or(Duration::ZERO, |last| pace.saturating_sub(last.elapsed())))
    }

    /// Begins the next request; `None` when nothing is left to be read.
    pub(super) fn take(&mut self, target: &Target) -> Option<Job> {
        self.advanced = false;
        self.job = if self.rest.is_empty() {
            if !self.history {
                return None;
            }
            self.last_history = Some(Instant::now());
            Some(Job::History)
        } else {
            // One session always fits: what may be kept of names is bounded with that in mind.
            let fitting = target.fitting(self.rest.make_contiguous(), self.limit).clamp(1, self.rest.len());
            Some(Job::Resume(self.rest.drain(..fitting).collect()))
        };
        self.job.clone()
    }

    /// The request under way brought everything: what it was.
    pub(super) fn finish(&mut self) -> Option<Job> {
        self.limit = self.limit.saturating_mul(2).min(self.most);
        self.fruitless = 0;
        let job = self.job.take();
        if job == Some(Job::History) {
            self.history = false;
        }
        job
    }

    /// The request under way is to be made again, from where its sessions are by now.
    pub(super) fn put_back(&mut self, positions: &Positions) {
        if let Some(Job::Resume(mut asked)) = self.job.take() {
            positions.refresh(&mut asked);
            self.return_to_rest(asked);
        }
    }

    /// The request under way was refused. A resume set is halved, the history is gone without; a session that
    /// can't be halved is returned, and nothing more of it is asked for.
    pub(super) fn refuse(&mut self) -> Option<Asked> {
        match self.job.take()? {
            Job::History => {
                tracing::warn!(
                    "the relay refuses to give its history: sessions that began in an outage may be missed"
                );
                self.history = false;
                None
            }
            Job::Resume(mut asked) if asked.len() == 1 => asked.pop(),
            Job::Resume(asked) => {
                self.limit = asked.len() / 2;
                self.return_to_rest(asked);
                None
            }
        }
    }

    fn return_to_rest(&mut self, asked: Vec<Asked>) {
        for asked in asked.into_iter().rev() {
            self.rest.push_front(asked);
        }
    }
}
