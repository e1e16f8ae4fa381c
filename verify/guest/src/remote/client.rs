//! A guest that is a client of an IOhost itself: its own `sidecored` serves the remote disk to its
//! own kernel, by ublk. The link is its NIC. The IOhost's daemon is killed while the guest writes.

use super::config::{self, DISK_MIB};
use super::host::Host;
use super::net::{self, GUEST};
use super::run::{FILESYSTEM, LOAD, LOAD_SIZE};
use super::store::{self, Digest};
use crate::checks::Checks;
use crate::emulator::Emulator;
use crate::guest::Guest;
use crate::qemu::{Cable, Nic};
use crate::session::{Session, Stage};
use anyhow::{Context, Result};
use sidecore_kit::namespace::Namespace;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;

/// The IOhost.
const IOHOST: &str = "io3";
/// The directory of the daemon's files in the guest.
const INSIDE: &str = "/run";
/// The rounds that the load finishes after the IOhost's daemon was killed. One of them was in
/// progress then.
const ROUNDS_AFTER: u64 = 2;

/// Does the run, in a guest whose kernel has ublk.
pub(super) fn run(stage: &Stage<'_>) -> Result<Checks> {
    Session::hold(stage, "ublk client", |session| {
        session.share_cores();
        let stores = session.directory.join("stores");
        std::fs::create_dir(&stores)?;
        let disk = config::store(&stores, GUEST.disk);
        std::fs::File::create(disk)?.set_len(DISK_MIB << 20)?;
        let mut checks = Checks::default();
        let namespace = net::with_tap()?;
        let configuration = config::iohost_of_guest(session.directory, &stores, IOHOST)?;
        let mut iohost = Host::start(session, &namespace, IOHOST, &configuration)?;
        let mut guest = boot(session, &namespace)?;
        serve(session, &iohost, &mut guest, &mut checks)?;
        kill_under_load(session, (&mut iohost, configuration.as_str()), &mut guest, &mut checks)?;
        checks.show(&iohost.sidecore, &["remote", "list"])?;
        let digest = leave(session, guest, &mut checks)?;
        iohost.stop(session)?;
        store::compare(session, &stores, GUEST.disk, &digest, &mut checks)?;
        Ok(checks)
    })
}

/// Boots the guest, whose QEMU is in the IOhost's namespace: there is the other end of its cable.
fn boot(session: &mut Session<'_>, namespace: &Namespace) -> Result<Guest> {
    let mut command = ["nsenter", "--net", "--target"].map(str::to_owned).to_vec();
    command.extend([namespace.pid().to_string(), "--".to_owned()]);
    command.extend(session.stage.qemu.command.iter().cloned());
    let nic = Nic {
        name: "wire",
        mac: GUEST.vmhost.address,
        cable: Cable::Tap(GUEST.iohost.interface),
        packed: false,
    };
    let mut guest = Guest::boot_client(session, &Emulator { command }, nic)?;
    guest.booted(session)?;
    Ok(guest)
}

/// Gives the guest its configuration and its invitation, and has its daemon serve the disk.
fn serve(
    session: &mut Session<'_>,
    iohost: &Host,
    guest: &mut Guest,
    checks: &mut Checks,
) -> Result<()> {
    let file = config::invitation(session.directory, GUEST.client);
    iohost.sidecore.run(&["remote", "invite", GUEST.client, crate::text(&file)?])?;
    let invitation = std::fs::read(&file)
        .with_context(|| format!("cannot read the invitation {}", file.display()))?;
    let inside = Path::new(INSIDE);
    let place = config::invitation(inside, GUEST.client);
    put(session, guest, &place, &invitation)?;
    let place = inside.join("client.toml");
    put(session, guest, &place, config::guest(inside)?.as_bytes())?;
    let order = format!("serve {} {}", GUEST.disk, crate::text(&place)?);
    let mib: u64 = guest.order(session, &order)?.number("mib")?;
    let what = "a guest's own sidecored has the IOhost's disk as a block device of its kernel";
    checks.note(session, what, mib == DISK_MIB, format!("/dev/ublkb0, {mib} MiB"));
    let report = iohost.sidecore.remote()?;
    let encryption = report["clients"][0]["encryption"].as_str().unwrap_or("unknown");
    let found = format!("encryption is {encryption}");
    checks.note(
        session,
        "the guest was invited, and its frames are sealed",
        encryption == "on",
        found,
    );
    Ok(())
}

/// Writes a file in the guest, whose orders are words of text.
fn put(session: &mut Session<'_>, guest: &mut Guest, file: &Path, content: &[u8]) -> Result<()> {
    let mut order = format!("put {} ", crate::text(file)?);
    for byte in content {
        write!(order, "{byte:02x}")?;
    }
    guest.order(session, &order).map(drop)
}

/// Makes a file system with known files, and kills the IOhost's daemon while the guest writes.
fn kill_under_load(
    session: &mut Session<'_>,
    (iohost, configuration): (&mut Host, &str),
    guest: &mut Guest,
    checks: &mut Checks,
) -> Result<()> {
    guest.order(session, &format!("mkfs {FILESYSTEM}"))?;
    guest.order(session, "keep")?;
    guest.order(session, &format!("load {LOAD} {LOAD_SIZE}"))?;
    guest.rounds_done(session, 1)?;
    iohost.kill(session)?;
    session.say("the IOhost's daemon is killed, and started again");
    let start = Instant::now();
    iohost.start_again(session, configuration)?;
    let done = guest.rounds_done(session, 0)?;
    guest.rounds_done(session, done + ROUNDS_AFTER)?;
    session.say(format!("{ROUNDS_AFTER} rounds after {:.1} s", start.elapsed().as_secs_f64()));
    let ended = guest.order(session, "endload")?;
    let what = "kill -9 of the IOhost's daemon under load: no request to the block device fails, \
                and fio has read back what it wrote";
    let found = format!("{} rounds of {LOAD_SIZE} MiB", ended.text("rounds")?);
    checks.note(session, what, true, found);
    Ok(())
}

/// Checks the file system and the kernel's log, and ends the device, its daemon and the guest.
/// Returns the checksums of the disk.
fn leave(session: &mut Session<'_>, mut guest: Guest, checks: &mut Checks) -> Result<Digest> {
    guest.order(session, "unmount")?;
    let fsck = guest.order(session, "fsck")?;
    let what = "e2fsck has nothing to say about ext4 on the block device";
    checks.note(session, what, fsck.text("code")? == "0", fsck.text("words")?);
    guest.order(session, "mount")?;
    let digest = Digest::of(&guest.order(session, &format!("digest {LOAD} {LOAD_SIZE}"))?)?;
    guest.order(session, "unmount")?;
    let released = guest.order(session, &format!("release {}", GUEST.disk))?;
    let (gone, code) = (released.text("gone")?, released.text("code")?);
    let what = "the removed device is gone, and the guest's daemon ends in order";
    checks.note(session, what, [gone, code] == ["true", "0"], format!("{gone}, exit code {code}"));
    let kernel = guest.order(session, "kernel")?.text("kernel")?.to_owned();
    checks.note(session, "the guest's kernel logs no errors", kernel == "none", kernel);
    guest.off(session)?;
    Ok(digest)
}
