//! What sidecores show each other of the functions of a controller: words that each sidecore writes on its own lines and
//! the others read. Nothing is locked; the memory is a sidecore's first use of the controller, and is used again.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::window::FIRST;
use crate::FUNCTIONS_MAX;

/// Functions have numbers up to and with the greatest.
pub(super) const NUMBERS: usize = FUNCTIONS_MAX + 1;

const SETS: usize = NUMBERS.div_ceil(64);

/// All boards of a controller.
#[derive(Debug)]
pub(crate) struct Boards {
    /// Functions that have queues.
    functions: AtomicUsize,
    /// On how many sidecores each function has queues.
    sidecores: Box<[AtomicU32]>,
    first: OnceLock<Arc<Board>>,
    /// How many requests may be in the store while functions compete.
    pub(super) window: AtomicU64,
}

/// One sidecore's board.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Board {
    used: AtomicBool,
    /// Requests that the store has completed here, while it was shared.
    pub(super) completed: AtomicU64,
    /// A bit for each function that has queues here.
    present: [AtomicU64; SETS],
    entries: Box<[Entry]>,
    next: OnceLock<Arc<Board>>,
}

/// What a sidecore says of a function.
#[derive(Debug, Default)]
pub(super) struct Entry {
    weight: AtomicU32,
    /// Units started since the function has queues here.
    started: AtomicU64,
    /// Requests in the store, and in the lowest bit whether more wait for it.
    demand: AtomicU64,
}

/// What an [`Entry`] held when it was read.
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
    /// Whether several functions have queues, anywhere.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.functions.load(Ordering::Relaxed) > 1
    }

    /// A board for a sidecore: one that is not used any more, or a new one.
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

    /// All boards that are used, in an order that all sidecores see.
    pub(super) fn used(&self) -> impl Iterator<Item = &Arc<Board>> {
        let all = std::iter::successors(self.first.get(), |board| board.next.get());
        all.filter(|board| board.used.load(Ordering::Acquire))
    }

    /// A sidecore has the first queue of a function, or has none any more.
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

    /// Gives it back, without functions.
    pub(super) fn release(&self) {
        for set in &self.present {
            set.store(0, Ordering::Relaxed);
        }
        self.used.store(false, Ordering::Release);
    }

    /// Shows a function from now on, with its weight, or not any more.
    pub(super) fn show(&self, function: u32, weight: Option<u32>) {
        let number = function as usize;
        let (Some(entry), Some(set)) = (self.entries.get(number), self.present.get(number / 64)) else { return };
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
        let sets = self.present.iter().map(|set| set.load(Ordering::Acquire)).zip((0..).step_by(64));
        let numbers = sets.flat_map(|(set, first): (u64, u32)| {
            let rest = std::iter::successors(Some(set), |set| Some(set & set.wrapping_sub(1)));
            rest.take_while(|set| *set != 0).map(move |set| first.saturating_add(set.trailing_zeros()))
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
