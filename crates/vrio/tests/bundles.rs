//! Frames that carry several requests, or several answers.

mod common;

use common::{Rig, pattern, request};
use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::slices::SlicePort;
use sidecore_vrio::wire::{FEATURES, FrameHeader, Kind, MIN_FRAME_BYTES, PartHeader};
use sidecore_vrio::{ClientOptions, OnDisconnect, Reason, ServerOptions};

const PART_BYTES: usize = PartHeader::BYTES + 52;

fn options() -> ClientOptions {
    ClientOptions {
        on_disconnect: OnDisconnect::Stall,
        replay_bytes: 256 << 10,
        ..ClientOptions::default()
    }
}

fn rig() -> Rig {
    Rig::connected(options(), ServerOptions::default())
}

fn header(frame: &[u8]) -> FrameHeader {
    FrameHeader::decode(frame.first_chunk().unwrap())
}

fn kinds<'a>(frames: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<Kind> {
    frames.into_iter().map(|frame| Kind::from_code(header(frame).kind)).collect()
}

/// Submits `count` requests of 512 bytes, from tag 0 on.
fn submit(rig: &mut Rig, operation: Operation, count: u64) {
    for tag in 0..count {
        if operation == Operation::Write {
            rig.write(tag, tag * 512, &pattern(tag as u8, 512));
        } else {
            rig.submit(tag, request(operation, tag * 512, 512));
        }
    }
}

/// Waits for the requests of [`submit`].
fn wait(rig: &mut Rig, count: u64) {
    for tag in 0..count {
        assert_eq!(rig.wait(tag), Ok(()), "request {tag}");
    }
}

/// The requests that the client has sent: delivers them, and has the IOhost send the answers.
fn deliver(rig: &mut Rig) {
    for frame in std::mem::take(&mut rig.to_host.frames) {
        rig.host_receives(sidecore_vrio::Peer(9), &frame);
    }
    rig.execute();
    rig.poll_host();
}

#[test]
fn requests_of_one_turn_share_frames_and_so_do_their_answers() {
    let mut rig = rig();
    // Four parts each, so that both ends work at the same time.
    submit(&mut rig, Operation::Write, 32);
    rig.poll_client();
    assert_eq!(kinds(&rig.to_host.frames), [Kind::Bundle; 8]);
    deliver(&mut rig);
    assert_eq!(kinds(&rig.to_client.frames), [Kind::Bundle; 8]);
    wait(&mut rig, 32);
    submit(&mut rig, Operation::Read, 30);
    rig.poll_client();
    assert_eq!(kinds(&rig.to_host.frames), [Kind::Bundle; 8]);
    deliver(&mut rig);
    assert_eq!(kinds(&rig.to_client.frames), [Kind::Bundle; 8]);
    wait(&mut rig, 30);
    for tag in 0..30_u64 {
        assert_eq!(rig.guest.bytes(tag)[..512], pattern(tag as u8, 512), "{tag}");
    }
}

#[test]
fn a_request_alone_and_long_data_have_frames_of_their_own() {
    let mut rig = rig();
    submit(&mut rig, Operation::Read, 1);
    rig.poll_client();
    assert_eq!(kinds(&rig.to_host.frames), [Kind::Request]);
    wait(&mut rig, 1);
    rig.write(1, 0, &pattern(1, 4096));
    rig.submit(2, request(Operation::Read, 65_536, 512));
    rig.submit(3, request(Operation::Read, 131_072, 512));
    rig.poll_client();
    assert_eq!(kinds(&rig.to_host.frames), [Kind::Request, Kind::Bundle]);
    for tag in 1..4 {
        assert_eq!(rig.wait(tag), Ok(()));
    }
}

#[test]
fn bundles_fit_the_smallest_frames() {
    let small = ClientOptions { frame_bytes: MIN_FRAME_BYTES, ..options() };
    let mut rig = Rig::connected(small, ServerOptions::default());
    submit(&mut rig, Operation::Write, 5);
    rig.poll_client();
    assert_eq!(kinds(&rig.to_host.frames), [Kind::Bundle, Kind::Bundle, Kind::Request]);
    assert!(rig.to_host.frames.iter().all(|frame| frame.len() <= MIN_FRAME_BYTES as usize));
    wait(&mut rig, 5);
}

#[test]
fn an_older_client_or_iohost_is_sent_no_bundles() {
    for (client, server) in [(0, FEATURES), (FEATURES, 0)] {
        let client = ClientOptions { features: client, ..options() };
        let server = ServerOptions { features: server, ..ServerOptions::default() };
        let mut rig = Rig::connected(client, server);
        submit(&mut rig, Operation::Read, 8);
        rig.poll_client();
        assert_eq!(kinds(&rig.to_host.frames), [Kind::Request; 8]);
        deliver(&mut rig);
        assert_eq!(kinds(&rig.to_client.frames), [Kind::Answer; 8]);
        wait(&mut rig, 8);
    }
}

#[test]
fn a_bundle_that_was_not_agreed_on_is_dropped() {
    let mut with = rig();
    submit(&mut with, Operation::Read, 2);
    with.poll_client();
    let mut bundle = with.to_host.frames.pop_back().unwrap();
    let server = ServerOptions { features: 0, ..ServerOptions::default() };
    let mut without = Rig::connected(options(), server);
    submit(&mut without, Operation::Read, 1);
    without.poll_client();
    // The session and the counter of the other one.
    bundle[2..26].copy_from_slice(&without.to_host.frames[0][2..26]);
    without.to_host.frames.clear();
    without.host_receives(sidecore_vrio::Peer(9), &bundle);
    assert_eq!(without.host_counts().dropped(Reason::Kind), 1);
    assert!(without.host.next_execute().is_none());
}

#[test]
fn each_request_of_a_lost_bundle_is_sent_again() {
    let mut rig = rig();
    submit(&mut rig, Operation::Write, 8);
    rig.poll_client();
    rig.to_host.frames.clear();
    wait(&mut rig, 8);
    assert_eq!(rig.client_counts().retransmissions, 8);
    assert_eq!(rig.executed(Operation::Write), 8, "each one once");
}

#[test]
fn each_answer_of_a_lost_bundle_is_sent_again_and_nothing_is_executed_twice() {
    let mut rig = rig();
    submit(&mut rig, Operation::Write, 8);
    rig.poll_client();
    deliver(&mut rig);
    rig.to_client.frames.clear();
    wait(&mut rig, 8);
    assert_eq!(rig.executed(Operation::Write), 8);
}

#[test]
fn a_bundle_that_came_before_is_dropped_as_a_whole() {
    let mut rig = rig();
    submit(&mut rig, Operation::Write, 4);
    rig.poll_client();
    let bundle = rig.to_host.frames[0].clone();
    rig.host_receives(sidecore_vrio::Peer(9), &bundle);
    rig.host_receives(sidecore_vrio::Peer(9), &bundle);
    assert_eq!(rig.host_counts().dropped(Reason::Replayed), 1);
    rig.to_host.frames.clear();
    wait(&mut rig, 4);
    assert_eq!(rig.executed(Operation::Write), 4);
}

#[test]
fn a_link_without_room_for_a_bundle_has_it_later() {
    let mut rig = rig();
    rig.to_host.refuses = 1;
    submit(&mut rig, Operation::Write, 4);
    rig.poll_client();
    assert!(rig.to_host.frames.is_empty());
    wait(&mut rig, 4);
    rig.to_client.refuses = 1;
    submit(&mut rig, Operation::Read, 4);
    wait(&mut rig, 4);
    assert_eq!(rig.client_counts().retransmissions, 0);
}

/// The IOhost's counters after a bundle of four writes that `edit` has changed, and the number of
/// requests that it gives the store.
fn edited(edit: impl Fn(&mut Vec<u8>)) -> (sidecore_vrio::VrioCounts, usize) {
    let mut rig = rig();
    submit(&mut rig, Operation::Write, 4);
    rig.poll_client();
    let mut bundle = rig.to_host.frames.pop_back().unwrap();
    edit(&mut bundle);
    rig.host_receives(sidecore_vrio::Peer(9), &bundle);
    let mut executed = 0;
    while rig.host.next_execute().is_some() {
        executed += 1;
    }
    (rig.host_counts(), executed)
}

#[test]
fn a_part_that_makes_no_sense_is_counted_and_leaves_those_before_it() {
    let part = |index: usize| FrameHeader::BYTES + index * (PART_BYTES + 512);
    // The third part is of a kind that only the IOhost sends.
    let (counts, executed) = edited(|bundle| bundle[part(2)] = Kind::Answer.code());
    assert_eq!((counts.dropped(Reason::Kind), executed), (1, 2));
    // It is longer than the frame.
    let (counts, executed) = edited(|bundle| bundle[part(3) + 3] = 0xff);
    assert_eq!((counts.dropped(Reason::Malformed), executed), (1, 3));
    // Its slot does not exist: the next one is taken.
    let (counts, executed) = edited(|bundle| bundle[part(1) + PartHeader::BYTES + 3] = 0xff);
    assert_eq!((counts.dropped(Reason::Slot), executed), (1, 3));
    // The frame ends in a part's head.
    let (counts, executed) = edited(|bundle| {
        let bytes = u16::try_from(part(1) - FrameHeader::BYTES + 20).unwrap();
        bundle[28..30].copy_from_slice(&bytes.to_le_bytes());
    });
    assert_eq!((counts.dropped(Reason::Malformed), executed), (1, 1));
    let (counts, executed) = edited(|bundle| bundle.truncate(part(3)));
    assert_eq!((counts.dropped(Reason::Truncated), executed), (1, 0));
}

#[test]
fn a_client_takes_no_requests_out_of_a_bundle() {
    let mut rig = rig();
    submit(&mut rig, Operation::Read, 4);
    rig.poll_client();
    deliver(&mut rig);
    let mut answers = rig.to_client.frames.pop_back().unwrap();
    answers[FrameHeader::BYTES] = Kind::Request.code();
    rig.client_receives(&answers);
    assert_eq!(rig.client_counts().dropped(Reason::Kind), 1);
    // The counter of the damaged frame is used up; repair brings the answers.
    wait(&mut rig, 4);
}

#[test]
fn transmit_sends_what_has_slots_and_only_that() {
    let mut rig = rig();
    let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
    for tag in 0..3 {
        let read = request(Operation::Read, tag * 512, 512);
        rig.client.start((tag, 0, read), &mut port).unwrap();
    }
    assert!(port.wire.frames.is_empty());
    rig.client.transmit(rig.now, &mut port);
    assert_eq!(kinds(&port.wire.frames), [Kind::Bundle]);
    assert_eq!(rig.client.unanswered(), 3);
    wait(&mut rig, 3);
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(rig.client_counts().retransmissions, 0);
}
