//! Another channel in the place of a queue's, while the queue is in use.

use std::io;

use sidecore_memory::GuestMemory;

use super::{Context, InFlight};
use crate::BlockChannel;

/// Called on the queue's sidecore when it has paused. Dropped if the queue ends before.
pub type Paused = Box<dyn FnOnce() + Send>;

/// A queue whose channel can be replaced while its guest uses it, in three steps on its sidecore:
/// the next channel is opened beside the one in use, the queue pauses, and the channels change
/// places. Several queues of a device pause before the first of them goes on.
pub trait SwapChannel {
    /// The requests that a channel of the queue has to take.
    fn depth(&self) -> usize;

    /// Keeps a channel beside the one in use, for the queue's memory. Returns the one that was kept
    /// before.
    ///
    /// # Errors
    /// The channel cannot be used; it is dropped then.
    fn set_spare(
        &mut self,
        spare: Option<Box<dyn BlockChannel>>,
    ) -> io::Result<Option<Box<dyn BlockChannel>>>;

    /// Takes no requests from the guest until [`resume`](Self::resume), and calls `paused` once
    /// none is in flight.
    fn pause(&mut self, paused: Paused);

    /// Takes requests again. If it `swaps`, and the queue has paused, the spare channel is in use
    /// from now on, and the one that was is the spare.
    fn resume(&mut self, swaps: bool);
}

/// Whether a queue takes requests.
#[derive(Default)]
pub(super) enum Pause {
    /// It does.
    #[default]
    No,
    /// Not any more. This is called when nothing is in flight.
    Wanted(Paused),
    /// Not any more, and nothing is in flight.
    Complete,
}

impl Pause {
    /// Nothing is in flight.
    #[inline]
    pub(super) fn complete(&mut self) {
        if matches!(self, Self::Wanted(_))
            && let Self::Wanted(paused) = std::mem::replace(self, Self::Complete)
        {
            paused();
        }
    }
}

impl<C: Context> InFlight<C> {
    /// See [`SwapChannel::set_spare`].
    ///
    /// # Errors
    /// The store refuses the memory.
    pub fn set_spare(
        &mut self,
        mut spare: Option<Box<dyn BlockChannel>>,
        memory: &GuestMemory,
    ) -> io::Result<Option<Box<dyn BlockChannel>>> {
        if let Some(spare) = &mut spare {
            spare.attach_memory(memory)?;
        }
        Ok(std::mem::replace(&mut self.spare, spare))
    }

    /// The channel beside the one in use.
    #[must_use]
    pub fn spare(&self) -> Option<&dyn BlockChannel> {
        self.spare.as_deref()
    }

    /// Has the spare channel and the one in use change places. Nothing may be in flight.
    pub fn swap(&mut self) {
        if let Some(spare) = self.spare.take() {
            self.spare = self.set_channel(Some(spare));
        }
    }

    /// See [`SwapChannel::pause`]: the poll that ends with nothing in flight calls `paused`.
    pub fn pause(&mut self, paused: Paused) {
        self.pause = Pause::Wanted(paused);
    }

    /// Whether the front end takes no requests.
    #[must_use]
    #[inline]
    pub fn is_paused(&self) -> bool {
        !matches!(self.pause, Pause::No)
    }

    /// See [`SwapChannel::resume`].
    pub fn resume(&mut self, swaps: bool) {
        if swaps && matches!(self.pause, Pause::Complete) {
            self.swap();
        }
        self.pause = Pause::No;
    }
}
