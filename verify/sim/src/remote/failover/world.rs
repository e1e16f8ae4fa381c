//! The clients, two IOhosts, their etcd and their stores.

use sidecore_ownership::{Options as OwnershipOptions, Record};
use sidecore_telemetry::Counts as _;
use sidecore_units::Nanos;
use sidecore_vrio::VrioCounts;
use sidecore_vrio::wire::Kind;

use super::super::guest::Guest;
use super::super::member::{Member, parts};
use super::super::network::{Network, Way};
use super::super::store::Store;
use super::super::world::{Manner, Step};
use super::Rule;
use super::history::{Options, Outcome};
use super::kernel::Kernel;
use super::machine::Machine;
use crate::Random;
use crate::ownership::etcd::Etcd;

pub(super) const MS: u64 = 1_000_000;
/// The time of a lease in seconds.
const TTL_S: u64 = 3;
/// More than a lease, fences that fail, and a replay to a slow store.
const SETTLED_MS: u64 = 60_000;

/// The way in which a former owner is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fence {
    /// Both IOhosts are processes of one host: the locks of the former owner's.
    Lock,
    /// A command switches the former owner's host off.
    Command,
}

impl Fence {
    /// As `sidecore own`: neither lets a host in, and the locks are the same for both IOhosts.
    fn set_options(self, options: &mut OwnershipOptions) {
        options.fence_admits = false;
        if self == Self::Lock {
            options.fence_attempts = u32::MAX;
        }
    }
}

/// Requests of the guests that the next owner has to answer for.
#[derive(Clone, Copy, Debug, Default)]
struct Owed {
    /// A former owner has answered writes that no flush covers.
    writes: bool,
    /// Flushes that were answered before.
    flushes: u64,
}

pub(super) struct World {
    pub(super) random: Random,
    manner: Manner,
    pub(super) neglect: Option<Rule>,
    pub(super) now: Nanos,
    ends_at: Nanos,
    pub(super) is_healed: bool,
    pub(super) options: OwnershipOptions,
    pub(super) fence: Fence,
    /// Writes that no flush covered are lost with the owner's host, too.
    pub(super) caches_are_hosts: bool,
    pub(super) etcd: Etcd,
    pub(super) etcd_away_until: Nanos,
    pub(super) record: Option<Record>,
    pub(super) machines: [Machine; 2],
    /// The paths between the clients and each IOhost.
    pub(super) networks: [Network; 2],
    pub(super) members: Vec<Member>,
    pub(super) kernel: Kernel,
    /// The IOhost of the newest opening.
    pub(super) owner: usize,
    /// With one address: the IOhost that the switch sends frames to, which is the one that it has
    /// heard last.
    heard: usize,
    pub(super) next_process: u64,
    looks_at: Nanos,
    pub(super) fault_every_ns: u64,
    fault_at: Nanos,
    owed: Owed,
    pub(super) outcome: Outcome,
    tells: bool,
    pub(super) trace: Vec<(usize, String)>,
}

impl World {
    pub(super) fn new(seed: u64, options: &Options, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let manner = Manner::failing_over(&mut random);
        let neglect = options.neglect;
        let mut ownership = OwnershipOptions::of_lease(TTL_S);
        ownership.neglect = Rule::of_ownership(neglect);
        let mut fork = || Random::new(random.below(u64::MAX));
        let mut networks = [0, 1].map(|_| manner.network(fork()));
        if manner.has_two_links {
            networks[1].host_link = 1;
        }
        let shape = (manner.block_bytes, manner.blocks);
        let stores = (0..manner.clients * manner.devices)
            .map(|_| Store::new(fork(), shape, manner.slow, !manner.is_volatile))
            .collect();
        let stuck = [0, 50, 300][random.below(3) as usize];
        let kernel_random = Random::new(random.below(u64::MAX));
        let neglected = Rule::of_channel(neglect);
        let clocks = [0, 1].map(|_| {
            // As wrong as they may be, as often as not.
            let rate = [900, 1_100, 900 + random.below(201)][random.below(3) as usize];
            (rate, random.below(1_000) * 1_000 * MS)
        });
        let fence = [Fence::Lock, Fence::Command][random.below(2) as usize];
        fence.set_options(&mut ownership);
        let machines = [0, 1].map(|index| Machine::new(index, clocks[index], ownership));
        Self {
            fence,
            caches_are_hosts: random.once_in(2),
            fault_every_ns: (200 * MS) << random.below(4),
            random,
            manner,
            neglect,
            now: Nanos(1),
            ends_at: Nanos::from_millis(options.seconds * 1_000),
            is_healed: false,
            options: ownership,
            etcd: Etcd::new(),
            etcd_away_until: Nanos::ZERO,
            record: None,
            machines,
            networks,
            members: (0..manner.clients).map(|n| Member::new(n, &manner, neglected)).collect(),
            kernel: Kernel::new(kernel_random, stores, manner.block_bytes, stuck),
            owner: 0,
            heard: 0,
            next_process: 3,
            looks_at: Nanos::ZERO,
            fault_at: Nanos::from_millis(500),
            owed: Owed::default(),
            outcome: Outcome::default(),
            tells,
            trace: Vec::new(),
        }
    }

    pub(super) fn manner(&self) -> &Manner {
        &self.manner
    }

    pub(super) fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.tells {
            let what = format!("at {} us: {}", self.now.0 / 1_000, what());
            self.trace.push((self.trace.len(), what));
        }
    }

    pub(super) fn live(&mut self) -> Step {
        while self.now < self.ends_at {
            self.step(true)?;
        }
        self.heal();
        self.settle()?;
        self.read_all()?;
        self.cut_power();
        self.read_all()
    }

    fn heal(&mut self) {
        self.tell(|| "heal".to_owned());
        self.is_healed = true;
        (self.fault_at, self.etcd_away_until) = (Nanos::MAX, Nanos::ZERO);
        self.networks.iter_mut().for_each(Network::heal);
        for machine in &mut self.machines {
            machine.supervisor.cut_until = Nanos::ZERO;
            machine.supervisor.runs_at = machine.supervisor.runs_at.min(self.now);
            if let Some(daemon) = &mut machine.daemon {
                (daemon.runs_at, daemon.stops) = (self.now, None);
            }
        }
    }

    /// Runs until all requests have ended.
    fn settle(&mut self) -> Step {
        let end = self.now.after(Nanos::from_millis(SETTLED_MS));
        loop {
            let in_flight: usize = self.members.iter().map(Member::in_flight).sum();
            if in_flight == 0 {
                return Ok(());
            }
            if self.now >= end {
                let states = self.machines.iter().map(|m| m.supervisor.daemon.status(m.until));
                let states: Vec<_> = states.collect();
                return Err(format!("{in_flight} requests do not end: {states:?}"));
            }
            self.step(false)?;
        }
    }

    fn read_all(&mut self) -> Step {
        for number in 0..self.members.len() {
            for device in 0..self.manner.devices {
                let mut first = 0;
                while let Some(read) = self.members[number].guests[device].read_all(first) {
                    first += (read.1.len_bytes / self.manner.block_bytes) as usize;
                    self.members[number].submit(read)?;
                    self.settle()?;
                }
            }
        }
        Ok(())
    }

    /// Lets the next thing happen.
    fn step(&mut self, submits: bool) -> Step {
        let soon = self.now.after(Nanos::from_micros(1));
        let mut next = self.looks_at.min(self.fault_at).min(self.kernel.next());
        for (network, machine) in self.networks.iter().zip(&self.machines) {
            let daemon = machine.daemon.as_ref().map_or(Nanos::MAX, |daemon| daemon.next(soon));
            next = next.min(network.next()).min(daemon);
        }
        for member in &self.members {
            let submits_at = if submits { member.guest_at.max(soon) } else { Nanos::MAX };
            next = next.min(member.next().max(soon)).min(submits_at);
        }
        self.now = next.max(self.now);
        self.deliver();
        self.land()?;
        self.run_daemons();
        if self.looks_at <= self.now {
            self.looks_at = self.now.after(Nanos((1 + self.random.below(8)) * MS));
            self.supervise()?;
        }
        if submits {
            self.submit()?;
        }
        if self.fault_at <= self.now {
            self.fault();
            self.fault_at = self.now.after(Nanos(self.random.below(2 * self.fault_every_ns)));
        }
        self.poll_members()
    }

    fn deliver(&mut self) {
        for index in 0..2 {
            while let Some((way, client, frame)) = self.networks[index].take(self.now) {
                if way == Way::ToClient {
                    let is_answer = |(_, kind, _): &(u64, Kind, _)| *kind == Kind::Answer;
                    let is_late = index != self.owner && parts(&frame).iter().any(is_answer);
                    self.outcome.late_answers += u64::from(is_late);
                    let member = &mut self.members[client];
                    let network = &mut self.networks[way_of(member, &self.manner, self.heard)];
                    member.receive(self.now, network, frame);
                } else if let Some(daemon) = &mut self.machines[index].daemon {
                    daemon.arrives(client, frame);
                }
            }
        }
    }

    fn land(&mut self) -> Step {
        while let Some(ended) = self.kernel.land(self.now)? {
            let mut daemons = self.machines.iter_mut().filter_map(|m| m.daemon.as_mut());
            if let Some(daemon) = daemons.find(|daemon| daemon.number == ended.process) {
                daemon.ends(ended);
            }
        }
        Ok(())
    }

    fn run_daemons(&mut self) {
        for index in 0..2 {
            let is_over = self.machines[index].is_over(self.now, Nanos::ZERO);
            let Some(daemon) = &mut self.machines[index].daemon else { continue };
            let sent = self.networks[index].sent();
            let had = self.kernel.submitted_writes;
            daemon.turn(self.now, &mut self.networks[index], &mut self.kernel);
            if is_over {
                self.outcome.ends_before_write += self.kernel.submitted_writes - had;
            }
            if self.networks[index].sent() != sent {
                self.heard = index;
            }
        }
    }

    fn submit(&mut self) -> Step {
        for number in 0..self.members.len() {
            if self.members[number].guest_at > self.now {
                continue;
            }
            let most_ns = if self.random.once_in(3) { 60 * MS } else { 300_000 };
            let at = self.now.after(Nanos(self.random.below(most_ns)));
            self.members[number].guest_at = at;
            if let Some((tag, request)) = self.members[number].draw(&mut self.random) {
                self.tell(|| format!("request {tag:#x} of client {number}: {request:?}"));
                self.outcome.requests += 1;
                self.members[number].submit((tag, request))?;
            }
        }
        Ok(())
    }

    fn poll_members(&mut self) -> Step {
        for number in 0..self.members.len() {
            let member = &mut self.members[number];
            if self.manner.has_two_links {
                member.seek(self.now, &mut self.networks[0], &self.manner);
                self.networks[1].change_link(number, member.link());
            }
            let network = &mut self.networks[way_of(member, &self.manner, self.heard)];
            member.poll(self.now, network, self.manner.receive_frames)?;
            for (tag, is_ok) in self.members[number].complete()? {
                self.tell(|| format!("request {tag:#x} of client {number} ended: {is_ok}"));
            }
        }
        Ok(())
    }

    fn guests(&self) -> impl Iterator<Item = &Guest> {
        self.members.iter().flat_map(|member| &member.guests)
    }

    /// An IOhost's daemon starts.
    pub(super) fn opened(&mut self, index: usize) {
        self.kernel.openings += 1;
        self.outcome.openings += 1;
        self.heard = index;
        let is_other = std::mem::replace(&mut self.owner, index) != index;
        let flushes = self.guests().map(|guest| guest.flushes).sum();
        let writes = self.guests().any(Guest::has_unflushed);
        self.owed = Owed { writes, flushes };
        self.outcome.failovers += u64::from(is_other && self.outcome.openings > 1);
    }

    /// The stores lose their power, and the IOhosts do.
    pub(super) fn cut_power(&mut self) {
        self.tell(|| "the rack loses its power".to_owned());
        self.outcome.power_cuts += 1;
        let flushes: u64 = self.guests().map(|guest| guest.flushes).sum();
        let is_served = self.machines[self.owner].daemon.is_some();
        let is_owed = self.owed.writes && self.owed.flushes == flushes;
        self.outcome.cuts_before_flush += u64::from(is_owed && is_served);
        self.kernel.cut_power();
        for index in 0..2 {
            self.end_machine(index, 3_000);
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        let mut counts = VrioCounts::default();
        self.members.iter().for_each(|member| counts.add(&member.counts()));
        Outcome {
            replayed: counts.replayed,
            link_changes: self.members.iter().map(|member| member.link_changes).sum(),
            resends_with_overlap: self.kernel.resends,
            ..self.outcome
        }
    }
}

/// The IOhost that a client's frames go to.
fn way_of(member: &Member, manner: &Manner, heard: usize) -> usize {
    if manner.has_two_links { member.link() } else { heard }
}
