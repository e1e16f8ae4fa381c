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
