//! The allocator of blocks.
//!
//! Every block of a store is exactly one of: superblock, metadata node, data (with a number of
//! references), granted, pending (freed, and not usable yet) or free. Only the first three are on
//! the disk, and of those only the trees: free space is what no tree refers to, found out when a
//! store is opened. So there is no second structure to keep in step with the trees, to be torn by a
//! crash or to disagree with them.
//!
//! # Why blocks have to wait
//!
//! A block that is freed in transaction *n* is still referred to by generation *n* - 1, which a
//! power cut before the commit brings back. If the block were overwritten meanwhile, a volume would
//! come back with another volume's data in it. So the block is *pending* until *n* is durable.
//! Also, a guest's request that was translated before the block was freed may still be in flight to
//! it: the caller knows when such requests have ended, and calls [`reuse`](crate::Volumes::reuse).
//!
//! A node that was made and given up in the same transaction was never on the disk: it is free at
//! once. A data block is not, because of the request on its way.
//!
//! # Layout
//!
//! Data grows from the start and metadata from the end, so that the one does not tear holes into
//! the other, and single nodes do not lie between the blocks of a volume. A volume's next blocks
//! lie right behind its last ones, if they are free, and in its [window](crate::windows) if others
//! write at the same time; else in the smallest free range that has room for a window. Data keeps
//! its position within 4 KiB, so that a guest's aligned write is one.
//!
//! # The reserve
//!
//! With shadowing, taking something away needs room first: the nodes on the way to it are written
//! elsewhere. So some room, in slots that a node fits into, is not given to data; growing trees may
//! take half of it, discards three quarters, and deleting all. What a transaction frees comes back
//! when it is durable.

use crate::free::FreeSpace;
use crate::geometry::Geometry;
use crate::guard::Guard;
use crate::lingering::Lingering;
use crate::ranges::RangeSet;
use crate::shares::{Piece, Shares};
use crate::windows::Windows;

/// Nodes that are kept for metadata: one in 64, at least and at most.
const RESERVE_NODES: (u64, u64) = (32, 4096);
/// Bytes of a window, at least and at most.
const WINDOW_BYTES: (u64, u64) = (256 << 10, 64 << 20);

/// The purpose of room for nodes, which limits how much of the reserve it may use. Data may use
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// New volumes and new mappings: half.
    Growth,
    /// Unmapping: three quarters.
    Shrink,
    /// Deleting: all.
    Delete,
}

/// Where a volume's new blocks are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) volume: u64,
    /// The first virtual block, and how many.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The end of the volume's extent in front of it: virtual, physical.
    pub(crate) behind: Option<(u64, u64)>,
    /// The start of the one behind it.
    pub(crate) before: Option<(u64, u64)>,
    /// The length of the extent in front of the wish, if the wish continues it: a sequential writer
    /// is likely to continue.
    pub(crate) row_blocks: u64,
}

/// The blocks of a store that are not superblocks.
#[derive(Debug)]
pub(crate) struct Allocator {
    geometry: Geometry,
    free: FreeSpace,
    windows: Windows,
    granted: RangeSet,
    /// Freed in this transaction.
    pending: RangeSet,
    /// Freed in the transaction that is being committed.
    committing: RangeSet,
    /// Freed durably, waiting for the caller's word.
    waiting: RangeSet,
    shares: Shares,
    /// Data that other trees still refer to on the disk.
    lingering: Lingering<RangeSet>,
    /// Data that is being compared.
    guard: Guard,
    data_blocks: u64,
    nodes: u64,
    reserve: u64,
    /// Room for nodes that was free when the disk was asked for space last.
    backed_slots: Option<u64>,
}

impl Allocator {
    /// An allocator for what is in use: `used` is data and nodes together.
    pub(crate) fn new(
        geometry: Geometry,
        used: &RangeSet,
        data_blocks: u64,
        nodes: u64,
        shares: Shares,
    ) -> Self {
        let mut free = FreeSpace::new(geometry.node_blocks());
        let mut at = geometry.first_block();
        for (first, count) in used.iter() {
            free.insert(at, first.saturating_sub(at));
            at = at.max(first.saturating_add(count));
        }
        free.insert(at, geometry.total_blocks.saturating_sub(at));
        let all_nodes = geometry.total_blocks.checked_div(geometry.node_blocks()).unwrap_or(0);
        let reserve =
            all_nodes.checked_div(64).unwrap_or(0).clamp(RESERVE_NODES.0, RESERVE_NODES.1);
        Self {
            geometry,
            free,
            windows: Windows::default(),
            granted: RangeSet::default(),
            pending: RangeSet::default(),
            committing: RangeSet::default(),
            waiting: RangeSet::default(),
            shares,
            lingering: Lingering::default(),
            guard: Guard::default(),
            data_blocks,
            nodes,
            reserve,
            backed_slots: None,
        }
    }

    // --- Nodes ---

    /// Room for `count` nodes, or `None`, and nothing was taken.
    pub(crate) fn nodes(&mut self, count: usize, need: Need) -> Option<Vec<u64>> {
        if !self.has_room(count, need) {
            return None;
        }
        let mut nodes = Vec::with_capacity(count);
        for _ in 0..count {
            let address = self.free.highest_slot()?;
            self.free.remove(address, self.geometry.node_blocks());
            nodes.push(address);
        }
        self.nodes = self.nodes.saturating_add(count as u64);
        Some(nodes)
    }

    /// Whether there is room for so many nodes.
    pub(crate) fn has_room(&mut self, count: usize, need: Need) -> bool {
        let wanted = (count as u64).saturating_add(self.untouchable(need));
        if self.free.slots() < wanted {
            self.give_up_windows();
        }
        self.free.slots() >= wanted
    }

    /// The slots for the next nodes: twice as many as are reserved for nodes. `None` if hardly any
    /// slots were used since the last call.
    pub(crate) fn next_slots(&self, always: bool) -> Option<Vec<u64>> {
        let slots = self.free.slots();
        let taken = self.backed_slots.map(|before| before.saturating_sub(slots));
        if !always && taken.is_some_and(|taken| taken < self.reserve / 2) {
            return None;
        }
        let count = usize::try_from(self.reserve.saturating_mul(2)).unwrap_or(usize::MAX);
        Some(self.free.highest_slots().take(count).collect())
    }

    /// The disk has space there.
    pub(crate) fn note_backed(&mut self) {
        self.backed_slots = Some(self.free.slots());
    }

    /// Frees a node that no tree refers to. `fresh`: it was made in this transaction.
    pub(crate) fn free_node(&mut self, address: u64, fresh: bool) {
        let count = self.geometry.node_blocks();
        self.nodes = self.nodes.saturating_sub(1);
        if fresh {
            self.free.insert(address, count);
        } else {
            self.pending.insert(address, count);
        }
    }

    // --- Data ---

    /// Grants contiguous blocks for the first part of the wish.
    pub(crate) fn grant(&mut self, wish: &Wish) -> Option<(u64, u64)> {
        let granted = self.find(wish).or_else(|| {
            self.give_up_windows();
            self.find(wish)
        });
        if let Some((first, count)) = granted {
            self.granted.insert(first, count);
        }
        granted
    }

    /// Takes these blocks as granted; `false`, and nothing was done, unless all are free.
    pub(crate) fn claim(&mut self, first: u64, count: u64) -> bool {
        let free = self.free.remove(first, count);
        if free {
            self.granted.insert(first, count);
        }
        free
    }

    /// Granted blocks go back.
    pub(crate) fn release(&mut self, first: u64, count: u64) {
        if self.granted.remove(first, count).is_some() {
            self.free.insert(first, count);
        }
    }

    /// Granted blocks become data with one reference.
    pub(crate) fn use_granted(&mut self, first: u64, count: u64) {
        if self.granted.remove(first, count).is_some() {
            self.data_blocks = self.data_blocks.saturating_add(count);
        }
    }

    /// Adds a reference to data.
    pub(crate) fn refer(&mut self, first: u64, count: u64) {
        self.shares.add(first, count);
    }

    /// Drops a reference; blocks without a reference become pending.
    pub(crate) fn drop_reference(&mut self, first: u64, count: u64) {
        for piece in self.shares.pieces(first, count) {
            if piece.shared {
                self.linger(piece.first, piece.count);
            }
        }
        for (first, count) in self.shares.drop_one(first, count) {
            self.guard.note_freed(first, count);
            if self.pending.insert(first, count) {
                self.data_blocks = self.data_blocks.saturating_sub(count);
            }
        }
    }

    /// Data in pieces that are shared or not.
    pub(crate) fn pieces(&self, first: u64, count: u64) -> Vec<Piece> {
        let pieces = self.shares.pieces(first, count);
        if self.lingering.is_empty() && self.guard.is_empty() {
            return pieces;
        }
        pieces.into_iter().flat_map(|piece| self.with_others(piece)).collect()
    }

    /// Guards these blocks, and no others.
    pub(crate) fn set_guard(&mut self, ranges: impl Iterator<Item = (u64, u64)>) {
        self.guard.set(ranges);
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Counts data that is shared on the disk as shared, also if it is not in memory, until this
    /// transaction is durable.
    pub(crate) fn linger(&mut self, first: u64, count: u64) {
        self.lingering.add(first, count);
    }

    /// A piece, with the parts of it that linger or are guarded as shared ones.
    fn with_others(&self, piece: Piece) -> Vec<Piece> {
        if piece.shared {
            return vec![piece];
        }
        let mut others = self.lingering.inside(piece.first, piece.count);
        for (first, count) in self.guard.inside(piece.first, piece.count) {
            others.cover(first, count);
        }
        let mut pieces = Vec::new();
        let mut at = piece.first;
        for (first, count) in others.iter() {
            if at < first {
                pieces.push(Piece { first: at, count: first.saturating_sub(at), shared: false });
            }
            pieces.push(Piece { first, count, shared: true });
            at = first.saturating_add(count);
        }
        let end = piece.first.saturating_add(piece.count);
        if at < end {
            pieces.push(Piece { first: at, count: end.saturating_sub(at), shared: false });
        }
        pieces
    }

    /// Drops the windows of a volume.
    pub(crate) fn forget_volume(&mut self, volume: u64) {
        for (first, count) in self.windows.close(volume) {
            self.free.insert(first, count);
        }
    }

    // --- Transactions ---

    /// Seals the transaction: the blocks that it freed wait for its commit.
    pub(crate) fn seal(&mut self) {
        self.committing = self.pending.take_all();
        self.lingering.seal();
    }

    /// Ends a durable commit. The blocks that it freed wait for [`reuse`](Self::reuse).
    pub(crate) fn durable(&mut self, generation: u64) -> Vec<(u64, u64)> {
        let freed: Vec<(u64, u64)> = self.committing.take_all().iter().collect();
        self.lingering.durable(generation);
        for (first, count) in &freed {
            self.waiting.insert(*first, *count);
        }
        freed
    }

    /// Ends the epoch after this generation.
    pub(crate) fn settled(&mut self, generation: u64) {
        self.lingering.settled(generation);
    }

    /// Makes blocks free again, on the caller's word that no I/O to them is in flight.
    pub(crate) fn reuse(&mut self, first: u64, count: u64) {
        if self.waiting.remove(first, count).is_some() {
            self.free.insert(first, count);
        }
    }

    // --- Numbers ---

    /// Whether blocks have been freed that will be usable later.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending_blocks() > 0
    }

    pub(crate) fn pending_blocks(&self) -> u64 {
        self.pending
            .blocks()
            .saturating_add(self.committing.blocks())
            .saturating_add(self.waiting.blocks())
    }

    pub(crate) fn granted_blocks(&self) -> u64 {
        self.granted.blocks()
    }

    pub(crate) fn data_blocks(&self) -> u64 {
        self.data_blocks
    }

    pub(crate) fn node_count(&self) -> u64 {
        self.nodes
    }

    /// Free blocks, those in windows and the reserve included.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.free.blocks().saturating_add(self.windows.blocks())
    }

    /// Of the free blocks, those that data does not get.
    pub(crate) fn reserved_blocks(&self) -> u64 {
        self.reserve.saturating_mul(self.geometry.node_blocks()).min(self.free_blocks())
    }

    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Free ranges, those in windows included.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.free.iter().chain(self.windows.iter())
    }

    pub(crate) fn granted_ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.granted.iter()
    }

    pub(crate) fn pending_ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.pending.iter().chain(self.committing.iter()).chain(self.waiting.iter())
    }

    // --- How ---

    /// Slots that `need` leaves alone.
    fn untouchable(&self, need: Need) -> u64 {
        match need {
            Need::Growth => self.reserve / 2,
            Need::Shrink => self.reserve / 4,
            Need::Delete => 0,
        }
    }

    fn give_up_windows(&mut self) {
        for (first, count) in self.windows.close_all() {
            self.free.insert(first, count);
        }
    }

    fn find(&mut self, wish: &Wish) -> Option<(u64, u64)> {
        if let Some(found) = self.windows.take(wish.volume, wish.first, wish.count) {
            return Some(found);
        }
        let window = self.window_blocks(wish.row_blocks);
        let into = wish.first.checked_rem(window).unwrap_or(0);
        // As far from the neighbours as in the volume, so that later writes between them find their
        // place.
        let behind = wish.behind.and_then(|(end, physical_end)| {
            let distance = wish.first.checked_sub(end)?;
            Some((distance, physical_end.checked_add(distance)?))
        });
        let before = wish.before.and_then(|(start, physical)| {
            let distance = start.checked_sub(wish.first)?;
            Some((distance, physical.checked_sub(distance)?))
        });
        let mut goals = [behind, before];
        goals.sort_unstable_by_key(|goal| goal.map_or(u64::MAX, |(distance, _)| distance));
        for (distance, goal) in
            goals.into_iter().flatten().filter(|(distance, _)| *distance <= window)
        {
            let Some(run) = self.free.containing(goal) else { continue };
            // The free blocks behind another part of the volume belong to that part's neighbour,
            // unless there are many.
            let room = run.0.saturating_add(run.1).saturating_sub(goal);
            if distance > into && room < window {
                continue;
            }
            if let Some(found) = self.take_at(wish, goal, run, window) {
                return Some(found);
            }
        }
        let wanted = window.saturating_add(wish.count).saturating_add(self.geometry.node_blocks());
        if let Some((first, count)) = self.free.best(wanted) {
            let start = self.in_step(wish.first.saturating_sub(into), (first, count));
            let roomy = start.saturating_sub(first).saturating_add(into) < count;
            let at = if roomy {
                start.saturating_add(into)
            } else {
                self.in_step(wish.first, (first, count))
            };
            if let Some(found) = self.take_at(wish, at, (first, count), window) {
                return Some(found);
            }
        }
        if let Some((first, count)) = self.free.largest_scrap() {
            let count = count.min(wish.count);
            return self.free.remove(first, count).then_some((first, count));
        }
        // The last slots are reserved, but not what lies in front of one.
        let (first, count) = self.free.best(0)?;
        self.take_at(wish, first, (first, count), 0)
    }

    /// The first block from `first` on at the same position within a node's room as virtual block
    /// `like`, if it is inside, else `first`.
    fn in_step(&self, like: u64, (first, count): (u64, u64)) -> u64 {
        let position = |block: u64| block.checked_rem(self.geometry.node_blocks()).unwrap_or(0);
        let step = position(
            position(like)
                .saturating_add(self.geometry.node_blocks())
                .saturating_sub(position(first)),
        );
        if step < count { first.saturating_add(step) } else { first }
    }

    /// Takes blocks from `at` on out of the free range `run`, and makes a window of those around
    /// them: the part of the volume of `window` blocks that they are in.
    fn take_at(
        &mut self,
        wish: &Wish,
        at: u64,
        run: (u64, u64),
        window: u64,
    ) -> Option<(u64, u64)> {
        let run_end = run.0.saturating_add(run.1);
        let into = wish.first.checked_rem(window).unwrap_or(0);
        let end = at.saturating_add(wish.count.max(window.saturating_sub(into))).min(run_end);
        for start in [at.saturating_sub(into).max(run.0), at] {
            let count = self.without_the_reserve(start, end.saturating_sub(start), run);
            let taken = wish.count.min(count.saturating_sub(at.saturating_sub(start)));
            if taken == 0 || !self.free.remove(start, count) {
                continue;
            }
            if taken < count {
                let first = wish.first.saturating_sub(at.saturating_sub(start));
                for (first, count) in
                    self.windows.open(wish.volume, first, (start, count), (at, taken))
                {
                    self.free.insert(first, count);
                }
            }
            return Some((at, taken));
        }
        None
    }

    /// How many of `count` blocks can be taken from `at` on so that the reserve is left.
    fn without_the_reserve(&self, at: u64, count: u64, run: (u64, u64)) -> u64 {
        let spare = self.free.slots().saturating_sub(self.reserve);
        let run_end = run.0.saturating_add(run.1);
        let lost = |count: u64| {
            let end = at.saturating_add(count);
            let left = self.free.slots_in(run.0, at.saturating_sub(run.0));
            let right = self.free.slots_in(end, run_end.saturating_sub(end));
            self.free.slots_in(run.0, run.1).saturating_sub(left).saturating_sub(right)
        };
        // Taking less loses less: two nodes' worth below is always enough.
        let mut count =
            count.min(spare.saturating_add(2).saturating_mul(self.geometry.node_blocks()));
        while count > 0 && lost(count) > spare {
            count = count.saturating_sub(1);
        }
        count
    }

    /// The blocks of a window: twice the length of the sequential run, within bounds, and a small
    /// part of the free blocks; a power of two, at least a node's.
    fn window_blocks(&self, row_blocks: u64) -> u64 {
        let blocks =
            |bytes: u64| bytes.checked_div(u64::from(self.geometry.block_bytes)).unwrap_or(0);
        let (least, most) = (blocks(WINDOW_BYTES.0), blocks(WINDOW_BYTES.1));
        let wanted = row_blocks.saturating_mul(2).clamp(least, most).min(self.free.blocks() / 64);
        let power = 1_u64.checked_shl(wanted.checked_ilog2().unwrap_or(0)).unwrap_or(1);
        power.max(self.geometry.node_blocks())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { block_bytes: 1024, total_blocks: 16 * 1024, tag: 0 };

    fn empty() -> Allocator {
        Allocator::new(GEOMETRY, &RangeSet::default(), 0, 0, Shares::default())
    }

    fn wish(volume: u64, first: u64, count: u64, behind: Option<(u64, u64)>) -> Wish {
        Wish { volume, first, count, behind, before: None, row_blocks: 0 }
    }

    #[test]
    fn data_comes_from_the_start_and_nodes_from_the_end() {
        let mut allocator = empty();
        assert_eq!(allocator.grant(&wish(1, 0, 4, None)), Some((16, 4)));
        assert_eq!(allocator.nodes(2, Need::Growth), Some(vec![16380, 16376]));
        assert_eq!(allocator.grant(&wish(1, 4, 4, Some((4, 20)))), Some((20, 4)));
    }

    #[test]
    fn volumes_that_take_turns_are_not_mixed() {
        let mut allocator = empty();
        let mut ends: [Option<(u64, u64)>; 2] = [None, None];
        let mut breaks = 0;
        for step in 0..512 {
            for volume in [0, 1] {
                let behind = ends[volume as usize];
                let (at, count) = allocator.grant(&wish(volume, step * 4, 4, behind)).unwrap();
                assert_eq!(count, 4);
                breaks += u64::from(behind.is_some_and(|(_, end)| end != at));
                ends[volume as usize] = Some((step * 4 + 4, at + 4));
            }
        }
        assert!(breaks < 40, "{breaks} breaks in 1024 writes");
    }

    #[test]
    fn data_leaves_the_reserve_alone_and_fills_the_scraps() {
        let mut allocator = empty();
        // A scrap of three blocks at the very start.
        assert_eq!(allocator.grant(&wish(9, 0, 4, None)), Some((16, 4)));
        let mut granted = 4;
        while let Some((_, count)) = allocator.grant(&wish(1, granted, 100, None)) {
            granted += count;
        }
        assert_eq!(allocator.free.slots(), 64);
        assert!(allocator.free_blocks() < 65 * 4);
        allocator.release(16, 3);
        let again = allocator.grant(&wish(1, 0, 100, None));
        assert_eq!(again, Some((16, 3)));
        assert!(allocator.grant(&wish(1, 0, 1, None)).is_none());
        assert!(allocator.nodes(33, Need::Growth).is_none());
        assert_eq!(allocator.nodes(32, Need::Growth).map(|nodes| nodes.len()), Some(32));
        assert!(
            allocator.nodes(1, Need::Growth).is_none()
                && allocator.nodes(16, Need::Shrink).is_some()
        );
        assert!(
            allocator.nodes(1, Need::Shrink).is_none()
                && allocator.nodes(16, Need::Delete).is_some()
        );
        assert!(allocator.nodes(1, Need::Delete).is_none());
    }

    #[test]
    fn freed_blocks_wait_for_the_commit_and_for_the_word() {
        let mut allocator = empty();
        let (first, count) = allocator.grant(&wish(1, 0, 64, None)).unwrap();
        allocator.use_granted(first, count);
        allocator.refer(first, 32);
        allocator.drop_reference(first, 64);
        assert_eq!((allocator.data_blocks(), allocator.pending_blocks()), (32, 32));
        let free = allocator.free_blocks();
        allocator.seal();
        assert_eq!(allocator.durable(1), [(first + 32, 32)]);
        assert_eq!(allocator.free_blocks(), free);
        allocator.reuse(first, 64);
        assert_eq!(allocator.free_blocks(), free);
        allocator.reuse(first + 32, 32);
        assert_eq!((allocator.free_blocks(), allocator.pending_blocks()), (free + 32, 0));
    }

    #[test]
    fn guests_alignment_is_kept() {
        let mut allocator = empty();
        let (at, _) = allocator.grant(&wish(1, 7, 2, None)).unwrap();
        assert_eq!(at % 4, 3);
        let (at, _) = allocator.grant(&wish(2, 8, 2, None)).unwrap();
        assert_eq!(at % 4, 0);
    }
}
