//! Records of frames in a ring: facts, and the beginnings of frames.

use std::sync::Arc;

use sidecore_net::{DropReason, Dropped, StageFrame, Way};
use sidecore_telemetry::counters;
use sidecore_units::Nanos;

use sidecore_spool::{Consumer, Producer, ring};

counters! {
    /// The counters of a capture or a trace.
    pub struct CaptureStats;

    /// The counters of a capture or a trace at one moment.
    pub struct CaptureCounts;

    /// Frames that the capture has.
    pub captured: Counter = "captured_total",
    /// Frames that it does not have, because its reader was too slow.
    pub lost: Counter = "lost_total",
}

/// The facts of a frame besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub at: Nanos,
    pub way: Way,
    pub vlan: u16,
    pub dropped: Option<Dropped>,
    pub len_bytes: u32,
    /// Frames that were lost before this one.
    pub lost: u32,
}

impl Seen {
    pub const WORDS: usize = 3;

    pub fn encode(self) -> [u64; Self::WORDS] {
        let reason = self.dropped.map(|dropped| dropped.reason);
        let number = |reason| DropReason::ALL.iter().position(|any| *any == reason);
        let reason = reason.and_then(number).map_or(0, |at| at.saturating_add(1)) as u64;
        let rule = self.dropped.and_then(|dropped| dropped.rule);
        let rule = rule.map_or(0, |rule| u64::from(rule).saturating_add(1));
        let (way, vlan) = (u64::from(self.way == Way::ToStation), u64::from(self.vlan));
        let sizes = u64::from(self.len_bytes) | u64::from(self.lost) << 32;
        [self.at.0, sizes, reason << 48 | vlan << 32 | rule << 1 | way]
    }

    pub fn decode([at, sizes, fate]: [u64; Self::WORDS]) -> Self {
        let reason = usize::try_from(fate >> 48).ok().and_then(|number| number.checked_sub(1));
        let reason = reason.and_then(|at| DropReason::ALL.get(at)).copied();
        let rule = (fate as u32 >> 1).checked_sub(1).and_then(|rule| rule.try_into().ok());
        Self {
            at: Nanos(at),
            way: if fate & 1 == 0 { Way::FromStation } else { Way::ToStation },
            vlan: (fate >> 32) as u16,
            dropped: reason.map(|reason| Dropped { reason, rule }),
            len_bytes: sizes as u32,
            lost: (sizes >> 32) as u32,
        }
    }
}

/// Writes records of frames, with headers of so many words, to a ring.
pub(crate) struct Recorder<const WORDS: usize> {
    ring: Producer<WORDS>,
    /// The beginning of a frame, in one piece.
    bytes: Box<[u8]>,
    stats: Arc<CaptureStats>,
    /// Frames that were lost since the last one that was not.
    lost: u32,
}

impl<const WORDS: usize> Recorder<WORDS> {
    /// Copies up to `snaplen` bytes of a frame to a ring of this size.
    pub fn new(snaplen: u32, ring_words: usize) -> (Self, Consumer<WORDS>) {
        let (ring, consumer) = ring(ring_words);
        let (bytes, stats) = (vec![0; snaplen as usize].into(), Arc::default());
        (Self { ring, bytes, stats, lost: 0 }, consumer)
    }

    pub fn stats(&self) -> Arc<CaptureStats> {
        Arc::clone(&self.stats)
    }

    /// Records a frame, or that there was one that could not be read, with the header that `header`
    /// makes of its facts.
    pub fn record(
        &mut self,
        frame: Option<&StageFrame<'_>>,
        seen: Seen,
        header: impl FnOnce([u64; Seen::WORDS]) -> [u64; WORDS],
    ) {
        let count = frame.map_or(0, |frame| frame.copy_of_station(&mut self.bytes));
        let len_bytes = frame.map_or(0, StageFrame::station_bytes);
        let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        let seen = Seen { len_bytes, lost: self.lost, ..seen };
        if self.ring.push(header(seen.encode()), self.bytes.get(..count).unwrap_or(&[])) {
            self.lost = 0;
            self.stats.captured.add(1);
        } else {
            self.lost = self.lost.saturating_add(1);
            self.stats.lost.add(1);
        }
    }
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
            let (at, vlan) = (Nanos(u64::MAX - u64::from(number)), u16::MAX - number as u16);
            let len_bytes = u32::MAX - number;
            let seen = Seen { at, way, vlan, dropped, len_bytes, lost: number };
            assert_eq!(Seen::decode(seen.encode()), seen);
        }
        // The words of a ring are the recorder's own; others would name no reason.
        assert_eq!(Seen::decode([0, 0, u64::MAX]).dropped, None);
    }
}
