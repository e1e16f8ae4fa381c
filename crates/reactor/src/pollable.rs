//! The traits of everything that a reactor polls.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

use sidecore_units::Nanos;

use crate::IdleMode;

/// Names one pollable of type `P` in its reactor. Once the pollable has finished, the name is
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

// A derive would require the same traits of `P`.
impl<P> Clone for PollableId<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for PollableId<P> {}

impl<P> PartialEq for PollableId<P> {
    fn eq(&self, other: &Self) -> bool {
        (self.index, self.generation) == (other.index, other.generation)
    }
}

impl<P> fmt::Debug for PollableId<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// A pollable that stops on request and returns its state. The pollable, or its successor in
/// another process, resumes from that state.
pub trait Unit: Pollable {
    /// The state to resume from, valid while nothing is in flight.
    type State: Send + 'static;

    /// Accepts no more requests. Once nothing is in flight and guest memory is released, the unit
    /// finishes and calls `stopped` with its state.
    fn stop(&mut self, stopped: Box<dyn FnOnce(Self::State) + Send>);
}

/// The result of one poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// The pollable had no work.
    Idle,
    /// The pollable did this many units of work, and may have more.
    Busy(usize),
    /// The pollable did something that no work follows on, a sign of life for instance. If it was
    /// woken for that, it sleeps again without spinning.
    Quiet,
    /// The pollable has ended: the reactor removes it and calls [`Pollable::finish`].
    Finished,
}

/// The result of [`Pollable::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// Notifications are on, and a look after that found no work: a wake descriptor will become
    /// readable when work comes.
    Armed,
    /// Work came meanwhile; notifications are off again.
    WorkPending,
    /// The pollable makes progress only if it is polled.
    CannotSleep,
}

/// A source of work that a sidecore polls: a virtqueue, an NVMe queue pair, a NIC.
pub trait Pollable: Any {
    /// Does up to `budget` units of work as of `now`. Never blocks.
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled;

    /// The way to spend idle time. A reactor asks once, when the pollable is added.
    fn idle_mode(&self) -> IdleMode;

    /// Turns notifications on, *then* looks for work once more: otherwise a kick between the last
    /// poll and this call would be lost.
    fn arm(&mut self) -> Arm;

    /// Turns notifications off again: the pollable is polled from now on.
    fn disarm(&mut self);

    /// Calls `watch` for each descriptor that wakes the pollable. The descriptors stay the same
    /// while the pollable is in the reactor, except for changes with its
    /// [`Surroundings`](crate::Surroundings).
    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>));

    /// Clears the wake descriptors: one of them is readable.
    fn on_wake(&mut self);

    /// The time of the next poll, even if no wake descriptor becomes readable.
    fn deadline(&self) -> Option<Nanos>;

    /// The time since which a request has waited for work that other threads need a CPU for: the
    /// kernel's workers, or another thread. A reactor asks about once a millisecond.
    fn waits_since(&self) -> Option<Nanos>;

    /// Ends the pollable after [`Polled::Finished`]: the place to return its state.
    fn finish(self: Box<Self>);
}
