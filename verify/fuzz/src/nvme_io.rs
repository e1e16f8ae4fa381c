//! The I/O queues of an NVMe controller: commands, data pointers, doorbells and changes of memory
//! in any order, with a RAM disk. For any input, each submitted command is completed at most once,
//! no request is lost, and the queues stop when they are told to.

#![no_main]

use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use libfuzzer_sys::fuzz_target;
use sidecore_block::{Geometry, RamStore, dropped_tags};
use sidecore_fuzz::{Input, guest_memory};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_nvme::io::{IoOptions, MakeQueue, QueueRunner, QueueSet, SendTask};
use sidecore_nvme::{
    Command, CompletionQueueSetup, Done, Namespace, QueueHost, StartError, SubmissionQueueSetup,
};
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Reactor, Sleeper, WakeKey, mailbox};
use sidecore_ring::nvme::Doorbells;
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

const COMPLETIONS: u64 = 0;
const SUBMISSIONS: [u64; 2] = [0x1000, 0x2000];
const ENTRIES: u32 = 8;
/// The page of the shadow doorbells, before the page of EventIdx.
const SHADOW: u64 = 0x9000;
/// The addresses of lists and data: few, so that an input finds them.
const ADDRESSES: &[u64] = &[0x4000, 0x5000, 0x6000, 0x8000, 0xF000, 0x4FF8, 0x1_0000];
const OPCODES: &[u64] = &[0, 1, 2, 5, 8, 9, 0xC];
const BLOCKS: u64 = 256;

/// A sleeper that never sleeps.
struct Restless;

impl Sleeper for Restless {
    fn watch(&mut self, _fd: BorrowedFd<'_>, _key: WakeKey) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, _timeout: Option<Nanos>, _woken: &mut Vec<WakeKey>) -> io::Result<()> {
        Ok(())
    }
}

thread_local! {
    static SIDECORE: RefCell<Option<Reactor<Restless>>> = const { RefCell::new(None) };
}

struct Runner;

impl QueueRunner for Runner {
    fn start(&self, _id: u16, make: MakeQueue) -> Result<SendTask, StartError> {
        let queue = SIDECORE.with_borrow_mut(|sidecore| {
            let sidecore = sidecore.as_mut().expect("a sidecore");
            let queue = make(sidecore.context())?;
            Ok(sidecore.add(queue).expect("watched"))
        })?;
        Ok(Arc::new(move |task| {
            SIDECORE.with_borrow_mut(|sidecore| {
                if let Some(queue) = sidecore.as_mut().expect("a sidecore").get_mut(queue) {
                    task(queue);
                }
            });
        }))
    }
}

fn turn(now: &mut u64) {
    *now += 1_000;
    SIDECORE.with_borrow_mut(|sidecore| {
        sidecore.as_mut().expect("a sidecore").turn(&mut || Nanos(*now)).expect("it never sleeps");
    });
}

/// The next command, with numbers that have a meaning in its fields.
fn command(input: &mut Input<'_>) -> Option<Command> {
    let opcode = input.number(OPCODES)? as u32 & 0xFF;
    let flags = u32::from(input.byte()?);
    let id = u32::from(input.byte()?);
    let mut command = Command::build(0, 0, input.number(&[1])? as u32)
        .with_dword(0, opcode | flags << 8 | id << 16);
    let pointer = [input.number(ADDRESSES)?, input.number(ADDRESSES)?];
    command = command.with_prps(pointer[0], pointer[1]);
    let first = input.number(&[BLOCKS, 1 << 32])?;
    command = command.with_dword(10, first as u32).with_dword(11, (first >> 32) as u32);
    Some(command.with_dword(12, input.number(&[1 << 30, BLOCKS, 2048])? as u32))
}

/// An action of the guest; `None` at the end of the input.
fn act(
    input: &mut Input<'_>,
    memory: &GuestMemory,
    doorbells: &Doorbells,
    set: &QueueSet,
    namespace: &Arc<Namespace>,
    now: &mut u64,
) -> Option<()> {
    let hint = &mut RegionHint::default();
    match input.byte()? % 16 {
        0..=5 => {
            let place = input.byte()?;
            let ring = SUBMISSIONS[usize::from(place & 1)];
            let entry = u64::from(place >> 1) % u64::from(ENTRIES);
            let command = command(input)?;
            memory
                .write_slice(GuestAddress(ring + entry * 64), command.bytes(), hint)
                .expect("in range");
        }
        6 | 7 => {
            let address = input.number(ADDRESSES)? % 0xFFF0;
            let low = input.number(ADDRESSES)?;
            let high = input.number(&[16 << 56 | 512, 32 << 56 | 32, 48 << 56 | 32, 4096])?;
            let bytes = u128::from(low) | u128::from(high) << 64;
            memory
                .write_slice(GuestAddress(address), &bytes.to_le_bytes(), hint)
                .expect("in range");
        }
        8 | 9 => doorbells.set_submission_tail(1, input.number(&[ENTRIES.into()])? as u32),
        10 => doorbells.set_submission_tail(2, input.number(&[ENTRIES.into()])? as u32),
        11 => doorbells.set_completion_head(1, input.number(&[ENTRIES.into()])? as u32),
        12 => set.set_memory(
            &if input.byte()? & 1 == 0 { GuestMemory::empty() } else { memory.clone() },
            Done::ignored(),
        ),
        13 => {
            let (queue, id) = (u16::from(input.byte()? & 3), u16::from(input.byte()?));
            set.abort(queue, id, |_| {});
        }
        14 => {
            set.stop_submission_queue(2, Done::ignored());
            let _ = set.start_submission_queue(submission(2, memory));
        }
        _ => match input.byte()? % 8 {
            0 => set.set_shadow_doorbells(None),
            1 => set
                .set_shadow_doorbells(Some((GuestAddress(SHADOW), GuestAddress(SHADOW + 0x1000)))),
            2 => set.set_namespace(None, Done::ignored()),
            3 => set.set_namespace(Some(Arc::clone(namespace)), Done::ignored()),
            4 => set.set_vector(0, None),
            5 => set.set_coalescing(u16::from(input.byte()?), 10),
            _ => {
                let (word, value) =
                    (u64::from(input.byte()? % 8), input.number(&[ENTRIES.into()])? as u32);
                let address = GuestAddress(SHADOW + word * 4);
                memory.write_slice(address, &value.to_le_bytes(), hint).expect("in range");
            }
        },
    }
    turn(now);
    Some(())
}

fn submission(id: u16, memory: &GuestMemory) -> SubmissionQueueSetup {
    let address = GuestAddress(SUBMISSIONS[usize::from(id - 1)]);
    SubmissionQueueSetup {
        id,
        completion_queue: 1,
        memory: memory.clone(),
        address,
        entries: ENTRIES,
    }
}

fuzz_target!(|input: &[u8]| {
    let mut input = Input::new(input);
    let Some(setup) = input.byte() else { return };
    let memory = guest_memory();
    let geometry = Geometry { volatile_cache: setup & 1 != 0, ..Geometry::new(BLOCKS * 512, 512) };
    let Ok(ram) = RamStore::new(geometry) else { return };
    let delay = Nanos(if setup & 2 == 0 { 0 } else { 2_500 });
    let store = Arc::new(DelayStore::new(Arc::new(ram), delay));
    let (_post, mailbox) = mailbox().expect("a mailbox");
    SIDECORE.set(Some(Reactor::new(CoreContext::default(), Restless, mailbox).expect("a reactor")));
    let doorbells = Arc::new(Doorbells::new(2).expect("doorbells"));
    let options = IoOptions {
        name: "fuzz".to_owned(),
        queue_pairs: 2,
        vectors: 1,
        namespaces: 2,
        idle: if setup & 4 == 0 { IdleMode::Poll } else { IdleMode::Interrupt },
        doorbells: Arc::clone(&doorbells),
        flush: |_| Ok(()),
        signal: EventFd::peer_signal,
    };
    let set = QueueSet::new(options, vec![Box::new(Runner)], Box::new(|_| {})).expect("a set");
    let block_bytes = if setup & 8 == 0 { 512 } else { 4096 };
    let namespace = Namespace { id: 1, store, block_bytes, nguid: [0; 16], uuid: [0; 16] };
    let namespace = Arc::new(namespace);
    set.set_namespace(Some(Arc::clone(&namespace)), Done::ignored());
    let vector = (setup & 16 != 0).then_some(0);
    let (address, entries) = (GuestAddress(COMPLETIONS), ENTRIES);
    let queue = CompletionQueueSetup { id: 1, memory: memory.clone(), address, entries, vector };
    set.start_completion_queue(queue).expect("a completion queue");
    for id in [1, 2] {
        set.start_submission_queue(submission(id, &memory)).expect("a submission queue");
    }
    let mut now = 0;
    while act(&mut input, &memory, &doorbells, &set, &namespace, &mut now).is_some() {}
    // The queues must stop in any state.
    let ended = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&ended);
    set.stop_all(Done::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    for _ in 0..2_000 {
        turn(&mut now);
    }
    assert_eq!(ended.load(Ordering::Relaxed), 1, "the queues did not end");
    SIDECORE.set(None);
    assert_eq!(dropped_tags(), 0);
});
