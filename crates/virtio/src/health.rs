//! Whether a device is broken, and why.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether a device is broken until its driver resets it. All of its queues share it with the
/// control path.
#[derive(Debug)]
pub struct Health {
    /// The device's name in the configuration.
    device: String,
    broken: AtomicBool,
    reason: Mutex<Option<String>>,
}

impl Health {
    /// The health of a device that works.
    pub(crate) fn new(device: &str) -> Self {
        Self { device: device.to_owned(), broken: AtomicBool::new(false), reason: Mutex::default() }
    }

    /// The device's name in the configuration.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Declares the device broken; the first reason stays.
    pub fn break_with(&self, reason: &str) {
        let mut slot = self.lock();
        if slot.is_none() {
            tracing::error!(device = self.device, "device stopped: {reason}");
            *slot = Some(reason.to_owned());
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Whether the device is broken.
    #[must_use]
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Why the device is broken, if it is.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        if self.is_broken() { self.lock().clone() } else { None }
    }

    /// Brings the device back.
    pub(crate) fn reset(&self) {
        let mut slot = self.lock();
        if slot.take().is_some() {
            tracing::info!(device = self.device, "device reset");
        }
        self.broken.store(false, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
