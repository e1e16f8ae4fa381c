//! Physical region pages (NVMe base 2.0, 4.1.1).
//!
//! * PRP entry 1 may begin anywhere in a page, at a multiple of four bytes.
//! * PRP entry 2 is reserved if the first page is enough, the second page if two are enough, and
//!   otherwise the address of a list, which may begin at any multiple of eight bytes.
//! * Entries of a list are whole pages. If a list does not fit the page that it is in, the last
//!   entry of that page is the address of a page in which it goes on.

use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments};
use sidecore_spec_nvme::command::PRP_BYTES;
use sidecore_units::PAGE_BYTES;

use super::{PAGE_MASK, push};
use crate::Status;

const ENTRY_BYTES: u64 = PRP_BYTES as u64;

/// Pages that follow each other are one piece: a store has less to do then.
struct Run {
    address: u64,
    len_bytes: u64,
}

impl Run {
    /// Appends a piece, and gives to `segments` what does not continue with it.
    #[inline]
    fn extend(
        &mut self,
        address: u64,
        len_bytes: u64,
        hint: &mut RegionHint,
        segments: &mut Segments,
    ) -> Result<(), Status> {
        if self.address.wrapping_add(self.len_bytes) == address {
            self.len_bytes = self.len_bytes.wrapping_add(len_bytes);
            return Ok(());
        }
        push(segments, self.address, self.len_bytes, hint)?;
        *self = Self { address, len_bytes };
        Ok(())
    }
}

/// Appends the memory of two PRP entries to `segments`.
///
/// # Errors
/// PRP Offset Invalid, or Data Transfer Error if the guest has no memory there.
#[inline]
pub(super) fn gather(
    prp1: u64,
    prp2: u64,
    len_bytes: u64,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    segments: &mut Segments,
) -> Result<(), Status> {
    if prp1 & 0b11 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let first_bytes = PAGE_BYTES.wrapping_sub(prp1 & PAGE_MASK).min(len_bytes);
    let rest_bytes = len_bytes.wrapping_sub(first_bytes);
    if rest_bytes == 0 {
        return push(segments, prp1, first_bytes, hint);
    }
    let mut run = Run { address: prp1, len_bytes: first_bytes };
    if rest_bytes <= PAGE_BYTES {
        run.extend(page(prp2)?, rest_bytes, hint, segments)?;
    } else {
        gather_list(prp2, rest_bytes, &mut run, memory, hint, segments)?;
    }
    push(segments, run.address, run.len_bytes, hint)
}

/// An entry that has to be a page's address.
#[inline]
fn page(entry: u64) -> Result<u64, Status> {
    if entry & PAGE_MASK == 0 { Ok(entry) } else { Err(Status::INVALID_PRP_OFFSET) }
}

/// Follows the list at `list` for `rest_bytes`.
fn gather_list(
    mut list: u64,
    mut rest_bytes: u64,
    run: &mut Run,
    memory: &GuestMemory,
    hint: &mut RegionHint,
    segments: &mut Segments,
) -> Result<(), Status> {
    if list & ENTRY_BYTES.wrapping_sub(1) != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    // Each round but the first, whose list may begin in a page's last entry, takes 511 pages or all
    // that are left.
    while rest_bytes > 0 {
        let pages = rest_bytes.div_ceil(PAGE_BYTES);
        let places = PAGE_BYTES.wrapping_sub(list & PAGE_MASK) / ENTRY_BYTES;
        let goes_on = pages > places;
        let mut left = pages.min(places);
        let mut at = list;
        while left > 0 {
            let (first, second) = read_two(memory, at, left, hint)?;
            let two = if left == 1 { [Some(first), None] } else { [Some(first), Some(second)] };
            for entry in two.into_iter().flatten() {
                let address = page(entry)?;
                left = left.wrapping_sub(1);
                if left == 0 && goes_on {
                    list = address;
                } else {
                    let len_bytes = rest_bytes.min(PAGE_BYTES);
                    run.extend(address, len_bytes, hint, segments)?;
                    rest_bytes = rest_bytes.wrapping_sub(len_bytes);
                }
            }
            at = at.wrapping_add(2 * ENTRY_BYTES);
        }
    }
    Ok(())
}

/// Reads the next two entries at once, or the only one that is `left`; the other is zero then.
#[inline]
fn read_two(
    memory: &GuestMemory,
    at: u64,
    left: u64,
    hint: &mut RegionHint,
) -> Result<(u64, u64), Status> {
    let no_memory = |_| Status::DATA_TRANSFER_ERROR;
    if left == 1 {
        let entry = memory.read_array::<8>(GuestAddress(at), hint).map_err(no_memory)?;
        return Ok((u64::from_le_bytes(entry), 0));
    }
    let both =
        u128::from_le_bytes(memory.read_array::<16>(GuestAddress(at), hint).map_err(no_memory)?);
    Ok((both as u64, (both >> 64) as u64))
}
