//! What a running assembly says about itself. These types are also the JSON of the control API, so a field that is
//! renamed here is renamed for every script out there.
//!
//! Counters start at zero with the daemon and never go back, whatever guests come and go.

mod controller;

use serde::{Deserialize, Serialize};
use sidecore_reactor::Histogram;

pub use controller::{
    CheckReport, ControllerReport, EventReport, ExtentReport, ExtentsReport, FunctionReport, SpaceReport,
    TranslationReport, TreeMemoryReport, TreeReport, VolumeReport,
};

/// All counters, read without stopping anything: two of them may be a few requests apart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Nanoseconds since the assembly was started.
    pub uptime_ns: u64,
    /// The polling threads, in the order of the configuration.
    pub sidecores: Vec<SidecoreReport>,
    /// The disks, in the order of the configuration.
    pub devices: Vec<DeviceStats>,
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
    /// Times that it went to sleep.
    pub sleeps: u64,
    /// Nanoseconds that it slept.
    pub asleep_ns: u64,
    /// Times that it gave way to the kernel's workers, or to another thread, because a request waited for them.
    pub yields: u64,
    /// Messages that it was sent: queues started and stopped, and the like.
    pub mails: u64,
    /// The share of its life in which it did something, 0 to 1, if all its turns took equally long.
    pub utilisation: f64,
    /// The queues that it polls right now.
    pub queues: u64,
}

/// The counters of a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Its name.
    pub name: String,
    /// Its request queues.
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
    /// Adds another queue's counters. Percentiles cannot be added: the worse one is kept, which overstates.
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
        self.latency_ns.add(&other.latency_ns);
    }
}

/// How long requests took, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// How many were timed.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half took at most this long.
    pub p50: u64,
    /// Nine in ten.
    pub p90: u64,
    /// 99 in a hundred.
    pub p99: u64,
    /// 999 in a thousand.
    pub p99_9: u64,
    /// 9,999 in ten thousand.
    pub p99_99: u64,
    /// The longest.
    pub max: u64,
}

impl Latency {
    /// What a histogram has seen.
    pub(crate) fn of(histogram: &Histogram) -> Self {
        let summary = histogram.summary();
        Self {
            count: summary.count,
            mean: summary.mean_ns as f64,
            p50: summary.p50_ns,
            p90: summary.p90_ns,
            p99: summary.p99_ns,
            p99_9: summary.p99_9_ns,
            p99_99: summary.p99_99_ns,
            max: summary.max_ns,
        }
    }

    fn add(&mut self, other: &Self) {
        let count = self.count.saturating_add(other.count);
        if count > 0 {
            let sum = self.mean * self.count as f64 + other.mean * other.count as f64;
            self.mean = sum / count as f64;
        }
        self.count = count;
        self.p50 = self.p50.max(other.p50);
        self.p90 = self.p90.max(other.p90);
        self.p99 = self.p99.max(other.p99);
        self.p99_9 = self.p99_9.max(other.p99_9);
        self.p99_99 = self.p99_99.max(other.p99_99);
        self.max = self.max.max(other.max);
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
    /// Why it is broken, if it is.
    pub reason: Option<String>,
    /// Whether it serves nothing until the driver resets it.
    pub needs_reset: bool,
    /// The counters of its queues together.
    pub counters: QueueCounters,
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
}

impl DeviceState {
    /// Every state there is.
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Connected, Self::Running, Self::Broken];

    /// The word for it in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Connected => "connected",
            Self::Running => "running",
            Self::Broken => "broken",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_total_adds_counts_and_keeps_the_worse_percentile() {
        let queue = |requests, mean, p99| QueueCounters {
            requests,
            latency_ns: Latency { count: requests, mean, p99, ..Latency::default() },
            ..QueueCounters::default()
        };
        let device = DeviceStats { name: "d".to_owned(), queues: vec![queue(1, 40.0, 50), queue(3, 20.0, 30)] };
        let total = device.total();
        assert_eq!((total.requests, total.latency_ns.p99), (4, 50));
        assert!((total.latency_ns.mean - 25.0).abs() < 1e-9);
    }

    #[test]
    fn a_state_has_the_same_word_in_json_and_in_text() {
        for state in DeviceState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
    }
}
