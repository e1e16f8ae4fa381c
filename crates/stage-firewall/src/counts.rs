//! The counters of a firewall.

use sidecore_telemetry::{Counter, Gauge};

/// The counters of one rule.
#[derive(Debug, Default)]
pub struct RuleCounts {
    /// Frames that the rule decided on.
    pub frames: Counter,
    /// Bytes in these frames.
    pub bytes: Counter,
}

impl RuleCounts {
    #[inline]
    pub(crate) fn count(&self, len_bytes: usize) {
        self.frames.add(1);
        self.bytes.add(len_bytes as u64);
    }
}

/// The counters of a firewall. Its sidecore alone writes them, any thread may read them.
#[derive(Debug)]
pub struct FirewallCounts {
    /// Of each rule, in their order.
    pub rules: Box<[RuleCounts]>,
    /// Of frames that no rule matches, which pass.
    pub unmatched: RuleCounts,
    /// Connections in the table, some of which may have ended.
    pub connections: Gauge,
    /// Connections and first fragments that were entered into the table.
    pub opened: Counter,
    /// Connections that were forgotten although they had not ended, because the table was full.
    pub evicted: Counter,
}

impl FirewallCounts {
    pub(crate) fn new(rules: usize) -> Self {
        Self {
            rules: (0..rules).map(|_| RuleCounts::default()).collect(),
            unmatched: RuleCounts::default(),
            connections: Gauge::default(),
            opened: Counter::default(),
            evicted: Counter::default(),
        }
    }
}
