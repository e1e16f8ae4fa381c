//! Scatter gather lists (NVMe base 2.0, 4.1.2).
//!
//! The descriptor in the command is the data itself, or leads to a segment: an array of
//! descriptors, the last of which leads to the next segment, unless it was a Last Segment
//! descriptor that led here. Each fault has its status (figure 96):
//!
//! * SGL Descriptor Type Invalid: a type or subtype that this controller does not support (keyed,
//!   transport, offsets).
//! * Invalid SGL Segment Descriptor: a segment that is empty or ends within a descriptor, a segment
//!   before the last that does not lead to another, or a last segment that does.
//! * Invalid Number of SGL Descriptors: a segment descriptor before the end of a segment, or more
//!   descriptors than the limit.
//! * Data SGL Length Invalid: less memory than the command transfers.
//! * Data Transfer Error: an address without memory.
//!
//! Descriptors beyond the transfer are ignored (SGLS bit 18). Linux sends such lists with commands
//! that applications pass through it.

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments};
use sidecore_spec_nvme::command::{SGL_DESCRIPTOR_BYTES, sgl};

use super::{Direction, Gathered, Hole, MAX_DESCRIPTORS, MAX_HOLES, push};
use crate::Status;

const DESCRIPTOR_BYTES: u64 = SGL_DESCRIPTOR_BYTES as u64;

/// SGL descriptor types (figure 107).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    DataBlock,
    BitBucket,
    Segment,
    LastSegment,
}

/// An SGL descriptor (figure 106), ours already.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    kind: Kind,
    address: u64,
    len_bytes: u64,
}

impl Descriptor {
    fn new(bytes: [u8; SGL_DESCRIPTOR_BYTES]) -> Result<Self, Status> {
        let word = u128::from_le_bytes(bytes);
        // The upper half of the last byte is the type, the lower one the subtype: an address, and
        // nothing else.
        let (kind, subtype) = ((word >> 124) as u8, (word >> 120) as u8 & 0xF);
        let kind = match (kind, subtype) {
            (sgl::DATA_BLOCK, 0) => Kind::DataBlock,
            (sgl::BIT_BUCKET, 0) => Kind::BitBucket,
            (sgl::SEGMENT, 0) => Kind::Segment,
            (sgl::LAST_SEGMENT, 0) => Kind::LastSegment,
            _ => return Err(Status::INVALID_SGL_TYPE),
        };
        Ok(Self { kind, address: word as u64, len_bytes: u64::from((word >> 64) as u32) })
    }

    const fn leads_on(&self) -> bool {
        matches!(self.kind, Kind::Segment | Kind::LastSegment)
    }

    /// How many descriptors the segment has that this one leads to.
    const fn segment_len(&self) -> Result<u64, Status> {
        if self.len_bytes == 0 || !self.len_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(Status::INVALID_SGL_SEGMENT);
        }
        Ok(self.len_bytes / DESCRIPTOR_BYTES)
    }
}

/// The part of a transfer that is gathered so far.
struct Transfer<'a> {
    direction: Direction,
    done_bytes: u64,
    rest_bytes: u64,
    segments: &'a mut Segments,
    /// Where holes are wanted.
    holes: Option<&'a mut Vec<Hole>>,
    has_holes: bool,
}

impl Transfer<'_> {
    /// Takes a descriptor that does not lead on.
    fn take(&mut self, descriptor: Descriptor, hint: &mut RegionHint) -> Result<(), Status> {
        let Descriptor { kind, address, len_bytes } = descriptor;
        let is_bucket = kind == Kind::BitBucket;
        // 4.1.2.1: in a source a bit bucket stands for nothing; and so does what has no length
        // anywhere.
        if len_bytes == 0 || (is_bucket && self.direction == Direction::FromGuest) {
            return Ok(());
        }
        let len_bytes = len_bytes.min(self.rest_bytes);
        if len_bytes == 0 {
            return Ok(());
        }
        let start_bytes = self.done_bytes;
        self.rest_bytes = self.rest_bytes.saturating_sub(len_bytes);
        self.done_bytes = self.done_bytes.saturating_add(len_bytes);
        if !is_bucket {
            return push(self.segments, address, len_bytes, hint);
        }
        self.has_holes = true;
        if let Some(holes) = &mut self.holes {
            if holes.len() >= MAX_HOLES {
                return Err(Status::INVALID_SGL_COUNT);
            }
            holes.push(Hole { start_bytes, len_bytes });
        }
        Ok(())
    }
}

/// Appends the memory that the descriptor in a command leads to, and the holes in it if they are
/// wanted.
///
/// # Errors
/// See the table above.
pub(super) fn gather(
    first: [u8; 16],
    len_bytes: u64,
    direction: Direction,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    segments: &mut Segments,
    holes: Option<&mut Vec<Hole>>,
) -> Result<Gathered, Status> {
    let mut transfer = Transfer {
        direction,
        done_bytes: 0,
        rest_bytes: len_bytes,
        segments,
        holes,
        has_holes: false,
    };
    let first = Descriptor::new(first)?;
    if first.leads_on() {
        gather_segments(first, &mut transfer, memory, hint)?;
    } else {
        transfer.take(first, hint)?;
    }
    if transfer.rest_bytes > 0 {
        return Err(Status::INVALID_DATA_SGL_LENGTH);
    }
    Ok(if transfer.has_holes { Gathered::HasHoles } else { Gathered::Whole })
}

/// Follows the segments from the one that `segment` leads to.
fn gather_segments(
    mut segment: Descriptor,
    transfer: &mut Transfer<'_>,
    memory: &GuestMemory,
    hint: &mut RegionHint,
) -> Result<(), Status> {
    let mut room = MAX_DESCRIPTORS;
    loop {
        let count = segment.segment_len()?;
        room = room.checked_sub(count).ok_or(Status::INVALID_SGL_COUNT)?;
        let is_last = segment.kind == Kind::LastSegment;
        let mut at = segment.address;
        let mut next = None;
        for _ in 0..count {
            if next.is_some() {
                // The one before was not the last of its segment.
                return Err(Status::INVALID_SGL_COUNT);
            }
            let bytes = memory
                .read_array(GuestAddress(at), hint)
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            let descriptor = Descriptor::new(bytes)?;
            if !descriptor.leads_on() {
                transfer.take(descriptor, hint)?;
            } else if is_last {
                return Err(Status::INVALID_SGL_SEGMENT);
            } else {
                next = Some(descriptor);
            }
            // Where an address wraps around there is no memory.
            at = at.wrapping_add(DESCRIPTOR_BYTES);
        }
        match next {
            _ if is_last => return Ok(()),
            Some(next) => segment = next,
            None => return Err(Status::INVALID_SGL_SEGMENT),
        }
    }
}
