//! Compare and Write as one.

use std::sync::Arc;

use sidecore_nvme::io::COMPARE_AND_WRITE_BYTES;
use sidecore_nvme::{Command, QueueHost, Status};
use sidecore_reactor::IdleMode;
use sidecore_stage_delay::DelayStore;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::Nanos;

use crate::rig::{
    BLOCK_BYTES, DATA, LISTS, Options, Rig, flag, is_set, op, or, pattern, ram, status,
};

const FIRST: u32 = 1 << 8;
const SECOND: u32 = 2 << 8;
const NEW: u64 = DATA + 0x10_0000;

/// A compare with the data at DATA and a write of the data at NEW.
fn pair(rig: &mut Rig, block: u64, blocks: u64) -> [Command; 2] {
    let compare = or(rig.command(op::COMPARE, block, blocks), 0, FIRST);
    let write = or(rig.command_at(op::WRITE, block, blocks, NEW, LISTS + 0x1_0000), 0, SECOND);
    [compare, write]
}

/// The statuses of a pair, in the order of their completions, which is the order of the commands.
fn run(rig: &mut Rig, pair: &[Command; 2]) -> [Status; 2] {
    rig.push(1, &pair[0]);
    rig.submit(1, &pair[1]);
    pair.map(|command| {
        let completion = rig.wait();
        assert_eq!(completion.command_id, command.id());
        status(&completion)
    })
}

fn blocks_at(rig: &mut Rig, block: u64, blocks: u64) -> Vec<u8> {
    let read = rig.command_at(op::READ, block, blocks, NEW + 0x10_0000, LISTS);
    assert_eq!(rig.run(read), Status::SUCCESS);
    rig.read(NEW + 0x10_0000, blocks * BLOCK_BYTES)
}

#[test]
fn both_or_neither() {
    let mut rig = Rig::new();
    for blocks in [1, 8, COMPARE_AND_WRITE_BYTES / BLOCK_BYTES] {
        let bytes = pattern(blocks, blocks * BLOCK_BYTES);
        rig.write(DATA, &vec![0; bytes.len()]);
        rig.write(NEW, &bytes);
        let both = pair(&mut rig, 1000, blocks);
        assert_eq!(run(&mut rig, &both), [Status::SUCCESS; 2]);
        assert!(blocks_at(&mut rig, 1000, blocks) == bytes);
        // Not what is there any more.
        let both = pair(&mut rig, 1000, blocks);
        assert_eq!(run(&mut rig, &both), [Status::COMPARE_FAILURE, Status::FAILED_FUSED]);
        rig.write(DATA, &bytes);
        rig.write(NEW, &vec![0; bytes.len()]);
        let both = pair(&mut rig, 1000, blocks);
        assert_eq!(run(&mut rig, &both), [Status::SUCCESS; 2]);
    }
    let stats = rig.set.stats(1).unwrap();
    assert_eq!((stats.compares.get(), stats.writes.get()), (9, 6));
}

#[test]
fn pairs_that_are_none() {
    let mut rig = Rig::new();
    let invalid = [Status::INVALID_FIELD; 2];
    let [compare, write] = pair(&mut rig, 5, 2);
    for other in [
        write.with_dword(10, 6),
        write.with_dword(12, 0),
        write.with_dword(1, 2),
        or(write, 0, op::READ.into()),
    ] {
        assert_eq!(run(&mut rig, &[compare, other]), invalid);
    }
    let read = or(rig.command(op::READ, 5, 2), 0, FIRST);
    assert_eq!(run(&mut rig, &[read, write]), invalid);
    let far = pair(&mut rig, 1 << 40, 1);
    assert_eq!(run(&mut rig, &far), [Status::LBA_OUT_OF_RANGE, Status::FAILED_FUSED]);
    let large = pair(&mut rig, 0, COMPARE_AND_WRITE_BYTES / BLOCK_BYTES + 1);
    assert_eq!(run(&mut rig, &large), [Status::ATOMIC_WRITE_UNIT_EXCEEDED, Status::FAILED_FUSED]);
    let nowhere = [compare, write.with_prps(!0xFFF, 0)];
    assert_eq!(run(&mut rig, &nowhere), [Status::FAILED_FUSED, Status::DATA_TRANSFER_ERROR]);
    let nowhere = [compare.with_prps(!0xFFF, 0), write];
    assert_eq!(run(&mut rig, &nowhere), [Status::DATA_TRANSFER_ERROR, Status::FAILED_FUSED]);
    // And it works.
    assert_eq!(run(&mut rig, &[compare, write]), [Status::SUCCESS; 2]);
}

#[test]
fn halves_of_pairs() {
    let mut rig = Rig::new();
    let [compare, write] = pair(&mut rig, 5, 2);
    assert_eq!(rig.run(compare), Status::MISSING_FUSED);
    assert_eq!(rig.run(write), Status::MISSING_FUSED);
    assert_eq!(rig.run(or(compare, 0, 3 << 8)), Status::INVALID_FIELD);
    // Something between them; and first after first after first.
    let read = rig.command(op::READ, 0, 1);
    for command in [compare, read, write, compare, compare, compare, write] {
        rig.push(1, &command);
    }
    rig.ring(1);
    let (missing, success) = (Status::MISSING_FUSED, Status::SUCCESS);
    let mut statuses: Vec<_> =
        (0..7).map(|_| rig.wait()).map(|done| (done.command_id, status(&done))).collect();
    statuses.sort_by_key(|(id, status)| (*id, status.code()));
    let mut expected = [
        (compare.id(), missing),
        (read.id(), success),
        (write.id(), missing),
        (compare.id(), missing),
        (compare.id(), missing),
        (compare.id(), success),
        (write.id(), success),
    ];
    expected.sort_by_key(|(id, status)| (*id, status.code()));
    assert_eq!(statuses, expected);
}

#[test]
fn a_store_that_fails_one_of_them() {
    for (affected, expected) in [
        (Affected::Reads, [Status::UNRECOVERED_READ_ERROR, Status::FAILED_FUSED]),
        (Affected::Writes, [Status::SUCCESS, Status::WRITE_FAULT]),
        (Affected::Flushes, [Status::SUCCESS, Status::WRITE_FAULT]),
    ] {
        let rule = FaultRule { affected, when: When::EveryNth(1), fault: Fault::Eio };
        let store = FaultStore::new(ram(true), FaultPlan { seed: 1, rules: vec![rule] });
        let mut rig = Rig::with(Options { store: Arc::new(store), ..Options::default() });
        let [compare, write] = pair(&mut rig, 5, 2);
        assert_eq!(run(&mut rig, &[compare, or(write, 12, 1 << 30)]), expected);
    }
}

#[test]
fn a_completion_queue_with_room_for_one() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(1, 2, None);
    rig.add_submission(1, 1, 16);
    let both = pair(&mut rig, 5, 2);
    assert_eq!(run(&mut rig, &both), [Status::SUCCESS; 2]);
    let read = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(read), Status::SUCCESS);
}

/// Two sidecores with a queue each, number 1 and number 2.
fn two(idle: IdleMode, delay: Nanos) -> Rig {
    let store = Arc::new(DelayStore::new(ram(false), delay));
    let mut rig = Rig::with(Options { store, idle, sidecores: 2, ..Options::default() });
    rig.add_completion(2, 64, None);
    rig.add_submission(2, 2, 64);
    rig
}

#[test]
fn nothing_of_another_sidecore_comes_between() {
    let mut rig = two(IdleMode::Poll, Nanos::from_micros(50));
    // The other one has something at the store.
    let before = rig.command(op::WRITE, 0, 1);
    rig.submit(2, &before);
    rig.turn_one(1);
    let both = pair(&mut rig, 0, 1);
    rig.push(1, &both[0]);
    rig.submit(1, &both[1]);
    let after = rig.command(op::WRITE, 0, 1);
    rig.submit(2, &after);
    // As long as the other sidecore does not turn, the pair waits for it.
    for _ in 0..1_000 {
        rig.now += 1_000;
        rig.turn_one(0);
        assert_eq!(rig.take(1), None);
    }
    assert_eq!(rig.set.stats(1).unwrap().bytes_read.get(), 0, "the compare has begun");
    // It turns: what it had is finished, and what came behind the pair is not taken until that is
    // over.
    let mut order = Vec::new();
    rig.until("all are completed", |rig| {
        order.extend(rig.take(1).map(|done| done.command_id));
        order.extend(rig.take(2).map(|done| done.command_id));
        order.len() == 4
    });
    assert_eq!(order, [before.id(), both[0].id(), both[1].id(), after.id()]);
}

#[test]
fn a_sidecore_that_sleeps_delays_no_queue() {
    let mut rig = two(IdleMode::Interrupt, Nanos::ZERO);
    for _ in 0..10 {
        rig.turn();
    }
    assert!(rig.slept > 0);
    let both = pair(&mut rig, 0, 1);
    rig.push(1, &both[0]);
    rig.submit(1, &both[1]);
    rig.set.kick(1);
    let mut done = 0;
    for _ in 0..100 {
        rig.now += 1_000;
        rig.turn_one(0);
        done += usize::from(rig.take(1).is_some());
    }
    assert_eq!(done, 2, "it waited for a sidecore that sleeps");
}

#[test]
fn one_that_wakes_while_the_fence_is_closed_waits() {
    let mut rig = two(IdleMode::Interrupt, Nanos::from_micros(50));
    for _ in 0..10 {
        rig.turn();
    }
    let both = pair(&mut rig, 0, 1);
    rig.push(1, &both[0]);
    rig.submit(1, &both[1]);
    rig.set.kick(1);
    for _ in 0..3 {
        rig.now += 1_000;
        rig.turn_one(0);
    }
    assert_eq!(rig.take(1), None);
    let write = rig.command(op::WRITE, 0, 1);
    rig.submit(2, &write);
    rig.set.kick(2);
    let mut order = Vec::new();
    rig.until("all are completed", |rig| {
        order.extend(rig.take(1).map(|done| done.command_id));
        order.extend(rig.take(2).map(|done| done.command_id));
        order.len() == 3
    });
    assert_eq!(order, [both[0].id(), both[1].id(), write.id()]);
}

#[test]
fn two_that_want_to_be_alone_are_so_in_turn() {
    let mut rig = two(IdleMode::Poll, Nanos::from_micros(5));
    for queue in [1, 2] {
        for _ in 0..10 {
            for command in pair(&mut rig, 0, 1) {
                rig.push(queue, &command);
            }
        }
        rig.ring(queue);
    }
    let mut done = 0;
    rig.until("all are completed", |rig| {
        for queue in [1, 2] {
            if let Some(completion) = rig.take(queue) {
                assert_eq!(Status::from_field(completion.status), Status::SUCCESS);
                done += 1;
            }
        }
        done == 40
    });
}

#[test]
fn a_reset_opens_the_fence() {
    let mut rig = two(IdleMode::Poll, Nanos::from_micros(50));
    let before = rig.command(op::WRITE, 0, 1);
    rig.submit(2, &before);
    rig.turn_one(1);
    for command in pair(&mut rig, 0, 1) {
        rig.push(1, &command);
    }
    rig.ring(1);
    rig.turn_one(0);
    let (done, gone) = flag();
    rig.set.stop_completion_queue(1, done);
    rig.until("it is gone", |_| is_set(&gone));
    let mut taken = 0;
    let after = rig.command(op::WRITE, 0, 1);
    rig.submit(2, &after);
    rig.until("the other one goes on", |rig| {
        taken += usize::from(rig.take(2).is_some());
        taken == 2
    });
}
