//! A queue's last extent.

use sidecore_units::Plba;

use crate::entry::{Entry, UNUSED};
use crate::range::BlockRange;
use crate::root::TreeRoot;

/// The extent that a queue used last: storage access is local (thesis 6.3), and
/// a queue's own locality is not disturbed by other queues.
#[derive(Clone, Copy, Debug)]
pub struct LastExtent {
    /// Zero is the version of no tree.
    version: u64,
    extent: Entry,
}

impl Default for LastExtent {
    fn default() -> Self {
        Self { version: 0, extent: UNUSED }
    }
}

impl LastExtent {
    /// Where `range` lies and whether it is shared, if all of it is in the
    /// extent and the extent is still valid.
    #[must_use]
    #[inline]
    pub fn hit(&self, root: &TreeRoot, range: BlockRange) -> Option<(Plba, bool)> {
        let physical = self.extent.locate(range)?;
        (self.version == root.version()).then_some((physical, self.extent.shared()))
    }

    /// Forgets it.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    #[inline]
    pub(crate) fn remember(&mut self, version: u64, extent: Entry) {
        *self = Self { version, extent };
    }
}
