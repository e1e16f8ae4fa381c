//! Clients that come, go and share an IOhost, and devices that are not those they were.

mod common;

use std::sync::Arc;

use common::{CLIENT, HOST, Rig, device, name, pattern, request};
use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{Kind, MIN_FRAME_BYTES, ending};
use sidecore_vrio::{
    Client, ClientOptions, Event, Member, OnDisconnect, Peer, Plain, ServerOptions, VrioStats,
};

fn options() -> ClientOptions {
    ClientOptions { on_disconnect: OnDisconnect::Stall, client: CLIENT, ..ClientOptions::default() }
}

fn rig() -> Rig {
    Rig::connected(options(), ServerOptions::default())
}

/// A second client of the rig's IOhost, at another station.
struct Second {
    client: Client<Plain>,
    from: Peer,
}

impl Second {
    fn new(rig: &mut Rig) -> Self {
        let stats = Arc::new(VrioStats::default());
        let mut client = Client::new(ClientOptions { queue: 1, ..options() }, HOST, Plain, stats);
        client.open(&name(0)).unwrap();
        rig.host.set_devices(rig.now, 1, &[device(0)]);
        let mut second = Self { client, from: Peer(10) };
        for _ in 0..1_000 {
            second.step(rig);
        }
        assert!(second.client.is_ready(0));
        second
    }

    /// One hop of this client; the rig's own one is silent.
    fn step(&mut self, rig: &mut Rig) {
        rig.to_host.frames.clear();
        let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
        self.client.poll(rig.now, &mut port);
        rig.poll_host();
        rig.now = rig.now.after(common::HOP);
        for frame in std::mem::take(&mut rig.to_host.frames) {
            rig.host_receives(self.from, &frame);
        }
        for frame in std::mem::take(&mut rig.to_client.frames) {
            let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
            port.to_client(&mut self.client, (rig.now, HOST), &mut Arrived::new(frame));
        }
    }
}

#[test]
fn an_idle_client_costs_a_frame_each_way_and_keepalive() {
    let mut rig = rig();
    rig.run_for(Nanos::from_millis(1_000));
    let (client, host) = (rig.client_counts(), rig.host_counts());
    rig.run_for(Nanos::from_millis(10_000));
    let keepalives = 10_000 / 700;
    let sent = rig.client_counts().frames_sent - client.frames_sent;
    assert!((keepalives - 1..=keepalives + 1).contains(&sent), "{sent} frames");
    assert_eq!(rig.host_counts().frames_sent - host.frames_sent, sent);
    assert!(rig.client.is_connected());
    // Both may sleep in between.
    assert_eq!(rig.host.deadline(), None);
    assert!(rig.client.deadline() > rig.now);
}

#[test]
fn clients_of_one_clock_send_their_keepalives_at_once() {
    let mut rigs: Vec<Rig> = (0..5_u64)
        .map(|number| {
            let mut rig = Rig::new(options(), ServerOptions::default());
            // They have started at any time.
            rig.now = Nanos::from_millis(1 + 137 * number);
            rig.run_for(Nanos::from_millis(3_000).since(rig.now));
            rig
        })
        .collect();
    for _ in 0..20 {
        // Each sleeps until its deadline: one wake-up at the end of this time serves all of them.
        let at = rigs[0].client.deadline();
        for rig in &mut rigs {
            assert!(rig.client.is_connected());
            assert_eq!(rig.client.deadline(), at, "a keepalive at a time of its own");
            let before = rig.client_counts().frames_sent;
            rig.now = at;
            // The answer takes a hop more than the PING, and nothing else follows.
            (0..4).for_each(|_| rig.step());
            assert_eq!(rig.client_counts().frames_sent, before + 1);
        }
    }
}

#[test]
fn a_lost_keepalive_is_repeated_before_the_iohost_counts_as_away() {
    let mut rig = rig();
    rig.run_for(Nanos::from_millis(1_000));
    let before = rig.client_counts().frames_sent;
    // All frames are lost for 500 ms, which is less than it takes to be away.
    let end = rig.now.after(Nanos::from_millis(500));
    while rig.now < end {
        rig.poll_client();
        rig.to_host.frames.clear();
        rig.now = rig.now.after(Nanos::from_millis(1));
    }
    assert!(rig.client_counts().frames_sent - before > 4);
    rig.run_for(Nanos::from_millis(400));
    assert!(rig.client.is_connected());
    assert!(!rig.events.contains(&Event::Disconnected));
}

#[test]
fn clients_take_turns() {
    let mut rig = rig();
    let mut second = Second::new(&mut rig);
    rig.run_for(Nanos::from_millis(2));
    rig.holds = true;
    for tag in 0..20 {
        rig.submit(tag, request(Operation::Read, tag * 512, 512));
    }
    rig.poll_client();
    let flood = std::mem::take(&mut rig.to_host.frames);
    for tag in 100..104 {
        second.client.submit(tag, 0, request(Operation::Read, 0, 512)).unwrap();
    }
    let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
    second.client.poll(rig.now, &mut port);
    let few = std::mem::take(&mut rig.to_host.frames);
    flood.iter().for_each(|frame| rig.host_receives(Peer(9), frame));
    few.iter().for_each(|frame| rig.host_receives(second.from, frame));
    rig.execute();
    let places: Vec<u64> = rig.held.iter().map(|execute| execute.place >> 16).collect();
    assert_eq!(places[..8], [0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(places.len(), 24);
    // The store keeps them for long: those of both clients are acknowledged.
    rig.now = rig.now.after(Nanos::from_millis(2));
    let before = rig.host_counts().acknowledged;
    rig.poll_host();
    assert_eq!(rig.host_counts().acknowledged - before, 24);
    assert_eq!(rig.to_client.frames.len(), 6, "bundles of four");
    assert_eq!(rig.host.deadline(), None);
}

#[test]
fn a_revoked_client_is_told_at_once_and_gets_no_session_any_more() {
    let mut rig = rig();
    rig.holds = true;
    rig.write(1, 0, &pattern(1, 4096));
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.held.len(), 1);
    rig.write(2, 8192, &pattern(2, 4096));
    rig.poll_client();
    let late = rig.to_host.frames.back().unwrap().clone();
    rig.host.remove(0);
    rig.host_receives(Peer(9), &late);
    rig.step();
    assert!(!rig.client.is_connected(), "within a hop");
    assert_eq!(rig.host.session(0).unwrap().session(), 0);
    rig.run_for(Nanos::from_millis(200));
    assert!(!rig.client.is_connected());
    assert_eq!(rig.client.refusal(), Some(ending::UNKNOWN_CLIENT));
    assert_eq!(rig.held.len(), 1, "nothing of it is executed any more");
    // Its place is free when the store has nothing of it left.
    let stats = Arc::new(VrioStats::default());
    let other = Member { client: [7; 16], queue: 0 };
    assert_eq!(rig.host.add(other, Arc::clone(&stats)), Some(2));
    let stuck = rig.held.pop_front().unwrap();
    rig.finish(stuck);
    let invited = Member { client: CLIENT, queue: 0 };
    assert_eq!(rig.host.add(invited, Arc::clone(&stats)), Some(0));
    assert_eq!(rig.host.add(invited, stats), None, "it has its place");
    rig.set_devices();
    rig.holds = false;
    assert_eq!((rig.wait(1), rig.wait(2)), (Ok(()), Ok(())));
    assert_eq!(rig.client.refusal(), None);
}

#[test]
fn a_path_that_carries_large_frames_one_way_only_gets_a_session_with_small_ones() {
    for way in [0, 1] {
        let mut rig = Rig::new(options(), ServerOptions::default());
        rig.write(1, 0, &pattern(1, 16_384));
        let end = rig.now.after(Nanos::from_millis(3_000));
        while rig.completed.is_empty() && rig.now < end {
            rig.poll_client();
            rig.poll_host();
            let narrow = if way == 0 { &mut rig.to_host } else { &mut rig.to_client };
            narrow.frames.retain(|frame| frame.len() <= 1_500);
            rig.step();
        }
        assert_eq!(rig.completed, [(1, Ok(()))], "way {way}");
        assert_eq!(rig.client.frame_bytes(), MIN_FRAME_BYTES);
    }
}

#[test]
fn a_client_that_starts_before_its_iohost_gets_large_frames() {
    // The IOhost starts at any moment of the client's search.
    for start_ms in (1..1_500).step_by(37) {
        let mut rig = Rig::new(options(), ServerOptions::default());
        let start = rig.now.after(Nanos::from_millis(start_ms));
        while rig.now < start {
            rig.poll_client();
            rig.to_host.frames.clear();
            rig.now = rig.now.after(Nanos::from_micros(500));
        }
        rig.run_until(Nanos::from_millis(1_000), |rig| rig.client.is_connected());
        assert_eq!(rig.client.frame_bytes(), options().frame_bytes, "start after {start_ms} ms");
    }
}

#[test]
fn a_replay_goes_to_the_device_and_not_to_its_number() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    // The next start of the IOhost numbers its devices differently.
    rig.devices = vec![device(5), device(0)];
    rig.devices[0].device = 0;
    rig.devices[1].device = 5;
    rig.restart(true);
    let executed = rig.disk.log.len();
    rig.holds = true;
    rig.run_until(Nanos::from_millis(2_000), |rig| !rig.held.is_empty());
    assert_eq!(rig.held.front().map(|execute| execute.device), Some(5));
    rig.holds = false;
    assert_eq!(rig.read(2, 0, 512), [1; 512]);
    assert_eq!(rig.disk.log.len(), executed + 2);
}

#[test]
fn another_device_in_the_place_of_a_known_one_is_not_written_to() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.devices[0].serial = [9; 20];
    rig.restart(true);
    rig.submit(2, request(Operation::Read, 0, 512));
    rig.run_for(Nanos::from_millis(2_000));
    assert!(rig.client.is_connected() && !rig.client.is_ready(0) && rig.completed.is_empty());
    assert_eq!(rig.client_counts().replayed, 0);
    // A caller that wants the new device opens it again.
    rig.client.close(0);
    assert_eq!(rig.client.open(&name(0)), Some(0));
    assert_eq!(rig.client.open(&name(0)), None, "it is open");
    assert_eq!(rig.wait(2), Err(BlockError::EIO));
    assert_eq!(rig.read(3, 0, 512), [0; 512]);
}

#[test]
fn a_change_is_told_before_the_client_asks() {
    let mut rig = rig();
    rig.run_for(Nanos::from_millis(50));
    rig.host.set_slot_limit(rig.now, 0, 3);
    rig.step();
    assert_eq!(rig.client.slot_limit(), 3);
    rig.devices[0].capacity_bytes *= 2;
    rig.set_devices();
    (0..6).for_each(|_| rig.step());
    assert_eq!(rig.client.device(0).unwrap().capacity_bytes, rig.devices[0].capacity_bytes);
    assert!(rig.client.round_trip() < Nanos::from_millis(1), "such a PONG measures nothing");
}

#[test]
fn frames_name_the_queue_of_their_receiver() {
    let mut rig = Rig::new(ClientOptions { queue: 1, ..options() }, ServerOptions::default());
    rig.host.set_devices(rig.now, 1, &[device(0)]);
    rig.write(1, 0, &[1; 512]);
    let mut seen = Vec::new();
    for _ in 0..50 {
        rig.poll_client();
        rig.poll_host();
        seen.extend(rig.to_client.frames.iter().map(|frame| (frame[1], frame[27])));
        assert!(rig.to_host.frames.iter().all(|frame| frame[27] == 0));
        rig.step();
    }
    seen.retain(|(kind, _)| *kind != Kind::Challenge.code());
    assert!(seen.len() > 4 && seen.iter().all(|(_, queue)| *queue == 1), "{seen:?}");
    assert_eq!(rig.wait(1), Ok(()));
}

/// Requests that the client gives up, because their device is gone, never reach the IOhost, or are
/// dropped there. The slots that they had are used again.
#[test]
fn the_end_of_a_device_leaves_the_slots_to_the_others() {
    for arrives in [true, false] {
        let mut rig = rig();
        rig.devices.push(device(1));
        rig.set_devices();
        assert_eq!(rig.client.open(&name(1)), Some(1));
        rig.run_until(Nanos::from_millis(100), |rig| rig.client.is_ready(1));
        for tag in 0..4 {
            rig.write(tag, tag * 4096, &pattern(1, 4096));
        }
        rig.poll_client();
        let frames = std::mem::take(&mut rig.to_host.frames);
        rig.devices.remove(0);
        rig.set_devices();
        for frame in frames.iter().filter(|_| arrives) {
            rig.host_receives(Peer(9), frame);
        }
        for tag in 0..4 {
            assert_eq!(rig.wait(tag), Err(BlockError::EIO));
        }
        for tag in 10..14 {
            rig.guest.bytes(tag).fill(1);
            rig.client.submit(tag, 1, request(Operation::Write, tag * 4096, 4096)).unwrap();
        }
        for tag in 10..14 {
            assert_eq!(rig.wait(tag), Ok(()), "the frames arrived: {arrives}");
        }
    }
}

#[test]
fn a_device_is_attached_again_for_a_user_that_begins() {
    let mut rig = rig();
    let attachment = |rig: &mut Rig, tag: u64| {
        rig.holds = true;
        rig.submit(tag, request(Operation::Read, 0, 512));
        rig.run_for(Nanos::from_millis(5));
        rig.held[0].attachment
    };
    let end = |rig: &mut Rig, tag: u64| {
        rig.holds = false;
        assert_eq!(rig.wait(tag), Ok(()));
    };
    let first = attachment(&mut rig, 1);
    rig.client.claim(0);
    end(&mut rig, 1);
    assert_eq!(attachment(&mut rig, 2), first, "a request was unanswered");
    end(&mut rig, 2);
    rig.client.claim(0);
    assert!(rig.client.is_ready(0), "a request waits for no longer than a round trip");
    let second = attachment(&mut rig, 3);
    assert!(second > first);
    end(&mut rig, 3);
    rig.write(4, 4096, &[1; 512]);
    assert_eq!(rig.wait(4), Ok(()));
    assert_eq!(rig.client.kept_writes(0), 1);
    rig.client.claim(0);
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.client.kept_writes(0), 0, "the write is flushed first");
    assert!(attachment(&mut rig, 5) > second);
    end(&mut rig, 5);
    assert_eq!(rig.disk.bytes, rig.disk.safe);
}

/// Of two clients of a device, the one that was attached last writes. The IOhost reads the clock
/// once for all frames of a poll.
#[test]
fn of_two_clients_that_attach_in_one_poll_one_is_the_later_one() {
    let mut rig = rig();
    let mut second = Second::new(&mut rig);
    rig.run_for(Nanos::from_millis(2));
    rig.holds = true;
    rig.client.claim(0);
    second.client.claim(0);
    rig.submit(1, request(Operation::Read, 0, 512));
    second.client.submit(1, 0, request(Operation::Read, 0, 512)).unwrap();
    for _ in 0..10 {
        rig.poll_client();
        let frames = std::mem::take(&mut rig.to_host.frames);
        let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
        second.client.poll(rig.now, &mut port);
        let others = std::mem::take(&mut rig.to_host.frames);
        frames.iter().for_each(|frame| rig.host_receives(Peer(9), frame));
        others.iter().for_each(|frame| rig.host_receives(second.from, frame));
        rig.poll_host();
        rig.execute();
        rig.now = rig.now.after(common::HOP);
        // Each drops the frames of the other's session.
        for frame in std::mem::take(&mut rig.to_client.frames) {
            rig.client_receives(&frame);
            let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
            port.to_client(&mut second.client, (rig.now, HOST), &mut Arrived::new(frame));
        }
    }
    assert_eq!(rig.held.len(), 2);
    assert_ne!(rig.held[0].attachment, rig.held[1].attachment);
}
