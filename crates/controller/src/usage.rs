//! What volumes have to themselves, and how full the store is.

use std::sync::{Mutex, PoisonError};

use sidecore_volume::{Disk, Usage};

use crate::Controller;
use crate::physical::PhysicalDisk;

/// Walks that were overtaken by commits, before there is no answer.
const ATTEMPTS: usize = 4;

/// The last answer.
#[derive(Default)]
pub(crate) struct LastUsage(Mutex<Option<Usage>>);

impl Controller {
    /// What each volume has to itself, as of the last commit: walked anew if there was one
    /// since the last answer. Nothing waits meanwhile. `None` if the store changes too
    /// fast, or cannot be read.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let mut disk = PhysicalDisk::open(self.store()).ok()?;
        self.usage_on(&mut disk)
    }

    fn usage_on(&self, disk: &mut dyn Disk) -> Option<Usage> {
        // Whoever asks meanwhile gets the same answer.
        let mut last = self.last_usage.0.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTEMPTS {
            let durable = self.hypervisor.state().volumes.durable();
            if let Some(usage) = last.as_ref().filter(|usage| usage.generation == durable.generation()) {
                return Some(usage.clone());
            }
            match durable.usage(disk) {
                Ok(usage) => return Some(last.insert(usage).clone()),
                Err(_) if self.hypervisor.state().volumes.generation() != durable.generation() => {}
                Err(error) => {
                    tracing::debug!(controller = self.name(), "what volumes share cannot be told: {error}");
                    return None;
                }
            }
        }
        None
    }
}
