//! The daemon of an IOhost, which may be stopped between any two of its steps.

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::FEATURES;
use sidecore_vrio::{
    Execute, Host, HostOptions, Member as Admitted, Neglected, ServerOptions, VrioStats,
};

use super::super::member::Member;
use super::super::network::{Network, address_of};
use super::super::seal::Checksum;
use super::super::store::Buffers;
use super::super::world::Manner;
use super::kernel::{InFlight, Kernel};

/// Frames that the link's ring holds for a daemon that is stopped.
const RING: usize = 128;
/// The steps of a turn, after each of which the daemon may be stopped.
pub(super) const STEPS: u64 = 4;

pub(super) struct Process {
    /// The number of its supervisor's start.
    pub(super) number: u64,
    opening: u64,
    engine: Host<Checksum>,
    buffers: Buffers,
    link_buffer: Vec<u8>,
    /// Frames that the daemon has not taken from the link.
    arrived: VecDeque<(usize, Vec<u8>)>,
    /// Requests that the kernel does not have yet.
    taken: Vec<Execute>,
    /// Requests that the kernel has ended, and of which the engine knows nothing.
    ended: Vec<InFlight>,
    /// When it goes on, if it is stopped.
    pub(super) runs_at: Nanos,
    /// It is stopped after this step, until then.
    pub(super) stops: Option<(u64, Nanos)>,
    /// It was asked to end in order.
    pub(super) is_ending: bool,
}

impl Process {
    pub(super) fn new(
        now: Nanos,
        (number, opening): (u64, u64),
        (manner, neglected): (&Manner, Neglected),
        (incarnation, secret): (u64, u64),
    ) -> Self {
        let stats = Arc::new(VrioStats::default());
        let server = ServerOptions {
            slots: manner.slots,
            neglected,
            features: FEATURES,
            ..ServerOptions::default()
        };
        let secret = [secret, 1];
        let options = HostOptions { incarnation, secret, server, ..HostOptions::default() };
        let mut engine = Host::new(options, Checksum::default(), Arc::clone(&stats));
        for client in 0..manner.clients {
            let admitted = Admitted { client: Member::name(client), queue: 0 };
            let place = engine.add(admitted, Arc::clone(&stats)).unwrap_or_default();
            // As in the daemon, an epoch is an incarnation.
            let devices = client * manner.devices..(client + 1) * manner.devices;
            let devices: Vec<_> = devices.map(|index| manner.device(index, incarnation)).collect();
            engine.set_devices(now, place, &devices);
            engine.set_slot_limit(now, place, manner.slots);
        }
        Self {
            number,
            opening,
            engine,
            buffers: Buffers::default(),
            link_buffer: Vec::new(),
            arrived: VecDeque::new(),
            taken: Vec::new(),
            ended: Vec::new(),
            runs_at: now,
            stops: None,
            is_ending: false,
        }
    }

    /// A frame of a client arrives.
    pub(super) fn arrives(&mut self, client: usize, frame: Vec<u8>) {
        if self.arrived.len() < RING && !self.is_ending {
            self.arrived.push_back((client, frame));
        }
    }

    /// The kernel has ended a request.
    pub(super) fn ends(&mut self, request: InFlight) {
        self.ended.push(request);
    }

    /// Whether nothing is left to be done of what it has taken.
    pub(super) fn is_idle(&self, now: Nanos) -> bool {
        self.arrived.is_empty()
            && self.taken.is_empty()
            && self.ended.is_empty()
            && self.engine.is_idle(now)
    }

    /// When it does something next.
    pub(super) fn next(&self, soon: Nanos) -> Nanos {
        let is_due = !(self.arrived.is_empty() && self.taken.is_empty() && self.ended.is_empty());
        let deadline = self.engine.deadline().unwrap_or(Nanos::MAX);
        let next = if is_due { soon } else { deadline.max(soon) };
        next.max(self.runs_at)
    }

    /// Does what is to be done, unless it is stopped in between.
    pub(super) fn turn(&mut self, now: Nanos, network: &mut Network, kernel: &mut Kernel) {
        for step in 0..STEPS {
            if self.runs_at > now {
                return;
            }
            match step {
                0 => self.receive(now, network),
                1 => self.submit(now, kernel),
                2 => self.complete(),
                _ => {
                    let mut link = network.host(now, &mut self.link_buffer);
                    let mut port = SlicePort { wire: &mut link, data: &mut self.buffers };
                    self.engine.poll(now, &mut port);
                }
            }
            if let Some((_, until)) = self.stops.take_if(|(after, _)| *after == step) {
                self.runs_at = until;
            }
        }
    }

    fn receive(&mut self, now: Nanos, network: &mut Network) {
        for (client, frame) in self.arrived.drain(..) {
            let mut link = network.host(now, &mut self.link_buffer);
            let mut port = SlicePort { wire: &mut link, data: &mut self.buffers };
            port.to_host(&mut self.engine, (now, address_of(client)), &mut Arrived::new(frame));
        }
        self.taken.extend(std::iter::from_fn(|| self.engine.next_execute()));
    }

    fn submit(&mut self, now: Nanos, kernel: &mut Kernel) {
        for execute in self.taken.drain(..) {
            let data = self.buffers.bytes(execute.place);
            kernel.submit(now, (self.number, self.opening), execute, data);
        }
    }

    fn complete(&mut self) {
        for InFlight { execute, data, result, .. } in self.ended.drain(..) {
            if execute.request.operation == Operation::Read && result.is_ok() {
                self.buffers.bytes(execute.place)[..data.len()].copy_from_slice(&data);
            }
            self.engine.complete(execute.ticket, result);
        }
    }
}
