//! Root on a VMhost, with a client of its own in place of the VMhost's daemon: it has the VMhost's
//! key, may lie to itself about the devices that the IOhost describes, and asks as fast as it can.

use super::net::{Net, Station};
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_block::{BlockError, Operation};
use sidecore_kit::namespace::Namespace;
use sidecore_link::{
    Buffer, EthernetAddress, Frame, Link as _, LinkAddress, LinkOptions, LinkQueue, PacketLink,
    PacketOptions,
};
use sidecore_linux::Clock;
use sidecore_trust::{ClientName, ClientTrust, SessionSeal};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;
use sidecore_vrio::port::{Peer, Seal};
use sidecore_vrio::slices::{Arrived, Buffers, SlicePort, Transmit};
use sidecore_vrio::wire::{
    DEVICE_NAME_BYTES, DeviceEntry, ETHERTYPE, Frame as Head, Hello, Kind, Welcome, device_flag,
};
use sidecore_vrio::{Client, ClientOptions, Event, Request};
use std::sync::Arc;
use std::time::{Duration, Instant};

const FRAME_BYTES: usize = 9000;
/// Frames that are moved at once.
const BATCH: usize = 64;
/// The longest sleep between two looks at the link and at the clock.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// The size of a request.
pub(super) const BLOCK: u64 = 4096;

/// The changes to each description of a device that the IOhost sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lie {
    /// The truth.
    None,
    /// A device may be written, and is four times as large.
    Larger,
    /// A device that the IOhost does not have for this client is there, with this number.
    Number(u16),
}

impl Lie {
    fn tell(self, entry: &mut DeviceEntry) {
        match self {
            Lie::None => {}
            Lie::Larger => {
                entry.flags &= !device_flag::READ_ONLY;
                entry.capacity_bytes *= 4;
            }
            Lie::Number(device) => {
                entry.flags |= device_flag::PRESENT;
                (entry.device, entry.capacity_bytes) = (device, 1 << 20);
                (entry.block_bytes, entry.physical_block_bytes) = (512, 512);
            }
        }
    }
}

/// The handshake of a session whose seal lies.
struct Liar {
    trust: ClientTrust,
    lie: Lie,
}

impl ClientHandshake for Liar {
    type Seal = LyingSeal;

    fn code(&self) -> u8 {
        self.trust.code()
    }

    fn hello(&mut self, fields: &Hello, message: &mut [u8]) -> Option<usize> {
        self.trust.hello(fields, message)
    }

    fn welcome(&mut self, message: &[u8]) -> Option<(Welcome, LyingSeal)> {
        let (welcome, seal) = self.trust.welcome(message)?;
        Some((welcome, LyingSeal { seal, lie: self.lie }))
    }
}

/// A seal that changes descriptions of devices behind the engine's back.
struct LyingSeal {
    seal: SessionSeal,
    lie: Lie,
}

impl Seal for LyingSeal {
    fn tag_bytes(&self) -> usize {
        self.seal.tag_bytes()
    }

    fn phase(&mut self, counter: u64) -> u8 {
        self.seal.phase(counter)
    }

    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) {
        self.seal.seal(counter, head, sealed);
    }

    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        if !self.seal.open(counter, head, sealed) {
            return false;
        }
        let kind = Head::parse(head).map(|frame| frame.kind);
        if let (Ok(Kind::Device | Kind::Attached), Some(bytes)) = (kind, sealed.first_chunk_mut()) {
            let mut entry = DeviceEntry::decode(bytes);
            self.lie.tell(&mut entry);
            *bytes = entry.encode();
        }
        true
    }
}

/// Frames that wait for the link.
#[derive(Default)]
struct Outgoing {
    handed_out: Vec<u8>,
    frames: Vec<Vec<u8>>,
}

impl Transmit for Outgoing {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        if self.frames.len() >= 4 * BATCH {
            return None;
        }
        self.handed_out = vec![0; len_bytes];
        Some(&mut self.handed_out)
    }

    fn commit(&mut self, _: Peer) {
        self.frames.push(std::mem::take(&mut self.handed_out));
    }
}

/// A raw socket on a host's interface.
pub(super) struct Tap {
    link: PacketLink,
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
}

impl Tap {
    /// Opens the interface of a namespace.
    pub(super) fn open(namespace: &Namespace, interface: &str) -> Result<Tap> {
        let options = PacketOptions {
            interface: interface.to_owned(),
            ethertype: ETHERTYPE,
            queue: LinkQueue::ONLY,
            link: LinkOptions { frame_bytes: FRAME_BYTES, ..LinkOptions::new(0) },
            bypass_qdisc: true,
            offload: false,
        };
        let link = namespace.within(|| PacketLink::open(&options))?;
        let link = link.with_context(|| format!("cannot open {interface}"))?;
        Ok(Tap { link, frames: Vec::new(), buffers: Vec::new() })
    }

    /// The frames that have come.
    pub(super) fn receive(&mut self, now: Nanos) -> Vec<Vec<u8>> {
        self.link.receive(now, BATCH, &mut self.frames);
        let read = |frame: &Frame| {
            let mut bytes = vec![0; frame.len_bytes()];
            frame.pieces().read(self.link.memory(), 0, &mut bytes);
            bytes
        };
        let received = self.frames.iter().map(read).collect();
        self.link.give_back(&mut self.frames);
        received
    }

    /// Sends as many frames as there is room for, and removes those.
    pub(super) fn send(&mut self, now: Nanos, to: LinkAddress, frames: &mut Vec<Vec<u8>>) {
        self.link.buffers(to, frames.len().min(BATCH), &mut self.buffers);
        let granted = self.buffers.len();
        for (buffer, frame) in self.buffers.iter_mut().zip(frames.drain(..granted)) {
            buffer.pieces().write(self.link.memory(), 0, &frame);
            buffer.address(to, frame.len());
        }
        self.link.send(now, &mut self.buffers);
    }

    fn wait(&self) {
        // An error is a signal, which the next look at the clock notices.
        let fd = self.link.wake_fd();
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&SLEEP));
    }
}

/// The address of the IOhost on a VMhost's cable.
pub(super) fn iohost(station: &Station) -> Result<LinkAddress> {
    let address: EthernetAddress =
        station.iohost.address.parse().ok().context("the IOhost has no address")?;
    Ok(LinkAddress::Ethernet(address))
}

/// A client on a VMhost's interface.
pub(super) struct Intruder {
    client: Client<Liar>,
    tap: Tap,
    iohost: LinkAddress,
    outgoing: Outgoing,
    data: Buffers,
    clock: Clock,
    /// Results of requests that ended, by their tags.
    ended: Vec<(u64, Result<(), BlockError>)>,
    next_tag: u64,
}

/// The name of the only station that an intruder speaks to.
const IOHOST: Peer = Peer(1);

impl Intruder {
    /// A client of this name, in the namespace of a VMhost.
    pub(super) fn new(
        namespace: &Namespace,
        station: &Station,
        (name, trust): (ClientName, ClientTrust),
        lie: Lie,
    ) -> Result<Intruder> {
        let clock = Clock::new();
        let options = ClientOptions {
            client: name.to_wire(),
            // Each start of a client has another number.
            life: clock.now().0,
            ..ClientOptions::default()
        };
        let client = Client::new(options, IOHOST, Liar { trust, lie }, Arc::default());
        Ok(Intruder {
            client,
            tap: Tap::open(namespace, Net::VMHOST_INTERFACE)?,
            iohost: iohost(station)?,
            outgoing: Outgoing::default(),
            data: Buffers::default(),
            clock,
            ended: Vec::new(),
            next_tag: 0,
        })
    }

    /// Moves frames until the condition holds; false if it does not in time.
    pub(super) fn runs_until(
        &mut self,
        patience: Duration,
        mut is_done: impl FnMut(&mut Self) -> bool,
    ) -> Result<bool> {
        let deadline = Instant::now() + patience;
        loop {
            if is_done(self) {
                return Ok(true);
            }
            sidecore_kit::interrupt::check()?;
            if Instant::now() >= deadline {
                return Ok(false);
            }
            if !self.turn() {
                self.tap.wait();
            }
        }
    }

    /// Handles the frames that have come, and sends what is due. Returns whether there was any.
    fn turn(&mut self) -> bool {
        let now = self.clock.now();
        let received = self.tap.receive(now);
        let has_received = !received.is_empty();
        let mut port = SlicePort { wire: &mut self.outgoing, data: &mut self.data };
        for frame in received {
            port.to_client(&mut self.client, (now, IOHOST), &mut Arrived::new(frame));
        }
        self.client.poll(now, &mut port);
        let has_sent = !self.outgoing.frames.is_empty();
        self.tap.send(now, self.iohost, &mut self.outgoing.frames);
        while let Some(event) = self.client.next_event() {
            if let Event::Completed { tag, result } = event {
                self.ended.push((tag, result));
            }
        }
        has_received || has_sent
    }

    /// Whether there is a session.
    pub(super) fn is_connected(&self) -> bool {
        self.client.is_connected()
    }

    /// Asks for a device, and returns its number in the client; `None` if it is not attached in
    /// time.
    pub(super) fn attach(&mut self, name: &str, patience: Duration) -> Result<Option<u16>> {
        let mut padded = [0; DEVICE_NAME_BYTES];
        padded.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        let number = self.client.open(&padded).context("the client has no more devices")?;
        let is_attached = |it: &mut Self| it.client.is_attached(number);
        Ok(self.runs_until(patience, is_attached)?.then_some(number))
    }

    /// Submits a request for a block at an offset, and returns its tag.
    pub(super) fn submit(&mut self, device: u16, operation: Operation, offset: u64) -> Result<u64> {
        self.next_tag += 1;
        let request =
            Request { operation, offset_bytes: offset, len_bytes: BLOCK, ..Request::default() };
        self.client.submit(self.next_tag, device, request)?;
        Ok(self.next_tag)
    }

    /// The result of a request; `None` if it does not end in time.
    pub(super) fn result(
        &mut self,
        device: u16,
        operation: Operation,
        offset: u64,
        patience: Duration,
    ) -> Result<Option<Result<(), BlockError>>> {
        let tag = self.submit(device, operation, offset)?;
        let mut result = None;
        self.runs_until(patience, |it| {
            let found = it.ended.iter().position(|(ended, _)| *ended == tag);
            result = found.map(|at| it.ended.swap_remove(at).1);
            result.is_some()
        })?;
        Ok(result)
    }

    /// Keeps as many requests with the IOhost as it takes, for this time. Returns how many ended
    /// well.
    pub(super) fn flood(
        &mut self,
        device: u16,
        operation: Operation,
        window: Duration,
    ) -> Result<u64> {
        const BLOCKS: u64 = 256;
        let (mut done, mut next) = (0, 0);
        self.runs_until(window, |it| {
            done += it.ended.drain(..).filter(|(_, result)| result.is_ok()).count() as u64;
            while it.client.unanswered() < 64
                && it.submit(device, operation, next % BLOCKS * BLOCK).is_ok()
            {
                next += 1;
            }
            false
        })?;
        Ok(done)
    }
}
