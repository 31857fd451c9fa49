//! The consumer's side over the wire: a subscription to a relay that outlives every connection.
//!
//! | question | file |
//! |---|---|
//! | what is asked for, and with which patience? | [`config`] |
//! | what happens after a disconnect, a refusal, a silence? | [`subscription`] |
//! | what is read beside the live stream? | `drains` |
//! | what is still owed of each session, and from where is it resumed? | `positions` |
//! | what goes into a request line? | `request` |
//! | what does an answer mean, and when is a stream over? | `connection` |
//! | what is at hand, and when is the next attempt? | `lane` |
//! | where does one event end in a stream of bytes? | `sse` |
//! | what is given, and what is told as lost? | [`update`] |
//! | is it working? | [`status`], [`metrics`] |
//!
//! ```no_run
//! use aep_sidecar::client::{Metrics, SubscribeConfig, Subscription, Update};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let config = SubscribeConfig::new("http://127.0.0.1:8787".parse()?);
//! let mut subscription = Subscription::new(&config, [], Metrics::default())?;
//! loop {
//!     match subscription.next().await {
//!         Update::Events(events) => println!("{} events", events.len()),
//!         Update::Lost(lost) => println!("lost: {lost}"),
//!     }
//! }
//! # }
//! ```
//!
//! Every event that the relay still holds is given at least once, whatever ends the connections. Duplicates are
//! told by `(source, id)`, which is the caller's part.

pub mod config;
mod connection;
mod drains;
mod lane;
pub mod metrics;
mod positions;
mod request;
mod sse;
pub mod status;
pub mod subscription;
pub mod update;

pub use config::{CatchUp, ConfigError, FilterText, Patience, Secret, SubscribeConfig};
pub use metrics::Metrics;
pub use status::{Cause, Status, StatusHandle};
pub use subscription::Subscription;
pub use update::{Lost, ResumePoint, Update};
