//! The simulated network between links: what becomes of each frame, by a seed.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_reactor::EventFd;
use sidecore_units::Nanos;
use sidecore_wire_faults::{Fates, Faults};

use super::SimulatedLink;
use crate::{EthernetAddress, LinkError, LinkOptions};

/// Frames on their way to one link at most: more are lost, as in a switch.
const IN_FLIGHT_MAX: usize = 1 << 14;

/// The fates of the frames so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkCounts {
    /// Frames given to the network.
    pub carried: u64,
    /// Frames given to the links that they were for, doubles included.
    pub delivered: u64,
    /// See [`Faults::lost`].
    pub lost: u64,
    /// See [`Faults::doubled`].
    pub doubled: u64,
    /// See [`Faults::overtaken`].
    pub overtaken: u64,
    /// See [`Faults::damaged`].
    pub damaged: u64,
    /// See [`Faults::cut_short`].
    pub cut_short: u64,
    /// Frames longer than [`Faults::black_hole_bytes`].
    pub swallowed: u64,
    /// Frames on a way that was cut.
    pub parted: u64,
    /// Frames for an address that no link has.
    pub strayed: u64,
    /// Frames on a way with too many of them.
    pub crowded_out: u64,
}

/// A network of simulated links. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Network(Arc<Mutex<Wires>>);

#[derive(Debug)]
struct Wires {
    fates: Fates,
    faults: Faults,
    counts: NetworkCounts,
    ports: BTreeMap<EthernetAddress, Port>,
    /// Ways that carry nothing, from one link to another.
    cuts: BTreeSet<(EthernetAddress, EthernetAddress)>,
    /// The number of the next frame, so that equal times keep their order.
    next: u64,
    /// Vectors of frames that have arrived.
    spare: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Port {
    flights: BinaryHeap<Reverse<Flight>>,
    /// The time of the last frame in order.
    latest: Nanos,
    armed: bool,
    event: Arc<EventFd>,
}

/// A frame on its way.
#[derive(Debug, PartialEq, Eq)]
struct Flight {
    at: Nanos,
    number: u64,
    from: EthernetAddress,
    bytes: Vec<u8>,
}

impl Ord for Flight {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for Flight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Network {
    /// A network without links.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self(Arc::new(Mutex::new(Wires {
            fates: Fates::new(seed),
            faults,
            counts: NetworkCounts::default(),
            ports: BTreeMap::new(),
            cuts: BTreeSet::new(),
            next: 0,
            spare: Vec::new(),
        })))
    }

    /// A new link. One that has the same address gets no more frames.
    ///
    /// # Errors
    /// Options out of range, or no memory.
    pub fn link(
        &self,
        address: EthernetAddress,
        options: &LinkOptions,
    ) -> Result<SimulatedLink, LinkError> {
        SimulatedLink::new(self.clone(), address, options)
    }

    /// Changes what becomes of frames from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.wires().faults = faults;
    }

    /// Cuts the way from one link to another; the way back stays.
    pub fn cut(&self, from: EthernetAddress, to: EthernetAddress) {
        self.wires().cuts.insert((from, to));
    }

    /// Mends all ways.
    pub fn mend(&self) {
        self.wires().cuts.clear();
    }

    /// The fates of the frames so far.
    #[must_use]
    pub fn counts(&self) -> NetworkCounts {
        self.wires().counts
    }

    fn wires(&self) -> MutexGuard<'_, Wires> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn plug(&self, address: EthernetAddress, event: Arc<EventFd>) {
        let port = Port { flights: BinaryHeap::new(), latest: Nanos::ZERO, armed: false, event };
        self.wires().ports.insert(address, port);
    }

    /// Takes a link off the network, unless another one has its address by now.
    pub(super) fn unplug(&self, address: EthernetAddress, event: &Arc<EventFd>) {
        let mut wires = self.wires();
        if wires.ports.get(&address).is_some_and(|port| Arc::ptr_eq(&port.event, event)) {
            wires.ports.remove(&address);
        }
    }

    /// Takes a frame to its destination, or does to it what is its fate.
    pub(super) fn carry(
        &self,
        now: Nanos,
        from: EthernetAddress,
        to: EthernetAddress,
        bytes: &[u8],
    ) {
        let mut wires = self.wires();
        if !to.is_multicast() {
            wires.carry(now, from, to, bytes);
            return;
        }
        let all: Vec<_> = wires.ports.keys().copied().filter(|port| *port != from).collect();
        all.into_iter().for_each(|port| wires.carry(now, from, port, bytes));
    }

    /// The next frame that has arrived by `now`.
    pub(super) fn deliver(
        &self,
        to: EthernetAddress,
        now: Nanos,
    ) -> Option<(EthernetAddress, Vec<u8>)> {
        let mut wires = self.wires();
        let port = wires.ports.get_mut(&to)?;
        if port.flights.peek()?.0.at > now {
            return None;
        }
        let Flight { from, bytes, .. } = port.flights.pop()?.0;
        wires.counts.delivered = wires.counts.delivered.saturating_add(1);
        Some((from, bytes))
    }

    /// Takes the vector of a frame back.
    pub(super) fn recycle(&self, bytes: Vec<u8>) {
        self.wires().spare.push(bytes);
    }

    /// Has the next frame for this link wake it. Returns the time of the next one that is under
    /// way.
    pub(super) fn arm(&self, address: EthernetAddress) -> Option<Nanos> {
        let mut wires = self.wires();
        let port = wires.ports.get_mut(&address)?;
        port.armed = true;
        port.flights.peek().map(|flight| flight.0.at)
    }

    pub(super) fn disarm(&self, address: EthernetAddress) {
        if let Some(port) = self.wires().ports.get_mut(&address) {
            port.armed = false;
        }
    }

    pub(super) fn next_delivery(&self, address: EthernetAddress) -> Option<Nanos> {
        self.wires().ports.get(&address)?.flights.peek().map(|flight| flight.0.at)
    }
}

impl Wires {
    fn carry(&mut self, now: Nanos, from: EthernetAddress, to: EthernetAddress, bytes: &[u8]) {
        let (faults, counts) = (self.faults, &mut self.counts);
        let count = |counter: &mut u64| *counter = counter.saturating_add(1);
        count(&mut counts.carried);
        let fate = self.fates.draw(&faults);
        if !self.ports.contains_key(&to) {
            return count(&mut counts.strayed);
        }
        if self.cuts.contains(&(from, to)) {
            return count(&mut counts.parted);
        }
        if bytes.len() > faults.black_hole_bytes {
            return count(&mut counts.swallowed);
        }
        if fate.is_lost {
            return count(&mut counts.lost);
        }
        let mut frame = self.spare.pop().unwrap_or_default();
        frame.clear();
        frame.extend_from_slice(bytes);
        frame.resize(bytes.len().max(faults.padded_to_bytes), 0);
        if fate.is_damaged {
            count(&mut counts.damaged);
            let (at, mask) = fate.wrong_bit(frame.len());
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= mask;
            }
        }
        if fate.is_cut_short {
            count(&mut counts.cut_short);
            frame.truncate(fate.rest(frame.len()));
        }
        if fate.is_doubled {
            count(&mut counts.doubled);
            let mut double = self.spare.pop().unwrap_or_default();
            double.clear();
            double.extend_from_slice(&frame);
            self.fly(now, from, to, double);
        }
        self.fly(now, from, to, frame);
    }

    /// Puts a frame on its way.
    fn fly(&mut self, now: Nanos, from: EthernetAddress, to: EthernetAddress, bytes: Vec<u8>) {
        let Some(port) = self.ports.get_mut(&to) else {
            return;
        };
        if port.flights.len() >= IN_FLIGHT_MAX {
            self.counts.crowded_out = self.counts.crowded_out.saturating_add(1);
            self.spare.push(bytes);
            return;
        }
        let arrival = self.fates.arrival(&self.faults, now, &mut port.latest);
        if arrival.is_overtaken {
            self.counts.overtaken = self.counts.overtaken.saturating_add(1);
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        port.flights.push(Reverse(Flight { at: arrival.at, number, from, bytes }));
        if port.armed {
            // Once: the link arms itself again.
            port.armed = false;
            port.event.signal();
        }
    }
}
