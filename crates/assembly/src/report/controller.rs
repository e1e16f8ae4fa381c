//! What controllers and their volumes say about themselves.

use serde::{Deserialize, Serialize};
use sidecore_controller::{FunctionStats, HypervisorCounts};
use sidecore_extent::TranslationCounts;

/// What a controller is and how it fares.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ControllerReport {
    /// Its name.
    pub name: String,
    /// The store that it owns.
    pub store: String,
    /// What people called that store when they formatted it.
    pub label: String,
    /// The unit of translation in bytes.
    pub block_bytes: u32,
    /// Size of the store in bytes.
    pub capacity_bytes: u64,
    /// Whether nothing may be changed any more: metadata is damaged, or could not be written.
    pub read_only: bool,
    /// Why, if so.
    pub reason: Option<String>,
    /// What the store said when it had no space for the last commit: what was changed is kept until it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
    /// The share of its store that is in use, in percent, if that is more than `warn_used_percent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nearly_full_percent: Option<u8>,
    /// The sizes of its volumes together, without snapshots: what guests may write at most, in bytes.
    #[serde(default)]
    pub promised_bytes: u64,
    /// What was found damaged, in words.
    pub damage: Vec<String>,
    /// What is used for what.
    pub space: SpaceReport,
    /// How many volumes there are, snapshots included.
    pub volumes: u64,
    /// How many extents map their blocks.
    pub extents: u64,
    /// The memory of the extent trees.
    pub tree_memory: TreeMemoryReport,
    /// The sum of the counters of all sidecores' translation units.
    pub translation: TranslationCounts,
    /// The counters of the hypervisor side.
    #[serde(flatten)]
    pub counts: HypervisorCounts,
    /// The virtual functions that are open.
    pub functions: Vec<FunctionReport>,
    /// What happened to it lately, the oldest first.
    pub events: Vec<EventReport>,
}

/// Where a store's bytes are. The parts add up to `total_bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceReport {
    /// All of them.
    pub total_bytes: u64,
    /// Those that volumes can be given.
    pub free_bytes: u64,
    /// Those that hold guests' data, however many volumes refer to them.
    pub data_bytes: u64,
    /// Superblocks and the nodes of the trees on disk.
    pub metadata_bytes: u64,
    /// Kept for metadata, so that deleting works on a full store.
    pub reserved_bytes: u64,
    /// Given to writes that are under way.
    pub granted_bytes: u64,
    /// Freed, and not to be used again yet.
    pub pending_bytes: u64,
}

/// The memory of a controller's extent trees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeMemoryReport {
    /// In use.
    pub used_bytes: u64,
    /// The most that it may be.
    pub max_bytes: u64,
}

/// A virtual function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionReport {
    /// Its number.
    pub id: u32,
    /// The volume that it shows.
    pub volume: String,
    /// Its share among those that want to be served.
    pub weight: u32,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Reads a second that it is limited to.
    pub read_iops: Option<u64>,
    /// Writes a second that it is limited to.
    pub write_iops: Option<u64>,
    /// Bytes read a second that it is limited to.
    pub read_bps: Option<u64>,
    /// Bytes written a second that it is limited to.
    pub write_bps: Option<u64>,
    /// Queues that are open.
    pub channels: u64,
    /// Its extent tree.
    pub tree: TreeReport,
    /// The counters of all its queues, past and present.
    #[serde(flatten)]
    pub stats: FunctionStats,
    /// The first block of its last miss (MissAddress).
    pub miss_address: u64,
    /// The blocks of its last miss (MissSize).
    pub miss_size: u64,
}

/// The shape of an extent tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeReport {
    /// Levels from root to leaf.
    pub depth: u32,
    /// Nodes of 4 KiB.
    pub nodes: u64,
    /// Extents in its leaves.
    pub extents: u64,
    /// Bytes of the volume that they map.
    pub mapped_bytes: u64,
    /// Parts that were pruned and are read again when they are needed.
    pub pruned_ranges: u64,
    /// Bytes of the volume in them.
    pub pruned_bytes: u64,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// When, in seconds since 1970; the last time, if it happened several times in a row.
    pub at_unix_s: u64,
    /// What.
    pub what: String,
    /// How many times in a row.
    pub times: u64,
}

/// A volume or a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeReport {
    /// Its number, which no other ever has.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The controller that it belongs to.
    pub controller: String,
    /// Its size as guests see it, in bytes.
    pub size_bytes: u64,
    /// The unit of translation in bytes.
    pub block_bytes: u32,
    /// The most that it may refer to, in bytes.
    pub quota_bytes: Option<u64>,
    /// What it refers to, shared or not, in bytes.
    pub allocated_bytes: u64,
    /// What only it refers to, its metadata included: what deleting it frees, in bytes. Of the last commit; none if
    /// that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive_bytes: Option<u64>,
    /// The part of `allocated_bytes` that other volumes or snapshots refer to as well. Of the last commit; none if
    /// that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u64>,
    /// The extents that map it.
    pub extents: u64,
    /// Whether nothing may be written to it, as with snapshots.
    pub read_only: bool,
    /// The number of the volume that it was made from.
    pub origin: Option<u64>,
    /// That volume's name, if it is still there.
    pub origin_name: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created_at_unix_s: u64,
    /// Whether some of its metadata is damaged: then it is neither read nor written.
    pub damaged: bool,
}

/// Part of a volume's mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentsReport {
    /// The unit of the numbers below, in bytes.
    pub block_bytes: u32,
    /// In the volume's order; what lies between them is not mapped and reads as zeros.
    pub extents: Vec<ExtentReport>,
    /// The block to go on from; none when this was all.
    pub next: Option<u64>,
}

/// Blocks of a volume that follow each other on the store, too. Numbers are in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentReport {
    /// The first block in the volume.
    pub first: u64,
    /// How many blocks.
    pub count: u64,
    /// The first block on the store.
    pub physical: u64,
    /// Whether another volume or snapshot refers to them as well.
    pub shared: bool,
}

/// What a full check found. Numbers are in blocks unless they say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Whether nothing is wrong.
    pub clean: bool,
    /// The last durable generation of the metadata.
    pub generation: u64,
    /// How many volumes, snapshots included.
    pub volumes: u64,
    /// How many metadata nodes.
    pub nodes: u64,
    /// How many extents.
    pub extents: u64,
    /// Blocks of the store.
    pub total_blocks: u64,
    /// Those that hold guests' data.
    pub data_blocks: u64,
    /// Those of them that more than one volume refers to, or one of them several times.
    pub shared_data_blocks: u64,
    /// Those that hold metadata, the superblocks included.
    pub metadata_blocks: u64,
    /// Those that are free, what is kept for metadata included.
    pub free_blocks: u64,
    /// Those given to writes under way, and those freed but not to be used again yet.
    pub transient_blocks: u64,
    /// What is wrong, with its place.
    pub problems: Vec<String>,
    /// How many more problems there are.
    pub more_problems: u64,
}
