//! One queue of a device: requests come as completions of an io_uring, and are completed by
//! submissions to it.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use io_uring::opcode;
use rustix::mm::{MapFlags, ProtFlags};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, SharedPages};
use sidecore_units::PAGE_BYTES;

use super::partitions::UblkPartitions;
use super::wire::{self, COMMIT_AND_FETCH_REQ, DEPTH_MAX, FETCH_REQ, IoDescriptor};
use crate::file::ring::{Completion, FILE, Ring};

/// An answer of the kernel about a tag: zero if it carries a request, or a negative errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoResult {
    /// The tag.
    pub tag: u16,
    /// Zero for a request.
    pub code: i32,
}

/// A queue of a device, on the thread that serves it.
pub struct UblkQueue {
    ring: Ring,
    descriptors: Descriptors,
    buffers: SharedPages,
    /// The address of the buffers here.
    base: *mut u8,
    index: u16,
    depth: u16,
    buffer_bytes: usize,
    /// Tags that the kernel has, or that have a request here: until it aborts them.
    open: usize,
    completions: Vec<Completion>,
}

/// Opens the device of this number for its queues. The kernel lets one process open it, once.
///
/// # Errors
/// The kernel's.
pub fn open_ublk_device(number: u32) -> io::Result<OwnedFd> {
    let path = format!("/dev/ublkc{number}");
    OpenOptions::new().read(true).write(true).open(path).map(OwnedFd::from)
}

impl UblkQueue {
    /// Takes a queue of a device, and has it fetch requests for all its tags. All calls have to
    /// come from the thread of this call.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(
        device: BorrowedFd<'_>,
        index: u16,
        depth: u16,
        io_bytes_max: u32,
        partitions: UblkPartitions,
    ) -> io::Result<Self> {
        let buffer_bytes = (io_bytes_max as usize).next_multiple_of(PAGE_BYTES as usize);
        let buffers = SharedPages::new("ublk", buffer_bytes * usize::from(depth).max(1))?;
        touch(buffers.memory(), buffers.len_bytes())?;
        let (base, _) = buffers.memory().host_ranges().next().ok_or(io::ErrorKind::OutOfMemory)?;
        let mut queue = Self {
            ring: Ring::new(device, device, u32::from(depth))?,
            descriptors: Descriptors::map(device, index, depth)?,
            buffers,
            base,
            index,
            depth,
            buffer_bytes,
            open: usize::from(depth),
            completions: Vec::with_capacity(usize::from(depth)),
        };
        for tag in 0..depth {
            queue.push(FETCH_REQ, tag, 0);
        }
        partitions.fetch(|| {
            queue.ring.turn();
        })?;
        Ok(queue)
    }

    fn push(&mut self, code: u32, tag: u16, result: i32) {
        let place = usize::from(tag) * self.buffer_bytes;
        let address = self.base.wrapping_add(place).expose_provenance() as u64;
        let entry = opcode::UringCmd16::new(FILE, code)
            .cmd(wire::io_command(self.index, tag, result, address))
            .build()
            .user_data(tag.into());
        // SAFETY: the buffer is mapped until the kernel has aborted the tag; see `drop`.
        unsafe { self.ring.push(&entry) };
    }

    /// The number of tags.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// The memory of all buffers.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        self.buffers.memory()
    }

    /// Where the data of a tag lie in [`memory`](Self::memory).
    #[must_use]
    pub fn buffer(&self, tag: u16) -> GuestAddress {
        GuestAddress(u64::from(tag) * self.buffer_bytes as u64)
    }

    /// The size of a buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes as u64
    }

    /// The request of a tag. The kernel does not change it before it is completed.
    #[must_use]
    pub fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.descriptors.get(tag)
    }

    /// Completes the request of a tag with the bytes done or a negative errno, and fetches the next
    /// one, both with the next [`turn`](Self::turn).
    pub fn commit(&mut self, tag: u16, result: i32) {
        self.push(COMMIT_AND_FETCH_REQ, tag, result);
    }

    /// Gives the kernel what was committed, and appends what it has answered, with one system call
    /// at most. Returns whether there was a call.
    pub fn turn(&mut self, answers: &mut Vec<IoResult>) -> bool {
        let called = self.ring.turn();
        self.ring.take(&mut self.completions);
        for completion in self.completions.drain(..) {
            let answer = IoResult { tag: completion.user_data as u16, code: completion.result };
            // The kernel fetches nothing more for this tag.
            self.open -= usize::from(answer.code < 0);
            answers.push(answer);
        }
        called
    }

    /// Whether a [`turn`](Self::turn) has something to do.
    pub fn is_ready(&mut self) -> bool {
        self.ring.has_queued() || self.ring.is_ready()
    }

    /// Whether completions wait for the next [`turn`](Self::turn).
    pub fn has_queued(&mut self) -> bool {
        self.ring.has_queued()
    }
}

impl AsFd for UblkQueue {
    /// Readable while [`turn`](Self::turn) has something to take.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Drop for UblkQueue {
    /// If the device was not stopped, the kernel may still copy a request's data to a buffer on
    /// this thread, until it has noticed that the ring is gone. The buffers then stay for the rest
    /// of the process, which is ending.
    fn drop(&mut self) {
        if self.open > 0 {
            std::mem::forget(self.buffers.memory().clone());
        }
    }
}

/// Has the kernel allocate pages, so that no request has to wait for one.
fn touch(memory: &GuestMemory, len_bytes: usize) -> io::Result<()> {
    let mut hint = RegionHint::default();
    for page in (0..len_bytes as u64).step_by(PAGE_BYTES as usize) {
        let touched = memory.write_slice(GuestAddress(page), &[0], &mut hint);
        touched.map_err(io::Error::other)?;
    }
    Ok(())
}

/// The requests' descriptors, which the kernel writes.
struct Descriptors {
    base: NonNull<IoDescriptor>,
    len_bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(device: BorrowedFd<'_>, index: u16, depth: u16) -> io::Result<Self> {
        let bytes = |count: usize| {
            (count * size_of::<IoDescriptor>()).next_multiple_of(PAGE_BYTES as usize)
        };
        let len_bytes = bytes(depth.into());
        let offset = u64::from(index) * bytes(DEPTH_MAX) as u64;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len_bytes, depth })
    }

    fn get(&self, tag: u16) -> IoDescriptor {
        if tag >= self.depth {
            return IoDescriptor::default();
        }
        // SAFETY: within the mapping, which lives as long as `self`; the kernel has written it
        // before the completion that named the tag.
        unsafe { self.base.add(tag.into()).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and no reference to it is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
