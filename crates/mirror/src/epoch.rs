//! Epochs: which legs hold the newest bytes, and who may go on. Pure code.
//!
//! An epoch is a time in which the same legs are in sync. Its [`Config`] is in force when each leg
//! that it names in sync holds it, and a majority of all members does; half of them will do with
//! the permission of a [witness](crate::Witness). Two epochs that are in force thus have a holder
//! in common, or were granted by the same witness, so the newest one is always seen.

use crate::error::LegError;
use crate::legs::{LegSet, MAX_LEGS};
use crate::rules::{Neglected, Rule};

/// An epoch, and the legs that are in sync in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Its number: larger than those of all epochs before it.
    pub epoch: u64,
    /// The newest epoch that was known when this one began: it has the bytes of that one.
    pub parent: u64,
    /// The map of dirty regions has all that was written since this epoch to some legs only.
    pub covered_from: u64,
    /// All legs of the mirror.
    pub members: LegSet,
    /// The members of the epoch before this one, of which as many have to hold it.
    pub former: LegSet,
    /// Half of the members suffices: a witness has permitted it.
    pub is_permitted: bool,
    /// The legs that have all answered writes.
    pub in_sync: LegSet,
    /// The last epoch in which each leg was in sync.
    pub seen: [u64; MAX_LEGS],
    /// The store that each number is, or was last; 0 if none was.
    pub stores: [StoreId; MAX_LEGS],
}

/// A random number that tells a store from others that have its leg's number at other times. It is
/// never 0.
pub type StoreId = u64;

impl Config {
    /// The first epoch.
    pub(crate) fn first(members: LegSet, in_sync: LegSet, stores: [StoreId; MAX_LEGS]) -> Self {
        let seen = std::array::from_fn(|leg| u64::from(in_sync.has(leg)));
        Self {
            epoch: 1,
            parent: 0,
            covered_from: 1,
            members,
            former: members,
            is_permitted: false,
            in_sync,
            seen,
            stores,
        }
    }

    /// This epoch, if a store has this number from now on.
    pub(crate) fn joined_by(mut self, leg: usize, store: StoreId) -> Self {
        if let (Some(place), Some(seen)) = (self.stores.get_mut(leg), self.seen.get_mut(leg)) {
            (*place, *seen) = (store, 0);
        }
        self
    }

    /// The store that a number is, or was last.
    pub(crate) fn store(&self, leg: usize) -> StoreId {
        self.stores.get(leg).copied().unwrap_or(0)
    }

    /// The epoch `epoch` after this one.
    pub(crate) fn next(&self, epoch: u64, members: LegSet, in_sync: LegSet) -> Self {
        let seen = std::array::from_fn(|leg| {
            if in_sync.has(leg) { epoch } else { self.seen.get(leg).copied().unwrap_or(0) }
        });
        let covered_from = self.covered_from;
        let (parent, former, stores) = (self.epoch, self.members, self.stores);
        let is_permitted = false;
        Self { epoch, parent, covered_from, members, former, is_permitted, in_sync, seen, stores }
    }

    /// Whether this epoch has all writes that were answered in `other`, if that was in force.
    /// `None` if other stores have the numbers of all legs that were in sync there.
    ///
    /// All of those legs held `other`. One that was in sync later, in an epoch before this one,
    /// came there with what it knew: the keeper had it all the time, or has checked its header in
    /// this way. Epochs of a leg grow, so it cannot have held `other` after that. And if this epoch
    /// comes after `other`, `seen` has it for each of those legs, also for one that has left since,
    /// until another store has the number.
    fn has_writes_of(&self, other: &Self) -> Option<bool> {
        let is_same = |leg: &usize| self.store(*leg) == other.store(*leg);
        let seen = |leg: usize| self.seen.get(leg).copied().unwrap_or(0);
        let mut legs = other.in_sync.numbers().filter(is_same).peekable();
        legs.peek()?;
        Some(legs.any(|leg| seen(leg) >= other.epoch))
    }

    /// The epoch that the map reaches back to after this one, which has been in force. Marks are
    /// cleared in an epoch with all legs in sync, and not before.
    pub(crate) fn covered_after(&self) -> u64 {
        if self.in_sync == self.members { self.epoch } else { self.covered_from }
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
    /// `None` if stores are told apart by their numbers only, as simulations can ask for.
    pub(crate) store: Option<StoreId>,
    pub(crate) config: Config,
    pub(crate) is_clean: bool,
}

impl Holder {
    /// Whether it is the store that an epoch means by its number.
    fn is_of(&self, config: &Config) -> bool {
        self.store.is_none_or(|store| store == config.store(self.leg))
    }

    fn is_member_of(&self, config: &Config) -> bool {
        config.members.has(self.leg) && self.is_of(config)
    }
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

/// Finds the newest epoch that may have been in force.
///
/// A write of a header that failed may have reached the leg, so a leg may hold an epoch that was
/// never in force. Such an epoch is passed over if the other legs show it: nothing was answered in
/// it, and its legs have the bytes of its parent. Stores in `former` are no legs any more, and
/// their headers count as those of the others in this: an epoch that only they hold is the newest
/// one all the same, and the mirror waits for the legs that were in sync in it.
///
/// # Errors
/// A leg is of another history, was removed, or has missed more than the map knows. The number is
/// its place among the holders.
pub(crate) fn assemble(
    legs: &[Holder],
    former: &[Holder],
    neglected: Neglected,
) -> Result<Assembled, (usize, LegError)> {
    let diverged = |(place, holder): (usize, &Holder), newest: &Config| {
        let since = newest.seen.get(holder.leg).copied().unwrap_or(0);
        (place, LegError::Diverged { epoch: holder.config.epoch, since })
    };
    let holders: Vec<Holder> = legs.iter().chain(former).copied().collect();
    let is_void = |holder: &Holder| is_void(&holder.config, &holders, LegSet::EMPTY);
    // An older one is that of a leg that is behind.
    let known = holders.iter().map(|holder| holder.config.parent).max();
    let known = known.ok_or((0, LegError::NoHeader))?;
    let mut newest: Option<&Holder> = None;
    for holder in holders.iter().filter(|holder| holder.config.epoch >= known && !is_void(holder)) {
        if newest.is_none_or(|newest| newest.config.epoch < holder.config.epoch) {
            newest = Some(holder);
        }
    }
    // Otherwise attempts to follow the newest one: those in sync in them have its bytes.
    let attempts = holders.iter().filter(|holder| holder.config.parent == known);
    let attempt = attempts.max_by_key(|at| (at.config.in_sync.has(at.leg), at.config.epoch));
    let config = newest.or(attempt).ok_or((0, LegError::NoHeader))?.config;
    // A store that says itself that it is none: the legs that are here decide without it.
    let is_none = |holder: &Holder| holder.config == config && !holder.is_member_of(&config);
    if let Some((place, holder)) = legs.iter().enumerate().find(|(_, holder)| is_none(holder)) {
        return Err((place, LegError::Removed { leg: holder.leg }));
    }
    let legs_of = |is_so: &dyn Fn(&Holder) -> bool| {
        let so = legs.iter().filter(|holder| is_so(holder));
        so.fold(LegSet::EMPTY, |set, holder| set.with(LegSet::of(holder.leg)))
    };
    let current = legs_of(&|holder| holder.config == config);
    // A leg whose next epoch was never in force has the bytes of this one.
    let torn = legs_of(&|holder| {
        holder.config.parent == config.epoch && holder.config.in_sync.has(holder.leg)
    });
    let torn = torn.and(config.in_sync);
    let in_sync = if torn.is_empty() { current.and(config.in_sync) } else { torn };
    // Without the bytes of an epoch nothing goes on, and the leg that has them will tell more.
    let goes_on = !in_sync.is_empty();
    // Both began with what was known before, and each may have been in force.
    let rival = legs.iter().enumerate().find(|(_, holder)| {
        holder.config != config && holder.config.epoch > config.parent && !is_void(holder)
    });
    if let Some(rival) = rival.filter(|_| goes_on) {
        return Err(diverged(rival, &config));
    }
    for (place, holder) in legs.iter().enumerate() {
        match check(holder, &config, &holders, neglected) {
            Err(LegError::Diverged { .. } | LegError::Rival { .. }) if !goes_on => {}
            checked => checked.map_err(|error| (place, error))?,
        }
    }
    let is_clean = legs.iter().filter(|holder| in_sync.has(holder.leg)).all(|at| at.is_clean);
    Ok(Assembled { config, in_sync, is_clean })
}

/// Whether an epoch was never in force, as far as the legs of `holders` tell. The legs `others` are
/// known not to have held it, or to have shown that it was never in force.
fn is_void(config: &Config, holders: &[Holder], others: LegSet) -> bool {
    let mut never = others;
    // A store that had the number of another one says nothing about that one.
    let is_other = |holder: &&Holder| holder.config != *config && holder.is_of(config);
    for holder in holders.iter().filter(is_other) {
        let Config { epoch, parent, .. } = holder.config;
        // The epochs of a leg grow, so it never held this one; and it may know of a rival. One that
        // has missed the parent, too, knows of none.
        let is_older = (config.parent..=config.epoch).contains(&epoch);
        // When its epoch began, this one was not seen, or was passed over.
        let is_beside = epoch > config.epoch && parent < config.epoch;
        if is_older || is_beside {
            never = never.with(LegSet::of(holder.leg));
        }
    }
    // It is in force when all that it names in sync hold it, and a majority or half of its members.
    let suffices = if config.is_permitted { Quorum::Half } else { Quorum::Majority };
    !config.in_sync.and(never).is_empty()
        || [config.members, config.former]
            .iter()
            .any(|voters| Config::quorum(*voters, voters.without(never)) < suffices)
}

/// Whether a leg belongs to the history of `newest`, which some of `holders` hold.
///
/// A leg that is behind matters, too: if its epoch was in force, writes may have been answered that
/// other legs have, and with its vote these would be outvoted.
pub(crate) fn check(
    holder: &Holder,
    newest: &Config,
    holders: &[Holder],
    neglected: Neglected,
) -> Result<(), LegError> {
    let Holder { leg, config, .. } = holder;
    if !holder.is_member_of(newest) {
        return Err(LegError::Removed { leg: *leg });
    }
    if config == newest {
        return Ok(());
    }
    let since = newest.seen.get(*leg).copied().unwrap_or(0);
    let went_on = config.in_sync.has(*leg) && config.epoch > since;
    let descends = match neglected.keeps(Rule::Descent) {
        true => newest.has_writes_of(config),
        false => Some(true),
    };
    if went_on || descends != Some(true) {
        let is_current = |holder: &&Holder| holder.config == *newest && holder.is_of(newest);
        let current = holders.iter().filter(is_current);
        let current = current.fold(LegSet::EMPTY, |set, at| set.with(LegSet::of(at.leg)));
        if !is_void(config, holders, current) {
            let Config { epoch, in_sync: legs, .. } = *config;
            return Err(match descends {
                _ if went_on => LegError::Diverged { epoch, since },
                None => LegError::Replaced { epoch, legs },
                _ => LegError::Rival { epoch, legs },
            });
        }
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
        Holder { leg, store: Some(config.store(leg)), config, is_clean: true }
    }

    fn assemble(holders: &[Holder]) -> Result<Assembled, (usize, LegError)> {
        super::assemble(holders, &[], Neglected::default())
    }

    fn check(holder: &Holder, newest: &Config, holders: &[Holder]) -> Result<(), LegError> {
        super::check(holder, newest, holders, Neglected::default())
    }

    fn first(members: LegSet, in_sync: LegSet) -> Config {
        Config::first(members, in_sync, std::array::from_fn(|leg| 100 + leg as u64))
    }

    /// An epoch with both of two legs in sync, and the one before it.
    fn both() -> Config {
        let two = A.with(B);
        first(two, two).next(5, two, two)
    }

    /// An epoch that half of the members may begin.
    fn permitted(config: Config) -> Config {
        Config { is_permitted: true, ..config }
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
        let alone = permitted(both().next(6, A.with(B), A));
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
        let (one, other) = (permitted(one), permitted(other));
        let found = assemble(&[holder(0, one), holder(1, other)]);
        assert!(matches!(found, Err((1, LegError::Diverged { epoch: 6, .. }))), "{found:?}");
        let later = permitted(one.next(9, A.with(B), A));
        let found = assemble(&[holder(0, later), holder(1, other)]);
        assert_eq!(found, Err((1, LegError::Diverged { epoch: 6, since: 5 })));
    }

    /// The epoch that one half of four legs begins, with one of them in sync.
    fn half(legs: [usize; 2], epoch: u64) -> (Config, [Holder; 2]) {
        let four = LegSet::first(4);
        let before = first(four, four).next(5, four, four);
        let config = permitted(before.next(epoch, four, LegSet::of(legs[0])));
        (config, legs.map(|leg| holder(leg, config)))
    }

    #[test]
    fn a_leg_that_is_behind_shows_that_others_went_on() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, all);
        // Legs 1 and 2 went on with another daemon, and only leg 1 was in sync.
        let rival = before.next(6, all, B);
        let waiting = [holder(0, before)];
        let refused = Err(LegError::Rival { epoch: 6, legs: B });
        assert_eq!(check(&holder(2, rival), &before, &waiting), refused);
        let later = rival.next(7, all, B).next(8, all, B);
        let refused = Err(LegError::Rival { epoch: 8, legs: B });
        assert_eq!(check(&holder(2, later), &before, &waiting), refused);
        // An epoch that it did not hold, as its own was still older.
        assert_eq!(check(&holder(2, before), &before, &waiting), Ok(()));
    }

    #[test]
    fn a_leg_that_is_behind_in_the_other_half_is_refused() {
        let (newest, holders) = half([2, 3], 7);
        let (_, [in_sync, behind]) = half([0, 1], 6);
        let refused = Err(LegError::Rival { epoch: 6, legs: A });
        assert_eq!(check(&behind, &newest, &holders), refused);
        let went_on = check(&in_sync, &newest, &holders);
        assert_eq!(went_on, Err(LegError::Diverged { epoch: 6, since: 5 }));
        // Without a permission the half was never in force.
        let attempt = Config { is_permitted: false, ..behind.config };
        assert_eq!(check(&holder(1, attempt), &newest, &holders), Ok(()));
        let later = newest.next(8, LegSet::first(4), C).next(9, LegSet::first(4), C);
        let holders = [holder(2, later), holder(3, later)];
        assert_eq!(check(&behind, &later, &holders), refused);
    }

    #[test]
    fn legs_are_not_opened_with_one_that_is_behind_in_another_history() {
        let (newest, _) = half([2, 3], 7);
        let four = LegSet::first(4);
        let newest = permitted(newest.next(8, four, C).next(9, four, C));
        let (_, [_, behind]) = half([0, 1], 6);
        let refused = Err((1, LegError::Rival { epoch: 6, legs: A }));
        assert_eq!(assemble(&[holder(2, newest), behind]), refused);
        assert_eq!(assemble(&[holder(2, newest), behind, holder(3, newest)]), refused);
        // Without the bytes they wait for a leg that has them.
        assert_eq!(assemble(&[holder(3, newest), behind]).unwrap().in_sync, LegSet::EMPTY);
    }

    #[test]
    fn a_leg_that_was_behind_for_long_comes_back() {
        let all = A.with(B).with(C);
        let behind = first(all, all).next(5, all, all).next(6, all, A);
        // The leg that was in sync then has another one come in sync, and fails; or is removed.
        let copied = behind.next(7, all, A.with(B));
        let alone = copied.next(8, all, B).next(9, all, B);
        let removed = alone.next(10, B.with(C), B).next(11, B.with(C), B);
        for newest in [copied, alone, removed] {
            let holders = [holder(1, newest)];
            assert_eq!(check(&holder(2, behind), &newest, &holders), Ok(()), "{newest:?}");
            assert!(assemble(&[holder(1, newest), holder(2, behind)]).is_ok());
        }
    }

    #[test]
    fn an_attempt_that_has_reached_a_leg_which_is_behind_does_not_refuse_it() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, A.with(B));
        // Leg 0 held it, and the next attempt of the same keeper was in force.
        let attempt = before.next(6, all, A);
        let newest = before.next(7, all, A);
        let holders = [holder(0, newest)];
        assert_eq!(check(&holder(2, attempt), &newest, &holders), Ok(()));
        // Five legs: the keeper ended before a majority held it, and the others went on.
        let (five, two) = (LegSet::first(5), A.with(C));
        let before = first(five, five).next(5, five, two);
        let attempt = before.next(6, five, A);
        let newest = before.next(6, five, C);
        let holders = [2, 3, 4].map(|leg| holder(leg, newest));
        assert_eq!(check(&holder(1, attempt), &newest, &holders), Ok(()));
        let refused = Err(LegError::Rival { epoch: 6, legs: A });
        assert_eq!(check(&holder(1, attempt), &newest, &holders[..2]), refused);
    }

    #[test]
    fn stores_that_have_the_numbers_of_others_tell_nothing_of_them() {
        let (two, all) = (A.with(B), A.with(B).with(C));
        let behind = first(all, all).next(5, all, A);
        let copied = behind.next(6, all, two);
        let removed = copied.next(7, B.with(C), B).next(8, B.with(C), B);
        let joined = removed.joined_by(0, 300).next(9, all, B).next(10, all, B);
        let refused = Err(LegError::Replaced { epoch: 5, legs: A });
        // Also when the new store is in sync.
        for newest in [joined, joined.next(11, all, two)] {
            let holders = [holder(1, newest)];
            assert_eq!(check(&holder(2, behind), &newest, &holders), refused);
            // Each leg that was in sync and is known as itself tells enough.
            assert_eq!(check(&holder(2, copied), &newest, &holders), Ok(()));
        }
    }

    #[test]
    fn an_epoch_that_needed_a_leg_of_the_newest_one_was_never_in_force() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, all);
        let torn = before.next(6, all, A.with(B));
        for epoch in [6, 9] {
            let newest = before.next(epoch, all, B.with(C));
            let holders = [holder(0, torn), holder(1, newest), holder(2, newest)];
            assert_eq!(assemble(&holders).unwrap().in_sync, B.with(C), "epoch {epoch}");
        }
    }

    #[test]
    fn an_epoch_that_too_few_legs_hold_was_never_in_force() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, all);
        // The last header that a leg got before it failed, and the epochs of the others since.
        for epoch in [6, 9] {
            let torn = before.next(epoch, all, A);
            let began = before.next(6, all, B.with(C));
            for newest in [began, began.next(8, all, B.with(C))] {
                let holders = [holder(0, torn), holder(1, newest), holder(2, newest)];
                let found = assemble(&holders).unwrap();
                assert_eq!((found.config, found.in_sync), (newest, B.with(C)));
            }
        }
        // Of two legs, one without a permission.
        let torn = both().next(6, A.with(B), A);
        assert_eq!(assemble(&[holder(0, torn), holder(1, both())]).unwrap().config, both());
    }

    #[test]
    fn attempts_that_all_failed_leave_the_bytes_of_the_epoch_before_them() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, all);
        // One leg failed the first attempt, and one of the others got the second one.
        let (one, other) = (before.next(6, all, all), before.next(7, all, A.with(B)));
        let found = assemble(&[holder(0, one), holder(1, other)]).unwrap();
        assert_eq!((found.config, found.in_sync), (other, B));
        // A leg that was away for long is not newer than they are.
        let old = first(all, all);
        let found = assemble(&[holder(0, one), holder(1, other), holder(2, old)]).unwrap();
        assert_eq!((found.config, found.in_sync), (other, B));
    }

    #[test]
    fn answered_writes_outweigh_a_larger_number() {
        let all = A.with(B).with(C);
        let before = first(all, all).next(5, all, all);
        // Its second attempt reached the first leg only, which was away later.
        let torn = before.next(7, all, A.with(B));
        let newest = before.next(6, all, B);
        let holders = [holder(0, torn), holder(1, newest), holder(2, newest)];
        let found = assemble(&holders).unwrap();
        assert_eq!((found.config, found.in_sync), (newest, B));
        // Without the leg in the middle nothing shows which one was in force.
        let found = assemble(&[holder(0, torn), holder(2, newest)]);
        assert!(matches!(found, Err((1, LegError::Diverged { epoch: 6, .. }))), "{found:?}");
    }

    #[test]
    fn a_leg_that_was_removed_alone_does_not_undo_its_epoch() {
        let removed = both().next(6, A, A);
        let mut holders = [holder(0, removed), holder(1, both())];
        // Both members had to hold it, and one never did.
        assert_eq!(assemble(&holders).unwrap().config, both());
        holders[1].config = removed;
        assert_eq!(assemble(&holders), Err((1, LegError::Removed { leg: 1 })));
        let later = removed.next(7, A, A);
        let found = assemble(&[holder(0, later), holder(1, both())]);
        assert_eq!(found, Err((1, LegError::Removed { leg: 1 })));
    }

    #[test]
    fn a_store_is_not_taken_for_the_one_that_has_its_number_now() {
        let (two, all) = (A.with(B), A.with(B).with(C));
        let before = both().next(6, all, two).next(7, all, two);
        let removed = before.next(8, two, two).next(9, two, two);
        let joined = removed.next(10, all, two).joined_by(2, 200);
        let now = joined.next(11, all, two).next(12, all, all);
        let store = |config| Holder { store: Some(200), ..holder(2, config) };
        let old = holder(2, before);
        let expected = Err((1, LegError::Removed { leg: 2 }));
        assert_eq!(assemble(&[holder(0, now), old]), expected);
        assert_eq!(assemble(&[holder(0, now), old, store(now)]), expected);
        let legs = [holder(0, now), holder(1, now), store(now)];
        assert_eq!(assemble(&legs).unwrap().in_sync, all);
    }

    #[test]
    fn legs_without_the_bytes_wait_for_the_one_that_knows_which_epoch_was_in_force() {
        let four = LegSet::first(4);
        let begun = first(four, four).next(5, four, C);
        // Each was held by leg 2 and by one of these, and by a third one, or not.
        let (one, other) = (begun.next(6, four, C), begun.next(7, four, C));
        let legs = [holder(0, other), holder(3, one)];
        assert_eq!(assemble(&legs).unwrap().in_sync, LegSet::EMPTY);
        let expected = Assembled { config: other, in_sync: C, is_clean: true };
        assert_eq!(assemble(&[legs[0], legs[1], holder(2, other)]), Ok(expected));
    }

    #[test]
    fn a_former_leg_shows_that_the_others_are_old() {
        // Leg 2 came for leg 0 while leg 1 was away, and is away itself now.
        let before = both();
        let joined = before.joined_by(2, 102).next(6, LegSet::first(3), A);
        let copied = joined.next(7, LegSet::first(3), A.with(C));
        let removed = copied.next(8, B.with(C), C);
        let (former, leg) =
            (holder(0, permitted(removed.next(9, B.with(C), C))), holder(1, before));
        assert_eq!(assemble(&[former, leg]), Err((0, LegError::Removed { leg: 0 })));
        assert_eq!(assemble(&[leg]).unwrap().in_sync, B, "as far as it knows");
        let found = super::assemble(&[leg], &[former], Neglected::default()).unwrap();
        assert_eq!((found.config, found.in_sync), (former.config, LegSet::EMPTY));
        let comes = [leg, holder(2, former.config)];
        let found = super::assemble(&comes, &[former], Neglected::default()).unwrap();
        assert_eq!((found.config, found.in_sync), (former.config, C));
    }

    #[test]
    fn a_store_that_is_no_leg_makes_no_rival_of_one() {
        let two = A.with(B);
        // Its header failed, and has reached leg 1. The mirror waits then, and goes on when it is
        // permitted to, and a store that is to be added has that epoch.
        let torn = holder(1, both().next(6, two, A));
        let now = permitted(both().next(7, two, A));
        let store = Holder { leg: 2, store: Some(77), config: now, is_clean: true };
        let expected = Err((1, LegError::Removed { leg: 2 }));
        assert_eq!(assemble(&[torn, store]), expected);
        assert_eq!(assemble(&[torn]).unwrap().in_sync, LegSet::EMPTY);
        assert_eq!(assemble(&[holder(0, now), torn]).unwrap().in_sync, A);
    }

    #[test]
    fn a_leg_that_has_missed_more_than_the_map_knows_is_refused() {
        let mut config = both();
        for epoch in [6, 7] {
            let covered_from = config.covered_after();
            config = Config { covered_from, ..config.next(epoch, A.with(B), A.with(B)) };
        }
        assert_eq!(config.covered_from, 6);
        let found = assemble(&[holder(0, config), holder(1, both())]);
        assert_eq!(found, Err((1, LegError::TooOld { epoch: 5, covered_from: 6 })));
        let alone = permitted(config.next(8, A.with(B), A).next(9, A.with(B), A));
        assert_eq!(config.covered_after(), 7);
        assert_eq!(assemble(&[holder(0, alone), holder(1, config)]).unwrap().in_sync, A);
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
