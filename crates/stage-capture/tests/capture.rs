//! Captures of ports of a switch.
#![forbid(unsafe_code)]

mod net;

use net::{Filter, Net, frame, mac};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::contract::NIC;
use sidecore_net::{Properties, StagePlace, Vlans, WAIT_TURNS};
use sidecore_stage_capture::{CaptureCounts, CaptureReader, CaptureStage, RING_WORDS};
use sidecore_telemetry::CounterSet as _;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn capture(net: &mut Net, at: usize, snaplen: u32, ring_words: usize) -> CaptureReader {
    let (stage, reader) = CaptureStage::new(snaplen, ring_words);
    net.set(at, StagePlace::Capture, Some(Box::new(stage)));
    reader
}

/// A packet in the file: its time, its direction, its size, its bytes, and its other options.
#[derive(Debug, PartialEq, Eq)]
struct Packet {
    at: u64,
    is_to_station: bool,
    len_bytes: u32,
    bytes: Vec<u8>,
    comment: Option<String>,
    lost: u64,
}

fn packets(mut file: &[u8]) -> Vec<Packet> {
    let mut packets = Vec::new();
    while !file.is_empty() {
        let field = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        let (kind, block_bytes) = (field(0), field(4) as usize);
        if kind == 6 {
            let at = u64::from(field(12)) << 32 | u64::from(field(16));
            let count = field(20) as usize;
            let bytes = file[28..28 + count].to_vec();
            let mut options = &file[28 + count.next_multiple_of(4)..block_bytes - 4];
            let len_bytes = field(24);
            let mut packet =
                Packet { at, is_to_station: false, len_bytes, bytes, comment: None, lost: 0 };
            while options[0] != 0 {
                let count = usize::from(options[2]);
                let value = &options[4..4 + count];
                match options[0] {
                    1 => packet.comment = Some(String::from_utf8(value.to_vec()).unwrap()),
                    2 => packet.is_to_station = value[0] == 2,
                    4 => packet.lost = u64::from_le_bytes(value.try_into().unwrap()),
                    _ => panic!("{options:?}"),
                }
                options = &options[4 + count.next_multiple_of(4)..];
            }
            packets.push(packet);
        }
        file = &file[block_bytes..];
    }
    packets
}

fn read(reader: &mut CaptureReader) -> Vec<Packet> {
    let mut file = Vec::new();
    reader.read(&mut file, u64::MAX, usize::MAX);
    packets(&file)
}

#[test]
fn a_capture_has_frames_of_both_ways_and_the_reasons_of_drops() {
    let mut net = Net::new(&[Vlans::Access(1), Vlans::Access(1)]);
    net.set(1, StagePlace::Firewall, Some(Box::new(Filter)));
    let mut reader = capture(&mut net, 1, 64, RING_WORDS);
    reader.set_epoch(1 << 60);
    let sent = [
        (0, frame(mac(1), 0, &[7; 100])),
        (1, frame(mac(0), 1, &[8; 46])),
        (0, frame(mac(1), 0, &[0xee; 46])),
        (1, frame(mac(0), 9, &[9; 46])),
    ];
    let start = net.now;
    for (from, frame) in &sent {
        net.send(*from, frame);
    }
    let comments = [None, None, Some("dropped: rule_out, rule 1"), Some("dropped: spoofed_mac")];
    let expected =
        sent.iter().zip(comments).zip(1_u64..).map(|(((from, frame), comment), at)| Packet {
            at: (1 << 60) + start.0 + at * 1_000,
            is_to_station: *from == 0,
            len_bytes: frame.len() as u32,
            bytes: frame[..frame.len().min(64)].to_vec(),
            comment: comment.map(str::to_owned),
            lost: 0,
        });
    assert_eq!(read(&mut reader), expected.collect::<Vec<_>>());
    assert_eq!(net.received(1), [sent[0].1.clone()]);
    assert_eq!(net.received(0), [sent[1].1.clone()]);
    net.set(1, StagePlace::Capture, None);
    net.send(0, &sent[0].1);
    assert!(read(&mut reader).is_empty() && reader.is_closed());
}

/// Drops that only the delivery knows of: a frame is shown once, when its end is known.
#[test]
fn a_capture_has_the_drops_of_a_station_that_cannot_take_a_frame() {
    let mut net = Net::new(&[Vlans::Access(1)]);
    net.add(Vlans::Access(1), Properties { frame_bytes: 518, ..NIC }, 1);
    let mut reader = capture(&mut net, 1, 64, RING_WORDS);
    let mut seen = || {
        let packets = read(&mut reader).into_iter();
        packets.map(|packet| (packet.bytes[14], packet.comment)).collect::<Vec<_>>()
    };
    let dropped = |why: &str| Some(format!("dropped: {why}"));
    let numbered = |number: u8| frame(mac(1), 0, &[number; 46]);
    net.send(0, &frame(mac(1), 0, &[1; 600]));
    net.send(0, &numbered(2));
    net.send(0, &numbered(3));
    assert_eq!(seen(), [(1, dropped("mtu")), (2, None)], "the third one waits");
    net.stations[1].post(1, 2048);
    net.turn();
    assert_eq!(seen(), [(3, None)]);
    net.send(0, &numbered(4));
    for _ in 0..WAIT_TURNS {
        net.turn();
    }
    assert_eq!(seen(), [(4, dropped("no_buffers"))]);
    // The port goes while frames wait for it.
    net.send(0, &numbered(5));
    net.send(0, &numbered(6));
    drop(net.switch.remove_port(net.ports[1]).unwrap());
    assert_eq!(seen(), [(5, dropped("no_buffers")), (6, dropped("no_buffers"))]);
    let numbers: Vec<_> = net.received(1).iter().map(|frame| frame[14]).collect();
    assert_eq!(numbers, [2, 3]);
}

/// A flood reaches a port with tags and one without, in either order: a capture has the frames that
/// their stations get.
#[test]
fn a_frame_has_the_tag_of_the_port() {
    let trunk = || Vlans::Trunk { native: None, allowed: [5].into_iter().collect() };
    let access = || Vlans::Access(5);
    for vlans in [
        [access(), trunk(), access()],
        [access(), access(), trunk()],
        [trunk(), access(), trunk()],
        [trunk(), trunk(), access()],
    ] {
        let mut net = Net::new(&vlans);
        let mut readers = [1, 2].map(|at| capture(&mut net, at, 2000, RING_WORDS));
        let payload: Vec<u8> = (0..1400).map(|at| at as u8).collect();
        let mut sent = frame([0xff; 6], 0, &payload);
        if matches!(vlans[0], Vlans::Trunk { .. }) {
            sent.splice(12..12, [0x81, 0, 0xa0, 5]);
        }
        net.send(0, &sent);
        for at in [1, 2] {
            let (got, seen) = (net.received(at), read(&mut readers[at - 1]));
            assert_eq!((got.len(), seen.len()), (1, 1));
            assert_eq!(seen[0].bytes, got[0], "port {at} of {vlans:?}");
            assert_eq!(seen[0].len_bytes as usize, got[0].len());
        }
    }
}

#[test]
fn a_capture_without_a_reader_delays_nothing_and_allocates_nothing() {
    let mut net = Net::new(&[Vlans::Access(1), Vlans::Access(1)]);
    // 12 words for each frame of 60 bytes: 5 fit.
    let mut reader = capture(&mut net, 1, 64, 64);
    let sent = frame(mac(1), 0, &[7; 46]);
    // The first frames fill the tables.
    net.send(1, &frame(mac(0), 1, &[1; 46]));
    let _ = (read(&mut reader), net.received(0), net.received(1));
    let mut made = 0;
    for _ in 0..1_000 {
        net.stations[0].send(&sent);
        let before = allocations();
        net.switch.turn(net.now, 32);
        made += allocations() - before;
    }
    assert_eq!(made, 0);
    assert_eq!(net.received(1).len(), 1_000);
    let counts: CaptureCounts = reader.stats().counts();
    assert_eq!((counts.captured, counts.lost), (6, 995));
    assert_eq!(read(&mut reader).len(), 5);
    net.send(0, &sent);
    let next = read(&mut reader);
    assert_eq!((next.len(), next[0].lost), (1, 995));
    let mut file = Vec::new();
    reader.end(&mut file, 1);
    assert_eq!(file.len() % 4, 0);
    assert!(file.windows(12).any(|part| part == [5, 0, 8, 0, 0xe3, 3, 0, 0, 0, 0, 0, 0]));
}
