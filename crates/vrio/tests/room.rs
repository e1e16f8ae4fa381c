//! Links without room, and work that is not there: one peer does not keep another one waiting, and
//! no sidecore spins.

mod common;

use common::{Rig, pattern};
use sidecore_units::Nanos;
use sidecore_vrio::wire::Kind;
use sidecore_vrio::{ClientOptions, OnDisconnect, Peer, ServerOptions};

/// A station that finds no room: a client of a link through memory that does not give its slots
/// back, or is gone.
const STUCK: Peer = Peer(9);
const OTHER: Peer = Peer(10);

fn options() -> ClientOptions {
    ClientOptions { on_disconnect: OnDisconnect::Stall, ..ClientOptions::default() }
}

/// Polls the IOhost, whose link has no room for the first frames. Returns the kinds of the others,
/// and the sessions that they name.
fn poll_host(rig: &mut Rig, refuses: usize) -> Vec<(Kind, u8)> {
    rig.to_client.refuses = refuses;
    rig.poll_host();
    rig.to_client.refuses = 0;
    let frames = rig.to_client.frames.drain(..);
    frames.map(|frame| (Kind::from_code(frame[1]), frame[2])).collect()
}

#[test]
fn a_peer_without_room_keeps_no_other_from_its_handshake() {
    let mut rig = Rig::new(options(), ServerOptions::default());
    rig.poll_client();
    let hello = rig.to_host.frames.pop_front().unwrap();
    rig.host_receives(STUCK, &hello);
    rig.host_receives(OTHER, &hello);
    assert_eq!(poll_host(&mut rig, 1), [(Kind::Challenge, 0)]);
    // Frames of no session.
    let stray = |session| {
        let mut frame = hello.clone();
        (frame[1], frame[2]) = (Kind::Ping.code(), session);
        frame
    };
    rig.host_receives(STUCK, &stray(7));
    assert_eq!(poll_host(&mut rig, 1), []);
    rig.host_receives(OTHER, &stray(8));
    assert_eq!(poll_host(&mut rig, 0), [(Kind::Ending, 8)]);
    assert_eq!(rig.host.deadline(), None);
}

#[test]
fn an_iohost_sleeps_while_a_client_has_no_room_for_its_answers() {
    let mut rig = Rig::connected(options(), ServerOptions::default());
    rig.write(1, 0, &pattern(1, 4096));
    rig.poll_client();
    for frame in std::mem::take(&mut rig.to_host.frames) {
        rig.host_receives(STUCK, &frame);
    }
    rig.execute();
    assert_eq!(poll_host(&mut rig, 1), []);
    let deadline = rig.host.deadline();
    assert!(deadline.is_none_or(|deadline| deadline > rig.now), "{deadline:?}");
    // The link wakes the sidecore when there is room, and the next poll sends.
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.wait(1), Ok(()));
}

#[test]
fn a_client_sleeps_while_its_link_has_no_room() {
    let mut rig = Rig::new(options(), ServerOptions::default());
    rig.to_host.refuses = usize::MAX;
    let mut polls = 0;
    let end = rig.now.after(Nanos::from_millis(1_000));
    while rig.now < end {
        rig.poll_client();
        polls += 1;
        assert!(rig.client.deadline() > rig.now, "it is polled at once again");
        rig.now = rig.client.deadline();
    }
    assert!(polls < 20, "{polls} polls in a second");
    rig.to_host.refuses = 0;
    rig.run_until(Nanos::from_millis(200), |rig| rig.client.is_ready(0));
    assert!(rig.client.is_ready(0));
    rig.run_for(Nanos::from_millis(5));
    rig.write(1, 0, &pattern(1, 65_536));
    rig.to_host.refuses = 1;
    rig.poll_client();
    assert!(rig.client.deadline() > rig.now, "{:?}", rig.client.deadline());
    assert_eq!(rig.wait(1), Ok(()));
}

#[test]
fn a_client_sleeps_after_its_last_answer() {
    let mut rig = Rig::connected(options(), ServerOptions::default());
    rig.write(1, 0, &pattern(1, 4096));
    assert_eq!(rig.wait(1), Ok(()));
    // It may start requests that wait, and there are none.
    assert!(!rig.client.is_due(rig.now));
    assert!(rig.client.deadline() > rig.now, "{:?}", rig.client.deadline());
}
