//! A hostile log of answered changes, beside an intact store.
//!
//! The input changes words of a log with two transactions: words of the header, and words of
//! entries. With `cfg(fuzzing)` checksums are not compared. Invariants for any log: no panic, no
//! write to blocks in use, an intact store afterwards, and a report of lost changes whenever the
//! store became read-only. A second replay after a successful first one finds the same mappings and
//! replays no entry.
#![no_main]

use std::io;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_extent::{BlockRange, Extent};
use sidecore_fuzz::Input;
use sidecore_units::Vlba;
use sidecore_volume::{
    Disk, FormatOptions, HeapMemory, LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogPlace, NewVolume,
    VolumeId, Volumes, format,
};

const DISK_BYTES: usize = 1 << 20;
const ENTRIES: usize = 16;
const VOLUME_BLOCKS: u64 = 64;
const PLACE: LogPlace = LogPlace { device: 1, inode: 2, boot: [7; 16] };
/// The words of the header that are in use, as in docs/volume-format.md.
const HEADER_WORDS: [usize; 18] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 18, 19, 24, 32, 40, 41];
/// The most words that an input changes.
const POKES: usize = 40;

#[derive(Clone)]
struct MemoryDisk(Vec<u8>);

impl MemoryDisk {
    fn part(&mut self, offset_bytes: u64, len_bytes: usize) -> io::Result<&mut [u8]> {
        let start = usize::try_from(offset_bytes).map_err(io::Error::other)?;
        let end = start.checked_add(len_bytes).filter(|end| *end <= self.0.len());
        Ok(&mut self.0[start..end.unwrap_or_else(|| panic!("outside: {offset_bytes}+{len_bytes}"))])
    }
}

impl Disk for MemoryDisk {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.copy_from_slice(self.part(offset_bytes, buffer.len())?);
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.part(offset_bytes, data.len())?.copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state that a process leaves which dies during a commit, and numbers that occur in this
/// state.
#[derive(Clone)]
struct Left {
    disk: MemoryDisk,
    words: Vec<u64>,
    known: Vec<u64>,
}

fn write(volumes: &mut Volumes, disk: &mut MemoryDisk, id: VolumeId, first: u64, count: u64) {
    let grant =
        volumes.allocate(disk, id, BlockRange { first: Vlba(first), count }).expect("blocks");
    volumes.link(disk, grant).expect("a mapping");
}

fn commit(volumes: &mut Volumes, disk: &mut MemoryDisk) {
    while let Some(commit) = volumes.begin_commit() {
        let written = commit.write(disk);
        let freed = volumes.end_commit(commit, written);
        volumes.reuse(freed);
    }
}

fn left() -> Left {
    let mut disk = MemoryDisk(vec![0; DISK_BYTES]);
    let options =
        FormatOptions { block_bytes: 4096, label: String::new(), uuid: [3; 16], force: false };
    format(&mut disk, &options).expect("a store");
    let memory = Arc::new(HeapMemory::new(LOG_HEADER_BYTES + ENTRIES * LOG_ENTRY_BYTES));
    let mut volumes = Volumes::open(&mut disk).expect("a store");
    let recovery = volumes.recover(&mut disk, memory.clone(), &PLACE);
    assert_eq!(recovery.loss, None);
    let ids = ["a", "b"].map(|name| {
        let new = NewVolume { name: name.to_owned(), blocks: VOLUME_BLOCKS, quota_blocks: None };
        volumes.create(&new, 1).expect("a volume")
    });
    for id in ids {
        write(&mut volumes, &mut disk, id, 0, 16);
    }
    commit(&mut volumes, &mut disk);
    write(&mut volumes, &mut disk, ids[0], 20, 4);
    volumes.unmap(&mut disk, ids[1], BlockRange { first: Vlba(0), count: 4 }).expect("a hole");
    let sealed = volumes.begin_commit();
    write(&mut volumes, &mut disk, ids[0], 20, 2);
    write(&mut volumes, &mut disk, ids[1], 40, 3);
    let generation = volumes.generation();
    let mut known =
        vec![ids[0].0, ids[1].0, generation, generation + 1, generation + 2, VOLUME_BLOCKS];
    known.extend(
        ids.iter()
            .flat_map(|id| mapping(&mut volumes, &mut disk, *id))
            .map(|extent| extent.physical.0),
    );
    drop(sealed);
    Left { disk, words: memory.to_words(), known }
}

fn mapping(volumes: &mut Volumes, disk: &mut MemoryDisk, id: VolumeId) -> Vec<Extent> {
    let mut extents = Vec::new();
    let mut rest = BlockRange { first: Vlba(0), count: VOLUME_BLOCKS };
    while rest.count > 0 {
        let mapped = volumes.map(disk, id, rest, 64).expect("a look");
        let reached = mapped.covered.count;
        extents.extend(mapped.extents);
        rest = rest.split(reached.max(1)).1;
    }
    extents
}

fn mappings(volumes: &mut Volumes, disk: &mut MemoryDisk) -> Vec<Vec<Extent>> {
    let ids: Vec<VolumeId> = volumes.list().map(|info| info.id).collect();
    ids.into_iter().map(|id| mapping(volumes, disk, id)).collect()
}

fn revive(disk: &mut MemoryDisk, memory: &Arc<HeapMemory>) -> (Volumes, sidecore_volume::Recovery) {
    let mut volumes = Volumes::open(disk).expect("the store is whole");
    let recovery = volumes.recover(disk, memory.clone(), &PLACE);
    assert_eq!(volumes.check(disk).problems, [], "{recovery:?}");
    (volumes, recovery)
}

fuzz_target!(|input: &[u8]| {
    thread_local! {
        static LEFT: Left = left();
    }
    let Left { mut disk, mut words, known } = LEFT.with(Clone::clone);
    let mut input = Input::new(input);
    for _ in 0..POKES {
        let (Some(place), Some(word)) = (input.byte(), input.number(&known)) else { break };
        let place = usize::from(place);
        let index = match place {
            0..128 => LOG_HEADER_BYTES / 8 + place,
            _ => HEADER_WORDS[place % HEADER_WORDS.len()],
        };
        words[index] = word;
    }
    let memory = Arc::new(HeapMemory::of_words(words));
    let (mut volumes, first) = revive(&mut disk, &memory);
    assert!(first.loss.is_some() || volumes.read_only().is_none(), "read-only without a word");
    if volumes.read_only().is_some() {
        return;
    }
    let before = mappings(&mut volumes, &mut disk);
    drop(volumes);
    let (mut volumes, second) = revive(&mut disk, &memory);
    assert_eq!((second.replayed, volumes.read_only()), (0, None), "{second:?} behind {first:?}");
    assert_eq!(mappings(&mut volumes, &mut disk), before);
});
