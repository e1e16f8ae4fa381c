//! An IOhost with its units: the one that polls the link, and helpers on other sidecores.

use std::rc::Rc;
use std::sync::Arc;

use sidecore_link::{EthernetAddress, Faults, Link as _, LinkAddress, LinkOptions, SimulatedLink};
use sidecore_linux::EpollSleeper;
use sidecore_reactor::{Arm, IdleMode, Pollable, Polled, Sleeper as _, WakeKey};
use sidecore_remote::export::{
    ClientId, ClientShare, ClientSpec, Export, ExportedDevice, Helper, Load, SteeringCounts, helper,
};
use sidecore_telemetry::Counts as _;
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{HostOptions, VrioCounts};

use super::disk::Disk;
use super::member::{Member, device_text};
use super::network::{Network, Way};
use super::seal::Checksum;
use super::world::Manner;
use crate::Random;

/// Requests that a poll of a unit may take.
const BUDGET: usize = 32;
const HOST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 100]);

fn station(client: usize) -> EthernetAddress {
    EthernetAddress([2, 0, 0, 0, 0, client as u8])
}

fn link_options() -> LinkOptions {
    let options = LinkOptions::new(DATA_HEADER_BYTES);
    LinkOptions { receive_frames: 128, transmit_frames: 64, ..options }
}

/// A sidecore with one unit.
struct Sidecore {
    /// When it polls next.
    at: Nanos,
    sleeps: bool,
    /// An event has woken it, and it polls soon.
    is_woken: bool,
}

impl Sidecore {
    fn turn(&mut self, now: Nanos, unit: &mut dyn Pollable, random: &mut Random) {
        if self.sleeps {
            unit.on_wake();
            unit.disarm();
            (self.sleeps, self.is_woken) = (false, false);
        }
        let polled = unit.poll(now, BUDGET);
        assert_ne!(polled, Polled::Finished, "a unit ends");
        let is_busy = matches!(polled, Polled::Busy(_));
        if !is_busy && random.once_in(2) && unit.arm() == Arm::Armed {
            self.sleeps = true;
            self.at = unit.deadline().map_or(Nanos::MAX, |at| at.max(now.after(Nanos(1_000))));
            return;
        }
        let pause_ns = match random.below(200) {
            // The host runs something else.
            0 => random.below(5_000_000),
            _ if is_busy => random.below(8_000),
            _ => random.below(25_000),
        };
        self.at = now.after(Nanos(1_000 + pause_ns));
    }

    /// Whether its unit sleeps and no event has come.
    fn waits(&self) -> bool {
        self.sleeps && !self.is_woken
    }

    /// Has a sleeping unit polled soon whose event has come.
    fn wake(&mut self, now: Nanos, random: &mut Random) {
        self.is_woken = true;
        self.at = self.at.min(now.after(Nanos(1_000 + random.below(30_000))));
    }
}

/// Watches what wakes the unit with the link, and its helpers.
fn watch(export: &Export<Checksum>, helpers: &[Helper]) -> EpollSleeper {
    let mut events = EpollSleeper::new().expect("an epoll");
    let helpers = helpers.iter().map(|helper| helper as &dyn Pollable);
    for (number, unit) in (0..).zip(std::iter::once(export as &dyn Pollable).chain(helpers)) {
        unit.wake_fds(&mut |fd| events.watch(fd, WakeKey(number)).expect("room in an epoll"));
    }
    events
}

/// The requests that an IOhost has where.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Abroad {
    /// Of stores, on other sidecores than that of the link.
    pub(super) executing: bool,
    /// In messages to other sidecores, and back.
    pub(super) in_messages: bool,
}

/// An IOhost's process.
pub(super) struct Unit {
    export: Box<Export<Checksum>>,
    helpers: Vec<Helper>,
    /// That of the link, and those of the helpers.
    sidecores: Vec<Sidecore>,
    /// Of all descriptors that wake a unit; the key is the number of its sidecore. One system call
    /// asks for all of them, because simulations would spend half of their time in one for each.
    events: EpollSleeper,
    woken: Vec<WakeKey>,
    /// Whether there may be events of which the units were not told: something was done to them.
    stirred: bool,
    /// The clients' ends of the IOhost's wire, which is perfect: the paths are the network's.
    ends: Vec<SimulatedLink>,
    clients: Vec<ClientId>,
    /// Of all devices, those of the first client first.
    numbers: Vec<u16>,
    disks: Vec<Disk>,
    random: Random,
}

impl Unit {
    pub(super) fn new(
        mut random: Random,
        manner: &Manner,
        options: HostOptions,
        disks: &[Disk],
    ) -> Self {
        let faults = Faults { delay: Nanos::ZERO, padded_to_bytes: 0, ..Faults::default() };
        let wire = sidecore_link::Network::new(1, faults);
        let link = Box::new(wire.link(HOST, &link_options()).expect("a link"));
        let (core, load) = (Rc::default(), Arc::new(Load::default()));
        let handshake = (options, Checksum::default());
        let mut export =
            Export::new(&core, link, handshake, &load, IdleMode::Poll).expect("a unit");
        let helpers = (1..manner.sidecores).map(|_| {
            let (end, seed) = helper(&Arc::default()).expect("a helper");
            export.add_helper(end).expect("a helper");
            Helper::new(&Rc::default(), seed, IdleMode::Poll).expect("a helper")
        });
        let helpers: Vec<Helper> = helpers.collect();
        let (mut clients, mut numbers) = (Vec::new(), Vec::new());
        let shared = Arc::default();
        for (client, disks) in disks.chunks(manner.devices).enumerate() {
            let spec = ClientSpec {
                name: format!("client{client}").into(),
                id: Member::name(client),
                queues: 1,
                share: ClientShare { weight: 1 + random.below(4) as u32, ..ClientShare::default() },
            };
            let id = export.add_client(&spec).expect("a client");
            for (device, disk) in disks.iter().enumerate() {
                let device = ExportedDevice {
                    name: device_text(device).into(),
                    serial: String::new(),
                    store: Arc::new(disk.clone()),
                    read_only: false,
                    write_cache: true,
                    epoch: 1,
                    tenure: if manner.is_shared { Arc::clone(&shared) } else { Arc::default() },
                };
                numbers.push(export.add_device(id, &device).expect("a device"));
            }
            clients.push(id);
        }
        let at = Nanos::ZERO;
        let sidecores = (0..manner.sidecores.max(1))
            .map(|_| Sidecore { at, sleeps: false, is_woken: false })
            .collect();
        let ends = 0..clients.len();
        let ends = ends.map(|client| wire.link(station(client), &link_options()).expect("a link"));
        let events = watch(&export, &helpers);
        Self {
            export: Box::new(export),
            helpers,
            sidecores,
            events,
            woken: Vec::new(),
            stirred: true,
            ends: ends.collect(),
            clients,
            numbers,
            disks: disks.to_vec(),
            random,
        }
    }

    /// A frame of a client arrives.
    pub(super) fn receive(&mut self, now: Nanos, client: usize, frame: &[u8]) {
        self.stirred = true;
        let end = &mut self.ends[client];
        let mut buffers = Vec::new();
        end.buffers(LinkAddress::Ethernet(HOST), 1, &mut buffers);
        for buffer in &mut buffers {
            buffer.pieces().write(end.memory(), 0, frame);
            buffer.address(LinkAddress::Ethernet(HOST), frame.len());
        }
        end.send(now, &mut buffers);
    }

    /// When a sidecore polls next.
    pub(super) fn next(&self) -> Nanos {
        self.sidecores.iter().map(|sidecore| sidecore.at).min().unwrap_or(Nanos::MAX)
    }

    /// Has those sidecores poll whose time it is, and sends what they send.
    pub(super) fn poll(&mut self, now: Nanos, network: &mut Network) {
        let Self { export, helpers, sidecores, events, woken, stirred, ends, random, .. } = self;
        let helpers = helpers.iter_mut().map(|helper| helper as &mut dyn Pollable);
        let units = std::iter::once(&mut **export as &mut dyn Pollable).chain(helpers);
        let mut units: Vec<(u64, &mut Sidecore, &mut dyn Pollable)> = (0..)
            .zip(sidecores.iter_mut().zip(units))
            .map(|(number, (sidecore, unit))| (number, sidecore, unit))
            .collect();
        // Any of them may be the first.
        let first = random.below(units.len() as u64) as usize;
        units.rotate_left(first);
        for (_, sidecore, unit) in &mut units {
            if sidecore.at <= now {
                sidecore.turn(now, &mut **unit, random);
                *stirred = true;
            }
        }
        woken.clear();
        if std::mem::take(stirred) {
            events.wait(Some(Nanos::ZERO), woken).expect("poll of events");
        }
        for (number, sidecore, _) in &mut units {
            if sidecore.waits() && woken.contains(&WakeKey(*number)) {
                sidecore.wake(now, random);
            }
        }
        let (mut frames, mut bytes) = (Vec::new(), Vec::new());
        for (client, end) in ends.iter_mut().enumerate() {
            end.receive(now, usize::MAX, &mut frames);
            for frame in &frames {
                bytes.resize(frame.len_bytes(), 0);
                frame.pieces().read(end.memory(), 0, &mut bytes);
                network.send(now, (Way::ToClient, client), bytes.clone());
            }
            end.give_back(&mut frames);
        }
    }

    pub(super) fn resize(&mut self, device: usize, capacity_bytes: u64) {
        self.stirred = true;
        self.export.resize_device(self.numbers[device], capacity_bytes).expect("a device");
    }

    pub(super) fn set_slot_limit(&mut self, client: usize, slots: u16) {
        self.stirred = true;
        let client = self.clients[client];
        if slots > 0 {
            let share = ClientShare { slots, ..ClientShare::default() };
            self.export.set_share(client, &share).expect("a client");
        }
        self.export.drain_client(client, slots == 0).expect("a client");
    }

    /// The requests that are not with the sidecore of the link.
    pub(super) fn abroad(&mut self) -> Abroad {
        let devices = self.export.status().devices;
        let places = self.disks.iter().map(Disk::in_flight);
        let (here, there) = places.fold((0, 0), |sum, add| (sum.0 + add.0, sum.1 + add.1));
        let all: u32 = devices.iter().map(|device| device.in_flight).sum();
        Abroad { executing: there > 0, in_messages: all as usize > here + there }
    }

    /// The counters of its executors, and those of the sessions.
    pub(super) fn counts(&mut self) -> (SteeringCounts, VrioCounts) {
        let status = self.export.status();
        let mut counts = status.strangers;
        for session in &status.sessions {
            counts.add(&session.counts);
        }
        (status.steering, counts)
    }
}
