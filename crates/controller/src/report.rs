//! What a controller says about itself.

use sidecore_block::Geometry;
use sidecore_extent::{Shape, TranslationCounts};
use sidecore_volume::{Damage, Space};

use crate::{Event, FunctionStats, HypervisorCounts, Limits};

/// A controller as of one moment.
#[derive(Clone, Debug)]
pub struct ControllerReport {
    /// Its name.
    pub name: String,
    /// The store's label.
    pub label: String,
    /// The physical store.
    pub store: Geometry,
    /// The granularity of extents in bytes.
    pub block_bytes: u32,
    /// Where the blocks are.
    pub space: Space,
    /// Why nothing can be changed, if so.
    pub read_only: Option<String>,
    /// What the store said when it had no space for the last commit, which is kept and
    /// written again.
    pub full: Option<String>,
    /// The share of it that is in use, if that is more than it should be.
    pub used_percent: Option<u8>,
    /// Only damaged metadata keeps it from being changed: volumes are served as far as
    /// that is safe, and what was changed before is made durable.
    pub is_frozen: bool,
    /// What is not as it should be on the disk.
    pub damage: Vec<Damage>,
    /// The virtual functions, by number.
    pub functions: Vec<FunctionReport>,
    /// What the sidecores' translation units have counted together.
    pub translation: TranslationCounts,
    /// Bytes of tree nodes in use, and the most that may be.
    pub tree_bytes: u64,
    /// See `tree_bytes`.
    pub tree_bytes_max: u64,
    /// The counters of the hypervisor side.
    pub counts: HypervisorCounts,
    /// The last events, oldest first.
    pub events: Vec<Event>,
}

/// What an operator has to know first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Why nothing about the volumes can be changed, if so.
    pub read_only: Option<String>,
    /// Only damaged metadata is the reason: see [`ControllerReport::is_frozen`].
    pub is_frozen: bool,
    /// What the store said when it had no space for the last commit.
    pub full: Option<String>,
    /// The share of it that is in use, if that is more than it should be.
    pub used_percent: Option<u8>,
    /// The volume that was asked about is damaged.
    pub is_damaged: bool,
}

/// A virtual function as of one moment.
#[derive(Clone, Debug)]
pub struct FunctionReport {
    /// Its number: 1 and up, because the physical function is 0.
    pub id: u32,
    /// The volume that it shows.
    pub volume: String,
    /// Its share.
    pub weight: u32,
    /// What it may not exceed.
    pub limits: Limits,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Its extent tree, which all functions of one volume share.
    pub tree: Shape,
    /// Queues open right now.
    pub channels: u64,
    /// What became of its requests.
    pub stats: FunctionStats,
    /// MissAddress and MissSize of its last miss (thesis 6.1), in blocks.
    pub miss_address: u64,
    /// See `miss_address`.
    pub miss_size: u64,
}
