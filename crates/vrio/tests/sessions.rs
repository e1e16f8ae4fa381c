//! A client and an IOhost over a wire that does as a test says.

mod common;

use common::{DISK_BYTES, HOP, Rig, device, name, pattern, request};
use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;
use sidecore_vrio::slices::SlicePort;
use sidecore_vrio::wire::{FrameHeader, Kind, MIN_FRAME_BYTES, device_flag};
use sidecore_vrio::{ClientOptions, Event, OnDisconnect, Peer, Reason, Request, ServerOptions};

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

fn kind(frame: &[u8]) -> Kind {
    Kind::from_code(FrameHeader::decode(frame.first_chunk().unwrap()).kind)
}

/// Delivers what both sides send once, but for frames to the IOhost or the client of this kind, of
/// which it loses `count`.
fn lose(rig: &mut Rig, lost: Kind, mut count: usize) {
    rig.poll_client();
    rig.poll_host();
    for wire in [&mut rig.to_host, &mut rig.to_client] {
        wire.frames.retain(|frame| {
            let loses = kind(frame) == lost && count > 0;
            count -= usize::from(loses);
            !loses
        });
    }
    assert_eq!(count, 0, "frames of kind {lost} were sent");
    rig.step();
}

#[test]
fn a_read_returns_what_was_written() {
    for frame_bytes in [MIN_FRAME_BYTES, 8_100, 9_000] {
        let mut rig = Rig::connected(
            ClientOptions { frame_bytes, ..options() },
            ServerOptions { frame_bytes: 9_000, ..ServerOptions::default() },
        );
        assert_eq!(rig.client.frame_bytes(), frame_bytes);
        for (tag, (offset, len)) in
            [(0, 512), (4096, 4096), (8192, 65_536), (DISK_BYTES - 512, 512)].iter().enumerate()
        {
            let data = pattern(tag as u8, *len);
            rig.write(tag as u64, *offset as u64, &data);
            assert_eq!(rig.wait(tag as u64), Ok(()));
            assert_eq!(
                rig.read(100, *offset as u64, *len),
                data,
                "{len} at {offset} in frames of {frame_bytes}"
            );
        }
        let counts = rig.client_counts();
        assert_eq!((counts.retransmissions, counts.asks), (0, 0), "{counts:?}");
    }
}

#[test]
fn every_kind_of_request_is_carried_out() {
    let mut rig = rig();
    rig.write(1, 0, &pattern(1, 16_384));
    assert_eq!(rig.wait(1), Ok(()));
    rig.submit(2, request(Operation::Discard, 4096, 4096));
    rig.submit(3, request(Operation::WriteZeroes { may_unmap: true }, 8192, 512));
    assert_eq!((rig.wait(2), rig.wait(3), rig.flush(4)), (Ok(()), Ok(()), Ok(())));
    let mut expected = pattern(1, 16_384);
    expected[4096..8704].fill(0);
    assert_eq!(rig.read(5, 0, 16_384), expected);
    assert_eq!(rig.disk.log[2].operation, Operation::WriteZeroes { may_unmap: true });
}

#[test]
fn a_request_that_the_device_cannot_do_fails_with_the_reason() {
    let mut rig = rig();
    rig.submit(1, request(Operation::Read, DISK_BYTES as u64, 512));
    rig.submit(2, request(Operation::Write, 1, 512));
    assert_eq!(
        (rig.wait(1), rig.wait(2)),
        (Err(BlockError::OutOfBounds), Err(BlockError::OutOfBounds))
    );
    for (tag, error) in [(3, BlockError::NoSpace), (4, BlockError::EIO), (5, BlockError::ReadOnly)]
    {
        rig.disk.fails = Some(error);
        rig.write(tag, 0, &[1; 512]);
        assert_eq!(rig.wait(tag), Err(error));
    }
}

#[test]
fn a_lost_request_is_sent_again_and_executed_once() {
    let mut rig = rig();
    rig.write(1, 0, &pattern(1, 4096));
    lose(&mut rig, Kind::Request, 1);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!((rig.executed(Operation::Write), rig.client_counts().retransmissions), (1, 1));
    assert_eq!(rig.read(2, 0, 4096), pattern(1, 4096));
}

#[test]
fn a_lost_answer_is_given_again_and_nothing_is_executed_for_it() {
    let mut rig = rig();
    rig.write(1, 0, &pattern(1, 4096));
    rig.step();
    lose(&mut rig, Kind::Answer, 1);
    // The block is written by another one meanwhile.
    rig.disk.bytes[..4096].fill(7);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.executed(Operation::Write), 1);
    assert_eq!(rig.read(2, 0, 4096), vec![7; 4096]);
}

#[test]
fn of_a_large_write_only_the_lost_segments_are_sent_again() {
    let mut rig = rig();
    let data = pattern(3, 65_536);
    rig.write(1, 0, &data);
    let before = rig.client_counts().frames_sent;
    lose(&mut rig, Kind::Request, 2);
    assert_eq!(rig.wait(1), Ok(()));
    // Nine segments, and the two again; no timer ended for them.
    assert_eq!(rig.client_counts().frames_sent - before, 11);
    assert_eq!(rig.client_counts().retransmissions, 0);
    assert_eq!(rig.disk.bytes[..65_536], data);
}

#[test]
fn a_large_write_survives_the_loss_of_its_last_segment() {
    let mut rig = rig();
    rig.write(1, 0, &pattern(3, 65_536));
    rig.poll_client();
    rig.to_host.frames.pop_back();
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.disk.bytes[..65_536], pattern(3, 65_536));
    assert_eq!(rig.client_counts().retransmissions, 1);
}

#[test]
fn of_a_large_read_only_the_lost_blocks_are_sent_again() {
    let mut rig = rig();
    rig.disk.bytes[..65_536].copy_from_slice(&pattern(4, 65_536));
    rig.submit(1, request(Operation::Read, 0, 65_536));
    rig.step();
    let before = rig.host_counts().frames_sent;
    lose(&mut rig, Kind::Answer, 2);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.guest.bytes(1)[..65_536], pattern(4, 65_536));
    assert_eq!(rig.host_counts().frames_sent - before, 11);
    assert_eq!(rig.executed(Operation::Read), 2, "a read is executed again");
}

#[test]
fn a_block_is_never_put_together_from_two_attempts() {
    // Blocks of 4096 bytes in segments of 1024.
    let mut rig = Rig::new(
        ClientOptions { frame_bytes: MIN_FRAME_BYTES, ..options() },
        ServerOptions::default(),
    );
    rig.devices[0].block_bytes = 4096;
    rig.set_devices();
    rig.run_until(Nanos::from_millis(50), |rig| rig.client.is_ready(0));
    rig.run_for(Nanos::from_millis(5));
    rig.submit(1, request(Operation::Read, 0, 8192));
    rig.step();
    // One segment of the second block is lost, and one is late.
    rig.poll_host();
    rig.to_client.frames.remove(4);
    let late = rig.to_client.frames.remove(4).unwrap();
    rig.step();
    rig.disk.bytes[..8192].fill(1);
    rig.run_until(Nanos::from_millis(50), |rig| rig.client_counts().retransmissions > 0);
    rig.client_receives(&late);
    assert_eq!(rig.client_counts().dropped(Reason::Attempt), 1);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.guest.bytes(1)[..4096], [0; 4096], "the first block was whole");
    assert_eq!(rig.guest.bytes(1)[4096..8192], [1; 4096]);
}

#[test]
fn a_slow_store_causes_no_retransmission() {
    let mut rig = rig();
    rig.holds = true;
    rig.write(1, 0, &[1; 512]);
    rig.run_for(Nanos::from_millis(50));
    assert!(rig.completed.is_empty());
    rig.holds = false;
    assert_eq!(rig.wait(1), Ok(()));
    let counts = rig.client_counts();
    assert_eq!((counts.retransmissions, counts.asks), (0, 0));
    assert_eq!(rig.host_counts().acknowledged, 1);
}

#[test]
fn the_answer_of_a_slow_store_may_be_lost_too() {
    let mut rig = rig();
    rig.holds = true;
    rig.write(1, 0, &[1; 512]);
    rig.run_for(Nanos::from_millis(5));
    rig.holds = false;
    rig.execute();
    lose(&mut rig, Kind::Answer, 1);
    assert_eq!(rig.wait(1), Ok(()));
    let counts = rig.client_counts();
    assert_eq!((counts.retransmissions, counts.asks, rig.executed(Operation::Write)), (0, 1, 1));
}

#[test]
fn a_request_waits_for_the_write_that_it_overlaps() {
    let mut rig = rig();
    rig.holds = true;
    rig.write(1, 0, &[1; 4096]);
    rig.write(2, 512, &[2; 512]);
    rig.submit(3, request(Operation::Read, 0, 4096));
    rig.write(4, 4096, &[4; 512]);
    rig.run_for(Nanos::from_millis(1));
    let offsets: Vec<u64> = rig.held.iter().map(|execute| execute.request.offset_bytes).collect();
    assert_eq!(offsets, [0, 4096], "the neighbour does not wait");
    assert_eq!(rig.client_counts().held_back, 2);
    rig.holds = false;
    assert_eq!((rig.wait(1), rig.wait(2), rig.wait(3)), (Ok(()), Ok(()), Ok(())));
    let mut expected = vec![1; 4096];
    expected[512..1024].fill(2);
    assert_eq!(rig.guest.bytes(3)[..4096], expected);
}

#[test]
fn an_answered_write_survives_a_power_cut_of_the_iohost() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.flush(2), Ok(()));
    rig.write(3, 0, &[3; 1024]);
    assert_eq!(rig.wait(3), Ok(()));
    rig.write(4, 512, &[4; 1024]);
    assert_eq!(rig.wait(4), Ok(()));
    // The guest's memory is used again.
    rig.guest.bytes(3).fill(0xaa);
    rig.guest.bytes(4).fill(0xaa);
    let before = rig.disk.log.len();
    rig.restart(true);
    let mut expected = vec![3; 512];
    expected.extend([4; 1024]);
    assert_eq!(rig.read(5, 0, 1536), expected);
    let after: Vec<(u64, u64)> =
        rig.disk.log[before..].iter().map(|r| (r.offset_bytes, r.len_bytes)).collect();
    assert_eq!(
        after,
        [(0, 1024), (512, 1024), (0, 1536)],
        "in the order of their answers, and before the read"
    );
    assert_eq!(rig.client_counts().replayed, 2);
    assert!(rig.events.contains(&Event::Disconnected));
}

#[test]
fn an_unanswered_write_is_sent_to_the_next_incarnation_behind_the_replay() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.holds = true;
    rig.write(2, 0, &[2; 512]);
    rig.submit(3, Request::FLUSH);
    rig.run_for(Nanos::from_millis(2));
    assert_eq!(rig.held.len(), 2);
    rig.restart(true);
    rig.holds = false;
    assert_eq!((rig.wait(2), rig.wait(3)), (Ok(()), Ok(())));
    assert_ne!(rig.disk.safe[..512], [0; 512], "the flush covers the answered write");
    assert_eq!(rig.disk.bytes[..512], [2; 512]);
    // A second power cut loses what the flush did not cover.
    rig.restart(true);
    assert_eq!(rig.read(4, 0, 512), [2; 512]);
}

#[test]
fn nothing_is_replayed_that_a_flush_has_covered() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.holds = true;
    rig.submit(2, Request::FLUSH);
    rig.run_for(Nanos::from_millis(1));
    // Answered behind the flush's begin: not covered by it.
    rig.write(3, 512, &[3; 512]);
    rig.run_for(Nanos::from_millis(1));
    let write = rig.held.pop_back().unwrap();
    rig.finish(write);
    assert_eq!(rig.wait(3), Ok(()));
    rig.holds = false;
    assert_eq!(rig.wait(2), Ok(()));
    rig.restart(false);
    assert_eq!(rig.read(4, 512, 512), [3; 512]);
    assert_eq!(rig.client_counts().replayed, 1);
}

#[test]
fn a_store_without_a_cache_has_nothing_replayed() {
    let mut rig = Rig::new(options(), ServerOptions::default());
    rig.devices[0].flags &= !device_flag::VOLATILE_CACHE;
    rig.set_devices();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.restart(false);
    assert_eq!(rig.read(2, 0, 512), [1; 512]);
    assert_eq!(rig.client_counts().replayed, 0);
}

#[test]
fn a_full_replay_log_is_flushed_and_no_write_waits_for_ever() {
    let mut rig = Rig::connected(
        ClientOptions { replay_bytes: 64 << 10, ..options() },
        ServerOptions::default(),
    );
    for tag in 0..100 {
        rig.write(tag, tag * 4096, &[tag as u8; 4096]);
        assert_eq!(rig.wait(tag), Ok(()));
    }
    let flushes = rig.client_counts().own_flushes;
    assert!((6..=100).contains(&flushes), "{flushes}");
    assert_eq!(rig.executed(Operation::Flush) as u64, flushes);
    rig.disk.flush_fails = true;
    let failed = (100..120).any(|tag| {
        rig.write(tag, 0, &[1; 4096]);
        rig.wait(tag) == Err(BlockError::NoSpace)
    });
    assert!(failed, "an error of the flush is the write's that needs it");
}

#[test]
fn fua_reaches_the_store() {
    let mut rig = rig();
    rig.guest.bytes(1)[..512].fill(9);
    rig.submit(1, Request { fua: true, ..request(Operation::Write, 0, 512) });
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.disk.safe[..512], [9; 512]);
}

#[test]
fn a_write_with_fua_is_not_undone_by_a_replay() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 1024]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.guest.bytes(2)[..512].fill(2);
    rig.submit(2, Request { fua: true, ..request(Operation::Write, 512, 512) });
    assert_eq!(rig.wait(2), Ok(()));
    assert_eq!(rig.client_counts().own_flushes, 1, "the older write is durable first");
    rig.restart(true);
    assert_eq!(rig.read(3, 0, 1024), [[1; 512], [2; 512]].concat());
    assert_eq!(rig.client_counts().replayed, 0);
}

#[test]
fn an_answer_has_zeros_where_the_store_wrote_nothing() {
    let mut rig = rig();
    rig.write(1, 0, &[0x5e; 4096]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.disk.is_null = true;
    assert_eq!(rig.read(2, 0, 4096), [0; 4096], "not the former request's data");
}

#[test]
fn a_failed_read_shows_nothing() {
    let mut rig = rig();
    rig.write(1, 0, &[0x5e; 4096]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.disk.fails = Some(BlockError::EIO);
    rig.submit(2, request(Operation::Read, 0, 4096));
    assert_eq!(rig.wait(2), Err(BlockError::EIO));
    assert_eq!(rig.guest.bytes(2)[..4096], [0xdd; 4096]);
}

#[test]
fn requests_wait_for_an_iohost_that_is_not_there_yet() {
    let mut rig = Rig::new(options(), ServerOptions::default());
    rig.write(1, 0, &[1; 512]);
    for _ in 0..100_000 {
        rig.poll_client();
        rig.now = rig.now.after(Nanos::from_micros(500));
    }
    rig.to_host.frames.clear();
    let begin = rig.now;
    assert_eq!(rig.wait(1), Ok(()));
    assert!(rig.now.since(begin) < Nanos::from_millis(1_000), "{:?}", rig.now.since(begin));
}

#[test]
fn requests_fail_after_the_time_that_is_configured_and_not_before() {
    let after = Nanos::from_millis(2_000);
    let mut rig = Rig::connected(
        ClientOptions { on_disconnect: OnDisconnect::Fail(after), ..options() },
        ServerOptions::default(),
    );
    rig.write(1, 0, &[1; 512]);
    let begin = rig.now;
    while rig.completed.is_empty() {
        rig.poll_client();
        rig.to_host.frames.clear();
        rig.now = rig.now.after(Nanos::from_millis(1));
        while let Some(event) = rig.client.next_event() {
            if let Event::Completed { tag, result } = event {
                rig.completed.push((tag, result));
            }
        }
        assert!(rig.now.since(begin) < Nanos::from_millis(2_100));
    }
    assert_eq!(rig.completed, [(1, Err(BlockError::Io { errno: 110 }))]);
    assert!(rig.now.since(begin) > Nanos::from_millis(1_900));
    assert_eq!(rig.client_counts().timed_out, 1);
    // The IOhost is back.
    rig.completed.clear();
    rig.run_until(Nanos::from_millis(1_000), |rig| rig.client.is_ready(0));
    assert_eq!(rig.read(2, 0, 512), [0; 512]);
}

#[test]
fn a_path_that_stops_to_carry_full_frames_is_noticed_within_a_second() {
    let mut rig = rig();
    let begin = rig.now;
    while rig.client.frame_bytes() > MIN_FRAME_BYTES {
        rig.poll_client();
        rig.poll_host();
        rig.to_host.frames.retain(|frame| frame.len() <= 1_500);
        rig.to_client.frames.retain(|frame| frame.len() <= 1_500);
        rig.step();
        assert!(rig.now.since(begin) < Nanos::from_millis(1_100));
    }
    rig.write(1, 0, &pattern(1, 16_384));
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.read(2, 0, 16_384), pattern(1, 16_384));
    // The path gets as wide as before.
    rig.run_until(Nanos::from_millis(10_000), |rig| rig.client.frame_bytes() > MIN_FRAME_BYTES);
    assert_eq!(rig.client.frame_bytes(), 8_100);
    assert_eq!(rig.read(3, 0, 16_384), pattern(1, 16_384));
    let sessions = rig.client_counts().sessions;
    rig.run_for(Nanos::from_millis(5_000));
    assert_eq!(rig.client_counts().sessions, sessions, "and the session lasts");
}

#[test]
fn a_silent_iohost_is_noticed_within_a_second_without_requests() {
    let mut rig = rig();
    let begin = rig.now;
    while rig.client.is_connected() {
        rig.poll_client();
        rig.now = rig.now.after(Nanos::from_millis(1));
    }
    assert!(rig.now.since(begin) < Nanos::from_millis(1_000));
}

#[test]
fn a_device_grows_comes_and_goes() {
    let mut rig = rig();
    rig.events.clear();
    rig.devices[0].capacity_bytes *= 2;
    rig.devices.push(device(7));
    rig.set_devices();
    assert_eq!(rig.client.open(&name(7)), Some(1));
    rig.run_for(Nanos::from_millis(300));
    assert_eq!(rig.client.device(0).unwrap().capacity_bytes, 2 * DISK_BYTES as u64);
    assert!(rig.client.is_ready(1));
    assert_eq!(rig.client.listed().iter().map(|entry| entry.device).collect::<Vec<_>>(), [0, 7]);
    for event in [Event::Device(0), Event::Device(1), Event::Listed] {
        assert!(rig.events.contains(&event), "{event:?}");
    }
    rig.holds = true;
    rig.submit(1, request(Operation::Read, 0, 512));
    rig.run_for(Nanos::from_millis(1));
    rig.devices.remove(0);
    rig.set_devices();
    assert_eq!(rig.wait(1), Err(BlockError::EIO), "the owner has taken the device away");
}

#[test]
fn another_epoch_of_a_device_is_another_owner() {
    let mut rig = rig();
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    // Another owner has served the store meanwhile, and has lost the write.
    rig.devices[0].epoch += 1;
    rig.disk.bytes.fill(0);
    rig.set_devices();
    assert_eq!(rig.read(2, 0, 512), [1; 512]);
    assert_eq!(rig.client_counts().replayed, 1);
}

#[test]
fn a_slot_limit_holds_and_is_no_increment() {
    let mut rig = rig();
    rig.holds = true;
    rig.host.set_slot_limit(rig.now, 0, 2);
    rig.run_for(Nanos::from_millis(250));
    for tag in 0..8 {
        rig.submit(tag, request(Operation::Read, tag * 512, 512));
    }
    rig.run_for(Nanos::from_millis(5));
    assert_eq!(rig.held.len(), 2);
    rig.host.set_slot_limit(rig.now, 0, 5);
    rig.run_for(Nanos::from_millis(250));
    assert_eq!(rig.held.len(), 5);
    rig.holds = false;
    for tag in 0..8 {
        assert_eq!(rig.wait(tag), Ok(()));
    }
}

#[test]
fn a_drained_client_waits_and_what_the_store_has_is_answered() {
    let mut rig = rig();
    rig.holds = true;
    (0..4).for_each(|tag| rig.submit(tag, request(Operation::Read, tag * 512, 512)));
    rig.run_for(Nanos::from_millis(5));
    assert_eq!(rig.held.len(), 4);
    // The client does not know yet, and sends one more.
    rig.host.set_slot_limit(rig.now, 0, 0);
    rig.write(4, 0, &[7; 512]);
    rig.run_for(Nanos::from_millis(20));
    assert_eq!((rig.client.slot_limit(), rig.held.len()), (0, 4));
    rig.submit(5, request(Operation::Read, 0, 512));
    rig.holds = false;
    (0..4).for_each(|tag| assert_eq!(rig.wait(tag), Ok(())));
    rig.run_for(Nanos::from_millis(5_000));
    assert!(rig.completed.is_empty(), "{:?}", rig.completed);
    assert_eq!((rig.executed(Operation::Write), rig.executed(Operation::Read)), (0, 4));
    assert!(rig.host_counts().dropped_slot >= 1);
    rig.host.set_slot_limit(rig.now, 0, 8);
    assert_eq!((rig.wait(4), rig.wait(5)), (Ok(()), Ok(())));
    assert_eq!(rig.executed(Operation::Write), 1);
}

#[test]
fn a_client_asks_for_no_more_frames_than_its_ring_holds() {
    let mut rig =
        Rig::connected(ClientOptions { receive_frames: 20, ..options() }, ServerOptions::default());
    rig.holds = true;
    for tag in 0..8 {
        rig.submit(tag, request(Operation::Read, 0, 65_536));
    }
    rig.run_for(Nanos::from_millis(5));
    assert_eq!(rig.held.len(), 2, "nine frames each");
    rig.holds = false;
    for tag in 0..8 {
        assert_eq!(rig.wait(tag), Ok(()));
    }
}

#[test]
fn a_link_without_room_delays_and_loses_nothing() {
    let mut rig = rig();
    for round in 0..40 {
        rig.to_host.refuses = round % 7;
        rig.to_client.refuses = round % 5;
        let data = pattern(round as u8, 32_768);
        rig.write(1, 0, &data);
        assert_eq!(rig.wait(1), Ok(()));
        assert_eq!(rig.read(2, 0, 32_768), data);
    }
}

#[test]
fn an_old_sessions_write_is_over_before_the_new_session_begins() {
    let mut rig = rig();
    rig.holds = true;
    rig.write(1, 0, &[1; 512]);
    rig.run_for(Nanos::from_millis(2));
    let stuck = rig.held.pop_front().unwrap();
    // The path is cut for so long that the client looks for a new session.
    let end = rig.now.after(Nanos::from_millis(900));
    while rig.now < end {
        rig.poll_client();
        rig.to_host.frames.clear();
        rig.now = rig.now.after(Nanos::from_millis(1));
    }
    assert!(!rig.client.is_connected());
    rig.holds = false;
    rig.run_for(Nanos::from_millis(500));
    assert!(
        !rig.client.is_connected() && rig.completed.is_empty(),
        "the store still has the write"
    );
    rig.finish(stuck);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.executed(Operation::Write), 2, "by the new session, too");
}

#[test]
fn a_client_that_starts_again_takes_its_place_over() {
    let mut rig = rig();
    let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
    rig.client.end(rig.now, &mut port);
    rig.step();
    let old = rig.host.session(0).unwrap().session();
    assert_eq!(old, 0, "ended in order");
    let next = Rig::new(ClientOptions { life: 2, ..options() }, ServerOptions::default());
    rig.client = next.client;
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    assert_ne!(rig.host.session(0).unwrap().session(), 0);
    assert!(rig.client.round_trip() >= HOP && rig.client.round_trip() < Nanos::from_millis(1));
}

#[test]
fn a_slot_whose_write_was_given_up_half_way_is_used_again() {
    let options = ClientOptions { slots: 1, ..ClientOptions::default() };
    let mut rig = Rig::connected(options, ServerOptions::default());
    rig.devices.push(device(1));
    rig.set_devices();
    assert_eq!(rig.client.open(&name(1)), Some(1));
    rig.run_until(Nanos::from_millis(50), |rig| rig.client.is_ready(1));
    // The first segment of a write arrives, and then its device is closed.
    rig.write(1, 0, &pattern(1, 65_536));
    rig.poll_client();
    let first = rig.to_host.frames.pop_front().unwrap();
    rig.to_host.frames.clear();
    rig.host_receives(Peer(9), &first);
    rig.client.close(0);
    assert_eq!(rig.wait(1), Err(BlockError::EIO));
    rig.client.submit(2, 1, request(Operation::Read, 0, 512)).unwrap();
    assert_eq!(rig.wait(2), Ok(()));
    // Late segments of the write belong to no request.
    rig.host_receives(Peer(9), &first);
    assert_eq!(rig.executed(Operation::Write), 0);
}

#[test]
fn each_frame_to_a_client_names_its_link_queue() {
    let queue = 1;
    let mut rig = Rig::new(ClientOptions { queue, ..options() }, ServerOptions::default());
    let serve = |rig: &mut Rig| {
        let (now, devices) = (rig.now, rig.devices.clone());
        rig.host.set_devices(now, queue.into(), &devices);
    };
    serve(&mut rig);
    let mut kinds = Vec::new();
    let mut run = |rig: &mut Rig, until: &dyn Fn(&Rig) -> bool| {
        for _ in 0..100_000 {
            rig.step();
            rig.poll_client();
            rig.poll_host();
            for frame in &rig.to_client.frames {
                assert_eq!(frame[27], queue, "a frame of kind {}", frame[1]);
                kinds.push(Kind::from_code(frame[1]));
            }
            if until(rig) {
                return;
            }
        }
        panic!("it does not happen");
    };
    run(&mut rig, &|rig| rig.client.is_ready(0));
    // Another IOhost, which does not know the session, sends an ENDING; a client that it does not
    // know gets one as well.
    rig.restart(false);
    serve(&mut rig);
    run(&mut rig, &|rig| rig.events.contains(&Event::Disconnected) && rig.client.is_ready(0));
    rig.host.remove(queue.into());
    run(&mut rig, &|rig| rig.client.refusal().is_some());
    for kind in [Kind::Challenge, Kind::Welcome, Kind::Attached, Kind::Pong, Kind::Ending] {
        assert!(kinds.contains(&kind), "{kind:?}");
    }
}
