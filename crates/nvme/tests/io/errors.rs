//! Error log entries of failed commands.

use std::sync::Arc;

use sidecore_nvme::{Command, QueueHost, Status};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};

use crate::rig::{BLOCKS, Options, Rig, op, or, ram};

const FUA: u32 = 1 << 30;
const FIRST: u32 = 1 << 8;
const SECOND: u32 = 2 << 8;

/// An entry of the log, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    count: u64,
    queue: u16,
    id: u16,
    status: Status,
    lba: u64,
    nsid: u32,
    opcode: u8,
}

/// The entries that there are, the newest first.
fn log(rig: &Rig) -> Vec<Entry> {
    let page = rig.set.error_log().page();
    let entries = page.chunks_exact(64).take_while(|entry| entry[..8] != [0; 8]);
    let entry = |entry: &[u8]| {
        let long = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
        let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        assert_eq!((word(14), entry[63]), (0xFFFF, 1));
        let (status, nsid) = (Status::from_field(word(12)), long(24) as u32);
        Entry {
            count: long(0),
            queue: word(8),
            id: word(10),
            status,
            lba: long(16),
            nsid,
            opcode: entry[31],
        }
    };
    entries.map(entry).collect()
}

/// The newest entry is about this command.
#[track_caller]
fn assert_logged(rig: &Rig, command: &Command, status: Status, lba: u64) {
    let log = log(rig);
    let (id, opcode) = (command.id(), command.opcode());
    let expected = Entry {
        count: log.len() as u64,
        queue: 1,
        id,
        status: status.more(),
        lba,
        nsid: 1,
        opcode,
    };
    assert_eq!(log.first(), Some(&expected));
}

fn failing(affected: Affected, fault: Fault) -> Rig {
    let rule = FaultRule { affected, when: When::EveryNth(1), fault };
    let store = FaultStore::new(ram(true), FaultPlan { seed: 1, rules: vec![rule] });
    Rig::with(Options { store: Arc::new(store), ..Options::default() })
}

#[test]
fn a_refused_command_says_which_block_it_wanted() {
    let mut rig = Rig::new();
    for opcode in [op::READ, op::WRITE, op::COMPARE, op::WRITE_ZEROES, op::VERIFY] {
        let command = rig.command(opcode, BLOCKS, 8);
        assert_eq!(rig.run(command), Status::LBA_OUT_OF_RANGE);
        assert_logged(&rig, &command, Status::LBA_OUT_OF_RANGE, BLOCKS);
    }
    let flush = or(rig.command(op::FLUSH, 0, 1), 10, 77).with_dword(1, 3);
    assert_eq!(rig.run(flush), Status::INVALID_FIELD);
    let newest = log(&rig).swap_remove(0);
    assert_eq!((newest.nsid, newest.lba, newest.opcode), (3, 0, op::FLUSH));
    // In steps, and refused when it begins.
    let deallocate = rig
        .command(op::DATASET_MANAGEMENT, 0, 1)
        .with_prps(!0xFFF, 0)
        .with_dword(10, 0)
        .with_dword(11, 4);
    assert_eq!(rig.run(deallocate), Status::DATA_TRANSFER_ERROR);
    assert_logged(&rig, &deallocate, Status::DATA_TRANSFER_ERROR, 0);
}

#[test]
fn what_the_store_fails_is_logged_with_the_command_that_asked_for_it() {
    for (affected, opcode, status) in [
        (Affected::Reads, op::READ, Status::UNRECOVERED_READ_ERROR),
        (Affected::Reads, op::COMPARE, Status::UNRECOVERED_READ_ERROR),
        (Affected::Reads, op::VERIFY, Status::UNRECOVERED_READ_ERROR),
        (Affected::Writes, op::WRITE, Status::WRITE_FAULT),
    ] {
        let mut rig = failing(affected, Fault::Eio);
        let command = rig.command(opcode, 40, 8);
        assert_eq!(rig.run(command), status);
        assert_logged(&rig, &command, status, 40);
    }
    // The flush behind a write is the write's.
    let mut rig = failing(Affected::Flushes, Fault::Eio);
    for opcode in [op::WRITE, op::WRITE_ZEROES] {
        let command = or(rig.command(opcode, 40, 8), 12, FUA);
        assert_eq!(rig.run(command), Status::WRITE_FAULT);
        assert_logged(&rig, &command, Status::WRITE_FAULT, 40);
    }
}

#[test]
fn of_a_fused_pair_the_half_that_failed_is_logged() {
    let mut rig = failing(Affected::Writes, Fault::Eio);
    let compare = or(rig.command(op::COMPARE, 5, 1), 0, FIRST);
    let write = or(rig.command(op::WRITE, 5, 1), 0, SECOND);
    rig.push(1, &compare);
    rig.submit(1, &write);
    assert_eq!(Status::from_field(rig.wait().status), Status::SUCCESS);
    assert_eq!(Status::from_field(rig.wait().status), Status::WRITE_FAULT.more());
    assert_logged(&rig, &write, Status::WRITE_FAULT, 5);
    // A compare that differs is a result, and no error.
    let mut rig = Rig::new();
    rig.write(crate::rig::DATA, &[1; 512]);
    let compare = rig.command(op::COMPARE, 0, 1);
    assert_eq!(rig.run(compare), Status::COMPARE_FAILURE);
    assert_eq!(log(&rig), []);
}

#[test]
fn the_log_holds_the_last_64_and_counts_them_all() {
    let mut rig = Rig::new();
    for _ in 0..100 {
        let command = rig.command(op::READ, BLOCKS, 1);
        assert_eq!(rig.run(command), Status::LBA_OUT_OF_RANGE);
    }
    let log = log(&rig);
    assert_eq!(
        (log.len(), log[0].count, log[63].count, rig.set.error_log().count()),
        (64, 100, 37, 100)
    );
    assert_eq!(rig.event_count(), 0, "no interrupt is raised for it");
}
