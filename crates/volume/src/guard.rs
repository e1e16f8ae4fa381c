//! Blocks whose contents stay as they are while they are compared, without holding up any request.
//!
//! Guarded blocks count as shared, so that no new write goes to them in place: it goes to fresh
//! blocks, and changes the mapping, which the comparing operation looks at again before it acts.
//! That is not enough alone: a block could be freed, be another volume's for a while, and come back
//! to its old place with other contents. So the guard remembers that one of its blocks was freed.

use crate::ranges::RangeSet;

/// The blocks that one operation guards.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    blocks: RangeSet,
    broken: bool,
}

impl Guard {
    /// Guards these blocks, and no others.
    pub(crate) fn set(&mut self, ranges: impl Iterator<Item = (u64, u64)>) {
        *self = Self::default();
        for (first, count) in ranges {
            self.blocks.cover(first, count);
        }
    }

    /// Whether blocks are guarded, and none of them was freed since.
    pub(crate) fn holds(&self) -> bool {
        !self.is_empty() && !self.broken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.blocks() == 0
    }

    /// Notes that these blocks were freed.
    pub(crate) fn note_freed(&mut self, first: u64, count: u64) {
        self.broken |= self.blocks.overlaps(first, count);
    }

    /// The guarded parts of these blocks, in order.
    pub(crate) fn inside(&self, first: u64, count: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.blocks.inside(first, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_breaks_with_the_first_of_its_blocks_that_is_freed() {
        let mut guard = Guard::default();
        assert!(!guard.holds(), "nothing is guarded");
        guard.set([(10, 4), (12, 4)].into_iter());
        guard.note_freed(0, 10);
        guard.note_freed(16, 1);
        assert!(guard.holds());
        assert_eq!(guard.inside(0, 12).collect::<Vec<_>>(), [(10, 2)]);
        guard.note_freed(15, 1);
        assert!(!guard.holds());
        guard.set([(10, 4)].into_iter());
        assert!(guard.holds());
        guard.set(std::iter::empty());
        assert!(!guard.holds() && guard.is_empty());
    }
}
