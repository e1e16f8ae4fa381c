//! Traces: the frames that a switch drops, and their reader, which counts them by flow.

use std::collections::HashMap;
use std::sync::Arc;

use sidecore_net::{DropTrace, Dropped, DroppedFrame, PortId, Way};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

use crate::flow::Flow;
use crate::record::{CaptureStats, Recorder, Seen};
use sidecore_spool::Consumer;

/// The words of a trace's ring: 1 MiB.
pub const TRACE_RING_WORDS: usize = 128 << 10;
/// The flows that a reader counts apart. Others are counted together, by port and reason.
pub const FLOWS_MAX: usize = 1024;

/// Bytes of a frame that are kept: the headers of most.
const SNAPLEN: u32 = 128;
/// A record's header: the facts, the port, and the port of the sender.
const WORDS: usize = Seen::WORDS + 2;
/// The most records of one call of the reader.
const RECORDS_MAX: u64 = 32 << 10;

/// Copies the beginnings of frames that are dropped to a ring.
pub struct TraceRecorder(Recorder<WORDS>);

impl TraceRecorder {
    /// A recorder with a ring of this size, and the ring's reader.
    #[must_use]
    pub fn new(ring_words: usize) -> (Self, TraceReader) {
        let (recorder, ring) = Recorder::new(SNAPLEN, ring_words);
        let reader = TraceReader {
            ring,
            stats: recorder.stats(),
            bytes: Vec::with_capacity(SNAPLEN as usize),
            counts: HashMap::new(),
            lost: 0,
        };
        (Self(recorder), reader)
    }
}

impl DropTrace for TraceRecorder {
    fn dropped(&mut self, now: Nanos, frame: &DroppedFrame<'_>) {
        let DroppedFrame { port, sender, way, vlan, dropped, .. } = *frame;
        let seen = Seen { at: now, way, vlan, dropped: Some(dropped), len_bytes: 0, lost: 0 };
        let sender = sender.map_or(0, PortId::number);
        self.0.record(frame.frame.as_ref(), seen, |[at, sizes, fate]| {
            [at, sizes, fate, port.number(), sender]
        });
    }
}

/// The frames that are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// Those of a flow.
    Flow(Flow),
    /// Those that could not be read, or are too short for a flow.
    Unread,
    /// Those of all flows for which there was no room.
    Others,
}

/// Why frames were dropped, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DropPlace {
    /// The number of the port that has dropped them.
    pub port: u64,
    /// That of the port of their sender, if it is known.
    pub sender: Option<u64>,
    /// Their way through the port.
    pub way: Way,
    /// Their VLAN, if it is known.
    pub vlan: Option<u16>,
    /// Why.
    pub dropped: Dropped,
    /// The frames.
    pub group: Group,
}

/// Counts of frames that were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropCounts {
    /// The time of the first one, by the sidecore's clock.
    pub first_at: Nanos,
    /// That of the last one.
    pub last_at: Nanos,
    /// Their number.
    pub frames: u64,
    /// Their bytes at the port, without virtio headers and check sequences.
    pub bytes: u64,
}

/// Reads the frames of a trace, and counts them by flow. Its memory is bounded.
pub struct TraceReader {
    ring: Consumer<WORDS>,
    stats: Arc<CaptureStats>,
    bytes: Vec<u8>,
    counts: HashMap<DropPlace, DropCounts>,
    /// Frames that were missing when they were last asked for.
    lost: u64,
}

impl TraceReader {
    /// Counts frames until there are no more, or `most` of them. Returns their number.
    pub fn read(&mut self, most: u64) -> u64 {
        let mut count = 0_u64;
        while count < most.min(RECORDS_MAX)
            && let Some([at, sizes, fate, port, sender]) = self.ring.pop(&mut self.bytes)
        {
            count = count.saturating_add(1);
            self.note(Seen::decode([at, sizes, fate]), port, sender);
        }
        count
    }

    fn note(&mut self, seen: Seen, port: u64, sender: u64) {
        // A trace is shown drops alone.
        let Some(dropped) = seen.dropped else { return };
        let (way, sender) = (seen.way, Some(sender).filter(|sender| *sender != 0));
        let flow = Flow::read(&self.bytes);
        let tag = flow.and_then(|flow| flow.vlan);
        let vlan = tag.or(Some(seen.vlan)).filter(|vlan| *vlan != 0);
        let group = flow.map_or(Group::Unread, Group::Flow);
        let mut place = DropPlace { port, sender, way, vlan, dropped, group };
        if self.counts.len() >= FLOWS_MAX && !self.counts.contains_key(&place) {
            // As many as ports times reasons at most.
            let dropped = Dropped { rule: None, ..dropped };
            place =
                DropPlace { port, sender: None, way, vlan: None, dropped, group: Group::Others };
        }
        let new = DropCounts { first_at: seen.at, last_at: seen.at, frames: 0, bytes: 0 };
        let counts = self.counts.entry(place).or_insert(new);
        counts.last_at = seen.at;
        counts.frames = counts.frames.saturating_add(1);
        counts.bytes = counts.bytes.saturating_add(seen.len_bytes.into());
    }

    /// Takes the counts since the last call, in the order of their first frames, and the number of
    /// frames that are missing in them because the reader was too slow: 0 if there are no counts,
    /// and the next ones have it.
    pub fn take(&mut self) -> (Vec<(DropPlace, DropCounts)>, u64) {
        if self.counts.is_empty() {
            return (Vec::new(), 0);
        }
        let mut counts: Vec<_> = self.counts.drain().collect();
        counts.sort_by_key(|(place, counts)| (counts.first_at, place.port));
        let lost = self.stats.counts().lost;
        (counts, lost.saturating_sub(std::mem::replace(&mut self.lost, lost)))
    }

    /// Whether the trace has ended: no frames come after those that are there by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.ring.is_closed()
    }
}
