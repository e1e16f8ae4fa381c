//! Nodes in memory: changed ones, ones being written, and some of the others.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use crate::disk::Disk;
use crate::geometry::{Geometry, is_whole};
use crate::limits::NODE_BYTES;
use crate::lingering::Lingering;
use crate::node::{Kind, Node, Pointer};

/// Why a tree cannot be read or changed.
#[derive(Debug)]
pub(crate) enum TreeError {
    /// There is no room for nodes.
    NoSpace,
    /// A read of the disk failed.
    Io(io::Error),
    /// A node fails its checks.
    Damaged { block: u64, what: String },
}

/// The nodes of all trees, by address.
#[derive(Debug)]
pub(crate) struct Nodes {
    geometry: Geometry,
    /// Changed in this transaction: not on the disk.
    dirty: HashMap<u64, Arc<Node>>,
    /// Of the transaction that is being committed: perhaps on the disk.
    writing: HashMap<u64, Arc<Node>>,
    /// The catalogue: on the disk, and always in memory.
    catalogue: HashMap<u64, Arc<Node>>,
    /// Others that are on the disk.
    cache: Cache,
    /// References to a node, where it is more than one.
    shared: HashMap<u64, u64>,
    /// Nodes that other trees still refer to on the disk.
    lingering: Lingering<HashSet<u64>>,
}

impl Nodes {
    pub(crate) fn new(geometry: Geometry, cache_nodes: usize) -> Self {
        Self {
            geometry,
            dirty: HashMap::new(),
            writing: HashMap::new(),
            catalogue: HashMap::new(),
            cache: Cache::new(cache_nodes),
            shared: HashMap::new(),
            lingering: Lingering::default(),
        }
    }

    // --- Reading ---

    /// The node at this address.
    pub(crate) fn get(
        &mut self,
        disk: &mut dyn Disk,
        pointer: Pointer,
        kind: Kind,
        level: u8,
    ) -> Result<Arc<Node>, TreeError> {
        if let Some(node) = self.in_memory(pointer.address) {
            // The pointer of a parent that was checked says the same.
            return if node.kind == kind && node.level == level {
                Ok(node)
            } else {
                Err(TreeError::Damaged {
                    block: pointer.address,
                    what: "it is of another tree".to_owned(),
                })
            };
        }
        let node = Arc::new(read_node(disk, &self.geometry, pointer, kind, level)?);
        self.cache.insert(pointer.address, Arc::clone(&node));
        Ok(node)
    }

    fn in_memory(&mut self, address: u64) -> Option<Arc<Node>> {
        let held = self.dirty.get(&address).or_else(|| self.writing.get(&address));
        held.or_else(|| self.catalogue.get(&address)).cloned().or_else(|| self.cache.get(address))
    }

    /// The node there if its newest form is not, or not surely, on the disk.
    pub(crate) fn unwritten(&self, address: u64) -> Option<Arc<Node>> {
        self.dirty.get(&address).or_else(|| self.writing.get(&address)).cloned()
    }

    // --- Changing ---

    pub(crate) fn is_dirty(&self, address: u64) -> bool {
        self.dirty.contains_key(&address)
    }

    /// A node of this transaction, to change it; `None` if it is of an earlier one.
    pub(crate) fn change(&mut self, address: u64) -> Option<&mut Node> {
        self.dirty.get_mut(&address).map(Arc::make_mut)
    }

    /// A node of this transaction, taken out to be changed and put back.
    pub(crate) fn take(&mut self, address: u64) -> Option<Node> {
        self.dirty.remove(&address).map(Arc::unwrap_or_clone)
    }

    pub(crate) fn put(&mut self, address: u64, node: Node) {
        self.dirty.insert(address, Arc::new(node));
    }

    /// Forgets a node that no tree refers to. Returns whether it was made in this transaction.
    pub(crate) fn forget(&mut self, address: u64) -> bool {
        self.writing.remove(&address);
        self.catalogue.remove(&address);
        self.cache.remove(address);
        self.dirty.remove(&address).is_some()
    }

    // --- References ---

    /// How many pointers and records refer to the node.
    pub(crate) fn references(&self, address: u64) -> u64 {
        self.shared.get(&address).copied().unwrap_or(1)
    }

    pub(crate) fn is_shared(&self, address: u64) -> bool {
        self.shared.contains_key(&address)
    }

    pub(crate) fn refer(&mut self, address: u64) {
        self.set_references(address, self.references(address).saturating_add(1));
    }

    pub(crate) fn drop_reference(&mut self, address: u64) {
        self.set_references(address, self.references(address).saturating_sub(1));
    }

    /// Gives up a reference, and with it, for good, all that it led to.
    pub(crate) fn abandon(&mut self, address: u64) {
        self.drop_reference(address);
        // Also if it was made in this transaction: its children were not, and the tree that keeps
        // it may be another than the tree that had it on the disk.
        self.linger(address);
    }

    /// Counts the node, and everything below it, as shared on the disk, also if it is not in
    /// memory, until this transaction is durable.
    pub(crate) fn linger(&mut self, address: u64) {
        self.lingering.add(address);
    }

    /// Ends the epoch after this generation.
    pub(crate) fn settled(&mut self, generation: u64) {
        self.lingering.settled(generation);
    }

    pub(crate) fn lingers(&self, address: u64) -> bool {
        self.lingering.has(address)
    }

    pub(crate) fn set_references(&mut self, address: u64, references: u64) {
        if references > 1 {
            self.shared.insert(address, references);
        } else {
            self.shared.remove(&address);
        }
    }

    pub(crate) fn shared(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.shared.iter().map(|(address, references)| (*address, *references))
    }

    // --- Transactions ---

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The addresses of the dirty nodes of a kind, leaves first.
    pub(crate) fn dirty_by_level(&self, kind: Kind) -> Vec<u64> {
        let of_kind = self.dirty.iter().filter(|(_, node)| node.kind == kind);
        let mut nodes: Vec<(u8, u64)> =
            of_kind.map(|(address, node)| (node.level, *address)).collect();
        nodes.sort_unstable();
        nodes.into_iter().map(|(_, address)| address).collect()
    }

    /// Begins a new transaction: dirty nodes are being written.
    pub(crate) fn seal(&mut self) {
        self.writing.extend(self.dirty.drain());
        self.lingering.seal();
    }

    /// Marks the nodes being written as durable.
    pub(crate) fn written(&mut self, generation: u64) {
        self.lingering.durable(generation);
        for (address, node) in self.writing.drain() {
            if node.kind == Kind::Catalogue {
                self.catalogue.insert(address, node);
            } else {
                self.cache.insert(address, node);
            }
        }
    }

    /// A node of the catalogue that was read when the store was opened.
    pub(crate) fn keep(&mut self, address: u64, node: Arc<Node>) {
        self.catalogue.insert(address, node);
    }

    /// Clean extent nodes in memory.
    pub(crate) fn cached(&self) -> usize {
        self.cache.nodes.len()
    }
}

/// Reads a node and checks it. After a wrong read it is read again: not every error is on the
/// medium.
pub(crate) fn read_node(
    disk: &mut dyn Disk,
    geometry: &Geometry,
    pointer: Pointer,
    kind: Kind,
    level: u8,
) -> Result<Node, TreeError> {
    let damaged = |what: String| TreeError::Damaged { block: pointer.address, what };
    if !geometry.node_fits(pointer.address) {
        return Err(damaged("no node can be there".to_owned()));
    }
    let mut bytes = vec![0; NODE_BYTES];
    for _ in 0..2 {
        disk.read(geometry.offset_bytes(pointer.address), &mut bytes).map_err(TreeError::Io)?;
        if is_whole(&bytes, pointer.checksum) {
            return Node::decode(&bytes, pointer.address, kind, level, geometry).map_err(damaged);
        }
    }
    Err(damaged("its checksum is wrong".to_owned()))
}

/// The nodes used last.
#[derive(Debug)]
struct Cache {
    nodes: HashMap<u64, (u64, Arc<Node>)>,
    /// By when they were used: their addresses.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    capacity: usize,
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self { nodes: HashMap::new(), by_use: BTreeMap::new(), uses: 0, capacity: capacity.max(1) }
    }

    fn get(&mut self, address: u64) -> Option<Arc<Node>> {
        let (used, node) = self.nodes.get_mut(&address)?;
        self.by_use.remove(used);
        self.uses = self.uses.wrapping_add(1);
        *used = self.uses;
        self.by_use.insert(self.uses, address);
        Some(Arc::clone(node))
    }

    fn insert(&mut self, address: u64, node: Arc<Node>) {
        self.remove(address);
        while self.nodes.len() >= self.capacity {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            self.nodes.remove(&oldest);
        }
        self.uses = self.uses.wrapping_add(1);
        self.nodes.insert(address, (self.uses, node));
        self.by_use.insert(self.uses, address);
    }

    fn remove(&mut self, address: u64) {
        if let Some((used, _)) = self.nodes.remove(&address) {
            self.by_use.remove(&used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Body, Entry};

    fn node(first: u64) -> Arc<Node> {
        let body = Body::Extents(vec![Entry { first, count: 1, physical: 100 }]);
        Arc::new(Node { kind: Kind::Extents, owner: 1, generation: 1, level: 0, body })
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_what_is_used() {
        let mut cache = Cache::new(3);
        for address in 0..3 {
            cache.insert(address, node(address));
        }
        assert_eq!(cache.get(0), Some(node(0)));
        cache.insert(3, node(3));
        assert_eq!((cache.get(1), cache.get(0)), (None, Some(node(0))));
        cache.insert(0, node(9));
        cache.remove(3);
        assert_eq!((cache.nodes.len(), cache.by_use.len()), (2, 2));
        assert_eq!(cache.get(0), Some(node(9)));
    }

    #[test]
    fn a_node_goes_from_dirty_to_written_and_is_always_found() {
        let geometry = Geometry { block_bytes: 4096, total_blocks: 1000, tag: 0 };
        let mut nodes = Nodes::new(geometry, 4);
        nodes.put(7, Arc::unwrap_or_clone(node(7)));
        for step in 0..3 {
            assert_eq!(nodes.in_memory(7), Some(node(7)), "step {step}");
            assert_eq!((nodes.is_dirty(7), nodes.unwritten(7).is_some()), (step == 0, step < 2));
            if step == 0 { nodes.seal() } else { nodes.written(1) }
        }
        assert!(!nodes.forget(7) && nodes.in_memory(7).is_none());
    }

    #[test]
    fn references_are_kept_where_there_are_several() {
        let mut nodes = Nodes::new(Geometry { block_bytes: 4096, total_blocks: 1000, tag: 0 }, 4);
        nodes.refer(5);
        nodes.refer(5);
        assert_eq!((nodes.references(5), nodes.references(6)), (3, 1));
        nodes.drop_reference(5);
        nodes.drop_reference(5);
        assert!(!nodes.is_shared(5) && nodes.shared().count() == 0);
    }
}
