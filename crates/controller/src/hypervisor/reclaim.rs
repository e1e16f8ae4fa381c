//! Retired nodes and freed blocks, until their epochs have passed.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use sidecore_extent::{NodeMemory, Retired};
use sidecore_volume::{Disk, Freed};

use super::{Hypervisor, State};
use crate::epochs::{Epoch, Epochs};

/// Nodes retired in one epoch: starting an epoch costs a system call.
const BATCH_NODES: usize = 128;

/// One part in this many of the trees' memory is pruned when the memory is full.
const PRUNE_SHARE: usize = 8;

/// Retired nodes and freed blocks, in the order of their epochs.
#[derive(Default)]
pub(crate) struct Limbo {
    /// Retired nodes without an epoch yet.
    fresh: Retired,
    nodes: VecDeque<(Epoch, Retired)>,
    blocks: VecDeque<(Epoch, Freed)>,
}

impl Limbo {
    pub(crate) fn retire(&mut self, retired: Retired, epochs: &Arc<Epochs>) {
        self.fresh.append(retired);
        if self.fresh.len() >= BATCH_NODES {
            self.close(epochs);
        }
    }

    /// Assigns an epoch to the fresh nodes.
    fn close(&mut self, epochs: &Arc<Epochs>) {
        if !self.fresh.is_empty() {
            self.nodes.push_back((epochs.advance(), std::mem::take(&mut self.fresh)));
        }
    }

    pub(super) fn free_later(&mut self, freed: Freed, epochs: &Arc<Epochs>) {
        if !freed.is_empty() {
            self.blocks.push_back((epochs.advance(), freed));
        }
    }

    fn free_nodes(&mut self, memory: &NodeMemory, epochs: &Epochs) {
        while let Some((epoch, _)) = self.nodes.front() {
            if !epochs.passed(*epoch) {
                return;
            }
            if let Some((_, retired)) = self.nodes.pop_front() {
                memory.free(retired);
            }
        }
    }

    fn take_freed(&mut self, epochs: &Epochs) -> Option<Freed> {
        let (epoch, _) = self.blocks.front()?;
        if !epochs.passed(*epoch) {
            return None;
        }
        self.blocks.pop_front().map(|(_, freed)| freed)
    }

    /// Whether blocks wait for their epoch.
    pub(super) fn holds_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }
}

impl Hypervisor {
    /// Frees the tree nodes that no channel can walk to.
    pub(super) fn reclaim(&self) {
        let mut state = self.state();
        state.limbo.free_nodes(&self.memory, &self.epochs);
    }

    /// Makes freed blocks reusable once no I/O to them is in flight, and serves the questions that
    /// wait for them. Returns whether some blocks still have to wait.
    ///
    /// # Errors
    /// The store fails a discard; nothing depends on it.
    pub(crate) fn reuse_blocks(&self, disk: &mut dyn Disk) -> io::Result<bool> {
        let mut result = Ok(());
        loop {
            let mut state = self.state();
            let block_bytes = u64::from(state.volumes.block_bytes());
            let Some(freed) = state.limbo.take_freed(&self.epochs) else {
                let waiting = state.limbo.holds_blocks();
                return result.map(|()| waiting);
            };
            // A damaged store keeps the contents of its blocks, whichever of them its metadata
            // calls free.
            let discarded = if state.volumes.is_frozen() {
                Vec::new()
            } else {
                state.volumes.discardable(&freed)
            };
            drop(state);
            for range in discarded {
                let offset_bytes = range.first.0.saturating_mul(block_bytes);
                result =
                    result.and(disk.discard(offset_bytes, range.count.saturating_mul(block_bytes)));
            }
            let mut state = self.state();
            state.volumes.reuse(freed);
            let waiting = std::mem::take(&mut state.for_space);
            drop(state);
            for message in waiting {
                self.serve(message, disk);
            }
        }
    }

    /// Serves the questions that wait for an epoch. Returns whether some still have to wait.
    pub(crate) fn retry_after_epoch(&self, disk: &mut dyn Disk) -> bool {
        let mut state = self.state();
        state.limbo.close(&self.epochs);
        state.limbo.free_nodes(&self.memory, &self.epochs);
        let waiting = std::mem::take(&mut state.for_epoch);
        drop(state);
        for message in waiting {
            self.serve(message, disk);
        }
        !self.state().for_epoch.is_empty()
    }

    /// Prunes trees, which have used up their memory.
    pub(crate) fn make_room(&self, state: &mut State) {
        let wanted = self.memory.max_nodes().checked_div(PRUNE_SHARE).unwrap_or(0).max(1);
        let trees = state.open.len().max(1);
        let each = wanted.div_ceil(trees).max(1);
        let mut pruned = 0_usize;
        for open in state.open.values_mut() {
            pruned = pruned.saturating_add(open.tree.prune_some(each));
            let retired = open.tree.take_retired();
            state.limbo.fresh.append(retired);
        }
        self.stats.pruned_nodes.add(pruned as u64);
        state.limbo.close(&self.epochs);
        state.limbo.free_nodes(&self.memory, &self.epochs);
    }
}
