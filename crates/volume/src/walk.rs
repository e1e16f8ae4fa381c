//! Looking at everything: what `open` builds its memory from, and what `check` compares it with.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::error::{Damage, Place};
use crate::geometry::Geometry;
use crate::info::VolumeId;
use crate::node::{Kind, Node, Pointer, Root};
use crate::nodes::TreeError;
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::shares::Shares;

/// Things that are wrong: the first ones, and how many more.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    pub(crate) list: Vec<Damage>,
    pub(crate) more: u64,
}

impl Problems {
    /// As many are listed.
    pub(crate) const MOST: usize = 256;

    pub(crate) fn add(&mut self, place: Place, what: impl Into<String>) {
        if self.list.len() < Self::MOST {
            self.list.push(Damage { place, what: what.into() });
        } else {
            self.more = self.more.saturating_add(1);
        }
    }
}

/// Where nodes come from.
pub(crate) trait Source {
    /// The node there, and whether its checksum has been compared with the pointer's.
    fn node(
        &mut self,
        pointer: Pointer,
        kind: Kind,
        level: u8,
    ) -> Result<(Arc<Node>, bool), TreeError>;
}

/// Facts about a node and everything below it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// As the first pointer to it says, if it was compared.
    checksum: Option<u64>,
    kind: Kind,
    level: u8,
    generation: u64,
    first: u64,
    /// The end of its last extent.
    end: u64,
    pub(crate) references: u64,
    extents: u64,
    blocks: u64,
    /// The node itself could be read.
    is_read: bool,
    /// The node, or something below it, is not as it should be.
    damaged: bool,
}

/// A walk over all trees. Each node is looked at once, however many trees it is in: the work is
/// bounded by the size of the disk. A node's level is below its parent's, so there is no walking in
/// circles.
pub(crate) struct Walk<'a> {
    pub(crate) geometry: Geometry,
    /// The newest generation that a node may have.
    pub(crate) generation: u64,
    pub(crate) source: &'a mut dyn Source,
    pub(crate) seen: HashMap<u64, Seen>,
    /// Blocks that hold data.
    pub(crate) data: RangeSet,
    pub(crate) shares: Shares,
    /// References to data, one a block.
    pub(crate) references: u64,
    /// Extents, those of shared nodes once.
    pub(crate) extents: u64,
    /// The catalogue's records.
    pub(crate) records: Vec<Record>,
    pub(crate) catalogue: Vec<(u64, Arc<Node>)>,
    pub(crate) problems: Problems,
    /// Keys below a damaged node that could not be read, by the node's address.
    unread: HashMap<u64, RangeSet>,
}

/// A pointer's target.
struct Visit {
    seen: Seen,
    /// Whether the node is the one that the pointer means. If not, whatever the pointer did mean is
    /// unread.
    is_meant: bool,
}

/// The result of a walk through a tree.
#[derive(Debug, Default)]
pub(crate) struct TreeHealth {
    /// The whole tree is as it should be.
    pub(crate) is_healthy: bool,
    /// Keys whose entries could not be read.
    pub(crate) unread: RangeSet,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(geometry: Geometry, generation: u64, source: &'a mut dyn Source) -> Self {
        Self {
            geometry,
            generation,
            source,
            seen: HashMap::new(),
            data: RangeSet::default(),
            shares: Shares::default(),
            references: 0,
            extents: 0,
            records: Vec::new(),
            catalogue: Vec::new(),
            problems: Problems::default(),
            unread: HashMap::new(),
        }
    }

    /// Walks the catalogue, and gathers its records. Returns the numbers of volumes whose records,
    /// if there are any, could not be read.
    pub(crate) fn catalogue(&mut self, root: Option<Root>) -> RangeSet {
        let Some(root) = root else { return RangeSet::default() };
        let visit = self.visit(root.pointer, Kind::Catalogue, root.level, self.generation);
        self.unread_of(root.pointer.address, &visit, (0, u64::MAX))
    }

    /// Walks a volume's tree.
    pub(crate) fn volume(&mut self, volume: &Record) -> TreeHealth {
        let visit = volume.root.map(|root| {
            let visit = self.visit(root.pointer, Kind::Extents, root.level, self.generation);
            let unread = self.unread_of(root.pointer.address, &visit, (0, u64::MAX));
            (visit.seen, unread)
        });
        let (seen, unread) =
            visit.map_or((None, RangeSet::default()), |(seen, unread)| (Some(seen), unread));
        let is_healthy = !seen.is_some_and(|seen| seen.damaged) && self.record_agrees(volume, seen);
        TreeHealth { is_healthy, unread }
    }

    /// Whether the record says of the tree what the tree is.
    fn record_agrees(&mut self, volume: &Record, seen: Option<Seen>) -> bool {
        let (extents, blocks, end) =
            seen.map_or((0, 0, 0), |seen| (seen.extents, seen.blocks, seen.end));
        let place = Place::Volume(VolumeId(volume.id));
        if end > volume.blocks {
            self.problems.add(
                place,
                format!("it has {} blocks, and blocks up to {end} are mapped", volume.blocks),
            );
            return false;
        }
        if (extents, blocks) != (volume.extents, volume.allocated_blocks) {
            let (has_extents, has_blocks) = (volume.extents, volume.allocated_blocks);
            let what = format!(
                "it has {extents} extents of {blocks} blocks, not {has_extents} of {has_blocks}"
            );
            self.problems.add(place, what);
            return false;
        }
        true
    }

    /// Data blocks that are not one volume's alone, after the walk: more than one extent refers to
    /// them, or they are below a node that more than one pointer leads to. Only subtrees below such
    /// nodes are read once more.
    pub(crate) fn shared_data(&mut self) -> u64 {
        let mut shared = RangeSet::default();
        for (first, count, _) in self.shares.iter() {
            shared.cover(first, count);
        }
        let nodes =
            self.seen.iter().filter(|(_, seen)| seen.references > 1 && seen.kind == Kind::Extents);
        let mut left: Vec<(Pointer, u8)> = nodes
            .map(|(address, seen)| {
                (Pointer { address: *address, checksum: seen.checksum.unwrap_or(0) }, seen.level)
            })
            .collect();
        let mut visited = HashSet::new();
        while let Some((pointer, level)) = left.pop() {
            if !visited.insert(pointer.address) {
                continue;
            }
            let Ok((node, _)) = self.source.node(pointer, Kind::Extents, level) else { continue };
            node.body
                .entries()
                .iter()
                .for_each(|entry| drop(shared.cover(entry.physical, entry.count)));
            left.extend(
                node.body.children().iter().map(|child| (child.pointer, level.saturating_sub(1))),
            );
        }
        shared.blocks()
    }

    /// The nodes that lie where data does, in order.
    pub(crate) fn conflicts(&mut self) -> Vec<u64> {
        let count = self.geometry.node_blocks();
        let mut twice: Vec<u64> = self
            .seen
            .keys()
            .copied()
            .filter(|address| self.data.overlaps(*address, count))
            .collect();
        twice.sort_unstable();
        for address in &twice {
            self.problems.add(Place::Node(*address), "an extent says that there is data");
        }
        twice
    }

    /// The keys in `first..end`, which a pointer leads to, that could not be read.
    fn unread_of(&self, address: u64, visit: &Visit, (first, end): (u64, u64)) -> RangeSet {
        let mut unread = RangeSet::default();
        let count = end.saturating_sub(first);
        if !visit.is_meant {
            unread.insert(first, count);
        } else if let Some(below) = self.unread.get(&address) {
            below.inside(first, count).for_each(|(first, count)| {
                unread.insert(first, count);
            });
        }
        unread
    }

    fn visit(&mut self, pointer: Pointer, kind: Kind, level: u8, newest: u64) -> Visit {
        let address = pointer.address;
        if let Some(seen) = self.seen.get_mut(&address) {
            seen.references = seen.references.saturating_add(1);
            let mut seen = *seen;
            let another = seen.checksum.is_some_and(|checksum| checksum != pointer.checksum);
            let is_meant =
                kind != Kind::Catalogue && seen.kind == kind && seen.level == level && !another;
            if !is_meant && seen.is_read {
                self.problems.add(Place::Node(address), "two pointers to it do not agree");
                seen.damaged = true;
            }
            return self.not_newer(
                Visit { seen, is_meant: is_meant && seen.is_read },
                address,
                newest,
            );
        }
        let mut seen = Seen {
            checksum: None,
            kind,
            level,
            generation: 0,
            first: 0,
            end: 0,
            references: 1,
            extents: 0,
            blocks: 0,
            is_read: false,
            damaged: true,
        };
        match self.source.node(pointer, kind, level) {
            Ok((node, compared)) => {
                seen.checksum = compared.then_some(pointer.checksum);
                (seen.is_read, seen.damaged) = (true, false);
                self.look_at(address, &node, &mut seen);
                if kind == Kind::Catalogue {
                    self.catalogue.push((address, node));
                }
            }
            Err(TreeError::Damaged { what, .. }) => self.problems.add(Place::Node(address), what),
            Err(TreeError::Io(error)) => {
                self.problems.add(Place::Node(address), format!("it cannot be read: {error}"))
            }
            Err(TreeError::NoSpace) => {}
        }
        self.seen.insert(address, seen);
        self.not_newer(Visit { seen, is_meant: seen.is_read }, address, newest)
    }

    /// A node is never newer than what refers to it: that had to be written with it.
    fn not_newer(&mut self, mut visit: Visit, address: u64, newest: u64) -> Visit {
        if visit.is_meant && visit.seen.generation > newest {
            let what = format!(
                "it is of generation {}, and what refers to it of {newest}",
                visit.seen.generation
            );
            self.problems.add(Place::Node(address), what);
            visit.seen.damaged = true;
            visit.is_meant = false;
        }
        visit
    }

    fn look_at(&mut self, address: u64, node: &Node, seen: &mut Seen) {
        seen.generation = node.generation;
        seen.first = node.body.first_key().unwrap_or(0);
        if let crate::node::Body::Records(records) = &node.body {
            seen.end = records.last().map_or(0, |record| record.id.saturating_add(1));
            self.records.extend_from_slice(records);
        }
        for entry in node.body.entries() {
            seen.end = entry.end();
            seen.extents = seen.extents.saturating_add(1);
            seen.blocks = seen.blocks.saturating_add(entry.count);
            self.extents = self.extents.saturating_add(1);
            self.references = self.references.saturating_add(entry.count);
            for (first, count) in self.data.cover(entry.physical, entry.count) {
                self.shares.add(first, count);
            }
        }
        let children = node.body.children();
        for (index, child) in children.iter().enumerate() {
            let upper = children.get(index.saturating_add(1)).map_or(u64::MAX, |next| next.key);
            if seen.end > child.key {
                self.problems.add(
                    Place::Node(address),
                    format!("what is in front of key {} overlaps it", child.key),
                );
                seen.damaged = true;
            }
            let mut visit =
                self.visit(child.pointer, node.kind, node.level.saturating_sub(1), node.generation);
            let below = visit.seen;
            if visit.is_meant && below.first != child.key {
                let what = format!(
                    "its child at block {} begins at {}, not {}",
                    child.pointer.address, below.first, child.key
                );
                self.problems.add(Place::Node(address), what);
                seen.damaged = true;
                visit.is_meant = false;
            }
            for (first, count) in
                self.unread_of(child.pointer.address, &visit, (child.key, upper)).iter()
            {
                self.unread.entry(address).or_default().cover(first, count);
            }
            seen.damaged |= below.damaged || !visit.is_meant;
            seen.end = seen.end.max(below.end);
            seen.extents = seen.extents.saturating_add(below.extents);
            seen.blocks = seen.blocks.saturating_add(below.blocks);
        }
    }
}
