//! Reports of schedules.

use std::sync::Arc;

use super::{Counts, OnController, Schedules};
use crate::graph::lock;
use crate::report::ScheduleReport;
use crate::spec::ScheduleSpec;

impl Schedules {
    /// Reports each schedule, in the order of the configuration. Waits for no disk.
    pub(crate) fn report(&self, now_unix_s: u64) -> Vec<ScheduleReport> {
        let specs = Arc::clone(&lock(&self.specs));
        let open: Vec<String> =
            self.controllers.all().iter().map(|open| open.name().to_owned()).collect();
        let closed = self.controllers.closed();
        let states = lock(&self.states);
        let report = |spec: &ScheduleSpec| {
            let is_meant = |name: &str| spec.controller.as_deref().is_none_or(|of| of == name);
            let meant = || states.iter().filter(|(controller, _)| is_meant(controller));
            let counts = meant().fold(None, |sum, (_, state)| Some(add(sum, spec, state)));
            let counts = counts.unwrap_or_default();
            let volumes = meant().flat_map(|(_, state)| state.volumes.values());
            let its = volumes.filter(|volume| volume.schedule == spec.name);
            let mut volumes: Vec<_> = its.map(|volume| volume.report.clone()).collect();
            volumes.sort_by(|one, other| one.volume.cmp(&other.volume));
            let is_looked_at =
                open.iter().filter(|name| is_meant(name)).all(|name| states.contains_key(name));
            let is_missing = volumes.is_empty() && is_looked_at;
            let of_closed = closed.iter().find(|closed| is_meant(&closed.name));
            // A controller that was not looked at yet has no success.
            let is_whole = is_looked_at && of_closed.is_none();
            let warning = of_closed.map(ToString::to_string);
            ScheduleReport {
                name: spec.name.clone(),
                controller: spec.controller.clone(),
                patterns: spec.volumes.clone(),
                keep: spec.keep.to_string(),
                next_unix_s: next(spec, now_unix_s, &volumes),
                last_success_unix_s: counts.last_success_unix_s.filter(|_| is_whole),
                made: counts.made,
                deleted: counts.deleted,
                failures: counts.failures,
                warning: warning.or_else(|| is_missing.then(|| no_volume(spec))),
                volumes,
            }
        };
        specs.iter().map(report).collect()
    }
}

/// The time of the next attempt: a failed one is repeated each minute.
fn next(spec: &ScheduleSpec, now: u64, volumes: &[crate::report::ScheduledVolumeReport]) -> u64 {
    let has_failed = volumes.iter().any(|volume| volume.error.is_some());
    if has_failed { (now / 60).saturating_add(1).saturating_mul(60) } else { spec.keep.next(now) }
}

fn no_volume(spec: &ScheduleSpec) -> String {
    let patterns = spec.volumes.join(", ");
    let place = spec.controller.as_ref().map(|name| format!(" of controller \"{name}\""));
    format!(
        "no volume{} has a name like {patterns} that no schedule before it fits",
        place.unwrap_or_default()
    )
}

/// Adds the counts on one more controller. A success is as old as that of the controller that has
/// succeeded longest ago.
fn add(sum: Option<Counts>, spec: &ScheduleSpec, state: &OnController) -> Counts {
    let more = state.counts.get(&spec.name).copied().unwrap_or_default();
    let Some(sum) = sum else { return more };
    Counts {
        last_success_unix_s: sum.last_success_unix_s.min(more.last_success_unix_s),
        made: sum.made.saturating_add(more.made),
        deleted: sum.deleted.saturating_add(more.deleted),
        failures: sum.failures.saturating_add(more.failures),
    }
}
