//! Errors, and the places of damage.

use std::fmt;
use std::io;

use crate::info::VolumeId;
use crate::owner::Owner;

/// A place on the disk, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A superblock, by its slot of four.
    Superblock(u32),
    /// The metadata node at this block.
    Node(u64),
    /// Blocks from this one on.
    Block(u64),
    /// The record of this volume, or a node of its tree.
    Volume(VolumeId),
    /// The store as a whole.
    Store,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock(slot) => write!(f, "superblock slot {slot}"),
            Self::Node(block) => write!(f, "metadata node at block {block}"),
            Self::Block(block) => write!(f, "block {block}"),
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Store => f.write_str("store"),
        }
    }
}

/// Something on the disk that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The damaged structure.
    pub place: Place,
    /// The damage.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// Why a disk was not formatted. Nothing was written, except after [`Io`](Self::Io).
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// There is something on the disk already.
    #[error("the disk holds {0}; formatting it anyway has to be asked for")]
    NotBlank(String),
    /// Not one of [`BLOCK_BYTES`](crate::BLOCK_BYTES).
    #[error("blocks of {0} bytes: 512, 1024 and 4096 are possible")]
    BadBlockSize(u32),
    /// The label is longer than [`MAX_LABEL_BYTES`](crate::MAX_LABEL_BYTES), or not printable.
    #[error("a label is at most 64 printable bytes")]
    BadLabel,
    /// The disk is smaller than [`MIN_STORE_BYTES`](crate::MIN_STORE_BYTES).
    #[error("the disk has {size_bytes} bytes, and {min_bytes} are needed")]
    TooSmall {
        /// The disk's size.
        size_bytes: u64,
        /// The smallest possible size.
        min_bytes: u64,
    },
    /// A read or write of the disk failed.
    #[error("the disk cannot be formatted: {0}")]
    Io(#[from] io::Error),
}

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No slot holds anything that looks like a superblock.
    #[error("the disk is not formatted: it holds {0}")]
    NotFormatted(String),
    /// Superblocks are there, and every one is damaged.
    #[error("no superblock is whole: {}", list(.0))]
    NoSuperblock(Vec<Damage>),
    /// Written by a later version of this format.
    #[error("the store has format version {found}, and this program knows {known}")]
    UnknownVersion {
        /// The version on the disk.
        found: u32,
        /// The version of this program.
        known: u32,
    },
    /// Uses features that this program does not know.
    #[error("the store uses features that this program does not know (bits {0:#x})")]
    UnknownFeatures(u64),
    /// The disk ends before the store does.
    #[error("the disk has {disk_blocks} blocks, and the store on it {store_blocks}")]
    Shrunk {
        /// The disk's size.
        disk_blocks: u64,
        /// The store's size according to its superblock.
        store_blocks: u64,
    },
    /// A superblock that is whole says what cannot be.
    #[error("{0}")]
    Invalid(Damage),
    /// A later owner has served the store.
    #[error(
        "the store was served in {found}, and this daemon is its owner in epoch {} only: let \
         `sidecore own` of this host and of the last owner use one etcd and one record, and start \
         it again",
        mine.epoch
    )]
    NewerOwner {
        /// The owner in the superblock.
        found: Owner,
        /// The owner that wants to open the store.
        mine: Owner,
    },
    /// The disk cannot be read.
    #[error("the disk cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// Why a store cannot be repaired. Nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// Nothing on the disk can be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A volume was to lose blocks, and there is none of this name.
    #[error("there is no volume called \"{0}\" that could lose blocks")]
    NoSuchVolume(String),
    /// A volume was named to lose blocks, but no other volume claims any of its own.
    #[error("volume \"{0}\" claims no block that another one claims: it has nothing to lose")]
    NoRival(String),
    /// There is no room for the nodes of the repaired trees.
    #[error(
        "the store has no room for the {nodes} nodes of the repaired trees: make the disk larger \
         first"
    )]
    NoSpace {
        /// How many are needed.
        nodes: usize,
    },
    /// The repaired metadata would not be sound.
    #[error("the repaired store would not be sound ({0}): nothing was written")]
    Unsound(String),
}

fn list(damage: &[Damage]) -> String {
    damage.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Why an operation on volumes was refused. Nothing was changed, unless the operation says
/// otherwise.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// No volume has this number.
    #[error("there is no volume {0}")]
    NoSuchVolume(VolumeId),
    /// Another volume has this name.
    #[error("there is a volume called {0} already")]
    NameTaken(String),
    /// Not 1 to 64 of letters, digits, `.`, `_`, `-`, or it begins with `.` or `-`.
    #[error(
        "{0:?} is no name for a volume: 1 to 64 letters, digits, '.', '_', '-', not beginning with \
         '.' or '-'"
    )]
    BadName(String),
    /// A volume has 1 block to 256 TiB.
    #[error("a volume of {blocks} blocks: 1 to {max_blocks} are possible")]
    BadSize {
        /// The size that was asked for.
        blocks: u64,
        /// The largest possible size.
        max_blocks: u64,
    },
    /// The store has [`MAX_VOLUMES`](crate::MAX_VOLUMES) volumes.
    #[error("there are {0} volumes already, and no more are possible")]
    TooManyVolumes(usize),
    /// The blocks lie outside the volume.
    #[error("blocks {first}+{count} of a volume of {blocks} blocks")]
    OutOfRange {
        /// The first block asked for.
        first: u64,
        /// The number of blocks.
        count: u64,
        /// The volume's size.
        blocks: u64,
    },
    /// Blocks of a volume cannot be shared with others that overlap them.
    #[error("a range cannot be shared with one that overlaps it")]
    Overlap,
    /// The store is full.
    #[error(
        "no space is left on the store{}",
        if *.after_commit { " until what was freed can be used again" } else { "" }
    )]
    NoSpace {
        /// Whether a commit, and the caller's epoch, will make freed blocks usable: then try again.
        after_commit: bool,
    },
    /// The volume may not have more blocks.
    #[error("the volume's quota of {quota_blocks} blocks is used up")]
    QuotaExceeded {
        /// The volume's quota in blocks.
        quota_blocks: u64,
    },
    /// Snapshots are read only.
    #[error("volume {0} is read only")]
    VolumeReadOnly(VolumeId),
    /// The store takes no changes, and why.
    #[error("the store is read only: {0}")]
    StoreReadOnly(String),
    /// The disk below the store has no space; with the disk's error.
    #[error(
        "the disk below the store is full ({0}): what was written before is made durable when it \
         has space again, and nothing is written to fresh blocks until then"
    )]
    DiskFull(String),
    /// Metadata of some volume is damaged; with the damage, below which the blocks in use are
    /// unknown. Reads and writes in place still work.
    #[error(
        "the store gives out no blocks, frees none and changes no volume while its metadata is \
         damaged ({0}); `sidecore volume repair` mends it while no daemon has it"
    )]
    StoreDamaged(String),
    /// Metadata of the volume is damaged: no mapping of it can be trusted.
    #[error("volume {id} is damaged: {what}")]
    Damaged {
        /// The volume's number.
        id: VolumeId,
        /// The damage and its place.
        what: String,
    },
    /// The disk failed to read metadata.
    #[error("metadata cannot be read: {0}")]
    Io(#[from] io::Error),
}
