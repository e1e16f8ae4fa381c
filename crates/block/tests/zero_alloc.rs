//! The simple stores' requests allocate nothing, once the channel is warm.

use std::sync::Arc;

use sidecore_block::contract::{guest_memory, request};
use sidecore_block::{
    Affected, Batch, BlockDevice, DelayStore, Fault, FaultPlan, FaultRule, FaultStore, Geometry, NullStore, Operation,
    RamStore, When,
};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: usize = 32;
const GEOMETRY: Geometry = Geometry::new(1 << 20, 512);
const ADDRESS: u64 = 0x1_0000_0000;

/// Carries out 100,000 requests of all kinds after a warm-up, and sees no allocation.
fn check(device: &dyn BlockDevice) {
    let memory = guest_memory();
    let mut channel = device.open_channel(&CoreContext::default(), DEPTH).unwrap();
    channel.attach_memory(&memory).unwrap();
    let mut batch: Batch = (0..DEPTH as u64)
        .map(|index| match index % 8 {
            0 => request(&memory, Operation::Write, index * 4096, &[(ADDRESS + index * 4096, 4096)]),
            1 => request(&memory, Operation::Read, index * 4096, &[(ADDRESS + 512, 512), (ADDRESS + 4096, 3584)]),
            2 => request(&memory, Operation::Write, index * 4096, &[(0x20_0000 - 2047, 4096)]),
            3 => request(&memory, Operation::Flush, 0, &[]),
            4 => request(&memory, Operation::Discard, index * 4096, &[]),
            5 => request(&memory, Operation::WriteZeroes { may_unmap: false }, index * 4096, &[]),
            _ => request(&memory, Operation::Read, index * 4096, &[(ADDRESS + index * 4096, 4096)]),
        })
        .collect();
    let mut completed = Batch::with_capacity(DEPTH);
    let mut now = Nanos(1);
    let mut run = |count: usize| {
        let mut done = 0;
        while done < count {
            channel.submit(now, &mut batch);
            now = now.after(Nanos(7));
            channel.poll(now, &mut completed);
            done += completed.len();
            batch.append(&mut completed);
        }
    };
    run(1_000);
    let before = allocations();
    run(100_000);
    assert_eq!(allocations() - before, 0);
}

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(GEOMETRY).unwrap())
}

#[test]
fn null() {
    check(&NullStore::new(GEOMETRY));
}

#[test]
fn ram_disk() {
    check(&*ram());
}

#[test]
fn delay() {
    check(&DelayStore::new(ram(), Nanos(20)));
}

#[test]
fn fault() {
    let rules = vec![
        FaultRule { affected: Affected::Reads, when: When::EveryNth(5), fault: Fault::Short },
        FaultRule { affected: Affected::All, when: When::PerMillion(50_000), fault: Fault::Eio },
        FaultRule { affected: Affected::Writes, when: When::Touching(0..1), fault: Fault::NoSpace },
    ];
    check(&FaultStore::new(ram(), FaultPlan { seed: 3, rules }));
}
