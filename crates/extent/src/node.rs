//! A node of an extent tree, and its layout in memory (thesis figure 5.1).
//!
//! ```text
//! word 0        header: kind, level, number of entries
//! word 1        touched: a walk came through since the clock did
//! words 2..4    first logical block and number of blocks covered by the entries
//! words 4..7    sketch of the entries' first logical blocks
//! words 7..     entries of three words, sorted:
//!               first logical block | number of blocks | next node pointer or first physical block
//! words 260..   in a node of node pointers: the sketch of each pointer's child
//! ```
//!
//! The header is in one cache line. A large tree does not fit the caches, and most of its nodes are
//! leaves: the sketch of a leaf beside the pointer to it tells the walk which lines of the leaf to
//! read before any of them has arrived. The walk waits for memory once, not twice.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::{Entry, NULL, UNUSED};
use crate::sketch::{Outline, SEGMENTS, SKETCH_WORDS, Sketch};

/// Size of a node, in bytes.
pub const NODE_BYTES: usize = 4096;

/// Most extent pointers in a node.
pub const EXTENT_POINTERS: usize = 168;

/// Most node pointers in a node.
pub const NODE_POINTERS: usize = 84;

const WORDS: usize = NODE_BYTES / size_of::<u64>();
const TOUCHED: usize = 1;
const FIRST: usize = 2;
const COUNT: usize = 3;
const SKETCH: usize = 4;
const HEADER_WORDS: usize = SKETCH + SKETCH_WORDS;
const ENTRY_WORDS: usize = 3;
/// The word index of the first entry.
#[cfg(test)]
pub(crate) const ENTRY_PLACES: usize = HEADER_WORDS;
const SKETCHES: usize = 260;

const _: () = assert!(HEADER_WORDS * size_of::<u64>() <= 64);
const _: () = assert!(HEADER_WORDS + EXTENT_POINTERS * ENTRY_WORDS <= WORDS);
const _: () = assert!(HEADER_WORDS + NODE_POINTERS * ENTRY_WORDS <= SKETCHES);
const _: () = assert!(SKETCHES + NODE_POINTERS * SKETCH_WORDS <= WORDS);

/// Most entries in a node of this level.
pub(crate) const fn capacity(level: usize) -> usize {
    if level == 0 { EXTENT_POINTERS } else { NODE_POINTERS }
}

/// Entries in a segment of a node of this level; the last segment may be shorter.
const fn segment_entries(level: usize) -> usize {
    capacity(level).div_ceil(SEGMENTS)
}

/// A node's number in its memory. Its word is one more than the index, so that zero is NULL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeId(NonZeroU32);

impl NodeId {
    /// The node at `index`, `None` if the index exceeds a node's number.
    pub(crate) fn at(index: usize) -> Option<Self> {
        NonZeroU32::new(u32::try_from(index.checked_add(1)?).ok()?).map(Self)
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0.get().wrapping_sub(1) as usize
    }

    #[inline]
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        NonZeroU32::new(u32::try_from(word).ok()?).map(Self)
    }

    pub(crate) fn to_word(id: Option<Self>) -> u64 {
        id.map_or(NULL, |id| u64::from(id.0.get()))
    }
}

/// The fields of a node's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The level above the leaves; a leaf's is zero.
    pub(crate) level: usize,
    pub(crate) len: usize,
}

/// The kinds of nodes: the two of figure 5.1.
const KIND_EXTENTS: u64 = 0xe;
const KIND_NODES: u64 = 0xd;

impl Header {
    /// Kind in bits 0..8, level in 8..16, number of entries in 32..64.
    const fn to_word(self) -> u64 {
        let kind = if self.level == 0 { KIND_EXTENTS } else { KIND_NODES };
        kind | (self.level as u64 & 0xff) << 8 | (self.len as u64) << 32
    }

    /// `None` for a word that no writer produces.
    #[inline]
    fn from_word(word: u64) -> Option<Self> {
        let level = (word >> 8 & 0xff) as usize;
        let len = (word >> 32) as usize;
        let right_kind = word & 0xff == if level == 0 { KIND_EXTENTS } else { KIND_NODES };
        (right_kind && len <= capacity(level)).then_some(Self { level, len })
    }
}

/// A node: one page of words, written by one thread and read by any.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Node {
    words: [AtomicU64; WORDS],
}

const _: () = assert!(size_of::<Node>() == NODE_BYTES);

impl Node {
    pub(crate) const fn new() -> Self {
        Self { words: [const { AtomicU64::new(0) }; WORDS] }
    }

    #[inline]
    fn word(&self, index: usize) -> u64 {
        // Never out of bounds; zero is the header of an empty node.
        self.words.get(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    pub(crate) fn set_word(&self, index: usize, value: u64) {
        if let Some(word) = self.words.get(index) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn set_words(&self, at: usize, values: impl IntoIterator<Item = u64>) {
        for (word, value) in self.words.iter().skip(at).zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(crate) fn header(&self) -> Option<Header> {
        Header::from_word(self.word(0))
    }

    #[inline]
    const fn place(index: usize) -> usize {
        index.wrapping_mul(ENTRY_WORDS).wrapping_add(HEADER_WORDS)
    }

    /// The number of entries, if this is a node of `level`.
    #[inline]
    pub(crate) fn len_at(&self, level: usize) -> Option<usize> {
        let word = self.word(0);
        // The header differs only in the number of entries between nodes of a level.
        let same = word as u32 == Header { level, len: 0 }.to_word() as u32;
        same.then_some((word >> 32) as usize)
    }

    /// The entry at `index`; any value past the last one.
    #[inline]
    pub(crate) fn entry(&self, index: usize) -> Entry {
        match self.words.get(Self::place(index)..).and_then(|words| words.first_chunk()) {
            Some([first, count, value]) => Entry {
                first: first.load(Ordering::Relaxed),
                count: count.load(Ordering::Relaxed),
                value: value.load(Ordering::Relaxed),
            },
            None => UNUSED,
        }
    }

    /// The entries, for the writer.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        let len = self.header().map_or(0, |header| header.len);
        (0..len).map(|index| self.entry(index))
    }

    /// The blocks that the entries cover, and the sketch of their keys.
    #[inline]
    pub(crate) fn outline(&self) -> Outline {
        let sketch = self.sketch_at(SKETCH);
        Outline { first: self.word(FIRST), count: self.word(COUNT), sketch }
    }

    /// The sketch of the child at `index`, stored beside its pointer.
    #[inline]
    pub(crate) fn child_sketch(&self, index: usize) -> Sketch {
        self.sketch_at(index.wrapping_mul(SKETCH_WORDS).wrapping_add(SKETCHES))
    }

    #[inline]
    fn sketch_at(&self, at: usize) -> Sketch {
        let words = self.words.get(at..).and_then(|words| words.first_chunk::<SKETCH_WORDS>());
        Sketch(words.map_or([u64::MAX; SKETCH_WORDS], |words| {
            words.each_ref().map(|word| word.load(Ordering::Relaxed))
        }))
    }

    /// The last entry that begins at `block` or before; the first entry if none does. `outline` is
    /// the node's own.
    #[inline(always)]
    pub(crate) fn search(&self, level: usize, len: usize, outline: Outline, block: u64) -> usize {
        let segment = outline.segment(block);
        if level == 0 {
            self.search_segment::<EXTENT_POINTERS, { segment_entries(0) }>(len, segment, block)
        } else {
            self.search_segment::<NODE_POINTERS, { segment_entries(1) }>(len, segment, block)
        }
    }

    #[inline(always)]
    fn search_segment<const MOST: usize, const STRIDE: usize>(
        &self,
        len: usize,
        segment: usize,
        block: u64,
    ) -> usize {
        // The last segment is shorter than the others; here it starts earlier instead.
        let start = segment.wrapping_mul(STRIDE).min(MOST.wrapping_sub(STRIDE));
        let entries = self
            .words
            .get(Self::place(start)..)
            .map_or(&[][..], |words| words.as_chunks::<ENTRY_WORDS>().0);
        let mut before = 0usize;
        if let Some(entries) = entries.first_chunk::<STRIDE>() {
            // Counts, because a branch would be mispredicted half of the time.
            for [key, _, _] in entries {
                before = before.wrapping_add(usize::from(key.load(Ordering::Relaxed) <= block));
            }
        }
        if before == 0 && start > 0 {
            return self.bisect(len, block);
        }
        start.wrapping_add(before).saturating_sub(1)
    }

    /// As [`search`](Self::search), where a sketch is too coarse.
    #[cold]
    fn bisect(&self, len: usize, block: u64) -> usize {
        let (mut low, mut high) = (0usize, len);
        // All entries before `low` begin at `block` or before, all from `high` on behind it.
        while low < high {
            let middle = low.midpoint(high);
            if self.entry(middle).first <= block {
                low = middle.wrapping_add(1);
            } else {
                high = middle;
            }
        }
        low.saturating_sub(1)
    }

    /// Writes a node that is not published yet. `entries` are sorted and fit, and `sketches` belong
    /// to their children.
    pub(crate) fn write(
        &self,
        level: usize,
        entries: &[Entry],
        sketches: impl IntoIterator<Item = Sketch>,
    ) {
        debug_assert!(entries.len() <= capacity(level));
        let first = entries.first().map_or(0, |entry| entry.first);
        let count = entries.last().map_or(0, |entry| entry.end().saturating_sub(first));
        let segments = entries.iter().step_by(segment_entries(level)).map(|entry| entry.first);
        let outline = Outline::draw(first, count, segments);
        self.set_word(0, Header { level, len: entries.len() }.to_word());
        // A fresh node counts as touched: a request caused it.
        self.set_word(TOUCHED, 1);
        self.set_word(FIRST, first);
        self.set_word(COUNT, count);
        self.set_words(SKETCH, outline.sketch.0);
        let entries =
            entries.iter().copied().chain(std::iter::repeat(UNUSED)).take(capacity(level));
        self.set_words(
            HEADER_WORDS,
            entries.flat_map(|entry| [entry.first, entry.count, entry.value]),
        );
        if level > 0 {
            self.set_words(SKETCHES, sketches.into_iter().flat_map(|sketch| sketch.0));
        }
    }

    /// Prunes below the node pointer at `index` of a published node, in place: readers see the old
    /// pointer or NULL, and the old subtree is freed after them.
    pub(crate) fn prune_entry(&self, index: usize) {
        self.set_word(Self::place(index).wrapping_add(2), NULL);
    }

    /// Marks that a walk visited the node.
    #[inline]
    pub(crate) fn touch(&self) {
        // Usually the mark is set already, and then the line stays shared by all sidecores.
        if self.word(TOUCHED) == 0 {
            self.set_word(TOUCHED, 1);
        }
    }

    /// Clears the mark of a walk; whether it was set.
    pub(crate) fn untouch(&self) -> bool {
        let touched = self.word(TOUCHED) != 0;
        self.set_word(TOUCHED, 0);
        touched
    }

    /// Overwrites all words.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn scribble(&self, mut words: impl FnMut() -> u64) {
        for word in &self.words {
            word.store(words(), Ordering::Relaxed);
        }
    }
}
