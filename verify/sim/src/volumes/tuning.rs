//! The choices of a history.

use sidecore_volume::OpenOptions;

use crate::Random;

/// The choices that hold for a whole history.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tuning {
    pub(crate) block_bytes: u32,
    pub(crate) disk_bytes: usize,
    /// In sectors.
    pub(crate) longest_write: u64,
    /// The largest usual volume, in blocks.
    pub(crate) largest_volume: u64,
    /// One in so many volumes is far larger than the disk.
    pub(crate) volumes_per_huge: u64,
    pub(crate) most_volumes: usize,
    /// The most steps for which freed blocks wait before they are reused.
    pub(crate) longest_reuse_delay: u64,
    /// The most writes between allocation and link.
    pub(crate) most_fresh_writes: usize,
    /// During a commit's writes, another step is taken once in so many times.
    pub(crate) writes_per_meanwhile: u64,
    /// One in so many commits meets a failing disk.
    pub(crate) commits_per_failure: u64,
    /// The most extents of one block that one step makes.
    pub(crate) most_fragments: u64,
    /// Clean nodes that are kept in memory.
    pub(crate) cache_nodes: usize,
    /// One in so many volume operations is not committed at once.
    pub(crate) operations_per_lazy: u64,
    /// The log's capacity.
    pub(crate) log_entries: usize,
    /// The process dies at one in so many opportunities.
    pub(crate) chances_per_death: u64,
}

impl Tuning {
    pub(crate) fn draw(random: &mut Random) -> Self {
        let block_bytes = [512, 1024, 1024, 4096][random.below(4) as usize];
        let kib = [1024, 1024, 1024 + 4 * random.below(256), 2048, 4096][random.below(5) as usize];
        Self {
            block_bytes,
            disk_bytes: (kib as usize) << 10,
            longest_write: [1, 8, 32, 128, 512][random.below(5) as usize],
            largest_volume: [8, 64, 512, 2048][random.below(4) as usize],
            volumes_per_huge: [3, 20][random.below(2) as usize],
            most_volumes: [2, 5, 12, 40][random.below(4) as usize],
            longest_reuse_delay: [1, 5, 40][random.below(3) as usize],
            most_fresh_writes: [1, 4, 12][random.below(3) as usize],
            writes_per_meanwhile: [2, 4, 1000][random.below(3) as usize],
            commits_per_failure: [60, 1000][random.below(2) as usize],
            most_fragments: [2, 40, 300, 1000][random.below(4) as usize],
            cache_nodes: [1, 8, 2048][random.below(3) as usize],
            operations_per_lazy: [2, 6, 1000][random.below(3) as usize],
            log_entries: [4, 40, 10_000][random.below(3) as usize],
            chances_per_death: [8, 20, 50][random.below(3) as usize],
        }
    }

    pub(crate) const fn open_options(&self) -> OpenOptions {
        OpenOptions { cache_nodes: self.cache_nodes, read_only: false, owner: None }
    }

    pub(crate) const fn sectors_per_block(&self) -> usize {
        self.block_bytes as usize / super::disk::SECTOR_BYTES
    }
}
