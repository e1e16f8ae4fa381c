//! Teams: of several uplinks to one network, one carries frames.
#![forbid(unsafe_code)]

mod harness;

use std::net::Ipv4Addr;

use harness::{BROADCAST, Lan, Place, frame, guard, mac, plain, tagged};
use sidecore_net::{DropReason, MacAddress, PortConfig, QueueState, SwitchEvent, Vlans};
use sidecore_units::Nanos;

const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

fn member() -> PortConfig {
    PortConfig { team: Some("wan".to_owned()), ..PortConfig::uplink() }
}

/// Two members of a team and a guest, whose frames the first member carries.
fn team() -> (Lan, [Place; 2], Place) {
    let mut lan = Lan::new();
    let members = [lan.add(member()), lan.add(member())];
    let guest = lan.add(PortConfig { guard: Some(guard(1)), ..PortConfig::station() });
    assert_eq!(members.each_ref().map(|place| lan.switch.is_standby(place.port)), [false, true]);
    assert_eq!(events(&mut lan), []);
    (lan, members, guest)
}

fn events(lan: &mut Lan) -> Vec<SwitchEvent> {
    let mut events = Vec::new();
    lan.switch.take_events(&mut events);
    events
}

/// Lets the switch look at its ports.
fn look(lan: &mut Lan) {
    lan.now = lan.now.after(Nanos::from_millis(2));
    lan.turn();
}

fn set_state(lan: &mut Lan, place: &Place, is_up: bool) {
    place.station.set_state(if is_up { QueueState::Up } else { QueueState::Down("no carrier") });
    look(lan);
}

fn is_taken_over(events: &[SwitchEvent]) -> bool {
    matches!(events, [SwitchEvent::TakenOver { team, .. }] if team == "wan")
}

/// The frame of the least size by which the switch announces station `number`.
fn rarp(number: u8) -> Vec<u8> {
    let own = mac(number).0;
    let message = [&[0, 1, 8, 0, 6, 4, 0, 3][..], &own, &[0; 4], &own, &[0; 4]].concat();
    let mut rarp = frame(BROADCAST, mac(number), 0x8035, &message);
    rarp.resize(60, 0);
    rarp
}

#[test]
fn one_member_carries_frames_and_what_the_other_receives_is_dropped() {
    let (mut lan, [active, standby], guest) = team();
    let asks = plain(BROADCAST, mac(1), 60);
    guest.station.send(&asks);
    lan.turn();
    assert_eq!((active.frames(), standby.frames().len()), (vec![asks.clone()], 0));
    // The network brings the guest's own frame back, and its own frames twice.
    let answer = plain(mac(1), mac(9), 60);
    for _ in 0..20 {
        standby.station.send(&asks);
        standby.station.send(&answer);
        active.station.send(&answer);
        look(&mut lan);
    }
    assert_eq!(guest.frames(), vec![answer; 20]);
    assert_eq!(standby.drops(), [(DropReason::Standby, 40)]);
    assert_eq!((active.drops(), guest.drops(), events(&mut lan)), (vec![], vec![], vec![]));
}

#[test]
fn a_member_takes_over_and_the_guests_are_announced_there() {
    let (mut lan, [first, second], guest) = team();
    let other = lan.add(PortConfig { vlans: Vlans::Access(5), ..PortConfig::station() });
    other.station.send(&plain(BROADCAST, mac(2), 60));
    first.station.send(&plain(mac(1), mac(9), 60));
    lan.turns(2);
    assert_eq!(guest.frames().len(), 1);
    drop(first.frames());
    set_state(&mut lan, &first, false);
    assert!(is_taken_over(&events(&mut lan)));
    // The guest's station, and neither that of another VLAN nor the network's.
    assert_eq!((second.frames(), first.frames()), (vec![rarp(1)], vec![]));
    let frame = plain(mac(9), mac(1), 60);
    guest.station.send(&frame);
    lan.turn();
    assert_eq!((second.frames(), first.frames()), (vec![frame], vec![]));
    // It goes on when the first one is back, which takes over in its turn.
    set_state(&mut lan, &first, true);
    assert!(lan.switch.is_standby(first.port) && events(&mut lan).is_empty());
    set_state(&mut lan, &second, false);
    assert!(is_taken_over(&events(&mut lan)) && lan.switch.is_standby(second.port));
    assert_eq!(first.frames(), [rarp(1)]);
}

#[test]
fn without_a_member_that_is_up_the_next_one_that_comes_up_carries_frames() {
    let (mut lan, [first, second], guest) = team();
    set_state(&mut lan, &second, false);
    set_state(&mut lan, &first, false);
    assert!(events(&mut lan).is_empty() && !lan.switch.is_standby(first.port));
    guest.station.send(&plain(BROADCAST, mac(1), 60));
    lan.turn();
    assert_eq!(guest.drops(), [(DropReason::NoDestination, 1)]);
    set_state(&mut lan, &second, true);
    assert!(is_taken_over(&events(&mut lan)));
    guest.station.send(&plain(BROADCAST, mac(1), 60));
    lan.turn();
    assert_eq!((first.frames().len(), second.frames().len()), (0, 2));
}

#[test]
fn a_member_that_leaves_is_replaced() {
    let (mut lan, [first, second], guest) = team();
    drop(lan.switch.detach(first.queue).unwrap());
    assert!(is_taken_over(&events(&mut lan)) && !lan.switch.is_standby(second.port));
    let third = lan.add(member());
    assert!(lan.switch.is_standby(third.port));
    lan.switch.change_port(lan.now, second.port, PortConfig::uplink()).unwrap();
    assert!(is_taken_over(&events(&mut lan)));
    look(&mut lan);
    assert_eq!((second.frames(), third.frames()), (vec![rarp(1)], vec![rarp(1)]));
    // Two networks from now on.
    guest.station.send(&plain(BROADCAST, mac(1), 60));
    lan.turn();
    assert_eq!((second.frames().len(), third.frames().len()), (1, 1));
    lan.switch.change_port(lan.now, second.port, member()).unwrap();
    assert!(lan.switch.is_standby(second.port) && events(&mut lan).is_empty());
    drop(lan.switch.remove_port(third.port).unwrap());
    assert!(is_taken_over(&events(&mut lan)) && !lan.switch.is_standby(second.port));
}

#[test]
fn many_stations_are_announced_over_some_time() {
    let (mut lan, [first, second], guest) = team();
    let trunk = Vlans::Trunk { native: None, allowed: [7].into_iter().collect() };
    let bridge = lan.add(PortConfig { vlans: trunk, ..PortConfig::station() });
    for place in [&first, &second] {
        let trunk = Vlans::Trunk { native: Some(1), allowed: [7].into_iter().collect() };
        lan.switch
            .change_port(lan.now, place.port, PortConfig { vlans: trunk, ..member() })
            .unwrap();
    }
    for number in 2..=200 {
        bridge.station.send(&tagged(&plain(BROADCAST, mac(number), 60), 7));
        lan.turn();
    }
    lan.turns(10);
    drop((first.frames(), second.frames(), guest.frames()));
    set_state(&mut lan, &first, false);
    let mut announced = second.frames();
    assert!(announced.len() <= 32, "{}", announced.len());
    for _ in 0..10 {
        look(&mut lan);
        announced.extend(second.frames());
    }
    let mut expected: Vec<_> = (2..=200).map(|number| tagged(&rarp(number), 7)).collect();
    expected.push(rarp(1));
    announced.sort();
    expected.sort();
    assert_eq!(announced, expected);
}

/// A member of a team whose network has the station of the probes.
fn probing() -> PortConfig {
    PortConfig { probe: Some(ROUTER), ..member() }
}

/// Has a member's network answer its probes, if it does, and returns their number.
fn answer(place: &Place, answers: bool) -> usize {
    let frames = place.frames();
    let probes = frames.iter().filter(|frame| frame[12..14] == [8, 6] && frame[28..32] == [0; 4]);
    for probe in probes.clone() {
        let source = MacAddress(probe[6..12].try_into().unwrap());
        assert_eq!(probe[..6], BROADCAST.0);
        assert!(source.is_station() && source.0[0] & 2 != 0, "{source}");
        let asks = [&[0, 1, 8, 0, 6, 4, 0, 1], &source.0[..], &[0; 10], &ROUTER.octets()].concat();
        assert_eq!(probe[14..42], asks);
        let router = mac(99);
        let reply =
            [&[0, 1, 8, 0, 6, 4, 0, 2], &router.0[..], &ROUTER.octets(), &source.0, &[0; 4]];
        if answers {
            place.station.send(&frame(source, router, 0x0806, &reply.concat()));
        }
    }
    probes.count()
}

/// A second, in steps of 10 ms, in which the networks answer or not. Returns the probes of each.
fn second(lan: &mut Lan, places: [&Place; 2], answers: [bool; 2]) -> [usize; 2] {
    let mut counts = [0; 2];
    for _ in 0..100 {
        lan.now = lan.now.after(Nanos::from_millis(10));
        lan.turn();
        for ((place, answers), count) in places.iter().zip(answers).zip(&mut counts) {
            *count += answer(place, answers);
        }
    }
    counts
}

#[test]
fn a_member_whose_network_does_not_answer_is_replaced() {
    let mut lan = Lan::new();
    let [first, other] = [lan.add(probing()), lan.add(probing())];
    let both = [&first, &other];
    assert_eq!(second(&mut lan, both, [true; 2]), [10, 10]);
    assert!(!lan.switch.is_standby(first.port) && events(&mut lan).is_empty());
    let due = lan.switch.deadline().unwrap();
    assert!(due <= lan.now.after(Nanos::from_millis(100)), "an idle switch is woken for them");
    second(&mut lan, both, [false, true]);
    assert!(is_taken_over(&events(&mut lan)) && lan.switch.is_standby(first.port));
    second(&mut lan, both, [true; 2]);
    assert!(events(&mut lan).is_empty(), "no way back without a reason");
    // A sidecore that has not run for a while has sent no probes in that time.
    lan.now = lan.now.after(Nanos::from_millis(5_000));
    second(&mut lan, both, [true; 2]);
    assert!(events(&mut lan).is_empty());
    // The station of the probes is away: that says nothing of the members.
    second(&mut lan, both, [false; 2]);
    assert!(events(&mut lan).is_empty() && !lan.switch.is_standby(other.port));
    second(&mut lan, both, [true, false]);
    assert!(is_taken_over(&events(&mut lan)) && !lan.switch.is_standby(first.port));
    // A link that is up without an answer comes before one that is down.
    first.station.set_state(QueueState::Down("no carrier"));
    second(&mut lan, both, [false; 2]);
    assert!(is_taken_over(&events(&mut lan)) && !lan.switch.is_standby(other.port));
    let drops = first.counts().drops(DropReason::Probe);
    assert!(drops > 30, "answers end at the switch: {drops}");
}

#[test]
fn only_the_answer_of_the_right_station_counts() {
    let mut lan = Lan::new();
    let [first, other] = [lan.add(probing()), lan.add(probing())];
    let mut source = None;
    for _ in 0..100 {
        lan.now = lan.now.after(Nanos::from_millis(10));
        lan.turn();
        answer(&other, true);
        for probe in first.frames() {
            source = Some(MacAddress(probe[6..12].try_into().unwrap()));
        }
        let Some(source) = source else { continue };
        let claims = |operation, address: [u8; 4]| {
            let start = [&[0, 1, 8, 0, 6, 4, 0, operation], &mac(98).0[..], &address].concat();
            frame(source, mac(98), 0x0806, &[&start[..], &source.0, &[0; 4]].concat())
        };
        first.station.send(&claims(2, [10, 0, 0, 77]));
        first.station.send(&claims(1, ROUTER.octets()));
        first.station.send(&plain(source, mac(98), 60));
        first.station.send(&frame(source, mac(98), 0x0806, &[0, 1, 8]));
    }
    assert!(is_taken_over(&events(&mut lan)) && lan.switch.is_standby(first.port));
}

#[test]
fn without_a_team_nothing_is_probed() {
    let mut lan = Lan::new();
    let alone = lan.add(PortConfig { team: None, ..probing() });
    for _ in 0..100 {
        lan.now = lan.now.after(Nanos::from_millis(10));
        lan.turn();
    }
    assert_eq!((alone.frames().len(), lan.switch.deadline()), (0, None));
    lan.switch.change_port(lan.now, alone.port, probing()).unwrap();
    look(&mut lan);
    assert_eq!(alone.frames().len(), 1);
}

#[test]
fn probes_that_find_no_buffers_say_nothing_of_the_network() {
    let mut lan = Lan::new();
    let [first, other] = [lan.add(probing()), lan.add(probing())];
    second(&mut lan, [&first, &other], [true; 2]);
    // The interface takes nothing more, because guests have filled it.
    first.station.take_buffers();
    for _ in 0..200 {
        lan.now = lan.now.after(Nanos::from_millis(10));
        lan.turn();
        answer(&other, true);
    }
    assert!(events(&mut lan).is_empty() && !lan.switch.is_standby(first.port));
}

#[test]
fn the_probes_of_a_member_in_reserve_are_not_for_guests() {
    let mut lan = Lan::new();
    let [first, other] = [lan.add(probing()), lan.add(probing())];
    let guest = lan.add(PortConfig::station());
    for _ in 0..100 {
        lan.now = lan.now.after(Nanos::from_millis(10));
        lan.turn();
        answer(&first, true);
        for probe in other.frames() {
            // The network floods it, and a guest takes its address.
            first.station.send(&probe);
            let source = MacAddress(probe[6..12].try_into().unwrap());
            guest.station.send(&plain(BROADCAST, source, 60));
        }
    }
    assert_eq!(guest.frames().len(), 0);
    assert_eq!(guest.drops(), [(DropReason::Probe, guest.counts().in_frames)]);
    assert!(first.counts().drops(DropReason::Probe) >= 20);
}
