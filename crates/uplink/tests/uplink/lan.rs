//! A switch with a station of tests and the kernel of a network namespace of each test's own, and
//! the tests that every way between the two passes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use sidecore_counting_alloc::allocations;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::output_of;
use sidecore_linux::{DatagramSocket, Departure, FrameFilter, PacketSocket, Place};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_net::contract::{NIC, QueueDriver, Station, WIRE};
use sidecore_net::{
    MacAddress, PortConfig, PortCounts, PortId, PortQueue, PortStats, Properties, Switch,
    SwitchOptions, SwitchUnit,
};
use sidecore_reactor::{Arm, IdleMode, Pollable as _};
use sidecore_spec_virtio::net::{PacketHeader, gso};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;

pub const SOON: Duration = Duration::from_secs(20);
/// The kernel's address, and the station's.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
pub const HOST_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
pub const GUEST_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// Runs a test in a network namespace of its own, if this machine allows that.
pub fn inside(test: impl FnOnce() + Send) {
    match Namespace::new() {
        Ok(namespace) => namespace.within(test).unwrap(),
        Err(error) => sidecore_skip::skip(format_args!("no network namespace: {error}")),
    }
}

/// Runs ip(8) in this thread's namespace.
pub fn ip(words: &str) -> String {
    let words: Vec<&str> = words.split_whitespace().collect();
    output_of("ip", &words).unwrap()
}

/// Sets an interface up. Without IPv6 its kernel sends nothing by itself.
pub fn set_up(interface: &str) {
    let path = format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
    // A kernel without IPv6 has no such file.
    let _ = std::fs::write(path, "1");
    ip(&format!("link set {interface} up"));
}

/// A queue of a port and the interface behind it.
pub struct Way {
    pub queue: Box<dyn PortQueue>,
    pub stats: Arc<PortStats>,
    /// The interface of the queue.
    pub interface: &'static str,
    /// The interface by which the kernel is reached, with the address [`HOST_MAC`].
    pub of_host: &'static str,
    /// Whether the kernel cuts datagrams.
    pub cuts_datagrams: bool,
}

/// A program of the host on a packet socket.
pub struct Host(PacketSocket);

impl Host {
    pub fn new(interface: &str) -> Self {
        let socket = PacketSocket::new().unwrap();
        let interface = socket.interface(interface).unwrap();
        socket.bind(&interface, &FrameFilter { ethertype: 0x88b5, share: None }).unwrap();
        Self(socket)
    }
}

impl QueueDriver for Host {
    fn send(&mut self, frame: &[u8]) {
        assert_eq!(send(&self.0, frame, SendFlags::empty()).unwrap(), frame.len());
    }

    fn offer(&mut self, _: usize) {}

    fn received(&mut self) -> Vec<Vec<u8>> {
        let (mut frames, mut bytes) = (Vec::new(), [0; 2048]);
        while let Ok((len_bytes, _)) = recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT) {
            frames.push(bytes[..len_bytes].to_vec());
        }
        frames
    }
}

/// A switch with a station of tests and the host's kernel.
pub struct Lan {
    pub unit: SwitchUnit,
    pub station: Station,
    stats: [Arc<PortStats>; 2],
    /// The port of the interface.
    pub port: PortId,
    start: Instant,
}

impl Lan {
    pub fn new(way: Way, of_station: Properties) -> Self {
        Self::with(way, of_station, PortConfig::station(), PortConfig::uplink())
    }

    /// A switch whose ports are configured so.
    pub fn with(
        way: Way,
        of_station: Properties,
        station_port: PortConfig,
        uplink_port: PortConfig,
    ) -> Self {
        let switch = Switch::new(SwitchOptions::new(7));
        let mut unit = SwitchUnit::new("lan", switch, IdleMode::Poll).unwrap();
        let of_host = way.of_host;
        ip(&format!("addr replace {HOST}/24 dev {of_host}"));
        ip(&format!("neigh replace {GUEST} lladdr {GUEST_MAC} dev {of_host} nud permanent"));
        let (station, queue) = Station::new(of_station, true);
        station.post(256, 2048);
        let stats = [Arc::default(), way.stats];
        let now = Nanos(1);
        let mut add = |name, config, at: usize| {
            unit.switch_mut().add_port(now, name, config, Arc::clone(&stats[at])).unwrap()
        };
        let guest = add("guest", station_port, 0);
        let port = add("uplink", uplink_port, 1);
        unit.attach(guest, Box::new(queue)).unwrap();
        unit.attach(port, way.queue).unwrap();
        Self { unit, station, stats, port, start: Instant::now() }
    }

    pub fn turn(&mut self) {
        let now = Nanos(2_000_000 + self.start.elapsed().as_nanos() as u64);
        self.unit.poll(now, 32);
    }

    /// Polls until `done`.
    pub fn until<T>(&mut self, subject: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.turn();
            if let Some(found) = done(self) {
                return found;
            }
            assert!(start.elapsed() < SOON, "{subject} does not come: {:?}", self.counts());
        }
    }

    /// Those of the station, and those of the interface.
    pub fn counts(&self) -> [PortCounts; 2] {
        [self.stats[0].counts(), self.stats[1].counts()]
    }
}

/// The sum of 16-bit words in ones' complement (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A UDP packet from the station to this port of the host, with the checksum of the pseudo header
/// alone.
fn packet(port: u16, data: &[u8]) -> Vec<u8> {
    let udp_bytes = (8 + data.len()) as u16;
    let addresses = [GUEST.octets(), HOST.octets()].concat();
    let head = [&[0x45, 0][..], &(20 + udp_bytes).to_be_bytes(), &[0, 1, 0, 0, 64, 17]].concat();
    let checksum = !sum(&[&head[..], &[0, 0], &addresses].concat());
    let partial = sum(&[&addresses[..], &[0, 17], &udp_bytes.to_be_bytes()].concat());
    [
        &HOST_MAC.0[..],
        &GUEST_MAC.0,
        &[8, 0],
        &head,
        &checksum.to_be_bytes(),
        &addresses,
        &4000_u16.to_be_bytes(),
        &port.to_be_bytes(),
        &udp_bytes.to_be_bytes(),
        &partial.to_be_bytes(),
        data,
    ]
    .concat()
}

/// The virtio header of such a packet.
fn unsummed(gso_size: u16) -> PacketHeader {
    let gso_type = if gso_size > 0 { gso::UDP_L4 } else { gso::NONE };
    let hdr_len = if gso_size > 0 { 42 } else { 0 };
    PacketHeader {
        flags: 1,
        gso_type,
        hdr_len,
        gso_size,
        csum_start: 34,
        csum_offset: 6,
        num_buffers: 0,
    }
}

/// The host's UDP socket gets packets of a station that left their checksum, and their cut, to it.
pub fn the_host_completes_checksums_and_cuts(open: fn() -> Way) {
    inside(|| {
        let way = open();
        let cuts = u64::from(!way.cuts_datagrams);
        let mut lan = Lan::new(way, NIC);
        let socket = UdpSocket::bind((HOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let port = socket.local_addr().unwrap().port();
        let data: Vec<u8> = (0..5000_u32).map(|at| (at * 7 + at / 256) as u8).collect();
        lan.station.send_with(unsummed(0), &packet(port, &data[..300]), 1 << 20);
        lan.station.send_with(unsummed(1000), &packet(port, &data), 1 << 20);
        let mut got: Vec<Vec<u8>> = Vec::new();
        lan.until("a datagram", |_| {
            let mut bytes = [0; 4096];
            while let Ok((len_bytes, from)) = socket.recv_from(&mut bytes) {
                assert_eq!(from, SocketAddr::new(IpAddr::V4(GUEST), 4000));
                got.push(bytes[..len_bytes].to_vec());
            }
            (got.len() >= 6).then_some(())
        });
        let mut expected = vec![data[..300].to_vec()];
        expected.extend(data.chunks(1000).map(<[u8]>::to_vec));
        assert_eq!(got, expected);
        let [_, counts] = lan.counts();
        let parts = if cuts == 1 { 5 } else { 1 };
        assert_eq!((counts.out_frames, counts.out_checksums), (1 + parts, 0));
        assert_eq!((counts.out_cuts, counts.out_errors), (cuts, 0));
    });
}

/// Sends a message of the host to the station, which the kernel is to cut.
fn send_large(segment_bytes: u16, len_bytes: u32) {
    let pages = SharedPages::new("host", 1 << 20).unwrap();
    let bytes: Vec<u8> = (0..len_bytes).map(|at| (at * 3 + at / 256) as u8).collect();
    pages.memory().write_slice(GuestAddress(0), &bytes, &mut RegionHint::default()).unwrap();
    let address = SocketAddr::new(IpAddr::V4(HOST), 0);
    let memory = pages.memory().clone();
    let mut socket = DatagramSocket::bind(address, memory, 1 << 20, true, false).unwrap();
    let to = SocketAddr::new(IpAddr::V4(GUEST), 5000);
    let departure = Departure { to, places: 0..1, segment_bytes };
    assert_eq!(socket.send(&[departure], &[Place { start: 0, len_bytes }]).unwrap(), 1);
}

/// A message of the host comes to a station with offloads in one piece, and to others in parts
/// with checksums.
pub fn large_messages_of_the_host_are_cut_for_those_that_need_it(open: fn() -> Way) {
    inside(|| {
        for (properties, frames) in [(NIC, 1), (WIRE, 5)] {
            let mut lan = Lan::new(open(), properties);
            send_large(1000, 5000);
            let mut got = Vec::new();
            lan.until("a message", |lan| {
                got.extend(lan.station.received());
                (got.iter().map(|one| one.frame.len() - 42).sum::<usize>() >= 5000).then_some(())
            });
            let data: Vec<u8> = got.iter().flat_map(|one| one.frame[42..].to_vec()).collect();
            let expected: Vec<u8> = (0..5000_u32).map(|at| (at * 3 + at / 256) as u8).collect();
            assert_eq!(data, expected);
            let has_uso = lan.counts()[1].in_frames == 1;
            if !has_uso {
                // Before Linux 6.2 the kernel cuts.
                continue;
            }
            assert_eq!(got.len(), frames);
            let is_cut = u64::from(frames > 1);
            assert_eq!(lan.counts()[0].out_cuts, is_cut);
            for one in got {
                let gso_size = if frames == 1 { 1000 } else { 0 };
                assert_eq!(one.header.gso_size, gso_size);
                if is_cut == 1 {
                    // The whole datagram with its pseudo header sums up to zero.
                    let udp = &one.frame[34..];
                    let len_bytes = (udp.len() as u16).to_be_bytes();
                    let pseudo = [&one.frame[26..34], &[0, 17], &len_bytes, udp].concat();
                    assert_eq!(sum(&pseudo), 0xffff);
                }
            }
        }
    });
}

pub fn the_port_follows_the_interface_down_and_up_and_to_its_end(open: fn() -> Way) {
    inside(|| {
        let way = open();
        let (interface, of_host) = (way.interface, way.of_host);
        let mut lan = Lan::new(way, NIC);
        let mut host = Host::new(of_host);
        let frame = [&HOST_MAC.0[..], &GUEST_MAC.0, &[0x88, 0xb5], &[1; 50]].concat();
        lan.station.send(&frame);
        lan.until("the first frame", |_| host.received().pop());
        ip(&format!("link set {interface} down"));
        let port = lan.port;
        lan.until("the end of the link", |lan| (!lan.unit.switch_mut().is_up(port)).then_some(()));
        let before = lan.counts()[0].dropped_no_destination;
        lan.station.send(&frame);
        lan.until("a drop", |lan| {
            let [guest, tap] = lan.counts();
            let is_dropped = guest.dropped_no_destination > before || tap.dropped_port_down > 0;
            is_dropped.then_some(())
        });
        ip(&format!("link set {interface} up"));
        lan.until("the link", |lan| lan.unit.switch_mut().is_up(port).then_some(()));
        lan.station.send(&frame);
        lan.until("a frame after that", |_| host.received().pop());

        ip(&format!("link del {interface}"));
        lan.until("the end of the interface", |lan| {
            (!lan.unit.switch_mut().is_up(port)).then_some(())
        });
        // A sidecore can sleep all the same. The station's kicks are of no interest here.
        lan.unit.on_wake();
        assert_eq!(lan.unit.arm(), Arm::Armed);
        lan.unit.wake_fds(&mut |fd| {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)), Ok(0));
        });
    });
}

pub fn frames_above_the_mtu_are_dropped_and_nothing_allocates(open: fn() -> Way) {
    inside(|| {
        let way = open();
        let (interface, of_host) = (way.interface, way.of_host);
        let mut lan = Lan::new(way, NIC);
        let mut host = Host::new(of_host);
        let frame = |to: MacAddress, from: MacAddress, len_bytes| {
            [&to.0[..], &from.0, &[0x88, 0xb5], &vec![1; len_bytes]].concat()
        };
        let (there, back) = (frame(HOST_MAC, GUEST_MAC, 1400), frame(GUEST_MAC, HOST_MAC, 1400));
        lan.station.send(&there);
        lan.until("a frame", |_| host.received().pop());
        for each in [interface, of_host] {
            ip(&format!("link set {each} mtu 9000"));
        }
        host.send(&frame(GUEST_MAC, HOST_MAC, 8000));
        lan.until("a drop", |lan| (lan.counts()[1].dropped_too_long == 1).then_some(()));

        let start = lan.station.send(&there);
        lan.until("a frame", |_| host.received().pop());
        let mut counted = 0;
        for _ in 0..100 {
            for _ in 0..20 {
                lan.station.resend(start, there.len());
                host.send(&back);
            }
            let (before, goal) = (allocations(), lan.counts()[1].in_frames + 20);
            while lan.counts()[1].in_frames < goal {
                lan.turn();
            }
            counted += allocations() - before;
            host.received();
            lan.station.discard();
            lan.station.post(20, 2048);
        }
        assert_eq!(counted, 0);
        assert!(lan.counts()[0].out_frames >= 2000 && lan.counts()[1].out_frames >= 2000);
    });
}
