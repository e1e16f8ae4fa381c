//! Where a channel's translated requests go: the physical store, and for a host file
//! that is not ours alone, the file.

use std::io;

use sidecore_block::{Batch, BlockChannel, BlockRequest, Next};
use sidecore_memory::GuestMemory;
use sidecore_reactor::WakeSet;
use sidecore_units::Nanos;

/// The channels below a function's.
pub(crate) struct Stores {
    /// To the store that extents lie on.
    pub(crate) physical: Box<dyn BlockChannel>,
    /// To the same blocks through a filesystem.
    pub(crate) through: Option<Box<dyn BlockChannel>>,
}

/// Requests that go to each of them.
pub(super) struct Outgoing {
    physical: Batch,
    through: Batch,
}

impl Outgoing {
    pub(super) fn with_capacity(count: usize) -> Self {
        Self { physical: Batch::with_capacity(count), through: Batch::new() }
    }

    #[inline]
    pub(super) fn push(&mut self, request: Box<BlockRequest>, through: bool) {
        if through { self.through.push(request) } else { self.physical.push(request) }
    }

    /// Adds all of `requests`, which go to the physical store.
    #[inline]
    pub(super) fn extend(&mut self, requests: impl Iterator<Item = Box<BlockRequest>>) {
        self.physical.extend(requests);
    }

    /// Takes the last one back.
    pub(super) fn pop(&mut self, through: bool) -> Option<Box<BlockRequest>> {
        if through { self.through.pop() } else { self.physical.pop() }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.physical.is_empty() && self.through.is_empty()
    }
}

impl Stores {
    /// Has `wake` become readable when one of them has something to hand back.
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
    pub(super) fn submit(&mut self, now: Nanos, outgoing: &mut Outgoing) {
        if !outgoing.physical.is_empty() {
            self.physical.submit(now, &mut outgoing.physical);
        }
        if let Some(through) = &mut self.through
            && !outgoing.through.is_empty()
        {
            through.submit(now, &mut outgoing.through);
        }
    }

    #[inline]
    pub(super) fn poll(&mut self, now: Nanos, returned: &mut Batch) {
        self.physical.poll(now, returned);
        if let Some(through) = &mut self.through {
            through.poll(now, returned);
        }
    }

    /// When to poll them next.
    pub(super) fn next(&self) -> Next {
        self.all().map(|store| store.readiness().next).min().unwrap_or(Next::OnWake)
    }

    /// When the oldest request that one of them waits for was taken.
    pub(super) fn waits_since(&self) -> Option<Nanos> {
        self.all().filter_map(BlockChannel::waits_since).min()
    }
}
