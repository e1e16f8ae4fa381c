//! References that are gone in memory and still on the disk.
//!
//! A block that two volumes refer to is written in place by neither. When one of them drops its
//! reference, the other has the block to itself in memory, but not on the disk: after a power cut
//! before the transaction is durable, the first volume is back, and would show the second's later
//! writes. So a block whose reference count went down, and not to zero, counts as shared until the
//! commit of that transaction is durable.
//!
//! Even then, I/O of the first volume's guest may be in flight to the block: a read that would see
//! the new data, or a write that would overwrite it. So the block counts as shared until the
//! caller's epoch is over, as a freed block is not reused until then.
//!
//! The same holds for nodes, and for everything below them. When a node that lingers is shadowed,
//! everything that it refers to lingers.

use std::collections::HashSet;

use crate::ranges::RangeSet;

/// The lingering items of one kind: since this transaction, since the transaction that is being
/// committed, and since durable generations whose epoch is not over.
#[derive(Debug, Default)]
pub(crate) struct Lingering<T> {
    now: T,
    committing: T,
    settling: Vec<(u64, T)>,
}

impl<T: Default> Lingering<T> {
    /// The transaction is sealed.
    pub(crate) fn seal(&mut self) {
        self.committing = std::mem::take(&mut self.now);
    }

    /// Records that the commit is durable, as this generation.
    pub(crate) fn durable(&mut self, generation: u64) {
        self.settling.push((generation, std::mem::take(&mut self.committing)));
    }

    /// Ends the epoch after this generation.
    pub(crate) fn settled(&mut self, generation: u64) {
        self.settling.retain(|(settling, _)| *settling != generation);
    }

    /// All that there is.
    fn all(&self) -> impl Iterator<Item = &T> {
        [&self.now, &self.committing]
            .into_iter()
            .chain(self.settling.iter().map(|(_, settling)| settling))
    }
}

impl Lingering<HashSet<u64>> {
    pub(crate) fn add(&mut self, address: u64) {
        self.now.insert(address);
    }

    pub(crate) fn has(&self, address: u64) -> bool {
        self.all().any(|nodes| nodes.contains(&address))
    }
}

impl Lingering<RangeSet> {
    pub(crate) fn add(&mut self, first: u64, count: u64) {
        self.now.cover(first, count);
    }

    /// The parts of these blocks that linger, in order and disjoint.
    pub(crate) fn inside(&self, first: u64, count: u64) -> RangeSet {
        let mut all = RangeSet::default();
        for (first, count) in self.all().flat_map(|data| data.inside(first, count)) {
            all.cover(first, count);
        }
        all
    }

    /// Whether no item lingers.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().all(|data| data.blocks() == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lingers_until_its_own_transaction_is_durable_and_settled() {
        let mut data = Lingering::<RangeSet>::default();
        data.add(10, 10);
        data.seal();
        data.add(15, 10);
        let parts = |data: &Lingering<RangeSet>| data.inside(0, 100).iter().collect::<Vec<_>>();
        assert_eq!(parts(&data), [(10, 15)]);
        data.durable(7);
        assert_eq!(parts(&data), [(10, 15)]);
        data.settled(7);
        assert_eq!(parts(&data), [(15, 10)]);
        data.seal();
        data.durable(8);
        data.settled(7);
        assert_eq!(parts(&data), [(15, 10)]);
        data.settled(8);
        assert!(data.is_empty());
    }
}
