//! A guest's NIC whose port is at the IOhost: sizes, losses, order, and what the IOhost changes.

mod common;
mod lan;

use common::IOHOST;
use common::{iohost_on, link_options};
use lan::{GUEST, Rig, SERVER, admit, exported, frame};
use sidecore_link::{Faults, Network};
use sidecore_remote::export::ExportedNic;
use sidecore_remote::{NicState, remote_nic};
use sidecore_spec_virtio::net::{PacketHeader, flag, gso};
use sidecore_units::Nanos;
use sidecore_vrio::ServerOptions;
use sidecore_vrio::wire::MIN_FRAME_BYTES;

fn number_of(frame: &[u8]) -> u32 {
    u32::from_le_bytes(*frame[14..].first_chunk().unwrap())
}

#[test]
fn frames_of_all_sizes_pass_in_their_order_both_ways() {
    for frame_bytes in [MIN_FRAME_BYTES, 8_100] {
        let mut rig = Rig::new(Faults::default(), frame_bytes);
        let before = (rig.client(), rig.host());
        let sizes = [60, 61, 1327, 1328, 1329, 1514, 4000, 7990, 9014];
        for round in 0..40 {
            let sent = |to, from| {
                let numbered = (round * 9..).zip(sizes);
                numbered.map(move |(number, len)| frame(to, from, number, len)).collect::<Vec<_>>()
            };
            let (up, down) = (sent(SERVER, GUEST), sent(GUEST, SERVER));
            for (up, down) in up.iter().zip(&down) {
                rig.vmhost.station.send(up);
                rig.iohost.station.send(down);
            }
            rig.run_for(Nanos::from_micros(200));
            assert!(rig.iohost.frames() == up, "round {round}");
            assert!(rig.vmhost.frames() == down, "round {round}");
            rig.vmhost.station.post(16, 16 << 10);
            rig.iohost.station.post(16, 16 << 10);
        }
        let (client, host) = (rig.client(), rig.host());
        assert_eq!(client.packets_sent - before.0.packets_sent, 360);
        assert_eq!(host.packets_received - before.1.packets_received, 360);
        assert_eq!(host.packets_sent - before.1.packets_sent, 360);
        assert_eq!(client.packets_received - before.0.packets_received, 360);
        assert_eq!((client.packets_incomplete, host.packets_incomplete), (0, 0));
    }
}

#[test]
fn a_large_packet_passes_with_its_offload() {
    let mut rig = Rig::new(Faults::default(), 8_100);
    let data = 65_000_usize;
    let mut packet = frame(SERVER, GUEST, 0, 14 + 40 + data);
    packet[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut packet[14..34];
    ip.fill(0);
    (ip[0], ip[8], ip[9]) = (0x45, 64, 6);
    ip[2..4].copy_from_slice(&((40 + data) as u16).to_be_bytes());
    packet[34..54].fill(0);
    packet[46] = 0x50;
    let header = PacketHeader {
        flags: flag::NEEDS_CSUM,
        gso_type: gso::TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 0,
    };
    rig.vmhost.station.send_with(header, &packet, 16 << 10);
    rig.run_for(Nanos::from_micros(200));
    let received = rig.iohost.station.received();
    assert_eq!(received.len(), 1);
    assert!(received[0].frame == packet, "as it was sent");
    let got = received[0].header;
    assert_eq!((got.gso_type, got.gso_size, got.csum_start), (gso::TCPV4, 1448, 34));
}

#[test]
fn a_lossy_wire_loses_frames_and_changes_none() {
    let faults = Faults {
        lost: 20_000,
        doubled: 20_000,
        overtaken: 5_000,
        jitter: Nanos::from_micros(5),
        ..Faults::default()
    };
    let mut rig = Rig::new(faults, MIN_FRAME_BYTES);
    let before = [rig.client(), rig.host()];
    let mut newest = [None; 2];
    let mut received = [0_u64; 2];
    const ROUNDS: u32 = 1_500;
    for round in 0..ROUNDS {
        let len = 60 + (round as usize * 131) % 5_000;
        rig.vmhost.station.send(&frame(SERVER, GUEST, round, len));
        rig.iohost.station.send(&frame(GUEST, SERVER, round, len));
        rig.run_for(Nanos::from_micros(40));
        let ways = [(rig.iohost.frames(), SERVER, GUEST), (rig.vmhost.frames(), GUEST, SERVER)];
        for (way, (frames, to, from)) in ways.into_iter().enumerate() {
            for got in frames {
                let number = number_of(&got);
                let len = 60 + (number as usize * 131) % 5_000;
                assert!(got == frame(to, from, number, len), "frame {number} has changed");
                assert!(newest[way].is_none_or(|newest| number > newest), "in their order");
                newest[way] = Some(number);
                received[way] += 1;
            }
        }
        rig.vmhost.station.post(2, 16 << 10);
        rig.iohost.station.post(2, 16 << 10);
    }
    rig.network.set_faults(Faults::default());
    rig.run_for(Nanos::from_millis(3));
    let rounds = u64::from(ROUNDS);
    for (way, count) in received.into_iter().enumerate() {
        assert!(count < rounds && count > rounds / 2, "{count} of {rounds} arrive");
        let (sent, arrived) =
            if way == 0 { (rig.client(), rig.host()) } else { (rig.host(), rig.client()) };
        let (sent_before, before) = (&before[way], &before[1 - way]);
        assert_eq!(sent.packets_sent - sent_before.packets_sent, rounds);
        let whole = arrived.packets_received - before.packets_received;
        assert!(whole.abs_diff(count) <= 1, "the last one may be on its way: {whole} {count}");
        assert!(arrived.packets_incomplete > before.packets_incomplete);
        assert!(arrived.dropped_replayed > before.dropped_replayed, "doubled frames");
    }
    // No buffer is lost: more packets pass than there are buffers.
    for number in 0..200 {
        rig.vmhost.station.send(&frame(SERVER, GUEST, 10_000 + number, 5_000));
        rig.run_for(Nanos::from_micros(30));
        assert_eq!(rig.iohost.frames().last().map(|got| number_of(got)), Some(10_000 + number));
        rig.iohost.station.post(1, 16 << 10);
    }
}

#[test]
fn the_port_is_down_while_no_session_has_the_nic() {
    let mut rig = Rig::new(Faults::default(), 8_100);
    // The IOhost sets the link down, with another MTU.
    let down = ExportedNic { is_up: false, mtu: 1500, ..exported() };
    rig.export.change_nic(rig.number, &down).unwrap();
    rig.run_until(|rig| rig.vmhost.monitor.state() == NicState::Down);
    assert_eq!(rig.vmhost.monitor.address(), Some((GUEST.0, 1500)));
    assert_eq!(rig.iohost.monitor.state(), NicState::Down);
    rig.run_for(Nanos::from_millis(2));
    assert!(!rig.vmhost.switch.is_up(rig.vmhost.nic_port));
    assert!(!rig.iohost.switch.is_up(rig.iohost.nic_port));
    rig.vmhost.station.send(&frame(SERVER, GUEST, 1, 100));
    rig.run_for(Nanos::from_millis(1));
    assert!(rig.iohost.frames().is_empty());
    rig.export.change_nic(rig.number, &exported()).unwrap();
    rig.run_until(Rig::is_up);
    // The IOhost removes the NIC, and makes another one in another epoch.
    rig.export.remove_nic(rig.number).unwrap();
    assert_eq!(rig.iohost.monitor.state(), NicState::Ended);
    rig.run_until(|rig| rig.vmhost.monitor.state() == NicState::Away);
    let (nic, end) = remote_nic(9000).unwrap();
    rig.iohost.monitor = nic.monitor();
    let port = rig.iohost.nic_port;
    drop(rig.iohost.switch.detach(rig.iohost.nic));
    rig.iohost.nic = rig.iohost.switch.attach(port, Box::new(nic)).unwrap();
    let again = ExportedNic { epoch: 2, ..exported() };
    rig.number = rig.export.add_nic(rig.id, &again, end).unwrap();
    rig.run_until(Rig::is_up);
    rig.run_for(Nanos::from_millis(2));
    rig.vmhost.station.send(&frame(SERVER, GUEST, 2, 3000));
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.iohost.frames(), [frame(SERVER, GUEST, 2, 3000)]);
    // The port of the VMhost ends.
    drop(rig.vmhost.switch.detach(rig.vmhost.nic));
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.vmhost.monitor.state(), NicState::Ended);
}

#[test]
fn a_nic_lives_through_a_restart_of_its_iohost() {
    let mut rig = Rig::new(Faults::default(), 8_100);
    let (nic, end) = remote_nic(9000).unwrap();
    rig.iohost.monitor = nic.monitor();
    let port = rig.iohost.nic_port;
    drop(rig.iohost.switch.detach(rig.iohost.nic));
    rig.iohost.nic = rig.iohost.switch.attach(port, Box::new(nic)).unwrap();
    // Its link has to be gone before another one has the address.
    let spare = Network::new(1, Faults::default());
    let link = Box::new(spare.link(IOHOST, &link_options()).unwrap());
    rig.export = iohost_on(link, 9, 0, ServerOptions::default()).0;
    let link = Box::new(rig.network.link(IOHOST, &link_options()).unwrap());
    rig.export = iohost_on(link, 2, 0, ServerOptions::default()).0;
    rig.id = admit(&mut rig.export);
    let exported = ExportedNic { epoch: 2, ..exported() };
    rig.number = rig.export.add_nic(rig.id, &exported, end).unwrap();
    // Packets for the old one are lost.
    rig.vmhost.station.send(&frame(SERVER, GUEST, 1, 3000));
    rig.run_until(Rig::is_up);
    rig.run_for(Nanos::from_millis(2));
    drop(rig.iohost.frames());
    rig.vmhost.station.send(&frame(SERVER, GUEST, 2, 3000));
    rig.iohost.station.send(&frame(GUEST, SERVER, 3, 3000));
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.iohost.frames(), [frame(SERVER, GUEST, 2, 3000)]);
    assert_eq!(rig.vmhost.frames(), [frame(GUEST, SERVER, 3, 3000)]);
}

#[test]
fn names_and_numbers_of_nics_are_those_of_no_device() {
    let mut rig = Rig::new(Faults::default(), 8_100);
    let (_, end) = remote_nic(1500).unwrap();
    assert!(rig.export.add_nic(rig.id, &exported(), end).is_err(), "the client has the name");
    let (_, end) = remote_nic(1500).unwrap();
    let nameless = ExportedNic { name: "".into(), ..exported() };
    assert!(rig.export.add_nic(rig.id, &nameless, end).is_err());
    assert!(rig.export.remove_nic(99).is_err());
    assert!(rig.export.change_nic(99, &exported()).is_err());
}
