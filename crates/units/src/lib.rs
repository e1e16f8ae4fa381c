//! Quantities as types, so that a sector is never added to a byte and a
//! nanosecond never compared with a microsecond; and [`layout!`] and [`codes!`], for
//! structures and messages whose bytes a specification fixes.
//!
//! Everything here is plain data; arithmetic that can overflow is checked and says so in its type.
#![forbid(unsafe_code)]

mod byte_extent;
mod codes;
pub mod layout;

use std::fmt;

pub use byte_extent::ByteExtent;

/// Bytes in a virtio-blk sector, whatever the device's block size is (virtio 1.2, 5.2.4).
pub const SECTOR_BYTES: u64 = 512;

/// Bytes in a page of guest memory.
pub const PAGE_BYTES: u64 = 4096;

/// A point on, or a distance along, the monotonic clock, in nanoseconds.
///
/// Subtraction and addition saturate: a clock that steps back yields a zero
/// distance instead of a huge one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The origin of the clock, and the empty distance.
    pub const ZERO: Self = Self(0);
    /// Later than every other point.
    pub const MAX: Self = Self(u64::MAX);

    /// A distance of `us` microseconds.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// A distance of `ms` milliseconds.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// The distance from `earlier` to here, zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }

    /// The point `distance` after this one.
    #[must_use]
    pub const fn after(self, distance: Self) -> Self {
        Self(self.0.saturating_add(distance.0))
    }
}

impl From<std::time::Duration> for Nanos {
    fn from(duration: std::time::Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for std::time::Duration {
    fn from(nanos: Nanos) -> Self {
        Self::from_nanos(nanos.0)
    }
}

/// The number that Linux gives a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreId(pub u32);

impl fmt::Display for CoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A 512-byte sector's number, as virtio-blk counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(pub u64);

impl Sector {
    /// The offset of the sector's first byte, `None` past the end of the 64-bit byte space.
    #[must_use]
    pub const fn offset_bytes(self) -> Option<u64> {
        self.0.checked_mul(SECTOR_BYTES)
    }
}

/// A block's number as a virtual function sees it: the *virtual LBA* of NeSC
/// (thesis 5.2), in units of the controller's granularity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vlba(pub u64);

/// A block's number on the physical store: the *physical LBA* of NeSC (thesis
/// 5.2), in units of the controller's granularity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Plba(pub u64);

impl fmt::Display for Vlba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Plba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_instead_of_wrapping() {
        assert_eq!(Nanos(3).since(Nanos(5)), Nanos::ZERO);
        assert_eq!(Nanos::MAX.after(Nanos(1)), Nanos::MAX);
        assert_eq!(Nanos::from_micros(2), Nanos(2_000));
    }

    #[test]
    fn the_last_whole_sector_has_an_offset_and_the_next_has_none() {
        let last = u64::MAX / SECTOR_BYTES;
        assert_eq!(Sector(last).offset_bytes(), Some(last * SECTOR_BYTES));
        assert_eq!(Sector(last + 1).offset_bytes(), None);
    }
}
