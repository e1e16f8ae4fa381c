//! Reports of deduplications.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Mapped bytes of all volumes of the run, when it began.
    pub total_bytes: u64,
    /// Of those, the bytes that the run has passed.
    pub passed_bytes: u64,
    /// Bytes read from the store.
    pub read_bytes: u64,
    /// Bytes of blocks that became free, or in a dry run would.
    pub saved_bytes: u64,
    /// Of those, the bytes of blocks of zeros, which became holes.
    pub zero_bytes: u64,
    /// Runs of equal blocks that became one.
    pub remaps: u64,
    /// Equal bytes that were left because requests to them were in flight, or came between.
    pub busy_bytes: u64,
    /// Equal bytes that were left because volumes outside of the run have them too, or too many
    /// snapshots.
    pub kept_bytes: u64,
    /// Bytes that could not be read, and were left.
    pub unreadable_bytes: u64,
    /// Volumes whose metadata could not be read, and which were left.
    pub skipped_volumes: u64,
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
