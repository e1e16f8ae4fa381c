//! A part of a virtual disk that a store carries requests out in.

use sidecore_units::ByteExtent;

use crate::{BlockRequest, Operation};

/// An extent of a virtual disk on a store, and whether writes may go there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mapped {
    /// The disk's bytes, and where the store has them.
    pub extent: ByteExtent,
    /// Whether a write may change these bytes: no other disk refers to them.
    pub takes_writes: bool,
}

impl Mapped {
    /// The place on the store of a read, or of a permitted write, that lies in the extent whole.
    #[must_use]
    #[inline]
    pub fn place(&self, request: &BlockRequest) -> Option<u64> {
        match request.operation {
            Operation::Read => {}
            Operation::Write if self.takes_writes => {}
            _ => return None,
        }
        self.extent.locate(request.offset_bytes, request.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_permitted_writes_have_a_place_and_nothing_else_has() {
        let extent = ByteExtent::new(4096, 8192, 1 << 20).unwrap();
        let mut request = BlockRequest::blank(0);
        (request.offset_bytes, request.len_bytes) = (8192, 4096);
        for (operation, places) in [
            (Operation::Read, [true, true]),
            (Operation::Write, [false, true]),
            (Operation::Flush, [false, false]),
            (Operation::Discard, [false, false]),
            (Operation::WriteZeroes { may_unmap: false }, [false, false]),
        ] {
            request.operation = operation;
            for (takes_writes, has_place) in [false, true].into_iter().zip(places) {
                let place = Mapped { extent, takes_writes }.place(&request);
                assert_eq!(place, has_place.then_some((1 << 20) + 4096), "{operation:?}");
            }
        }
        request.operation = Operation::Read;
        request.len_bytes = 4097;
        assert_eq!(Mapped { extent, takes_writes: true }.place(&request), None);
    }
}
