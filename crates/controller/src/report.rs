//! Reports of a controller's state.

use sidecore_block::Geometry;
use sidecore_extent::{Shape, TranslationCounts};
use sidecore_volume::{Damage, Space};

use crate::{Event, FunctionStats, HypervisorCounts, Limits};

/// A controller's state at one moment.
#[derive(Clone, Debug)]
pub struct ControllerReport {
    /// The controller's name.
    pub name: String,
    /// The store's label.
    pub label: String,
    /// The geometry of the physical store.
    pub store: Geometry,
    /// The granularity of extents in bytes.
    pub block_bytes: u32,
    /// The store's blocks by use.
    pub space: Space,
    /// Why the metadata cannot be changed, if so.
    pub read_only: Option<String>,
    /// The store's error if it had no space for the last commit, which is kept and written again.
    pub full: Option<String>,
    /// The used share of the store, in percent, if it is above the configured threshold.
    pub used_percent: Option<u8>,
    /// Only damaged metadata keeps the store from being changed: volumes are served as far as that
    /// is safe, and earlier changes are made durable.
    pub is_frozen: bool,
    /// Damage found in the metadata on the disk.
    pub damage: Vec<Damage>,
    /// The virtual functions, by number.
    pub functions: Vec<FunctionReport>,
    /// The counters of all sidecores' translation units.
    pub translation: TranslationCounts,
    /// Bytes of tree nodes in use.
    pub tree_bytes: u64,
    /// The limit of `tree_bytes`.
    pub tree_bytes_max: u64,
    /// The counters of the hypervisor side.
    pub counts: HypervisorCounts,
    /// The last events, oldest first.
    pub events: Vec<Event>,
}

/// The conditions that an operator has to act on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Why the metadata cannot be changed, if so.
    pub read_only: Option<String>,
    /// Only damaged metadata is the reason: see [`ControllerReport::is_frozen`].
    pub is_frozen: bool,
    /// The store's error if it had no space for the last commit.
    pub full: Option<String>,
    /// The used share of the store, in percent, if it is above the configured threshold.
    pub used_percent: Option<u8>,
    /// The volume in question is damaged.
    pub is_damaged: bool,
}

/// A virtual function's state at one moment.
#[derive(Clone, Debug)]
pub struct FunctionReport {
    /// The function's number: 1 and up, because the physical function is 0.
    pub id: u32,
    /// The volume's name.
    pub volume: String,
    /// The function's weight among all functions.
    pub weight: u32,
    /// The function's rate limits.
    pub limits: Limits,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The size of its extent tree, which all functions of one volume share.
    pub tree: Shape,
    /// The number of open queues.
    pub channels: u64,
    /// Counters of its requests.
    pub stats: FunctionStats,
    /// MissAddress of its last miss (thesis 6.1), in blocks.
    pub miss_address: u64,
    /// MissSize of its last miss, in blocks.
    pub miss_size: u64,
}
