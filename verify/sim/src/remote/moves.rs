//! A guest whose VMM is killed, and which is started again by one of two clients of its device.

use sidecore_telemetry::Counts as _;
use sidecore_units::Nanos;
use sidecore_vrio::{HostOptions, Neglected, Rule, ServerOptions, VrioCounts};

use super::disk::Disk;
use super::guest::Guest;
use super::member::Member;
use super::network::{Network, Way};
use super::store::Buffers;
use super::unit::Unit;
use super::world::{Manner, Step};
use crate::Random;
use crate::many::Total;
use crate::violation::{Violation, no_panic};

/// A guest is not started elsewhere sooner: frames of the killed one may still be on their way.
const RESTART: Nanos = Nanos::from_millis(1_000);

/// The counts of histories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Requests of guests.
    pub requests: u64,
    /// Ends of an IOhost.
    pub restarts: u64,
    /// Ends of a VMM.
    pub kills: u64,
    /// Of which so many came while the IOhost was away.
    pub kills_while_away: u64,
    /// Starts of the guest at another client than before.
    pub moves: u64,
    /// Answered writes that were sent again.
    pub replayed: u64,
    /// Answered writes that were not, because their user was gone.
    pub abandoned: u64,
}

impl Total for Outcome {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.restarts += other.restarts;
        self.kills += other.kills;
        self.kills_while_away += other.kills_while_away;
        self.moves += other.moves;
        self.replayed += other.replayed;
        self.abandoned += other.abandoned;
    }
}

/// The guest.
enum Place {
    /// It runs at this client.
    At(usize),
    /// It starts at this client, at this time.
    Starts(usize, Nanos, Box<Guest>),
}

struct World {
    random: Random,
    manner: Manner,
    neglected: Neglected,
    now: Nanos,
    network: Network,
    members: [Member; 2],
    disk: Disk,
    /// Of the engine alone, which this IOhost is not.
    buffers: Buffers,
    /// `None` while it is down.
    host: Option<Unit>,
    host_up_at: Nanos,
    guest: Place,
    fault_at: Nanos,
    outcome: Outcome,
    tells: bool,
    trace: Vec<(usize, String)>,
}

/// Runs the history of `seed`, in which the clients may neglect a rule.
///
/// # Errors
/// Something that must not be.
pub fn run(seed: u64, neglect: Option<Rule>) -> Result<Outcome, Box<Violation>> {
    let mut world = World::new(seed, neglect, false);
    if no_panic(|| world.live()).is_ok() {
        return Ok(world.outcome());
    }
    // The same again, with a trace.
    let mut world = World::new(seed, neglect, true);
    let what = no_panic(|| world.live()).err();
    let what = what.unwrap_or_else(|| "it is not the same again".to_owned());
    let when = format!("at {} us ({:?})", world.now.0 / 1_000, world.manner);
    Err(Violation::new((seed, 0), when, what, &world.trace, world.trace.len()))
}

impl World {
    fn new(seed: u64, neglect: Option<Rule>, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let manner = Manner::moving(&mut random);
        let neglected = neglect.map_or(Neglected::default(), Neglected::only);
        let mut fork = || Random::new(random.below(u64::MAX));
        let (network, disk) = (manner.network(fork()), manner.store(fork()));
        let mut world = Self {
            random,
            manner,
            neglected,
            now: Nanos::from_millis(1),
            network,
            members: [0, 1].map(|number| Member::new(number, &manner, neglected)),
            disk,
            buffers: Buffers::default(),
            host: None,
            host_up_at: Nanos::ZERO,
            guest: Place::At(0),
            fault_at: Nanos::ZERO,
            outcome: Outcome::default(),
            tells,
            trace: Vec::new(),
        };
        world.plan_fault();
        world
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.tells {
            let what = format!("at {} us: {}", self.now.0 / 1_000, what());
            self.trace.push((self.trace.len(), what));
        }
    }

    fn plan_fault(&mut self) {
        let after_ns = self.random.below(40_000_000) << self.random.below(4);
        self.fault_at = self.now.after(Nanos(after_ns));
    }

    fn live(&mut self) -> Step {
        let end = self.now.after(Nanos::from_millis(5_000));
        while self.now < end {
            self.step(true)?;
        }
        self.fault_at = Nanos::MAX;
        self.network.heal();
        self.host_up_at = self.host_up_at.min(self.now);
        self.tell(|| "heal".to_owned());
        self.settle()?;
        self.read_all()?;
        self.kill_host(true);
        self.host_up_at = self.now;
        self.read_all()
    }

    /// The client with the guest, if that runs.
    fn home(&mut self) -> Option<&mut Member> {
        match self.guest {
            Place::At(number) => Some(&mut self.members[number]),
            Place::Starts(..) => None,
        }
    }

    fn read_all(&mut self) -> Step {
        let mut first = 0;
        while let Some(home) = self.home()
            && let Some(read) = home.guests[0].read_all(first)
        {
            home.submit(read)?;
            first += (read.1.len_bytes / self.manner.block_bytes) as usize;
            self.settle()?;
        }
        Ok(())
    }

    /// Runs until the guest runs, knows its device and has no request.
    fn settle(&mut self) -> Step {
        let end = self.now.after(Nanos::from_millis(20_000));
        loop {
            let is_settled = self.home().map(|home| home.guests[0].is_settled());
            let in_flight = self.home().map(|home| home.guests[0].in_flight());
            if is_settled == Some(true) && in_flight == Some(0) {
                return Ok(());
            }
            if self.now >= end {
                return Err(format!("{in_flight:?} requests do not end on a perfect path"));
            }
            self.step(is_settled != Some(true))?;
        }
    }

    /// Lets the next thing happen.
    fn step(&mut self, submits: bool) -> Step {
        let soon = self.now.after(Nanos::from_micros(1));
        let mut next = self.network.next().min(self.fault_at);
        next = next.min(self.disk.with(|store| store.next()));
        for member in &self.members {
            next = next.min(member.next().max(soon));
        }
        next = next.min(match &self.guest {
            Place::At(number) if submits => self.members[*number].guest_at.max(soon),
            Place::At(_) => Nanos::MAX,
            Place::Starts(_, at, _) => (*at).max(self.now.after(Nanos::from_micros(100))),
        });
        next = next.min(self.host.as_ref().map_or(self.host_up_at.max(soon), Unit::next));
        self.now = next.max(self.now);
        if self.host.is_none() && self.host_up_at <= self.now {
            self.start_host();
        }
        while let Some((way, client, frame)) = self.network.take(self.now) {
            match (way, &mut self.host) {
                (Way::ToClient, _) => {
                    self.members[client].receive(self.now, &mut self.network, frame);
                }
                (Way::ToHost, Some(unit)) => unit.receive(self.now, client, &frame),
                (Way::ToHost, None) => {}
            }
        }
        self.start_guest();
        if submits {
            self.submit()?;
        }
        if self.fault_at <= self.now {
            self.fault();
            self.plan_fault();
        }
        for number in 0..self.members.len() {
            let (network, ring) = (&mut self.network, self.manner.receive_frames);
            self.members[number].poll(self.now, network, ring)?;
        }
        if let Some(unit) = &mut self.host {
            unit.poll(self.now, &mut self.network);
        }
        for number in 0..self.members.len() {
            for (tag, is_ok) in self.members[number].complete()? {
                self.tell(|| format!("request {tag:#x} of client {number} ended: {is_ok}"));
            }
        }
        Ok(())
    }

    fn submit(&mut self) -> Step {
        let Place::At(number) = self.guest else { return Ok(()) };
        if self.members[number].guest_at > self.now {
            return Ok(());
        }
        // More pauses than requests: much happens between two of them.
        let pause_ns = self.random.below(2_000_000);
        self.members[number].guest_at = self.now.after(Nanos(pause_ns));
        if let Some((tag, request)) = self.members[number].draw(&mut self.random) {
            self.tell(|| format!("request {tag:#x} of client {number}: {request:?}"));
            self.outcome.requests += 1;
            self.members[number].submit((tag, request))?;
        }
        Ok(())
    }

    fn fault(&mut self) {
        let until = self.now.after(Nanos(self.random.below(400_000_000)));
        let number = self.random.below(2) as usize;
        match self.random.below(8) {
            0 => self.kill_host(false),
            1 | 2 => self.kill_host(true),
            3 | 4 => {
                self.tell(|| format!("the path of client {number} is cut until {until:?}"));
                self.network.cut(Way::ToHost, number, until);
                self.network.cut(Way::ToClient, number, until);
            }
            _ => self.kill_guest(),
        }
    }

    fn start_host(&mut self) {
        let incarnation = self.random.below(u64::MAX - 1) + 1;
        let server = ServerOptions {
            slots: self.manner.slots,
            neglected: self.neglected,
            ..ServerOptions::default()
        };
        let secret = [self.random.below(u64::MAX), 1];
        let options = HostOptions { incarnation, secret, server, ..HostOptions::default() };
        let random = Random::new(self.random.below(u64::MAX));
        let disks = [self.disk.clone(), self.disk.clone()];
        self.host = Some(Unit::new(random, &self.manner, options, &disks));
        self.tell(|| "the IOhost starts".to_owned());
    }

    /// The IOhost's process ends; with `power`, its machine does.
    fn kill_host(&mut self, power: bool) {
        if self.host.take().is_none() {
            return;
        }
        self.tell(|| format!("the IOhost {}", if power { "loses its power" } else { "dies" }));
        self.outcome.restarts += 1;
        let buffers = &mut self.buffers;
        self.disk.with(|store| if power { store.cut_power(buffers) } else { store.kill(buffers) });
        self.host_up_at = self.now.after(Nanos(self.random.below(500_000_000)));
    }

    /// The guest's VMM is killed, and another one starts the guest later, here or elsewhere.
    fn kill_guest(&mut self) {
        let Place::At(number) = self.guest else { return };
        let next = self.random.below(2) as usize;
        self.tell(|| format!("the VMM at client {number} dies, the next one is at {next}"));
        self.outcome.kills += 1;
        self.outcome.kills_while_away += u64::from(self.host.is_none());
        self.outcome.moves += u64::from(next != number);
        let guest = Box::new(self.members[number].kill_guest());
        let after = if next == number { Nanos::ZERO } else { RESTART };
        let at = self.now.after(after).after(Nanos(self.random.below(200_000_000)));
        self.guest = Place::Starts(next, at, guest);
    }

    fn start_guest(&mut self) {
        let is_time = |world: &Self| match &world.guest {
            Place::Starts(number, at, _) => *at <= world.now && world.members[*number].is_free(),
            Place::At(_) => false,
        };
        if !is_time(self) {
            return;
        }
        if let Place::Starts(number, _, guest) = std::mem::replace(&mut self.guest, Place::At(0)) {
            self.guest = Place::At(number);
            self.members[number].start_guest(*guest);
            self.tell(|| format!("the guest starts at client {number}"));
        }
    }

    fn outcome(&self) -> Outcome {
        let mut counts = VrioCounts::default();
        self.members.iter().for_each(|member| counts.add(&member.counts()));
        let VrioCounts { replayed, abandoned, .. } = counts;
        Outcome { replayed, abandoned, ..self.outcome }
    }
}
