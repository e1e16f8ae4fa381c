//! The log of a queue's writes to guest memory, while the guest migrates.
//!
//! A queue writes the data of reads, the answer to GET_ID, and status bytes; its ring marks what it
//! writes itself. The rule: a page is marked after it was written, and before the used index makes
//! the request complete. Then a VMM that has copied the used index to the destination finds each
//! page of the request in the log.

use std::io;
use std::os::fd::AsFd;

use sidecore_block::{BlockRequest, Operation};
use sidecore_memory::DirtyLog;
use sidecore_reactor::{MakeSignal, Signal};
use sidecore_ring::Descriptor;

use crate::QueueLog;

/// The log of one queue.
#[derive(Debug)]
pub struct Log {
    pages: DirtyLog,
    /// Tells the VMM that pages were marked.
    event: Option<Box<dyn Signal>>,
}

impl Log {
    /// Makes the log of a queue, whose VMM is notified by what `signal` makes.
    ///
    /// # Errors
    /// The VMM's descriptor is no eventfd.
    pub fn new(log: QueueLog, signal: MakeSignal) -> io::Result<Self> {
        let event = log.event.map(|event| signal(event.as_fd())).transpose()?;
        Ok(Self { pages: log.pages, event })
    }

    /// The pages that were written.
    pub(crate) fn pages(&self) -> &DirtyLog {
        &self.pages
    }

    /// Marks the data of a completed request that the store has written, or the kernel for it. A
    /// failed read may have written a part.
    #[cold]
    pub(crate) fn mark_data(&self, request: &BlockRequest) {
        if request.operation == Operation::Read {
            request.segments.mark(&self.pages);
        }
    }

    /// Marks all buffers of a request that was answered without the store.
    #[cold]
    pub(crate) fn mark_buffers(&self, buffers: &[Descriptor]) {
        for buffer in buffers {
            self.pages.mark(buffer.address, u64::from(buffer.len_bytes));
        }
    }

    /// Notifies the VMM, if it wants that.
    #[cold]
    pub(crate) fn notify(&mut self) {
        if let Some(event) = &mut self.event {
            event.signal();
        }
    }

    /// Whether the VMM has truncated the file behind the log.
    pub(crate) fn is_lost(&self) -> bool {
        self.pages.is_lost()
    }
}
