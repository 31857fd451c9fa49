//! A place for one request at a time: waiting for the next attempt, opening, open.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::config::Patience;
use super::connection::{End, Failure, Opening, Wire};
use super::metrics::{BySkip, Metrics, Skip};
use super::positions::{Asked, Origin, Positions};
use super::sse::Item;
use super::update::Lost;
use crate::aep::{Event, Position, ResumeToken};

/// The most events in one update.
const MOST_EVENTS: usize = 256;
/// How many bytes of events an update holds before no further event is added.
const MOST_BYTES: usize = 1024 * 1024;

/// One request at a time, and how its attempts went.
#[derive(Debug)]
pub(super) struct Lane {
    link: Link,
    /// Attempts since the last one that brought something new.
    failures: u32,
    /// The least wait that the server asked for.
    wish: Duration,
    /// The sessions of the request that no loss was told of, by what a marker calls them: a server tells one
    /// loss a session.
    asked: HashMap<String, Asked>,
    /// Whether the server said that nothing follows.
    complete: bool,
    /// Whether the server said that it goes away.
    shutting_down: bool,
    /// Whether a skipped event of this stream is in the log already.
    warned: bool,
}

enum Link {
    Idle,
    Waiting(Instant),
    Opening(Opening),
    Open(Box<Wire>),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "Idle",
            Self::Waiting(_) => "Waiting",
            Self::Opening(_) => "Opening",
            Self::Open(_) => "Open",
        })
    }
}

/// What happened in a lane.
#[derive(Debug)]
pub(super) enum Step {
    /// The wait is over.
    Due,
    Opened,
    Failed(Failure),
    /// Something is at hand.
    More,
    Ended(End),
}

/// What is on its way to the caller.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// The update that is being gathered; what it brings counts once it was taken.
    pub(super) events: Vec<(Event, Origin)>,
    bytes: usize,
    /// Losses to tell, at most one for each session in a request.
    pub(super) lost: VecDeque<Lost>,
}

impl Outbox {
    fn has_room(&self) -> bool {
        // A loss is told before what follows it.
        self.events.len() < MOST_EVENTS && self.bytes < MOST_BYTES && self.lost.is_empty()
    }

    fn put(&mut self, event: Event, origin: Origin) {
        self.bytes = self.bytes.saturating_add(event.as_bytes().len());
        self.events.push((event, origin));
    }

    /// What the caller took.
    pub(super) fn taken(&mut self) -> Vec<(Event, Origin)> {
        self.bytes = 0;
        std::mem::take(&mut self.events)
    }
}

impl Lane {
    /// A lane with nothing to do.
    pub(super) fn idle() -> Self {
        Self {
            link: Link::Idle,
            failures: 0,
            wish: Duration::ZERO,
            asked: HashMap::new(),
            complete: false,
            shutting_down: false,
            warned: false,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.shutting_down
    }

    /// Lets go of whatever is under way.
    pub(super) fn close(&mut self) {
        self.link = Link::Idle;
        self.complete = false;
        self.shutting_down = false;
        self.asked.clear();
    }

    /// Starts a request for the sessions `asked`.
    pub(super) fn open(&mut self, opening: Opening, asked: &[Asked]) {
        self.close();
        self.warned = false;
        // As servers put a session into a comment, which holds one line.
        let marked = |asked: &Asked| (asked.session.replace(char::is_control, "\u{fffd}"), asked.clone());
        self.asked = asked.iter().map(marked).collect();
        self.link = Link::Opening(opening);
    }

    /// The next step is due after `wait`.
    pub(super) fn wait(&mut self, wait: Duration) {
        self.close();
        let now = Instant::now();
        self.link = Link::Waiting(now.checked_add(wait).unwrap_or(now + Duration::from_hours(24)));
    }

    /// The next step is due when the back-off is over: how long that is.
    pub(super) fn back_off(
        &mut self,
        patience: Patience,
        least: Duration,
        random: &mut fastrand::Rng,
    ) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let wait = patience.delay(self.failures, random).max(least).max(self.wish.min(patience.max));
        self.wait(wait);
        wait
    }

    /// The attempts go well.
    pub(super) fn succeed(&mut self) {
        self.failures = 0;
    }

    /// The last `away` was nobody's silence: nobody listened.
    pub(super) fn forgive(&mut self, away: Duration) {
        if let Link::Open(wire) = &mut self.link {
            wire.forgive(away);
        }
    }

    /// Waits for the next step; for ever when there is nothing to do.
    ///
    /// # Cancel safety
    /// Cancel safe: what is under way goes on.
    pub(super) async fn step(&mut self) -> Step {
        match &mut self.link {
            Link::Idle => std::future::pending().await,
            Link::Waiting(until) => {
                sleep_until(*until).await;
                self.link = Link::Idle;
                Step::Due
            }
            Link::Opening(opening) => match opening.await {
                Ok(wire) => {
                    self.wish = Duration::ZERO;
                    self.link = Link::Open(Box::new(wire));
                    Step::Opened
                }
                Err(failure) => {
                    self.link = Link::Idle;
                    Step::Failed(failure)
                }
            },
            Link::Open(wire) => match wire.more().await {
                Ok(()) => Step::More,
                Err(end) => {
                    self.link = Link::Idle;
                    Step::Ended(end)
                }
            },
        }
    }

    /// Takes what is at hand, as far as there is room for it.
    pub(super) fn read(
        &mut self,
        origin: Origin,
        positions: &mut Positions,
        metrics: &Metrics,
        out: &mut Outbox,
    ) {
        let Link::Open(wire) = &mut self.link else { return };
        while out.has_room()
            && !self.complete
            && let Some(item) = wire.item()
        {
            let skipped = match item {
                Item::Data(data) => match Event::parse(data) {
                    Ok(event) => {
                        if origin == Origin::History && !positions.is_owed(&event) {
                            continue;
                        }
                        if positions.is_news(&event) {
                            self.failures = 0;
                        }
                        metrics.events.inc();
                        out.put(event, origin);
                        continue;
                    }
                    Err(error) => (Skip::Illegal, error.code()),
                },
                Item::TooLong => (Skip::TooLong, "too-long"),
                Item::Retry(wait) => {
                    self.wish = wait;
                    continue;
                }
                Item::Comment(b"replay-complete") => {
                    self.complete = origin != Origin::Live;
                    continue;
                }
                Item::Comment(b"shutting-down") => {
                    self.shutting_down = true;
                    continue;
                }
                Item::Comment(text) => {
                    if let Some((session, earliest)) = exhausted(text)
                        && let Some(asked) = self.asked.remove(session)
                        && positions.lose(&asked, earliest)
                    {
                        metrics.losses.inc();
                        let (session, after) = (asked.session, Some(asked.after));
                        out.lost.push_back(Lost { session, after, earliest: Some(earliest) });
                    }
                    continue;
                }
            };
            let (reason, error) = skipped;
            metrics.skipped.get_or_create(&BySkip { reason }).inc();
            // Once a stream, or what a peer sends would fill the log.
            if !std::mem::replace(&mut self.warned, true) {
                tracing::warn!(error, "an event of the relay is skipped");
            }
        }
    }
}

/// The session and the earliest position of `replay-exhausted {session} {epoch}:{seq}`.
///
/// Spec: AEP-0003 §3.3, §5.
fn exhausted(comment: &[u8]) -> Option<(&str, Position)> {
    let text = std::str::from_utf8(comment).ok()?.strip_prefix("replay-exhausted ")?;
    let (session, position) = text.rsplit_once(' ')?;
    // The form of an event's id, of a session that holds no colon.
    let token = ResumeToken::from_event_id(&format!("s:{position}")).filter(|token| token.session == "s")?;
    Some((session, token.position?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_is_split_from_the_right() {
        let found = |text: &'static str| exhausted(text.as_bytes());
        assert_eq!(found("replay-exhausted a b: 1:2 3:4"), Some(("a b: 1:2", Position::new(3, 4))));
        for text in
            ["replay-exhausted", "replay-exhausted s", "replay-exhausted s 1", "replay-exhausted s 1:x"]
        {
            assert_eq!(found(text), None, "{text}");
        }
        assert_eq!(found("replay-exhausted s 1:2:3"), None);
        assert_eq!(exhausted(b"replay-exhausted \xff 1:2"), None);
    }
}
