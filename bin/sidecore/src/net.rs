//! `sidecore net`: switches, their ports, and the addresses that they know.

mod trace;

use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use sidecore_control::report::{
    Counts, FirewallReport, PortCounts, PortReport, RuleCounts, StageFailureReport, SwitchReport,
    WireCounts,
};
use sidecore_control::{CaptureQuery, Client, ClientError};

use crate::print;
use crate::table::Table;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the switches with their ports: frames, bytes and drops.
    List {
        /// Print the control API's JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Show the addresses that a switch knows.
    Table {
        /// The switch.
        switch: String,
    },
    /// Show why frames from and to a port were dropped.
    Drops {
        /// The port: the name of its device.
        port: String,
    },
    /// Show the rules of a port's firewall, with their counters, or replace them.
    Rules {
        /// The port: the name of its device.
        port: String,
        /// Replace the rules at once by those in this file, one a line; `-` reads standard input.
        /// Empty lines, and what follows a `#`, have no meaning. Connections stay.
        #[arg(long, value_name = "FILE")]
        set: Option<PathBuf>,
    },
    /// Show the rate limits of a port, or change them.
    Limits {
        /// The port: the name of its device.
        port: String,
        /// A limit, as in `from 5000 frames/s` or `to 10MiB/s burst 1MiB`; several replace all
        /// that there were.
        #[arg(long, value_name = "LIMIT")]
        set: Vec<String>,
        /// Take all limits away.
        #[arg(long, conflicts_with = "set")]
        clear: bool,
    },
    /// Show the faults of the wire to a port, with what became of frames, or change them.
    Faults {
        /// The port: the name of its device.
        port: String,
        /// The faults, as in `loss 0.1% delay 5ms`; an empty text for a good wire. For tests.
        #[arg(long, value_name = "FAULTS")]
        set: Option<String>,
    },
    /// Show why frames are dropped, as they are: by flow and reason, every second. Ends by Ctrl-C,
    /// `--count` or `--seconds`.
    Trace(trace::Arguments),
    /// Write the frames of a port as they pass, both ways, to a file that Wireshark reads. Ends by
    /// Ctrl-C, `--count` or `--seconds`.
    Capture {
        /// The port: the name of its device.
        port: String,
        /// The file, in pcapng; `-` writes standard output.
        #[arg(short, long, value_name = "FILE")]
        write: PathBuf,
        /// The largest number of bytes of each frame.
        #[arg(long, value_name = "BYTES", default_value_t = CaptureQuery::default().snaplen)]
        snaplen: u32,
        /// End after so many frames.
        #[arg(long)]
        count: Option<u64>,
        /// End after so many seconds.
        #[arg(long)]
        seconds: Option<u64>,
    },
}

pub(crate) fn run(client: &Client, arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::List { json: true } => {
            Ok(print(&(serde_json::to_string_pretty(&client.switches()?)? + "\n"))?)
        }
        Command::List { json: false } => Ok(print(&list(&client.switches()?))?),
        Command::Table { switch } => Ok(print(&table(find(&client.switches()?, &switch)?))?),
        Command::Drops { port } => Ok(print(&drops(&client.switches()?, &port)?)?),
        Command::Rules { port, set: None } => Ok(print(&rules(&client.rules(&port)?))?),
        Command::Rules { port, set: Some(file) } => {
            let text = read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(client.set_rules(&port, lines(&text))?)
        }
        Command::Limits { port, set, clear } if clear || !set.is_empty() => {
            Ok(client.set_limits(&port, set)?)
        }
        Command::Limits { port, .. } => Ok(print(&limits(&client.switches()?, &port)?)?),
        Command::Faults { port, set: None } => Ok(print(&faults(&client.switches()?, &port)?)?),
        Command::Faults { port, set: Some(faults) } => Ok(client.set_faults(&port, &faults)?),
        Command::Trace(arguments) => trace::run(client, &arguments),
        Command::Capture { port, write, snaplen, count, seconds } => {
            capture(client, &port, &write, &CaptureQuery { snaplen, count, seconds })
        }
    }
}

/// Writes the frames of a port to a file, which replaces one that is there.
fn capture(client: &Client, port: &str, file: &Path, query: &CaptureQuery) -> Result<()> {
    let open = || -> io::Result<Box<dyn Write>> {
        if file == Path::new("-") {
            return Ok(Box::new(io::stdout()));
        }
        Ok(Box::new(std::fs::File::create(file)?))
    };
    match client.capture(port, query, open) {
        // The reader of standard output has seen enough.
        Err(ClientError::File(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(ClientError::File(error)) => {
            Err(error).with_context(|| format!("cannot write {}", file.display()))
        }
        other => Ok(other?),
    }
}

fn read(file: &Path) -> std::io::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        return std::io::stdin().read_to_string(&mut text).map(|_| text);
    }
    std::fs::read_to_string(file)
}

/// The rules in a file.
fn lines(text: &str) -> Vec<String> {
    let rules = text.lines().filter_map(|line| line.split('#').next());
    rules.map(str::trim).filter(|rule| !rule.is_empty()).map(str::to_owned).collect()
}

fn rules(firewall: &FirewallReport) -> String {
    let mut table = Table::new(&[">RULE", ">FRAMES", ">BYTES", "TEXT"]);
    let mut row = |number: String, counts: &RuleCounts, text: &str| {
        table.row([number, counts.frames.to_string(), counts.bytes.to_string(), text.to_owned()]);
    };
    for (number, rule) in (1_usize..).zip(&firewall.rules) {
        row(number.to_string(), &rule.counters, &rule.text);
    }
    if !firewall.rules.is_empty() {
        row("none".to_owned(), &firewall.unmatched, "(passes)");
    }
    let connections = match &firewall.table {
        table if table.opened == 0 => String::new(),
        table => format!(
            "{} connections, {} opened, {} forgotten because the table was full\n",
            table.connections, table.opened, table.evicted
        ),
    };
    table.render() + &connections
}

fn find<'a>(switches: &'a [SwitchReport], name: &str) -> Result<&'a SwitchReport> {
    let found = switches.iter().find(|switch| switch.name == name);
    found.with_context(|| format!("there is no switch \"{name}\"; see `sidecore net list`"))
}

fn list(switches: &[SwitchReport]) -> String {
    let mut table = Table::new(&[
        "SWITCH",
        "PORT",
        "STATE",
        ">IN",
        ">IN BYTES",
        ">OUT",
        ">OUT BYTES",
        ">DROPPED",
        "SIDECORE",
    ]);
    for switch in switches {
        for port in &switch.ports {
            let counts = &port.counters;
            table.row([
                switch.name.clone(),
                port.name.clone(),
                state(port),
                counts.in_frames.to_string(),
                counts.in_octets.to_string(),
                counts.out_frames.to_string(),
                counts.out_octets.to_string(),
                counts.in_discards().saturating_add(counts.out_discards()).to_string(),
                switch.sidecore.clone(),
            ]);
        }
    }
    table.render() + &failures(switches)
}

/// The failures of stages, each with its remedy.
fn failures(switches: &[SwitchReport]) -> String {
    let mut text = String::new();
    for port in switches.iter().flat_map(|switch| &switch.ports) {
        let Some(failure) = &port.failure else { continue };
        let StageFailureReport { stage, message } = failure;
        let name = &port.name;
        let drops = "the port drops all frames until";
        let consequence = match stage.as_str() {
            "capture" => "it has ended".to_owned(),
            "firewall" => format!("{drops} `sidecore net rules {name} --set FILE`"),
            "limit" => format!("{drops} `sidecore net limits {name} --set LIMIT` or `--clear`"),
            _ => format!("{drops} `sidecore net faults {name} --set FAULTS`"),
        };
        text.push_str(&format!("{name}: its {stage} has panicked ({message}): {consequence}\n"));
    }
    text
}

fn state(port: &PortReport) -> String {
    let state = match (port.is_blocked, port.is_up) {
        _ if port.failure.as_ref().is_some_and(|failure| failure.stage != "capture") => "failed",
        (true, _) => "blocked",
        (false, true) if port.is_standby => "standby",
        (false, true) => "up",
        (false, false) => "down",
    };
    let capture = if port.capture.is_some() { ", capture" } else { "" };
    format!("{state}{capture}")
}

fn table(switch: &SwitchReport) -> String {
    let mut table = Table::new(&["ADDRESS", ">VLAN", "PORT", "KIND", ">SILENT"]);
    for station in &switch.stations {
        let (kind, silent) = if station.is_fixed {
            ("configured", String::new())
        } else {
            ("learnt", format!("{} s", station.silent_s))
        };
        table.row([
            station.mac.clone(),
            station.vlan.to_string(),
            station.port.clone(),
            kind.to_owned(),
            silent,
        ]);
    }
    table.render()
}

fn limits(switches: &[SwitchReport], port: &str) -> Result<String> {
    let limits = &find_port(switches, port)?.limits;
    Ok(if limits.is_empty() { "none\n".to_owned() } else { limits.join("\n") + "\n" })
}

/// The faults of a port's wire, and the counters of what it did.
fn faults(switches: &[SwitchReport], port: &str) -> Result<String> {
    let Some(wire) = &find_port(switches, port)?.wire else {
        return Ok("none\n".to_owned());
    };
    let mut table = Table::new(&[">FRAMES", "MEANING"]);
    for metric in WireCounts::METRICS {
        table.row([(metric.value)(&wire.counters).to_string(), metric.help.to_owned()]);
    }
    Ok(format!("{}\n{}", wire.faults, table.render()))
}

fn find_port<'a>(switches: &'a [SwitchReport], name: &str) -> Result<&'a PortReport> {
    let found = switches.iter().flat_map(|switch| &switch.ports).find(|port| port.name == name);
    found.with_context(|| format!("there is no port \"{name}\"; see `sidecore net list`"))
}

/// The counters of drops that are not zero, with their explanations.
fn drops(switches: &[SwitchReport], port: &str) -> Result<String> {
    let found = find_port(switches, port)?;
    let mut table = Table::new(&[">FRAMES", "REASON", "MEANING"]);
    for metric in PortCounts::METRICS {
        let count = (metric.value)(&found.counters).to_string();
        if let Some(reason) = metric.field.strip_prefix("dropped_")
            && count != "0"
        {
            table.row([count, reason.to_owned(), metric.help.to_owned()]);
        }
    }
    Ok(table.render())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, failure: Option<(&str, &str)>) -> PortReport {
        let failure = failure.map(|(stage, message)| StageFailureReport {
            stage: stage.to_owned(),
            message: message.to_owned(),
        });
        PortReport { name: name.to_owned(), is_up: true, failure, ..PortReport::default() }
    }

    #[test]
    fn a_failed_stage_is_listed_with_its_remedy() {
        let ports = vec![
            port("fine", None),
            port("closed", Some(("firewall", "index out of bounds: 7"))),
            port("open", Some(("capture", "a bug"))),
        ];
        let switch = SwitchReport { name: "lan".to_owned(), ports, ..SwitchReport::default() };
        let text = list(&[switch]);
        let row = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().to_owned();
        assert!(row("fine").contains(" up "), "{text}");
        assert!(row("closed").contains(" failed "), "{text}");
        assert!(row("open").contains(" up "), "{text}");
        let ends: Vec<&str> = text.lines().skip(4).collect();
        let closed = "closed: its firewall has panicked (index out of bounds: 7): the port drops \
                      all frames until `sidecore net rules closed --set FILE`";
        assert_eq!(ends, [closed, "open: its capture has panicked (a bug): it has ended"]);
    }
}
