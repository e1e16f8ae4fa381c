//! The rules that the IOhost enforces (vRIO, section 4.6): root in a guest and root on a VMhost try
//! to pass them, while the guest of the other VMhost writes on.

use super::config::{self, DISK_MIB, Device, Limits, READ_ONLY, READS_PER_SECOND};
use super::intruder::{BLOCK, Intruder, Lie, Tap, iohost};
use super::net::{LossyNet, STATIONS, Station};
use super::run::{LOAD, LOAD_SIZE, Place, READ_ONLY_SLOT, count, wait_for};
use super::store::Digest;
use crate::checks::Checks;
use crate::guest::Guest;
use crate::measure;
use crate::nvme::log;
use crate::session::Session;
use anyhow::{Context, Result, ensure};
use sidecore_block::{BlockError, Operation};
use sidecore_kit::namespace::Namespace;
use sidecore_linux::Clock;
use sidecore_trust::{ClientTrust, Invitation, PrivateKey};
use std::time::{Duration, Instant};

/// The longest time for something that the IOhost allows.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time for which something that it refuses is tried.
const TRIES: Duration = Duration::from_millis(1500);
/// Raw frames of each kind.
const FRAMES: usize = 100;
/// The time of a flood of reads.
const FLOOD: Duration = Duration::from_secs(2);
/// The numbers of devices that an intruder tries.
const NUMBERS: u16 = 4;

/// The parts of the run.
struct Trial<'t, 'a> {
    session: &'t mut Session<'a>,
    place: Place,
    checks: &'t mut Checks,
}

/// Tries everything, and ends the run. Returns the checksums of the disks as the guests leave them.
pub(super) fn run(
    session: &mut Session<'_>,
    place: Place,
    [mut virtio, mut nvme]: [Guest; 2],
    digests: &[Digest],
    checks: &mut Checks,
) -> Result<Vec<Digest>> {
    let mut trial = Trial { session, place, checks };
    trial.root_in_guest(&mut virtio)?;
    trial.raw_frames(&mut virtio)?;
    trial.rates(&mut nvme)?;
    let digest = trial.leave(virtio, &STATIONS[0])?;
    let what = "raw frames and forbidden writes have changed no file of the guest";
    trial.note(what, digest == digests[0], digest.words());
    trial.place.vmhosts[0].stop(trial.session)?;

    nvme.order(trial.session, &format!("load {LOAD} {LOAD_SIZE}"))?;
    trial.another_device()?;
    trial.keys()?;
    trial.lies()?;
    trial.revoked()?;
    let rounds = nvme.rounds_done(trial.session, 1)?;
    nvme.rounds_done(trial.session, rounds + 1)?;
    let rounds: u64 = nvme.order(trial.session, "endload")?.number("rounds")?;
    let found = format!("{rounds} rounds of {LOAD_SIZE} MiB, each read back by fio");
    trial.note("the other VMhost's guest has written on, without an error", true, found);
    let digests = vec![digest, trial.leave(nvme, &STATIONS[1])?];
    trial.place.vmhosts[1].stop(trial.session)?;
    trial.place.iohost.stop(trial.session)?;
    Ok(digests)
}

impl Trial<'_, '_> {
    fn note(&mut self, what: &str, ok: bool, found: impl Into<String>) {
        self.checks.note(self.session, what, ok, found);
    }

    /// A counter of the first VMhost at the IOhost.
    fn counter(&self, name: &str) -> Result<u64> {
        count(&self.place.iohost.sidecore.remote()?, STATIONS[0].client, name)
    }

    /// The namespace of the first VMhost.
    fn namespace(&self) -> &Namespace {
        &self.place.cables.net.vmhosts[0]
    }

    /// Reads a guest's checksums, and lets it power off.
    fn leave(&mut self, mut guest: Guest, station: &Station) -> Result<Digest> {
        let session = &mut *self.session;
        let digest = guest.order(session, &format!("digest {LOAD} {LOAD_SIZE}"))?;
        guest.order(session, "unmount")?;
        let logged = guest.order(session, "log")?;
        let faults = log::faults(logged.text("lines")?);
        guest.off(session)?;
        let what = format!("the kernel of the guest on {} has logged no error", station.client);
        self.note(&what, faults.is_empty(), if faults.is_empty() { "none" } else { &faults[0] });
        Digest::of(&digest)
    }

    fn root_in_guest(&mut self, guest: &mut Guest) -> Result<()> {
        let answer = guest.order(self.session, &format!("forbidden {READ_ONLY_SLOT:02x}"))?;
        // The guest's kernel logs what it refuses.
        guest.order(self.session, "log")?;
        let found = format!("dd ended with {}: {}", answer.text("code")?, answer.text("words")?);
        let is_refused = answer.text("code")? != "0" && self.is_untouched(READ_ONLY)?;
        let what = "root in the guest cannot write to a disk that the IOhost has read-only";
        self.note(what, is_refused, found);
        Ok(())
    }

    /// Whether a store has zeros alone, as at first.
    fn is_untouched(&self, disk: &str) -> Result<bool> {
        let content = std::fs::read(config::store(&self.place.stores, disk))?;
        Ok(!content.is_empty() && content.iter().all(|byte| *byte == 0))
    }

    /// Sends frames again that the VMhost's daemon has sent, and changed ones.
    fn raw_frames(&mut self, guest: &mut Guest) -> Result<()> {
        let station = &STATIONS[0];
        let clock = Clock::new();
        let mut tap = Tap::open(&self.place.cables.middle, LossyNet::tap(station))?;
        guest.order(self.session, "flood 1")?;
        let mut sent: Vec<Vec<u8>> = Vec::new();
        while sent.len() < FRAMES {
            let more = tap.receive(clock.now());
            ensure!(!more.is_empty(), "the VMhost has sent only {} frames", sent.len());
            // Frames of a session, whose counter is not zero.
            sent.extend(more.into_iter().filter(|frame| frame.get(10..18) != Some(&[0; 8])));
        }
        sent.truncate(FRAMES);
        let mut raw = Tap::open(self.namespace(), station.vmhost.interface)?;
        let forged = |frame: &Vec<u8>| {
            let mut frame = frame.clone();
            // A counter that was not used yet, and a wrong bit behind the header.
            frame[14] ^= 1;
            if let Some(byte) = frame.get_mut(40) {
                *byte ^= 1;
            }
            frame
        };
        let forged: Vec<Vec<u8>> = sent.iter().map(forged).collect();
        for (frames, counter, kind) in
            [(sent, "dropped_replayed", "sent again"), (forged, "dropped_seal", "forged")]
        {
            let before = self.counter(counter)?;
            let mut left = frames;
            while !left.is_empty() {
                raw.send(clock.now(), iohost(station)?, &mut left);
            }
            wait_for(counter, || Ok(self.counter(counter)? >= before + FRAMES as u64))?;
            let found = format!("{counter}: {} more", self.counter(counter)? - before);
            let what = format!("root on the VMhost: {FRAMES} frames that are {kind} are dropped");
            self.note(&what, true, found);
        }
        Ok(())
    }

    /// Compares a guest's rate with and without the IOhost's limit.
    fn rates(&mut self, guest: &mut Guest) -> Result<()> {
        let order = format!("flood {}", FLOOD.as_secs());
        let free = measure::fio_ios(guest.order(self.session, &order)?.text("fio")?)?;
        let text = config::iohost(self.session.directory, &self.place.stores, Limits::Reads)?;
        self.place.iohost.stop(self.session)?;
        self.place.iohost.start_again(self.session, &text)?;
        let start = Instant::now();
        let limited = measure::fio_ios(guest.order(self.session, &order)?.text("fio")?)?;
        let most = allowance(start.elapsed());
        let found = format!(
            "{:.0} a second without the limit; with it {} in {:.1} s, at most {most:.0}",
            free.iops,
            limited.total,
            start.elapsed().as_secs_f64()
        );
        let is_bound = free.iops > 1.5 * READS_PER_SECOND as f64;
        let what = "root in the guest: reads are limited by the IOhost, of which the VMhost's \
                    configuration says nothing";
        self.note(what, limited.total as f64 <= most && is_bound, found);
        Ok(())
    }

    /// Runs a daemon whose configuration asks for the other VMhost's disk.
    fn another_device(&mut self) -> Result<()> {
        let station = &STATIONS[0];
        let theirs = [Device { disk: STATIONS[1].disk, keys: "" }];
        let own = self.session.directory.join("theirs");
        std::fs::create_dir(&own)?;
        let mut text = config::vmhost(&own, station, &theirs)?;
        // The control socket and the invitation are this VMhost's.
        let (there, here) = (crate::text(&own)?, crate::text(self.session.directory)?);
        for file in
            [format!("{}.invitation", station.client), format!("{}-control.sock", station.client)]
        {
            text = text.replace(&format!("{there}/{file}"), &format!("{here}/{file}"));
        }
        let vmhost = &mut self.place.vmhosts[0];
        vmhost.start_again(self.session, &text)?;
        wait_for("a session of the VMhost", || {
            Ok(vmhost.sidecore.remote()?["iohosts"][0]["state"] == "connected")
        })?;
        let tried = Instant::now();
        let mut is_ready = false;
        while tried.elapsed() < TRIES {
            is_ready |= vmhost.sidecore.remote()?["iohosts"][0]["devices"][0]["ready"] == true;
            std::thread::sleep(Duration::from_millis(100));
        }
        let report = vmhost.sidecore.remote()?;
        let waits = report["iohosts"][0]["devices"][0]["waits_for"].to_string();
        self.checks.show(&vmhost.sidecore, &["remote", "list"])?;
        // A remote disk that is not there keeps the daemon from ending in order.
        vmhost.kill(self.session)?;
        let what = "a VMhost whose configuration asks for another one's disk does not get it";
        self.note(what, !is_ready, format!("it waits for {waits}"));
        Ok(())
    }

    /// Whether a client with this name and trust gets a session from the first VMhost's place.
    fn admits(&self, name: &str, trust: ClientTrust, patience: Duration) -> Result<bool> {
        let who = (name.parse()?, trust);
        let mut intruder = Intruder::new(self.namespace(), &STATIONS[0], who, Lie::None)?;
        intruder.runs_until(patience, |it| it.is_connected())
    }

    fn invitation(&self) -> Result<Invitation> {
        let file = config::invitation(self.session.directory, STATIONS[0].client);
        Ok(Invitation::read(&file)?)
    }

    /// Tries names and keys that are not this VMhost's.
    fn keys(&mut self) -> Result<()> {
        let (own, other) = (STATIONS[0].client, STATIONS[1].client);
        let invitation = self.invitation()?;
        let stranger = Invitation { key: PrivateKey::generate()?, ..invitation.clone() };
        let trust = ClientTrust::invited;
        for (what, name, trust) in [
            ("with its own key, but the other one's name", other, trust(&invitation)),
            ("with its own name, but another key", own, trust(&stranger)),
            ("with its own name, but without a key", own, ClientTrust::off()),
        ] {
            let is_admitted = self.admits(name, trust, TRIES)?;
            let what = format!("a VMhost that comes {what} gets no session");
            self.note(&what, !is_admitted, format!("tried for {} ms", TRIES.as_millis()));
        }
        let is_admitted = self.admits(own, ClientTrust::invited(&invitation), PATIENCE)?;
        self.note("with its own name and key it gets one, at once", is_admitted, own);
        Ok(())
    }

    /// A client of the first VMhost that lies to itself.
    fn intruder(&self, lie: Lie) -> Result<Intruder> {
        let who = (STATIONS[0].client.parse()?, ClientTrust::invited(&self.invitation()?));
        Intruder::new(self.namespace(), &STATIONS[0], who, lie)
    }

    /// Sends the IOhost requests that the VMhost's own daemon would refuse.
    fn lies(&mut self) -> Result<()> {
        let mut intruder = self.intruder(Lie::Larger)?;
        let writable = intruder.attach(READ_ONLY, PATIENCE)?.context("no session")?;
        let result = intruder.result(writable, Operation::Write, 0, PATIENCE)?;
        let is_refused =
            result == Some(Err(BlockError::ReadOnly)) && self.is_untouched(READ_ONLY)?;
        let what = "a VMhost that sends a write to its read-only disk gets an error";
        self.note(what, is_refused, format!("{result:?}"));

        let disk = STATIONS[0].disk;
        let device = intruder.attach(disk, PATIENCE)?.context("no session")?;
        let end = DISK_MIB << 20;
        for (operation, verb) in [(Operation::Read, "read"), (Operation::Write, "write")] {
            let inside = intruder.result(device, Operation::Read, end - BLOCK, PATIENCE)?;
            let beyond = intruder.result(device, operation, end, PATIENCE)?;
            let len = std::fs::metadata(config::store(&self.place.stores, disk))?.len();
            let is_refused = inside == Some(Ok(()))
                && beyond == Some(Err(BlockError::OutOfBounds))
                && len == end;
            let what = format!("a VMhost that sends a {verb} behind the end of its disk gets one");
            self.note(&what, is_refused, format!("{beyond:?}; the last block: {inside:?}"));
        }
        let start = Instant::now();
        let done = intruder.flood(device, Operation::Read, FLOOD)?;
        let most = allowance(start.elapsed());
        let found = format!("{done} in {:.1} s, at most {most:.0}", start.elapsed().as_secs_f64());
        let what = "a VMhost that asks as fast as it can gets no more reads than the limit";
        let is_limited = done as f64 <= most && done as f64 > 0.5 * most;
        self.note(what, is_limited, found);
        drop(intruder);
        self.numbers()
    }

    /// Sends requests for devices by numbers that the IOhost did not give.
    fn numbers(&mut self) -> Result<()> {
        let dropped = |it: &Self| it.counter("dropped_device");
        let before = dropped(self)?;
        let mut answered = 0;
        for number in 0..NUMBERS {
            let mut intruder = self.intruder(Lie::Number(number))?;
            let device = intruder.attach(STATIONS[1].disk, PATIENCE)?.context("no session")?;
            let patience = Duration::from_millis(300);
            let result = intruder.result(device, Operation::Read, 0, patience)?;
            answered += u32::from(matches!(result, Some(Ok(()))));
        }
        let more = dropped(self)? - before;
        let what = "a VMhost that names another one's disk by its number gets no answer";
        let found = format!("numbers 0 to {}, dropped_device: {more} more", NUMBERS - 1);
        self.note(what, answered == 0 && more >= u64::from(NUMBERS), found);
        Ok(())
    }

    /// Revokes the VMhost's invitation while it has a session.
    fn revoked(&mut self) -> Result<()> {
        let client = STATIONS[0].client;
        let mut intruder = self.intruder(Lie::None)?;
        ensure!(intruder.runs_until(PATIENCE, |it| it.is_connected())?, "no session");
        self.place.iohost.sidecore.run(&["remote", "revoke", client])?;
        let start = Instant::now();
        let is_out = intruder.runs_until(PATIENCE, |it| !it.is_connected())?;
        let took = start.elapsed();
        let returns = intruder.runs_until(TRIES, |it| it.is_connected())?;
        let what = "a VMhost whose invitation is revoked is out within a second, and stays out";
        let found = format!("out after {} ms", took.as_millis());
        self.note(what, is_out && took < Duration::from_secs(1) && !returns, found);
        Ok(())
    }
}

/// The reads that the IOhost lets a client do in a time, with a burst after a rest.
fn allowance(time: Duration) -> f64 {
    READS_PER_SECOND as f64 * (time.as_secs_f64() + 1.0)
}
