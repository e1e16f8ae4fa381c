//! Overlapping writes follow each other: each leg would apply them in an order of its own.
//!
//! A write holds the stripes of 4 KiB that it touches, from its first submission until all legs
//! have it. Stripes are shared by all queues, and are named by the low bits of their number, so two
//! writes far apart may follow each other for no reason.

use std::sync::atomic::{AtomicBool, Ordering};

/// The unit of overlap.
const STRIPE_BYTES: u64 = 4096;
/// The number of stripes that have a place of their own: 256 MiB of the mirror.
const PLACES: u64 = 1 << 16;

/// See the module.
pub(crate) struct Stripes(Box<[AtomicBool]>);

impl Stripes {
    pub(crate) fn new() -> Self {
        Self((0..PLACES).map(|_| AtomicBool::new(false)).collect())
    }

    fn range(offset_bytes: u64, len_bytes: u64) -> std::ops::RangeInclusive<u64> {
        let last = offset_bytes.saturating_add(len_bytes.saturating_sub(1));
        offset_bytes / STRIPE_BYTES..=last / STRIPE_BYTES
    }

    fn place(&self, stripe: u64) -> Option<&AtomicBool> {
        self.0.get(usize::try_from(stripe % PLACES).ok()?)
    }

    /// Holds the stripes of a range, which has fewer bytes than there are places. False, and none
    /// held, if another write holds one.
    #[inline]
    pub(crate) fn hold(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        for stripe in Self::range(offset_bytes, len_bytes) {
            let is_free = self.place(stripe).is_some_and(|place| {
                let taken =
                    place.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
                taken.is_ok()
            });
            if !is_free {
                for held in *Self::range(offset_bytes, len_bytes).start()..stripe {
                    self.free(held);
                }
                return false;
            }
        }
        true
    }

    #[inline]
    fn free(&self, stripe: u64) {
        if let Some(place) = self.place(stripe) {
            place.store(false, Ordering::Release);
        }
    }

    /// Ends a [`hold`](Self::hold).
    #[inline]
    pub(crate) fn release(&self, offset_bytes: u64, len_bytes: u64) {
        Self::range(offset_bytes, len_bytes).for_each(|stripe| self.free(stripe));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_exclude_each_other_and_leave_nothing_held() {
        let stripes = Stripes::new();
        assert!(stripes.hold(4096, 8192));
        for (offset, len) in [(0, 4097), (8191, 1), (12_287, 4096), (0, 65_536)] {
            assert!(!stripes.hold(offset, len), "{len} at {offset}");
        }
        assert!(stripes.hold(0, 4096) && stripes.hold(12_288, 512));
        stripes.release(4096, 8192);
        assert!(!stripes.hold(4096, 8193), "its last byte is held");
        assert!(stripes.hold(4096, 8192));
        for (offset, len) in [(0, 4096), (4096, 8192), (12_288, 512)] {
            stripes.release(offset, len);
        }
        assert!(stripes.hold(0, 4 << 20));
        assert!(stripes.0.iter().filter(|place| place.load(Ordering::Relaxed)).count() == 1024);
    }
}
