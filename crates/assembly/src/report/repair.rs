//! Reports of repairs of a controller's store.

use serde::{Deserialize, Serialize};

/// A planned repair, and whether it was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// Whether anything is damaged.
    pub needed: bool,
    /// Whether the repair can be carried out: each block is claimed by one volume, or the operator
    /// has named the volume that loses it.
    pub decided: bool,
    /// Whether the repair was carried out.
    pub done: bool,
    /// The generation of the metadata; the new one if the repair was carried out.
    pub generation: u64,
    /// The unit of all block numbers, in bytes.
    pub block_bytes: u32,
    /// The damaged metadata, with its places.
    pub damage: Vec<String>,
    /// The number of volumes whose records, and so whose names, cannot be read.
    pub lost_volumes: u64,
    /// The ranges that contain the numbers of those volumes: first number and count.
    pub lost_numbers: Vec<(u64, u64)>,
    /// Parts of volumes whose mapping cannot be read. The repair turns them into holes, which read
    /// as zeros.
    pub losses: Vec<LossReport>,
    /// Repairs without a loss.
    pub notes: Vec<String>,
    /// Blocks that more than one volume claims.
    pub rivals: Vec<RivalsReport>,
}

/// A part of a volume that a repair loses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossReport {
    /// The name of the volume.
    pub volume: String,
    /// The offset of the part in the volume.
    pub offset_bytes: u64,
    /// The length of the part. Some of it may never have been written.
    pub size_bytes: u64,
    /// Why the mapping is unknown.
    pub why: String,
}

/// Blocks that several volumes claim, and that only one can keep.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RivalsReport {
    /// The number of the first block on the store.
    pub first: u64,
    /// The number of blocks.
    pub count: u64,
    /// The names of the volumes that claim the blocks.
    pub volumes: Vec<String>,
    /// Whether the blocks hold the catalogue of volumes, which then keeps them.
    pub catalogue: bool,
}
