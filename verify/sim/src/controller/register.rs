//! One thing that is written and read while the power may go: which of the values written to it may be found.
//!
//! Who writes to it waits or does not; what was under way at the same time has no order. So a value may be found unless
//! it is certain that another one came after it: a write that succeeded, that began after the first had ended, and that
//! had itself ended before the reader began, or was safe when the power was cut.

/// When something happened: the clock is another one each time, the position is the recording's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    pub(super) clock: u64,
    pub(super) position: usize,
}

#[derive(Clone, Copy, Debug)]
struct Version<T> {
    value: T,
    issued: Moment,
    /// `None` while it is under way.
    ended: Option<Moment>,
    /// What failed may be there or not.
    succeeded: bool,
    /// The position of the recording from which on no power cut undoes it.
    safe_from: Option<usize>,
}

/// All that was ever written to it.
#[derive(Clone, Debug)]
pub(super) struct Register<T>(Vec<Version<T>>);

/// Names a write to a register.
pub(super) type Write = usize;

impl<T: Copy + PartialEq> Register<T> {
    /// It holds one of `values`, safely, since before `now`.
    pub(super) fn holding(values: impl IntoIterator<Item = T>, now: Moment) -> Self {
        let version =
            |value| Version { value, issued: Moment::default(), ended: Some(now), succeeded: true, safe_from: Some(0) };
        Self(values.into_iter().map(version).collect())
    }

    /// Somebody begins to write.
    pub(super) fn begin(&mut self, value: T, issued: Moment) -> Write {
        self.0.push(Version { value, issued, ended: None, succeeded: false, safe_from: None });
        self.0.len() - 1
    }

    /// That write is over.
    pub(super) fn end(&mut self, write: Write, now: Moment, succeeded: bool) {
        if let Some(version) = self.0.get_mut(write) {
            version.ended = Some(now);
            version.succeeded = succeeded;
        }
    }

    /// From `position` on, all that succeeded before `asked` is safe. Returns whether something is not.
    pub(super) fn secure(&mut self, asked: Moment, position: usize) -> bool {
        let mut all = true;
        for version in self.0.iter_mut().filter(|version| version.safe_from.is_none()) {
            if version.succeeded && version.ended.is_some_and(|ended| ended.clock < asked.clock) {
                version.safe_from = Some(position);
            } else {
                all = false;
            }
        }
        !all
    }

    /// What a reader may find that began at `since` and ends now.
    pub(super) fn shown(&self, since: Moment) -> impl Iterator<Item = T> {
        self.left(move |newer| newer.ended.is_some_and(|ended| ended.clock < since.clock)).map(|version| version.value)
    }

    /// What may be found when the power is cut at `position`.
    pub(super) fn left_at(&self, position: usize) -> impl Iterator<Item = T> {
        let there = move |version: &&Version<T>| version.issued.position < position;
        let certain = move |newer: &Version<T>| newer.safe_from.is_some_and(|safe_from| safe_from <= position);
        self.left(certain).filter(there).map(|version| version.value)
    }

    /// Those after which no other came for certain.
    fn left(&self, certain: impl Fn(&Version<T>) -> bool) -> impl Iterator<Item = &Version<T>> {
        let newest = self.0.iter().filter(|newer| newer.succeeded && certain(newer));
        let newest = newest.map(|newer| newer.issued.clock).max().unwrap_or(0);
        // What ended before some certain write was issued is gone.
        self.0.iter().filter(move |version| version.ended.is_none_or(|ended| ended.clock >= newest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(clock: u64) -> Moment {
        Moment { clock, position: clock as usize }
    }

    #[test]
    fn what_overlaps_has_no_order_and_what_follows_has() {
        let mut register = Register::holding([0], at(1));
        let one = register.begin(1, at(2));
        let two = register.begin(2, at(3));
        assert_eq!(register.shown(at(4)).collect::<Vec<_>>(), [0, 1, 2]);
        register.end(one, at(5), true);
        register.end(two, at(6), true);
        assert_eq!(register.shown(at(7)).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(register.shown(at(4)).collect::<Vec<_>>(), [0, 1, 2], "it began to read before that");
        let three = register.begin(3, at(8));
        register.end(three, at(9), false);
        assert_eq!(register.shown(at(10)).collect::<Vec<_>>(), [1, 2, 3]);
        let four = register.begin(4, at(11));
        register.end(four, at(12), true);
        assert_eq!(register.shown(at(13)).collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn a_power_cut_takes_what_is_not_safe() {
        let mut register = Register::holding([0], at(1));
        let one = register.begin(1, at(2));
        register.end(one, at(3), true);
        let two = register.begin(2, at(5));
        assert!(register.secure(at(4), 8), "the second is not");
        register.end(two, at(9), true);
        assert_eq!(register.left_at(2).collect::<Vec<_>>(), [0]);
        assert_eq!(register.left_at(5).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(register.left_at(7).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(register.left_at(8).collect::<Vec<_>>(), [1, 2]);
        assert!(!register.secure(at(10), 12));
        assert_eq!(register.left_at(12).collect::<Vec<_>>(), [2]);
    }
}
