//! Frames at their ends: counted, and shown to captures.

use sidecore_memory::Segments;

use super::Switch;
use crate::head::Head;
use crate::ports::Lane;
use crate::{DropReason, Dropped, StageFrame, Way};

/// What became of a copy of a frame.
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
    #[inline]
    pub(super) fn drop_frame(
        &mut self,
        index: u16,
        dropped: Dropped,
        vlan: u16,
        frame: Option<(&Head, &Segments)>,
    ) {
        let Some(port) = self.port_at(index) else { return };
        port.stats.dropped(dropped.reason);
        if !port.is_plain {
            self.show_dropped(index, dropped, vlan, frame);
        }
    }

    /// Shows a dropped frame to the capture of its port.
    #[cold]
    fn show_dropped(
        &mut self,
        index: u16,
        dropped: Dropped,
        vlan: u16,
        frame: Option<(&Head, &Segments)>,
    ) {
        let Some((head, segments)) = frame else { return };
        let way = if dropped.reason.is_ingress() { Way::FromStation } else { Way::ToStation };
        let now = self.now;
        if let Some(port) = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut) {
            port.show(now, &StageFrame::new(way, vlan, head, segments), Some(dropped));
        }
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
