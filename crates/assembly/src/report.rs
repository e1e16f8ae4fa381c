//! Reports of a running assembly. The types are the JSON of the control API: scripts depend on the
//! names of the fields.
//!
//! Counters start at zero with the daemon and only grow, also over guests' reconnects.

mod closed;
mod controller;
mod dedup;
mod meter;
mod mirror;
mod net;
mod remote;
mod repair;
mod schedule;
mod stages;
mod trace;

use std::ops::Deref;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_block::QueueStats;
use sidecore_sidecore::Sidecore;
use sidecore_telemetry::CounterSet;
use sidecore_units::Nanos;

pub use closed::{ClosedControllerReport, ControllerState};
pub use controller::{
    CheckReport, ControllerReport, EventReport, ExtentReport, ExtentsReport, FunctionReport,
    SpaceReport, TreeMemoryReport, TreeReport, VolumeReport,
};
pub use dedup::{DedupPhase, DedupReport};
pub use meter::MeterReport;
pub use mirror::{LegReport, LegWord, MirrorReport, MirrorState};
pub use net::{
    CaptureReport, FirewallReport, PortReport, RuleReport, StageFailureReport, StationReport,
    SwitchReport, WireReport,
};
pub use remote::{
    ClientReport, ExecutorReport, ExportReport, ExportedNicReport, IohostReport, LinkMove,
    LinkReport, RefusedDeviceReport, RemoteDeviceReport, RemoteNicReport, RemoteReport,
    ServeReport,
};
pub use repair::{LossReport, RepairReport, RivalsReport};
pub use schedule::{HeldReport, ScheduleReport, ScheduledVolumeReport};
pub use sidecore_block::{FindingsCounts, MeterCounts, QueueCounts, RecordingCounts, StageCounts};
pub use sidecore_controller::{DedupCounts, FunctionStats, HypervisorCounts};
pub use sidecore_extent::TranslationCounts;
pub use sidecore_link::LinkCounts;
pub use sidecore_net::PortCounts;
pub use sidecore_reactor::ReactorCounts;
pub use sidecore_remote::export::ExecutorCounts;
pub use sidecore_stage_capture::CaptureCounts;
pub use sidecore_stage_firewall::{RuleCounts, TableCounts};
pub use sidecore_stage_wire::WireCounts;
pub use sidecore_telemetry::{Counts, Latency, LatencyCounts};
pub use sidecore_vrio::VrioCounts;
pub use stages::{
    FindingsReport, RecordingReport, StageChange, StageReport, StageStats, StagesReport,
};
pub use trace::{DropReport, DropWay, FlowReport};

/// All counters. They are read while sidecores run: two counters may be a few requests apart.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Stats {
    /// Nanoseconds since the assembly was started.
    pub uptime_ns: u64,
    /// The length of the interval that latencies and utilisation cover; `None` if they cover the
    /// time since the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ns: Option<u64>,
    /// The polling threads, in the order of the configuration.
    pub sidecores: Vec<SidecoreReport>,
    /// The devices, in the order of the configuration.
    pub devices: Vec<DeviceStats>,
    /// The meters in front of stores that devices lead to, by their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub meters: Vec<MeterReport>,
    /// The stages of devices, in the order in which a request meets them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageStats>,
}

impl Stats {
    /// Returns these counters with latencies and utilisation of the time since `earlier`, a report
    /// of the same daemon.
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

/// The use of a sidecore's time.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct SidecoreReport {
    /// The sidecore's name in the configuration.
    pub name: String,
    /// The CPU that the sidecore is pinned to.
    pub cpu: Option<u32>,
    /// The counters of its loop.
    #[serde(flatten)]
    pub counts: ReactorCounts,
    /// The share of the time, 0 to 1, that was taken by turns with work.
    pub utilisation: f64,
    /// How much of the sidecore's core other work takes, and the remedy; `None` while the core is
    /// the sidecore's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl SidecoreReport {
    /// Reads a sidecore's counters at the time `now`.
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

    /// The share of the last `elapsed_ns`, 0 to 1, that was taken by turns with work. `earlier` is
    /// the sidecore's report from the beginning of that time; `None` if the sidecore is younger.
    #[must_use]
    pub fn utilisation_since(&self, earlier: Option<&Self>, elapsed_ns: u64) -> f64 {
        let before_ns = earlier.map_or(0, |earlier| earlier.busy_ns);
        let busy_ns = self.busy_ns.saturating_sub(before_ns);
        // The time of a turn is counted at its end; the turn may have begun before the interval.
        if elapsed_ns == 0 { 0.0 } else { (busy_ns as f64 / elapsed_ns as f64).min(1.0) }
    }
}

/// The counters of a device.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct DeviceStats {
    /// The device's name in the configuration.
    pub name: String,
    /// The request queues that guests have used.
    pub queues: Vec<QueueCounters>,
}

impl DeviceStats {
    /// Adds the counters of all queues.
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
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct QueueCounters {
    /// The queue's number on its device.
    pub index: u16,
    /// The counters of requests and notifications.
    #[serde(flatten)]
    pub counts: QueueCounts,
    /// Bytes read and written by guests.
    pub bytes: u64,
}

impl QueueCounters {
    /// Reads the counters of the queue with this number.
    pub(crate) fn of(index: u16, stats: &QueueStats) -> Self {
        let mut counters = Self { index, ..Self::default() };
        counters.add(&stats.counts());
        counters
    }

    /// Whether a guest has ever used the queue.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.counts != QueueCounts::default()
    }

    /// Adds the counters of another queue.
    pub fn add(&mut self, counts: &QueueCounts) {
        self.counts.add(counts);
        self.bytes = self.bytes_read.saturating_add(self.bytes_written);
    }
}

/// Derefs a report to its counters, because its JSON has them as fields of the report itself.
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
    MeterReport: counts of MeterCounts,
    StageStats: counts of StageCounts,
    RecordingReport: counts of RecordingCounts,
    FindingsReport: counts of FindingsCounts,
    FunctionReport: stats of FunctionStats,
}

/// The settings and the state of a device.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct DeviceReport {
    /// The device's name in the configuration.
    pub name: String,
    /// The guest's view: `virtio-blk`, `nvme` or `virtio-net`; or `vrio`, `vrio-net`,
    /// `remote-net`, `ublk`, `tap` or `ethernet`.
    pub front_end: String,
    /// The name of the device's store; empty for a NIC.
    pub store: String,
    /// The type of that store.
    #[serde(rename = "type")]
    pub store_type: String,
    /// The types of the stages that a request passes, in that order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<String>,
    /// The controller, if a virtual or physical function is at the bottom of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<String>,
    /// The volume, if the function is a virtual one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The switch, if the device is a NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch: Option<String>,
    /// The path of the socket, or of the block device of this host.
    pub socket: String,
    /// The size in bytes.
    pub capacity_bytes: u64,
    /// The unit of reads and writes in bytes.
    pub block_bytes: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The number of request queues.
    pub queues: u16,
    /// The number of queues that the guest has started.
    pub queues_running: u16,
    /// The names of the sidecores that serve the queues.
    pub sidecores: Vec<String>,
    /// The idle mode: `poll`, `adaptive` or `interrupt`.
    pub idle: String,
    /// The device's state.
    pub state: DeviceState,
    /// Why the device is broken or not served.
    pub reason: Option<String>,
    /// Conditions that restrict the device while it is served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Whether the device is broken until the guest's driver resets it.
    pub needs_reset: bool,
    /// The last client that was disconnected for its errors, if no queue has been started since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disconnect: Option<DisconnectReport>,
    /// The sum of its queues' counters, without the histogram's buckets.
    pub counters: QueueCounters,
}

/// The disconnect of a client for its errors.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct DisconnectReport {
    /// The client's error.
    pub reason: String,
    /// The time in seconds since 1970.
    pub at_unix_s: u64,
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// No VMM is connected.
    Waiting,
    /// A VMM is connected, and the guest's driver has started no queue.
    Connected,
    /// At least one queue is running.
    Running,
    /// The guest broke the protocol, or the store failed. Other devices are served.
    Broken,
    /// The store has not answered yet, or has only just: the device is served soon after.
    Opening,
    /// The store could not be opened: remove the device, or restart the daemon.
    Refused,
    /// The kernel does not show the block device of this host yet.
    Starting,
}

impl DeviceState {
    /// All states, in the order of their declaration.
    pub const ALL: [Self; 7] = [
        Self::Waiting,
        Self::Connected,
        Self::Running,
        Self::Broken,
        Self::Opening,
        Self::Refused,
        Self::Starting,
    ];

    /// The word for the state in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connected => "connected",
            Self::Running => "running",
            Self::Broken => "broken",
            Self::Opening => "opening",
            Self::Refused => "refused",
            Self::Starting => "starting",
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
        let counts =
            QueueCounts { requests: latency_ns.count, latency_ns, ..QueueCounts::default() };
        QueueCounters { index, counts, bytes: 0 }
    }

    fn stats(uptime_ns: u64, busy_ns: u64, queues: Vec<QueueCounters>) -> Stats {
        let counts = ReactorCounts { busy_ns, ..ReactorCounts::default() };
        let sidecore =
            SidecoreReport { name: "sc0".to_owned(), counts, ..SidecoreReport::default() };
        Stats {
            uptime_ns,
            sidecores: vec![sidecore],
            devices: vec![DeviceStats { name: "d".to_owned(), queues }],
            ..Stats::default()
        }
    }

    #[test]
    fn a_total_adds_counts_and_has_the_percentiles_of_all_requests() {
        let device = DeviceStats {
            name: "d".to_owned(),
            queues: vec![queue(0, &[(50, 1)]), queue(3, &[(30, 199)])],
        };
        let total = device.total();
        assert_eq!((total.requests, total.latency_ns.p99, total.latency_ns.max), (200, 30, 50));
        assert!((total.latency_ns.mean - 30.1).abs() < 1e-9);
    }

    #[test]
    fn an_interval_covers_latencies_and_utilisation_but_no_counters() {
        let before = stats(1_000, 900, vec![queue(0, &[(1_000_000, 5_000)])]);
        let now = stats(
            2_000,
            1_100,
            vec![queue(0, &[(50, 10), (1_000_000, 5_000)]), queue(1, &[(60, 1)])],
        );
        let interval = now.of_interval(&before);
        assert_eq!(interval.interval_ns, Some(1_000));
        assert!((interval.sidecores[0].utilisation - 0.2).abs() < 1e-9);
        let queues = &interval.devices[0].queues;
        assert_eq!(
            (queues[0].requests, queues[0].latency_ns.count, queues[0].latency_ns.p99),
            (5_010, 10, 50)
        );
        assert_eq!((queues[1].requests, queues[1].latency_ns.max), (1, 60), "a new queue");
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
            "count": 0, "mean": 0.0, "p50": 0, "p90": 0, "p99": 0, "p99_9": 0, "p99_99": 0,
            "max": 0, "sum": 0,
        });
        let mut queue = serde_json::json!({ "index": 7, "bytes": 3, "latency_ns": latency_ns });
        for name in [
            "kicks",
            "interrupts",
            "polls",
            "empty_polls",
            "enters",
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
        for name in [
            "name",
            "turns",
            "busy_turns",
            "busy_ns",
            "sleeps",
            "asleep_ns",
            "yields",
            "messages",
            "utilisation",
        ] {
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
