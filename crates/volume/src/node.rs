//! The node of a tree: one codec for the catalogue and for the extents of volumes.
//!
//! A node records its kind, its tree, its store, its generation and its place; the pointer to it
//! carries its checksum. So a damaged, stale, misdirected or foreign node is never mistaken for
//! another. The table of fields is in `docs/volume-format.md`.

use crate::bytes::{all_zero, array_at, put, put_u64, u8_at, u16_at, u64_at};
use crate::geometry::Geometry;
use crate::limits::NODE_BYTES;
use crate::record::{RECORD_BYTES, Record};

const MAGIC: [u8; 8] = *b"SCVOLNOD";
const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 24;
/// Children of an inner node, and extents of a leaf.
pub(crate) const ENTRIES: usize = (NODE_BYTES - HEADER_BYTES) / ENTRY_BYTES;
/// Volumes of a leaf of the catalogue.
pub(crate) const RECORDS: usize = (NODE_BYTES - HEADER_BYTES) / RECORD_BYTES;

/// Where a node lies, and the checksum of what lies there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pointer {
    pub(crate) address: u64,
    /// Of a node that is not written yet: meaningless.
    pub(crate) checksum: u64,
}

/// The pointer to a tree's root, and its level: 0 for a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) pointer: Pointer,
    pub(crate) level: u8,
}

impl Root {
    /// As it is on the disk, where address 0, a superblock's, stands for none.
    pub(crate) fn read(address: u64, checksum: u64, level: u8) -> Option<Self> {
        (address != 0).then_some(Self { pointer: Pointer { address, checksum }, level })
    }
}

/// Which tree a node is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Volume number to [`Record`].
    Catalogue,
    /// First virtual block to [`Entry`].
    Extents,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Catalogue => 1,
            Self::Extents => 2,
        }
    }
}

/// An entry of an inner node: a child, and its first key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Child {
    pub(crate) key: u64,
    pub(crate) pointer: Pointer,
}

/// An entry of a leaf of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) physical: u64,
}

impl Entry {
    pub(crate) fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }

    pub(crate) fn physical_end(&self) -> u64 {
        self.physical.saturating_add(self.count)
    }

    /// The part that lies in `first..end`.
    pub(crate) fn clip(&self, first: u64, end: u64) -> Option<Self> {
        let (from, to) = (self.first.max(first), self.end().min(end));
        (from < to).then(|| Self {
            first: from,
            count: to.saturating_sub(from),
            physical: self.physical.saturating_add(from.saturating_sub(self.first)),
        })
    }
}

/// The entries of a node; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    Inner(Vec<Child>),
    Extents(Vec<Entry>),
    Records(Vec<Record>),
}

/// A node in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    /// The volume that it was made for, 0 for the catalogue. Snapshots and clones share it.
    pub(crate) owner: u64,
    /// The transaction that made it.
    pub(crate) generation: u64,
    pub(crate) level: u8,
    pub(crate) body: Body,
}

impl Body {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Inner(children) => children.len(),
            Self::Extents(entries) => entries.len(),
            Self::Records(records) => records.len(),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        match self {
            Self::Inner(_) | Self::Extents(_) => ENTRIES,
            Self::Records(_) => RECORDS,
        }
    }

    /// The first key.
    pub(crate) fn first_key(&self) -> Option<u64> {
        match self {
            Self::Inner(children) => children.first().map(|child| child.key),
            Self::Extents(entries) => entries.first().map(|entry| entry.first),
            Self::Records(records) => records.first().map(|record| record.id),
        }
    }

    /// The last key.
    pub(crate) fn last_key(&self) -> Option<u64> {
        match self {
            Self::Inner(children) => children.last().map(|child| child.key),
            Self::Extents(entries) => entries.last().map(|entry| entry.first),
            Self::Records(records) => records.last().map(|record| record.id),
        }
    }

    pub(crate) fn children(&self) -> &[Child] {
        match self {
            Self::Inner(children) => children,
            _ => &[],
        }
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        match self {
            Self::Extents(entries) => entries,
            _ => &[],
        }
    }

    /// Keeps the first `at`, and returns the rest.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.len());
        match self {
            Self::Inner(children) => Self::Inner(children.split_off(at)),
            Self::Extents(entries) => Self::Extents(entries.split_off(at)),
            Self::Records(records) => Self::Records(records.split_off(at)),
        }
    }

    /// Takes the other's in behind its own; `false` if they are of two sorts.
    pub(crate) fn append(&mut self, other: &Self) -> bool {
        match (self, other) {
            (Self::Inner(own), Self::Inner(more)) => own.extend_from_slice(more),
            (Self::Extents(own), Self::Extents(more)) => own.extend_from_slice(more),
            (Self::Records(own), Self::Records(more)) => own.extend_from_slice(more),
            _ => return false,
        }
        true
    }
}

/// Which child of these is on the way to `key`: the last one that does not begin behind it, else
/// the first.
pub(crate) fn child_for(children: &[Child], key: u64) -> usize {
    children.partition_point(|child| child.key <= key).saturating_sub(1)
}

impl Node {
    pub(crate) fn encode(&self, address: u64, geometry: &Geometry) -> Vec<u8> {
        let mut bytes = vec![0; NODE_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &[self.kind.code(), self.level]);
        put(&mut bytes, 10, &u16::try_from(self.body.len()).unwrap_or(u16::MAX).to_le_bytes());
        put_u64(&mut bytes, 16, self.owner);
        put_u64(&mut bytes, 24, self.generation);
        put_u64(&mut bytes, 32, address);
        put_u64(&mut bytes, 40, geometry.tag);
        let body = bytes.get_mut(HEADER_BYTES..).unwrap_or_default();
        let put_words = |slot: &mut [u8], words: [u64; 3]| {
            for (place, word) in slot.chunks_exact_mut(8).zip(words) {
                put_u64(place, 0, word);
            }
        };
        match &self.body {
            Body::Inner(children) => {
                for (slot, child) in body.chunks_exact_mut(ENTRY_BYTES).zip(children) {
                    put_words(slot, [child.key, child.pointer.address, child.pointer.checksum]);
                }
            }
            Body::Extents(entries) => {
                for (slot, entry) in body.chunks_exact_mut(ENTRY_BYTES).zip(entries) {
                    put_words(slot, [entry.first, entry.count, entry.physical]);
                }
            }
            Body::Records(records) => {
                for (slot, record) in body.chunks_exact_mut(RECORD_BYTES).zip(records) {
                    record.encode(slot);
                }
            }
        }
        bytes
    }

    /// The node that is in `bytes`, which have the checksum that the pointer says. Everything in it
    /// is checked that can be without looking elsewhere.
    pub(crate) fn decode(
        bytes: &[u8],
        address: u64,
        kind: Kind,
        level: u8,
        geometry: &Geometry,
    ) -> Result<Self, String> {
        if bytes.len() != NODE_BYTES || array_at(bytes, 0) != Some(MAGIC) {
            return Err("it is no metadata node".to_owned());
        }
        if u64_at(bytes, 40) != geometry.tag {
            return Err("it belongs to another store".to_owned());
        }
        if u64_at(bytes, 32) != address {
            return Err(format!("it belongs at block {}", u64_at(bytes, 32)));
        }
        if u8_at(bytes, 8) != kind.code() || u8_at(bytes, 9) != level {
            let (kind_found, level_found) = (u8_at(bytes, 8), u8_at(bytes, 9));
            return Err(format!(
                "it is of kind {kind_found} and level {level_found}, not {} and {level}",
                kind.code()
            ));
        }
        let (capacity, entry_bytes) = match (kind, level) {
            (Kind::Catalogue, 0) => (RECORDS, RECORD_BYTES),
            _ => (ENTRIES, ENTRY_BYTES),
        };
        let count = usize::from(u16_at(bytes, 10));
        if count == 0 || count > capacity {
            return Err(format!("it has {count} entries"));
        }
        let (body, rest) = bytes
            .get(HEADER_BYTES..)
            .and_then(|body| body.split_at_checked(count.saturating_mul(entry_bytes)))
            .unwrap_or_default();
        if !all_zero(rest)
            || !all_zero(bytes.get(48..HEADER_BYTES).unwrap_or_default())
            || u64_at(bytes, 8) >> 32 != 0
        {
            return Err("there is something in its unused bytes".to_owned());
        }
        let body = match (kind, level) {
            (Kind::Catalogue, 0) => Body::Records(records(body, geometry)?),
            (Kind::Extents, 0) => Body::Extents(entries(body, geometry)?),
            _ => Body::Inner(children(body, geometry)?),
        };
        Ok(Self { kind, owner: u64_at(bytes, 16), generation: u64_at(bytes, 24), level, body })
    }
}

fn records(body: &[u8], geometry: &Geometry) -> Result<Vec<Record>, String> {
    let records: Vec<Record> = body
        .chunks_exact(RECORD_BYTES)
        .map(|slot| Record::decode(slot, geometry))
        .collect::<Result<_, _>>()?;
    if !records.is_sorted_by(|a, b| a.id < b.id) {
        return Err("its volumes are not in order".to_owned());
    }
    Ok(records)
}

fn entries(body: &[u8], geometry: &Geometry) -> Result<Vec<Entry>, String> {
    let entry = |slot: &[u8]| Entry {
        first: u64_at(slot, 0),
        count: u64_at(slot, 8),
        physical: u64_at(slot, 16),
    };
    let entries: Vec<Entry> = body.chunks_exact(ENTRY_BYTES).map(entry).collect();
    for entry in &entries {
        if entry.count == 0 || entry.first.checked_add(entry.count).is_none() {
            return Err(format!(
                "it maps {} blocks from virtual block {} on",
                entry.count, entry.first
            ));
        }
        if !geometry.data_fits(entry.physical, entry.count) {
            return Err(format!(
                "it maps to {} blocks from block {} on, outside",
                entry.count, entry.physical
            ));
        }
    }
    if !entries.is_sorted_by(|a, b| a.end() <= b.first) {
        return Err("its extents are not in order, or overlap".to_owned());
    }
    Ok(entries)
}

fn children(body: &[u8], geometry: &Geometry) -> Result<Vec<Child>, String> {
    let child = |slot: &[u8]| Child {
        key: u64_at(slot, 0),
        pointer: Pointer { address: u64_at(slot, 8), checksum: u64_at(slot, 16) },
    };
    let children: Vec<Child> = body.chunks_exact(ENTRY_BYTES).map(child).collect();
    if let Some(child) = children.iter().find(|child| !geometry.node_fits(child.pointer.address)) {
        return Err(format!(
            "it has a child at block {}, where none can be",
            child.pointer.address
        ));
    }
    if !children.is_sorted_by(|a, b| a.key < b.key) {
        return Err("its children are not in order".to_owned());
    }
    Ok(children)
}
