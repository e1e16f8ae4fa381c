//! Copies of regions: to a leg that is behind, at a limited rate, and from one leg to repair
//! another.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sidecore_block::BlockError;
use sidecore_units::Nanos;

use super::{Copying, Keeper, LOOK, RETRY};
use crate::disk::{BUFFER_BYTES, Wait};
use crate::legs::LegSet;
use crate::rules::Rule;

/// Why a copy was not made: the leg that failed, if one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    From(BlockError),
    To(BlockError),
    /// The mirror is to end.
    Ending,
}

impl Keeper {
    /// Copies a region, or begins or ends a copy. Returns the time until the next step.
    pub(super) fn copy_some(&mut self, wait: &mut dyn Wait) -> Duration {
        let Some(copying) = &mut self.copying else { return self.begin_copy(wait) };
        let now = wait.now();
        if now < copying.next_at {
            return Duration::from(copying.next_at.since(now));
        }
        let leg = copying.leg;
        let Some(region) = copying.left.pop_front() else { return self.end_copy(leg, wait) };
        let (offset_bytes, len_bytes) = self.identity.layout.range_of(region);
        let copied = self.copy_shut(&[region], (offset_bytes, len_bytes), leg, wait);
        let pause = match copied {
            Ok(false) => {
                if let Some(copying) = &mut self.copying {
                    copying.left.push_front(region);
                }
                return Duration::ZERO;
            }
            Ok(true) => {
                self.copied_regions = self.copied_regions.saturating_add(1);
                self.copied_bytes = self.copied_bytes.saturating_add(len_bytes);
                let per_s = self.options.copy_bytes_per_s.max(1);
                Nanos(len_bytes.saturating_mul(1_000_000_000).checked_div(per_s).unwrap_or(0))
            }
            Err(Broken::To(error)) => {
                self.blame(leg, format!("a copy to it: {error}"));
                self.failed = self.failed.with(LegSet::of(leg));
                return Duration::ZERO;
            }
            Err(Broken::Ending) => {
                if let Some(copying) = &mut self.copying {
                    copying.left.push_front(region);
                }
                return LOOK;
            }
            Err(Broken::From(error)) => {
                tracing::warn!(region, "no leg in sync can read a region to copy: {error}");
                if let Some(copying) = &mut self.copying {
                    copying.left.push_back(region);
                }
                RETRY
            }
        };
        let Some(copying) = &mut self.copying else { return Duration::ZERO };
        copying.next_at = now.after(pause);
        Duration::from(pause)
    }

    /// Whether a queue holds a part that a leg has failed.
    fn has_held(&self) -> bool {
        self.shared.gauges().iter().any(|gauge| gauge.has_held())
    }

    /// Begins to copy to a leg that is behind, if there is one.
    fn begin_copy(&mut self, wait: &mut dyn Wait) -> Duration {
        let behind = self.present().and(self.config.members).without(self.in_sync);
        let Some(leg) = behind.lowest() else { return LOOK };
        if self.has_held() {
            // A queue has not seen that the leg had left, and would have it fail again.
            return Duration::from(Nanos::from_millis(1));
        }
        // No write may be in flight by a plan without this leg, to a region that is equal on it.
        self.pause(wait);
        let left = self.map.dirty().collect();
        self.shared.equal.clear_all();
        for region in (0..self.identity.layout.regions()).filter(|at| !self.map.is_dirty(*at)) {
            self.shared.equal.set(region);
        }
        self.copying = Some(Copying { leg, left, next_at: wait.now() });
        tracing::info!(leg, regions = self.map.count(), "begins to copy to a leg");
        self.publish();
        Duration::ZERO
    }

    /// Has a leg that is equal in all regions come in sync.
    fn end_copy(&mut self, leg: usize, wait: &mut dyn Wait) -> Duration {
        self.pause(wait);
        let holds = self.has_held();
        let is_whole = self.copying.as_ref().is_some_and(|copying| copying.left.is_empty());
        if !self.failed.is_empty() || holds || !is_whole {
            // A leg has failed, a queue has not seen that one has left, or a write has failed.
            self.publish();
            return Duration::from(Nanos::from_millis(1));
        }
        // Its map becomes that of the legs in sync. One flush is for the map and for the copies.
        let legs = LegSet::of(leg);
        let mut failed = self.write_map(legs, &self.all_blocks(), wait);
        if failed.is_empty() && self.shared.neglected.keeps(Rule::FlushThenSync) {
            failed = self.on_each(legs, wait, |disk, now| disk.begin_flush(now));
        }
        if !failed.is_empty() {
            self.drop_leg(leg);
        }
        self.copying = None;
        if !self.present().has(leg) {
            self.publish();
            return Duration::ZERO;
        }
        let (members, in_sync) = (self.config.members, self.in_sync.with(legs));
        let installed = self.install(members, in_sync, wait);
        tracing::info!(leg, epoch = self.config.epoch, "a leg was copied to");
        self.conclude(installed, wait);
        Duration::ZERO
    }

    /// Copies a range that lies in some regions to a leg, while no write to them is in flight.
    /// False, and nothing copied, if a leg has failed that may have missed one: first the keeper
    /// decides about it.
    pub(super) fn copy_shut(
        &mut self,
        regions: &[usize],
        range: (u64, u64),
        to: usize,
        wait: &mut dyn Wait,
    ) -> Result<bool, Broken> {
        let were_open = self.shut(regions, wait);
        if !self.failed.is_empty() {
            self.reopen(&were_open);
            return Ok(false);
        }
        let mut from = self.in_sync.without(LegSet::of(to));
        let result = loop {
            let preferred = Some(self.shared.plan().read).filter(|leg| from.has(*leg));
            let Some(leg) = preferred.or(from.lowest()) else {
                break Err(Broken::From(BlockError::EIO));
            };
            match self.copy_range((leg, to), range, wait) {
                Err(Broken::From(_)) => from = from.without(LegSet::of(leg)),
                other => break other,
            }
        };
        if result.is_ok() && self.copying.as_ref().is_some_and(|copying| copying.leg == to) {
            regions.iter().for_each(|region| self.shared.equal.set(*region));
        }
        self.reopen(&were_open);
        result.map(|()| true)
    }

    /// Copies a range of one leg to another. Each leg is in sync, or marked dirty there: the rest
    /// of a copy that is given up is made at the next start.
    pub(super) fn copy_range(
        &mut self,
        (from, to): (usize, usize),
        (offset_bytes, len_bytes): (u64, u64),
        wait: &mut dyn Wait,
    ) -> Result<(), Broken> {
        let mut buffer = vec![0; usize::try_from(BUFFER_BYTES.min(len_bytes)).unwrap_or(0)];
        let mut done = 0_u64;
        while done < len_bytes {
            if self.shared.is_ending.load(Ordering::Acquire) {
                return Err(Broken::Ending);
            }
            let count = BUFFER_BYTES.min(len_bytes.saturating_sub(done));
            let piece = usize::try_from(count).ok().and_then(|count| buffer.get_mut(..count));
            let piece = piece.ok_or(Broken::From(BlockError::EIO))?;
            let start = self.identity.layout.data_bytes.saturating_add(offset_bytes);
            let at = start.saturating_add(done);
            let source = self.disk(from).ok_or(Broken::From(BlockError::EIO))?;
            source.read(wait, at, piece).map_err(Broken::From)?;
            let target = self.disk(to).ok_or(Broken::To(BlockError::EIO))?;
            target.write(wait, at, piece).map_err(Broken::To)?;
            done = done.saturating_add(count);
        }
        Ok(())
    }
}
