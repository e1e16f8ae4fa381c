//! Changes under load: memory, namespace, and commands that are aborted.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use sidecore_block::BlockDevice;
use sidecore_memory::reaper::wait_until_reaped;
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};
use sidecore_nvme::{Done, QueueEvent, QueueHost, Status};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use crate::rig::{
    DATA, LISTS, MEMORY_BYTES, Options, Rig, flag, flush, is_set, map, map_part, namespace, op,
    pattern, ram, status,
};

fn slow() -> Options {
    let store = Arc::new(DelayStore::new(ram(false), Nanos::from_micros(100)));
    Options { store, ..Options::default() }
}

/// A region more, of 1 MiB behind the guest's memory, in a file of this name.
fn with_extra(memory: &GuestMemory, name: &str) -> GuestMemory {
    let file: OwnedFd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    let region = RegionSpec {
        guest_address: GuestAddress(MEMORY_BYTES),
        user_address: UserAddress(MEMORY_BYTES),
        len_bytes: 1 << 20,
        file,
        file_offset_bytes: 0,
    };
    memory.with_region(region).unwrap()
}

/// Whether this process has a mapping of the file.
fn is_mapped(name: &str) -> bool {
    wait_until_reaped();
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

#[test]
fn memory_that_goes_while_it_is_in_use() {
    let mut rig = Rig::with(slow());
    let name = "unmapped-under-load";
    let more = with_extra(&rig.memory, name);
    let (done, changed) = flag();
    rig.set.set_memory(&more, done);
    rig.turn();
    assert!(is_set(&changed), "nothing was in flight");
    drop(more);
    // Every kind of command has its data there.
    let mut ids = Vec::new();
    for opcode in [op::READ, op::WRITE, op::COMPARE, op::READ, op::DATASET_MANAGEMENT] {
        let command = rig.command_at(opcode, 0, 16, MEMORY_BYTES, LISTS);
        // Deallocate one range, of no blocks.
        let command =
            if opcode == op::DATASET_MANAGEMENT { command.with_dword(11, 4) } else { command };
        ids.push(command.id());
        rig.push(1, &command);
    }
    rig.ring(1);
    rig.turn();
    let smaller = rig.memory.clone();
    let (done, changed) = flag();
    rig.set.set_memory(&smaller, done);
    rig.turn();
    assert!(!is_set(&changed) && is_mapped(name), "the store still works there");
    // A command that comes meanwhile waits, and finds the memory gone.
    let late = rig.command_at(op::READ, 0, 16, MEMORY_BYTES, LISTS);
    rig.submit(1, &late);
    for _ in &ids {
        let completion = rig.wait();
        assert!(ids.contains(&completion.command_id));
        assert!(
            Status::from_field(completion.status).is_success() || completion.command_id == ids[2]
        );
    }
    rig.until("the table is let go of", |_| is_set(&changed));
    assert!(!is_mapped(name), "the old table is still mapped");
    let completion = rig.wait();
    assert_eq!(completion.command_id, late.id());
    assert_eq!(status(&completion), Status::DATA_TRANSFER_ERROR);
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
}

#[test]
fn a_queue_that_is_not_in_the_new_table_waits_for_one_that_has_it() {
    let mut rig = Rig::new();
    for _ in 0..10 {
        let command = rig.command(op::READ, 0, 1);
        assert_eq!(rig.run(command), Status::SUCCESS);
    }
    for part in [GuestMemory::empty(), map_part(&rig.file, 0x1000)] {
        let (done, changed) = flag();
        rig.set.set_memory(&part, done);
        rig.turn();
        assert!(is_set(&changed));
        let command = rig.command(op::READ, 0, 1);
        rig.submit(1, &command);
        for _ in 0..100 {
            rig.turn();
            assert_eq!(rig.take(1), None);
        }
        let whole = map(&rig.file);
        rig.set.set_memory(&whole, Done::ignored());
        assert_eq!(rig.wait().command_id, command.id());
    }
    for _ in 0..200 {
        let command = rig.command(op::WRITE, 0, 1);
        assert_eq!(rig.run(command), Status::SUCCESS, "positions and phase were kept");
    }
    // And one that waits can be ended.
    rig.set.set_memory(&GuestMemory::empty(), Done::ignored());
    rig.turn();
    let (done, gone) = flag();
    rig.set.stop_all(done);
    rig.until("it is gone", |_| is_set(&gone));
}

#[test]
fn several_changes_come_in_order_and_each_is_answered() {
    let mut rig = Rig::with(slow());
    let command = rig.command(op::WRITE, 0, 1);
    rig.submit(1, &command);
    rig.turn();
    let answers: Vec<_> = (0..4)
        .map(|index| {
            let (done, called) = flag();
            match index {
                0 => rig.set.set_memory(&GuestMemory::empty(), done),
                1 => rig.set.set_namespace(None, done),
                2 => rig.set.set_memory(&map(&rig.file), done),
                _ => rig.set.set_namespace(Some(namespace(ram(false), 512)), done),
            }
            called
        })
        .collect();
    assert!(answers.iter().all(|called| !is_set(called)));
    assert_eq!(rig.wait().command_id, command.id());
    rig.until("all are done", |_| answers.iter().all(|called| is_set(called)));
    assert_eq!(rig.run(command), Status::SUCCESS);
}

#[test]
fn another_namespace_is_another_store() {
    let mut rig = Rig::with(slow());
    let bytes = pattern(1, 512);
    rig.write(DATA, &bytes);
    let write = rig.command(op::WRITE, 0, 1);
    rig.submit(1, &write);
    rig.turn();
    let (done, changed) = flag();
    rig.set.set_namespace(Some(namespace(ram(false), 512)), done);
    let read = rig.command_at(op::READ, 0, 1, DATA + 4096, LISTS);
    rig.submit(1, &read);
    rig.turn();
    assert!(!is_set(&changed));
    assert_eq!(rig.wait().command_id, write.id());
    assert_eq!(rig.wait().command_id, read.id());
    assert!(is_set(&changed));
    assert!(rig.read(DATA + 4096, 512).iter().all(|byte| *byte == 0), "that is the old store");
    // A queue that comes later has it, too.
    rig.add_completion(2, 64, None);
    rig.add_submission(2, 2, 64);
    rig.submit(2, &read);
    rig.until("a completion", |rig| rig.take(2).is_some());
}

#[test]
fn a_command_that_waits_inside_can_be_aborted() {
    let mut rig = Rig::with(slow());
    let compares: Vec<_> = (0..6).map(|_| rig.command(op::COMPARE, 0, 8)).collect();
    for command in &compares {
        rig.push(1, command);
    }
    rig.ring(1);
    rig.turn();
    let abort = |rig: &Rig, submission, command| {
        let (answer, answered) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (aborted, called) = (Arc::clone(&answer), Arc::clone(&answered));
        rig.set.abort(submission, command, move |was| {
            aborted.store(was, Ordering::Relaxed);
            called.store(true, Ordering::Relaxed);
        });
        assert!(is_set(&answered));
        is_set(&answer)
    };
    assert!(!abort(&rig, 1, compares[0].id()), "the store has it");
    assert!(!abort(&rig, 2, compares[5].id()) && !abort(&rig, 1, 999));
    assert!(abort(&rig, 1, compares[5].id()));
    let completion = rig.wait();
    assert_eq!(completion.command_id, compares[5].id());
    assert_eq!(status(&completion), Status::ABORT_REQUESTED);
    for command in &compares[..5] {
        assert_eq!(rig.wait().command_id, command.id());
    }
    assert_eq!(rig.take(1), None);
}

#[test]
fn memory_is_not_let_go_of_while_a_queue_is_ending() {
    let mut rig = Rig::with(slow());
    let name = "unmapped-while-ending";
    let more = with_extra(&rig.memory, name);
    rig.set.set_memory(&more, Done::ignored());
    rig.turn();
    drop(more);
    let command = rig.command_at(op::WRITE, 0, 16, MEMORY_BYTES, LISTS);
    rig.submit(1, &command);
    rig.turn();
    let (done, gone) = flag();
    rig.set.stop_completion_queue(1, done);
    let (done, all_gone) = flag();
    rig.set.stop_all(done);
    let (done, changed) = flag();
    let smaller = rig.memory.clone();
    rig.set.set_memory(&smaller, done);
    rig.turn();
    assert!(
        !is_set(&gone) && !is_set(&all_gone) && !is_set(&changed),
        "the store still works there"
    );
    assert!(
        rig.set.start_completion_queue(rig.completion_setup(1, 64, None)).is_err(),
        "its number is taken"
    );
    rig.until("it is gone", |_| is_set(&gone));
    assert!(is_set(&all_gone) && is_set(&changed) && !is_mapped(name));
    rig.add_completion(1, 64, None);
    rig.add_submission(1, 1, 64);
    let command = rig.command(op::READ, 0, 1);
    assert_eq!(rig.run(command), Status::SUCCESS);
}

/// Whether flushes go on.
static LET_GO: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// A flush that waits for that.
fn held_flush(store: &dyn BlockDevice) -> std::io::Result<()> {
    let (is_open, opened) = &LET_GO;
    drop(opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    flush(store)
}

fn wait_for(flag: &AtomicBool) {
    for _ in 0..10_000 {
        if is_set(flag) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("never");
}

#[test]
fn a_flush_is_waited_for_by_another_namespace_and_nothing_else() {
    let mut rig = Rig::with(Options { store: ram(true), flush: held_flush, ..Options::default() });
    rig.set.stop_all(Done::ignored());
    rig.until("all queues are gone", |rig| rig.queues() == 0);
    let (done, flushed) = flag();
    rig.set.flush(done);
    let (done, changed) = flag();
    rig.set.set_memory(&rig.memory, done);
    let (done, stopped) = flag();
    rig.set.stop_all(done);
    assert!(
        is_set(&changed) && is_set(&stopped),
        "it holds no memory, and a client waits for a reset"
    );
    let (done, replaced) = flag();
    rig.set.set_namespace(None, done);
    assert!(!is_set(&replaced) && !is_set(&flushed));
    *LET_GO.0.lock().unwrap() = true;
    LET_GO.1.notify_all();
    wait_for(&flushed);
    wait_for(&replaced);
    assert_eq!(rig.event_count(), 0);
}

#[test]
fn a_flush_that_fails_is_reported_and_one_of_nothing_is_not_made() {
    let fail = |_: &dyn BlockDevice| Err(std::io::Error::other("no"));
    for (volatile_cache, failures) in [(true, 1), (false, 0)] {
        let rig =
            Rig::bare(Options { store: ram(volatile_cache), flush: fail, ..Options::default() });
        let (done, flushed) = flag();
        rig.set.flush(done);
        wait_for(&flushed);
        assert_eq!(*rig.events.lock().unwrap(), vec![QueueEvent::FlushFailed; failures]);
    }
}
