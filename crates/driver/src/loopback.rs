//! A queue without a socket, for a device in the same process: tests of devices, and measurements
//! of them alone.

use std::os::fd::OwnedFd;

use sidecore_memory::GuestMemory;
use sidecore_ring::RingLayout;

use crate::arena::Arena;
use crate::client::Plan;
use crate::error::ClientError;
use crate::options::ClientOptions;
use crate::queue::BlkQueue;

/// Both ends of one queue.
#[derive(Debug)]
pub struct Loopback {
    /// The guest's end.
    pub queue: BlkQueue,
    /// The memory of the device's queue,
    pub memory: GuestMemory,
    /// where the ring is in it,
    pub layout: RingLayout,
    /// where the guest kicks,
    pub kick: OwnedFd,
    /// where it is called,
    pub call: OwnedFd,
    /// and where it is told that the queue is broken.
    pub error: OwnedFd,
}

impl Loopback {
    /// A fresh queue for a device that has these of the virtio `features`, out of which `options`
    /// choose; the numbers of queues and regions are always one.
    ///
    /// # Errors
    /// There is not enough memory, or the options contradict themselves.
    pub fn new(options: &ClientOptions, features: u64) -> Result<Self, ClientError> {
        let plan = Plan::new(options, features & crate::client::wanted(options))?;
        let mut arena = Arena::new(plan.arena_bytes(1), options.huge_pages)?;
        let (queue, hooks) = plan.build(&mut arena, options)?;
        let (kick, call, error) = (hooks.kick, hooks.call, hooks.error);
        Ok(Self { queue, memory: arena.memory().clone(), layout: hooks.layout, kick, call, error })
    }
}
