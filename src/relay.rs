//! The relay: takes events in, holds a bounded history of each session, and fans out to readers.
//!
//! It knows no sink and no export. [`Hub`] is the one way in ([`Hub::accept`]) and the one way out
//! ([`Hub::subscribe`]); every binding under [`http`] is a translation to and from these two.
//!
//! | question | file |
//! |---|---|
//! | what happens to an accepted event? | [`hub`] |
//! | what makes accepted events last? | [`keep`] |
//! | where do live readers read from? | [`log`] |
//! | what is held of a session, in which order, and what was forgotten? | [`buffer`], [`history`] |
//! | how does a reader get from replay to live? | [`subscriber`] |
//! | where does a command go? | [`control`] |
//! | who may, and see what? | [`auth`] |
//! | how are connections encrypted? | [`http::Tls`] |
//! | how much? | [`limits`] |
//! | what does each refusal look like? | [`http::refusal`] |

pub mod auth;
pub mod buffer;
pub mod control;
pub mod history;
pub mod http;
pub mod hub;
pub mod keep;
pub mod limits;
pub mod log;
pub mod metrics;
pub mod subscriber;

pub use auth::{Access, Token, Tokens};
pub use hub::Hub;
pub use keep::{Keep, NotKept};
pub use limits::Limits;
pub use metrics::Metrics;
pub use subscriber::{From, OnLoss, Step, Subscriber, Subscription, Then};
