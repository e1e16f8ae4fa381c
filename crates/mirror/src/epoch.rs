//! Epochs: which legs hold the newest bytes, and who may go on. Pure code.
//!
//! An epoch is a time in which the same legs are in sync. Its [`Config`] is in force when each leg
//! that it names in sync holds it, and a majority of all members does; half of them will do with
//! the permission of a [witness](crate::Witness). Two epochs that are in force thus have a holder
//! in common, or were granted by the same witness, so the newest one is always seen.

use crate::error::LegError;
use crate::legs::{LegSet, MAX_LEGS};

/// An epoch, and the legs that are in sync in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Its number: larger than those of all epochs before it.
    pub epoch: u64,
    /// The map of dirty regions has all that was written since this epoch to some legs only.
    pub covered_from: u64,
    /// All legs of the mirror.
    pub members: LegSet,
    /// The legs that have all answered writes.
    pub in_sync: LegSet,
    /// The last epoch in which each leg was in sync.
    pub seen: [u64; MAX_LEGS],
}

impl Config {
    /// The first epoch.
    pub(crate) fn first(members: LegSet, in_sync: LegSet) -> Self {
        let seen = std::array::from_fn(|leg| u64::from(in_sync.has(leg)));
        Self { epoch: 1, covered_from: 1, members, in_sync, seen }
    }

    /// The epoch `epoch` after this one, which has been in force.
    pub(crate) fn next(&self, epoch: u64, members: LegSet, in_sync: LegSet) -> Self {
        let seen = std::array::from_fn(|leg| {
            if in_sync.has(leg) { epoch } else { self.seen.get(leg).copied().unwrap_or(0) }
        });
        // Marks are cleared in an epoch with all legs in sync, and not before it is in force.
        let is_whole = self.in_sync == self.members && members == self.members;
        let covered_from = if is_whole { self.epoch } else { self.covered_from };
        Self { epoch, covered_from, members, in_sync, seen }
    }

    /// Whether the holders suffice to put an epoch of these members in force.
    pub(crate) fn quorum(members: LegSet, holders: LegSet) -> Quorum {
        let twice = holders.and(members).len().saturating_mul(2);
        match twice.cmp(&members.len()) {
            std::cmp::Ordering::Greater => Quorum::Majority,
            std::cmp::Ordering::Equal => Quorum::Half,
            std::cmp::Ordering::Less => Quorum::Minority,
        }
    }
}

/// How many of the members are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Quorum {
    /// Too few.
    Minority,
    /// As many as are not: a witness decides.
    Half,
    Majority,
}

/// A leg's own header, as far as epochs are concerned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    pub(crate) leg: usize,
    pub(crate) config: Config,
    pub(crate) is_clean: bool,
}

/// The state of legs that are opened together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assembled {
    /// The newest epoch.
    pub(crate) config: Config,
    /// Legs that hold it and are in sync in it.
    pub(crate) in_sync: LegSet,
    /// Whether all of these were closed in good order, so that their bytes are equal.
    pub(crate) is_clean: bool,
}

/// Finds the newest epoch that the legs hold.
///
/// # Errors
/// A leg is of another history, was removed, or has missed more than the map knows.
pub(crate) fn assemble(holders: &[Holder]) -> Result<Assembled, (usize, LegError)> {
    let newest = holders.iter().map(|holder| holder.config.epoch).max().unwrap_or(0);
    let held_by = |config: &Config| {
        let same = holders.iter().filter(|holder| holder.config == *config);
        same.fold(LegSet::EMPTY, |set, holder| set.with(LegSet::of(holder.leg)))
    };
    let candidates = || holders.iter().filter(|holder| holder.config.epoch == newest);
    let Some(first) = candidates().next() else { return Err((0, LegError::NoHeader)) };
    let other = candidates().find(|holder| holder.config != first.config);
    let config = match other {
        None => first.config,
        // Two of one number: the one that may have been in force is held by a majority.
        Some(other) => {
            let is_in_force = |holder: &&Holder| {
                let legs = held_by(&holder.config);
                Config::quorum(holder.config.members, legs) == Quorum::Majority
            };
            let diverged = LegError::Diverged { epoch: newest, since: first.config.epoch };
            candidates().find(is_in_force).ok_or((other.leg, diverged))?.config
        }
    };
    let current = held_by(&config);
    for holder in holders {
        check(holder, &config, current).map_err(|error| (holder.leg, error))?;
    }
    let in_sync = current.and(config.in_sync);
    let is_clean = holders.iter().filter(|holder| in_sync.has(holder.leg)).all(|at| at.is_clean);
    Ok(Assembled { config, in_sync, is_clean })
}

/// Whether a leg belongs to the history of `newest`, which the legs `current` hold.
pub(crate) fn check(holder: &Holder, newest: &Config, current: LegSet) -> Result<(), LegError> {
    let Holder { leg, config, .. } = holder;
    if !newest.members.has(*leg) {
        return Err(LegError::Removed { leg: *leg });
    }
    if config == newest {
        return Ok(());
    }
    let since = newest.seen.get(*leg).copied().unwrap_or(0);
    // An epoch that needed a leg of the newest one was never in force, unless that leg had it too.
    let was_in_force = config.in_sync.and(current).is_empty();
    if config.in_sync.has(*leg) && config.epoch > since && was_in_force {
        return Err(LegError::Diverged { epoch: config.epoch, since });
    }
    if config.epoch < newest.covered_from {
        let covered_from = newest.covered_from;
        return Err(LegError::TooOld { epoch: config.epoch, covered_from });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LegSet = LegSet::from_bits(1);
    const B: LegSet = LegSet::from_bits(2);
    const C: LegSet = LegSet::from_bits(4);

    fn holder(leg: usize, config: Config) -> Holder {
        Holder { leg, config, is_clean: true }
    }

    /// An epoch with both of two legs in sync, and the one before it.
    fn both() -> Config {
        let two = A.with(B);
        Config::first(two, two).next(5, two, two)
    }

    #[test]
    fn equal_legs_are_in_sync_and_clean_if_all_are() {
        let mut holders = [holder(0, both()), holder(1, both())];
        let expected = Assembled { config: both(), in_sync: A.with(B), is_clean: true };
        assert_eq!(assemble(&holders), Ok(expected));
        holders[1].is_clean = false;
        assert_eq!(assemble(&holders), Ok(Assembled { is_clean: false, ..expected }));
    }

    #[test]
    fn a_leg_with_an_older_epoch_is_behind() {
        let alone = both().next(6, A.with(B), A);
        let found = assemble(&[holder(0, alone), holder(1, both())]).unwrap();
        assert_eq!((found.config, found.in_sync), (alone, A));
        // It knows of the newest epoch, and is not in sync in it.
        assert_eq!(assemble(&[holder(1, alone)]).unwrap().in_sync, LegSet::EMPTY);
        // An epoch that reached one of its legs only: the other is copied.
        let torn = both().next(6, A.with(B), A.with(B));
        assert_eq!(assemble(&[holder(0, torn), holder(1, both())]).unwrap().in_sync, A);
    }

    #[test]
    fn legs_that_went_on_by_themselves_are_not_one_mirror() {
        let (one, other) = (both().next(6, A.with(B), A), both().next(6, A.with(B), B));
        let found = assemble(&[holder(0, one), holder(1, other)]);
        assert!(matches!(found, Err((1, LegError::Diverged { epoch: 6, .. }))), "{found:?}");
        let later = one.next(9, A.with(B), A);
        let found = assemble(&[holder(0, later), holder(1, other)]);
        assert_eq!(found, Err((1, LegError::Diverged { epoch: 6, since: 5 })));
    }

    #[test]
    fn an_epoch_that_needed_a_leg_of_the_newest_one_was_never_in_force() {
        let all = A.with(B).with(C);
        let before = Config::first(all, all).next(5, all, all);
        let torn = before.next(6, all, A.with(B));
        for epoch in [6, 9] {
            let newest = before.next(epoch, all, B.with(C));
            let holders = [holder(0, torn), holder(1, newest), holder(2, newest)];
            assert_eq!(assemble(&holders).unwrap().in_sync, B.with(C), "epoch {epoch}");
        }
    }

    #[test]
    fn a_leg_that_has_missed_more_than_the_map_knows_is_refused() {
        let mut config = both();
        for epoch in [6, 7] {
            config = config.next(epoch, A.with(B), A.with(B));
        }
        assert_eq!(config.covered_from, 6);
        let found = assemble(&[holder(0, config), holder(1, both())]);
        assert_eq!(found, Err((1, LegError::TooOld { epoch: 5, covered_from: 6 })));
        let alone = config.next(8, A.with(B), A).next(9, A.with(B), A);
        assert_eq!(alone.covered_from, 7);
        assert_eq!(assemble(&[holder(0, alone), holder(1, config)]).unwrap().in_sync, A);
    }

    #[test]
    fn a_removed_leg_is_refused() {
        let without = both().next(6, A, A);
        let found = assemble(&[holder(0, without), holder(1, both())]);
        assert_eq!(found, Err((1, LegError::Removed { leg: 1 })));
    }

    #[test]
    fn half_of_the_members_need_a_witness() {
        let four = LegSet::first(4);
        for (members, holders, quorum) in [
            (A, A, Quorum::Majority),
            (A.with(B), A, Quorum::Half),
            (A.with(B), A.with(C), Quorum::Half),
            (A.with(B).with(C), A, Quorum::Minority),
            (A.with(B).with(C), A.with(C), Quorum::Majority),
            (four, A.with(C), Quorum::Half),
            (four, C, Quorum::Minority),
        ] {
            assert_eq!(Config::quorum(members, holders), quorum, "{holders} of {members}");
        }
    }
}
