//! The seam for stages: what decides on the frames of one port besides the switch itself.

use std::any::Any;

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use crate::frames::BATCH;
use crate::head::Head;
use crate::{DropReason, Frames, HeldFrames, MacAddress};

/// The way of a frame through a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// From the station into the switch.
    FromStation,
    /// From the switch to the station.
    ToStation,
}

/// Why a stage drops a frame; the port counts it by its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// The rule of this number says so, counted from 0.
    Rule(u16),
    /// Its headers are wrong, or not whole in the part that decisions are made on.
    Headers,
    /// It is a fragment without its first one.
    Fragment,
    /// It is lost on a bad wire, which was asked for.
    Lost,
    /// There are more than the port's limit permits.
    Limit,
    /// A stage of the port has failed, and might have dropped it.
    Failed,
}

/// A drop: its reason, and the rule that has decided on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dropped {
    /// The counter's reason.
    pub reason: DropReason,
    /// The number of the firewall's rule, counted from 0.
    pub rule: Option<u16>,
}

impl From<DropReason> for Dropped {
    fn from(reason: DropReason) -> Self {
        Self { reason, rule: None }
    }
}

impl DropCause {
    pub(crate) const fn dropped(self, way: Way) -> Dropped {
        let rule = if let Self::Rule(number) = self { Some(number) } else { None };
        Dropped { reason: self.reason(way), rule }
    }

    const fn reason(self, way: Way) -> DropReason {
        match (self, way) {
            (Self::Rule(_), Way::FromStation) => DropReason::Rule,
            (Self::Rule(_), Way::ToStation) => DropReason::RuleOut,
            (Self::Headers, Way::FromStation) => DropReason::Headers,
            (Self::Headers, Way::ToStation) => DropReason::HeadersOut,
            (Self::Fragment, Way::FromStation) => DropReason::Fragment,
            (Self::Fragment, Way::ToStation) => DropReason::FragmentOut,
            (Self::Lost, Way::FromStation) => DropReason::Lost,
            (Self::Lost, Way::ToStation) => DropReason::LostOut,
            (Self::Limit, Way::FromStation) => DropReason::Limit,
            (Self::Limit, Way::ToStation) => DropReason::LimitOut,
            (Self::Failed, Way::FromStation) => DropReason::Failed,
            (Self::Failed, Way::ToStation) => DropReason::FailedOut,
        }
    }
}

/// The decision of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The frame goes on.
    Pass,
    /// It is dropped and counted.
    Drop(DropCause),
    /// The stage has copied it to its [`HeldFrames`], from where it goes on later.
    Held,
}

/// The place of a stage of a port: frames from the station pass them in this order, frames to it in
/// the reverse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StagePlace {
    /// The wire between the station and the switch.
    Wire,
    /// Limits the rates.
    Limit,
    /// Decides which frames pass.
    Firewall,
    /// Shows frames with their ends in the port, and decides nothing.
    Capture,
}

impl StagePlace {
    /// The number of places.
    pub const COUNT: usize = 4;

    /// The word for it in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Wire => "wire",
            Self::Limit => "limit",
            Self::Firewall => "firewall",
            Self::Capture => "capture",
        }
    }
}

/// A frame as a stage sees it: the private copy of its head. The rest is in memory that its sender
/// can change at any time, so that nothing may be decided on it.
#[derive(Clone, Copy, Debug)]
pub struct StageFrame<'a> {
    pub(crate) way: Way,
    pub(crate) vlan: u16,
    /// The tag with which the station gets the frame.
    pub(crate) tag: Option<u16>,
    pub(crate) head: &'a Head,
    pub(crate) segments: &'a Segments,
}

impl<'a> StageFrame<'a> {
    pub(crate) const fn new(way: Way, vlan: u16, head: &'a Head, segments: &'a Segments) -> Self {
        Self { way, vlan, tag: None, head, segments }
    }

    /// Its way through the port.
    #[must_use]
    #[inline]
    pub const fn way(&self) -> Way {
        self.way
    }

    /// Its VLAN.
    #[must_use]
    #[inline]
    pub const fn vlan(&self) -> u16 {
        self.vlan
    }

    /// The receiver.
    #[must_use]
    pub const fn to(&self) -> MacAddress {
        self.head.to
    }

    /// The sender.
    #[must_use]
    pub const fn from(&self) -> MacAddress {
        self.head.from
    }

    /// The type of the payload, behind a VLAN tag.
    #[must_use]
    #[inline]
    pub const fn ether_type(&self) -> u16 {
        self.head.ether_type
    }

    /// Size of the frame in bytes, without virtio header and check sequence.
    #[must_use]
    #[inline]
    pub const fn len_bytes(&self) -> usize {
        self.head.len_bytes()
    }

    /// The payload, as far as it is in the private copy.
    #[must_use]
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        self.head.payload()
    }

    /// Size of the payload in bytes.
    #[must_use]
    pub const fn payload_bytes(&self) -> usize {
        self.head.len_bytes().saturating_sub(self.head.payload_at)
    }

    /// Copies the frame to `bytes`, as much as there is room for. Returns the number of bytes.
    /// Those behind the private copy may differ from what the receiver gets, if the sender changes
    /// them.
    pub fn copy(&self, bytes: &mut [u8]) -> usize {
        let known = self.head.frame();
        let known_bytes = known.len().min(bytes.len());
        let (front, behind) = bytes.split_at_mut(known_bytes);
        front.copy_from_slice(known.get(..known_bytes).unwrap_or(&[]));
        let (skip, rest) = self.head.rest();
        let behind = behind.get_mut(..rest.min(behind.len())).unwrap_or_default();
        known_bytes.saturating_add(self.segments.copy_to_slice(skip as u64, behind))
    }

    /// Size of the frame in bytes at the station: with the tag that it has there.
    #[must_use]
    pub fn station_bytes(&self) -> usize {
        match self.way {
            Way::FromStation => self.head.len_bytes(),
            Way::ToStation => self.head.len_with(self.tag),
        }
    }

    /// As [`copy`](Self::copy), of the frame as the station sends or gets it: the tags of its
    /// sender and of its receiver may differ. For [`FrameStage::decided`].
    pub fn copy_of_station(&self, bytes: &mut [u8]) -> usize {
        if self.way == Way::FromStation {
            return self.copy(bytes);
        }
        // A delivery to another port may have changed the bytes in front of the type.
        let head = self.head;
        let tag = self.tag.map(|tag| {
            let [high, low] = tag.to_be_bytes();
            [0x81, 0, high, low]
        });
        let known = head.frame().get(head.payload_at.saturating_sub(2)..).unwrap_or(&[]);
        let tag = tag.as_ref().map_or(&[][..], <[u8; 4]>::as_slice);
        let parts: [&[u8]; 4] = [&head.to.0, &head.from.0, tag, known];
        let mut at = 0_usize;
        for part in parts {
            let room = bytes.get_mut(at..).unwrap_or_default();
            let count = part.len().min(room.len());
            let (room, part) = (room.get_mut(..count), part.get(..count));
            room.unwrap_or_default().copy_from_slice(part.unwrap_or(&[]));
            at = at.saturating_add(count);
        }
        let (skip, rest) = head.rest();
        let room = bytes.get_mut(at..).unwrap_or_default();
        let room = room.get_mut(..rest.min(room.len())).unwrap_or_default();
        at.saturating_add(self.segments.copy_to_slice(skip as u64, room))
    }
}

/// Frames that follow each other through a port by one way, and the decisions on them.
///
/// Each of them has the same two stations, no tag and no offload.
#[derive(Debug)]
pub struct StageRun<'a> {
    way: Way,
    vlan: u16,
    frames: &'a Frames,
    /// The place of its first frame.
    first: usize,
    sizes: &'a RunSizes,
    /// The frames that a stage has stopped, as bits, and why.
    stopped: u32,
    verdicts: [Verdict; BATCH],
}

/// The frames of a run by their numbers.
#[derive(Debug)]
pub(crate) struct RunSizes {
    /// The number of frames.
    pub len: usize,
    /// Their sizes at the receiver, with its virtio header.
    pub sizes_bytes: [usize; BATCH],
    pub header_bytes: usize,
    /// As bits: frames that [repeat](StageRun::repeated) the one in front of them.
    pub repeats: u32,
}

/// The verdicts on a run have a bit each.
const _: () = assert!(BATCH == u32::BITS as usize);

/// The bit of a frame.
#[inline]
const fn bit(number: usize) -> u32 {
    1_u32.wrapping_shl(number as u32)
}

impl RunSizes {
    pub const fn new(header_bytes: usize) -> Self {
        Self { len: 0, sizes_bytes: [0; BATCH], header_bytes, repeats: 0 }
    }

    /// Adds a frame.
    #[inline]
    pub fn push(&mut self, len_bytes: usize, repeats: bool) {
        if let Some(place) = self.sizes_bytes.get_mut(self.len) {
            *place = self.header_bytes.wrapping_add(len_bytes);
            self.repeats |= if repeats { bit(self.len) } else { 0 };
            self.len = self.len.wrapping_add(1);
        }
    }

    /// The bytes of so many frames from `first` on.
    #[inline]
    pub fn bytes(&self, first: usize, count: usize) -> usize {
        let sizes = self.sizes_bytes.get(first..first.wrapping_add(count)).unwrap_or(&[]);
        let sum = sizes.iter().fold(0_usize, |sum, size_bytes| sum.wrapping_add(*size_bytes));
        sum.wrapping_sub(self.header_bytes.wrapping_mul(sizes.len()))
    }
}

impl<'a> StageRun<'a> {
    pub(crate) fn new(vlan: u16, frames: &'a Frames, first: usize, sizes: &'a RunSizes) -> Self {
        let (way, verdicts) = (Way::FromStation, [Verdict::Pass; BATCH]);
        Self { way, vlan, frames, first, sizes, stopped: 0, verdicts }
    }

    /// The number of frames, with those that a stage has stopped.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.sizes.len
    }

    /// Whether there are no frames.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.sizes.len == 0
    }

    /// The frame of this number, counted from 0; `None` if an earlier stage has stopped it.
    #[must_use]
    #[inline]
    pub fn frame(&self, number: usize) -> Option<StageFrame<'a>> {
        if number >= self.sizes.len || self.stopped & bit(number) != 0 {
            return None;
        }
        let slot = self.frames.get(self.first.wrapping_add(number))?;
        Some(StageFrame::new(self.way, self.vlan, &slot.head, &slot.segments))
    }

    /// How many frames behind this one have its [flow](crate::PlainFlow) and are
    /// [steady](crate::PlainFlow::is_steady) as it is, with no other one and none that a stage has
    /// stopped between them; and their bytes, without virtio headers.
    #[must_use]
    #[inline]
    pub fn repeated(&self, number: usize) -> (usize, usize) {
        let behind = number.wrapping_add(1);
        let repeats = self.sizes.repeats & !self.stopped;
        let count = repeats.checked_shr(behind as u32).unwrap_or(0).trailing_ones() as usize;
        (count, self.sizes.bytes(behind, count))
    }

    /// Notes the decision on the frame of this number.
    #[inline]
    pub fn decide(&mut self, number: usize, verdict: Verdict) {
        if verdict == Verdict::Pass {
            return;
        }
        if let Some(place) = self.verdicts.get_mut(number) {
            *place = verdict;
            self.stopped |= bit(number);
        }
    }

    /// The frames that were stopped until now, as bits.
    pub(crate) const fn stopped(&self) -> u32 {
        self.stopped
    }

    pub(crate) const fn verdicts(&self) -> [Verdict; BATCH] {
        self.verdicts
    }

    /// Goes on to the stages of this way.
    pub(crate) const fn set_way(&mut self, way: Way) {
        self.way = way;
    }
}

/// A stage of a port: a firewall, for instance. Frames from the station pass the stages in the
/// order of their [places](StagePlace) after the switch has found out where they go; frames to the
/// station pass those of their receiver in the reverse order, once, before they are delivered or
/// wait for buffers.
///
/// A port without stages pays nothing for this seam.
///
/// # Duties
///
/// A stage neither allocates, locks nor waits for a frame. If it panics, only its held frames are
/// asked for, and its port drops all frames until it is replaced or taken away
/// ([`Switch::failure`]); a capture leaves its place, and the port goes on without it.
///
/// [`Switch::failure`]: crate::Switch::failure
pub trait FrameStage: Any + Send {
    /// Decides on a frame.
    fn frame(&mut self, now: Nanos, frame: &StageFrame<'_>) -> Verdict;

    /// Decides on the frames of a run, in their order, as [`frame`](Self::frame) does on each.
    fn run(&mut self, now: Nanos, run: &mut StageRun<'_>) {
        for number in 0..run.len() {
            if let Some(frame) = run.frame(number) {
                run.decide(number, self.frame(now, &frame));
            }
        }
    }

    /// Sees a frame at its end in this port: it has gone on into the switch or to the station, or
    /// is dropped. The stage at [`StagePlace::Capture`] alone is shown frames.
    fn decided(&mut self, _: Nanos, _: &StageFrame<'_>, _: Option<Dropped>) {}

    /// Runs about once a millisecond while the switch polls: the place to forget what is old.
    fn look(&mut self, now: Nanos);

    /// Takes over the state of `old`, if that is of the same type: this stage replaces it.
    fn inherit(&mut self, old: &mut dyn FrameStage);

    /// The frames that it holds, if it ever answers [`Verdict::Held`].
    fn held(&mut self) -> Option<&mut HeldFrames> {
        None
    }

    /// When the first of them goes on.
    fn next_release(&self) -> Option<Nanos> {
        None
    }
}
