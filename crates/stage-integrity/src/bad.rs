//! The blocks whose last read was bad: they are a warning until they are written, or read well.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tags::zeros;

/// See the module: a bit for each block. Channels of all sidecores share it and take no lock. The
/// findings count them.
pub(crate) struct BadBlocks(Box<[AtomicU64]>);

impl BadBlocks {
    /// None of so many blocks. `None` without the memory.
    pub(crate) fn new(blocks: u64) -> Option<Self> {
        Some(Self(zeros(blocks.div_ceil(64))?))
    }

    fn bit(&self, block: u64) -> Option<(&AtomicU64, u64)> {
        let word = self.0.get(usize::try_from(block / 64).ok()?)?;
        Some((word, 1 << (block % 64)))
    }

    /// Notes a bad block. Returns whether it is a new one.
    #[cold]
    pub(crate) fn note(&self, block: u64) -> bool {
        let Some((word, bit)) = self.bit(block) else { return false };
        word.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Notes that a block is good. Returns whether it was bad.
    #[cold]
    pub(crate) fn mend(&self, block: u64) -> bool {
        let Some((word, bit)) = self.bit(block) else { return false };
        // While another block is bad, each good one comes here, of all queues.
        word.load(Ordering::Relaxed) & bit != 0 && word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_bad_once_until_it_is_mended() {
        let bad = BadBlocks::new(100).unwrap();
        assert!(!bad.mend(70));
        assert!(bad.note(70) && !bad.note(70) && bad.note(99));
        assert!(bad.mend(70) && !bad.mend(70));
        assert!(bad.mend(99) && !bad.mend(99));
        assert!(!bad.note(1 << 40) && !bad.mend(1 << 40), "no such block");
    }
}
