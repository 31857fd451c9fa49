//! What the spool counts.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The spool's counters. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct SpoolMetrics {
    /// Events appended.
    pub events: Counter,
    /// Bytes of these events.
    pub bytes: Counter,
    /// Events that were there already.
    pub duplicates: Counter,
    /// Groups of events written, each by one write.
    pub writes: Counter,
    /// Writes that failed.
    pub write_failures: Counter,
    /// Appends that were refused: full, failing or too far behind.
    pub refused: Counter,
    /// Events lost to damaged files.
    pub lost_events: Counter,
    /// Bytes cut off torn ends at the start.
    pub cut_bytes: Counter,
    /// Segments given up.
    pub freed_segments: Counter,
    /// Bytes held now, in files or in memory.
    pub held_bytes: Gauge,
    /// Events held now.
    pub held_events: Gauge,
    /// Bytes of accepted events that aren't written yet.
    pub waiting_bytes: Gauge,
}

impl SpoolMetrics {
    /// Registers every counter.
    pub fn register(&self, registry: &mut Registry) {
        let mut counter = |name, help, counter: &Counter| registry.register(name, help, counter.clone());
        counter("aep_spool_events", "Events appended", &self.events);
        counter("aep_spool_bytes", "Bytes of the events appended", &self.bytes);
        counter("aep_spool_duplicates", "Events that were there already", &self.duplicates);
        counter("aep_spool_writes", "Groups of events written", &self.writes);
        counter("aep_spool_write_failures", "Writes that failed", &self.write_failures);
        counter("aep_spool_refused", "Appends that were refused", &self.refused);
        counter("aep_spool_lost_events", "Events lost to damaged files", &self.lost_events);
        counter("aep_spool_cut_bytes", "Bytes cut off torn ends at the start", &self.cut_bytes);
        counter("aep_spool_freed_segments", "Segments given up", &self.freed_segments);
        let mut gauge = |name, help, gauge: &Gauge| registry.register(name, help, gauge.clone());
        gauge("aep_spool_held_bytes", "Bytes held, in files or in memory", &self.held_bytes);
        gauge("aep_spool_held_events", "Events held", &self.held_events);
        gauge("aep_spool_waiting_bytes", "Bytes of events that aren't written yet", &self.waiting_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        let (metrics, mut registry) = (SpoolMetrics::default(), Registry::default());
        metrics.register(&mut registry);
        metrics.events.inc();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("aep_spool_events_total 1\n"), "{text}");
    }
}
