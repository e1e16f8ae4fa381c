//! A queue's last extent.

use sidecore_units::{ByteExtent, Plba};

use crate::entry::Bounded;
use crate::range::BlockRange;
use crate::root::TreeRoot;

/// The extent that a queue used last: storage access is local (thesis 6.3), and other queues do not
/// disturb a queue's own locality.
#[derive(Clone, Copy, Debug)]
pub struct LastExtent {
    /// Zero is the version of no tree.
    version: u64,
    extent: Bounded,
}

impl Default for LastExtent {
    fn default() -> Self {
        Self { version: 0, extent: Bounded::EMPTY }
    }
}

impl LastExtent {
    /// The physical place of `range` and whether it is shared, if the extent contains all of it and
    /// is still valid.
    #[must_use]
    #[inline]
    pub fn hit(&self, root: &TreeRoot, range: BlockRange) -> Option<(Plba, bool)> {
        let physical = self.extent.locate(range)?;
        (self.version == root.version()).then_some((physical, self.extent.shared()))
    }

    /// The extent in bytes, of blocks of `1 << shift` bytes; empty if the bytes exceed 64 bits.
    #[must_use]
    pub fn in_bytes(&self, shift: u32) -> LastBytes {
        let bytes = |blocks: u64| blocks.checked_mul(1_u64.checked_shl(shift)?);
        let extent = self.extent;
        let place = || {
            ByteExtent::new(bytes(extent.first)?, bytes(extent.count)?, bytes(extent.physical())?)
        };
        place().map_or_else(LastBytes::default, |place| LastBytes {
            version: self.version,
            extent: place,
            shared: extent.shared(),
        })
    }

    /// Drops the extent.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    #[inline]
    pub(crate) fn remember(&mut self, version: u64, extent: Bounded) {
        *self = Self { version, extent };
    }
}

/// A queue's last extent in bytes, the unit of requests: a hit costs no shifts.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastBytes {
    /// Zero is the version of no tree.
    version: u64,
    extent: ByteExtent,
    shared: bool,
}

impl LastBytes {
    /// Whether the extent still agrees with the tree. The answer holds for all translations until
    /// the channel publishes that it is idle.
    #[must_use]
    #[inline]
    pub fn is_valid(&self, root: &TreeRoot) -> bool {
        self.version == root.version()
    }

    /// Whether another volume or snapshot refers to these blocks too.
    #[must_use]
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The extent, for as long as it is [valid](Self::is_valid).
    #[must_use]
    #[inline]
    pub fn extent(&self) -> ByteExtent {
        self.extent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Entry;
    use crate::range::Extent;
    use sidecore_units::{Plba, Vlba};

    fn last(first: u64, count: u64, physical: u64) -> LastExtent {
        let extent =
            Entry::of(Extent { first: Vlba(first), count, physical: Plba(physical), shared: true });
        LastExtent { version: 7, extent: extent.bounded().unwrap() }
    }

    #[test]
    fn bytes_lie_where_their_blocks_do_and_outside_of_the_extent_nowhere() {
        let bytes = last(10, 2, 100).in_bytes(10);
        assert!(bytes.is_shared());
        let bytes = bytes.extent();
        assert_eq!(bytes.locate(10 << 10, 2 << 10), Some(100 << 10));
        assert_eq!(bytes.locate((12 << 10) - 1, 1), Some((102 << 10) - 1));
        for (offset, len) in [
            ((10 << 10) - 1, 1),
            ((12 << 10) - 1, 2),
            (12 << 10, 1),
            (10 << 10, 2049),
            (0, u64::MAX),
        ] {
            assert_eq!(bytes.locate(offset, len), None, "{offset}, {len}");
        }
    }

    #[test]
    fn an_extent_without_bytes_holds_nothing() {
        let none =
            [LastExtent::default(), last(1 << 60, 1, 0), last(0, 1 << 60, 0), last(0, 1, 1 << 60)];
        for bytes in none.map(|last| last.in_bytes(10)) {
            assert_eq!((bytes.version, bytes.extent().locate(0, 1)), (0, None), "{bytes:?}");
        }
    }
}
