//! TAP interfaces in a network namespace of each test's own.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::output_of;
use sidecore_kit::wait;
use sidecore_linux::{DatagramSocket, Departure, FrameFilter, PacketSocket, Place, Tap};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_net::contract::{NIC, QueueDriver, QueueRig, Station, WIRE, check_queue};
use sidecore_net::{
    Guard, MacAddress, PortConfig, PortCounts, PortId, PortQueue as _, PortStats, Properties,
    QueueState, Switch, SwitchOptions, SwitchUnit,
};
use sidecore_reactor::{Arm, IdleMode, Pollable as _};
use sidecore_spec_virtio::net::{PacketHeader, gso};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_uplink::{TapOptions, TapQueue};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TAP: &str = "tap0";
const SOON: Duration = Duration::from_secs(20);
/// The kernel's address, and the station's.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const HOST_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
const GUEST_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// Runs a test in a network namespace of its own, if this machine allows that and has TAP.
fn inside(test: impl FnOnce() + Send) {
    if let Err(error) = File::open("/dev/net/tun") {
        return sidecore_skip::skip(format_args!("/dev/net/tun: {error}"));
    }
    match Namespace::new() {
        Ok(namespace) => namespace.within(test).unwrap(),
        Err(error) => sidecore_skip::skip(format_args!("no network namespace: {error}")),
    }
}

/// Runs ip(8) in this thread's namespace.
fn ip(words: &str) -> String {
    let words: Vec<&str> = words.split_whitespace().collect();
    output_of("ip", &words).unwrap()
}

fn options() -> TapOptions {
    TapOptions { interface: TAP.to_owned(), mtu: Some(1500), offloads: true }
}

fn open() -> (TapQueue, Arc<PortStats>) {
    let stats = Arc::<PortStats>::default();
    // Until a child of another test runs its program, it has the descriptors of this process, and
    // an interface that was closed is still busy.
    let tap = wait::succeed(SOON, || TapQueue::open(&options(), Arc::clone(&stats)));
    (tap, stats)
}

/// Sets the interface up. Without IPv6 its kernel sends nothing by itself.
fn set_up() {
    let path = format!("/proc/sys/net/ipv6/conf/{TAP}/disable_ipv6");
    // A kernel without IPv6 has no such file.
    let _ = std::fs::write(path, "1");
    ip(&format!("link set {TAP} address {HOST_MAC} up"));
}

/// A program of the host on a packet socket.
struct Host(PacketSocket);

impl Host {
    fn new() -> Self {
        let socket = PacketSocket::new().unwrap();
        let interface = socket.interface(TAP).unwrap();
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

#[test]
fn a_tap_keeps_the_contract_of_queues() {
    inside(|| {
        check_queue(&|| {
            let (queue, _) = open();
            set_up();
            QueueRig { queue: Box::new(queue), driver: Box::new(Host::new()) }
        });
    });
}

/// A switch with a station of tests and the host's kernel.
struct Lan {
    unit: SwitchUnit,
    station: Station,
    stats: [Arc<PortStats>; 2],
    tap: PortId,
    start: Instant,
}

impl Lan {
    fn new(of_station: Properties) -> Self {
        let switch = Switch::new(SwitchOptions::new(7));
        let mut unit = SwitchUnit::new("lan", switch, IdleMode::Poll).unwrap();
        let (tap, of_tap) = open();
        set_up();
        ip(&format!("addr replace {HOST}/24 dev {TAP}"));
        ip(&format!("neigh replace {GUEST} lladdr {GUEST_MAC} dev {TAP} nud permanent"));
        let (station, queue) = Station::new(of_station, true);
        station.post(256, 2048);
        let stats = [Arc::default(), of_tap];
        let now = Nanos(1);
        let mut add = |name, config, at: usize| {
            unit.switch_mut().add_port(now, name, config, Arc::clone(&stats[at])).unwrap()
        };
        let guest = add("guest", PortConfig::station(), 0);
        let port = add("tap", PortConfig::uplink(), 1);
        unit.attach(guest, Box::new(queue)).unwrap();
        unit.attach(port, Box::new(tap)).unwrap();
        Self { unit, station, stats, tap: port, start: Instant::now() }
    }

    fn turn(&mut self) {
        let now = Nanos(2_000_000 + self.start.elapsed().as_nanos() as u64);
        self.unit.poll(now, 32);
    }

    /// Polls until `done`.
    fn until<T>(&mut self, subject: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.turn();
            if let Some(found) = done(self) {
                return found;
            }
            assert!(start.elapsed() < SOON, "{subject} does not come: {:?}", self.counts());
        }
    }

    fn counts(&self) -> [PortCounts; 2] {
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
#[test]
fn the_host_completes_checksums_and_cuts() {
    inside(|| {
        let mut lan = Lan::new(NIC);
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
        let [_, tap] = lan.counts();
        assert_eq!((tap.out_frames, tap.out_checksums, tap.out_cuts, tap.out_errors), (2, 0, 0, 0));
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
#[test]
fn large_messages_of_the_host_are_cut_for_those_that_need_it() {
    inside(|| {
        for (properties, frames) in [(NIC, 1), (WIRE, 5)] {
            let mut lan = Lan::new(properties);
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

#[test]
fn the_port_follows_the_interface_down_and_up_and_to_its_end() {
    inside(|| {
        let mut lan = Lan::new(NIC);
        let mut host = Host::new();
        let frame = [&HOST_MAC.0[..], &GUEST_MAC.0, &[0x88, 0xb5], &[1; 50]].concat();
        lan.station.send(&frame);
        lan.until("the first frame", |_| host.received().pop());
        ip(&format!("link set {TAP} down"));
        let tap = lan.tap;
        lan.until("the end of the link", |lan| (!lan.unit.switch_mut().is_up(tap)).then_some(()));
        let before = lan.counts()[0].dropped_no_destination;
        lan.station.send(&frame);
        lan.until("a drop", |lan| {
            let [guest, tap] = lan.counts();
            let is_dropped = guest.dropped_no_destination > before || tap.dropped_port_down > 0;
            is_dropped.then_some(())
        });
        ip(&format!("link set {TAP} up"));
        lan.until("the link", |lan| lan.unit.switch_mut().is_up(tap).then_some(()));
        lan.station.send(&frame);
        lan.until("a frame after that", |_| host.received().pop());

        ip(&format!("link del {TAP}"));
        lan.until("the end of the interface", |lan| {
            (!lan.unit.switch_mut().is_up(tap)).then_some(())
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

#[test]
fn an_interface_stays_with_its_addresses_and_has_one_process() {
    inside(|| {
        let (queue, stats) = open();
        let again = TapQueue::open(&options(), stats).unwrap_err();
        assert_eq!(again.kind(), std::io::ErrorKind::ResourceBusy);
        assert!(matches!(queue.state(), QueueState::Down(_)), "the interface is down at first");
        set_up();
        assert_eq!(queue.state(), QueueState::Up);
        assert_eq!(queue.mtu(), 1500);
        drop(queue);
        assert!(ip(&format!("link show {TAP}")).contains("NO-CARRIER"));
        let jumbo = TapOptions { mtu: Some(9000), ..options() };
        let queue = TapQueue::open(&jumbo, Arc::default()).unwrap();
        let shown = ip(&format!("link show {TAP}"));
        assert!(shown.contains("LOWER_UP") && shown.contains("mtu 9000"), "{shown}");
        drop(queue);
        let as_it_is = TapOptions { mtu: None, ..options() };
        assert_eq!(TapQueue::open(&as_it_is, Arc::default()).unwrap().mtu(), 9000);

        for name in ["lo", "a-name-that-is-too-long", ""] {
            let other = TapOptions { interface: name.to_owned(), ..options() };
            // Without a name the kernel would choose one.
            assert!(TapQueue::open(&other, Arc::default()).is_err(), "{name:?}");
        }
    });
}

#[test]
fn frames_above_the_mtu_are_dropped_and_nothing_allocates() {
    inside(|| {
        let mut lan = Lan::new(NIC);
        let mut host = Host::new();
        let frame = |to: MacAddress, from: MacAddress, len_bytes| {
            [&to.0[..], &from.0, &[0x88, 0xb5], &vec![1; len_bytes]].concat()
        };
        let (there, back) = (frame(HOST_MAC, GUEST_MAC, 1400), frame(GUEST_MAC, HOST_MAC, 1400));
        lan.station.send(&there);
        lan.until("a frame", |_| host.received().pop());
        ip(&format!("link set {TAP} mtu 9000"));
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

/// Frames from one interface to another, beside a loop of read and write alone: `cargo test
/// --release -p sidecore-uplink --test tap -- --ignored --nocapture` prints the ratio.
#[test]
#[ignore = "a measurement, not a test"]
fn frames_per_second_beside_a_bare_loop() {
    const FRAMES: usize = 256;
    inside(|| {
        let open = |name: &str| {
            let stats = Arc::<PortStats>::default();
            let named = TapOptions { interface: name.to_owned(), ..options() };
            let queue = TapQueue::open(&named, Arc::clone(&stats)).unwrap();
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
            (queue, stats)
        };
        let pages = SharedPages::new("bare", 1 << 20).unwrap();
        let bare = |name: &str| Tap::open(name, pages.memory().clone(), true, None).unwrap();
        let frame = [&GUEST_MAC.0[..], &HOST_MAC.0, &[0x88, 0xb5], &[1; 50]].concat();
        let (mut of_switch, mut of_loop, rounds) = (Duration::ZERO, Duration::ZERO, 2_000);
        let place = Place { start: 0, len_bytes: 4096 };
        for (name, address) in [("tap0", HOST_MAC), ("tap1", GUEST_MAC)] {
            drop(bare(name));
            ip(&format!("link set {name} address {address} up"));
        }
        for round in 0..10 {
            let mut host = Host::new();
            let (from, to) = (bare("tap0"), bare("tap1"));
            for _ in 0..rounds / 10 {
                (0..FRAMES).for_each(|_| host.send(&frame));
                let start = Instant::now();
                for _ in 0..FRAMES {
                    let len_bytes = from.read(place).unwrap();
                    to.write(Place { len_bytes, ..place }).unwrap();
                }
                of_loop += start.elapsed();
            }
            drop((from, to));
            let (from, _) = open("tap0");
            let (to, counts) = open("tap1");
            let switch = Switch::new(SwitchOptions::new(7));
            let mut unit = SwitchUnit::new("lan", switch, IdleMode::Poll).unwrap();
            let guard = Guard { mac: GUEST_MAC, ipv4: None, ipv6: None, router: false };
            let station = PortConfig { guard: Some(guard), ..PortConfig::station() };
            for (queue, config, stats) in
                [(from, PortConfig::uplink(), Arc::default()), (to, station, Arc::clone(&counts))]
            {
                let port = unit.switch_mut().add_port(Nanos(1), "tap", config, stats).unwrap();
                unit.attach(port, Box::new(queue)).unwrap();
            }
            let (start_of_all, mut goal) = (Instant::now(), 0);
            for _ in 0..rounds / 10 {
                (0..FRAMES).for_each(|_| host.send(&frame));
                goal += FRAMES as u64;
                let start = Instant::now();
                while counts.counts().out_frames < goal {
                    unit.poll(Nanos(2_000_000 + start_of_all.elapsed().as_nanos() as u64), 32);
                }
                of_switch += start.elapsed();
            }
            assert_eq!(counts.counts().out_errors, 0, "round {round}");
        }
        let frames = (rounds * FRAMES) as u32;
        let (of_switch, of_loop) = (of_switch / frames, of_loop / frames);
        let ratio = of_loop.as_secs_f64() / of_switch.as_secs_f64();
        println!("switch {of_switch:?}, loop {of_loop:?} per frame, ratio of rates {ratio:.2}");
    });
}
