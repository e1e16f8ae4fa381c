//! Why a store is not made or opened.

/// Why a store is not made or opened with the stage. Nothing on it was changed, unless a write has
/// failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    /// There is no header.
    #[error(
        "the store has no checksums; name the right store, or make them with `sidecore integrity \
         format`, which overwrites all of it"
    )]
    NoHeader,
    /// Both copies of the header are damaged.
    #[error(
        "both copies of the header are damaged, so the places of blocks are unknown; restore the \
         first 8 KiB of the store from a backup"
    )]
    Damaged,
    /// Both copies are whole, and differ.
    #[error(
        "the two copies of the header are of different stores: one was written over the other; \
         restore the first 8 KiB of the store from a backup"
    )]
    Differ,
    /// The header is of a later format.
    #[error("the header has version {0}, and this program knows version 1; use a newer program")]
    Version(u32),
    /// The header is of another store than the configuration names.
    #[error(
        "the store has the UUID {found}, and the stage is to have {wanted}; name the right store, \
         or correct `uuid`"
    )]
    OtherStore {
        /// The header's.
        found: String,
        /// The configuration's.
        wanted: String,
    },
    /// The store is smaller than when it was made.
    #[error(
        "the store has {has_bytes} bytes, and had {needs_bytes} at least when it was made; enlarge \
         it, or name the right store"
    )]
    Shrunk {
        /// The store's size.
        has_bytes: u64,
        /// The size that its header says.
        needs_bytes: u64,
    },
    /// The store's blocks are larger than those of its header.
    #[error(
        "the store's blocks of {has_bytes} bytes are larger than the {needs_bytes} bytes for which \
         it was made; set a smaller `block_bytes`"
    )]
    Blocks {
        /// The store's.
        has_bytes: u32,
        /// The header's.
        needs_bytes: u32,
    },
    /// No layout fits.
    #[error(
        "a store of {capacity_bytes} bytes in blocks of {below_bytes} has no room for blocks of \
         {block_bytes} bytes with checksums; they have 512 to 4096 bytes, and no fewer than the \
         store's"
    )]
    NoRoom {
        /// The store's size.
        capacity_bytes: u64,
        /// The store's blocks.
        below_bytes: u32,
        /// The blocks asked for.
        block_bytes: u32,
    },
    /// The store has checksums already.
    #[error("the store has checksums already; nothing is overwritten without `--force`")]
    HasHeader,
    /// The store has other contents.
    #[error("the store is not blank; nothing is overwritten without `--force`")]
    NotBlank,
    /// The store cannot be written.
    #[error("the store is read-only, and cannot be made to have checksums")]
    ReadOnly,
    /// The tags do not fit into memory.
    #[error("there is not enough memory for the tags of {blocks} blocks, 16 bytes for each")]
    Memory {
        /// The blocks of the disk.
        blocks: u64,
    },
    /// The user for whom the store was being opened has gone.
    #[error("the VMM has ended meanwhile")]
    Gone,
    /// The store cannot be read or written.
    #[error("{0}")]
    Io(String),
}

impl IntegrityError {
    /// How much an unreadable copy of the header says.
    pub(crate) fn rank(&self) -> u8 {
        match self {
            Self::NoHeader => 0,
            Self::Damaged => 1,
            _ => 2,
        }
    }
}

impl From<std::io::Error> for IntegrityError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error.to_string())
    }
}
