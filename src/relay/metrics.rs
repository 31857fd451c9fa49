//! What the relay counts. Labels are closed sets.

use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// A refusal's wire code.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Code {
    /// One of the codes that `http::refusal` defines.
    pub code: &'static str,
}

/// The relay's counters. Cloning shares them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Events taken in.
    pub admitted: Counter,
    /// Of those, events that a history already held: fanned out again, held once.
    pub duplicates: Counter,
    /// Events that a history gave up to stay within its bounds.
    pub evicted: Counter,
    /// Sessions forgotten whole.
    pub sessions_forgotten: Counter,
    /// Refusals by code.
    pub refusals: Family<Code, Counter>,
    /// Replay-exhausted markers sent.
    pub replays_exhausted: Counter,
    /// Readers whose stream was ended because they had fallen behind everything that is held.
    pub readers_behind: Counter,
    /// Live readers.
    pub subscribers: Gauge<i64, AtomicI64>,
    /// Open connections.
    pub connections: Gauge<i64, AtomicI64>,
}

impl Metrics {
    /// Puts the counters into `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("relay");
        registry.register("events_admitted", "Events taken in", self.admitted.clone());
        registry.register("events_duplicate", "Events that a history already held", self.duplicates.clone());
        registry.register("events_evicted", "Events given up by a history", self.evicted.clone());
        registry.register("sessions_forgotten", "Sessions forgotten whole", self.sessions_forgotten.clone());
        registry.register("refusals", "Refusals by code", self.refusals.clone());
        registry.register("replays_exhausted", "Replay-exhausted markers", self.replays_exhausted.clone());
        registry.register("readers_behind", "Streams ended for falling behind", self.readers_behind.clone());
        registry.register("subscribers", "Live readers", self.subscribers.clone());
        registry.register("connections", "Open connections", self.connections.clone());
    }

    /// Counts a refusal.
    pub fn refused(&self, code: &'static str) {
        self.refusals.get_or_create(&Code { code }).inc();
    }
}
