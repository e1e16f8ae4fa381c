//! One request on its way to a store and back.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use crate::BlockError;
use crate::in_flight::Phase;

/// Requests on their way: boxes out of a front end's pool.
///
/// They are boxed so that a request is a pointer to move, whatever its scatter-gather list holds.
#[allow(clippy::vec_box)]
pub type Batch = Vec<Box<BlockRequest>>;

/// The kind of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Store to guest memory.
    #[default]
    Read,
    /// Guest memory to store.
    Write,
    /// Make every write completed so far survive a power cut.
    Flush,
    /// The range's contents no longer matter.
    Discard,
    /// The range reads as zeros from now on; with `may_unmap` the store may give its space back.
    WriteZeroes {
        /// Whether deallocating the blocks is allowed.
        may_unmap: bool,
    },
}

impl Operation {
    /// Whether the operation changes the store's contents.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes { .. })
    }
}

static DROPPED_TAGS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// See [`Tag::abandon`]. A tag that is dropped knows no context but its thread.
    static ABANDONS: Cell<bool> = const { Cell::new(false) };
}

/// How many tags were dropped instead of being completed, in this process: a
/// request was lost. Zero, or there is a bug.
#[must_use]
pub fn dropped_tags() -> u64 {
    DROPPED_TAGS.load(Ordering::Relaxed)
}

/// The front end's name for a request in flight. A tag is linear: its holder has to give it back
/// with [`Tag::into_bits`]; dropping it is counted ([`dropped_tags`]), and is a panic in tests and
/// debug builds.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Tag(u64);

impl Tag {
    /// Names a request by 64 bits of the front end's choice.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits that the tag was made of.
    #[must_use]
    #[inline]
    pub const fn bits(&self) -> u64 {
        self.0
    }

    /// Ends the tag's life as it should end.
    #[inline]
    pub const fn into_bits(self) -> u64 {
        let bits = self.0;
        std::mem::forget(self);
        bits
    }

    /// Drops the requests of a stage that has panicked. Their true tags are kept elsewhere.
    pub(crate) fn abandon(drop_requests: impl FnOnce()) {
        ABANDONS.set(true);
        drop_requests();
        ABANDONS.set(false);
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        // A panic unwinds a stage, whose requests are answered (`contain`), or ends its thread.
        if ABANDONS.get() || std::thread::panicking() {
            return;
        }
        DROPPED_TAGS.fetch_add(1, Ordering::Relaxed);
        debug_assert!(
            false,
            "the request tagged {:#x} was dropped instead of being completed",
            self.0
        );
    }
}

/// State of a stage that redirects a request to another offset. It lies in the request, so that its
/// completion needs no look into a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detour {
    /// The stage's own word; zero if no stage has redirected the request.
    mark: u32,
    /// The offset before the redirection.
    from_bytes: u64,
}

/// A block request: what, where, with which memory, and how it ended.
#[derive(Debug)]
pub struct BlockRequest {
    /// The kind of the request.
    pub operation: Operation,
    /// First byte in the store.
    pub offset_bytes: u64,
    /// How many bytes of the store it concerns. For reads and writes this is
    /// the size of `segments`; a flush has zero.
    pub len_bytes: u64,
    /// The guest's memory, for reads and writes; empty otherwise.
    pub segments: Segments,
    /// Whether a write is durable when it completes ("force unit access"). [`InFlight`] sets it for
    /// a channel that [takes](crate::BlockChannel::takes_write_through) it, and flushes otherwise.
    ///
    /// [`InFlight`]: crate::InFlight
    pub write_through: bool,
    /// The front end's name for it; `None` while it rests in a pool.
    pub tag: Option<Tag>,
    /// The front end's [`Context`](crate::Context); stores and stages leave it alone.
    pub(crate) context: [u64; 2],
    /// How far the request is; stores and stages leave it alone.
    pub(crate) phase: Phase,
    /// Set by [`BlockRequest::send_on`], cleared by [`BlockRequest::come_back`].
    pub detour: Detour,
    /// How it ended. Set by the store before `poll` hands the request back.
    pub result: Result<(), BlockError>,
    /// When the front end took it from the guest.
    pub taken_at: Nanos,
}

impl BlockRequest {
    /// A blank request for a pool, with room for `max_segments` pieces.
    #[must_use]
    #[allow(clippy::unnecessary_box_returns)]
    pub fn blank(max_segments: usize) -> Box<Self> {
        Box::new(Self {
            operation: Operation::Read,
            offset_bytes: 0,
            len_bytes: 0,
            segments: Segments::with_capacity(max_segments),
            write_through: false,
            tag: None,
            context: [0; 2],
            phase: Phase::Last,
            detour: Detour::default(),
            result: Ok(()),
            taken_at: Nanos::ZERO,
        })
    }

    /// Redirects the request to `offset_bytes`, until [`come_back`](Self::come_back). Returns false
    /// and changes nothing if another stage has redirected it already, or if `mark` is zero: such a
    /// request needs a tag of the stage's own.
    #[inline]
    pub fn send_on(&mut self, offset_bytes: u64, mark: u32) -> bool {
        if self.detour.mark != 0 || mark == 0 {
            return false;
        }
        self.detour = Detour { mark, from_bytes: self.offset_bytes };
        self.offset_bytes = offset_bytes;
        true
    }

    /// Whether a stage has redirected the request and not yet taken it back.
    #[must_use]
    #[inline]
    pub const fn is_on_detour(&self) -> bool {
        self.detour.mark != 0
    }

    /// Ends a detour: restores the offset from before. Returns the mark given to
    /// [`send_on`](Self::send_on); zero, with nothing changed, if the request is on no detour.
    #[inline]
    pub fn come_back(&mut self) -> u32 {
        let Detour { mark, from_bytes } = self.detour;
        if mark != 0 {
            self.offset_bytes = from_bytes;
            self.detour.mark = 0;
        }
        mark
    }
}

/// Moves the first `count` requests of `batch` to the end of `completed`.
#[inline]
pub(crate) fn move_front(batch: &mut Batch, count: usize, completed: &mut Batch) {
    if count < batch.len() {
        completed.extend(batch.drain(..count));
    } else if completed.is_empty() && completed.capacity() == batch.capacity() {
        // Of lists of equal capacity neither allocates earlier for the exchange.
        std::mem::swap(batch, completed);
    } else {
        completed.append(batch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_of_a_batch_moves_to_the_end_of_the_completed_ones() {
        let batch = |offsets: &[u64], capacity: usize| {
            let mut batch = Batch::with_capacity(capacity);
            for offset in offsets {
                let mut request = BlockRequest::blank(0);
                request.offset_bytes = *offset;
                batch.push(request);
            }
            batch
        };
        let offsets = |batch: &Batch| -> Vec<u64> {
            batch.iter().map(|request| request.offset_bytes).collect()
        };
        for capacity in [4, 8] {
            for before in [&[][..], &[7]] {
                for count in 0..=3 {
                    let (mut from, mut to) = (batch(&[1, 2, 3], 4), batch(before, capacity));
                    move_front(&mut from, count, &mut to);
                    assert_eq!(offsets(&from), [1, 2, 3][count..]);
                    assert_eq!(offsets(&to), [before, &[1, 2, 3][..count]].concat());
                }
            }
        }
    }

    #[test]
    fn one_stage_at_a_time_sends_a_request_on() {
        let mut request = BlockRequest::blank(0);
        request.offset_bytes = 5;
        assert!(!request.send_on(9, 0), "zero is no mark");
        assert_eq!((request.come_back(), request.offset_bytes), (0, 5));
        assert!(request.send_on(9, 3));
        assert!(!request.send_on(11, 4));
        assert_eq!((request.offset_bytes, request.is_on_detour()), (9, true));
        assert_eq!((request.come_back(), request.offset_bytes), (3, 5));
        assert!(!request.is_on_detour());
    }
}
