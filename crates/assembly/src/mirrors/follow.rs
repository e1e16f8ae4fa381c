//! Legs that come while the mirror is open.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sidecore_mirror::{LegError, Mirror, MirrorError};

use super::comeback::Comeback;
use super::{MirrorInUse, RETRY, State, about, may_pass};

/// The time between two looks at IOhosts.
const LOOK: Duration = Duration::from_millis(500);

impl MirrorInUse {
    /// Attaches stores that come late, and devices of IOhosts that were away and have failed
    /// meanwhile: nothing is wrong with their disks. A leg of this machine that has failed is
    /// attached by command only: a disk that fails now and then would be copied to each time. So is
    /// one on a controller, which may have to be opened again.
    pub(super) fn follow(self: Arc<Self>) {
        // This thread may have missed why they have failed, until it has seen them in sync.
        let direct = self.devices.iter().filter(|(_, device)| !device.has_controller);
        let unseen = |(leg, _): (&String, _)| (leg.clone(), Comeback::of_unseen());
        let mut comebacks: BTreeMap<String, Comeback> = direct.map(unseen).collect();
        let mut late = BTreeSet::new();
        let mut next_try = Instant::now();
        loop {
            let is_idle = |state: &mut State| !state.is_closed && state.to_attach.is_empty();
            let waited = self.changed.wait_timeout_while(self.state(), LOOK, is_idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_closed {
                return;
            }
            let mut legs: BTreeSet<String> = state.to_attach.drain(..).collect();
            let Some(mirror) = state.mirror.clone() else { return };
            drop(state);
            if next_try <= Instant::now() {
                next_try = Instant::now() + RETRY;
                legs.append(&mut late);
            }
            let failed = self.came_back(&mut comebacks, &mirror);
            // One whose last try failed is not tried at each look: guests wait for each try.
            legs.extend(failed.into_iter().filter(|leg| !late.contains(leg)));
            for leg in legs {
                if !self.attach_leg(&leg, &mirror) {
                    late.insert(leg);
                } else if let Some(comeback) = comebacks.get_mut(&leg) {
                    comeback.was_tried();
                }
            }
        }
    }

    /// The legs that have failed and are to be attached.
    fn came_back(
        &self,
        comebacks: &mut BTreeMap<String, Comeback>,
        mirror: &Mirror,
    ) -> Vec<String> {
        let now = Instant::now();
        let mut came_back = Vec::new();
        for (leg, comeback) in comebacks {
            // In this order: an absence that comes in between is counted at the next look.
            let presence = self.presence(leg);
            let state = self.leg_state(leg, mirror);
            if comeback.look(state.as_ref(), presence, now) {
                came_back.push(leg.clone());
            }
        }
        came_back
    }

    /// Attaches the store of this name. False if it has to be tried again: its IOhost is away, or
    /// it cannot be read now.
    fn attach_leg(&self, leg: &str, mirror: &Mirror) -> bool {
        let device = self.state().stores.get(leg).cloned();
        let Some(Ok(device)) = device else { return true };
        if self.uses(leg, mirror) {
            return true;
        }
        // The keeper would wait for it, and so would guests.
        if !self.is_there(leg) {
            return false;
        }
        let error = match mirror.attach(device) {
            Ok(()) => {
                tracing::info!(store = self.name, leg, "attached");
                self.state().refused.remove(leg);
                self.read_preferred();
                return true;
            }
            Err(error) => error,
        };
        let is_retried = match &error {
            // Each try would hold guests up again, and no IOhost says when it is there.
            MirrorError::Leg { error: LegError::Silent { .. }, .. } => {
                self.devices.contains_key(leg)
            }
            MirrorError::Leg { error, .. } => may_pass(error),
            _ => false,
        };
        let why = about(leg, error);
        let before = self.state().refused.insert(leg.to_owned(), why.clone());
        if before.as_ref() != Some(&why) {
            tracing::warn!(store = self.name, leg, "not used as a leg: {why}");
        }
        !is_retried
    }
}
