//! The table and the pictures of the results.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::servers::{PF, SCATTERED, VF};
use super::{FILE, MEDIA, Medium, NAME, SIZES, case, depths, operation, size_name};
use crate::lines::{Figure, Line, Panel};
use crate::record::{FLOOR, Measure, Record, Records};
use crate::{cells, peer, plot};

const PICTURES: &str = "docs/bench";

/// The systems that [`VF`] is compared with.
const OTHERS: [&str; 5] = [PF, FILE, peer::NAME, SCATTERED, FLOOR];

/// The systems that were measured on `medium`, in the tables' order.
fn systems(records: &Records, medium: Medium) -> Vec<&'static str> {
    let prefix = format!("{}/", medium.name());
    let was_measured = |system: &str| {
        records.all().iter().any(|record| match record {
            Record::Measure(measure) => {
                measure.case.starts_with(&prefix) && measure.system == system
            }
            Record::Ratio(_) => false,
        })
    };
    std::iter::once(VF).chain(OTHERS).filter(|system| was_measured(system)).collect()
}

/// All results, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::new();
    for medium in MEDIA {
        let systems = systems(records, medium);
        let Some((_, others)) = systems.split_first() else { continue };
        let ratios: Vec<String> = others.iter().map(|other| format!("{VF} / {other}")).collect();
        let columns =
            [&systems[..], &ratios.iter().map(String::as_str).collect::<Vec<_>>()].concat();
        let _ = writeln!(page, "| on {} | {} |", medium.name(), columns.join(" | "));
        let _ = writeln!(page, "| --- |{}", " --- |".repeat(columns.len()));
        for (case, depth) in cases(medium) {
            if records.find(&case, VF, "iops").is_none() {
                continue;
            }
            let numbers = systems.iter().map(|system| cell(records, &case, system, depth));
            let ratios = others.iter().map(|other| cells::ratio(records, &case, other));
            let cells: Vec<String> = numbers.chain(ratios).collect();
            let _ = writeln!(
                page,
                "| {} | {} |",
                case.split_once('/').map_or("", |(_, rest)| rest),
                cells.join(" | ")
            );
        }
        page.push('\n');
    }
    page
}

/// All possible cases, by operation, depth and size.
fn cases(medium: Medium) -> Vec<(String, u16)> {
    let mut cases = Vec::new();
    for write in [false, true] {
        for deep in [0, 1] {
            let depth = |bytes| depths(bytes)[deep];
            cases.extend(
                SIZES.map(|bytes| (case(medium, write, bytes, depth(bytes)), depth(bytes))),
            );
        }
    }
    cases
}

/// Formats the median latency of single requests, or the rate of many.
fn cell(records: &Records, case: &str, system: &str, depth: u16) -> String {
    let found = |metric| records.find(case, system, metric).map(|measure: &Measure| measure.value);
    match depth {
        1 => found("latency_p50").map_or(String::new(), |ns| format!("{:.2} us", ns / 1e3)),
        _ => found("iops").map_or(String::new(), plot::per_second),
    }
}

pub(super) const NOTE: &str = "Latency of single requests, requests a second of 32 (8 from 256 KiB \
                               on);\nratios are of requests a second.";

pub(super) fn draw(records: &Records) -> Result<()> {
    std::fs::create_dir_all(PICTURES)?;
    for medium in MEDIA {
        let systems = systems(records, medium);
        if systems.is_empty() {
            continue;
        }
        let picture = Path::new(PICTURES).join(format!("{NAME}-{}.svg", medium.name()));
        let svg = figure(records, medium, &systems).to_svg();
        std::fs::write(&picture, svg)
            .with_context(|| format!("cannot write {}", picture.display()))?;
    }
    Ok(())
}

/// Draws Figures 8.1 and 8.2.
fn figure(records: &Records, medium: Medium, systems: &[&str]) -> Figure {
    let mut panels = Vec::new();
    for (deep, metric, what) in
        [(0, "latency_p50", "median latency, one request"), (1, "bandwidth", "bandwidth")]
    {
        for write in [false, true] {
            let point = |bytes: u32, system: &str| {
                let case = case(medium, write, bytes, depths(bytes)[deep]);
                records.find(&case, system, metric).map(|measure| (f64::from(bytes), measure.value))
            };
            let lines = systems.iter().enumerate().map(|(series, system)| Line {
                series,
                points: SIZES.iter().filter_map(|bytes| point(*bytes, system)).collect(),
            });
            panels.push(Panel {
                title: format!("{}: {what}", operation(write)),
                lines: lines.collect(),
                x_label: |bytes| size_name(bytes as u32),
                y_label: if deep == 0 { duration } else { bandwidth },
            });
        }
    }
    let on = match medium {
        Medium::Ram => "a store in memory",
        Medium::Loop => "loop devices",
        Medium::Zram => "zram disks",
    };
    let title = format!(
        "Virtual functions, the physical one, and files, on {on}, by request size (logarithmic)"
    );
    Figure { title, series: systems.iter().map(|system| (*system).to_owned()).collect(), panels }
}

fn duration(ns: f64) -> String {
    match ns {
        1e6.. => format!("{} ms", ns / 1e6),
        1e3.. => format!("{} us", ns / 1e3),
        _ => format!("{ns} ns"),
    }
}

fn bandwidth(bytes_per_s: f64) -> String {
    match bytes_per_s {
        1e9.. => format!("{} GB/s", bytes_per_s / 1e9),
        1e6.. => format!("{} MB/s", bytes_per_s / 1e6),
        _ => format!("{} kB/s", bytes_per_s / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Params;

    #[test]
    fn a_table_has_what_was_measured() {
        let mut records = Records::new(NAME);
        let (alone, deep) =
            (case(Medium::Loop, false, 4096, 1), case(Medium::Loop, false, 4096, 32));
        for (system, ns) in [(VF, 2000.0), (FILE, 4000.0)] {
            records.measure(&alone, system, "iops", 1e9 / ns, "1/s", Params::new());
            records.measure(&alone, system, "latency_p50", ns, "ns", Params::new());
            records.measure(&deep, system, "iops", 1e9 / ns, "1/s", Params::new());
        }
        records.ratio(&alone, "iops", VF, FILE, 2.0, Params::new());
        let table = table(&records);
        assert!(table.contains("| on loop | vf | file | vf / file |"), "{table}");
        assert!(table.contains("| randread/4KiB/qd1 | 2.00 us | 4.00 us | 2.00 |"), "{table}");
        assert!(table.contains("| randread/4KiB/qd32 | 500 k/s | 250 k/s |  |"), "{table}");
        let figure = figure(&records, Medium::Loop, &systems(&records, Medium::Loop));
        assert_eq!(figure.panels.len(), 4);
        assert!(!figure.to_svg().contains("NaN"));
    }
}
