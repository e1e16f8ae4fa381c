//! The run with volumes: a guest on a thin volume, a snapshot of it under load, a second guest on a
//! clone of the snapshot, and the proof that neither sees the other one's writes.

use crate::checks::Checks;
use crate::config::{self, ORIGIN, POOL, POOL_MIB, QUEUES, VOLUME_MIB};
use crate::daemon::Daemon;
use crate::guest::{FIRST, Guest, SECOND};
use crate::session::{Session, Stage};
use crate::sidecore::{Sidecore, in_common};
use crate::{secret, text};
use anyhow::{Result, ensure};
use serde::Serialize;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// The parts of the disk, in MiB. The file system has the first part; the others are written
/// directly.
const FILESYSTEM: u64 = 768;
const LOAD: u64 = 800;
const LOAD_SIZE: u64 = 8;
const FIRST_SECRET: u64 = 850;
const SECOND_SECRET: u64 = 900;
/// The size of a part that is filled with a secret.
const SECRET_SIZE: u64 = 1;
/// The part that the first guest discards, so that the second guest gets its blocks.
const GIVEN_UP: u64 = 950;
const SCATTER: u64 = 960;
const SCATTER_SIZE: u64 = 16;
/// The size of the first guest's disk in the end.
const GROWN_MIB: u64 = VOLUME_MIB + 256;
const SNAPSHOT: &str = "before";
/// The longest wait for background work.
const PATIENCE: Duration = Duration::from_secs(30);

/// The results of the run with volumes.
#[derive(Debug, Clone, Serialize)]
pub struct Volumes {
    /// The checks, and commands with their output.
    #[serde(flatten)]
    pub checks: Checks,
    /// The time of the snapshot, from the start of the command to its end.
    pub snapshot_ms: f64,
    /// The time of the clone, measured the same way.
    pub clone_ms: f64,
}

impl Volumes {
    /// The report.
    pub(crate) fn text(&self) -> String {
        self.checks.text("Thin volumes, a snapshot under load, and a second guest on its clone")
    }
}

/// The times of the snapshot and of its clone.
struct Times {
    snapshot_ms: f64,
    clone_ms: f64,
}

/// Runs all steps.
pub(crate) fn run(stage: &Stage<'_>) -> Result<Volumes> {
    Session::hold(stage, "volumes", |session| {
        let mut checks = Checks::default();
        let daemon = session.daemon(|places| places.volumes())?;
        let Times { snapshot_ms, clone_ms } = play(session, &daemon, &mut checks)?;
        daemon.stop(&mut session.inbox)?;
        // The check reads the store as the next daemon would find it.
        let (clean, found) =
            session.sidecore().check(&["volume", "check", "--path", text(session.pool)?])?;
        checks.note(session, "the store is clean after the daemon's end", clean, found);
        Ok(Volumes { checks, snapshot_ms, clone_ms })
    })
}

fn play(session: &mut Session<'_>, daemon: &Daemon, checks: &mut Checks) -> Result<Times> {
    let sidecore = &daemon.sidecore;
    let mut first = Guest::boot(session, FIRST)?;
    let size: u64 = first.booted(session)?.number("mib")?;
    let found = format!("{size} MiB on {POOL_MIB} MiB");
    checks.note(
        session,
        "the guest's disk is larger than its store",
        size == VOLUME_MIB && size > POOL_MIB,
        found,
    );
    let digest = known_files(session, &mut first, sidecore, checks)?;

    let (rounds, times) = snapshot_under_load(session, &mut first, sidecore, checks)?;
    let socket = config::socket(session.directory, SECOND);
    let (socket, queues) = (text(&socket)?, QUEUES.to_string());
    sidecore.run(&[
        "device",
        "add",
        SECOND,
        socket,
        "--controller",
        POOL,
        "--volume",
        SECOND,
        "--queues",
        &queues,
    ])?;
    let mut second = Guest::boot(session, SECOND)?;
    second.booted(session)?;
    end_load(session, &mut first, rounds, checks)?;

    let changed = first.order(session, "change")?.text("digest")?.to_owned();
    second_looks(session, &mut second, &digest, checks)?;
    let secrets = [secret::make(FIRST)?, secret::make(SECOND)?];
    reuse(session, &mut first, &mut second, sidecore, &secrets[0], checks)?;
    first.order(session, &format!("secret {FIRST} {} {FIRST_SECRET}", secrets[0]))?;
    second.order(session, &format!("secret {SECOND} {} {SECOND_SECRET}", secrets[1]))?;
    search(session, [&mut first, &mut second], &secrets, checks)?;
    first_looks(session, &mut first, &changed, checks)?;
    grow(session, &mut first, sidecore, checks)?;

    checks.show(sidecore, &["volume", "--controller", POOL, "list"])?;
    checks.show(sidecore, &["controller", "--controller", POOL, "show"])?;
    let (clean, found) = sidecore.check(&["volume", "--controller", POOL, "check"])?;
    checks.note(session, "the controller's metadata is clean", clean, found);
    space(session, first, second, sidecore, checks)?;
    Ok(times)
}

/// Grows the volume, and checks that the running guest learns of it.
fn grow(
    session: &mut Session<'_>,
    first: &mut Guest,
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    sidecore.run(&[
        "volume",
        "--controller",
        POOL,
        "resize",
        ORIGIN,
        &format!("{GROWN_MIB}MiB"),
    ])?;
    let start = Instant::now();
    let mib: u64 = first.order(session, &format!("grown {GROWN_MIB}"))?.number("mib")?;
    let found = format!("{mib} MiB, {:.1} s later", start.elapsed().as_secs_f64());
    checks.note(session, "the running guest sees that its disk has grown", mib == GROWN_MIB, found);
    Ok(())
}

/// Makes a file system on the thin volume, with known files. Returns the checksum of their
/// checksums.
fn known_files(
    session: &mut Session<'_>,
    first: &mut Guest,
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<String> {
    first.order(session, &format!("mkfs {FILESYSTEM}"))?;
    let kept = first.order(session, "keep")?;
    session.say(format!("{} files of {} KiB written", kept.text("files")?, kept.text("kib")?));
    checks.show(sidecore, &["volume", "--controller", POOL, "list"])?;
    let volume = sidecore.volume(POOL, ORIGIN)?;
    let ok = volume.allocated_bytes > 0 && volume.allocated_bytes < volume.size_bytes / 8;
    let found = format!("{} MiB of {} MiB", volume.allocated_bytes / MIB, volume.size_bytes / MIB);
    checks.note(
        session,
        "a volume with a file system and files takes a fraction of its size",
        ok,
        found,
    );
    Ok(kept.text("digest")?.to_owned())
}

/// Takes the snapshot, and clones it, while the guest writes. Returns the number of rounds that the
/// load had done then, and the times.
fn snapshot_under_load(
    session: &mut Session<'_>,
    first: &mut Guest,
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<(u64, Times)> {
    first.order(session, &format!("load {LOAD} {LOAD_SIZE}"))?;
    // The snapshot makes the next writes copy only if the load has written every block of its part
    // once.
    first.rounds_done(session, 1)?;
    // fio starts again between its rounds; the snapshot must come while it writes.
    let mut before = sidecore.requests(ORIGIN)?;
    wait_for("the guest's writes", || {
        let now = sidecore.requests(ORIGIN)?;
        Ok(std::mem::replace(&mut before, now) + 20 <= now)
    })?;
    let snapshot =
        sidecore.timed(&["volume", "--controller", POOL, "snapshot", ORIGIN, SNAPSHOT])?;
    let clone = sidecore.timed(&["volume", "--controller", POOL, "clone", SNAPSHOT, SECOND])?;
    let during = sidecore.requests(ORIGIN)? - before;
    wait_for("more of the guest's writes", || {
        Ok(sidecore.requests(ORIGIN)? >= before + during + 20)
    })?;
    let times =
        Times { snapshot_ms: snapshot.as_secs_f64() * 1e3, clone_ms: clone.as_secs_f64() * 1e3 };
    let found = format!(
        "snapshot {:.1} ms, clone {:.1} ms with the command line; {during} requests served around \
         them",
        times.snapshot_ms, times.clone_ms
    );
    checks.note(
        session,
        "a snapshot and its clone are made while the guest goes on writing",
        true,
        found,
    );
    Ok((first.rounds_done(session, 1)?, times))
}

/// Ends the load, which verifies all its writes. It had done `rounds` rounds when the snapshot was
/// taken.
fn end_load(
    session: &mut Session<'_>,
    first: &mut Guest,
    rounds: u64,
    checks: &mut Checks,
) -> Result<()> {
    // One round was in progress at the snapshot; only the round after it began later.
    first.rounds_done(session, rounds + 2)?;
    // The guest fails at the first block with other data than was written.
    let rounds: u64 = first.order(session, "endload")?.number("rounds")?;
    let found = format!(
        "{rounds} rounds of {LOAD_SIZE} MiB in pieces of 512 B to 16 KiB, each read back by fio"
    );
    checks.note(session, "what the guest wrote meanwhile came back as it was written", true, found);
    Ok(())
}

/// Checks that the second guest finds the data of the snapshot, and no later data.
fn second_looks(
    session: &mut Session<'_>,
    second: &mut Guest,
    digest: &str,
    checks: &mut Checks,
) -> Result<()> {
    let fsck = second.order(session, "fsck")?;
    session.say(format!(
        "e2fsck before the journal's recovery ended with {}: {}",
        fsck.text("code")?,
        fsck.text("words")?
    ));
    let recovered: u64 = second.order(session, "mount")?.number("recovered")?;
    checks.note(
        session,
        "ext4 mounts the clone and recovers its journal",
        recovered > 0,
        format!("{recovered} time"),
    );
    second.order(session, "unmount")?;
    let fsck = second.order(session, "fsck")?;
    checks.note(
        session,
        "e2fsck has nothing to say then",
        fsck.text("code")? == "0",
        fsck.text("words")?,
    );
    second.order(session, "mount")?;
    let check = second.order(session, &format!("check {digest}"))?;
    let (verdict, files) = (check.text("verdict")?, check.text("files")?);
    let found = if verdict == "true" { format!("{files} files") } else { verdict.to_owned() };
    checks.note(
        session,
        "every known file has its checksum in the clone",
        verdict == "true",
        found,
    );
    let list = second.order(session, "list")?;
    let files = list.text("files")?;
    let ok = !files.contains("after-snapshot");
    checks.note(session, "what was written after the snapshot is not in the clone", ok, files);
    Ok(())
}

/// Lets the first guest discard blocks with a secret, and the second guest get these blocks and
/// write half of each.
fn reuse(
    session: &mut Session<'_>,
    first: &mut Guest,
    second: &mut Guest,
    sidecore: &Sidecore,
    secret: &str,
    checks: &mut Checks,
) -> Result<()> {
    first.order(session, &format!("secret {FIRST} {secret} {GIVEN_UP}"))?;
    let given_up = sidecore.extents(POOL, FIRST, GIVEN_UP * MIB, SECRET_SIZE * MIB)?;
    first.order(session, &format!("discard {GIVEN_UP} {SECRET_SIZE}"))?;
    let space = wait_for_space(sidecore)?;
    ensure!(space, "the discarded blocks did not become free in time");
    second.order(session, &format!("scatter {SCATTER} {SCATTER_SIZE}"))?;
    let got = sidecore.extents(POOL, SECOND, SCATTER * MIB, SCATTER_SIZE * MIB)?;
    let both = in_common(&given_up, &got);
    let bytes: u64 = given_up.iter().map(|extent| extent.count).sum();
    let found = format!("{} KiB of {} KiB, in writes of half a block", both / 1024, bytes / 1024);
    checks.note(session, "the second guest got blocks that the first gave up", both > 0, found);
    Ok(())
}

/// Searches for both secrets in each guest's disk, and in the host's store.
fn search(
    session: &mut Session<'_>,
    guests: [&mut Guest; 2],
    secrets: &[String; 2],
    checks: &mut Checks,
) -> Result<()> {
    for (guest, [own, other]) in guests.into_iter().zip([[0, 1], [1, 0]]) {
        let (me, them) = ([FIRST, SECOND][own], [FIRST, SECOND][other]);
        let answer =
            guest.order(session, &format!("search {} {}", secrets[own], secrets[other]))?;
        let size: u64 = answer.number("mib")?;
        ensure!(size == VOLUME_MIB, "the {me} guest searched {size} MiB instead of {VOLUME_MIB}");
        let (mine, theirs): (u64, u64) = (answer.number("one")?, answer.number("other")?);
        let what = format!("the {me} guest finds its own secret on its disk");
        checks.note(session, &what, mine > 0, format!("{mine} times in {size} MiB"));
        let what = format!("the {me} guest finds nothing of the {them} guest's there");
        checks.note(session, &what, theirs == 0, format!("{theirs} times in {size} MiB"));
    }
    let mut counts = Vec::new();
    for secret in secrets {
        counts.push(secret::count(session.pool, secret)?);
    }
    let found = format!("{} and {} times", counts[0], counts[1]);
    checks.note(
        session,
        "the host finds both secrets on the store",
        counts.iter().all(|count| *count > 0),
        found,
    );
    Ok(())
}

/// Checks that the first guest has its own data, and no data of the second guest.
fn first_looks(
    session: &mut Session<'_>,
    first: &mut Guest,
    digest: &str,
    checks: &mut Checks,
) -> Result<()> {
    first.order(session, "unmount")?;
    let fsck = first.order(session, "fsck")?;
    checks.note(
        session,
        "e2fsck has nothing to say about the first guest's disk",
        fsck.text("code")? == "0",
        fsck.text("words")?,
    );
    first.order(session, "mount")?;
    let check = first.order(session, &format!("check {digest}"))?;
    let verdict = check.text("verdict")?;
    let found = if verdict == "true" {
        format!("{} files", check.text("files")?)
    } else {
        verdict.to_owned()
    };
    checks.note(
        session,
        "the first guest's files are as it changed them after the snapshot",
        verdict == "true",
        found,
    );
    let list = first.order(session, "list")?;
    let files = list.text("files")?;
    let ok = files.contains("after-snapshot") && !files.contains("second-");
    checks.note(
        session,
        "what the second guest wrote is not in the first guest's file system",
        ok,
        files,
    );
    Ok(())
}

/// Checks that deleted, trimmed and discarded blocks become free space.
fn space(
    session: &mut Session<'_>,
    mut first: Guest,
    mut second: Guest,
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    let allocated =
        |name: &str| -> Result<u64> { Ok(sidecore.volume(POOL, name)?.allocated_bytes) };
    let (before, free_before) = (allocated(FIRST)?, free(sidecore)?);
    let words = first.order(session, "trim")?.text("words")?.to_owned();
    let after = allocated(FIRST)?;
    // The snapshot still has the blocks of its time; blocks written later are free now.
    let freed = wait_for_free(sidecore, free_before + SECRET_SIZE * MIB / 2)?;
    let found = format!(
        "{} KiB allocated before, {} KiB after; {} MiB free before, {} MiB after; {words}",
        before / 1024,
        after / 1024,
        free_before / MIB,
        free(sidecore)? / MIB
    );
    let what = "fstrim in the guest gives back what its file system does not use";
    checks.note(session, what, after < before && freed, found);

    // The clone discards the load's part, and the first guest has rewritten it: so only the
    // snapshot has the old blocks.
    second.order(session, &format!("discard {LOAD} {LOAD_SIZE}"))?;
    wait_for_space(sidecore)?;
    let before = free(sidecore)?;
    sidecore.run(&["volume", "--controller", POOL, "delete", SNAPSHOT])?;
    let freed = wait_for_free(sidecore, before + LOAD_SIZE * MIB)?;
    let found = format!("{} MiB free before, {} MiB after", before / MIB, free(sidecore)? / MIB);
    checks.note(session, "deleting the snapshot frees what only it had", freed, found);

    second.off(session)?;
    let before = free(sidecore)?;
    sidecore.run(&["device", "remove", SECOND])?;
    sidecore.run(&["volume", "--controller", POOL, "delete", SECOND])?;
    let freed = wait_for_free(sidecore, before + SCATTER_SIZE * MIB)?;
    let found = format!("{} MiB free before, {} MiB after", before / MIB, free(sidecore)? / MIB);
    checks.note(session, "so does removing the second guest's disk at run time", freed, found);
    first.off(session)
}

fn free(sidecore: &Sidecore) -> Result<u64> {
    Ok(sidecore.controller(POOL)?.space.free_bytes)
}

/// Waits until so many bytes are free. Freed blocks can be used again only some time later.
fn wait_for_free(sidecore: &Sidecore, bytes: u64) -> Result<bool> {
    wait(|| Ok(free(sidecore)? >= bytes))
}

/// Waits until all freed blocks can be used again.
fn wait_for_space(sidecore: &Sidecore) -> Result<bool> {
    wait(|| Ok(sidecore.controller(POOL)?.space.pending_bytes == 0))
}

fn wait_for(what: &str, happened: impl FnMut() -> Result<bool>) -> Result<()> {
    ensure!(wait(happened)?, "{what} did not come in time");
    Ok(())
}

fn wait(mut happened: impl FnMut() -> Result<bool>) -> Result<bool> {
    let end = Instant::now() + PATIENCE;
    while !happened()? {
        if Instant::now() >= end {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_uses_of_the_disk_overlap() {
        let parts = [
            (0, FILESYSTEM),
            (LOAD, LOAD_SIZE),
            (FIRST_SECRET, SECRET_SIZE),
            (SECOND_SECRET, SECRET_SIZE),
            (GIVEN_UP, SECRET_SIZE),
            (SCATTER, SCATTER_SIZE),
        ];
        assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert!(parts.iter().all(|(first, size)| first + size <= VOLUME_MIB));
    }
}
