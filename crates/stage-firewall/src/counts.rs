//! The counters of a firewall.

use sidecore_telemetry::counters;

counters! {
    /// The counters of one rule. Their sidecore alone writes them, any thread may read them.
    pub struct RuleStats;

    /// The counters of one rule at one moment.
    pub struct RuleCounts;

    /// Frames that the rule has decided on. The rule `none` stands for frames that no rule matches,
    /// which pass.
    pub frames: Counter = "rule_frames_total",
    /// Bytes in these frames, without virtio headers and check sequences.
    pub bytes: Counter = "rule_bytes_total",
}

counters! {
    /// The counters of a table of connections.
    pub struct TableStats;

    /// The counters of a table of connections at one moment.
    pub struct TableCounts;

    /// Connections in the table, some of which may have ended.
    pub connections: Gauge = "connections",
    /// Connections, and first fragments of packets, that were entered into the table.
    pub opened: Counter = "connections_opened_total",
    /// Connections that were forgotten although they had not ended, because the table was full.
    pub evicted: Counter = "connections_evicted_total",
}

impl RuleStats {
    #[inline]
    pub(crate) fn count(&self, frames: usize, bytes: usize) {
        self.frames.add(frames as u64);
        self.bytes.add(bytes as u64);
    }
}

/// The counters of a firewall.
#[derive(Debug)]
pub struct FirewallStats {
    /// Of each rule, in their order.
    pub rules: Box<[RuleStats]>,
    /// Of frames that no rule matches, which pass.
    pub unmatched: RuleStats,
    /// Of the connections.
    pub table: TableStats,
}

impl FirewallStats {
    pub(crate) fn new(rules: usize) -> Self {
        Self {
            rules: (0..rules).map(|_| RuleStats::default()).collect(),
            unmatched: RuleStats::default(),
            table: TableStats::default(),
        }
    }
}
