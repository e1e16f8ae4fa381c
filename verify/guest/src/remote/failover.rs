//! Two IOhosts of one disk, by `sidecore own` and a real etcd: a planned hand-over, the death of
//! the active one's whole host, and a VMhost that serves the disk itself for a time, while its
//! guest writes.

use super::config;
use super::host::Host;
use super::net::{RackNet, STATIONS};
use super::run::wait_for;
use crate::checks::Checks;
use crate::guest::Guest;
use crate::session::Session;
use crate::text;
use anyhow::{Context, Result, ensure};
use sidecore_kit::etcd::Etcd;
use sidecore_kit::interrupt;
use std::path::Path;
use std::time::{Duration, Instant};

const NAMES: [&str; 2] = ["io1", "io2"];
/// The time of the lease, in seconds.
const LEASE: u64 = 5;
/// The longest time for a takeover: busy hosts elect etcd's leader again.
const PATIENCE: Duration = Duration::from_secs(120);

/// The IOhosts that are on, and etcd.
pub(super) struct IoHosts {
    hosts: Vec<Host>,
    etcd: Etcd,
}

impl IoHosts {
    /// Starts etcd and both IOhosts, and waits until the first one serves and the other one waits.
    pub(super) fn start(
        session: &mut Session<'_>,
        net: &RackNet,
        stores: &Path,
        disk: &str,
    ) -> Result<IoHosts> {
        let etcd = Etcd::start(&net.middle, "demo").context("cannot start etcd")?;
        let mut hosts = Vec::new();
        let options = options(stores, disk)?;
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        for ((name, namespace), state) in
            NAMES.into_iter().zip(&net.iohosts).zip(["serving", "waiting for key"])
        {
            let configuration = config::shared(session.directory, stores, name)?;
            let host = Host::candidate(session, namespace, name, &configuration, &options)?;
            wait_for("the states of the IOhosts", || Ok(host.is_candidate(state)))?;
            hosts.push(host);
        }
        let answers = || Ok(hosts[0].sidecore.remote().is_ok());
        wait_for("the daemon of the first IOhost", answers)?;
        session.say("three members of etcd, and two IOhosts: one serves, the other one waits");
        Ok(IoHosts { hosts, etcd })
    }

    /// The IOhost that serves.
    pub(super) fn owner(&self) -> Result<&Host> {
        Ok(&self.hosts[self.owner_index()?])
    }

    fn owner_index(&self) -> Result<usize> {
        let mut found = None;
        wait_for("an IOhost that serves", || {
            found = self.hosts.iter().position(|host| host.is_candidate("serving"));
            Ok(found.is_some())
        })?;
        found.context("no IOhost serves")
    }

    /// Lets the active IOhost hand over, and kills all processes of the next one's host, while a
    /// guest of a VMhost writes.
    pub(super) fn take_over(
        &mut self,
        session: &mut Session<'_>,
        guest: &mut Guest,
        vmhost: &Host,
        checks: &mut Checks,
    ) -> Result<()> {
        wait_for("writes of the guest", || Ok(answered(vmhost)? > 0))?;
        let what = "a planned hand-over: the other IOhost serves the guest, which writes on";
        self.hand_over(session, (guest, vmhost), what, checks)?;

        let mut owner = self.hosts.remove(self.owner_index()?);
        session.say(format!("kill -9 of all processes of {}", owner.name()));
        let begin = Instant::now();
        owner.power_off(session)?;
        let pause = pause_until(&self.hosts[0], vmhost, begin)?;
        let what = "kill -9 of the active IOhost's whole host: the other one takes over";
        let pause = pause.as_secs_f64();
        let found = format!("at most {pause:.1} s without an answer, by a lease of {LEASE} s");
        two_rounds(session, guest)?;
        checks.note(session, what, true, found);
        Ok(())
    }

    /// Lets the active IOhost hand over to the other one.
    fn hand_over(
        &mut self,
        session: &mut Session<'_>,
        (guest, vmhost): (&mut Guest, &Host),
        what: &'static str,
        checks: &mut Checks,
    ) -> Result<()> {
        let owner = self.owner_index()?;
        let (from, to) = (&self.hosts[owner], &self.hosts[1 - owner]);
        session.say(format!("{} hands over to {}", from.name(), to.name()));
        let begin = Instant::now();
        from.hand_over()?;
        let pause = pause_until(to, vmhost, begin)?;
        let found = format!("at most {} ms without an answer", pause.as_millis());
        two_rounds(session, guest)?;
        checks.note(session, what, true, found);
        checks.show(&to.sidecore, &["list"])?;
        wait_for("a successor", || Ok(from.is_candidate("waiting for key")))
    }

    /// Lets the guest's own VMhost take the disk over from the IOhost that is left, and give it
    /// back.
    pub(super) fn serve_near(
        &mut self,
        session: &mut Session<'_>,
        (net, stores, disk): (&RackNet, &Path, &str),
        (guest, vmhost): (&mut Guest, &Host),
        checks: &mut Checks,
    ) -> Result<()> {
        let configuration = config::near(session.directory, stores)?;
        let options = options(stores, disk)?;
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let namespace = &net.vmhosts[0];
        let near = Host::candidate(session, namespace, config::NEAR, &configuration, &options)?;
        wait_for("the VMhost as a candidate", || Ok(near.is_candidate("waiting for key")))?;
        self.hosts.push(near);
        let link = |vmhost: &Host| -> Result<String> {
            let report = vmhost.sidecore.remote()?;
            Ok(report["iohosts"][0]["link"].as_str().context("no IOhost")?.to_owned())
        };
        let what = "the VMhost takes the disk over, and serves its guest itself";
        self.hand_over(session, (guest, vmhost), what, checks)?;
        let found = link(vmhost)?;
        let what = "the guest's requests go through the memory link on its own host";
        checks.note(session, what, found == config::NEAR, found);
        let what = "the VMhost gives the disk back to the IOhost";
        self.hand_over(session, (guest, vmhost), what, checks)?;
        let found = link(vmhost)?;
        let what = "the guest's requests go over the cable again";
        checks.note(session, what, found != config::NEAR, found);
        let mut near = self.hosts.pop().context("no candidate")?;
        near.stop(session)
    }

    /// Ends the IOhosts in order, and then etcd.
    pub(super) fn stop(mut self, session: &mut Session<'_>) -> Result<()> {
        self.hosts.iter_mut().try_for_each(|host| host.stop(session))?;
        drop(self.etcd);
        Ok(())
    }
}

/// The options of all candidates: all hosts are namespaces of one kernel.
fn options(stores: &Path, disk: &str) -> Result<Vec<String>> {
    let (store, record) = (config::store(stores, disk), stores.join("disk.owner"));
    let (endpoints, lease) = (Etcd::endpoints_at(RackNet::ETCD), LEASE.to_string());
    let options = ["--lease", &lease, "--etcd", &endpoints, "--record", text(&record)?];
    let fence = ["--path", text(&store)?, "--fence-lock"];
    Ok(options.into_iter().chain(fence).map(str::to_owned).collect())
}

/// The requests that the VMhost's guest has got answers to.
fn answered(vmhost: &Host) -> Result<u64> {
    vmhost.sidecore.requests(&config::moving_disk(&STATIONS[0]))
}

/// Waits for answers of a successor. Returns the longest time without an answer since `begin`, in
/// which the guest may also have had no request.
fn pause_until(successor: &Host, vmhost: &Host, begin: Instant) -> Result<Duration> {
    let deadline = begin + PATIENCE;
    let (mut last, mut at) = (answered(vmhost)?, begin);
    let mut longest = Duration::ZERO;
    // Only an answer after one that was counted while the successor served is the successor's.
    let mut is_over = false;
    loop {
        interrupt::check()?;
        ensure!(Instant::now() < deadline, "{} does not take over", successor.name());
        let serves = is_over || successor.is_candidate("serving");
        let now = answered(vmhost)?;
        if now > last {
            longest = longest.max(at.elapsed());
            (last, at) = (now, Instant::now());
            if is_over {
                return Ok(longest);
            }
        }
        is_over = serves;
    }
}

/// Waits until fio has written and verified a part of the disk that it began now.
fn two_rounds(session: &mut Session<'_>, guest: &mut Guest) -> Result<()> {
    let done = guest.rounds_done(session, 0)?;
    guest.rounds_done(session, done + 2).map(drop)
}
