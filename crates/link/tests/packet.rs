//! Links on the two ends of a wire between network namespaces.

use std::time::{Duration, Instant};

use sidecore_link::{
    EthernetAddress, Link, LinkAddress, LinkError, LinkOptions, LinkQueue, LinkState, PacketLink,
    PacketOptions,
};
use sidecore_link_contract as contract;
use sidecore_reactor::Arm;
use sidecore_units::Nanos;

mod veth;
use veth::{LEFT, RIGHT, Veth};

const ETHERTYPE: u16 = 0x88b5;

fn options(interface: &str, frame_bytes: usize) -> PacketOptions {
    PacketOptions {
        interface: interface.to_owned(),
        ethertype: ETHERTYPE,
        queue: LinkQueue::ONLY,
        link: LinkOptions {
            frame_bytes,
            receive_frames: 64,
            transmit_frames: 32,
            ..LinkOptions::new(82)
        },
        bypass_qdisc: true,
        offload: false,
    }
}

fn open(veth: &Veth, end: &str, options: &PacketOptions) -> PacketLink {
    veth.within(end, || PacketLink::open(options).unwrap())
}

fn pair(veth: &Veth, frame_bytes: usize) -> contract::Pair {
    let link = |end| open(veth, end, &options(end, frame_bytes));
    contract::Pair::new(link(LEFT), link(RIGHT))
}

#[test]
fn jumbo_frames_keep_the_contract() {
    let Some(veth) = Veth::new(9_000) else { return };
    contract::check(&|| pair(&veth, 8_100));
}

#[test]
fn plain_frames_keep_the_contract_through_a_queueing_discipline() {
    let Some(veth) = Veth::new(1_500) else { return };
    contract::check(&|| {
        let link =
            |end| open(&veth, end, &PacketOptions { bypass_qdisc: false, ..options(end, 8_100) });
        contract::Pair::new(link(LEFT), link(RIGHT))
    });
}

#[test]
fn the_interface_grants_no_longer_frames_than_its_mtu() {
    let Some(veth) = Veth::new(1_500) else { return };
    let link = open(&veth, LEFT, &options(LEFT, 8_100));
    assert_eq!(link.properties().frame_bytes, 1_500);
    assert_eq!(link.properties().payload_align_bytes, 512);
    veth.ip(LEFT, &format!("link set {LEFT} mtu 1000"));
    let error =
        veth.within(LEFT, || PacketLink::open(&options(LEFT, 8_100)).map(drop).unwrap_err());
    assert!(matches!(error, LinkError::ShortFrames { .. }), "{error}");
    assert!(error.to_string().contains("`ip link set dev left mtu 8100`"), "{error}");
    let error =
        veth.within(RIGHT, || PacketLink::open(&options(LEFT, 8_100)).map(drop).unwrap_err());
    assert!(error.to_string().contains("there is no Ethernet interface `left`"), "{error}");
}

#[test]
fn frames_of_others_do_not_come_in() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    let other = |end| open(&veth, end, &PacketOptions { ethertype: 0x88b6, ..options(end, 8_100) });
    let mut others = contract::Pair::new(other(LEFT), other(RIGHT));
    let own = left.peer;
    left.peer = LinkAddress::Ethernet(EthernetAddress([2, 9, 9, 9, 9, 9]));
    left.send_one(b"for another station");
    left.peer = LinkAddress::Ethernet(EthernetAddress::BROADCAST);
    left.send_one(b"for all");
    left.peer = own;
    left.send_one(b"for this one");
    others.left.send_one(b"of another protocol");
    let received = right.take(2);
    assert!(received[0].starts_with(b"for all") && received[1].starts_with(b"for this one"));
    assert!(others.right.take(1)[0].starts_with(b"of another protocol"));
    // All of it was delivered in the order of sending: nothing can come later.
    assert!(right.receive(8).is_empty() && others.right.receive(8).is_empty());
    assert!(left.receive(8).is_empty(), "the link hears itself");
}

#[test]
fn an_interface_that_goes_down_and_comes_back_loses_nothing_that_waits() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    left.send_one(&contract::pattern(0, 100));
    assert_eq!(right.take(1)[0], contract::pattern(0, 100));
    assert_eq!(left.link.arm(), Arm::Armed);
    veth.ip(LEFT, &format!("link set {LEFT} down"));
    // The news of it is one wake-up, and not one after the other.
    let mut wakes = 0;
    while is_readable(&left) {
        wakes += 1;
        assert!(wakes < 10, "an interface that is down wakes the sidecore for ever");
        left.link.on_wake();
    }
    left.link.disarm();
    assert_eq!(left.send(&[contract::pattern(1, 100), contract::pattern(2, 100)]), 2);
    assert!(matches!(left.link.state(), LinkState::Down(_)));
    assert!(left.link.deadline().is_some(), "it tries again");
    veth.ip(LEFT, &format!("link set {LEFT} up"));
    // It may see that the interface is up before it is time to send again.
    until(&mut left, |left| left.link.deadline().is_none());
    assert_eq!(left.link.state(), LinkState::Up);
    for frame in 1..3 {
        assert_eq!(right.take(1)[0], contract::pattern(frame, 100));
    }
    assert_eq!((left.link.deadline(), left.counts().dropped()), (None, 0));
}

#[test]
fn a_link_without_a_carrier_says_so_and_comes_back_without_a_frame_to_send() {
    for bypass_qdisc in [true, false] {
        let Some(veth) = Veth::new(9_000) else { return };
        let link = |end| open(&veth, end, &PacketOptions { bypass_qdisc, ..options(end, 8_100) });
        let mut pair = contract::Pair::new(link(LEFT), link(RIGHT));
        // The left side goes down, by which the right one has no carrier.
        veth.ip(LEFT, &format!("link set {LEFT} down"));
        for end in [&mut pair.left, &mut pair.right] {
            end.send(&[vec![1; 100]]);
            until(end, |end| matches!(end.link.state(), LinkState::Down(_)));
        }
        assert_eq!(pair.right.link.state(), LinkState::Down("the interface has no carrier"));
        veth.ip(LEFT, &format!("link set {LEFT} up"));
        for end in [&mut pair.left, &mut pair.right] {
            until(end, |end| end.link.state() == LinkState::Up);
        }
        // Asleep when it goes down, with nothing to send. The other side's frame came before.
        until(&mut pair.right, |end| end.link.deadline().is_none());
        while pair.left.link.arm() != Arm::Armed {
            let mut frames = pair.left.receive(8);
            pair.left.link.give_back(&mut frames);
        }
        veth.ip(LEFT, &format!("link set {LEFT} down"));
        let start = Instant::now();
        while pair.left.link.state() == LinkState::Up {
            if is_readable(&pair.left) {
                pair.left.link.on_wake();
            }
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        pair.left.link.disarm();
        assert!(pair.left.link.deadline().is_some(), "it looks whether the interface is up");
        veth.ip(LEFT, &format!("link set {LEFT} up"));
        until(&mut pair.left, |end| end.link.state() == LinkState::Up);
        assert_eq!(pair.left.link.deadline(), None);
    }
}

/// Receives until it is so.
fn until(end: &mut contract::End, is_so: impl Fn(&contract::End) -> bool) {
    let start = Instant::now();
    while !is_so(end) {
        let mut frames = end.receive(8);
        end.link.give_back(&mut frames);
        end.skip();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", end.link.state());
    }
}

fn is_readable(end: &contract::End) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let fd = end.link.wake_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        > 0
}

#[test]
fn frames_that_a_lowered_mtu_refuses_are_counted_and_stop_nothing() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    veth.ip(LEFT, &format!("link set {LEFT} mtu 4000"));
    let frames =
        [contract::pattern(1, 100), contract::pattern(2, 8_100), contract::pattern(3, 100)];
    assert_eq!(left.send(&frames), 3);
    let received = right.take(2);
    assert!(received[0] == frames[0] && received[1] == frames[2]);
    assert_eq!(left.counts().dropped_refused, 1);
    // Longer frames than this side takes are cut by the kernel, and dropped here.
    veth.ip(LEFT, &format!("link set {LEFT} mtu 9000"));
    let long = open(&veth, LEFT, &options(LEFT, 9_000));
    let mut long = contract::Pair::new(long, open(&veth, RIGHT, &options(RIGHT, 8_100))).left;
    long.send_one(&contract::pattern(4, 8_101));
    long.send_one(&contract::pattern(5, 100));
    assert_eq!(right.take(1)[0], contract::pattern(5, 100));
    assert_eq!(right.counts().dropped_truncated, 1);
}

#[test]
fn an_interface_that_is_removed_leaves_a_link_that_is_down() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    veth.ip(LEFT, &format!("link del {LEFT}"));
    for end in [&mut left, &mut right] {
        assert_eq!(end.send(&[vec![1; 100]]), 1);
        assert!(matches!(end.link.state(), LinkState::Down(_)));
        assert!(end.receive(8).is_empty());
        // Its ring fills up, and then there are no buffers.
        for _ in 0..200 {
            end.send(&[vec![1; 100]]);
        }
        assert_eq!(end.send(&[vec![1; 100]]), 0);
        assert!(end.link.deadline().is_some_and(|at| at > Nanos::ZERO));
    }
}

#[test]
fn frames_that_come_while_a_ring_is_held_are_counted_as_dropped() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    let slots = right.link.properties().receive_frames;
    for index in 0..slots {
        left.send_one(&contract::pattern(index, 100));
    }
    let mut held = right.receive_all(slots);
    for index in 0..10 {
        left.send_one(&contract::pattern(index, 100));
    }
    right.link.arm();
    assert_eq!(right.counts().dropped_full, 10);
    right.link.disarm();
    assert!(right.receive(8).is_empty());
    // The last one back first: the kernel fills them in order.
    held.reverse();
    right.link.give_back(&mut held);
    left.send_one(&contract::pattern(77, 100));
    assert_eq!(right.take(1)[0], contract::pattern(77, 100));
    assert_eq!((right.counts().dropped(), right.counts().received), (10, slots as u64 + 1));
}

#[test]
fn only_a_frame_that_is_sent_after_its_turn_is_copied() {
    let Some(veth) = Veth::new(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100);
    let mut buffers = Vec::new();
    left.link.buffers(left.peer, 4, &mut buffers);
    for (index, buffer) in buffers.iter_mut().enumerate() {
        buffer.pieces().write(left.link.memory(), 0, &contract::pattern(index, 5_000));
        buffer.address(left.peer, 5_000);
    }
    // Its answer takes longer than those of the others.
    let mut slow = vec![buffers.remove(0)];
    left.link.send(Nanos::ZERO, &mut buffers);
    for index in 1..4 {
        assert!(
            right.take(1)[0] == contract::pattern(index, 5_000),
            "frame {index} waits for the slow one"
        );
    }
    assert_eq!(left.counts().late_copies, 0);
    left.link.send(Nanos::ZERO, &mut slow);
    assert!(right.take(1)[0] == contract::pattern(0, 5_000));
    assert_eq!(left.counts().late_copies, 1);
    // Round the ring again, in order.
    for index in 0..3 * left.link.properties().transmit_frames {
        left.send_one(&contract::pattern(index, 300));
        assert!(right.take(1)[0] == contract::pattern(index, 300));
    }
    assert_eq!(
        (left.counts().late_copies, left.counts().dropped(), right.counts().dropped()),
        (1, 0, 0)
    );
}
