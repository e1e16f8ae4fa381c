//! Frames that travel together through a packet link, as one packet for the interface to cut.

use std::time::{Duration, Instant};

use sidecore_link::{
    Contents, FakeHeader, LinkAddress, LinkOptions, LinkQueue, PacketLink, PacketOptions, QUEUE_AT,
};
use sidecore_link_contract::{self as contract, End, Pair, pattern};

mod veth;
use veth::{LEFT, RIGHT, Veth};

const ETHERTYPE: u16 = 0x88b5;

fn options(interface: &str) -> PacketOptions {
    PacketOptions {
        interface: interface.to_owned(),
        ethertype: ETHERTYPE,
        queue: LinkQueue::ONLY,
        link: LinkOptions { receive_frames: 64, transmit_frames: 32, ..LinkOptions::new(82) },
        bypass_qdisc: true,
        offload: true,
    }
}

fn open(veth: &Veth, options: [PacketOptions; 2]) -> Pair {
    let [left, right] = options;
    let link = |options: PacketOptions| {
        veth.within(&options.interface, || PacketLink::open(&options).unwrap())
    };
    Pair::new(link(left), link(right))
}

fn pair(veth: &Veth) -> Pair {
    open(veth, [options(LEFT), options(RIGHT)])
}

/// A frame for the first queue.
fn frame(seed: usize, len_bytes: usize) -> Vec<u8> {
    let mut frame = pattern(seed, len_bytes);
    frame[QUEUE_AT] = 0;
    frame
}

/// Frames of this size, which are different from those of another seed.
fn frames(seed: usize, count: usize, len_bytes: usize) -> Vec<Vec<u8>> {
    (0..count).map(|index| frame(seed + index, len_bytes)).collect()
}

/// Sends frames and takes them at the other end.
fn carry(from: &mut End, to: &mut End, frames: &[Vec<u8>]) {
    assert_eq!(from.send(frames), frames.len());
    let received = to.take(frames.len());
    assert!(received == frames, "frames are damaged, or in another order");
}

/// Sends frames until they travel together. Questions and answers are taken by the receives.
fn until_together(from: &mut End, to: &mut End, len_bytes: usize) {
    let start = Instant::now();
    let before = from.counts().offloaded;
    while from.counts().offloaded == before {
        assert!(start.elapsed() < Duration::from_secs(10), "frames never travel together");
        carry(from, to, &frames(1, 3, len_bytes));
        let mut nothing = from.receive(1);
        from.link.give_back(&mut nothing);
    }
}

#[test]
fn links_with_offload_keep_the_contract() {
    let Some(veth) = Veth::new(9_000) else { return };
    contract::check(&|| pair(&veth));
}

#[test]
fn links_with_offload_on_one_side_keep_the_contract() {
    let Some(veth) = Veth::new(9_000) else { return };
    for is_left in [true, false] {
        contract::check(&|| {
            let [left, right] = [options(LEFT), options(RIGHT)];
            open(
                &veth,
                [
                    PacketOptions { offload: is_left, ..left },
                    PacketOptions { offload: !is_left, ..right },
                ],
            )
        });
    }
}

#[test]
fn packets_that_the_kernel_cuts_keep_the_contract() {
    let Some(veth) = Veth::new(9_000) else { return };
    for end in [LEFT, RIGHT] {
        // No packet of several segments leaves: the kernel cuts each in front of the interface.
        veth.ip(end, &format!("link set {end} gso_max_size 3000"));
    }
    let open = || {
        let [left, right] = [options(LEFT), options(RIGHT)];
        open(
            &veth,
            [
                PacketOptions { bypass_qdisc: false, ..left },
                PacketOptions { bypass_qdisc: false, ..right },
            ],
        )
    };
    contract::check(&open);
    let Pair { mut left, mut right } = open();
    until_together(&mut left, &mut right, 4_178);
    carry(&mut left, &mut right, &frames(5, 15, 4_178));
    assert_eq!(left.counts().offload_refusals, 0);
}

#[test]
fn frames_of_one_size_travel_together_once_the_other_link_has_said_that_it_takes_them() {
    let Some(veth) = Veth::new(9_000) else { return };
    let Pair { mut left, mut right } = pair(&veth);
    carry(&mut left, &mut right, &frames(0, 9, 7_762));
    assert_eq!(left.counts().offloaded, 0, "the other link has not been asked before");
    // 64 KiB: eight frames in a packet, and the rest in another one.
    let mut message = frames(3, 8, 7_762);
    message.push(frame(20, 4_178));
    let start = Instant::now();
    let mut together = 0;
    while together == 0 {
        // An answer that is older than 900 ms counts no more.
        assert!(start.elapsed() < Duration::from_secs(10));
        until_together(&mut left, &mut right, 7_762);
        let before = left.counts().offloaded;
        carry(&mut left, &mut right, &message);
        together = left.counts().offloaded - before;
    }
    assert_eq!(together, 9);
    // A single frame, and short ones, go as before.
    let before = left.counts().offloaded;
    carry(&mut left, &mut right, &frames(4, 1, 7_762));
    carry(&mut left, &mut right, &frames(4, 9, 300));
    assert_eq!(left.counts().offloaded, before);
    assert_eq!((left.counts().dropped(), right.counts().dropped()), (0, 0));
    // The other direction is asked for by the other side.
    assert_eq!(right.counts().offloaded, 0);
    until_together(&mut right, &mut left, 4_178);
}

#[test]
fn a_link_without_offload_gets_plain_frames() {
    let Some(veth) = Veth::new(9_000) else { return };
    let plain = PacketOptions { offload: false, ..options(RIGHT) };
    let Pair { mut left, mut right } = open(&veth, [options(LEFT), plain]);
    for seed in 0..50 {
        carry(&mut left, &mut right, &frames(seed, 9, 7_762));
        carry(&mut right, &mut left, &frames(seed, 9, 7_762));
    }
    assert_eq!((left.counts().offloaded, right.counts().offloaded), (0, 0));
    assert_eq!((left.counts().dropped(), right.counts().dropped()), (0, 0));
}

#[test]
fn an_interface_that_cannot_cut_packets_gets_plain_frames_and_loses_none() {
    let Some(veth) = Veth::new(9_000) else { return };
    let Pair { mut left, mut right } = pair(&veth);
    let start = Instant::now();
    while left.counts().offload_refusals == 0 {
        // An answer that is older than 900 ms counts no more.
        assert!(start.elapsed() < Duration::from_secs(10), "no packet is refused");
        veth.ip(LEFT, &format!("link set {LEFT} gso_max_size 65536"));
        until_together(&mut left, &mut right, 4_178);
        // The kernel would cut them, but not on the way that bypasses the queueing discipline.
        veth.ip(LEFT, &format!("link set {LEFT} gso_max_size 3000"));
        let before = left.counts().offloaded;
        for seed in 0..40 {
            carry(&mut left, &mut right, &frames(seed, 9, 4_178));
        }
        assert_eq!(left.counts().offloaded, before);
    }
    // After some refusals it is not tried again.
    assert!(left.counts().offload_refusals <= 8, "{}", left.counts().offload_refusals);
    assert_eq!((left.counts().dropped(), right.counts().dropped()), (0, 0));
}

#[test]
fn packets_wait_while_their_frames_are_lent_and_the_others_come_on() {
    let Some(veth) = Veth::new(9_000) else { return };
    let Pair { mut left, mut right } = pair(&veth);
    until_together(&mut left, &mut right, 2_000);
    left.send(&frames(0, 8, 2_000));
    let mut held = right.receive_all(8);
    for round in 0..200 {
        carry(&mut left, &mut right, &frames(round, 3, 100));
    }
    for (index, frame) in held.iter().enumerate() {
        assert!(right.bytes(frame) == self::frame(index, 2_000), "frame {index} has changed");
    }
    // In another order than they came.
    held.reverse();
    held.swap(1, 5);
    let mut first = held.split_off(3);
    right.link.give_back(&mut first);
    right.link.give_back(&mut held);
    for round in 0..200 {
        carry(&mut left, &mut right, &frames(round, 8, 2_000));
    }
}

#[test]
fn forged_packets_are_dropped_and_counted() {
    let Some(veth) = Veth::new(9_000) else { return };
    let Pair { mut left, mut right } = pair(&veth);
    until_together(&mut left, &mut right, 2_000);
    // An attacker on the same wire, which sends IPv4 packets of its own making.
    let raw = PacketOptions { ethertype: 0x0800, offload: false, ..options(LEFT) };
    let raw = veth.within(LEFT, || PacketLink::open(&raw).unwrap());
    let mut attacker = Pair::new(
        raw,
        veth.within(RIGHT, || {
            PacketLink::open(&PacketOptions { ethertype: 0x88b6, ..options(RIGHT) }).unwrap()
        }),
    )
    .left;
    let good = FakeHeader {
        contents: Contents::Frames { queue: 0 },
        segment_bytes: 2_000,
        sequence: 0,
        port: ETHERTYPE,
    };
    let packet = |header: FakeHeader, payload: usize, after: usize| {
        [header.encode(payload).unwrap().to_vec(), pattern(1, after)].concat()
    };
    let message = FakeHeader { contents: Contents::Message { queue: 0 }, ..good };
    let mut fragment = packet(good, 4_000, 4_000);
    fragment[6] = 0x20;
    // Segments of no bytes, of one byte, a payload that is not there, a fragment.
    let malformed = [
        packet(FakeHeader { segment_bytes: 0, ..good }, 4_000, 4_000),
        packet(FakeHeader { segment_bytes: 1, ..good }, 4_000, 4_000),
        packet(good, 4_000, 3_000),
        fragment,
    ];
    for packet in &malformed {
        attacker.send_one(packet);
    }
    attacker.send_one(&packet(FakeHeader { segment_bytes: 9_000, ..good }, 4_000, 4_000));
    // Messages that are none, and answers that were not asked for.
    attacker.send_one(&packet(message, 4_000, 4_000));
    attacker.send_one(&packet(message, 10, 10));
    let mut answer = packet(message, 2_000, 2_000);
    answer[40..42].copy_from_slice(&[2, 1]);
    attacker.send_one(&answer);
    // A sound packet arrives from any sender: the protocol above decides.
    attacker.send_one(&packet(good, 3_000, 3_000));
    let received = right.take(2);
    assert_eq!((received[0].len(), received[1].len()), (2_000, 1_000));
    let counts = right.counts();
    assert_eq!(counts.dropped_malformed, malformed.len() as u64);
    assert_eq!(counts.dropped_truncated, 1);
    carry(&mut left, &mut right, &frames(9, 8, 2_000));
}

#[test]
fn packets_reach_the_queue_that_their_frames_name() {
    let Some(veth) = Veth::new(9_000) else { return };
    let queue = |index| LinkQueue { index, count: 2 };
    let link = |index| {
        let options = PacketOptions { queue: queue(index), ..options(RIGHT) };
        veth.within(RIGHT, || PacketLink::open(&options).unwrap())
    };
    let left = veth.within(LEFT, || PacketLink::open(&options(LEFT)).unwrap());
    let Pair { mut left, mut right } = Pair::new(left, link(0));
    let mut second = Pair::new(link(1), SecondEnd::of(&left, &veth)).left;
    second.peer = right.peer;
    let for_queue = |queue: u8, seed| {
        let mut frames = frames(seed, 6, 3_000);
        frames.iter_mut().for_each(|frame| frame[QUEUE_AT] = queue);
        frames
    };
    for (number, end) in [(0, &mut right), (1, &mut second)] {
        let start = Instant::now();
        let before = left.counts().offloaded;
        while left.counts().offloaded == before {
            assert!(start.elapsed() < Duration::from_secs(10));
            carry(&mut left, end, &for_queue(number, 7));
            let mut nothing = left.receive(1);
            left.link.give_back(&mut nothing);
        }
    }
    // Frames for both, by turns.
    let mixed: Vec<_> =
        for_queue(0, 1).into_iter().chain(for_queue(1, 2)).chain(for_queue(0, 3)).collect();
    left.send(&mixed);
    assert!(right.take(12) == [for_queue(0, 1), for_queue(0, 3)].concat());
    assert!(second.take(6) == for_queue(1, 2));
}

/// A link that only has an address, for a pair whose other end is wanted.
struct SecondEnd;

impl SecondEnd {
    fn of(left: &End, veth: &Veth) -> PacketLink {
        assert!(matches!(left.link.properties().address, LinkAddress::Ethernet(_)));
        let options = PacketOptions { ethertype: 0x88b7, offload: false, ..options(LEFT) };
        veth.within(LEFT, || PacketLink::open(&options).unwrap())
    }
}
