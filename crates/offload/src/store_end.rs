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
    /// Requests that were received and not sent back.
    in_flight: usize,
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
            in_flight: 0,
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
        self.in_flight = self.in_flight.saturating_add(taken);
        if self.in_flight == 0 {
            return (0, 0);
        }
        self.channel.exchange(now, &mut self.queued, &mut self.ended);
        // The ring has room for all that may be in flight.
        let returned = self.returns.send(&mut self.ended);
        self.in_flight = self.in_flight.saturating_sub(returned);
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
