//! How an export is set up.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::dead_letter;
use super::retry::RetryPolicy;
use super::sink::{SinkOptions, Target};
use super::spool::{SpoolConfig, SpoolSync};
use crate::aep::{Capture, Filter};

/// How an export is set up.
#[derive(Debug, Clone)]
pub struct ExportConfig {
    /// Where events go. Names are distinct.
    pub sinks: Vec<SinkConfig>,
    /// Where the spool, the sinks' cursors and dead letters are kept; in memory only without one.
    pub state_dir: Option<PathBuf>,
    /// What the spool takes.
    pub spool: SpoolConfig,
    /// How long events are still delivered after the order to stop.
    pub drain: Duration,
}

impl ExportConfig {
    /// The defaults with one sink, `default`: nothing kept on disk, 64 MiB of events in memory, 50 000 events
    /// remembered to tell duplicates, 10 s to stop.
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            sinks: vec![SinkConfig::new(SinkName::default(), target)],
            state_dir: None,
            spool: SpoolConfig {
                sync: SpoolSync::Write,
                max_bytes: 64 << 20,
                keep_bytes: 8 << 20,
                recent_bytes: 8 << 20,
                dedupe: bound(50_000),
                keeps_positions: false,
            },
            drain: Duration::from_secs(10),
        }
    }
}

/// How one sink is set up.
#[derive(Debug, Clone)]
pub struct SinkConfig {
    /// What it is called in files, logs and metrics.
    pub name: SinkName,
    /// Where events go.
    pub target: Target,
    /// What is set beside that.
    pub options: SinkOptions,
    /// Which events it gets.
    pub filter: Filter,
    /// How much of their content; `None` for all of it.
    pub ceiling: Option<Capture>,
    /// How long to wait between attempts.
    pub retry: RetryPolicy,
    /// How many requests are in flight at once.
    pub concurrency: NonZeroUsize,
    /// How many events go together at most, in a mode that can hold several; `None` for what suits the sink.
    pub batch: Option<NonZeroUsize>,
    /// How long an event may wait for others to go with.
    pub linger: Duration,
    /// How many events are held between the spool and the sink; when full, the spool isn't read for it.
    pub max_pending: NonZeroUsize,
    /// How much memory these take, in bytes, beyond which the spool isn't read for it.
    pub max_pending_bytes: NonZeroUsize,
    /// How many bytes of dead letters are kept.
    pub max_dead_letters: u64,
    /// Where dead letters go instead of into a file.
    pub dead_letter_sink: Option<Target>,
}

impl SinkConfig {
    /// The defaults: every event, one a request, 16 requests in flight, attempts of 30 s at most, 1000 events or
    /// 16 MiB held, 64 MiB of dead letters.
    #[must_use]
    pub fn new(name: SinkName, target: Target) -> Self {
        Self {
            name,
            target,
            options: SinkOptions::default(),
            filter: Filter::default(),
            ceiling: None,
            retry: RetryPolicy::default(),
            concurrency: bound(16),
            batch: None,
            linger: Duration::ZERO,
            max_pending: bound(1000),
            max_pending_bytes: bound(16 << 20),
            max_dead_letters: dead_letter::DEFAULT_BOUND,
            dead_letter_sink: None,
        }
    }
}

const fn bound(n: usize) -> NonZeroUsize {
    NonZeroUsize::MIN.saturating_add(n.saturating_sub(1))
}

/// What a sink is called: lower-case letters, digits and hyphens, a letter first, at most 40 of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SinkName(Box<str>);

/// Why a text is no sink's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be lower-case letters, digits and hyphens, a letter first, at most 40")]
pub struct SinkNameError;

impl SinkName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for SinkName {
    /// The one sink's name where none is given.
    fn default() -> Self {
        Self("default".into())
    }
}

impl FromStr for SinkName {
    type Err = SinkNameError;

    fn from_str(text: &str) -> Result<Self, SinkNameError> {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let good =
            text.len() <= 40 && text.starts_with(|c: char| c.is_ascii_lowercase()) && text.chars().all(legal);
        if good { Ok(Self(text.into())) } else { Err(SinkNameError) }
    }
}

impl fmt::Display for SinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_fit_for_files_labels_and_variables() {
        for good in ["a", "default", "kafka-2", &"a".repeat(40)] {
            assert_eq!(good.parse::<SinkName>().unwrap().as_str(), good);
        }
        for bad in ["", "A", "1a", "-a", "a_b", "a.b", "a/b", "a b", "é", &"a".repeat(41)] {
            assert_eq!(bad.parse::<SinkName>(), Err(SinkNameError), "{bad}");
        }
    }
}
