//! Where things may lie.

use twox_hash::XxHash3_64;

use crate::limits::NODE_BYTES;

/// Superblock slots at the start of a store.
pub(crate) const SLOTS: u32 = 4;

/// The checksum of everything that is metadata.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Whether the bytes have this checksum. When fuzzing, always true: the code to be tested is behind
/// this check.
pub(crate) fn is_whole(bytes: &[u8], sum: u64) -> bool {
    cfg!(fuzzing) || checksum(bytes) == sum
}

/// The limits that a store's addresses are checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Bytes in a block: 512, 1024 or 4096.
    pub(crate) block_bytes: u32,
    /// Blocks of the store.
    pub(crate) total_blocks: u64,
    /// Half of the store's UUID folded over the other half: in every node, so that nodes of an
    /// earlier store on the same disk are not taken for ours.
    pub(crate) tag: u64,
}

impl Geometry {
    /// Blocks of a node: 8, 4 or 1.
    pub(crate) fn node_blocks(&self) -> u64 {
        (NODE_BYTES as u64).checked_div(u64::from(self.block_bytes)).unwrap_or(1).max(1)
    }

    /// The first block behind the superblock slots.
    pub(crate) fn first_block(&self) -> u64 {
        self.node_blocks().saturating_mul(u64::from(SLOTS))
    }

    /// Whether a node can lie there.
    pub(crate) fn node_fits(&self, address: u64) -> bool {
        address.is_multiple_of(self.node_blocks()) && self.data_fits(address, self.node_blocks())
    }

    /// Whether these blocks are inside, and behind the superblocks.
    pub(crate) fn data_fits(&self, first: u64, count: u64) -> bool {
        first >= self.first_block()
            && first.checked_add(count).is_some_and(|end| end <= self.total_blocks)
    }

    /// The offset of a block's first byte.
    pub(crate) fn offset_bytes(&self, block: u64) -> u64 {
        block.saturating_mul(u64::from(self.block_bytes))
    }
}

/// The number of the store in its nodes.
pub(crate) fn tag_of(uuid: &[u8; 16]) -> u64 {
    let (high, low) = uuid.split_at(8);
    let word = |half: &[u8]| half.first_chunk().copied().map_or(0, u64::from_le_bytes);
    word(high) ^ word(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_lie_aligned_behind_the_superblocks_and_inside() {
        for (block_bytes, node_blocks) in [(512, 8), (1024, 4), (4096, 1)] {
            let geometry = Geometry { block_bytes, total_blocks: 100 * node_blocks, tag: 0 };
            assert_eq!(
                (geometry.node_blocks(), geometry.first_block()),
                (node_blocks, 4 * node_blocks)
            );
            assert!(!geometry.node_fits(3 * node_blocks) && geometry.node_fits(4 * node_blocks));
            assert!(geometry.node_fits(99 * node_blocks) && !geometry.node_fits(100 * node_blocks));
            assert_eq!(geometry.node_fits(5 * node_blocks + 1), node_blocks == 1);
            assert!(!geometry.data_fits(u64::MAX, 2));
        }
    }
}
