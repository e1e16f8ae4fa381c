//! `sidecore schedule`: snapshots that are made and deleted by the clock.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Subcommand;
use sidecore_control::report::{ScheduleReport, ScheduledVolumeReport};
use sidecore_control::{Client, Config, Depth, NewSchedules, Schedules};

use crate::table::Table;
use crate::units::{count, time};
use crate::{print, print_json};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// List the schedules: their next times, their last results and their volumes. Times are UTC.
    List,
    /// Make the snapshots that are due, and delete those that have expired, now.
    ///
    /// The daemon does so every minute: this is of use after a failure whose cause is gone.
    Run,
    /// Replace the schedules of the daemon by those of a configuration file.
    ///
    /// Only its sections "schedule" are taken. The snapshots that there are stay, and those that
    /// have expired by the new rules are deleted within a minute.
    Load {
        /// The configuration file.
        config: PathBuf,
    },
}

pub(crate) fn run(client: &Client, arguments: Arguments) -> Result<()> {
    let json = arguments.json;
    match arguments.command {
        Action::List => show(client.schedules()?, json),
        Action::Run => {
            let schedules = client.run_schedules()?;
            let failing: usize = schedules.iter().map(|schedule| failing(schedule).count()).sum();
            show(schedules, json)?;
            if failing > 0 {
                bail!("{} failed: see above", count(failing, "volume"));
            }
            Ok(())
        }
        Action::Load { config } => {
            let Ok(config) =
                Config::load(&config, Depth::Text).map_err(|faults| eprintln!("{faults}"))
            else {
                bail!("the schedules of the daemon are as before");
            };
            client.set_schedules(&NewSchedules::of(&config.spec))?;
            show(client.schedules()?, json)
        }
    }
}

fn show(schedules: Vec<ScheduleReport>, json: bool) -> Result<()> {
    if json {
        return print_json(&Schedules { schedules });
    }
    Ok(print(&text(&schedules))?)
}

fn failing(schedule: &ScheduleReport) -> impl Iterator<Item = &ScheduledVolumeReport> {
    schedule.volumes.iter().filter(|volume| volume.error.is_some())
}

fn text(schedules: &[ScheduleReport]) -> String {
    if schedules.is_empty() {
        return "there are no schedules: add a [[schedule]] to the configuration\n".to_owned();
    }
    let mut table = Table::new(&[
        "SCHEDULE",
        "VOLUMES",
        "KEEP",
        "NEXT (UTC)",
        "LAST SUCCESS",
        ">MADE",
        ">DELETED",
        ">FAILURES",
    ]);
    let at = |time_s: Option<u64>| time_s.map_or_else(|| "-".to_owned(), time);
    for schedule in schedules {
        table.row([
            schedule.name.clone(),
            schedule.patterns.join(","),
            schedule.keep.clone(),
            time(schedule.next_unix_s),
            at(schedule.last_success_unix_s),
            schedule.made.to_string(),
            schedule.deleted.to_string(),
            schedule.failures.to_string(),
        ]);
    }
    let mut volumes =
        Table::new(&["VOLUME", "CONTROLLER", "SCHEDULE", ">SNAPSHOTS", "NEWEST (UTC)", "STATE"]);
    let mut notes = String::new();
    for schedule in schedules {
        if let Some(warning) = &schedule.warning {
            notes.push_str(&format!("schedule \"{}\": {warning}\n", schedule.name));
        }
        for volume in &schedule.volumes {
            volumes.row([
                volume.volume.clone(),
                volume.controller.clone(),
                schedule.name.clone(),
                volume.snapshots.to_string(),
                at(volume.newest_unix_s),
                state(volume).to_owned(),
            ]);
            notes.push_str(&remarks(volume));
        }
    }
    let has_volumes = schedules.iter().any(|schedule| !schedule.volumes.is_empty());
    let volumes = if has_volumes { format!("\n{}", volumes.render()) } else { String::new() };
    let gap = if notes.is_empty() { "" } else { "\n" };
    table.render() + &volumes + gap + &notes
}

fn state(volume: &ScheduledVolumeReport) -> &'static str {
    match (&volume.error, volume.unchanged) {
        (Some(_), _) => "failed",
        (None, true) => "unchanged",
        (None, false) => "ok",
    }
}

/// The lines below the tables about a volume.
fn remarks(volume: &ScheduledVolumeReport) -> String {
    let name = &volume.volume;
    let mut text = String::new();
    if let Some(error) = &volume.error {
        text.push_str(&format!("volume \"{name}\": {error}\n"));
    }
    for held in &volume.held {
        let (snapshot, reason) = (&held.snapshot, &held.reason);
        text.push_str(&format!("snapshot \"{snapshot}\" has expired, and is kept: {reason}\n"));
    }
    if volume.later > 0 {
        let later = count(volume.later as usize, "snapshot");
        text.push_str(&format!(
            "volume \"{name}\": {later} from later than now: the clock was ahead, or is behind\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use sidecore_control::report::HeldReport;

    use super::*;

    #[test]
    fn a_list_has_times_states_and_remarks() {
        let volume = ScheduledVolumeReport {
            volume: "vm1".to_owned(),
            controller: "pool".to_owned(),
            snapshots: 3,
            newest_unix_s: Some(951_782_400),
            ..ScheduledVolumeReport::default()
        };
        let failed = ScheduledVolumeReport {
            volume: "vm2".to_owned(),
            error: Some("no space".to_owned()),
            later: 1,
            held: vec![HeldReport { snapshot: "s1".to_owned(), reason: "it is in use".to_owned() }],
            newest_unix_s: None,
            ..volume.clone()
        };
        let schedule = ScheduleReport {
            name: "all".to_owned(),
            patterns: vec!["vm*".to_owned(), "db".to_owned()],
            keep: "3 hourly".to_owned(),
            next_unix_s: 951_786_000,
            last_success_unix_s: None,
            made: 5,
            deleted: 2,
            failures: 1,
            warning: Some("no volume".to_owned()),
            volumes: vec![volume, failed],
            controller: None,
        };
        assert_eq!(
            text(&[schedule]),
            "SCHEDULE  VOLUMES  KEEP      NEXT (UTC)           LAST SUCCESS  \
             MADE  DELETED  FAILURES\n\
             all       vm*,db   3 hourly  2000-02-29 01:00:00  -             \
             \x20  5        2         1\n\
             \n\
             VOLUME  CONTROLLER  SCHEDULE  SNAPSHOTS  NEWEST (UTC)         STATE\n\
             vm1     pool        all               3  2000-02-29 00:00:00  ok\n\
             vm2     pool        all               3  -                    failed\n\
             \n\
             schedule \"all\": no volume\n\
             volume \"vm2\": no space\n\
             snapshot \"s1\" has expired, and is kept: it is in use\n\
             volume \"vm2\": 1 snapshot from later than now: the clock was ahead, or is behind\n"
        );
        assert!(text(&[]).contains("there are no schedules"));
    }
}
