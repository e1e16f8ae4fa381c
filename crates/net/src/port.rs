//! The seam between a station and the switch.

use std::any::Any;
use std::os::fd::BorrowedFd;

use sidecore_memory::Segments;
use sidecore_reactor::Arm;
use sidecore_spec_virtio::net::gso;
use sidecore_units::Nanos;

use crate::{DropReason, Frames};

/// Offloads of a virtio header that a station may use, or understands (virtio 1.2, 5.1.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u8);

impl Offloads {
    /// None: every frame is whole and has its checksum.
    pub const NONE: Self = Self(0);
    /// Frames whose transport checksum is still to be computed.
    pub const CHECKSUM: Self = Self(1);
    /// TCP segments over IPv4 that are larger than the MTU.
    pub const TSO4: Self = Self(2);
    /// TCP segments over IPv6 that are larger than the MTU.
    pub const TSO6: Self = Self(4);
    /// Large TCP segments with ECN.
    pub const ECN: Self = Self(8);
    /// UDP datagrams that are larger than the MTU, to be cut into datagrams.
    pub const USO: Self = Self(16);
    /// All of them.
    pub const ALL: Self = Self(31);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These, or none unless `wanted`.
    #[must_use]
    pub const fn when(self, wanted: bool) -> Self {
        if wanted { self } else { Self::NONE }
    }

    /// Whether all of `other` are among these.
    #[must_use]
    #[inline]
    pub const fn have(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The offloads that a frame with this `gso_type` needs; `None` for a type that is not known.
    #[must_use]
    #[inline]
    pub const fn of_gso(gso_type: u8) -> Option<Self> {
        let ecn = if gso_type & gso::ECN == 0 { Self::NONE } else { Self::ECN };
        match gso_type & !gso::ECN {
            gso::NONE if ecn.0 == 0 => Some(Self::NONE),
            gso::TCPV4 => Some(Self::CHECKSUM.and(Self::TSO4).and(ecn)),
            gso::TCPV6 => Some(Self::CHECKSUM.and(Self::TSO6).and(ecn)),
            gso::UDP_L4 if ecn.0 == 0 => Some(Self::CHECKSUM.and(Self::USO)),
            _ => None,
        }
    }
}

/// The properties of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Size of the virtio header in front of each frame, in both directions: 12, 10 (a legacy
    /// driver without merged buffers), or 0 for a wire without such headers.
    pub header_bytes: usize,
    /// The longest Ethernet frame in both directions, with a VLAN tag and without the virtio header
    /// and the check sequence. Frames that an offload is to cut may be longer.
    pub frame_bytes: usize,
    /// The offloads that frames from the station may ask for.
    pub sends: Offloads,
    /// The offloads that frames to the station may ask for.
    pub takes: Offloads,
    /// The most pieces of memory of a frame that the station sends.
    pub frame_segments: usize,
    /// The most pieces of memory of the buffers for a frame to the station.
    pub buffer_segments: usize,
}

/// Whether a queue carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// It does.
    Up,
    /// It does not for now, for this reason.
    Down(&'static str),
}

/// Why a queue lends no buffers for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoBuffers {
    /// It has too few at the moment: the frame may wait.
    Later,
    /// It will not take this frame, for this reason.
    Never(DropReason),
}

/// Buffers for one frame to a station.
#[derive(Debug)]
pub struct Loan {
    /// The memory of the buffers: as many bytes as were asked for, the virtio header first.
    pub segments: Segments,
    /// The number of buffers, for the virtio header.
    pub buffers: u16,
}

impl Loan {
    /// A loan of up to `segments` pieces of memory.
    #[must_use]
    pub fn with_capacity(segments: usize) -> Self {
        Self { segments: Segments::with_capacity(segments), buffers: 0 }
    }
}

/// A queue of a port, as the switch sees it: a pair of virtqueues of a NIC, or a queue of a link.
///
/// One sidecore polls the switch with all of its queues.
///
/// # Frames from the station
///
/// [`receive`](Self::receive) lends frames in the order of the station's ring. The switch copies
/// from them and gives them back oldest first, by [`give_back`](Self::give_back), so that a ring is
/// completed in its order: a VMM that finds its device server killed resumes from the used index.
///
/// # Frames to the station
///
/// [`lend`](Self::lend) lends buffers for one frame, all of them or none. The switch fills them and
/// calls [`commit`](Self::commit), or changes its mind and calls [`cancel`](Self::cancel). At most
/// one loan is out at a time.
///
/// # Duties
///
/// * Nothing on these ways allocates, locks or waits.
/// * A frame that the queue itself drops is lent with a [`DropReason`], so that it is counted and
///   keeps its place in the order.
/// * The station is hostile: whatever it does breaks its own queue, and nothing else.
pub trait PortQueue: Any + Send {
    /// The properties. The switch asks when the queue is attached, and after each
    /// [`Switch::with_queue`](crate::Switch::with_queue), where they may change.
    fn properties(&self) -> Properties;

    /// Whether the queue carries frames. The switch asks now and then.
    fn state(&self) -> QueueState;

    /// Lends frames that the station has sent, as many as there is room for in `frames`.
    fn receive(&mut self, now: Nanos, frames: &mut Frames);

    /// Takes back the oldest `count` frames that are lent.
    fn give_back(&mut self, count: usize);

    /// Lends buffers for a frame of `len_bytes` with its virtio header, in a loan that is empty and
    /// bound to no memory.
    ///
    /// # Errors
    /// Nothing is lent, and the loan may have any contents.
    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers>;

    /// Lends a buffer for each of the first frames of these sizes, with their virtio headers: as
    /// many as have one buffer that is one piece of memory. The loan's piece of each number is the
    /// buffer for the frame of that number. Returns the number of frames; for a frame without such
    /// a buffer, [`lend`](Self::lend) knows the reason.
    fn lend_each(&mut self, sizes_bytes: &[usize], loan: &mut Loan) -> usize {
        let _ = (sizes_bytes, loan);
        0
    }

    /// Gives the buffers of the loan, which are filled, to the station.
    fn commit(&mut self);

    /// Takes the buffers of the loan back. The next loan begins with them.
    fn cancel(&mut self);

    /// Shows the station all frames and buffers that it was given: the switch calls it after each
    /// batch.
    fn publish(&mut self);

    /// Ends a turn of the switch: the place to interrupt the station. `busy` says that the turn had
    /// frames from or to this queue.
    fn end_turn(&mut self, now: Nanos, busy: bool);

    /// Turns notifications on, *then* looks once more for frames.
    fn arm(&mut self) -> Arm;

    /// Turns notifications off: the queue is polled from now on.
    fn disarm(&mut self);

    /// Calls `watch` for each descriptor that wakes the queue. They stay the same while the queue
    /// is attached.
    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>));

    /// Clears the wake descriptors, one of which, or one of another queue, is readable.
    fn on_wake(&mut self);

    /// When the queue must be polled next although nothing wakes it.
    fn deadline(&self) -> Option<Nanos>;
}
