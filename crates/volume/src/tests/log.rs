//! The death of the process: answered changes survive. The large simulation is in verify/sim; these
//! are the rules, one at a time.

use std::sync::Arc;

use crate::log::{Change, Log};
use crate::testing::{MemoryDisk, clean, commit, mapping, random, range, store, volume, write};
use crate::{
    Disk, HeapMemory, LOG_ENTRY_BYTES, LOG_HEADER_BYTES, LogMemory, LogPlace, Recovery, Survives,
};
use crate::{VolumeError, VolumeId, Volumes};

const MIB: u64 = 1 << 20;
const PLACE: LogPlace = LogPlace { device: 8, inode: 77, boot: *b"the first boot.." };

fn memory(entries: usize) -> Arc<HeapMemory> {
    Arc::new(HeapMemory::new(LOG_HEADER_BYTES + entries * LOG_ENTRY_BYTES))
}

fn copy(memory: &HeapMemory) -> Arc<HeapMemory> {
    Arc::new(HeapMemory::of_words(memory.to_words()))
}

/// A store with a log, and a volume that is durable.
fn logged(entries: usize) -> (MemoryDisk, Arc<HeapMemory>, Volumes, VolumeId) {
    let (mut disk, mut volumes) = store(8 * MIB, 1024);
    let memory = memory(entries);
    assert_eq!(volumes.recover(&mut disk, memory.clone(), &PLACE), Recovery::default());
    assert_eq!(volumes.log_survives(), Some(Survives::Process));
    let id = volume(&mut volumes, "a", 10_000);
    commit(&mut volumes, &mut disk);
    (disk, memory, volumes, id)
}

/// The next process, with whatever is in memory and on the disk.
fn revive(disk: &mut MemoryDisk, memory: &Arc<HeapMemory>) -> (Volumes, Recovery) {
    let mut volumes = Volumes::open(disk).unwrap();
    let recovery = volumes.recover(disk, memory.clone(), &PLACE);
    (volumes, recovery)
}

fn replayed(replayed: u64) -> Recovery {
    Recovery { replayed, loss: None }
}

#[test]
fn what_was_answered_is_there_after_the_death_of_the_process() {
    let (mut disk, memory, mut volumes, id) = logged(1000);
    for step in 0..100 {
        write(&mut volumes, &mut disk, id, step * 7, 3).unwrap();
    }
    volumes.unmap(&mut disk, id, range(70, 20)).unwrap();
    let before = mapping(&mut volumes, &mut disk, id);
    drop(volumes);
    let (mut volumes, recovery) = revive(&mut disk, &memory);
    assert_eq!(recovery, replayed(101));
    assert_eq!(mapping(&mut volumes, &mut disk, id), before);
    assert_eq!((volumes.log_entries(), volumes.read_only()), (0, None));
    clean(&volumes, &mut disk);
    // And it is durable: without the log as well.
    let mut volumes = Volumes::open(&mut disk).unwrap();
    assert_eq!(mapping(&mut volumes, &mut disk, id), before);
}

/// The disk as it was before the `after`-th write or flush from now on.
struct Dying<'a> {
    disk: &'a mut MemoryDisk,
    memory: &'a HeapMemory,
    deaths: Vec<(MemoryDisk, Arc<HeapMemory>)>,
}

impl Disk for Dying<'_> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&mut self, at: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.disk.read(at, buffer)
    }

    fn write(&mut self, at: u64, data: &[u8]) -> std::io::Result<()> {
        self.deaths.push((self.disk.clone(), copy(self.memory)));
        self.disk.write(at, data)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.deaths.push((self.disk.clone(), copy(self.memory)));
        self.disk.flush()
    }
}

/// A volume's extents: first block, count, physical block, and whether others share it.
type Mapping = Vec<(u64, u64, u64, bool)>;

/// Two transactions in the log: one that is being committed, and the open one.
fn two_generations() -> (MemoryDisk, Arc<HeapMemory>, VolumeId, Mapping) {
    let (mut disk, memory, mut volumes, id) = logged(1000);
    let other = volume(&mut volumes, "b", 1000);
    write(&mut volumes, &mut disk, other, 0, 900).unwrap();
    commit(&mut volumes, &mut disk);
    for step in 0..50 {
        write(&mut volumes, &mut disk, id, step * 5, 2).unwrap();
    }
    // A mapping that is undone by the next transaction: applied twice, or in one commit that is
    // replayed twice, it would come back.
    write(&mut volumes, &mut disk, id, 500, 8).unwrap();
    let sealed = volumes.begin_commit().unwrap();
    write(&mut volumes, &mut disk, id, 500, 4).unwrap();
    volumes.unmap(&mut disk, id, range(504, 4)).unwrap();
    volumes.unmap(&mut disk, other, range(0, 300)).unwrap();
    write(&mut volumes, &mut disk, id, 1000, 100).unwrap();
    let expected = mapping(&mut volumes, &mut disk, id);
    drop((sealed, volumes));
    (disk, memory, id, expected)
}

#[test]
fn killed_at_every_step_of_the_replay_it_comes_to_the_same() {
    let (mut disk, memory, id, expected) = two_generations();
    let mut deaths = vec![(disk.clone(), copy(&memory))];
    let mut seen = 0;
    let mut dying = Dying { disk: &mut disk, memory: &memory, deaths: Vec::new() };
    let mut volumes = Volumes::open(&mut dying).unwrap();
    assert_eq!(volumes.recover(&mut dying, memory.clone(), &PLACE).loss, None);
    deaths.append(&mut dying.deaths);
    assert!(deaths.len() > 10);
    // Deaths in the replay that follows a death, too.
    while let Some((mut disk, memory)) = deaths.pop() {
        seen += 1;
        let before = copy(&memory);
        let mut dying = Dying { disk: &mut disk, memory: &memory, deaths: Vec::new() };
        let mut volumes = Volumes::open(&mut dying).unwrap();
        let recovery = volumes.recover(&mut dying, memory.clone(), &PLACE);
        assert_eq!((recovery.loss, volumes.read_only()), (None, None), "death {seen}: {before:?}");
        if seen < 12 {
            deaths.append(&mut dying.deaths);
        }
        assert_eq!(mapping(&mut volumes, &mut disk, id), expected, "death {seen}");
        let other = volumes.find("b").unwrap().id;
        assert_eq!(mapping(&mut volumes, &mut disk, other).first().map(|found| found.0), Some(300));
        clean(&volumes, &mut disk);
    }
}

/// Memory that keeps each store apart.
#[derive(Debug)]
struct Watched {
    memory: HeapMemory,
    stores: std::sync::Mutex<Vec<(usize, u64)>>,
}

impl LogMemory for Watched {
    fn words(&self) -> usize {
        self.memory.words()
    }

    fn load(&self, index: usize) -> u64 {
        self.memory.load(index)
    }

    fn store(&self, index: usize, word: u64) {
        self.stores.lock().unwrap().push((index, word));
        self.memory.store(index, word);
    }

    fn survives(&self) -> Survives {
        Survives::Process
    }
}

#[test]
fn a_death_between_two_stores_to_the_log_loses_nothing() {
    let (mut disk, first, mut volumes, id) = logged(40);
    write(&mut volumes, &mut disk, id, 0, 5).unwrap();
    let disk_before = disk.clone();
    drop(volumes);
    let watched =
        Watched { memory: HeapMemory::of_words(first.to_words()), stores: Default::default() };
    let watched = Arc::new(watched);
    let mut volumes = Volumes::open(&mut disk).unwrap();
    // Replay, the mark, a write, and a commit that ends: each store may be the last.
    assert_eq!(volumes.recover(&mut disk, watched.clone(), &PLACE), replayed(1));
    let replayed_disk = disk.clone();
    let stores_of_replay = watched.stores.lock().unwrap().len();
    write(&mut volumes, &mut disk, id, 5, 5).unwrap();
    let commit = volumes.begin_commit().unwrap();
    commit.write(&mut disk).unwrap();
    let stores_of_write = watched.stores.lock().unwrap().len();
    let freed = volumes.end_commit(commit, Ok(()));
    volumes.reuse(freed);
    let stores = watched.stores.lock().unwrap().clone();
    assert!(stores_of_replay >= 10 && stores.len() > stores_of_write);
    let mut words = first.to_words();
    for (count, (index, word)) in stores.iter().enumerate() {
        words[*index] = *word;
        // Before or after each write of the replay, which is a commit or two.
        let disks = match count {
            count if count < stores_of_replay => vec![&disk_before, &replayed_disk],
            count if count < stores_of_write => vec![&replayed_disk],
            _ => vec![&disk],
        };
        let found = disks.into_iter().map(|disk| {
            let mut disk = disk.clone();
            let (mut volumes, recovery) =
                revive(&mut disk, &Arc::new(HeapMemory::of_words(words.clone())));
            (
                mapping(&mut volumes, &mut disk, id).iter().map(|found| found.1).sum::<u64>(),
                recovery.loss,
            )
        });
        let found: Vec<_> = found.collect();
        // The log and one of the two disks belong together.
        let least = if count + 1 < stores_of_write { 5 } else { 10 };
        assert!(
            found.iter().any(|(blocks, loss)| *blocks >= least && loss.is_none()),
            "store {count}: {found:?}"
        );
    }
}

#[test]
fn replay_keeps_the_blocks_of_later_entries_from_its_own_nodes() {
    // A store so full that nodes of the replay have to look for room.
    let (mut disk, memory, mut volumes, id) = logged(3000);
    write(&mut volumes, &mut disk, id, 0, 4000).unwrap();
    commit(&mut volumes, &mut disk);
    let sealed_first = write(&mut volumes, &mut disk, id, 4000, 1).unwrap();
    assert_eq!(sealed_first.len(), 1);
    let sealed = volumes.begin_commit().unwrap();
    let mut at = 4002;
    while write(&mut volumes, &mut disk, id, at, 1).is_ok() {
        at += 2;
    }
    let expected = mapping(&mut volumes, &mut disk, id);
    drop((sealed, volumes));
    let (mut volumes, recovery) = revive(&mut disk, &memory);
    assert_eq!((recovery.loss, volumes.read_only()), (None, None));
    assert_eq!(mapping(&mut volumes, &mut disk, id), expected);
    clean(&volumes, &mut disk);
}

#[test]
fn operations_on_the_catalogue_that_no_commit_answered_are_not_there() {
    let (mut disk, memory, mut volumes, id) = logged(100);
    write(&mut volumes, &mut disk, id, 0, 10).unwrap();
    commit(&mut volumes, &mut disk);
    let snapshot = volumes.snapshot(&mut disk, id, "s", 1).unwrap();
    assert!(volumes.is_made(id) && !volumes.is_made(snapshot));
    // Copied on write, because of the snapshot.
    write(&mut volumes, &mut disk, id, 2, 3).unwrap();
    let expected: Vec<_> = mapping(&mut volumes, &mut disk, id)
        .iter()
        .map(|found| (found.0, found.1, found.2))
        .collect();
    drop(volumes);
    let (mut volumes, recovery) = revive(&mut disk, &memory);
    assert_eq!(recovery, replayed(1));
    assert_eq!(volumes.find("s"), None);
    let found: Vec<_> = mapping(&mut volumes, &mut disk, id)
        .iter()
        .map(|found| (found.0, found.1, found.2))
        .collect();
    assert_eq!(found, expected);
    clean(&volumes, &mut disk);
}

#[test]
fn a_discard_where_something_not_durable_made_a_hole_is_there_after_a_death() {
    let (mut disk, memory, mut volumes, id) = logged(100);
    write(&mut volumes, &mut disk, id, 0, 10).unwrap();
    commit(&mut volumes, &mut disk);
    // Blocks 4 to 7 become holes; the log says nothing of it.
    volumes.share(&mut disk, (id, range(100, 4)), (id, sidecore_units::Vlba(4))).unwrap();
    volumes.unmap(&mut disk, id, range(4, 4)).unwrap();
    drop(volumes);
    let (mut volumes, recovery) = revive(&mut disk, &memory);
    assert_eq!(recovery, replayed(1));
    let found: Vec<_> =
        mapping(&mut volumes, &mut disk, id).iter().map(|found| (found.0, found.1)).collect();
    assert_eq!(found, [(0, 4), (8, 2)]);
    clean(&volumes, &mut disk);
}

#[test]
fn a_full_log_waits_as_for_space_and_a_store_that_cannot_commit_fails_at_once() {
    let (mut disk, _, mut volumes, id) = logged(4);
    let grant = volumes.allocate(&mut disk, id, range(0, 1)).unwrap();
    for at in [2, 4, 6] {
        write(&mut volumes, &mut disk, id, at, 1).unwrap();
    }
    assert!(volumes.log_wants_commit());
    // The fourth entry is the grant's.
    let full = |error| matches!(error, VolumeError::NoSpace { after_commit: true });
    assert!(full(volumes.allocate(&mut disk, id, range(8, 1)).unwrap_err()));
    assert!(full(volumes.unmap(&mut disk, id, range(2, 1)).unwrap_err()));
    volumes.link(&mut disk, grant).unwrap();
    assert_eq!(volumes.log_entries(), 4);
    commit(&mut volumes, &mut disk);
    assert_eq!(volumes.log_entries(), 0);
    let grant = volumes.allocate(&mut disk, id, range(8, 1)).unwrap();
    volumes.release(grant);
    for at in [10, 12, 14, 16] {
        write(&mut volumes, &mut disk, id, at, 1).unwrap();
    }
    disk.fail_after = Some(0);
    volumes.commit_now(&mut disk).unwrap_err();
    let refused = volumes.allocate(&mut disk, id, range(20, 1)).unwrap_err();
    assert!(matches!(refused, VolumeError::StoreReadOnly(_)), "{refused}");
}

#[test]
fn an_entry_that_does_not_fit_ends_the_replay() {
    let (disk, memory, mut volumes, id) = logged(100);
    let mut later = disk.clone();
    for at in 0..5 {
        write(&mut volumes, &mut later, id, at * 2, 1).unwrap();
    }
    drop(volumes);
    let words = memory.to_words();
    for (word, why) in [
        (512 + 2 * 8 + 5, "checksum"),
        (24, "does not say which entries"),
        (3, "checksum of its header"),
    ] {
        let mut disk = disk.clone();
        let mut bad = words.clone();
        bad[word] ^= 1 << 40;
        let (volumes, recovery) = revive(&mut disk, &Arc::new(HeapMemory::of_words(bad)));
        let loss = recovery.loss.unwrap();
        assert!(loss.contains(why), "{loss}");
        assert_eq!(volumes.read_only(), Some(loss.as_str()));
        // Nothing is taken from who mends it.
        let (volumes, recovery) = revive(&mut disk, &copy(&memory));
        assert_eq!((recovery, volumes.read_only()), (replayed(5), None));
    }
}

#[test]
fn a_log_of_another_state_of_the_store_is_not_replayed() {
    let (mut disk, memory, mut volumes, id) = logged(100);
    let old = disk.clone();
    write(&mut volumes, &mut disk, id, 0, 1).unwrap();
    drop(volumes);
    // A program without the log has changed the store.
    let mut volumes = Volumes::open(&mut disk).unwrap();
    write(&mut volumes, &mut disk, id, 7, 1).unwrap();
    commit(&mut volumes, &mut disk);
    let (volumes, recovery) = revive(&mut disk, &memory);
    assert!(recovery.loss.unwrap().contains("builds on generation"));
    assert!(volumes.read_only().is_some());
    // The state that it builds on is still fine.
    assert_eq!(revive(&mut old.clone(), &memory).1, replayed(1));
}

#[test]
fn a_store_that_was_in_use_under_this_boot_misses_its_log() {
    let (mut disk, log, mut volumes, id) = logged(100);
    write(&mut volumes, &mut disk, id, 0, 1).unwrap();
    drop(volumes);
    let open = |disk: &MemoryDisk, memory: &Arc<HeapMemory>, place: &LogPlace| {
        let mut disk = disk.clone();
        let mut volumes = Volumes::open(&mut disk).unwrap();
        let recovery = volumes.recover(&mut disk, memory.clone(), place);
        assert_eq!(volumes.read_only(), None);
        recovery.loss
    };
    assert!(open(&disk, &memory(100), &PLACE).unwrap().contains("its log is gone"));
    assert!(
        open(&disk, &copy(&log), &LogPlace { inode: 78, ..PLACE })
            .unwrap()
            .contains("another store's")
    );
    // Without any memory for a log as well, and until an orderly end.
    let mut without = disk.clone();
    for is_lost in [true, true, false] {
        let mut volumes = Volumes::open(&mut without).unwrap();
        assert_eq!(volumes.recover_without_log(&PLACE.boot).loss.is_some(), is_lost);
        volumes
            .create(
                &crate::NewVolume {
                    name: format!("v{}", volumes.generation()),
                    blocks: 1,
                    quota_blocks: None,
                },
                0,
            )
            .unwrap();
        commit(&mut volumes, &mut without);
        if volumes.list().count() == 3 {
            volumes.close();
            commit(&mut volumes, &mut without);
        }
    }
    // The log that was begun without the one that is missing says so to the next process.
    let (mut lost, begun) = (disk.clone(), memory(100));
    for _ in 0..2 {
        let (mut volumes, recovery) = revive(&mut lost, &begun);
        assert!(recovery.loss.is_some() && volumes.read_only().is_none());
        write(&mut volumes, &mut lost, id, 7, 1).unwrap();
    }
    let (mut volumes, recovery) = revive(&mut lost, &begun);
    assert_eq!((recovery.replayed, recovery.loss.is_some()), (1, true));
    volumes.close();
    commit(&mut volumes, &mut lost);
    drop(volumes);
    assert_eq!(open(&lost, &begun, &PLACE), None);
    // Another boot: the guests are gone as well.
    assert_eq!(open(&disk, &memory(100), &LogPlace { boot: *b"the second boot.", ..PLACE }), None);
    assert_eq!(open(&disk, &copy(&log), &LogPlace { boot: *b"the second boot.", ..PLACE }), None);
    // An orderly end.
    let (mut volumes, recovery) = revive(&mut disk, &log);
    assert_eq!(recovery, replayed(1));
    volumes.close();
    commit(&mut volumes, &mut disk);
    assert_eq!(open(&disk, &memory(100), &PLACE), None);
    assert_eq!(open(&disk, &log, &PLACE), None);
}

#[test]
fn entries_that_no_guest_wrote_neither_panic_nor_spoil_the_store() {
    let (disk, memory, mut volumes, id) = logged(100);
    let mut disk_at_death = disk.clone();
    write(&mut volumes, &mut disk_at_death, id, 0, 300).unwrap();
    commit(&mut volumes, &mut disk_at_death);
    let (uuid, base) = (volumes.uuid(), volumes.durable);
    let next = volumes.open_generation();
    drop((volumes, memory));
    let (mut replays, mut refusals) = (0, 0);
    for seed in 0..3000 {
        let mut random = random(seed);
        let mut number = |usual: u64| match random() % 12 {
            0 => u64::MAX - random() % 3,
            1 => 0,
            2 => 1 << (random() % 64),
            _ => random() % usual,
        };
        let memory = super::log::memory(100);
        let mut log = Log::create(memory.clone(), &uuid, &PLACE, base, false);
        for _ in 0..1 + number(6).min(20) {
            let (volume, first, count) =
                (1 + number(2).min(3), number(9000), 1 + number(20).min(u64::MAX - 1));
            let change = match number(3) {
                0 => Change::Unmap { volume, first, count },
                _ => Change::Map { volume, first, count, physical: number(8000) },
            };
            log.publish(next.saturating_add(number(3) % 4), [change]);
        }
        drop(log);
        let mut disk = disk_at_death.clone();
        let (volumes, recovery) = revive(&mut disk, &memory);
        assert_eq!(
            recovery.loss.is_some(),
            volumes.read_only().is_some(),
            "seed {seed}: {recovery:?}"
        );
        if recovery.loss.is_some() {
            refusals += 1;
            // The store on the disk is as before.
            clean(&Volumes::open(&mut disk).unwrap(), &mut disk);
        } else {
            replays += 1;
            clean(&volumes, &mut disk);
        }
    }
    assert!(replays > 50 && refusals > 500, "{replays} replays, {refusals} refusals");
}

#[test]
fn any_word_of_a_log_may_be_damaged() {
    let (mut disk, memory, mut volumes, id) = logged(10);
    for at in 0..8 {
        write(&mut volumes, &mut disk, id, at * 3, 2).unwrap();
    }
    let expected = mapping(&mut volumes, &mut disk, id);
    drop(volumes);
    let words = memory.to_words();
    for seed in 0..20 * words.len() as u64 {
        let mut random = random(seed);
        let mut bad = words.clone();
        let at = (random() % bad.len() as u64) as usize;
        bad[at] = if seed.is_multiple_of(2) { bad[at] ^ 1 << (random() % 64) } else { random() };
        let mut disk = disk.clone();
        let (mut volumes, recovery) = revive(&mut disk, &Arc::new(HeapMemory::of_words(bad)));
        // Missing changes are reported as missing.
        if recovery.loss.is_none() {
            assert_eq!(mapping(&mut volumes, &mut disk, id), expected, "word {at}");
        }
    }
}

#[test]
fn nodes_of_the_replay_keep_off_blocks_that_later_entries_name() {
    let (mut disk, memory, volumes, id) = logged(100);
    let (uuid, base, next) = (volumes.uuid(), volumes.durable, volumes.open_generation());
    // Where the next node would be put, were it not for the entry of the generation behind.
    let highest =
        volumes.forest.allocator.free_ranges().map(|(first, count)| first + count).max().unwrap()
            - 4;
    drop((volumes, memory));
    let memory = super::log::memory(100);
    let mut log = Log::create(memory.clone(), &uuid, &PLACE, base, false);
    log.publish(next, [Change::Map { volume: id.0, first: 0, count: 4, physical: 400 }]);
    log.publish(next + 1, [Change::Map { volume: id.0, first: 8, count: 4, physical: highest }]);
    drop(log);
    let (mut volumes, recovery) = revive(&mut disk, &memory);
    assert_eq!(recovery, replayed(2));
    assert_eq!(mapping(&mut volumes, &mut disk, id), [(0, 4, 400, false), (8, 4, highest, false)]);
    clean(&volumes, &mut disk);
}
