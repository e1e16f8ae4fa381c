//! What a reactor polls.

use std::os::fd::BorrowedFd;

use sidecore_units::Nanos;

use crate::IdleMode;

/// A pollable's place in its reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PollableId(pub(crate) usize);

/// What one poll found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Nothing to do.
    Idle,
    /// This many units of work were done; there may be more.
    Busy(usize),
    /// It is done for good: the reactor takes it out and calls
    /// [`Pollable::finish`].
    Finished,
}

/// The answer to [`Pollable::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Notifications are on, and a look after that found nothing: a wake
    /// descriptor will become readable when there is work.
    Armed,
    /// Work arrived meanwhile; notifications are off again.
    WorkPending,
    /// It has to be polled to make progress.
    CannotSleep,
}

/// Something that a sidecore polls: a virtqueue, an NVMe queue pair, a NIC.
pub trait Pollable {
    /// Does up to `budget` units of work as of `now`. Never blocks.
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled;

    /// How it wants to spend its idle time.
    fn idle_mode(&self) -> IdleMode;

    /// Turns its notifications on, *then* looks for work once more: a kick
    /// between the last poll and now would otherwise be lost.
    fn arm(&mut self) -> Arm;

    /// Turns its notifications off again: it is being polled from now on.
    fn disarm(&mut self);

    /// Calls `watch` for each descriptor that wakes it. They stay the same
    /// while it is in the reactor.
    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>));

    /// One of its descriptors is readable; takes note and clears it.
    fn on_wake(&mut self);

    /// When it must be polled next though nothing wakes it.
    fn deadline(&self) -> Option<Nanos>;

    /// Since when it has waited for something that others need a CPU for: the
    /// kernel's workers, or another thread. Asked about once a millisecond.
    fn waits_since(&self) -> Option<Nanos>;

    /// Ends it after [`Polled::Finished`]: the place to hand its state back.
    fn finish(self);
}
