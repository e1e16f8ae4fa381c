//! Disks in memory, and shorthands, for the tests.

use std::collections::BTreeMap;
use std::io;

use sidecore_extent::BlockRange;
use sidecore_units::Vlba;

use crate::{Disk, FormatOptions, Grant, NewVolume, VolumeError, VolumeId, Volumes, format};

/// Bytes that a write may tear at.
const SECTOR: usize = 512;

/// A disk with a volatile cache: unflushed data may or may not survive. Sparse, in pieces of 4 KiB.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryDisk {
    size_bytes: u64,
    durable: BTreeMap<u64, Vec<u8>>,
    /// Not flushed, oldest first: sectors by offset.
    cached: Vec<(u64, Vec<u8>)>,
    /// Operations (writes and flushes) until they fail.
    pub(crate) fail_after: Option<usize>,
    /// Writes (not flushes) until there is no space.
    pub(crate) full_after: Option<usize>,
    pub(crate) fail_reads: bool,
    pub(crate) writes: usize,
    pub(crate) flushes: usize,
    pub(crate) reads: usize,
}

impl MemoryDisk {
    pub(crate) fn new(size_bytes: u64) -> Self {
        Self { size_bytes, ..Self::default() }
    }

    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let mut disk = Self::new(bytes.len() as u64 / 4096 * 4096);
        for (index, piece) in bytes.chunks_exact(4096).enumerate() {
            disk.put(index as u64 * 4096, piece);
        }
        disk
    }

    pub(crate) fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
    }

    /// Flips a bit of the durable contents.
    pub(crate) fn flip(&mut self, bit: u64) {
        let at = bit / 8;
        let piece = self.durable.entry(at / 4096 * 4096).or_insert_with(|| vec![0; 4096]);
        piece[(at % 4096) as usize] ^= 1 << (bit % 8);
    }

    pub(crate) fn xor(&mut self, at: u64, mask: u8) {
        let piece = self.durable.entry(at / 4096 * 4096).or_insert_with(|| vec![0; 4096]);
        piece[(at % 4096) as usize] ^= mask;
    }

    /// A power cut: of the sectors written since the last flush, any subset is on the disk.
    pub(crate) fn cut(&mut self, random: &mut impl FnMut() -> u64) {
        for (at, sector) in std::mem::take(&mut self.cached) {
            if random() & 1 == 0 {
                self.put(at, &sector);
            }
        }
        self.fail_after = None;
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        for (index, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = at + (index * SECTOR) as u64;
            let piece = self.durable.entry(at / 4096 * 4096).or_insert_with(|| vec![0; 4096]);
            piece[(at % 4096) as usize..][..sector.len()].copy_from_slice(sector);
        }
    }

    fn count_down(&mut self) -> io::Result<()> {
        match &mut self.fail_after {
            Some(0) => Err(io::Error::other("the disk is broken")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn inside(&self, at: u64, len: usize) {
        assert!(at.is_multiple_of(4096) && len.is_multiple_of(4096), "unaligned: {at}+{len}");
        assert!(at + len as u64 <= self.size_bytes, "outside: {at}+{len}");
    }
}

impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.inside(at, buffer.len());
        self.reads += 1;
        if self.fail_reads {
            return Err(io::Error::other("the disk cannot be read"));
        }
        for (index, piece) in buffer.chunks_mut(4096).enumerate() {
            match self.durable.get(&(at + index as u64 * 4096)) {
                Some(bytes) => piece.copy_from_slice(bytes),
                None => piece.fill(0),
            }
        }
        let end = at + buffer.len() as u64;
        for (sector_at, sector) in &self.cached {
            if (at..end).contains(sector_at) {
                buffer[(sector_at - at) as usize..][..SECTOR].copy_from_slice(sector);
            }
        }
        Ok(())
    }

    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.inside(at, data.len());
        self.writes += 1;
        self.count_down()?;
        match &mut self.full_after {
            Some(0) => return Err(io::ErrorKind::StorageFull.into()),
            Some(left) => *left -= 1,
            None => {}
        }
        for (index, sector) in data.chunks(SECTOR).enumerate() {
            self.cached.push((at + (index * SECTOR) as u64, sector.to_vec()));
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushes += 1;
        self.count_down()?;
        for (at, sector) in std::mem::take(&mut self.cached) {
            self.put(at, &sector);
        }
        Ok(())
    }
}

/// A generator that prints as its seed.
pub(crate) fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

/// A formatted disk and its open store.
pub(crate) fn store(size_bytes: u64, block_bytes: u32) -> (MemoryDisk, Volumes) {
    let mut disk = MemoryDisk::new(size_bytes);
    let options =
        FormatOptions { block_bytes, uuid: *b"a store for test", ..FormatOptions::default() };
    format(&mut disk, &options).unwrap();
    let volumes = Volumes::open(&mut disk).unwrap();
    (disk, volumes)
}

pub(crate) fn range(first: u64, count: u64) -> BlockRange {
    BlockRange { first: Vlba(first), count }
}

pub(crate) fn volume(volumes: &mut Volumes, name: &str, blocks: u64) -> VolumeId {
    volumes.create(&NewVolume { name: name.to_owned(), blocks, quota_blocks: None }, 1).unwrap()
}

/// Allocates and links, as often as it takes.
pub(crate) fn write(
    volumes: &mut Volumes,
    disk: &mut MemoryDisk,
    id: VolumeId,
    first: u64,
    count: u64,
) -> Result<Vec<(u64, u64)>, VolumeError> {
    let mut written = Vec::new();
    let (mut at, end) = (first, first + count);
    while at < end {
        let grant = volumes.allocate(disk, id, range(at, end - at))?;
        assert_eq!((grant.volume(), grant.range().first.0), (id, at));
        check_grant(&grant);
        at += grant.range().count;
        written.extend(grant.extents().iter().map(|extent| (extent.physical.0, extent.count)));
        volumes.link(disk, grant)?;
    }
    Ok(written)
}

fn check_grant(grant: &Grant) {
    let mut at = grant.range().first.0;
    for extent in grant.extents() {
        assert_eq!((extent.first.0, extent.shared), (at, false));
        at += extent.count;
    }
    assert_eq!(at, grant.range().first.0 + grant.range().count);
}

pub(crate) fn commit(volumes: &mut Volumes, disk: &mut MemoryDisk) {
    volumes.commit_now(disk).unwrap();
}

/// A check that has to find nothing.
pub(crate) fn clean(volumes: &Volumes, disk: &mut MemoryDisk) -> crate::Report {
    let report = volumes.check(disk);
    assert!(report.is_clean(), "{:#?}", report.problems);
    let parts = [
        report.superblock_blocks,
        report.metadata_blocks,
        report.data_blocks,
        report.granted_blocks,
        report.pending_blocks,
        report.free_blocks,
    ];
    assert_eq!(parts.iter().sum::<u64>(), report.total_blocks);
    let space = volumes.space();
    let parts =
        [space.free, space.data, space.metadata, space.reserved, space.granted, space.pending];
    assert_eq!(parts.iter().sum::<u64>(), space.total);
    report
}

pub(crate) fn reopen(volumes: Volumes, disk: &mut MemoryDisk) -> Volumes {
    drop(volumes);
    let volumes = Volumes::open(disk).unwrap();
    assert_eq!((volumes.damage(), volumes.read_only()), (&[][..], None));
    volumes
}

/// All of a volume, as (first, count, physical, shared).
pub(crate) fn mapping(
    volumes: &mut Volumes,
    disk: &mut MemoryDisk,
    id: VolumeId,
) -> Vec<(u64, u64, u64, bool)> {
    let blocks = volumes.get(id).unwrap().blocks;
    let mapped = volumes.map(disk, id, range(0, blocks), usize::MAX - 1).unwrap();
    assert_eq!(mapped.covered, range(0, blocks));
    mapped
        .extents
        .iter()
        .map(|extent| (extent.first.0, extent.count, extent.physical.0, extent.shared))
        .collect()
}
