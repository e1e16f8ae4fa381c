//! Changes to a disk that no well-behaved program makes.

use std::collections::BTreeSet;

use sidecore_fuzz::Input;
use sidecore_volume::NODE_BYTES;

use crate::disk::{PAGE, SparseDisk};
use crate::reader::{
    CATALOGUE, ENTRIES_AT, ENTRY_BYTES, EXTENTS, NODE_MAGIC, RECORD_BYTES, SLOT_MAGIC, Superblock,
    word,
};

/// The sizes of disks: small ones, and one on which block numbers must not overflow.
pub const SIZES_BYTES: [u64; 4] = [1 << 20, (1 << 20) + 3 * PAGE, 3 << 20, (1 << 60) + PAGE];

fn put(page: &mut [u8; NODE_BYTES], at: usize, value: u64) {
    page[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Makes one change. `None` at the end of the input.
pub fn mutate(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    match input.byte()? % 11 {
        0 => flip(disk, input),
        1 => set_word(disk, input),
        2 => set_superblock(disk, input),
        3 => set_header(disk, input),
        4 => craft_extents(disk, input),
        5 => craft_inner(disk, input),
        6 => craft_records(disk, input),
        7 => copy(disk, input),
        8 => {
            let page = place(disk, input)?;
            disk.erase(page);
            Some(())
        }
        9 => {
            disk.size_bytes = SIZES_BYTES[usize::from(input.byte()?) % SIZES_BYTES.len()];
            Some(())
        }
        _ => {
            mend(disk);
            Some(())
        }
    }
}

/// A page, in most cases one in use.
fn place(disk: &SparseDisk, input: &mut Input<'_>) -> Option<u64> {
    let byte = u64::from(input.byte()?);
    let live = disk.live();
    // The index counts from the end, because nodes come last, and superblocks first.
    let index = (live.len() as u64).wrapping_sub(1 + byte);
    Some(if byte < 128 { live.get(index as usize).copied().unwrap_or(byte) } else { byte - 124 })
}

/// Numbers that have a meaning on this disk.
fn known(disk: &SparseDisk) -> Vec<u64> {
    let mut known = vec![0, 1 << 47, 1 << 48, u64::MAX];
    if let Some(superblock) = Superblock::newest(disk) {
        let blocks = superblock.node_blocks();
        known.extend([
            superblock.total_blocks,
            superblock.generation,
            superblock.next_volume,
            (1 << 48) / (PAGE / blocks),
        ]);
        known.extend(disk.live().iter().rev().map(|page| page * blocks));
    }
    known
}

fn flip(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let page = place(disk, input)?;
    let at = usize::from(u16::from_le_bytes([input.byte()?, input.byte()?])) % NODE_BYTES;
    let mask = input.byte()?;
    disk.page_mut(page)?[at] ^= mask;
    Some(())
}

fn set_word(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let page = place(disk, input)?;
    let at = 8 * usize::from(input.byte()?);
    let value = input.number(&known(disk))?;
    put(disk.page_mut(page)?, at, value);
    Some(())
}

/// Changes a word of the newest superblock, in both copies, because they must agree.
fn set_superblock(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let at = 8 * usize::from(input.byte()? % 14);
    let value = input.number(&known(disk))?;
    let first = Superblock::newest(disk)?.slot & !1;
    for slot in [first, first + 1] {
        put(disk.page_mut(slot)?, at, value);
    }
    Some(())
}

fn set_header(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let page = place(disk, input)?;
    let (field, value) = (input.byte()?, input.byte()?);
    disk.page_mut(page)?[usize::from(field % 48)] = value;
    Some(())
}

/// Makes a fresh node with a correct header.
fn craft(disk: &mut SparseDisk, input: &mut Input<'_>, kind: u8, level: u8) -> Option<(u64, u8)> {
    let page = place(disk, input)?;
    let count = input.byte()? % 16;
    let superblock = Superblock::newest(disk)?;
    let bytes = disk.page_mut(page)?;
    bytes.fill(0);
    bytes[..8].copy_from_slice(&NODE_MAGIC);
    bytes[8..12].copy_from_slice(&[kind, level, count, 0]);
    put(bytes, 24, 1);
    put(bytes, 32, page.wrapping_mul(superblock.node_blocks()));
    put(bytes, 40, superblock.tag);
    Some((page, count))
}

fn craft_extents(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let (page, count) = craft(disk, input, EXTENTS, 0)?;
    let known = known(disk);
    let mut at = 0_u64;
    for index in 0..usize::from(count) {
        let (gap, blocks, physical) =
            (input.number(&known)?, input.number(&known)?, input.number(&known)?);
        at = at.wrapping_add(gap);
        let bytes = disk.page_mut(page)?;
        for (place, value) in [at, blocks, physical].into_iter().enumerate() {
            put(bytes, ENTRIES_AT + index * ENTRY_BYTES + 8 * place, value);
        }
        at = at.wrapping_add(blocks);
    }
    Some(())
}

fn craft_inner(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let setup = input.byte()?;
    let kind = if setup & 1 == 0 { EXTENTS } else { CATALOGUE };
    let (page, count) = craft(disk, input, kind, setup >> 1 & 15)?;
    let blocks = Superblock::newest(disk)?.node_blocks();
    for index in 0..usize::from(count) {
        let child = place(disk, input)?;
        let key = disk.page(child).map_or(0, |bytes| word(&bytes[..], ENTRIES_AT));
        let bytes = disk.page_mut(page)?;
        put(bytes, ENTRIES_AT + index * ENTRY_BYTES, key);
        put(bytes, ENTRIES_AT + index * ENTRY_BYTES + 8, child.wrapping_mul(blocks));
    }
    Some(())
}

fn craft_records(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let (page, count) = craft(disk, input, CATALOGUE, 0)?;
    let known = known(disk);
    let blocks = Superblock::newest(disk)?.node_blocks();
    let mut number = 0_u64;
    for index in 0..usize::from(count) {
        number = number.wrapping_add(input.number(&known)?);
        let (size, quota, flags) = (input.number(&known)?, input.number(&known)?, input.byte()?);
        let root = if flags & 2 == 0 { place(disk, input)? } else { 0 };
        let level = disk.page(root).map_or(0, |bytes| bytes[9]);
        let bytes = disk.page_mut(page)?;
        let at = ENTRIES_AT + index * RECORD_BYTES;
        put(bytes, at, number);
        put(bytes, at + 8, size);
        put(bytes, at + 16, quota);
        put(bytes, at + 40, root.wrapping_mul(blocks));
        bytes[at + 72..at + 75].copy_from_slice(&[level, flags & 1, 3]);
        let name = [b'a' + index as u8, b'a' + flags / 4 % 26, b'a' + (number % 26) as u8];
        bytes[at + 128..at + 131].copy_from_slice(&name);
    }
    Some(())
}

/// Copies a node or a slot to another place, with the address of that place.
fn copy(disk: &mut SparseDisk, input: &mut Input<'_>) -> Option<()> {
    let (from, to) = (place(disk, input)?, place(disk, input)?);
    let bytes = disk.page(from)?.clone();
    let blocks = Superblock::newest(disk)?.node_blocks();
    let target = disk.page_mut(to)?;
    *target = bytes;
    if target[..8] == SLOT_MAGIC {
        target[104] = to as u8;
    } else {
        put(target, 32, to.wrapping_mul(blocks));
    }
    Some(())
}

/// Corrects numbers that follow from others: keys of inner nodes, sums of volumes, numbers in the
/// superblock. Then the change passes the first checks and reaches later ones.
fn mend(disk: &mut SparseDisk) {
    let Some(superblock) = Superblock::newest(disk) else { return };
    let mut mender = Mender {
        disk,
        blocks: superblock.node_blocks(),
        seen: BTreeSet::new(),
        left: 4096,
        volumes: 0,
        newest: 0,
    };
    if let Some(root) = superblock.catalogue {
        mender.node(root.address / mender.blocks, 13);
    }
    let (volumes, newest) = (mender.volumes, mender.newest);
    let first = superblock.slot & !1;
    for slot in [first, first + 1] {
        let bytes = disk.page_mut(slot).filter(|bytes| bytes[..8] == SLOT_MAGIC);
        if let Some(bytes) = bytes {
            put(bytes, 56, volumes);
            put(bytes, 48, superblock.next_volume.max(newest.saturating_add(1)));
        }
    }
}

struct Mender<'a> {
    disk: &'a mut SparseDisk,
    blocks: u64,
    seen: BTreeSet<u64>,
    /// The number of nodes that may still be visited.
    left: u32,
    volumes: u64,
    newest: u64,
}

impl Mender<'_> {
    /// Corrects a node and its subtree. Returns the number of its extents, and of the blocks in
    /// them.
    fn node(&mut self, page: u64, depth: u8) -> (u64, u64) {
        let Some(mut bytes) = self.disk.page(page).cloned() else { return (0, 0) };
        let Some(left) = self.left.checked_sub(1) else { return (0, 0) };
        self.left = left;
        let count = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
        let is_new = self.seen.insert(page);
        let (mut extents, mut blocks) = (0_u64, 0_u64);
        let entry_bytes =
            if (bytes[8], bytes[9]) == (CATALOGUE, 0) { RECORD_BYTES } else { ENTRY_BYTES };
        for index in 0..count.min((NODE_BYTES - ENTRIES_AT) / entry_bytes) {
            let at = ENTRIES_AT + index * entry_bytes;
            if bytes[9] > 0 {
                // A node in several places is counted in the first one only, so that the recursion
                // ends.
                let child = word(&bytes[..], at + 8) / self.blocks;
                if depth > 0 && is_new {
                    let below = self.node(child, depth - 1);
                    (extents, blocks) =
                        (extents.wrapping_add(below.0), blocks.wrapping_add(below.1));
                }
                let key = self.disk.page(child).map_or(0, |bytes| word(&bytes[..], ENTRIES_AT));
                put(&mut bytes, at, key);
            } else if bytes[8] == CATALOGUE {
                if is_new {
                    self.volumes += 1;
                    self.newest = self.newest.max(word(&bytes[..], at));
                }
                // Snapshots share nodes, so each volume is counted by itself.
                self.seen.clear();
                self.seen.insert(page);
                let sums = if word(&bytes[..], at + 40) == 0 {
                    (0, 0)
                } else {
                    self.node(word(&bytes[..], at + 40) / self.blocks, 13)
                };
                put(&mut bytes, at + 24, sums.1);
                put(&mut bytes, at + 32, sums.0);
            } else {
                extents += 1;
                blocks = blocks.wrapping_add(word(&bytes[..], at + 8));
            }
        }
        if let Some(page) = self.disk.page_mut(page) {
            *page = bytes;
        }
        (extents, blocks)
    }
}
