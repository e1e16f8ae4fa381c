//! Doorbells in shared memory: the admin queue's among them, and each client's own.

mod controller_rig;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use controller_rig::*;
use sidecore_memory::SharedPages;
use sidecore_nvme::{ControllerWorker, Done, FunctionState, HandedOver, PciFunction, Status};
use sidecore_ring::nvme::{DoorbellStride, Doorbells};

const PATIENCE: Duration = Duration::from_secs(20);

/// The doorbell memory as a client of the function maps it.
fn mapped(rig: &Rig) -> Doorbells {
    Doorbells::from_file(rig.function.area_file(0).unwrap(), 64, DoorbellStride::Line).unwrap()
}

fn inode(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_ino
}

/// Lets the function be taken away from its process.
fn leave(rig: &Rig) -> HandedOver {
    let (reply, left) = channel();
    rig.function.hand_over(Box::new(move |left| reply.send(left).unwrap()));
    left.recv_timeout(PATIENCE).unwrap().expect("it can be left")
}

#[test]
fn admin_commands_are_taken_from_a_mapped_doorbell() {
    let mut rig = Rig::ready();
    let doorbells = mapped(&rig);
    let id = rig.queue(identify(1, 0));
    doorbells.set_submission_tail(0, 1);
    let next = rig.function.run().expect("it wants to be run again");
    assert!(next <= Instant::now() + Duration::from_millis(1));
    let answer = rig.peek_answer().unwrap();
    assert_eq!((answer.id, answer.status), (id, Status::SUCCESS));
    // Round the queue: each completion is given back by a store, too.
    for command in 2..200_u32 {
        rig.queue(get_features(7, 0));
        doorbells.set_completion_head(0, (command - 1) % ENTRIES);
        doorbells.set_submission_tail(0, command % ENTRIES);
        rig.function.run();
        assert_eq!(rig.peek_answer().expect("taken").status, Status::SUCCESS);
    }
    assert!(rig.function.run().is_some());
    rig.write32(CC, 0);
    assert!(rig.function.run().is_none(), "nothing is to be looked at");
}

#[test]
fn a_doorbell_that_the_queue_cannot_have_is_reported_once() {
    let mut rig = Rig::ready();
    let doorbells = mapped(&rig);
    rig.submit(event_request());
    doorbells.set_submission_tail(0, 99);
    rig.function.run();
    let told = rig.answer().expect("an event");
    assert_eq!((told.result, told.status), (0x0001_0100, Status::SUCCESS));
    rig.log_page(1, 64);
    rig.submit(event_request());
    rig.function.run();
    rig.function.run();
    assert!(rig.answer().is_none());
}

#[test]
fn what_was_stored_before_a_controller_is_enabled_means_nothing() {
    let mut rig = Rig::new();
    let doorbells = mapped(&rig);
    for _ in 0..3 {
        doorbells.set_submission_tail(0, 5);
        doorbells.set_completion_head(0, 3);
        rig.enable();
        assert_eq!((doorbells.submission_tail(0), doorbells.completion_head(0)), (0, 0));
        rig.function.run();
        assert!(rig.peek_answer().is_none());
        rig.ok(get_features(7, 0));
        rig.write32(CC, 0);
    }
}

#[test]
fn the_worker_thread_polls_mapped_doorbells() {
    let worker = ControllerWorker::start().unwrap();
    let mut rigs = [0, 1, 2]
        .map(|_| Rig::ready_with(Options { worker: Some(worker.clone()), ..Options::default() }));
    for round in 1..=20 {
        for rig in &mut rigs {
            rig.queue(identify(1, 0));
            mapped(rig).set_submission_tail(0, round);
        }
        for rig in &mut rigs {
            let end = Instant::now() + PATIENCE;
            while rig.peek_answer().is_none() {
                assert!(Instant::now() < end, "the doorbells are not read");
                std::thread::yield_now();
            }
            mapped(rig).set_completion_head(0, round);
        }
    }
}

#[test]
fn each_client_gets_memory_of_its_own() {
    let mut rig = Rig::new();
    let mut before: Vec<(u64, Doorbells)> = Vec::new();
    for _ in 0..3 {
        rig.function.connect().unwrap();
        let doorbells = mapped(&rig);
        let file = inode(&rig.function.area_file(0).unwrap());
        assert!(before.iter().all(|(earlier, _)| *earlier != file));
        for queue in 0..=64 {
            assert_eq!(
                (doorbells.submission_tail(queue), doorbells.completion_head(queue)),
                (0, 0)
            );
        }
        rig.enable();
        rig.queue(identify(1, 0));
        for (_, gone) in &before {
            (0..=64).for_each(|queue| gone.set_submission_tail(queue, 1));
        }
        rig.function.run();
        assert!(rig.peek_answer().is_none(), "a client that has gone rang the doorbell");
        doorbells.set_submission_tail(0, 1);
        rig.function.run();
        assert!(rig.peek_answer().is_some());
        rig.function.reset(Done::ignored());
        before.push((file, doorbells));
    }
    // One that has shown nothing needs no other.
    rig.function.connect().unwrap();
    rig.function.connect().unwrap();
    let trapped = Rig::with(Options { mapped: false, ..Options::default() });
    assert!(trapped.function.area_file(0).is_err());
    trapped.function.connect().unwrap();
}

#[test]
fn the_next_process_has_the_clients_memory_until_the_client_goes() {
    let mut rig = Rig::ready();
    let doorbells = mapped(&rig);
    let ids = [rig.queue(identify(1, 0)), rig.queue(identify(1, 0))];
    doorbells.set_submission_tail(0, 1);
    rig.function.run();
    assert_eq!(rig.peek_answer().unwrap().id, ids[0]);
    let left = leave(&rig);
    // While there is no process.
    doorbells.set_submission_tail(0, 2);
    doorbells.set_completion_head(0, 1);
    let mut next = Rig::new();
    let (memory, file) = (rig.memory.clone(), inode(&left.doorbells));
    next.function.take_over(left, memory).unwrap();
    assert_eq!(inode(&next.function.area_file(0).unwrap()), file);
    next.function.run();
    assert_eq!(rig.peek_answer().unwrap().id, ids[1]);
    // That client goes; the next one is shown other memory, in this process and in those after it.
    next.function.reset(Done::ignored());
    next.function.connect().unwrap();
    assert_ne!(inode(&next.function.area_file(0).unwrap()), file);
    next.enable();
    next.queue(identify(1, 0));
    doorbells.set_submission_tail(0, 1);
    next.function.run();
    assert!(next.peek_answer().is_none());
}

/// A state as the process of an earlier version has left it: doorbells with a page for each pair,
/// and of the admin queue none that a client could have mapped.
#[test]
fn doorbells_of_an_earlier_version_are_gone_on_with() {
    let mut rig = Rig::ready();
    rig.ok(identify(1, 0));
    rig.create_pair(2);
    let id = rig.queue(identify(1, 0));
    let HandedOver { state, events, .. } = leave(&rig);
    let mut state = serde_json::to_value(state).unwrap();
    state.as_object_mut().unwrap().remove("doorbell_stride").unwrap();
    state["controller"]["registers"]["doorbell_stride"] = 9.into();
    let pages = SharedPages::new("sidecore-doorbells", (2 + 64) * 4096).unwrap();
    let file = || pages.file().try_clone_to_owned().unwrap();
    let client = Doorbells::from_file(file(), 64, DoorbellStride::HalfPage).unwrap();
    let state: FunctionState = serde_json::from_value(state).unwrap();
    let next = Rig::new();
    next.function
        .take_over(HandedOver { state, events, doorbells: file() }, rig.memory.clone())
        .unwrap();
    assert_eq!(next.read32(4) & 0xF, 9, "CAP.DSTRD is as its client knows it");
    assert_eq!(next.function.bar(0).unwrap().mappable.unwrap().len_bytes, 65 * 4096);
    next.function.run();
    assert!(rig.peek_answer().is_none());
    // The admin queue's doorbell is a message to this client.
    next.write32(0x1000, 4);
    assert_eq!(rig.peek_answer().unwrap().id, id);
    next.write32(0x1000 + 2 * 4096, 7);
    assert_eq!(client.submission_tail(2), 7);
    next.function.reset(Done::ignored());
    next.function.connect().unwrap();
    assert_eq!(next.read32(4) & 0xF, 4, "its next client finds what every client finds");
}

/// Linux takes a namespace away whose identifiers change while it is used: a host that an earlier
/// version has told of no UUID hears of none as long as it is there.
#[test]
fn a_host_that_knows_no_uuid_is_told_of_none() {
    let uuid = |list: &[u8]| list.chunks(20).any(|descriptor| descriptor[0] == 3);
    let mut rig = Rig::ready();
    rig.ok(set_features(0x0B, 0x100));
    assert!(uuid(&rig.identify(3, 1)[..60]));
    let mut left = leave(&rig);
    let mut json = serde_json::to_value(&left.state).unwrap();
    json["controller"]["namespace"].as_object_mut().unwrap().remove("uuid").unwrap();
    left.state = serde_json::from_value(json).unwrap();
    for _ in 0..2 {
        let next = Rig::new();
        next.function.take_over(left, rig.memory.clone()).unwrap();
        rig.function = next.function;
        assert!(!uuid(&rig.identify(3, 1)[..60]));
        rig.submit(event_request());
        assert!(rig.answer().is_none(), "its namespace has not changed");
        rig.write32(CC, 0);
        rig.enable();
        assert!(!uuid(&rig.identify(3, 1)[..60]), "not after a reset by the host either");
        rig.ok(set_features(0x0B, 0x100));
        left = leave(&rig);
    }
    let next = Rig::new();
    next.function.take_over(left, rig.memory.clone()).unwrap();
    next.function.reset(Done::ignored());
    next.function.connect().unwrap();
    rig.function = next.function;
    rig.function.set_memory(rig.memory.clone(), Done::ignored());
    rig.enable();
    assert!(uuid(&rig.identify(3, 1)[..60]));
}

#[test]
fn a_state_with_other_doorbells_than_its_file_is_not_gone_on_with() {
    for (stride, file_bytes) in
        [(4_u8, 66 * 4096), (9, 66 * 4096), (9, 4 * 4096), (5, 4 * 4096), (4, 4096)]
    {
        let rig = Rig::ready();
        let HandedOver { mut state, events, .. } = leave(&rig);
        let mut json = serde_json::to_value(&state).unwrap();
        json["doorbell_stride"] = stride.into();
        state = serde_json::from_value(json).unwrap();
        let pages = SharedPages::new("sidecore-doorbells", file_bytes).unwrap();
        let doorbells = pages.file().as_fd().try_clone_to_owned().unwrap();
        let next = Rig::new();
        let left = HandedOver { state, events, doorbells };
        assert!(
            next.function.take_over(left, rig.memory.clone()).is_err(),
            "{stride} in {file_bytes} bytes"
        );
        // After all attempts, the next client has its own doorbells.
        next.function.reset(Done::ignored());
        next.function.connect().unwrap();
        assert_eq!((next.read32(4) & 0xF, mapped(&next).len_bytes()), (4, 3 * 4096));
    }
}
