//! One boot: the daemon, the guest, and the talk between host and guest that keeps their counts about the same window.

use crate::console::{self, Edge, Word};
use crate::cores::Cores;
use crate::daemon::{self, Counters, Daemon};
use crate::interrupt::Interrupt;
use crate::measure::{self, Reads};
use crate::process::{Event, Inbox, Source};
use crate::progress::Progress;
use crate::qemu::{Accelerator, Disk, Machine};
use crate::report::{Mode, Row};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) struct Boot<'a> {
    pub(crate) mode: Mode,
    pub(crate) accelerator: Accelerator,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) binaries: &'a Path,
    pub(crate) window: Duration,
}

/// The longest that any step of the guest may take without a word.
const SILENCE: Duration = Duration::from_secs(90);
/// What all the guest's checks must not need more than, apart from the measured windows.
const PATIENCE: Duration = Duration::from_secs(240);
const FIRST_SLOT: u8 = 5;
/// What the guest has to have checked on each disk.
const CHECKS: [&str; 3] = ["tree", "write", "read"];

/// Boots a guest, lets it check and measure both disks, and leaves nothing behind.
pub(crate) fn run(boot: &Boot<'_>, interrupt: &Interrupt, progress: &Progress) -> Result<Vec<Row>> {
    let directory = tempfile::Builder::new().prefix("sidecore-demo-").tempdir().context("cannot create a directory")?;
    let kernel_log = directory.path().join("kernel.log");
    let mut inbox = Inbox::new(interrupt);
    converse(boot, directory.path(), &kernel_log, &mut inbox, progress).map_err(|error| {
        if interrupt.check().is_err() {
            return error;
        }
        let kernel = std::fs::read(&kernel_log).unwrap_or_default();
        let kernel = String::from_utf8_lossy(&kernel);
        let lines: Vec<&str> = kernel.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let tail: String = lines[lines.len().saturating_sub(15)..].iter().map(|l| format!("\n  Kernel: {l}")).collect();
        error.context(format!("the {} run failed{}{tail}", boot.mode, inbox.last_words()))
    })
}

fn converse(
    boot: &Boot<'_>,
    directory: &Path,
    kernel_log: &Path,
    inbox: &mut Inbox<'_>,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let mode = boot.mode;
    let cores = Cores::divide()?;
    let daemon = Daemon::start(inbox, boot.binaries, directory, &cores, mode)?;
    let sockets: Vec<PathBuf> = daemon::DISKS.iter().map(|disk| daemon::socket(directory, disk)).collect();
    let disks: Vec<Disk<'_>> = daemon::DISKS
        .iter()
        .zip(&sockets)
        .zip(FIRST_SLOT..)
        .map(|((name, socket), slot)| Disk { name, socket, slot, packed: *name == daemon::PACKED_DISK })
        .collect();
    let slots: Vec<String> = disks.iter().map(|disk| format!("{}:{:02x}", disk.name, disk.slot)).collect();
    let machine = Machine {
        accelerator: boot.accelerator,
        kernel: boot.kernel,
        initramfs: boot.initramfs,
        kernel_log,
        disks: &disks,
        queues: daemon::QUEUES,
        settings: format!(
            "SIDECORE_MODE={mode} SIDECORE_DISKS={} SIDECORE_PACKED={} SIDECORE_SECONDS={}",
            slots.join(","),
            daemon::PACKED_DISK,
            boot.window.as_secs().max(1)
        ),
    };
    progress.say(format!("{mode}: booting the guest"));
    let mut qemu = cores.elsewhere(|| machine.start(inbox))?;
    let end = Instant::now() + PATIENCE + boot.window * 2;
    let mut findings = Findings::default();
    loop {
        let silence = Instant::now() + SILENCE;
        let line = match inbox.next(silence.min(end))? {
            Some(Event::Line(Source::Guest, line)) => line,
            Some(Event::Line(..)) => continue,
            Some(Event::Closed(Source::Daemon)) => bail!("sidecored ended while the guest was using it"),
            Some(Event::Closed(_)) => bail!("QEMU ended before the guest had finished"),
            None => bail!("the guest has not finished in time; its last step: {}", findings.last_step),
        };
        let Some(word) = console::parse(&line)? else { continue };
        match findings.note(&word)? {
            Reaction::Listen => {}
            Reaction::Tell(what) => progress.say(format!("{mode}: {what}")),
            Reaction::Meet { disk, edge } => {
                findings.counters(disk, edge, daemon.counters(disk)?);
                qemu.write("go\n")?;
            }
            Reaction::Finish => break,
        }
    }
    // The guest is powering off; if that takes long, dropping QEMU ends it as well.
    inbox.wait_closed(Source::Guest, Instant::now() + Duration::from_secs(10))?;
    drop(qemu);
    daemon.stop(inbox)?;
    findings.rows(mode)
}

/// What the host has to do about a word of the guest.
#[derive(Debug, PartialEq, Eq)]
enum Reaction<'a> {
    Listen,
    Tell(String),
    Meet { disk: &'a str, edge: Edge },
    Finish,
}

/// Everything heard so far.
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
    begin: Sample,
    end: Sample,
    reads: Option<Reads>,
}

/// One end of the window.
#[derive(Default)]
struct Sample {
    interrupts: u64,
    requests: Option<u64>,
    counters: Option<Counters>,
}

impl Finding {
    fn sample(&mut self, edge: Edge) -> &mut Sample {
        match edge {
            Edge::Begin => &mut self.begin,
            Edge::End => &mut self.end,
        }
    }
}

impl Findings {
    fn finding(&mut self, disk: &str) -> Result<&mut Finding> {
        self.disks.get_mut(disk).with_context(|| format!("the guest has no disk {disk}"))
    }

    fn note<'a>(&mut self, word: &Word<'a>) -> Result<Reaction<'a>> {
        match *word {
            Word::Booted { release } => return self.step(format!("Linux {release} is up")),
            Word::Tree { files, kib } => return self.step(format!("{files} files of {kib} KiB to copy")),
            Word::Disk { disk, virtio, .. } => {
                self.disks.insert(disk.to_owned(), Finding { virtio: virtio.to_owned(), ..Finding::default() });
            }
            Word::Step { disk, what } => return self.step(format!("{disk}: {what}")),
            Word::Verified { disk, what, complaint } => {
                let finding = self.finding(disk)?;
                finding.checked.push(what.to_owned());
                finding.complaints.extend(complaint.map(|complaint| format!("{what}: {complaint}")));
            }
            Word::Window { disk, edge } => {
                self.finding(disk)?;
                return Ok(Reaction::Meet { disk, edge });
            }
            Word::Interrupts { disk, edge, line } => {
                let finding = self.finding(disk)?;
                let interrupts = measure::request_interrupts(line, &finding.virtio)?;
                finding.sample(edge).interrupts += interrupts;
            }
            Word::Stat { disk, edge, line } => {
                self.finding(disk)?.sample(edge).requests = Some(measure::completed_requests(line)?);
            }
            Word::Fio { disk, json } => self.finding(disk)?.reads = Some(measure::fio_reads(json)?),
            Word::Failed { why } => bail!("in the guest: {why} (during: {})", self.last_step),
            Word::Done => return Ok(Reaction::Finish),
        }
        Ok(Reaction::Listen)
    }

    fn step<'a>(&mut self, what: String) -> Result<Reaction<'a>> {
        self.last_step.clone_from(&what);
        Ok(Reaction::Tell(what))
    }

    fn counters(&mut self, disk: &str, edge: Edge, counters: Counters) {
        if let Some(finding) = self.disks.get_mut(disk) {
            finding.sample(edge).counters = Some(counters);
        }
    }

    fn rows(self, mode: Mode) -> Result<Vec<Row>> {
        let mut disks = self.disks;
        daemon::DISKS
            .iter()
            .map(|disk| {
                let finding = disks.remove(*disk).with_context(|| format!("the guest never saw the disk {disk}"))?;
                finding.row(mode, disk).with_context(|| format!("{mode}/{disk}"))
            })
            .collect()
    }
}

impl Finding {
    fn row(self, mode: Mode, disk: &str) -> Result<Row> {
        let reads = self.reads.context("the guest reported no measurement")?;
        let missing: Vec<&str> = CHECKS.into_iter().filter(|check| !self.checked.iter().any(|c| c == check)).collect();
        let mut complaints = self.complaints;
        complaints.extend(missing.iter().map(|check| format!("{check}: never checked")));
        let requests = difference(self.begin.requests, self.end.requests).context("requests in the guest")?;
        let interrupts = difference(Some(self.begin.interrupts), Some(self.end.interrupts)).context("interrupts")?;
        let kicks_of = |sample: &Sample| sample.counters.map(|counters| counters.kicks);
        let served_of = |sample: &Sample| sample.counters.map(|counters| counters.requests);
        let kicks = difference(kicks_of(&self.begin), kicks_of(&self.end)).context("kicks")?;
        let served = difference(served_of(&self.begin), served_of(&self.end)).context("requests in the daemon")?;
        // Both sides must have counted the same requests, or the counts of the two do not belong together.
        ensure!(
            requests == reads.total && requests == served,
            "the window was not quiet: fio read {} times, the guest's kernel counted {requests} requests, the daemon {served}",
            reads.total
        );
        Ok(Row {
            mode,
            disk: disk.to_owned(),
            iops: reads.iops,
            p50_us: reads.p50_us,
            p99_us: reads.p99_us,
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

fn difference(begin: Option<u64>, end: Option<u64>) -> Result<u64> {
    let (begin, end) = (begin.context("not counted at the beginning")?, end.context("not counted at the end")?);
    end.checked_sub(begin).with_context(|| format!("the count went back from {begin} to {end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIO: &str = r#"SIDECORE fio ram {"jobs":[{"error":0,"read":{"total_ios":100,"iops":20.0,"lat_ns":{"percentile":{"50.000000":1000,"99.000000":2000}}}}]}"#;

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
            "SIDECORE interrupts ram begin 24: 5 PCI-MSI virtio1-req.0",
            "SIDECORE interrupts ram begin 25: 7 PCI-MSI virtio1-req.1",
            "SIDECORE stat ram begin 50 0 0 0 0 0 0 0 0 0 0",
            "SIDECORE interrupts ram end 24: 55 PCI-MSI virtio1-req.0",
            "SIDECORE interrupts ram end 25: 57 PCI-MSI virtio1-req.1",
            "SIDECORE stat ram end 150 0 0 0 0 0 0 0 0 0 0",
            FIO,
        ];
        hear(&mut findings, &lines);
        findings.counters("ram", Edge::Begin, Counters { kicks: 10, requests: 1000 });
        findings.counters("ram", Edge::End, Counters { kicks: 10 + kicks, requests: 1000 + served });
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
        assert!(session(50, 101).row(Mode::Interrupt, "ram").unwrap_err().to_string().contains("not quiet"));
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
        let window = console::parse("SIDECORE window ram begin").unwrap().unwrap();
        assert_eq!(findings.note(&window).unwrap(), Reaction::Meet { disk: "ram", edge: Edge::Begin });
        let failed = console::parse("SIDECORE failed no disk").unwrap().unwrap();
        let error = findings.note(&failed).unwrap_err().to_string();
        assert!(error.contains("no disk") && error.contains("ram: copy"), "{error}");
        let foreign = console::parse("SIDECORE window other begin").unwrap().unwrap();
        assert!(findings.note(&foreign).is_err());
    }
}
