//! Nothing is allocated for a command, from doorbell to completion.

#[path = "io/rig.rs"]
#[allow(dead_code)]
mod rig;

use std::sync::Arc;

use sidecore_block::{Geometry, NullStore};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_nvme::{Command, QueueHost};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use rig::{BLOCK_BYTES, DATA, DISK_BYTES, LISTS, Options, Rig, interrupt, op, or, ram};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const COMMANDS: usize = 100_000;

/// Every kind of command, and some that are refused.
fn commands(rig: &mut Rig) -> Vec<Command> {
    let ranges: Vec<u8> = (0..128_u64)
        .flat_map(|index| [1_u64 << 32, index * 8])
        .flat_map(u64::to_le_bytes)
        .collect();
    rig.write(DATA + 0x30_0000, &ranges);
    let large = rig.command_at(op::READ, 0, 600, DATA, LISTS);
    let compare = rig.command_at(op::COMPARE, 0, 300, DATA, LISTS);
    let mut bucket = [0; 16];
    bucket[8..12].copy_from_slice(&(8 * BLOCK_BYTES as u32).to_le_bytes());
    bucket[15] = 0x10;
    let word = |at: usize| u64::from_le_bytes(bucket[at..at + 8].try_into().unwrap());
    let around = or(rig.command(op::READ, 0, 8), 0, 1 << 14).with_prps(word(0), word(8));
    let deallocate = Command::build(op::DATASET_MANAGEMENT, 0, 1)
        .with_prps(DATA + 0x30_0000, 0)
        .with_dword(10, 127)
        .with_dword(11, 4);
    let first = or(rig.command(op::COMPARE, 0, 1), 0, 1 << 8);
    let second = or(rig.command(op::WRITE, 0, 1), 0, 2 << 8);
    vec![
        rig.command(op::READ, 0, 8),
        rig.command(op::WRITE, 8, 8),
        or(rig.command(op::WRITE, 8, 8), 12, 1 << 30),
        or(rig.command(op::READ, 8, 8), 12, 1 << 30),
        large,
        compare,
        around,
        deallocate,
        rig.command(op::FLUSH, 0, 1),
        rig.command(op::WRITE_ZEROES, 100, 50),
        rig.command(op::VERIFY, 0, 600),
        first,
        second,
        second,
        rig.command(0x7F, 0, 1),
        rig.command(op::READ, u64::MAX, 1),
    ]
}

#[test]
fn a_hundred_thousand_commands_allocate_nothing() {
    let null = Arc::new(NullStore::new(Geometry {
        volatile_cache: true,
        ..Geometry::new(DISK_BYTES, 512)
    }));
    let slow = Arc::new(DelayStore::new(ram(true), Nanos::from_micros(2)));
    for store in [null, ram(true), slow] as [Arc<dyn sidecore_block::BlockDevice>; 3] {
        let mut rig = Rig::bare(Options { store, ..Options::default() });
        let (event, theirs) = interrupt();
        rig.set.set_vector(0, Some(theirs));
        rig.add_completion(1, 64, Some(0));
        rig.add_submission(1, 1, 64);
        let commands = commands(&mut rig);
        let mut run = |rounds: usize| {
            for _ in 0..rounds {
                for command in &commands {
                    rig.push(1, command);
                }
                rig.ring(1);
                let mut done = 0;
                while done < commands.len() {
                    rig.turn();
                    while rig.take(1).is_some() {
                        done += 1;
                    }
                    event.drain();
                }
            }
        };
        // Pools and lists settle first.
        run(100);
        let before = allocations();
        run(COMMANDS / 16 + 1);
        assert_eq!(allocations() - before, 0);
    }
}
