//! The blocks that each volume has to itself, which its deletion would free, and those that it
//! shares.
//!
//! There are no reference counts on the disk, so this walks the trees of the durable generation.
//! The walk reads the disk alone and blocks no operation: the store may change meanwhile, and if
//! nodes of that generation are overwritten by then, the walk fails.

use std::collections::{BTreeMap, HashMap};

use crate::disk::Disk;
use crate::geometry::Geometry;
use crate::info::VolumeId;
use crate::node::{Kind, Node, Pointer};
use crate::nodes::{TreeError, read_node};
use crate::record::Record;
use crate::superblock::Superblock;
use crate::volumes::Volumes;

/// The durable generation of a store, to be looked at without it.
#[derive(Clone, Debug)]
pub struct Durable(Superblock);

/// Blocks by owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The generation that it is about.
    pub generation: u64,
    /// Of each volume: blocks of data and of metadata that only it refers to. Deleting it frees
    /// them.
    pub exclusive: BTreeMap<VolumeId, u64>,
    /// Of each volume: its blocks that are mapped to blocks of data which other volumes refer to as
    /// well. Its other mapped blocks it has to itself.
    pub shared: BTreeMap<VolumeId, u64>,
    /// Blocks of data that two or more volumes refer to.
    pub shared_data: u64,
}

/// The owner of a node or a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// This volume alone.
    One(u64),
    /// Two or more volumes'.
    Many,
}

impl Volumes {
    /// The durable generation, for [`Durable::usage`].
    #[must_use]
    pub fn durable(&self) -> Durable {
        Durable(self.superblock.clone())
    }
}

impl Durable {
    /// Walks all trees.
    ///
    /// # Errors
    /// A node cannot be read, or was overwritten.
    pub fn usage(&self, disk: &mut dyn Disk) -> std::io::Result<Usage> {
        let walk =
            Walk { disk, geometry: self.0.geometry(), owners: HashMap::new(), leaves: Vec::new() };
        walk.run(&self.0).map_err(|error| match error {
            TreeError::Io(error) => error,
            TreeError::Damaged { block, what } => {
                std::io::Error::other(format!("metadata node at block {block}: {what}"))
            }
            TreeError::NoSpace => std::io::ErrorKind::Other.into(),
        })
    }

    /// The generation that it is.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation
    }
}

struct Walk<'a> {
    disk: &'a mut dyn Disk,
    geometry: Geometry,
    owners: HashMap<u64, Owner>,
    /// Leaves, each once, with their extents on the disk: first block and count.
    leaves: Vec<(u64, Vec<(u64, u64)>)>,
}

impl Walk<'_> {
    fn run(mut self, superblock: &Superblock) -> Result<Usage, TreeError> {
        let mut roots = Vec::new();
        if let Some(root) = superblock.catalogue {
            self.catalogue(root.pointer, root.level, &mut roots)?;
        }
        let mut usage = Usage { generation: superblock.generation, ..Usage::default() };
        for record in &roots {
            usage.exclusive.insert(VolumeId(record.id), 0);
            // Exclusive blocks are subtracted below.
            usage.shared.insert(VolumeId(record.id), record.allocated_blocks);
            if let Some(root) = record.root {
                self.visit(root.pointer, root.level, Owner::One(record.id))?;
            }
        }
        let node_blocks = self.geometry.node_blocks();
        for owner in self.owners.values() {
            add(&mut usage, *owner, node_blocks, false);
        }
        let mut claims = Vec::new();
        for (address, extents) in &self.leaves {
            let owner = self.owners.get(address).copied().unwrap_or(Owner::Many);
            claims.extend(
                extents.iter().map(|(first, count)| (*first, first.saturating_add(*count), owner)),
            );
        }
        let owned = owned(&mut claims);
        for (first, end, owner) in &owned {
            add(&mut usage, *owner, end.saturating_sub(*first), true);
        }
        let own = Own::new(&owned);
        for (first, end, owner) in claims {
            if let Owner::One(id) = owner
                && let Some(shared) = usage.shared.get_mut(&VolumeId(id))
            {
                *shared = shared.saturating_sub(own.between(id, first, end));
            }
        }
        Ok(usage)
    }

    fn node(&mut self, pointer: Pointer, kind: Kind, level: u8) -> Result<Node, TreeError> {
        read_node(self.disk, &self.geometry, pointer, kind, level)
    }

    fn catalogue(
        &mut self,
        pointer: Pointer,
        level: u8,
        roots: &mut Vec<Record>,
    ) -> Result<(), TreeError> {
        let node = self.node(pointer, Kind::Catalogue, level)?;
        if let crate::node::Body::Records(records) = &node.body {
            roots.extend(records.iter().cloned());
        }
        for child in node.body.children() {
            self.catalogue(child.pointer, level.saturating_sub(1), roots)?;
        }
        Ok(())
    }

    /// Each node is read at most twice: when it is met first, and when another volume turns out to
    /// have it.
    fn visit(&mut self, pointer: Pointer, level: u8, owner: Owner) -> Result<(), TreeError> {
        let before = self.owners.get(&pointer.address).copied();
        let now = match before {
            None => owner,
            Some(before) if before == owner => return Ok(()),
            Some(Owner::Many) => return Ok(()),
            Some(Owner::One(_)) => Owner::Many,
        };
        self.owners.insert(pointer.address, now);
        if level == 0 && before.is_some() {
            return Ok(());
        }
        let node = self.node(pointer, Kind::Extents, level)?;
        if level == 0 {
            let extents =
                node.body.entries().iter().map(|entry| (entry.physical, entry.count)).collect();
            self.leaves.push((pointer.address, extents));
        }
        for child in node.body.children() {
            self.visit(child.pointer, level.saturating_sub(1), now)?;
        }
        Ok(())
    }
}

fn add(usage: &mut Usage, owner: Owner, blocks: u64, is_data: bool) {
    match owner {
        Owner::One(id) => {
            let exclusive = usage.exclusive.entry(VolumeId(id)).or_default();
            *exclusive = exclusive.saturating_add(blocks);
        }
        Owner::Many if is_data => usage.shared_data = usage.shared_data.saturating_add(blocks),
        Owner::Many => {}
    }
}

/// The blocks that are a volume's alone, in order, with the number of those before.
struct Own(HashMap<u64, Vec<(u64, u64, u64)>>);

impl Own {
    fn new(owned: &[(u64, u64, Owner)]) -> Self {
        let mut own: HashMap<u64, Vec<(u64, u64, u64)>> = HashMap::new();
        for (first, end, owner) in owned {
            if let Owner::One(id) = owner {
                let ranges = own.entry(*id).or_default();
                let before = ranges.last().map_or(0, |(first, end, before)| {
                    before.saturating_add(end.saturating_sub(*first))
                });
                ranges.push((*first, *end, before));
            }
        }
        Self(own)
    }

    /// How many of a volume's own blocks are in this range.
    fn between(&self, id: u64, first: u64, end: u64) -> u64 {
        self.before(id, end).saturating_sub(self.before(id, first))
    }

    fn before(&self, id: u64, at: u64) -> u64 {
        let Some(ranges) = self.0.get(&id) else { return 0 };
        let begun = ranges.partition_point(|(first, ..)| *first < at);
        let last = begun.checked_sub(1).and_then(|last| ranges.get(last));
        last.map_or(0, |(first, end, before)| {
            before.saturating_add(at.min(*end).saturating_sub(*first))
        })
    }
}

/// Claims (first block, end, owner) that may overlap, as disjoint ones: what two owners claim is
/// many's.
pub(crate) fn owned(claims: &mut [(u64, u64, Owner)]) -> Vec<(u64, u64, Owner)> {
    claims.sort_unstable();
    let mut owned: Vec<(u64, u64, Owner)> = Vec::new();
    let mut ends: BTreeMap<(u64, Owner), u64> = BTreeMap::new();
    let mut at = 0;
    let mut claims = claims.iter().copied().peekable();
    loop {
        // Up to where the next claim begins, or the first of the present ones ends.
        let begins = claims.peek().map(|(first, ..)| *first);
        let finishes = ends.keys().next().map(|(end, _)| *end);
        let Some(next) = begins.into_iter().chain(finishes).min() else { return owned };
        if next > at
            && let Some((_, owner)) = ends.keys().next().copied()
        {
            let alone = ends.keys().all(|(_, other)| *other == owner);
            let owner = if alone { owner } else { Owner::Many };
            match owned.last_mut() {
                Some(last) if last.1 == at && last.2 == owner => last.1 = next,
                _ => owned.push((at, next, owner)),
            }
        }
        at = next;
        while let Some(entry) = ends.first_entry().filter(|entry| entry.key().0 <= at) {
            entry.remove();
        }
        while let Some((_, end, owner)) = claims.next_if(|(first, ..)| *first <= at) {
            let count = ends.entry((end, owner)).or_default();
            *count = count.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_claim_is_manys_and_what_one_claims_twice_is_its_own() {
        let (a, b) = (Owner::One(1), Owner::One(2));
        let claims = vec![(0, 10, a), (5, 15, b), (20, 30, a), (22, 24, a), (40, 41, Owner::Many)];
        let expected =
            [(0, 5, a), (5, 10, Owner::Many), (10, 15, b), (20, 30, a), (40, 41, Owner::Many)];
        let mut claims = claims;
        assert_eq!(owned(&mut claims), expected);
        assert_eq!(owned(&mut []), []);
        assert_eq!(owned(&mut [(0, 4, a), (4, 8, a)]), [(0, 8, a)]);
        let own = Own::new(&expected);
        for (id, first, end, blocks) in [
            (1, 0, 10, 5),
            (1, 5, 10, 0),
            (1, 3, 25, 7),
            (1, 0, u64::MAX, 15),
            (2, 0, 12, 2),
            (3, 0, 9, 0),
            (1, 7, 3, 0),
        ] {
            assert_eq!(own.between(id, first, end), blocks, "{id} {first} {end}");
        }
    }
}
