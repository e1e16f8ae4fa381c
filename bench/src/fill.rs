//! Disks that are written before they are measured.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FallocateFlags;
use sidecore_driver::{BlkClient, ClientOptions, Queue};
use sidecore_units::{SECTOR_BYTES, Sector};
use tempfile::TempDir;

use crate::stop;

/// The order in which the pieces of a disk are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// From the start to the end.
    Sequential,
    /// Each piece once, in a random order that is always the same.
    Random,
}

/// Writes the first `bytes` of a disk in pieces, one at a time, and flushes them.
///
/// # Errors
/// The device fails a request, or does not answer; an interrupt.
pub fn fill(socket: &Path, bytes: u64, piece_bytes: u32, order: Order) -> Result<()> {
    let options = ClientOptions { slots: 1, slot_bytes: piece_bytes, ..ClientOptions::default() };
    let mut client = BlkClient::connect(socket, &options)?;
    let queue = client.queue(0).context("no queue")?;
    let slot = queue.take_slot().context("no slot")?;
    queue.write_data(slot, 0, &vec![0x5a; piece_bytes as usize]);
    let pieces = bytes / u64::from(piece_bytes);
    let mut completions = Vec::new();
    for index in 0..=pieces {
        match order {
            _ if index == pieces => queue.submit_flush(slot)?,
            Order::Sequential => {
                queue.submit_write(slot, sector(index, piece_bytes), piece_bytes)?
            }
            Order::Random => queue.submit_write(
                slot,
                sector(shuffled(index, pieces), piece_bytes),
                piece_bytes,
            )?,
        }
        complete(queue, &mut completions)?;
    }
    Ok(())
}

/// Writes the first `bytes` of a disk from the start to the end, through a queue of either kind
/// whose slots are as large as the pieces. The data is the present content of a slot, and is not
/// flushed.
///
/// # Errors
/// As [`fill`].
pub fn fill_queue<Q: Queue>(queue: &mut Q, bytes: u64, piece_bytes: u32) -> Result<()> {
    let slot = queue.take_slot().context("no slot")?;
    let mut completions = Vec::with_capacity(1);
    for index in 0..bytes / u64::from(piece_bytes) {
        queue.submit_write(slot, sector(index, piece_bytes), piece_bytes)?;
        complete(queue, &mut completions)?;
    }
    queue.release_slot(slot);
    Ok(())
}

/// Publishes the one queued request and waits for its completion.
fn complete<Q: Queue>(queue: &mut Q, completions: &mut Vec<Q::Completion>) -> Result<()> {
    queue.publish()?;
    completions.clear();
    let give_up = Instant::now() + PATIENCE;
    while queue.poll_completions(completions)? == 0 {
        stop::check()?;
        if !queue.wait(WAIT)? && Instant::now() > give_up {
            bail!("the device does not answer");
        }
    }
    ensure!(
        completions.iter().all(|done| Q::outcome(*done).1),
        "filling a disk fails: {completions:?}"
    );
    Ok(())
}

/// Makes a directory in memory, so that measurements show the path and not a medium.
///
/// # Errors
/// There is no tmpfs at `/dev/shm`.
pub fn directory_in_memory() -> Result<TempDir> {
    tempfile::Builder::new().prefix("sidecore-bench").tempdir_in("/dev/shm").context("no tmpfs")
}

/// Makes a file whose blocks are all allocated.
///
/// # Errors
/// The filesystem has too little space.
pub fn allocated_file(path: &Path, bytes: u64) -> Result<PathBuf> {
    rustix::fs::fallocate(File::create(path)?, FallocateFlags::empty(), 0, bytes)?;
    Ok(path.to_owned())
}

/// Long enough for a commit on a slow and busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const WAIT: Duration = Duration::from_millis(100);

fn sector(index: u64, piece_bytes: u32) -> Sector {
    Sector(index * u64::from(piece_bytes) / SECTOR_BYTES)
}

/// A bijection on `0..count`, a power of two, that scatters neighbours.
fn shuffled(index: u64, count: u64) -> u64 {
    let mask = count.next_power_of_two() - 1;
    let mut mixed = index;
    // Each step is invertible within the mask.
    for _ in 0..3 {
        mixed = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask;
        mixed ^= mixed >> (mask.count_ones() / 2).max(1);
    }
    mixed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffled_disk_is_a_whole_disk() {
        for count in [2, 16, 256, 8192] {
            let mut all: Vec<u64> = (0..count).map(|index| shuffled(index, count)).collect();
            let in_order = all.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
            assert!(in_order as u64 <= count / 16 + 1, "{count}: {in_order}");
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{count}");
        }
    }
}
