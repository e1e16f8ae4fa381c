//! A measured run: the daemon, a guest, and the dialogue that lets host and guest count over the
//! same window.

use crate::config::{self, DISKS, FILE, RAM};
use crate::console::{self, Edge, Message, Window};
use crate::guest::{FIRST_SLOT, MEASURED};
use crate::measure::{self, Ios};
use crate::overhead::{Overhead, WRITES};
use crate::qemu::{Backend, Disk, Equipment};
use crate::report::{Mode, Row};
use crate::session::{Session, Stage};
use crate::sidecore::Counters;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The longest time between two messages of the guest.
const SILENCE: Duration = Duration::from_secs(180);
/// The longest time for all of the guest's checks, without the measured windows.
const PATIENCE: Duration = Duration::from_secs(600);
/// The checks that the guest must make on each disk.
const CHECKS: [&str; 3] = ["tree", "write", "read"];
/// The window whose reads make a row.
const READ: &str = "read";

/// Boots a guest and lets it check and measure both disks.
pub(crate) fn run(
    stage: &Stage<'_>,
    mode: Mode,
    window: Duration,
) -> Result<(Vec<Row>, Vec<Overhead>)> {
    Session::hold(stage, &mode.to_string(), |session| converse(session, mode, window))
}

fn converse(
    session: &mut Session<'_>,
    mode: Mode,
    window: Duration,
) -> Result<(Vec<Row>, Vec<Overhead>)> {
    let daemon = session.daemon(|places| places.measured(mode))?;
    let sockets: Vec<PathBuf> =
        DISKS.iter().map(|disk| config::socket(session.directory, disk)).collect();
    let disks: Vec<Disk<'_>> = DISKS
        .iter()
        .zip(&sockets)
        .zip(FIRST_SLOT..)
        .map(|((name, socket), slot)| Disk {
            name,
            backend: Backend::Daemon(socket),
            slot,
            packed: *name == RAM,
        })
        .collect();
    let slots: Vec<String> =
        disks.iter().map(|disk| format!("{}:{:02x}", disk.name, disk.slot)).collect();
    let settings = format!(
        "SIDECORE_PART=measure SIDECORE_DISKS={} SIDECORE_PACKED={RAM} SIDECORE_WRITES={FILE} \
         SIDECORE_SECONDS={}",
        slots.join(","),
        window.as_secs().max(1)
    );
    let equipment =
        Equipment { polled: mode == Mode::Polled, disks: &disks, ports: &[], nics: &[] };
    let mut qemu = session.boot(MEASURED, session.stage.qemu, &equipment, &settings)?;
    let end = Instant::now() + PATIENCE + window * 2;
    let mut findings = Findings::default();
    loop {
        let silence = Instant::now() + SILENCE;
        let Some(line) = session.next_message(MEASURED, silence.min(end))? else {
            bail!("the guest has not finished in time; its last step: {}", findings.last_step);
        };
        let Some(message) = console::parse(&line)? else { continue };
        match findings.note(&message)? {
            Reaction::Listen => {}
            Reaction::Tell(what) => session.say(what),
            Reaction::Meet { window, edge } => {
                let counters =
                    daemon.sidecore.counters(config::controller_of(window.disk), window.disk)?;
                findings.sample(window, edge)?.counters = Some(counters);
                qemu.write("go\n")?;
            }
            Reaction::Finish => break,
        }
    }
    // The guest is powering off. If that takes long, dropping QEMU ends it as well.
    session.wait_for_power_off(MEASURED, Instant::now() + Duration::from_secs(10))?;
    drop(qemu);
    daemon.stop(&mut session.inbox)?;
    findings.reported(mode)
}

/// The host's reaction to a message of the guest.
#[derive(Debug, PartialEq, Eq)]
enum Reaction<'a> {
    Listen,
    Tell(String),
    Meet { window: Window<'a>, edge: Edge },
    Finish,
}

/// All results so far.
#[derive(Default)]
struct Findings {
    last_step: String,
    disks: BTreeMap<String, Finding>,
}

#[derive(Default)]
struct Finding {
    virtio: String,
    checked: Vec<String>,
    complaints: Vec<String>,
    windows: BTreeMap<String, Counted>,
}

/// The counts of a window.
#[derive(Default)]
struct Counted {
    begin: Sample,
    end: Sample,
    ios: Option<Ios>,
}

/// The counts at one end of a window.
#[derive(Default)]
struct Sample {
    interrupts: u64,
    requests: Option<u64>,
    counters: Option<Counters>,
}

impl Findings {
    fn finding(&mut self, disk: &str) -> Result<&mut Finding> {
        self.disks.get_mut(disk).with_context(|| format!("the guest has no disk {disk}"))
    }

    fn counted(&mut self, window: Window<'_>) -> Result<&mut Counted> {
        Ok(self.finding(window.disk)?.windows.entry(window.what.to_owned()).or_default())
    }

    fn sample(&mut self, window: Window<'_>, edge: Edge) -> Result<&mut Sample> {
        let counted = self.counted(window)?;
        Ok(match edge {
            Edge::Begin => &mut counted.begin,
            Edge::End => &mut counted.end,
        })
    }

    fn note<'a>(&mut self, message: &Message<'a>) -> Result<Reaction<'a>> {
        match *message {
            Message::Booted { release } => return self.step(format!("Linux {release} is up")),
            Message::Tree { files, kib } => {
                return self.step(format!("{files} files of {kib} KiB to copy"));
            }
            Message::Disk { disk, virtio, .. } => {
                self.disks.insert(
                    disk.to_owned(),
                    Finding { virtio: virtio.to_owned(), ..Finding::default() },
                );
            }
            Message::Step { disk, what } => return self.step(format!("{disk}: {what}")),
            Message::Verified { disk, what, complaint } => {
                let finding = self.finding(disk)?;
                finding.checked.push(what.to_owned());
                finding
                    .complaints
                    .extend(complaint.map(|complaint| format!("{what}: {complaint}")));
            }
            Message::Window { window, edge } => {
                self.finding(window.disk)?;
                return Ok(Reaction::Meet { window, edge });
            }
            Message::Interrupts { window, edge, line } => {
                let interrupts =
                    measure::request_interrupts(line, &self.finding(window.disk)?.virtio)?;
                self.sample(window, edge)?.interrupts += interrupts;
            }
            Message::Stat { window, edge, line } => {
                self.sample(window, edge)?.requests = Some(measure::completed_requests(line)?);
            }
            Message::Fio { window, json } => {
                self.counted(window)?.ios = Some(measure::fio_ios(json)?)
            }
            Message::Value { .. } | Message::Finished { .. } => {
                bail!("the guest answers an order that it was not given")
            }
            Message::Failed { why } => bail!("in the guest: {why} (during: {})", self.last_step),
            Message::Done => return Ok(Reaction::Finish),
        }
        Ok(Reaction::Listen)
    }

    fn step<'a>(&mut self, what: String) -> Result<Reaction<'a>> {
        self.last_step.clone_from(&what);
        Ok(Reaction::Tell(what))
    }

    fn reported(mut self, mode: Mode) -> Result<(Vec<Row>, Vec<Overhead>)> {
        let overheads = WRITES
            .iter()
            .map(|what| {
                let counted = self.finding(FILE)?.windows.remove(*what);
                let totals = counted
                    .context("never measured")?
                    .totals()
                    .with_context(|| format!("{mode}/{what}"))?;
                Overhead::new(mode, what, &totals)
            })
            .collect::<Result<_>>()?;
        let rows = DISKS
            .iter()
            .map(|disk| {
                let finding = self
                    .disks
                    .remove(*disk)
                    .with_context(|| format!("the guest never saw the disk {disk}"))?;
                finding.row(mode, disk).with_context(|| format!("{mode}/{disk}"))
            })
            .collect::<Result<_>>()?;
        Ok((rows, overheads))
    }
}

impl Finding {
    fn row(mut self, mode: Mode, disk: &str) -> Result<Row> {
        let counted = self.windows.remove(READ).context("the guest reported no measurement")?;
        let totals = counted.totals()?;
        let missing: Vec<&str> =
            CHECKS.into_iter().filter(|check| !self.checked.iter().any(|c| c == check)).collect();
        let mut complaints = self.complaints;
        complaints.extend(missing.iter().map(|check| format!("{check}: never checked")));
        let Totals { ios, requests, kicks, interrupts, .. } = totals;
        // Without a file system, each of fio's reads is one request, and there are no others.
        ensure!(
            requests == ios.total,
            "the window was not quiet: fio read {} times, but there were {requests} requests",
            ios.total
        );
        Ok(Row {
            mode,
            disk: disk.to_owned(),
            iops: ios.iops,
            p50_us: ios.p50_us,
            p99_us: ios.p99_us,
            kicks_per_request: kicks as f64 / requests as f64,
            interrupts_per_request: interrupts as f64 / requests as f64,
            verified: complaints.is_empty(),
            requests,
            kicks,
            interrupts,
            complaints,
        })
    }
}

/// The differences of a window's counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) ios: Ios,
    pub(crate) requests: u64,
    pub(crate) kicks: u64,
    pub(crate) interrupts: u64,
    pub(crate) misses: u64,
}

impl Counted {
    fn totals(&self) -> Result<Totals> {
        let ios = self.ios.context("fio reported nothing")?;
        let requests =
            difference(self.begin.requests, self.end.requests).context("requests in the guest")?;
        let interrupts = difference(Some(self.begin.interrupts), Some(self.end.interrupts))
            .context("interrupts")?;
        let counted = |what: fn(Counters) -> u64| {
            difference(self.begin.counters.map(what), self.end.counters.map(what))
        };
        let kicks = counted(|counters| counters.kicks).context("kicks")?;
        let served = counted(|counters| counters.requests).context("requests in the daemon")?;
        let misses = counted(|counters| counters.misses).context("misses")?;
        // Both sides must have counted the same requests; otherwise their counts are of different
        // windows.
        ensure!(
            requests == served,
            "the window was not quiet: the guest's kernel counted {requests} requests, the daemon \
             {served}"
        );
        Ok(Totals { ios, requests, kicks, interrupts, misses })
    }
}

fn difference(begin: Option<u64>, end: Option<u64>) -> Result<u64> {
    let (begin, end) =
        (begin.context("not counted at the beginning")?, end.context("not counted at the end")?);
    end.checked_sub(begin).with_context(|| format!("the count went back from {begin} to {end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIO: &str = concat!(
        r#"SIDECORE fio ram read {"jobs":[{"error":0,"read":{"total_ios":100,"iops":20.0,"#,
        r#""lat_ns":{"percentile":{"50.000000":1000,"99.000000":2000}}}}]}"#,
    );
    const WINDOW: Window<'static> = Window { disk: "ram", what: "read" };

    fn hear(findings: &mut Findings, lines: &[&str]) {
        for line in lines {
            findings.note(&console::parse(line).unwrap().unwrap()).unwrap();
        }
    }

    fn session(kicks: u64, served: u64) -> Finding {
        let mut findings = Findings::default();
        let lines = [
            "SIDECORE disk ram vdb virtio1 1",
            "SIDECORE verified ram tree true",
            "SIDECORE verified ram write true",
            "SIDECORE verified ram read true",
            "SIDECORE interrupts ram read begin 24: 5 PCI-MSI virtio1-req.0",
            "SIDECORE interrupts ram read begin 25: 7 PCI-MSI virtio1-req.1",
            "SIDECORE stat ram read begin 50 0 0 0 0 0 0 0 0 0 0",
            "SIDECORE interrupts ram read end 24: 55 PCI-MSI virtio1-req.0",
            "SIDECORE interrupts ram read end 25: 57 PCI-MSI virtio1-req.1",
            "SIDECORE stat ram read end 150 0 0 0 0 0 0 0 0 0 0",
            // Counts of another window must not be added to this one's.
            "SIDECORE interrupts ram other end 25: 99 PCI-MSI virtio1-req.1",
            FIO,
        ];
        hear(&mut findings, &lines);
        let counters = |kicks, requests| Some(Counters { kicks, requests, misses: 0 });
        findings.sample(WINDOW, Edge::Begin).unwrap().counters = counters(10, 1000);
        findings.sample(WINDOW, Edge::End).unwrap().counters = counters(10 + kicks, 1000 + served);
        findings.disks.remove("ram").unwrap()
    }

    #[test]
    fn counts_are_differences_over_the_window() {
        let row = session(50, 100).row(Mode::Interrupt, "ram").unwrap();
        assert_eq!((row.requests, row.kicks, row.interrupts), (100, 50, 100));
        assert_eq!(row.kicks_per_request, 0.5);
        assert_eq!(row.interrupts_per_request, 1.0);
        assert!(row.verified);
    }

    #[test]
    fn a_window_with_foreign_requests_is_refused() {
        assert!(
            session(50, 101)
                .row(Mode::Interrupt, "ram")
                .unwrap_err()
                .to_string()
                .contains("not quiet")
        );
        let mut finding = session(50, 100);
        finding.windows.get_mut("read").unwrap().ios.as_mut().unwrap().total = 99;
        assert!(finding.row(Mode::Interrupt, "ram").unwrap_err().to_string().contains("not quiet"));
    }

    #[test]
    fn a_check_that_failed_or_never_ran_shows() {
        let mut finding = session(0, 100);
        finding.complaints.push("tree: ./x: FAILED".to_owned());
        assert!(!finding.row(Mode::Polled, "ram").unwrap().verified);
        let mut finding = session(0, 100);
        finding.checked.pop();
        let row = finding.row(Mode::Polled, "ram").unwrap();
        assert_eq!(row.complaints, ["read: never checked"]);
        assert!(!row.verified);
    }

    #[test]
    fn the_guest_waits_at_the_windows_and_its_failure_ends_the_run() {
        let mut findings = Findings::default();
        hear(&mut findings, &["SIDECORE disk ram vdb virtio1 1", "SIDECORE step ram copy"]);
        let window = console::parse("SIDECORE window ram read begin").unwrap().unwrap();
        assert_eq!(
            findings.note(&window).unwrap(),
            Reaction::Meet { window: WINDOW, edge: Edge::Begin }
        );
        let failed = console::parse("SIDECORE failed no disk").unwrap().unwrap();
        let error = findings.note(&failed).unwrap_err().to_string();
        assert!(error.contains("no disk") && error.contains("ram: copy"), "{error}");
        let foreign = console::parse("SIDECORE window other read begin").unwrap().unwrap();
        assert!(findings.note(&foreign).is_err());
    }
}
