//! The frames that a queue has lent and that are not given back yet, in their order.

use sidecore_memory::Segments;

use crate::DropReason;
use crate::head::Head;
use crate::ports::PortSet;

/// The most frames that a queue has lent at a time: some wait for buffers of their receivers.
pub const FRAMES_MAX: usize = 128;
/// The most frames that a queue lends in one turn.
pub const BATCH: usize = 32;

/// A frame that a queue has lent.
#[derive(Debug)]
pub(crate) struct Slot {
    pub segments: Segments,
    pub fault: Option<DropReason>,
    /// The head, and what was decided on it, once that was done.
    pub head: Head,
    pub vlan: u16,
    /// The ports that have no buffers for the frame yet.
    pub pending: PortSet,
    /// The turn in which it began to wait.
    pub since: u64,
    pub is_done: bool,
}

/// The frames of one queue: those that a turn has not decided on yet, and older ones that wait for
/// buffers of their receivers.
///
/// The memory of the scatter-gather lists is allocated once.
#[derive(Debug)]
pub struct Frames {
    slots: Box<[Slot]>,
    /// The oldest frame.
    first: usize,
    /// The number of frames.
    len: usize,
    /// How many may still be appended in this turn.
    room: usize,
}

impl Frames {
    /// Room for frames of up to `segments` pieces of memory each.
    #[must_use]
    pub fn with_capacity(segments: usize) -> Self {
        let slot = |_| Slot {
            segments: Segments::with_capacity(segments),
            fault: None,
            head: Head::new(),
            vlan: 0,
            pending: PortSet::NONE,
            since: 0,
            is_done: false,
        };
        Self { slots: (0..FRAMES_MAX).map(slot).collect(), first: 0, len: 0, room: 0 }
    }

    /// The number of frames that may be appended now.
    #[must_use]
    #[inline]
    pub fn room(&self) -> usize {
        self.room
    }

    /// Appends a frame, if there is room for it: `fill` binds the list to the memory of the frame
    /// and adds the pieces of virtio header and frame to it. Returns whether it was appended.
    ///
    /// If `fill` fails, then the frame is counted as dropped for this reason: it keeps its place
    /// among the others and is not looked at.
    #[inline]
    pub fn append(&mut self, fill: impl FnOnce(&mut Segments) -> Result<(), DropReason>) -> bool {
        let at = self.place(self.len);
        let Some(slot) = self.slots.get_mut(at).filter(|_| self.room > 0) else {
            return false;
        };
        slot.fault = fill(&mut slot.segments).err();
        slot.is_done = false;
        self.len = self.len.wrapping_add(1);
        self.room = self.room.wrapping_sub(1);
        true
    }

    /// Makes room for up to `limit` frames more.
    #[inline]
    pub(crate) fn make_room(&mut self, limit: usize) {
        self.room = limit.min(FRAMES_MAX.wrapping_sub(self.len));
        if self.len == 0 {
            // The same slots again: they are in the cache.
            self.first = 0;
        }
    }

    /// Frames that are not given back yet.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The slot of the frame at `index`, counted from the oldest.
    #[inline]
    fn place(&self, index: usize) -> usize {
        self.first.wrapping_add(index) % FRAMES_MAX
    }

    /// The frame at `index`, counted from the oldest.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<&Slot> {
        self.slots.get(self.place(index)).filter(|_| index < self.len)
    }

    /// The frame at `index`, counted from the oldest.
    #[inline]
    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Slot> {
        let at = self.place(index);
        self.slots.get_mut(at).filter(|_| index < self.len)
    }

    /// Removes the oldest frames that are done, up to the first that is not. Returns their number.
    #[inline]
    pub(crate) fn take_done(&mut self) -> usize {
        let mut count = 0_usize;
        while self.get(0).is_some_and(|slot| slot.is_done) {
            self.first = self.place(1);
            self.len = self.len.wrapping_sub(1);
            count = count.wrapping_add(1);
        }
        count
    }
}
