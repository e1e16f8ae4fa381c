//! Marks of dirty regions: before the first write, and cleared when the legs are equal again.

use std::sync::atomic::Ordering;

use super::{Keeper, RETRY};
use crate::disk::Wait;
use crate::layout::{BLOCK_BYTES, SLOTS};
use crate::legs::LegSet;
use crate::map::DirtyMap;
use crate::rules::Rule;

/// The place of a block of the map.
pub(super) fn map_bytes(block: usize) -> u64 {
    SLOTS.saturating_add(block as u64).saturating_mul(BLOCK_BYTES as u64)
}

impl Keeper {
    /// Marks the regions that writes wait for, all in one, and lets the writes start.
    pub(super) fn open_asked(&mut self, wait: &mut dyn Wait) {
        if self.asked.is_empty() {
            return;
        }
        let now = wait.now();
        if now < self.next_mark {
            return;
        }
        let asked = std::mem::take(&mut self.asked);
        let (mut blocks, mut marked) = (Vec::new(), Vec::new());
        for region in asked.iter().flat_map(|(first, end)| *first..*end) {
            if !self.map.is_dirty(region) {
                self.map.set(region, true);
                marked.push(region);
                blocks.push(DirtyMap::block_of(region));
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        let mut failed = LegSet::EMPTY;
        if !blocks.is_empty() {
            failed = self.write_map(self.in_sync, &blocks, wait);
            let others = self.in_sync.without(failed);
            failed = failed.with(self.on_each(others, wait, |disk, now| disk.begin_flush(now)));
        }
        if !failed.is_empty() {
            // A leg that failed may stay, if all others have failed, too. The marks are written
            // again, and the writes wait.
            marked.iter().for_each(|region| self.map.set(*region, false));
            if failed == self.in_sync {
                self.unmarked = self.in_sync.lowest();
                self.next_mark = now.after(RETRY);
            }
            self.failed = self.failed.with(failed);
            self.asked = asked;
            return;
        }
        self.unmarked = None;
        for region in asked.iter().flat_map(|(first, end)| *first..*end) {
            self.shared.touched.set(region);
            self.shared.open.set(region);
        }
        self.has_opened();
    }

    /// Wakes queues that wait for regions.
    pub(super) fn has_opened(&self) {
        self.shared.openings.fetch_add(1, Ordering::AcqRel);
        self.shared.ring();
    }

    /// Closes regions, and waits until no write to them is in flight. Legs that have failed one are
    /// in `failed` then. Returns the regions that were open.
    pub(super) fn shut(&mut self, regions: &[usize], wait: &mut dyn Wait) -> Vec<usize> {
        let is_open = |region: &usize| self.shared.open.has(*region);
        let were_open: Vec<usize> = regions.iter().copied().filter(is_open).collect();
        for region in regions {
            self.shared.open.clear(*region);
        }
        let parity = self.shared.turn_parity();
        if self.shared.neglected.keeps(Rule::Drain) {
            self.drain(wait, |gauge| gauge.has_no_writes(parity));
        }
        self.read_inbox();
        were_open
    }

    /// Opens regions again that [`shut`](Self::shut) has closed.
    pub(super) fn reopen(&self, regions: &[usize]) {
        regions.iter().for_each(|region| self.shared.open.set(*region));
        self.has_opened();
    }

    /// Clears the marks of regions that were not written for a while, if all legs are in sync.
    pub(super) fn clear_unused(&mut self, wait: &mut dyn Wait) {
        let now = wait.now();
        if now < self.next_clearing {
            return;
        }
        self.next_clearing = now.after(self.options.clear_after);
        let is_whole = self.in_sync == self.config.members;
        if !is_whole && self.shared.neglected.keeps(Rule::KeepMarks) {
            return;
        }
        let dirty: Vec<usize> = self.map.dirty().collect();
        let (used, unused): (Vec<usize>, Vec<usize>) =
            dirty.into_iter().partition(|region| self.shared.touched.has(*region));
        for region in used {
            self.shared.touched.clear(region);
        }
        if unused.is_empty() {
            return;
        }
        self.shut(&unused, wait);
        if !self.failed.is_empty() {
            return;
        }
        if self.shared.neglected.keeps(Rule::FlushThenClear) {
            let failed = self.on_each(self.in_sync, wait, |disk, now| disk.begin_flush(now));
            self.failed = self.failed.with(failed);
        }
        if !self.failed.is_empty() {
            return;
        }
        let mut blocks: Vec<usize> = Vec::new();
        for region in unused {
            self.map.set(region, false);
            blocks.push(DirtyMap::block_of(region));
        }
        blocks.dedup();
        // No flush: a mark that comes back after a power cut costs a copy.
        let failed = self.write_map(self.in_sync, &blocks, wait);
        self.failed = self.failed.with(failed);
    }

    /// Writes blocks of the map. Returns the legs that failed.
    pub(super) fn write_map(
        &mut self,
        legs: LegSet,
        blocks: &[usize],
        wait: &mut dyn Wait,
    ) -> LegSet {
        let mut failed = LegSet::EMPTY;
        for block in blocks {
            let bytes = self.map.encode(*block);
            let others = legs.without(failed);
            let write = |disk: &mut crate::disk::LegDisk, now| {
                disk.begin_write(now, map_bytes(*block), &bytes);
            };
            failed = failed.with(self.on_each(others, wait, write));
        }
        failed
    }

    /// The numbers of all blocks of the map.
    pub(super) fn all_blocks(&self) -> Vec<usize> {
        (0..self.map.blocks()).collect()
    }

    /// Writes all of the map, durably. Legs that fail leave.
    pub(super) fn write_whole_map(&mut self, legs: LegSet, wait: &mut dyn Wait) {
        let legs = legs.and(self.present());
        let failed = self.write_map(legs, &self.all_blocks(), wait);
        let others = legs.without(failed);
        let failed = failed.with(self.on_each(others, wait, |disk, now| disk.begin_flush(now)));
        failed.numbers().for_each(|leg| self.drop_leg(leg));
    }
}
