//! The metrics of schedules of snapshots.

use sidecore_assembly::report::{ScheduleReport, ScheduledVolumeReport};
use sidecore_telemetry::{Kind, Metric, Value};

use super::{Page, gauge};

const fn counter(
    name: &'static str,
    help: &'static str,
    value: fn(&ScheduleReport) -> Value,
) -> Metric<ScheduleReport> {
    Metric { field: "", name: Some(name), kind: Kind::Counter, help, value }
}

fn sum(schedule: &ScheduleReport, of: fn(&ScheduledVolumeReport) -> u64) -> Value {
    Value::Whole(schedule.volumes.iter().map(of).fold(0, u64::saturating_add))
}

const SCHEDULES: &[Metric<ScheduleReport>] = &[
    gauge(
        "last_success_timestamp_seconds",
        "The last time, in seconds since 1970, that all of its volumes were found to have their \
         snapshots; 0 for never, and while a controller is not open. They are looked at every \
         minute.",
        |s| Value::Whole(s.last_success_unix_s.unwrap_or(0)),
    ),
    gauge(
        "next_timestamp_seconds",
        "The time of its next snapshots, in seconds since 1970.",
        |s| Value::Whole(s.next_unix_s),
    ),
    gauge("volumes", "Its volumes.", |s| Value::Whole(s.volumes.len() as u64)),
    gauge("failing_volumes", "Volumes at which the last attempt failed.", |s| {
        sum(s, |volume| volume.error.is_some().into())
    }),
    gauge("snapshots", "Snapshots of its volumes that schedules have made.", |s| {
        sum(s, |volume| volume.snapshots)
    }),
    gauge(
        "held_snapshots",
        "Expired snapshots that are kept, because something needs them.",
        |s| sum(s, |volume| volume.held.len() as u64),
    ),
    gauge(
        "later_snapshots",
        "Snapshots from later than now, which are left alone: the clock was ahead, or is behind.",
        |s| sum(s, |volume| volume.later),
    ),
    counter("made_total", "Snapshots made.", |s| Value::Whole(s.made)),
    counter("deleted_total", "Expired snapshots deleted.", |s| Value::Whole(s.deleted)),
    counter("failures_total", "Attempts that failed; each is repeated every minute.", |s| {
        Value::Whole(s.failures)
    }),
];

impl Page {
    pub(super) fn schedules(&mut self, schedules: &[ScheduleReport]) {
        let labelled =
            schedules.iter().map(|schedule| (vec![("schedule", schedule.name.as_str())], schedule));
        self.metrics("sidecore_schedule_", SCHEDULES, labelled);
    }
}
