//! The store: volumes, and the operations on them.

mod blocks;
mod catalogue;
mod commit;
mod recover;
mod remap;
mod reserve;

pub use recover::Recovery;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::allocator::Need;
use crate::commit::Commit;
use crate::disk::Disk;
use crate::error::{Damage, OpenError, Place, VolumeError};
use crate::forest::{Forest, Item, NoDisk, Tree};
use crate::info::{Space, VolumeId, VolumeInfo, VolumeState};
use crate::limits::DEFAULT_CACHE_NODES;
use crate::log::{Log, SuperblockId};
use crate::nodes::TreeError;
use crate::owner::Owner;
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::report::Report;
use crate::superblock::Superblock;

/// How to open a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Clean extent nodes (of 4 KiB) kept in memory.
    pub cache_nodes: usize,
    /// Take no changes, and write nothing.
    pub read_only: bool,
    /// The owner that opens the store, if several hosts reach it: see
    /// [`Volumes::announce_owner`].
    pub owner: Option<Owner>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { cache_nodes: DEFAULT_CACHE_NODES, read_only: false, owner: None }
    }
}

/// A volume, and what only this program knows of it.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) info: VolumeInfo,
    pub(crate) tree: Tree,
    /// Of its quota, what outstanding grants take.
    pub(crate) charged_blocks: u64,
    /// The transaction that changed it last.
    pub(crate) changed_in: u64,
    /// The transaction that made it, 0 if it was there when the store was opened.
    pub(crate) made_in: u64,
}

/// An open store.
///
/// Kept in memory: the volumes, their catalogue, the free ranges, the counts of shared blocks, and
/// the changes since the last commit; of the trees of extents a bounded number of nodes. The disk
/// is passed to each operation that may have to read.
#[derive(Debug)]
pub struct Volumes {
    pub(crate) superblock: Superblock,
    pub(crate) forest: Forest,
    pub(crate) catalogue: Tree,
    pub(crate) volumes: BTreeMap<VolumeId, Volume>,
    pub(crate) names: HashMap<String, VolumeId>,
    pub(crate) next_volume: u64,
    /// Volumes whose records change with the next commit.
    pub(crate) touched: BTreeSet<VolumeId>,
    /// Something changes with the next commit.
    pub(crate) changed: bool,
    /// The durable generation.
    pub(crate) generation: u64,
    /// The generation being committed, and its superblock.
    pub(crate) committing: Option<Superblock>,
    /// Blocks that the disk has space for: the present and the former reserve of the metadata.
    pub(crate) backed: RangeSet,
    /// The sealed transaction that the disk had no space for, and what the disk said.
    pub(crate) kept: Option<Commit>,
    pub(crate) disk_is_full: Option<String>,
    /// The durable superblock, as a log names it.
    pub(crate) durable: SuperblockId,
    /// The log that keeps the open transaction if the process dies.
    pub(crate) log: Option<Log>,
    pub(crate) read_only: Option<String>,
    /// Only damaged metadata keeps the store from taking changes.
    pub(crate) frozen: bool,
    pub(crate) damage: Vec<Damage>,
    /// The owner that has opened the store, whose commits have a tripwire.
    pub(crate) owner: Option<Owner>,
    /// The owner is not in both generations of the superblock yet.
    pub(crate) announces: bool,
}

impl Volumes {
    /// Opens the store on this disk, which takes one look at each metadata node. If the disk has
    /// grown, the store grows with the next commit.
    ///
    /// A damaged copy of the superblock is a note in [`damage`](Self::damage), and repaired at
    /// once. A damaged node makes the volumes that it is part of unusable, and
    /// [freezes](Self::is_frozen) the store.
    ///
    /// # Errors
    /// [`OpenError`]: nothing on the disk can be used.
    pub fn open(disk: &mut dyn Disk) -> Result<Self, OpenError> {
        Self::open_with(disk, &OpenOptions::default())
    }

    /// As [`open`](Self::open), with a word on how.
    ///
    /// # Errors
    /// [`OpenError`]: nothing on the disk can be used.
    pub fn open_with(disk: &mut dyn Disk, options: &OpenOptions) -> Result<Self, OpenError> {
        crate::open::open(disk, options)
    }

    /// Bytes in a block.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        self.superblock.block_bytes
    }

    /// Blocks of the store.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.superblock.total_blocks
    }

    /// The store's UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.superblock.uuid
    }

    /// The store's label.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.superblock.label
    }

    /// The last durable generation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The generation that the next commit to begin makes durable.
    #[must_use]
    pub fn open_generation(&self) -> u64 {
        self.forest.generation
    }

    /// Why the store takes no changes, `None` if it does.
    #[must_use]
    pub fn read_only(&self) -> Option<&str> {
        self.read_only.as_deref()
    }

    /// Whether the store takes no changes because some of its metadata is damaged. There is no map
    /// of free blocks on the disk: blocks below a damaged node look free, and blocks shared with it
    /// look unshared. So no block is allocated or freed until the store is repaired; healthy
    /// volumes are read, and written in place where their blocks are proved to be theirs alone.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Why nothing more can be made durable, if so.
    pub fn cannot_commit(&self) -> Option<&str> {
        self.read_only.as_deref().filter(|_| !self.frozen)
    }

    /// The disk's error if it had no space for the last commit, which is kept and
    /// [begun](Self::begin_commit) again; `None` if it had space.
    #[must_use]
    pub fn disk_is_full(&self) -> Option<&str> {
        self.disk_is_full.as_deref()
    }

    /// The error when no block, or no room for a node, is found. While the disk is full, no commit
    /// frees anything.
    pub(crate) fn no_space(&self) -> VolumeError {
        match &self.disk_is_full {
            Some(why) => VolumeError::DiskFull(why.clone()),
            None => VolumeError::NoSpace { after_commit: self.forest.allocator.has_pending() },
        }
    }

    /// Whether anything of the volume can be written: in place at least.
    #[must_use]
    pub fn takes_writes(&self, id: VolumeId) -> bool {
        let Some(volume) = self.volumes.get(&id) else { return false };
        let (info, doubt) = (&volume.info, self.forest.doubts.get(&id.0));
        let in_doubt =
            doubt.is_some_and(|doubt| doubt.inside(0, info.blocks).eq([(0, info.blocks)]));
        let usable = !info.read_only && info.state == VolumeState::Healthy;
        usable && (self.read_only.is_none() || (self.frozen && !in_doubt))
    }

    /// The damage found on the disk.
    #[must_use]
    pub fn damage(&self) -> &[Damage] {
        &self.damage
    }

    /// Where the blocks are.
    #[must_use]
    pub fn space(&self) -> Space {
        let allocator = &self.forest.allocator;
        let geometry = self.superblock.geometry();
        let reserved = allocator.reserved_blocks();
        let nodes = allocator.node_count().saturating_mul(geometry.node_blocks());
        Space {
            total: self.superblock.total_blocks,
            free: allocator.free_blocks().saturating_sub(reserved),
            data: allocator.data_blocks(),
            metadata: geometry.first_block().saturating_add(nodes),
            reserved,
            granted: allocator.granted_blocks(),
            pending: allocator.pending_blocks(),
        }
    }

    /// All volumes, snapshots included, by number.
    pub fn list(&self) -> impl Iterator<Item = &VolumeInfo> {
        self.volumes.values().map(|volume| &volume.info)
    }

    /// The volume of this number.
    #[must_use]
    pub fn get(&self, id: VolumeId) -> Option<&VolumeInfo> {
        self.volumes.get(&id).map(|volume| &volume.info)
    }

    /// The volume of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&VolumeInfo> {
        self.names.get(name).and_then(|id| self.get(*id))
    }

    /// Clean extent nodes in memory, for reports: at most what [`OpenOptions::cache_nodes`] says.
    #[must_use]
    pub fn cached_nodes(&self) -> usize {
        self.forest.nodes.cached()
    }

    /// Reads all metadata again and accounts for every block, independently of the state in memory,
    /// and compares both. Uncommitted changes are checked as they are in memory.
    pub fn check(&self, disk: &mut dyn Disk) -> Report {
        crate::check::check(self, disk)
    }

    // --- For the operations ---

    fn writable(&self) -> Result<(), VolumeError> {
        match &self.read_only {
            Some(why) if self.frozen => Err(VolumeError::StoreDamaged(why.clone())),
            Some(why) => Err(VolumeError::StoreReadOnly(why.clone())),
            None => Ok(()),
        }
    }

    /// A volume that can be read.
    fn healthy(&self, id: VolumeId) -> Result<&Volume, VolumeError> {
        let volume = self.volumes.get(&id).ok_or(VolumeError::NoSuchVolume(id))?;
        match volume.info.state {
            VolumeState::Healthy => Ok(volume),
            VolumeState::Damaged => Err(VolumeError::Damaged { id, what: self.first_damage() }),
        }
    }

    /// A volume that can be written, in a store that can.
    fn changeable(&self, id: VolumeId) -> Result<&Volume, VolumeError> {
        self.writable()?;
        let volume = self.healthy(id)?;
        if volume.info.read_only { Err(VolumeError::VolumeReadOnly(id)) } else { Ok(volume) }
    }

    fn first_damage(&self) -> String {
        let node = self.damage.iter().find(|damage| !matches!(damage.place, Place::Superblock(_)));
        node.map_or_else(|| "its metadata cannot be trusted".to_owned(), ToString::to_string)
    }

    /// Converts the error of a tree to that of its volume. A volume whose tree is damaged is used
    /// no further, and the store is frozen. Earlier changes can still be committed: the references
    /// of all volumes are in memory since the store was opened, and all were readable then.
    fn fail(&mut self, id: VolumeId, error: TreeError) -> VolumeError {
        match error {
            TreeError::NoSpace => self.no_space(),
            TreeError::Io(error) => VolumeError::Io(error),
            TreeError::Damaged { block, what } => {
                let damage = Damage { place: Place::Node(block), what };
                let what = damage.to_string();
                if self.read_only.is_none() {
                    self.read_only = Some(what.clone());
                    self.frozen = true;
                }
                if self.damage.len() < Report::MAX_PROBLEMS && !self.damage.contains(&damage) {
                    self.damage.push(damage);
                }
                if let Some(volume) = self.volumes.get_mut(&id) {
                    volume.info.state = VolumeState::Damaged;
                }
                VolumeError::Damaged { id, what }
            }
        }
    }

    /// Sees to it that the volume's record can be changed by the next commit without anything that
    /// could fail.
    fn touch(&mut self, id: VolumeId, need: Need) -> Result<(), VolumeError> {
        let Some(volume) = self.volumes.get(&id) else { return Err(VolumeError::NoSuchVolume(id)) };
        if !self.touched.contains(&id) {
            let record = volume.record();
            self.put_record(record, need)?;
            self.touched.insert(id);
        }
        let generation = self.forest.generation;
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.changed_in = generation;
        }
        Ok(())
    }

    fn put_record(&mut self, record: Record, need: Need) -> Result<(), VolumeError> {
        let id = record.id;
        self.change_catalogue(id, vec![Item::Volume(record)], need)
    }

    fn change_catalogue(
        &mut self,
        id: u64,
        items: Vec<Item>,
        need: Need,
    ) -> Result<(), VolumeError> {
        self.changed = true;
        let keys = (id, id.saturating_add(1));
        let changed = self.forest.replace(&mut NoDisk, &mut self.catalogue, keys, items, need);
        changed.map(|_| ()).map_err(|error| self.fail(VolumeId(id), error))
    }
}

impl Volume {
    /// The volume's record for the disk.
    pub(crate) fn record(&self) -> Record {
        let info = &self.info;
        Record {
            id: info.id.0,
            name: info.name.clone(),
            blocks: info.blocks,
            quota_blocks: info.quota_blocks,
            allocated_blocks: info.allocated_blocks,
            extents: info.extents,
            root: self.tree.root,
            origin: info.origin.map_or(0, |origin| origin.0),
            created_at_unix_s: info.created_at_unix_s,
            read_only: info.read_only,
        }
    }
}
