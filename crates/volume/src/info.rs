//! Information about volumes and the space that they share.

use std::fmt;

/// A volume's number: never used for another volume, even after deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub u64);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Whether a volume can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// All of its metadata is whole.
    Healthy,
    /// Some of its metadata is not: it is neither read nor written.
    Damaged,
}

/// A volume, as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// The volume's number.
    pub id: VolumeId,
    /// The volume's name, unique in the store.
    pub name: String,
    /// The size as guests see it, in blocks.
    pub blocks: u64,
    /// The most blocks that it may refer to, `None` for its size.
    pub quota_blocks: Option<u64>,
    /// Blocks that it refers to, shared or not.
    pub allocated_blocks: u64,
    /// Extents that map them.
    pub extents: u64,
    /// Snapshots are read only.
    pub read_only: bool,
    /// The volume or snapshot that this one was made from; it may be gone.
    pub origin: Option<VolumeId>,
    /// When it was made, in seconds since 1970.
    pub created_at_unix_s: u64,
    /// Whether it can be used.
    pub state: VolumeState,
}

/// The properties of a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// 1 to 64 of `A-Z a-z 0-9 . _ -`, not beginning with `.` or `-`.
    pub name: String,
    /// The size as guests see it, in blocks.
    pub blocks: u64,
    /// The most blocks that it may refer to.
    pub quota_blocks: Option<u64>,
}

/// Where the blocks of a store are, in blocks. The parts add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// All blocks of the store.
    pub total: u64,
    /// Blocks that can be allocated to volumes.
    pub free: u64,
    /// Blocks with guest data, each counted once however many volumes refer to it.
    pub data: u64,
    /// Superblocks and nodes.
    pub metadata: u64,
    /// Kept for metadata, so that deleting works on a full store.
    pub reserved: u64,
    /// Given to grants that are neither linked nor released yet.
    pub granted: u64,
    /// Freed, and not yet usable: their transaction is not durable, or
    /// [`reuse`](crate::Volumes::reuse) was not called.
    pub pending: u64,
}
