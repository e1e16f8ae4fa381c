//! Demands of the functions of a controller, published by its sidecores: each sidecore writes words
//! on its own cache lines, and the others read them, without locks. The memory of a board is
//! allocated at a sidecore's first use of the controller, and used again later.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::window::FIRST;
use crate::FUNCTIONS_MAX;

/// Function numbers are inclusive of the greatest.
pub(super) const NUMBERS: usize = FUNCTIONS_MAX + 1;

const SETS: usize = NUMBERS.div_ceil(64);

/// All boards of a controller.
#[derive(Debug)]
pub(crate) struct Boards {
    /// The number of functions with queues.
    functions: AtomicUsize,
    /// The number of sidecores on which each function has queues.
    sidecores: Box<[AtomicU32]>,
    first: OnceLock<Arc<Board>>,
    /// The number of requests that may be in the store while functions compete.
    pub(super) window: AtomicU64,
}

/// One sidecore's board.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Board {
    used: AtomicBool,
    /// Requests that the store has completed on this sidecore, while it was shared.
    pub(super) completed: AtomicU64,
    /// A bit for each function with queues on this sidecore.
    present: [AtomicU64; SETS],
    entries: Box<[Entry]>,
    next: OnceLock<Arc<Board>>,
}

/// A sidecore's published state of a function.
#[derive(Debug, Default)]
pub(super) struct Entry {
    weight: AtomicU32,
    /// Units started since the function has queues on this sidecore.
    started: AtomicU64,
    /// Requests in the store; the lowest bit is set if more are queued for it.
    demand: AtomicU64,
}

/// The values of an [`Entry`] at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub(super) function: u32,
    pub(super) weight: u32,
    pub(super) started: u64,
    pub(super) in_flight: usize,
    pub(super) waiting: bool,
}

impl Default for Boards {
    fn default() -> Self {
        Self {
            functions: AtomicUsize::new(0),
            sidecores: (0..NUMBERS).map(|_| AtomicU32::new(0)).collect(),
            first: OnceLock::new(),
            window: AtomicU64::new(FIRST),
        }
    }
}

impl Boards {
    /// Whether several functions have queues, on any sidecore.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.functions.load(Ordering::Relaxed) > 1
    }

    /// A board for a sidecore: an unused one, or a new one.
    pub(super) fn take(&self) -> Arc<Board> {
        let mut place = &self.first;
        loop {
            let board = place.get_or_init(|| Arc::new(Board::new()));
            if !board.used.swap(true, Ordering::AcqRel) {
                return Arc::clone(board);
            }
            place = &board.next;
        }
    }

    /// All boards in use, in an order that all sidecores agree on.
    pub(super) fn used(&self) -> impl Iterator<Item = &Arc<Board>> {
        let all = std::iter::successors(self.first.get(), |board| board.next.get());
        all.filter(|board| board.used.load(Ordering::Acquire))
    }

    /// Counts a sidecore's first queue of a function, or uncounts it after the last.
    pub(super) fn count(&self, function: u32, opens: bool) {
        let Some(sidecores) = self.sidecores.get(function as usize) else { return };
        if opens && sidecores.fetch_add(1, Ordering::Relaxed) == 0 {
            self.functions.fetch_add(1, Ordering::Relaxed);
        } else if !opens && sidecores.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.functions.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Board {
    fn new() -> Self {
        Self {
            used: AtomicBool::new(false),
            completed: AtomicU64::new(0),
            present: std::array::from_fn(|_| AtomicU64::new(0)),
            entries: (0..NUMBERS).map(|_| Entry::default()).collect(),
            next: OnceLock::new(),
        }
    }

    /// Returns the board, without functions.
    pub(super) fn release(&self) {
        for set in &self.present {
            set.store(0, Ordering::Relaxed);
        }
        self.used.store(false, Ordering::Release);
    }

    /// Publishes a function and its weight; `None` withdraws the function.
    pub(super) fn show(&self, function: u32, weight: Option<u32>) {
        let number = function as usize;
        let (Some(entry), Some(set)) = (self.entries.get(number), self.present.get(number / 64))
        else {
            return;
        };
        let bit = 1_u64 << (number % 64);
        let present = set.load(Ordering::Relaxed);
        entry.demand.store(0, Ordering::Relaxed);
        entry.started.store(0, Ordering::Relaxed);
        if let Some(weight) = weight {
            entry.weight.store(weight, Ordering::Relaxed);
        }
        set.store(if weight.is_some() { present | bit } else { present & !bit }, Ordering::Release);
    }

    pub(super) fn write(&self, function: u32, started: u64, in_flight: usize, waiting: bool) {
        let Some(entry) = self.entries.get(function as usize) else { return };
        entry.started.store(started, Ordering::Relaxed);
        entry.demand.store((in_flight as u64) << 1 | u64::from(waiting), Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> impl Iterator<Item = Reading> {
        let sets =
            self.present.iter().map(|set| set.load(Ordering::Acquire)).zip((0..).step_by(64));
        let numbers = sets.flat_map(|(set, first): (u64, u32)| {
            let rest = std::iter::successors(Some(set), |set| Some(set & set.wrapping_sub(1)));
            rest.take_while(|set| *set != 0)
                .map(move |set| first.saturating_add(set.trailing_zeros()))
        });
        numbers.filter_map(|function| {
            let entry = self.entries.get(function as usize)?;
            let demand = entry.demand.load(Ordering::Relaxed);
            Some(Reading {
                function,
                weight: entry.weight.load(Ordering::Relaxed),
                started: entry.started.load(Ordering::Relaxed),
                in_flight: usize::try_from(demand >> 1).unwrap_or(usize::MAX),
                waiting: demand & 1 != 0,
            })
        })
    }
}
