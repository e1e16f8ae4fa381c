//! How soon a client finds an IOhost that was started again, or has a successor.

mod common;

use common::Rig;
use sidecore_units::Nanos;
use sidecore_vrio::wire::{FrameHeader, Kind};
use sidecore_vrio::{ClientOptions, OnDisconnect, ServerOptions};

fn rig() -> Rig {
    let options = ClientOptions {
        on_disconnect: OnDisconnect::Stall,
        replay_bytes: 256 << 10,
        ..ClientOptions::default()
    };
    Rig::connected(options, ServerOptions::default())
}

fn kind(frame: &[u8]) -> Kind {
    Kind::from_code(FrameHeader::decode(frame.first_chunk().unwrap()).kind)
}

#[test]
fn a_restarted_iohost_is_found_within_a_second_though_frames_are_lost() {
    let mut rig = rig();
    // So long that the client asks as rarely as it ever does.
    let away_until = rig.now.after(Nanos::from_millis(3_000));
    while rig.now < away_until {
        rig.poll_client();
        rig.to_host.frames.clear();
        rig.step();
    }
    rig.restart(false);
    let started_at = rig.now;
    let mut to_lose = vec![Kind::Hello, Kind::Challenge, Kind::Hello, Kind::Welcome, Kind::Welcome];
    while !(rig.client.is_ready(0) && to_lose.is_empty()) {
        rig.poll_client();
        rig.poll_host();
        for frames in [&mut rig.to_host.frames, &mut rig.to_client.frames] {
            frames.retain(|frame| {
                let lost = to_lose.iter().position(|lost| *lost == kind(frame));
                lost.map(|lost| to_lose.remove(lost)).is_none()
            });
        }
        rig.step();
        let taken = rig.now.since(started_at);
        assert!(taken < Nanos::from_millis(1_000), "after {taken:?}, {to_lose:?} were not lost");
    }
}

#[test]
fn a_successor_is_greeted_at_once_though_the_cookie_is_of_its_predecessor() {
    let mut rig = rig();
    rig.restart(false);
    let is_challenge = |frame: &Vec<u8>| kind(frame) == Kind::Challenge;
    while !rig.to_client.frames.iter().any(is_challenge) {
        rig.step();
        rig.poll_client();
        rig.poll_host();
    }
    // The answer and its repetition, after 10 ms, find no IOhost.
    let mut lost = 0;
    while lost < 2 {
        rig.step();
        rig.poll_client();
        lost += rig.to_host.frames.drain(..).count();
    }
    rig.restart(false);
    let started_at = rig.now;
    while !rig.client.is_ready(0) {
        rig.poll_client();
        rig.poll_host();
        rig.step();
    }
    // The next HELLO follows after 20 ms, and the one after that after another 40 ms.
    let taken = rig.now.since(started_at);
    assert!(taken < Nanos::from_millis(30), "{taken:?}");
}
