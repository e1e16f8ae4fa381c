//! What a reactor polls.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

use sidecore_units::Nanos;

use crate::IdleMode;

/// Names a pollable of type `P` in its reactor: that one alone. Once it has finished, the name is
/// invalid, even after another pollable has taken its place.
pub struct PollableId<P> {
    pub(crate) index: usize,
    pub(crate) generation: u64,
    of: PhantomData<fn() -> P>,
}

impl<P> PollableId<P> {
    pub(crate) const fn new(index: usize, generation: u64) -> Self {
        Self { index, generation, of: PhantomData }
    }
}

// Derived, these would ask the same of `P`.
impl<P> Clone for PollableId<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for PollableId<P> {}

impl<P> fmt::Debug for PollableId<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// A pollable that stops on request and hands its state back. From that state it, or its successor
/// in another process, resumes.
pub trait Unit: Pollable {
    /// The state that it resumes from, valid while nothing is in flight.
    type State: Send + 'static;

    /// Takes no more requests. Once nothing is in flight and guest memory is released, the unit
    /// finishes and calls `stopped` with its state.
    fn stop(&mut self, stopped: Box<dyn FnOnce(Self::State) + Send>);
}

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
pub trait Pollable: Any {
    /// Does up to `budget` units of work as of `now`. Never blocks.
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled;

    /// How it spends its idle time. Asked once, when a reactor takes it.
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
    fn finish(self: Box<Self>);
}
