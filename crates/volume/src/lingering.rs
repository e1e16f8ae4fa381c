//! References that are gone in memory and still on the disk.
//!
//! A block that two volumes refer to is written by neither in place. When one of
//! them gives its reference up, the other has the block to itself, in memory. On
//! the disk it has not: if the power goes before the transaction is durable, the
//! first one is back, and would show what the second has written meanwhile. So a
//! block whose reference count went down, and not to zero, counts as shared until
//! the commit of the transaction that did it is durable.
//!
//! The same holds for nodes, and for all that is below them. A node that lingers
//! and is shadowed hands that on to what it refers to.

use std::collections::HashSet;

use crate::ranges::RangeSet;

/// What lingers of one kind: since this transaction, and since the one that is
/// being committed.
#[derive(Debug, Default)]
pub(crate) struct Lingering<T> {
    now: T,
    committing: T,
}

impl<T: Default> Lingering<T> {
    /// The transaction is sealed.
    pub(crate) fn seal(&mut self) {
        self.committing = std::mem::take(&mut self.now);
    }

    /// Its commit is durable.
    pub(crate) fn durable(&mut self) {
        self.committing = T::default();
    }
}

impl Lingering<HashSet<u64>> {
    pub(crate) fn add(&mut self, address: u64) {
        self.now.insert(address);
    }

    pub(crate) fn has(&self, address: u64) -> bool {
        self.now.contains(&address) || self.committing.contains(&address)
    }
}

impl Lingering<RangeSet> {
    pub(crate) fn add(&mut self, first: u64, count: u64) {
        self.now.cover(first, count);
    }

    /// The parts of these blocks that linger, in order and disjoint.
    pub(crate) fn inside(&self, first: u64, count: u64) -> RangeSet {
        let mut both = RangeSet::default();
        for (first, count) in self.now.inside(first, count).chain(self.committing.inside(first, count)) {
            both.cover(first, count);
        }
        both
    }

    /// Whether none does.
    pub(crate) fn is_empty(&self) -> bool {
        self.now.blocks() == 0 && self.committing.blocks() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lingers_until_its_own_transaction_is_durable() {
        let mut data = Lingering::<RangeSet>::default();
        data.add(10, 10);
        data.seal();
        data.add(15, 10);
        let parts = |data: &Lingering<RangeSet>| data.inside(0, 100).iter().collect::<Vec<_>>();
        assert_eq!(parts(&data), [(10, 15)]);
        data.durable();
        assert_eq!(parts(&data), [(15, 10)]);
        data.seal();
        data.durable();
        assert!(data.is_empty());
    }
}
