//! Runs many histories in parallel.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::Violation;

/// Results of histories, which can be added up.
pub trait Total: Default + Send {
    /// Adds the result of another history.
    fn add(&mut self, other: Self);
}

/// Runs the histories of all `seeds` with `run`, on as many threads as there are cores. After each
/// history, `progress` gets the number of ended ones, and the sum of their results.
///
/// # Errors
/// The violation with the lowest seed of those found.
pub fn run_many<T: Total>(
    seeds: Range<u64>,
    run: &(dyn Fn(u64) -> Result<T, Box<Violation>> + Sync),
    progress: &(dyn Fn(u64, &T) + Sync),
) -> Result<T, Box<Violation>> {
    let all = Mutex::new(All { seeds, ended: 0, total: T::default(), violation: None });
    let lock = || all.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        loop {
            let next = lock().seeds.next();
            let Some(seed) = next else { return };
            let result = run(seed);
            let mut all = lock();
            match result {
                Ok(outcome) => {
                    all.ended += 1;
                    all.total.add(outcome);
                    progress(all.ended, &all.total);
                }
                Err(violation) => {
                    // Histories of earlier seeds still run to their end.
                    all.seeds = 0..0;
                    if all.violation.as_ref().is_none_or(|other| violation.seed < other.seed) {
                        all.violation = Some(violation);
                    }
                }
            }
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(work);
        }
    });
    let All { total, violation, .. } = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    violation.map_or(Ok(total), Err)
}

struct All<T> {
    /// The seeds that no thread has taken.
    seeds: Range<u64>,
    ended: u64,
    total: T,
    violation: Option<Box<Violation>>,
}
