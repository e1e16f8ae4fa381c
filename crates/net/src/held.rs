//! Frames that a stage has taken, to let them go on later: copies in private memory, bounded.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::io;

use sidecore_memory::{GuestAddress, Part, RegionHint, Segments, SharedPages};
use sidecore_units::Nanos;

use crate::head::Head;
use crate::{StageFrame, Way};

/// Room for the longest frame, with a virtio header and a tag, in whole pages.
const FRAME_BYTES: usize = 68 << 10;

/// Frames that a stage holds. They stay in the order of their times.
pub struct HeldFrames {
    /// The memory of what lies behind the heads.
    _pages: SharedPages,
    #[allow(clippy::vec_box)] // frames move between the two lists
    free: Vec<Box<HeldFrame>>,
    flights: BinaryHeap<Reverse<Flight>>,
    /// The number of the next frame, so that equal times keep their order.
    next: u64,
}

/// A frame that is held.
pub(crate) struct HeldFrame {
    start: GuestAddress,
    pub head: Head,
    pub segments: Segments,
    pub vlan: u16,
    pub way: Way,
}

struct Flight {
    at: Nanos,
    number: u64,
    frame: Box<HeldFrame>,
}

/// The harm that a frame takes while it is held. Its headers up to the payload stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Harm {
    /// A byte of the payload, and the bits of it that change.
    pub wrong_bits: Option<(usize, u8)>,
    /// The bytes of the payload that are left.
    pub rest: Option<usize>,
}

impl HeldFrames {
    /// Room for so many frames.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(frames: usize) -> io::Result<Self> {
        let pages = SharedPages::new("held-frames", frames.saturating_mul(FRAME_BYTES))?;
        let frame = |index: usize| {
            let start = GuestAddress(index.saturating_mul(FRAME_BYTES) as u64);
            let mut segments = Segments::with_capacity(1);
            segments.bind(pages.memory());
            let (vlan, way) = (0, Way::FromStation);
            Box::new(HeldFrame { start, head: Head::new(), segments, vlan, way })
        };
        let free = (0..frames).map(frame).collect();
        Ok(Self { _pages: pages, free, flights: BinaryHeap::with_capacity(frames), next: 0 })
    }

    /// Holds a copy of a frame until `at`. False if there is no room, or the frame is too long.
    pub fn hold(&mut self, frame: &StageFrame<'_>, at: Nanos, harm: Harm) -> bool {
        let Some(mut held) = self.free.pop() else {
            return false;
        };
        if !held.fill(frame) {
            self.free.push(held);
            return false;
        }
        held.harm(harm);
        let number = self.next;
        self.next = number.wrapping_add(1);
        self.flights.push(Reverse(Flight { at, number, frame: held }));
        true
    }

    /// The number of frames.
    #[must_use]
    pub fn len(&self) -> usize {
        self.flights.len()
    }

    /// Whether no frame is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// When the next frame goes on.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        self.flights.peek().map(|flight| flight.0.at)
    }

    /// Takes the first frame, if it is to go on by `now`.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<Box<HeldFrame>> {
        if self.deadline()? > now {
            return None;
        }
        Some(self.flights.pop()?.0.frame)
    }

    /// Takes back the place of a frame that has gone on.
    pub(crate) fn give_back(&mut self, frame: Box<HeldFrame>) {
        self.free.push(frame);
    }
}

impl std::fmt::Debug for HeldFrames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldFrames").field("frames", &self.len()).finish_non_exhaustive()
    }
}

impl HeldFrame {
    /// Copies a frame. False if it is too long.
    fn fill(&mut self, frame: &StageFrame<'_>) -> bool {
        self.head.clone_from(frame.head);
        (self.vlan, self.way) = (frame.vlan, frame.way);
        let (skip, rest) = frame.head.rest();
        let total = skip.saturating_add(rest);
        self.segments.clear();
        if total > FRAME_BYTES
            || self.segments.push(self.start, total as u64, &mut RegionHint::default()).is_err()
        {
            return false;
        }
        let part = Part { skip_bytes: skip as u64, len_bytes: rest };
        frame.segments.copy_to(part, &self.segments, skip as u64) == rest
    }

    /// Harms the payload. A checksum that was still to be computed would be right again, so the
    /// receiver computes none; a frame that was still to be cut is too long for it.
    fn harm(&mut self, harm: Harm) {
        if harm == Harm::default() {
            return;
        }
        self.head.packet = sidecore_spec_virtio::net::PacketHeader::default();
        if let Some((at, bits)) = harm.wrong_bits {
            let at = at.saturating_add(self.head.payload_at);
            if !self.head.flip(at, bits) {
                let (skip, _) = self.head.rest();
                let behind = at.saturating_sub(self.head.frame().len());
                let place = skip.saturating_add(behind) as u64;
                let mut byte = [0];
                if self.segments.copy_to_slice(place, &mut byte) == byte.len() {
                    self.segments.copy_from_slice(place, &byte.map(|byte| byte ^ bits));
                }
            }
        }
        if let Some(rest) = harm.rest {
            self.head.shorten(rest.saturating_add(self.head.payload_at));
        }
    }
}

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Flight {}

impl Ord for Flight {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
