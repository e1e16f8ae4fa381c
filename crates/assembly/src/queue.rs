//! What sidecores poll: the queues of every kind of front end.

use std::os::fd::BorrowedFd;

use sidecore_nvme::io::IoQueue;
use sidecore_reactor::{Arm, IdleMode, Pollable, Polled};
use sidecore_units::Nanos;
use sidecore_virtio::blk::BlkQueue;

use crate::sidecore::Counted;

/// A queue on its sidecore.
pub(crate) enum Queue {
    VirtioBlk(Box<BlkQueue>),
    Nvme { queue: Box<IoQueue>, _counted: Counted },
}

/// Has whichever it is do something.
macro_rules! either {
    ($queue:expr, $inner:ident => $what:expr) => {
        match $queue {
            Queue::VirtioBlk($inner) => $what,
            Queue::Nvme { queue: $inner, .. } => $what,
        }
    };
}

impl Queue {
    /// The virtqueue, if it is one.
    pub(crate) fn virtio_blk(&mut self) -> Option<&mut BlkQueue> {
        match self {
            Self::VirtioBlk(queue) => Some(queue),
            Self::Nvme { .. } => None,
        }
    }

    /// The NVMe queue, if it is one.
    pub(crate) fn nvme(&mut self) -> Option<&mut IoQueue> {
        match self {
            Self::Nvme { queue, .. } => Some(queue),
            Self::VirtioBlk(_) => None,
        }
    }
}

impl Pollable for Queue {
    #[inline]
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        either!(self, queue => queue.poll(now, budget))
    }

    fn idle_mode(&self) -> IdleMode {
        either!(self, queue => queue.idle_mode())
    }

    fn arm(&mut self) -> Arm {
        either!(self, queue => queue.arm())
    }

    fn disarm(&mut self) {
        either!(self, queue => queue.disarm());
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        either!(self, queue => queue.wake_fds(watch));
    }

    fn on_wake(&mut self) {
        either!(self, queue => queue.on_wake());
    }

    fn deadline(&self) -> Option<Nanos> {
        either!(self, queue => queue.deadline())
    }

    fn waits_since(&self) -> Option<Nanos> {
        either!(self, queue => queue.waits_since())
    }

    fn finish(self) {
        either!(self, queue => queue.finish());
    }
}
