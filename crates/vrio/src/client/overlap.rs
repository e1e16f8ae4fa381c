//! The writes that are unanswered, for the question whether a request overlaps one.

use crate::Request;

/// An unanswered write. All that the question needs is here: the entries are many and large.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// First byte in the device.
    start: u64,
    /// The byte behind the last one.
    end: u64,
    order: u64,
    device: usize,
    index: u16,
    is_replay: bool,
}

/// The unanswered writes of a client, in no order.
#[derive(Debug, Default)]
pub(super) struct UnansweredWrites {
    writes: Vec<Write>,
    /// For each entry the place of its write, if it has one.
    places: Vec<u16>,
}

impl UnansweredWrites {
    /// Room for the writes of `count` entries.
    pub(super) fn new(count: usize) -> Self {
        Self { writes: Vec::with_capacity(count), places: vec![0; count] }
    }

    /// Adds the write of an entry.
    pub(super) fn add(
        &mut self,
        index: u16,
        is_replay: bool,
        (device, order): (usize, u64),
        request: &Request,
    ) {
        let start = request.offset_bytes;
        let end = start.saturating_add(request.len_bytes);
        self.note(index, self.writes.len());
        self.writes.push(Write { start, end, order, device, index, is_replay });
    }

    fn note(&mut self, index: u16, place: usize) {
        if let Some(noted) = self.places.get_mut(usize::from(index)) {
            *noted = u16::try_from(place).unwrap_or(u16::MAX);
        }
    }

    /// The place of an entry's write.
    fn place(&self, index: u16) -> Option<usize> {
        let place = usize::from(*self.places.get(usize::from(index))?);
        self.writes.get(place).is_some_and(|write| write.index == index).then_some(place)
    }

    /// The write of an entry has ended.
    pub(super) fn remove(&mut self, index: u16) {
        if let Some(place) = self.place(index) {
            self.writes.swap_remove(place);
            if let Some(moved) = self.writes.get(place).map(|write| write.index) {
                self.note(moved, place);
            }
        }
    }

    /// Whether the write of this entry is unanswered.
    pub(super) fn has(&self, index: u16, order: u64) -> bool {
        let write = self.place(index).and_then(|place| self.writes.get(place));
        write.is_some_and(|write| write.order == order)
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
        let overlaps = |write: &&Write| {
            // Both at once: each of the two alone is true as often as not.
            ((write.start < end) & (start < write.end))
                && write.order < order
                && write.device == device
                && write.is_replay == is_replay
        };
        self.writes.iter().find(overlaps).map(|write| (write.index, write.order))
    }
}

#[cfg(test)]
mod tests {
    use sidecore_block::Operation;

    use super::*;

    #[test]
    fn an_earlier_write_of_the_same_device_is_in_the_way_until_it_ends() {
        let at = |offset_bytes| Request {
            operation: Operation::Write,
            offset_bytes,
            len_bytes: 512,
            fua: false,
        };
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
}
