//! Queues that sleep: doorbell writes that are messages, and shadow doorbells that make them rare.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_block::BlockDevice;
use sidecore_block_contract::Asking;
use sidecore_linux::{FileOptions, FileStore};
use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_nvme::{Done, QueueHost, Status};
use sidecore_reactor::IdleMode;
use sidecore_ring::driver::nvme::{DoorbellWords, HostShadow};
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use crate::rig::{DISK_BYTES, Options, Rig, flag, interrupt, is_set, map, namespace, op, ram};

const SHADOW: u64 = 2 << 20;
const EVENTS: u64 = SHADOW + 4096;

fn sleeping() -> Options {
    Options { idle: IdleMode::Interrupt, ..Options::default() }
}

/// The guest's end of the shadow doorbells, which the controller is told of.
fn shadow(rig: &mut Rig) -> HostShadow {
    let window = |address| rig.memory.guest_window(GuestAddress(address), 4096, 4096).unwrap();
    let words = [SHADOW, EVENTS].map(|address| DoorbellWords::new(window(address)).unwrap());
    rig.set.set_shadow_doorbells(Some((GuestAddress(SHADOW), GuestAddress(EVENTS))));
    let [shadow, events] = words;
    HostShadow::new(shadow, events)
}

const fn tail_offset(queue: u16) -> usize {
    8 * queue as usize
}

const fn head_offset(queue: u16) -> usize {
    tail_offset(queue) + 4
}

#[test]
fn a_message_wakes_a_queue_that_sleeps() {
    let mut rig = Rig::with(sleeping());
    for _ in 0..5 {
        rig.turn();
    }
    let slept = rig.slept;
    assert!(slept > 0);
    let command = rig.command(op::READ, 0, 1);
    rig.submit(1, &command);
    for _ in 0..5 {
        rig.turn();
    }
    assert_eq!(rig.take(1), None, "no kick has come");
    rig.set.kick(1);
    assert_eq!(rig.wait().command_id, command.id());
    assert_eq!(rig.set.stats(1).unwrap().kicks.get(), 1);
    // A submission queue's number is as good as its completion queue's.
    rig.add_submission(5, 1, 16);
    for _ in 0..5 {
        rig.turn();
    }
    rig.submit(5, &command);
    rig.set.kick(5);
    assert_eq!(rig.wait().sq_id, 5);
    rig.set.kick(7);
}

#[test]
fn shadow_doorbells_ask_for_a_message_only_when_it_sleeps() {
    let mut rig = Rig::with(sleeping());
    let shadow = shadow(&mut rig);
    let mut messages = 0;
    let mut completed = 0;
    // In bursts, so that it is awake for most, and long enough to go round several times.
    for round in 0..200_u32 {
        for _ in 0..1 + round % 7 {
            let command = rig.command(op::READ, 0, 1);
            rig.push(1, &command);
            if shadow.announce(tail_offset(1), rig.submissions[&1].tail()) {
                messages += 1;
                rig.ring(1);
                rig.set.kick(1);
            }
            if round % 3 == 0 {
                rig.turn();
            }
        }
        let mut left = 1 + round % 7;
        rig.until("completions", |rig| {
            while let Some(_completion) = rig.take_quietly(1) {
                completed += 1;
                left -= 1;
                if shadow.announce(head_offset(1), rig.completions[&1].head()) {
                    rig.doorbells.set_completion_head(1, rig.completions[&1].head());
                    rig.set.kick(1);
                }
            }
            left == 0
        });
        for _ in 0..round % 4 {
            rig.turn();
        }
    }
    assert_eq!(rig.set.stats(1).unwrap().requests.get(), completed);
    assert!(messages > 0 && messages < completed, "{messages} messages for {completed} commands");
    assert!(rig.slept > 0);
}

#[test]
fn a_queue_that_is_awake_needs_no_message_for_long() {
    let mut rig = Rig::bare(Options::default());
    rig.add_completion(1, 64, None);
    rig.add_submission(1, 1, 64);
    let shadow = shadow(&mut rig);
    rig.turn();
    let mut messages = 0;
    for _ in 0..1_000 {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
        messages += u32::from(shadow.announce(tail_offset(1), rig.submissions[&1].tail()));
        rig.until("a completion", |rig| rig.take_quietly(1).is_some());
        let _ = shadow.announce(head_offset(1), rig.completions[&1].head());
    }
    assert!(messages <= 1_000 / 64 + 1, "{messages} messages for 1000 commands");
}

/// Lets the queue fall asleep, and stay so: a turn also sleeps in which something wakes it.
fn doze(rig: &mut Rig) {
    let mut asleep = 0;
    rig.until("it stays asleep", |rig| {
        let before = rig.slept;
        rig.turn();
        asleep = if rig.slept > before { asleep + 1 } else { 0 };
        asleep == 4
    });
}

/// A guest that has one request at a time, and a queue that sleeps in between: the guest's head
/// doorbell causes no message.
#[test]
fn a_request_to_a_queue_that_sleeps_costs_one_message() {
    for (idle, interrupts) in [
        (IdleMode::Interrupt, false),
        (IdleMode::Interrupt, true),
        (IdleMode::Adaptive { spin: Nanos::from_micros(3) }, true),
    ] {
        let mut rig = Rig::bare(Options { idle, ..Options::default() });
        let (event, theirs) = interrupt();
        rig.set.set_vector(0, Some(theirs));
        rig.add_completion(1, 64, interrupts.then_some(0));
        rig.add_submission(1, 1, 64);
        let shadow = shadow(&mut rig);
        let mut messages = 0_u32;
        for _ in 0..1_000 {
            doze(&mut rig);
            let command = rig.command(op::READ, 0, 1);
            rig.push(1, &command);
            if shadow.announce(tail_offset(1), rig.submissions[&1].tail()) {
                messages += 1;
                rig.set.kick(1);
            }
            rig.until("a completion", |rig| rig.take_quietly(1).is_some());
            doze(&mut rig);
            if shadow.announce(head_offset(1), rig.completions[&1].head()) {
                messages += 1;
                rig.set.kick(1);
            }
            event.drain();
        }
        assert!(messages * 100 <= 1_000 * 105, "{messages} messages for 1000 requests, {idle:?}");
        assert_eq!(rig.set.stats(1).unwrap().requests.get(), 1_000);
    }
}

/// An interrupt that is held back until the driver has handled the one before is raised when it
/// has, and not later.
#[test]
fn a_queue_that_holds_an_interrupt_back_asks_for_its_head() {
    let mut rig = Rig::bare(sleeping());
    let (event, theirs) = interrupt();
    rig.set.set_vector(0, Some(theirs));
    rig.add_completion(1, 64, Some(0));
    rig.add_submission(1, 1, 64);
    let shadow = shadow(&mut rig);
    for expected in [1, 0] {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
        if shadow.announce(tail_offset(1), rig.submissions[&1].tail()) {
            rig.set.kick(1);
        }
        for _ in 0..20 {
            rig.turn();
        }
        assert_eq!(event.drain(), expected, "one is outstanding at a time");
    }
    assert!(rig.take_quietly(1).is_some());
    assert!(
        shadow.announce(head_offset(1), rig.completions[&1].head()),
        "the head would not be read"
    );
    rig.set.kick(1);
    for _ in 0..5 {
        rig.turn();
    }
    assert_eq!(event.drain(), 1);
}

#[test]
fn a_full_completion_queue_asks_for_its_head() {
    let mut rig = Rig::bare(sleeping());
    rig.add_completion(1, 4, None);
    rig.add_submission(1, 1, 64);
    let shadow = shadow(&mut rig);
    for _ in 0..5 {
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
        if shadow.announce(tail_offset(1), rig.submissions[&1].tail()) {
            rig.set.kick(1);
        }
    }
    for _ in 0..20 {
        rig.turn();
    }
    assert!(rig.slept > 0);
    for _ in 0..3 {
        assert!(rig.take_quietly(1).is_some());
    }
    assert_eq!(rig.take_quietly(1), None);
    assert!(shadow.announce(head_offset(1), rig.completions[&1].head()));
    rig.set.kick(1);
    rig.until("the fourth", |rig| rig.take_quietly(1).is_some());
}

#[test]
fn shadow_doorbells_that_are_not_in_memory_hold_the_queue_until_they_are() {
    for idle in [IdleMode::Interrupt, IdleMode::Poll] {
        let mut rig = Rig::with(Options { idle, ..Options::default() });
        let shadow = shadow(&mut rig);
        let whole = map(&rig.file);
        // The doorbells themselves have been written once, and stay behind from then on.
        let command = rig.command(op::READ, 0, 1);
        rig.push(1, &command);
        let _ = shadow.announce(tail_offset(1), rig.submissions[&1].tail());
        rig.ring(1);
        rig.set.kick(1);
        for _ in 0..20 {
            rig.until("a completion", |rig| rig.take_quietly(1).is_some());
            let _ = shadow.announce(head_offset(1), rig.completions[&1].head());
            rig.set.set_memory(&GuestMemory::empty(), Done::ignored());
            rig.turn();
            let command = rig.command(op::READ, 0, 1);
            rig.push(1, &command);
            let _ = shadow.announce(tail_offset(1), rig.submissions[&1].tail());
            rig.set.kick(1);
            for _ in 0..20 {
                rig.turn();
            }
            assert_eq!(rig.take_quietly(1), None);
            let (done, changed) = flag();
            rig.set.set_memory(&whole, done);
            rig.until("it is back", |_| is_set(&changed));
        }
        assert_eq!(Status::from_field(rig.wait().status), Status::SUCCESS);
        for _ in 0..20 {
            rig.turn();
        }
        assert_eq!(rig.take_quietly(1), None, "a doorbell from before was believed");
        assert_eq!((rig.set.stats(1).unwrap().requests.get(), rig.event_count()), (21, 0));
        // Without them, the doorbells themselves count.
        rig.set.stop_all(Done::ignored());
        rig.set.set_shadow_doorbells(None);
        rig.until("it is gone", |rig| rig.queues() == 0);
        rig.add_completion(1, 64, None);
        rig.add_submission(1, 1, 64);
        rig.submit(1, &command);
        rig.set.kick(1);
        assert_eq!(Status::from_field(rig.wait().status), Status::SUCCESS);
    }
}

/// A disk in a file, whose answers come from the kernel.
fn file_store() -> (tempfile::NamedTempFile, Arc<dyn BlockDevice>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(DISK_BYTES).unwrap();
    let store = FileStore::open(&FileOptions::new(file.path())).unwrap();
    (file, Arc::new(store))
}

#[test]
fn a_store_of_the_kernel_wakes_it_also_after_it_was_swapped() {
    let (_first, store) = file_store();
    let mut rig = Rig::with(Options { store, ..sleeping() });
    let (_second, another) = file_store();
    for store in [None, Some(another), Some(ram(false))] {
        if let Some(store) = store {
            rig.set.set_namespace(Some(namespace(store, 512)), Done::ignored());
        }
        for opcode in [op::WRITE, op::READ, op::FLUSH, op::COMPARE, op::VERIFY] {
            for _ in 0..20 {
                let command = rig.command(opcode, 0, 256);
                rig.push(1, &command);
                rig.ring(1);
                rig.set.kick(1);
                let deadline = Instant::now() + Duration::from_secs(10);
                let completion = loop {
                    rig.turn();
                    if let Some(completion) = rig.take(1) {
                        break completion;
                    }
                    assert!(Instant::now() < deadline, "nothing woke it");
                    std::thread::yield_now();
                };
                assert_eq!(Status::from_field(completion.status), Status::SUCCESS);
            }
        }
        let slept = rig.slept;
        rig.until("it sleeps", |rig| rig.slept > slept);
    }
}

#[test]
fn what_the_store_and_the_clock_owe_wakes_it() {
    let store = Arc::new(DelayStore::new(ram(false), Nanos::from_micros(50)));
    let mut rig = Rig::bare(Options { store, idle: IdleMode::Interrupt, ..Options::default() });
    let (event, theirs) = interrupt();
    rig.set.set_vector(0, Some(theirs));
    rig.set.set_coalescing(100, 200);
    rig.add_completion(1, 64, Some(0));
    rig.add_submission(1, 1, 64);
    let command = rig.command(op::READ, 0, 1);
    rig.submit(1, &command);
    let slept = rig.slept;
    rig.until("the store answers", |rig| rig.take_quietly(1).is_some());
    assert!(rig.slept > slept, "it did not sleep while the store worked");
    rig.until("the interrupt", |_| event.drain() == 1);
}

#[test]
fn an_idle_queue_polls_a_store_that_asks_for_it_and_then_sleeps() {
    let store = Asking::new(ram(false));
    let options = Options { store: Arc::clone(&store) as _, ..sleeping() };
    let mut rig = Rig::with(options);
    let slept = rig.slept;
    rig.until("it sleeps", |rig| rig.slept > slept);
    store.ask();
    rig.until("it was polled", |_| !store.asks());
    let slept = rig.slept;
    rig.until("it sleeps again", |rig| rig.slept > slept);
    // Its descriptor wakes the sidecore, and must not again.
    store.signal();
    for _ in 0..4 {
        rig.turn();
    }
    assert!(store.is_quiet());
}
