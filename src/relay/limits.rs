//! Every bound of the relay, typed and in one place.

use std::time::Duration;

/// What the relay holds and takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Events held of one session.
    pub buffer: usize,
    /// Sessions held; past it, the least recently written one is forgotten.
    pub max_sessions: usize,
    /// Bytes of events held over all sessions.
    pub buffer_bytes: usize,
    /// Bytes of the arrival log that live readers read from: how far one may fall behind.
    pub window_bytes: usize,
    /// Bytes of one request's body, decompressed.
    pub max_body: usize,
    /// Events in one request.
    pub max_batch: usize,
    /// Resume positions in one subscription.
    pub max_from: usize,
    /// Subscriptions of one WebSocket connection.
    pub max_subscriptions: usize,
    /// Bytes of request bodies in memory at one time, over all requests.
    pub ingest_bytes: usize,
    /// Connections open at one time; past it, new ones wait to be accepted.
    pub max_connections: usize,
    /// How long peers are waited for.
    pub times: Times,
}

impl Default for Limits {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        Self {
            buffer: 10_000,
            max_sessions: 500,
            buffer_bytes: 256 * MIB,
            window_bytes: 64 * MIB,
            max_body: 16 * MIB,
            max_batch: 10_000,
            max_from: 500,
            max_subscriptions: 100,
            ingest_bytes: 128 * MIB,
            max_connections: 16_384,
            times: Times::default(),
        }
    }
}

impl Limits {
    /// For how many forgotten sessions the highest evicted position is remembered.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.max_sessions.saturating_mul(10)
    }
}

/// Bytes gathered into one write to a reader, where that many are at hand.
pub const WRITE_SIZE: usize = 64 * 1024;

/// How long the relay waits for its peers, and how often it gives a sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// A silent event stream is pinged this often.
    ///
    /// Spec: AEP-0003 §3.3 #4 (at least every 30 s).
    pub stream_ping: Duration,
    /// A WebSocket peer is pinged this often.
    ///
    /// Spec: AEP-0003 §3.5 #5.
    pub socket_ping: Duration,
    /// A WebSocket peer that is silent for this long is gone.
    ///
    /// Spec: AEP-0003 §3.5 #5.
    pub silence: Duration,
    /// A request's head, a TLS handshake and a `hello` must arrive within this.
    pub head: Duration,
    /// Between two pieces of a request's body at most this may pass.
    pub body: Duration,
    /// A peer that takes no byte of what is written to it for this long is gone.
    pub write: Duration,
    /// After a close, the peer's own is waited for this long.
    pub close: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            stream_ping: Duration::from_secs(15),
            socket_ping: Duration::from_secs(25),
            silence: Duration::from_secs(90),
            head: Duration::from_secs(30),
            body: Duration::from_secs(30),
            write: Duration::from_secs(90),
            close: Duration::from_secs(2),
        }
    }
}
