//! A wire between two Ethernet interfaces that loses, doubles, reorders and damages the frames of
//! one ethertype, as a seed decides.
//!
//! Each end is a [`PacketLink`], and between the ends is the [`Network`] of the simulations, in
//! real time. Packets of several frames (`segmentation_offload`) have links and a network of their
//! own: the wire cuts them, as a network card does, and each segment has a fate of its own. An
//! end has the Ethernet address of the station behind the *other* end: so stations address each
//! other, and see each other's addresses, as on a plain wire:
//!
//! ```text
//! station A ── left end, address of B ── faults ── right end, address of A ── station B
//! ```
#![forbid(unsafe_code)]

mod orders;
mod segments;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use sidecore_link::{
    Buffer, EthernetAddress, Faults, Frame, Link, LinkAddress, LinkOptions, LinkQueue, LinkStats,
    Network, PacketLink, PacketOptions, SimulatedLink,
};
use sidecore_linux::Clock;
use sidecore_reactor::Arm;
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

pub use orders::{Chances, Order};

/// Frames that are moved at once in one direction.
const BATCH: usize = 64;
/// The longest frame of an interface with an MTU of 9000.
const FRAME_BYTES: usize = 9_000;
const RING_FRAMES: usize = 1024;
/// IPv4: the protocol of packets of several frames.
const IPV4: u16 = 0x0800;
/// The longest of these that an end receives, if its MTU permits.
const PACKET_BYTES: usize = 65_520;
const RING_PACKETS: usize = 128;
/// A packet of several frames has at most so many.
const SEGMENTS_MAX: usize = 64;
/// The longest sleep: the end of [`Wires::run`] is asked for without a wake-up.
const SLEEP_MAX: Nanos = Nanos::from_millis(20);

/// The fates of the frames of a wire so far, both ways together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Frames that came to an end of the wire.
    pub carried: u64,
    /// Frames that left the wire, doubles included.
    pub delivered: u64,
    /// Frames that vanished.
    pub lost: u64,
    /// Frames that came out twice.
    pub doubled: u64,
    /// Frames that came out later than some that came in behind them.
    pub overtaken: u64,
    /// Frames with a wrong bit.
    pub damaged: u64,
    /// Frames that came while the wire was cut.
    pub parted: u64,
    /// Frames that found no room: no chance decided about them.
    pub crowded_out: u64,
}

/// Changes and counts what a wire does, from any thread.
#[derive(Clone, Debug)]
pub struct Handle {
    /// Of frames, and of segments of packets.
    networks: [Network; 2],
    addresses: [EthernetAddress; 2],
    /// Of the links at both ends of each network.
    stats: [[Arc<LinkStats>; 2]; 2],
}

impl Handle {
    /// Changes the fate of frames from now on.
    pub fn set_chances(&self, chances: Chances) {
        self.networks.iter().for_each(|network| network.set_faults(chances.faults()));
    }

    /// Cuts the wire, both ways.
    pub fn cut(&self) {
        let [left, right] = self.addresses;
        for network in &self.networks {
            network.cut(left, right);
            network.cut(right, left);
        }
    }

    /// Cuts the wire from its left end to its right one: the other way carries on.
    pub fn cut_from_left(&self) {
        let [left, right] = self.addresses;
        // The wire's ends have the addresses of the stations behind the other ones.
        self.networks.iter().for_each(|network| network.cut(left, right));
    }

    /// Has longer frames vanish from now on, and no others: a path whose MTU is smaller than its
    /// ends believe.
    pub fn limit_frames(&self, bytes: usize) {
        let faults = Chances::default().faults();
        let faults = Faults { black_hole_bytes: bytes, ..faults };
        self.networks.iter().for_each(|network| network.set_faults(faults));
    }

    /// Mends the wire.
    pub fn mend(&self) {
        self.networks.iter().for_each(Network::mend);
    }

    /// The fates of the frames so far, those of segments included.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let [frames, segments] = [self.counts_of(0), self.counts_of(1)];
        Counts {
            carried: frames.carried + segments.carried,
            delivered: frames.delivered + segments.delivered,
            lost: frames.lost + segments.lost,
            doubled: frames.doubled + segments.doubled,
            overtaken: frames.overtaken + segments.overtaken,
            damaged: frames.damaged + segments.damaged,
            parted: frames.parted + segments.parted,
            crowded_out: frames.crowded_out + segments.crowded_out,
        }
    }

    /// The fates of the segments of packets of several frames.
    #[must_use]
    pub fn segment_counts(&self) -> Counts {
        self.counts_of(1)
    }

    fn counts_of(&self, network: usize) -> Counts {
        let stats = &self.stats[network];
        let dropped: u64 = stats.iter().map(|stats| stats.counts().dropped()).sum();
        let network = self.networks[network].counts();
        Counts {
            carried: network.carried,
            delivered: network.delivered,
            lost: network.lost,
            doubled: network.doubled,
            overtaken: network.overtaken,
            damaged: network.damaged,
            parted: network.parted,
            crowded_out: network.crowded_out + dropped,
        }
    }
}

/// A link to an interface, and its place in a network of faults.
struct Lane {
    packet: PacketLink,
    simulated: SimulatedLink,
}

impl Lane {
    fn open(interface: &str, ethertype: u16, shape: [usize; 2], network: &Network) -> Result<Self> {
        let [frame_bytes, ring_frames] = shape;
        let ring = LinkOptions {
            frame_bytes,
            receive_frames: ring_frames,
            transmit_frames: ring_frames,
            ..LinkOptions::new(0)
        };
        let options = PacketOptions {
            interface: interface.to_owned(),
            ethertype,
            queue: LinkQueue::ONLY,
            link: ring,
            bypass_qdisc: true,
            // Each frame has a fate of its own here.
            offload: false,
        };
        let packet = PacketLink::open(&options)
            .with_context(|| format!("cannot open the end {interface}"))?;
        let LinkAddress::Ethernet(address) = packet.properties().address else {
            bail!("{interface} is no Ethernet interface");
        };
        let frames = LinkOptions {
            frame_bytes: FRAME_BYTES,
            receive_frames: RING_FRAMES,
            transmit_frames: RING_FRAMES,
            ..ring
        };
        Ok(Self { packet, simulated: network.link(address, &frames)? })
    }

    fn links(&mut self) -> [&mut dyn Link; 2] {
        [&mut self.packet, &mut self.simulated]
    }
}

/// An interface.
struct End {
    frames: Lane,
    /// Packets of several frames on one side of it, their segments on the other.
    packets: Lane,
}

impl End {
    fn open(interface: &str, ethertype: u16, networks: &[Network; 2]) -> Result<Self> {
        let [frames, segments] = networks;
        Ok(Self {
            frames: Lane::open(interface, ethertype, [FRAME_BYTES, RING_FRAMES], frames)?,
            packets: Lane::open(interface, IPV4, [PACKET_BYTES, RING_PACKETS], segments)?,
        })
    }

    fn address(&self) -> LinkAddress {
        self.frames.packet.properties().address
    }
}

/// A wire between two interfaces.
struct Wire {
    ends: [End; 2],
    ethertype: u16,
    handle: Handle,
}

impl Wire {
    fn open(interfaces: [&str; 2], ethertype: u16, networks: [Network; 2]) -> Result<Self> {
        let open = |interface| End::open(interface, ethertype, &networks);
        let ends = [open(interfaces[0])?, open(interfaces[1])?];
        let [LinkAddress::Ethernet(left), LinkAddress::Ethernet(right)] =
            ends.each_ref().map(End::address)
        else {
            bail!("an end is no Ethernet interface");
        };
        if left == right {
            let [one, other] = interfaces;
            bail!(
                "{one} and {other} have the same address, {left}: give each end that of the \
                 station behind the other"
            );
        }
        let stats = |lane: fn(&End) -> &Lane| {
            ends.each_ref().map(|end| Arc::clone(lane(end).packet.stats()))
        };
        let stats = [stats(|end| &end.frames), stats(|end| &end.packets)];
        let handle = Handle { networks, addresses: [left, right], stats };
        Ok(Self { ends, ethertype, handle })
    }

    /// Moves the frames that have come, and those whose time it is. Returns how many.
    fn turn(&mut self, now: Nanos, scratch: &mut Scratch) -> usize {
        let mut moved = 0;
        let [left, right] = self.handle.addresses;
        for (end, other) in self.ends.iter_mut().zip([right, left]) {
            // The other end's address is that of the other link in the network, and that of the
            // station in front of this end.
            let to = LinkAddress::Ethernet(other);
            let Lane { packet, simulated } = &mut end.frames;
            moved += scratch.carry(now, packet, simulated, to);
            moved += scratch.carry(now, simulated, packet, to);
            let Lane { packet, simulated } = &mut end.packets;
            moved += scratch.cut(now, (packet, self.ethertype), simulated, to);
            moved += scratch.carry(now, simulated, packet, to);
        }
        moved
    }
}

/// Vectors that are used again.
struct Scratch {
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
    bytes: Vec<u8>,
}

impl Scratch {
    fn new() -> Self {
        Self { frames: Vec::new(), buffers: Vec::new(), bytes: vec![0; PACKET_BYTES] }
    }

    /// Moves frames from one link to the other, as far as it has room.
    fn carry(
        &mut self,
        now: Nanos,
        from: &mut dyn Link,
        to: &mut dyn Link,
        address: LinkAddress,
    ) -> usize {
        to.buffers(address, BATCH, &mut self.buffers);
        from.receive(now, self.buffers.len(), &mut self.frames);
        let moved = self.frames.len();
        let mut spare = self.buffers.split_off(moved);
        to.cancel(&mut spare);
        for (frame, buffer) in self.frames.iter().zip(&mut self.buffers) {
            let len_bytes = frame.pieces().read(from.memory(), 0, &mut self.bytes);
            buffer.pieces().write(to.memory(), 0, &self.bytes[..len_bytes]);
            buffer.address(address, len_bytes);
        }
        from.give_back(&mut self.frames);
        to.send(now, &mut self.buffers);
        moved
    }

    /// Moves the segments of a packet from one link to the other. Returns the number of packets.
    fn cut(
        &mut self,
        now: Nanos,
        (from, port): (&mut dyn Link, u16),
        to: &mut dyn Link,
        address: LinkAddress,
    ) -> usize {
        to.buffers(address, SEGMENTS_MAX, &mut self.buffers);
        if self.buffers.len() == SEGMENTS_MAX {
            from.receive(now, 1, &mut self.frames);
        }
        let moved = self.frames.len();
        let mut count = 0;
        for frame in &self.frames {
            let len_bytes = frame.pieces().read(from.memory(), 0, &mut self.bytes);
            let segments = segments::cut(&self.bytes[..len_bytes], port);
            let fitting = segments.iter().filter(|segment| segment.len() <= FRAME_BYTES);
            for (segment, buffer) in fitting.zip(&mut self.buffers) {
                buffer.pieces().write(to.memory(), 0, segment);
                buffer.address(address, segment.len());
                count += 1;
            }
        }
        from.give_back(&mut self.frames);
        let mut spare = self.buffers.split_off(count);
        to.cancel(&mut spare);
        to.send(now, &mut self.buffers);
        moved
    }
}

/// Wires that one thread runs.
pub struct Wires {
    wires: Vec<Wire>,
    clock: Clock,
    scratch: Scratch,
}

impl Wires {
    /// Wires between interfaces of this thread's network namespace. Each has a seed of its own,
    /// which follows from `seed`.
    ///
    /// # Errors
    /// An interface does not exist or has too small an MTU, both ends of a wire have the same
    /// address, or the process lacks CAP_NET_RAW.
    pub fn open(
        interfaces: &[[String; 2]],
        ethertype: u16,
        seed: u64,
        chances: Chances,
    ) -> Result<Self> {
        let wires = interfaces.iter().zip(seed..).map(|([left, right], seed)| {
            let networks = [seed, !seed].map(|seed| Network::new(seed, chances.faults()));
            Wire::open([left, right], ethertype, networks)
        });
        let wires = wires.collect::<Result<_>>()?;
        Ok(Self { wires, clock: Clock::new(), scratch: Scratch::new() })
    }

    /// Handles of all wires, in their order.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        self.wires.iter().map(|wire| wire.handle.clone()).collect()
    }

    /// Carries frames until `end` is set.
    ///
    /// # Errors
    /// The kernel's.
    pub fn run(&mut self, end: &AtomicBool) -> Result<()> {
        while !end.load(Ordering::Relaxed) {
            let now = self.clock.now();
            let moved: usize =
                self.wires.iter_mut().map(|wire| wire.turn(now, &mut self.scratch)).sum();
            if moved == 0 {
                self.sleep()?;
            }
        }
        Ok(())
    }

    /// Sleeps until a link has work.
    fn sleep(&mut self) -> Result<()> {
        let ends = self.wires.iter_mut().flat_map(|wire| &mut wire.ends);
        let lanes = ends.flat_map(|end| [&mut end.frames, &mut end.packets]);
        let mut links: Vec<&mut dyn Link> = lanes.flat_map(Lane::links).collect();
        let may_sleep = links.iter_mut().all(|link| link.arm() == Arm::Armed);
        if may_sleep {
            let now = self.clock.now();
            let deadline = links.iter().filter_map(|link| link.deadline()).min();
            let patience = deadline.map_or(SLEEP_MAX, |at| at.since(now).min(SLEEP_MAX));
            let fds: Vec<BorrowedFd<'_>> = links.iter().map(|link| link.wake_fd()).collect();
            let woken = wait(&fds, patience)?;
            for (link, _) in links.iter_mut().zip(woken).filter(|(_, woken)| *woken) {
                link.on_wake();
            }
        }
        links.iter_mut().for_each(|link| link.disarm());
        Ok(())
    }
}

/// Waits until a descriptor is readable. Returns which ones are.
fn wait(fds: &[BorrowedFd<'_>], patience: Nanos) -> Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let nanos = i64::try_from(patience.0).unwrap_or(0);
    match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: nanos })) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error).context("cannot wait for frames"),
    }
    Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
}
