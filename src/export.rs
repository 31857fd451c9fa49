//! The export pipeline: events from a feed, delivered to a sink at least once, each session in order.
//!
//! ```text
//! feed ──► seen ──► lanes ──► sink
//!                     ▲         │ acknowledged, or recorded as a dead letter
//!                     └─────────┴──► checkpoint
//! ```
//!
//! | question | file |
//! |---|---|
//! | where do events come from? | [`feed`] |
//! | when is an event a duplicate? | [`seen`] |
//! | what survives a restart, and which crash? | [`checkpoint`] |
//! | what is kept of accepted events, and which crash does it survive? | [`spool`] |
//! | up to which position is a session done with? | `reached` |
//! | which event goes next, and when does the sink pause? | `lane`, `breaker` |
//! | how long until the next attempt? | [`retry`] |
//! | what does an answer of the sink mean? | [`sink`] |
//! | where do refused events go? | [`dead_letter`] |
//! | what is counted? | [`metrics`] |
//! | how does it run, and how does it stop? | [`pipeline`] |
//!
//! A file of JSON lines, exported as CloudEvents to standard output:
//!
//! ```no_run
//! use std::num::NonZeroUsize;
//!
//! use aep_sidecar::export::feed::file::FileFeed;
//! use aep_sidecar::export::{Export, ExportConfig, Metrics, Target};
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tokio::io::BufReader::new(tokio::fs::File::open("session.jsonl").await?);
//! let feed = FileFeed::new(file, NonZeroUsize::new(16 << 20).ok_or("no bound")?)
//!     .on_bad_line(|bad| tracing::warn!(%bad, "line skipped"));
//! let export = Export::open(ExportConfig::new(Target::parse("stdout")?), Metrics::default())?;
//! let summary = export.run(feed, CancellationToken::new()).await?;
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
