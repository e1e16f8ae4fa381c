//! Both sides of NVMe's queues against each other, and against words written down by hand.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use sidecore_memory::{
    GuestAddress, GuestMemory, MemoryError, RegionHint, RegionSpec, SharedPages, UserAddress,
};

use sidecore_spec_nvme::command::{COMMAND_BYTES, COMPLETION_BYTES, MAX_ENTRIES};

use super::*;
use crate::cell::Words;
use crate::driver::nvme::{CompletionRing, DoorbellWords, HostShadow, SubmissionRing};

/// The base in the device's addresses, deliberately different from a VMM's.
const BASE: u64 = 0x4000_0000;
const USER_BASE: u64 = 0x7000_0000_0000;
const COMMANDS_AT: u64 = BASE;
const COMPLETIONS_AT: u64 = BASE + 0x40_0000;
const SHADOW_AT: u64 = BASE + 0x60_0000;
const EVENTS_AT: u64 = BASE + 0x61_0000;
const MEMORY_BYTES: u64 = 8 << 20;

fn region(file: &File, guest: u64, len_bytes: u64, file_offset_bytes: u64) -> RegionSpec {
    RegionSpec {
        guest_address: GuestAddress(guest),
        user_address: UserAddress(guest - BASE + USER_BASE),
        len_bytes,
        file: file.as_fd().try_clone_to_owned().unwrap(),
        file_offset_bytes,
    }
}

fn file() -> File {
    let file =
        File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(MEMORY_BYTES).unwrap();
    file
}

fn memory_of(file: &File) -> GuestMemory {
    GuestMemory::map(vec![region(file, BASE, MEMORY_BYTES, 0)]).unwrap()
}

fn memory() -> GuestMemory {
    memory_of(&file())
}

fn submission(memory: &GuestMemory, entries: u32) -> (SubmissionRing, SubmissionQueue) {
    let address = GuestAddress(COMMANDS_AT);
    let window = memory.guest_window(address, entries as usize * COMMAND_BYTES, 4096).unwrap();
    (
        SubmissionRing::new(window, entries).unwrap(),
        SubmissionQueue::new(memory, address, entries, 0).unwrap(),
    )
}

fn completion(memory: &GuestMemory, entries: u32) -> (CompletionRing, CompletionQueue) {
    let address = GuestAddress(COMPLETIONS_AT);
    let window = memory.guest_window(address, entries as usize * COMPLETION_BYTES, 4096).unwrap();
    (
        CompletionRing::new(window, entries).unwrap(),
        CompletionQueue::new(memory, address, entries).unwrap(),
    )
}

/// A command that is different in each of its words.
fn command(number: u64) -> [u8; COMMAND_BYTES] {
    let mut command = [0; COMMAND_BYTES];
    for (word, bytes) in (0..).zip(command.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&(number << 8 | word).to_le_bytes());
    }
    command
}

fn entry(number: u32) -> Completion {
    Completion {
        result: number,
        reserved_or_result_high: !number,
        sq_head: number as u16,
        sq_id: 3,
        command_id: number as u16 ^ 0x5555,
        status: (number as u16) << 1,
    }
}

#[test]
fn commands_come_out_as_they_went_in_round_and_round() {
    let memory = memory();
    for entries in [2, 3, 8, 1000] {
        let (mut host, mut queue) = submission(&memory, entries);
        let (mut sent, mut taken) = (0, 0);
        for batch in (1..entries).cycle().take(5 * entries as usize) {
            while sent < taken + u64::from(batch) {
                assert!(host.push(&command(sent)));
                sent += 1;
            }
            queue.set_tail(host.tail()).unwrap();
            assert_eq!(queue.pending(), batch);
            queue.prefetch();
            while let Some(found) = queue.pop() {
                assert_eq!(found, command(taken));
                taken += 1;
            }
            assert_eq!((taken, queue.pending()), (sent, 0));
            host.set_head(queue.head()).unwrap();
        }
    }
}

#[test]
fn a_full_submission_queue_holds_one_less_than_its_entries() {
    let memory = memory();
    let (mut host, mut queue) = submission(&memory, 4);
    for number in 0..3 {
        assert_eq!(host.room(), 3 - number);
        assert!(host.push(&command(number.into())));
    }
    assert!(!host.push(&command(9)));
    queue.set_tail(host.tail()).unwrap();
    assert_eq!(queue.pending(), 3);
    // The host writes a fourth all the same: that would look like an empty queue.
    assert_eq!(queue.set_tail(0), Err(DoorbellError::Overrun { value: 0, moved: 1, room: 0 }));
    assert_eq!(queue.pop(), Some(command(0)));
    queue.set_tail(0).unwrap();
    assert_eq!(queue.pending(), 3);
}

#[test]
fn hostile_tails_change_nothing() {
    let memory = memory();
    let (mut host, mut queue) = submission(&memory, 8);
    host.push(&command(0));
    host.push(&command(1));
    queue.set_tail(2).unwrap();
    for value in [8, 9, 0xffff, 0x1_0000, 0x1_0002, u32::MAX] {
        assert_eq!(queue.set_tail(value), Err(DoorbellError::OutOfRange { value, entries: 8 }));
    }
    // Backwards is forwards, and further than there is room.
    assert_eq!(queue.set_tail(1), Err(DoorbellError::Overrun { value: 1, moved: 7, room: 5 }));
    assert_eq!(queue.set_tail(0), Err(DoorbellError::Overrun { value: 0, moved: 6, room: 5 }));
    queue.set_tail(2).unwrap();
    assert_eq!((queue.pending(), queue.head()), (2, 0));
    assert_eq!((queue.pop(), queue.pop(), queue.pop()), (Some(command(0)), Some(command(1)), None));
}

#[test]
fn the_phase_tag_turns_over_with_the_queue() {
    let memory = memory();
    for entries in [2, 3, 8, 1000] {
        let (mut host, mut queue) = completion(&memory, entries);
        let (mut posted, mut taken) = (0, 0);
        for batch in (1..entries).cycle().take(5 * entries as usize) {
            assert_eq!(queue.room(), entries - 1);
            queue.prefetch();
            for _ in 0..batch {
                assert!(queue.push(entry(posted)));
                posted += 1;
            }
            assert_eq!(queue.unconsumed(), batch);
            assert!(host.has_next());
            while let Some(found) = host.pop() {
                let expected = Completion { status: (taken as u16) << 1, ..entry(taken) };
                assert_eq!(found, expected);
                taken += 1;
            }
            assert!(!host.has_next());
            assert_eq!(taken, posted);
            queue.set_head(host.head()).unwrap();
        }
    }
}

#[test]
fn an_entry_lies_in_memory_as_the_standard_says() {
    let memory = memory();
    let (_, mut queue) = completion(&memory, 2);
    let read = |index: u64| -> [u8; 16] {
        memory
            .read_array(GuestAddress(COMPLETIONS_AT + index * 16), &mut RegionHint::default())
            .unwrap()
    };
    let entry = Completion {
        result: 0x0403_0201,
        reserved_or_result_high: 0x0807_0605,
        sq_head: 0x0a09,
        sq_id: 0x0c0b,
        command_id: 0x0e0d,
        // The phase bit is the queue's, whatever comes in here.
        status: 0x1010,
    };
    assert!(queue.push(entry));
    assert_eq!(read(0), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0x11, 0x10]);
    queue.set_head(1).unwrap();
    assert!(queue.push(Completion { status: 0x1011, ..entry }));
    assert_eq!(read(1)[14], 0x11);
    queue.set_head(0).unwrap();
    assert!(queue.push(Completion { status: 0x1011, ..entry }));
    assert_eq!(read(0)[14], 0x10, "the second round");
}

#[test]
fn a_full_completion_queue_takes_nothing_more() {
    let memory = memory();
    let (mut host, mut queue) = completion(&memory, 4);
    for number in 0..3 {
        assert_eq!(queue.room(), 3 - number);
        assert!(queue.push(entry(number)));
    }
    assert!(!queue.push(entry(3)));
    assert_eq!((queue.room(), queue.unconsumed()), (0, 3));
    assert_eq!(host.pop().unwrap().result, 0);
    queue.set_head(host.head()).unwrap();
    assert!(queue.push(entry(3)));
    assert!(!queue.push(entry(4)));
    let rest: Vec<u32> = std::iter::from_fn(|| host.pop()).map(|entry| entry.result).collect();
    assert_eq!(rest, [1, 2, 3]);
}

#[test]
fn hostile_heads_change_nothing() {
    let memory = memory();
    let (_, mut queue) = completion(&memory, 8);
    queue.push(entry(0));
    queue.push(entry(1));
    for value in [8, 0xffff, 0x1_0001, u32::MAX] {
        assert_eq!(queue.set_head(value), Err(DoorbellError::OutOfRange { value, entries: 8 }));
    }
    assert_eq!(queue.set_head(3), Err(DoorbellError::Overrun { value: 3, moved: 3, room: 2 }));
    queue.set_head(2).unwrap();
    // Giving back what was given back already.
    assert_eq!(queue.set_head(1), Err(DoorbellError::Overrun { value: 1, moved: 7, room: 0 }));
    assert_eq!((queue.unconsumed(), queue.room()), (0, 7));
}

#[test]
fn a_hostile_controller_cannot_move_the_hosts_head_past_its_tail() {
    let memory = memory();
    let (mut host, _) = submission(&memory, 8);
    host.push(&command(0));
    host.push(&command(1));
    for head in [3, 7, 8, 0xffff] {
        assert!(host.set_head(head).is_err(), "{head}");
    }
    host.set_head(2).unwrap();
    assert!(host.set_head(1).is_err());
    assert_eq!(host.room(), 7);
    host.reset();
    assert_eq!((host.tail(), host.room()), (0, 7));
}

#[test]
fn queues_lie_where_they_may() {
    let file = file();
    // Two regions side by side, and one whose place in its file is crooked.
    let memory = GuestMemory::map(vec![
        region(&file, BASE, 0x4000, 0),
        region(&file, BASE + 0x4000, 0x4000, 0x4000),
        region(&file, BASE + 0x10_0000, 0x4000, 0x8020),
    ])
    .unwrap();
    let new =
        |at: u64, entries| SubmissionQueue::new(&memory, GuestAddress(at), entries, 0).map(drop);
    let completion =
        |at: u64, entries| CompletionQueue::new(&memory, GuestAddress(at), entries).map(drop);
    assert!(new(BASE, 256).is_ok() && completion(BASE, 1024).is_ok());
    let outside = |result| matches!(result, Err(MemoryError::OutOfRange { .. }));
    let crooked = |result| matches!(result, Err(MemoryError::Misaligned { .. }));
    assert!(outside(new(BASE, 257)), "across regions");
    assert!(outside(completion(BASE, 1025)), "across regions");
    assert!(outside(new(BASE + 0x7000, 65)), "past the end");
    assert!(
        outside(new(BASE - 0x1000, 2)) && outside(new(0, 2)) && outside(new(u64::MAX << 12, 65536))
    );
    assert!(crooked(new(BASE + 64, 2)) && crooked(completion(BASE + 2048, 2)));
    assert!(crooked(new(BASE + 0x10_0000, 2)), "an entry would be on two lines");
    for entries in [0, 1, 65537, u32::MAX] {
        assert!(outside(new(BASE, entries)) && outside(completion(BASE, entries)), "{entries}");
    }
    assert!(outside(SubmissionQueue::new(&memory, GuestAddress(BASE), 8, 8).map(drop)));
    // The VMM's address is none of ours.
    assert!(outside(new(USER_BASE, 2)));
}

#[test]
fn the_largest_queues_go_round() {
    let memory = memory();
    let (mut host, mut queue) = submission(&memory, MAX_ENTRIES);
    for number in 0..u64::from(MAX_ENTRIES) - 1 {
        assert!(host.push(&command(number)));
    }
    assert!(!host.push(&command(0)));
    queue.set_tail(host.tail()).unwrap();
    assert_eq!(queue.pending(), 65535);
    for number in 0..65535 {
        assert_eq!(queue.pop(), Some(command(number)));
    }
    assert_eq!((queue.pop(), queue.head()), (None, 65535));
    host.set_head(queue.head()).unwrap();
    assert!(host.push(&command(1)));
    assert_eq!(host.tail(), 0);
    queue.set_tail(0).unwrap();
    assert_eq!((queue.pop(), queue.head()), (Some(command(1)), 0));
}

#[test]
fn a_new_table_changes_nothing_but_the_table() {
    let file = file();
    let memory = memory_of(&file);
    let (mut host, mut commands) = submission(&memory, 8);
    let (mut answers, mut completions) = completion(&memory, 4);
    host.push(&command(0));
    host.push(&command(1));
    commands.set_tail(2).unwrap();
    assert_eq!(commands.pop(), Some(command(0)));
    (0..3).for_each(|number| assert!(completions.push(entry(number))));
    (0..3).for_each(|number| assert_eq!(answers.pop().unwrap().result, number));
    completions.set_head(3).unwrap();

    // Without the queues: they hold nothing of the old table, and do nothing.
    let elsewhere =
        GuestMemory::map(vec![region(&self::file(), BASE + (1 << 30), 0x1000, 0)]).unwrap();
    assert!(commands.rebind(&elsewhere).is_err() && completions.rebind(&elsewhere).is_err());
    assert_eq!((commands.pop(), commands.pending(), completions.room()), (None, 0, 0));
    commands.prefetch();
    completions.prefetch();
    assert!(!completions.push(entry(9)));
    commands.set_tail(2).unwrap();
    assert!(commands.set_tail(8).is_err());

    // With them again, at other addresses of ours: everything goes on, in the same round.
    let again = memory_of(&file);
    assert!(!again.is_same(&memory));
    commands.rebind(&again).unwrap();
    completions.rebind(&again).unwrap();
    assert_eq!((commands.pop(), commands.pop(), commands.head()), (Some(command(1)), None, 2));
    assert_eq!(completions.room(), 3);
    (3..6).for_each(|number| assert!(completions.push(entry(number))));
    (3..6).for_each(|number| assert_eq!(answers.pop().unwrap().result, number));
    assert!(answers.pop().is_none());
}

/// The area as a client maps it.
fn map_area(doorbells: &Doorbells) -> DoorbellWords {
    let len_bytes = doorbells.len_bytes();
    let peer = GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes: len_bytes as u64,
        file: doorbells.file().try_clone_to_owned().unwrap(),
        file_offset_bytes: doorbells.area_offset_bytes(),
    }])
    .unwrap();
    DoorbellWords::new(peer.guest_window(GuestAddress(0), len_bytes, 4096).unwrap()).unwrap()
}

#[test]
fn every_doorbell_has_a_line_and_a_page_has_32_pairs() {
    for (pairs, pages) in [(1_u16, 1), (31, 1), (32, 2), (64, 3)] {
        let doorbells = Doorbells::new(pairs).unwrap();
        assert_eq!((doorbells.len_bytes(), doorbells.area_offset_bytes()), (pages * 4096, 0x1000));
        assert_eq!((doorbells.queue_pairs(), doorbells.stride()), (pairs, DoorbellStride::Line));
    }
    let doorbells = Doorbells::new(33).unwrap();
    let host = map_area(&doorbells);
    // BAR offset 0x1000 + queue * 128, from the admin queue on.
    for queue in 0..=33_u16 {
        let at = usize::from(queue) * 128;
        host.store(at, 100 + u32::from(queue));
        host.prefetch_for_write(at);
        host.store(at + 64, u32::MAX - u32::from(queue));
    }
    for queue in 0..=33_u16 {
        assert_eq!(doorbells.submission_tail(queue), 100 + u32::from(queue));
        assert_eq!(doorbells.completion_head(queue), u32::MAX - u32::from(queue));
        doorbells.set_submission_tail(queue, 7);
        doorbells.set_completion_head(queue, 0);
        let at = usize::from(queue) * 128;
        assert_eq!((host.load(at), host.load(at + 64)), (7, 0));
    }
    for queue in [34, u16::MAX] {
        doorbells.set_submission_tail(queue, 9);
        doorbells.set_completion_head(queue, 9);
        assert_eq!((doorbells.submission_tail(queue), doorbells.completion_head(queue)), (0, 0));
    }
    host.store(2, 1);
    host.store(2 * 4096, 1);
    assert_eq!((host.load(2), host.load(2 * 4096), host.load(usize::MAX)), (0, 0, 0));
    assert!(Doorbells::new(0).is_err());
}

#[test]
fn doorbells_of_another_process_are_read_where_its_client_writes_them() {
    let ours = Doorbells::new(3).unwrap();
    let host = map_area(&ours);
    host.store(3 * 128, 5);
    let file = || ours.file().try_clone_to_owned().unwrap();
    let next = Doorbells::from_file(file(), 3, DoorbellStride::Line).unwrap();
    assert_eq!(next.submission_tail(3), 5);
    assert!(
        Doorbells::from_file(file(), 3, DoorbellStride::HalfPage).is_err(),
        "the file is too small for that"
    );
    assert!(Doorbells::from_file(file(), 33, DoorbellStride::Line).is_err());

    // As an earlier version has made them: a page for each pair, at the same place as in the
    // register.
    let pages = SharedPages::new("sidecore-doorbells", 5 * 4096).unwrap();
    let old = Doorbells::from_file(
        pages.file().try_clone_to_owned().unwrap(),
        3,
        DoorbellStride::HalfPage,
    )
    .unwrap();
    assert_eq!((old.len_bytes(), old.area_offset_bytes()), (4 * 4096, 0x1000));
    let host = map_area(&old);
    host.store(2 * 4096, 8);
    host.store(2 * 4096 + 2048, 9);
    assert_eq!((old.submission_tail(2), old.completion_head(2)), (8, 9));
}

fn shadow(
    memory: &GuestMemory,
    queue_pairs: u16,
    stride_bytes: u32,
) -> (HostShadow, ShadowDoorbells) {
    let len_bytes = (usize::from(queue_pairs) + 1) * 2 * stride_bytes as usize;
    let words = |at| {
        DoorbellWords::new(memory.guest_window(GuestAddress(at), len_bytes, 4096).unwrap()).unwrap()
    };
    let device = ShadowDoorbells::new(
        memory,
        GuestAddress(SHADOW_AT),
        GuestAddress(EVENTS_AT),
        queue_pairs,
        stride_bytes,
    );
    (HostShadow::new(words(SHADOW_AT), words(EVENTS_AT)), device.unwrap())
}

#[test]
fn shadow_doorbells_lie_as_doorbells_do() {
    let memory = memory();
    let read = |at: u64| -> u32 {
        u32::from_le_bytes(memory.read_array(GuestAddress(at), &mut RegionHint::default()).unwrap())
    };
    let write = |at: u64, value: u32| {
        memory
            .write_slice(GuestAddress(at), &value.to_le_bytes(), &mut RegionHint::default())
            .unwrap();
    };
    for stride in [4_u32, 2048] {
        let (_, device) = shadow(&memory, 3, stride);
        for queue in 1..=3_u16 {
            let at = u64::from(queue) * 2 * u64::from(stride);
            write(SHADOW_AT + at, 10 + u32::from(queue));
            write(SHADOW_AT + at + u64::from(stride), 20 + u32::from(queue));
            assert_eq!(device.submission_tail(queue), 10 + u32::from(queue));
            assert_eq!(device.completion_head(queue), 20 + u32::from(queue));
            assert_eq!(device.arm_submission(queue, 5), 10 + u32::from(queue));
            assert_eq!(device.arm_completion(queue, 6), 20 + u32::from(queue));
            assert_eq!((read(EVENTS_AT + at), read(EVENTS_AT + at + u64::from(stride))), (5, 6));
        }
        device.set_submission_event(4, 1);
        assert_eq!((device.submission_tail(4), device.completion_head(u16::MAX)), (0, 0));
    }
    let new = |shadow, events| {
        ShadowDoorbells::new(&memory, GuestAddress(shadow), GuestAddress(events), 64, 4).map(drop)
    };
    assert!(new(SHADOW_AT, BASE + MEMORY_BYTES - 4096).is_ok(), "a page is enough");
    assert!(new(SHADOW_AT + 4, EVENTS_AT).is_err() && new(SHADOW_AT, EVENTS_AT + 1).is_err());
    assert!(new(SHADOW_AT, BASE + MEMORY_BYTES).is_err() && new(0, EVENTS_AT).is_err());
}

#[test]
fn an_event_behind_the_head_is_silent_until_the_host_has_gone_round() {
    let memory = memory();
    let (host, device) = shadow(&memory, 1, 4);
    let entries = 8;
    let tail = 2 * 4;
    // Awake at every position, the event half a round behind at most.
    let mut event_at = 0;
    device.set_submission_event(1, entries - 1);
    for step in 1..100_u32 {
        let position = step % entries;
        assert!(!host.announce(tail, position), "step {step}");
        if (position + entries - event_at) % entries >= entries / 2 {
            event_at = position;
            device.set_submission_event(1, (position + entries - 1) % entries);
        }
    }
    // Asleep: the next move rings, from wherever and however far; and only that one.
    for from in 0..entries {
        for by in 1..entries - 1 {
            host.words()[0].store(tail, from);
            assert_eq!(device.arm_submission(1, from), from);
            assert!(host.announce(tail, (from + by) % entries), "{from} + {by}");
            // Moving on within the round, with the same event.
            let behind = host.announce(tail, (from + by + 1) % entries);
            assert!(!behind || from + by + 1 >= entries, "{from} + {by} + 1");
        }
    }
    host.reset(tail);
    assert_eq!((device.submission_tail(1), host.words()[1].load(tail)), (0, 0));
}

proptest! {
    /// For any doorbell values of a host, a queue gives out no more than it can hold, and ends.
    #[test]
    fn any_doorbells(
        entries in 2_u32..40,
        writes in prop::collection::vec((any::<bool>(), 0_u32..80), 0..200),
    ) {
        let memory = memory();
        let (_, mut commands) = submission(&memory, entries);
        let (_, mut completions) = completion(&memory, entries);
        for (is_tail, value) in writes {
            let valid =
                if is_tail { commands.set_tail(value) } else { completions.set_head(value) };
            let overrun = matches!(valid, Err(DoorbellError::Overrun { .. }));
            prop_assert!(valid.is_ok() || value >= entries || overrun);
            prop_assert!(commands.pending() < entries);
            prop_assert!(completions.room() < entries && completions.unconsumed() < entries);
            let (pending, room) = (commands.pending(), completions.room());
            if value % 3 == 0 {
                let popped = std::iter::from_fn(|| commands.pop()).count();
                prop_assert_eq!(popped, pending as usize);
                let pushed = (0..100).filter(|number| completions.push(entry(*number))).count();
                prop_assert_eq!(pushed, room as usize);
            }
        }
    }
}

const COMMANDS: u64 = 50_000;

/// How long a side waits for the other: if that one panics, this one ends too.
const PATIENCE: Duration = Duration::from_secs(60);

/// The host's side of a stress test: keeps the queue as full as it can, and checks that each
/// command is completed once, in order, with what it asked for visible.
fn drive(
    memory: &GuestMemory,
    entries: u32,
    mut ring_tail: impl FnMut(u32),
    mut ring_head: impl FnMut(u32),
) {
    let window = memory
        .guest_window(GuestAddress(COMMANDS_AT), entries as usize * COMMAND_BYTES, 64)
        .unwrap();
    let mut commands = SubmissionRing::new(window, entries).unwrap();
    let window = memory
        .guest_window(GuestAddress(COMPLETIONS_AT), entries as usize * COMPLETION_BYTES, 64)
        .unwrap();
    let mut completions = CompletionRing::new(window, entries).unwrap();
    let data = Words::<AtomicU64>::new(memory, UserAddress(USER_BASE + 0x70_0000), 1, 8).unwrap();
    let (mut sent, mut done) = (0, 0);
    let start = Instant::now();
    while done < COMMANDS {
        let mut pushed = false;
        while sent < COMMANDS && commands.push(&command(sent)) {
            sent += 1;
            pushed = true;
        }
        if pushed {
            ring_tail(commands.tail());
        }
        let mut popped = false;
        while let Some(completion) = completions.pop() {
            assert_eq!(completion, Completion { result: done as u32, ..completion });
            assert_eq!(completion.reserved_or_result_high, !(done as u32));
            // Relaxed: the phase tag must have made it visible.
            assert!(data.get(0).unwrap().load(Ordering::Relaxed) >= done);
            commands.set_head(completion.sq_head).unwrap();
            done += 1;
            popped = true;
        }
        if popped {
            ring_head(completions.head());
        } else if !pushed {
            assert!(start.elapsed() < PATIENCE, "the controller is gone");
            std::thread::yield_now();
        }
    }
}

/// The controller's side: answers what there is; returns how much that was.
struct Controller {
    commands: SubmissionQueue,
    completions: CompletionQueue,
    data: Words<AtomicU64>,
    done: u64,
}

impl Controller {
    fn new(memory: &GuestMemory, entries: u32) -> Self {
        Self {
            commands: SubmissionQueue::new(memory, GuestAddress(COMMANDS_AT), entries, 0).unwrap(),
            completions: CompletionQueue::new(memory, GuestAddress(COMPLETIONS_AT), entries)
                .unwrap(),
            data: Words::new(memory, UserAddress(USER_BASE + 0x70_0000), 1, 8).unwrap(),
            done: 0,
        }
    }

    fn work(&mut self, tail: u32, head: u32) -> u64 {
        self.commands.set_tail(tail).unwrap();
        self.completions.set_head(head).unwrap();
        let before = self.done;
        while self.completions.room() > 0
            && let Some(found) = self.commands.pop()
        {
            assert_eq!(found, command(self.done));
            self.data.get(0).unwrap().store(self.done, Ordering::Relaxed);
            let sq_head = self.commands.head();
            assert!(self.completions.push(Completion { sq_head, ..entry(self.done as u32) }));
            self.done += 1;
        }
        self.done - before
    }
}

#[test]
fn two_threads_with_mapped_doorbells() {
    for entries in [2, 7, 64] {
        let memory = memory();
        let doorbells = Doorbells::new(2).unwrap();
        // Made before the host zeroes its queue, as a controller's reset would have it: it reads
        // nothing of it.
        let mut controller = Controller::new(&memory, entries);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drive(
                    &memory,
                    entries,
                    |tail| doorbells.set_submission_tail(2, tail),
                    |head| doorbells.set_completion_head(2, head),
                );
            });
            while controller.done < COMMANDS {
                if controller.work(doorbells.submission_tail(2), doorbells.completion_head(2)) == 0
                {
                    assert!(start.elapsed() < PATIENCE, "the host is gone");
                    std::thread::yield_now();
                }
            }
        });
    }
}

/// The controller sleeps whenever it has nothing to do, and is woken by doorbell messages alone: a
/// wake-up that was lost would be a time-out.
#[test]
fn two_threads_with_shadow_doorbells() {
    let entries = 8;
    let memory = memory();
    let (host, device) = shadow(&memory, 1, 4);
    let (bell, messages) = mpsc::channel();
    let mut controller = Controller::new(&memory, entries);
    let memory = &memory;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let ring = |offset_bytes: usize, value: u32| {
                if host.announce(offset_bytes, value) {
                    let _ = bell.send(());
                }
            };
            drive(memory, entries, |tail| ring(8, tail), |head| ring(12, head));
        });
        let mut sleeps = 0_u64;
        while controller.done < COMMANDS {
            let (tail, head) = (device.submission_tail(1), device.completion_head(1));
            if controller.work(tail, head) > 0 {
                continue;
            }
            if device.arm_submission(1, tail) != tail || device.arm_completion(1, head) != head {
                continue;
            }
            messages.recv_timeout(PATIENCE / 2).expect("a wake-up was lost");
            sleeps += 1;
        }
        assert!(sleeps > 0);
    });
}
