//! The cost of commands for the guest: interrupts, and doorbells that need a message to the daemon,
//! with polled queues and with the others.

use crate::config::{POOL, VF};
use crate::daemon::Daemon;
use crate::guest::{Answer, Guest};
use crate::measure::{self, Ios};
use crate::session::Session;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// The ways in which the guest learns of completions.
const WAYS: [(&str, u8); 2] = [("interrupts", 0), ("polled", 1)];

/// The cost of random reads of 4 KiB, one at a time, directly from the namespace.
#[derive(Debug, Clone, Serialize)]
pub struct Way {
    /// `interrupts` or `polled`: the way in which the guest learned of completions.
    pub way: String,
    /// The number of reads.
    pub commands: u64,
    /// Interrupts of the I/O queues.
    pub interrupts: u64,
    /// Doorbell writes that reached the daemon by a message, each of which is an exit.
    pub kicks: u64,
    /// Interrupts per command.
    pub interrupts_per_command: f64,
    /// Commands per second.
    pub iops: f64,
    /// The median latency.
    pub p50_us: f64,
    /// The latency of the 99th percentile.
    pub p99_us: f64,
}

/// Measures both ways in a part of the disk, given in MiB, that was written before.
pub(super) fn measure(
    session: &mut Session<'_>,
    guest: &mut Guest,
    daemon: &Daemon,
    place: u64,
    window: Duration,
) -> Result<Vec<Way>> {
    let mut ways = Vec::new();
    for (name, polled) in WAYS {
        let before = daemon.sidecore.counters(POOL, VF)?;
        let answer = guest
            .order(session, &format!("measure {polled} {place} {}", window.as_secs().max(1)))?;
        let after = daemon.sidecore.counters(POOL, VF)?;
        let way = way(name, &answer, after.kicks - before.kicks)
            .with_context(|| format!("nvme/{name}"))?;
        session.say(format!("{name}: {} commands, {} interrupts", way.commands, way.interrupts));
        ways.push(way);
    }
    Ok(ways)
}

fn way(name: &str, answer: &Answer, kicks: u64) -> Result<Way> {
    let Ios { iops, p50_us, p99_us, total } = measure::fio_ios(answer.text("fio")?)?;
    let requests = |edge| measure::completed_requests(answer.text(edge)?);
    let commands = requests("stat-end")? - requests("stat-begin")?;
    ensure!(
        commands == total,
        "the window was not quiet: fio read {total} times, but there were {commands} requests"
    );
    let interrupts = |edge| interrupts(answer.text(edge)?);
    let interrupts = interrupts("interrupts-end")? - interrupts("interrupts-begin")?;
    let interrupts_per_command = interrupts as f64 / commands as f64;
    Ok(Way {
        way: name.to_owned(),
        commands,
        interrupts,
        kicks,
        interrupts_per_command,
        iops,
        p50_us,
        p99_us,
    })
}

/// The interrupts of a controller's I/O queues, from its lines of /proc/interrupts.
fn interrupts(lines: &str) -> Result<u64> {
    lines.split('|').map(measure::nvme_interrupts).sum()
}

/// The report.
pub(super) fn table(ways: &[Way]) -> String {
    let mut text = String::from(
        "Random reads of 4 KiB, one at a time, by the guest's nvme driver; interrupts are those of \
         its queues for I/O, and\n\
         doorbells those that needed a message to the daemon:\n\n",
    );
    let mut line = |cells: [&str; 6]| {
        let [way, commands, interrupts, doorbells, iops, p50] = cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{way:<12} {commands:>9} {interrupts:>19} {doorbells:>18} {iops:>9} {p50:>8}"
        );
    };
    line(["way", "commands", "interrupts/command", "doorbells/command", "IOPS", "p50 us"]);
    for Way { way, commands, interrupts_per_command, kicks, iops, p50_us, .. } in ways {
        line([
            way,
            &commands.to_string(),
            &format!("{interrupts_per_command:.3}"),
            &format!("{:.3}", *kicks as f64 / *commands as f64),
            &format!("{iops:.0}"),
            &format!("{p50_us:.1}"),
        ]);
    }
    text
}

/// The measurements that break a rule, in words.
pub(super) fn faults(ways: &[Way]) -> Vec<String> {
    let fault = |Way { way, commands, interrupts, kicks, .. }: &Way| {
        let must = match way.as_str() {
            "polled" if *interrupts > 0 => "there must be no interrupt",
            // Without interrupts here, their absence in the polled case would prove nothing.
            "interrupts" if *interrupts == 0 => "there must be some: the counting does not work",
            _ if *kicks > 0 => {
                "there must be no doorbell that needs a message: the function is polled"
            }
            _ => return None,
        };
        Some(format!(
            "nvme/{way}: {commands} commands took {interrupts} interrupts and {kicks} messages; \
             {must}"
        ))
    };
    ways.iter().filter_map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(way: &str, interrupts: u64, kicks: u64) -> usize {
        let way = Way {
            way: way.to_owned(),
            commands: 100,
            interrupts,
            kicks,
            interrupts_per_command: interrupts as f64 / 100.0,
            iops: 1.0,
            p50_us: 15.9,
            p99_us: 50.0,
        };
        assert!(table(std::slice::from_ref(&way)).contains("15.9"));
        faults(&[way]).len()
    }

    #[test]
    fn polled_commands_take_no_interrupt_and_the_others_some() {
        assert_eq!((found("polled", 0, 0), found("polled", 1, 0)), (0, 1));
        assert_eq!((found("interrupts", 100, 0), found("interrupts", 0, 0)), (0, 1));
        assert_eq!((found("polled", 0, 1), found("interrupts", 100, 1)), (1, 1));
    }

    #[test]
    fn the_lines_of_all_queues_are_summed() {
        let lines = " 26:  9  0  PCI-MSIX-0000:01:00.0  0-edge  nvme0q0| 27:  5  2  \
                     PCI-MSIX-0000:01:00.0  1-edge  nvme0q1|28:  1  0  PCI-MSI 3-edge  nvme0q12|";
        assert_eq!(interrupts(lines).unwrap(), 8);
        assert_eq!(interrupts("").unwrap(), 0);
    }
}
