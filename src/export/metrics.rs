//! What the export counts.

use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::sink::Reason;
use super::spool::SpoolMetrics;

/// The label of what is counted for each sink: its configured name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BySink {
    /// The sink's name.
    pub sink: Arc<str>,
}

/// The labels of a counter by sink and reason.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    /// The sink's name.
    pub sink: Arc<str>,
    /// Why.
    pub reason: Reason,
}

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

/// Declares what is counted for each sink.
macro_rules! by_sink {
    ($($(#[$doc:meta])* $field:ident: $kind:ident, $name:literal, $help:literal;)*) => {
        /// The export's counters. Clones share them.
        #[derive(Debug, Clone, Default)]
        pub struct Metrics {
            /// The spool's.
            pub spool: SpoolMetrics,
            $($(#[$doc])* pub $field: Family<BySink, $kind>,)*
            /// Attempts that failed and are repeated.
            pub retries: Family<ByReason, Counter>,
            /// Events that became dead letters.
            pub dead_letters: Family<ByReason, Counter>,
        }

        /// One sink's counters. Clones share them.
        #[derive(Debug, Clone)]
        pub struct SinkMetrics {
            name: Arc<str>,
            $($(#[$doc])* pub $field: $kind,)*
            retries: Family<ByReason, Counter>,
            dead_letters: Family<ByReason, Counter>,
        }

        impl Metrics {
            /// Registers every counter.
            pub fn register(&self, registry: &mut Registry) {
                self.spool.register(registry);
                $(registry.register($name, $help, self.$field.clone());)*
                registry.register("aep_export_retries", "Attempts that failed and are repeated", self.retries.clone());
                registry.register("aep_export_dead_letters", "Events that became dead letters", self.dead_letters.clone());
            }

            /// The counters of one sink.
            #[must_use]
            pub fn sink(&self, name: &str) -> SinkMetrics {
                let name: Arc<str> = name.into();
                let label = BySink { sink: Arc::clone(&name) };
                SinkMetrics {
                    $($field: self.$field.get_or_create(&label).clone(),)*
                    retries: self.retries.clone(),
                    dead_letters: self.dead_letters.clone(),
                    name,
                }
            }
        }
    };
}

by_sink! {
    /// Events that the sink acknowledged.
    delivered: Counter, "aep_export_delivered", "Events that the sink acknowledged";
    /// Batches that the sink refused and that went again in smaller ones.
    batches_split: Counter, "aep_export_batches_split", "Batches that the sink refused and that went again in smaller ones";
    /// Dead letters dropped to make room for newer ones.
    dead_letters_dropped: Counter, "aep_export_dead_letters_dropped", "Dead letters dropped to make room for newer ones";
    /// Events read from the spool and not handled yet.
    pending_events: Gauge, "aep_export_pending_events", "Events read from the spool and not handled yet";
    /// Memory that these take, in bytes.
    pending_bytes: Gauge, "aep_export_pending_bytes", "Memory of the pending events, in bytes";
    /// Numbers in the spool from the sink's cursor to its end: those of events that it may not want included.
    lag_events: Gauge, "aep_export_lag_events", "Events in the spool that the sink is not done with";
    /// 1 while the sink is paused, else 0.
    paused: Gauge, "aep_export_sink_paused", "1 while the sink is paused, else 0";
    /// Writes of the cursor that failed.
    cursor_failures: Counter, "aep_export_cursor_failures", "Writes of the cursor that failed";
    /// Damaged cursor files found.
    damaged_files: Counter, "aep_export_damaged_files", "Damaged cursor files found";
}

impl Default for SinkMetrics {
    /// Counters of their own.
    fn default() -> Self {
        Metrics::default().sink("default")
    }
}

impl Metrics {
    /// How many retries of a sink there were, by reason.
    #[must_use]
    pub fn retries(&self, sink: &str, reason: Reason) -> u64 {
        self.retries.get_or_create(&ByReason { sink: sink.into(), reason }).get()
    }

    /// How many dead letters of a sink there were, by reason.
    #[must_use]
    pub fn dead_letters(&self, sink: &str, reason: Reason) -> u64 {
        self.dead_letters.get_or_create(&ByReason { sink: sink.into(), reason }).get()
    }
}

impl SinkMetrics {
    pub(crate) fn retried(&self, reason: Reason) {
        self.retries.get_or_create(&ByReason { sink: Arc::clone(&self.name), reason }).inc();
    }

    pub(crate) fn dead_lettered(&self, reason: Reason) {
        self.dead_letters.get_or_create(&ByReason { sink: Arc::clone(&self.name), reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let (metrics, mut registry) = (Metrics::default(), Registry::default());
        metrics.register(&mut registry);
        let sink = metrics.sink("bus");
        sink.delivered.inc();
        sink.retried(Reason::Throttled);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("aep_export_delivered_total{sink=\"bus\"} 1\n"), "{text}");
        assert!(text.contains("aep_export_retries_total{sink=\"bus\",reason=\"throttled\"} 1\n"), "{text}");
        assert_eq!(metrics.retries("bus", Reason::Throttled), 1);
        assert_eq!(metrics.dead_letters("bus", Reason::Mapping), 0);
    }
}
