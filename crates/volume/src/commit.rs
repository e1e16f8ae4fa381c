//! From one durable state to the next.
//!
//! # The order
//!
//! Between two commits the disk's metadata does not change: nodes of the transaction are in memory,
//! and everything they replace stays where it is. A commit then writes
//!
//! 1. the new nodes, to blocks that were free, in any order;
//! 2. a flush;
//! 3. the two superblock slots of this generation;
//! 4. a flush.
//!
//! Guests' data has been written before that, to blocks that were granted: a block is linked to a
//! volume only when all of it has been. So the flush of step 2 makes durable what the superblock of
//! step 3 leads to: nodes, and the data that they map for the first time. Without it the disk would
//! be free to write the superblock first, and a power cut would leave trees of stale blocks, or,
//! worse, trees that are right and map blocks with what a deleted volume left there. The flush of
//! step 4 is what a guest's flush waits for; and only after it may a freed block be written again,
//! as until then a power cut brings back the generation that refers to it.
//!
//! # A power cut
//!
//! In steps 1 and 2 a power cut leaves the old superblocks, which refer to nothing that was
//! written. In steps 3 and 4, each slot of the new generation is whole or not, also if it is torn,
//! and its checksum tells which. If one slot is whole, so is all metadata below it, and the new
//! generation is complete, although no caller was notified. If none is, the other two slots are
//! untouched, and the old generation is there.
//!
//! # A damaged slot
//!
//! Why two slots for a generation: with one, a flipped bit in the newest slot would look like a
//! torn commit, and the store would silently go back in time, to a generation whose freed blocks
//! belong to other volumes since. With two, one flipped bit leaves a good copy. If both are bad,
//! the store looks like after a torn commit, and is treated so.
//!
//! # A commit that failed
//!
//! After an error the disk holds one generation or the other, and reading cannot tell which:
//! "written" data may be in a cache that lost it. So no commit builds on it. The store takes no
//! more changes until it is opened again, and reads come from the disk as it is.
//!
//! A write for which the disk had no space is different: no acknowledged data is in doubt. The
//! commit is kept and written again from its first byte to its last, to the same places, until
//! there is space. A flush that fails is never repeated, for any reason: the kernel may have
//! dropped the data that it could not write, and would call the next flush a success.

use std::io;

use crate::disk::Disk;
use crate::geometry::Geometry;
use crate::grant::PhysicalRange;
use crate::limits::NODE_BYTES;
use crate::owner::Tripwire;
use crate::superblock::{Superblock, slot_offset_bytes, slots_of};

/// Bytes of nodes that lie in a row and are written as one.
const MAX_WRITE_BYTES: usize = 1 << 20;

/// Why a commit was not written.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CommitError {
    error: io::Error,
    is_full: bool,
    is_tripped: bool,
}

impl CommitError {
    /// A write failed.
    fn of_write(error: io::Error) -> Self {
        let is_full =
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        Self { error, is_full, is_tripped: false }
    }

    /// A flush failed, for whatever reason, or the look at the superblocks.
    pub(crate) fn of_flush(error: io::Error) -> Self {
        Self { error, is_full: false, is_tripped: false }
    }

    /// Another program has written to the store.
    pub(crate) fn tripped(why: String) -> Self {
        Self { error: io::Error::other(why), is_full: false, is_tripped: true }
    }

    /// Whether the disk had no space for a write: the same commit can be written again when it has.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Whether the store has another owner: this program must neither answer nor write any more.
    #[must_use]
    pub fn is_tripped(&self) -> bool {
        self.is_tripped
    }
}

impl From<CommitError> for io::Error {
    fn from(error: CommitError) -> Self {
        error.error
    }
}

/// A transaction on its way to the disk. It has all that it needs: writing it does not need the
/// [`Volumes`](crate::Volumes).
#[derive(Debug)]
#[must_use = "a commit has to be written and ended"]
pub struct Commit {
    generation: u64,
    /// Nodes, by offset in bytes.
    nodes: Vec<(u64, Vec<u8>)>,
    /// Superblock slots, likewise.
    slots: Vec<(u64, Vec<u8>)>,
    /// Of an owner.
    tripwire: Option<Tripwire>,
}

impl Commit {
    /// A commit of these nodes (address, contents).
    pub(crate) fn new(
        superblock: &Superblock,
        mut nodes: Vec<(u64, Vec<u8>)>,
        geometry: &Geometry,
    ) -> Self {
        nodes.sort_unstable_by_key(|(address, _)| *address);
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (address, bytes) in nodes {
            let offset = geometry.offset_bytes(address);
            match runs.last_mut() {
                Some((start, run))
                    if start.saturating_add(run.len() as u64) == offset
                        && run.len() < MAX_WRITE_BYTES =>
                {
                    run.extend_from_slice(&bytes);
                }
                _ => runs.push((offset, bytes)),
            }
        }
        let slots = slots_of(superblock.generation)
            .map(|slot| (slot_offset_bytes(slot), superblock.encode(slot)));
        Self { generation: superblock.generation, nodes: runs, slots: slots.into(), tripwire: None }
    }

    /// Lets the commit fail if another program has written to the store.
    pub(crate) fn with(self, tripwire: Option<Tripwire>) -> Self {
        Self { tripwire, ..self }
    }

    /// The generation that it makes.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Nodes that it writes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
            .iter()
            .map(|(_, run)| run.len().checked_div(NODE_BYTES).unwrap_or(0))
            .fold(0, usize::saturating_add)
    }

    /// Makes it durable: nodes, flush, superblocks, flush. An owner looks at the superblocks before
    /// the first and the third of these.
    ///
    /// # Errors
    /// The disk's error. The durable generation is then this one or the one before. Or another
    /// program has written to the store: see [`CommitError::is_tripped`].
    pub fn write(&self, disk: &mut dyn Disk) -> Result<(), CommitError> {
        self.look(disk)?;
        for (offset_bytes, run) in &self.nodes {
            disk.write(*offset_bytes, run).map_err(CommitError::of_write)?;
        }
        disk.flush().map_err(CommitError::of_flush)?;
        self.look(disk)?;
        for (offset_bytes, slot) in &self.slots {
            disk.write(*offset_bytes, slot).map_err(CommitError::of_write)?;
        }
        disk.flush().map_err(CommitError::of_flush)
    }

    fn look(&self, disk: &mut dyn Disk) -> Result<(), CommitError> {
        self.tripwire.map_or(Ok(()), |tripwire| tripwire.check(disk))
    }
}

/// Blocks that a durable transaction has freed. No metadata on the disk refers to them; guests' I/O
/// that started earlier still may.
///
/// Linear: it goes to [`reuse`](crate::Volumes::reuse) when no such I/O is left. If dropped, its
/// blocks are lost until the store is opened again.
#[derive(Debug, Default)]
#[must_use = "freed blocks have to be given to reuse"]
pub struct Freed {
    pub(crate) ranges: Vec<PhysicalRange>,
    /// The durable generations that the blocks come from: references were dropped in them, and a
    /// volume that has kept a reference must not write in place yet.
    pub(crate) generations: Vec<u64>,
}

impl Freed {
    /// The blocks, for a discard on the device.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = PhysicalRange> + '_ {
        self.ranges.iter().copied()
    }

    /// Whether there is nothing to wait for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.generations.is_empty()
    }

    /// Takes over the blocks of `other`: one epoch for several commits.
    pub fn append(&mut self, mut other: Self) {
        self.ranges.append(&mut other.ranges);
        self.generations.append(&mut other.generations);
    }
}
