//! Runs of a device that tests of several crates share.

use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::{Open, Options, SCRATCH, check, guest_memory, request};
use sidecore_block::{Batch, BlockDevice, Operation, dropped_tags};

/// [`check`] at several depths; no request is lost.
///
/// # Panics
/// The device breaks the contract.
pub fn check_at_each_depth(open: Open<'_>) {
    for depth in [1, 8, 64] {
        check(open, &Options { depth, ..Options::default() });
    }
    assert_eq!(dropped_tags(), 0);
}

/// Carries out 100,000 requests of all kinds after a warm-up. `allocations` counts those of this
/// thread.
///
/// # Panics
/// One of the requests allocated.
pub fn allocates_nothing(device: &dyn BlockDevice, allocations: fn() -> u64) {
    const DEPTH: usize = 32;
    let memory = guest_memory();
    let mut channel = device.open_channel(&CoreContext::default(), DEPTH).unwrap();
    channel.attach_memory(&memory).unwrap();
    let mut batch: Batch = (0..DEPTH as u64)
        .map(|index| match index % 8 {
            0 => {
                request(&memory, Operation::Write, index * 4096, &[(SCRATCH + index * 4096, 4096)])
            }
            1 => request(
                &memory,
                Operation::Read,
                index * 4096,
                &[(SCRATCH + 512, 512), (SCRATCH + 4096, 3584)],
            ),
            2 => request(&memory, Operation::Write, index * 4096, &[(0x20_0000 - 2047, 4096)]),
            3 => request(&memory, Operation::Flush, 0, &[]),
            4 => request(&memory, Operation::Discard, index * 4096, &[]),
            5 => request(&memory, Operation::WriteZeroes { may_unmap: false }, index * 4096, &[]),
            _ => request(&memory, Operation::Read, index * 4096, &[(SCRATCH + index * 4096, 4096)]),
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
