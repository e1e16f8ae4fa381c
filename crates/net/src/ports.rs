//! Ports and queues as the switch keeps them.

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_units::Nanos;

use crate::config::{PORTS_MAX, QUEUES_MAX};
use crate::floods::Floods;
use crate::head::TAG_BYTES;
use crate::stages::{StageFailure, Stages};
use crate::switch::{Announcements, Probes};
use crate::table::Key;
use crate::{
    DropReason, Dropped, FrameStage, Frames, Loan, PortConfig, PortKind, PortQueue, PortStats,
    Properties, StageFrame, StagePlace, Vlans,
};

/// Names a port of a switch. It is invalid once the port is removed, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortId {
    pub(crate) index: u16,
    pub(crate) generation: u64,
}

impl PortId {
    /// A number that no other port of the switch has, nor had: never 0.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.generation
    }
}

/// Names a queue of a switch. It is invalid once the queue is detached, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueId {
    pub(crate) index: u16,
    pub(crate) generation: u64,
}

/// A set of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortSet([u64; PORTS_MAX / 64]);

impl PortSet {
    pub const NONE: Self = Self([0; PORTS_MAX / 64]);

    /// The set of one port.
    pub fn of(port: u16) -> Self {
        let mut set = Self::NONE;
        set.add(port);
        set
    }

    #[inline]
    pub fn add(&mut self, port: u16) {
        if let Some(word) = self.0.get_mut(usize::from(port >> 6)) {
            *word |= 1 << (port & 63);
        }
    }

    #[inline]
    pub fn remove(&mut self, port: u16) {
        if let Some(word) = self.0.get_mut(usize::from(port >> 6)) {
            *word &= !(1 << (port & 63));
        }
    }

    #[inline]
    pub fn has(&self, port: u16) -> bool {
        self.0.get(usize::from(port >> 6)).is_some_and(|word| word >> (port & 63) & 1 != 0)
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0 == Self::NONE.0
    }

    /// The ports, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        let words = self.0;
        (0_u16..).zip(words).flat_map(|(number, word)| {
            (0..64_u16)
                .filter(move |bit| word >> bit & 1 != 0)
                .map(move |bit| number.saturating_mul(64).saturating_add(bit))
        })
    }
}

/// A port.
pub(crate) struct Port {
    pub generation: u64,
    pub name: String,
    pub config: PortConfig,
    pub stats: Arc<PortStats>,
    /// Its queues that carry frames.
    pub up: Vec<u16>,
    /// Its queues.
    pub queues: Vec<u16>,
    /// Until when it is blocked because of a loop.
    pub blocked_until: Option<Nanos>,
    /// Another port of its team carries the frames.
    pub is_standby: bool,
    /// The probes of its network, if it is in a team that has them.
    pub probes: Option<Probes>,
    /// The announcements of its station that are still to be sent.
    pub announcements: Announcements,
    pub floods: Floods,
    /// The stages of its frames.
    pub stages: Stages,
    /// Whether one of them holds frames at times.
    pub holds: bool,
    /// Nothing but the tables decides on its frames: it is open and has no stages. The one test
    /// for a frame on its way.
    pub is_plain: bool,
    /// Its frames may go in runs: it is open, and its stages neither hold frames nor are shown
    /// their ends.
    pub runs: bool,
}

impl Port {
    /// Whether frames may go to the port, or come from it.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.closed().is_none()
    }

    /// Whether its network does not answer.
    pub fn is_lost(&self) -> bool {
        self.probes.is_some_and(|probes| probes.is_lost())
    }

    /// Why frames from the port are dropped, if all are.
    #[inline]
    pub fn closed(&self) -> Option<DropReason> {
        match self.blocked_until {
            _ if self.is_standby => Some(DropReason::Standby),
            Some(_) => Some(DropReason::Blocked),
            None => None,
        }
    }

    pub fn stand_by(&mut self, is_standby: bool) {
        self.is_standby = is_standby;
        self.note_plain();
    }

    pub fn block(&mut self, until: Option<Nanos>) {
        self.blocked_until = until;
        self.note_plain();
    }

    /// Replaces the stage at this place, whose state a new one takes over. Returns the old one, and
    /// whether it has failed.
    pub fn set_stage(
        &mut self,
        place: StagePlace,
        stage: Option<Box<dyn FrameStage>>,
    ) -> Option<(Box<dyn FrameStage>, bool)> {
        let old = self.stages.set(place, stage);
        self.holds = self.stages.hold();
        self.note_plain();
        old
    }

    /// Goes on without a capture that has failed.
    pub fn leave_out(&mut self, failure: StageFailure) {
        self.stages.leave_out(failure);
        self.holds = self.stages.hold();
        self.note_plain();
    }

    fn note_plain(&mut self) {
        self.is_plain = self.is_open() && self.stages.is_empty();
        self.runs = self.is_open() && !self.holds && !self.stages.show();
    }

    /// Shows a frame to a capture, if there is one.
    pub fn show(&mut self, now: Nanos, frame: &StageFrame<'_>, drop: Option<Dropped>) {
        if self.stages.show() {
            let tag = self.tag(frame.vlan, frame.head.tag);
            self.stages.decided(now, &StageFrame { tag, ..*frame }, drop);
        }
    }
}

impl Port {
    pub fn is_uplink(&self) -> bool {
        self.config.kind == PortKind::Uplink
    }

    /// The tag of a frame of this VLAN that leaves by the port; `tag` is the one that it came with,
    /// whose priority stays.
    #[inline]
    pub fn tag(&self, vlan: u16, tag: Option<u16>) -> Option<u16> {
        match &self.config.vlans {
            Vlans::Access(_) => None,
            Vlans::Trunk { native, .. } if *native == Some(vlan) => None,
            Vlans::Trunk { .. } => Some(vlan | (tag.unwrap_or(0) & 0xf000)),
        }
    }
}

/// A queue.
pub(crate) struct Lane {
    pub generation: u64,
    pub port: u16,
    pub queue: Box<dyn PortQueue>,
    pub properties: Properties,
    pub frames: Frames,
    /// The youngest frames, which no decision was made on yet.
    pub undecided: usize,
    /// Frames that wait for buffers.
    pub waiting: usize,
    /// Queues whose frames wait for buffers of this one, the next to be served first.
    pub waiters: VecDeque<u16>,
    pub loan: Loan,
    /// Frames were given to or back to the queue since it was last told to publish them.
    pub is_touched: bool,
    /// The same, since the turn began.
    pub is_busy: bool,
    pub is_up: bool,
    pub memo: Memo,
}

/// The stations of a queue's last frame: most frames have the same ones.
pub(crate) struct Memo {
    /// The sender, when the table was told of it, and the version of the table.
    pub source: (Key, Nanos, u64),
    /// The receiver, its port, and the version of the table.
    pub target: (Key, u16, u64),
}

impl Lane {
    pub fn new(generation: u64, port: u16, queue: Box<dyn PortQueue>) -> Self {
        let properties = queue.properties();
        Self {
            generation,
            port,
            queue,
            properties,
            frames: Frames::with_capacity(properties.frame_segments),
            undecided: 0,
            waiting: 0,
            waiters: VecDeque::with_capacity(QUEUES_MAX),
            loan: Loan::with_capacity(properties.buffer_segments),
            is_touched: false,
            is_busy: false,
            is_up: false,
            memo: Memo { source: (Key::NONE, Nanos::ZERO, 0), target: (Key::NONE, 0, 0) },
        }
    }

    /// Whether a frame of this size fits, as long as with a tag.
    #[inline]
    pub const fn fits(&self, len_bytes: usize, tag: Option<u16>) -> bool {
        let with_tag = match tag {
            Some(_) => len_bytes,
            None => len_bytes.saturating_add(TAG_BYTES),
        };
        with_tag <= self.properties.frame_bytes
    }

    /// Shows the station what it was given.
    #[inline]
    pub fn publish(&mut self) {
        if std::mem::take(&mut self.is_touched) {
            self.queue.publish();
            self.is_busy = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_ports_that_were_added() {
        let mut set = PortSet::NONE;
        for port in [0, 63, 64, 255, 256, 9999] {
            set.add(port);
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 255]);
        assert!(set.has(64) && !set.has(65) && !set.has(9999));
        set.remove(64);
        set.remove(9999);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 255]);
        [0, 63, 255].into_iter().for_each(|port| set.remove(port));
        assert!(set.is_empty());
    }
}
