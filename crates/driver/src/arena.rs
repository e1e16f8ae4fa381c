//! The memory that the client shares with the device: one memfd, mapped here as one piece, told to
//! the device as one region or several.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress, Window};
use sidecore_ring::driver::SharedMemory;
use sidecore_units::PAGE_BYTES;

use crate::error::ClientError;

/// Made-up addresses, different from each other and from where the memory really is, so that a
/// device which mixes them up is noticed at once.
const GUEST_BASE: u64 = 0x1_0000_0000;
const USER_BASE: u64 = 0x5_0000_0000;

const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// One region, as the device is told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub guest_address: u64,
    pub len_bytes: u64,
    pub user_address: u64,
    pub file_offset_bytes: u64,
}

/// The shared memory, given out from its start.
#[derive(Debug)]
pub(crate) struct Arena {
    file: OwnedFd,
    memory: GuestMemory,
    guest_base: u64,
    len_bytes: u64,
    page_bytes: u64,
    given_bytes: u64,
}

/// A part of the arena.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub window: Window,
    pub guest_address: u64,
    pub user_address: u64,
}

impl Arena {
    pub(crate) fn new(len_bytes: u64, huge_pages: bool) -> Result<Self, ClientError> {
        Self::new_at(GUEST_BASE, len_bytes, huge_pages)
    }

    /// As [`Arena::new`], at a guest address of the caller's choice.
    pub(crate) fn new_at(
        guest_base: u64,
        len_bytes: u64,
        huge_pages: bool,
    ) -> Result<Self, ClientError> {
        let in_huge = len_bytes.max(1).next_multiple_of(HUGE_PAGE_BYTES);
        let huge = huge_pages
            .then(|| file(in_huge, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB))
            .and_then(Result::ok);
        let (file, len_bytes, page_bytes) = match huge {
            Some(file) => (file, in_huge, HUGE_PAGE_BYTES),
            None => {
                let len_bytes = len_bytes.max(1).next_multiple_of(PAGE_BYTES);
                let file = file(len_bytes, MemfdFlags::empty())
                    .map_err(ClientError::io("shared memory"))?;
                (file, len_bytes, PAGE_BYTES)
            }
        };
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(guest_base),
            user_address: UserAddress(USER_BASE),
            len_bytes,
            file: file
                .try_clone()
                .map_err(|source| ClientError::Io { what: "shared memory", source })?,
            file_offset_bytes: 0,
        }])?;
        let arena = Self { file, memory, guest_base, len_bytes, page_bytes, given_bytes: 0 };
        // Touched here and now, so that no request waits for a page.
        let whole = usize::try_from(len_bytes)
            .map_err(|_| ClientError::Options("too much memory".to_owned()))?;
        SharedMemory::new(arena.memory.window(UserAddress(USER_BASE), whole, 1)?).fill_zero();
        Ok(arena)
    }

    /// The next `len_bytes`, on a page of their own.
    pub(crate) fn give(&mut self, len_bytes: usize) -> Result<Part, ClientError> {
        let at = self.given_bytes.next_multiple_of(PAGE_BYTES);
        let window = self.memory.window(UserAddress(USER_BASE + at), len_bytes, 4096)?;
        self.given_bytes = at + len_bytes as u64;
        Ok(Part { window, guest_address: self.guest_base + at, user_address: USER_BASE + at })
    }

    /// The arena in at most `count` regions of whole pages.
    pub(crate) fn regions(&self, count: u8) -> Vec<Region> {
        let share =
            (self.len_bytes / u64::from(count.max(1))).max(1).next_multiple_of(self.page_bytes);
        let starts = (0..self.len_bytes).step_by(usize::try_from(share).unwrap_or(usize::MAX));
        starts
            .map(|start| Region {
                guest_address: self.guest_base + start,
                len_bytes: share.min(self.len_bytes - start),
                user_address: USER_BASE + start,
                file_offset_bytes: start,
            })
            .collect()
    }

    /// The guest address behind its last byte.
    pub(crate) fn end(&self) -> u64 {
        self.guest_base + self.len_bytes
    }

    /// Whether a guest address is its own.
    pub(crate) fn contains(&self, address: u64) -> bool {
        (self.guest_base..self.end()).contains(&address)
    }

    pub(crate) fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn is_huge(&self) -> bool {
        self.page_bytes == HUGE_PAGE_BYTES
    }
}

fn file(len_bytes: u64, kind: MemfdFlags) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("sidecore-driver", MemfdFlags::CLOEXEC | kind)?;
    rustix::fs::ftruncate(&file, len_bytes)?;
    // Reserves the pages: a huge page that is missing is an error here and not a fault later.
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len_bytes)?;
    Ok(file)
}
