//! Requests allocate nothing at the client, once the session and its queues are set up.

mod vmhost;

use sidecore_block::{Batch, Operation};
use sidecore_block_contract::request;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::Faults;
use sidecore_reactor::Pollable as _;
use sidecore_telemetry::CounterSet as _;
use vmhost::{Rig, SCRATCH, STEP, entry};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const REQUESTS: usize = 100_000;
const DEPTH: usize = 16;

/// Runs requests of a queue, and counts the allocations of the client alone.
fn run(is_local: bool) {
    let mut rig = Rig::new(1, Faults::default(), &[entry(0, "disk1")]);
    let store = rig.open("disk1");
    rig.add_queue(store, is_local, DEPTH);
    let memory = rig.queues[0].memory.clone();
    let mut batch: Batch = (0..DEPTH as u64)
        .map(|index| {
            let mut made = match index {
                0 | 8 => request(&memory, Operation::Write, index * 8192, &[(SCRATCH, 8192)]),
                1 | 9 => request(&memory, Operation::Flush, 0, &[]),
                2 | 10 => request(&memory, Operation::Discard, index * 8192, &[]),
                3 => request(&memory, Operation::Read, 0, &[(SCRATCH, 150 << 10)]),
                12 => request(&memory, Operation::Write, 1 << 20, &[(SCRATCH, 70 << 10)]),
                _ => request(&memory, Operation::Read, index * 8192, &[(SCRATCH, 4096)]),
            };
            if index % 8 == 2 {
                made.len_bytes = 4096;
            }
            made.tag = Some(sidecore_block::Tag::from_bits(index));
            made
        })
        .collect();
    let mut completed = Batch::with_capacity(DEPTH);
    let (mut done, mut counted) = (0, 0);
    while done < REQUESTS {
        let before = allocations();
        rig.queues[0].channel.exchange(rig.now, &mut batch, &mut completed);
        rig.session.poll(rig.now, 32);
        rig.queues[0].channel.poll(rig.now, &mut completed);
        let own = allocations() - before;
        done += completed.len();
        if done > REQUESTS / 10 {
            counted += own;
        }
        for request in &mut completed {
            assert_eq!(request.result, Ok(()));
        }
        batch.append(&mut completed);
        rig.now = rig.now.after(STEP);
        rig.host.as_mut().unwrap().turn(rig.now);
    }
    assert_eq!(counted, 0);
    let counts = rig.iohost.stats().counts();
    assert!(counts.splits > 0);
    assert_eq!(counts.handed_over == 0, is_local);
    // The requests end with the test.
    while rig.queues[0].channel.readiness().in_flight > 0 {
        rig.step();
    }
    batch.append(&mut rig.queues[0].completed);
    for mut request in batch {
        request.tag.take().map(sidecore_block::Tag::into_bits);
    }
}

#[test]
fn requests_of_a_local_queue() {
    run(true);
}

#[test]
fn requests_of_a_queue_on_another_sidecore() {
    run(false);
}
