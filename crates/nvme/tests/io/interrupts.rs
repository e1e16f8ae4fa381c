//! When an interrupt is raised, and when not.

use sidecore_nvme::QueueHost;
use sidecore_reactor::EventFd;

use crate::rig::{Options, Rig, interrupt, op};

/// Queue pair 1 with vector 2, which signals the event.
fn rig() -> (Rig, EventFd) {
    let mut rig = Rig::bare(Options::default());
    let (event, theirs) = interrupt();
    rig.set.set_vector(2, Some(theirs));
    rig.add_completion(1, 64, Some(2));
    rig.add_submission(1, 1, 64);
    (rig, event)
}

fn submit(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
    }
    rig.ring(1);
}

/// Takes all completions; how many there were.
fn take_all(rig: &mut Rig) -> usize {
    std::iter::from_fn(|| rig.take(1)).count()
}

#[test]
fn one_for_all_that_a_turn_completes() {
    let (mut rig, event) = rig();
    submit(&mut rig, 20);
    rig.turn();
    assert_eq!(event.drain(), 1);
    assert_eq!(take_all(&mut rig), 20);
    for _ in 0..2_000 {
        rig.turn();
    }
    assert_eq!(event.drain(), 0, "nothing is new");
    assert_eq!(rig.set.stats(1).unwrap().interrupts.get(), 1);
}

#[test]
fn none_while_one_is_outstanding() {
    let (mut rig, event) = rig();
    submit(&mut rig, 1);
    rig.turn();
    assert_eq!(event.drain(), 1);
    submit(&mut rig, 1);
    for _ in 0..400 {
        rig.turn();
    }
    assert_eq!(event.drain(), 0, "the driver has not reacted to the first one");
    // It does: what came meanwhile may have come after its last look.
    assert!(rig.take(1).is_some());
    rig.turn();
    assert_eq!(event.drain(), 1);
    assert!(rig.take(1).is_some());
    submit(&mut rig, 1);
    rig.turn();
    assert_eq!(event.drain(), 1);
    // One that does not react at all is told again after half a millisecond, of what is new.
    submit(&mut rig, 1);
    for _ in 0..499 {
        rig.turn();
    }
    assert_eq!(event.drain(), 0);
    rig.turn();
    rig.turn();
    assert_eq!(event.drain(), 1);
    for _ in 0..2_000 {
        rig.turn();
    }
    assert_eq!(event.drain(), 0);
}

#[test]
fn none_for_what_the_driver_has_found_by_itself() {
    let (mut rig, event) = rig();
    submit(&mut rig, 1);
    rig.turn();
    submit(&mut rig, 3);
    rig.turn();
    assert_eq!((event.drain(), take_all(&mut rig)), (1, 4));
    rig.turn();
    assert_eq!(event.drain(), 0);
}

#[test]
fn a_masked_vector_is_pending() {
    let (mut rig, event) = rig();
    rig.set.set_vector(2, None);
    submit(&mut rig, 3);
    rig.turn();
    assert!(rig.set.is_pending(2) && !rig.set.is_pending(1));
    assert_eq!(event.drain(), 0);
    let (event, theirs) = interrupt();
    rig.set.set_vector(2, Some(theirs));
    rig.turn();
    assert!(!rig.set.is_pending(2));
    assert_eq!(event.drain(), 1);
    // Masked and unmasked with nothing between.
    rig.set.set_vector(2, None);
    let (event, theirs) = interrupt();
    rig.set.set_vector(2, Some(theirs));
    rig.turn();
    assert_eq!(event.drain(), 0);
    // A queue that goes takes its pending interrupt with it.
    take_all(&mut rig);
    rig.set.set_vector(2, None);
    submit(&mut rig, 1);
    rig.turn();
    assert!(rig.set.is_pending(2));
    rig.set.stop_all(sidecore_nvme::Done::ignored());
    rig.turn();
    assert!(!rig.set.is_pending(2));
}

#[test]
fn a_vector_that_two_queues_share_and_one_that_none_has() {
    let (mut rig, event) = rig();
    rig.add_completion(2, 64, Some(2));
    rig.add_submission(2, 2, 64);
    rig.add_completion(3, 64, Some(3));
    rig.add_submission(3, 3, 64);
    rig.add_completion(4, 64, None);
    rig.add_submission(4, 4, 64);
    for queue in 1..=4 {
        let command = rig.command(op::READ, 0, 1);
        rig.submit(queue, &command);
    }
    rig.turn();
    assert_eq!(event.drain(), 2);
    assert!(rig.set.is_pending(3));
    assert_eq!(rig.set.stats(4).unwrap().interrupts.get(), 0);
    rig.set.set_vector(77, None);
    assert!(!rig.set.is_pending(77));
}

#[test]
fn coalescing_waits_for_so_many_or_so_long() {
    let (mut rig, event) = rig();
    rig.set.set_coalescing(4, 100);
    submit(&mut rig, 3);
    rig.turn();
    assert_eq!(event.drain(), 0);
    submit(&mut rig, 1);
    rig.turn();
    assert_eq!(event.drain(), 1);
    assert_eq!(take_all(&mut rig), 4);
    submit(&mut rig, 1);
    for _ in 0..100 {
        rig.turn();
        assert_eq!(event.drain(), 0);
    }
    rig.turn();
    assert_eq!(event.drain(), 1);
    assert_eq!(take_all(&mut rig), 1);
    // A vector that it does not apply to, and then again.
    rig.set.set_vector_coalescing(2, false);
    submit(&mut rig, 1);
    rig.turn();
    assert_eq!((event.drain(), take_all(&mut rig)), (1, 1));
    rig.set.set_vector_coalescing(2, true);
    submit(&mut rig, 1);
    rig.turn();
    assert_eq!(event.drain(), 0);
    rig.set.set_coalescing(0, 100);
    rig.turn();
    assert_eq!((event.drain(), take_all(&mut rig)), (1, 1));
    // A queue that comes later is told as well.
    rig.set.set_coalescing(4, 100);
    rig.add_completion(2, 64, Some(2));
    rig.add_submission(2, 2, 64);
    let command = rig.command(op::READ, 0, 1);
    rig.submit(2, &command);
    rig.turn();
    assert_eq!(event.drain(), 0);
}
