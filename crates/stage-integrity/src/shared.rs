//! The state of a store that all of its channels share.

use std::ops::Range;
use std::sync::Arc;

use sidecore_block::{BadBlock, BlockError, BlockRequest, Findings, Geometry, Operation};

use crate::bad::BadBlocks;
use crate::header::Header;
use crate::journal::Journal;
use crate::layout::Layout;
use crate::rules::Neglected;
use crate::tag::{Sums, Tag};
use crate::tags::Tags;
use crate::users::Users;

/// The error of a bad block: `EILSEQ`, as dm-integrity reports it.
pub(crate) const BAD: BlockError = BlockError::Io { errno: 84 };

/// Blocks on each side among which the right place of bytes is looked for.
const NEAR: u64 = 2048;

/// See the module.
pub(crate) struct Shared {
    /// The store's, in the log.
    pub(crate) name: String,
    pub(crate) header: Header,
    /// The header's.
    pub(crate) layout: Layout,
    pub(crate) geometry: Geometry,
    pub(crate) sums: Sums,
    pub(crate) tags: Tags,
    pub(crate) journal: Journal,
    pub(crate) users: Users,
    pub(crate) findings: Arc<Findings>,
    pub(crate) bad: BadBlocks,
    /// Whether writes of the store below are durable only after a flush.
    pub(crate) is_volatile: bool,
    pub(crate) neglected: Neglected,
}

impl Shared {
    /// Whether a request can be carried out.
    #[inline]
    pub(crate) fn check(&self, request: &BlockRequest) -> Result<(), BlockError> {
        let geometry = &self.geometry;
        let (offset_bytes, len_bytes) = (request.offset_bytes, request.len_bytes);
        match request.operation {
            Operation::Flush => return Ok(()),
            operation if operation.is_write() && geometry.read_only => {
                return Err(BlockError::ReadOnly);
            }
            Operation::WriteZeroes { .. } if !geometry.write_zeroes => {
                return Err(BlockError::Unsupported);
            }
            Operation::Discard if !geometry.discard => return Err(BlockError::Unsupported),
            Operation::Read | Operation::Write if request.segments.len_bytes() != len_bytes => {
                return Err(BlockError::OutOfBounds);
            }
            _ => {}
        }
        geometry.check(offset_bytes, len_bytes).map_err(|_| BlockError::OutOfBounds)
    }

    /// Notes that these blocks are good.
    #[inline]
    pub(crate) fn mend(&self, blocks: Range<u64>) {
        if self.findings.has_bad() {
            for block in blocks.filter(|block| self.bad.mend(*block)) {
                self.findings.mended(block.saturating_mul(self.layout.block_bytes.into()));
            }
        }
    }

    /// Why a block with this hash is bad, as far as its tag says. `None` if its bytes may be those
    /// of another block: see [`searched`](Self::searched).
    #[cold]
    pub(crate) fn kind(&self, block: u64, hash: u64) -> Option<BadBlock> {
        let tag = self.tags.get(block).unwrap_or(Tag::unknown());
        if tag.is_unknown() {
            return Some(BadBlock::Unknown);
        }
        if tag.followed(self.sums.at(block, hash)) {
            return Some(BadBlock::Stale);
        }
        // Zeros are the bytes of many blocks.
        self.sums.is_of_zeros(hash).then_some(BadBlock::Checksum)
    }

    /// Looks for the block to which the bytes of a bad one belong. Takes about 20 us.
    #[cold]
    pub(crate) fn searched(&self, block: u64, hash: u64) -> BadBlock {
        if self.has_place(block, hash) { BadBlock::Misdirected } else { BadBlock::Checksum }
    }

    /// Whether bytes with this hash belong to a block near this one, or to one whose number differs
    /// in a bit.
    fn has_place(&self, block: u64, hash: u64) -> bool {
        let near = block.saturating_sub(NEAR)..=block.saturating_add(NEAR);
        let flipped = (0..u64::BITS).map(|bit| block ^ 1 << bit);
        let is_it = |other: u64| {
            let sum = self.tags.sum(other);
            other != block && sum.is_some_and(|sum| self.sums.hash_of(other, sum) == hash)
        };
        near.into_iter().any(is_it) || flipped.into_iter().any(is_it)
    }
}
