//! Weighted sharing between virtual functions (thesis 6.3 dequeues them round-robin).
//!
//! Weights belong to functions, independent of the number of a function's queues and of the
//! sidecores that serve them. Weights decide where a resource is scarce. Two resources can be:
//!
//! * *The sidecore's time*, shared by the functions that this sidecore serves: [`Turns`].
//! * *The store's slots*, shared by all functions of a controller on all sidecores:
//!   [`StoreShares`].
//!
//! Both grant credit in rounds (deficit round-robin: Shreedhar and Varghese 1995) while at least
//! two functions have queued requests; otherwise nothing is counted. The queues of a function have
//! equal shares: [`Queues`].
//!
//! The threads that serve misses are a third scarce resource, with an order of their own:
//! `threads.rs`.

mod board;
mod queues;
mod store;
mod turns;
mod window;

pub(crate) use board::Boards;
pub(crate) use store::{Place, StoreShares};
pub(crate) use turns::{TurnPlace, Turns};

/// Credit is kept in fractions of a unit, so that weights of 100 and 101 differ, and 1 and 1000.
const FRACTION: i64 = 1 << 20;

/// The bytes of a unit of service, as a power of two. A request is at least one unit.
const UNIT_BYTES_SHIFT: u32 = 12;

/// The resource that a queue waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuedBy {
    /// A new turn: its function has used up its part of this one.
    Turn,
    /// A slot of the store: all are taken, or other functions come first.
    Store,
}

/// The units of service of a request: one for each page or part of a page.
#[inline]
pub(crate) fn units(len_bytes: u64) -> i64 {
    i64::try_from(len_bytes >> UNIT_BYTES_SHIFT).unwrap_or(i64::MAX).max(1)
}

/// The credit of one round for a function of `weight`, if the heaviest gets `units`; in fractions.
fn share(units: i64, weight: u32, heaviest: u32) -> i64 {
    let share = units.saturating_mul(FRACTION).saturating_mul(i64::from(weight));
    share.checked_div(i64::from(heaviest.max(1))).unwrap_or(0).max(1)
}

/// The number of whole units that a credit above zero permits.
fn whole_units(credit: i64) -> i64 {
    credit.saturating_add(FRACTION.saturating_sub(1)).checked_div(FRACTION).unwrap_or(0)
}

#[cfg(test)]
mod tests;
