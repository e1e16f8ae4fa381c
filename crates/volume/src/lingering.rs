//! References that are gone in memory and still on the disk.
//!
//! A block that two volumes refer to is written by neither in place. When one of them gives its
//! reference up, the other has the block to itself, in memory. On the disk it has not: if the power
//! goes before the transaction is durable, the first one is back, and would show what the second
//! has written meanwhile. So a block whose reference count went down, and not to zero, counts as
//! shared until the commit of the transaction that did it is durable.
//!
//! And not even then is the I/O over that the first one's guest had under way to it: a read that
//! would see what is written now, or a write that would go on top of it. So it counts as shared
//! until the caller's grace period is over, like a block that was freed until it is used again.
//!
//! The same holds for nodes, and for all that is below them. A node that lingers and is shadowed
//! hands that on to what it refers to.

use std::collections::HashSet;

use crate::ranges::RangeSet;

/// What lingers of one kind: since this transaction, since the one that is being committed, and
/// since those, by generation, that wait for a grace period.
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

    /// Its commit is durable, as this generation.
    pub(crate) fn durable(&mut self, generation: u64) {
        self.settling.push((generation, std::mem::take(&mut self.committing)));
    }

    /// The grace period after this generation is over.
    pub(crate) fn settled(&mut self, generation: u64) {
        self.settling.retain(|(settling, _)| *settling != generation);
    }

    /// All that there is.
    fn all(&self) -> impl Iterator<Item = &T> {
        [&self.now, &self.committing].into_iter().chain(self.settling.iter().map(|(_, settling)| settling))
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

    /// Whether none does.
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
