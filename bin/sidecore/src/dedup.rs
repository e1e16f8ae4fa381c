//! `sidecore volume dedup`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use sidecore_control::report::{DedupPhase, DedupReport};
use sidecore_control::{Client, Dedup};

use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::units::bytes;
use crate::{print, print_json};

/// The time between two looks at the progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The arguments of `sidecore volume dedup`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The volumes, each with its snapshots and clones, and those that it was made from. All by
    /// default.
    volumes: Vec<String>,
    /// Change nothing, and say what would be saved.
    #[arg(long)]
    dry_run: bool,
    /// Also let blocks become one of volumes that are not copies of each other. Their guests can
    /// then find out, by the time that writes take, which contents the others have.
    #[arg(long)]
    across: bool,
    /// The most MiB to read in a second while guests make few requests; while they make many, an
    /// eighth of it.
    #[arg(long, value_name = "MIB", default_value_t = 128,
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    rate: u64,
    /// Do not wait for the end.
    #[arg(long)]
    background: bool,
    /// Show the run in progress, or the last one.
    #[arg(long, conflicts_with_all = ["volumes", "dry_run", "across", "rate", "background"])]
    status: bool,
    /// Stop the run in progress. Blocks that have become one stay so.
    #[arg(
        long,
        conflicts_with_all = ["volumes", "dry_run", "across", "rate", "background", "status"]
    )]
    stop: bool,
}

pub(crate) fn run(
    client: &Client,
    controller: &str,
    arguments: Arguments,
    json: bool,
) -> Result<ExitCode> {
    if arguments.status {
        return show(&client.dedup(controller)?, json);
    }
    if arguments.stop {
        return show(&client.stop_dedup(controller)?, json);
    }
    let interrupt = Interrupt::listen()?;
    let request = Dedup {
        volumes: arguments.volumes,
        across: arguments.across,
        dry_run: arguments.dry_run,
        rate_bytes_per_s: Some(arguments.rate << 20),
    };
    let started = client.start_dedup(controller, &request)?;
    if arguments.background {
        return show(&started, json);
    }
    show(&follow(client, controller, &started, &interrupt)?, json)
}

/// Shows the progress until the run's end. A signal stops the run.
fn follow(
    client: &Client,
    controller: &str,
    started: &DedupReport,
    interrupt: &Interrupt,
) -> Result<DedupReport> {
    let what = if started.dry_run { "looking for equal blocks" } else { "deduplicating" };
    let mut progress = Progress::new(what, started.counts.total_bytes);
    loop {
        let report = if interrupt.has_come() {
            client.stop_dedup(controller)?
        } else {
            client.dedup(controller)?
        };
        progress.set(report.counts.passed_bytes);
        match report.state {
            DedupPhase::Running => std::thread::sleep(LOOK_INTERVAL),
            DedupPhase::Done => {
                progress.finish();
                return Ok(report);
            }
            DedupPhase::Stopped | DedupPhase::Failed => return Ok(report),
        }
    }
}

/// Prints a report. A run that has ended early is a failure.
fn show(report: &DedupReport, json: bool) -> Result<ExitCode> {
    if json {
        print_json(report)?;
    } else {
        print(&text(report))?;
    }
    Ok(match report.state {
        DedupPhase::Running | DedupPhase::Done => ExitCode::SUCCESS,
        DedupPhase::Stopped | DedupPhase::Failed => ExitCode::FAILURE,
    })
}

fn text(report: &DedupReport) -> String {
    let state = match (report.state, &report.reason) {
        (DedupPhase::Running, _) if report.yields => "in progress, slower because guests are busy",
        (DedupPhase::Running, _) => "in progress",
        (DedupPhase::Done, _) => "done",
        (DedupPhase::Stopped, _) => "stopped",
        (DedupPhase::Failed, Some(why)) => &format!("failed: {why}"),
        (DedupPhase::Failed, None) => "failed",
    };
    let saved = if report.dry_run { "would save" } else { "saved" };
    let mut text = format!(
        "{state}: controller \"{}\", {} of {} in {:.1} s; {saved} {}",
        report.controller,
        bytes(report.counts.passed_bytes),
        bytes(report.counts.total_bytes),
        report.seconds,
        bytes(report.counts.saved_bytes)
    );
    if report.counts.zero_bytes > 0 {
        text.push_str(&format!(", {} of it zeros", bytes(report.counts.zero_bytes)));
    }
    text.push('\n');
    let left = [
        (report.counts.busy_bytes, "of equal blocks were in use, and left: run it again"),
        (
            report.counts.kept_bytes,
            "of equal blocks are kept by other volumes or many snapshots, and left",
        ),
        (report.counts.unreadable_bytes, "could not be read, and were left"),
    ];
    for (count, why) in left.into_iter().filter(|(count, _)| *count > 0) {
        text.push_str(&format!("{} {why}\n", bytes(count)));
    }
    if report.counts.skipped_volumes > 0 {
        let volumes = crate::units::count(report.counts.skipped_volumes as usize, "volume");
        text.push_str(&format!("{volumes} could not be read: `sidecore volume check` says why\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use sidecore_control::report::DedupCounts;

    use super::*;

    #[test]
    fn a_report_says_what_was_saved_and_what_was_left() {
        let report = DedupReport {
            controller: "pool".to_owned(),
            state: DedupPhase::Done,
            seconds: 1.25,
            counts: DedupCounts {
                passed_bytes: 2 << 30,
                total_bytes: 2 << 30,
                saved_bytes: 1 << 30,
                ..DedupCounts::default()
            },
            ..DedupReport::default()
        };
        assert_eq!(text(&report), "done: controller \"pool\", 2GiB of 2GiB in 1.2 s; saved 1GiB\n");
        let report = DedupReport {
            state: DedupPhase::Failed,
            reason: Some("no room".to_owned()),
            dry_run: true,
            counts: DedupCounts {
                zero_bytes: 4096,
                busy_bytes: 8192,
                unreadable_bytes: 512,
                skipped_volumes: 1,
                ..report.counts
            },
            ..report
        };
        assert_eq!(
            text(&report),
            "failed: no room: controller \"pool\", 2GiB of 2GiB in 1.2 s; would save 1GiB, 4KiB of \
             it zeros\n\
             8KiB of equal blocks were in use, and left: run it again\n\
             512B could not be read, and were left\n\
             1 volume could not be read: `sidecore volume check` says why\n"
        );
    }
}
