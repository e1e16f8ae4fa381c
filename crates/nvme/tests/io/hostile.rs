//! Guests that lie: pointers, doorbells, rings.

use proptest::prelude::*;
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_nvme::{Command, QueueEvent, Status};

use crate::rig::{
    BLOCK_BYTES, DATA, LISTS, MEMORY_BYTES, Options, PAGE, Rig, op, or, pattern, ranged,
};

const DATA_BLOCK: u8 = 0x00;
const BIT_BUCKET: u8 = 0x10;
const SEGMENT: u8 = 0x20;
const LAST_SEGMENT: u8 = 0x30;

fn descriptor(kind: u8, address: u64, len_bytes: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&(len_bytes as u32).to_le_bytes());
    bytes[15] = kind;
    bytes
}

/// A command whose data pointer is this descriptor.
fn with_sgl(command: Command, descriptor: [u8; 16]) -> Command {
    let word = |at: usize| u64::from_le_bytes(descriptor[at..at + 8].try_into().unwrap());
    or(command, 0, 1 << 14).with_prps(word(0), word(8))
}

#[test]
fn scatter_gather_lists_move_data_both_ways() {
    let mut rig = Rig::new();
    let bytes = pattern(2, 4 * BLOCK_BYTES);
    rig.write(DATA + 3, &bytes);
    let write = rig.command(op::WRITE, 9, 4);
    let write = with_sgl(write, descriptor(DATA_BLOCK, DATA + 3, 4 * BLOCK_BYTES));
    assert_eq!(rig.run(write), Status::SUCCESS);
    // Into three pieces, out of order, in two segments.
    let target = DATA + 0x1_0000;
    let first =
        [descriptor(DATA_BLOCK, target + 5000, 1000), descriptor(LAST_SEGMENT, LISTS + 0x100, 32)];
    let second = [descriptor(DATA_BLOCK, target, 48), descriptor(DATA_BLOCK, target + 101, 1000)];
    rig.write(LISTS, &first.concat());
    rig.write(LISTS + 0x100, &second.concat());
    let read = rig.command(op::READ, 9, 4);
    assert_eq!(rig.run(with_sgl(read, descriptor(SEGMENT, LISTS, 32))), Status::SUCCESS);
    let pieces =
        [rig.read(target + 5000, 1000), rig.read(target, 48), rig.read(target + 101, 1000)];
    assert!(pieces.concat() == bytes);
}

#[test]
fn bit_buckets_take_unwanted_data() {
    let mut rig = Rig::new();
    let blocks = 300;
    let bytes = pattern(6, blocks * BLOCK_BYTES);
    rig.write(DATA, &bytes);
    let write = rig.command(op::WRITE, 0, blocks);
    assert_eq!(rig.run(write), Status::SUCCESS);
    let target = DATA + 0x10_0000;
    rig.write(target, &vec![0xEE; 2 * bytes.len()]);
    // Holes at the beginning, across a step's end, and at the end.
    let (hole, from, to) = (700, 60_000, 70_000);
    let end = bytes.len() as u64;
    let list = [
        descriptor(BIT_BUCKET, 0, hole),
        descriptor(DATA_BLOCK, target, from - hole),
        descriptor(BIT_BUCKET, 0xDEAD, to - from),
        descriptor(DATA_BLOCK, target + 100_000, end - to - 1),
        descriptor(BIT_BUCKET, 0, 1),
    ];
    let read = rig.command(op::READ, 0, blocks);
    rig.write(LISTS, &list.concat());
    assert_eq!(rig.run(with_sgl(read, descriptor(LAST_SEGMENT, LISTS, 80))), Status::SUCCESS);
    assert!(rig.read(target, from - hole) == bytes[hole as usize..from as usize]);
    assert!(rig.read(target + from - hole, 64).iter().all(|byte| *byte == 0xEE));
    assert!(rig.read(target + 100_000, end - to - 1) == bytes[to as usize..bytes.len() - 1]);
    assert_eq!(rig.read(target + 100_000 + end - to - 1, 1), [0xEE]);
    // Nothing but a bucket.
    let read = rig.command(op::READ, 0, 8);
    assert_eq!(
        rig.run(with_sgl(read, descriptor(BIT_BUCKET, 0, 8 * BLOCK_BYTES))),
        Status::SUCCESS
    );
    assert_eq!(rig.set.stats(1).unwrap().reads.get(), 2);
}

#[test]
fn pointers_that_are_wrong_have_a_status_and_change_nothing() {
    let mut rig = Rig::new();
    for opcode in [op::READ, op::WRITE, op::COMPARE] {
        let command = ranged(Command::build(opcode, 1, 1), 0, 32);
        let block = descriptor(DATA_BLOCK, DATA, 32 * BLOCK_BYTES);
        let mut cases = vec![
            (command.with_prps(DATA + 2, 0), Status::INVALID_PRP_OFFSET),
            (command.with_prps(DATA, LISTS + 4), Status::INVALID_PRP_OFFSET),
            (command.with_prps(MEMORY_BYTES, LISTS + 0x3000), Status::DATA_TRANSFER_ERROR),
            (command.with_prps(DATA, MEMORY_BYTES), Status::DATA_TRANSFER_ERROR),
            (or(command, 0, 3 << 14), Status::INVALID_FIELD),
        ];
        for kind in [0x40, 0x50, 0x0F, 0xF0] {
            cases.push((
                with_sgl(command, descriptor(kind, DATA, 32 * BLOCK_BYTES)),
                Status::INVALID_SGL_TYPE,
            ));
        }
        let short = descriptor(DATA_BLOCK, DATA, 31 * BLOCK_BYTES);
        cases.push((with_sgl(command, short), Status::INVALID_DATA_SGL_LENGTH));
        let nowhere = descriptor(DATA_BLOCK, MEMORY_BYTES - 512, 32 * BLOCK_BYTES);
        cases.push((with_sgl(command, nowhere), Status::DATA_TRANSFER_ERROR));
        cases.push((
            with_sgl(command, descriptor(SEGMENT, LISTS + 0x2000, 24)),
            Status::INVALID_SGL_SEGMENT,
        ));
        rig.write(LISTS + 0x2000, &[block, block].concat());
        cases.push((
            with_sgl(command, descriptor(SEGMENT, LISTS + 0x2000, 16)),
            Status::INVALID_SGL_SEGMENT,
        ));
        // Entries of a list that are no pages.
        let entries: Vec<u8> =
            (1..5_u64).flat_map(|page| (DATA + page * PAGE + 8).to_le_bytes()).collect();
        rig.write(LISTS, &entries);
        cases.push((command.with_prps(DATA, LISTS), Status::INVALID_PRP_OFFSET));
        for (command, status) in cases {
            assert_eq!(rig.run(command), status, "{opcode:#x}: {command:?}");
        }
    }
    let verify = rig.command(op::VERIFY, 0, 32);
    assert_eq!(rig.run(verify), Status::SUCCESS);
    assert_eq!(rig.set.stats(1).unwrap().writes.get(), 0);
}

#[test]
fn doorbells_out_of_range_are_reported_and_ignored() {
    let mut rig = Rig::new();
    let invalid = QueueEvent::InvalidDoorbellValue { queue: 1 };
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
    rig.doorbells.set_submission_tail(1, 64);
    for _ in 0..10 {
        rig.turn();
    }
    assert_eq!(*rig.events.lock().unwrap(), [invalid], "once for each value that is wrong");
    // Not more often than once a millisecond, whatever is written.
    for value in 65..165 {
        rig.doorbells.set_submission_tail(1, value);
        rig.turn();
    }
    assert_eq!(rig.event_count(), 1);
    assert_eq!(rig.set.stats(1).unwrap().invalid_doorbells.get(), 101);
    for _ in 0..1_000 {
        rig.turn();
    }
    rig.doorbells.set_submission_tail(1, u32::MAX);
    rig.turn();
    assert_eq!(rig.event_count(), 2);
    // The right value brings it back.
    assert_eq!(rig.run(command), Status::SUCCESS);
    assert_eq!(rig.take(1), None);
}

#[test]
fn a_head_past_what_was_posted_is_reported_and_ignored() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(1, 8, None);
    rig.add_submission(1, 1, 8);
    for head in [8, 5, u32::MAX, 1] {
        rig.doorbells.set_completion_head(1, head);
        let command = rig.command(op::READ, 0, 1);
        rig.submit(1, &command);
        let mut done = None;
        rig.until("a completion", |rig| {
            done = done.or_else(|| rig.take_quietly(1));
            done.is_some()
        });
        assert_eq!(done.unwrap().command_id, command.id());
    }
    assert!(rig.event_count() > 0);
    rig.doorbells.set_completion_head(1, rig.completions[&1].head());
    for _ in 0..30 {
        let command = rig.command(op::READ, 0, 1);
        assert_eq!(rig.run(command), Status::SUCCESS);
    }
}

#[test]
fn games_with_the_phase_tag_fool_the_guest_alone() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(1, 8, None);
    rig.add_submission(1, 1, 8);
    let entries = rig.completion_setup(1, 8, None).address.0;
    for round in 0..50_u8 {
        let command = rig.command(op::READ, 0, 1);
        rig.submit(1, &command);
        rig.turn();
        // The posted entry is there, and then overwritten, and the queue continues.
        assert!(rig.take(1).is_some());
        let index = rig.completions[&1].head();
        let inverted = if round % 2 == 0 { [0xFF; 16] } else { [0; 16] };
        for entry in (0..8).filter(|entry| *entry != u64::from(index)) {
            let address = GuestAddress(entries + entry * 16);
            rig.memory.write_slice(address, &inverted, &mut RegionHint::default()).unwrap();
        }
        // Put back what the guest's own ring needs: entries of the round before.
        let phase = |entry: u64| {
            let done = u64::from(round) + 1;
            (done.saturating_sub(entry).div_ceil(8) % 2) as u8
        };
        for entry in 0..8 {
            let mut bytes = [0; 16];
            bytes[14] = phase(entry);
            rig.memory
                .write_slice(GuestAddress(entries + entry * 16), &bytes, &mut RegionHint::default())
                .unwrap();
        }
    }
    assert_eq!(rig.set.stats(1).unwrap().requests.get(), 50);
}

#[test]
fn truncated_memory_stops_the_queue_and_says_so() {
    let mut rig = Rig::new();
    rig.file.set_len(0).unwrap();
    // Rings of zeros: whatever is read there, is no crash.
    for tail in (0..64).cycle().take(20_000) {
        rig.doorbells.set_submission_tail(1, tail);
        rig.doorbells.set_completion_head(1, tail);
        rig.turn();
        if rig.event_count() > 0
            && rig.events.lock().unwrap().contains(&QueueEvent::Fatal { queue: 1 })
        {
            return;
        }
    }
    panic!("the loss of guest memory is not noticed");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any commands of a guest, each command is completed once, and the queue works afterwards.
    #[test]
    fn any_commands(
        commands in prop::collection::vec((any::<[u8; 64]>(), any::<u16>()), 1..60),
        list in prop::collection::vec(any::<u64>(), 512),
    ) {
        let mut rig = Rig::new();
        let list: Vec<u8> = list
            .iter()
            .flat_map(|entry| ((entry % (MEMORY_BYTES / 2)) & !(PAGE - 1)).to_le_bytes())
            .collect();
        rig.write(LISTS, &list);
        let count = commands.len();
        for (index, (bytes, shape)) in commands.into_iter().enumerate() {
            // Bent towards what is not refused at once.
            let first = u32::from(bytes[0]) | u32::from(shape) << 8 & 0xC300 | (index as u32) << 16;
            let mut command = Command::new(bytes).with_dword(0, first);
            if shape & 0x10 != 0 {
                let known = command.dword(0) & !0xFF | u32::from(shape & 0x0D);
                command = command.with_dword(0, known).with_dword(1, 1);
            }
            if shape & 0x20 != 0 {
                command = ranged(command, u64::from(shape), u64::from(shape % 500) + 1);
            }
            if shape & 0x40 != 0 {
                command = command.with_prps(DATA + u64::from(shape % 1024) * 4, LISTS);
            }
            rig.push(1, &command);
        }
        rig.ring(1);
        let mut seen = vec![false; count];
        for _ in 0..count {
            let id = usize::from(rig.wait().command_id);
            prop_assert!(!std::mem::replace(&mut seen[id], true));
        }
        prop_assert_eq!(rig.take(1), None);
        let command = rig.command(op::READ, 0, 8);
        prop_assert_eq!(rig.run(command), Status::SUCCESS);
    }
}
