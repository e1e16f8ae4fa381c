//! The firewall of a guest's NIC: a connection that rules allow goes on while they are replaced,
//! and one that they refuse is in a trace.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::counter;
use crate::checks::Checks;
use crate::guest::Guest;
use crate::session::Session;
use crate::sidecore::Sidecore;

/// The size of the file that is on its way while rules are replaced: some seconds' for guests
/// without KVM.
const FILE_MIB: u64 = 12;
/// The time for a file to begin, and to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

/// Rules under which the guest takes files.
const OPEN: &str = "ct state established,related accept\nct state invalid drop\nfrom accept\n\
                    to tcp dport 9000 ct state new accept\nto icmp accept\nto drop\n";
/// Rules under which new connections go outward only.
const CLOSED: &str = "ct state established,related accept\nct state invalid drop\nfrom accept\n\
                      to icmp accept\nto drop\n";

/// A file by a connection that the rules allow, and a connection that they refuse.
pub(super) fn check(
    session: &mut Session<'_>,
    guests: &mut [Guest; 2],
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    let rules = Rules { file: session.directory.join("firewall.rules"), sidecore };
    rules.set(OPEN)?;
    transfer(session, guests, &rules, checks)?;
    rules.set(CLOSED)?;
    refuse(session, &mut guests[0], sidecore, checks)?;
    checks.show(sidecore, &["net", "rules", "nic-b"])?;
    rules.set("")
}

/// The rules of the second guest's NIC.
struct Rules<'a> {
    file: PathBuf,
    sidecore: &'a Sidecore,
}

impl Rules<'_> {
    fn set(&self, rules: &str) -> Result<()> {
        std::fs::write(&self.file, rules)?;
        let file = self.file.to_str().context("a directory that is UTF-8")?;
        self.sidecore.run(&["net", "rules", "nic-b", "--set", file]).map(drop)
    }
}

/// Sends a file, and replaces the rules again and again until it has arrived.
fn transfer(
    session: &mut Session<'_>,
    [a, b]: &mut [Guest; 2],
    rules: &Rules<'_>,
    checks: &mut Checks,
) -> Result<()> {
    let start = counter(rules.sidecore, "nic-b", "out_octets")?;
    let arrived =
        || Ok::<_, anyhow::Error>(counter(rules.sidecore, "nic-b", "out_octets")? - start);
    b.order(session, "listen")?;
    let order = format!("send 10.0.0.2 {FILE_MIB}");
    a.send(&order)?;
    let end = Instant::now() + PATIENCE;
    while arrived()? < 1 << 20 {
        ensure!(Instant::now() < end, "the file does not begin under rules that allow it");
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut replaced = 0_u64;
    loop {
        rules.set(if replaced.is_multiple_of(2) { CLOSED } else { OPEN })?;
        if arrived()? >= FILE_MIB << 20 {
            break;
        }
        replaced += 1;
        if Instant::now() > end {
            bail!("the file does not arrive while rules are replaced");
        }
    }
    let sent = a.answer(session, &order)?.text("digest")?.to_owned();
    let got = b.order(session, "got")?;
    let is_same = got.text("digest")? == sent && got.number::<u64>("mib")? == FILE_MIB;
    let found = format!("{FILE_MIB} MiB, {replaced} times");
    let what = "a connection goes on while the rules that allow it are replaced";
    checks.note(session, what, is_same && replaced > 1, found);
    Ok(())
}

/// A trace says which rule has dropped the first packets of a connection.
fn refuse(
    session: &mut Session<'_>,
    a: &mut Guest,
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    let before = counter(sidecore, "nic-b", "dropped_rule_out")?;
    let (connected, trace) = std::thread::scope(|scope| {
        // Longer than the attempt, whose first packet is repeated after a second.
        let trace = || sidecore.run(&["net", "trace", "nic-b", "--seconds", "3"]);
        let trace = scope.spawn(trace);
        let connected = a.order(session, "connect 10.0.0.2 9000");
        (connected, trace.join())
    });
    let code = connected?.text("code")?.to_owned();
    let trace = trace.map_err(|_| anyhow::anyhow!("the trace panicked"))??;
    let dropped = counter(sidecore, "nic-b", "dropped_rule_out")? - before;
    let line = trace
        .lines()
        .find(|line| line.contains("> 10.0.0.2:9000") && line.contains("rule_out 5 \"to drop\""));
    let is_refused = code != "0" && dropped > 0;
    let found = format!("{dropped} packets dropped");
    checks.note(session, "a connection that the rules refuse does not begin", is_refused, found);
    let found = line.unwrap_or("no such line").to_owned();
    checks.note(session, "a trace shows the rule that refuses it", line.is_some(), found);
    Ok(())
}
