//! Epochs: legs that have failed leave, and legs that were copied to come.

use super::{Keeper, RETRY};
use crate::disk::Wait;
use crate::epoch::{Config, Quorum};
use crate::error::Waits;
use crate::header::{Header, MAX_NUMBER, slot_bytes};
use crate::legs::LegSet;
use crate::rules::Rule;
use crate::witness::Claim;

impl Keeper {
    /// Decides about legs that have failed, and begins an epoch without them; or has requests wait
    /// and says why.
    pub(super) fn settle(&mut self, wait: &mut dyn Wait) {
        self.pause(wait);
        let failed = std::mem::take(&mut self.failed);
        // The last leg's errors are the guest's: nothing would be left without it.
        let spared = match failed.and(self.in_sync) == self.in_sync {
            true => self.in_sync.lowest().map_or(LegSet::EMPTY, LegSet::of),
            false => LegSet::EMPTY,
        };
        let was = self.in_sync;
        for leg in failed.without(spared).numbers() {
            self.drop_leg(leg);
        }
        if self.in_sync == was && self.has_run && self.waits.is_none() {
            return self.publish();
        }
        if !self.has_run {
            // Marks of several legs were put together.
            self.write_whole_map(self.in_sync, wait);
        }
        let (members, in_sync) = (self.config.members, self.in_sync);
        let installed = self.install(members, in_sync, wait);
        self.conclude(installed, wait);
    }

    /// Goes on by a new epoch, or waits.
    pub(super) fn conclude(&mut self, installed: Result<(), Waits>, wait: &mut dyn Wait) {
        match installed {
            Ok(()) => {
                if let Some(waits) = self.waits.take() {
                    tracing::info!("the mirror goes on; it had waited: {waits}");
                }
                self.has_run = true;
                self.publish();
            }
            Err(waits) => {
                if self.waits.as_ref() != Some(&waits) {
                    tracing::warn!("the mirror waits: {waits}");
                }
                self.waits = Some(waits);
                self.end_permission();
                self.next_try = wait.now().after(RETRY);
            }
        }
    }

    /// Puts an epoch in force. Legs that fail meanwhile leave.
    pub(super) fn install(
        &mut self,
        members: LegSet,
        in_sync: LegSet,
        wait: &mut dyn Wait,
    ) -> Result<(), Waits> {
        let config = self.config;
        self.install_after(&config, (members, in_sync), wait)
    }

    /// [`install`](Self::install), after the newest epoch with a store that joins it.
    pub(super) fn install_after(
        &mut self,
        before: &Config,
        (members, in_sync): (LegSet, LegSet),
        wait: &mut dyn Wait,
    ) -> Result<(), Waits> {
        let mut wanted = in_sync;
        loop {
            let present = self.present();
            wanted = wanted.and(present);
            if wanted.is_empty() {
                return Err(Waits::Bytes { missing: self.config.in_sync.without(self.in_sync) });
            }
            let epoch = self.highest.max(self.config.epoch).saturating_add(1);
            // A header with a larger one cannot be read.
            if epoch >= MAX_NUMBER {
                return Err(Waits::Numbers);
            }
            let is_permitted = self.may_begin(epoch, members, wanted, present)?;
            let mut next = before.next(epoch, members, wanted);
            next.is_permitted = is_permitted;
            if !is_permitted {
                // Before its first header: a leg that has that one may go on elsewhere, also if
                // the epoch is never in force.
                self.end_permission();
            }
            // An epoch that was found need not have been in force.
            if self.has_run && members == self.config.members {
                next.covered_from = self.config.covered_after();
            }
            self.highest = epoch;
            // Those in sync before come first: if a copied leg had it alone, it could go on with it
            // while the others go on without.
            let first = wanted.and(self.config.in_sync);
            let mut failed = LegSet::EMPTY;
            for group in [first, wanted.without(first), present.without(wanted)] {
                failed = failed.with(self.write_headers(&next, group, false, wait));
                if !failed.and(wanted).is_empty() {
                    break;
                }
            }
            // The last one is tried again: nothing would be left without it.
            let last = if wanted.is_within(failed) { wanted.lowest() } else { None };
            let dropped = failed.without(last.map_or(LegSet::EMPTY, LegSet::of));
            dropped.numbers().for_each(|leg| self.drop_leg(leg));
            if let Some(leg) = last {
                self.in_sync = LegSet::of(leg);
                return Err(Waits::Write { leg });
            }
            if failed.is_empty() {
                self.config = next;
                self.in_sync = wanted;
                for leg in wanted.numbers() {
                    if let Some(disk) = self.disk(leg) {
                        disk.wait_for_store();
                    }
                }
                return Ok(());
            }
        }
    }

    /// Has the next epoch of half of the legs need another permission.
    fn end_permission(&mut self) {
        if self.shared.neglected.keeps(Rule::PermitOnce) {
            self.excused = LegSet::EMPTY;
        }
    }

    /// Whether these legs may begin an epoch. True if a witness had to permit it.
    fn may_begin(
        &self,
        epoch: u64,
        members: LegSet,
        in_sync: LegSet,
        present: LegSet,
    ) -> Result<bool, Waits> {
        let config = &self.config;
        let quorum_of = |voters: LegSet| Config::quorum(voters, present);
        // The newest epoch may have been found, and need not have been in force: its legs alone do
        // not decide before those of the epoch before have.
        let quorum = [members, config.members, config.former].map(quorum_of);
        let quorum = quorum.into_iter().min().unwrap_or(Quorum::Minority);
        if !self.shared.neglected.keeps(Rule::Permission) {
            return Ok(quorum < Quorum::Majority);
        }
        let missing = config.former.with(config.members).with(members).without(present);
        match quorum {
            Quorum::Majority => Ok(false),
            Quorum::Minority => Err(Waits::Legs { missing }),
            // The operator has answered for the missing legs, and no epoch has had them since.
            Quorum::Half if !missing.is_empty() && missing.is_within(self.excused) => Ok(true),
            Quorum::Half => {
                let claim = Claim {
                    mirror: self.identity.uuid,
                    held: self.config.epoch,
                    epoch,
                    legs: in_sync,
                };
                let answer = self.options.witness.may_go_on_alone(&claim);
                answer.map(|()| true).map_err(|reason| Waits::Permission { missing, reason })
            }
        }
    }

    /// Writes headers, durably. Returns the legs that failed.
    ///
    /// A write that failed may have reached the leg in part. So the slot of the newest header that
    /// is durable is not written before another one is.
    pub(super) fn write_headers(
        &mut self,
        config: &Config,
        legs: LegSet,
        is_clean: bool,
        wait: &mut dyn Wait,
    ) -> LegSet {
        let is_read = |leg: &usize| self.legs.get(*leg).is_some_and(|leg| leg.is_only_read);
        let read = legs.numbers().filter(is_read);
        let read = read.map(LegSet::of).fold(LegSet::EMPTY, LegSet::with);
        // The header that was read may lie in a cache.
        let mut failed = self.on_each(read, wait, |disk, now| disk.begin_flush(now));
        for number in legs.without(failed).numbers() {
            let leg = self.legs.get(number);
            if leg.is_some_and(|leg| next_generation(leg.tried, leg.durable) >= MAX_NUMBER) {
                self.blame(number, "the numbers of its headers are used up".to_owned());
                failed = failed.with(LegSet::of(number));
            }
        }
        let legs_left = legs.without(failed);
        let identity = self.identity;
        let mut headers = Vec::new();
        for number in legs_left.numbers() {
            let leg = self.legs.get_mut(number).filter(|leg| leg.disk.is_some());
            let Some(leg) = leg else { continue };
            leg.tried = next_generation(leg.tried, leg.durable);
            leg.is_only_read = false;
            (leg.held, leg.is_clean) = (Some(*config), is_clean);
            let (generation, config) = (leg.tried, *config);
            let (leg, store) = (number, leg.store);
            headers.push(Header { identity, leg, store, generation, config, is_clean });
        }
        let mut headers = headers.into_iter();
        let unwritten = self.on_each(legs_left, wait, |disk, now| {
            if let Some(header) = headers.next() {
                disk.begin_write(now, slot_bytes(header.generation), &header.encode());
            }
        });
        let others = legs_left.without(unwritten);
        let unflushed = self.on_each(others, wait, |disk, now| disk.begin_flush(now));
        for number in others.without(unflushed).numbers() {
            if let Some(leg) = self.legs.get_mut(number) {
                leg.durable = leg.tried;
            }
        }
        failed.with(unwritten).with(unflushed)
    }
}

/// The generation after all that were tried, whose slot is not that of the generation `safe`.
fn next_generation(tried: u64, safe: u64) -> u64 {
    let next = tried.max(safe).saturating_add(1);
    if slot_bytes(next) == slot_bytes(safe) { next.saturating_add(1) } else { next }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_of_a_durable_header_is_kept_until_another_one_is_durable() {
        assert_eq!(next_generation(4, 4), 5);
        assert_eq!(next_generation(5, 4), 7, "the write of 5 has failed");
        assert_eq!(next_generation(7, 4), 9);
        assert_eq!(next_generation(7, 7), 8);
        assert_eq!(next_generation(0, 0), 1);
    }
}
