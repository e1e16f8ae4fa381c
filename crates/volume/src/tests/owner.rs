//! Two owners of one disk, of which one should have ended.

use std::io;

use crate::superblock::{Superblock, slot_offset_bytes, slots_of};
use crate::testing::{MemoryDisk, clean, commit, mapping, store, volume, write};
use crate::{CommitError, Disk, OpenError, OpenOptions, Owner, VolumeId, Volumes};

const MIB: u64 = 1 << 20;

const FORMER: Owner = Owner { series: 5, epoch: 1 };
const SUCCESSOR: Owner = Owner { series: 5, epoch: 2 };

fn open(disk: &mut MemoryDisk, owner: Option<Owner>) -> Result<Volumes, OpenError> {
    let mut volumes = Volumes::open_with(disk, &OpenOptions { owner, ..OpenOptions::default() })?;
    volumes.announce_owner(disk).unwrap();
    Ok(volumes)
}

/// A disk on which something else happens before one of the accesses.
struct Paused<'a> {
    disk: &'a mut MemoryDisk,
    left: usize,
    then: Option<Event<'a>>,
}

impl Paused<'_> {
    fn step(&mut self) {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => {
                if let Some(then) = self.then.take() {
                    then(self.disk);
                }
            }
        }
    }
}

impl Disk for Paused<'_> {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.step();
        self.disk.read(at, buffer)
    }

    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.step();
        self.disk.write(at, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.step();
        self.disk.flush()
    }
}

/// Something that happens to a disk.
type Event<'a> = Box<dyn FnOnce(&mut MemoryDisk) + 'a>;

/// The result of a pause of a former owner in a commit.
struct Left {
    disk: MemoryDisk,
    /// The end of the former owner's commit.
    former: Result<(), CommitError>,
    successor: Volumes,
    /// The successor's volume, and where it lies.
    volume: VolumeId,
    mapping: Vec<(u64, u64, u64, bool)>,
}

/// Pauses a former owner before an access of its commit, while the successor opens the store and
/// makes a commit before or after that. `None` if there are fewer accesses.
fn pause(former: Option<Owner>, before: usize, commits: bool) -> Option<Left> {
    let (mut disk, volumes) = store(4 * MIB, 4096);
    drop(volumes);
    let mut old = open(&mut disk, former).unwrap();
    let id = volume(&mut old, "a", 1000);
    write(&mut old, &mut disk, id, 0, 20).unwrap();
    commit(&mut old, &mut disk);
    write(&mut old, &mut disk, id, 100, 20).unwrap();
    let transaction = old.begin_commit().unwrap();

    let mut taken = None;
    let mut paused = Paused {
        disk: &mut disk,
        left: before,
        then: Some(Box::new(|disk| {
            let mut successor = open(disk, Some(SUCCESSOR)).unwrap();
            let id = successor.find("a").unwrap().id;
            if commits {
                write(&mut successor, disk, id, 500, 40).unwrap();
                commit(&mut successor, disk);
            }
            let mapping = mapping(&mut successor, disk, id);
            taken = Some((successor, id, mapping));
        })),
    };
    let former = transaction.write(&mut paused);
    drop(paused);
    let (successor, volume, mapping) = taken?;
    Some(Left { disk, former, successor, volume, mapping })
}

impl Left {
    /// Whether the store opens as the successor has it.
    fn is_the_successors(&mut self) -> bool {
        let mut disk = self.disk.clone();
        let mut volumes = open(&mut disk, None).unwrap();
        volumes.superblock.owner == Some(SUCCESSOR)
            && volumes.check(&mut disk).is_clean()
            && mapping(&mut volumes, &mut disk, self.volume) == self.mapping
    }
}

/// Reads of a look at the superblocks.
const LOOK: usize = 4;

#[test]
fn a_former_owner_that_continues_a_commit_ends_or_leaves_the_successors_store() {
    let accesses = (0..).take_while(|before| pause(Some(FORMER), *before, false).is_some()).count();
    // After the second look: two superblocks and a flush.
    let slots = accesses - 3;
    for before in 0..accesses {
        let mut left = pause(Some(FORMER), before, false).unwrap();
        if before >= slots {
            left.former.as_ref().expect("it does not look again");
            assert!(left.is_the_successors(), "a superblock of before is the newest: {before}");
            continue;
        }
        let error = left.former.as_ref().expect_err("a commit beside the successor");
        assert!(error.is_tripped() && !error.is_full(), "{error}");
        assert!(error.to_string().contains("epoch 2 of series"), "{error}");
        // Nodes that it writes between its looks can hit the successor's.
        if before < LOOK {
            assert!(left.is_the_successors(), "access {before}");
        }
    }
}

#[test]
fn without_epochs_the_former_owner_damages_the_store() {
    let mut left = pause(None, 0, true).unwrap();
    left.former.as_ref().expect("nothing stops it");
    assert!(!left.is_the_successors(), "this test shows nothing");
}

#[test]
fn an_owner_notices_a_former_one_that_overwrites_its_superblock() {
    let accesses = (0..).take_while(|before| pause(Some(FORMER), *before, true).is_some()).count();
    // Before both of its superblocks, which are where the successor's newest are by then.
    let Left { mut disk, former, mut successor, volume, .. } =
        pause(Some(FORMER), accesses - 3, true).unwrap();
    former.unwrap();
    write(&mut successor, &mut disk, volume, 900, 1).unwrap();
    let error = successor.begin_commit().unwrap().write(&mut disk).unwrap_err();
    assert!(error.is_tripped(), "{error}");
}

#[test]
fn a_program_without_an_epoch_ends_the_owner() {
    let (mut disk, volumes) = store(4 * MIB, 1024);
    drop(volumes);
    let mut owner = open(&mut disk, Some(FORMER)).unwrap();
    let mut other = open(&mut disk, None).unwrap();
    volume(&mut other, "b", 10);
    commit(&mut other, &mut disk);
    let id = volume(&mut owner, "a", 10);
    let transaction = owner.begin_commit().unwrap();
    let written = transaction.write(&mut disk);
    assert!(written.as_ref().is_err_and(CommitError::is_tripped));
    drop(owner.end_commit(transaction, written));
    assert!(owner.read_only().is_some() && !owner.is_made(id));
    let next = open(&mut disk, None).unwrap();
    assert!(next.find("b").is_some() && next.find("a").is_none());
    assert_eq!(next.superblock.owner, Some(FORMER), "it stays for the next owner");
}

#[test]
fn an_owner_is_announced_in_both_generations_and_an_older_one_is_refused() {
    let (mut disk, volumes) = store(4 * MIB, 1024);
    drop(volumes);
    let owners = |disk: &mut MemoryDisk| {
        [0, 1, 2, 3].map(|slot| {
            let mut bytes = [0; 4096];
            disk.read(slot_offset_bytes(slot), &mut bytes).unwrap();
            Superblock::decode(&bytes, slot).unwrap().owner
        })
    };
    drop(open(&mut disk, Some(SUCCESSOR)).unwrap());
    assert_eq!(owners(&mut disk), [Some(SUCCESSOR); 4]);
    let writes = disk.writes;
    let volumes = open(&mut disk, Some(SUCCESSOR)).unwrap();
    assert!(!volumes.needs_commit());
    clean(&volumes, &mut disk);

    let error = open(&mut disk, Some(FORMER)).unwrap_err();
    assert!(matches!(error, OpenError::NewerOwner { found, .. } if found == SUCCESSOR), "{error}");
    assert_eq!(disk.writes, writes, "a store that is refused was written to");

    let begun_anew = Owner { series: 6, epoch: 1 };
    drop(open(&mut disk, Some(begun_anew)).unwrap());
    assert_eq!(owners(&mut disk), [Some(begun_anew); 4]);
}

#[test]
fn two_owners_superblocks_of_one_generation_are_told_apart() {
    let (mut disk, volumes) = store(4 * MIB, 1024);
    drop(volumes);
    let base = open(&mut disk, Some(FORMER)).unwrap().superblock;
    let generation = base.generation + 1;
    let of = |owner| Superblock { generation, owner, ..base.clone() };
    let write_both = |owners: [Option<Owner>; 2]| {
        let mut disk = disk.clone();
        for (slot, owner) in slots_of(generation).into_iter().zip(owners) {
            disk.write(slot_offset_bytes(slot), &of(owner).encode(slot)).unwrap();
        }
        disk
    };
    let (former, successor) = (Some(FORMER), Some(SUCCESSOR));
    for owners in [[former, successor], [successor, former], [None, successor], [successor, None]] {
        let mut disk = write_both(owners);
        let volumes = Volumes::open(&mut disk).unwrap();
        assert_eq!(volumes.superblock, of(successor));
        let [damage] = volumes.damage() else { panic!("{:?}", volumes.damage()) };
        assert!(damage.to_string().contains("former owner"), "{damage}");
        assert_eq!(Volumes::open(&mut disk).unwrap().damage(), [], "it was written again");
    }
    let stranger = Some(Owner { series: 6, epoch: 9 });
    let error = Volumes::open(&mut write_both([successor, stranger])).unwrap_err();
    assert!(error.to_string().contains("contradicts"), "{error}");
}
