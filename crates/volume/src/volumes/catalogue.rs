//! Volumes come and go.

use super::{Volume, Volumes};
use crate::allocator::Need;
use crate::disk::Disk;
use crate::error::VolumeError;
use crate::forest::Tree;
use crate::info::{NewVolume, VolumeId, VolumeInfo, VolumeState};
use crate::limits::MAX_VOLUMES;
use crate::node::Kind;
use crate::record::{is_name, max_volume_blocks};

impl Volumes {
    /// An empty volume: all hole.
    ///
    /// # Errors
    /// [`VolumeError`]: its name, its size, too many volumes, no space.
    pub fn create(&mut self, new: &NewVolume, now_unix_s: u64) -> Result<VolumeId, VolumeError> {
        self.size_is_possible(new.blocks)?;
        let info = VolumeInfo {
            id: VolumeId(0),
            name: new.name.clone(),
            blocks: new.blocks,
            // On the disk, this one stands for none.
            quota_blocks: new.quota_blocks.filter(|quota| *quota != u64::MAX),
            allocated_blocks: 0,
            extents: 0,
            read_only: false,
            origin: None,
            created_at_unix_s: now_unix_s,
            state: VolumeState::Healthy,
        };
        self.add(info, Tree { kind: Kind::Extents, owner: 0, root: None })
    }

    /// A read-only volume with the contents that this one has now, at the price of a record. Both
    /// share all blocks until one is written.
    ///
    /// # Errors
    /// [`VolumeError`]: its name, too many volumes, no space, a damaged volume.
    pub fn snapshot(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        name: &str,
        now_unix_s: u64,
    ) -> Result<VolumeId, VolumeError> {
        self.copy(disk, id, name, now_unix_s, true)
    }

    /// A writable volume with the contents that this volume or snapshot has now, at the price of a
    /// record, without a quota.
    ///
    /// # Errors
    /// [`VolumeError`]: its name, too many volumes, no space, a damaged volume.
    pub fn clone_volume(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        name: &str,
        now_unix_s: u64,
    ) -> Result<VolumeId, VolumeError> {
        self.copy(disk, id, name, now_unix_s, false)
    }

    fn copy(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        name: &str,
        now_unix_s: u64,
        read_only: bool,
    ) -> Result<VolumeId, VolumeError> {
        let volume = self.healthy(id)?;
        let tree = volume.tree;
        let info = VolumeInfo {
            name: name.to_owned(),
            quota_blocks: None,
            read_only,
            origin: Some(id),
            created_at_unix_s: now_unix_s,
            ..volume.info.clone()
        };
        // An unreadable tree is not worth a copy.
        if let Some(root) = tree.root {
            let node = self.forest.nodes.get(disk, root.pointer, tree.kind, root.level);
            node.map_err(|error| self.fail(id, error))?;
        }
        let copy = self.add(info, tree)?;
        if let Some(root) = tree.root {
            self.forest.nodes.refer(root.pointer.address);
        }
        Ok(copy)
    }

    fn add(&mut self, mut info: VolumeInfo, mut tree: Tree) -> Result<VolumeId, VolumeError> {
        self.writable()?;
        self.name_is_possible(&info.name)?;
        if self.volumes.len() >= MAX_VOLUMES {
            return Err(VolumeError::TooManyVolumes(MAX_VOLUMES));
        }
        let id = VolumeId(self.next_volume);
        info.id = id;
        tree.owner = id.0;
        let name = info.name.clone();
        let made_in = self.forest.generation;
        let volume = Volume { info, tree, charged_blocks: 0, changed_in: made_in, made_in };
        self.put_record(volume.record(), Need::Growth)?;
        self.next_volume = self.next_volume.saturating_add(1);
        self.names.insert(name, id);
        self.volumes.insert(id, volume);
        self.touched.insert(id);
        Ok(id)
    }

    /// Another size. Blocks behind a smaller one are given up.
    ///
    /// # Errors
    /// [`VolumeError`]: the size, a read-only volume, no space, the disk.
    pub fn resize(
        &mut self,
        disk: &mut dyn Disk,
        id: VolumeId,
        blocks: u64,
    ) -> Result<(), VolumeError> {
        self.size_is_possible(blocks)?;
        let before = self.changeable(id)?.info.blocks;
        self.touch(id, if blocks < before { Need::Shrink } else { Need::Growth })?;
        if blocks < before {
            self.change(disk, id, (blocks, u64::MAX), Vec::new(), Need::Shrink)?;
        }
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.info.blocks = blocks;
        }
        Ok(())
    }

    /// Renames a volume.
    ///
    /// # Errors
    /// [`VolumeError`]: the name, no space.
    pub fn rename(&mut self, id: VolumeId, name: &str) -> Result<(), VolumeError> {
        self.writable()?;
        let volume = self.volumes.get(&id).ok_or(VolumeError::NoSuchVolume(id))?;
        if volume.info.name == name {
            return Ok(());
        }
        self.name_is_possible(name)?;
        self.touch(id, Need::Growth)?;
        if let Some(volume) = self.volumes.get_mut(&id) {
            let old = std::mem::replace(&mut volume.info.name, name.to_owned());
            self.names.remove(&old);
            self.names.insert(name.to_owned(), id);
        }
        Ok(())
    }

    /// Another quota. What the volume has above it stays, but it gets no more.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume, no space.
    pub fn set_quota(
        &mut self,
        id: VolumeId,
        quota_blocks: Option<u64>,
    ) -> Result<(), VolumeError> {
        self.writable()?;
        self.touch(id, Need::Growth)?;
        if let Some(volume) = self.volumes.get_mut(&id) {
            // The largest number stands for none on the disk.
            volume.info.quota_blocks = quota_blocks.filter(|quota| *quota != u64::MAX);
        }
        Ok(())
    }

    /// Deletes the volume. Its snapshots and clones stay, and so does what they share with it.
    ///
    /// # Errors
    /// [`VolumeError`]: no such volume, a damaged one, the disk. That the store
    /// is full is none.
    pub fn delete(&mut self, disk: &mut dyn Disk, id: VolumeId) -> Result<(), VolumeError> {
        self.writable()?;
        let volume = self.healthy(id)?;
        let (tree, name) = (volume.tree, volume.info.name.clone());
        let doomed = self.forest.doom_tree(disk, &tree).map_err(|error| self.fail(id, error))?;
        self.change_catalogue(id.0, Vec::new(), Need::Delete)?;
        self.forest.give_up(doomed);
        self.forest.allocator.forget_volume(id.0);
        self.touched.remove(&id);
        self.volumes.remove(&id);
        self.names.remove(&name);
        Ok(())
    }

    /// Whether two volumes have the same size and the same tree, as a volume and its snapshot have
    /// until one of the volume's blocks is written. Costs no read.
    #[must_use]
    pub fn are_same(&self, one: VolumeId, other: VolumeId) -> bool {
        // A tree that both refer to is not changed in place, and its root is not freed.
        let tree = |id| {
            let volume = self.healthy(id).ok()?;
            let root = volume.tree.root.map(|root| (root.pointer.address, root.level));
            Some((volume.info.blocks, root))
        };
        tree(one).is_some_and(|one| tree(other) == Some(one))
    }

    fn size_is_possible(&self, blocks: u64) -> Result<(), VolumeError> {
        let max_blocks = max_volume_blocks(self.superblock.block_bytes);
        if (1..=max_blocks).contains(&blocks) {
            Ok(())
        } else {
            Err(VolumeError::BadSize { blocks, max_blocks })
        }
    }

    fn name_is_possible(&self, name: &str) -> Result<(), VolumeError> {
        if !is_name(name) {
            return Err(VolumeError::BadName(name.to_owned()));
        }
        if self.names.contains_key(name) {
            return Err(VolumeError::NameTaken(name.to_owned()));
        }
        Ok(())
    }
}
