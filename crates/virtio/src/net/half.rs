//! One virtqueue of a pair: its ring, and the events between it and the driver.

use std::fmt;
use std::sync::Arc;

use sidecore_block::QueueStats;
use sidecore_memory::{GuestMemory, RegionHint};
use sidecore_reactor::{MakeSignal, Signal};
use sidecore_ring::{Chain, DeviceRing, RingState, Token};

use super::NetDevice;
use crate::device::open_ring;
use crate::notices::Notices;
use crate::{QueueResources, StartError};

/// Most descriptors in a chain. A driver may use as many as its ring has entries; Linux uses 19.
const CHAIN_MAX: usize = 256;

/// Busy turns after which an outstanding interrupt is considered all the same.
const MAX_CALL_DELAY: u32 = 4;

/// A virtqueue of a NIC that is started.
#[derive(Debug)]
pub(super) struct Half {
    device: Arc<NetDevice>,
    stats: Arc<QueueStats>,
    index: u16,
    pub(super) memory: GuestMemory,
    pub(super) ring: DeviceRing,
    pub(super) chain: Chain,
    pub(super) hint: RegionHint,
    pub(super) features: u64,
    /// A ring that is started and disabled carries no frames (vhost-user, "Ring states").
    pub(super) is_enabled: bool,
    /// Takes nothing more from the ring: broken.
    is_halted: bool,
    notices: Notices,
    /// Whether the ring holds completions that the guest cannot see yet.
    is_unpublished: bool,
    /// Turns since something was published that no interrupt was considered for.
    call_delay: Option<u32>,
}

impl Half {
    pub(super) fn new(
        device: &Arc<NetDevice>,
        index: u16,
        resources: QueueResources,
        state: RingState,
        signal: MakeSignal,
    ) -> Result<Self, StartError> {
        let Some(stats) = device.pair_stats(index / 2).cloned() else {
            let queue_count = device.queue_count();
            return Err(StartError::NoSuchQueue { index, queue_count });
        };
        let QueueResources { memory, layout, features, kick, call, err, is_enabled, .. } =
            resources;
        Ok(Self {
            device: Arc::clone(device),
            stats,
            index,
            ring: open_ring(index, &memory, &layout, state)?,
            memory,
            chain: Chain::with_limit(CHAIN_MAX),
            hint: RegionHint::default(),
            features,
            is_enabled,
            is_halted: false,
            notices: Notices::new(index, kick, call, err, signal)?,
            is_unpublished: false,
            // The guest may have missed an interrupt before a stop or a takeover; one too many does
            // no harm.
            call_delay: Some(0),
        })
    }

    /// Whether frames may pass.
    #[inline]
    pub(super) fn is_usable(&self) -> bool {
        !self.is_halted
    }

    /// Takes the next chain of the ring. An error of the driver breaks the device.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Token> {
        if self.is_halted {
            return None;
        }
        match self.ring.pop(&self.memory, &mut self.chain) {
            Ok(token) => token,
            Err(error) => {
                self.break_with(&error);
                None
            }
        }
    }

    /// Notes that the ring holds completions that the guest cannot see yet.
    #[inline]
    pub(super) fn completed(&mut self) {
        self.is_unpublished = true;
        self.call_delay.get_or_insert(0);
    }

    #[inline]
    pub(super) fn publish(&mut self) {
        if std::mem::take(&mut self.is_unpublished) {
            self.ring.publish();
        }
    }

    pub(super) fn end_turn(&mut self, busy: bool) {
        if busy {
            self.ring.keep_suppressed();
            self.check();
        }
        if let Some(delay) = self.call_delay {
            if !busy || delay >= MAX_CALL_DELAY {
                self.consider_call();
            } else {
                self.call_delay = Some(delay.wrapping_add(1));
            }
        }
    }

    /// Halts if the device is broken, by this queue or another one, or its memory is gone.
    pub(super) fn check(&mut self) {
        if self.device.health().is_broken() {
            self.is_halted = true;
        } else if self.memory.is_lost() {
            self.break_with(&"guest memory is gone");
        }
    }

    /// Interrupts the guest if it asked for that. Deferred until a turn has nothing new, because
    /// finding that out needs a full fence.
    pub(super) fn consider_call(&mut self) {
        self.call_delay = None;
        if self.notices.call(&mut self.ring) {
            self.stats.interrupts.add(1);
        }
    }

    /// Interrupts the guest if something waits for that.
    pub(super) fn settle(&mut self) {
        if self.call_delay.is_some() {
            self.consider_call();
        }
    }

    /// Stops using the ring, says why, and tells the guest as far as virtio can.
    pub(super) fn break_with(&mut self, reason: &dyn fmt::Display) {
        self.is_halted = true;
        let index = self.index;
        // If guest memory is gone, the ring's error is only a symptom: report the cause.
        let reason = if self.memory.is_lost() {
            format!("queue {index}: the file behind guest memory was truncated")
        } else {
            format!("queue {index}: {reason}")
        };
        self.device.health().break_with(&reason);
        self.notices.broke(self.device.name(), index);
    }

    pub(super) fn set_call(&mut self, call: Option<Box<dyn Signal>>) -> Option<Box<dyn Signal>> {
        self.notices.set_call(call)
    }

    pub(super) fn notices(&self) -> &Notices {
        &self.notices
    }

    pub(super) fn count_kicks(&self) {
        self.stats.kicks.add(self.notices.drain_kicks());
    }

    pub(super) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Ends the queue: where it stands. Nothing of it is in flight.
    pub(super) fn finish(mut self) -> RingState {
        self.publish();
        self.count_kicks();
        self.consider_call();
        self.ring.state()
    }
}
