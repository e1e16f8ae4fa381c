//! Queues are left by one process, and gone on with by the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_nvme::{Done, QueueHost, Status};
use sidecore_reactor::IdleMode;
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use crate::rig::{
    BLOCK_BYTES, DATA, Options, Rig, interrupt, map_part, op, or, pattern, ram, status,
};

fn slow() -> Options {
    Options {
        store: Arc::new(DelayStore::new(ram(false), Nanos::from_micros(100))),
        ..Options::default()
    }
}

#[test]
fn what_was_taken_is_completed_first_and_nothing_else_is_taken() {
    let mut rig = Rig::with(slow());
    let commands: Vec<_> = (0..7).map(|block| rig.command(op::READ, block, 1)).collect();
    for command in &commands[..4] {
        rig.push(1, command);
    }
    rig.ring(1);
    rig.turn();
    let left = Arc::new(AtomicBool::new(false));
    let leave = Arc::clone(&left);
    rig.set.hand_over(Box::new(move |_| leave.store(true, Ordering::Relaxed)));
    for command in &commands[4..] {
        rig.push(1, command);
    }
    rig.ring(1);
    rig.turn();
    assert!(!left.load(Ordering::Relaxed), "four commands are at the store");
    rig.until("the queues are left", |_| left.load(Ordering::Relaxed));
    assert_eq!(std::iter::from_fn(|| rig.take(1)).count(), 4);
    assert_eq!((rig.queues(), rig.set.running_count()), (0, 0));
}

/// Many processes, one after the other, with queues that wrap round in between.
#[test]
fn every_command_is_carried_out_once() {
    for idle in [IdleMode::Poll, IdleMode::Interrupt] {
        let mut rig = Rig::bare(Options { idle, sidecores: 2, ..slow() });
        for id in [1, 2] {
            rig.add_completion(id, 5, None);
        }
        // Two that complete into the same queue.
        for (id, completion) in [(1, 1), (2, 2), (3, 2)] {
            rig.add_submission(id, completion, 7);
        }
        let mut written = 0_u64;
        for round in 0..60_u64 {
            let mut out = Vec::new();
            for id in [1, 2, 3] {
                for _ in 0..round % 4 {
                    let at = DATA + written * BLOCK_BYTES;
                    rig.write(at, &pattern(written, BLOCK_BYTES));
                    let command = rig.command_at(op::WRITE, written, 1, at, 0);
                    rig.push(id, &command);
                    out.push(command.id());
                    written += 1;
                }
                rig.ring(id);
                rig.set.kick(id);
            }
            if round % 2 == 0 {
                rig.turn();
            }
            let left = rig.leave().unwrap();
            rig.take_over(&left).unwrap();
            rig.until("all are completed", |rig| {
                for queue in [1, 2] {
                    while let Some(completion) = rig.take(queue) {
                        assert_eq!(status(&completion), Status::SUCCESS);
                        let at = out
                            .iter()
                            .position(|id| *id == completion.command_id)
                            .expect("completed once");
                        out.swap_remove(at);
                        rig.set.kick(queue);
                    }
                }
                out.is_empty()
            });
        }
        // The first queue has the others' blocks as well.
        for block in 0..written {
            let read = rig.command(op::READ, block, 1);
            rig.submit(1, &read);
            rig.set.kick(1);
            assert_eq!(status(&rig.wait()), Status::SUCCESS);
            assert!(rig.read(DATA, BLOCK_BYTES) == pattern(block, BLOCK_BYTES), "block {block}");
        }
    }
}

/// Completions without an interrupt so far are signalled by the next process, once there is an
/// event to signal.
#[test]
fn interrupts_that_were_held_back_are_raised() {
    for masked in [false, true] {
        let mut rig = Rig::bare(Options::default());
        let (event, theirs) = interrupt();
        // Either coalesced for longer than the first process lives, or masked.
        rig.set.set_coalescing(100, 1_000_000);
        if !masked {
            rig.set.set_vector(2, Some(theirs.try_clone().unwrap()));
        }
        rig.add_completion(1, 64, Some(2));
        rig.add_submission(1, 1, 64);
        let command = rig.command(op::READ, 0, 1);
        rig.submit(1, &command);
        rig.turn();
        let left = rig.leave().unwrap();
        assert_eq!(event.drain(), 0);
        rig.take_over(&left).unwrap();
        rig.turn();
        assert_eq!(event.drain(), 0, "nothing is to be signalled yet");
        rig.set.set_vector(2, Some(theirs));
        rig.turn();
        assert_eq!(event.drain(), 1);
        assert!(rig.take(1).is_some());
    }
}

/// Of two commands that were to be fused the second was another one, and was taken with the first.
#[test]
fn a_command_that_was_taken_too_early_is_not_lost() {
    let mut rig = Rig::bare(Options::default());
    // Room for one completion.
    rig.add_completion(1, 2, None);
    rig.add_submission(1, 1, 8);
    let first = or(rig.command(op::COMPARE, 0, 1), 0, 1 << 8);
    let other = rig.command(op::READ, 0, 1);
    rig.push(1, &first);
    rig.submit(1, &other);
    rig.turn();
    let left = rig.leave().unwrap();
    assert!(left.completion_queues[0].submission_queues[0].ahead.is_some());
    rig.take_over(&left).unwrap();
    let completion = rig.wait();
    assert_eq!((completion.command_id, status(&completion)), (first.id(), Status::MISSING_FUSED));
    let completion = rig.wait();
    assert_eq!((completion.command_id, status(&completion)), (other.id(), Status::SUCCESS));
}

#[test]
fn queues_wait_for_memory_that_is_not_there() {
    let mut rig = Rig::new();
    let whole = rig.memory.clone();
    let left = rig.leave().unwrap();
    // The client was about to map the rest.
    rig.memory = map_part(&rig.file, 0x1_0000);
    rig.take_over(&left).unwrap();
    rig.memory = whole.clone();
    let command = rig.command(op::READ, 0, 1);
    rig.submit(1, &command);
    for _ in 0..10 {
        rig.turn();
    }
    assert_eq!(rig.take(1), None);
    rig.set.set_memory(&whole, Done::ignored());
    assert_eq!(rig.wait().command_id, command.id());
}

#[test]
fn what_is_no_queue_is_an_error() {
    let mut rig = Rig::new();
    let left = rig.leave().unwrap();
    let wrong: [&dyn Fn(&mut sidecore_nvme::CompletionQueueState); 6] = [
        &|queue| queue.id = 0,
        &|queue| queue.entries = 1,
        &|queue| queue.address += 4,
        &|queue| queue.position.tail = queue.entries,
        &|queue| queue.submission_queues[0].entries = u32::MAX,
        &|queue| queue.submission_queues[0].head = u16::MAX,
    ];
    for wrong in wrong {
        let mut damaged = left.clone();
        wrong(&mut damaged.completion_queues[0]);
        assert!(rig.take_over(&damaged).is_err(), "{damaged:?}");
    }
    rig.take_over(&left).unwrap();
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
}

/// The client resets the controller meanwhile: the queues are gone.
#[test]
fn queues_that_end_are_not_left() {
    let mut rig = Rig::with(slow());
    let command = rig.command(op::READ, 0, 1);
    rig.submit(1, &command);
    rig.turn();
    rig.set.stop_all(Done::ignored());
    assert_eq!(rig.leave().unwrap().completion_queues, []);
    assert_eq!(rig.queues(), 0, "and what they had at the store has ended");
}
