//! Hosts whose daemons claim, reserve, write, pause and end.

use std::collections::BTreeMap;

use super::disk::{Disk, Write};
use super::{Acquisition, Order, Random, Reply, Rule};
use crate::Member;

const HOSTS: usize = 3;
/// The most writes in flight of a host.
const WRITES: usize = 3;
/// One abort in so many has no reply.
const LOST_ABORTS: usize = 20;

#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A host gets the key, which the last owner may not know.
    Claim,
    /// An attempt sends its next order.
    Order,
    /// An owner, or a daemon that takes itself for one, sends a write.
    Write,
    /// A write on its way arrives at the disk, or one that the disk has taken is carried out.
    Land,
    /// A daemon is killed. Its writes stay in flight.
    Kill,
    /// The owner ends in order.
    Close,
    /// A host is paused, or goes on.
    Pause,
    /// An operator switches a host off whose preemption has no known end, and says so.
    SwitchOff,
    LosePower,
}

impl Step {
    pub(super) const ALL: [Self; 14] = [
        Self::Claim,
        Self::Order,
        Self::Order,
        Self::Order,
        Self::Order,
        Self::Write,
        Self::Write,
        Self::Land,
        Self::Land,
        Self::Kill,
        Self::Close,
        Self::Pause,
        Self::SwitchOff,
        Self::LosePower,
    ];
}

/// An attempt to become the owner of an epoch.
struct Attempt {
    epoch: u64,
    me: Member,
    acquisition: Acquisition,
    /// The hosts whose commands a preemption still has to abort before it ends.
    aborts: Option<Vec<usize>>,
}

#[derive(Default)]
struct Host {
    /// The epoch in which its daemon serves.
    daemon: Option<u64>,
    attempt: Option<Attempt>,
    is_paused: bool,
    me: Member,
}

pub(super) struct Hosts {
    rule: Option<Rule>,
    disk: Disk,
    hosts: Vec<Host>,
    epoch: u64,
    /// The newest epoch whose owner has begun to serve.
    serving: u64,
    incarnations: u64,
    /// The host of each key.
    hosts_of: BTreeMap<u64, usize>,
    suspects: Vec<Member>,
    /// How many times longer than others a write takes.
    slowness: usize,
    /// The record's owner, if it has closed the store in order.
    former: Option<Member>,
    pub(super) served: usize,
}

impl Hosts {
    pub(super) fn new(rule: Option<Rule>, disk: Disk, slowness: usize) -> Self {
        let aborts_nothing = rule == Some(Rule::Abort);
        Self {
            rule,
            disk: Disk { aborts_nothing, ..disk },
            hosts: (0..HOSTS).map(|_| Host::default()).collect(),
            epoch: 0,
            serving: 0,
            incarnations: 0,
            hosts_of: BTreeMap::new(),
            suspects: Vec::new(),
            slowness,
            former: None,
            served: 0,
        }
    }

    pub(super) fn step(&mut self, step: Step, random: &mut Random) -> Result<(), String> {
        let host = random.below(HOSTS);
        if matches!(step, Step::Claim | Step::Order | Step::Write | Step::Close)
            && self.hosts[host].is_paused
        {
            return Ok(());
        }
        match step {
            Step::Claim if random.once_in(6) => self.claim(host),
            Step::Claim => {}
            Step::Order => return self.order(host, random),
            Step::Write => {
                let in_flight = self.disk.writes.iter().filter(|write| write.host == host).count();
                if let Some(epoch) = self.hosts[host].daemon.filter(|_| in_flight < WRITES) {
                    self.disk.writes.push(Write { host, epoch, is_taken: false });
                }
            }
            Step::Land if random.once_in(self.slowness) => return self.land(random),
            Step::Land => {}
            Step::Kill => self.hosts[host].daemon = None,
            Step::Close if random.once_in(3) => self.close(host),
            Step::Close => {}
            Step::Pause if random.once_in(10) => self.hosts[host].is_paused ^= true,
            Step::Pause => {}
            Step::SwitchOff => self.switch_off(host),
            Step::LosePower if random.once_in(10) => self.disk.lose_power(),
            Step::LosePower => {}
        }
        Ok(())
    }

    fn in_flight(&self, host: usize) -> bool {
        self.disk.writes.iter().any(|write| write.host == host)
    }

    /// The locks of a host: it has no daemon, and no request in flight.
    fn is_quiet(&self, host: usize) -> bool {
        self.hosts[host].daemon.is_none() && !self.in_flight(host)
    }

    fn claim(&mut self, host: usize) {
        // An attempt that goes on is given up with its lease, wherever it is.
        if self.hosts[host].attempt.is_some() {
            return;
        }
        if self.rule != Some(Rule::LocalFirst) && !self.is_quiet(host) {
            return;
        }
        self.epoch += 1;
        self.incarnations += 1;
        let is_first = self.hosts[host].me.incarnation == 0;
        let incarnation = if is_first || self.rule != Some(Rule::Fresh) {
            self.incarnations
        } else {
            self.hosts[host].me.incarnation
        };
        let me = Member { name: format!("d{host}"), host: format!("h{host}"), incarnation };
        let others = self.suspects.iter().chain(&self.former);
        let notes = self.disk.notes_of(host);
        let mut acquisition = Acquisition::new("disk", &me, others, notes);
        acquisition.neglected = self.rule;
        self.hosts_of.insert(me.reservation_key(), host);
        self.suspects.push(me.clone());
        let attempt = Attempt { epoch: self.epoch, me: me.clone(), acquisition, aborts: None };
        self.hosts[host].attempt = Some(attempt);
        self.hosts[host].me = me;
        self.hosts[host].daemon = None;
    }

    /// The reply to an order. `None`: the disk has not carried it out yet.
    fn reply(&mut self, host: usize, order: Order, random: &mut Random) -> Option<Reply> {
        let chance = random.below(60);
        if chance == 0 {
            return Some(Reply::Failed("the order was lost".to_owned()));
        }
        let attempt = self.hosts[host].attempt.as_mut()?;
        if let Some(aborted) = attempt.aborts.take() {
            // Without a reply, the abort goes on for longer than this history looks.
            if random.once_in(LOST_ABORTS) {
                return Some(Reply::Failed("the reply was lost".to_owned()));
            }
            self.disk.abort(&aborted);
            return Some(if aborted.is_empty() { Reply::Conflict } else { Reply::Done });
        }
        if let Order::PreemptAndAbort { victim, mine } = order
            && !self.disk.lies
        {
            attempt.aborts = Some(self.disk.end_registrations(host, victim, mine));
            return None;
        }
        let reply = self.disk.carry_out(host, order);
        Some(if chance == 1 { Reply::Failed("the reply was lost".to_owned()) } else { reply })
    }

    fn order(&mut self, host: usize, random: &mut Random) -> Result<(), String> {
        let Some(attempt) = &self.hosts[host].attempt else { return Ok(()) };
        let Some(order) = attempt.acquisition.order() else { return Ok(()) };
        let reply = self.reply(host, order, random);
        self.check_owner()?;
        let Some(reply) = reply else { return Ok(()) };
        let Some(attempt) = &mut self.hosts[host].attempt else { return Ok(()) };
        attempt.acquisition.replied(reply);
        let Some(result) = attempt.acquisition.result() else { return Ok(()) };
        let (is_done, epoch, me) = (result.is_ok(), attempt.epoch, attempt.me.clone());
        self.hosts[host].attempt = None;
        // The record and the ledger change only while this daemon has the key.
        if is_done && epoch == self.epoch {
            self.suspects = vec![me];
            self.former = None;
            self.hosts[host].daemon = Some(epoch);
            self.serving = epoch;
            self.served += 1;
            if !self.disk.is_reserved_by(host) {
                return Err(format!("host {host} serves in epoch {epoch} without reservation"));
            }
        }
        Ok(())
    }

    /// An owner that has the key is fenced by nobody.
    fn check_owner(&self) -> Result<(), String> {
        let serves = |host: &usize| self.hosts[*host].daemon == Some(self.epoch);
        match (0..HOSTS).find(serves).filter(|host| !self.disk.is_reserved_by(*host)) {
            Some(host) => Err(format!("host {host} is fenced and owns epoch {}", self.epoch)),
            None => Ok(()),
        }
    }

    fn switch_off(&mut self, host: usize) {
        let is_in_doubt = |key: u64| Some(host) == self.hosts_of.get(&key).copied();
        let mut noted = self.disk.notes.values().flat_map(|notes| &notes.preempted);
        if noted.any(|key| is_in_doubt(*key)) && !self.in_flight(host) {
            self.hosts[host].daemon = None;
            let of = &self.hosts_of;
            for notes in self.disk.notes.values_mut() {
                notes.preempted.retain(|key| of.get(key) != Some(&host));
            }
        }
    }

    fn land(&mut self, random: &mut Random) -> Result<(), String> {
        if self.disk.writes.is_empty() {
            return Ok(());
        }
        let index = random.below(self.disk.writes.len());
        let write = self.disk.writes[index];
        if !write.is_taken {
            if self.disk.lets(write.host) {
                self.disk.writes[index].is_taken = true;
            } else {
                // A reservation conflict: the daemon ends.
                self.disk.writes.remove(index);
                self.end(write.host, write.epoch);
            }
            return Ok(());
        }
        self.disk.writes.remove(index);
        if write.epoch < self.serving {
            let (host, serving) = (write.host, self.serving);
            let epoch = write.epoch;
            return Err(format!("host {host} writes in epoch {epoch}, after {serving} has begun"));
        }
        Ok(())
    }

    fn end(&mut self, host: usize, epoch: u64) {
        let daemon = &mut self.hosts[host].daemon;
        *daemon = daemon.filter(|of| *of != epoch);
    }

    fn close(&mut self, host: usize) {
        let owns = self.hosts[host].daemon == Some(self.epoch);
        if !owns || self.in_flight(host) {
            return;
        }
        self.hosts[host].daemon = None;
        let me = self.hosts[host].me.clone();
        if self.rule == Some(Rule::Keep) {
            let old = me.reservation_key();
            self.disk.carry_out(host, Order::Register { old, new: 0 });
        }
        self.suspects.clear();
        self.former = Some(me);
    }
}
