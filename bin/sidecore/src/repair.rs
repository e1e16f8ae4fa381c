//! `sidecore volume repair`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use sidecore_control::config::size;
use sidecore_control::offline;
use sidecore_control::report::RepairReport;

use crate::units::count;
use crate::{FAULTS, print, print_json};

/// The arguments of `sidecore volume repair`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The file or block device, which no daemon may have open.
    path: PathBuf,
    /// Carry out the repair, and give up the data that is listed as lost.
    #[arg(long)]
    yes: bool,
    /// A volume that gives up its blocks which another volume claims, too; repeat the option for
    /// several.
    #[arg(long, value_name = "VOLUME")]
    lose: Vec<String>,
    /// Repair the store of a killed daemon whose log of answered changes has not been replayed,
    /// too.
    #[arg(long)]
    accept_loss: bool,
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<ExitCode> {
    let options = offline::RepairOptions {
        losers: arguments.lose.clone(),
        carry_out: arguments.yes,
        accept_loss: arguments.accept_loss,
    };
    let report = offline::repair(&arguments.path, &options)?;
    let code =
        if report.done || !report.needed { ExitCode::SUCCESS } else { ExitCode::from(FAULTS) };
    if json {
        print_json(&report)?;
    } else {
        print(&text(&report))?;
    }
    Ok(code)
}

/// The most lines of each kind; the JSON has all.
const MOST: usize = 100;

fn text(report: &RepairReport) -> String {
    if !report.needed {
        return "nothing is damaged\n".to_owned();
    }
    let mut text = String::new();
    list(&mut text, "damaged:", report.damage.iter().cloned());
    list(&mut text, "put right:", report.notes.iter().cloned());
    let rivals = report.rivals.iter().map(|rivals| {
        let mut names: Vec<String> =
            rivals.volumes.iter().map(|name| format!("\"{name}\"")).collect();
        if rivals.catalogue {
            names.push("the list of volumes".to_owned());
        }
        let end = rivals.first.saturating_add(rivals.count).saturating_sub(1);
        format!("blocks {} to {end} of the store, by {}", rivals.first, names.join(", "))
    });
    list(&mut text, "claimed by more than one:", rivals);
    let mut lost: Vec<String> = Vec::new();
    if report.lost_volumes > 0 {
        let range = |(first, count): &(u64, u64)| {
            format!("{first} to {}", first.saturating_add(*count).saturating_sub(1))
        };
        let numbers: Vec<String> = report.lost_numbers.iter().map(range).collect();
        let among = if numbers.is_empty() {
            String::new()
        } else {
            format!(", among numbers {}", numbers.join(", "))
        };
        lost.push(format!(
            "{} whose records cannot be read{among}",
            count(report.lost_volumes as usize, "whole volume")
        ));
    }
    lost.extend(report.losses.iter().map(|loss| {
        let (length, offset) = (size::show(loss.size_bytes), size::show(loss.offset_bytes));
        format!(
            "of \"{}\": what was written in {length} from {offset} on, which will read as zeros \
             ({})",
            loss.volume, loss.why
        )
    }));
    let nothing = lost.is_empty();
    list(&mut text, if report.done { "lost:" } else { "would be lost:" }, lost.into_iter());
    text.push_str(&match (report.done, report.decided) {
        (true, _) => format!("repaired: the metadata has generation {} now\n", report.generation),
        (false, false) => {
            "nothing was written: say --lose VOLUME for each volume that gives up such blocks\n"
                .to_owned()
        }
        (false, true) if nothing => {
            "nothing was written, and nothing would be lost: say --yes to repair it\n".to_owned()
        }
        (false, true) => {
            "nothing was written: say --yes to repair it and give up what is listed as lost\n"
                .to_owned()
        }
    });
    text
}

fn list(text: &mut String, title: &str, lines: impl ExactSizeIterator<Item = String>) {
    if lines.len() == 0 {
        return;
    }
    let more = lines.len().saturating_sub(MOST);
    text.push_str(&format!("{title}\n"));
    for line in lines.take(MOST) {
        text.push_str(&format!("  {line}\n"));
    }
    if more > 0 {
        text.push_str(&format!("  and {more} more (--json lists them)\n"));
    }
}
