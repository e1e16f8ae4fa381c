//! Epochs: legs that have failed leave, and legs that were copied to come.

use super::{Keeper, RETRY};
use crate::disk::Wait;
use crate::epoch::{Config, Quorum};
use crate::error::Waits;
use crate::header::{Header, slot_bytes};
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
        let mut wanted = in_sync;
        loop {
            let present = self.present();
            wanted = wanted.and(present);
            if wanted.is_empty() {
                return Err(Waits::Bytes { missing: self.config.in_sync.without(self.in_sync) });
            }
            let epoch = self.highest.max(self.config.epoch).saturating_add(1);
            self.may_begin(epoch, members, wanted, present)?;
            let next = self.config.next(epoch, members, wanted);
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
                return Ok(());
            }
        }
    }

    /// Whether these legs may begin an epoch.
    fn may_begin(
        &self,
        epoch: u64,
        members: LegSet,
        in_sync: LegSet,
        present: LegSet,
    ) -> Result<(), Waits> {
        let old = Config::quorum(self.config.members, present);
        let quorum = old.min(Config::quorum(members, present));
        if !self.shared.neglected.keeps(Rule::Permission) {
            return Ok(());
        }
        let missing = self.config.members.with(members).without(present);
        match quorum {
            Quorum::Majority => Ok(()),
            Quorum::Minority => Err(Waits::Legs { missing }),
            Quorum::Half => {
                let claim = Claim {
                    mirror: self.identity.uuid,
                    held: self.config.epoch,
                    epoch,
                    legs: in_sync,
                };
                let answer = self.options.witness.may_go_on_alone(&claim);
                answer.map_err(|reason| Waits::Permission { missing, reason })
            }
        }
    }

    /// Writes headers, durably. Returns the legs that failed.
    pub(super) fn write_headers(
        &mut self,
        config: &Config,
        legs: LegSet,
        is_clean: bool,
        wait: &mut dyn Wait,
    ) -> LegSet {
        let identity = self.identity;
        let mut headers = Vec::new();
        for number in legs.numbers() {
            let Some(leg) = self.legs.get_mut(number) else { continue };
            leg.generation = leg.generation.saturating_add(1);
            (leg.held, leg.is_clean) = (Some(*config), is_clean);
            let (generation, config) = (leg.generation, *config);
            headers.push(Header { identity, leg: number, generation, config, is_clean });
        }
        let mut headers = headers.into_iter();
        let failed = self.on_each(legs, wait, |disk, now| {
            if let Some(header) = headers.next() {
                disk.begin_write(now, slot_bytes(header.generation), &header.encode());
            }
        });
        let others = legs.without(failed);
        failed.with(self.on_each(others, wait, |disk, now| disk.begin_flush(now)))
    }
}
