//! The composition root: settings, wiring, start and stop. The only room that knows both the relay and the
//! export.
//!
//! | question | file |
//! |---|---|
//! | which variables are there? | [`settings`] |
//! | what is started, and how is it wired? | [`app`] |
//! | how does the export see the relay's events? | [`bridge`] |
//! | what stops, in which order? | [`shutdown`] |
//! | where do logs go? | [`telemetry`] |
//! | what takes effect without a restart? | [`watch`] |
//! | which types did the operator add? | [`schemas`] |

pub mod app;
pub mod bridge;
pub mod schemas;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
pub mod watch;

pub use app::{App, AppError};
pub use settings::{Settings, SettingsError, VARIABLES, Variable};
