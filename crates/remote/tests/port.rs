//! A port moves payloads between requests and frames, whole and in the right place, sealed or not.

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::{EthernetAddress, Faults, LinkAddress, LinkOptions, Network, dropped_frames};
use sidecore_memory::{GuestAddress, RegionHint, Segments, SharedPages};
use sidecore_remote::{LinkPort, RequestData};
use sidecore_units::Nanos;
use sidecore_vrio::port::{Kept, Payload, Peer, Plain, Port, Seal};
use sidecore_vrio::wire::DATA_HEADER_BYTES;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const HERE: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
const THERE: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 2]);
const HEAD: [u8; DATA_HEADER_BYTES] = [0x11; DATA_HEADER_BYTES];
const HOP: Nanos = Nanos::from_micros(10);

/// One request, number 7, whose data are three pieces; number 9 is the rest of it.
struct Request {
    pages: SharedPages,
    list: Segments,
}

impl Request {
    const BYTES: usize = 1000 + 24 + 7000;
    const REST_AT: u64 = 1000;

    fn new() -> Self {
        let pages = SharedPages::new("test", 4 << 12).unwrap();
        let mut list = Segments::with_capacity(3);
        list.bind(pages.memory());
        for (at, len_bytes) in [(8000, 1000), (100, 24), (200, 7000)] {
            list.push(GuestAddress(at), len_bytes, &mut RegionHint::default()).unwrap();
        }
        let outside = vec![0xee; 4 << 12];
        pages.memory().write_slice(GuestAddress(0), &outside, &mut RegionHint::default()).unwrap();
        Self { pages, list }
    }

    fn set(&self, bytes: &[u8]) {
        assert_eq!(self.list.copy_from_slice(0, bytes), bytes.len());
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::BYTES];
        assert_eq!(self.list.copy_to_slice(0, &mut bytes), bytes.len());
        bytes
    }

    /// Whether the bytes between the pieces are as they were.
    fn is_sound(&self) -> bool {
        let mut all = vec![0; 4 << 12];
        self.pages
            .memory()
            .read_slice(GuestAddress(0), &mut all, &mut RegionHint::default())
            .unwrap();
        let outside = [(0, 100), (124, 200), (7200, 8000), (9000, 4 << 12)];
        outside.iter().all(|(from, to)| all[*from..*to].iter().all(|byte| *byte == 0xee))
    }
}

impl RequestData for Request {
    fn segments(&self, request: u64) -> Option<&Segments> {
        matches!(request, 7 | 9).then_some(&self.list)
    }

    fn first_byte(&self, request: u64) -> u64 {
        if request == 9 { Self::REST_AT } else { 0 }
    }
}

/// A cipher as weak as can be, with a tag of four bytes.
#[derive(Clone, Copy)]
struct Xor;

impl Xor {
    fn tag(counter: u64, head: &[u8], bytes: &[u8]) -> [u8; 4] {
        let sum = head
            .iter()
            .chain(bytes)
            .fold(counter as u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
        sum.to_le_bytes()
    }
}

impl Seal for Xor {
    fn tag_bytes(&self) -> usize {
        4
    }

    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) {
        let (payload, tag) = sealed.split_at_mut(sealed.len() - 4);
        payload.iter_mut().for_each(|byte| *byte ^= 0x5a);
        tag.copy_from_slice(&Self::tag(counter, head, payload));
    }

    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        let (payload, tag) = sealed.split_at_mut(sealed.len() - 4);
        let is_whole = *tag == Self::tag(counter, head, payload);
        payload.iter_mut().for_each(|byte| *byte ^= 0x5a);
        is_whole
    }
}

type TestPort = LinkPort<Request>;

fn ports(faults: Faults, frames: usize) -> (TestPort, TestPort) {
    let network = Network::new(1, faults);
    let options = LinkOptions {
        receive_frames: frames,
        transmit_frames: frames,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    };
    let port =
        |address| LinkPort::new(Box::new(network.link(address, &options).unwrap()), Request::new());
    (port(HERE), port(THERE))
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8).collect()
}

fn there(port: &mut TestPort) -> Peer {
    port.peers().name(LinkAddress::Ethernet(THERE))
}

/// Sends a payload, and hands the frame and its opened payload to `look`.
fn exchange<S: Seal + Copy>(
    (here, to): (&mut TestPort, &mut TestPort),
    payload: Payload<'_>,
    seal: S,
    look: impl FnOnce(&mut TestPort, &mut sidecore_remote::Received),
) {
    let len_bytes = payload.len_bytes();
    let peer = there(here);
    assert!(here.send(peer, &HEAD, payload, (3, &mut { seal })));
    here.flush(Nanos::ZERO);
    assert_eq!(to.receive(HOP, 8), 1);
    let mut arrived = to.next_frame().unwrap();
    assert!(to.next_frame().is_none());
    assert_eq!(to.peers().address(arrived.from), Some(LinkAddress::Ethernet(HERE)));
    assert_eq!(arrived.head(), HEAD);
    assert_eq!(arrived.frame_bytes, HEAD.len() + len_bytes + seal.tag_bytes());
    assert!(to.open(&mut arrived.received, &HEAD, len_bytes, 3, &mut { seal }));
    look(to, &mut arrived.received);
    to.give_back();
}

fn data_moves<S: Seal + Copy>(seal: S) {
    let (mut here, mut to) = ports(Faults::default(), 16);
    let whole = pattern(Request::BYTES);
    here.data.set(&whole);
    to.data.set(&vec![0xcc; Request::BYTES]);
    // Inside of a piece, over two edges, to the end.
    for (offset, len, at) in
        [(10, 500, 0_u32), (990, 60, 1020), (1024, 7000, 1024), (7000, 24, 990)]
    {
        let payload = Payload::Data { request: 7, offset_bytes: offset, len_bytes: len };
        let before = to.data.bytes();
        exchange((&mut here, &mut to), payload, seal, |to, received| to.store(received, 7, at));
        let (offset, len, at) = (offset as usize, len as usize, at as usize);
        let mut expected = before;
        expected[at..at + len].copy_from_slice(&whole[offset..offset + len]);
        assert!(to.data.bytes() == expected && to.data.is_sound(), "{len} bytes from {offset}");
    }
    // Past the end of the data come zeros, and nothing is stored outside of the data.
    let payload = Payload::Data { request: 7, offset_bytes: 8000, len_bytes: 100 };
    exchange((&mut here, &mut to), payload, seal, |to, received| {
        let mut message = [1; 100];
        assert_eq!(to.message(received, &mut message), 100);
        assert_eq!(message[..24], whole[8000..]);
        assert_eq!(message[24..], [0; 76]);
        to.store(received, 7, 8000);
        to.store(received, 8, 0);
    });
    assert!(to.data.is_sound());
    assert_eq!(to.data.bytes()[8000..], whole[8000..]);
    // Data that begin within the list.
    let payload = Payload::Data { request: 9, offset_bytes: 10, len_bytes: 512 };
    let before = to.data.bytes();
    exchange((&mut here, &mut to), payload, seal, |to, received| to.store(received, 9, 2048));
    let mut expected = before;
    expected[3048..3560].copy_from_slice(&whole[1010..1522]);
    assert!(to.data.bytes() == expected && to.data.is_sound());
    // Data of no request are zeros, of which none are those of an earlier frame.
    let payload = Payload::Data { request: 8, offset_bytes: 0, len_bytes: 7000 };
    exchange((&mut here, &mut to), payload, seal, |to, received| to.store(received, 7, 0));
    assert_eq!(to.data.bytes()[..7000], [0; 7000]);
}

#[test]
fn data_move_from_one_request_to_another() {
    data_moves(Plain);
}

#[test]
fn sealed_data_move_from_one_request_to_another() {
    data_moves(Xor);
}

fn messages_move<S: Seal + Copy>(seal: S) {
    let (mut here, mut to) = ports(Faults::default(), 16);
    let kept = pattern(5000);
    exchange((&mut here, &mut to), Payload::Kept(Kept::from(&*kept)), seal, |to, received| {
        let mut message = vec![1; 6000];
        assert_eq!(to.message(received, &mut message), 5000);
        assert_eq!(message[..5000], kept);
    });
    let payload = Payload::Message { message: b"message", len_bytes: 7000 };
    exchange((&mut here, &mut to), payload, seal, |to, received| {
        let mut message = [1; 7000];
        assert_eq!(to.message(received, &mut message[..3]), 3);
        assert_eq!(&message[..4], b"mes\x01");
        assert_eq!(to.message(received, &mut message), 7000);
        assert_eq!(message[..7], *b"message");
        assert_eq!(message[7..], [0; 6993]);
    });
    exchange((&mut here, &mut to), Payload::NONE, seal, |to, received| {
        assert_eq!(to.message(received, &mut [1; 10]), 0);
    });
}

#[test]
fn messages_are_padded_with_zeros() {
    messages_move(Plain);
    messages_move(Xor);
}

#[test]
fn a_damaged_payload_is_refused() {
    let (mut here, mut to) = ports(Faults { damaged: 1_000_000, ..Faults::default() }, 16);
    let peer = there(&mut here);
    let (mut refused, mut frames) = (0, 0);
    for _ in 0..100 {
        let payload = Payload::Message { message: b"message", len_bytes: 2000 };
        assert!(here.send(peer, &HEAD, payload, (3, &mut Xor)));
        here.flush(to_later(frames));
        frames += 1;
        to.receive(to_later(frames), 8);
        while let Some(mut arrived) = to.next_frame() {
            let head = arrived.head().to_vec();
            refused += u32::from(!to.open(&mut arrived.received, &head, 2000, 3, &mut Xor));
        }
    }
    assert_eq!(refused, 100);
}

fn to_later(frames: u64) -> Nanos {
    Nanos(HOP.0 * frames)
}

#[test]
fn a_frame_cut_short_is_not_opened_with_the_end_of_another() {
    let (mut here, mut to) = ports(Faults::default(), 16);
    let peer = there(&mut here);
    let payload = Payload::Message { message: &[], len_bytes: 40 };
    assert!(here.send(peer, &HEAD, payload, (3, &mut Xor)));
    here.flush(Nanos::ZERO);
    to.receive(HOP, 8);
    let mut arrived = to.next_frame().unwrap();
    for payload_bytes in [41, 8000, usize::MAX - 10, usize::MAX] {
        assert!(!to.open(&mut arrived.received, &HEAD, payload_bytes, 3, &mut Xor));
    }
    assert!(to.open(&mut arrived.received, &HEAD, 40, 3, &mut Xor));
}

#[test]
fn a_link_without_room_takes_no_frame_and_frames_go_back() {
    let (mut here, mut to) = ports(Faults::default(), 16);
    let peer = there(&mut here);
    let mut now = Nanos::ZERO;
    let payload = Payload::Data { request: 7, offset_bytes: 0, len_bytes: 4096 };
    for round in 0..100 {
        let sent = (0..20).filter(|_| here.send(peer, &HEAD, payload, (1, &mut Plain))).count();
        assert_eq!(sent, 16, "round {round}");
        here.flush(now);
        now = now.after(HOP);
        assert_eq!(to.receive(now, 10), 10);
        while to.next_frame().is_some() {}
        assert_eq!(to.receive(now, 10), 6, "without giving any back by name");
    }
    // A name that became invalid, and a frame that no buffer can hold, are losses, and not waited
    // for.
    assert!(here.send(Peer(0), &HEAD, payload, (1, &mut Plain)));
    let long = Payload::Message { message: &[], len_bytes: 8100 };
    assert!(here.send(peer, &HEAD, long, (1, &mut Plain)));
    assert!(here.send(peer, &HEAD, long, (1, &mut Xor)));
    assert_eq!(here.unsendable(), 3);
    drop((here, to));
    assert_eq!(dropped_frames(), 0);
}

#[test]
fn steady_traffic_allocates_nothing() {
    let (mut here, mut to) = ports(Faults::default(), 64);
    let peer = there(&mut here);
    let mut now = Nanos::ZERO;
    let mut run = |rounds: usize| {
        for _ in 0..rounds {
            for request in 0..10 {
                let payload =
                    Payload::Data { request: 7, offset_bytes: 512 * request, len_bytes: 512 };
                assert!(here.send(peer, &HEAD, payload, (1, &mut Plain)));
                assert!(here.send(peer, &HEAD, payload, (1, &mut Xor)));
            }
            here.flush(now);
            now = now.after(HOP);
            to.receive(now, 64);
            while let Some(mut arrived) = to.next_frame() {
                let received = &mut arrived.received;
                assert!(to.open(received, &HEAD, 512, 1, &mut Plain));
                to.store(received, 7, 0);
            }
        }
    };
    run(10);
    let before = allocations();
    run(1000);
    assert_eq!(allocations(), before);
}
