//! Rings: wrap-around, full queues, many submission queues, and queues that go.

use std::sync::Arc;

use sidecore_block::{Geometry, NullStore};
use sidecore_nvme::{QueueHost, StartError, Status};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use crate::rig::{DISK_BYTES, Options, Rig, flag, is_set, op, ram};

#[test]
fn round_and_round() {
    let mut rig = Rig::bare(Options::default());
    // Sizes that divide nothing.
    rig.add_completion(1, 7, None);
    rig.add_submission(1, 1, 5);
    let mut heads = Vec::new();
    for round in 0..100_u16 {
        for _ in 0..1 + round % 3 {
            let command = rig.command(op::READ, u64::from(round), 1);
            rig.push(1, &command);
        }
        rig.ring(1);
        for _ in 0..1 + round % 3 {
            let completion = rig.wait();
            assert_eq!(
                (completion.sq_id, Status::from_field(completion.status)),
                (1, Status::SUCCESS)
            );
            heads.push(completion.sq_head);
        }
        assert_eq!(rig.take(1), None);
    }
    assert!((0..5).all(|head| heads.contains(&head)));
}

#[test]
fn a_full_completion_queue_holds_commands_back() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(1, 4, None);
    rig.add_submission(1, 1, 64);
    for _ in 0..10 {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
    }
    rig.ring(1);
    for _ in 0..10 {
        rig.turn();
    }
    // Three entries: one stays free, as in any queue.
    let mut seen = Vec::new();
    while let Some(completion) = rig.take_quietly(1) {
        seen.push(completion.command_id);
    }
    assert_eq!(seen, [1, 2, 3]);
    let stats = rig.set.stats(1).unwrap();
    assert_eq!(stats.reads.get(), 3, "commands without room for their completion were taken");
    for _ in 0..10 {
        rig.turn();
        assert_eq!(rig.take_quietly(1), None);
    }
    rig.doorbells.set_completion_head(1, rig.completions[&1].head());
    for id in 4..=10 {
        assert_eq!(rig.wait().command_id, id);
    }
}

#[test]
fn a_full_completion_queue_in_front_of_a_slow_store() {
    let store = Arc::new(DelayStore::new(ram(false), Nanos::from_micros(30)));
    let mut rig = Rig::bare(Options { store, ..Options::default() });
    rig.add_completion(1, 3, None);
    rig.add_submission(1, 1, 64);
    for _ in 0..50 {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
    }
    rig.ring(1);
    for id in 1..=50 {
        assert_eq!(rig.wait().command_id, id);
    }
}

#[test]
fn several_submission_queues_share_a_completion_queue() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(2, 256, None);
    for id in 1..=4 {
        rig.add_submission(id, 2, 64);
    }
    for id in 1..=4 {
        for _ in 0..40 {
            let command = rig.command(op::WRITE, 0, 1);
            rig.push(id, &command);
        }
        rig.ring(id);
    }
    let mut counts = [0; 5];
    let mut in_first = [0; 5];
    for done in 0..160 {
        let mut taken = None;
        rig.until("a completion", |rig| {
            taken = taken.or_else(|| rig.take(2));
            taken.is_some()
        });
        let completion = taken.unwrap();
        counts[usize::from(completion.sq_id)] += 1;
        if done < 128 {
            in_first[usize::from(completion.sq_id)] += 1;
        }
    }
    assert_eq!(counts, [0, 40, 40, 40, 40]);
    assert!(
        in_first[1..].iter().all(|count| *count >= 8),
        "{in_first:?}: one queue kept the others waiting"
    );
    // One of them goes, and the others do not notice.
    let (done, gone) = flag();
    rig.set.stop_submission_queue(3, done);
    assert!(is_set(&gone));
    let command = rig.command(op::WRITE, 0, 1);
    rig.submit(3, &command);
    rig.submit(4, &command);
    rig.until("a completion", |rig| rig.take(2).is_some());
    for _ in 0..10 {
        rig.turn();
        assert_eq!(rig.take(2), None);
    }
    // Its number can be used again, by an empty queue.
    rig.add_submission(3, 2, 8);
    for _ in 0..10 {
        rig.turn();
        assert_eq!(rig.take(2), None, "a doorbell of an older queue was believed");
    }
    rig.submit(3, &command);
    rig.until("a completion", |rig| rig.take(2).is_some());
}

#[test]
fn a_queue_goes_when_its_commands_are_completed() {
    let store = Arc::new(DelayStore::new(ram(false), Nanos::from_micros(100)));
    let mut rig = Rig::with(Options { store, ..Options::default() });
    for _ in 0..5 {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
    }
    rig.ring(1);
    rig.turn();
    let (done, gone) = flag();
    rig.set.stop_submission_queue(1, done);
    // Not fetched any more.
    let command = rig.command(op::READ, 0, 1);
    rig.submit(1, &command);
    assert!(!is_set(&gone));
    for id in 1..=5 {
        assert_eq!(rig.wait().command_id, id);
    }
    rig.until("it is gone", |_| is_set(&gone));
    assert_eq!(rig.take(1), None);
    let (done, gone) = flag();
    rig.set.stop_completion_queue(1, done);
    rig.until("it is gone", |_| is_set(&gone));
    assert_eq!((rig.queues(), rig.set.running_count()), (0, 0));
}

#[test]
fn a_reset_waits_for_the_store_and_posts_nothing() {
    let store = Arc::new(DelayStore::new(ram(true), Nanos::from_micros(100)));
    let mut rig = Rig::with(Options { store, ..Options::default() });
    rig.add_completion(2, 64, None);
    rig.add_submission(2, 2, 64);
    for queue in [1, 2] {
        for opcode in
            [op::READ, op::WRITE, op::COMPARE, op::VERIFY, op::FLUSH, op::WRITE, op::COMPARE]
        {
            let command = rig.command(opcode, 0, 200).with_dword(12, 199 | 1 << 30);
            rig.push(queue, &command);
        }
        rig.ring(queue);
    }
    rig.turn();
    let (done, gone) = flag();
    rig.set.stop_all(done);
    assert!(!is_set(&gone));
    rig.until("all queues are gone", |_| is_set(&gone));
    assert_eq!(rig.queues(), 0);
    assert_eq!((rig.take(1), rig.take(2)), (None, None));
    // The same numbers again, from the beginning.
    rig.add_completion(1, 64, None);
    rig.add_submission(1, 1, 64);
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
    // There are no queues: done at once.
    rig.set.stop_all(sidecore_nvme::Done::ignored());
    rig.until("all queues are gone", |rig| rig.queues() == 0);
    let (done, gone) = flag();
    rig.set.stop_all(done);
    assert!(is_set(&gone));
}

#[test]
fn queues_that_cannot_be() {
    let mut rig = Rig::new();
    assert!(matches!(
        rig.set.start_completion_queue(rig.completion_setup(1, 64, None)),
        Err(StartError::Io { .. })
    ));
    assert!(matches!(
        rig.set.start_completion_queue(rig.completion_setup(9, 64, None)),
        Err(StartError::Io { .. })
    ));
    assert!(matches!(
        rig.set.start_submission_queue(rig.submission_setup(2, 3, 64)),
        Err(StartError::Io { .. })
    ));
    let mut elsewhere = rig.completion_setup(2, 64, None);
    elsewhere.address.0 = crate::rig::MEMORY_BYTES - 512;
    assert!(matches!(
        rig.set.start_completion_queue(elsewhere),
        Err(StartError::Memory { id: 2, .. })
    ));
    let mut elsewhere = rig.submission_setup(2, 1, 64);
    elsewhere.address.0 += 64;
    assert!(matches!(
        rig.set.start_submission_queue(elsewhere),
        Err(StartError::Memory { id: 2, .. })
    ));
    assert!(matches!(
        rig.set.start_submission_queue(rig.submission_setup(2, 1, 70_000)),
        Err(StartError::Memory { id: 2, .. })
    ));
    // Nothing was broken by it.
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
    assert_eq!(rig.queues(), 1);
}

#[test]
fn a_turn_takes_a_share_and_not_everything() {
    let store = Arc::new(NullStore::new(Geometry::new(DISK_BYTES, 512)));
    let mut rig = Rig::bare(Options { store, ..Options::default() });
    rig.add_completion(1, 1024, None);
    rig.add_submission(1, 1, 1024);
    let large: Vec<_> = (0..8).map(|_| rig.command(op::READ, 0, 2048)).collect();
    let small: Vec<_> = (0..500).map(|_| rig.command(op::READ, 0, 8)).collect();
    for command in large.iter().chain(&small) {
        rig.push(1, command);
    }
    rig.ring(1);
    rig.turn();
    // More than half a mebibyte at once only if the last command makes it so.
    assert_eq!(rig.set.stats(1).unwrap().reads.get(), 1);
    for _ in 0..7 {
        rig.turn();
    }
    rig.turn();
    assert_eq!(rig.set.stats(1).unwrap().reads.get(), 8 + 32);
    rig.until("all are read", |rig| rig.set.stats(1).unwrap().reads.get() == 508);
}
