//! aep-sidecar: an Agent Event Protocol relay and CloudEvents export pipeline in one binary.
//!
//! AI agents emit activity events in the Agent Event Protocol. The sidecar takes them in over HTTP and WebSocket,
//! keeps those that a sink wants on disk, holds a bounded history of each session, fans them out to readers, and
//! delivers them as CloudEvents to one sink or many.
//!
//! ```
//! use aep_sidecar::aep::{Event, Filter, cloudevents::CloudEvent};
//!
//! let event = Event::parse_str(
//!     r#"{"aep":"0.1","id":"e1","type":"tool.completed","time":"2026-07-03T10:15:04Z","source":"aep://host/agent/demo","agent":"demo","session":"s1","seq":0,"data":{"status":"success"}}"#,
//! )?;
//! let filter = Filter::parse(r#"{"type":["tool.*"]}"#)?;
//! assert!(filter.matches(&event));
//! let body = CloudEvent::of(&event)?.structured();
//! assert!(body.starts_with(br#"{"specversion":"1.0","id":"e1""#));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Six rooms on four floors; an import only ever points down:
//!
//! ```text
//! main → sidecar, cli → relay | export | client → aep
//! ```
//!
//! | room | what it is |
//! |---|---|
//! | [`aep`] | the protocol, pure |
//! | [`relay`] | ingest, fan-out, replay, auth; knows no sink |
//! | [`export`] | feed, spool, cursors, lanes, sinks; knows no relay |
//! | [`client`] | the consumer's side over the wire: a subscription to any relay |
//! | [`sidecar`] | settings, wiring, start, stop |
//! | [`cli`] | the other commands |

pub mod aep;
pub mod cli;
pub mod client;
pub mod export;
pub mod relay;
pub mod sidecar;
