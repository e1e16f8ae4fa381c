//! The guest of the tests.

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};

use sidecore_block::{BlockRequest, Operation};

/// Where the guest's memory is: the first two regions touch in the guest and
/// not in the host, the third lies apart.
const REGIONS: [(u64, u64); 3] =
    [(0x10_0000, 0x10_0000), (0x20_0000, 0x10_0000), (0x1_0000_0000, 0x20_0000)];

/// Guest memory in three regions, two of which touch at guest address 0x200000; zeroed.
///
/// # Panics
/// There is no memory for it.
#[must_use]
pub fn guest_memory() -> GuestMemory {
    let specs = REGIONS.iter().map(|&(start, len_bytes)| {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len_bytes).unwrap();
        RegionSpec {
            guest_address: GuestAddress(start),
            user_address: UserAddress(start),
            len_bytes,
            file,
            file_offset_bytes: 0,
        }
    });
    GuestMemory::map(specs.collect()).unwrap()
}

/// A request without a tag over `pieces` of guest memory, as address and size in bytes.
///
/// # Panics
/// A piece is outside of `memory`.
#[must_use]
pub fn request(
    memory: &GuestMemory,
    operation: Operation,
    offset_bytes: u64,
    pieces: &[(u64, u64)],
) -> Box<BlockRequest> {
    // A piece can cross from one region to the next.
    let mut request = BlockRequest::blank(2 * pieces.len());
    request.operation = operation;
    request.offset_bytes = offset_bytes;
    request.segments.bind(memory);
    for &(address, len_bytes) in pieces {
        request
            .segments
            .push(GuestAddress(address), len_bytes, &mut RegionHint::default())
            .unwrap();
    }
    request.len_bytes = request.segments.len_bytes();
    request
}
