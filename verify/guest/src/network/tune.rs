//! `sidecore-guest-tune` in guests: its report and the kernel's own settings agree, and pings are
//! counted with their interrupts in each mode.

use crate::checks::{Checks, Shown};
use crate::guest::Guest;
use crate::session::Session;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fmt::Write as _;

/// The pings of each mode.
const PINGS: u32 = 200;

/// The interrupts of a guest in each mode.
#[derive(Default)]
pub(super) struct Counts(Vec<(String, u32)>);

impl Counts {
    /// Pings the other guest, and counts the interrupts of the one that pings.
    fn take(
        &mut self,
        (session, guest): (&mut Session<'_>, &mut Guest),
        mode: &str,
        checks: &mut Checks,
    ) -> Result<u32> {
        let answer = guest.order(session, &format!("pings 10.0.0.2 {PINGS}"))?;
        let received: u32 = answer.number("received")?;
        let interrupts: u32 = answer.number("interrupts")?;
        let found = format!("{received} of {PINGS}, {interrupts} interrupts");
        checks.note(session, &format!("pings are answered: {mode}"), received == PINGS, found);
        self.0.push((mode.to_owned(), interrupts));
        Ok(interrupts)
    }

    /// The table of all modes.
    pub(super) fn show(&self, checks: &mut Checks) {
        let mut printed = String::from("| guest | interrupts per ping |\n| --- | --- |\n");
        for (mode, interrupts) in &self.0 {
            // Writing to a string cannot fail.
            let _ =
                writeln!(printed, "| {mode} | {:.3} |", f64::from(*interrupts) / f64::from(PINGS));
        }
        let command = format!("ping -A -c {PINGS} 10.0.0.2      # in the first guest");
        checks.shown.push(Shown { command, printed });
    }
}

/// A guest whose kernel has no threaded busy polling: interrupts are deferred.
pub(super) fn deferred(
    session: &mut Session<'_>,
    guest: &mut Guest,
    counts: &mut Counts,
    checks: &mut Checks,
) -> Result<()> {
    let before = settings(session, guest)?;
    counts.take((session, guest), "Linux 6.1, as it boots", checks)?;
    let found = status(session, guest, "threaded busy polling")?;
    let is_refused = found.0 == "cannot" && found.1.contains("6.19");
    let what = "the guest's report says why its kernel cannot poll NICs by threads";
    checks.note(session, what, is_refused, found.1);
    let refused = tune(session, guest, "apply --nics busy-poll")?;
    let what = "and the program refuses to try";
    checks.note(session, what, refused.0 != "0" && refused.1.contains("--nics defer"), refused.1);

    let applied = tune(session, guest, "apply")?;
    let (state, value) = status(session, guest, "deferred interrupts")?;
    let shown = settings(session, guest)?;
    let what = "deferred interrupts are in force by the report and by sysfs";
    let is_right = applied.0 == "0" && state == "in-force" && shown == ["100", "50000", "50"];
    checks.note(session, what, is_right, format!("{state}, {value}; {}", shown.join(", ")));
    counts.take((session, guest), "Linux 6.1, deferred interrupts", checks)?;
    let again = tune(session, guest, "apply")?.1;
    checks.note(session, "a second run changes nothing", again.contains("nothing"), again);
    undo(session, guest, &before, checks)
}

/// A guest whose kernel polls NICs by threads.
pub(super) fn threaded(
    session: &mut Session<'_>,
    guest: &mut Guest,
    counts: &mut Counts,
    checks: &mut Checks,
) -> Result<()> {
    let before = settings(session, guest)?;
    counts.take((session, guest), "Linux of backports, as it boots", checks)?;
    let applied = tune(session, guest, "apply --no-transmit-interrupts")?;
    let (state, value) = status(session, guest, "threaded busy polling")?;
    let threads = threads(session, guest)?;
    let is_right = applied.0 == "0" && state == "in-force" && threads > 0;
    let what = "threads poll the NIC by the report and by the list of threads";
    let found = format!("{}; {state}, {value}; {threads} threads", applied.1);
    checks.note(session, what, is_right, found);
    counts.take((session, guest), "Linux of backports, threaded busy polling", checks)?;
    reloaded(session, guest, counts, checks)?;
    undo(session, guest, &before, checks)?;
    let (state, value) = status(session, guest, "threaded busy polling")?;
    checks.note(session, "no thread polls afterwards", state == "off", value);
    Ok(())
}

/// The driver as after a reboot: sent frames make no interrupts either.
fn reloaded(
    session: &mut Session<'_>,
    guest: &mut Guest,
    counts: &mut Counts,
    checks: &mut Checks,
) -> Result<()> {
    let setting = "transmission without interrupts";
    let (before, _) = status(session, guest, setting)?;
    guest.order(session, "reload")?;
    guest.order(session, "up eth0 10.0.0.1/24")?;
    let (state, value) = status(session, guest, setting)?;
    let what = "the driver sends without interrupts after a reboot, as the report has said";
    let is_right = before == "after-reboot" && state == "in-force";
    checks.note(session, what, is_right, format!("{before}, then {state}, {value}"));
    let applied = tune(session, guest, "apply --keep-next-boot")?;
    checks.note(session, "a new NIC is polled by a thread, too", applied.0 == "0", applied.1);
    // The interrupt of the first frame starts the thread.
    guest.order(session, "pings 10.0.0.2 1")?;
    let count = counts.take((session, guest), "Linux of backports, polled both ways", checks)?;
    // The polling thread lets few through: none or some in a hundred pings, instead of one each.
    let what = "a guest that polls both ways takes hardly any interrupts for its pings";
    checks.note(session, what, count < PINGS / 4, format!("{count} for {PINGS} pings"));
    Ok(())
}

fn undo(
    session: &mut Session<'_>,
    guest: &mut Guest,
    before: &[String; 3],
    checks: &mut Checks,
) -> Result<()> {
    let undone = tune(session, guest, "undo")?;
    let after = settings(session, guest)?;
    let is_right = undone.0 == "0" && after == *before;
    checks.note(session, "undo restores the settings", is_right, after.join(", "));
    Ok(())
}

/// Settings as the kernel shows them.
fn settings(session: &mut Session<'_>, guest: &mut Guest) -> Result<[String; 3]> {
    let mut read = |path: &str| -> Result<String> {
        Ok(guest.order(session, &format!("setting {path}"))?.text("setting")?.to_owned())
    };
    Ok([
        read("/sys/class/net/eth0/napi_defer_hard_irqs")?,
        read("/sys/class/net/eth0/gro_flush_timeout")?,
        read("/proc/sys/net/core/busy_read")?,
    ])
}

fn threads(session: &mut Session<'_>, guest: &mut Guest) -> Result<u32> {
    guest.order(session, "threads eth0")?.number("threads")
}

/// Runs the program in the guest: its exit code and its words.
fn tune(session: &mut Session<'_>, guest: &mut Guest, words: &str) -> Result<(String, String)> {
    let answer = guest.order(session, &format!("tune {words}"))?;
    Ok((answer.text("code")?.to_owned(), answer.text("words")?.to_owned()))
}

/// The state of a setting of the first NIC by the program's report, with its value and reason.
fn status(session: &mut Session<'_>, guest: &mut Guest, setting: &str) -> Result<(String, String)> {
    let report = tune(session, guest, "status --json")?.1;
    let findings: Value = serde_json::from_str(&report)
        .with_context(|| format!("the guest's report is no JSON: {report}"))?;
    let mut findings = findings.as_array().into_iter().flatten();
    let found = findings.find(|found| found["device"] == "eth0" && found["setting"] == setting);
    let found = found.with_context(|| format!("the report has no {setting}: {report}"))?;
    let text = |key: &str| found[key].as_str().unwrap_or_default();
    Ok((text("state").to_owned(), format!("{}{}", text("value"), text("reason"))))
}
