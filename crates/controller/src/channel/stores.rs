//! The stores of a channel's translated requests: the physical store, and the file through its
//! filesystem for a host file that another program has open.

use std::io;

use sidecore_block::{Batch, BlockChannel, BlockRequest, Next};
use sidecore_memory::GuestMemory;
use sidecore_reactor::WakeSet;
use sidecore_units::Nanos;

/// The channels below a function's channel.
pub(crate) struct Stores {
    /// To the store with the extents.
    pub(crate) physical: Box<dyn BlockChannel>,
    /// To the same blocks through a filesystem.
    pub(crate) through: Option<Box<dyn BlockChannel>>,
}

/// Requests queued for each store.
pub(super) struct StoreQueues {
    physical: Batch,
    through: Batch,
}

impl StoreQueues {
    pub(super) fn with_capacity(count: usize) -> Self {
        Self { physical: Batch::with_capacity(count), through: Batch::new() }
    }

    #[inline]
    pub(super) fn push(&mut self, request: Box<BlockRequest>, through: bool) {
        if through { self.through.push(request) } else { self.physical.push(request) }
    }

    /// Adds all of `requests` for the physical store.
    #[inline]
    pub(super) fn extend(&mut self, requests: impl Iterator<Item = Box<BlockRequest>>) {
        self.physical.extend(requests);
    }

    /// Removes the last request.
    pub(super) fn pop(&mut self, through: bool) -> Option<Box<BlockRequest>> {
        if through { self.through.pop() } else { self.physical.pop() }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.physical.is_empty() && self.through.is_empty()
    }
}

impl Stores {
    /// Adds the stores' wake descriptors to `wake`.
    pub(super) fn watch(&self, wake: &WakeSet) -> io::Result<()> {
        for store in self.all() {
            if let Some(fd) = store.wake_fd() {
                wake.add(fd)?;
            }
        }
        Ok(())
    }

    fn all(&self) -> impl Iterator<Item = &dyn BlockChannel> {
        std::iter::once(&*self.physical).chain(self.through.as_deref())
    }

    pub(super) fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        if let Some(through) = &mut self.through {
            through.attach_memory(memory)?;
        }
        self.physical.attach_memory(memory)
    }

    #[inline]
    pub(super) fn submit(&mut self, now: Nanos, for_store: &mut StoreQueues) {
        if !for_store.physical.is_empty() {
            self.physical.submit(now, &mut for_store.physical);
        }
        if let Some(through) = &mut self.through
            && !for_store.through.is_empty()
        {
            through.submit(now, &mut for_store.through);
        }
    }

    #[inline]
    pub(super) fn poll(&mut self, now: Nanos, returned: &mut Batch) {
        self.physical.poll(now, returned);
        if let Some(through) = &mut self.through {
            through.poll(now, returned);
        }
    }

    /// When to poll the stores next.
    pub(super) fn next(&self) -> Next {
        self.all().map(|store| store.readiness().next).min().unwrap_or(Next::OnWake)
    }

    /// When the oldest request that a store waits for was accepted.
    pub(super) fn waits_since(&self) -> Option<Nanos> {
        self.all().filter_map(BlockChannel::waits_since).min()
    }
}
