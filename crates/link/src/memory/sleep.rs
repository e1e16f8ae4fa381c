//! The order in which a side publishes or goes to sleep, and then looks.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use sidecore_memory::Words;

/// The words in shared memory that say whether a side sleeps. Those of tests record each access.
pub(super) trait Flags {
    fn load(&self, flag: usize) -> u64;
    fn store(&self, flag: usize, value: u64);
    /// Keeps the accesses before it and those after it apart, for all places.
    fn fence(&self);
}

impl Flags for Words<AtomicU64> {
    #[inline]
    fn load(&self, flag: usize) -> u64 {
        self.get(flag).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    #[inline]
    fn store(&self, flag: usize, value: u64) {
        if let Some(word) = self.get(flag) {
            word.store(value, Ordering::Relaxed);
        }
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// One side's view of both flags.
#[derive(Debug)]
pub(super) struct Sleep<F> {
    pub flags: F,
    pub own: usize,
    pub peer: usize,
}

impl<F: Flags> Sleep<F> {
    /// Whether the peer sleeps and has to be woken by the caller, who has published entries. The
    /// peer counts as awake from then on.
    pub fn take_sleeper(&self) -> bool {
        // Entries published so far are visible before the flag is read: either the peer sees them
        // when it looks once more, or its flag is seen here.
        self.flags.fence();
        if self.flags.load(self.peer) == 0 {
            return false;
        }
        self.flags.store(self.peer, 0);
        true
    }

    /// Whether the peer sleeps, as far as this core has seen.
    pub fn seems_asleep(&self) -> bool {
        self.flags.load(self.peer) != 0
    }

    /// Sets the own flag. A side that sets it then looks for entries once more.
    pub fn set(&self, asleep: bool) {
        self.flags.store(self.own, u64::from(asleep));
        if asleep {
            self.flags.fence();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Access {
        Store(usize),
        Load(usize),
        Fence,
    }

    /// Notes the accesses of a side that sees nothing of the other one's.
    #[derive(Debug, Default)]
    struct Recorder(RefCell<Vec<Access>>);

    impl Flags for Recorder {
        fn load(&self, flag: usize) -> u64 {
            self.0.borrow_mut().push(Access::Load(flag));
            0
        }

        fn store(&self, flag: usize, _value: u64) {
            self.0.borrow_mut().push(Access::Store(flag));
        }

        fn fence(&self) {
            self.0.borrow_mut().push(Access::Fence);
        }
    }

    /// The places that both sides use: an entry of a ring, and the flag of its reader.
    const ENTRY: usize = 0;
    const ASLEEP: usize = 1;
    const UNUSED: usize = 2;

    /// The accesses of a side that publishes and looks whether its peer sleeps.
    fn publishes() -> Vec<Access> {
        let side = Sleep { flags: Recorder::default(), own: UNUSED, peer: ASLEEP };
        side.flags.store(ENTRY, 1);
        assert!(!side.take_sleeper());
        side.flags.0.take()
    }

    /// The accesses of a side that goes to sleep and looks for an entry.
    fn sleeps() -> Vec<Access> {
        let side = Sleep { flags: Recorder::default(), own: ASLEEP, peer: UNUSED };
        side.set(true);
        assert_eq!(side.flags.load(ENTRY), 0);
        side.flags.0.take()
    }

    /// Whether two sides can carry out these accesses so that each load sees zero. Accesses of one
    /// side to different places may change their order, except across a fence: more than any
    /// processor permits.
    fn can_see_nothing(sides: [&[Access]; 2], stored: &[usize]) -> bool {
        if sides.iter().all(|side| side.is_empty()) {
            return true;
        }
        (0..2).any(|of| {
            let side = sides[of];
            (0..side.len()).any(|at| {
                if !may_be_first(side, at) {
                    return false;
                }
                let mut stored = stored.to_vec();
                match side[at] {
                    Access::Load(place) if stored.contains(&place) => return false,
                    Access::Store(place) => stored.push(place),
                    Access::Load(_) | Access::Fence => {}
                }
                let rest = [&side[..at], &side[at + 1..]].concat();
                let mut next = sides;
                next[of] = &rest;
                can_see_nothing(next, &stored)
            })
        })
    }

    fn may_be_first(side: &[Access], at: usize) -> bool {
        let place = |access| match access {
            Access::Store(place) | Access::Load(place) => Some(place),
            Access::Fence => None,
        };
        side[..at].iter().all(|before| match (place(*before), place(side[at])) {
            (Some(before), Some(this)) => before != this,
            _ => false,
        })
    }

    #[test]
    fn one_of_two_sides_sees_the_other_one_in_every_order_of_their_accesses() {
        let (publishes, sleeps) = (publishes(), sleeps());
        assert!(!can_see_nothing([&publishes, &sleeps], &[]), "{publishes:?} and {sleeps:?}");
    }

    #[test]
    fn without_one_of_the_fences_both_sides_can_see_nothing() {
        let without = |accesses: &[Access]| -> Vec<Access> {
            accesses.iter().copied().filter(|access| *access != Access::Fence).collect()
        };
        let (publishes, sleeps) = (publishes(), sleeps());
        assert!(can_see_nothing([&without(&publishes), &sleeps], &[]));
        assert!(can_see_nothing([&publishes, &without(&sleeps)], &[]));
    }

    #[test]
    fn a_sleeper_is_taken_once() {
        let pages = sidecore_memory::SharedPages::new("flags", 4096).unwrap();
        let flags = || crate::memory::layout::words(pages.memory(), 0, 3).unwrap();
        let host = Sleep { flags: flags(), own: ENTRY, peer: ASLEEP };
        let client = Sleep { flags: flags(), own: ASLEEP, peer: ENTRY };
        assert!(!host.take_sleeper());
        client.set(true);
        assert!(host.seems_asleep() && host.take_sleeper() && !host.take_sleeper());
        client.set(true);
        client.set(false);
        assert!(!host.seems_asleep() && !client.seems_asleep());
    }
}
