//! What the export counts.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::sink::Reason;

/// The label of a counter by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    /// Why.
    pub reason: Reason,
}

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

/// The export's counters. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Events that the sink acknowledged.
    pub delivered: Counter,
    /// Attempts that failed and are repeated.
    pub retries: Family<ByReason, Counter>,
    /// Events that became dead letters.
    pub dead_letters: Family<ByReason, Counter>,
    /// Dead letters dropped to make room for newer ones.
    pub dead_letters_dropped: Counter,
    /// Events dropped since they were known already.
    pub duplicates: Counter,
    /// Events taken from the feed and not handled yet.
    pub pending_events: Gauge,
    /// Memory that these take, in bytes.
    pub pending_bytes: Gauge,
    /// 1 while the sink is paused, else 0.
    pub sink_paused: Gauge,
    /// Writes of the checkpoint that failed.
    pub checkpoint_failures: Counter,
    /// Damaged checkpoint files found.
    pub damaged_files: Counter,
}

impl Metrics {
    /// Registers every counter.
    pub fn register(&self, registry: &mut Registry) {
        let mut counter = |name, help, counter: &Counter| registry.register(name, help, counter.clone());
        counter("aep_export_delivered", "Events that the sink acknowledged", &self.delivered);
        counter("aep_export_duplicates", "Events dropped since they were known already", &self.duplicates);
        counter(
            "aep_export_dead_letters_dropped",
            "Dead letters dropped to make room for newer ones",
            &self.dead_letters_dropped,
        );
        counter(
            "aep_export_checkpoint_failures",
            "Writes of the checkpoint that failed",
            &self.checkpoint_failures,
        );
        counter("aep_export_damaged_files", "Damaged checkpoint files found", &self.damaged_files);
        let mut family =
            |name, help, family: &Family<ByReason, Counter>| registry.register(name, help, family.clone());
        family("aep_export_retries", "Attempts that failed and are repeated", &self.retries);
        family("aep_export_dead_letters", "Events that became dead letters", &self.dead_letters);
        let mut gauge = |name, help, gauge: &Gauge| registry.register(name, help, gauge.clone());
        gauge(
            "aep_export_pending_events",
            "Events taken from the feed and not handled yet",
            &self.pending_events,
        );
        gauge("aep_export_pending_bytes", "Memory of the pending events, in bytes", &self.pending_bytes);
        gauge("aep_export_sink_paused", "1 while the sink is paused, else 0", &self.sink_paused);
    }

    /// How many retries there were, by reason.
    #[must_use]
    pub fn retries(&self, reason: Reason) -> u64 {
        self.retries.get_or_create(&ByReason { reason }).get()
    }

    /// How many dead letters there were, by reason.
    #[must_use]
    pub fn dead_letters(&self, reason: Reason) -> u64 {
        self.dead_letters.get_or_create(&ByReason { reason }).get()
    }

    pub(crate) fn retried(&self, reason: Reason) {
        self.retries.get_or_create(&ByReason { reason }).inc();
    }

    pub(crate) fn dead_lettered(&self, reason: Reason) {
        self.dead_letters.get_or_create(&ByReason { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let (metrics, mut registry) = (Metrics::default(), Registry::default());
        metrics.register(&mut registry);
        metrics.delivered.inc();
        metrics.retried(Reason::Throttled);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("aep_export_delivered_total 1\n"), "{text}");
        assert!(text.contains("aep_export_retries_total{reason=\"throttled\"} 1\n"), "{text}");
        assert_eq!((metrics.retries(Reason::Throttled), metrics.dead_letters(Reason::Mapping)), (1, 0));
    }
}
