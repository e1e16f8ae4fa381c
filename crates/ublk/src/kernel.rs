//! The seam between a queue's unit and the kernel.

use std::os::fd::{AsFd as _, BorrowedFd};

use sidecore_linux::{IoDescriptor, IoResult, UblkQueue};
use sidecore_memory::{GuestAddress, GuestMemory};

/// The kernel's side of a queue. A tag is either the kernel's, which will answer it with a request
/// or an error, or it carries a request here, until [`commit`](Kernel::commit).
pub trait Kernel: 'static {
    /// The number of tags.
    fn depth(&self) -> u16;

    /// The memory of all buffers.
    fn memory(&self) -> &GuestMemory;

    /// Where the data of a tag lie.
    fn buffer(&self, tag: u16) -> GuestAddress;

    /// The size of a buffer.
    fn buffer_bytes(&self) -> u64;

    /// The request that a tag carries.
    fn descriptor(&self, tag: u16) -> IoDescriptor;

    /// Completes the request of a tag with the bytes done or a negative errno, at the next turn.
    fn commit(&mut self, tag: u16, result: i32);

    /// Gives the kernel what was committed and appends its answers, with one system call at most.
    /// Returns whether there was a call.
    fn turn(&mut self, answers: &mut Vec<IoResult>) -> bool;

    /// Whether a turn has something to do.
    fn is_ready(&mut self) -> bool;

    /// Whether completions wait for the next turn.
    fn has_queued(&mut self) -> bool;

    /// Readable while a turn has something to take.
    fn wake_fd(&self) -> BorrowedFd<'_>;
}

impl Kernel for UblkQueue {
    fn depth(&self) -> u16 {
        self.depth()
    }

    fn memory(&self) -> &GuestMemory {
        self.memory()
    }

    fn buffer(&self, tag: u16) -> GuestAddress {
        self.buffer(tag)
    }

    fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes()
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.descriptor(tag)
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.commit(tag, result);
    }

    fn turn(&mut self, answers: &mut Vec<IoResult>) -> bool {
        self.turn(answers)
    }

    fn is_ready(&mut self) -> bool {
        self.is_ready()
    }

    fn has_queued(&mut self) -> bool {
        self.has_queued()
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}
