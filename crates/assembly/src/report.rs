//! What a running assembly says about itself. These types are also the JSON of the control API, so a field that is
//! renamed here is renamed for every script out there.
//!
//! Counters start at zero with the daemon and never go back, whatever guests come and go.

mod closed;
mod controller;
mod repair;

use serde::{Deserialize, Serialize};

pub use closed::{ClosedControllerReport, ControllerState};
pub use controller::{
    CheckReport, ControllerReport, EventReport, ExtentReport, ExtentsReport, FunctionReport, SpaceReport,
    TranslationReport, TreeMemoryReport, TreeReport, VolumeReport,
};
pub use repair::{LossReport, RepairReport, RivalsReport};
pub use sidecore_telemetry::{Latency, LatencyCounts};

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
                    queue.latency_ns = queue.latency_ns.since(&old.latency_ns);
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
    /// Rounds of its loop.
    pub turns: u64,
    /// Rounds in which something was done.
    pub busy_turns: u64,
    /// Nanoseconds that those rounds took.
    #[serde(default)]
    pub busy_ns: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
    /// Nanoseconds that it slept.
    pub asleep_ns: u64,
    /// Times that it gave way to the kernel's workers, or to another thread, because a request waited for them.
    pub yields: u64,
    /// Messages that it was sent: queues started and stopped, and the like.
    pub mails: u64,
    /// The share of the time, 0 to 1, that rounds took in which something was done.
    pub utilisation: f64,
    /// The queues that it polls right now.
    pub queues: u64,
    /// Its core is lost to other work: how much of it, and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl SidecoreReport {
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
    /// Kicks by the guest that arrived: exits, on hardware.
    pub kicks: u64,
    /// Calls to the guest that were sent: interrupts, on hardware.
    pub calls: u64,
    /// Looks at the ring.
    pub polls: u64,
    /// Looks that found nothing.
    pub empty_polls: u64,
    /// Batches that went to the store.
    pub batches: u64,
    /// Requests completed, of every kind.
    pub requests: u64,
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Discards completed.
    pub discards: u64,
    /// Writes of zeros completed.
    pub write_zeroes: u64,
    /// Requests that the store failed.
    pub errors: u64,
    /// Requests refused before they reached the store: malformed, out of bounds, unsupported.
    pub rejected: u64,
    /// Bytes that guests read.
    pub bytes_read: u64,
    /// Bytes that guests wrote.
    pub bytes_written: u64,
    /// Both together.
    pub bytes: u64,
    /// From taking a request off the ring to completing it, in nanoseconds.
    pub latency_ns: Latency,
}

impl QueueCounters {
    /// Whether the guest has ever used the queue.
    #[must_use]
    pub fn is_used(&self) -> bool {
        *self != Self { index: self.index, ..Self::default() }
    }

    /// Adds another queue's counters.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.kicks, other.kicks),
            (&mut self.calls, other.calls),
            (&mut self.polls, other.polls),
            (&mut self.empty_polls, other.empty_polls),
            (&mut self.batches, other.batches),
            (&mut self.requests, other.requests),
            (&mut self.reads, other.reads),
            (&mut self.writes, other.writes),
            (&mut self.flushes, other.flushes),
            (&mut self.discards, other.discards),
            (&mut self.write_zeroes, other.write_zeroes),
            (&mut self.errors, other.errors),
            (&mut self.rejected, other.rejected),
            (&mut self.bytes_read, other.bytes_read),
            (&mut self.bytes_written, other.bytes_written),
            (&mut self.bytes, other.bytes),
        ];
        for (sum, count) in pairs {
            *sum = sum.saturating_add(count);
        }
        self.latency_ns.add(&other.latency_ns.counts());
    }
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
        QueueCounters { index, requests: latency_ns.count, latency_ns, ..QueueCounters::default() }
    }

    fn stats(uptime_ns: u64, busy_ns: u64, queues: Vec<QueueCounters>) -> Stats {
        let sidecore = SidecoreReport { name: "sc0".to_owned(), busy_ns, ..SidecoreReport::default() };
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
        assert!(QueueCounters { kicks: 1, ..queue(7, &[]) }.is_used());
    }

    #[test]
    fn a_state_has_the_same_word_in_json_and_in_text() {
        for state in DeviceState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
    }
}
