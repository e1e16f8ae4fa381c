//! Reports of controllers, their virtual functions and their volumes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_controller::{FunctionStats, HypervisorCounts};
use sidecore_extent::TranslationCounts;

/// The state of a controller.
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct ControllerReport {
    /// The controller's name in the configuration.
    pub name: String,
    /// The name of the controller's store.
    pub store: String,
    /// The label that the store got when it was formatted.
    pub label: String,
    /// The unit of translation in bytes.
    pub block_bytes: u32,
    /// The size of the store in bytes.
    pub capacity_bytes: u64,
    /// Whether volumes cannot be changed: metadata is damaged, or could not be written.
    pub read_only: bool,
    /// Why volumes cannot be changed.
    pub reason: Option<String>,
    /// The store's error if it had no space for the last commit. The changes are kept until it has
    /// space.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
    /// The used share of the store in percent, if it is more than `warn_used_percent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nearly_full_percent: Option<u8>,
    /// The sum of the volumes' sizes without snapshots, in bytes: the most that guests may write.
    #[serde(default)]
    pub provisioned_bytes: u64,
    /// Descriptions of damaged metadata.
    pub damage: Vec<String>,
    /// The store's bytes by their use.
    pub space: SpaceReport,
    /// The number of volumes and snapshots.
    pub volumes: u64,
    /// The number of extents of all volumes.
    pub extents: u64,
    /// The memory of the extent trees.
    pub tree_memory: TreeMemoryReport,
    /// The counters of all sidecores' translation units together.
    pub translation: TranslationCounts,
    /// The counters of the hypervisor side.
    #[serde(flatten)]
    pub counts: HypervisorCounts,
    /// The open virtual functions, by number.
    pub functions: Vec<FunctionReport>,
    /// The latest events, oldest first.
    pub events: Vec<EventReport>,
}

/// The bytes of a store by their use. The other fields add up to `total_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct SpaceReport {
    /// The size of the store.
    pub total_bytes: u64,
    /// Bytes that volumes can allocate.
    pub free_bytes: u64,
    /// Bytes of guests' data, each counted once even if several volumes refer to it.
    pub data_bytes: u64,
    /// Bytes of superblocks and of trees' nodes.
    pub metadata_bytes: u64,
    /// Bytes kept for metadata, so that volumes can be deleted on a full store.
    pub reserved_bytes: u64,
    /// Bytes granted to writes in flight.
    pub granted_bytes: u64,
    /// Freed bytes that may not be reused yet.
    pub pending_bytes: u64,
}

/// The memory of a controller's extent trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TreeMemoryReport {
    /// Bytes of nodes in memory.
    pub used_bytes: u64,
    /// The limit of `used_bytes`.
    pub max_bytes: u64,
}

/// A virtual function.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct FunctionReport {
    /// The function's number on its controller.
    pub id: u32,
    /// The name of the function's volume.
    pub volume: String,
    /// The function's weight among all functions.
    pub weight: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The limit of reads a second; `None` for no limit.
    pub read_iops: Option<u64>,
    /// The limit of writes a second; `None` for no limit.
    pub write_iops: Option<u64>,
    /// The limit of bytes read a second; `None` for no limit.
    pub read_bps: Option<u64>,
    /// The limit of bytes written a second; `None` for no limit.
    pub write_bps: Option<u64>,
    /// The number of open queues.
    pub channels: u64,
    /// The shape of the volume's extent tree.
    pub tree: TreeReport,
    /// The counters of all queues, past and present.
    #[serde(flatten)]
    pub stats: FunctionStats,
    /// The first block of the last miss (NeSC's register MissAddress).
    pub miss_address: u64,
    /// The number of blocks of the last miss (NeSC's register MissSize).
    pub miss_size: u64,
}

/// The shape of an extent tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct TreeReport {
    /// The number of levels from root to leaf.
    pub depth: u32,
    /// The number of nodes, of 4 KiB each.
    pub nodes: u64,
    /// The number of extents in the leaves.
    pub extents: u64,
    /// Bytes of the volume that the extents map.
    pub mapped_bytes: u64,
    /// The number of pruned ranges. The next requests to them read their nodes again.
    pub pruned_ranges: u64,
    /// Bytes of the volume in pruned ranges.
    pub pruned_bytes: u64,
}

/// An event of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct EventReport {
    /// The time in seconds since 1970; of several equal events in a row, the time of the last one.
    pub at_unix_s: u64,
    /// The event in words.
    pub what: String,
    /// The number of equal events in a row.
    pub times: u64,
}

/// A volume or a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct VolumeReport {
    /// The volume's number, which is never given to another volume.
    pub id: u64,
    /// The volume's name on its controller.
    pub name: String,
    /// The name of the controller.
    pub controller: String,
    /// The size in bytes that guests see.
    pub size_bytes: u64,
    /// The unit of translation in bytes.
    pub block_bytes: u32,
    /// The limit of `allocated_bytes`; `None` for no limit.
    pub quota_bytes: Option<u64>,
    /// The bytes that the volume refers to, shared or not.
    pub allocated_bytes: u64,
    /// The bytes that only this volume refers to, metadata included: a delete frees as many. As of
    /// the last commit; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive_bytes: Option<u64>,
    /// The part of `allocated_bytes` that other volumes refer to as well. As of the last commit;
    /// `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u64>,
    /// The number of extents that map the volume.
    pub extents: u64,
    /// Whether writes are refused, as for snapshots.
    pub read_only: bool,
    /// The number of the volume that this one is a copy of.
    pub origin: Option<u64>,
    /// The name of that volume, if it still exists.
    pub origin_name: Option<String>,
    /// The time of the creation in seconds since 1970.
    pub created_at_unix_s: u64,
    /// Whether some metadata is damaged. Then the volume is neither read nor written.
    pub damaged: bool,
}

/// A part of a volume's mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ExtentsReport {
    /// The unit of all block numbers, in bytes.
    pub block_bytes: u32,
    /// The extents in the volume's order. Blocks between them are not mapped and read as zeros.
    pub extents: Vec<ExtentReport>,
    /// The first block of the next part; `None` after the last part.
    pub next: Option<u64>,
}

/// Blocks of a volume that are consecutive on the store, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ExtentReport {
    /// The number of the first block in the volume.
    pub first: u64,
    /// The number of blocks.
    pub count: u64,
    /// The number of the first block on the store.
    pub physical: u64,
    /// Whether another volume or snapshot refers to these blocks as well.
    pub shared: bool,
}

/// The result of a check of all metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct CheckReport {
    /// Whether the check found no problem.
    pub clean: bool,
    /// The last durable generation of the metadata.
    pub generation: u64,
    /// The number of volumes and snapshots.
    pub volumes: u64,
    /// The number of metadata nodes.
    pub nodes: u64,
    /// The number of extents of all volumes.
    pub extents: u64,
    /// The number of blocks on the store.
    pub total_blocks: u64,
    /// The number of blocks with guests' data.
    pub data_blocks: u64,
    /// The number of data blocks that are referred to more than once.
    pub shared_data_blocks: u64,
    /// The number of blocks with metadata, superblocks included.
    pub metadata_blocks: u64,
    /// The number of free blocks, those kept for metadata included.
    pub free_blocks: u64,
    /// The number of blocks that are granted to writes in flight, or freed and not reusable yet.
    pub transient_blocks: u64,
    /// The problems, with their places; the first ones if there are many.
    pub problems: Vec<String>,
    /// The number of problems that are not in `problems`.
    pub more_problems: u64,
}
