//! The switch as its stations see it.
#![forbid(unsafe_code)]

mod harness;

use harness::{BROADCAST, Lan, frame, guard, mac, plain, tagged};
use sidecore_net::contract::{NIC, WIRE};
use sidecore_net::{
    DropReason, FloodLimit, PortConfig, Properties, QueueState, SwitchError, SwitchEvent, VlanSet,
    Vlans, WAIT_TURNS,
};
use sidecore_spec_virtio::net::PacketHeader;
use sidecore_units::Nanos;

fn access(vlan: u16) -> PortConfig {
    PortConfig { vlans: Vlans::Access(vlan), ..PortConfig::station() }
}

fn trunk(native: Option<u16>, allowed: &[u16]) -> PortConfig {
    let allowed = allowed.iter().copied().collect();
    PortConfig { vlans: Vlans::Trunk { native, allowed }, ..PortConfig::station() }
}

#[test]
fn a_frame_goes_to_all_until_its_receiver_is_known() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    let first = plain(mac(2), mac(1), 1400);
    a.station.send(&first);
    lan.turn();
    assert_eq!((b.frames(), c.frames()), (vec![first.clone()], vec![first.clone()]));
    let answer = plain(mac(1), mac(2), 60);
    b.station.send(&answer);
    lan.turn();
    a.station.send(&first);
    lan.turn();
    assert_eq!((a.frames(), b.frames(), c.frames().len()), (vec![answer], vec![first], 0));
    assert_eq!((a.station.completed(), b.station.completed()), (2, 1));
    let (at_a, at_b) = (a.counts(), b.counts());
    assert_eq!((at_a.in_frames, at_a.in_copies, at_a.in_floods, at_a.out_frames), (2, 3, 1, 1));
    assert_eq!((at_a.in_octets, at_b.out_octets, at_b.out_copies), (2828, 2828, 2));
    assert_eq!(lan.switch.station_count(), 2);
}

#[test]
fn frames_of_every_size_and_cut_arrive_as_they_were_sent() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    lan.learn(&[&a, &b]);
    for len_bytes in (0..300).chain([511, 512, 1023, 1024, 1498, 1499, 1500]) {
        for piece_bytes in [1 << 20, 700, 77, 61] {
            let sent = plain(mac(2), mac(1), len_bytes);
            a.station.send_with(PacketHeader::default(), &sent, piece_bytes);
            lan.turn();
            let received = b.only();
            assert!(received.frame == sent, "{len_bytes} bytes in pieces of {piece_bytes}");
            let (count, buffer_bytes) = if len_bytes % 2 == 0 { (1, 2048) } else { (13, 130) };
            b.station.post(count, buffer_bytes);
        }
    }
    assert!(a.drops().is_empty() && b.drops().is_empty());
}

#[test]
fn runts_giants_and_bad_sources_are_dropped_and_counted() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    lan.learn(&[&a, &b]);
    a.station.send(&plain(mac(2), mac(1), 1501));
    a.station.send(&[1; 13]);
    a.station.send(&[]);
    a.station.send(&plain(mac(2), BROADCAST, 60));
    a.station.send(&plain(mac(2), sidecore_net::MacAddress([0; 6]), 60));
    a.station.send(&plain("01:80:c2:00:00:0e".parse().unwrap(), mac(1), 60));
    a.station.send(&plain(mac(1), mac(1), 60));
    a.station.send_fault(DropReason::Disabled);
    a.station.send_with(PacketHeader::default(), &plain(mac(2), mac(1), 1000), 10);
    lan.turn();
    let expected = [
        (DropReason::Runt, 2),
        (DropReason::TooLong, 1),
        (DropReason::Fragmented, 1),
        (DropReason::BadSource, 2),
        (DropReason::SamePort, 1),
        (DropReason::Reserved, 1),
        (DropReason::Disabled, 1),
    ];
    assert_eq!(a.drops(), expected);
    assert_eq!((a.station.completed(), b.frames().len()), (10, 0));
    a.station.send(&plain(mac(2), mac(1), 1500));
    lan.turn();
    assert_eq!(b.frames().len(), 1, "the port lives on");
}

#[test]
fn vlans_do_not_see_each_other() {
    let mut lan = Lan::new();
    let (a, b) = (lan.add(access(10)), lan.add(access(10)));
    let (c, t) = (lan.add(access(20)), lan.add(trunk(Some(20), &[10, 30])));
    let sent = plain(BROADCAST, mac(1), 100);
    a.station.send(&sent);
    lan.turn();
    assert_eq!((b.frames(), c.frames().len()), (vec![sent.clone()], 0));
    assert_eq!(t.frames(), [tagged(&sent, 10)]);
    // Untagged on the trunk is its native VLAN; a priority stays, and is no VLAN.
    let from_trunk = plain(BROADCAST, mac(4), 100);
    t.station.send(&from_trunk);
    t.station.send(&tagged(&from_trunk, 0xe000));
    t.station.send(&tagged(&from_trunk, 0x600a));
    lan.turn();
    assert_eq!((c.frames(), b.frames()), (vec![from_trunk.clone(); 2], vec![from_trunk.clone()]));
    assert_eq!(a.frames(), std::slice::from_ref(&from_trunk));
    // A known station is found in its VLAN only.
    t.station.send(&tagged(&plain(mac(1), mac(4), 100), 10));
    t.station.send(&plain(mac(1), mac(4), 100));
    lan.turn();
    assert_eq!((a.frames().len(), b.frames().len(), c.frames().len()), (1, 0, 1));
    // Tags that a port has no VLAN for, and stacks of tags.
    t.station.send(&tagged(&from_trunk, 40));
    a.station.send(&tagged(&sent, 10));
    t.station.send(&tagged(&tagged(&from_trunk, 30), 10));
    let mut service = tagged(&from_trunk, 10);
    service[12..14].copy_from_slice(&[0x88, 0xa8]);
    t.station.send(&service);
    lan.turn();
    assert_eq!(t.drops(), [(DropReason::VlanStack, 2), (DropReason::VlanIngress, 1)]);
    assert_eq!(a.drops(), [(DropReason::VlanIngress, 1)]);
    // A trunk without a native VLAN has no untagged frames.
    let u = lan.add(trunk(None, &[10]));
    u.station.send(&from_trunk);
    lan.turn();
    assert_eq!(u.drops(), [(DropReason::VlanIngress, 1)]);
}

#[test]
fn isolated_ports_and_uplinks_keep_to_themselves() {
    let mut lan = Lan::new();
    let isolated = || PortConfig { is_isolated: true, ..PortConfig::station() };
    let (a, b, c) = (lan.add(isolated()), lan.add(isolated()), lan.add(PortConfig::station()));
    let (u, v) = (lan.add(PortConfig::uplink()), lan.add(PortConfig::uplink()));
    for (number, place) in [(1, &a), (2, &b), (3, &c), (4, &u), (5, &v)] {
        place.station.send(&plain(BROADCAST, mac(number), 80));
    }
    lan.turns(3);
    let seen = [&a, &b, &c, &u, &v].map(|place| {
        place.frames().iter().map(|frame| frame[11]).collect::<std::collections::BTreeSet<_>>()
    });
    let expected = [&[3, 4, 5][..], &[3, 4, 5], &[1, 2, 4, 5], &[1, 2, 3], &[1, 2, 3]];
    assert_eq!(seen, expected.map(|seen| seen.iter().copied().collect()));
    a.station.send(&plain(mac(2), mac(1), 80));
    u.station.send(&plain(mac(5), mac(4), 80));
    lan.turn();
    assert_eq!(a.drops(), [(DropReason::Isolated, 1)]);
    assert_eq!(u.drops(), [(DropReason::Uplinks, 1)]);
    assert!(b.frames().is_empty() && v.frames().is_empty());
}

#[test]
fn a_port_that_becomes_isolated_is_so_at_once() {
    let mut lan = Lan::new();
    let isolated = || PortConfig { is_isolated: true, ..PortConfig::station() };
    let (a, b) =
        (lan.add(PortConfig { stations: 0, ..PortConfig::station() }), lan.add(isolated()));
    lan.learn(&[&a, &b]);
    a.station.send(&plain(mac(2), mac(1), 80));
    lan.turn();
    lan.switch.change_port(lan.now, a.port, PortConfig { stations: 0, ..isolated() }).unwrap();
    a.station.send(&plain(mac(2), mac(1), 80));
    lan.turn();
    assert_eq!((b.frames().len(), a.drops()), (1, vec![(DropReason::Isolated, 1)]));
}

#[test]
fn a_guarded_station_is_known_without_a_frame_and_others_cannot_be_it() {
    let mut lan = Lan::new();
    let guarded = |number| PortConfig { guard: Some(guard(number)), ..PortConfig::station() };
    let (a, b, c) = (lan.add(guarded(1)), lan.add(guarded(2)), lan.add(PortConfig::station()));
    a.station.send(&plain(mac(2), mac(1), 80));
    lan.turn();
    assert_eq!((b.frames().len(), c.frames().len()), (1, 0), "no flood");
    a.station.send(&plain(mac(2), mac(9), 80));
    c.station.send(&plain(mac(2), mac(1), 80));
    lan.turn();
    assert_eq!((a.drops(), c.drops()), (vec![(DropReason::SpoofedMac, 1)], a.drops()));
    assert_eq!(b.frames().len(), 0);
    let stats = Default::default();
    let double = lan.switch.add_port(lan.now, "d", guarded(1), stats);
    assert_eq!(double, Err(SwitchError::DoubleMac { mac: mac(1), vlan: 1 }));
    // Free again once the port is gone.
    drop(lan.switch.remove_port(a.port).unwrap());
    lan.switch.change_port(lan.now, c.port, guarded(1)).unwrap();
    b.station.send(&plain(mac(1), mac(2), 80));
    lan.turn();
    assert_eq!(c.frames().len(), 1);
}

#[test]
fn a_frame_waits_for_a_buffer_for_eight_turns() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    lan.learn(&[&a, &b, &c]);
    b.station.take_buffers();
    let late = plain(mac(2), mac(1), 80);
    let other = plain(mac(3), mac(1), 80);
    a.station.send(&late);
    a.station.send(&other);
    lan.turn();
    assert_eq!((c.frames(), b.frames().len()), (vec![other], 0), "others are served");
    assert_eq!(a.station.completed(), 1, "but completed in the order of the ring");
    lan.turns(3);
    b.station.post(1, 2048);
    lan.turn();
    assert_eq!((b.frames(), a.station.completed()), (vec![late.clone()], 3));
    a.station.send(&late);
    lan.turn();
    for _ in 0..WAIT_TURNS {
        assert_eq!(a.station.completed(), 3);
        assert!(lan.switch.has_frames());
        lan.turn();
    }
    assert_eq!((a.station.completed(), b.drops()), (4, vec![(DropReason::NoBuffers, 1)]));
    assert!(!lan.switch.has_frames());
}

#[test]
fn two_senders_share_a_slow_receiver() {
    // Buffers come in every turn, in every second one, or in bursts that the senders overrun.
    for (every, burst) in [(1, 7), (2, 11), (3, 32), (5, 40)] {
        let mut lan = Lan::new();
        let [a, b, c] = lan.stations();
        lan.learn(&[&a, &b, &c]);
        c.station.take_buffers();
        let mut received = [0_usize; 2];
        for turn in 0..3000 {
            for (place, number) in [(&a, 1), (&b, 2)] {
                while place.station.unsent() < 40 {
                    place.station.send(&plain(mac(3), mac(number), 80));
                }
            }
            if turn % every == 0 {
                c.station.post(burst, 2048);
            }
            lan.turn();
            for frame in c.frames() {
                received[usize::from(frame[11]) - 1] += 1;
            }
        }
        let (least, most) = (received[0].min(received[1]), received[0].max(received[1]));
        assert!(least * 10 >= most * 9, "{received:?} with {burst} buffers each {every} turns");
        assert!(least + most > 3000 / every * burst * 9 / 10, "{received:?}");
    }
}

#[test]
fn frames_of_a_flow_stay_in_order_while_some_wait() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    lan.learn(&[&a, &b]);
    b.station.take_buffers();
    let (mut next, mut last) = (0_u32, None);
    for turn in 0..2000_usize {
        while a.station.unsent() < 33 {
            a.station.send(&frame(mac(2), mac(1), 0x88b5, &next.to_be_bytes()));
            next += 1;
        }
        b.station.post(turn * 7919 % 31, 2048);
        lan.turn();
        for frame in b.frames() {
            let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
            assert!(last.is_none_or(|last| last < number), "{last:?} before {number}");
            last = Some(number);
        }
    }
    assert!(last.unwrap() > 20_000);
}

#[test]
fn a_buffer_that_is_too_small_and_one_mtu_for_another_are_reasons() {
    let mut lan = Lan::new();
    let a = lan.add_with(PortConfig::station(), Properties { frame_bytes: 9018, ..NIC }, true);
    let b = lan.add_with(PortConfig::station(), NIC, false);
    lan.learn(&[&a, &b]);
    b.station.take_buffers();
    b.station.post(2, 500);
    for len_bytes in [1501, 600, 100] {
        a.station.send(&plain(mac(2), mac(1), len_bytes));
    }
    lan.turn();
    assert_eq!(b.frames().len(), 1, "the small frame is in the buffer that was too small before");
    assert_eq!(b.drops(), [(DropReason::SmallBuffers, 1), (DropReason::Mtu, 1)]);
}

#[test]
fn floods_are_limited() {
    let mut lan = Lan::new();
    let floods = Some(FloodLimit { per_second: 1000, burst: 10 });
    let (a, b) = (lan.add(PortConfig { floods, ..PortConfig::station() }), lan.add(access(1)));
    for _ in 0..30 {
        a.station.send(&plain(BROADCAST, mac(1), 60));
    }
    lan.turns(2);
    assert_eq!((b.frames().len(), a.drops()), (10, vec![(DropReason::FloodLimit, 20)]));
    lan.now = lan.now.after(Nanos::from_millis(5));
    for _ in 0..30 {
        a.station.send(&plain(mac(9), mac(1), 60));
    }
    lan.turn();
    assert_eq!(b.frames().len(), 5, "unknown stations are flooded too");
    b.station.send(&plain(mac(1), mac(2), 60));
    lan.turn();
    for _ in 0..30 {
        a.station.send(&plain(mac(2), mac(1), 60));
    }
    lan.turns(2);
    assert_eq!(b.frames().len(), 30, "known ones have no limit");
}

#[test]
fn a_loop_blocks_the_younger_port_for_a_while() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    for _ in 0..4 {
        a.station.send(&plain(BROADCAST, mac(9), 60));
        lan.turn();
        c.station.send(&plain(BROADCAST, mac(9), 60));
        lan.turn();
    }
    assert!(lan.switch.is_blocked(c.port) && !lan.switch.is_blocked(a.port));
    let mut events = Vec::new();
    lan.switch.take_events(&mut events);
    let expected =
        SwitchEvent::Loop { mac: mac(9), vlan: 1, blocked: "p".to_owned(), other: "p".to_owned() };
    assert_eq!(events, [expected]);
    drop((b.frames(), c.frames()));
    let drops = c.counts().drops(DropReason::Blocked);
    c.station.send(&plain(BROADCAST, mac(3), 60));
    a.station.send(&plain(BROADCAST, mac(1), 60));
    lan.turn();
    assert_eq!((b.frames().len(), c.frames().len()), (1, 0));
    assert_eq!(c.counts().drops(DropReason::Blocked), drops + 1);
    lan.now = lan.now.after(Nanos::from_millis(30_001));
    c.station.send(&plain(BROADCAST, mac(3), 60));
    lan.turn();
    assert_eq!(b.frames().len(), 1, "it is open again");
}

#[test]
fn a_migrated_station_moves_without_a_loop() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    lan.learn(&[&a, &b, &c]);
    lan.switch.announce(lan.now, c.port, mac(1)).unwrap();
    let heard = b.only().frame;
    assert_eq!((&heard[..6], &heard[6..12], heard.len()), (&[0xff; 6][..], &mac(1).0[..], 60));
    assert_eq!(heard[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    assert_eq!((&heard[22..28], &heard[32..38]), (&mac(1).0[..], &mac(1).0[..]));
    drop(a.frames());
    b.station.send(&plain(mac(1), mac(2), 60));
    lan.turn();
    assert_eq!((a.frames().len(), c.frames().len()), (0, 1));
    assert!(!lan.switch.is_blocked(a.port) && !lan.switch.is_blocked(c.port));
}

#[test]
fn a_port_that_is_down_gets_nothing_and_its_stations_are_forgotten() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    lan.learn(&[&a, &b]);
    b.station.set_state(QueueState::Down("unplugged"));
    lan.now = lan.now.after(Nanos::from_millis(2));
    lan.turn();
    assert!(!lan.switch.is_up(b.port));
    a.station.send(&plain(mac(2), mac(1), 60));
    lan.turn();
    assert_eq!(a.drops(), [(DropReason::NoDestination, 1)]);
    b.station.set_state(QueueState::Up);
    lan.now = lan.now.after(Nanos::from_millis(2));
    a.station.send(&plain(mac(2), mac(1), 60));
    lan.turn();
    assert_eq!(b.frames().len(), 1);
}

#[test]
fn a_detached_queue_has_all_of_its_frames_and_the_switch_none_of_its_memory() {
    let mut lan = Lan::new();
    let [a, b, c] = lan.stations();
    lan.learn(&[&a, &b, &c]);
    b.station.take_buffers();
    // One waits, and more are lent than one turn takes.
    a.station.send(&plain(mac(2), mac(1), 60));
    for _ in 0..80 {
        a.station.send(&plain(mac(2), mac(1), 1400));
    }
    lan.turns(2);
    let sent = 82 - a.station.unsent();
    let queue = lan.switch.detach(a.queue).unwrap();
    assert_eq!(a.station.completed(), sent);
    let counts = [a.counts(), b.counts(), c.counts()];
    assert_eq!(counts[0].in_frames as usize, sent, "each is counted");
    let copies: u64 = counts.iter().map(|counts| counts.in_copies).sum();
    let ends = counts.iter().map(|counts| counts.out_copies + counts.out_discards());
    assert_eq!(copies, ends.sum::<u64>());
    assert!(lan.switch.detach(a.queue).is_none());
    drop(queue);
    // The receiver too, while frames wait for it.
    c.station.send(&plain(mac(2), mac(3), 60));
    lan.turn();
    drop(lan.switch.remove_port(b.port).unwrap());
    assert_eq!(c.station.completed(), 2);
    assert_eq!(lan.switch.change_port(lan.now, b.port, access(3)), Err(SwitchError::NoSuchPort));
    lan.turns(9);
    assert!(!lan.switch.has_frames());
}

#[test]
fn a_port_moves_to_another_vlan_at_once() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    lan.learn(&[&a, &b]);
    b.station.take_buffers();
    a.station.send(&plain(mac(2), mac(1), 60));
    lan.turn();
    lan.switch.change_port(lan.now, b.port, access(5)).unwrap();
    b.station.post(9, 2048);
    a.station.send(&plain(mac(2), mac(1), 60));
    lan.turn();
    assert!(b.frames().is_empty(), "what waited is dropped");
    assert_eq!(b.drops(), [(DropReason::NoBuffers, 1)]);
    let wrong = lan.switch.change_port(lan.now, b.port, access(4095)).unwrap_err();
    assert_eq!(wrong.to_string(), "vlan 4095: use a number from 1 to 4094");
    lan.switch.change_port(lan.now, b.port, access(1)).unwrap();
    b.station.send(&plain(mac(1), mac(2), 60));
    lan.turn();
    assert_eq!(a.frames().len(), 1);
    let all = Vlans::Trunk { native: None, allowed: VlanSet::all() };
    assert!(all.have(1) && all.have(4094) && !all.have(0) && !all.have(4095));
}

#[test]
fn a_port_with_several_queues_keeps_a_flow_on_one() {
    let mut lan = Lan::new();
    let [a, b] = lan.stations();
    let (second, queue) = sidecore_net::contract::Station::new(NIC, true);
    lan.switch.attach(b.port, Box::new(queue)).unwrap();
    second.post(2000, 2048);
    b.station.post(2000, 2048);
    lan.learn(&[&a, &b]);
    drop(second.received());
    let mut ports = [Vec::new(), Vec::new()];
    for round in 0..640_u16 {
        let source_port = round % 64;
        let mut ip = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        ip.extend(source_port.to_be_bytes());
        ip.extend([0, 53, 0, 20, 0, 0]);
        a.station.send(&frame(mac(2), mac(1), 0x0800, &ip));
        lan.turn();
        for (ports, frames) in ports
            .iter_mut()
            .zip([b.frames(), second.received().into_iter().map(|r| r.frame).collect()])
        {
            ports.extend(frames.iter().map(|frame| frame[35]));
        }
    }
    assert_eq!(ports[0].len() + ports[1].len(), 640);
    assert!(ports.iter().all(|ports| ports.len() > 160), "both are used");
    assert!(ports[0].iter().all(|port| !ports[1].contains(port)), "a flow has one queue");
}

#[test]
fn frames_cross_between_a_nic_and_a_wire() {
    let mut lan = Lan::new();
    let a = lan.add(PortConfig::station());
    let w = lan.add_with(PortConfig::uplink(), WIRE, false);
    lan.learn(&[&a, &w]);
    for len_bytes in [46, 300, 1500] {
        let (there, back) = (plain(mac(2), mac(1), len_bytes), plain(mac(1), mac(2), len_bytes));
        a.station.send(&there);
        w.station.send(&back);
        lan.turn();
        assert_eq!((w.frames(), a.only().frame), (vec![there], back));
    }
}

/// The stations that another switch has learnt in this one's place.
#[test]
fn restored_stations_are_known_if_their_port_could_learn_them() {
    let mut lan = Lan::new();
    lan.now = Nanos::from_millis(3_600_000);
    let (a, b) = (lan.add(PortConfig { stations: 2, ..access(1) }), lan.add(access(1)));
    let c = lan.add(PortConfig { guard: Some(guard(7)), ..access(1) });
    let now = lan.now;
    let minute = Nanos::from_millis(60_000);
    let mut restore = |port, number: u8, vlan, silent| {
        lan.switch.restore_station(now, port, (mac(number), vlan), silent)
    };
    assert!(restore(a.port, 1, 1, minute));
    assert!(!restore(b.port, 1, 1, Nanos::ZERO), "it is known by now, on another port");
    assert!(!restore(b.port, 2, 2, minute), "the port is not in that VLAN");
    assert!(!restore(b.port, 2, 1, Nanos::from_millis(300_001)), "it is too old");
    assert!(!restore(c.port, 3, 1, minute), "the port may not have it");
    assert!(!restore(c.port, 7, 1, minute), "it is the configured one");
    assert!(restore(a.port, 4, 1, minute));
    assert!(!restore(a.port, 5, 1, minute), "the port may have two");
    assert!(!lan.switch.restore_station(now, b.port, (BROADCAST, 1), minute));
    b.station.send(&plain(mac(1), mac(9), 60));
    lan.turn();
    assert_eq!((a.frames().len(), c.frames().len(), b.counts().in_floods), (1, 0, 0));
    // Its silence goes on: it ages as it would have.
    let known = |lan: &Lan| lan.switch.stations().any(|station| station.mac == mac(4));
    assert!(known(&lan));
    // Less than the age of a station; some turns look at a part of the table each.
    for _ in 0..1_200 {
        lan.now = lan.now.after(Nanos::from_millis(241));
        lan.turn();
    }
    assert!(!known(&lan));
}
