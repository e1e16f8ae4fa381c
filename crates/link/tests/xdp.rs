//! AF_XDP links on the two ends of a wire between network namespaces. A virtual wire has no zero
//! copy: interfaces.rs is for cards that have.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use sidecore_link::{
    EthernetAddress, Link, LinkAddress, LinkError, LinkOptions, LinkState, XdpLink, XdpOptions,
};
use sidecore_link_contract as contract;
use sidecore_linux::XdpMode;
use sidecore_skip::skip;

mod veth;
use veth::{LEFT, RIGHT, Veth};

fn options(interface: &str, frame_bytes: usize, mode: Option<XdpMode>) -> XdpOptions {
    XdpOptions {
        interface: interface.to_owned(),
        ethertype: 0x88b5,
        link: LinkOptions {
            frame_bytes,
            receive_frames: 64,
            transmit_frames: 32,
            ..LinkOptions::new(82)
        },
        mode,
    }
}

fn open(veth: &Veth, end: &str, options: &XdpOptions) -> Result<XdpLink, LinkError> {
    veth.within(end, || XdpLink::open(options))
}

/// A wire on which AF_XDP works in this mode.
fn wire(mtu: usize, mode: XdpMode) -> Option<Veth> {
    let veth = Veth::new(mtu)?;
    match open(&veth, LEFT, &options(LEFT, 8_100, Some(mode))) {
        Ok(_) => Some(veth),
        Err(error) => {
            skip(format_args!("AF_XDP in mode {mode:?}: {error}"));
            None
        }
    }
}

fn pair(veth: &Veth, frame_bytes: usize, mode: XdpMode) -> contract::Pair {
    let link = |end| open(veth, end, &options(end, frame_bytes, Some(mode))).unwrap();
    contract::Pair::new(link(LEFT), link(RIGHT))
}

#[test]
fn generic_links_keep_the_contract() {
    for (mtu, frame_bytes) in [(9_000, 8_100), (1_500, 1_500)] {
        let Some(veth) = wire(mtu, XdpMode::Generic) else { return };
        contract::check(&|| pair(&veth, frame_bytes, XdpMode::Generic));
    }
}

#[test]
fn links_in_the_driver_keep_the_contract() {
    for (mtu, frame_bytes) in [(9_000, 8_100), (1_500, 1_500)] {
        let Some(veth) = wire(mtu, XdpMode::Driver) else { return };
        contract::check(&|| pair(&veth, frame_bytes, XdpMode::Driver));
    }
}

#[test]
fn a_mode_that_the_interface_lacks_is_refused_and_the_granted_one_is_told() {
    let Some(veth) = wire(9_000, XdpMode::Driver) else { return };
    let error =
        open(&veth, LEFT, &options(LEFT, 8_100, Some(XdpMode::ZeroCopy))).map(drop).unwrap_err();
    assert!(error.to_string().contains("no zero copy"), "{error}");
    let link = open(&veth, LEFT, &options(LEFT, 8_100, None)).unwrap();
    assert_eq!(link.properties().mode, "AF_XDP, copied, in the driver");
    // The program goes with the link: other frames pass it, and afterwards there is none.
    drop(link);
    open(&veth, LEFT, &options(LEFT, 8_100, Some(XdpMode::Generic))).unwrap();
}

#[test]
fn a_jumbo_frame_has_several_pieces_and_its_first_payload_is_aligned() {
    let Some(veth) = wire(9_000, XdpMode::Generic) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100, XdpMode::Generic);
    let bytes = contract::pattern(1, 8_100);
    left.send_one(&bytes);
    let mut frames = right.receive_all(1);
    assert_eq!(frames[0].pieces().part(0, usize::MAX).count(), 3);
    assert_eq!(frames[0].pieces().part(82, 1).next().unwrap().address().0 % 64, 0);
    assert!(right.bytes(&frames[0]) == bytes);
    right.link.give_back(&mut frames);
}

/// A card that has no chunk left drops frames and counts them itself. The link counts how often the
/// kernel was without a chunk; with copied frames, the kernel counts the frames, too.
#[test]
fn a_link_counts_how_often_it_has_no_buffer_for_a_frame() {
    for mode in [XdpMode::Generic, XdpMode::Driver] {
        let Some(veth) = wire(1_500, mode) else { return };
        let contract::Pair { mut left, mut right } = pair(&veth, 1_500, mode);
        let mut held = Vec::new();
        while held.len() < 64 {
            left.send_one(b"held");
            held.append(&mut right.receive_all(1));
        }
        assert_eq!((right.counts().starvations, right.counts().dropped_full), (0, 0));
        for _ in 0..5 {
            left.send_one(b"lost");
        }
        let start = Instant::now();
        while right.counts().starvations < 5 {
            let _ = right.link.arm();
            right.link.disarm();
            assert!(start.elapsed() < Duration::from_secs(10), "{:?}", right.counts());
        }
        assert_eq!(right.counts().dropped_full, 5);
        right.link.give_back(&mut held);
    }
}

#[test]
fn a_link_that_was_down_comes_back_without_a_frame_to_send() {
    for mode in [XdpMode::Generic, XdpMode::Driver] {
        let Some(veth) = wire(9_000, mode) else { return };
        let contract::Pair { mut left, right: mut other } = pair(&veth, 8_100, mode);
        veth.ip(LEFT, &format!("link set {LEFT} down"));
        left.send(&[vec![1; 100]]);
        other.send(&[vec![1; 100]]);
        until(&mut left, |state| matches!(state, LinkState::Down(_)));
        until(&mut other, |state| matches!(state, LinkState::Down(_)));
        veth.ip(LEFT, &format!("link set {LEFT} up"));
        until(&mut left, |state| state == LinkState::Up);
        until(&mut other, |state| state == LinkState::Up);
    }
}

/// Receives until the link's state is so.
fn until(end: &mut contract::End, is_so: impl Fn(LinkState) -> bool) {
    let start = Instant::now();
    while !is_so(end.link.state()) {
        let mut frames = end.receive(8);
        end.link.give_back(&mut frames);
        end.skip();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", end.link.state());
    }
}

#[test]
fn frames_for_other_stations_do_not_come_in() {
    for mode in [XdpMode::Generic, XdpMode::Driver] {
        let Some(veth) = wire(9_000, mode) else { return };
        let contract::Pair { mut left, mut right } = pair(&veth, 8_100, mode);
        let own = left.peer;
        let LinkAddress::Ethernet(EthernetAddress(bytes)) = own else { panic!("{own}") };
        for byte in 0..6 {
            let mut other = bytes;
            other[byte] ^= 0x40;
            left.peer = LinkAddress::Ethernet(EthernetAddress(other));
            left.send_one(b"for another station");
        }
        left.peer = LinkAddress::Ethernet(EthernetAddress::BROADCAST);
        left.send_one(b"for all");
        left.peer = own;
        left.send_one(b"for this one");
        assert_eq!(right.take(2), [&b"for all"[..], b"for this one"]);
    }
}

#[test]
fn frames_of_others_go_to_the_network_stack() {
    let Some(veth) = wire(9_000, XdpMode::Generic) else { return };
    let contract::Pair { mut left, mut right } = pair(&veth, 8_100, XdpMode::Generic);
    let own = left.peer;
    veth.ip(LEFT, &format!("addr add 10.9.0.1/24 dev {LEFT}"));
    veth.ip(RIGHT, &format!("addr add 10.9.0.2/24 dev {RIGHT}"));
    let answered = veth.within(LEFT, || {
        let socket =
            TcpStream::connect_timeout(&([10, 9, 0, 2], 9).into(), Duration::from_secs(10));
        // There is no listener, and the other side's stack says so, over the same wire.
        socket.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    });
    assert!(answered);
    left.peer = LinkAddress::Peer(0);
    assert_eq!(left.send(&[vec![1; 100]]), 1);
    assert_eq!(left.counts().dropped_unsendable, 1, "an address of another medium");
    left.peer = own;
    left.send_one(&[7; 100]);
    assert_eq!(right.take(1), [[7; 100]]);
}
