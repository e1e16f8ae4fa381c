//! Ethernet interfaces: an end of a wire, at whose other end is the kernel.

use std::sync::Arc;

use sidecore_net::contract::{NIC, QueueDriver as _, QueueRig, check_queue};
use sidecore_net::{PortConfig, PortStats, Vlans};
use sidecore_uplink::PacketQueue;

use crate::lan::{self, GUEST_MAC, HOST_MAC, Host, Lan, Way, inside, ip, set_up};

const PORT: &str = "wire0";
const FAR: &str = "wire1";

/// A wire that is up, anew.
fn open() -> Way {
    if std::path::Path::new("/proc/sys/net/ipv4/conf").join(PORT).exists() {
        ip(&format!("link del {PORT}"));
    }
    ip(&format!("link add {PORT} mtu 1500 type veth peer name {FAR} mtu 1500"));
    ip(&format!("link set {FAR} address {HOST_MAC}"));
    [PORT, FAR].into_iter().for_each(set_up);
    way(PORT, FAR)
}

fn way(interface: &'static str, of_host: &'static str) -> Way {
    let stats = Arc::<PortStats>::default();
    let queue = PacketQueue::open(interface, Arc::clone(&stats)).unwrap();
    assert_eq!(queue.mtu_bytes(), 1500);
    Way { queue: Box::new(queue), stats, interface, of_host, cuts_datagrams: false }
}

#[test]
fn an_interface_keeps_the_contract_of_queues() {
    inside(|| {
        check_queue(&|| QueueRig { queue: open().queue, driver: Box::new(Host::new(FAR)) });
    });
}

#[test]
fn the_host_completes_checksums_and_cuts() {
    lan::the_host_completes_checksums_and_cuts(open);
}

#[test]
fn large_messages_of_the_host_are_cut_for_those_that_need_it() {
    lan::large_messages_of_the_host_are_cut_for_those_that_need_it(open);
}

#[test]
fn the_port_follows_the_interface_down_and_up_and_to_its_end() {
    lan::the_port_follows_the_interface_down_and_up_and_to_its_end(open);
}

#[test]
fn frames_above_the_mtu_are_dropped_and_nothing_allocates() {
    lan::frames_above_the_mtu_are_dropped_and_nothing_allocates(open);
}

/// The kernel takes the tags of received frames out of them.
#[test]
fn tags_of_vlans_arrive_in_both_directions() {
    inside(|| {
        let trunk = || PortConfig {
            vlans: Vlans::Trunk { native: None, allowed: std::iter::once(7).collect() },
            ..PortConfig::uplink()
        };
        let station = || PortConfig { vlans: Vlans::Access(7), ..PortConfig::station() };
        let mut near = Lan::with(open(), NIC, station(), trunk());
        let mut host = Host::new(FAR);
        let frame =
            |to: &[u8], from: &[u8], tag: &[u8]| [to, from, tag, &[0x88, 0xb5], &[1; 50]].concat();
        let (guest, host_mac) = (&GUEST_MAC.0[..], &HOST_MAC.0[..]);
        // The last one is of this VLAN, the others of another and of none.
        for tag in [&[0x81, 0, 0, 8][..], &[], &[0x81, 0, 0x60, 7]] {
            host.send(&frame(guest, host_mac, tag));
        }
        let got = near.until("a frame of the VLAN", |lan| lan.station.received().pop());
        assert_eq!(got.frame, frame(guest, host_mac, &[]));
        let counts = near.counts();
        assert_eq!((counts[0].out_frames, counts[1].dropped_vlan_ingress), (1, 2));

        let mut far = Lan::with(way(FAR, PORT), NIC, station(), trunk());
        near.station.send(&frame(host_mac, guest, &[]));
        let got = far.until("a frame of the VLAN", |lan| {
            near.turn();
            lan.station.received().pop()
        });
        assert_eq!(got.frame, frame(host_mac, guest, &[]));
        assert_eq!(far.counts()[1].dropped_vlan_ingress, 0);
    });
}
