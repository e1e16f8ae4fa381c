//! A second reader of docs/volume-format.md: strict, slow, and written from that page alone. A
//! volume that the volume crate calls healthy must be correct for this reader, too.

use std::collections::{BTreeMap, BTreeSet};

use crate::disk::{PAGE, Page, SparseDisk};

/// The offset of a node's entries.
pub const ENTRIES_AT: usize = 64;
pub const ENTRY_BYTES: usize = 24;
pub const RECORD_BYTES: usize = 192;
const MOST_ENTRIES: usize = 168;
const MOST_RECORDS: usize = 21;

static ZEROS: [u8; PAGE as usize] = [0; PAGE as usize];

pub const SLOT_MAGIC: [u8; 8] = *b"SCVOLUME";
pub const NODE_MAGIC: [u8; 8] = *b"SCVOLNOD";
pub const CATALOGUE: u8 = 1;
pub const EXTENTS: u8 = 2;

pub fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// An address of a node, with the level that its parent states.
#[derive(Clone, Copy, Debug)]
pub struct Root {
    pub address: u64,
    pub level: u8,
}

#[derive(Clone, Copy, Debug)]
pub struct Superblock {
    pub slot: u64,
    pub block_bytes: u64,
    pub total_blocks: u64,
    pub generation: u64,
    pub tag: u64,
    pub next_volume: u64,
    pub volumes: u64,
    pub catalogue: Option<Root>,
}

impl Superblock {
    /// The superblock in a slot, if the slot has the magic number.
    pub fn of_slot(disk: &SparseDisk, slot: u64) -> Option<Self> {
        let bytes = disk.page(slot).filter(|bytes| bytes[..8] == SLOT_MAGIC)?;
        Some(Self {
            slot,
            block_bytes: half(&bytes[..], 12).into(),
            total_blocks: word(&bytes[..], 40),
            generation: word(&bytes[..], 32),
            tag: word(&bytes[..], 16) ^ word(&bytes[..], 24),
            next_volume: word(&bytes[..], 48),
            volumes: word(&bytes[..], 56),
            catalogue: root(&bytes[..], 64, 80),
        })
    }

    /// The newest superblock of the four slots.
    pub fn newest(disk: &SparseDisk) -> Option<Self> {
        (0..4)
            .filter_map(|slot| Self::of_slot(disk, slot))
            .max_by_key(|superblock| superblock.generation)
    }

    /// The number of blocks in a node.
    pub fn node_blocks(&self) -> u64 {
        PAGE / self.block_bytes.clamp(512, PAGE)
    }

    pub fn first_block(&self) -> u64 {
        4 * self.node_blocks()
    }
}

fn root(bytes: &[u8], address_at: usize, level_at: usize) -> Option<Root> {
    let address = word(bytes, address_at);
    (address != 0).then(|| Root { address, level: bytes[level_at] })
}

/// Virtual blocks and their place: first block, count, and first physical block.
pub type Mapping = (u64, u64, u64);

/// A volume as recorded on the disk.
#[derive(Debug)]
pub struct Volume {
    pub number: u64,
    pub name: String,
    pub blocks: u64,
    pub allocated: u64,
    pub extents: u64,
    pub read_only: bool,
    root: Option<Root>,
}

/// A generation as recorded on the disk.
#[derive(Debug)]
pub struct Image<'a> {
    disk: &'a SparseDisk,
    pub superblock: Superblock,
    pub volumes: BTreeMap<u64, Volume>,
    /// The pages of the nodes that were read.
    pub nodes: BTreeSet<u64>,
}

impl std::fmt::Debug for SparseDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a disk of {} bytes", self.size_bytes)
    }
}

/// The range of keys in a subtree.
struct Span {
    first: u64,
    end: u64,
}

impl<'a> Image<'a> {
    /// Reads the generation that was opened. With `strict`, all of its catalogue must be correct;
    /// without, reads as much as is readable.
    pub fn read(disk: &'a SparseDisk, generation: u64, strict: bool) -> Self {
        let slots = [generation % 2 * 2, generation % 2 * 2 + 1];
        let mut found = slots.into_iter().filter_map(|slot| Superblock::of_slot(disk, slot));
        let superblock = found.find(|superblock| superblock.generation == generation);
        let superblock = superblock.expect("a slot of the generation that was opened");
        assert!([512, 1024, 4096].contains(&superblock.block_bytes));
        assert!(
            u128::from(superblock.total_blocks) * u128::from(superblock.block_bytes)
                <= disk.size_bytes.into()
        );
        let mut image = Self { disk, superblock, volumes: BTreeMap::new(), nodes: BTreeSet::new() };
        if let Some(root) = superblock.catalogue {
            image.catalogue(root, generation, strict);
        }
        if strict {
            assert_eq!(image.volumes.len() as u64, superblock.volumes);
            let names: BTreeSet<&String> =
                image.volumes.values().map(|volume| &volume.name).collect();
            assert_eq!(names.len(), image.volumes.len(), "two volumes of one name");
            assert!(image.volumes.keys().all(|number| *number < superblock.next_volume));
        }
        image
    }

    /// A node and the number of its entries, if its whole header is correct.
    fn node(&self, root: Root, kind: u8, newest: u64) -> Result<(&'a Page, usize), &'static str> {
        let superblock = &self.superblock;
        let (address, blocks) = (root.address, superblock.node_blocks());
        let fits = address.checked_add(blocks).is_some_and(|end| end <= superblock.total_blocks);
        if !fits || address < superblock.first_block() || !address.is_multiple_of(blocks) {
            return Err("a node where none can be");
        }
        let bytes = self.disk.page(address / blocks).ok_or("a node of zeros")?;
        let (most, entry_bytes) = if (kind, root.level) == (CATALOGUE, 0) {
            (MOST_RECORDS, RECORD_BYTES)
        } else {
            (MOST_ENTRIES, ENTRY_BYTES)
        };
        let count = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
        if bytes[..8] != NODE_MAGIC
            || word(&bytes[..], 32) != address
            || word(&bytes[..], 40) != superblock.tag
        {
            return Err("no node of this store that belongs here");
        }
        if (bytes[8], bytes[9]) != (kind, root.level) || root.level > 12 {
            return Err("a node of another kind or level");
        }
        if count == 0 || count > most {
            return Err("an impossible number of entries");
        }
        let unused = [&bytes[12..16], &bytes[48..64], &bytes[ENTRIES_AT + count * entry_bytes..]];
        if unused.into_iter().any(|bytes| *bytes != ZEROS[..bytes.len()]) {
            return Err("something in unused bytes");
        }
        if word(&bytes[..], 24) > newest {
            return Err("a node newer than what refers to it");
        }
        Ok((bytes, count))
    }

    fn catalogue(&mut self, root: Root, newest: u64, strict: bool) -> Option<Span> {
        if !self.nodes.insert(root.address / self.superblock.node_blocks()) {
            assert!(!strict, "a node of the catalogue in two places");
            return None;
        }
        let (bytes, count) = match self.node(root, CATALOGUE, newest) {
            Ok(node) => node,
            // A node that is only too new is damaged, and its volumes are listed all the same.
            Err("a node newer than what refers to it") if !strict => {
                self.node(root, CATALOGUE, u64::MAX).ok()?
            }
            Err(_) if !strict => return None,
            Err(what) => panic!("the catalogue has {what} at block {}", root.address),
        };
        let generation = word(&bytes[..], 24);
        let records = || bytes[ENTRIES_AT..].chunks_exact(RECORD_BYTES).take(count);
        if root.level == 0 && !records().all(|record| self.is_record(record)) {
            assert!(!strict, "a volume that cannot be");
            return None;
        }
        let mut span: Option<Span> = None;
        for index in 0..count {
            let below = if root.level > 0 {
                let entry = &bytes[ENTRIES_AT + index * ENTRY_BYTES..][..ENTRY_BYTES];
                let child = Root { address: word(entry, 8), level: root.level - 1 };
                let below = self.catalogue(child, generation, strict);
                if strict {
                    assert_eq!(
                        below.as_ref().map(|below| below.first),
                        Some(word(entry, 0)),
                        "a key of the catalogue"
                    );
                }
                below
            } else {
                let volume =
                    Self::volume(&bytes[ENTRIES_AT + index * RECORD_BYTES..][..RECORD_BYTES]);
                let number = volume.number;
                self.volumes.insert(number, volume);
                Some(Span { first: number, end: number.saturating_add(1) })
            };
            let Some(below) = below else { continue };
            let before = span.as_ref().map_or(1, |span| span.end);
            assert!(!strict || before <= below.first, "volumes are out of order");
            span =
                Some(Span { first: span.map_or(below.first, |span| span.first), end: below.end });
        }
        span
    }

    /// Whether the record describes a possible volume.
    fn is_record(&self, bytes: &[u8]) -> bool {
        let name = bytes[128..].get(..usize::from(bytes[74])).unwrap_or_default();
        let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        let named =
            name.iter().all(allowed) && name.first().is_some_and(|byte| !b".-".contains(byte));
        let blocks = word(bytes, 8);
        let sized =
            blocks > 0 && u128::from(blocks) * u128::from(self.superblock.block_bytes) <= 1 << 48;
        word(bytes, 0) > 0 && named && sized && bytes[73] <= 1
    }

    fn volume(bytes: &[u8]) -> Volume {
        let name = bytes[128..].get(..usize::from(bytes[74])).unwrap_or_default();
        Volume {
            number: word(bytes, 0),
            name: String::from_utf8_lossy(name).into_owned(),
            blocks: word(bytes, 8),
            allocated: word(bytes, 24),
            extents: word(bytes, 32),
            read_only: bytes[73] == 1,
            root: root(bytes, 40, 72),
        }
    }

    /// The mappings of a healthy volume.
    pub fn mappings(&mut self, number: u64) -> Vec<Mapping> {
        let volume = &self.volumes[&number];
        let (blocks, allocated, extents, root) =
            (volume.blocks, volume.allocated, volume.extents, volume.root);
        let mut mappings = Vec::new();
        if let Some(root) = root {
            let span = self.extents(root, self.superblock.generation, &mut mappings);
            assert!(span.end <= blocks, "volume {number} maps more than it has");
        }
        assert_eq!(mappings.len() as u64, extents, "extents of volume {number}");
        assert_eq!(
            mappings.iter().map(|(_, count, _)| count).sum::<u64>(),
            allocated,
            "blocks of volume {number}"
        );
        mappings
    }

    fn extents(&mut self, root: Root, newest: u64, mappings: &mut Vec<Mapping>) -> Span {
        let node = self.node(root, EXTENTS, newest);
        let (bytes, count) = node
            .unwrap_or_else(|what| panic!("a healthy volume has {what} at block {}", root.address));
        self.nodes.insert(root.address / self.superblock.node_blocks());
        let generation = word(&bytes[..], 24);
        let mut span: Option<Span> = None;
        for entry in bytes[ENTRIES_AT..].chunks_exact(ENTRY_BYTES).take(count) {
            let [first, second, third] = [0, 8, 16].map(|at| word(entry, at));
            let below = if root.level > 0 {
                let below = self.extents(
                    Root { address: second, level: root.level - 1 },
                    generation,
                    mappings,
                );
                assert_eq!(below.first, first, "a key in the node at block {}", root.address);
                below
            } else {
                let end =
                    third.checked_add(second).filter(|end| *end <= self.superblock.total_blocks);
                assert!(
                    second > 0 && third >= self.superblock.first_block() && end.is_some(),
                    "an extent outside"
                );
                mappings.push((first, second, third));
                Span { first, end: first.checked_add(second).expect("an extent that ends") }
            };
            // This order also bounds the recursion: no node can be in a tree twice.
            assert!(
                span.as_ref().is_none_or(|span| span.end <= below.first),
                "extents are out of order"
            );
            span = Some(Span { first: span.map_or(first, |span| span.first), end: below.end });
        }
        span.expect("a node has entries")
    }
}
