//! The memory for the nodes of all trees.

use std::fmt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::node::{Node, NodeId};

/// Nodes in a chunk, the unit of growth: as many as a huge page holds.
pub const CHUNK_NODES: usize = 512;

/// The size and alignment of a chunk permit the kernel to use a huge page.
#[repr(C, align(2_097_152))]
struct Chunk([Node; CHUNK_NODES]);

/// The stack on which a chunk is built, see [`Chunk::boxed`].
const CHUNK_STACK_BYTES: usize = 16 << 20;

impl Chunk {
    /// A chunk of zeros on the heap, `None` if the system is short of it.
    ///
    /// Safe Rust builds a value on the stack before it moves it to the heap, unless the optimiser
    /// sees through it, and callers' stacks are as small as a chunk: hence a thread with a larger
    /// one.
    fn boxed() -> Option<Box<Self>> {
        std::thread::Builder::new()
            .name("node-chunk".into())
            .stack_size(CHUNK_STACK_BYTES)
            .spawn(|| Box::new(Self([const { Node::new() }; CHUNK_NODES])))
            .ok()?
            .join()
            .ok()
    }
}

/// All nodes that the memory may have are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is left for extent tree nodes")]
pub struct OutOfNodes;

/// Nodes that no tree refers to, but a reader may still walk in. Pass them to [`NodeMemory::free`]
/// after their epoch; nodes dropped instead are lost until the memory itself is dropped.
#[derive(Debug, Default)]
#[must_use = "retired nodes are to be freed after their epoch"]
pub struct Retired(pub(crate) Vec<NodeId>);

impl Retired {
    /// Whether there are no nodes to free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes over the nodes of `other`.
    pub fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

/// Called with the nodes of each fresh chunk: to lock them into memory and to ask for a huge page.
pub type Pin = Box<dyn Fn(&[Node]) + Send + Sync>;

#[derive(Debug, Default)]
struct Pool {
    free: Vec<NodeId>,
    used: usize,
    /// The nodes in use, by index: a node that is freed twice would become part of two trees.
    live: Vec<bool>,
}

/// A bounded memory of nodes that never move (thesis 5.2: the trees always are in memory, pinned).
///
/// The memory grows by chunks and never shrinks: freed nodes are used again. Taking and freeing
/// nodes locks, reading them does not.
pub struct NodeMemory {
    chunks: Box<[OnceLock<Box<Chunk>>]>,
    max_nodes: usize,
    pool: Mutex<Pool>,
    pin: Option<Pin>,
}

impl NodeMemory {
    /// A memory of at most `max_nodes` nodes. Chunks are allocated when they are needed.
    #[must_use]
    pub fn new(max_nodes: usize) -> Self {
        Self::make(max_nodes, None)
    }

    /// As [`new`](Self::new), and calls `pin` once for each fresh chunk, before the first of its
    /// nodes is used. A chunk is 2 MiB large and aligned to it.
    #[must_use]
    pub fn with_pin(max_nodes: usize, pin: Pin) -> Self {
        Self::make(max_nodes, Some(pin))
    }

    fn make(max_nodes: usize, pin: Option<Pin>) -> Self {
        // A node's number has 32 bits.
        let max_nodes = max_nodes.min(u32::MAX as usize);
        let chunks = (0..max_nodes.div_ceil(CHUNK_NODES)).map(|_| OnceLock::new()).collect();
        Self { chunks, max_nodes, pool: Mutex::default(), pin }
    }

    /// The limit of nodes.
    #[must_use]
    pub fn max_nodes(&self) -> usize {
        self.max_nodes
    }

    /// The number of nodes in use, retired ones included.
    #[must_use]
    pub fn used_nodes(&self) -> usize {
        self.pool().used
    }

    /// Frees retired nodes. The caller guarantees that no reader walks in them: each reader was
    /// between two walks since they were retired.
    pub fn free(&self, retired: Retired) {
        let mut pool = self.pool();
        for id in retired.0 {
            let live = pool.live.get_mut(id.index()).is_some_and(std::mem::take);
            debug_assert!(live, "node {id:?} is freed, and not in use");
            if !live {
                continue;
            }
            // Makes the walk of a reader that is still here, against the guarantee, find garbage.
            #[cfg(debug_assertions)]
            if let Some(node) = self.node(id) {
                node.scribble(|| 0xdead_beef_dead_beef);
            }
            pool.free.push(id);
            pool.used = pool.used.saturating_sub(1);
        }
    }

    /// A node for the writer, with the words of its last use.
    pub(crate) fn take(&self) -> Result<NodeId, OutOfNodes> {
        let mut pool = self.pool();
        let id = match pool.free.pop() {
            Some(id) => id,
            None => {
                // Nodes from this index on were never used.
                let id = self.fresh(pool.live.len())?;
                pool.live.push(false);
                id
            }
        };
        pool.used = pool.used.saturating_add(1);
        if let Some(live) = pool.live.get_mut(id.index()) {
            *live = true;
        }
        Ok(id)
    }

    /// The node at an index that was never used; allocates its chunk if there is none.
    fn fresh(&self, index: usize) -> Result<NodeId, OutOfNodes> {
        if index >= self.max_nodes {
            return Err(OutOfNodes);
        }
        let id = NodeId::at(index).ok_or(OutOfNodes)?;
        let place = self.chunks.get(index / CHUNK_NODES).ok_or(OutOfNodes)?;
        if place.get().is_none() {
            let chunk = Chunk::boxed().ok_or(OutOfNodes)?;
            let chunk = place.get_or_init(|| chunk);
            if let Some(pin) = &self.pin {
                pin(&chunk.0);
            }
        }
        Ok(id)
    }

    /// The node with this number, `None` if it was never allocated.
    #[inline]
    pub(crate) fn node(&self, id: NodeId) -> Option<&Node> {
        let index = id.index();
        let chunk = self.chunks.get(index / CHUNK_NODES)?.get()?;
        chunk.0.get(index % CHUNK_NODES)
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        // A panic under the lock leaves at worst a node that is never used again.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for NodeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("NodeMemory");
        shown
            .field("used_nodes", &self.used_nodes())
            .field("max_nodes", &self.max_nodes)
            .finish_non_exhaustive()
    }
}
