//! Answered writes that must not be lost, nor be overwritten by older ones.

mod common;

use common::{Rig, name, pattern, request};
use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;
use sidecore_vrio::wire::device_flag;
use sidecore_vrio::{ClientOptions, OnDisconnect, Peer, ServerOptions};

fn rig(replay_bytes: usize) -> Rig {
    let on_disconnect = OnDisconnect::Stall;
    let options = ClientOptions { on_disconnect, replay_bytes, ..ClientOptions::default() };
    Rig::connected(options, ServerOptions::default())
}

/// A device that loses its volatile cache with a restart of the IOhost, as when its `write_cache`
/// is turned off: later writes are durable and are not kept, and the kept ones are older.
#[test]
fn a_kept_write_does_not_come_back_over_a_newer_one_that_is_not_kept() {
    for operation in [Operation::Write, Operation::Discard] {
        let mut rig = rig(1 << 20);
        rig.write(1, 0, &pattern(1, 4096));
        assert_eq!(rig.wait(1), Ok(()));
        rig.devices[0].flags &= !device_flag::VOLATILE_CACHE;
        rig.restart(false);
        rig.run_for(Nanos::from_millis(3_000));
        assert!(rig.client.is_ready(0) && rig.client_counts().replayed == 1);
        rig.guest.bytes(2)[..4096].copy_from_slice(&pattern(2, 4096));
        rig.submit(2, request(operation, 0, 4096));
        assert_eq!(rig.wait(2), Ok(()));
        rig.restart(false);
        rig.run_for(Nanos::from_millis(3_000));
        let newer = if operation == Operation::Write { pattern(2, 4096) } else { vec![0; 4096] };
        assert!(rig.read(9, 0, 4096) == newer, "{operation:?}");
    }
}

#[test]
fn the_loss_of_an_answered_write_is_told_by_a_flush_whatever_writes_fail_before() {
    let mut rig = rig(64 << 10);
    for tag in 0..16 {
        rig.write(tag, tag * 4096, &pattern(tag as u8, 4096));
        assert_eq!(rig.wait(tag), Ok(()));
    }
    rig.restart(true);
    rig.disk.fails = Some(BlockError::EIO);
    rig.run_for(Nanos::from_millis(3_000));
    assert!(rig.client.is_ready(0) && rig.client_counts().replayed == 16);
    rig.disk.fails = None;
    // The log is full.
    rig.write(20, 1 << 18, &pattern(20, 4096));
    assert_eq!(rig.wait(20), Err(BlockError::EIO));
    assert_eq!(rig.flush(21), Err(BlockError::EIO), "answered writes are lost");
    assert_eq!(rig.flush(22), Ok(()));
    rig.write(23, 1 << 18, &pattern(20, 4096));
    assert_eq!(rig.wait(23), Ok(()));
}

/// A write that its client has given up by closing the device, and that the network or the store
/// still has when the device is open again.
#[test]
fn a_write_that_was_given_up_is_not_executed_after_later_ones() {
    for at_store in [false, true] {
        let mut rig = rig(1 << 20);
        rig.holds = true;
        rig.write(1, 0, &pattern(1, 4096));
        rig.poll_client();
        let late = rig.to_host.frames.pop_front().unwrap();
        if at_store {
            rig.host_receives(Peer(9), &late);
            rig.execute();
        }
        rig.client.close(0);
        assert_eq!(rig.client.open(&name(0)), Some(0));
        let held = rig.held.pop_front();
        assert_eq!(held.is_some(), at_store);
        rig.holds = false;
        rig.write(2, 0, &pattern(2, 4096));
        let mut held = held;
        let end = rig.now.after(Nanos::from_millis(3_000));
        while !rig.completed.contains(&(2, Ok(()))) {
            rig.step();
            // The store ends the old write when it can delay no longer.
            if rig.now >= end
                && let Some(old) = held.take()
            {
                rig.finish(old);
            }
            assert!(rig.now < end.after(Nanos::from_millis(3_000)));
        }
        rig.host_receives(Peer(9), &late);
        rig.execute();
        held.into_iter().for_each(|old| rig.finish(old));
        assert!(rig.read(3, 0, 4096) == pattern(2, 4096), "at the store: {at_store}");
    }
}

/// The writes of a user that is gone: a copy that is not flushed, one in a slot, and one that has
/// no slot because the IOhost is away.
#[test]
fn nothing_of_a_user_that_is_gone_reaches_another_incarnation() {
    for next_begins in [false, true] {
        let mut rig = rig(1 << 20);
        rig.write(1, 0, &pattern(1, 4096));
        assert_eq!(rig.wait(1), Ok(()));
        // The IOhost has lost what it answered, and another one is not there yet.
        rig.disk.bytes.fill(9);
        rig.holds = true;
        rig.write(2, 8192, &pattern(2, 4096));
        rig.submit(3, request(Operation::Read, 16_384, 512));
        rig.poll_client();
        rig.to_host.frames.clear();
        rig.client.leave(0);
        assert_eq!(rig.client.left_writes(0), 1);
        rig.write(4, 12_288, &pattern(4, 4096));
        rig.restart(false);
        rig.disk.log.clear();
        rig.holds = false;
        assert_eq!(rig.wait(2), Err(BlockError::EIO));
        assert_eq!(rig.wait(4), Err(BlockError::EIO));
        assert!(!rig.client.is_connected());
        if next_begins {
            rig.client.claim(0);
            assert_eq!(rig.client.left_writes(0), 1, "they are still the former user's");
        }
        assert_eq!(rig.wait(3), Ok(()), "a read harms no user");
        rig.run_for(Nanos::from_millis(3_000));
        assert!(rig.client.is_ready(0) && rig.client.kept_writes(0) == 0);
        assert_eq!((rig.client_counts().replayed, rig.client_counts().abandoned), (0, 1));
        assert_eq!(rig.executed(Operation::Write), 0);
        assert_eq!(rig.client.left_writes(0), 1, "they may be missing");
        // The next user has the device, and its writes are kept as ever.
        rig.client.claim(0);
        assert_eq!(rig.client.left_writes(0), 0);
        rig.write(5, 0, &pattern(5, 4096));
        assert_eq!(rig.wait(5), Ok(()));
        rig.restart(true);
        rig.run_for(Nanos::from_millis(3_000));
        assert!(rig.read(6, 0, 4096) == pattern(5, 4096));
    }
}

#[test]
fn the_same_incarnation_flushes_the_writes_of_a_user_that_is_gone() {
    let mut rig = rig(1 << 20);
    rig.write(1, 0, &pattern(1, 4096));
    assert_eq!(rig.wait(1), Ok(()));
    // One more is answered after that.
    rig.write(2, 8192, &pattern(2, 4096));
    rig.poll_client();
    rig.client.leave(0);
    assert_eq!(rig.wait(2), Ok(()));
    rig.run_for(Nanos::from_millis(5));
    assert!(rig.disk.safe[..4096] == pattern(1, 4096)[..]);
    assert!(rig.disk.safe[8192..12_288] == pattern(2, 4096)[..]);
    assert_eq!((rig.client.left_writes(0), rig.client_counts().abandoned), (0, 0));
    rig.write(3, 0, &pattern(3, 4096));
    assert_eq!(rig.wait(3), Err(BlockError::EIO), "no queue of a user is open");
}

/// Writes of a user that is gone are not told to the next one, whether a flush of them fails or
/// their replay is interrupted.
#[test]
fn the_next_user_is_not_told_of_the_errors_of_the_last_one() {
    for replays in [false, true] {
        let mut rig = rig(1 << 20);
        for tag in 0..40 {
            rig.write(tag, tag * 4096, &pattern(tag as u8, 4096));
            assert_eq!(rig.wait(tag), Ok(()));
        }
        if replays {
            rig.restart(true);
            rig.holds = true;
            rig.run_until(Nanos::from_millis(3_000), |rig| !rig.held.is_empty());
            assert!(!rig.client.is_ready(0));
        } else {
            rig.disk.flush_fails = true;
        }
        rig.client.leave(0);
        rig.holds = false;
        rig.execute();
        rig.run_for(Nanos::from_millis(3_000));
        let abandoned = rig.client_counts().abandoned;
        assert!(if replays { (1..40).contains(&abandoned) } else { abandoned == 40 });
        assert_eq!(rig.client.left_writes(0), abandoned);
        assert!(rig.client.is_ready(0) && rig.client.kept_writes(0) == 0);
        rig.disk.flush_fails = false;
        rig.client.claim(0);
        assert_eq!(rig.flush(100), Ok(()));
    }
}

/// The same, if the next one begins while the flush is unanswered.
#[test]
fn the_next_user_is_not_told_of_a_flush_that_fails_after_its_begin() {
    let mut rig = rig(1 << 20);
    rig.write(1, 0, &pattern(1, 4096));
    assert_eq!(rig.wait(1), Ok(()));
    rig.disk.flush_fails = true;
    rig.holds = true;
    rig.client.leave(0);
    rig.run_until(Nanos::from_millis(5), |rig| !rig.held.is_empty());
    rig.client.claim(0);
    // It waits for the flush, and for the device to be attached again.
    rig.write(2, 0, &pattern(2, 4096));
    rig.run_for(Nanos::from_millis(5));
    assert_eq!(rig.held.len(), 1);
    rig.holds = false;
    rig.execute();
    assert_eq!(rig.wait(2), Ok(()));
    assert_eq!((rig.client_counts().abandoned, rig.client.left_writes(0)), (1, 1));
    rig.disk.flush_fails = false;
    assert_eq!(rig.flush(3), Ok(()));
    assert!(rig.disk.safe[..4096] == pattern(2, 4096)[..]);
}

/// A replay is unanswered when a user begins: the device is attached again all the same, after it.
#[test]
fn a_user_that_begins_during_a_replay_is_the_newest_one() {
    let mut rig = rig(1 << 20);
    rig.write(1, 0, &pattern(1, 4096));
    assert_eq!(rig.wait(1), Ok(()));
    rig.restart(true);
    rig.holds = true;
    rig.run_until(Nanos::from_millis(3_000), |rig| !rig.held.is_empty());
    let before = rig.held[0].attachment;
    rig.client.claim(0);
    rig.submit(2, request(Operation::Read, 0, 4096));
    // The replay is first, then a flush, and the user's request last.
    for operation in [Operation::Write, Operation::Flush, Operation::Read] {
        rig.run_for(Nanos::from_millis(5));
        assert_eq!(rig.held.len(), 1);
        let execute = rig.held.pop_front().unwrap();
        assert_eq!(execute.request.operation, operation);
        assert_eq!(execute.attachment > before, operation == Operation::Read);
        rig.finish(execute);
    }
    assert_eq!(rig.wait(2), Ok(()));
    assert!(rig.guest.bytes(2)[..4096] == pattern(1, 4096)[..]);
    assert_eq!(rig.client.kept_writes(0), 0);
}
