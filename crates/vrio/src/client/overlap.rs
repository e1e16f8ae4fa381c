//! The writes that are unanswered, for the question whether a request overlaps one.

use crate::Request;

/// An unanswered write. All that the question needs is here: the entries are many and large.
#[derive(Clone, Copy, Debug)]
struct Write {
    index: u16,
    is_replay: bool,
    device: usize,
    order: u64,
    request: Request,
}

/// The unanswered writes of a client, in no order.
#[derive(Debug, Default)]
pub(super) struct UnansweredWrites(Vec<Write>);

impl UnansweredWrites {
    /// Room for `count` writes.
    pub(super) fn new(count: usize) -> Self {
        Self(Vec::with_capacity(count))
    }

    /// Adds the write of entry `index`.
    pub(super) fn add(
        &mut self,
        index: u16,
        is_replay: bool,
        (device, order): (usize, u64),
        request: &Request,
    ) {
        self.0.push(Write { index, is_replay, device, order, request: *request });
    }

    /// Takes the write of entry `index` out.
    pub(super) fn remove(&mut self, index: u16) {
        if let Some(place) = self.0.iter().position(|write| write.index == index) {
            self.0.swap_remove(place);
        }
    }

    /// Whether the write of entry `index` that has this order is unanswered.
    pub(super) fn has(&self, index: u16, order: u64) -> bool {
        self.0.iter().any(|write| write.index == index && write.order == order)
    }

    /// A write that was accepted before `order` and overlaps `request`, as its entry and its order.
    /// Replayed writes are compared with each other only: the caller's wait for the whole replay.
    pub(super) fn in_the_way(
        &self,
        is_replay: bool,
        (device, order): (usize, u64),
        request: &Request,
    ) -> Option<(u16, u64)> {
        let overlaps = |write: &&Write| {
            write.order < order
                && write.device == device
                && write.is_replay == is_replay
                && write.request.overlaps(request)
        };
        self.0.iter().find(overlaps).map(|write| (write.index, write.order))
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
        let mut writes = UnansweredWrites::new(4);
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
