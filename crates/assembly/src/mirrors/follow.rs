//! Legs that come while the mirror is open.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sidecore_mirror::{LegState, Mirror};

use super::{MirrorInUse, about};

/// The time between two looks at IOhosts.
const LOOK: Duration = Duration::from_millis(500);
/// The time until a store that could not be attached is tried again.
const RETRY: Duration = Duration::from_secs(5);

impl MirrorInUse {
    /// Attaches stores that come late, and devices of IOhosts that were away and have failed
    /// meanwhile: nothing is wrong with their disks. A leg that has failed otherwise is attached by
    /// command only, because a disk that fails now and then would be copied to again and again.
    pub(super) fn follow(self: Arc<Self>) {
        let mut was_away = BTreeSet::new();
        let mut next_try = Instant::now();
        loop {
            let is_idle = |state: &mut super::State| !state.is_closed && state.to_attach.is_empty();
            let waited = self.changed.wait_timeout_while(self.state(), LOOK, is_idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_closed {
                return;
            }
            let mut legs = std::mem::take(&mut state.to_attach);
            let Some(mirror) = state.mirror.clone() else { return };
            drop(state);
            let came_back = self.came_back(&mut was_away, &mirror);
            if !came_back.is_empty() && next_try <= Instant::now() {
                next_try = Instant::now() + RETRY;
                legs.extend(came_back);
            }
            for leg in legs {
                if self.attach_leg(&leg, &mirror) {
                    was_away.remove(&leg);
                }
            }
        }
    }

    /// The legs whose IOhosts were away since they failed, and are there again.
    fn came_back(&self, was_away: &mut BTreeSet<String>, mirror: &Mirror) -> Vec<String> {
        let status = mirror.status();
        let mut came_back = Vec::new();
        for (leg, device) in &self.devices {
            let number = self.number_of(leg, &self.state(), mirror);
            let state = number.and_then(|number| status.legs.get(number));
            if !self.remote.is_ready(device) {
                was_away.insert(leg.clone());
            } else if state == Some(&LegState::Failed) && was_away.contains(leg) {
                came_back.push(leg.clone());
            } else if state == Some(&LegState::InSync) {
                was_away.remove(leg);
            }
        }
        came_back
    }

    /// Attaches the store of this name. False if it is no leg, or cannot be used.
    fn attach_leg(&self, leg: &str, mirror: &Mirror) -> bool {
        let device = self.state().stores.get(leg).cloned();
        let Some(Ok(device)) = device else { return false };
        let attached = mirror.attach(device);
        let mut state = self.state();
        match attached {
            Ok(()) => {
                tracing::info!(store = self.name, leg, "attached");
                state.refused.remove(leg);
                drop(state);
                self.read_preferred();
                true
            }
            Err(error) => {
                let why = about(leg, error);
                tracing::warn!(store = self.name, leg, "not used as a leg: {why}");
                state.refused.insert(leg.to_owned(), why);
                false
            }
        }
    }
}
