//! Where a frame goes, decided on the private copy of its head.

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use super::{Switch, SwitchEvent};
use crate::guard;
use crate::head::Head;
use crate::ports::{Memo, Port, PortSet};
use crate::table::{Key, Learned};
use crate::{DropReason, Dropped, MacAddress, Properties, StageFrame, Way};

/// A station that sends all the time is noted so often.
pub(super) const REFRESH: Nanos = Nanos::from_millis(1_000);
/// Moves of one station in a second that show a loop.
const LOOP_MOVES: u8 = 6;

/// The receivers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Targets {
    /// One port.
    One(u16),
    /// Every port that may have it.
    All(PortSet),
}

impl Switch {
    /// Decides on a frame of the port `from`: its VLAN, and where it goes. `STAGES` says that the
    /// port has some.
    ///
    /// # Errors
    /// The frame is to be dropped.
    #[inline]
    pub(super) fn decide<const STAGES: bool>(
        &mut self,
        now: Nanos,
        from: u16,
        of_queue: (&Properties, &mut Memo),
        (head, segments): (&mut Head, &Segments),
    ) -> Result<(u16, Targets), Dropped> {
        let (vlan, targets) = self.route(now, from, of_queue, head)?;
        if !STAGES {
            return Ok((vlan, targets));
        }
        let Some(port) = self.ports.get_mut(usize::from(from)).and_then(Option::as_mut) else {
            return Ok((vlan, targets));
        };
        let frame = StageFrame::new(Way::FromStation, vlan, head, segments);
        if port.stages.pass(now, &frame, None)? {
            port.show(now, &frame, None);
            return Ok((vlan, targets));
        }
        Ok((vlan, Targets::All(PortSet::NONE)))
    }

    /// Decides on a frame without the stages of its port.
    // Always inline: the code for ports without stages is as if there were none.
    #[inline(always)]
    fn route(
        &mut self,
        now: Nanos,
        from: u16,
        (properties, memo): (&Properties, &mut Memo),
        head: &mut Head,
    ) -> Result<(u16, Targets), DropReason> {
        head.parse(properties)?;
        let port = self.port_at(from).ok_or(DropReason::PortDown)?;
        if let Some(reason) = port.closed() {
            self.note_answer(from, head)?;
            return Err(reason);
        }
        if !head.from.is_station() {
            return Err(DropReason::BadSource);
        }
        if head.to.is_reserved() {
            return Err(DropReason::Reserved);
        }
        let vlan = vlan_of(port, head)?;
        if let Some(guard) = &port.config.guard {
            guard::check(guard, head)?;
        }
        self.learn(now, from, memo, Key::new(head.from, vlan))?;
        let targets = self.targets(now, from, memo, (head.to, vlan));
        if targets == Err(DropReason::Probe) {
            self.note_answer(from, head)?;
        }
        Ok((vlan, targets?))
    }

    /// Notes where the sender is.
    // Always inline, although there are two callers, with and without stages: 50 instructions less.
    #[inline(always)]
    fn learn(
        &mut self,
        now: Nanos,
        from: u16,
        memo: &mut Memo,
        key: Key,
    ) -> Result<(), DropReason> {
        let (last, noted_at, version) = memo.source;
        if last == key && version == self.table.version() && now.since(noted_at) < REFRESH {
            return Ok(());
        }
        self.learn_slowly(now, from, memo, key)
    }

    fn learn_slowly(
        &mut self,
        now: Nanos,
        index: u16,
        memo: &mut Memo,
        key: Key,
    ) -> Result<(), DropReason> {
        if self.is_probe_source(key.mac()) {
            memo.source.0 = Key::NONE;
            return Err(DropReason::Probe);
        }
        let port = self.ports.get(usize::from(index)).and_then(Option::as_ref);
        let port = port.ok_or(DropReason::PortDown)?;
        let learned = self.table.learn(key, index, now, port.config.stations);
        memo.source = (key, now, self.table.version());
        match learned {
            Learned::Known => Ok(()),
            Learned::New => {
                port.stats.learned.add(1);
                Ok(())
            }
            Learned::Full => {
                // Look again at its next frame: there may be room then.
                memo.source.0 = Key::NONE;
                port.stats.not_learned.add(1);
                Ok(())
            }
            Learned::Foreign => {
                memo.source.0 = Key::NONE;
                Err(DropReason::SpoofedMac)
            }
            Learned::Moved { from, moves } => {
                port.stats.moves.add(1);
                if moves >= LOOP_MOVES { self.block(now, key, index, from) } else { Ok(()) }
            }
        }
    }

    /// Blocks the younger of two ports between which a station moves to and fro.
    fn block(&mut self, now: Nanos, key: Key, to: u16, from: u16) -> Result<(), DropReason> {
        let age = |index| self.port_at(index).map_or(0, |port| port.generation);
        let (blocked, other) = if age(to) > age(from) { (to, from) } else { (from, to) };
        let name = |index| self.port_at(index).map(|port| port.name.clone()).unwrap_or_default();
        let (blocked_name, other_name) = (name(blocked), name(other));
        let until = now.after(self.options.block);
        if let Some(port) = self.ports.get_mut(usize::from(blocked)).and_then(Option::as_mut) {
            port.block(Some(until));
            port.stats.blocks.add(1);
        }
        self.table.forget(blocked, false);
        self.event(SwitchEvent::Loop {
            mac: key.mac(),
            vlan: key.vlan(),
            blocked: blocked_name,
            other: other_name,
        });
        if blocked == to { Err(DropReason::Blocked) } else { Ok(()) }
    }

    /// The receivers of a frame.
    // As `learn`.
    #[inline(always)]
    fn targets(
        &mut self,
        now: Nanos,
        from: u16,
        memo: &mut Memo,
        (to, vlan): (MacAddress, u16),
    ) -> Result<Targets, DropReason> {
        if !to.is_group() {
            let key = Key::new(to, vlan);
            let version = self.table.version();
            if memo.target.0 == key && memo.target.2 == version {
                return Ok(Targets::One(memo.target.1));
            }
            if let Some(target) = self.table.port_of(key) {
                self.check_way(from, target, vlan)?;
                memo.target = (key, target, version);
                return Ok(Targets::One(target));
            }
        }
        let port = self.ports.get_mut(usize::from(from)).and_then(Option::as_mut);
        let port = port.ok_or(DropReason::PortDown)?;
        if port.probes.is_some_and(|probes| probes.are_from(to)) {
            return Err(DropReason::Probe);
        }
        if !port.floods.take(now) {
            return Err(DropReason::FloodLimit);
        }
        port.stats.in_floods.add(1);
        self.all_targets(from, vlan)
    }

    /// The receivers of a frame that was held, and had others then.
    pub(super) fn targets_again(
        &self,
        from: u16,
        (to, vlan): (MacAddress, u16),
    ) -> Result<Targets, DropReason> {
        if !to.is_group()
            && let Some(target) = self.table.port_of(Key::new(to, vlan))
        {
            return self.check_way(from, target, vlan).map(|()| Targets::One(target));
        }
        self.all_targets(from, vlan)
    }

    fn all_targets(&self, from: u16, vlan: u16) -> Result<Targets, DropReason> {
        let targets = self.flood_targets(from, vlan);
        if targets.is_empty() { Err(DropReason::NoDestination) } else { Ok(Targets::All(targets)) }
    }

    /// Whether frames of this VLAN may go from the one port to the other.
    #[inline]
    pub(super) fn check_way(&self, from: u16, to: u16, vlan: u16) -> Result<(), DropReason> {
        if from == to {
            return Err(DropReason::SamePort);
        }
        let (Some(from), Some(to)) = (self.port_at(from), self.port_at(to)) else {
            return Err(DropReason::NoDestination);
        };
        if from.is_uplink() && to.is_uplink() {
            return Err(DropReason::Uplinks);
        }
        if from.config.is_isolated && to.config.is_isolated {
            return Err(DropReason::Isolated);
        }
        if !to.config.vlans.have(vlan) {
            return Err(DropReason::VlanEgress);
        }
        Ok(())
    }

    /// All ports that a frame may go to.
    pub(super) fn flood_targets(&self, from: u16, vlan: u16) -> PortSet {
        let mut targets = PortSet::NONE;
        for (index, port) in (0_u16..).zip(&self.ports) {
            let is_up = port.as_ref().is_some_and(|port| port.is_open() && !port.up.is_empty());
            if is_up && self.check_way(from, index, vlan).is_ok() {
                targets.add(index);
            }
        }
        targets
    }
}

/// The VLAN of a frame that came in by this port.
#[inline]
pub(super) fn vlan_of(port: &Port, head: &Head) -> Result<u16, DropReason> {
    // A tag of VLAN 0 has a priority, and says nothing of the VLAN (IEEE 802.1Q, 9.6).
    let tagged = head.tag.map(|tag| tag & 0x0fff).filter(|vlan| *vlan != 0);
    match tagged {
        None => port.config.vlans.untagged().ok_or(DropReason::VlanIngress),
        Some(vlan) => match &port.config.vlans {
            crate::Vlans::Trunk { allowed, .. } if allowed.has(vlan) => Ok(vlan),
            _ => Err(DropReason::VlanIngress),
        },
    }
}
