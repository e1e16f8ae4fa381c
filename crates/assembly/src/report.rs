//! What a running assembly says about itself. These types are also the JSON of the control API, so a field that is
//! renamed here is renamed for every script out there.
//!
//! Counters start at zero with the daemon and never go back, whatever guests come and go.

mod closed;
mod controller;
mod repair;

use std::ops::Deref;

use serde::{Deserialize, Serialize};
use sidecore_block::QueueStats;
use sidecore_sidecore::Sidecore;
use sidecore_telemetry::CounterSet;
use sidecore_units::Nanos;

pub use closed::{ClosedControllerReport, ControllerState};
pub use controller::{
    CheckReport, ControllerReport, EventReport, ExtentReport, ExtentsReport, FunctionReport, SpaceReport,
    TreeMemoryReport, TreeReport, VolumeReport,
};
pub use repair::{LossReport, RepairReport, RivalsReport};
pub use sidecore_block::QueueCounts;
pub use sidecore_controller::{FunctionStats, HypervisorCounts};
pub use sidecore_extent::TranslationCounts;
pub use sidecore_reactor::ReactorCounts;
pub use sidecore_telemetry::{Counts, Latency, LatencyCounts};

/// All counters, read without stopping anything: two of them may be a few requests apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Nanoseconds since the assembly was started.
    pub uptime_ns: u64,
    /// If latencies and utilisation are not since the start but of an interval: its length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ns: Option<u64>,
    /// The polling threads, in the order of the configuration.
    pub sidecores: Vec<SidecoreReport>,
    /// The disks, in the order of the configuration.
    pub devices: Vec<DeviceStats>,
}

impl Stats {
    /// The same with latencies and utilisation of the time since `earlier`, an answer of the same daemon.
    #[must_use]
    pub fn of_interval(mut self, earlier: &Self) -> Self {
        let interval_ns = self.uptime_ns.saturating_sub(earlier.uptime_ns);
        for sidecore in &mut self.sidecores {
            let old = earlier.sidecores.iter().find(|old| old.name == sidecore.name);
            sidecore.utilisation = sidecore.utilisation_since(old, interval_ns);
        }
        for device in &mut self.devices {
            let Some(old) = earlier.devices.iter().find(|old| old.name == device.name) else {
                continue;
            };
            for queue in &mut device.queues {
                if let Some(old) = old.queues.iter().find(|old| old.index == queue.index) {
                    queue.counts.latency_ns = queue.latency_ns.since(&old.latency_ns);
                }
            }
        }
        self.interval_ns = Some(interval_ns);
        self
    }
}

/// What a sidecore does with its time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SidecoreReport {
    /// Its name.
    pub name: String,
    /// The CPU that it is pinned to, if it is.
    pub cpu: Option<u32>,
    /// The counters of its loop.
    #[serde(flatten)]
    pub counts: ReactorCounts,
    /// The share of the time, 0 to 1, that rounds took in which something was done.
    pub utilisation: f64,
    /// Its core is lost to other work: how much of it, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl SidecoreReport {
    /// A sidecore's counters as of `now`.
    pub(crate) fn of(sidecore: &Sidecore, now: Nanos) -> Self {
        let mut report = Self {
            name: sidecore.name().to_owned(),
            cpu: sidecore.cpu().map(|cpu| cpu.0),
            counts: sidecore.stats().counts(),
            utilisation: 0.0,
            warning: sidecore.core_warning().map(|warning| warning.to_string()),
        };
        report.utilisation = report.utilisation_since(None, now.since(sidecore.started_at()).0);
        report
    }

    /// The share of the last `elapsed_ns`, 0 to 1, in which it worked. `earlier` is its report from before that, if
    /// there was one.
    #[must_use]
    pub fn utilisation_since(&self, earlier: Option<&Self>, elapsed_ns: u64) -> f64 {
        let before_ns = earlier.map_or(0, |earlier| earlier.busy_ns);
        let busy_ns = self.busy_ns.saturating_sub(before_ns);
        // The time is counted when a round ends, which may have begun before the interval.
        if elapsed_ns == 0 { 0.0 } else { (busy_ns as f64 / elapsed_ns as f64).min(1.0) }
    }
}

/// The counters of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Its name.
    pub name: String,
    /// Its request queues, but for those that the guest has never used.
    pub queues: Vec<QueueCounters>,
}

impl DeviceStats {
    /// The counters of all queues together.
    #[must_use]
    pub fn total(&self) -> QueueCounters {
        let mut total = QueueCounters::default();
        for queue in &self.queues {
            total.add(queue);
        }
        total
    }
}

/// The counters of a request queue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueCounters {
    /// Its number.
    pub index: u16,
    /// The counters.
    #[serde(flatten)]
    pub counts: QueueCounts,
    /// Bytes that guests read and wrote.
    pub bytes: u64,
}

impl QueueCounters {
    /// The counters of a queue with this number as of now.
    pub(crate) fn of(index: u16, stats: &QueueStats) -> Self {
        let mut counters = Self { index, ..Self::default() };
        counters.add(&stats.counts());
        counters
    }

    /// Whether the guest has ever used the queue.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.counts != QueueCounts::default()
    }

    /// Adds another queue's counters.
    pub fn add(&mut self, counts: &QueueCounts) {
        self.counts.add(counts);
        self.bytes = self.bytes_read.saturating_add(self.bytes_written);
    }
}

/// A report shows its counters as if they were its own, as its JSON does.
macro_rules! show_counts {
    ($($Report:ident: $field:ident of $Counts:ty,)+) => {$(
        impl Deref for $Report {
            type Target = $Counts;

            fn deref(&self) -> &$Counts {
                &self.$field
            }
        }
    )+};
}

show_counts! {
    SidecoreReport: counts of ReactorCounts,
    QueueCounters: counts of QueueCounts,
    ControllerReport: counts of HypervisorCounts,
    FunctionReport: stats of FunctionStats,
}

/// What a disk is and how it fares.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// What its guest sees: `virtio-blk` or `nvme`.
    pub front_end: String,
    /// The store behind it.
    pub store: String,
    /// That store's type.
    #[serde(rename = "type")]
    pub store_type: String,
    /// The controller whose virtual or physical function that store is, or is put in front of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// The volume that its virtual function shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The socket that it is served on.
    pub socket: String,
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// Unit of reads and writes in bytes.
    pub block_bytes: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// How many request queues it has.
    pub queues: u16,
    /// How many of them the guest has started.
    pub queues_running: u16,
    /// The sidecores that serve it.
    pub sidecores: Vec<String>,
    /// How it spends idle time: `poll`, `adaptive` or `interrupt`.
    pub idle: String,
    /// Where it stands.
    pub state: DeviceState,
    /// Why it is broken or not served, if it is.
    pub reason: Option<String>,
    /// What keeps its store from doing all that it should, though it is served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Whether it serves nothing until the driver resets it.
    pub needs_reset: bool,
    /// The last client, if it was disconnected for what it did and no queue has been started since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disconnect: Option<DisconnectReport>,
    /// The counters of its queues together.
    pub counters: QueueCounters,
}

/// A client that was disconnected for what it did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisconnectReport {
    /// What it did.
    pub reason: String,
    /// When, in seconds since the beginning of 1970.
    pub at_unix_s: u64,
}

/// Where a disk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// No VMM is connected.
    Waiting,
    /// A VMM is connected, the guest's driver has started no queue.
    Connected,
    /// The guest is being served.
    Running,
    /// The guest did what no driver does, or the store went away; other disks go on.
    Broken,
    /// The store is being opened, and has not answered yet; then the disk is served.
    Opening,
    /// The store could not be opened; remove the disk, or restart the daemon.
    Refused,
}

impl DeviceState {
    /// Every state there is.
    pub const ALL: [Self; 6] =
        [Self::Waiting, Self::Connected, Self::Running, Self::Broken, Self::Opening, Self::Refused];

    /// The word for it in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connected => "connected",
            Self::Running => "running",
            Self::Broken => "broken",
            Self::Opening => "opening",
            Self::Refused => "refused",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(index: u16, latencies: &[(u64, u64)]) -> QueueCounters {
        let buckets = latencies.to_vec();
        let sum_ns = buckets.iter().map(|(ns, count)| ns * count).sum();
        let latency_ns = Latency::of(LatencyCounts { buckets, sum_ns });
        let counts = QueueCounts { requests: latency_ns.count, latency_ns, ..QueueCounts::default() };
        QueueCounters { index, counts, bytes: 0 }
    }

    fn stats(uptime_ns: u64, busy_ns: u64, queues: Vec<QueueCounters>) -> Stats {
        let counts = ReactorCounts { busy_ns, ..ReactorCounts::default() };
        let sidecore = SidecoreReport { name: "sc0".to_owned(), counts, ..SidecoreReport::default() };
        Stats {
            uptime_ns,
            sidecores: vec![sidecore],
            devices: vec![DeviceStats { name: "d".to_owned(), queues }],
            ..Stats::default()
        }
    }

    #[test]
    fn a_total_adds_counts_and_has_the_percentiles_of_all_requests() {
        let device = DeviceStats { name: "d".to_owned(), queues: vec![queue(0, &[(50, 1)]), queue(3, &[(30, 199)])] };
        let total = device.total();
        assert_eq!((total.requests, total.latency_ns.p99, total.latency_ns.max), (200, 30, 50));
        assert!((total.latency_ns.mean - 30.1).abs() < 1e-9);
    }

    #[test]
    fn of_an_interval_are_latencies_and_utilisation_and_not_counters() {
        let before = stats(1_000, 900, vec![queue(0, &[(1_000_000, 5_000)])]);
        let now = stats(2_000, 1_100, vec![queue(0, &[(50, 10), (1_000_000, 5_000)]), queue(1, &[(60, 1)])]);
        let interval = now.of_interval(&before);
        assert_eq!(interval.interval_ns, Some(1_000));
        assert!((interval.sidecores[0].utilisation - 0.2).abs() < 1e-9);
        let queues = &interval.devices[0].queues;
        assert_eq!((queues[0].requests, queues[0].latency_ns.count, queues[0].latency_ns.p99), (5_010, 10, 50));
        assert_eq!((queues[1].requests, queues[1].latency_ns.max), (1, 60), "a queue that is new");
    }

    #[test]
    fn a_queue_without_a_count_is_unused() {
        assert!(!queue(7, &[]).is_used());
        let counts = QueueCounts { kicks: 1, ..QueueCounts::default() };
        assert!(QueueCounters { counts, ..queue(7, &[]) }.is_used());
    }

    #[test]
    fn counters_are_fields_of_their_report_in_json() {
        let latency_ns = serde_json::json!({
            "count": 0, "mean": 0.0, "p50": 0, "p90": 0, "p99": 0, "p99_9": 0, "p99_99": 0, "max": 0, "sum": 0,
        });
        let mut queue = serde_json::json!({ "index": 7, "bytes": 3, "latency_ns": latency_ns });
        for name in [
            "kicks",
            "calls",
            "polls",
            "empty_polls",
            "batches",
            "requests",
            "reads",
            "writes",
            "flushes",
            "discards",
            "write_zeroes",
            "errors",
            "rejected",
            "bytes_read",
            "bytes_written",
        ] {
            queue[name] = 0.into();
        }
        queue["bytes_read"] = 2.into();
        queue["bytes_written"] = 1.into();
        let mut counters = QueueCounters { index: 7, ..QueueCounters::default() };
        counters.add(&QueueCounts { bytes_read: 2, bytes_written: 1, ..QueueCounts::default() });
        assert_eq!(serde_json::to_value(&counters).unwrap(), queue);
        assert_eq!(serde_json::from_value::<QueueCounters>(queue).unwrap(), counters);
        let sidecore = serde_json::to_value(SidecoreReport::default()).unwrap();
        for name in ["name", "turns", "busy_turns", "busy_ns", "sleeps", "asleep_ns", "yields", "mails", "utilisation"]
        {
            assert!(sidecore.get(name).is_some(), "{name}: {sidecore}");
        }
        let function = serde_json::to_value(FunctionReport::default()).unwrap();
        for name in [
            "id",
            "channels",
            "last_hits",
            "translations",
            "splits",
            "misses",
            "prune_misses",
            "rewalks",
            "throttled",
            "stalled",
        ] {
            assert!(function.get(name).is_some(), "{name}: {function}");
        }
        let controller = serde_json::to_value(ControllerReport::default()).unwrap();
        assert!(controller["commits"] == 0 && controller["pruned_nodes"] == 0, "{controller}");
        for name in ["last_hits", "btlb_hits", "walks", "nodes_visited", "holes", "pruned"] {
            assert_eq!(controller["translation"][name], 0, "{name}: {controller}");
        }
    }

    #[test]
    fn a_state_has_the_same_word_in_json_and_in_text() {
        for state in DeviceState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
    }
}
