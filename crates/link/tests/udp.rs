//! UDP links over the loopback interface, and between network namespaces.

use std::net::SocketAddr;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_link::{LinkAddress, LinkError, LinkOptions, UdpLink, UdpOptions};
use sidecore_link_contract as contract;
use sidecore_reactor::Arm;

mod veth;
use veth::{LEFT, RIGHT, Veth};

const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

fn options(address: &str, frame_bytes: usize, coalesce: bool) -> UdpOptions {
    let link = LinkOptions {
        frame_bytes,
        receive_frames: 64,
        transmit_frames: 32,
        ..LinkOptions::new(82)
    };
    UdpOptions { address: address.parse().unwrap(), link, coalesce }
}

#[test]
fn links_on_one_host_keep_the_contract() {
    for (address, frame_bytes, coalesce) in [
        ("127.0.0.1:0", 8_100, true),
        ("[::1]:0", 8_100, false),
        ("127.0.0.1:0", 1_452, true),
        ("[::1]:0", 65_000, true),
    ] {
        contract::check(&|| {
            let link = || UdpLink::open(&options(address, frame_bytes, coalesce)).unwrap();
            contract::Pair::new(link(), link())
        });
    }
}

/// A pair on a wire, as 10.9.0.1 and 10.9.0.2.
fn pair(veth: &Veth, frame_bytes: usize, coalesce: bool) -> contract::Pair {
    let link = |end, address: &'static str| {
        veth.within(end, || UdpLink::open(&options(address, frame_bytes, coalesce)).unwrap())
    };
    contract::Pair::new(link(LEFT, "10.9.0.1:0"), link(RIGHT, "10.9.0.2:0"))
}

fn veth(mtu: usize) -> Option<Veth> {
    let veth = Veth::new(mtu)?;
    veth.ip(LEFT, &format!("addr add 10.9.0.1/24 dev {LEFT}"));
    veth.ip(RIGHT, &format!("addr add 10.9.0.2/24 dev {RIGHT}"));
    Some(veth)
}

#[test]
fn links_across_a_wire_keep_the_contract() {
    for (mtu, frame_bytes, coalesce) in [(9_000, 8_100, true), (1_500, 1_452, false)] {
        let Some(veth) = veth(mtu) else { return };
        contract::check(&|| pair(&veth, frame_bytes, coalesce));
    }
}

#[test]
fn batches_of_one_size_are_segmented_and_come_apart_as_they_were() {
    let Some(veth) = veth(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100, true);
    for round in 0..50_usize {
        // Several of one size, a shorter one, and longer ones again.
        let sizes = [8_100, 8_100, 8_100, 100 + round, 8_100, 46, 46, 46, 8_100];
        let frames: Vec<_> =
            sizes.iter().enumerate().map(|(index, len)| contract::pattern(index, *len)).collect();
        assert_eq!(left.send(&frames), frames.len());
        let received = right.take(frames.len());
        assert!(received == frames, "round {round}");
    }
    assert_eq!((left.counts().dropped(), right.counts().dropped()), (0, 0));
}

#[test]
fn frames_that_the_kernel_refuses_are_counted_and_stop_nothing() {
    let Some(veth) = veth(1_500) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100, false);
    let peer = left.peer;
    left.send_one(&[1; 8_100]);
    assert_eq!(
        left.counts().dropped_refused,
        1,
        "too long for the interface, and not to be fragmented"
    );
    let nowhere: SocketAddr = "192.0.2.1:9".parse().unwrap();
    left.peer = LinkAddress::Udp(nowhere);
    left.send_one(&[2; 100]);
    assert_eq!(left.counts().dropped_refused, 2, "no route");
    left.peer = peer;
    left.send_one(&[3; 100]);
    assert_eq!(right.take(1), [[3; 100]]);
}

#[test]
fn datagrams_for_which_there_is_no_room_are_counted() {
    let Some(veth) = veth(9_000) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100, false);
    let total: u64 = 4000;
    for index in 0..total {
        left.send_one(&[index as u8; 8_100]);
    }
    let mut received = 0;
    loop {
        let mut frames = right.receive(64);
        if frames.is_empty() {
            break;
        }
        received += frames.len() as u64;
        right.link.give_back(&mut frames);
    }
    right.link.arm();
    let dropped = right.counts().dropped_full;
    assert!(dropped > 0 && received + dropped == total, "{received} received, {dropped} dropped");
}

/// Whether the link's descriptor is readable, once a frame is there.
fn is_watched(end: &contract::End) -> bool {
    poll(&mut [PollFd::new(&end.link.wake_fd(), PollFlags::IN)], Some(&ZERO)).unwrap() > 0
}

#[test]
fn a_link_is_watched_while_it_wakes_now_and_then() {
    let link = || UdpLink::open(&options("127.0.0.1:0", 8_100, false)).unwrap();
    let contract::Pair { mut left, mut right } = contract::Pair::new(link(), link());
    // As for keepalives: each change of the watch would be a system call.
    for round in 0..20 {
        assert_eq!(right.link.arm(), Arm::Armed, "round {round}");
        right.link.disarm();
        left.send_one(&[round; 100]);
        assert!(is_watched(&right), "round {round}");
        assert_eq!(right.take(1), [[round; 100]]);
        assert!(!is_watched(&right), "round {round}");
    }
    // The kernel does not tell the watch of the frames of a link that stays awake.
    (0..8).for_each(|_| assert!(right.receive(8).is_empty()));
    left.send_one(&[1; 100]);
    assert!(!is_watched(&right));
    assert_eq!(right.link.arm(), Arm::WorkPending);
    assert!(is_watched(&right));
    right.link.disarm();
    let mut frames = right.receive(8);
    assert_eq!(frames.len(), 1);
    (0..8).for_each(|_| assert!(right.receive(8).is_empty()));
    right.link.give_back(&mut frames);
    left.send_one(&[2; 100]);
    assert!(!is_watched(&right));
}

#[test]
fn frames_longer_than_any_datagram_are_refused() {
    let error = UdpLink::open(&options("127.0.0.1:0", 66_000, true)).map(drop).unwrap_err();
    assert!(matches!(error, LinkError::Option { name: "frame_bytes", .. }), "{error}");
    let error = UdpLink::open(&options("192.0.2.1:0", 8_100, true)).map(drop).unwrap_err();
    assert!(error.to_string().contains("bind a UDP socket"), "{error}");
}
