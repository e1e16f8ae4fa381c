//! The block translation lookaside buffer (thesis 6.3).

use sidecore_units::Plba;

use crate::entry::{Entry, UNUSED};
use crate::range::BlockRange;
use crate::unit::FunctionId;

/// An extent, and for whom and how long it holds.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Zero is the version of no tree: an empty line.
    version: u64,
    extent: Entry,
    function: FunctionId,
}

const EMPTY: Line = Line { version: 0, extent: UNUSED, function: FunctionId(0) };

impl Line {
    /// A quick look, by the first block only.
    #[inline]
    fn may_hold(&self, version: u64, range: BlockRange) -> bool {
        (self.version == version) & (range.first.0.wrapping_sub(self.extent.first) < self.extent.count)
    }
}

/// The extents that were used last in translation; a new one evicts the oldest.
#[derive(Debug)]
pub(crate) struct Btlb {
    lines: Box<[Line]>,
    /// The oldest one.
    next: usize,
}

impl Btlb {
    pub(crate) fn new(entries: usize) -> Self {
        Self { lines: vec![EMPTY; entries].into_boxed_slice(), next: 0 }
    }

    /// Where `range` lies, and the extent, if all of it is in one.
    #[inline]
    pub(crate) fn hit(&self, function: FunctionId, version: u64, range: BlockRange) -> Option<(Plba, Entry)> {
        let line = self.lines.iter().find(|line| line.may_hold(version, range))?;
        let found = line.extent.locate(range)?;
        (line.function == function).then_some((found, line.extent))
    }

    /// Takes `extent` in, unless it is there.
    pub(crate) fn insert(&mut self, function: FunctionId, version: u64, extent: Entry) {
        if !self.lines.iter().any(|line| line.version == version && line.extent.first == extent.first) {
            self.insert_new(function, version, extent);
        }
    }

    /// Takes `extent` in, which is not there.
    #[inline]
    pub(crate) fn insert_new(&mut self, function: FunctionId, version: u64, extent: Entry) {
        if let Some(line) = self.lines.get_mut(self.next) {
            *line = Line { version, extent, function };
        }
        self.next = self.next.wrapping_add(1);
        if self.next >= self.lines.len() {
            self.next = 0;
        }
    }

    pub(crate) fn flush(&mut self, function: FunctionId) {
        for line in self.lines.iter_mut().filter(|line| line.function == function) {
            *line = EMPTY;
        }
    }

    pub(crate) fn flush_all(&mut self) {
        self.lines.fill(EMPTY);
    }
}
