//! The stage.

use std::sync::Arc;

use sidecore_net::{DropReason, Dropped, FrameStage, StageFrame, Verdict, Way};
use sidecore_telemetry::counters;
use sidecore_units::Nanos;

use crate::CaptureReader;
use crate::ring::{HEADER_WORDS, Producer, ring};

/// The words of a capture's ring: 4 MiB.
pub const RING_WORDS: usize = 512 << 10;

/// The most bytes of a frame that a capture can have: the largest segment with its tag.
pub const SNAPLEN_MAX: u32 = 65_535 + 18;

counters! {
    /// The counters of a capture.
    pub struct CaptureStats;

    /// The counters of a capture at one moment.
    pub struct CaptureCounts;

    /// Frames that the capture has.
    pub captured: Counter = "captured_total",
    /// Frames that it does not have, because its reader was too slow.
    pub lost: Counter = "lost_total",
}

/// The ring's record of a frame, besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub at: Nanos,
    pub way: Way,
    pub dropped: Option<Dropped>,
    pub len_bytes: u32,
    /// Frames that were lost before this one.
    pub lost: u32,
}

impl Seen {
    fn encode(self) -> [u64; HEADER_WORDS] {
        let reason = self.dropped.map(|dropped| dropped.reason);
        let number = |reason| DropReason::ALL.iter().position(|any| *any == reason);
        let reason = reason.and_then(number).map_or(0, |at| at.saturating_add(1)) as u64;
        let rule = self.dropped.and_then(|dropped| dropped.rule);
        let rule = rule.map_or(0, |rule| u64::from(rule).saturating_add(1));
        let way = u64::from(self.way == Way::ToStation);
        let sizes = u64::from(self.len_bytes) | u64::from(self.lost) << 32;
        [self.at.0, sizes, reason << 32 | rule << 1 | way]
    }

    pub fn decode([at, sizes, fate]: [u64; HEADER_WORDS]) -> Self {
        let reason = usize::try_from(fate >> 32).ok().and_then(|number| number.checked_sub(1));
        let reason = reason.and_then(|at| DropReason::ALL.get(at)).copied();
        let rule = (fate as u32 >> 1).checked_sub(1).and_then(|rule| rule.try_into().ok());
        Self {
            at: Nanos(at),
            way: if fate & 1 == 0 { Way::FromStation } else { Way::ToStation },
            dropped: reason.map(|reason| Dropped { reason, rule }),
            len_bytes: sizes as u32,
            lost: (sizes >> 32) as u32,
        }
    }
}

/// Copies the beginnings of frames, with the decisions on them.
pub struct CaptureStage {
    ring: Producer,
    /// The beginning of a frame, in one piece.
    bytes: Box<[u8]>,
    stats: Arc<CaptureStats>,
    /// Frames that were lost since the last one that was not.
    lost: u32,
}

impl CaptureStage {
    /// A stage that copies up to `snaplen` bytes of a frame, at most [`SNAPLEN_MAX`], to a ring of
    /// this size, and the reader of the ring.
    #[must_use]
    pub fn new(snaplen: u32, ring_words: usize) -> (Self, CaptureReader) {
        let (producer, consumer) = ring(ring_words);
        let snaplen = snaplen.min(SNAPLEN_MAX);
        let stats = Arc::<CaptureStats>::default();
        let reader = CaptureReader::new(consumer, snaplen, Arc::clone(&stats));
        let bytes = vec![0; snaplen as usize].into();
        (Self { ring: producer, bytes, stats, lost: 0 }, reader)
    }
}

impl FrameStage for CaptureStage {
    fn frame(&mut self, _: Nanos, _: &StageFrame<'_>) -> Verdict {
        Verdict::Pass
    }

    fn decided(&mut self, now: Nanos, frame: &StageFrame<'_>, dropped: Option<Dropped>) {
        let count = frame.copy_of_station(&mut self.bytes);
        let seen = Seen {
            at: now,
            way: frame.way(),
            dropped,
            len_bytes: u32::try_from(frame.station_bytes()).unwrap_or(u32::MAX),
            lost: self.lost,
        };
        if self.ring.push(seen.encode(), self.bytes.get(..count).unwrap_or(&[])) {
            self.lost = 0;
            self.stats.captured.add(1);
        } else {
            self.lost = self.lost.saturating_add(1);
            self.stats.lost.add(1);
        }
    }

    fn look(&mut self, _: Nanos) {}

    fn inherit(&mut self, _: &mut dyn FrameStage) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_frame_is_the_same_behind_the_ring() {
        let rules = [None, Some(0), Some(7), Some(u16::MAX)];
        let drops = DropReason::ALL.iter().zip(rules.iter().cycle());
        let drops = drops.map(|(reason, rule)| Some(Dropped { reason: *reason, rule: *rule }));
        for (dropped, number) in drops.chain([None]).zip(0..) {
            let way = if number % 2 == 0 { Way::FromStation } else { Way::ToStation };
            let at = Nanos(u64::MAX - u64::from(number));
            let seen = Seen { at, way, dropped, len_bytes: u32::MAX - number, lost: number };
            assert_eq!(Seen::decode(seen.encode()), seen);
        }
        // The words of a ring are the stage's own; others would name no reason.
        assert_eq!(Seen::decode([0, 0, u64::MAX]).dropped, None);
    }
}
