//! Frames that stages have held, on the rest of their ways.

use sidecore_units::Nanos;

use super::Switch;
use super::decide::{Targets, vlan_of};
use super::drops::Sent;
use crate::frames::BATCH;
use crate::held::HeldFrame;
use crate::ports::PortSet;
use crate::stages::take_all_held;
use crate::{DropCause, DropReason, Dropped, FrameStage, StageFrame, StagePlace, SwitchEvent, Way};

impl Switch {
    /// Lets held frames go on whose times have come, a batch of each port. Returns their number.
    pub(super) fn release_held(&mut self, now: Nanos) -> usize {
        let mut work = 0_usize;
        for at in 0..self.holders.len() {
            let Some(index) = self.holders.get(at).copied() else { break };
            for _ in 0..BATCH {
                let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
                let Some((place, mut frame)) = port.and_then(|port| port.stages.take_held(now))
                else {
                    break;
                };
                work = work.saturating_add(1);
                self.go_on(index, place, &mut frame);
                let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
                if let Some(port) = port {
                    port.stages.give_back(place, frame);
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
        while let Some(mut frame) = take_all_held(stage) {
            self.go_on(index, place, &mut frame);
        }
        self.publish_all();
    }

    /// Notifies the owner of the switch that a stage of a port has failed, and drops the frames
    /// that the stage held. A capture that has failed leaves its place.
    pub(super) fn note_failure(&mut self, index: u16) {
        let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
        let Some(port) = port else { return };
        let Some(failure) = port.stages.new_failure() else { return };
        let port = port.name.clone();
        self.event(SwitchEvent::StageFailed { port, failure: failure.clone() });
        loop {
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            let Some(port) = port else { return };
            let Some(frame) = port.stages.take_left() else {
                if failure.place == StagePlace::Capture {
                    port.leave_out(failure);
                    self.note_holders();
                }
                return;
            };
            let dropped = DropCause::Failed.dropped(frame.way);
            self.drop_frame(index, dropped, frame.vlan, Some((&frame.head, &frame.segments)));
        }
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
        ports.filter_map(|port| port.stages.next_release()).min()
    }

    /// Drops the frames that a port holds, because it is removed or changes.
    pub(super) fn drop_held(&mut self, index: u16) {
        // The switch needs the port for what it shows of each frame.
        loop {
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            let held = port.and_then(|port| port.stages.take_held(Nanos(u64::MAX)));
            let Some((place, frame)) = held else { return };
            let reason = match frame.way {
                Way::FromStation => DropReason::Detached,
                Way::ToStation => DropReason::PortDown,
            };
            self.drop_frame(index, reason.into(), frame.vlan, Some((&frame.head, &frame.segments)));
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            if let Some(port) = port {
                port.stages.give_back(place, frame);
            }
        }
    }

    /// Lets a frame of a port go on behind the stage at `place`. It waits for no buffers: a wire
    /// does not wait either.
    fn go_on(&mut self, index: u16, place: StagePlace, frame: &mut HeldFrame) {
        if let Err(dropped) = self.try_to_go_on(index, place, frame) {
            self.drop_frame(index, dropped, frame.vlan, Some((&frame.head, &frame.segments)));
        }
    }

    fn try_to_go_on(
        &mut self,
        index: u16,
        place: StagePlace,
        frame: &mut HeldFrame,
    ) -> Result<(), Dropped> {
        let now = self.now;
        let HeldFrame { head, segments, vlan, way, .. } = frame;
        let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
        let port = port.ok_or(DropReason::PortDown)?;
        match way {
            Way::FromStation if !port.is_open() => return Err(DropReason::Blocked.into()),
            Way::ToStation if !port.is_open() || port.up.is_empty() => {
                return Err(DropReason::PortDown.into());
            }
            _ => {}
        }
        let seen = StageFrame::new(*way, *vlan, head, segments);
        if !port.stages.pass(now, &seen, Some(place))? {
            return Ok(());
        }
        if *way == Way::ToStation {
            if self.copy_to_open(index, *vlan, head, segments, true) == Sent::Delivered {
                self.show_sent(index, *vlan, head, segments);
            }
            return Ok(());
        }
        // The port, and those that the frame was for, may have changed meanwhile.
        let vlan = vlan_of(port, head)?;
        let targets = match self.targets_again(index, (head.to, vlan))? {
            Targets::One(target) => PortSet::of(target),
            Targets::All(targets) => targets,
        };
        if let Some(port) = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut) {
            port.show(now, &StageFrame::new(*way, vlan, head, segments), None);
        }
        for target in targets.iter() {
            if let Some(port) = self.port_at(index) {
                port.stats.in_copies.add(1);
            }
            self.copy_to(target, vlan, head, segments, true);
        }
        Ok(())
    }
}
