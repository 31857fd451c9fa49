//! What a subscription counts.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::status::Cause;

/// The label of a counter by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByCause {
    /// Why.
    pub cause: Cause,
}

impl EncodeLabelValue for Cause {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

/// Why an event was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Skip {
    /// It isn't a legal event.
    Illegal,
    /// It is longer than events may be.
    TooLong,
}

/// The label of the counter of skipped events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BySkip {
    /// Why.
    pub reason: Skip,
}

/// The counters of a subscription. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Events given.
    pub events: Counter,
    /// Events that were read and can't be given.
    pub skipped: Family<BySkip, Counter>,
    /// Losses told, one for a session each time.
    pub losses: Counter,
    /// Live streams that ended or couldn't be opened.
    pub disconnects: Family<ByCause, Counter>,
    /// Requests beside the live stream that failed.
    pub drain_failures: Family<ByCause, Counter>,
    /// Resume sets that the relay refused.
    pub refused_resumes: Counter,
}

impl Metrics {
    /// Registers every counter.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("aep_client_events", "Events received from the relay", self.events.clone());
        registry.register(
            "aep_client_skipped",
            "Events from the relay that were illegal or too long",
            self.skipped.clone(),
        );
        registry.register(
            "aep_client_losses",
            "Sessions of which the relay no longer had everything",
            self.losses.clone(),
        );
        registry.register(
            "aep_client_disconnects",
            "Live streams that ended or couldn't be opened",
            self.disconnects.clone(),
        );
        registry.register(
            "aep_client_drain_failures",
            "Requests for missed events that failed",
            self.drain_failures.clone(),
        );
        registry.register(
            "aep_client_refused_resumes",
            "Resume sets that the relay refused",
            self.refused_resumes.clone(),
        );
    }
}
