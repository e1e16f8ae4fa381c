//! The stages of a device.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The stages of a device.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct StagesReport {
    /// The device's name.
    pub device: String,
    /// The stages, in the order in which a request meets them.
    pub stages: Vec<StageReport>,
}

/// A stage of a device.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
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
