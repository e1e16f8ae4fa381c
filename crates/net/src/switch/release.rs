//! Frames that stages have held, on the rest of their ways.

use sidecore_units::Nanos;

use super::Switch;
use super::decide::{Targets, vlan_of};
use crate::frames::BATCH;
use crate::held::HeldFrame;
use crate::ports::PortSet;
use crate::{DropReason, FrameStage, StageFrame, StagePlace, Way};

impl Switch {
    /// Lets held frames go on whose times have come, a batch of each port. Returns their number.
    pub(super) fn release_held(&mut self, now: Nanos) -> usize {
        let mut work = 0_usize;
        for at in 0..self.holders.len() {
            let Some(index) = self.holders.get(at).copied() else { break };
            for _ in 0..BATCH {
                let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
                let Some((place, mut frame)) = port.and_then(|port| port.take_held(now)) else {
                    break;
                };
                work = work.saturating_add(1);
                self.go_on(index, place, &mut frame);
                let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
                if let Some(held) = port.and_then(|port| port.held(place)) {
                    held.give_back(frame);
                }
            }
        }
        self.publish_all();
        work
    }

    /// Lets all frames go on at once that a stage holds which has left its place.
    pub(super) fn release_all(
        &mut self,
        index: u16,
        place: StagePlace,
        stage: &mut dyn FrameStage,
    ) {
        let Some(held) = stage.held() else { return };
        while let Some(mut frame) = held.due(Nanos(u64::MAX)) {
            self.go_on(index, place, &mut frame);
            held.give_back(frame);
        }
        self.publish_all();
    }

    /// Notes which ports hold frames.
    pub(super) fn note_holders(&mut self) {
        self.holders.clear();
        let ports = (0_u16..).zip(&self.ports);
        let holds = ports.filter(|(_, port)| port.as_ref().is_some_and(|port| port.holds));
        self.holders.extend(holds.map(|(index, _)| index));
    }

    /// The earliest time at which a held frame goes on.
    pub(super) fn next_release(&self) -> Option<Nanos> {
        let ports = self.holders.iter().filter_map(|index| self.port_at(*index));
        ports.filter_map(|port| port.next_release()).min()
    }

    /// Drops the frames that a port holds, because it is removed or changes.
    pub(super) fn drop_held(&mut self, index: u16) {
        let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
        let Some(port) = port else { return };
        while let Some((place, frame)) = port.take_held(Nanos(u64::MAX)) {
            port.stats.dropped(match frame.way {
                Way::FromStation => DropReason::Detached,
                Way::ToStation => DropReason::PortDown,
            });
            if let Some(held) = port.held(place) {
                held.give_back(frame);
            }
        }
    }

    /// Lets a frame of a port go on behind the stage at `place`. It waits for no buffers: a wire
    /// does not wait either.
    fn go_on(&mut self, index: u16, place: StagePlace, frame: &mut HeldFrame) {
        if let Err(reason) = self.try_to_go_on(index, place, frame)
            && let Some(port) = self.port_at(index)
        {
            port.stats.dropped(reason);
        }
    }

    fn try_to_go_on(
        &mut self,
        index: u16,
        place: StagePlace,
        frame: &mut HeldFrame,
    ) -> Result<(), DropReason> {
        let now = self.now;
        let HeldFrame { head, segments, vlan, way, .. } = frame;
        let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
        let port = port.ok_or(DropReason::PortDown)?;
        match way {
            Way::FromStation if !port.is_open() => return Err(DropReason::Blocked),
            Way::ToStation if !port.is_open() || port.up.is_empty() => {
                return Err(DropReason::PortDown);
            }
            _ => {}
        }
        let seen = StageFrame::new(*way, *vlan, head, segments);
        if !port.pass_stages(now, &seen, Some(place))? {
            return Ok(());
        }
        if *way == Way::ToStation {
            self.copy_to_open(index, *vlan, head, segments, true);
            return Ok(());
        }
        // The port, and those that the frame was for, may have changed meanwhile.
        let vlan = vlan_of(port, head)?;
        let targets = match self.targets_again(index, (head.to, vlan))? {
            Targets::One(target) => PortSet::of(target),
            Targets::All(targets) => targets,
        };
        for target in targets.iter() {
            if let Some(port) = self.port_at(index) {
                port.stats.in_copies.add(1);
            }
            self.copy_to(target, vlan, head, segments, true);
        }
        Ok(())
    }
}
