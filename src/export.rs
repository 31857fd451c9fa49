//! The export pipeline: events from a feed, delivered to sinks at least once, each session in order.
//!
//! ```text
//! feed ──► intake ──► spool ──┬──► lanes ──► sink
//!          a sink     known   │      ▲         │ acknowledged, or kept as a dead letter
//!          wants it?  already?│      │         ▼
//!                             │      └────── cursor ──► the spool may forget
//!                             └──► … the same for every other sink
//! ```
//!
//! An event is taken once it is in the spool. From there on each sink is by itself: its filter, its ceiling, its
//! pauses, its dead letters. The spool holds an event until the slowest sink that wants it is done with it.
//!
//! | question | file |
//! |---|---|
//! | where do events come from? | [`feed`] |
//! | which events are kept at all? | `intake` |
//! | what is kept of accepted events, which crash does it survive, and when is it full? | [`spool`] |
//! | when is an event a duplicate? | [`seen`], looked up at the spool's entrance |
//! | which events is a sink done with, and what of that survives a restart? | `cursor` |
//! | which events go next, how many together, and what when a batch is refused? | `lane` |
//! | when does a sink pause? | `breaker` |
//! | how long until the next attempt? | [`retry`] |
//! | what does an answer of a sink mean? | [`sink`] |
//! | where do refused events go? | [`dead_letter`] |
//! | how is a sink set up? | [`config`] |
//! | what is counted? | [`metrics`] |
//! | how does it run, and how does it stop? | [`pipeline`] |
//! | whose is the state directory? | `state_dir` |
//!
//! A file of JSON lines, exported as CloudEvents to standard output:
//!
//! ```no_run
//! use std::num::NonZeroUsize;
//! use std::sync::Arc;
//!
//! use aep_sidecar::aep::Registry;
//! use aep_sidecar::export::feed::file::FileFeed;
//! use aep_sidecar::export::{Ends, Export, ExportConfig, Metrics, Target};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tokio::io::BufReader::new(tokio::fs::File::open("session.jsonl").await?);
//! let feed = FileFeed::new(file, NonZeroUsize::new(16 << 20).ok_or("no bound")?)
//!     .on_bad_line(|bad| tracing::warn!(%bad, "line skipped"));
//! // One sink, and nothing on disk; with a `state_dir`, what isn't delivered survives the process.
//! let config = ExportConfig::new(Target::parse("stdout")?);
//! let registry = Arc::new(Registry::core());
//! let export = Export::open(&config, &registry, Metrics::default())?;
//! let summary = export.run_feed(feed, Ends::default()).await?;
//! assert_eq!(summary.unhandled, 0);
//! # Ok(())
//! # }
//! ```
//!
//! The room knows the protocol and nothing of the relay: what it exports may come from the embedded relay, a
//! remote one or a file.

mod breaker;
pub mod config;
mod cursor;
pub mod dead_letter;
pub mod feed;
mod intake;
mod lane;
pub mod metrics;
pub mod pipeline;
pub mod retry;
pub mod seen;
pub mod sink;
pub mod spool;
mod state_dir;

pub use breaker::{SinkState, SinkStatus};
pub use config::{ExportConfig, SinkConfig, SinkName};
pub use feed::{Feed, FeedError};
pub use intake::Intake;
pub use metrics::{Metrics, SinkMetrics};
pub use pipeline::{Ends, Export, ExportError, Summary};
pub use retry::RetryPolicy;
pub use sink::{AnySink, Delivery, DeliveryError, Mode, Reason, Sink, SinkOptions, Target, TargetError};
pub use spool::{Spool, SpoolConfig, SpoolState, SpoolSync};
