//! The device's side of a virtqueue, whichever format it has.

use sidecore_memory::{DirtyLog, GuestMemory, RegionHint};

use crate::packed::PackedDevice;
use crate::split::SplitDevice;
use crate::{Chain, Descriptor, RingError, RingFormat, RingLayout, RingState, Token};

/// A virtqueue that a device serves.
///
/// One thread owns it and polls both of its directions, so nothing in it is locked (FAST'12, 5.2).
#[derive(Debug)]
pub struct DeviceRing {
    format: Format,
    hint: RegionHint,
}

#[derive(Debug)]
enum Format {
    Split(SplitDevice),
    Packed(PackedDevice),
}

impl DeviceRing {
    /// Takes up a ring in `memory` where `state` left it.
    ///
    /// # Errors
    /// The layout is impossible, outside of memory or misaligned.
    pub fn new(
        memory: &GuestMemory,
        layout: &RingLayout,
        state: RingState,
    ) -> Result<Self, RingError> {
        let format = match layout.format {
            RingFormat::Split => Format::Split(SplitDevice::new(memory, layout, state)?),
            RingFormat::Packed => Format::Packed(PackedDevice::new(memory, layout, state)?),
        };
        Ok(Self { format, hint: RegionHint::default() })
    }

    /// Marks the pages that the device writes in `log` from now on, or in none: those of the split
    /// ring's used area, and of the packed ring's descriptors and device event area.
    pub fn set_log(&mut self, log: Option<&DirtyLog>) {
        match &mut self.format {
            Format::Split(ring) => ring.set_log(log),
            Format::Packed(ring) => ring.set_log(log),
        }
    }

    /// Takes the next request, its buffers in `chain`; `None` when there is
    /// none. `memory` is what the ring was made with.
    ///
    /// # Errors
    /// The driver wrote nonsense. Nothing was taken; the ring is not usable
    /// any more and its owner has to stop.
    #[inline]
    pub fn pop(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<Token>, RingError> {
        match &mut self.format {
            Format::Split(ring) => ring.pop(memory, chain, &mut self.hint),
            Format::Packed(ring) => ring.pop(memory, chain, &mut self.hint),
        }
    }

    /// Takes up to `limit` requests that have one descriptor each, all for the device to write or
    /// all to read, and calls `take` with each. A request that `take` does not want (false) stays
    /// in the ring. Returns the number of those that were taken.
    ///
    /// Ends in front of a request of any other shape, which [`pop`](Self::pop) takes, or refuses.
    ///
    /// # Errors
    /// As [`pop`](Self::pop), after which no request was taken.
    #[inline]
    pub fn pop_each(
        &mut self,
        memory: &GuestMemory,
        is_writable: bool,
        limit: usize,
        take: impl FnMut(Token, Descriptor) -> bool,
    ) -> Result<usize, RingError> {
        match &mut self.format {
            Format::Split(ring) => ring.pop_each(memory, &mut self.hint, is_writable, limit, take),
            Format::Packed(ring) => Ok(ring.pop_each(is_writable, limit, take)),
        }
    }

    /// Gives a request back, having written `written_bytes` to its buffers. The driver sees it
    /// after the next [`publish`](Self::publish), or before.
    #[inline]
    #[allow(clippy::needless_pass_by_value)] // completing ends the token
    pub fn complete(&mut self, token: Token, written_bytes: u32) {
        match &mut self.format {
            Format::Split(ring) => ring.complete(&token, written_bytes),
            Format::Packed(ring) => ring.complete(&token, written_bytes),
        }
    }

    /// Gives back these requests, which the device has only read, in their order.
    #[inline]
    pub fn complete_read(&mut self, done: impl Iterator<Item = Token>) {
        match &mut self.format {
            Format::Split(ring) => done.for_each(|token| ring.complete(&token, 0)),
            Format::Packed(ring) => done.for_each(|token| ring.complete(&token, 0)),
        }
    }

    /// Gives back the requests of `done` with the bytes written to each, in their order, and
    /// empties it. The driver sees the first of them only together with all others: a frame in
    /// several buffers is whole when its first buffer shows (virtio 1.2, 5.1.6.3.1).
    #[inline]
    pub fn complete_together(&mut self, done: &mut Vec<(Token, u32)>) {
        match &mut self.format {
            Format::Split(ring) => {
                for (token, written_bytes) in done.iter() {
                    ring.complete(token, *written_bytes);
                }
                done.clear();
            }
            Format::Packed(ring) => ring.complete_together(done),
        }
    }

    /// Forgets a request without answering it: the driver broke the rules with
    /// it, and an answer without a status could be taken for a good one.
    #[allow(clippy::needless_pass_by_value)] // abandoning ends the token
    pub fn abandon(&mut self, token: Token) {
        match &mut self.format {
            Format::Split(ring) => ring.abandon(),
            Format::Packed(ring) => ring.abandon(&token),
        }
    }

    /// Undoes the last [`pop`](Self::pop) that was neither completed nor undone: the next one takes
    /// the same request. Of several, the last one taken is put back first.
    #[inline]
    #[allow(clippy::needless_pass_by_value)] // putting it back ends the token
    pub fn put_back(&mut self, token: Token) {
        match &mut self.format {
            Format::Split(ring) => ring.put_back(),
            Format::Packed(ring) => ring.put_back(&token),
        }
    }

    /// Makes all completions visible to the driver.
    #[inline]
    pub fn publish(&mut self) {
        match &mut self.format {
            Format::Split(ring) => ring.publish(),
            // Each completion became visible with its flags.
            Format::Packed(_) => {}
        }
    }

    /// Whether the driver wants to be called for what was published since the
    /// last time. Costs a full fence: ask once a batch.
    #[inline]
    pub fn take_call(&mut self) -> bool {
        match &mut self.format {
            Format::Split(ring) => ring.take_call(),
            Format::Packed(ring) => ring.take_call(),
        }
    }

    /// Asks for kicks, then looks once more: true if something is there already.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    pub fn arm_kicks(&mut self, memory: &GuestMemory) -> Result<bool, RingError> {
        match &mut self.format {
            Format::Split(ring) => ring.arm_kicks(memory, &mut self.hint),
            Format::Packed(ring) => Ok(ring.arm_kicks()),
        }
    }

    /// Asks for no kicks: the ring is being polled.
    pub fn suppress_kicks(&mut self) {
        match &mut self.format {
            Format::Split(ring) => ring.suppress_kicks(),
            Format::Packed(ring) => ring.suppress_kicks(),
        }
    }

    /// To be called now and then while polling, so that suppression lasts for ever.
    #[inline]
    pub fn keep_suppressed(&mut self) {
        match &mut self.format {
            Format::Split(ring) => ring.keep_suppressed(),
            Format::Packed(_) => {}
        }
    }

    /// Requests taken and not yet completed.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> u16 {
        match &self.format {
            Format::Split(ring) => ring.in_flight(),
            Format::Packed(ring) => ring.in_flight(),
        }
    }

    /// Where the ring stands, to be taken up again later. Meaningful when nothing is in flight.
    #[must_use]
    pub fn state(&self) -> RingState {
        match &self.format {
            Format::Split(ring) => ring.state(),
            Format::Packed(ring) => ring.state(),
        }
    }
}
