//! A store, the operations on it, and its expected state.

use std::cell::RefCell;
use std::collections::HashMap;

use sidecore_extent::{BlockRange, Extent};
use sidecore_fuzz::Input;
use sidecore_units::Vlba;
use sidecore_volume::{
    Commit, FormatOptions, Freed, Grant, NewVolume, OpenOptions, VolumeError, VolumeId, Volumes,
    format,
};

use crate::disk::{PAGE, SparseDisk};
use crate::mutate::{SIZES_BYTES, mutate};
use crate::reader::Image;
use crate::rules::{self, Ranges, is_sound, physical, range};

/// The most operations of an input, and the most grants in them, so that no input takes long.
const MOST_STEPS: usize = 120;
const MOST_GRANTS: usize = 800;
/// Setups from here on have a disk of zeros.
const UNFORMATTED: u8 = 248;

/// The expected result of an open.
#[derive(Clone, Copy)]
struct Expected {
    generation: u64,
    /// A commit has failed, and may be on the disk.
    or_next: bool,
    /// The store must open for writing.
    writable: bool,
}

/// An open store.
struct Open {
    volumes: Volumes,
    /// The store opened without damage.
    sound: bool,
    /// The store may be written.
    writable: bool,
    /// Since the open, only the store's own commits have changed the disk.
    trusted: bool,
    grants: Vec<Grant>,
    /// Blocks linked in this transaction, and in the one in commit.
    linked: Ranges,
    sealed: Ranges,
    commit: Option<Commit>,
    freed: Vec<Freed>,
    /// Blocks that the durable generation needs.
    durable: Ranges,
}

struct World<'a> {
    input: Input<'a>,
    disk: SparseDisk,
    options: OpenOptions,
    open: Option<Open>,
    /// The disk's content cannot be opened.
    refused: bool,
    expected: Option<Expected>,
    grants_left: usize,
    names: u32,
}

/// Executes the input.
pub fn run(mut input: Input<'_>) {
    let Some(setup) = input.byte() else { return };
    let mut world = World {
        input,
        disk: formatted(setup),
        options: OpenOptions {
            cache_nodes: if setup & 16 == 0 { 64 } else { 1 },
            read_only: false,
            owner: None,
        },
        open: None,
        refused: false,
        expected: if setup < UNFORMATTED {
            Some(Expected { generation: 1, or_next: false, writable: true })
        } else {
            None
        },
        grants_left: MOST_GRANTS,
        names: 0,
    };
    for _ in 0..MOST_STEPS {
        if world.step().is_none() {
            break;
        }
    }
    world.settle();
}

/// The disk for a setup, cached, because making one takes longer than most inputs.
fn formatted(setup: u8) -> SparseDisk {
    thread_local! {
        static DISKS: RefCell<HashMap<u8, SparseDisk>> = RefCell::default();
    }
    let disk = |setup: u8| {
        let mut disk = SparseDisk::new(SIZES_BYTES[usize::from(setup & 3)]);
        if setup < UNFORMATTED {
            let block_bytes = [512, 1024, 4096, 1024][usize::from(setup >> 2 & 3)];
            let uuid = *b"a store of fuzz.";
            format(&mut disk, &FormatOptions { block_bytes, uuid, ..FormatOptions::default() })
                .unwrap();
        }
        disk
    };
    let setup = if setup < UNFORMATTED { setup & 15 } else { setup };
    DISKS.with_borrow_mut(|disks| disks.entry(setup).or_insert_with(|| disk(setup)).clone())
}

impl World<'_> {
    fn step(&mut self) -> Option<()> {
        let operation = self.input.byte()?;
        if operation >= 192 {
            // With an open store or without one.
            if let Some(open) = self.open.as_mut().filter(|_| operation >= 240) {
                open.trusted = false;
                self.disk.guard.clear();
            } else {
                self.close();
            }
            (self.refused, self.expected) = (false, None);
            return mutate(&mut self.disk, &mut self.input);
        }
        self.ensure_open();
        match operation % 24 {
            0 => self.create(),
            1 => self.copy(true),
            2 => self.copy(false),
            3 => self.delete(),
            4 | 5 => self.write(),
            6 => self.scatter(),
            7 | 8 => self.unmap(),
            9 => self.share(),
            10 => self.resize(),
            11 => self.rename(),
            12 => self.set_quota(),
            13 => self.grant(),
            14 => self.link(),
            15 => self.release(),
            16 | 17 => self.commit_now(),
            18 => self.begin_commit(),
            19 => self.end_commit(),
            20 => self.reuse(),
            21 => self.fail_commit(),
            22 => self.reopen(),
            _ => self.map(),
        }
    }

    // --- Opening ---

    fn ensure_open(&mut self) {
        if self.open.is_some() || self.refused {
            return;
        }
        self.disk.fail_after = None;
        self.disk.reads = 0;
        self.disk.seen_bytes = self.disk.size_bytes;
        // An open repairs superblocks at most.
        self.disk.guard.clear();
        self.disk.guard.add((if self.options.read_only { 0 } else { 4 * PAGE }, u64::MAX));
        let opened = Volumes::open_with(&mut self.disk, &self.options);
        // A node on the disk has 168 children, which need not be there.
        assert!(
            self.disk.reads <= 32 + 169 * self.disk.live().len() as u64,
            "{} reads",
            self.disk.reads
        );
        self.disk.guard.clear();
        match opened {
            Ok(volumes) => {
                let sound = is_sound(&volumes);
                let writable = volumes.read_only().is_none();
                assert!(sound || !writable, "damaged, and written to: {:?}", volumes.damage());
                if !sound {
                    rules::repair(&self.disk);
                }
                if let Some(Expected { generation, or_next, writable: wanted }) = self.expected {
                    let next = or_next && volumes.generation() == generation + 1;
                    assert!(
                        next || volumes.generation() == generation,
                        "generation {}",
                        volumes.generation()
                    );
                    assert!(
                        sound && (writable || !wanted || self.options.read_only),
                        "{:?}",
                        volumes.read_only()
                    );
                }
                if self.expected.is_some() && writable {
                    // The open has also repaired the remains of a torn commit.
                    assert_eq!(volumes.check(&mut self.disk).problems, []);
                }
                self.open = Some(Open {
                    volumes,
                    sound,
                    writable,
                    trusted: true,
                    grants: Vec::new(),
                    linked: Ranges::default(),
                    sealed: Ranges::default(),
                    commit: None,
                    freed: Vec::new(),
                    durable: Ranges::default(),
                });
                self.compare(true);
            }
            Err(error) => {
                assert!(self.expected.is_none(), "{error}");
                self.refused = true;
            }
        }
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            let generation = open.volumes.generation();
            let or_next =
                open.commit.is_some() || (open.writable && open.volumes.read_only().is_some());
            self.expected = (open.sound && open.trusted).then_some(Expected {
                generation,
                or_next,
                writable: open.writable,
            });
        }
        self.disk.guard.clear();
    }

    fn reopen(&mut self) -> Option<()> {
        let setup = self.input.byte()?;
        self.close();
        self.options = OpenOptions {
            cache_nodes: usize::from(setup & 63),
            read_only: setup >= 224,
            owner: None,
        };
        self.ensure_open();
        Some(())
    }

    // --- Looking ---

    /// Compares the maps with the disk, while no change is uncommitted. Afterwards the durable data
    /// must not be overwritten.
    fn compare(&mut self, fresh: bool) {
        let Self { disk, open: Some(open), .. } = self else { return };
        if !open.trusted {
            return;
        }
        let maps = rules::survey(&mut open.volumes, disk, 64);
        if fresh && open.sound {
            rules::sharing(&maps, true);
        }
        rules::check(&open.volumes, disk, &maps, open.sound);
        let mut image = Image::read(disk, open.volumes.generation(), open.sound);
        open.durable = rules::is_on_disk(&open.volumes, &maps, &mut image);
        if open.sound {
            assert_eq!(maps.len(), image.volumes.len(), "an undamaged volume is not healthy");
        }
        self.protect();
    }

    /// Guards the blocks of the durable generation, its superblock, and all data against writes.
    fn protect(&mut self) {
        let Self { disk, open: Some(open), .. } = self else { return };
        if !open.trusted {
            return;
        }
        let block_bytes = u64::from(open.volumes.block_bytes());
        disk.guard.clear();
        disk.guard.add((open.volumes.generation() % 2 * 2 * PAGE, 2 * PAGE));
        if !open.writable {
            disk.guard.add((0, u64::MAX));
        }
        let granted = open.grants.iter().flat_map(Grant::extents).map(physical);
        let blocks =
            open.durable.iter().chain(open.linked.iter()).chain(open.sealed.iter()).chain(granted);
        disk.guard.extend(blocks.map(|(first, count)| (first * block_bytes, count * block_bytes)));
    }

    /// Checks that the store's state in memory is consistent.
    fn look(&mut self) {
        let Self { disk, open: Some(open), .. } = self else { return };
        if open.trusted {
            let maps = rules::survey(&mut open.volumes, disk, 7);
            rules::check(&open.volumes, disk, &maps, open.sound);
        }
    }

    /// Ends all operations in progress, then opens the store again.
    fn settle(&mut self) {
        self.ensure_open();
        self.look();
        while self.end_commit().is_some() {}
        if let Some(open) = &mut self.open {
            open.grants.drain(..).for_each(|grant| open.volumes.release(grant));
        }
        self.commit_now();
        self.look();
        self.close();
        self.ensure_open();
    }

    // --- Operations ---

    /// Checks that a sound store may return such a result.
    fn judge<T>(&mut self, result: Result<T, VolumeError>) -> Option<T> {
        let open = self.open.as_ref()?;
        let refused =
            matches!(&result, Err(VolumeError::StoreReadOnly(_) | VolumeError::StoreDamaged(_)));
        if open.trusted {
            assert!(open.writable || result.is_err(), "a store that is read only was changed");
            // A failed commit makes the store read-only.
            assert!(!refused || open.volumes.read_only().is_some());
            match &result {
                Err(error @ VolumeError::Io(_)) => panic!("{error}"),
                Err(error @ VolumeError::Damaged { .. }) => assert!(!open.sound, "{error}"),
                _ => {}
            }
        }
        result.ok()
    }

    /// Numbers that have a meaning in this store.
    fn known(&self) -> Vec<u64> {
        let Some(open) = &self.open else { return Vec::new() };
        let sizes = open.volumes.list().map(|info| info.blocks);
        let space = open.volumes.space();
        let largest = (1 << 48) / u64::from(open.volumes.block_bytes());
        sizes.chain([space.free, open.volumes.blocks(), largest, 1000]).collect()
    }

    fn number(&mut self) -> Option<u64> {
        let known = self.known();
        self.input.number(&known)
    }

    /// The id of a volume; sometimes of none.
    fn volume(&mut self) -> Option<VolumeId> {
        let index = usize::from(self.input.byte()?);
        let open = self.open.as_ref()?;
        let count = open.volumes.list().count();
        if index == 255 || count == 0 {
            return Some(VolumeId(index as u64));
        }
        open.volumes.list().nth(index % count).map(|info| info.id)
    }

    /// A volume and a part of it, mostly inside.
    fn part(&mut self) -> Option<(VolumeId, BlockRange)> {
        let id = self.volume()?;
        let (first, count) = (self.number()?, self.number()?);
        let blocks = self.open.as_ref()?.volumes.get(id).map_or(0, |info| info.blocks);
        let count =
            if first < blocks && count < 1 << 60 { count.min(blocks - first) } else { count };
        Some((id, range(first, count)))
    }

    fn name(&mut self) -> Option<String> {
        let byte = self.input.byte()?;
        self.names += 1;
        Some(match byte {
            0..128 => format!("v{}", self.names),
            128..240 => format!("v{}", byte % 8),
            _ => "x".repeat(usize::from(byte - 200)),
        })
    }

    fn create(&mut self) -> Option<()> {
        let (name, blocks, quota) = (self.name()?, self.number()?, self.number()?);
        // On the disk, the largest number means no quota.
        let new = NewVolume { name, blocks, quota_blocks: Some(quota).filter(|quota| *quota != 0) };
        let created = self.open.as_mut()?.volumes.create(&new, 1);
        if let Some(id) = self.judge(created) {
            let Self { disk, open: Some(open), .. } = self else { return None };
            let info = open.volumes.get(id).unwrap();
            assert!(
                (info.blocks, &info.name) == (blocks, &new.name)
                    && open.volumes.find(&new.name).is_some()
            );
            assert_eq!(rules::map_all(&mut open.volumes, disk, id, 5).unwrap(), []);
        }
        Some(())
    }

    fn copy(&mut self, read_only: bool) -> Option<()> {
        let (id, name) = (self.volume()?, self.name()?);
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        let copied = if read_only {
            open.volumes.snapshot(disk, id, &name, 2)
        } else {
            open.volumes.clone_volume(disk, id, &name, 2)
        };
        let Some(copy) = self.judge(copied) else { return Some(()) };
        let Self { disk, open: Some(open), .. } = self else { return None };
        if open.trusted {
            let [of_copy, of_origin] = [copy, id]
                .map(|id| rules::map_all(&mut open.volumes, disk, id, usize::MAX).unwrap());
            assert_eq!(of_copy, of_origin);
            assert!(of_copy.iter().all(|extent| extent.shared));
        }
        Some(())
    }

    fn delete(&mut self) -> Option<()> {
        let id = self.volume()?;
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        let deleted = open.volumes.delete(disk, id);
        if self.judge(deleted).is_some() {
            assert!(self.open.as_ref()?.volumes.get(id).is_none());
        }
        Some(())
    }

    /// Allocates blocks, which must be free in memory and after a power cut.
    fn allocate(&mut self, id: VolumeId, wanted: BlockRange) -> Option<Grant> {
        self.grants_left = self.grants_left.checked_sub(1)?;
        let Self { disk, open: Some(open), .. } = self else { return None };
        let granted = open.volumes.allocate(disk, id, wanted);
        let grant = self.judge(granted)?;
        let open = self.open.as_mut()?;
        assert!(
            grant.volume() == id
                && grant.range().first == wanted.first
                && grant.range().count <= wanted.count
        );
        let first_block = 4 * PAGE / u64::from(open.volumes.block_bytes());
        let mut at = wanted.first;
        for extent in grant.extents() {
            let (first, count) = physical(extent);
            assert!(extent.first == at && count > 0 && !extent.shared);
            assert!(first >= first_block && first + count <= open.volumes.blocks());
            at = extent.range().end().unwrap();
            if open.trusted {
                let mut others = Ranges::default();
                others.extend(open.grants.iter().flat_map(Grant::extents).map(physical));
                others.extend(
                    open.freed
                        .iter()
                        .flat_map(Freed::ranges)
                        .map(|range| (range.first.0, range.count)),
                );
                for taken in [&open.durable, &open.linked, &open.sealed, &others] {
                    assert!(!taken.overlaps((first, count)), "{extent:?} is granted, and not free");
                }
            }
        }
        assert_eq!(at.0 - wanted.first.0, grant.range().count);
        Some(grant)
    }

    fn link_one(&mut self, grant: Grant) {
        let Self { disk, open: Some(open), .. } = self else { return };
        let (id, range, extents) = (grant.volume(), grant.range(), grant.extents().to_vec());
        let linked = open.volumes.link(disk, grant);
        if self.judge(linked).is_none() {
            return;
        }
        let Self { disk, open: Some(open), .. } = self else { return };
        open.linked.extend(extents.iter().map(physical));
        let mapped = open.volumes.map(disk, id, range, usize::MAX);
        if open.trusted && !range.is_empty() {
            let mapped = mapped.unwrap();
            // Contiguous blocks are one extent on both sides. Whether they are shared does not
            // matter here.
            let flat = |extents: &[Extent]| -> Vec<_> {
                extents.iter().map(|extent| (extent.first, physical(extent))).collect()
            };
            assert_eq!((mapped.covered, flat(&mapped.extents)), (range, flat(&extents)));
        }
    }

    fn write(&mut self) -> Option<()> {
        let (id, range) = self.part()?;
        if let Some(grant) = self.allocate(id, range) {
            self.link_one(grant);
        }
        Some(())
    }

    /// Makes many extents, and so nodes.
    fn scatter(&mut self) -> Option<()> {
        let (id, range) = self.part()?;
        let stride = u64::from(self.input.byte()?) + 1;
        for index in 0..range.count.min(256) {
            let Some(at) = range.first.0.checked_add(index * stride) else { break };
            let Some(grant) = self.allocate(id, rules::range(at, 1)) else { break };
            self.link_one(grant);
        }
        Some(())
    }

    fn unmap(&mut self) -> Option<()> {
        let (id, range) = self.part()?;
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        let unmapped = open.volumes.unmap(disk, id, range);
        if self.judge(unmapped).is_some() {
            let Self { disk, open: Some(open), .. } = self else { return None };
            if open.trusted {
                assert_eq!(open.volumes.map(disk, id, range, 9).unwrap().extents, []);
            }
        }
        Some(())
    }

    fn share(&mut self) -> Option<()> {
        let (from, range) = self.part()?;
        let (to, first) = (self.volume()?, self.number()?);
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        let shared = open.volumes.share(disk, (from, range), (to, Vlba(first)));
        if self.judge(shared).is_some() {
            let Self { disk, open: Some(open), .. } = self else { return None };
            if open.trusted && (from, range.first.0) != (to, first) {
                let [source, target] =
                    [(from, range), (to, rules::range(first, range.count))].map(|(id, range)| {
                        open.volumes.map(disk, id, range, usize::MAX).unwrap().extents
                    });
                assert_eq!(
                    source
                        .iter()
                        .map(|e| (e.first.0 - range.first.0, e.count, e.physical))
                        .collect::<Vec<_>>(),
                    target
                        .iter()
                        .map(|e| (e.first.0 - first, e.count, e.physical))
                        .collect::<Vec<_>>()
                );
            }
        }
        Some(())
    }

    fn resize(&mut self) -> Option<()> {
        let (id, blocks) = (self.volume()?, self.number()?);
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        let resized = open.volumes.resize(disk, id, blocks);
        if self.judge(resized).is_some() {
            assert_eq!(self.open.as_ref()?.volumes.get(id).unwrap().blocks, blocks);
        }
        Some(())
    }

    fn rename(&mut self) -> Option<()> {
        let (id, name) = (self.volume()?, self.name()?);
        let renamed = self.open.as_mut().map(|open| open.volumes.rename(id, &name))?;
        if self.judge(renamed).is_some() {
            assert_eq!(self.open.as_ref()?.volumes.find(&name).unwrap().id, id);
        }
        Some(())
    }

    fn set_quota(&mut self) -> Option<()> {
        let (id, quota) = (self.volume()?, self.number()?);
        let set = self.open.as_mut().map(|open| open.volumes.set_quota(id, Some(quota)))?;
        self.judge(set);
        Some(())
    }

    fn grant(&mut self) -> Option<()> {
        let (id, range) = self.part()?;
        if let Some(grant) = self.allocate(id, range) {
            self.open.as_mut()?.grants.push(grant);
        }
        Some(())
    }

    fn link(&mut self) -> Option<()> {
        if let Some(grant) = self.open.as_mut().and_then(|open| open.grants.pop()) {
            self.link_one(grant);
        }
        Some(())
    }

    fn release(&mut self) -> Option<()> {
        if let Some(open) = &mut self.open
            && let Some(grant) = open.grants.pop()
        {
            open.volumes.release(grant);
        }
        Some(())
    }

    fn map(&mut self) -> Option<()> {
        let (id, range) = self.part()?;
        let most = usize::from(self.input.byte()?);
        let Self { disk, open: Some(open), .. } = self else { return Some(()) };
        if let Ok(mapped) = open.volumes.map(disk, id, range, most) {
            assert!(
                mapped.extents.len() <= most
                    && (mapped.covered.count > 0 || most == 0 || range.is_empty())
            );
            rules::mapped_is_right(&open.volumes, range, &mapped);
        }
        self.look();
        Some(())
    }

    // --- Commits ---

    fn begin_commit(&mut self) -> Option<()> {
        self.look();
        let Some(open) = &mut self.open else { return Some(()) };
        let needed = open.volumes.needs_commit() && open.commit.is_none();
        let commit = open.volumes.begin_commit();
        if open.trusted {
            assert_eq!(commit.is_some(), needed, "{:?}", open.volumes.read_only());
            assert!(open.writable || !needed);
        }
        if commit.is_some() {
            open.commit = commit;
            open.sealed = std::mem::take(&mut open.linked);
        }
        Some(())
    }

    fn write_commit(&mut self, fail_after: Option<u32>) -> Option<()> {
        self.protect();
        let Self { disk, open: Some(open), .. } = self else { return None };
        let commit = open.commit.take()?;
        disk.fail_after = fail_after;
        let written = commit.write(disk);
        disk.fail_after = None;
        let (ok, generation) = (written.is_ok(), commit.generation());
        open.freed.push(open.volumes.end_commit(commit, written));
        if !ok {
            assert!(open.volumes.read_only().is_some());
            return Some(());
        }
        assert_eq!(open.volumes.generation(), generation);
        open.sealed.clear();
        if open.trusted && !open.volumes.needs_commit() {
            self.compare(false);
        } else if open.trusted && open.sound {
            let mut image = Image::read(disk, generation, true);
            let numbers: Vec<u64> = image.volumes.keys().copied().collect();
            let mut durable = Ranges::default();
            for number in numbers {
                durable.extend(
                    image.mappings(number).iter().map(|(_, count, physical)| (*physical, *count)),
                );
            }
            let blocks = image.superblock.node_blocks();
            durable.extend(image.nodes.iter().map(|page| (page * blocks, blocks)));
            open.durable = durable;
            self.protect();
        }
        Some(())
    }

    fn end_commit(&mut self) -> Option<()> {
        self.open.as_ref()?.commit.as_ref()?;
        self.write_commit(None)
    }

    fn commit_now(&mut self) -> Option<()> {
        self.end_commit();
        self.begin_commit();
        self.end_commit();
        self.reuse()
    }

    fn fail_commit(&mut self) -> Option<()> {
        let fail_after = self.input.byte()?;
        self.begin_commit();
        self.write_commit(Some(fail_after.into()));
        Some(())
    }

    fn reuse(&mut self) -> Option<()> {
        if let Some(open) = &mut self.open {
            open.freed.drain(..).for_each(|freed| open.volumes.reuse(freed));
        }
        Some(())
    }
}
