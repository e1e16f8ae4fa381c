//! Data pointers: from PRP entries and SGL descriptors to the guest's memory (NVMe base 2.0, 4.1).
//!
//! Every walk is bounded: a PRP list by the transfer's length, an SGL by [`MAX_DESCRIPTORS`]. Every
//! word of a list is read once; what was read is checked, translated and not looked at again.

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, RegionHint, Segments};
use sidecore_units::PAGE_BYTES;

use crate::{Command, PointerKind, Status};

mod prp;
mod sgl;
#[cfg(test)]
mod tests;

/// Most bytes that one command transfers (MDTS): 2^8 pages of the smallest size that the controller
/// has (CAP.MPSMIN).
pub const MAX_TRANSFER_BYTES: u64 = PAGE_BYTES << MAX_TRANSFER_PAGES_LOG2;

/// MDTS as Identify Controller has it (figure 275): a power of two of pages.
pub const MAX_TRANSFER_PAGES_LOG2: u8 = 8;

/// Pieces that the data of one command may be in: each page by itself, one more if the first is
/// cut, and some grace for SGLs that cut them up and for regions that meet within one.
pub const MAX_PIECES: usize = (1 << MAX_TRANSFER_PAGES_LOG2) + 32;

/// Most SGL descriptors of one command, whatever they describe.
pub const MAX_DESCRIPTORS: u64 = 1024;

/// Most bit buckets among them.
pub const MAX_HOLES: usize = 32;

const PAGE_MASK: u64 = PAGE_BYTES - 1;

/// The side that writes the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The controller: the command reads.
    ToGuest,
    /// The guest: the command writes.
    FromGuest,
}

/// Bytes of a transfer that the guest does not want (SGL Bit Bucket descriptor, 4.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// Where in the transfer it begins, in bytes.
    pub start_bytes: u64,
    /// Its size in bytes; never zero.
    pub len_bytes: u64,
}

/// The result of [`gather`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathered {
    /// All of the transfer has memory, and the list holds it.
    Whole,
    /// The transfer has bit buckets, and the list is of no use: [`gather_with_holes`] finds both.
    HasHoles,
}

/// Finds the memory of a command's data pointer: `len_bytes` of it, bound to `memory`.
///
/// # Errors
/// The status that the specification has for the pointer's error.
#[inline]
pub fn gather(
    command: &Command,
    len_bytes: u64,
    direction: Direction,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    segments: &mut Segments,
) -> Result<Gathered, Status> {
    segments.bind(memory);
    match command.pointer_kind() {
        PointerKind::Prp => {
            prp::gather(command.prp1(), command.prp2(), len_bytes, memory, hint, segments)?;
            Ok(Gathered::Whole)
        }
        // There is no metadata, so it does not matter where it would be.
        PointerKind::Sgl | PointerKind::SglWithMetadataSegment => {
            sgl::gather(command.sgl(), len_bytes, direction, memory, hint, segments, None)
        }
        PointerKind::Reserved => Err(Status::INVALID_FIELD),
    }
}

/// The same for a command that reads and may have bit buckets: `segments` is the memory of what is
/// between them.
///
/// # Errors
/// As [`gather`].
pub fn gather_with_holes(
    command: &Command,
    len_bytes: u64,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    segments: &mut Segments,
    holes: &mut Vec<Hole>,
) -> Result<(), Status> {
    holes.clear();
    match command.pointer_kind() {
        PointerKind::Sgl | PointerKind::SglWithMetadataSegment => {
            segments.bind(memory);
            sgl::gather(
                command.sgl(),
                len_bytes,
                Direction::ToGuest,
                memory,
                hint,
                segments,
                Some(holes),
            )?;
        }
        PointerKind::Prp | PointerKind::Reserved => {
            gather(command, len_bytes, Direction::ToGuest, memory, hint, segments)?;
        }
    }
    Ok(())
}

/// Appends to the list. Memory that is not there cannot be transferred to or from (figure 96, 04h).
#[inline]
fn push(
    segments: &mut Segments,
    address: u64,
    len_bytes: u64,
    hint: &mut RegionHint,
) -> Result<(), Status> {
    segments.push(GuestAddress(address), len_bytes, hint).map_err(|error| match error {
        MemoryError::TooManySegments { .. } => Status::INVALID_SGL_COUNT,
        _ => Status::DATA_TRANSFER_ERROR,
    })
}
