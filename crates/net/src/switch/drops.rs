//! Frames at their ends: counted, and shown to captures and traces.

use sidecore_memory::Segments;

use super::Switch;
use crate::head::Head;
use crate::ports::Lane;
use crate::table::Key;
use crate::trace::Running;
use crate::{
    DropReason, DropTrace, Dropped, DroppedFrame, PortId, StageFrame, SwitchError, TRACES_MAX,
    TraceId, Way,
};

/// The fate of a copy of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is in the station's buffers.
    Delivered,
    /// It is dropped and counted.
    Dropped,
    /// It has to wait for buffers.
    Waits,
}

impl Switch {
    /// Counts a frame that a port drops, and shows it. `vlan` counts for frames to the station. A
    /// frame that could not be looked at has no head.
    // Not inline: the code of frames that arrive stays short.
    #[inline(never)]
    pub(super) fn drop_frame(
        &mut self,
        index: u16,
        dropped: Dropped,
        vlan: u16,
        frame: Option<(&Head, &Segments)>,
    ) {
        let Some(port) = self.port_at(index) else { return };
        port.stats.dropped(dropped.reason);
        if !port.is_plain || !self.traces.is_empty() {
            self.show_dropped(index, dropped, vlan, frame);
        }
    }

    /// Shows a dropped frame to the capture of its port, and to traces.
    #[cold]
    fn show_dropped(
        &mut self,
        index: u16,
        dropped: Dropped,
        vlan: u16,
        frame: Option<(&Head, &Segments)>,
    ) {
        let now = self.now;
        let Some(port) = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut) else {
            return;
        };
        let is_ingress = dropped.reason.is_ingress();
        let (way, vlan) = if is_ingress {
            (Way::FromStation, port.config.vlans.untagged().unwrap_or(0))
        } else {
            (Way::ToStation, vlan)
        };
        let shown = frame.map(|(head, segments)| StageFrame {
            tag: port.tag(vlan, head.tag),
            ..StageFrame::new(way, vlan, head, segments)
        });
        if let Some(frame) = &shown {
            port.show(now, frame, Some(dropped));
        }
        if self.traces.is_empty() {
            return;
        }
        let port = PortId { index, generation: port.generation };
        let sender = match frame {
            _ if is_ingress => Some(port),
            Some((head, _)) => self.port_of_sender(head, vlan),
            None => None,
        };
        let seen = DroppedFrame { port, sender, way, vlan, dropped, frame: shown };
        self.traces.iter_mut().for_each(|trace| trace.show(now, &seen));
    }

    /// The port that the sender of a frame in this VLAN is on.
    fn port_of_sender(&self, head: &Head, vlan: u16) -> Option<PortId> {
        let index = self.table.port_of(Key::new(head.from, vlan))?;
        Some(PortId { index, generation: self.port_at(index)?.generation })
    }

    /// Begins to show dropped frames to a trace: those from and to a port, or all with `None`. The
    /// trace ends with the port.
    ///
    /// # Errors
    /// There is no such port, or there are [`TRACES_MAX`] traces already.
    pub fn add_trace(
        &mut self,
        port: Option<PortId>,
        trace: Box<dyn DropTrace>,
    ) -> Result<TraceId, SwitchError> {
        if port.is_some_and(|port| self.port(port).is_none()) {
            return Err(SwitchError::NoSuchPort);
        }
        if self.traces.len() >= TRACES_MAX {
            return Err(SwitchError::TooManyTraces);
        }
        let id = TraceId(self.next_generation());
        self.traces.push(Running { id, port, trace });
        Ok(id)
    }

    /// Ends a trace. Returns it: its memory is for another thread to free.
    pub fn remove_trace(&mut self, id: TraceId) -> Option<Box<dyn DropTrace>> {
        let at = self.traces.iter().position(|trace| trace.id == id)?;
        Some(self.traces.swap_remove(at).trace)
    }

    /// Shows a frame that its station has got to the capture of the port.
    pub(super) fn show_sent(&mut self, index: u16, vlan: u16, head: &Head, segments: &Segments) {
        let now = self.now;
        if let Some(port) = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut) {
            port.show(now, &StageFrame::new(Way::ToStation, vlan, head, segments), None);
        }
    }

    /// Drops the frames of a queue that no decision was made on, because it is detached.
    pub(super) fn drop_undecided(&mut self, lane: &Lane) {
        for index in lane.frames.len().saturating_sub(lane.undecided)..lane.frames.len() {
            let Some(slot) = lane.frames.get(index) else { break };
            if let Some(port) = self.port_at(lane.port) {
                let header_bytes = lane.properties.header_bytes as u64;
                port.stats.in_frames.add(1);
                port.stats.in_octets.add(slot.segments.len_bytes().saturating_sub(header_bytes));
            }
            let frame = slot.fault.is_none().then_some((&slot.head, &slot.segments));
            self.drop_frame(lane.port, DropReason::Detached.into(), 0, frame);
        }
    }
}
