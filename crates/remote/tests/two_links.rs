//! A session whose IOhost may be on either of two links.

mod vmhost;

use sidecore_block::Operation;
use sidecore_link::{EthernetAddress, Faults, LinkAddress, LinkState, Network};
use sidecore_remote::client::WaitsFor;
use sidecore_units::Nanos;
use vmhost::{Disk, Rig, TestHost, VMHOST, entry, link_options, session_options};

/// The IOhost's address on the second link.
const SECOND: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 3]);
const SIZE: usize = 64 << 10;

fn bad_wire() -> Faults {
    Faults { lost: 50_000, doubled: 50_000, overtaken: 100_000, ..Faults::default() }
}

/// A rig with a second link, and the network of that.
fn with_two_links(seed: u64, faults: Faults) -> (Rig, Network) {
    let mut rig = Rig::new(seed, faults, &[entry(0, "disk1")]);
    let second = Network::new(seed, faults);
    let link = Box::new(second.link(VMHOST, &link_options()).unwrap());
    let options = session_options(LinkAddress::Ethernet(vmhost::IOHOST));
    rig.session.add_second(link, LinkAddress::Ethernet(SECOND), &options).unwrap();
    rig.open("disk1");
    rig.add_queue(0, true, 32);
    (rig, second)
}

/// An IOhost on the second link.
fn revive_on(second: &Network, rig: &mut Rig, disks: Vec<Disk>) {
    rig.incarnation += 1;
    let link = Box::new(second.link(SECOND, &link_options()).unwrap());
    let entries = [entry(0, "disk1")];
    rig.host = Some(TestHost::with_disks(link, rig.incarnation, &entries, disks));
}

#[test]
fn an_iohost_that_moves_between_the_links_has_every_answered_write() {
    for (seed, faults) in [(51, Faults::default()), (52, bad_wire()), (53, bad_wire())] {
        let (mut rig, second) = with_two_links(seed, faults);
        assert!(!rig.session.report().is_on_second);
        let mut longest = Nanos::ZERO;
        for round in 1..=6_u64 {
            let at = (round % 3) * SIZE as u64;
            let answered = rig.write(0, at, round, SIZE);
            // Answered and not flushed: lost with this IOhost, and sent again to the next one.
            let disks = rig.kill(true);
            rig.run_until("waits", |rig| rig.status(0) == Some(WaitsFor::Iohost));
            let read = rig.request(0, 1, Operation::Read, (at, SIZE as u64), 0);
            rig.queues[0].batch.push(read);
            rig.run_for(Nanos::from_millis(round * 70));
            assert!(rig.queues[0].completed.is_empty());
            let begin = rig.now;
            let on_second = round % 3 == 1;
            if on_second {
                revive_on(&second, &mut rig, disks);
            } else {
                rig.revive(&[entry(0, "disk1")], disks);
            }
            assert_eq!(rig.wait(0), Ok(()));
            assert!(rig.peek(0, 0, SIZE) == answered, "seed {seed}, round {round}");
            let report = rig.session.report();
            assert_eq!(report.is_on_second, on_second, "seed {seed}, round {round}");
            assert_eq!((report.link, report.second_link), (LinkState::Up, Some(LinkState::Up)));
            longest = longest.max(rig.now.since(begin));
        }
        println!("seed {seed}: found again within {} ms", longest.0 / 1_000_000);
        assert!(longest < Nanos::from_millis(1_500), "{longest:?}");
    }
}

#[test]
fn a_session_stays_on_its_link_while_it_lasts() {
    let (mut rig, second) = with_two_links(54, Faults::default());
    // Another one on the second link, that has the same names.
    let link = Box::new(second.link(SECOND, &link_options()).unwrap());
    let mut other = TestHost::new(link, 700, &[entry(0, "disk1")]);
    for round in 0..2_000_u64 {
        rig.write(0, 0, round, 512);
        other.turn(rig.now);
    }
    assert!(!rig.session.report().is_on_second);
    assert_eq!(other.disks[0].executed, [0; 4]);
}
