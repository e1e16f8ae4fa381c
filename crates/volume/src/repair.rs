//! Repair of a store with damaged metadata: offline, by a new generation that leaves out what
//! cannot be read.
//!
//! A repair keeps only proved metadata: nodes whose checksum their parent has. A node that differs
//! from its parent's pointer is left out, with everything below it; its virtual blocks become
//! holes, and are listed. Nothing is reconstructed from blocks that look like nodes, nor taken from
//! an older generation: blocks that this generation freed may hold other data by now.
//!
//! Two trees may claim the same blocks, and both be whole. Then the caller says which volume loses
//! them.
//!
//! The new generation is written like a commit, so a repair that is cut off leaves the old one as
//! it was.

mod mend;
mod rivals;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use crate::commit::Commit;
use crate::disk::Disk;
use crate::error::{Damage, OpenError, Place, RepairError};
use crate::free::FreeSpace;
use crate::geometry::{Geometry, checksum};
use crate::info::VolumeId;
use crate::node::{Body, Child, ENTRIES, Kind, Node, Pointer, RECORDS, Root};
use crate::nodes::TreeError;
use crate::open::{FromDisk, check_catalogue, heal, newest};
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::superblock::{MAX_NUMBER, Superblock};
use crate::walk::{Source, Walk};

use mend::{Fresh, Mender};
pub use rivals::Rivals;

/// A part of a volume, or whole volumes, that a repair leaves out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Virtual blocks that become a hole.
    Blocks {
        /// The volume's number.
        volume: VolumeId,
        /// The volume's name.
        name: String,
        /// The first block.
        first: u64,
        /// How many blocks, not all of which had a mapping.
        count: u64,
        /// Why their mapping is unknown.
        why: Damage,
    },
    /// Volumes whose records cannot be read; their names are unknown.
    Volumes {
        /// The number of such volumes.
        count: u64,
        /// Their numbers are in these ranges (first, count).
        numbers: Vec<(u64, u64)>,
    },
}

/// A repair that has been worked out, and not been carried out.
#[derive(Debug)]
pub struct Repair {
    /// The generation that it starts from.
    pub generation: u64,
    /// The unit of all blocks in here, in bytes.
    pub block_bytes: u32,
    /// The damage found.
    pub damage: Vec<Damage>,
    /// The parts left out.
    pub losses: Vec<Loss>,
    /// Corrections without a loss.
    pub notes: Vec<String>,
    /// Blocks that more than one volume claims, until the caller has said which lose them.
    pub rivals: Vec<Rivals>,
    superblock: Superblock,
    commit: Option<Commit>,
}

/// Works out how to repair the store on this disk; nothing is written. Volumes named in `losers`
/// give up all blocks that another one claims as well.
///
/// # Errors
/// [`RepairError`]: nothing on the disk can be used, or there is no room, or a loser is
/// none.
pub fn plan_repair(disk: &mut dyn Disk, losers: &[String]) -> Result<Repair, RepairError> {
    let newest = newest(disk)?;
    let superblock = newest.superblock;
    if superblock.features != 0 || superblock.features_to_write != 0 {
        return Err(
            OpenError::UnknownFeatures(superblock.features | superblock.features_to_write).into()
        );
    }
    let disk_blocks = disk.size_bytes().checked_div(u64::from(superblock.block_bytes)).unwrap_or(0);
    if disk_blocks < superblock.total_blocks {
        return Err(OpenError::Shrunk { disk_blocks, store_blocks: superblock.total_blocks }.into());
    }
    let mut repair = Repair {
        generation: superblock.generation,
        block_bytes: superblock.block_bytes,
        damage: newest.damage,
        losses: Vec::new(),
        notes: Vec::new(),
        rivals: Vec::new(),
        superblock,
        commit: None,
    };
    repair.plan(disk, losers)?;
    Ok(repair)
}

impl Repair {
    /// The boot of the machine under which the store was in use with a log when its process died: a
    /// repair makes that log useless.
    #[must_use]
    pub fn in_use_under(&self) -> Option<[u8; 16]> {
        self.superblock.in_use
    }

    /// Whether there is anything to repair.
    #[must_use]
    pub fn is_needed(&self) -> bool {
        !self.damage.is_empty() || !self.rivals.is_empty() || self.commit.is_some()
    }

    /// Whether the plan can be carried out: a loser is named for each block that two volumes claim.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.rivals.is_empty()
    }

    /// Carries it out. Returns the generation that the disk has then.
    ///
    /// # Errors
    /// The disk's; the old generation is there still, or the new one. Nothing is written unless it
    /// [is decided](Self::is_decided).
    pub fn write(self, disk: &mut dyn Disk) -> io::Result<u64> {
        if !self.is_decided() {
            return Err(io::Error::other(
                "two volumes claim the same blocks, and the plan does not name the one that loses \
                 them",
            ));
        }
        match &self.commit {
            Some(commit) => {
                commit.write(disk)?;
                Ok(commit.generation())
            }
            None => heal(disk, &self.superblock).map(|()| self.generation),
        }
    }

    fn plan(&mut self, disk: &mut dyn Disk, losers: &[String]) -> Result<(), RepairError> {
        let geometry = self.superblock.geometry();
        let mut source = FromDisk { disk, geometry };
        let mut walk = Walk::new(geometry, self.generation, &mut source);
        let hidden = walk.catalogue(self.superblock.catalogue);
        let catalogue: BTreeSet<u64> = walk.seen.keys().copied().collect();
        let mut records = std::mem::take(&mut walk.records);
        check_catalogue(&self.superblock, &records, &mut walk.problems);
        for record in &records {
            let _ = walk.volume(record);
        }
        let problems = std::mem::take(&mut walk.problems);
        let is_damaged = !problems.list.is_empty();
        self.damage.extend(problems.list);
        if problems.more > 0 {
            let what = format!("{} more places are damaged", problems.more);
            self.damage.push(Damage { place: Place::Store, what });
        }

        let original = records.clone();
        self.mend_catalogue(&mut records, &hidden);
        let only_copies = self.superblock.only_copies;
        let mut fresh = Fresh::default();
        let mut mender = Mender::new(&mut source, geometry, self.generation, catalogue);
        let mended = mender.all(&records, &[]);
        let mut found = mender.rivals(&records, only_copies);
        let outcome = if losers.is_empty() {
            mended
        } else {
            let cuts = rivals::cuts(&records, &found, losers)?;
            let catalogue = mender.into_catalogue();
            mender = Mender::new(&mut source, geometry, self.generation, catalogue);
            let mended = mender.all(&records, &cuts);
            found = mender.rivals(&records, only_copies);
            mended
        };
        self.rivals = found;
        for (record, outcome) in records.iter_mut().zip(outcome) {
            self.losses.extend(outcome.losses(record));
            outcome.apply(record);
        }
        let used = mender.into_used(&mut fresh);
        if (is_damaged || !losers.is_empty() || records != original) && self.rivals.is_empty() {
            self.build(&mut source, records, fresh, &used)?;
        }
        Ok(())
    }

    /// Corrects the records, and notes missing ones.
    fn mend_catalogue(&mut self, records: &mut Vec<Record>, hidden: &RangeSet) {
        records.sort_by_key(|record| record.id);
        let listed = records.len();
        records.dedup_by_key(|record| record.id);
        records.retain(|record| record.id.saturating_add(1) < MAX_NUMBER);
        let next_volume = self.superblock.next_volume;
        let mut missing = self.superblock.volume_count.saturating_sub(listed as u64);
        let numbers: Vec<(u64, u64)> =
            hidden.iter().filter_map(|range| crate::ranges::clip(range, 1, next_volume)).collect();
        if !numbers.is_empty() {
            missing = missing.max(1);
        }
        missing = missing.saturating_add(listed.saturating_sub(records.len()) as u64);
        if missing > 0 {
            self.losses.push(Loss::Volumes { count: missing, numbers });
        }
        let mut names = BTreeSet::new();
        for record in records.iter_mut() {
            if record.origin >= next_volume {
                record.origin = 0;
            }
            if !names.insert(record.name.clone()) {
                let name = (0_u64..)
                    .map(|index| format!("repaired-{}-{index}", record.id))
                    .find(|name| !names.contains(name))
                    .unwrap_or_default();
                self.notes.push(format!(
                    "volume {}, the second one called {}, is called {name}",
                    record.id, record.name
                ));
                names.insert(name.clone());
                record.name = name;
            }
            if record.id >= self.superblock.next_volume {
                self.superblock.next_volume = record.id.saturating_add(1);
            }
        }
    }

    /// Makes the commit: a catalogue of these records, and fresh nodes where there is room.
    fn build(
        &mut self,
        source: &mut FromDisk<'_>,
        records: Vec<Record>,
        mut fresh: Fresh,
        used: &RangeSet,
    ) -> Result<(), RepairError> {
        let geometry = self.superblock.geometry();
        let generation = self.generation.saturating_add(1);
        let volume_count = records.len() as u64;
        let catalogue = plant_catalogue(&mut fresh, generation, records);
        let mut superblock = Superblock {
            generation,
            volume_count,
            catalogue,
            in_use: None,
            ..self.superblock.clone()
        };
        let nodes =
            fresh.settle(&geometry, free_space(&geometry, used), &mut superblock.catalogue)?;
        verify(source, &superblock, &nodes)?;
        self.commit = Some(Commit::new(&superblock, nodes, &geometry));
        Ok(())
    }
}

/// Writes a whole new catalogue.
fn plant_catalogue(fresh: &mut Fresh, generation: u64, records: Vec<Record>) -> Option<Root> {
    let node = |level, body| Node { kind: Kind::Catalogue, owner: 0, generation, level, body };
    let mut children: Vec<Child> = Vec::new();
    for records in records.chunks(RECORDS) {
        let key = records.first().map_or(0, |record| record.id);
        let pointer = fresh.add(node(0, Body::Records(records.to_vec())));
        children.push(Child { key, pointer });
    }
    let mut level = 0_u8;
    while children.len() > 1 {
        level = level.saturating_add(1);
        let mut above = Vec::new();
        for below in children.chunks(ENTRIES) {
            let key = below.first().map_or(0, |child| child.key);
            above.push(Child { key, pointer: fresh.add(node(level, Body::Inner(below.to_vec()))) });
        }
        children = above;
    }
    children.first().map(|child| Root { pointer: child.pointer, level })
}

fn free_space(geometry: &Geometry, used: &RangeSet) -> FreeSpace {
    let mut free = FreeSpace::new(geometry.node_blocks());
    let mut at = geometry.first_block();
    for (first, count) in used.iter() {
        free.insert(at, first.saturating_sub(at));
        at = at.max(first.saturating_add(count));
    }
    free.insert(at, geometry.total_blocks.saturating_sub(at));
    free
}

/// Nodes that are not written yet, in front of those on the disk.
struct Overlay<'a, 'b> {
    nodes: HashMap<u64, &'a [u8]>,
    below: &'a mut FromDisk<'b>,
}

impl Source for Overlay<'_, '_> {
    fn node(
        &mut self,
        pointer: Pointer,
        kind: Kind,
        level: u8,
    ) -> Result<(Arc<Node>, bool), TreeError> {
        let Some(bytes) = self.nodes.get(&pointer.address) else {
            return self.below.node(pointer, kind, level);
        };
        let damaged = |what: String| TreeError::Damaged { block: pointer.address, what };
        if checksum(bytes) != pointer.checksum {
            return Err(damaged("its checksum is wrong".to_owned()));
        }
        let node = Node::decode(bytes, pointer.address, kind, level, &self.below.geometry)
            .map_err(damaged)?;
        Ok((Arc::new(node), true))
    }
}

/// Looks at the repaired store before any of it is written.
fn verify(
    source: &mut FromDisk<'_>,
    superblock: &Superblock,
    nodes: &[(u64, Vec<u8>)],
) -> Result<(), RepairError> {
    let geometry = superblock.geometry();
    let nodes = nodes.iter().map(|(address, bytes)| (*address, bytes.as_slice())).collect();
    let mut overlay = Overlay { nodes, below: source };
    let mut walk = Walk::new(geometry, superblock.generation, &mut overlay);
    walk.catalogue(superblock.catalogue);
    let records = std::mem::take(&mut walk.records);
    check_catalogue(superblock, &records, &mut walk.problems);
    for record in &records {
        let _ = walk.volume(record);
    }
    let _ = walk.conflicts();
    match walk.problems.list.first() {
        Some(problem) => Err(RepairError::Unsound(problem.to_string())),
        None => Ok(()),
    }
}
