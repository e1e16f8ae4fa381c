//! Single numbers that one thread writes and any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Kind;

/// A counter with one writer: adding is a plain load and store, not a locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    #[doc(hidden)]
    pub const KIND: Kind = Kind::Counter;

    /// Adds `count`. Only the owning thread may call it.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter with several writers, for rare events: adding is a locked instruction.
#[derive(Debug, Default)]
pub struct SharedCounter(AtomicU64);

impl SharedCounter {
    #[doc(hidden)]
    pub const KIND: Kind = Kind::Counter;

    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// The count so far.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    #[doc(hidden)]
    pub const KIND: Kind = Kind::Gauge;

    /// Replaces the number.
    #[inline]
    pub fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    /// The number as of now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
