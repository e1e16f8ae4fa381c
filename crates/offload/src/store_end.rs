//! The sidecore's end of a channel between a stage and its store.

use std::io;

use sidecore_block::{Batch, BlockChannel, BlockDevice, Next};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_ring::{Consumer, Producer, spsc};
use sidecore_units::Nanos;

use crate::desk::{Boxed, Opened};

/// A channel to the store, which serves a ring of requests of a stage.
pub(crate) struct StoreEnd {
    channel: Box<dyn BlockChannel>,
    requests: Consumer<Boxed>,
    returns: Producer<Boxed>,
    /// Requests for which the store had no room yet.
    queued: Batch,
    /// Requests on their way back.
    ended: Batch,
}

impl StoreEnd {
    /// Opens a channel to `below`. `number` is its place in the order of opening.
    pub(crate) fn open(
        below: &dyn BlockDevice,
        core: &CoreContext,
        (number, depth): (usize, usize),
    ) -> io::Result<(Self, Opened)> {
        let channel = below.open_channel(core, depth)?;
        let takes_write_through = channel.takes_write_through();
        let (to_sidecore, requests) = spsc(depth);
        let (returns, from_sidecore) = spsc(depth);
        let end = Self {
            channel,
            requests,
            returns,
            queued: Batch::with_capacity(depth),
            ended: Batch::with_capacity(depth),
        };
        let opened = Opened {
            store: number,
            requests: to_sidecore,
            returns: from_sidecore,
            takes_write_through,
        };
        Ok((end, opened))
    }

    pub(crate) fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.channel.attach_memory(memory)
    }

    /// Gives the store what the stage has sent, and sends back what is done. Returns the numbers of
    /// requests that came from the stage, and that went there.
    #[inline]
    pub(crate) fn serve(&mut self, now: Nanos) -> (usize, usize) {
        let taken = self.requests.receive(&mut self.queued);
        // Also with nothing in flight: only the store can clear its wake descriptor, and one that
        // stays readable keeps the sidecore from sleeping.
        self.channel.exchange(now, &mut self.queued, &mut self.ended);
        // The ring has room for all that may be in flight.
        let returned = self.returns.send(&mut self.ended);
        (taken, returned)
    }

    /// The time of the next call of [`serve`](Self::serve).
    #[inline]
    pub(crate) fn next(&self) -> Next {
        if !self.requests.is_empty() || !self.queued.is_empty() || !self.ended.is_empty() {
            return Next::Now;
        }
        self.channel.readiness().next
    }

    pub(crate) fn channel(&self) -> &dyn BlockChannel {
        self.channel.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, BorrowedFd};

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
    use sidecore_block::{Geometry, Readiness};

    use super::*;

    /// A store whose wake descriptor is readable until it is asked.
    struct Woken;

    struct WokenChannel(std::os::fd::OwnedFd);

    impl BlockDevice for Woken {
        fn geometry(&self) -> Geometry {
            Geometry::new(1 << 20, 512)
        }

        fn open_channel(&self, _: &CoreContext, _: usize) -> io::Result<Box<dyn BlockChannel>> {
            Ok(Box::new(WokenChannel(eventfd(1, EventfdFlags::NONBLOCK)?)))
        }
    }

    impl BlockChannel for WokenChannel {
        fn submit(&mut self, _: Nanos, _: &mut Batch) {}

        fn poll(&mut self, _: Nanos, _: &mut Batch) {
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }

        fn readiness(&self) -> Readiness {
            Readiness { in_flight: 0, next: Next::OnWake }
        }

        fn waits_since(&self) -> Option<Nanos> {
            None
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }

    #[test]
    fn a_store_that_wakes_the_sidecore_is_asked_with_nothing_in_flight_too() {
        let (mut end, _) = StoreEnd::open(&Woken, &CoreContext::default(), (0, 1)).unwrap();
        let is_readable = |end: &StoreEnd| {
            let fd = end.channel().wake_fd().unwrap();
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).unwrap() > 0
        };
        assert!(is_readable(&end));
        assert_eq!(end.serve(Nanos(1)), (0, 0));
        assert!(!is_readable(&end));
    }
}
