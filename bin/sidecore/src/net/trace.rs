//! `sidecore net trace`: lines of text, made of the lines of JSON that the daemon sends.

use std::io::{self, Write};

use anyhow::{Context, Result};
use sidecore_control::report::{DropReport, DropWay, FlowReport};
use sidecore_control::{Client, ClientError, TraceQuery};

#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("part").required(true)))]
pub(super) struct Arguments {
    /// The port: the name of its device. Frames from it are shown, and those to it.
    #[arg(group = "part")]
    port: Option<String>,
    /// Show the frames of all ports of this switch.
    #[arg(long, group = "part")]
    switch: Option<String>,
    /// Print the control API's JSON instead of text, a line for each flow, reason and second.
    #[arg(long)]
    json: bool,
    /// End after so many dropped frames.
    #[arg(long)]
    count: Option<u64>,
    /// End after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
}

pub(super) fn run(client: &Client, arguments: &Arguments) -> Result<()> {
    let query = TraceQuery { count: arguments.count, seconds: arguments.seconds };
    let json = arguments.json;
    let open = || -> io::Result<Box<dyn Write>> {
        let out = io::stdout();
        Ok(if json { Box::new(out) } else { Box::new(Lines { out, rest: Vec::new() }) })
    };
    let traced = match (&arguments.port, &arguments.switch) {
        (Some(port), _) => client.trace_port(port, &query, open),
        (None, Some(switch)) => client.trace_switch(switch, &query, open),
        (None, None) => Ok(()),
    };
    match traced {
        // The reader of standard output has seen enough.
        Err(ClientError::File(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(ClientError::File(error)) => Err(error).context("cannot write the trace"),
        other => Ok(other?),
    }
}

/// Writes a line of text for each line of JSON.
struct Lines<W> {
    out: W,
    /// The beginning of a line whose end has not come yet.
    rest: Vec<u8>,
}

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if *byte != b'\n' {
                self.rest.push(*byte);
                continue;
            }
            let report: DropReport = serde_json::from_slice(&self.rest)?;
            self.rest.clear();
            self.out.write_all(text(&report).as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A report as a line of text, or two.
fn text(report: &DropReport) -> String {
    let lost = match report.lost {
        0 => String::new(),
        lost => format!("{lost} dropped frames are not shown: there were too many\n"),
    };
    let name = |name: &str| if name.is_empty() { "?".to_owned() } else { name.to_owned() };
    let way = match (report.way, report.sender.as_deref()) {
        (DropWay::From, _) => format!("from {}", name(&report.port)),
        (DropWay::To, Some(sender)) => format!("from {} to {}", name(sender), name(&report.port)),
        (DropWay::To, None) => format!("to {}", name(&report.port)),
    };
    let vlan = report.vlan.map(|vlan| format!(" vlan {vlan}")).unwrap_or_default();
    let flow = match &report.flow {
        Some(flow) => flow_text(flow, &report.reason),
        None if report.others => "other flows".to_owned(),
        None => "frames that could not be read".to_owned(),
    };
    let rule = match (report.rule, report.rule_text.as_deref()) {
        (Some(number), Some(text)) => format!(" {number} \"{text}\""),
        (Some(number), None) => format!(" {number}"),
        (None, _) => String::new(),
    };
    let frames = if report.frames == 1 { "frame" } else { "frames" };
    format!(
        "{lost}{} {way}{vlan}, {flow}: {}{rule} ({} {frames}, {} bytes)\n",
        time_of_day(report.first_ns),
        report.reason,
        report.frames,
        report.bytes
    )
}

/// The flow; with Ethernet addresses if there are no others, or if they are what is wrong.
fn flow_text(flow: &FlowReport, reason: &str) -> String {
    let macs = format!("{} > {}", flow.source_mac, flow.target_mac);
    let kind = match (flow.ether_type, flow.protocol) {
        (0x0806, _) => "arp".to_owned(),
        (_, None) => format!("type {:#06x}", flow.ether_type),
        (_, Some(1)) => "icmp".to_owned(),
        (_, Some(6)) => "tcp".to_owned(),
        (_, Some(17)) => "udp".to_owned(),
        (_, Some(58)) => "icmpv6".to_owned(),
        (_, Some(132)) => "sctp".to_owned(),
        (_, Some(other)) => format!("proto {other}"),
    };
    let (Some(source), Some(target)) = (&flow.source, &flow.target) else {
        return format!("{macs} {kind}");
    };
    let end = |address: &str, port: Option<u16>| match port {
        Some(port) if address.contains(':') => format!("[{address}]:{port}"),
        Some(port) => format!("{address}:{port}"),
        None => address.to_owned(),
    };
    let (source, target) = (end(source, flow.source_port), end(target, flow.target_port));
    let is_about_macs =
        ["spoofed_mac", "spoofed_arp", "spoofed_nd", "bad_source"].contains(&reason);
    let macs = if is_about_macs { format!("{macs} ") } else { String::new() };
    format!("{macs}{kind} {source} > {target}")
}

/// The time of day in UTC.
fn time_of_day(since_1970_ns: u64) -> String {
    let ms = since_1970_ns / 1_000_000;
    let (s, ms) = (ms / 1_000, ms % 1_000);
    format!("{:02}:{:02}:{:02}.{ms:03}Z", s / 3_600 % 24, s / 60 % 60, s % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> DropReport {
        DropReport {
            first_ns: ((20_000 * 24 + 3) * 3_600 + 4 * 60 + 5) * 1_000_000_000 + 678_900_000,
            port: "nic6".to_owned(),
            way: DropWay::To,
            sender: Some("nic1".to_owned()),
            vlan: Some(10),
            flow: Some(FlowReport {
                source_mac: "52:54:00:00:00:01".to_owned(),
                target_mac: "52:54:00:00:00:06".to_owned(),
                ether_type: 0x800,
                source: Some("10.0.0.1".to_owned()),
                target: Some("10.0.0.6".to_owned()),
                protocol: Some(6),
                source_port: Some(4242),
                target_port: Some(80),
            }),
            reason: "rule_out".to_owned(),
            rule: Some(3),
            rule_text: Some("to drop".to_owned()),
            frames: 2,
            bytes: 128,
            ..DropReport::default()
        }
    }

    fn flow(change: impl Fn(&mut FlowReport)) -> Option<FlowReport> {
        let mut flow = report().flow;
        flow.iter_mut().for_each(change);
        flow
    }

    #[test]
    fn a_line_has_time_ports_flow_reason_and_counts() {
        let (more, one) = (report(), DropReport { frames: 1, bytes: 64, ..report() });
        assert_eq!(
            text(&more),
            "03:04:05.678Z from nic1 to nic6 vlan 10, tcp 10.0.0.1:4242 > 10.0.0.6:80: rule_out 3 \
             \"to drop\" (2 frames, 128 bytes)\n"
        );
        let ipv6 = flow(|flow| {
            (flow.source, flow.protocol) = (Some("fe80::1".to_owned()), Some(17));
            (flow.target, flow.target_port) = (Some("ff02::1".to_owned()), None);
        });
        let (sender, rule_text, vlan) = (None, None, None);
        let line =
            text(&DropReport { flow: ipv6, sender, rule_text, vlan, lost: 7, ..one.clone() });
        assert_eq!(
            line,
            "7 dropped frames are not shown: there were too many\n03:04:05.678Z to nic6, udp \
             [fe80::1]:4242 > ff02::1: rule_out 3 (1 frame, 64 bytes)\n"
        );
        let from = DropReport { way: DropWay::From, rule: None, rule_text: None, ..one };
        let spoofed = DropReport { reason: "spoofed_mac".to_owned(), ..from.clone() };
        assert_eq!(
            text(&spoofed),
            "03:04:05.678Z from nic6 vlan 10, 52:54:00:00:00:01 > 52:54:00:00:00:06 tcp \
             10.0.0.1:4242 > 10.0.0.6:80: spoofed_mac (1 frame, 64 bytes)\n"
        );
        let other = flow(|flow| {
            (flow.source, flow.target, flow.protocol, flow.ether_type) = (None, None, None, 0x88b5);
        });
        let line = text(&DropReport { flow: other, ..from.clone() });
        assert!(line.contains(", 52:54:00:00:00:01 > 52:54:00:00:00:06 type 0x88b5: "), "{line}");
        let line = text(&DropReport { flow: None, others: true, ..from.clone() });
        assert!(line.contains(" vlan 10, other flows: rule_out (1 frame"), "{line}");
        let line = text(&DropReport { flow: None, ..from });
        assert!(line.contains(", frames that could not be read: "), "{line}");
    }

    #[test]
    fn lines_may_come_in_parts() {
        let (mut out, json) = (Vec::new(), serde_json::to_string(&report()).unwrap() + "\n");
        let mut lines = Lines { out: &mut out, rest: Vec::new() };
        for part in json.repeat(2).as_bytes().chunks(7) {
            lines.write_all(part).unwrap();
        }
        assert!(lines.write_all(b"{}\n").is_err(), "another version's");
        assert_eq!(String::from_utf8(out).unwrap(), text(&report()).repeat(2));
    }
}
