//! Hosts whose daemons claim, reserve, write, pause and end.

use super::disk::{Disk, Write};
use super::{Acquisition, Random, Reply, Rule};
use crate::Member;

const HOSTS: usize = 3;

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
    LosePower,
}

impl Step {
    pub(super) const ALL: [Self; 12] = [
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
        Self::LosePower,
    ];
}

/// An attempt to become the owner of an epoch.
struct Attempt {
    epoch: u64,
    acquisition: Acquisition,
}

#[derive(Default)]
struct Host {
    /// The epoch in which its daemon serves.
    daemon: Option<u64>,
    attempt: Option<Attempt>,
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
    suspects: Vec<Member>,
    /// The record's owner, if it has closed the store in order.
    former: Option<Member>,
    pub(super) served: usize,
}

impl Hosts {
    pub(super) fn new(rule: Option<Rule>, disk: Disk) -> Self {
        let aborts_nothing = rule == Some(Rule::Abort);
        Self {
            rule,
            disk: Disk { aborts_nothing, ..disk },
            hosts: (0..HOSTS).map(|_| Host::default()).collect(),
            epoch: 0,
            serving: 0,
            incarnations: 0,
            suspects: Vec::new(),
            former: None,
            served: 0,
        }
    }

    pub(super) fn step(&mut self, step: Step, random: &mut Random) -> Result<(), String> {
        let host = random.below(HOSTS);
        match step {
            Step::Claim if random.once_in(4) => self.claim(host),
            Step::Claim => {}
            Step::Order => return self.order(host, random),
            Step::Write => {
                if let Some(epoch) = self.hosts[host].daemon {
                    self.disk.writes.push(Write { host, epoch, is_taken: false });
                }
            }
            Step::Land => return self.land(random),
            Step::Kill => self.hosts[host].daemon = None,
            Step::Close if random.once_in(3) => self.close(host),
            Step::Close => {}
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
        let me = Member {
            name: format!("d{host}"),
            host: format!("h{host}"),
            incarnation: self.incarnations,
        };
        let others = self.suspects.iter().chain(&self.former);
        let mut acquisition = Acquisition::new("disk", &me, others);
        acquisition.neglected = self.rule;
        self.suspects.push(me.clone());
        self.hosts[host].attempt = Some(Attempt { epoch: self.epoch, acquisition });
        self.hosts[host].me = me;
        self.hosts[host].daemon = None;
    }

    fn order(&mut self, host: usize, random: &mut Random) -> Result<(), String> {
        let Some(attempt) = &mut self.hosts[host].attempt else { return Ok(()) };
        let Some(order) = attempt.acquisition.order() else { return Ok(()) };
        let reply = match random.below(20) {
            0 => Reply::Failed("the order was lost".to_owned()),
            1 => {
                self.disk.carry_out(host, order);
                Reply::Failed("the reply was lost".to_owned())
            }
            _ => self.disk.carry_out(host, order),
        };
        attempt.acquisition.replied(reply);
        let Some(result) = attempt.acquisition.result() else { return Ok(()) };
        let (is_done, epoch) = (result.is_ok(), attempt.epoch);
        self.hosts[host].attempt = None;
        // The record and the ledger change only while this daemon has the key.
        if is_done && epoch == self.epoch {
            self.suspects = vec![self.hosts[host].me.clone()];
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
            self.disk.carry_out(host, super::Order::Register { old, new: 0 });
        }
        self.suspects.clear();
        self.former = Some(me);
    }
}
