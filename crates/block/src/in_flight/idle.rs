//! Stores that have to be polled with nothing in flight.
//!
//! A store may have a change to take over, for instance a channel to close, or a signal of its
//! descriptor to take, which would wake the queue's sidecore time and again.

use super::{Context, InFlight};
use crate::Next;

/// A queue that never sleeps asks its store once in so many polls without work.
const IDLE_POLLS: u64 = 1024;

impl<C: Context> InFlight<C> {
    /// Whether a poll has to [`exchange`](Self::exchange): requests are in flight, or the store
    /// wants to be polled without.
    #[must_use]
    #[inline]
    pub const fn is_due(&self) -> bool {
        self.in_flight > 0 || self.is_called
    }

    /// The store's descriptor may be readable: has the next poll take the signal.
    #[inline]
    pub const fn call(&mut self) {
        self.is_called = true;
    }

    /// Whether the queue may sleep, after a turn that found nothing. Otherwise the next poll is
    /// [due](Self::is_due).
    pub fn may_sleep(&mut self) -> bool {
        let may_sleep = self.readiness().next != Next::Now;
        self.is_called |= !may_sleep;
        may_sleep
    }

    /// Asks the store now and then in polls without work, if nothing is in flight.
    #[inline]
    pub(super) fn look_if_idle(&mut self) {
        if self.in_flight == 0 && self.stats.empty_polls.get().is_multiple_of(IDLE_POLLS) {
            self.may_sleep();
        }
    }
}
