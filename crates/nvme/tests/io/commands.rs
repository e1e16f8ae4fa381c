//! Every command, and how each of them fails.

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, NullStore, RamStore};
use sidecore_nvme::{Command, Done, MAX_TRANSFER_BYTES, QueueHost, Status};
use sidecore_spec_nvme::command::BROADCAST_NSID;
use sidecore_stage_delay::DelayStore;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::Nanos;

use crate::rig::{
    BLOCK_BYTES, BLOCKS, DATA, DISK_BYTES, LISTS, Options, Rig, namespace, op, or, pattern, ram,
    ranged,
};

const FUA: u32 = 1 << 30;
const LIMITED_RETRY: u32 = 1 << 31;

fn with_store(store: Arc<dyn BlockDevice>) -> Rig {
    Rig::with(Options { store, ..Options::default() })
}

fn failing(affected: Affected, when: When, fault: Fault) -> Rig {
    let plan = FaultPlan { seed: 1, rules: vec![FaultRule { affected, when, fault }] };
    with_store(Arc::new(FaultStore::new(ram(true), plan)))
}

fn write_pattern(rig: &mut Rig, block: u64, blocks: u64, seed: u64) -> Vec<u8> {
    let bytes = pattern(seed, blocks * BLOCK_BYTES);
    rig.write(DATA, &bytes);
    let command = rig.command(op::WRITE, block, blocks);
    assert_eq!(rig.run(command), Status::SUCCESS);
    bytes
}

fn read_back(rig: &mut Rig, block: u64, blocks: u64) -> Vec<u8> {
    rig.write(DATA, &vec![0xA5; (blocks * BLOCK_BYTES) as usize]);
    let command = rig.command(op::READ, block, blocks);
    assert_eq!(rig.run(command), Status::SUCCESS);
    rig.read(DATA, blocks * BLOCK_BYTES)
}

#[test]
fn what_was_written_is_read() {
    let mut rig = Rig::new();
    for (seed, blocks) in [1, 7, 8, 9, 16, 17, 255, 2048].into_iter().enumerate() {
        let block = BLOCKS - blocks;
        let bytes = write_pattern(&mut rig, block, blocks, seed as u64);
        assert!(read_back(&mut rig, block, blocks) == bytes, "{blocks} blocks");
    }
    let stats = rig.set.stats(1).unwrap();
    assert_eq!((stats.reads.get(), stats.writes.get(), stats.requests.get()), (8, 8, 16));
    assert_eq!(stats.bytes_read.get(), stats.bytes_written.get());
    assert!(stats.latency.summary().count >= 15, "{:?}", stats.latency.summary());
}

#[test]
fn blocks_of_4096_bytes_on_a_store_of_512() {
    let mut rig = Rig::with(Options { block_bytes: 4096, ..Options::default() });
    let bytes = pattern(3, 2 * 4096);
    rig.write(DATA, &bytes);
    let write = rig.command(op::WRITE, 5, 2);
    // PRP 2 is what a transfer of two pages needs.
    assert_eq!(rig.run(write.with_prps(DATA, DATA + 4096)), Status::SUCCESS);
    let read = rig.command(op::READ, 5, 2);
    assert_eq!(rig.run(read.with_prps(DATA + 0x1_0000, DATA + 0x1_1000)), Status::SUCCESS);
    assert!(rig.read(DATA + 0x1_0000, 8192) == bytes);
    let last = rig.command(op::READ, DISK_BYTES / 4096, 1);
    assert_eq!(rig.run(last), Status::LBA_OUT_OF_RANGE);
}

#[test]
fn ranges_that_do_not_fit() {
    let mut rig = Rig::new();
    for opcode in [op::READ, op::WRITE, op::COMPARE, op::VERIFY, op::WRITE_ZEROES] {
        for (block, blocks) in
            [(BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2), (1 << 55, 1)]
        {
            let command = ranged(rig.command(opcode, 0, 1), block, blocks);
            assert_eq!(rig.run(command), Status::LBA_OUT_OF_RANGE, "{opcode:#x} {block} {blocks}");
        }
        let command = or(rig.command(opcode, 0, 1), 12, 1 << 26);
        assert_eq!(rig.run(command), Status::INVALID_PROTECTION_INFORMATION);
    }
    // MDTS is about what is transferred.
    let too_many = MAX_TRANSFER_BYTES / BLOCK_BYTES + 1;
    for opcode in [op::READ, op::WRITE, op::COMPARE] {
        let command = rig.command(opcode, 0, too_many);
        assert_eq!(rig.run(command), Status::INVALID_FIELD);
    }
    for opcode in [op::VERIFY, op::WRITE_ZEROES] {
        let command = ranged(Command::build(opcode, 1, 1), 0, too_many);
        assert_eq!(rig.run(command), Status::SUCCESS);
    }
    assert_eq!(rig.set.stats(1).unwrap().rejected.get(), 5 * 6 + 3);
}

#[test]
fn namespaces_that_are_not_this_one() {
    let mut rig = Rig::new();
    for opcode in
        [op::READ, op::WRITE, op::COMPARE, op::VERIFY, op::WRITE_ZEROES, op::DATASET_MANAGEMENT]
    {
        for (nsid, status) in [
            (0, Status::INVALID_NAMESPACE),
            (BROADCAST_NSID, Status::INVALID_NAMESPACE),
            (5, Status::INVALID_NAMESPACE),
            (4, Status::INVALID_FIELD),
        ] {
            let command = rig.command(opcode, 0, 1).with_dword(1, nsid);
            assert_eq!(rig.run(command), status, "opcode {opcode:#x}, namespace {nsid:#x}");
        }
    }
    assert_eq!(rig.run(Command::build(op::FLUSH, 1, 1)), Status::SUCCESS);
    assert_eq!(rig.run(Command::build(op::FLUSH, 2, BROADCAST_NSID)), Status::SUCCESS);
    assert_eq!(rig.run(Command::build(op::FLUSH, 3, 0)), Status::INVALID_NAMESPACE);
    for opcode in [0x04, 0x0D, 0x19, 0x7F, 0x80, 0xFF] {
        assert_eq!(rig.run(Command::build(opcode, 4, 1)), Status::INVALID_OPCODE);
    }
    rig.set.set_namespace(None, Done::ignored());
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::INVALID_FIELD);
    assert_eq!(rig.run(command.with_dword(1, 0)), Status::INVALID_NAMESPACE);
    assert_eq!(rig.run(Command::build(op::FLUSH, 5, BROADCAST_NSID)), Status::SUCCESS);
}

#[test]
fn a_read_only_namespace_is_write_protected() {
    let geometry = Geometry { read_only: true, ..Geometry::new(DISK_BYTES, 512) };
    let mut rig = with_store(Arc::new(RamStore::new(geometry).unwrap()));
    for opcode in [op::WRITE, op::WRITE_ZEROES, op::DATASET_MANAGEMENT] {
        let command = rig.command(opcode, 0, 1);
        assert_eq!(rig.run(command), Status::NAMESPACE_WRITE_PROTECTED);
    }
    for opcode in [op::READ, op::COMPARE, op::VERIFY] {
        rig.write(DATA, &[0; 512]);
        let command = rig.command(opcode, 0, 1);
        assert_eq!(rig.run(command), Status::SUCCESS);
    }
}

#[test]
fn write_zeroes_with_and_without_deallocating() {
    let mut rig = Rig::new();
    for deallocate in [0, 1 << 25] {
        write_pattern(&mut rig, 0, 64, 5);
        let zeroes = or(ranged(Command::build(op::WRITE_ZEROES, 1, 1), 1, 62), 12, deallocate);
        assert_eq!(rig.run(zeroes), Status::SUCCESS);
        let bytes = read_back(&mut rig, 0, 64);
        assert!(bytes[512..63 * 512].iter().all(|byte| *byte == 0));
        assert!(bytes[..512] == pattern(5, 512));
    }
    let geometry = Geometry { write_zeroes: false, ..Geometry::new(DISK_BYTES, 512) };
    let mut rig = with_store(Arc::new(RamStore::new(geometry).unwrap()));
    let zeroes = rig.command(op::WRITE_ZEROES, 0, 1);
    assert_eq!(rig.run(zeroes), Status::INVALID_OPCODE);
}

/// Dataset Management's ranges: context attributes, blocks, first block.
fn deallocate(rig: &mut Rig, ranges: &[(u64, u32)], attributes: u32) -> Command {
    let bytes: Vec<u8> = ranges
        .iter()
        .flat_map(|(first, count)| {
            [&7_u32.to_le_bytes()[..], &count.to_le_bytes(), &first.to_le_bytes()].concat()
        })
        .collect();
    rig.write(DATA, &bytes);
    let id = rig.next_id();
    Command::build(op::DATASET_MANAGEMENT, id, 1)
        .with_prps(DATA, 0)
        .with_dword(10, ranges.len() as u32 - 1)
        .with_dword(11, attributes)
}

const AD: u32 = 1 << 2;

#[test]
fn deallocating_ranges() {
    let mut rig = Rig::new();
    let before = write_pattern(&mut rig, 0, 1024, 9);
    // Every other pair of blocks, 256 times, and one of no blocks.
    let mut ranges: Vec<_> = (0..256).map(|index| (index * 4, 2)).collect();
    ranges[255] = (77, 0);
    let command = deallocate(&mut rig, &ranges, AD);
    assert_eq!(rig.run(command), Status::SUCCESS);
    let after = read_back(&mut rig, 0, 1024);
    for block in 0..1024 {
        let at = block * 512..(block + 1) * 512;
        let gone = block % 4 < 2 && block < 255 * 4;
        assert!(
            if gone {
                after[at].iter().all(|byte| *byte == 0)
            } else {
                after[at.clone()] == before[at]
            },
            "{block}"
        );
    }
    // Advice alone changes nothing.
    let command = deallocate(&mut rig, &[(2, 2)], 0b11);
    assert_eq!(rig.run(command), Status::SUCCESS);
    // One range that ends past the namespace: none is deallocated.
    let command = deallocate(&mut rig, &[(2, 2), (BLOCKS - 1, 2)], AD);
    assert_eq!(rig.run(command), Status::LBA_OUT_OF_RANGE);
    assert!(read_back(&mut rig, 0, 1024) == after);
    // The whole disk at once, which takes the store several polls.
    let command = deallocate(&mut rig, &[(0, BLOCKS as u32)], AD);
    assert_eq!(rig.run(command), Status::SUCCESS);
    assert!(read_back(&mut rig, 0, 1024).iter().all(|byte| *byte == 0));
    // Ranges that are not in the guest's memory.
    let command = deallocate(&mut rig, &[(0, 1)], AD).with_prps(!0xFFF, 0);
    assert_eq!(rig.run(command), Status::DATA_TRANSFER_ERROR);
    let stats = rig.set.stats(1).unwrap();
    assert_eq!((stats.discards.get(), stats.rejected.get()), (2, 2));
}

#[test]
fn a_store_that_cannot_deallocate_takes_it_as_advice() {
    let geometry = Geometry { discard: false, ..Geometry::new(DISK_BYTES, 512) };
    let mut rig = with_store(Arc::new(RamStore::new(geometry).unwrap()));
    let bytes = write_pattern(&mut rig, 0, 2, 1);
    let command = deallocate(&mut rig, &[(0, 2)], AD);
    assert_eq!(rig.run(command), Status::SUCCESS);
    assert!(read_back(&mut rig, 0, 2) == bytes);
}

#[test]
fn comparing() {
    let mut rig = Rig::new();
    // More than a step, and not a whole number of them.
    let blocks = 300;
    let bytes = write_pattern(&mut rig, 10, blocks, 4);
    let command = rig.command(op::COMPARE, 10, blocks);
    assert_eq!(rig.run(command), Status::SUCCESS);
    for changed in [0, 511, 4096, 0x1_0000, bytes.len() as u64 - 1] {
        rig.write(DATA + changed, &[!bytes[changed as usize]]);
        let command = rig.command(op::COMPARE, 10, blocks);
        assert_eq!(rig.run(command), Status::COMPARE_FAILURE, "byte {changed}");
        rig.write(DATA + changed, &[bytes[changed as usize]]);
    }
    let command = rig.command(op::COMPARE, 10, 1).with_prps(!0xFFF, 0);
    assert_eq!(rig.run(command), Status::DATA_TRANSFER_ERROR);
    let stats = rig.set.stats(1).unwrap();
    assert_eq!((stats.compares.get(), stats.rejected.get()), (6, 1));
}

#[test]
fn verifying_reads_everything_and_gives_nothing() {
    let mut rig = Rig::new();
    let before = rig.read(DATA, 512);
    let command = rig.command(op::VERIFY, 0, 1000);
    assert_eq!(rig.run(command.with_prps(DATA, 0)), Status::SUCCESS);
    assert_eq!(rig.set.stats(1).unwrap().bytes_read.get(), 1000 * 512);
    assert!(rig.read(DATA, 512) == before);
    let mut rig = failing(Affected::Reads, When::Touching(400_000..400_001), Fault::Eio);
    let command = rig.command(op::VERIFY, 0, 1000);
    assert_eq!(rig.run(command), Status::UNRECOVERED_READ_ERROR);
    let command = rig.command(op::VERIFY, 0, 100);
    assert_eq!(rig.run(command), Status::SUCCESS);
}

#[test]
fn more_of_them_than_there_are_buffers() {
    let store = Arc::new(DelayStore::new(ram(false), Nanos::from_micros(50)));
    let mut rig = with_store(store);
    let compares: Vec<_> =
        (0..20).map(|index| rig.command(op::COMPARE, index * 300, 300)).collect();
    rig.write(DATA, &vec![0; 300 * 512]);
    for command in &compares {
        rig.push(1, command);
    }
    // A read behind them does not wait for their buffers.
    let read = rig.command_at(op::READ, 0, 1, DATA + 0x10_0000, LISTS);
    rig.submit(1, &read);
    let first = rig.wait();
    assert_eq!(first.command_id, read.id());
    for _ in &compares {
        let completion = rig.wait();
        assert_eq!(Status::from_field(completion.status), Status::SUCCESS);
    }
}

#[test]
fn what_the_store_fails_has_a_status() {
    for (affected, opcode, fault, status) in [
        (Affected::Reads, op::READ, Fault::Eio, Status::UNRECOVERED_READ_ERROR),
        (Affected::Reads, op::READ, Fault::Short, Status::UNRECOVERED_READ_ERROR),
        (Affected::Reads, op::COMPARE, Fault::Eio, Status::UNRECOVERED_READ_ERROR),
        (Affected::Writes, op::WRITE, Fault::Eio, Status::WRITE_FAULT),
        (Affected::Writes, op::WRITE, Fault::Short, Status::WRITE_FAULT),
        (Affected::Writes, op::WRITE, Fault::NoSpace, Status::CAPACITY_EXCEEDED),
        (Affected::Flushes, op::FLUSH, Fault::Eio, Status::WRITE_FAULT),
        (Affected::Deallocations, op::WRITE_ZEROES, Fault::NoSpace, Status::CAPACITY_EXCEEDED),
    ] {
        let mut rig = failing(affected, When::EveryNth(1), fault);
        let command = rig.command(opcode, 0, 1);
        assert_eq!(rig.run(command), status, "{opcode:#x} {fault:?}");
        assert_eq!(rig.set.stats(1).unwrap().errors.get(), 1);
        let command = rig.command(op::VERIFY, 0, 1);
        let expected = if affected == Affected::Reads {
            Status::UNRECOVERED_READ_ERROR
        } else {
            Status::SUCCESS
        };
        assert_eq!(rig.run(command), expected);
    }
    let mut rig = failing(Affected::Deallocations, When::Touching(512..513), Fault::Eio);
    let command = deallocate(&mut rig, &[(0, 1), (1, 1), (2, 1)], AD);
    assert_eq!(rig.run(command), Status::WRITE_FAULT);
}

#[test]
fn force_unit_access_costs_a_flush_where_there_is_a_cache() {
    for (cached, flushes) in [(true, 3), (false, 0)] {
        let mut rig = with_store(ram(cached));
        let bytes = pattern(1, 512);
        rig.write(DATA, &bytes);
        let write = or(rig.command(op::WRITE, 3, 1), 12, FUA | LIMITED_RETRY);
        assert_eq!(rig.run(write), Status::SUCCESS);
        rig.write(DATA, &[0; 512]);
        let read = or(rig.command(op::READ, 3, 1), 12, FUA);
        assert_eq!(rig.run(read), Status::SUCCESS);
        assert!(rig.read(DATA, 512) == bytes);
        let zeroes = or(rig.command(op::WRITE_ZEROES, 3, 1), 12, FUA);
        assert_eq!(rig.run(zeroes), Status::SUCCESS);
        let compare = or(rig.command(op::COMPARE, 4, 1), 12, FUA);
        rig.write(DATA, &[0; 512]);
        assert_eq!(rig.run(compare), Status::SUCCESS);
        let stats = rig.set.stats(1).unwrap();
        assert_eq!((stats.writes.get(), stats.reads.get(), stats.requests.get()), (1, 1, 4));
        // How often the store flushed shows in what it fails.
        let plan =
            FaultRule { affected: Affected::Flushes, when: When::EveryNth(1), fault: Fault::Eio };
        let store = FaultStore::new(ram(cached), FaultPlan { seed: 1, rules: vec![plan] });
        rig.set.set_namespace(Some(namespace(Arc::new(store), 512)), Done::ignored());
        let mut failed = 0;
        for opcode in [op::WRITE, op::READ, op::WRITE_ZEROES] {
            let command = or(rig.command(opcode, 3, 1), 12, FUA);
            failed += u32::from(!rig.run(command).is_success());
        }
        assert_eq!(failed, flushes);
    }
}

#[test]
fn without_a_write_cache_every_write_is_flushed() {
    let mut rig = failing(Affected::Flushes, When::EveryNth(1), Fault::Eio);
    let write = rig.command(op::WRITE, 3, 1);
    assert_eq!(rig.run(write), Status::SUCCESS);
    assert!(rig.set.set_write_cache(false));
    assert_eq!(rig.run(write), Status::WRITE_FAULT);
    assert!(rig.set.set_write_cache(true));
    assert_eq!(rig.run(write), Status::SUCCESS);
}

#[test]
fn directives_that_there_are_none_of() {
    let mut rig = Rig::new();
    let write = or(rig.command(op::WRITE, 3, 1), 12, 1 << 20);
    assert_eq!(rig.run(write), Status::INVALID_FIELD);
}

#[test]
fn lists_that_chain_across_pages() {
    let mut rig = Rig::new();
    let blocks = MAX_TRANSFER_BYTES / BLOCK_BYTES;
    let bytes = pattern(8, MAX_TRANSFER_BYTES);
    rig.write(DATA, &bytes);
    // A list that begins ten entries before the end of its page, and goes on in another.
    let list = LISTS + 4096 - 80;
    let entries: Vec<u64> = (1..256).map(|page| DATA + page * 4096).collect();
    let (here, there) = entries.split_at(9);
    let flat =
        |entries: &[u64]| entries.iter().flat_map(|entry| entry.to_le_bytes()).collect::<Vec<u8>>();
    rig.write(list, &flat(here));
    rig.write(list + 72, &(LISTS + 0x8000).to_le_bytes());
    rig.write(LISTS + 0x8000, &flat(there));
    let write = ranged(Command::build(op::WRITE, 1, 1), 16, blocks).with_prps(DATA, list);
    assert_eq!(rig.run(write), Status::SUCCESS);
    let read = rig.command_at(op::READ, 16, blocks, DATA + 0x20_0000, LISTS + 0x1_0000);
    assert_eq!(rig.run(read), Status::SUCCESS);
    assert!(rig.read(DATA + 0x20_0000, MAX_TRANSFER_BYTES) == bytes);
}

#[test]
fn a_null_store_answers_at_once() {
    let mut rig = with_store(Arc::new(NullStore::new(Geometry::new(DISK_BYTES, 512))));
    for _ in 0..200 {
        let command = rig.command(op::READ, 0, 8);
        assert_eq!(rig.run(command), Status::SUCCESS);
    }
}
