//! A new store, and what a disk holds.

use std::io;

use crate::bytes::{all_zero, array_at};
use crate::disk::Disk;
use crate::error::FormatError;
use crate::geometry::SLOTS;
use crate::limits::{
    BLOCK_BYTES, DEFAULT_BLOCK_BYTES, MAX_LABEL_BYTES, MAX_STORE_BLOCKS, MIN_STORE_BYTES,
    NODE_BYTES,
};
use crate::superblock::{MAGIC, Superblock, slot_offset_bytes, slots_of};

/// As much at either end of a disk is looked at, and zeroed by formatting: every format in the
/// table below keeps its mark there.
const EDGE_BYTES: u64 = 1 << 20;

/// The first generation.
const FIRST_GENERATION: u64 = 1;

/// The options of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatOptions {
    /// Bytes in a block: 512, 1024 or 4096.
    pub block_bytes: u32,
    /// For people, at most 64 printable bytes.
    pub label: String,
    /// Tells this store from every other: random bytes.
    pub uuid: [u8; 16],
    /// Formats over any contents of the disk.
    pub force: bool,
}

impl Default for FormatOptions {
    /// 1 KiB blocks, no label, no UUID, nothing given up.
    fn default() -> Self {
        Self { block_bytes: DEFAULT_BLOCK_BYTES, label: String::new(), uuid: [0; 16], force: false }
    }
}

/// The contents of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: its first and its last MiB are zeros.
    Blank,
    /// A store of this format.
    Ours,
    /// Something else, by this name.
    Foreign(&'static str),
    /// Something that is not zeros.
    Unknown,
}

/// Marks of other formats at the start of a disk: offset in bytes, bytes, name. The specific ones
/// first: a partition table may have a file system's mark too. The places are those that `blkid` of
/// util-linux reads.
const MARKS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0, b"XFSB", "an XFS file system"),
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (0x1_0040, b"_BHRfS_M", "a Btrfs file system"),
    (0x1018, &[0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca], "a bcache or bcachefs device"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (8182, b"SWAPSPACE2", "swap space"),
    (16374, b"SWAPSPACE2", "swap space"),
    (65526, b"SWAPSPACE2", "swap space"),
    (0, b"LABELONE", "an LVM physical volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (0, &[0xfc, 0x4e, 0x2b, 0xa9], "a part of a Linux RAID"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a part of a Linux RAID"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"KDMV", "a VMDK image"),
    (0, b"vhdxfile", "a VHDX image"),
    (0, b"conectix", "a VHD image"),
    (0, b"hsqs", "a squashfs file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (510, &[0x55, 0xaa], "an MBR partition table"),
];

/// Detects the contents of the disk.
///
/// # Errors
/// The disk's error.
pub fn probe(disk: &mut dyn Disk) -> io::Result<Content> {
    let size_bytes = whole_nodes(disk.size_bytes());
    let head = read(disk, 0, size_bytes.min(EDGE_BYTES))?;
    let tail_at = size_bytes.saturating_sub(EDGE_BYTES);
    let tail = read(disk, tail_at, size_bytes.saturating_sub(tail_at))?;
    for slot in 0..SLOTS {
        let at = usize::try_from(slot_offset_bytes(slot)).unwrap_or(usize::MAX);
        if array_at(&head, at) == Some(MAGIC) {
            return Ok(Content::Ours);
        }
    }
    let has = |bytes: &[u8], at: usize, mark: &[u8]| {
        bytes.get(at..).is_some_and(|rest| rest.starts_with(mark))
    };
    if let Some((.., name)) = MARKS.iter().find(|(at, mark, _)| has(&head, *at, mark)) {
        return Ok(Content::Foreign(name));
    }
    if has_uberblock(&head) || has_uberblock(&tail) {
        return Ok(Content::Foreign("a part of a ZFS pool"));
    }
    Ok(if all_zero(&head) && all_zero(&tail) { Content::Blank } else { Content::Unknown })
}

/// ZFS keeps an array of uberblocks 128 KiB into each of its labels, the first at the start of the
/// disk.
fn has_uberblock(bytes: &[u8]) -> bool {
    const MAGIC: u64 = 0x00ba_b10c;
    let words = bytes.chunks_exact(1024).filter_map(|uberblock| array_at(uberblock, 0));
    let mut numbers = words.map(u64::from_le_bytes);
    numbers.any(|number| number == MAGIC || number.swap_bytes() == MAGIC)
}

/// Makes an empty store.
///
/// # Errors
/// [`FormatError`]; without `force`, a disk that is not blank is refused.
pub fn format(disk: &mut dyn Disk, options: &FormatOptions) -> Result<(), FormatError> {
    let FormatOptions { block_bytes, label, uuid, force } = options.clone();
    if !BLOCK_BYTES.contains(&block_bytes) {
        return Err(FormatError::BadBlockSize(block_bytes));
    }
    if label.len() > MAX_LABEL_BYTES || label.chars().any(char::is_control) {
        return Err(FormatError::BadLabel);
    }
    let size_bytes = whole_nodes(disk.size_bytes());
    if size_bytes < MIN_STORE_BYTES {
        return Err(FormatError::TooSmall {
            size_bytes: disk.size_bytes(),
            min_bytes: MIN_STORE_BYTES,
        });
    }
    if !force {
        match probe(disk)? {
            Content::Blank => {}
            Content::Ours => return Err(FormatError::NotBlank("a store of volumes".to_owned())),
            Content::Foreign(name) => return Err(FormatError::NotBlank(name.to_owned())),
            Content::Unknown => return Err(FormatError::NotBlank("something unknown".to_owned())),
        }
    }
    // Earlier contents must not be found again: not by this crate, in the slots, and not by other
    // programs, at either end. The zeros are durable before the new slots are written.
    zero(disk, 0, EDGE_BYTES.min(size_bytes))?;
    let tail_at = size_bytes.saturating_sub(EDGE_BYTES);
    zero(disk, tail_at, size_bytes.saturating_sub(tail_at))?;
    disk.flush()?;
    let superblock = Superblock {
        block_bytes,
        uuid,
        label,
        generation: FIRST_GENERATION,
        total_blocks: size_bytes
            .checked_div(u64::from(block_bytes))
            .unwrap_or(0)
            .min(MAX_STORE_BLOCKS),
        next_volume: 1,
        volume_count: 0,
        catalogue: None,
        only_copies: true,
        features: 0,
        features_to_write: 0,
        in_use: None,
        owner: None,
    };
    for slot in slots_of(FIRST_GENERATION) {
        disk.write(slot_offset_bytes(slot), &superblock.encode(slot))?;
    }
    disk.flush()?;
    Ok(())
}

fn whole_nodes(size_bytes: u64) -> u64 {
    size_bytes.saturating_sub(size_bytes.checked_rem(NODE_BYTES as u64).unwrap_or(0))
}

fn read(disk: &mut dyn Disk, offset_bytes: u64, count_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(count_bytes.min(EDGE_BYTES)).unwrap_or(0)];
    disk.read(offset_bytes, &mut bytes)?;
    Ok(bytes)
}

fn zero(disk: &mut dyn Disk, offset_bytes: u64, count_bytes: u64) -> io::Result<()> {
    let zeros = vec![0; usize::try_from(count_bytes.min(EDGE_BYTES)).unwrap_or(0)];
    disk.write(offset_bytes, &zeros)
}
