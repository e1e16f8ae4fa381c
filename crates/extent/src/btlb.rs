//! The block translation lookaside buffer (thesis 6.3).

use sidecore_units::Plba;

use crate::entry::Bounded;
use crate::range::BlockRange;
use crate::unit::FunctionId;

/// An extent, and the function and version that it is valid for.
#[derive(Clone, Copy, Debug)]
struct Line {
    /// Zero is the version of no tree: an empty line.
    version: u64,
    extent: Bounded,
    function: FunctionId,
}

const EMPTY: Line = Line { version: 0, extent: Bounded::EMPTY, function: FunctionId(0) };

impl Line {
    /// A quick check, by the first block only.
    #[inline]
    fn may_hold(&self, version: u64, range: BlockRange) -> bool {
        (self.version == version)
            & (range.first.0.wrapping_sub(self.extent.first) < self.extent.count)
    }
}

/// The extents last used in translation; a new extent evicts the oldest.
#[derive(Debug)]
pub(crate) struct Btlb {
    lines: Box<[Line]>,
    /// The oldest line.
    next: usize,
}

impl Btlb {
    pub(crate) fn new(entries: usize) -> Self {
        Self { lines: vec![EMPTY; entries].into_boxed_slice(), next: 0 }
    }

    /// The physical place of `range`, and its extent, if one cached extent contains all of it.
    #[inline]
    pub(crate) fn hit(
        &self,
        function: FunctionId,
        version: u64,
        range: BlockRange,
    ) -> Option<(Plba, Bounded)> {
        let line = self.lines.iter().find(|line| line.may_hold(version, range))?;
        let found = line.extent.locate(range)?;
        (line.function == function).then_some((found, line.extent))
    }

    /// Adds `extent`, unless it is cached already.
    pub(crate) fn insert(&mut self, function: FunctionId, version: u64, extent: Bounded) {
        if !self
            .lines
            .iter()
            .any(|line| line.version == version && line.extent.first == extent.first)
        {
            self.insert_new(function, version, extent);
        }
    }

    /// Adds `extent`, which is not cached yet.
    #[inline]
    pub(crate) fn insert_new(&mut self, function: FunctionId, version: u64, extent: Bounded) {
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
