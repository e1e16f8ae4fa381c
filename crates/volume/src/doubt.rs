//! Sharing of a volume's blocks while another volume is damaged.
//!
//! A block below a damaged node looks as if no other volume referred to it. A volume that was read
//! in full may still share it, for instance as a snapshot of the damaged one: a write in place
//! would change both. So its mappings count as shared wherever they may be, which sends writes to
//! the allocator, and the allocator grants nothing while the store is damaged.
//!
//! Some blocks can be proved to be unshared. Snapshots and clones share blocks at the same virtual
//! block, and only within a family: a volume, and the volumes made from it, directly or not. Where
//! the superblock says that nothing else was ever shared, a block of a volume is its own if no
//! unread part of a relative covers its virtual block, and if the count of the references that were
//! read is one. Where the superblock does not say so, nothing is proved.

use std::collections::HashMap;

use crate::ranges::RangeSet;
use crate::record::Record;

/// Where a volume comes from, as far as the catalogue tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ancestor {
    /// The first one of its family is this volume.
    First(u64),
    /// The volume was made from this one, which is deleted, and may have been made from another,
    /// older one.
    Gone(u64),
}

impl Ancestor {
    /// Of this volume. `origin` gives the number of a listed volume's origin, or 0 without one.
    fn of(mut id: u64, origin: impl Fn(u64) -> Option<u64>) -> Self {
        loop {
            match origin(id) {
                None => return Self::Gone(id),
                Some(0) => return Self::First(id),
                // An origin is older than its copies. Whatever is not has no known origin.
                Some(origin) if origin >= id => return Self::Gone(u64::MAX),
                Some(origin) => id = origin,
            }
        }
    }
}

/// Whether two volumes may be of one family. `origin` gives the number of a listed volume's origin,
/// or 0 without one; of a volume that is not listed, only its number is known.
pub(crate) fn may_be_related(origin: impl Fn(u64) -> Option<u64>, one: u64, other: u64) -> bool {
    match (Ancestor::of(one, &origin), Ancestor::of(other, &origin)) {
        (Ancestor::First(one), Ancestor::First(other)) => one == other,
        (Ancestor::First(first), Ancestor::Gone(gone))
        | (Ancestor::Gone(gone), Ancestor::First(first)) => first < gone,
        (Ancestor::Gone(_), Ancestor::Gone(_)) => true,
    }
}

/// Families of volumes.
pub(crate) struct Families(HashMap<u64, u64>);

impl Families {
    pub(crate) fn of(records: &[Record]) -> Self {
        Self(records.iter().map(|record| (record.id, record.origin)).collect())
    }

    /// See [`may_be_related`].
    pub(crate) fn may_be_related(&self, one: u64, other: u64) -> bool {
        may_be_related(|id| self.0.get(&id).copied(), one, other)
    }
}

/// The metadata that could not be read.
pub(crate) struct Unread<'a> {
    pub(crate) records: &'a [Record],
    /// For each damaged volume, the virtual blocks whose mapping is unknown.
    pub(crate) volumes: &'a [(u64, RangeSet)],
    /// Numbers of volumes whose records were not read.
    pub(crate) hidden: &'a RangeSet,
    /// The number that the next volume gets.
    pub(crate) next_volume: u64,
    /// See [`Superblock::only_copies`](crate::superblock::Superblock::only_copies).
    pub(crate) only_copies: bool,
}

impl Unread<'_> {
    fn is_nothing(&self) -> bool {
        self.hidden.blocks() == 0 && self.volumes.iter().all(|(_, unread)| unread.blocks() == 0)
    }

    /// For each volume, its virtual blocks that something unread may share.
    pub(crate) fn doubts(&self) -> HashMap<u64, RangeSet> {
        let mut doubts = HashMap::new();
        if self.is_nothing() {
            return doubts;
        }
        let families = Families::of(self.records);
        // The youngest that can be hidden: older ones have fewer possible relatives.
        let youngest_hidden = self.hidden.iter().last().map(|(first, count)| {
            let last = first.saturating_add(count).saturating_sub(1);
            last.min(self.next_volume.saturating_sub(1))
        });
        for record in self.records {
            let hidden =
                youngest_hidden.is_some_and(|hidden| families.may_be_related(record.id, hidden));
            let mut doubt = RangeSet::default();
            if !self.only_copies || hidden {
                doubt.insert(0, u64::MAX);
            } else {
                for (_, unread) in
                    self.volumes.iter().filter(|(id, _)| families.may_be_related(record.id, *id))
                {
                    unread.iter().for_each(|(first, count)| drop(doubt.cover(first, count)));
                }
            }
            if doubt.blocks() > 0 {
                doubts.insert(record.id, doubt);
            }
        }
        doubts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64, origin: u64) -> Record {
        Record {
            id,
            name: format!("v{id}"),
            blocks: 10,
            quota_blocks: None,
            allocated_blocks: 0,
            extents: 0,
            root: None,
            origin,
            created_at_unix_s: 0,
            read_only: false,
        }
    }

    fn unread(ranges: &[(u64, u64)]) -> RangeSet {
        let mut set = RangeSet::default();
        ranges.iter().for_each(|(first, count)| drop(set.cover(*first, *count)));
        set
    }

    #[test]
    fn relatives_are_found_also_where_what_they_come_from_is_gone() {
        // 1 and its copies 4 and 5; 2; 6, a copy of 3, which is gone; 7, a copy of itself.
        let records = [
            record(1, 0),
            record(2, 0),
            record(4, 1),
            record(5, 4),
            record(6, 3),
            record(7, 7),
            record(8, 0),
        ];
        let families = Families::of(&records);
        let related = |one, other| families.may_be_related(one, other);
        assert!(related(1, 5) && related(4, 5) && related(2, 2));
        assert!(!related(1, 2) && !related(5, 2) && !related(8, 1));
        // 3 may have been made from 1 or 2, and not from 8, which is younger.
        assert!(related(6, 1) && related(6, 2) && related(6, 5) && !related(6, 8));
        assert!(related(7, 8) && related(7, 1));
        // 3 itself is not listed.
        assert!(related(3, 1) && !related(3, 8));
    }

    #[test]
    fn only_relatives_are_in_doubt_and_only_where_something_is_unread() {
        let records = [record(1, 0), record(2, 1), record(3, 0)];
        let volumes = [(2, unread(&[(5, 3)]))];
        let none = RangeSet::default();
        let all = Unread {
            records: &records,
            volumes: &volumes,
            hidden: &none,
            next_volume: 9,
            only_copies: true,
        };
        let doubts = all.doubts();
        assert_eq!(doubts[&1], unread(&[(5, 3)]));
        assert!(!doubts.contains_key(&3));
        let doubts = Unread { only_copies: false, ..all }.doubts();
        assert_eq!(doubts[&3], unread(&[(0, u64::MAX)]));
        // A record that was not read, of volume 2: it cannot come from 3, which is younger.
        let (hidden, volumes) = (unread(&[(2, 1)]), []);
        let records = [record(1, 0), record(3, 0)];
        let all = Unread {
            records: &records,
            volumes: &volumes,
            hidden: &hidden,
            next_volume: 9,
            only_copies: true,
        };
        let doubts = all.doubts();
        assert!(doubts.contains_key(&1) && !doubts.contains_key(&3));
        assert!(Unread { hidden: &none, only_copies: false, ..all }.doubts().is_empty());
    }
}
