//! The state that all queues of a disk share with each other and the control path.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use sidecore_block::{Geometry, QueueStats};
use sidecore_spec_virtio::blk::WRITEBACK_OFFSET;

use super::BlkOptions;
use crate::ConfigError;
use crate::device::read_config;
use crate::health::Health;

/// A virtio-blk device: configuration, cache mode, counters, health.
#[derive(Debug)]
pub struct BlkDevice {
    options: BlkOptions,
    /// As it was at first; the capacity is in `capacity_bytes`.
    geometry: Geometry,
    capacity_bytes: AtomicU64,
    config_generation: AtomicU32,
    features: u64,
    /// The cache mode that the driver chose (5.2.5.2): true is write-back.
    writeback: AtomicBool,
    stats: Box<[Arc<QueueStats>]>,
    health: Health,
}

impl BlkDevice {
    /// A disk in front of a store of this geometry.
    #[must_use]
    pub fn new(name: &str, options: BlkOptions, geometry: Geometry) -> Self {
        let geometry = Geometry { read_only: geometry.read_only || options.read_only, ..geometry };
        Self {
            features: options.features(&geometry),
            capacity_bytes: AtomicU64::new(geometry.capacity_bytes),
            geometry,
            config_generation: AtomicU32::new(0),
            writeback: AtomicBool::new(options.write_cache),
            stats: (0..options.queues).map(|_| Arc::default()).collect(),
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
    pub fn options(&self) -> &BlkOptions {
        &self.options
    }

    /// The store's geometry, read-only if either side is.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry { capacity_bytes: self.capacity_bytes(), ..self.geometry }
    }

    /// The size that the driver reads from the configuration space, in bytes.
    #[must_use]
    #[inline]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    /// Changes the size. False if it is no change; otherwise the driver has to be told.
    pub fn set_capacity_bytes(&self, capacity_bytes: u64) -> bool {
        let changes = self.capacity_bytes.swap(capacity_bytes, Ordering::Relaxed) != capacity_bytes;
        if changes {
            // Release: a reader that sees the generation sees the size.
            self.config_generation.fetch_add(1, Ordering::Release);
        }
        changes
    }

    /// Counts the changes of the configuration space that no driver made.
    #[must_use]
    pub fn config_generation(&self) -> u32 {
        self.config_generation.load(Ordering::Acquire)
    }

    /// The feature bits it offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether the driver left the write-back cache on.
    #[must_use]
    #[inline]
    pub fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// The counters of a queue.
    #[must_use]
    pub fn queue_stats(&self, index: u16) -> Option<&Arc<QueueStats>> {
        self.stats.get(usize::from(index))
    }

    /// Reads the configuration space.
    ///
    /// # Errors
    /// The range is not all inside.
    pub fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        let config = self.options.config(&self.geometry(), self.writeback());
        read_config(&config, offset_bytes, data)
    }

    /// Writes the configuration space: only `writeback` takes it (5.2.4).
    ///
    /// # Errors
    /// Any other byte.
    pub fn write_config(&self, offset_bytes: u32, data: &[u8]) -> Result<(), ConfigError> {
        match (offset_bytes, data) {
            (WRITEBACK_OFFSET, [value]) => {
                self.writeback.store(*value != 0, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(ConfigError::ReadOnly { offset_bytes }),
        }
    }

    /// Declares the device broken; the first reason stays.
    pub fn break_with(&self, reason: &str) {
        self.health.break_with(reason);
    }

    /// Whether it is broken.
    #[must_use]
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    /// Why it is broken, if it is.
    #[must_use]
    pub fn broken(&self) -> Option<String> {
        self.health.reason()
    }

    /// Back to the state before a driver came; no queue is running.
    ///
    /// The cache mode stays: QEMU resets its devices on every pause of the
    /// guest and does not repeat what the driver wrote to the configuration,
    /// and a driver that starts afresh reads the mode from there.
    pub fn reset(&self) {
        self.health.reset();
    }
}
