//! The time that a stage takes itself.

use std::cell::Cell;

use sidecore_reactor::CoreClock;
use sidecore_units::Nanos;

/// Measures the time of a stage's code: it runs from a call of the stage to its return, but not
/// while the stage calls the store.
#[derive(Default)]
pub(super) struct Stopwatch {
    clock: Option<CoreClock>,
    /// Since when it runs.
    since: Cell<Option<Nanos>>,
    spent: Cell<Nanos>,
}

impl Stopwatch {
    /// Measures by `clock`, or nothing without one.
    pub(super) fn new(clock: Option<CoreClock>) -> Self {
        Self { clock, ..Self::default() }
    }

    #[inline]
    pub(super) fn start(&self) {
        self.since.set(self.clock.as_ref().map(|clock| clock()));
    }

    /// False if it did not run.
    #[inline]
    pub(super) fn stop(&self) -> bool {
        let (Some(since), Some(clock)) = (self.since.take(), &self.clock) else { return false };
        self.spent.set(self.spent.get().after(clock().since(since)));
        true
    }

    /// Stops, and starts again from zero the next time. Returns the time so far.
    #[inline]
    pub(super) fn take(&self) -> Nanos {
        self.stop();
        self.spent.take()
    }
}
