//! Frames between two pinned threads, through each link and through nothing but the rings of a
//! packet socket: round trips and exchanges, interleaved, as ratios to the bare rings.
//!
//! `cargo run --release -p sidecore-link --example exchange [ROUNDS]`, as root, on two idle cores.

#[path = "../tests/veth/mod.rs"]
mod veth;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sidecore_link::{
    Buffer, Frame, Link, LinkAddress, LinkDescription, LinkOptions, Medium, MemoryLink, open,
};
use sidecore_linux::{
    FrameFilter, PacketRing, PacketSetup, PacketSocket, XdpMode, cpu, peer_event,
};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, UserAddress, Words};
use sidecore_units::{CoreId, Nanos};
use veth::{LEFT, RIGHT, Veth};

const ETHERTYPE: u16 = 0x88b5;
const SLICE: Duration = Duration::from_millis(120);
/// Size of a question, of its answer, and how many are in flight.
const LOADS: [(&str, usize, usize, usize); 3] = [
    ("64 B, depth 1", 64, 64, 1),
    ("4160 B, depth 1", 4160, 4160, 1),
    ("64 to 4160 B, depth 32", 64, 4160, 32),
];

/// An end of a wire.
trait Wire: Send {
    /// Sends up to `count` frames of this size; returns how many.
    fn send(&mut self, count: usize, len_bytes: usize) -> usize;
    /// Receives what has come, up to 32 frames.
    fn receive(&mut self) -> usize;
}

struct Linked {
    link: Box<dyn Link>,
    peer: LinkAddress,
    frames: Vec<Frame>,
    buffers: Vec<Buffer>,
}

impl Wire for Linked {
    fn send(&mut self, count: usize, len_bytes: usize) -> usize {
        self.link.buffers(self.peer, count, &mut self.buffers);
        let sent = self.buffers.len();
        self.buffers.iter_mut().for_each(|buffer| buffer.address(self.peer, len_bytes));
        self.link.send(Nanos::ZERO, &mut self.buffers);
        sent
    }

    fn receive(&mut self) -> usize {
        self.link.receive(Nanos::ZERO, 32, &mut self.frames);
        let count = self.frames.len();
        self.link.give_back(&mut self.frames);
        count
    }
}

/// The rings of a packet socket, and as little as possible around them.
struct Bare {
    socket: PacketSocket,
    memory: GuestMemory,
    words: Words<AtomicU32>,
    receive: PacketRing,
    transmit: PacketRing,
    next: u32,
    sent: u32,
    header: [u8; 14],
}

const SLOT_BYTES: u32 = 12_288;
const FRAME_AT: u32 = 128;

impl Bare {
    fn open(interface: &str, peer: [u8; 6]) -> Self {
        let socket = PacketSocket::new().unwrap();
        let found = socket.interface(interface).unwrap();
        let (receive, transmit) =
            (PacketRing::new(SLOT_BYTES, 256), PacketRing::new(SLOT_BYTES, 256));
        let setup = PacketSetup {
            receive,
            transmit,
            reserve_bytes: 0,
            bypass_qdisc: true,
            has_virtio_headers: false,
        };
        let memory = socket.set_up(&setup).unwrap();
        let bytes = usize::try_from(memory.len_bytes()).unwrap();
        let words = Words::in_bytes(&memory, UserAddress(0), bytes, 4).unwrap();
        socket.bind(&found, &FrameFilter { ethertype: ETHERTYPE, share: None }).unwrap();
        let mut header = [0; 14];
        let parts = peer.into_iter().chain(found.address).chain(ETHERTYPE.to_be_bytes());
        header.iter_mut().zip(parts).for_each(|(to, from)| *to = from);
        Self { socket, memory, words, receive, transmit, next: 0, sent: 0, header }
    }

    fn word(&self, slot_at: u64, offset: usize) -> &AtomicU32 {
        self.words.at(slot_at as usize + offset).unwrap()
    }
}

impl Wire for Bare {
    fn send(&mut self, count: usize, len_bytes: usize) -> usize {
        let mut done = 0;
        while done < count {
            let at = self.receive.len_bytes() + self.transmit.slot_at(self.sent);
            if self.word(at, 0).load(Ordering::Acquire) & 3 != 0 {
                break;
            }
            let frame = GuestAddress(at + u64::from(FRAME_AT));
            self.memory.write_slice(frame, &self.header, &mut RegionHint::default()).unwrap();
            self.word(at, 4).store(len_bytes as u32 + 14, Ordering::Relaxed);
            self.word(at, 12).store(FRAME_AT, Ordering::Relaxed);
            self.word(at, 0).store(1, Ordering::Release);
            self.sent = (self.sent + 1) % self.transmit.slots();
            done += 1;
        }
        if done > 0 {
            self.socket.transmit().unwrap();
        }
        done
    }

    fn receive(&mut self) -> usize {
        let mut count = 0;
        while count < 32 {
            let at = self.receive.slot_at(self.next);
            if self.word(at, 0).load(Ordering::Acquire) & 1 == 0 {
                break;
            }
            self.word(at, 0).store(0, Ordering::Release);
            self.next = (self.next + 1) % self.receive.slots();
            count += 1;
        }
        count
    }
}

struct Case {
    name: &'static str,
    client: Box<dyn Wire>,
    host: Option<Box<dyn Wire>>,
    /// Keeps its wire.
    _veth: Option<Veth>,
    /// Exchanges a second, of each load and round.
    rates: [Vec<f64>; LOADS.len()],
}

fn linked(link: Box<dyn Link>, peer: LinkAddress) -> Box<dyn Wire> {
    Box::new(Linked { link, peer, frames: Vec::with_capacity(64), buffers: Vec::with_capacity(64) })
}

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 256, transmit_frames: 256, ..LinkOptions::new(82) }
}

fn case(name: &'static str, make: impl Fn(&str) -> Medium) -> Option<Case> {
    let veth = Veth::new(9_000)?;
    veth.ip(LEFT, &format!("addr add 10.9.0.1/24 dev {LEFT}"));
    veth.ip(RIGHT, &format!("addr add 10.9.0.2/24 dev {RIGHT}"));
    let end = |end: &str| {
        let description = LinkDescription { medium: make(end), queues: 1, options: options() };
        veth.within(end, || open(&description)).map(|mut links| links.remove(0))
    };
    let (left, right) = match (end(LEFT), end(RIGHT)) {
        (Ok(left), Ok(right)) => (left, right),
        (Err(error), _) | (_, Err(error)) => {
            println!("{name}: {error}");
            return None;
        }
    };
    let (lefts, rights) = (left.properties().address, right.properties().address);
    let (client, host) = (linked(left, rights), linked(right, lefts));
    Some(Case { name, client, host: Some(host), _veth: Some(veth), rates: Default::default() })
}

fn bare() -> Option<Case> {
    let veth = Veth::new(9_000)?;
    let address = |end: &str| {
        veth.within(end, || PacketSocket::new().unwrap().interface(end).unwrap().address)
    };
    let (lefts, rights) = (address(LEFT), address(RIGHT));
    let client = Box::new(veth.within(LEFT, || Bare::open(LEFT, rights)));
    let host: Box<dyn Wire> = Box::new(veth.within(RIGHT, || Bare::open(RIGHT, lefts)));
    let (name, rates) = ("bare TPACKET_V2", Default::default());
    Some(Case { name, client, host: Some(host), _veth: Some(veth), rates })
}

fn memory() -> Option<Case> {
    let (host, client) = MemoryLink::pair(&options(), peer_event).unwrap();
    let peer = LinkAddress::Peer(0);
    let (client, host) = (linked(Box::new(client), peer), linked(Box::new(host), peer));
    let rates = Default::default();
    Some(Case { name: "memory", client, host: Some(host), _veth: None, rates })
}

/// Answers each frame until it is over.
fn answer(mut wire: Box<dyn Wire>, len_bytes: usize, over: &AtomicBool) -> Box<dyn Wire> {
    cpu::pin_current_thread(CoreId(1)).unwrap();
    while !over.load(Ordering::Relaxed) {
        let mut left = wire.receive();
        while left > 0 && !over.load(Ordering::Relaxed) {
            left -= wire.send(left, len_bytes);
        }
    }
    wire
}

/// Exchanges a second.
fn measure(case: &mut Case, (_, question, answered, depth): (&str, usize, usize, usize)) -> f64 {
    let over = Arc::new(AtomicBool::new(false));
    let host = case.host.take().unwrap();
    let theirs = Arc::clone(&over);
    let answerer = std::thread::spawn(move || answer(host, answered, &theirs));
    let (mut in_flight, mut done) = (0, 0_u64);
    let start = Instant::now();
    let mut looks = 0_u32;
    loop {
        if in_flight < depth {
            in_flight += case.client.send(depth - in_flight, question);
        }
        let received = case.client.receive();
        in_flight -= received;
        done += received as u64;
        looks += 1;
        if looks.is_multiple_of(64) && start.elapsed() >= SLICE {
            break;
        }
    }
    let elapsed = start.elapsed();
    let drain = Instant::now();
    while in_flight > 0 && drain.elapsed() < SLICE {
        in_flight -= case.client.receive();
    }
    over.store(true, Ordering::Relaxed);
    case.host = Some(answerer.join().unwrap());
    done as f64 / elapsed.as_secs_f64()
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(9);
    let packet = |end: &str| Medium::Packet {
        interface: end.to_owned(),
        ethertype: ETHERTYPE,
        bypass_qdisc: true,
        offload: true,
    };
    let xdp = |mode| {
        move |end: &str| Medium::Xdp {
            interface: end.to_owned(),
            ethertype: ETHERTYPE,
            mode: Some(mode),
        }
    };
    let udp = |end: &str| {
        let listen = if end == LEFT { "10.9.0.1:34997" } else { "10.9.0.2:34997" };
        Medium::Udp { listen: listen.parse().unwrap(), coalesce: true }
    };
    let cases = [
        bare(),
        case("packet", packet),
        case("xdp, generic", xdp(XdpMode::Generic)),
        case("xdp, in the driver", xdp(XdpMode::Driver)),
        case("udp", udp),
        memory(),
    ];
    let mut cases: Vec<_> = cases.into_iter().flatten().collect();
    cpu::pin_current_thread(CoreId(0)).unwrap();
    for _ in 0..rounds {
        for (index, load) in LOADS.into_iter().enumerate() {
            for case in &mut cases {
                let rate = measure(case, load);
                case.rates[index].push(rate);
            }
        }
    }
    for (index, (name, _, _, depth)) in LOADS.into_iter().enumerate() {
        println!("{name}:");
        let floor = median(&mut cases[0].rates[index]);
        for case in &mut cases {
            let rates = &mut case.rates[index];
            let rate = median(rates);
            let (low, high) = (rates[0], rates[rates.len() - 1]);
            println!(
                "  {:20} {:8.2} us  {:8.0}/s (from {low:.0} to {high:.0})  {:.2} of the bare rings",
                case.name,
                depth as f64 * 1e6 / rate,
                rate,
                rate / floor
            );
        }
    }
}
