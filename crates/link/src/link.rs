//! The frame seam.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_reactor::Arm;
use sidecore_units::Nanos;

use crate::{Buffer, Frame, LinkAddress, LinkStats, Properties};

/// Whether a link carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// It does.
    Up,
    /// It does not for now, for this reason: frames to send wait.
    Down(&'static str),
    /// It never will again, for this reason: frames to send are dropped.
    Closed(&'static str),
}

/// A wire, or one queue of it, as its sidecore sees it.
///
/// # Receiving
///
/// [`receive`](Self::receive) lends frames in the link's own memory. Each comes back by
/// [`give_back`](Self::give_back), in any order; until then the link puts nothing else there.
///
/// # Sending
///
/// [`buffers`](Self::buffers) lends empty buffers for frames to one address. The caller writes a
/// frame into each, addresses it and gives it to [`send`](Self::send), in any order, or back by
/// [`cancel`](Self::cancel). Frames that are sent to one address leave in the order in which they
/// were sent. A link without free buffers lends none: that is the back pressure.
///
/// # Duties
///
/// * Nothing on these ways allocates, locks or makes a system call for each frame; one for each
///   batch is permitted.
/// * A frame that is not delivered or not sent is counted by its reason in [`stats`](Self::stats).
/// * A frame has the bytes that its sender sent, then zeros where the medium pads, and nothing
///   else.
/// * A peer can damage its own frames, and nothing else; neither a peer nor the medium can make the
///   link panic or wait.
pub trait Link: Send {
    /// The link's properties, which never change.
    fn properties(&self) -> &Properties;

    /// The memory that all frames and buffers of the link lie in, for as long as a clone is held. A
    /// receive may change it, when a peer comes or goes: then it still has all frames and buffers
    /// that are lent.
    fn memory(&self) -> &GuestMemory;

    /// The counters.
    fn stats(&self) -> &Arc<LinkStats>;

    /// Whether it carries frames.
    fn state(&self) -> LinkState;

    /// Appends up to `limit` frames that have arrived by `now`, those of a sender in the order of
    /// their arrival. A link with a queue for each sender takes few frames of those that send many
    /// while another one waits for an answer to each of its own.
    fn receive(&mut self, now: Nanos, limit: usize, frames: &mut Vec<Frame>);

    /// Takes all of `frames` back.
    fn give_back(&mut self, frames: &mut Vec<Frame>);

    /// Appends up to `count` empty buffers for frames to `to`. If there are fewer, the link wakes
    /// its sidecore when there are more. For a peer that is gone there are none.
    fn buffers(&mut self, to: LinkAddress, count: usize, buffers: &mut Vec<Buffer>);

    /// Sends all of `buffers`, in their order. A buffer without a destination, or with a frame of
    /// no or too many bytes, is dropped and counted. A peer that was just going to sleep may be
    /// woken only by an [`arm`](Self::arm), by a [`receive`](Self::receive) that finds no frame, or
    /// by one of the next few that find some.
    fn send(&mut self, now: Nanos, buffers: &mut Vec<Buffer>);

    /// Takes all of `buffers` back unsent.
    fn cancel(&mut self, buffers: &mut Vec<Buffer>);

    /// Turns notifications on, *then* looks once more: for a frame, and for a buffer if
    /// [`buffers`](Self::buffers) had too few.
    fn arm(&mut self) -> Arm;

    /// Turns notifications off: the link is polled from now on.
    fn disarm(&mut self);

    /// The descriptor that becomes readable when an armed link has work. It stays the same for the
    /// link's life. A frame that is lent does not make it readable.
    fn wake_fd(&self) -> BorrowedFd<'_>;

    /// The descriptor was readable: takes note and clears it.
    fn on_wake(&mut self);

    /// When the link must be polled next although nothing wakes it: frames are still to be sent, or
    /// are under way on a simulated wire.
    fn deadline(&self) -> Option<Nanos>;
}
