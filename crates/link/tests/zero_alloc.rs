//! No link allocates for a frame.

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::{
    EthernetAddress, Faults, LinkOptions, LinkQueue, MemoryLink, Network, PacketLink,
    PacketOptions, UdpLink, UdpOptions, XdpLink, XdpOptions,
};
use sidecore_link_contract::{Pair, exchange, exchange_batches};

mod veth;
use veth::{LEFT, RIGHT, Veth};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const HEADER_BYTES: usize = 82;

fn options() -> LinkOptions {
    LinkOptions { receive_frames: 64, transmit_frames: 32, ..LinkOptions::new(HEADER_BYTES) }
}

fn check(mut pair: Pair) {
    exchange(&mut pair, 200);
    exchange_batches(&mut pair, 20);
    let before = allocations();
    exchange(&mut pair, 20_000);
    exchange_batches(&mut pair, 2_000);
    assert_eq!(allocations() - before, 0);
}

#[test]
fn a_simulated_link_allocates_nothing_for_a_frame() {
    let network = Network::new(1, Faults::default());
    let link = |last| network.link(EthernetAddress([2, 0, 0, 0, 0, last]), &options()).unwrap();
    check(Pair::new(link(1), link(2)));
}

#[test]
fn a_memory_link_allocates_nothing_for_a_frame() {
    let (host, client) = MemoryLink::pair(&options(), sidecore_linux::peer_event).unwrap();
    check(Pair::new(host, client));
}

#[test]
fn a_packet_link_allocates_nothing_for_a_frame() {
    for offload in [false, true] {
        let Some(veth) = Veth::new(9_000) else { return };
        let link = |end: &str| {
            let options = PacketOptions {
                interface: end.to_owned(),
                ethertype: 0x88b5,
                queue: LinkQueue::ONLY,
                link: options(),
                bypass_qdisc: true,
                offload,
            };
            veth.within(end, || PacketLink::open(&options).unwrap())
        };
        check(Pair::new(link(LEFT), link(RIGHT)));
    }
}

#[test]
fn a_udp_link_allocates_nothing_for_a_frame() {
    for coalesce in [false, true] {
        let options =
            UdpOptions { address: "127.0.0.1:0".parse().unwrap(), link: options(), coalesce };
        let link = || UdpLink::open(&options).unwrap();
        check(Pair::new(link(), link()));
    }
}

#[test]
fn an_xdp_link_allocates_nothing_for_a_frame() {
    let Some(veth) = Veth::new(9_000) else { return };
    let link = |end: &str| {
        let link = options();
        let options = XdpOptions { interface: end.to_owned(), ethertype: 0x88b5, link, mode: None };
        veth.within(end, || XdpLink::open(&options))
    };
    match (link(LEFT), link(RIGHT)) {
        (Ok(left), Ok(right)) => check(Pair::new(left, right)),
        (Err(error), _) | (_, Err(error)) => sidecore_skip::skip(error),
    }
}
