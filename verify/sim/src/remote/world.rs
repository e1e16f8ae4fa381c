//! The clients, the IOhost, and what happens to them.

use std::sync::Arc;

use sidecore_block::Geometry;
use sidecore_remote::export::SteeringCounts;
use sidecore_telemetry::{CounterSet as _, Counts as _};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{DeviceEntry, FEATURES, MIN_FRAME_BYTES, device_flag};
use sidecore_vrio::{
    Host, HostOptions, Member as Admitted, Neglected, Rule, ServerOptions, VrioCounts, VrioStats,
};

use super::disk::Disk;
use super::guest::{DEPTH, Guest};
use super::history::Outcome;
use super::member::{Member, device_name};
use super::network::{Network, Way, Weather, address_of};
use super::seal::Checksum;
use super::store::{Buffers, Store};
use super::unit::Unit;
use crate::Random;

/// The manner of a history.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    pub(super) clients: usize,
    /// Devices of each client.
    pub(super) devices: usize,
    pub(super) block_bytes: u64,
    pub(super) blocks: usize,
    pub(super) frame_bytes: u32,
    weather: Weather,
    /// How often something breaks, in nanoseconds; 0 for never.
    fault_every_ns: u64,
    /// How many things break at most.
    faults: u64,
    pub(super) replay_bytes: usize,
    pub(super) is_volatile: bool,
    pub(super) times_out: bool,
    pub(super) slots: u16,
    pub(super) receive_frames: u32,
    pub(super) slow: u64,
    /// Sidecores of the IOhost; 0 for its engine alone, without units.
    pub(super) sidecores: usize,
    /// The IOhost starts on either of two links.
    pub(super) has_two_links: bool,
    /// All clients have the same device.
    pub(super) is_shared: bool,
}

impl Manner {
    pub(super) fn draw(random: &mut Random) -> Self {
        let is_calm = random.once_in(8);
        let late_by = [30_000, 300_000, 3_000_000, 30_000_000][random.below(4) as usize];
        let bad = Weather {
            loss: [0, 10, 100, 300][random.below(4) as usize],
            doubles: random.below(3) * 50,
            damage: random.below(3) * 10,
            late: random.below(4) * 60,
            late_by: Nanos(late_by),
        };
        // One of each as often as not.
        let clients = [1, 1, 2, 3][random.below(4) as usize];
        let devices = [1, 1, 2][random.below(3) as usize];
        Self {
            clients,
            devices,
            block_bytes: if random.once_in(3) { 512 } else { 4096 },
            blocks: 12 + random.below(12) as usize,
            frame_bytes: if random.once_in(2) { MIN_FRAME_BYTES } else { 8_100 },
            weather: if is_calm { Weather::default() } else { bad },
            fault_every_ns: if is_calm { 0 } else { 1_000_000 << random.below(7) },
            faults: random.below(16),
            replay_bytes: 65_536 << random.below(4),
            is_volatile: !random.once_in(10),
            times_out: random.once_in(5),
            slots: 2 + random.below(15) as u16,
            receive_frames: 34 + random.below(60) as u32,
            slow: [0, 8, 40][random.below(3) as usize],
            sidecores: if random.once_in(4) { 1 + random.below(4) as usize } else { 0 },
            has_two_links: false,
            is_shared: false,
        }
    }

    /// Of a history in which one guest moves between two clients of a device.
    pub(super) fn moving(random: &mut Random) -> Self {
        let weather = Weather {
            loss: [0, 20, 50][random.below(3) as usize],
            doubles: random.below(3) * 30,
            late: random.below(3) * 30,
            late_by: Nanos(300_000),
            ..Weather::default()
        };
        Self {
            clients: 2,
            devices: 1,
            weather,
            is_volatile: true,
            times_out: false,
            sidecores: 1 + random.below(2) as usize,
            is_shared: true,
            ..Self::draw(random)
        }
    }

    /// Of a history with two IOhosts, on one link or on two.
    pub(super) fn failing_over(random: &mut Random) -> Self {
        let late_by = [300_000, 30_000_000, 1_000_000_000][random.below(3) as usize];
        let weather = Weather {
            loss: random.below(3) * 20,
            doubles: random.below(3) * 30,
            late: random.below(3) * 60,
            late_by: Nanos(late_by),
            ..Weather::default()
        };
        let (clients, devices) = [(1, 1), (1, 2), (2, 1)][random.below(3) as usize];
        let has_two_links = random.once_in(2);
        let (is_volatile, times_out, sidecores) = (true, false, 0);
        let drawn = Self::draw(random);
        Self {
            clients,
            devices,
            weather,
            is_volatile,
            times_out,
            sidecores,
            has_two_links,
            ..drawn
        }
    }

    /// A device of a client, by its number among all, as an IOhost lists it in this epoch.
    pub(super) fn device(&self, index: usize, epoch: u64) -> DeviceEntry {
        let cache = if self.is_volatile { device_flag::VOLATILE_CACHE } else { 0 };
        DeviceEntry {
            device: index as u16,
            flags: device_flag::PRESENT | device_flag::DISCARD | device_flag::WRITE_ZEROES | cache,
            epoch,
            capacity_bytes: self.block_bytes * self.blocks as u64,
            block_bytes: self.block_bytes as u32,
            physical_block_bytes: 4096,
            name: device_name(index % self.devices),
            ..DeviceEntry::default()
        }
    }

    /// The paths of its clients.
    pub(super) fn network(&self, random: Random) -> Network {
        Network::new(random, self.weather, self.clients)
    }

    /// The store of a device.
    pub(super) fn store(&self, random: Random) -> Disk {
        let shape = (self.block_bytes, self.blocks);
        let geometry = Geometry {
            physical_block_bytes: 4096,
            volatile_cache: self.is_volatile,
            ..Geometry::new(self.block_bytes * self.blocks as u64, self.block_bytes as u32)
        };
        Disk::new(Store::new(random, shape, self.slow, !self.is_volatile), geometry)
    }

    pub(super) fn is_calm(&self) -> bool {
        self.fault_every_ns == 0
    }
}

/// The IOhost's process.
enum Process {
    /// The engine of its sessions.
    Engine(Box<Host<Checksum>>),
    /// The units that have the engine, on several sidecores.
    Units(Box<Unit>),
}

/// Clients, an IOhost, and all between and around them.
pub(super) struct World {
    random: Random,
    pub(super) manner: Manner,
    neglected: Neglected,
    pub(super) now: Nanos,
    network: Network,
    members: Vec<Member>,
    /// `None` while it is down.
    host: Option<Process>,
    host_stats: Arc<VrioStats>,
    host_up_at: Nanos,
    /// The counters of units that have ended.
    unit_counts: VrioCounts,
    steering: SteeringCounts,
    /// Those of the first client, then those of the second one.
    devices: Vec<DeviceEntry>,
    /// The stores of the devices.
    stores: Vec<Disk>,
    buffers: Buffers,
    fault_at: Nanos,
    faults_left: u64,
    /// Nothing breaks any more.
    is_healed: bool,
    /// The ring of the IOhost's link.
    link_buffer: Vec<u8>,
    pub(super) outcome: Outcome,
    /// Whether steps are written to the trace, which takes longer than the steps.
    tells: bool,
    pub(super) trace: Vec<(usize, String)>,
}

/// How a step ends: with what is wrong, if something is.
pub(super) type Step = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64, rule: Option<Rule>, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let mut manner = Manner::draw(&mut random);
        manner.has_two_links = !manner.is_calm() && Random::new(!seed).once_in(3);
        let mut fork = || Random::new(random.below(u64::MAX));
        let network = manner.network(fork());
        let neglected = rule.map_or(Neglected::default(), Neglected::only);
        let count = manner.clients * manner.devices;
        let stores = std::iter::repeat_with(|| manner.store(fork())).take(count).collect();
        let members = 0..manner.clients;
        let members = members.map(|number| Member::new(number, &manner, neglected)).collect();
        let mut world = Self {
            random,
            manner,
            neglected,
            now: Nanos::from_millis(1),
            network,
            members,
            host: None,
            host_stats: Arc::new(VrioStats::default()),
            host_up_at: Nanos::ZERO,
            unit_counts: VrioCounts::default(),
            steering: SteeringCounts::default(),
            devices: (0..count).map(|index| manner.device(index, 1)).collect(),
            stores,
            buffers: Buffers::default(),
            fault_at: Nanos::MAX,
            faults_left: manner.faults,
            is_healed: manner.is_calm(),
            link_buffer: Vec::new(),
            outcome: Outcome::default(),
            tells,
            trace: Vec::new(),
        };
        if !world.manner.is_calm() {
            for member in &mut world.members {
                member.slot_limit = world.random.below(u64::from(manner.slots) + 1) as u16;
            }
            world.plan_fault();
        }
        world
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.tells {
            let what = format!("at {} us: {}", self.now.0 / 1_000, what());
            self.trace.push((self.trace.len(), what));
        }
    }

    fn plan_fault(&mut self) {
        let after = 1 + self.random.below(2 * self.manner.fault_every_ns);
        self.fault_at =
            if self.faults_left == 0 { Nanos::MAX } else { self.now.after(Nanos(after)) };
        self.faults_left = self.faults_left.saturating_sub(1);
    }

    /// Requests of all guests.
    pub(super) fn requests(&self) -> u64 {
        self.members.iter().flat_map(|member| &member.guests).map(|guest| guest.requests).sum()
    }

    fn in_flight(&self) -> usize {
        self.members.iter().map(Member::in_flight).sum()
    }

    /// Has the guests submit so many requests.
    pub(super) fn run(&mut self, requests: u64) -> Step {
        let end = self.now.after(Nanos::from_millis(60_000));
        while self.requests() < requests && self.now < end {
            self.step(true)?;
        }
        Ok(())
    }

    /// From now on nothing breaks; all requests have to end, and the devices are read.
    pub(super) fn heal(&mut self) -> Step {
        self.network.heal();
        self.is_healed = true;
        self.fault_at = Nanos::MAX;
        self.host_up_at = self.host_up_at.min(self.now);
        for member in 0..self.members.len() {
            self.set_slot_limit(member, self.manner.slots);
        }
        self.tell(|| "heal".to_owned());
        self.settle(|world| {
            world.in_flight() == 0 && world.members.iter().all(Member::is_settled)
        })?;
        self.settle(|world| {
            world.all_devices(|world, member, device| {
                let entry = world.members[member].client().device(device as u16);
                let index = world.index(member, device);
                let capacity_bytes = world.devices[index].capacity_bytes;
                entry.is_some_and(|entry| entry.capacity_bytes == capacity_bytes)
            })
        })
        .map_err(|error| format!("{error}; the client does not know the device's capacity"))?;
        // A replay to a slow store may still be going on.
        self.settle(|world| {
            world.all_devices(|world, member, device| {
                world.members[member].client().is_ready(device as u16)
            })
        })
        .map_err(|error| format!("{error}; the device is not ready"))?;
        self.use_all_slots()?;
        self.read_all()
    }

    /// The place of a client's device among all devices.
    fn index(&self, member: usize, device: usize) -> usize {
        member * self.manner.devices + device
    }

    fn all_devices(&self, is_so: impl Fn(&Self, usize, usize) -> bool) -> bool {
        let members = 0..self.manner.clients;
        members
            .flat_map(|member| (0..self.manner.devices).map(move |device| (member, device)))
            .all(|(member, device)| is_so(self, member, device))
    }

    /// No credit is lost: each client uses all slots at once.
    fn use_all_slots(&mut self) -> Step {
        // The engines' own flushes end, if need be by asking, and the clients learn of the slots.
        let end = self.now.after(Nanos::from_millis(300));
        while self.now < end || self.stores.iter().any(|store| store.in_flight() != (0, 0)) {
            self.step(false)?;
        }
        for member in &mut self.members {
            member.requests_sent = 0;
            while let Some(flush) = member.guests[0].flush() {
                member.submit(flush)?;
            }
        }
        self.poll()?;
        let all = DEPTH.min(self.manner.slots.into());
        for member in &self.members {
            let sent = member.requests_sent;
            if sent < all {
                return Err(format!("the client uses {sent} of {all} slots: a credit was lost"));
            }
        }
        self.settle(|world| world.in_flight() == 0)
    }

    /// The IOhost loses its power once more, and the devices are read again.
    pub(super) fn cut_and_read(&mut self) -> Step {
        self.kill_host(true);
        self.host_up_at = self.now;
        self.read_all()
    }

    fn read_all(&mut self) -> Step {
        let mut first = 0;
        loop {
            let mut count = 0;
            for member in &mut self.members {
                for device in 0..member.guests.len() {
                    let Some(read) = member.guests[device].read_all(first) else { return Ok(()) };
                    count = (read.1.len_bytes / self.manner.block_bytes) as usize;
                    member.submit(read)?;
                }
            }
            first += count;
            self.settle(|world| world.in_flight() == 0)?;
        }
    }

    fn settle(&mut self, is_settled: impl Fn(&Self) -> bool) -> Step {
        let end = self.now.after(Nanos::from_millis(10_000));
        while !is_settled(self) {
            if self.now >= end {
                return Err(format!("{} requests do not end on a perfect path", self.in_flight()));
            }
            self.step(!self.members.iter().all(Member::is_settled))?;
        }
        Ok(())
    }

    /// Lets the next thing happen.
    fn step(&mut self, submits: bool) -> Step {
        let soon = self.now.after(Nanos::from_micros(1));
        let mut next = self.network.next();
        for store in &self.stores {
            next = next.min(store.with(|store| store.next()));
        }
        for member in &self.members {
            next = next.min(member.next().max(soon));
            if submits {
                next = next.min(member.guest_at.max(soon));
            }
        }
        next = match &self.host {
            Some(Process::Engine(host)) => {
                next.min(host.deadline().unwrap_or(Nanos::MAX).max(soon))
            }
            Some(Process::Units(unit)) => next.min(unit.next()),
            None => next.min(self.host_up_at.max(soon)),
        };
        self.now = next.min(self.fault_at).max(self.now);
        if self.host.is_none() && self.host_up_at <= self.now {
            self.start_host();
        }
        self.deliver();
        for store in &self.stores {
            let (now, buffers) = (self.now, &mut self.buffers);
            while let Some(execute) = store.with(|store| store.finish(now, buffers))? {
                if let Some(Process::Engine(host)) = &mut self.host {
                    host.complete(execute.ticket, Ok(()));
                }
            }
        }
        for member in 0..self.members.len() {
            if submits && self.members[member].guest_at <= self.now {
                self.submit(member)?;
            }
        }
        if self.fault_at <= self.now {
            self.fault();
            self.plan_fault();
        }
        self.poll()?;
        for member in 0..self.members.len() {
            for (tag, is_ok) in self.members[member].complete()? {
                self.tell(|| format!("request {tag:#x} of client {member} ended: {is_ok}"));
            }
        }
        Ok(())
    }

    fn deliver(&mut self) {
        while let Some((way, client, frame)) = self.network.take(self.now) {
            match (way, &mut self.host) {
                (Way::ToClient, _) => {
                    self.members[client].receive(self.now, &mut self.network, frame);
                }
                (Way::ToHost, Some(Process::Units(unit))) => {
                    unit.receive(self.now, client, &frame);
                }
                (Way::ToHost, Some(Process::Engine(host))) => {
                    let mut link = self.network.host(self.now, &mut self.link_buffer);
                    let mut port = SlicePort { wire: &mut link, data: &mut self.buffers };
                    let from = (self.now, address_of(client));
                    port.to_host(host, from, &mut Arrived::new(frame));
                    self.execute();
                }
                (Way::ToHost, None) => {}
            }
        }
    }

    /// Gives the stores what the IOhost has for them.
    fn execute(&mut self) {
        while let Some(Process::Engine(host)) = &mut self.host
            && let Some(execute) = host.next_execute()
        {
            let number = execute.device;
            let Some(index) = self.devices.iter().position(|device| device.device == number) else {
                continue;
            };
            let owner = index / self.manner.devices;
            self.outcome.beside_others += u64::from(self.has_requests_of_others(owner));
            let device = index % self.manner.devices;
            let replays = self.members[owner].replays_beside(device);
            self.outcome.beside_replays += u64::from(replays);
            self.stores[index].with(|store| store.submit(self.now, execute));
        }
    }

    /// Whether the stores have requests of another client than this one.
    fn has_requests_of_others(&self, member: usize) -> bool {
        let mut stores = self.stores.iter().enumerate();
        stores.any(|(index, store)| {
            index / self.manner.devices != member && store.in_flight() != (0, 0)
        })
    }

    fn submit(&mut self, member: usize) -> Step {
        let pause_ns = if self.random.once_in(10) {
            self.random.below(2_000_000)
        } else {
            self.random.below(60_000)
        };
        self.members[member].guest_at = self.now.after(Nanos(pause_ns));
        if !self.is_healed && self.random.once_in(16) {
            self.change_slot_limit(member);
        }
        if let Some((tag, request)) = self.members[member].draw(&mut self.random) {
            self.tell(|| format!("request {tag:#x} of client {member}: {request:?}"));
            self.members[member].submit((tag, request))?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Step {
        for member in &mut self.members {
            if self.manner.has_two_links {
                member.seek(self.now, &mut self.network, &self.manner);
            }
            member.poll(self.now, &mut self.network, self.manner.receive_frames)?;
        }
        match &mut self.host {
            Some(Process::Engine(host)) => {
                let mut link = self.network.host(self.now, &mut self.link_buffer);
                host.poll(self.now, &mut SlicePort { wire: &mut link, data: &mut self.buffers });
            }
            Some(Process::Units(unit)) => unit.poll(self.now, &mut self.network),
            None => {}
        }
        Ok(())
    }

    fn start_host(&mut self) {
        if self.manner.has_two_links {
            self.network.host_link = self.random.below(2) as usize;
        }
        let incarnation = self.random.below(u64::MAX - 1) + 1;
        let server = ServerOptions {
            slots: self.manner.slots,
            neglected: self.neglected,
            // Each fourth one is of an older version.
            features: if incarnation.is_multiple_of(4) { 0 } else { FEATURES },
            ..ServerOptions::default()
        };
        let secret = [self.random.below(u64::MAX), 1];
        let options = HostOptions { incarnation, secret, server, ..HostOptions::default() };
        self.host = Some(if self.manner.sidecores > 0 {
            let random = Random::new(self.random.below(u64::MAX));
            Process::Units(Box::new(Unit::new(random, &self.manner, options, &self.stores)))
        } else {
            Process::Engine(Box::new(self.engine(options)))
        });
        for member in 0..self.members.len() {
            self.set_devices(member);
            self.set_slot_limit(member, self.members[member].slot_limit);
        }
        self.tell(|| "the IOhost starts".to_owned());
    }

    fn engine(&mut self, options: HostOptions) -> Host<Checksum> {
        let stats = &self.host_stats;
        let mut host = Host::new(options, Checksum::default(), Arc::clone(stats));
        for member in 0..self.members.len() {
            host.add(Admitted { client: Member::name(member), queue: 0 }, Arc::clone(stats));
        }
        // Another start may give the devices other numbers.
        let first = self.random.below(1000) as u16;
        for (device, number) in self.devices.iter_mut().zip(first..) {
            device.device = number;
        }
        host
    }

    fn set_devices(&mut self, member: usize) {
        let first = self.index(member, 0);
        let devices = &self.devices[first..][..self.manner.devices];
        match &mut self.host {
            Some(Process::Engine(host)) => host.set_devices(self.now, member as u16, devices),
            Some(Process::Units(unit)) => {
                for (index, device) in (first..).zip(devices) {
                    unit.resize(index, device.capacity_bytes);
                }
            }
            None => {}
        }
    }

    fn change_slot_limit(&mut self, member: usize) {
        let slot_limit = self.random.below(u64::from(self.manner.slots) + 1) as u16;
        self.tell(|| format!("client {member} may use {slot_limit} slots"));
        self.set_slot_limit(member, slot_limit);
    }

    fn set_slot_limit(&mut self, member: usize, slot_limit: u16) {
        self.members[member].slot_limit = slot_limit;
        match &mut self.host {
            Some(Process::Engine(host)) => {
                host.set_slot_limit(self.now, member as u16, slot_limit);
            }
            Some(Process::Units(unit)) => unit.set_slot_limit(member, slot_limit),
            None => {}
        }
    }

    /// The IOhost's process ends; with `power`, its machine does.
    fn kill_host(&mut self, power: bool) {
        let Some(host) = self.host.take() else { return };
        if let Process::Units(mut unit) = host {
            let abroad = unit.abroad();
            self.outcome.restarts_abroad += u64::from(abroad.executing);
            self.outcome.restarts_with_messages += u64::from(abroad.in_messages);
            self.note_counts(&mut unit);
        }
        self.tell(|| format!("the IOhost {}", if power { "loses its power" } else { "dies" }));
        self.outcome.restarts += 1;
        self.outcome.power_cuts += u64::from(power);
        let guests = || self.members.iter().flat_map(|member| &member.guests);
        if self.manner.is_volatile && guests().any(Guest::has_unflushed) {
            self.outcome.restarts_with_resend += 1;
            let overlap = guests().any(Guest::has_overlapping_unflushed);
            self.outcome.restarts_with_overlap += u64::from(overlap);
        }
        let waiting = self.members.iter().filter(|member| member.in_flight() > 0).count();
        self.outcome.restarts_with_unanswered += u64::from(waiting > 0);
        self.outcome.restarts_with_several += u64::from(waiting > 1);
        for store in &self.stores {
            let buffers = &mut self.buffers;
            store.with(|store| if power { store.cut_power(buffers) } else { store.kill(buffers) });
        }
        self.host_up_at = self.now.after(Nanos(self.random.below(30_000_000)));
    }

    /// A client's machine dies, and another one starts.
    fn kill_client(&mut self, member: usize) {
        self.tell(|| format!("client {member} dies"));
        self.outcome.client_deaths += 1;
        self.outcome.deaths_beside_others += u64::from(self.has_requests_of_others(member));
        if let Some(Process::Units(unit)) = &mut self.host {
            self.outcome.deaths_abroad += u64::from(unit.abroad().executing);
        }
        let manner = self.manner;
        self.members[member].die(&manner);
    }

    fn fault(&mut self) {
        let long = Nanos(self.random.below(150_000_000));
        let until = self.now.after(long);
        let member = self.random.below(self.members.len() as u64) as usize;
        match self.random.below(16) {
            0..3 => self.kill_host(false),
            3..6 => self.kill_host(true),
            6 => self.kill_client(member),
            7 => {
                // The rack loses its power.
                for member in 0..self.members.len() {
                    self.kill_client(member);
                }
                self.kill_host(true);
            }
            8..10 => {
                self.tell(|| format!("the path of client {member} is cut for {long:?}"));
                self.network.cut(Way::ToHost, member, until);
                self.network.cut(Way::ToClient, member, until);
            }
            10 => self.network.cut(Way::ToHost, member, until),
            11 => self.network.cut(Way::ToClient, member, until),
            12 => self.network.narrow(member, until),
            13 => {
                let device = self.random.below(self.manner.devices as u64) as usize;
                let index = self.index(member, device);
                self.devices[index].capacity_bytes += self.manner.block_bytes;
                self.set_devices(member);
            }
            _ => self.change_slot_limit(member),
        }
    }

    /// Sessions on another link than the one before.
    pub(super) fn link_changes(&self) -> u64 {
        self.members.iter().map(|member| member.link_changes).sum()
    }

    /// Adds the counters of units that end.
    fn note_counts(&mut self, unit: &mut Unit) {
        let (steering, sessions) = unit.counts();
        self.steering.add(&steering);
        self.unit_counts.add(&sessions);
    }

    /// The counters of all clients, and of all IOhosts.
    pub(super) fn counts(&self) -> (VrioCounts, VrioCounts) {
        let mut clients = VrioCounts::default();
        for member in &self.members {
            clients.add(&member.counts());
        }
        let mut hosts = self.host_stats.counts();
        hosts.add(&self.unit_counts);
        (clients, hosts)
    }

    /// The counters of the executors of IOhosts that have ended.
    pub(super) const fn steering(&self) -> &SteeringCounts {
        &self.steering
    }
}
