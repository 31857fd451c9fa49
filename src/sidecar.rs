//! The composition root: settings, wiring, start and stop. The only room that knows both the relay and the
//! export.
//!
//! | question | file |
//! |---|---|
//! | which variables are there? | [`settings`] |
//! | what is started, and how is it wired? | [`app`] |
//! | how do the relay's events get into the export? | [`bridge`] |
//! | how do another relay's get there? | [`remote`] |
//! | is it alive, ready, and what does it count? | [`admin`] |
//! | what stops, in which order? | [`shutdown`] |
//! | where do logs go? | [`telemetry`] |
//! | what takes effect without a restart? | [`watch`] |
//! | which types did the operator add? | [`schemas`] |

pub mod admin;
pub mod app;
pub mod bridge;
pub mod remote;
pub mod schemas;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
pub mod watch;

pub use app::{App, AppError};
pub use remote::RemoteApp;
pub use settings::{Settings, SettingsError, VARIABLES, Variable};
