//! Weighted sharing between virtual functions (thesis 6.3 dequeues them round-robin).
//!
//! Weights belong to functions, whatever number of queues a function has and wherever they are served. They decide where
//! something is short, and each of two things can be:
//!
//! * *The sidecore's time*, shared by the functions that this sidecore serves: [`Turns`].
//! * *The store's slots*, shared by all functions of a controller on all sidecores: [`StoreShares`].
//!
//! Both hand out credit in rounds (deficit round-robin: Shreedhar and Varghese 1995) while at least two functions want
//! more; otherwise nothing is counted. Within a function, its queues are served alike: [`Queues`].
//!
//! The third thing that can be short, the threads that serve misses, has its own order: `threads.rs`.

mod board;
mod queues;
mod store;
mod turns;
mod window;

pub(crate) use board::Boards;
pub(crate) use store::{Place, StoreShares};
pub(crate) use turns::{TurnPlace, Turns};

/// Credit is kept in fractions of a unit, so that weights of 100 and 101 differ, and of 1 and 1000.
const FRACTION: i64 = 1 << 20;

/// Bytes of a unit of service: a request is at least one.
const UNIT_BYTES_SHIFT: u32 = 12;

/// Why a queue may not start anything now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// Its function has had its part of the turn.
    UntilNextTurn,
    /// The store has no room, or others come first.
    ByStore,
}

/// The units of service of a request: one for each page or part of one.
#[inline]
pub(crate) fn units(len_bytes: u64) -> i64 {
    i64::try_from(len_bytes >> UNIT_BYTES_SHIFT).unwrap_or(i64::MAX).max(1)
}

/// What one round gives to a function of `weight`, if the heaviest gets `units`; in fractions.
fn share(units: i64, weight: u32, heaviest: u32) -> i64 {
    let share = units.saturating_mul(FRACTION).saturating_mul(i64::from(weight));
    share.checked_div(i64::from(heaviest.max(1))).unwrap_or(0).max(1)
}

/// Whole units that a credit above zero is good for.
fn whole_units(credit: i64) -> i64 {
    credit.saturating_add(FRACTION.saturating_sub(1)).checked_div(FRACTION).unwrap_or(0)
}

#[cfg(test)]
mod tests;
