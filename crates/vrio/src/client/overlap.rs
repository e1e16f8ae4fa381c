//! The writes that are unanswered, for the question whether a request overlaps one.

use crate::Request;

/// No link: the end of a list.
const NONE: u32 = u32::MAX;
/// Lists of each level.
const LISTS: usize = 1024;
/// Writes up to 4 KiB, up to 64 KiB, and longer ones.
const LEVELS: [u32; 3] = [12, 16, 63];
/// A write that is no longer than a cell of its level lies in two of them at most.
const CELLS: usize = 2;

/// An unanswered write. All that the question needs is here: the entries are many and large.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// First byte in the device.
    start: u64,
    /// The byte behind the last one; equal to `start` if the entry has no write.
    end: u64,
    order: u64,
    device: usize,
    is_replay: bool,
    level: u8,
    /// The links behind its own, in the lists of its cells.
    next: [u32; CELLS],
}

/// The unanswered writes whose sizes are within two bounds.
#[derive(Clone, Debug)]
struct Level {
    /// Writes here.
    count: usize,
    /// The device is divided into cells of this size, as a power of two.
    shift: u32,
    /// The lists of the writes in cells, by a hash of the cells. A link is a write's number, and
    /// which of its cells it is of.
    lists: Box<[u32]>,
}

impl Level {
    /// The list of a cell.
    #[inline]
    fn list(device: usize, cell: u64) -> usize {
        // The golden ratio spreads neighbours (Knuth, volume 3, 6.4).
        let mixed = cell.wrapping_add((device as u64) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 54) as usize
    }

    /// The first and the last cell of a range that is not empty.
    #[inline]
    fn cells(&self, start: u64, end: u64) -> (u64, u64) {
        (start >> self.shift, end.saturating_sub(1) >> self.shift)
    }
}

/// The unanswered writes of a client. The question costs as much as there are writes near the
/// request, and not as there are writes.
#[derive(Debug)]
pub(super) struct UnansweredWrites {
    /// By the numbers of entries.
    writes: Box<[Write]>,
    levels: [Level; LEVELS.len()],
    /// Of all levels.
    count: usize,
}

impl UnansweredWrites {
    /// Room for the writes of `count` entries.
    pub(super) fn new(count: usize) -> Self {
        let next = [NONE; CELLS];
        let none =
            Write { start: 0, end: 0, order: 0, device: 0, is_replay: false, level: 0, next };
        let level = |shift| Level { count: 0, shift, lists: vec![NONE; LISTS].into() };
        Self { writes: vec![none; count].into(), levels: LEVELS.map(level), count: 0 }
    }

    /// Whether there is none.
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds the write of an entry.
    #[inline]
    pub(super) fn add(
        &mut self,
        index: u16,
        is_replay: bool,
        (device, order): (usize, u64),
        request: &Request,
    ) {
        let start = request.offset_bytes;
        let end = start.saturating_add(request.len_bytes);
        let Some(write) = self.writes.get_mut(usize::from(index)).filter(|_| start < end) else {
            return;
        };
        let fits = |level: &(u8, &mut Level)| request.len_bytes <= 1 << level.1.shift;
        let mut levels = (0_u8..).zip(&mut self.levels);
        // All that are longer are in the last one, which has one cell or two.
        let Some((number, level)) = levels.find(|level| fits(level) || level.0 == 2) else {
            return;
        };
        level.count = level.count.wrapping_add(1);
        self.count = self.count.wrapping_add(1);
        let (first, last) = level.cells(start, end);
        let mut next = [NONE; CELLS];
        for ((side, cell), next) in (0_u32..).zip(first..=last).zip(&mut next) {
            if let Some(list) = level.lists.get_mut(Level::list(device, cell)) {
                *next = std::mem::replace(list, u32::from(index) << 1 | side);
            }
        }
        *write = Write { start, end, order, device, is_replay, level: number, next };
    }

    /// The write of an entry has ended.
    #[inline]
    pub(super) fn remove(&mut self, index: u16) {
        let Some(write) = self.writes.get_mut(usize::from(index)) else { return };
        if write.start == write.end {
            return;
        }
        let Write { start, end, device, level, .. } = *write;
        write.end = start;
        let Some(level) = self.levels.get_mut(usize::from(level)) else { return };
        level.count = level.count.wrapping_sub(1);
        self.count = self.count.wrapping_sub(1);
        let (first, last) = level.cells(start, end);
        for (side, cell) in (0..CELLS).zip(first..=last) {
            // Read anew: both cells may be in one list.
            let own = u32::from(index) << 1 | u32::from(side > 0);
            let next = self.writes.get(usize::from(index)).map(|write| write.next);
            let Some(behind) = next.and_then(|next| next.get(side).copied()) else { return };
            let Some(list) = level.lists.get_mut(Level::list(device, cell)) else { continue };
            if *list == own {
                *list = behind;
                continue;
            }
            let mut link = *list;
            while let Some(next) = self
                .writes
                .get_mut((link >> 1) as usize)
                .and_then(|write| write.next.get_mut((link & 1) as usize))
            {
                link = *next;
                if link == own {
                    *next = behind;
                    break;
                }
            }
        }
    }

    /// Whether the write of this entry is unanswered.
    pub(super) fn has(&self, index: u16, order: u64) -> bool {
        let write = self.writes.get(usize::from(index));
        write.is_some_and(|write| write.start < write.end && write.order == order)
    }

    /// A write that was accepted before `order` and overlaps `request`, as its entry and its order.
    /// Replayed writes are compared with each other only: the caller's wait for the whole replay.
    #[inline]
    pub(super) fn in_the_way(
        &self,
        is_replay: bool,
        (device, order): (usize, u64),
        request: &Request,
    ) -> Option<(u16, u64)> {
        let start = request.offset_bytes;
        let end = start.saturating_add(request.len_bytes);
        let is_it = |write: &Write| {
            // Both at once: each of the two alone is true as often as not.
            ((write.start < end) & (start < write.end))
                && write.order < order
                && write.device == device
                && write.is_replay == is_replay
        };
        if self.count == 0 {
            return None;
        }
        for level in self.levels.iter().filter(|level| level.count > 0 && start < end) {
            let (first, last) = level.cells(start, end);
            let found = if last.wrapping_sub(first) >= level.count as u64 {
                // A long request: there are fewer writes than cells.
                let mut numbered = (0_u16..).zip(&self.writes);
                numbered.find(|(_, write)| write.start < write.end && is_it(write))
            } else {
                (first..=last).find_map(|cell| self.find(level, (device, cell), is_it))
            };
            if let Some((index, write)) = found {
                return Some((index, write.order));
            }
        }
        None
    }

    /// The first write in the list of a cell that `is_it`.
    #[inline]
    fn find(
        &self,
        level: &Level,
        (device, cell): (usize, u64),
        is_it: impl Fn(&Write) -> bool,
    ) -> Option<(u16, &Write)> {
        let mut link = *level.lists.get(Level::list(device, cell))?;
        while link != NONE {
            let write = self.writes.get((link >> 1) as usize)?;
            if is_it(write) {
                return u16::try_from(link >> 1).ok().map(|index| (index, write));
            }
            link = *write.next.get((link & 1) as usize)?;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sidecore_block::Operation;

    use super::*;

    fn write(offset_bytes: u64, len_bytes: u64) -> Request {
        Request { operation: Operation::Write, offset_bytes, len_bytes, fua: false }
    }

    #[test]
    fn an_earlier_write_of_the_same_device_is_in_the_way_until_it_ends() {
        let at = |offset_bytes| write(offset_bytes, 512);
        let mut writes = UnansweredWrites::new(8);
        writes.add(3, false, (0, 10), &at(0));
        writes.add(4, false, (0, 11), &at(512));
        writes.add(5, true, (0, 12), &at(1024));
        assert_eq!(writes.in_the_way(false, (0, 20), &at(0)), Some((3, 10)));
        assert_eq!(writes.in_the_way(false, (0, 10), &at(0)), None, "its own order");
        assert_eq!(writes.in_the_way(false, (1, 20), &at(0)), None, "another device");
        assert_eq!(writes.in_the_way(false, (0, 20), &at(1024)), None, "a replayed write");
        assert_eq!(writes.in_the_way(true, (0, 20), &at(1024)), Some((5, 12)));
        assert_eq!(writes.in_the_way(false, (0, 20), &Request::FLUSH), None);
        assert!(writes.has(3, 10) && !writes.has(3, 11));
        writes.remove(3);
        assert_eq!(writes.in_the_way(false, (0, 20), &at(0)), None);
        assert!(writes.has(4, 11));
    }

    #[test]
    fn the_end_of_the_numbers_is_a_place_as_any_other() {
        let mut writes = UnansweredWrites::new(3);
        let all = write(0, u64::MAX);
        writes.add(0, false, (0, 0), &all);
        writes.add(1, false, (0, 1), &write(u64::MAX - 512, 512));
        writes.add(2, false, (0, 2), &write(u64::MAX, 512));
        assert_eq!(writes.in_the_way(false, (0, 1), &write(1 << 63, 1)), Some((0, 0)));
        writes.remove(0);
        assert_eq!(writes.in_the_way(false, (0, 9), &all), Some((1, 1)));
        writes.remove(1);
        writes.remove(2);
        assert_eq!(writes.in_the_way(false, (0, 9), &all), None);
        assert!(writes.levels.iter().all(|level| level.count == 0));
        assert!(writes.levels.iter().all(|level| level.lists.iter().all(|link| *link == NONE)));
    }

    proptest! {
        /// The answers are those of a look at all writes, whatever has come and gone.
        #[test]
        fn it_agrees_with_a_list(steps in proptest::collection::vec(
            (0_u16..24, any::<bool>(), 0_usize..2, 0_u64..600, 0_u32..21, any::<bool>()),
            1..200,
        )) {
            let mut writes = UnansweredWrites::new(24);
            let mut list: Vec<Option<(bool, usize, u64, Request)>> = vec![None; 24];
            for (order, step) in (0_u64..).zip(steps) {
                let (index, is_replay, device, sector, size, is_question) = step;
                let odd_bytes = if size % 2 == 0 { 0 } else { 512 };
                let request = write(sector * 512, (512_u64 << size) - odd_bytes);
                if is_question {
                    let found = writes.in_the_way(is_replay, (device, order), &request);
                    let is_it = |one: &&Option<(bool, usize, u64, Request)>| {
                        one.is_some_and(|(replays, of, _, other)| {
                            (replays, of) == (is_replay, device) && other.overlaps(&request)
                        })
                    };
                    let expected = list.iter().filter(is_it).count();
                    prop_assert_eq!(found.is_some(), expected > 0, "{:?}", request);
                    if let Some((index, order)) = found {
                        let one = &list[usize::from(index)];
                        prop_assert!(is_it(&one) && one.is_some_and(|one| one.2 == order));
                    }
                } else if list[usize::from(index)].take().is_some() {
                    writes.remove(index);
                } else {
                    writes.add(index, is_replay, (device, order), &request);
                    list[usize::from(index)] = Some((is_replay, device, order, request));
                }
            }
        }
    }
}
