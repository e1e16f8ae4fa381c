//! The seam for traces: they see the frames that a switch drops, and why.

use sidecore_units::Nanos;

use crate::{Dropped, PortId, StageFrame, Way};

/// The most traces of a switch at a time.
pub const TRACES_MAX: usize = 8;

/// A frame that a switch drops.
#[derive(Clone, Copy, Debug)]
pub struct DroppedFrame<'a> {
    /// The port that drops and counts it.
    pub port: PortId,
    /// The port that its sender is on, if the switch knows that.
    pub sender: Option<PortId>,
    /// Its way through `port`.
    pub way: Way,
    /// Its VLAN, if it has no tag; 0 for none.
    pub vlan: u16,
    /// Why.
    pub dropped: Dropped,
    /// The frame, whose bytes alone can be relied on: its headers may be wrong. None if it could
    /// not be read from the station's memory.
    pub frame: Option<StageFrame<'a>>,
}

/// A trace of a switch. Frames that arrive cost nothing because of it.
///
/// # Duties
///
/// A trace neither allocates, locks nor waits for a frame.
pub trait DropTrace: Send {
    /// Sees a frame that is dropped.
    fn dropped(&mut self, now: Nanos, frame: &DroppedFrame<'_>);
}

/// Names a trace of a switch. It is invalid once the trace is removed, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceId(pub(crate) u64);

/// A trace that runs.
pub(crate) struct Running {
    pub id: TraceId,
    /// The port whose frames it sees; `None` for all ports.
    pub port: Option<PortId>,
    pub trace: Box<dyn DropTrace>,
}

impl Running {
    /// Shows the frame if it is from or to a port of the trace.
    pub fn show(&mut self, now: Nanos, frame: &DroppedFrame<'_>) {
        let is_wanted = |port| frame.port == port || frame.sender == Some(port);
        if self.port.is_none_or(is_wanted) {
            self.trace.dropped(now, frame);
        }
    }
}
