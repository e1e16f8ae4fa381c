//! Trees that are changed by shadowing: the catalogue, and the extents of each volume.
//!
//! # Shadowing
//!
//! Nodes on the disk are never overwritten. A node to be changed is first made *writable*:
//!
//! * made in this transaction, and referred to once: it is changed in place;
//! * on the disk, and referred to once: it moves to a new address, and the old one is pending;
//! * referred to more than once, by a snapshot for instance: it is copied, and whatever it refers
//!   to, nodes or data, has one reference more.
//!
//! A node's parent is made writable before it, so sharing is found at the top and carried down, a
//! node at a time, as far as a change goes. That is why a snapshot is one more reference to a root,
//! and no more (O. Rodeh, "B-trees, shadowing, and clones", ACM Transactions on Storage 3(4),
//! 2008).
//!
//! # The shape
//!
//! All leaves are at the same level. The key of a child is the first key in it, exactly; so the
//! extents in front of a key are always in the child that the key leads to, and a wrong child is
//! noticed. Nodes are split when they are full, and take a neighbour in when a change left them
//! nearly empty, if that neighbour can be read. No node is empty: an empty tree has no root.
//!
//! # All or nothing
//!
//! A change is prepared first: paths are made writable, everything that it will drop is read, room
//! for splits is taken. Each of those steps may fail, and leaves a tree with the same contents. The
//! change itself is then done in memory and cannot fail.

mod drop;
mod look;
mod replace;
mod splice;

pub(crate) use look::Found;
pub(crate) use replace::MAX_ITEMS;
pub(crate) use splice::Item;

use std::collections::HashMap;
use std::io;

use crate::allocator::{Allocator, Need};
use crate::disk::Disk;
use crate::node::{Body, Child, Kind, Node, Pointer, Root};
use crate::nodes::{Nodes, TreeError};
use crate::ranges::RangeSet;

/// All trees, and the blocks that they lie on.
#[derive(Debug)]
pub(crate) struct Forest {
    pub(crate) nodes: Nodes,
    pub(crate) allocator: Allocator,
    /// The transaction that changes belong to.
    pub(crate) generation: u64,
    /// Virtual blocks, by volume, that something unread may share: see [`doubt`](crate::doubt).
    pub(crate) doubts: HashMap<u64, RangeSet>,
}

/// A tree of the forest, by its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) kind: Kind,
    /// The volume's number, 0 for the catalogue.
    pub(crate) owner: u64,
    pub(crate) root: Option<Root>,
}

/// The change of a tree's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) more_extents: u64,
    pub(crate) less_extents: u64,
    pub(crate) more_blocks: u64,
    pub(crate) less_blocks: u64,
}

impl Delta {
    pub(crate) fn extents(&self, before: u64) -> u64 {
        before.saturating_add(self.more_extents).saturating_sub(self.less_extents)
    }

    pub(crate) fn blocks(&self, before: u64) -> u64 {
        before.saturating_add(self.more_blocks).saturating_sub(self.less_blocks)
    }
}

impl Forest {
    /// Makes the node writable, and returns where it is then.
    fn writable(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        pointer: Pointer,
        level: u8,
        need: Need,
    ) -> Result<Pointer, TreeError> {
        let shared = self.nodes.is_shared(pointer.address);
        if !shared && self.nodes.is_dirty(pointer.address) {
            return Ok(pointer);
        }
        let node = self.nodes.get(disk, pointer, tree.kind, level)?;
        let address = self.one_node(need)?;
        if shared {
            self.nodes.drop_reference(pointer.address);
            self.refer_to_all_in(&node);
        } else {
            self.hand_on(pointer.address, &node);
            let fresh = self.nodes.forget(pointer.address);
            self.allocator.free_node(pointer.address, fresh);
        }
        let shadow = Node { generation: self.generation, owner: tree.owner, ..Node::clone(&node) };
        self.nodes.put(address, shadow);
        Ok(Pointer { address, checksum: 0 })
    }

    /// Adds a reference to everything that the node refers to.
    fn refer_to_all_in(&mut self, node: &Node) {
        for child in node.body.children() {
            self.nodes.refer(child.pointer.address);
        }
        for entry in node.body.entries() {
            self.allocator.refer(entry.physical, entry.count);
        }
    }

    /// Replaces a node. If the node lingers, its children and data linger from now on.
    fn hand_on(&mut self, address: u64, node: &Node) {
        if !self.nodes.lingers(address) {
            return;
        }
        for child in node.body.children() {
            self.nodes.linger(child.pointer.address);
        }
        for entry in node.body.entries() {
            self.allocator.linger(entry.physical, entry.count);
        }
    }

    fn one_node(&mut self, need: Need) -> Result<u64, TreeError> {
        self.allocator
            .nodes(1, need)
            .and_then(|nodes| nodes.first().copied())
            .ok_or(TreeError::NoSpace)
    }

    /// Makes a child of a writable node writable.
    fn writable_child(
        &mut self,
        disk: &mut dyn Disk,
        tree: &Tree,
        parent: (u64, u8),
        index: usize,
        need: Need,
    ) -> Result<Pointer, TreeError> {
        let (address, level) = parent;
        let child = self.child(address, index)?;
        let pointer = self.writable(disk, tree, child.pointer, level.saturating_sub(1), need)?;
        if let Some(Node { body: Body::Inner(children), .. }) = self.nodes.change(address)
            && let Some(child) = children.get_mut(index)
        {
            child.pointer = pointer;
        }
        Ok(pointer)
    }

    /// A child of a writable node.
    fn child(&mut self, address: u64, index: usize) -> Result<Child, TreeError> {
        let child =
            self.nodes.change(address).and_then(|node| node.body.children().get(index).copied());
        child.ok_or_else(|| TreeError::Damaged {
            block: address,
            what: "a child of it is gone".to_owned(),
        })
    }
}

/// Stands in where nothing is read: the catalogue is in memory.
pub(crate) struct NoDisk;

impl Disk for NoDisk {
    fn size_bytes(&self) -> u64 {
        0
    }

    fn read(&mut self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("the catalogue is not in memory"))
    }

    fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("nothing is written here"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
