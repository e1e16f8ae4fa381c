//! NeSC's translation unit: extent trees, block walk, BTLB (thesis 5.2, 6.3).
//!
//! # Roles
//!
//! The *hypervisor's side* owns an [`ExtentTree`] per virtual function and is its only writer. The
//! *controller's side* owns a [`TranslationUnit`] per sidecore and reads the tree through its
//! [`TreeRoot`]. One [`NodeMemory`] holds the nodes of all trees; it is bounded and never moves.
//!
//! # Why readers need no lock
//!
//! An update copies the nodes from the leaf to the root and publishes the new root with one store.
//! The nodes that it replaces are [`Retired`], not freed: their owner frees them by *epoch-based
//! reclamation*, after every reader was between two walks. Until then a walk that began before the
//! update continues in the old tree, which is still whole.
//!
//! # Guarantees of the tree to a reader
//!
//! Nothing. For all contents of the nodes, a walk ends, touches only nodes of the memory, and
//! yields pieces that tile the request. Where the tree has no mapping or a corrupt one, the piece
//! is [`Mapping::Pruned`], and the hypervisor is asked.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod arithmetic;
mod btlb;
mod entry;
mod last;
mod memory;
mod node;
mod range;
mod root;
mod sketch;
mod stats;
mod tree;
mod unit;
mod walk;

pub use last::{LastBytes, LastExtent};
pub use memory::{CHUNK_NODES, NodeMemory, OutOfNodes, Pin, Retired};
pub use node::{EXTENT_POINTERS, NODE_BYTES, NODE_POINTERS, Node};
pub use range::{BlockRange, Extent, MAX_PHYSICAL_BLOCKS, Mapping, Piece};
pub use root::TreeRoot;
pub use stats::{TranslationCounts, TranslationStats};
pub use tree::{BuildError, Content, ExtentTree, SetError, Shape, TreeFault};
pub use unit::{Coverage, DEFAULT_BTLB_ENTRIES, FunctionId, TranslationUnit};
