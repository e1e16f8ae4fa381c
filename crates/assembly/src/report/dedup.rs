//! Reports of deduplications.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_controller::DedupCounts;

/// A deduplication of a controller: the one in progress, or the last one.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct DedupReport {
    /// The controller's name.
    pub controller: String,
    /// The state of the run.
    pub state: DedupPhase,
    /// Why the run has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The volumes that were named; none for all.
    pub volumes: Vec<String>,
    /// Whether blocks of different families may become one.
    pub across: bool,
    /// Whether nothing is changed.
    pub dry_run: bool,
    /// The bytes that the run reads in a second at most.
    pub rate_bytes_per_s: u64,
    /// Whether the run reads more slowly at present, because guests make requests.
    pub yields: bool,
    /// The seconds that the run has taken.
    pub seconds: f64,
    /// The bytes that the run has dealt with so far.
    #[serde(flatten)]
    pub counts: DedupCounts,
}

/// The state of a deduplication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DedupPhase {
    /// The run goes on.
    #[default]
    Running,
    /// All volumes were looked at.
    Done,
    /// The operator, or the end of the daemon, has stopped the run.
    Stopped,
    /// The run has ended early.
    Failed,
}
