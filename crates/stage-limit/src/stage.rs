//! The stage.

use sidecore_block::Gate;
use sidecore_net::{DropCause, FrameStage, StageFrame, Verdict, Way};
use sidecore_units::Nanos;

use crate::PortLimits;

/// The limits of a port.
pub struct LimitStage {
    from: Gate,
    to: Gate,
}

impl LimitStage {
    /// Full buckets of these limits.
    #[must_use]
    pub fn new(limits: &PortLimits) -> Self {
        let ([from_frames, to_frames], [from_bytes, to_bytes]) = (limits.frames, limits.bytes);
        Self { from: Gate::new(from_frames, from_bytes), to: Gate::new(to_frames, to_bytes) }
    }
}

impl FrameStage for LimitStage {
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict {
        let gate = match frame.way() {
            Way::FromStation => &self.from,
            Way::ToStation => &self.to,
        };
        match gate.pass(now, frame.len_bytes() as u64) {
            Ok(()) => Verdict::Pass,
            Err(_) => Verdict::Drop(DropCause::Limit),
        }
    }

    fn look(&mut self, _: Nanos) {}

    /// The buckets of other limits begin full.
    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}
