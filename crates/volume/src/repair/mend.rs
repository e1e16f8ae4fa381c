//! Trees without their damaged parts.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use super::Loss;
use super::rivals::{Claims, Rivals};
use crate::error::{Damage, Place, RepairError};
use crate::free::FreeSpace;
use crate::geometry::{Geometry, checksum};
use crate::info::VolumeId;
use crate::node::{Body, Child, Entry, Kind, Node, Pointer, Root};
use crate::nodes::TreeError;
use crate::open::FromDisk;
use crate::ranges::RangeSet;
use crate::record::Record;
use crate::walk::Source;

/// Addresses from here on are those of nodes that have no place yet.
const UNPLACED: u64 = 1 << 62;

/// Nodes of the new generation, children in front of their parents.
#[derive(Default)]
pub(super) struct Fresh {
    nodes: Vec<Node>,
}

impl Fresh {
    pub(super) fn add(&mut self, node: Node) -> Pointer {
        self.nodes.push(node);
        Pointer {
            address: UNPLACED.saturating_add(self.nodes.len() as u64).saturating_sub(1),
            checksum: 0,
        }
    }

    /// Assigns a place to every node, and returns the blocks to be written there.
    pub(super) fn settle(
        self,
        geometry: &Geometry,
        mut free: FreeSpace,
        catalogue: &mut Option<Root>,
    ) -> Result<Vec<(u64, Vec<u8>)>, RepairError> {
        let wanted = self.nodes.len();
        let mut placed: Vec<Pointer> = Vec::with_capacity(wanted);
        let mut written = Vec::with_capacity(wanted);
        for mut node in self.nodes {
            match &mut node.body {
                Body::Inner(children) => {
                    children.iter_mut().for_each(|child| place(&placed, &mut child.pointer))
                }
                Body::Records(records) => {
                    let roots = records.iter_mut().filter_map(|record| record.root.as_mut());
                    roots.for_each(|root| place(&placed, &mut root.pointer));
                }
                Body::Extents(_) => {}
            }
            let address = free.highest_slot().ok_or(RepairError::NoSpace { nodes: wanted })?;
            free.remove(address, geometry.node_blocks());
            let bytes = node.encode(address, geometry);
            placed.push(Pointer { address, checksum: checksum(&bytes) });
            written.push((address, bytes));
        }
        if let Some(root) = catalogue {
            place(&placed, &mut root.pointer);
        }
        Ok(written)
    }
}

fn place(placed: &[Pointer], pointer: &mut Pointer) {
    let index = pointer.address.checked_sub(UNPLACED).and_then(|index| usize::try_from(index).ok());
    if let Some(place) = index.and_then(|index| placed.get(index)) {
        *pointer = *place;
    }
}

/// The readable parts that a volume has to lose.
#[derive(Clone, Debug, Default)]
pub(super) struct Cut {
    /// The volume, 0 for all without a cut.
    pub(super) volume: u64,
    /// Its virtual blocks from here on.
    pub(super) from: Option<u64>,
    /// Blocks of the store that another one has as well.
    pub(super) blocks: RangeSet,
}

/// Virtual blocks that are left out.
#[derive(Clone, Debug)]
struct Lost {
    first: u64,
    end: u64,
    why: Damage,
}

/// The result for a node and everything below it.
#[derive(Clone, Debug)]
struct Mended {
    checksum: u64,
    level: u8,
    generation: u64,
    /// As it was: first key, and end of the last extent.
    first: u64,
    end: u64,
    /// As it is now, with its first key, if anything of it is left.
    kept: Option<(u64, Pointer)>,
    extents: u64,
    blocks: u64,
    lost: Rc<Vec<Lost>>,
}

/// The result for a volume's tree.
#[derive(Debug)]
pub(super) struct Outcome {
    root: Option<Root>,
    extents: u64,
    blocks: u64,
    lost: Vec<Lost>,
}

impl Outcome {
    pub(super) fn losses(&self, record: &Record) -> Vec<Loss> {
        let loss = |lost: &Lost| {
            let end =
                if lost.first < record.blocks { lost.end.min(record.blocks) } else { lost.end };
            Loss::Blocks {
                volume: VolumeId(record.id),
                name: record.name.clone(),
                first: lost.first,
                count: end.saturating_sub(lost.first),
                why: lost.why.clone(),
            }
        };
        self.lost.iter().map(loss).collect()
    }

    /// Makes the record say what the tree is now.
    pub(super) fn apply(self, record: &mut Record) {
        (record.root, record.extents, record.allocated_blocks) =
            (self.root, self.extents, self.blocks);
    }
}

/// Reads trees, and makes new nodes where something of them is left out. A node is mended once,
/// however many trees it is in, and stays shared.
pub(super) struct Mender<'a, 'b> {
    source: &'a mut FromDisk<'b>,
    geometry: Geometry,
    /// The newest one that a node may have.
    generation: u64,
    /// By address, and volume if it has a cut.
    mended: HashMap<(u64, u64), Mended>,
    fresh: Fresh,
    /// Nodes of the catalogue.
    catalogue: BTreeSet<u64>,
    claims: Claims,
    /// Blocks that the generation on the disk uses.
    used: RangeSet,
}

impl<'a, 'b> Mender<'a, 'b> {
    pub(super) fn new(
        source: &'a mut FromDisk<'b>,
        geometry: Geometry,
        generation: u64,
        catalogue: BTreeSet<u64>,
    ) -> Self {
        let mut used = RangeSet::default();
        catalogue.iter().for_each(|address| drop(used.cover(*address, geometry.node_blocks())));
        Self {
            source,
            geometry,
            generation,
            mended: HashMap::new(),
            fresh: Fresh::default(),
            catalogue,
            claims: Claims::default(),
            used,
        }
    }

    pub(super) fn into_catalogue(self) -> BTreeSet<u64> {
        self.catalogue
    }

    /// Its nodes, and the blocks that none of them may be written to.
    pub(super) fn into_used(self, fresh: &mut Fresh) -> RangeSet {
        *fresh = self.fresh;
        self.used
    }

    /// Blocks that two volumes claim, after mending.
    pub(super) fn rivals(&mut self, records: &[Record], only_copies: bool) -> Vec<Rivals> {
        let blocks =
            self.claims.rivals(records, &self.catalogue, self.geometry.node_blocks(), only_copies);
        super::rivals::name(
            self.source,
            records,
            &self.catalogue,
            self.geometry.node_blocks(),
            &blocks,
        )
    }

    /// Mends the trees of all volumes.
    pub(super) fn all(&mut self, records: &[Record], cuts: &[Cut]) -> Vec<Outcome> {
        let whole = Cut::default();
        records
            .iter()
            .map(|record| {
                let cut = cuts.iter().find(|cut| cut.volume == record.id).unwrap_or(&whole);
                self.volume(record, cut)
            })
            .collect()
    }

    fn volume(&mut self, record: &Record, cut: &Cut) -> Outcome {
        let mut outcome = Outcome { root: None, extents: 0, blocks: 0, lost: Vec::new() };
        let Some(root) = record.root else { return outcome };
        let newest = self.generation;
        let mended = match self.node(record.id, root.pointer, root.level, newest, cut) {
            // Nothing can be behind the volume's end.
            Ok(mended) if mended.end > record.blocks && cut.from.is_none() => {
                let cut = Cut {
                    volume: record.id,
                    from: Some(record.blocks),
                    blocks: cut.blocks.clone(),
                };
                self.node(record.id, root.pointer, root.level, newest, &cut)
            }
            mended => mended,
        };
        match mended {
            Ok(mended) => {
                outcome.root = mended.kept.map(|(_, pointer)| Root { pointer, level: root.level });
                (outcome.extents, outcome.blocks) = (mended.extents, mended.blocks);
                outcome.lost = mended.lost.to_vec();
            }
            Err(why) => outcome.lost.push(Lost { first: 0, end: record.blocks, why }),
        }
        outcome
    }

    /// Mends the node of a pointer, or returns why the node does not fit the pointer.
    fn node(
        &mut self,
        volume: u64,
        pointer: Pointer,
        level: u8,
        newest: u64,
        cut: &Cut,
    ) -> Result<Mended, Damage> {
        let address = pointer.address;
        let damage = |what: String| Damage { place: Place::Node(address), what };
        self.used.cover(address, self.geometry.node_blocks());
        if cut.blocks.overlaps(address, self.geometry.node_blocks()) {
            return Err(damage(
                "another volume has this block as well, and it is given up".to_owned(),
            ));
        }
        let mended = match self.mended.get(&(address, cut.volume)) {
            Some(mended) if mended.checksum == pointer.checksum && mended.level == level => {
                mended.clone()
            }
            Some(_) => return Err(damage("two pointers to it do not agree".to_owned())),
            None => {
                if self.catalogue.contains(&address) {
                    return Err(damage("two pointers to it do not agree".to_owned()));
                }
                let node = match self.source.node(pointer, Kind::Extents, level) {
                    Ok((node, _)) => node,
                    Err(TreeError::Damaged { what, .. }) => return Err(damage(what)),
                    Err(TreeError::Io(error)) => {
                        return Err(damage(format!("it cannot be read: {error}")));
                    }
                    Err(TreeError::NoSpace) => return Err(damage("it cannot be read".to_owned())),
                };
                let mended = self.body(volume, pointer, &node, cut);
                self.mended.insert((address, cut.volume), mended.clone());
                mended
            }
        };
        self.claims.node(address, volume);
        if mended.generation > newest {
            let what = format!(
                "it is of generation {}, and what refers to it of {newest}",
                mended.generation
            );
            return Err(damage(what));
        }
        Ok(mended)
    }

    fn body(&mut self, volume: u64, pointer: Pointer, node: &Node, cut: &Cut) -> Mended {
        let mut mended = Mended {
            checksum: pointer.checksum,
            level: node.level,
            generation: node.generation,
            first: node.body.first_key().unwrap_or(0),
            end: 0,
            kept: None,
            extents: 0,
            blocks: 0,
            lost: Rc::default(),
        };
        let mut lost = Vec::new();
        let body = match &node.body {
            Body::Inner(children) => {
                Body::Inner(self.children(volume, (children, node), cut, &mut mended, &mut lost))
            }
            body => {
                Body::Extents(self.entries(volume, body.entries(), cut, &mut mended, &mut lost))
            }
        };
        mended.kept = match body.first_key() {
            None => None,
            Some(key) if body == node.body => Some((key, pointer)),
            Some(key) => {
                let generation = self.generation.saturating_add(1);
                let fresh = Node { generation, body, ..node.clone() };
                Some((key, self.fresh.add(fresh)))
            }
        };
        mended.lost = Rc::new(lost);
        mended
    }

    fn children(
        &mut self,
        volume: u64,
        (children, node): (&[Child], &Node),
        cut: &Cut,
        mended: &mut Mended,
        lost: &mut Vec<Lost>,
    ) -> Vec<Child> {
        let mut kept = Vec::new();
        for (index, child) in children.iter().enumerate() {
            let upper = children.get(index.saturating_add(1)).map_or(u64::MAX, |next| next.key);
            let address = child.pointer.address;
            let below = self.node(
                volume,
                child.pointer,
                node.level.saturating_sub(1),
                node.generation,
                cut,
            );
            let below = below.and_then(|below| {
                let damage = |what: String| Damage { place: Place::Node(address), what };
                if below.first != child.key {
                    return Err(damage(format!("it begins at {}, not {}", below.first, child.key)));
                }
                if mended.end > child.key || below.end > upper {
                    return Err(damage("what it maps overlaps its neighbour's".to_owned()));
                }
                Ok(below)
            });
            match below {
                Ok(below) => {
                    mended.end = below.end;
                    mended.extents = mended.extents.saturating_add(below.extents);
                    mended.blocks = mended.blocks.saturating_add(below.blocks);
                    // A subtree's loss at its end extends to the end of the subtree.
                    lost.extend(
                        below
                            .lost
                            .iter()
                            .map(|lost| Lost { end: lost.end.min(upper), ..lost.clone() }),
                    );
                    kept.extend(below.kept.map(|(key, pointer)| Child { key, pointer }));
                }
                Err(why) => lost.push(Lost { first: child.key, end: upper, why }),
            }
        }
        kept
    }

    fn entries(
        &mut self,
        volume: u64,
        entries: &[Entry],
        cut: &Cut,
        mended: &mut Mended,
        lost: &mut Vec<Lost>,
    ) -> Vec<Entry> {
        let mut kept = Vec::new();
        for entry in entries {
            self.used.cover(entry.physical, entry.count);
            mended.end = entry.end();
            let limit = cut.from.unwrap_or(u64::MAX);
            if let Some(behind) = entry.clip(limit, u64::MAX) {
                let why = Damage {
                    place: Place::Block(behind.physical),
                    what: "behind the volume's end".to_owned(),
                };
                lost.push(Lost { first: behind.first, end: behind.end(), why });
            }
            let Some(entry) = entry.clip(0, limit) else { continue };
            let mut at = entry.physical;
            let mut keep = |from: u64, end: u64| {
                let first = entry.first.saturating_add(from.saturating_sub(entry.physical));
                let count = end.saturating_sub(from);
                if count > 0 {
                    kept.push(Entry { first, count, physical: from });
                }
            };
            for (first, count) in cut.blocks.inside(entry.physical, entry.count) {
                keep(at, first);
                at = first.saturating_add(count);
                let virt = entry.first.saturating_add(first.saturating_sub(entry.physical));
                let what = "another has this block as well, and it is given up".to_owned();
                let why = Damage { place: Place::Block(first), what };
                lost.push(Lost { first: virt, end: virt.saturating_add(count), why });
            }
            keep(at, entry.physical_end());
        }
        // Cutting a hole into the only extent of a full leaf would need one more entry.
        let room = crate::node::ENTRIES;
        for entry in kept.split_off(room.min(kept.len())) {
            let what = "there is no room for its mapping next to what is given up".to_owned();
            lost.push(Lost {
                first: entry.first,
                end: entry.end(),
                why: Damage { place: Place::Block(entry.physical), what },
            });
        }
        for entry in &kept {
            self.claims.data(*entry, volume);
            mended.extents = mended.extents.saturating_add(1);
            mended.blocks = mended.blocks.saturating_add(entry.count);
        }
        kept
    }
}
