//! The state that all queues of a NIC share with each other and the control path.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use sidecore_block::QueueStats;
use sidecore_spec_virtio::net::MTU_MIN;

use super::NetOptions;
use crate::ConfigError;
use crate::device::read_config;
use crate::health::Health;

/// A virtio-net device: configuration, counters, health.
#[derive(Debug)]
pub struct NetDevice {
    options: NetOptions,
    /// The MTU that the VMM has told the guest, at most that of the options.
    mtu: AtomicU16,
    stats: Box<[Arc<QueueStats>]>,
    health: Health,
}

impl NetDevice {
    /// A NIC of this name.
    #[must_use]
    pub fn new(name: &str, options: NetOptions) -> Self {
        Self {
            mtu: AtomicU16::new(options.mtu),
            stats: (0..options.pairs).map(|_| Arc::default()).collect(),
            health: Health::new(name),
            options,
        }
    }

    /// Its name in the configuration.
    #[must_use]
    pub fn name(&self) -> &str {
        self.health.device()
    }

    /// How it presents itself.
    #[must_use]
    pub fn options(&self) -> &NetOptions {
        &self.options
    }

    /// The number of its queues.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        self.options.pairs.saturating_mul(2)
    }

    /// The MTU in force.
    #[must_use]
    pub fn mtu(&self) -> u16 {
        self.mtu.load(Ordering::Relaxed)
    }

    /// Sets the MTU. False if it is too small for a device, or larger than that of the options.
    pub fn set_mtu(&self, mtu: u16) -> bool {
        let is_possible = (MTU_MIN..=self.options.mtu).contains(&mtu);
        if is_possible {
            self.mtu.store(mtu, Ordering::Relaxed);
        }
        is_possible
    }

    /// The counters of a pair of queues. Only those of kicks, interrupts and polls count.
    #[must_use]
    pub fn pair_stats(&self, pair: u16) -> Option<&Arc<QueueStats>> {
        self.stats.get(usize::from(pair))
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    /// The range is not all inside.
    pub fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        read_config(&self.options.config(self.mtu()), offset_bytes, data)
    }

    /// Whether it is broken.
    #[must_use]
    #[inline]
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Back to the state before a driver came; no queue is running.
    pub fn reset(&self) {
        self.mtu.store(self.options.mtu, Ordering::Relaxed);
        self.health.reset();
    }
}
