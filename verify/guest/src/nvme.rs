//! The run with NVMe: a guest with the kernel's own nvme driver on functions of the daemon, over
//! vfio-user.

mod commands;
pub(crate) mod log;
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

/// The parts of the disk, in MiB. The file system has the first part; the others are written
/// directly.
const FILESYSTEM: u64 = 160;
/// The part for nvme-cli's commands.
pub(crate) const COMMANDS: u64 = 168;
/// The part that fio verifies and then measures.
const BLOCKS: u64 = 176;
const BLOCKS_SIZE: u64 = 16;
/// The part that the load writes.
const LOAD: u64 = 200;
const LOAD_SIZE: u64 = 4;
/// The size of the disk after it has grown.
const GROWN: u64 = 384;
/// The port of the function that the guest boots with, and the port for functions that are plugged
/// later.
const PORT: u8 = FIRST_SLOT;
const OTHER_PORT: u8 = FIRST_SLOT + 1;
/// The port of the physical function.
const MANAGER_PORT: u8 = FIRST_SLOT + 2;
/// Restarts of the daemon under load.
const RESTARTS: u64 = 3;
/// The size of the volume that the guest makes.
const MADE: u64 = 224;
/// The longest time until a guest releases a device.
const PATIENCE: Duration = Duration::from_secs(60);

/// The results of the run with NVMe.
#[derive(Debug, Clone, Serialize)]
pub struct Nvme {
    /// The version of the QEMU that is the vfio-user client.
    pub qemu: String,
    /// Whether this QEMU can unplug a function with MSI-X. If it would abort, the guest removes the
    /// function by itself. QEMU can always unplug a function with MSI.
    pub can_unplug: bool,
    /// The cost of commands, polled and with interrupts.
    pub ways: Vec<Way>,
    /// The checks, and commands with their output.
    #[serde(flatten)]
    pub checks: Checks,
}

impl Nvme {
    /// The report.
    pub(crate) fn text(&self) -> String {
        let title =
            format!("NVMe functions over vfio-user (QEMU {}), with Linux's nvme driver", self.qemu);
        format!("{}\n{}", self.checks.text(&title), ways::table(&self.ways))
    }

    /// The checks and measurements that failed, in words.
    pub(crate) fn faults(&self) -> Vec<String> {
        [self.checks.faults(), ways::faults(&self.ways)].concat()
    }
}

/// Runs all steps.
pub(crate) fn run(stage: &Stage<'_>, emulator: &Emulator, window: Duration) -> Result<Nvme> {
    Session::hold(stage, "nvme", |session| {
        let mut checks = Checks::default();
        let daemon = session.daemon(|places| places.nvme())?;
        let function = qemu::function(VF, &config::socket(session.directory, VF), PORT)?;
        let ports = [(PORT, Some(function)), (OTHER_PORT, None), (MANAGER_PORT, None)];
        let ports = ports.map(|(slot, device)| Port { slot, device });
        let can_unplug = unplug::can_unplug(session, emulator)?;
        let guest = Guest::boot_nvme(session, emulator, &ports, true)?;
        let qmp = session.qmp(NVME)?;
        let steps = Steps { session, guest, qmp, checks: &mut checks, can_unplug };
        let ways = steps.all(daemon, window)?;
        let (clean, found) =
            session.sidecore().check(&["volume", "check", "--path", text(session.pool)?])?;
        checks.note(session, "the store is clean after the daemon's end", clean, found);
        Ok(Nvme { qemu: emulator.version(), can_unplug, ways, checks })
    })
}

/// The guest's description of a function.
pub(crate) struct Found {
    /// The controller's name in the guest.
    pub(crate) controller: String,
    /// The disk's name in the guest.
    pub(crate) dev: String,
    mib: u64,
}

/// The participants of the run.
struct Steps<'s, 'a> {
    session: &'s mut Session<'a>,
    guest: Guest,
    qmp: Qmp,
    checks: &'s mut Checks,
    can_unplug: bool,
}

impl Steps<'_, '_> {
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

    /// Checks that the kernel has logged no error of NVMe.
    fn quiet(&mut self, during: &str) -> Result<()> {
        let said = self.guest.order(self.session, "log")?.text("lines")?.to_owned();
        let faults = log::faults(&said);
        let found = if faults.is_empty() {
            format!("{} lines", log::lines(&said))
        } else {
            faults.join("; ")
        };
        self.note(
            &format!("the kernel's log has no nvme error or timeout: {during}"),
            faults.is_empty(),
            found,
        );
        Ok(())
    }

    fn find(&mut self, slot: u8) -> Result<Found> {
        let found = self.guest.order(self.session, &format!("find {slot:02x}"))?;
        let (controller, dev) =
            (found.text("controller")?.to_owned(), found.text("dev")?.to_owned());
        ensure!(found.text("polls")? == "1", "/dev/{dev} has no queue to poll");
        Ok(Found { controller, dev, mib: found.number("mib")? })
    }

    /// Checks that the guest finds the function at boot, with the size of its volume.
    fn boot(&mut self) -> Result<Found> {
        self.guest.booted(self.session)?;
        let found = self.find(PORT)?;
        let what = "the guest's nvme driver drives the function, and has queues to poll";
        self.note(
            what,
            found.mib == FUNCTION_MIB,
            format!("/dev/{} of {} MiB", found.dev, found.mib),
        );
        self.quiet("boot")?;
        Ok(found)
    }

    /// Makes a file system with known files, and checks it without the guest's page cache. Returns
    /// the checksum of the files' checksums.
    fn filesystem(&mut self) -> Result<String> {
        self.guest.order(self.session, &format!("mkfs {FILESYSTEM}"))?;
        let digest = self.guest.order(self.session, "keep")?.text("digest")?.to_owned();
        self.guest.order(self.session, "unmount")?;
        let fsck = self.guest.order(self.session, "fsck")?;
        self.note(
            "e2fsck has nothing to say about ext4 on it",
            fsck.text("code")? == "0",
            fsck.text("words")?,
        );
        self.known_files("every file in ext4 has its checksum", &digest)?;
        Ok(digest)
    }

    fn known_files(&mut self, what: &str, digest: &str) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        let check = self.guest.order(self.session, &format!("check {digest}"))?;
        self.guest.order(self.session, "unmount")?;
        let verdict = check.text("verdict")?;
        let found = if verdict == "true" {
            format!("{} files", check.text("files")?)
        } else {
            verdict.to_owned()
        };
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

    /// Resets the controller while fio and ext4 write: no data may be lost, and no program may see
    /// an error.
    fn reset_under_load(&mut self, found: &Found) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        self.guest.order(self.session, &format!("load {LOAD} {LOAD_SIZE}"))?;
        let rounds = self.guest.rounds_done(self.session, 1)?;
        let reset =
            self.guest.order(self.session, &format!("nvme reset /dev/{}", found.controller))?;
        let words = format!("{}{}", reset.text("out")?, reset.text("err")?);
        self.note(
            "nvme reset, under load",
            reset.text("code")? == "0",
            format!("code {} {words}", reset.text("code")?),
        );
        // One round was in progress at the reset; only the round after it began later.
        self.guest.rounds_done(self.session, rounds + 2)?;
        let rounds: u64 = self.guest.order(self.session, "endload")?.number("rounds")?;
        let found = format!("{rounds} rounds of {LOAD_SIZE} MiB, each read back by fio");
        self.note("what was written around the reset came back as it was written", true, found);
        self.guest.order(self.session, "unmount")?;
        self.quiet("a controller reset under load")
    }

    /// Grows the volume, and checks that the guest learns of it.
    fn grow(&mut self, daemon: &Daemon) -> Result<()> {
        let size = format!("{GROWN}MiB");
        daemon.sidecore.run(&["volume", "--controller", POOL, "resize", VF, &size])?;
        let start = Instant::now();
        let mib: u64 = self.guest.order(self.session, &format!("grown {GROWN}"))?.number("mib")?;
        let found = format!("{mib} MiB, {:.1} s later", start.elapsed().as_secs_f64());
        self.note("the running guest sees that its namespace has grown", mib == GROWN, found);
        self.quiet("a resize")
    }

    /// Lets the guest manage volumes by the physical function: it makes a volume, checks that a
    /// function shows it, and deletes it.
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

    /// Plugs a second function, with MSI, into the running guest, unplugs it, and does both again.
    fn plug_another(&mut self) -> Result<()> {
        let socket = config::socket(self.session.directory, PLUGGED);
        for what in [
            "a function that is plugged shows up in the running guest, with the volume that was \
             made for it",
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

    /// Lets the guest release a function that fio uses: because QEMU unplugs it, or else by the
    /// guest itself.
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
            "by the guest alone, since this QEMU aborts when it unplugs a vfio-user device with \
             MSI-X"
        };
        let gone =
            self.guest.order(self.session, &format!("gone {slot:02x}"))?.text("gone")?.to_owned();
        let took = start.elapsed().as_secs_f64();
        let pressed = self.guest.order(self.session, "pressed")?;
        let (code, words) = (pressed.text("code")?, pressed.text("words")?);
        let ok = gone == "true" && code != "0";
        let found = format!("{who}, {took:.1} s; fio ended with {code}: {words}");
        self.note(
            &format!("{name} is unplugged under load: its disk goes, and its user is told"),
            ok,
            found,
        );
        self.quiet("a hot-unplug under load")
    }

    /// Restarts the daemon under a guest that writes: no program may see an error, and no data may
    /// be lost.
    fn restart_under_load(&mut self, daemon: &Daemon, digest: &str) -> Result<()> {
        self.guest.order(self.session, "mount")?;
        self.guest.order(self.session, &format!("load {LOAD} {LOAD_SIZE}"))?;
        let mut rounds = self.guest.rounds_done(self.session, 1)?;
        let mut longest = Duration::ZERO;
        for _ in 0..RESTARTS {
            let start = Instant::now();
            daemon.restart(&mut self.session.inbox)?;
            longest = longest.max(start.elapsed());
            // One round was in progress at the restart; only the round after it began later.
            rounds = self.guest.rounds_done(self.session, rounds + 2)?;
        }
        let rounds: u64 = self.guest.order(self.session, "endload")?.number("rounds")?;
        self.guest.order(self.session, "unmount")?;
        let found = format!(
            "{RESTARTS} times, {:.2} s at most; {rounds} rounds of {LOAD_SIZE} MiB, each read back \
             by fio",
            longest.as_secs_f64(),
        );
        self.note(
            "the daemon is restarted under load, and the guest writes and reads on",
            true,
            found,
        );
        self.find(PORT)?;
        self.known_files("every file is as it was before the daemon's restart", digest)?;
        self.quiet(
            "the daemon's restarts under load, where each daemon resumes the connections of the \
             one before",
        )
    }
}
