//! Requests of experiments that drive a store's channels in their own process.

use anyhow::Result;
use rustix::fs::MemfdFlags;
use sidecore_block::{BlockRequest, Operation};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};

/// Maps memory like a guest's, from address 0.
///
/// # Errors
/// The machine has not enough memory.
pub fn memory(len_bytes: u64) -> Result<GuestMemory> {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, len_bytes)?;
    let (guest_address, user_address) = (GuestAddress(0), UserAddress(0));
    Ok(GuestMemory::map(vec![RegionSpec {
        guest_address,
        user_address,
        len_bytes,
        file,
        file_offset_bytes: 0,
    }])?)
}

/// Makes a request with the buffer of this number, among buffers of `len_bytes`.
///
/// # Errors
/// The buffer is not in `memory`.
pub fn request(
    memory: &GuestMemory,
    operation: Operation,
    number: u64,
    len_bytes: u64,
) -> Result<Box<BlockRequest>> {
    let mut request = BlockRequest::blank(1);
    request.operation = operation;
    request.segments.bind(memory);
    request.segments.push(
        GuestAddress(number * len_bytes),
        len_bytes,
        &mut RegionHint::default(),
    )?;
    request.len_bytes = len_bytes;
    Ok(request)
}
