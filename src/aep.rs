//! The Agent Event Protocol, pure: no runtime, no I/O, no clock.
//!
//! An [`Event`] is the bytes that were received plus what its envelope says; everything the sidecar does with
//! one (route, hold, forward, down-level, map to a CloudEvent) starts from that pair, so that what is
//! forwarded is what was received.
//!
//! | question | file |
//! |---|---|
//! | what makes an event legal? | [`event`], [`envelope`], [`event_type`] |
//! | how are events ordered? | [`position`] |
//! | who sees what content? | [`capture`], [`registry`] |
//! | which events does a subscription match? | [`filter`] |
//! | what does an event look like on an SSE stream? | [`sse`] |
//! | what is said beside events on a WebSocket? | [`frame`] |
//! | what does it look like as a CloudEvent, and back? | [`cloudevents`] |

pub mod capture;
pub mod cloudevents;
pub mod envelope;
pub mod event;
pub mod event_type;
pub mod filter;
pub mod frame;
pub mod json;
pub mod position;
pub mod registry;
pub mod severity;
pub mod sse;

pub use capture::Capture;
pub use envelope::Scalar;
pub use event::{Event, EventError};
pub use event_type::{EventType, Scope};
pub use filter::{Filter, FilterError};
pub use position::{EventKey, Position, ResumeToken};
pub use registry::Registry;
pub use severity::Severity;

/// The one protocol version this crate speaks.
///
/// Spec: AEP-0001 §5.1 #1.
pub const VERSION: &str = "0.1";
