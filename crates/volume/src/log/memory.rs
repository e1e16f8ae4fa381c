//! The memory that a log is in.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a log's memory outlives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Survives {
    /// The process: enough for guests on the same machine, which a power cut ends as well.
    Process,
    /// The machine: a guest on another machine outlives a power cut here.
    Machine,
}

/// Memory of 64-bit words, for a [log](crate::Volumes::recover).
///
/// Stores of one thread become visible in their order to whoever maps the memory after the process
/// has died. Words outside of it read as zero, and stores to them do nothing.
pub trait LogMemory: fmt::Debug + Send + Sync {
    /// How many words there are.
    fn words(&self) -> usize;

    /// The word at `index`.
    fn load(&self, index: usize) -> u64;

    /// Stores a word behind all stores before it.
    fn store(&self, index: usize, word: u64);

    /// What the memory outlives.
    fn survives(&self) -> Survives;

    /// The log in it is empty and its store closed: nobody needs it any more. The default keeps it.
    fn discard(&self) {}
}

/// Memory of this process, for tests and simulations: whoever holds it plays what survives.
#[derive(Debug)]
pub struct HeapMemory(Box<[AtomicU64]>);

impl HeapMemory {
    /// `bytes` zeroes, rounded down to words.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self::of_words((0..bytes / 8).map(|_| 0))
    }

    /// Memory with these contents.
    #[must_use]
    pub fn of_words(words: impl IntoIterator<Item = u64>) -> Self {
        Self(words.into_iter().map(AtomicU64::new).collect())
    }

    /// What is in it now.
    #[must_use]
    pub fn to_words(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }
}

impl LogMemory for HeapMemory {
    fn words(&self) -> usize {
        self.0.len()
    }

    fn load(&self, index: usize) -> u64 {
        self.0.get(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, index: usize, word: u64) {
        if let Some(place) = self.0.get(index) {
            place.store(word, Ordering::Release);
        }
    }

    fn survives(&self) -> Survives {
        Survives::Process
    }
}
