//! The run about NVMe: a guest with the kernel's own nvme driver on functions of the daemon, reached over vfio-user. It
//! reads from top to bottom; each check says what must be true.

mod commands;
mod log;
mod manage;
mod unplug;
mod ways;

use crate::checks::Checks;
use crate::config::{self, FUNCTION_MIB, MANAGER, PLUGGED, POOL, VF};
use crate::daemon::Daemon;
use crate::emulator::Emulator;
use crate::guest::{FIRST_SLOT, Guest, NVME};
use crate::qemu::{self, Port};
use crate::qmp::Qmp;
use crate::session::{Session, Stage};
use crate::text;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::time::{Duration, Instant};

pub use ways::Way;

/// The file system takes the first part of the disk; what is behind it is written directly. All places are in MiB.
const FILESYSTEM: u64 = 160;
/// The part that nvme-cli's commands are about.
pub(crate) const COMMANDS: u64 = 168;
/// Read and written by fio, with verification; and then measured.
const BLOCKS: u64 = 176;
const BLOCKS_SIZE: u64 = 16;
/// What the load is about.
const LOAD: u64 = 200;
const LOAD_SIZE: u64 = 4;
/// The size of the disk after it has grown.
const GROWN: u64 = 384;
/// The port whose function is there when the guest boots, and the one for what is plugged later.
const PORT: u8 = FIRST_SLOT;
const OTHER_PORT: u8 = FIRST_SLOT + 1;
/// Where the physical function is plugged.
const MANAGER_PORT: u8 = FIRST_SLOT + 2;
/// How often the daemon is restarted under load.
const RESTARTS: u64 = 3;
/// The size of the volume that its host makes.
const MADE: u64 = 224;
/// How long a guest may take to let go of a device.
const PATIENCE: Duration = Duration::from_secs(60);

/// What was found in the run about NVMe.
#[derive(Debug, Clone, Serialize)]
pub struct Nvme {
    /// The version of the QEMU that is the client.
    pub qemu: String,
    /// Whether it can unplug a function with MSI-X: where it would abort, the guest lets go of it by itself. One with MSI it
    /// unplugs.
    pub can_unplug: bool,
    /// What commands cost, polled and with interrupts.
    pub ways: Vec<Way>,
    /// What was checked, and what some commands printed.
    #[serde(flatten)]
    pub checks: Checks,
}

impl Nvme {
    /// For people.
    pub(crate) fn text(&self) -> String {
        let title = format!("NVMe functions over vfio-user (QEMU {}), with Linux's nvme driver", self.qemu);
        format!("{}\n{}", self.checks.text(&title), ways::table(&self.ways))
    }

    /// What is not as it must be.
    pub(crate) fn faults(&self) -> Vec<String> {
        [self.checks.faults(), ways::faults(&self.ways)].concat()
    }
}

/// Does all of it, and leaves nothing behind.
pub(crate) fn run(stage: &Stage<'_>, emulator: &Emulator, window: Duration) -> Result<Nvme> {
    Session::hold(stage, "nvme", |session| {
        let mut checks = Checks::default();
        let daemon = session.daemon(|places| places.nvme())?;
        let function = qemu::function(VF, &config::socket(session.directory, VF), PORT)?;
        let ports = [(PORT, Some(function)), (OTHER_PORT, None), (MANAGER_PORT, None)];
        let ports = ports.map(|(slot, device)| Port { slot, device });
        let can_unplug = unplug::can_unplug(session, emulator)?;
        let guest = Guest::boot_nvme(session, emulator, &ports)?;
        let qmp = session.qmp(NVME)?;
        let play = Play { session, guest, qmp, checks: &mut checks, can_unplug };
        let ways = play.all(daemon, window)?;
        let (clean, found) = session.sidecore().check(&["volume", "check", "--path", text(session.pool)?])?;
        checks.note(session, "the store is clean after the daemon's end", clean, found);
        Ok(Nvme { qemu: emulator.version(), can_unplug, ways, checks })
    })
}

/// What the guest says about a function that it found.
pub(crate) struct Found {
    /// The controller's name in the guest.
    pub(crate) controller: String,
    /// The disk's.
    pub(crate) dev: String,
    mib: u64,
}

/// Those who take part.
struct Play<'s, 'a> {
    session: &'s mut Session<'a>,
    guest: Guest,
    qmp: Qmp<'a>,
    checks: &'s mut Checks,
    can_unplug: bool,
}

impl Play<'_, '_> {
    fn all(mut self, daemon: Daemon, window: Duration) -> Result<Vec<Way>> {
        let found = self.boot()?;
        commands::run(self.session, &mut self.guest, &found, self.checks)?;
        self.quiet("nvme-cli's commands")?;
        let digest = self.filesystem()?;
        self.blocks()?;
        let ways = ways::measure(self.session, &mut self.guest, &daemon, BLOCKS, window)?;
        self.quiet("files, fio and its verification")?;

        self.reset_under_load(&found)?;
        self.grow(&daemon)?;
        self.manage()?;
        self.restart_under_load(&daemon, &digest)?;
        self.unplug_under_load(VF, PORT, self.can_unplug)?;

        self.guest.off(self.session)?;
        daemon.stop(&mut self.session.inbox)?;
        Ok(ways)
    }

    fn note(&mut self, what: &str, ok: bool, found: impl Into<String>) {
        self.checks.note(self.session, what, ok, found);
    }

    /// The kernel has not said anything that it should not have.
    fn quiet(&mut self, during: &str) -> Result<()> {
        let said = self.guest.order(self.session, "log")?.text("lines")?.to_owned();
        let faults = log::faults(&said);
        let found = if faults.is_empty() { format!("{} lines", log::lines(&said)) } else { faults.join("; ") };
        self.note(&format!("the kernel's log has no nvme error or timeout: {during}"), faults.is_empty(), found);
        Ok(())
    }

    fn find(&mut self, slot: u8) -> Result<Found> {
        let found = self.guest.order(self.session, &format!("find {slot:02x}"))?;
        let (controller, dev) = (found.text("controller")?.to_owned(), found.text("dev")?.to_owned());
        ensure!(found.text("polls")? == "1", "/dev/{dev} has no queue to poll");
        Ok(Found { controller, dev, mib: found.number("mib")? })
    }

    /// The guest finds the function that was there from the beginning, with the size of its volume.
    fn boot(&mut self) -> Result<Found> {
        self.guest.booted(self.session)?;
        let found = self.find(PORT)?;
        let what = "the guest's nvme driver drives the function, and has queues to poll";
        self.note(what, found.mib == FUNCTION_MIB, format!("/dev/{} of {} MiB", found.dev, found.mib));
        self.quiet("boot")?;
        Ok(found)
    }

    /// A file system with known files, of which nothing is answered from the guest's memory. Returns the checksum of
    /// their checksums.
    fn filesystem(&mut self) -> Result<String> {
        self.guest.order(self.session, &format!("mkfs {FILESYSTEM}"))?;
        let digest = self.guest.order(self.session, "keep")?.text("digest")?.to_owned();
        self.guest.order(self.session, "unmount")?;
        let fsck = self.guest.order(self.session, "fsck")?;
        self.note("e2fsck has nothing to say about ext4 on it", fsck.text("code")? == "0", fsck.text("words")?);
        self.known_files("every file in ext4 has its checksum", &digest)?;
        Ok(digest)
    }

    fn known_files(&mut self, what: &str, digest: &str) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        let check = self.guest.order(self.session, &format!("check {digest}"))?;
        self.guest.order(self.session, "unmount")?;
        let verdict = check.text("verdict")?;
        let found = if verdict == "true" { format!("{} files", check.text("files")?) } else { verdict.to_owned() };
        self.note(what, verdict == "true", found);
        Ok(())
    }

    fn blocks(&mut self) -> Result<()> {
        let answer = self.guest.order(self.session, &format!("fio {BLOCKS} {BLOCKS_SIZE}"))?;
        for way in ["write", "read"] {
            let verdict = answer.text(way)?;
            let what = format!("fio, polled (random {way}s), verifies what it wrote");
            self.note(&what, verdict == "true", format!("{BLOCKS_SIZE} MiB: {verdict}"));
        }
        Ok(())
    }

    /// A controller reset while fio and ext4 write: nothing is lost, and nobody sees an error.
    fn reset_under_load(&mut self, found: &Found) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        self.guest.order(self.session, &format!("load {LOAD} {LOAD_SIZE}"))?;
        let rounds = self.guest.rounds_done(self.session, 1)?;
        let reset = self.guest.order(self.session, &format!("nvme reset /dev/{}", found.controller))?;
        let words = format!("{}{}", reset.text("out")?, reset.text("err")?);
        self.note(
            "nvme reset, under load",
            reset.text("code")? == "0",
            format!("code {} {words}", reset.text("code")?),
        );
        // One round was under way then, and the one after it began later.
        self.guest.rounds_done(self.session, rounds + 2)?;
        let rounds: u64 = self.guest.order(self.session, "endload")?.number("rounds")?;
        let found = format!("{rounds} rounds of {LOAD_SIZE} MiB, each read back by fio");
        self.note("what was written around the reset came back as it was written", true, found);
        self.guest.order(self.session, "unmount")?;
        self.quiet("a controller reset under load")
    }

    /// The volume grows, and the guest is told.
    fn grow(&mut self, daemon: &Daemon) -> Result<()> {
        let size = format!("{GROWN}MiB");
        daemon.sidecore.run(&["volume", "--controller", POOL, "resize", VF, &size])?;
        let start = Instant::now();
        let mib: u64 = self.guest.order(self.session, &format!("grown {GROWN}"))?.number("mib")?;
        let found = format!("{mib} MiB, {:.1} s later", start.elapsed().as_secs_f64());
        self.note("the running guest sees that its namespace has grown", mib == GROWN, found);
        self.quiet("a resize")
    }

    /// The guest has the physical function as well: it makes a volume, sees that it is served, and deletes it.
    fn manage(&mut self) -> Result<()> {
        let socket = config::socket(self.session.directory, MANAGER);
        self.qmp.plug(qemu::function(MANAGER, &socket, MANAGER_PORT)?)?;
        let manager = self.find(MANAGER_PORT)?;
        let made = manage::make(self.session, &mut self.guest, &manager, self.checks, MADE)?;
        self.quiet("the management of volumes")?;
        self.plug_another()?;
        manage::unmake(self.session, &mut self.guest, &manager, self.checks, made)?;
        self.guest.order(self.session, &format!("remove {MANAGER_PORT:02x}"))?;
        self.guest.order(self.session, &format!("gone {MANAGER_PORT:02x}"))?;
        self.find(PORT)?;
        self.quiet("the end of the management")
    }

    /// A second function, with MSI, comes and goes while the guest runs, and comes and goes again.
    fn plug_another(&mut self) -> Result<()> {
        let socket = config::socket(self.session.directory, PLUGGED);
        for what in [
            "a function that is plugged shows up in the running guest, with the volume that was made for it",
            "it can be plugged again, where it was before",
        ] {
            self.qmp.plug(qemu::function(PLUGGED, &socket, OTHER_PORT)?)?;
            let found = self.find(OTHER_PORT)?;
            self.note(what, found.mib == MADE, format!("/dev/{} of {} MiB", found.dev, found.mib));
            self.blocks()?;
            self.quiet("a hot-plug")?;
            self.unplug_under_load(PLUGGED, OTHER_PORT, true)?;
        }
        Ok(())
    }

    /// The guest has to let go of a function while fio reads and writes there: since QEMU unplugs it, or else by itself.
    fn unplug_under_load(&mut self, name: &str, slot: u8, by_qemu: bool) -> Result<()> {
        self.find(slot)?;
        self.guest.order(self.session, &format!("press {BLOCKS} {BLOCKS_SIZE}"))?;
        let start = Instant::now();
        let who = if by_qemu {
            self.qmp.unplug(name)?;
            ensure!(self.qmp.unplugged(name, start + PATIENCE)?, "QEMU still has {name}");
            "by QEMU"
        } else {
            self.guest.order(self.session, &format!("remove {slot:02x}"))?;
            "by the guest alone, since this QEMU aborts when it unplugs a vfio-user device with MSI-X"
        };
        let gone = self.guest.order(self.session, &format!("gone {slot:02x}"))?.text("gone")?.to_owned();
        let took = start.elapsed().as_secs_f64();
        let pressed = self.guest.order(self.session, "pressed")?;
        let (code, words) = (pressed.text("code")?, pressed.text("words")?);
        let ok = gone == "true" && code != "0";
        let found = format!("{who}, {took:.1} s; fio ended with {code}: {words}");
        self.note(&format!("{name} is unplugged under load: its disk goes, and its user is told"), ok, found);
        self.quiet("a hot-unplug under load")
    }

    /// The daemon ends and another one begins under a running guest that writes: nobody sees an error, and nothing is lost.
    fn restart_under_load(&mut self, daemon: &Daemon, digest: &str) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        self.guest.order(self.session, &format!("load {LOAD} {LOAD_SIZE}"))?;
        let mut rounds = self.guest.rounds_done(self.session, 1)?;
        let mut longest = Duration::ZERO;
        for _ in 0..RESTARTS {
            let start = Instant::now();
            daemon.restart(&mut self.session.inbox)?;
            longest = longest.max(start.elapsed());
            // One round was under way then, and the one after it began later.
            rounds = self.guest.rounds_done(self.session, rounds + 2)?;
        }
        let rounds: u64 = self.guest.order(self.session, "endload")?.number("rounds")?;
        self.guest.order(self.session, "unmount")?;
        let found = format!(
            "{RESTARTS} times, {:.2} s at most; {rounds} rounds of {LOAD_SIZE} MiB, each read back by fio",
            longest.as_secs_f64(),
        );
        self.note("the daemon is restarted under load, and the guest writes and reads on", true, found);
        self.find(PORT)?;
        self.known_files("every file is as it was before the daemon's restart", digest)?;
        self.quiet("the daemon's restarts under load, each with the next daemon going on")
    }
}
