//! The steady state allocates nothing: 100,000 requests to virtual functions, whole ones and such
//! that go in parts. Also run in release only mode by the test command.

mod common;

use sidecore_block::{Batch, BlockDevice, Operation, Tag};
use sidecore_block_contract::{guest_memory, request};
use sidecore_controller::{FunctionOptions, Limit, Limits};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: usize = 32;
const MIB: u64 = 1 << 20;
const ADDRESS: u64 = 0x1_0000_0000;

/// Carries out 100,000 requests after a warm-up, and sees no allocation on this thread.
fn check(core: &CoreContext, function: &dyn BlockDevice) {
    let memory = guest_memory();
    let mut channel = function.open_channel(core, DEPTH).unwrap();
    channel.attach_memory(&memory).unwrap();
    let mut batch: Batch = (0..DEPTH as u64)
        .map(|index| match index % 8 {
            // Across four extents of the fragmented volume.
            0 => {
                request(&memory, Operation::Write, index * 4096, &[(ADDRESS + index * 4096, 4096)])
            }
            1 => request(
                &memory,
                Operation::Read,
                index * 4096,
                &[(ADDRESS + 512, 512), (ADDRESS + 4096, 3584)],
            ),
            2 => {
                request(&memory, Operation::Write, index * 4096 + 512, &[(0x20_0000 - 2047, 4096)])
            }
            3 => request(&memory, Operation::Flush, 0, &[]),
            // A hole.
            4 => request(&memory, Operation::Read, 2 * MIB + index * 4096, &[(ADDRESS, 4096)]),
            5 => request(&memory, Operation::WriteZeroes { may_unmap: false }, index * 4096, &[]),
            // As large as a part can be, and larger.
            6 => request(&memory, Operation::Read, 0, &[(ADDRESS, 64 << 10)]),
            _ => request(&memory, Operation::Read, index * 4096, &[(ADDRESS + index * 4096, 1024)]),
        })
        .collect();
    for request in &mut batch {
        if request.operation.is_write() && request.len_bytes == 0 {
            request.len_bytes = 4096;
        }
    }
    let mut completed = Batch::with_capacity(DEPTH);
    let mut now = Nanos(1);
    let mut run = |count: usize| {
        let mut done = 0;
        while done < count {
            for request in &mut batch {
                request.tag.get_or_insert_with(|| Tag::from_bits(0));
            }
            channel.submit(now, &mut batch);
            now = now.after(Nanos(1_000));
            channel.poll(now, &mut completed);
            done += completed.len();
            assert!(completed.iter().all(|request| request.result.is_ok()));
            batch.append(&mut completed);
        }
        while channel.readiness().in_flight > 0 {
            now = now.after(Nanos(1_000));
            channel.poll(now, &mut completed);
            batch.append(&mut completed);
        }
    };
    run(5_000);
    let before = allocations();
    run(100_000);
    assert_eq!(allocations() - before, 0);
    batch
        .iter_mut()
        .for_each(|request| assert_eq!(request.tag.take().map(Tag::into_bits), Some(0)));
}

/// A volume of 4 MiB, its first MiB mapped; in extents of one block if `fragmented`.
fn volume(fragmented: bool) -> std::sync::Arc<sidecore_controller::Controller> {
    let (controller, _) = common::in_memory(16 * MIB, 1024);
    controller.create_volume("v", 4 * MIB, None).unwrap();
    let (mut guest, _device) = common::guest(&controller, "v");
    guest.store(0, &vec![1; MIB as usize]);
    if fragmented {
        controller.snapshot_volume("v", "s").unwrap();
        for block in (0..1024).step_by(2) {
            guest.store(block * 1024, &[2; 1024]);
        }
        controller.delete_volume("s").unwrap();
        let (extents, _) = controller.volume_extents("v", sidecore_units::Vlba(0), 10_000).unwrap();
        assert!(extents.len() > 900, "{} extents", extents.len());
    }
    guest.run_one_flush();
    controller
}

trait Flush {
    fn run_one_flush(&mut self);
}

impl Flush for sidecore_block_contract::Harness {
    fn run_one_flush(&mut self) {
        let flush = self.request(Operation::Flush, 0, &[]);
        assert_eq!(self.run_one(flush), Ok(()));
    }
}

#[test]
fn whole_requests() {
    let controller = volume(false);
    check(&CoreContext::default(), &*common::function(&controller, "v"));
}

#[test]
fn requests_in_parts() {
    let controller = volume(true);
    check(&CoreContext::default(), &*common::function(&controller, "v"));
}

#[test]
fn with_limits_and_weights() {
    let (core, controller) = (CoreContext::default(), volume(true));
    let limit = Some(Limit { per_s: 3_000_000, burst: 1_000 });
    let bytes = Some(Limit { per_s: 1 << 40, burst: 1 << 30 });
    let limits = Limits {
        read_iops: limit,
        write_iops: limit,
        read_bytes_per_s: bytes,
        write_bytes_per_s: bytes,
    };
    let other = controller
        .open_function(&FunctionOptions { weight: 1000, ..FunctionOptions::new("v") })
        .unwrap();
    // It wants nothing, but it is there: from here on, shares are counted.
    let _queue = other.open_channel(&core, DEPTH).unwrap();
    let options = FunctionOptions { limits, weight: 50, ..FunctionOptions::new("v") };
    check(&core, &*controller.open_function(&options).unwrap());
}
