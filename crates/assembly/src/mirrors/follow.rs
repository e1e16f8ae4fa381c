//! Legs that come while the mirror is open.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sidecore_mirror::{LegError, LegState, Mirror, MirrorError};

use super::{MirrorInUse, RETRY, State, about, may_pass};

/// The time between two looks at IOhosts.
const LOOK: Duration = Duration::from_millis(500);
/// The time after which a device of an IOhost that has failed is tried again, though its IOhost was
/// not seen to be away: it may have been, between two looks. Each further time is twice as long, as
/// each copies all that was missed: a disk that fails now and then is not copied to again and again.
const UNSEEN: Duration = Duration::from_secs(30);
/// The longest of these times.
const LONGEST: Duration = Duration::from_secs(3600);

/// The failures of a leg since it was in sync.
struct Failing {
    /// `None` while it is copied to.
    since: Option<Instant>,
    /// The time until it is tried again.
    pause: Duration,
}

impl MirrorInUse {
    /// Attaches stores that come late, and devices of IOhosts that were away and have failed
    /// meanwhile: nothing is wrong with their disks. A leg of this machine that has failed is
    /// attached by command only: a disk that fails now and then would be copied to each time.
    pub(super) fn follow(self: Arc<Self>) {
        // This thread may have missed why they have failed, until it has seen them in sync.
        let mut was_away: BTreeSet<String> = self.devices.keys().cloned().collect();
        let (mut late, mut failing) = (BTreeSet::new(), BTreeMap::new());
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
            let failed = self.came_back(&mut was_away, &mut failing, &mirror);
            if next_try <= Instant::now() {
                next_try = Instant::now() + RETRY;
                legs.append(&mut late);
                legs.extend(failed);
            }
            for leg in legs {
                if !self.attach_leg(&leg, &mirror) {
                    late.insert(leg);
                } else if self.uses(&leg, &mirror) {
                    // It was away, and is not any more: if it fails now, that is another reason.
                    was_away.remove(&leg);
                }
            }
        }
    }

    /// The legs whose IOhosts were away since they failed, and are there again.
    fn came_back(
        &self,
        was_away: &mut BTreeSet<String>,
        failing: &mut BTreeMap<String, Failing>,
        mirror: &Mirror,
    ) -> Vec<String> {
        let mut came_back = Vec::new();
        for leg in self.devices.keys() {
            let state = self.leg_state(leg, mirror);
            let has_failed = state == Some(LegState::Failed);
            if let Some(failing) = failing.get_mut(leg).filter(|_| !has_failed) {
                failing.since = None;
            }
            if !self.is_there(leg) {
                was_away.insert(leg.clone());
            } else if has_failed {
                let new = || Failing { since: None, pause: UNSEEN };
                let failing = failing.entry(leg.clone()).or_insert_with(new);
                let since = *failing.since.get_or_insert_with(Instant::now);
                if was_away.contains(leg) {
                    came_back.push(leg.clone());
                } else if since.elapsed() > failing.pause {
                    failing.since = None;
                    failing.pause = failing.pause.saturating_mul(2).min(LONGEST);
                    came_back.push(leg.clone());
                }
            } else if state == Some(LegState::InSync) {
                was_away.remove(leg);
                failing.remove(leg);
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
