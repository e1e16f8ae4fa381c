//! The bytes that a mirror may show, in use and after a power cut.

use crate::volumes::disk::SECTOR_BYTES;

/// A write of one sector.
#[derive(Clone, Debug)]
struct Write {
    /// The contents that it may have: a guest can change its memory until the write has ended.
    stamps: Vec<u64>,
    began: u64,
    /// When it was answered; `None` if it was not.
    ended: Option<u64>,
    /// Whether the answer was a success.
    has_succeeded: bool,
    /// When a flush was answered that had begun after the answer.
    durable: Option<u64>,
}

/// The name of a write.
pub(crate) type WriteId = u64;

/// All writes, by sector.
#[derive(Clone, Debug)]
pub(crate) struct Model(Vec<Vec<(WriteId, Write)>>);

/// The contents of a sector with a stamp.
pub(crate) fn fill(stamp: u64) -> [u8; SECTOR_BYTES] {
    let mut sector = [0; SECTOR_BYTES];
    for word in sector.chunks_exact_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
    sector
}

/// The stamp of a sector; `None` if it is a mixture.
pub(crate) fn stamp_of(sector: &[u8]) -> Option<u64> {
    let first = u64::from_le_bytes(*sector.first_chunk()?);
    (sector == fill(first)).then_some(first)
}

impl Model {
    /// A mirror whose sectors have these stamps, durably.
    pub(crate) fn new(stamps: &[u64]) -> Self {
        let base = |stamp: &u64| {
            let write = Write {
                stamps: vec![*stamp],
                began: 0,
                ended: Some(0),
                has_succeeded: true,
                durable: Some(0),
            };
            vec![(0, write)]
        };
        Self(stamps.iter().map(base).collect())
    }

    pub(crate) fn begin(&mut self, id: WriteId, sector: usize, stamps: &[u64], at: u64) {
        let write = Write {
            stamps: stamps.to_vec(),
            began: at,
            ended: None,
            has_succeeded: false,
            durable: None,
        };
        self.0[sector].push((id, write));
    }

    fn writes(&mut self) -> impl Iterator<Item = &mut (WriteId, Write)> {
        self.0.iter_mut().flatten()
    }

    /// Adds a content that a write in flight may have.
    pub(crate) fn change(&mut self, id: WriteId, sector: usize, stamp: u64) {
        for (_, write) in self.0[sector].iter_mut().filter(|(of, _)| *of == id) {
            write.stamps.push(stamp);
        }
    }

    pub(crate) fn end(&mut self, id: WriteId, has_succeeded: bool, at: u64) {
        for (_, write) in self.writes().filter(|(of, _)| *of == id) {
            (write.ended, write.has_succeeded) = (Some(at), has_succeeded);
        }
    }

    /// A flush that began then was answered.
    pub(crate) fn flushed(&mut self, began: u64, at: u64) {
        for (_, write) in self.writes() {
            let is_covered = write.has_succeeded && write.ended.is_some_and(|ended| ended < began);
            if is_covered && write.durable.is_none() {
                write.durable = Some(at);
            }
        }
    }

    /// Checks a read that began and ended then.
    pub(crate) fn check_read(
        &self,
        sector: usize,
        found: Option<u64>,
        (began, ended): (u64, u64),
    ) -> Result<(), String> {
        let writes = &self.0[sector];
        // The writes that were over when the read began hide those that were over before them.
        let hides = |write: &Write| write.has_succeeded && write.ended.is_some_and(|at| at < began);
        Self::check(writes, sector, found, ended, &hides)
    }

    /// Whether these consecutive sectors are all of one write.
    pub(crate) fn are_of_one(&self, first: usize, found: &[Option<u64>]) -> bool {
        let has = |sector: usize, id: WriteId, found: &Option<u64>| {
            let mut writes = self.0[sector].iter().filter(|(of, _)| *of == id);
            writes.any(|(_, write)| found.is_some_and(|found| write.stamps.contains(&found)))
        };
        self.0[first].iter().any(|(id, _)| {
            found.iter().enumerate().all(|(index, found)| has(first + index, *id, found))
        })
    }

    /// Checks what a power cut has left.
    pub(crate) fn check_cut(
        &self,
        sector: usize,
        found: Option<u64>,
        at: u64,
    ) -> Result<(), String> {
        let hides = |write: &Write| write.durable.is_some_and(|durable| durable <= at);
        Self::check(&self.0[sector], sector, found, at, &hides)
    }

    fn check(
        writes: &[(WriteId, Write)],
        sector: usize,
        found: Option<u64>,
        until: u64,
        hides: &dyn Fn(&Write) -> bool,
    ) -> Result<(), String> {
        let is_hidden = |write: &Write| {
            write.ended.is_some_and(|ended| {
                writes.iter().any(|(_, other)| hides(other) && other.began > ended)
            })
        };
        let begun = || writes.iter().filter(|(_, write)| write.began <= until);
        let mut shown = begun().filter(|(_, write)| !is_hidden(write));
        if shown.any(|(_, write)| found.is_some_and(|found| write.stamps.contains(&found))) {
            return Ok(());
        }
        Err(format!("sector {sector} has {found:x?} at {until}; its writes: {writes:x?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_durable_write_hides_those_that_were_over_before_it_began() {
        let mut model = Model::new(&[7]);
        model.begin(1, 0, &[8], 10);
        model.end(1, true, 20);
        model.begin(2, 0, &[9], 30);
        for stamp in [7, 8, 9] {
            assert!(model.check_cut(0, Some(stamp), 40).is_ok());
        }
        model.flushed(25, 50);
        assert!(model.check_cut(0, Some(7), 49).is_ok(), "the flush is not answered");
        assert!(model.check_cut(0, Some(7), 50).is_err());
        assert!(model.check_cut(0, Some(8), 50).is_ok() && model.check_cut(0, Some(9), 50).is_ok());
        assert!(model.check_cut(0, Some(9), 29).is_err(), "it has not begun");
        assert!(model.check_cut(0, None, 50).is_err(), "a mixture");
    }

    #[test]
    fn a_read_shows_the_newest_answered_write_or_one_in_flight() {
        let mut model = Model::new(&[7]);
        model.begin(1, 0, &[8], 10);
        assert!(model.check_read(0, Some(7), (11, 12)).is_ok());
        model.end(1, true, 20);
        assert!(model.check_read(0, Some(7), (15, 25)).is_ok(), "they were in flight together");
        assert!(model.check_read(0, Some(7), (21, 25)).is_err());
        model.begin(2, 0, &[9], 30);
        model.end(2, false, 40);
        assert!(model.check_read(0, Some(8), (41, 42)).is_ok());
        assert!(model.check_read(0, Some(9), (41, 42)).is_ok(), "it may have been done");
        assert_eq!(stamp_of(&fill(5)), Some(5));
    }
}
