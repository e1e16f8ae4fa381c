//! Opening a store: finding the newest generation, and looking at all of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use crate::allocator::Allocator;
use crate::claims::claimants;
use crate::disk::Disk;
use crate::doubt::Unread;
use crate::error::{Damage, OpenError, Place};
use crate::forest::{Forest, Tree};
use crate::format::{Content, probe};
use crate::geometry::{Geometry, SLOTS};
use crate::info::{VolumeId, VolumeInfo, VolumeState};
use crate::limits::{MAX_STORE_BLOCKS, NODE_BYTES};
use crate::node::{Kind, Node, Pointer};
use crate::nodes::{Nodes, TreeError, read_node};
use crate::owner::Owner;
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::superblock::{SlotError, Superblock, VERSION, slot_offset_bytes, slots_of};
use crate::volumes::{OpenOptions, Volume, Volumes};
use crate::walk::{Problems, Source, TreeHealth, Walk};

/// The newest whole superblock, and the damage of its copies.
pub(crate) struct Newest {
    pub(crate) superblock: Superblock,
    pub(crate) damage: Vec<Damage>,
    /// One of its two slots was not written yet when the program was killed: no damage, and written
    /// again on open.
    pub(crate) is_half_written: bool,
}

/// Nodes from the disk, nothing else.
pub(crate) struct FromDisk<'a> {
    pub(crate) disk: &'a mut dyn Disk,
    pub(crate) geometry: Geometry,
}

impl Source for FromDisk<'_> {
    fn node(
        &mut self,
        pointer: Pointer,
        kind: Kind,
        level: u8,
    ) -> Result<(Arc<Node>, bool), TreeError> {
        let node = read_node(self.disk, &self.geometry, pointer, kind, level)?;
        Ok((Arc::new(node), true))
    }
}

/// Slots, by their numbers, and their contents.
type Slots = Vec<(u32, Result<Superblock, SlotError>)>;

/// The contents of all slots, and the error of the disk if one cannot be read.
fn slots(disk: &mut dyn Disk) -> (Slots, Option<io::Error>) {
    let mut found = Slots::new();
    let mut failed = None;
    for slot in 0..SLOTS {
        let mut bytes = vec![0; NODE_BYTES];
        let slot_end = slot_offset_bytes(slot).saturating_add(NODE_BYTES as u64);
        if disk.size_bytes() < slot_end {
            found.push((slot, Err(SlotError::NotOurs)));
            continue;
        }
        let read = match disk.read(slot_offset_bytes(slot), &mut bytes) {
            Ok(()) => Superblock::decode(&bytes, slot),
            Err(error) => {
                let unread = Err(SlotError::Damaged(format!("it cannot be read: {error}")));
                failed = Some(error);
                unread
            }
        };
        found.push((slot, read));
    }
    (found, failed)
}

/// Looks at all slots.
pub(crate) fn newest(disk: &mut dyn Disk) -> Result<Newest, OpenError> {
    let (found, failed) = slots(disk);
    // A later version is believed before this one: it may have been here last.
    if let Some(version) = found.iter().find_map(|(_, slot)| match slot {
        Err(SlotError::Version(version)) => Some(*version),
        _ => None,
    }) {
        return Err(OpenError::UnknownVersion { found: version, known: VERSION });
    }
    // Whole, and it cannot be: no torn commit, and no reason to go back.
    if let Some((slot, what)) = found.iter().find_map(|(slot, content)| match content {
        Err(SlotError::Invalid(what)) => Some((*slot, what.clone())),
        _ => None,
    }) {
        return Err(OpenError::Invalid(Damage { place: Place::Superblock(slot), what }));
    }
    let whole = found.iter().filter_map(|(_, slot)| slot.as_ref().ok());
    let Some(superblock) = whole.max_by_key(|superblock| superblock.rank()).cloned() else {
        return Err(no_superblock(disk, &found, failed));
    };
    let mut damage = Vec::new();
    let mut is_half_written = false;
    for (slot, content) in &found {
        let ours = slots_of(superblock.generation).contains(slot);
        match content {
            // The copy that the slots had before: the program was killed between the two writes.
            Ok(old) if ours && old.generation.saturating_add(2) == superblock.generation => {
                is_half_written = true
            }
            Err(SlotError::Blank) if ours && superblock.generation == 2 => is_half_written = true,
            // A copy that was lost.
            Ok(old) if ours && old.generation != superblock.generation => {
                let what = format!("it is still of generation {}", old.generation);
                damage.push(Damage { place: Place::Superblock(*slot), what });
            }
            // A late write of an owner that had been replaced.
            Ok(old) if ours && old.is_superseded_by(&superblock) => {
                let what = "a former owner has written it".to_owned();
                damage.push(Damage { place: Place::Superblock(*slot), what });
            }
            Ok(other) if ours && *other != superblock => {
                let place = Place::Superblock(*slot);
                return Err(OpenError::Invalid(Damage {
                    place,
                    what: "it contradicts its copy".to_owned(),
                }));
            }
            Err(error) if ours => {
                damage.push(Damage { place: Place::Superblock(*slot), what: describe(error) })
            }
            _ => {}
        }
    }
    Ok(Newest { superblock, damage, is_half_written })
}

fn no_superblock(
    disk: &mut dyn Disk,
    found: &[(u32, Result<Superblock, SlotError>)],
    failed: Option<std::io::Error>,
) -> OpenError {
    let ours = |error: &SlotError| !matches!(error, SlotError::Blank | SlotError::NotOurs);
    let damage: Vec<Damage> = found
        .iter()
        .filter_map(|(slot, content)| {
            Some((*slot, content.as_ref().err().filter(|error| ours(error))?))
        })
        .map(|(slot, error)| Damage { place: Place::Superblock(slot), what: describe(error) })
        .collect();
    match (failed, damage.is_empty()) {
        (Some(error), _) => OpenError::Io(error),
        (None, false) => OpenError::NoSuperblock(damage),
        (None, true) => match probe(disk) {
            Ok(Content::Blank) => OpenError::NotFormatted("nothing".to_owned()),
            Ok(Content::Foreign(name)) => OpenError::NotFormatted(name.to_owned()),
            Ok(Content::Ours | Content::Unknown) => {
                OpenError::NotFormatted("something unknown".to_owned())
            }
            Err(error) => OpenError::Io(error),
        },
    }
}

fn describe(error: &SlotError) -> String {
    match error {
        SlotError::Blank => "it is empty".to_owned(),
        SlotError::NotOurs => "it holds something else".to_owned(),
        SlotError::Damaged(what) | SlotError::Invalid(what) => what.clone(),
        SlotError::Version(version) => format!("it has version {version}"),
    }
}

/// Whether the newest superblock describes a store that this disk can hold. Reads nothing else, and
/// writes nothing.
///
/// # Errors
/// There is no superblock that can be used, or the disk is shorter than the store.
pub fn probe_size(disk: &mut dyn Disk) -> Result<(), OpenError> {
    let superblock = newest(disk)?.superblock;
    blocks_on(disk, &superblock).map(drop)
}

/// The boot under which the store on the disk was in use with a log when its daemon died; none if
/// there is no such store.
///
/// # Errors
/// The disk cannot be read.
pub fn in_use_under(disk: &mut dyn Disk) -> io::Result<Option<[u8; 16]>> {
    match newest(disk) {
        Ok(newest) => Ok(newest.superblock.in_use),
        Err(OpenError::Io(error)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// The blocks of a disk, which must not be fewer than those of the store.
fn blocks_on(disk: &mut dyn Disk, superblock: &Superblock) -> Result<u64, OpenError> {
    let disk_blocks = disk.size_bytes().checked_div(u64::from(superblock.block_bytes)).unwrap_or(0);
    if disk_blocks < superblock.total_blocks {
        return Err(OpenError::Shrunk { disk_blocks, store_blocks: superblock.total_blocks });
    }
    Ok(disk_blocks)
}

/// Flushes the disk before it is read: the data may be in its cache alone, if the last program died
/// in the middle of a commit, and all later commits build on it. Returns the reason why the store
/// cannot be written, if the disk fails.
fn flush(disk: &mut dyn Disk) -> Option<String> {
    disk.flush().err().map(|error| format!("the disk cannot be flushed: {error}"))
}

/// Gives a superblock the size of its disk, and its owner. Returns whether either is another one.
fn renew(superblock: &mut Superblock, disk_blocks: u64, owner: Option<Owner>) -> (bool, bool) {
    let blocks = disk_blocks.min(MAX_STORE_BLOCKS).max(superblock.total_blocks);
    let owner = owner.or(superblock.owner);
    let has_changed = (superblock.total_blocks != blocks, superblock.owner != owner);
    (superblock.total_blocks, superblock.owner) = (blocks, owner);
    has_changed
}

/// The owner that opens the store. Fails if a later one has served the store, or if the store has
/// features that this program does not know.
fn admitted(options: &OpenOptions, superblock: &Superblock) -> Result<Option<Owner>, OpenError> {
    if superblock.features != 0 {
        return Err(OpenError::UnknownFeatures(superblock.features));
    }
    let owner = options.owner.filter(|_| !options.read_only);
    match (owner, superblock.owner) {
        (Some(mine), Some(found)) if found.is_newer_than(&mine) => {
            Err(OpenError::NewerOwner { found, mine })
        }
        _ => Ok(owner),
    }
}

pub(crate) fn open(disk: &mut dyn Disk, options: &OpenOptions) -> Result<Volumes, OpenError> {
    let mut read_only =
        if options.read_only { Some("it was opened so".to_owned()) } else { flush(disk) };
    let Newest { mut superblock, mut damage, is_half_written } = newest(disk)?;
    let bad_slots = is_half_written || !damage.is_empty();
    let owner = admitted(options, &superblock)?;
    if superblock.features_to_write != 0 {
        read_only =
            Some(format!("it uses unknown features (bits {:#x})", superblock.features_to_write));
    }
    let disk_blocks = blocks_on(disk, &superblock)?;

    let on_disk = superblock.clone();
    let durable = superblock.id();
    let mut source = FromDisk { disk, geometry: superblock.geometry() };
    let mut walk = Walk::new(superblock.geometry(), superblock.generation, &mut source);
    let Trees { records, healthy, doubts } = walk_trees(&mut walk, &superblock);

    let mut frozen = false;
    let found = damage_of(std::mem::take(&mut walk.problems));
    if let Some(first) = found.first() {
        frozen = read_only.is_none();
        read_only.get_or_insert_with(|| first.to_string());
    } else if walk.shares.iter().next().is_none() {
        // No two extents refer to the same block: nothing but copies ever did.
        superblock.only_copies = true;
    }
    damage.extend(found);
    // A store with damage makes no commit that is not needed.
    let (grows, announces) = match read_only {
        None => renew(&mut superblock, disk_blocks, owner),
        Some(_) => (false, false),
    };

    let forest = forest_of(walk, &superblock, options.cache_nodes, doubts);
    let catalogue = Tree { kind: Kind::Catalogue, owner: 0, root: superblock.catalogue };
    let (volumes, names) = volumes_of(records, healthy);
    // Writes another copy, before any change builds on the blocks that this generation freed: from
    // now on a single flipped bit cannot make the generation look like a torn commit.
    if bad_slots
        && (frozen || read_only.is_none())
        && let Err(error) = heal(disk, &on_disk)
    {
        frozen = false;
        read_only = Some(format!("a damaged superblock cannot be written again: {error}"));
    }

    Ok(Volumes {
        next_volume: superblock.next_volume,
        generation: superblock.generation,
        superblock,
        forest,
        catalogue,
        volumes,
        names,
        touched: BTreeSet::new(),
        changed: grows || announces,
        committing: None,
        backed: RangeSet::default(),
        kept: None,
        disk_is_full: None,
        durable,
        log: None,
        read_only,
        frozen,
        damage,
        owner,
        announces,
    })
}

fn damage_of(Problems { mut list, more }: Problems) -> Vec<Damage> {
    if more > 0 {
        list.push(Damage { place: Place::Store, what: format!("{more} more places are damaged") });
    }
    list
}

/// The volumes of records that are [healthy](Trees::healthy) or not, and their names. Of two
/// records of one name the first has it.
fn volumes_of(
    records: Vec<Record>,
    healthy: Vec<bool>,
) -> (BTreeMap<VolumeId, Volume>, HashMap<String, VolumeId>) {
    let mut volumes = BTreeMap::new();
    let mut names = HashMap::new();
    for (record, healthy) in records.into_iter().zip(healthy) {
        let id = VolumeId(record.id);
        names.entry(record.name.clone()).or_insert(id);
        volumes.insert(id, volume_of(record, healthy));
    }
    (volumes, names)
}

/// The volumes of the catalogue, and the facts of their trees.
struct Trees {
    records: Vec<Record>,
    /// By record.
    healthy: Vec<bool>,
    /// As [`Forest::doubts`].
    doubts: HashMap<u64, RangeSet>,
}

fn walk_trees(walk: &mut Walk<'_>, superblock: &Superblock) -> Trees {
    let hidden = walk.catalogue(superblock.catalogue);
    let records = std::mem::take(&mut walk.records);
    check_catalogue(superblock, &records, &mut walk.problems);
    let health: Vec<TreeHealth> = records.iter().map(|record| walk.volume(record)).collect();
    let mut healthy: Vec<bool> = health.iter().map(|health| health.is_healthy).collect();
    refuse_rivals(walk, &records, &mut healthy);
    let volumes: Vec<(u64, RangeSet)> =
        records.iter().zip(health).map(|(record, health)| (record.id, health.unread)).collect();
    let (next_volume, only_copies) = (superblock.next_volume, superblock.only_copies);
    let unread =
        Unread { records: &records, volumes: &volumes, hidden: &hidden, next_volume, only_copies };
    let doubts = unread.doubts();
    Trees { records, healthy, doubts }
}

/// The forest that a walk has seen, for the transaction after the superblock's.
fn forest_of(
    walk: Walk<'_>,
    superblock: &Superblock,
    cache_nodes: usize,
    doubts: HashMap<u64, RangeSet>,
) -> Forest {
    let geometry = superblock.geometry();
    let mut nodes = Nodes::new(geometry, cache_nodes);
    for (address, node) in walk.catalogue {
        nodes.keep(address, node);
    }
    let mut used = walk.data.clone();
    for (address, seen) in &walk.seen {
        used.cover(*address, geometry.node_blocks());
        nodes.set_references(*address, seen.references);
    }
    let allocator =
        Allocator::new(geometry, &used, walk.data.blocks(), walk.seen.len() as u64, walk.shares);
    Forest { nodes, allocator, generation: superblock.generation.saturating_add(1), doubts }
}

/// Where a node lies and an extent says that there is data, one of the two is wrong, and nothing
/// here tells which: the volumes that have the one or the other are not used.
fn refuse_rivals(walk: &mut Walk<'_>, records: &[Record], healthy: &mut [bool]) {
    let node_blocks = walk.geometry.node_blocks();
    let rivals: Vec<(u64, u64)> =
        walk.conflicts().into_iter().map(|address| (address, node_blocks)).collect();
    if rivals.is_empty() {
        return;
    }
    let claimants: BTreeSet<u64> =
        claimants(&mut *walk.source, records, node_blocks, &rivals).into_iter().flatten().collect();
    for (record, healthy) in records.iter().zip(healthy) {
        *healthy &= !claimants.contains(&record.id);
    }
}

/// Writes both copies of a superblock again, one after the other: one of them is whole at every
/// moment.
pub(crate) fn heal(disk: &mut dyn Disk, superblock: &Superblock) -> std::io::Result<()> {
    let mut bytes = vec![0; NODE_BYTES];
    for slot in slots_of(superblock.generation) {
        let copy = superblock.encode(slot);
        disk.read(slot_offset_bytes(slot), &mut bytes)?;
        if bytes != copy {
            disk.write(slot_offset_bytes(slot), &copy)?;
            disk.flush()?;
        }
    }
    Ok(())
}

/// Checks the catalogue as a whole.
pub(crate) fn check_catalogue(
    superblock: &Superblock,
    records: &[Record],
    problems: &mut Problems,
) {
    if records.len() as u64 != superblock.volume_count {
        let what = format!(
            "{} volumes are listed, and there should be {}",
            records.len(),
            superblock.volume_count
        );
        problems.add(Place::Store, what);
    }
    let mut names = BTreeSet::new();
    for record in records {
        let place = Place::Volume(VolumeId(record.id));
        if record.id >= superblock.next_volume || record.origin >= superblock.next_volume {
            problems.add(
                place,
                format!("its number was not given out: the next is {}", superblock.next_volume),
            );
        }
        if !names.insert(&record.name) {
            problems.add(place, format!("another volume is called {} as well", record.name));
        }
    }
}

fn volume_of(record: Record, healthy: bool) -> Volume {
    let tree = Tree { kind: Kind::Extents, owner: record.id, root: record.root };
    let info = VolumeInfo {
        id: VolumeId(record.id),
        name: record.name,
        blocks: record.blocks,
        quota_blocks: record.quota_blocks,
        allocated_blocks: record.allocated_blocks,
        extents: record.extents,
        read_only: record.read_only,
        origin: (record.origin != 0).then_some(VolumeId(record.origin)),
        created_at_unix_s: record.created_at_unix_s,
        state: if healthy { VolumeState::Healthy } else { VolumeState::Damaged },
    };
    Volume { info, tree, charged_blocks: 0, changed_in: 0, made_in: 0 }
}
