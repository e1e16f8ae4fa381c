//! Captures of ports of a switch.
#![forbid(unsafe_code)]

mod net;

use net::{Filter, Net, frame, mac};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_net::contract::NIC;
use sidecore_net::{Properties, StagePlace, Vlans, WAIT_TURNS};
use sidecore_stage_capture::pcapng::{self, Direction, Malformed, ReadPacket};
use sidecore_stage_capture::{CaptureCounts, CaptureReader, CaptureStage, RING_WORDS};
use sidecore_telemetry::CounterSet as _;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn capture(net: &mut Net, at: usize, snaplen: u32, ring_words: usize) -> CaptureReader {
    let (stage, reader) = CaptureStage::new(snaplen, ring_words);
    net.set(at, StagePlace::Capture, Some(Box::new(stage)));
    reader
}

/// The packets of a file with all that the reader has now.
fn read(reader: &mut CaptureReader) -> Vec<ReadPacket> {
    let mut file = Vec::new();
    reader.start(&mut file, "nic");
    reader.read(&mut file, u64::MAX, usize::MAX);
    let file = pcapng::read(&file).unwrap();
    assert_eq!(file.interface, "nic");
    file.packets
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
        sent.iter().zip(comments).zip(1_u64..).map(|(((from, frame), comment), at)| ReadPacket {
            at_ns: (1 << 60) + start.0 + at * 1_000,
            direction: if *from == 0 { Direction::Outbound } else { Direction::Inbound },
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
    reader.start(&mut file, "nic");
    reader.end(&mut file, 1);
    assert_eq!(pcapng::read(&file).unwrap().end, Some((1, 7 + 995, 995)));
}

/// The reader of these tests is strict: a file that is cut off or changed is refused, or has
/// other contents.
#[test]
fn a_file_that_the_writer_would_not_write_is_refused() {
    let packet = |number: u8| ReadPacket {
        at_ns: u64::from(number) << 40,
        direction: Direction::Inbound,
        len_bytes: 1514,
        bytes: vec![number; usize::from(number)],
        lost: number.into(),
        comment: number.is_multiple_of(2).then(|| "dropped: mtu".to_owned()),
    };
    let file = pcapng::File {
        application: "test".to_owned(),
        interface: "nic".to_owned(),
        snaplen: 96,
        packets: (1..6).map(packet).collect(),
        end: Some((1 << 50, 20, 15)),
    };
    let mut bytes = Vec::new();
    file.write(&mut bytes);
    assert_eq!(pcapng::read(&bytes), Ok(file.clone()));
    let blocks = (0..bytes.len()).filter(|end| pcapng::read(&bytes[..*end]).is_ok()).count();
    assert_eq!(blocks, 1 + 2 + 5, "nothing, or whole blocks but the last");
    for at in 0..bytes.len() {
        let mut wrong = bytes.clone();
        wrong[at] ^= 0x80;
        assert_ne!(pcapng::read(&wrong).as_ref(), Ok(&file), "byte {at}");
    }
    let twice = [&bytes[..], &bytes].concat();
    let why = "a block that does not belong here";
    assert_eq!(pcapng::read(&twice), Err(Malformed { at: bytes.len(), why }));
}
