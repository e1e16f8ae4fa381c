//! Writes the results of a run into the documentation: README.md has the counts, docs/demo.md all
//! results, docs/demo.svg the recording.

use std::fmt::Write as _;
use std::path::Path;

use crate::nvme::Nvme;
use crate::overhead::Overhead;
use crate::report::{Mode, Row};
use anyhow::{Context, Result};
use sidecore_kit::pages;

const README: &str = "README.md";
const PAGE: &str = "docs/demo.md";
const RECORDING: &str = "docs/demo.svg";

/// Writes the results of a run into the pages of a workspace.
pub(crate) fn publish(
    workspace: &Path,
    rows: &[Row],
    overheads: &[Overhead],
    nvme: &Nvme,
    recording: &str,
) -> Result<()> {
    pages::update(&workspace.join(README), "demo", &counts(rows))?;
    let page = workspace.join(PAGE);
    pages::update(&page, "disks", &disks(rows))?;
    pages::update(&page, "writes", &writes(overheads))?;
    pages::update(&page, "nvme", &ways(nvme))?;
    std::fs::write(workspace.join(RECORDING), recording)
        .with_context(|| format!("cannot write {RECORDING}"))
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Interrupt => "interrupt-driven",
        Mode::Polled => "polling",
    }
}

fn disk(row: &Row) -> &str {
    if row.disk == crate::config::RAM { "ram, packed rings" } else { &row.disk }
}

/// A count per request; a zero is bold.
fn count(count: u64, each: f64) -> String {
    if count == 0 { "**0.000**".to_owned() } else { format!("{each:.3}") }
}

fn counts(rows: &[Row]) -> String {
    let mut table = String::from(
        "| guest and sidecore | disk | kicks per request | interrupts per request |\n\
         | --- | --- | --- | --- |\n",
    );
    for row in rows {
        let kicks = count(row.kicks, row.kicks_per_request);
        let interrupts = count(row.interrupts, row.interrupts_per_request);
        let _ = writeln!(table, "| {} | {} | {kicks} | {interrupts} |", mode(row.mode), disk(row));
    }
    table
}

fn disks(rows: &[Row]) -> String {
    let mut table = String::from(
        "| guest and sidecore | disk | kicks per request | interrupts per request | IOPS | p50 | \
         p99 |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in rows {
        let kicks = count(row.kicks, row.kicks_per_request);
        let interrupts = count(row.interrupts, row.interrupts_per_request);
        let (mode, disk) = (mode(row.mode), disk(row));
        let Row { iops, p50_us, p99_us, .. } = row;
        let _ = writeln!(
            table,
            "| {mode} | {disk} | {kicks} | {interrupts} | {iops:.0} | {p50_us:.0} us | {p99_us:.0} \
             us |"
        );
    }
    table.push_str(
        "| *FAST'12, before* | ramdisk | each I/O | each I/O | 48800 | 50 us | |\n\
         | *FAST'12, polling* | ramdisk | none | none | 357500 | 15.9 us | |\n",
    );
    table
}

fn writes(overheads: &[Overhead]) -> String {
    let mut table = String::from(
        "| guest and sidecore | writes to | requests | kicks | interrupts | misses |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    for overhead in overheads {
        let to = match overhead.writes.as_str() {
            "raw-first" => "fresh blocks",
            "ext4-first" => "a new file on ext4",
            _ => "the same again",
        };
        let counts = [overhead.requests, overhead.kicks, overhead.interrupts, overhead.misses];
        let [requests, kicks, interrupts, misses] =
            counts.map(|count| format!("{:.3}", overhead.each(count)));
        let mode = mode(overhead.mode);
        let _ =
            writeln!(table, "| {mode} | {to} | {requests} | {kicks} | {interrupts} | {misses} |");
    }
    table
}

fn ways(nvme: &Nvme) -> String {
    let mut table = String::from(
        "| guest's queues | commands | doorbell messages | interrupts |\n\
         | --- | --- | --- | --- |\n",
    );
    for way in &nvme.ways {
        let _ = writeln!(
            table,
            "| {} | {} | {} | {} |",
            way.way, way.commands, way.kicks, way.interrupts
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_have_a_place_for_each_result() {
        let read = |page| {
            std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page))
                .unwrap()
        };
        let header = |table: &str| table.lines().next().unwrap().to_owned();
        let (readme, page) = (read(README), read(PAGE));
        let nvme = Nvme {
            qemu: String::new(),
            can_unplug: false,
            ways: Vec::new(),
            checks: crate::checks::Checks::default(),
        };
        for (text, name, table) in [
            (&readme, "demo", counts(&[])),
            (&page, "disks", disks(&[])),
            (&page, "writes", writes(&[])),
            (&page, "nvme", ways(&nvme)),
        ] {
            let there = pages::between(text, name).expect(name);
            assert_eq!(header(there.trim_start()), header(&table), "{name}");
        }
    }
}
