//! The memory that a log is in.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The events that a log's memory survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Survives {
    /// The process: enough for guests on the same machine, which a power cut ends as well.
    Process,
    /// The machine: a guest on another machine outlives a power cut here.
    Machine,
}

/// Memory of 64-bit words, for a [log](crate::Volumes::recover).
///
/// Stores of one thread become visible in their order to a process that maps the memory after this
/// process has died. Words outside of the memory read as zero, and stores to them do nothing.
pub trait LogMemory: fmt::Debug + Send + Sync {
    /// How many words there are.
    fn words(&self) -> usize;

    /// The word at `index`.
    fn load(&self, index: usize) -> u64;

    /// Stores a word behind all stores before it.
    fn store(&self, index: usize, word: u64);

    /// The events that the memory survives.
    fn survives(&self) -> Survives;

    /// Called when the log is empty and its store closed: the memory is no longer needed. The
    /// default keeps it.
    fn discard(&self) {}
}

/// Memory of this process, for tests and simulations, which keep a copy to simulate its survival.
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

    /// The current contents.
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
