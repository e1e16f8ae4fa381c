//! The result of a full check.

use crate::error::Place;

/// Something that a check does not like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The structure with the problem.
    pub place: Place,
    /// The problem.
    pub what: String,
}

/// The result of [`Volumes::check`](crate::Volumes::check). All counts of blocks are in the store's
/// blocks; they add up to `total_blocks` if nothing is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The last durable generation.
    pub generation: u64,
    /// Volumes, snapshots included.
    pub volumes: u64,
    /// Metadata nodes, each counted once.
    pub nodes: u64,
    /// Extents in them, each counted once.
    pub extents: u64,
    /// Blocks of the store.
    pub total_blocks: u64,
    /// Blocks of superblock slots.
    pub superblock_blocks: u64,
    /// Blocks of metadata nodes.
    pub metadata_blocks: u64,
    /// Blocks that hold guest data.
    pub data_blocks: u64,
    /// Data blocks that more than one extent refers to, or that are below a node that snapshots or
    /// clones share.
    pub shared_data_blocks: u64,
    /// References to data blocks, one for each extent that covers a block.
    pub data_references: u64,
    /// Blocks of grants.
    pub granted_blocks: u64,
    /// Blocks freed and not yet usable.
    pub pending_blocks: u64,
    /// Free blocks, the metadata reserve included.
    pub free_blocks: u64,
    /// The problems, at most [`MAX_PROBLEMS`](Self::MAX_PROBLEMS) of them.
    pub problems: Vec<Problem>,
    /// Problems that the list has no room for.
    pub more_problems: u64,
}

impl Report {
    /// Problems that are listed.
    pub const MAX_PROBLEMS: usize = 256;

    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.problems.is_empty()
    }
}
