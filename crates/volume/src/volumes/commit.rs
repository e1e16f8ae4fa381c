//! Commits, begun and ended.

use std::collections::HashMap;
use std::io;

use super::Volumes;
use crate::commit::{Commit, CommitError, Freed};
use crate::error::VolumeError;
use crate::geometry::checksum;
use crate::grant::PhysicalRange;
use crate::info::VolumeId;
use crate::node::{Body, Kind, Root, child_for};
use crate::owner::Tripwire;
use crate::record::Record;
use crate::superblock::Superblock;

use sidecore_units::Plba;

/// Checksums of the nodes of a transaction, by address, and where they go.
#[derive(Default)]
struct Sealed {
    sums: HashMap<u64, u64>,
    nodes: Vec<(u64, Vec<u8>)>,
}

impl Volumes {
    /// Whether anything of the volume is not durable yet. A guest's flush has to wait for a commit
    /// then.
    #[must_use]
    pub fn is_dirty(&self, id: VolumeId) -> bool {
        self.volumes.get(&id).is_some_and(|volume| volume.changed_in > self.generation)
    }

    /// Whether a commit has made durable that the volume exists. Until then it must not be served:
    /// a log has no entries for it.
    #[must_use]
    pub fn is_made(&self, id: VolumeId) -> bool {
        self.volumes.get(&id).is_some_and(|volume| volume.made_in <= self.generation)
    }

    /// Whether there is something for the next commit.
    #[must_use]
    pub fn needs_commit(&self) -> bool {
        let wanted = self.kept.is_some() || self.changed || self.forest.nodes.has_dirty();
        wanted && self.cannot_commit().is_none()
    }

    /// Whether the next commit is one that the disk had no space for.
    #[must_use]
    pub fn has_kept_commit(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether a commit has begun and not ended.
    #[must_use]
    pub fn is_committing(&self) -> bool {
        self.committing.is_some()
    }

    /// Seals the transaction: all changes until now, and none that come later. `None` if there are
    /// none, if a commit is in flight ([`is_committing`](Self::is_committing)), or if the store is
    /// read only. A transaction that the disk had no space for is begun again, as it was.
    pub fn begin_commit(&mut self) -> Option<Commit> {
        if !self.needs_commit() {
            return None;
        }
        if self.is_committing() {
            return self.kept.take();
        }
        match self.sealed() {
            Ok((sealed, superblock)) => {
                let geometry = superblock.geometry();
                let (durable, next) = (self.durable, superblock.id());
                let tripwire = self.owner.map(|owner| Tripwire { owner, durable, next });
                let commit = Commit::new(&superblock, sealed.nodes, &geometry).with(tripwire);
                self.forest.nodes.seal();
                self.forest.allocator.seal();
                self.forest.generation = superblock.generation.saturating_add(1);
                self.touched.clear();
                self.changed = false;
                if let Some(log) = &mut self.log {
                    log.seal(next);
                }
                self.committing = Some(superblock);
                Some(commit)
            }
            Err(what) => {
                // A bug, found before it is on the disk.
                self.fail_for_good(format!("a transaction does not add up: {what}"));
                None
            }
        }
    }

    /// Ends a commit, with its result. The blocks that it freed can be reused after the caller's
    /// epoch. If the disk had no space for it, the commit is kept, and is the next one again. After
    /// any other error the store takes no changes: the disk holds the generation before or this
    /// one, which the next open finds out.
    pub fn end_commit(&mut self, commit: Commit, result: Result<(), CommitError>) -> Freed {
        if let Err(error) = &result
            && error.is_full()
            && self
                .committing
                .as_ref()
                .is_some_and(|superblock| superblock.generation == commit.generation())
        {
            self.disk_is_full = Some(error.to_string());
            self.kept = Some(commit);
            return Freed::default();
        }
        let Some(superblock) =
            self.committing.take_if(|superblock| superblock.generation == commit.generation())
        else {
            return Freed::default();
        };
        if let Err(error) = result {
            self.changed = true;
            self.fail_for_good(format!("metadata could not be written: {error}"));
            return Freed::default();
        }
        self.disk_is_full = None;
        self.generation = superblock.generation;
        self.durable = superblock.id();
        // The transaction after this one may have shared blocks already, and what a close or
        // another opening says of itself is for the next commit.
        let only_copies = superblock.only_copies && self.superblock.only_copies;
        self.superblock = Superblock { only_copies, in_use: self.superblock.in_use, ..superblock };
        if let Some(log) = &mut self.log {
            log.durable();
        }
        self.forest.nodes.written(self.generation);
        let freed = self.forest.allocator.durable(self.generation).into_iter();
        Freed {
            ranges: freed
                .map(|(first, count)| PhysicalRange { first: Plba(first), count })
                .collect(),
            generations: vec![self.generation],
        }
    }

    /// Records that a flush of the disk has failed, on behalf of any user: earlier writes may be
    /// lost, also those that a commit would build on. The store takes no more changes.
    pub fn flush_failed(&mut self, error: &io::Error) {
        self.fail_for_good(format!("the disk could not be flushed: {error}"));
    }

    /// Stops all writes until the store is opened again.
    fn fail_for_good(&mut self, why: String) {
        if self.cannot_commit().is_none() {
            self.read_only = Some(why);
            self.frozen = false;
        }
    }

    /// Makes freed blocks reusable, on the caller's word that no earlier I/O is in flight: blocks
    /// with one remaining reference may then be written in place.
    pub fn reuse(&mut self, freed: Freed) {
        for range in freed.ranges {
            self.forest.allocator.reuse(range.first.0, range.count);
        }
        for generation in freed.generations {
            self.forest.allocator.settled(generation);
            self.forest.nodes.settled(generation);
        }
    }

    /// Puts the checksums in, from the leaves up: nodes of extents, the records of volumes, nodes
    /// of the catalogue, superblock.
    fn sealed(&mut self) -> Result<(Sealed, Superblock), String> {
        let mut sealed = Sealed::default();
        self.seal_nodes(Kind::Extents, &mut sealed)?;
        for id in self.touched.clone() {
            let Some(volume) = self.volumes.get_mut(&id) else { continue };
            sealed.point(&mut volume.tree.root);
            let record = volume.record();
            self.set_record(record)?;
        }
        self.seal_nodes(Kind::Catalogue, &mut sealed)?;
        sealed.point(&mut self.catalogue.root);
        let superblock = Superblock {
            generation: self.forest.generation,
            next_volume: self.next_volume,
            volume_count: self.volumes.len() as u64,
            catalogue: self.catalogue.root,
            ..self.superblock.clone()
        };
        Ok((sealed, superblock))
    }

    fn seal_nodes(&mut self, kind: Kind, sealed: &mut Sealed) -> Result<(), String> {
        let geometry = self.superblock.geometry();
        for address in self.forest.nodes.dirty_by_level(kind) {
            let Some(node) = self.forest.nodes.change(address) else { continue };
            if let Body::Inner(children) = &mut node.body {
                for child in children {
                    if let Some(sum) = sealed.sums.get(&child.pointer.address) {
                        child.pointer.checksum = *sum;
                    }
                }
            }
            if !(1..=node.body.capacity()).contains(&node.body.len()) {
                return Err(format!("the node at block {address} has {} entries", node.body.len()));
            }
            let bytes = node.encode(address, &geometry);
            sealed.sums.insert(address, checksum(&bytes));
            sealed.nodes.push((address, bytes));
        }
        Ok(())
    }

    /// Puts a record where `touch` made room for it.
    fn set_record(&mut self, record: Record) -> Result<(), String> {
        let id = record.id;
        let missing = || format!("the record of volume {id} cannot be changed");
        let mut pointer = self.catalogue.root.ok_or_else(missing)?.pointer;
        loop {
            let node = self.forest.nodes.change(pointer.address).ok_or_else(missing)?;
            match &mut node.body {
                Body::Inner(children) => {
                    let child = children.get(child_for(children, id)).ok_or_else(missing)?;
                    pointer = child.pointer;
                }
                Body::Records(records) => {
                    let place = records.iter_mut().find(|place| place.id == id);
                    *place.ok_or_else(missing)? = record;
                    return Ok(());
                }
                Body::Extents(_) => return Err(missing()),
            }
        }
    }

    /// Writes the owner of [`OpenOptions::owner`](crate::OpenOptions::owner) to both generations of
    /// the superblock, unless they have it. Call after [`open_with`](Self::open_with) and after a
    /// log was replayed, before any guest is served. A store that is read only stays as it is.
    ///
    /// # Errors
    /// The disk's; the store is read only then.
    pub fn announce_owner(&mut self, disk: &mut dyn crate::Disk) -> Result<(), VolumeError> {
        if std::mem::take(&mut self.announces) && self.cannot_commit().is_none() {
            for _ in 0..2 {
                self.changed = true;
                self.commit_now(disk)?;
            }
        }
        Ok(())
    }

    /// Everything at once, for callers with no I/O of guests to wait for: begin, write, end, reuse.
    ///
    /// # Errors
    /// The disk's; the store is read only then.
    pub fn commit_now(&mut self, disk: &mut dyn crate::Disk) -> Result<(), VolumeError> {
        // Twice, if the first is one that was kept.
        for _ in 0..2 {
            let is_kept = self.has_kept_commit();
            let Some(commit) = self.begin_commit() else { break };
            let written = commit.write(disk);
            let freed = self.end_commit(commit, written);
            self.reuse(freed);
            if !is_kept || self.has_kept_commit() {
                break;
            }
        }
        if let (true, Some(why)) = (self.has_kept_commit(), &self.disk_is_full) {
            return Err(VolumeError::DiskFull(why.clone()));
        }
        let undone =
            self.changed || self.volumes.values().any(|volume| volume.changed_in > self.generation);
        match self.cannot_commit() {
            Some(why) if undone => Err(VolumeError::StoreReadOnly(why.to_owned())),
            _ => Ok(()),
        }
    }
}

impl Sealed {
    /// Puts the checksum of its node into a pointer.
    fn point(&self, root: &mut Option<Root>) {
        if let Some(root) = root
            && let Some(sum) = self.sums.get(&root.pointer.address)
        {
            root.pointer.checksum = *sum;
        }
    }
}
