//! A plan for the snapshots of one volume, carried out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sidecore_schedule::{Plan, Unchanged, plan, time_of};
use sidecore_volume::{VolumeId, VolumeInfo};

use super::{Schedules, VolumeState};
use crate::controllers::ControllerHandle;
use crate::operation::{ErrorKind, OperationError};
use crate::report::{HeldReport, ScheduledVolumeReport};
use crate::spec::ScheduleSpec;

/// A look at one volume.
pub(super) struct Run<'a> {
    pub(super) schedules: &'a Schedules,
    pub(super) controller: &'a ControllerHandle,
    /// All schedules of this look.
    pub(super) specs: &'a Arc<Vec<ScheduleSpec>>,
    pub(super) spec: &'a ScheduleSpec,
    pub(super) volume: &'a VolumeInfo,
    /// All volumes of the controller.
    pub(super) volumes: &'a [VolumeInfo],
}

/// The result.
#[derive(Default)]
pub(super) struct Ran {
    pub(super) unchanged: Option<Unchanged>,
    pub(super) made: bool,
    pub(super) deleted: u64,
    /// The controller is ending, which is no failure.
    pub(super) is_ending: bool,
    pub(super) report: ScheduledVolumeReport,
}

impl Ran {
    fn fail(&mut self, error: OperationError) {
        match error.kind {
            ErrorKind::Ending => self.is_ending = true,
            _ => self.report.error = Some(error.message),
        }
    }
}

impl Run<'_> {
    /// Makes the snapshot that is due, if one is, and then deletes those that have expired. Each
    /// step is durable before the next one begins, and the snapshots are all of the state: a
    /// process that is killed leaves the rest to the next look.
    pub(super) fn run(&self, now: u64, before: &VolumeState) -> Ran {
        let snapshots = self.snapshots(self.volumes);
        let times: Vec<u64> = snapshots.iter().map(|(at, _)| *at).collect();
        let mut ran = Ran { unchanged: before.unchanged, ..Ran::default() };
        let mut next = plan(now, &times, &self.spec.keep, ran.unchanged);
        if next.create {
            let same = self.same_as(&snapshots);
            ran.unchanged = same.map(|since| Unchanged { at: now, since });
            next = plan(now, &times, &self.spec.keep, ran.unchanged);
            ran.unchanged = ran.unchanged.filter(|_| !next.create);
        }
        match self.controller.read_only() {
            Some(why) => ran.report.error = Some(why),
            None => self.carry_out(now, &next, &snapshots, &mut ran),
        }
        let has_failed = ran.report.error.is_some() || ran.is_ending;
        if before.report.error.is_some() && !has_failed && !ran.made && ran.deleted == 0 {
            // The step that failed last may have been made, and not be durable.
            self.controller.settle_changes().unwrap_or_else(|error| ran.fail(error));
        }
        // The step that has just failed may be its reason.
        ran.report.error = ran.report.error.take().or_else(|| self.controller.read_only());
        let newest = times.iter().copied().chain(ran.made.then_some(now / 60 * 60)).max();
        ran.report = ScheduledVolumeReport {
            volume: self.volume.name.clone(),
            controller: self.controller.name().to_owned(),
            snapshots: (times.len() as u64)
                .saturating_add(ran.made.into())
                .saturating_sub(ran.deleted),
            newest_unix_s: newest,
            unchanged: ran.unchanged.is_some(),
            later: next.later as u64,
            ..ran.report
        };
        ran
    }

    fn carry_out(&self, now: u64, next: &Plan, snapshots: &[(u64, &VolumeInfo)], ran: &mut Ran) {
        if next.create {
            match self.controller.snapshot_of_schedule(self.volume, now) {
                Ok(()) => ran.made = true,
                // Without the new one, the old ones are needed.
                Err(error) => return ran.fail(error),
            }
        }
        if !next.delete.is_empty() {
            self.delete(&next.delete, snapshots, ran);
        }
    }

    /// The snapshots of the volume that schedules have made, with their times.
    fn snapshots<'b>(&self, volumes: &'b [VolumeInfo]) -> Vec<(u64, &'b VolumeInfo)> {
        let its = |info: &&VolumeInfo| info.read_only && info.origin == Some(self.volume.id);
        let snapshots = volumes.iter().filter(its);
        snapshots.filter_map(|info| Some((time_of(&info.name)?, info))).collect()
    }

    /// The time of the snapshot of the volume that was made last, whatever the clock said, if the
    /// volume is as in it.
    fn same_as(&self, snapshots: &[(u64, &VolumeInfo)]) -> Option<u64> {
        let (at, newest) = snapshots.iter().max_by_key(|(_, snapshot)| snapshot.id)?;
        self.controller.is_unchanged_since(self.volume.id, newest.id).then_some(*at)
    }

    /// Deletes expired snapshots, up to a change of the schedules.
    fn delete(&self, expired: &[u64], snapshots: &[(u64, &VolumeInfo)], ran: &mut Ran) {
        // The list is from the beginning of the look, which may have lasted.
        let volumes = self.controller.infos();
        let there: BTreeSet<(u64, VolumeId)> =
            self.snapshots(&volumes).iter().map(|(at, info)| (*at, info.id)).collect();
        if snapshots.iter().any(|(at, info)| !there.contains(&(*at, info.id))) {
            // An operator has deleted or renamed some of those that were to be kept, perhaps.
            return;
        }
        let configured = self.schedules.configured(self.controller.name());
        for (_, snapshot) in snapshots.iter().filter(|(at, _)| expired.contains(at)) {
            if !self.schedules.are(self.specs) {
                return;
            }
            let reason = match need(snapshot, &volumes, &configured) {
                Some(reason) => reason,
                None => match self.controller.delete_volume(&snapshot.name) {
                    Ok(()) => {
                        let (controller, volume) = (self.controller.name(), &self.volume.name);
                        let snapshot = &snapshot.name;
                        tracing::info!(controller, volume, snapshot, "expired snapshot deleted");
                        ran.deleted = ran.deleted.saturating_add(1);
                        continue;
                    }
                    // An operator was faster.
                    Err(error) if error.kind == ErrorKind::NotFound => continue,
                    Err(error) if error.kind == ErrorKind::Conflict => error.message,
                    Err(error) => return ran.fail(error),
                },
            };
            ran.report.held.push(HeldReport { snapshot: snapshot.name.clone(), reason });
        }
    }
}

/// The part that needs a snapshot and would not keep the controller from deleting it.
fn need(
    snapshot: &VolumeInfo,
    volumes: &[VolumeInfo],
    configured: &BTreeMap<String, String>,
) -> Option<String> {
    let copy = volumes.iter().find(|info| info.origin == Some(snapshot.id));
    let copy = copy.map(|copy| format!("volume \"{}\" was made from it", copy.name));
    copy.or_else(|| {
        let store = configured.get(&snapshot.name)?;
        Some(format!("store \"{store}\" is configured on it"))
    })
}
