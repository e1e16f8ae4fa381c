//! Frames of a remote NIC allocate nothing, at either end.

mod common;
mod lan;

use lan::{GUEST, Rig, SERVER, frame};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::Faults;
use sidecore_reactor::Pollable as _;
use sidecore_units::Nanos;
use sidecore_vrio::wire::MIN_FRAME_BYTES;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const ROUNDS: u32 = 5_000;

#[test]
fn frames_allocate_nothing() {
    let mut rig = Rig::new(Faults::default(), MIN_FRAME_BYTES);
    // The simulated wire keeps a buffer for each frame that was on its way, and makes them longer
    // when longer frames come: more and longer ones than later.
    for number in 0..32 {
        rig.vmhost.station.send(&frame(SERVER, GUEST, number, 9_000));
        rig.iohost.station.send(&frame(GUEST, SERVER, number, 9_000));
    }
    rig.run_for(Nanos::from_millis(1));
    assert_eq!((rig.iohost.station.discard(), rig.vmhost.station.discard()), (32, 32));
    let (mut up, mut down, mut counted) = (0, 0, [0; 4]);
    for round in 0..ROUNDS {
        // Of one segment, and of several.
        let len_bytes = 60 + (round as usize * 611) % 8_000;
        rig.vmhost.station.send(&frame(SERVER, GUEST, round, len_bytes));
        rig.iohost.station.send(&frame(GUEST, SERVER, round, len_bytes));
        let mut count = |at: usize, before: u64| {
            if round > ROUNDS / 10 {
                counted[at] += allocations() - before;
            }
        };
        for _ in 0..20 {
            let before = allocations();
            rig.vmhost.switch.turn(rig.now, 32);
            count(0, before);
            let before = allocations();
            rig.session.poll(rig.now, 64);
            count(1, before);
            let before = allocations();
            rig.export.poll(rig.now, 64);
            count(2, before);
            let before = allocations();
            rig.iohost.switch.turn(rig.now, 32);
            count(3, before);
            rig.now = rig.now.after(common::STEP);
        }
        up += rig.iohost.station.discard();
        down += rig.vmhost.station.discard();
        rig.vmhost.station.post(1, 16 << 10);
        rig.iohost.station.post(1, 16 << 10);
    }
    assert_eq!((up, down), (ROUNDS as usize, ROUNDS as usize));
    assert_eq!(counted, [0; 4], "allocations in the polls");
}
