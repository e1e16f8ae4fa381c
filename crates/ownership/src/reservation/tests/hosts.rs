//! Hosts whose daemons claim, reserve, write, pause and end, and which boot again.

use super::disk::{Disk, Write};
use super::{Acquisition, Order, Random, Reply, Rivals, Rule};
use crate::Member;

const HOSTS: usize = 3;
/// The most writes in flight of a host.
const WRITES: usize = 3;

/// How fast and how reliable the paths to the disks are in a history.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paths {
    /// How many times longer than others a write takes.
    slowness: usize,
    /// One abort in so many has no reply, and one in so many is never begun: the driver lost the
    /// reply and has sent the order again, which conflicts.
    losses: usize,
    /// Attempts go on at once. Otherwise others overtake them.
    are_prompt: bool,
}

impl Paths {
    pub(super) fn choose(random: &mut Random) -> Self {
        Self {
            // The paths to some disks are slower than a takeover.
            slowness: [1, 4, 32][random.below(3)],
            losses: [20, 80][random.below(2)],
            are_prompt: random.once_in(2),
        }
    }
}

/// Other orders are lost, and have no reply, so many times less often than aborts.
const ORDERS_PER_ABORT: usize = 5;

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
    /// A host boots again. The disks keep its registration, and commands that they have taken.
    Boot,
    /// An operator switches the last owner's host off, and says so.
    SwitchOff,
    /// An operator, or another program, ends all reservations of a disk.
    Clear,
    /// An operator, or another program, releases the last owner's reservation. The owner stays
    /// registered.
    Release,
    LosePower,
}

impl Step {
    pub(super) const ALL: [Self; 21] = [
        Self::Claim,
        Self::Order,
        Self::Order,
        Self::Order,
        Self::Order,
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
        Self::Boot,
        Self::SwitchOff,
        Self::Clear,
        Self::Release,
        Self::LosePower,
    ];
}

/// One such step in so many is taken.
const BOOTS: usize = 40;
const CLEARS: usize = 40;

/// An attempt to become the owner of an epoch.
struct Attempt {
    epoch: u64,
    me: Member,
    rivals: Rivals,
    /// The disk of the acquisition, and all after it follow.
    disk: usize,
    acquisition: Acquisition,
    /// Whether a disk has failed. The others get the key of this claim all the same.
    has_failed: bool,
    /// The hosts whose commands a preemption still has to abort before it ends.
    aborts: Option<Vec<usize>>,
}

#[derive(Default)]
struct Host {
    /// The epoch in which its daemon serves.
    daemon: Option<u64>,
    attempt: Option<Attempt>,
    is_paused: bool,
    boot: u64,
    me: Member,
}

pub(super) struct Hosts {
    rule: Option<Rule>,
    disks: Vec<Disk>,
    hosts: Vec<Host>,
    epoch: u64,
    /// The newest epoch whose owner has begun to serve.
    serving: u64,
    incarnations: u64,
    suspects: Vec<Member>,
    /// The last owner, if it has not closed the store in order.
    owner: Option<(usize, Member)>,
    paths: Paths,
    /// The record's owner, if it has closed the store in order.
    former: Option<Member>,
    /// Whether a candidate has asked for an operator.
    is_refused: bool,
    pub(super) served: usize,
}

impl Hosts {
    pub(super) fn new(rule: Option<Rule>, disks: Vec<Disk>, paths: Paths) -> Self {
        let aborts_nothing = rule == Some(Rule::Abort);
        let of = |disk| Disk { aborts_nothing, ..disk };
        Self {
            rule,
            disks: disks.into_iter().map(of).collect(),
            hosts: (0..HOSTS).map(|_| Host::default()).collect(),
            epoch: 0,
            serving: 0,
            incarnations: 0,
            suspects: Vec::new(),
            owner: None,
            paths,
            former: None,
            is_refused: false,
            served: 0,
        }
    }

    /// Host 0 serves, with another fence: the disks know nothing of it.
    pub(super) fn serve_unregistered(&mut self) {
        (self.epoch, self.serving, self.incarnations) = (1, 1, 1);
        let me = self.member(0, 1);
        self.hosts[0].daemon = Some(1);
        self.hosts[0].me = me.clone();
        self.suspects = vec![me.clone()];
        self.owner = Some((0, me));
    }

    fn member(&self, host: usize, incarnation: u64) -> Member {
        let boot = self.hosts[host].boot;
        Member { name: format!("d{host}"), host: format!("h{host}/{boot}"), incarnation }
    }

    pub(super) fn step(&mut self, step: Step, random: &mut Random) -> Result<(), String> {
        let host = self.choose(step, random);
        if matches!(step, Step::Claim | Step::Order | Step::Write | Step::Close)
            && self.hosts[host].is_paused
        {
            return Ok(());
        }
        let (disks, boot) = (self.disks.len(), self.hosts[host].boot);
        match step {
            Step::Claim if random.once_in(10) => self.claim(host),
            Step::Claim => {}
            Step::Order => return self.order(host, random),
            Step::Write => {
                let disk = &mut self.disks[random.below(disks)];
                let in_flight = disk.writes.iter().filter(|write| write.host == host).count();
                if let Some(epoch) = self.hosts[host].daemon.filter(|_| in_flight < WRITES) {
                    disk.writes.push(Write { host, boot, epoch, is_taken: false });
                }
            }
            Step::Land if random.once_in(self.paths.slowness) => return self.land(random),
            Step::Land => {}
            Step::Kill if random.once_in(4) => self.hosts[host].daemon = None,
            Step::Kill => {}
            Step::Close if random.once_in(3) => self.close(host),
            Step::Close => {}
            Step::Pause if random.once_in(10) => self.hosts[host].is_paused ^= true,
            Step::Pause => {}
            Step::Boot if random.once_in(BOOTS) => self.boot(host),
            Step::Boot => {}
            Step::SwitchOff if self.is_refused && random.once_in(8) => self.switch_off(),
            Step::SwitchOff => {}
            Step::Clear if random.once_in(CLEARS) => self.clear(random.below(disks)),
            Step::Release if random.once_in(CLEARS) => self.release(random.below(disks)),
            Step::Clear | Step::Release => {}
            Step::LosePower if random.once_in(10) => {
                self.disks.iter_mut().for_each(Disk::lose_power);
            }
            Step::LosePower => {}
        }
        Ok(())
    }

    /// Chooses the host of a step. A prompt order is that of a host which has one.
    fn choose(&self, step: Step, random: &mut Random) -> usize {
        let is_prompt = self.paths.are_prompt && matches!(step, Step::Order);
        let acts = |host: &usize| {
            let Host { attempt, is_paused, .. } = &self.hosts[*host];
            is_prompt && attempt.is_some() && !is_paused
        };
        let acting: Vec<usize> = (0..HOSTS).filter(acts).collect();
        if acting.is_empty() { random.below(HOSTS) } else { acting[random.below(acting.len())] }
    }

    /// Whether a request of this boot of a host is in flight.
    fn in_flight(&self, host: usize) -> bool {
        let boot = self.hosts[host].boot;
        let is_its = |write: &Write| (write.host, write.boot) == (host, boot);
        self.disks.iter().flat_map(|disk| &disk.writes).any(is_its)
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
        let me = self.member(host, incarnation);
        let all = self.suspects.iter().chain(&self.former).cloned().collect();
        let owner = self.owner.clone().map(|(_, owner)| owner);
        let rivals = Rivals { all, owner };
        self.suspects.push(me.clone());
        let acquisition = self.acquisition(host, 0, (&me, &rivals));
        let attempt = Attempt {
            epoch: self.epoch,
            me: me.clone(),
            rivals,
            disk: 0,
            acquisition,
            has_failed: false,
            aborts: None,
        };
        self.hosts[host].attempt = Some(attempt);
        self.hosts[host].me = me;
        self.hosts[host].daemon = None;
    }

    fn acquisition(
        &self,
        host: usize,
        disk: usize,
        (me, rivals): (&Member, &Rivals),
    ) -> Acquisition {
        let disk = &self.disks[disk];
        let mut acquisition = Acquisition::new(("disk", &disk.id), me, rivals, disk.notes_of(host));
        acquisition.neglected = self.rule;
        acquisition
    }

    /// The reply to an order. `None`: the disk has not carried it out yet.
    fn reply(&mut self, host: usize, order: Order, random: &mut Random) -> Option<Reply> {
        let chance = random.below(self.paths.losses * ORDERS_PER_ABORT);
        if chance == 0 {
            return Some(Reply::Failed("the order was lost".to_owned()));
        }
        let attempt = self.hosts[host].attempt.as_mut()?;
        let disk = &mut self.disks[attempt.disk];
        if let Some(aborted) = attempt.aborts.take() {
            // Without a reply, the abort goes on for longer than this history looks.
            if random.once_in(self.paths.losses) {
                return Some(Reply::Failed("the reply was lost".to_owned()));
            }
            if random.once_in(self.paths.losses) {
                return Some(Reply::Conflict);
            }
            disk.abort(&aborted);
            return Some(if aborted.is_empty() { Reply::Conflict } else { Reply::Done });
        }
        if let Order::PreemptAndAbort { victim, mine } = order
            && !disk.lies
        {
            attempt.aborts = Some(disk.end_registrations(host, victim, mine));
            return None;
        }
        let reply = disk.carry_out(host, order);
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
        let has_failed = attempt.has_failed || result.is_err();
        let (epoch, me) = (attempt.epoch, attempt.me.clone());
        // Until an operator acts, or another candidate needs none.
        self.is_refused |= result.as_ref().is_err_and(|why| why.contains("reservation fenced"));
        let (next, rivals) = (attempt.disk + 1, attempt.rivals.clone());
        if next < self.disks.len() {
            let acquisition = self.acquisition(host, next, (&me, &rivals));
            let (disk, aborts) = (next, None);
            self.hosts[host].attempt =
                Some(Attempt { epoch, me, rivals, disk, acquisition, has_failed, aborts });
            return Ok(());
        }
        self.hosts[host].attempt = None;
        // The record and the ledger change only while this daemon has the key.
        if !has_failed && epoch == self.epoch {
            self.suspects = vec![me.clone()];
            self.owner = Some((host, me));
            self.former = None;
            self.hosts[host].daemon = Some(epoch);
            self.serving = epoch;
            self.is_refused = false;
            self.served += 1;
            if !self.has_disks(host) {
                return Err(format!("host {host} serves in epoch {epoch} without reservation"));
            }
        }
        Ok(())
    }

    fn has_disks(&self, host: usize) -> bool {
        self.disks.iter().all(|disk| disk.is_reserved_by(host))
    }

    /// No host fences an owner that has the key.
    fn check_owner(&self) -> Result<(), String> {
        let serves = |host: &usize| self.hosts[*host].daemon == Some(self.epoch);
        match (0..HOSTS).find(serves).filter(|host| !self.has_disks(*host)) {
            Some(host) => Err(format!("host {host} is fenced and owns epoch {}", self.epoch)),
            None => Ok(()),
        }
    }

    fn boot(&mut self, host: usize) {
        self.hosts[host].boot += 1;
        (self.hosts[host].daemon, self.hosts[host].attempt) = (None, None);
        self.hosts[host].is_paused = false;
        for disk in &mut self.disks {
            disk.writes.retain(|write| write.host != host || write.is_taken);
        }
    }

    fn switch_off(&mut self) {
        let Some((host, owner)) = self.owner.take() else { return };
        self.is_refused = false;
        self.boot(host);
        for disk in &mut self.disks {
            disk.writes.retain(|write| write.host != host);
        }
        self.former = Some(owner);
    }

    fn clear(&mut self, disk: usize) {
        if self.all_end() {
            self.disks[disk].clear();
        }
    }

    /// Only of an owner that holds it: a host that was fenced would write, and leave no evidence.
    fn release(&mut self, disk: usize) {
        let holder = self.disks[disk].holder;
        let is_owners = self.owner.as_ref().is_some_and(|(owner, _)| holder == Some(*owner));
        if is_owners && self.all_end() {
            self.disks[disk].release();
        }
    }

    /// All candidates are ended. False if more is left than the last owner: of those before it,
    /// which the reservation keeps out.
    fn all_end(&mut self) -> bool {
        let of_hosts = self.hosts.iter().filter_map(|host| host.daemon);
        let of_writes = self.disks.iter().flat_map(|disk| &disk.writes).map(|write| write.epoch);
        let is_last = of_hosts.chain(of_writes).all(|epoch| epoch == self.serving);
        if is_last {
            self.hosts.iter_mut().for_each(|host| host.attempt = None);
            self.epoch += 1;
        }
        is_last
    }

    fn land(&mut self, random: &mut Random) -> Result<(), String> {
        let disk = random.below(self.disks.len());
        let disk = &mut self.disks[disk];
        if disk.writes.is_empty() {
            return Ok(());
        }
        let index = random.below(disk.writes.len());
        let write = disk.writes[index];
        if !write.is_taken {
            if disk.lets(write.host) {
                disk.writes[index].is_taken = true;
            } else {
                // A reservation conflict: the daemon ends.
                disk.writes.remove(index);
                self.end(write.host, write.epoch);
            }
            return Ok(());
        }
        disk.writes.remove(index);
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
            for disk in &mut self.disks {
                disk.carry_out(host, Order::Register { old, new: 0 });
            }
        }
        self.suspects.clear();
        self.owner = None;
        self.former = Some(me);
    }
}
