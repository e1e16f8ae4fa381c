//! A second link to the IOhost: a client without a session looks for one on both links in turn.

use std::sync::Arc;

use sidecore_link::{Frame, Link, LinkAddress, LinkState, LinkStats};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;

use super::SessionDesk;

/// The time that the client looks for a session on one link, at first. It doubles when none was
/// found on both: a busy IOhost needs longer for its answers.
const STAY_MIN: Nanos = Nanos::from_millis(40);
const STAY_MAX: Nanos = Nanos::from_millis(1_000);

/// The link that is not used, and when it will be.
pub(in crate::client) struct Spare {
    link: Box<dyn Link>,
    /// The IOhost's address on it.
    address: LinkAddress,
    /// The same of the link that is used.
    other_address: LinkAddress,
    /// The frames, and frames of the receive ring, that are asked for on either link at most.
    most: (u32, u32),
    /// The link that is used is the second one of the configuration.
    is_second_used: bool,
    /// When the links change places; `None` in a session.
    changes_at: Option<Nanos>,
    stay: Nanos,
    /// Changes since the last session.
    changes: u32,
    /// Kept for its capacity.
    frames: Vec<Frame>,
}

impl Spare {
    /// The second link; `other_address` is the IOhost's on the first one.
    pub(in crate::client) fn new(
        link: Box<dyn Link>,
        address: LinkAddress,
        other_address: LinkAddress,
        most: (u32, u32),
    ) -> Self {
        let frames = Vec::with_capacity(link.properties().receive_frames);
        Self {
            link,
            address,
            other_address,
            most,
            is_second_used: false,
            changes_at: None,
            stay: STAY_MIN,
            changes: 0,
            frames,
        }
    }

    pub(super) const fn is_second_used(&self) -> bool {
        self.is_second_used
    }

    pub(super) fn state(&self) -> LinkState {
        self.link.state()
    }

    pub(in crate::client) fn stats(&self) -> &Arc<LinkStats> {
        self.link.stats()
    }

    /// The descriptor was readable: nothing is done with frames that still come.
    pub(in crate::client) fn on_wake(&mut self, now: Nanos) {
        self.link.on_wake();
        self.link.receive(now, self.frames.capacity(), &mut self.frames);
        self.link.give_back(&mut self.frames);
    }
}

impl<H: ClientHandshake> SessionDesk<H> {
    pub(in crate::client) fn add_spare(&mut self, spare: Spare) {
        self.spare = Some(spare);
    }

    pub(in crate::client) const fn spare_mut(&mut self) -> Option<&mut Spare> {
        self.spare.as_mut()
    }

    /// The states of both links in the order of the configuration, and whether the second one is
    /// used.
    pub(in crate::client) fn links(&self) -> (LinkState, Option<LinkState>, bool) {
        let used = self.port.state();
        match &self.spare {
            None => (used, None, false),
            Some(spare) if spare.is_second_used => (spare.link.state(), Some(used), true),
            Some(spare) => (used, Some(spare.link.state()), false),
        }
    }

    /// The state of the link that the session is on, or of the one that is better off.
    pub(super) fn link_state(&self) -> LinkState {
        let spare = self.spare.as_ref().filter(|_| !self.client.is_connected());
        match spare.map(|spare| spare.link.state()) {
            Some(LinkState::Up) => LinkState::Up,
            _ => self.port.state(),
        }
    }

    /// When the unit has to be polled.
    pub(in crate::client) fn deadline(&self) -> Nanos {
        let changes_at = self.spare.as_ref().and_then(|spare| spare.changes_at);
        let others = [self.port.deadline(), self.failure_deadline(), changes_at];
        others.into_iter().flatten().fold(self.client.deadline(), Nanos::min)
    }

    /// Takes the other link in time, while there is no session.
    #[inline]
    pub(super) fn seek_elsewhere(&mut self, now: Nanos) {
        let is_connected = self.client.is_connected();
        if let Some(spare) = &mut self.spare {
            match spare.changes_at {
                _ if is_connected => (spare.changes_at, spare.changes) = (None, 0),
                None => {
                    spare.stay = STAY_MIN;
                    spare.changes_at = Some(now.after(STAY_MIN));
                }
                Some(at) if at <= now => self.change_links(now, Nanos::ZERO),
                Some(_) => {}
            }
        }
    }

    /// Looks for a session on the other link, for this time at least.
    pub(super) fn change_links(&mut self, now: Nanos, at_least: Nanos) {
        let patience = self.client.patience();
        let Some(mut spare) = self.spare.take() else { return };
        // Its frames are of a session that is over.
        spare.on_wake(now);
        let Spare { link, address, other_address, most, .. } = spare;
        let properties = link.properties();
        let as_u32 = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let frames = (
            most.0.min(as_u32(properties.frame_bytes)),
            most.1.min(as_u32(properties.receive_frames)),
        );
        let link = self.port.replace(link);
        let host = self.port.peers().keep(address);
        self.client.look_at(now, host, frames);
        let changes = spare.changes.wrapping_add(1);
        let stay = match changes % 2 {
            0 => Nanos(spare.stay.0.saturating_mul(2)).min(STAY_MAX),
            _ => spare.stay,
        };
        self.spare = Some(Spare {
            link,
            address: other_address,
            other_address: address,
            is_second_used: !spare.is_second_used,
            changes_at: Some(now.after(stay.max(patience).max(at_least))),
            stay,
            changes,
            most,
            frames: spare.frames,
        });
        self.looks_again = true;
    }
}
