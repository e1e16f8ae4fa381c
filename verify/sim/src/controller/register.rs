//! A register that is written and read while the power may be cut: which of its values a reader may
//! find.
//!
//! Writes that are in flight at the same time have no order. So a reader may find a value unless
//! another value certainly came after it: the value of a write that succeeded, that began after the
//! first write had ended, and that ended before the read began, or was safe when the power was cut.

/// A time: the clock is unique, the position is the recording's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    pub(super) clock: u64,
    pub(super) position: usize,
}

#[derive(Clone, Copy, Debug)]
struct Version<T> {
    value: T,
    issued: Moment,
    /// `None` while in flight.
    ended: Option<Moment>,
    /// The value of a failed write may be there or not.
    succeeded: bool,
    /// The position of the recording from which on no power cut undoes the write.
    safe_from: Option<usize>,
}

/// All values ever written.
#[derive(Clone, Debug)]
pub(super) struct Register<T>(Vec<Version<T>>);

/// The index of a write in its register.
pub(super) type Write = usize;

impl<T: Copy + PartialEq> Register<T> {
    /// A register that has held one of `values`, safely, since before `now`.
    pub(super) fn holding(values: impl IntoIterator<Item = T>, now: Moment) -> Self {
        let version = |value| Version {
            value,
            issued: Moment::default(),
            ended: Some(now),
            succeeded: true,
            safe_from: Some(0),
        };
        Self(values.into_iter().map(version).collect())
    }

    /// Notes the start of a write.
    pub(super) fn begin(&mut self, value: T, issued: Moment) -> Write {
        self.0.push(Version { value, issued, ended: None, succeeded: false, safe_from: None });
        self.0.len() - 1
    }

    /// Notes the end of a write.
    pub(super) fn end(&mut self, write: Write, now: Moment, succeeded: bool) {
        if let Some(version) = self.0.get_mut(write) {
            version.ended = Some(now);
            version.succeeded = succeeded;
        }
    }

    /// Notes that all writes which succeeded before `asked` are safe from `position` on. True if
    /// other writes are not safe.
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

    /// The values that a read may find which began at `since` and ends now.
    pub(super) fn shown(&self, since: Moment) -> impl Iterator<Item = T> {
        self.left(move |newer| newer.ended.is_some_and(|ended| ended.clock < since.clock))
            .map(|version| version.value)
    }

    /// The values that a power cut at `position` may leave.
    pub(super) fn left_at(&self, position: usize) -> impl Iterator<Item = T> {
        let there = move |version: &&Version<T>| version.issued.position < position;
        let certain = move |newer: &Version<T>| {
            newer.safe_from.is_some_and(|safe_from| safe_from <= position)
        };
        self.left(certain).filter(there).map(|version| version.value)
    }

    /// The values that no other value has certainly replaced.
    fn left(&self, certain: impl Fn(&Version<T>) -> bool) -> impl Iterator<Item = &Version<T>> {
        let newest = self.0.iter().filter(|newer| newer.succeeded && certain(newer));
        let newest = newest.map(|newer| newer.issued.clock).max().unwrap_or(0);
        // A version that ended before the newest certain write was issued has been replaced.
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
        assert_eq!(
            register.shown(at(4)).collect::<Vec<_>>(),
            [0, 1, 2],
            "it began to read before that"
        );
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
