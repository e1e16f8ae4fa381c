//! What a repair of a controller's store is about.

use serde::{Deserialize, Serialize};

/// A repair that was worked out, and perhaps carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairReport {
    /// Whether anything is damaged.
    pub needed: bool,
    /// Whether it can be carried out: no block is claimed by two, or it was said who loses it.
    pub decided: bool,
    /// Whether it was carried out.
    pub done: bool,
    /// The generation of the metadata: the new one, if it was carried out.
    pub generation: u64,
    /// The unit of all numbers of blocks, in bytes.
    pub block_bytes: u32,
    /// What is damaged, with its place.
    pub damage: Vec<String>,
    /// Volumes whose records cannot be read, and whose names are unknown.
    pub lost_volumes: u64,
    /// Their numbers are in these ranges: first, and how many.
    pub lost_numbers: Vec<(u64, u64)>,
    /// Parts of volumes whose mapping cannot be read; they become holes, which read as zeros.
    pub losses: Vec<LossReport>,
    /// What is put right and loses nothing.
    pub notes: Vec<String>,
    /// Blocks that more than one volume claims.
    pub rivals: Vec<RivalsReport>,
}

/// A part of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossReport {
    /// The volume.
    pub volume: String,
    /// Where the part begins, in bytes of the volume.
    pub offset_bytes: u64,
    /// How long it is, in bytes. Not all of it need have been written.
    pub size_bytes: u64,
    /// Why its mapping is unknown.
    pub why: String,
}

/// Blocks that only one of these can have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RivalsReport {
    /// The first block, on the store.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The volumes that claim them.
    pub volumes: Vec<String>,
    /// Whether the list of volumes lies there, which then keeps them.
    pub catalogue: bool,
}
