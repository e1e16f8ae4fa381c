//! The stages of a device.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_block::{
    Findings, FindingsCounts, Recording, RecordingCounts, RecordingState, StageCounts,
};

/// The stages of a device.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct StagesReport {
    /// The device's name.
    pub device: String,
    /// The stages, in the order in which a request meets them.
    pub stages: Vec<StageReport>,
}

/// A stage of a device.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct StageReport {
    /// The stage's place in the order, from 1.
    pub position: usize,
    /// The type of the stage.
    #[serde(rename = "type")]
    pub word: String,
    /// Whether the stage was added while the daemon runs, and can be removed. The others belong to
    /// the device's store in the configuration.
    pub is_live: bool,
    /// The settings of an added stage that were given, each as `KEY=VALUE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<String>,
    /// The number of threads of its own that the stage runs on; 0 if it runs on sidecores.
    #[serde(default)]
    pub threads: usize,
    /// Why the stage has failed, and with it all requests of the device; `None` while it works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The recording that the stage makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<RecordingReport>,
    /// The bad blocks that the stage has found, if it checks blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub findings: Option<FindingsReport>,
}

/// The bad blocks that a stage has found since it was opened.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct FindingsReport {
    /// The last bad block, or why writes fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The counters.
    #[serde(flatten)]
    pub counts: FindingsCounts,
}

impl FindingsReport {
    pub(crate) fn of(findings: &Findings) -> Self {
        Self { problem: findings.problem(), counts: findings.counts() }
    }
}

/// A recording of requests.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RecordingReport {
    /// The file.
    pub file: String,
    /// The size of the file in bytes.
    pub file_bytes: u64,
    /// Whether the file has its largest size. It is complete then.
    pub is_full: bool,
    /// Why requests are not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The counters.
    #[serde(flatten)]
    pub counts: RecordingCounts,
}

impl RecordingReport {
    pub(crate) fn of(recording: &Recording) -> Self {
        Self {
            file: recording.file().display().to_string(),
            file_bytes: recording.file_bytes(),
            is_full: recording.state() == RecordingState::Full,
            problem: recording.problem(),
            counts: recording.counts(),
        }
    }
}

/// The counters of a stage of a device.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct StageStats {
    /// The device's name.
    pub device: String,
    /// The stage's place in the order in which a request meets the device's stages, from 1.
    pub position: usize,
    /// The type of the stage.
    #[serde(rename = "type")]
    pub word: String,
    /// Whether the stage has failed, and with it all requests of the device.
    pub has_failed: bool,
    /// The longest time that the stage took of a turn; 0 if that was never over a millisecond.
    pub longest_turn_ns: u64,
    /// The number of threads of its own that the stage runs on; 0 if it runs on sidecores.
    #[serde(default)]
    pub threads: usize,
    /// The time for which these threads have run, also without work.
    #[serde(default)]
    pub threads_ran_ns: u64,
    /// The recording that the stage makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<RecordingReport>,
    /// The bad blocks that the stage has found, if it checks blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub findings: Option<FindingsReport>,
    /// The counters.
    #[serde(flatten)]
    pub counts: StageCounts,
}

/// A stage that was added to a device, or removed.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StageChange {
    /// The device's name.
    pub device: String,
    /// The type of the stage.
    #[serde(rename = "type")]
    pub word: String,
    /// The stage's place among the device's stages, from 1.
    pub position: usize,
    /// The number of queues that were running.
    pub queues: usize,
    /// The nanoseconds in which these queues may have taken no requests.
    pub pause_ns: u64,
}
