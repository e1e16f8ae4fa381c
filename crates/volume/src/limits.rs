//! The limits of the format, each with its reason.

/// The sizes that a block may have, in bytes. The default is the granularity of the thesis'
/// prototype (5.3).
pub const BLOCK_BYTES: [u32; 3] = [512, 1024, 4096];

/// Bytes in a block unless something else is asked for (thesis 5.3).
pub const DEFAULT_BLOCK_BYTES: u32 = 1024;

/// Bytes in a metadata node and in a superblock slot, and the unit of all metadata I/O.
pub const NODE_BYTES: usize = 4096;

/// Volumes in a store, snapshots included.
pub const MAX_VOLUMES: usize = 65_536;

/// Bytes in a volume's name.
pub const MAX_NAME_BYTES: usize = 64;

/// Bytes in a store's label.
pub const MAX_LABEL_BYTES: usize = 64;

/// The size of the largest volume, in bytes: 256 TiB.
pub const MAX_VOLUME_BYTES: u64 = 1 << 48;

/// Blocks of the largest store; what a disk has beyond is not used.
pub const MAX_STORE_BLOCKS: u64 = 1 << 47;

/// The size of the smallest store, in bytes: superblocks, the metadata reserve and something to
/// use.
pub const MIN_STORE_BYTES: u64 = 1 << 20;

/// Levels in a tree. Half-full nodes of 2^47 one-block extents need fewer.
pub(crate) const MAX_LEVELS: u8 = 12;

/// Clean nodes kept in memory unless [`OpenOptions`](crate::OpenOptions) says otherwise: 8 MiB.
pub const DEFAULT_CACHE_NODES: usize = 2048;
