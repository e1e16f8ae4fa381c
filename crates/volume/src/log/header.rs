//! The header of a log: its store, and the superblock that it builds on.

use super::entry::{ENTRY_WORDS, Entry, checksum_of, is_sum_of};
use super::memory::LogMemory;

/// Bytes of a log's header.
pub const LOG_HEADER_BYTES: usize = 4096;
/// Bytes of an entry.
pub const LOG_ENTRY_BYTES: usize = ENTRY_WORDS * 8;
/// The smallest memory that a log can be in.
pub const MIN_LOG_BYTES: usize = 2 * LOG_HEADER_BYTES;

/// `SCVOLLOG`, lowest byte first.
const MAGIC: u64 = u64::from_le_bytes(*b"SCVOLLOG");
const VERSION: u64 = 1;

const HEADER_WORDS: usize = LOG_HEADER_BYTES / 8;
/// Version, UUID, device, inode, boot, capacity.
const IDENTITY_WORDS: usize = 8;
const MAGIC_AT: usize = 0;
const IDENTITY_AT: usize = 1;
const CHECKSUM_AT: usize = 9;
/// Generation and checksum of a superblock each. Pairs and counters have cache lines of their own.
const BASE_AT: usize = 16;
const NEXT_AT: usize = 18;
const HEAD_AT: usize = 24;
const TAIL_AT: usize = 32;
/// Not zero: answered changes are missing from the store, and no log has them.
const LOSS_AT: usize = 40;
/// Entries' numbers: a log with a million a second gets there in nine years, and is made anew with
/// each boot.
const SEQUENCE_MASK: u64 = (1 << 48) - 1;

/// Where a store is and which boot of the machine this is: what tells a log that belongs to it from
/// one that was left by something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPlace {
    /// The file's device, or the block device's own number.
    pub device: u64,
    /// The file's inode, 0 for a block device.
    pub inode: u64,
    /// The kernel's name for this boot.
    pub boot: [u8; 16],
}

/// A superblock: its generation, and its checksum in the first slot of this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SuperblockId {
    pub(crate) generation: u64,
    pub(crate) checksum: u64,
}

/// The contents of a log's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No log.
    Blank,
    /// The log of another store, or of another boot: it says nothing about this one.
    Foreign,
    /// A log that cannot be read.
    Damaged(String),
    /// The log of this store.
    Log {
        /// The superblock that it builds on, or two while a commit is in flight.
        builds_on: [SuperblockId; 2],
        /// Whether a log before this one was missing.
        has_loss: bool,
        /// The first entry's number.
        head: u64,
        /// The entries, up to the first one that cannot be read, which is an error.
        entries: Vec<Result<Entry, String>>,
    },
}

/// Reads a log's header and entries.
pub(crate) fn look(memory: &dyn LogMemory, uuid: &[u8; 16], place: &LogPlace) -> Found {
    if memory.load(MAGIC_AT) != MAGIC {
        return Found::Blank;
    }
    let identity: [u64; IDENTITY_WORDS] =
        std::array::from_fn(|index| memory.load(IDENTITY_AT.saturating_add(index)));
    if !is_sum_of(memory.load(CHECKSUM_AT), &identity) {
        return Found::Damaged("the checksum of its header is wrong".to_owned());
    }
    let capacity = capacity(memory);
    let expected = identity_of(uuid, place, capacity);
    // The first word is the version, the last one the capacity.
    let [version, .., found_capacity] = identity;
    if version != VERSION {
        return Found::Damaged(format!(
            "its version is {version}, and this program knows {VERSION}"
        ));
    }
    if identity != expected {
        let [_, inner @ .., _] = identity;
        let [_, ours @ .., _] = expected;
        return match inner == ours {
            true => Found::Damaged(format!(
                "it has room for {capacity} entries instead of {found_capacity}"
            )),
            false => Found::Foreign,
        };
    }
    let (Some(head), Some(tail)) = (counter_at(memory, HEAD_AT), counter_at(memory, TAIL_AT))
    else {
        return Found::Damaged("it does not say which entries are valid".to_owned());
    };
    let Some(count) = tail.checked_sub(head).filter(|count| *count <= capacity) else {
        return Found::Damaged(format!("entries {head} to {tail} are more than it has room for"));
    };
    let mut entries: Vec<Result<Entry, String>> =
        Vec::with_capacity(usize::try_from(count).unwrap_or(0));
    for sequence in head..tail {
        let entry = read(memory, sequence, capacity);
        let ended = entry.is_err();
        entries.push(entry.map_err(|what| format!("entry {sequence}: {what}")));
        if ended {
            break;
        }
    }
    let builds_on = [BASE_AT, NEXT_AT].map(|at| superblock_at(memory, at));
    Found::Log { builds_on, has_loss: memory.load(LOSS_AT) != 0, head, entries }
}

fn read(memory: &dyn LogMemory, sequence: u64, capacity: u64) -> Result<Entry, String> {
    let at = entry_at(sequence, capacity);
    let words = std::array::from_fn(|index| memory.load(at.saturating_add(index)));
    Entry::decode(&words, sequence)
}

/// Makes an empty log that builds on `base`, and says whether answered changes are missing. A log
/// that was there ends first.
pub(super) fn format(
    memory: &dyn LogMemory,
    uuid: &[u8; 16],
    place: &LogPlace,
    base: SuperblockId,
    has_loss: bool,
) {
    memory.store(MAGIC_AT, 0);
    let identity = identity_of(uuid, place, capacity(memory));
    for (index, word) in identity.iter().enumerate() {
        memory.store(IDENTITY_AT.saturating_add(index), *word);
    }
    memory.store(CHECKSUM_AT, checksum_of(&identity));
    put_superblock(memory, BASE_AT, base);
    forget_next(memory);
    memory.store(HEAD_AT, counter(0));
    memory.store(TAIL_AT, counter(0));
    memory.store(LOSS_AT, has_loss.into());
    memory.store(MAGIC_AT, MAGIC);
}

/// The entries that there is room for.
pub(super) fn capacity(memory: &dyn LogMemory) -> u64 {
    (memory.words().saturating_sub(HEADER_WORDS) / ENTRY_WORDS) as u64
}

fn entry_at(sequence: u64, capacity: u64) -> usize {
    let slot =
        sequence.checked_rem(capacity).and_then(|slot| usize::try_from(slot).ok()).unwrap_or(0);
    slot.saturating_mul(ENTRY_WORDS).saturating_add(HEADER_WORDS)
}

/// Writes an entry behind the tail, where readers do not see it yet.
pub(super) fn put(memory: &dyn LogMemory, sequence: u64, capacity: u64, entry: &Entry) {
    let at = entry_at(sequence, capacity);
    for (index, word) in entry.encode(sequence).into_iter().enumerate() {
        memory.store(at.saturating_add(index), word);
    }
}

/// Publishes all entries up to `tail`.
pub(super) fn set_tail(memory: &dyn LogMemory, tail: u64) {
    memory.store(TAIL_AT, counter(tail));
}

/// Drops all entries before `head`.
pub(super) fn set_head(memory: &dyn LogMemory, head: u64) {
    memory.store(HEAD_AT, counter(head));
}

/// An entry's number, which one store changes, with its checksum above it: a wrong one would make
/// valid entries disappear.
fn counter(sequence: u64) -> u64 {
    let sequence = sequence & SEQUENCE_MASK;
    sequence | (checksum_of(&[sequence]) & !SEQUENCE_MASK)
}

fn counter_at(memory: &dyn LogMemory, at: usize) -> Option<u64> {
    let word = memory.load(at);
    let sequence = word & SEQUENCE_MASK;
    (cfg!(fuzzing) || word == counter(sequence)).then_some(sequence)
}

/// The log builds on `base` from now on. If it was the next one it stays that until it is the base
/// as well: one of the two is valid at every moment.
pub(super) fn set_base(memory: &dyn LogMemory, base: SuperblockId) {
    if superblock_at(memory, BASE_AT) != base {
        put_superblock(memory, BASE_AT, base);
    }
    forget_next(memory);
}

/// A commit that is in flight may replace the base by `next`.
pub(super) fn set_next(memory: &dyn LogMemory, next: SuperblockId) {
    put_superblock(memory, NEXT_AT, next);
}

fn forget_next(memory: &dyn LogMemory) {
    memory.store(NEXT_AT, 0);
}

/// No superblock has generation 0: a half-written one is not valid.
fn put_superblock(memory: &dyn LogMemory, at: usize, superblock: SuperblockId) {
    memory.store(at, 0);
    memory.store(at.saturating_add(1), superblock.checksum);
    memory.store(at, superblock.generation);
}

fn superblock_at(memory: &dyn LogMemory, at: usize) -> SuperblockId {
    SuperblockId { generation: memory.load(at), checksum: memory.load(at.saturating_add(1)) }
}

fn identity_of(uuid: &[u8; 16], place: &LogPlace, capacity: u64) -> [u64; IDENTITY_WORDS] {
    let ([uuid_low, uuid_high], [boot_low, boot_high]) = (words_of(uuid), words_of(&place.boot));
    [VERSION, uuid_low, uuid_high, place.device, place.inode, boot_low, boot_high, capacity]
}

fn words_of(bytes: &[u8; 16]) -> [u64; 2] {
    let (low, high) = bytes.split_at(8);
    [low, high].map(|half| half.first_chunk().copied().map_or(0, u64::from_le_bytes))
}
