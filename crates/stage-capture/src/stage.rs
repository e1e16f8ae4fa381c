//! The stage that captures frames.

use sidecore_net::{Dropped, FrameStage, StageFrame, Verdict};
use sidecore_units::Nanos;

use crate::CaptureReader;
use crate::record::{Recorder, Seen};

/// The words of a capture's ring: 4 MiB.
pub const RING_WORDS: usize = 512 << 10;

/// The most bytes of a frame that a capture can have: the largest segment with its tag.
pub const SNAPLEN_MAX: u32 = 65_535 + 18;

/// Copies the beginnings of frames, with what became of them.
pub struct CaptureStage(Recorder<{ Seen::WORDS }>);

impl CaptureStage {
    /// A stage that copies up to `snaplen` bytes of a frame, at most [`SNAPLEN_MAX`], to a ring of
    /// this size, and the reader of the ring.
    #[must_use]
    pub fn new(snaplen: u32, ring_words: usize) -> (Self, CaptureReader) {
        let snaplen = snaplen.min(SNAPLEN_MAX);
        let (recorder, consumer) = Recorder::new(snaplen, ring_words);
        let reader = CaptureReader::new(consumer, snaplen, recorder.stats());
        (Self(recorder), reader)
    }
}

impl FrameStage for CaptureStage {
    fn frame(&mut self, _: Nanos, _: &StageFrame<'_>) -> Verdict {
        Verdict::Pass
    }

    fn decided(&mut self, now: Nanos, frame: &StageFrame<'_>, dropped: Option<Dropped>) {
        let (way, vlan) = (frame.way(), frame.vlan());
        let seen = Seen { at: now, way, vlan, dropped, len_bytes: 0, lost: 0 };
        self.0.record(Some(frame), seen, |header| header);
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}
