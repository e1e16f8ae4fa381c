//! Which free blocks are kept for which volume.
//!
//! Guests write little by little, and several at once. If each got the next free block, their
//! volumes would be as mixed as their writes. So a volume that is given blocks also gets a
//! *window*: the free blocks around them, kept for the virtual blocks around those written. A later
//! write finds its place in the window by its distance, whatever was written in between and in
//! whatever order. Windows are a promise in memory only: when space gets short, they are all given
//! up.

use std::collections::HashMap;

use crate::ranges::{RangeSet, clip};

/// The most streams of writes distinguished in a volume.
const WINDOWS_A_VOLUME: usize = 16;
/// Windows in all, after which all are given up.
const WINDOWS: usize = 4096;

/// Virtual blocks from `first` on have their place at `physical` on.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: u64,
    physical: u64,
    count: u64,
}

/// The windows of all volumes.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    /// By volume, the one used last at the end.
    of: HashMap<u64, Vec<Window>>,
    /// The blocks in windows that are still there.
    kept: RangeSet,
}

impl Windows {
    /// The number of blocks in windows.
    pub(crate) fn blocks(&self) -> u64 {
        self.kept.blocks()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.kept.iter()
    }

    /// Takes at most `count` blocks for virtual blocks from `first` on out of a window of the
    /// volume.
    pub(crate) fn take(&mut self, volume: u64, first: u64, count: u64) -> Option<(u64, u64)> {
        let windows = self.of.get_mut(&volume)?;
        for index in (0..windows.len()).rev() {
            let Some(window) = windows.get(index).copied() else { continue };
            let Some(into) = first.checked_sub(window.first).filter(|into| *into < window.count)
            else {
                continue;
            };
            let at = window.physical.saturating_add(into);
            let Some(run) = self.kept.containing(at) else { continue };
            let end = at.saturating_add(count).min(window.physical.saturating_add(window.count));
            let Some(taken) = clip(run, at, end) else { continue };
            self.kept.remove(taken.0, taken.1);
            windows.remove(index);
            windows.push(window);
            return Some(taken);
        }
        None
    }

    /// A window of blocks from `physical` on for virtual blocks from `first` on. They are the
    /// caller's to give; those in `taken`, which are among them, are in use already. Returns blocks
    /// that are no longer in a window.
    #[must_use]
    pub(crate) fn open(
        &mut self,
        volume: u64,
        first: u64,
        (physical, count): (u64, u64),
        taken: (u64, u64),
    ) -> Vec<(u64, u64)> {
        let mut given_up = Vec::new();
        if self.of.len() >= WINDOWS {
            given_up = self.close_all();
        }
        let windows = self.of.entry(volume).or_default();
        if windows.len() >= WINDOWS_A_VOLUME {
            let oldest = windows.remove(0);
            given_up.extend(self.kept.take(oldest.physical, oldest.count));
        }
        if self.kept.insert(physical, count) {
            self.kept.remove(taken.0, taken.1);
            windows.push(Window { first, physical, count });
        }
        given_up
    }

    /// Gives up the windows of a volume.
    pub(crate) fn close(&mut self, volume: u64) -> Vec<(u64, u64)> {
        let windows = self.of.remove(&volume).unwrap_or_default();
        windows
            .into_iter()
            .flat_map(|window| self.kept.take(window.physical, window.count))
            .collect()
    }

    /// Gives up all windows.
    pub(crate) fn close_all(&mut self) -> Vec<(u64, u64)> {
        self.of.clear();
        self.kept.take_all().iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_keeps_distances_in_any_order() {
        let mut windows = Windows::default();
        assert_eq!(windows.open(1, 100, (1000, 16), (1008, 4)), []);
        assert_eq!(windows.take(1, 100, 16), Some((1000, 8)));
        assert_eq!(windows.take(1, 108, 4), None);
        assert_eq!(windows.take(1, 112, 100), Some((1012, 4)));
        assert_eq!(
            (windows.take(1, 99, 1), windows.take(1, 116, 1), windows.take(2, 100, 1)),
            (None, None, None)
        );
        assert_eq!(windows.blocks(), 0);
    }

    #[test]
    fn the_least_recently_used_window_of_a_volume_goes_first() {
        let mut windows = Windows::default();
        for stream in 0..WINDOWS_A_VOLUME as u64 {
            assert_eq!(windows.open(1, stream * 1000, (stream * 100, 10), (0, 0)), []);
        }
        assert_eq!(windows.take(1, 0, 1), Some((0, 1)));
        assert_eq!(windows.open(1, 90_000, (9000, 10), (0, 0)), [(100, 10)]);
        assert_eq!(windows.close(1).iter().map(|(_, count)| count).sum::<u64>(), 159);
        assert_eq!(windows.blocks(), 0);
    }
}
