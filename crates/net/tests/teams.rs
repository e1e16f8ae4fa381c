//! Teams: of several uplinks to one network, one carries frames.
#![forbid(unsafe_code)]

mod harness;

use harness::{BROADCAST, Lan, Place, frame, guard, mac, plain, tagged};
use sidecore_net::{DropReason, PortConfig, QueueState, SwitchEvent, Vlans};
use sidecore_units::Nanos;

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
