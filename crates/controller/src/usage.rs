//! The blocks that each volume has to itself, and the used share of the store.

use std::sync::{Mutex, PoisonError};

use sidecore_volume::{Disk, Usage};

use crate::Controller;
use crate::physical::PhysicalDisk;

/// The number of walks that commits may overtake, before the call fails.
const ATTEMPTS: usize = 4;

/// The last result.
#[derive(Default)]
pub(crate) struct LastUsage(Mutex<Option<Usage>>);

impl Controller {
    /// The blocks that each volume has to itself, as of the last commit: computed again if there
    /// was a commit since the last result. Other operations do not wait meanwhile. `None` if the
    /// store changes too fast, or cannot be read.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let mut disk = PhysicalDisk::open(self.store()).ok()?;
        self.usage_on(&mut disk)
    }

    fn usage_on(&self, disk: &mut dyn Disk) -> Option<Usage> {
        // Locked: a concurrent caller waits and gets the same result.
        let mut last = self.last_usage.0.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..ATTEMPTS {
            let durable = self.hypervisor.state().volumes.durable();
            if let Some(usage) =
                last.as_ref().filter(|usage| usage.generation == durable.generation())
            {
                return Some(usage.clone());
            }
            match durable.usage(disk) {
                Ok(usage) => return Some(last.insert(usage).clone()),
                Err(_) if self.hypervisor.state().volumes.generation() != durable.generation() => {}
                Err(error) => {
                    tracing::debug!(
                        controller = self.name(),
                        "the volumes' metadata cannot be read, so their exclusive blocks are \
                         unknown: {error}"
                    );
                    return None;
                }
            }
        }
        None
    }
}
