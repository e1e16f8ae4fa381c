//! Threads of a stage: the place of its code, and the effects of a stage that goes wrong.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{io, mem};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, Geometry, Operation, Readiness, Stage as _, Tag,
    dropped_tags, open_stage,
};
use sidecore_block_contract::Harness;
use sidecore_keys::{Value, Values};
use sidecore_memory::GuestMemory;
use sidecore_offload::offload;
use sidecore_reactor::CoreContext;
use sidecore_stage_fault::FaultPlan;
use sidecore_units::Nanos;

use common::{BAD, OPENING, PATIENCE, geometry, ram, this_thread, told, until};

/// Where guest memory is.
const MEMORY: u64 = 0x1_0000_0000;

fn fault(keys: &[(&'static str, u64)], threads: usize) -> Arc<dyn BlockDevice> {
    let values = keys.iter().map(|(key, value)| (*key, Value::Number(*value))).collect();
    let plan = FaultPlan::from_values(&Values(values));
    let open = |below| open_stage(&plan, "disk", below);
    match threads {
        0 => open(ram()),
        threads => offload("fault", threads, ram(), open),
    }
    .unwrap()
}

/// A store that notes its calls, and the threads that they come from.
#[derive(Clone, Default)]
struct Noted(Arc<Mutex<Notes>>);

#[derive(Default)]
struct Notes {
    threads: Vec<u32>,
    /// Requests, and memory that was attached (`None`), in order.
    calls: Vec<Option<(Operation, bool)>>,
}

impl Noted {
    fn note(&self, call: Option<(Operation, bool)>) {
        let mut notes = self.0.lock().unwrap();
        notes.threads.push(this_thread());
        notes.calls.push(call);
    }

    fn calls(&self) -> Vec<Option<(Operation, bool)>> {
        mem::take(&mut self.0.lock().unwrap().calls)
    }
}

impl BlockDevice for Noted {
    fn geometry(&self) -> Geometry {
        geometry()
    }

    fn open_channel(
        &self,
        _core: &CoreContext,
        _depth: usize,
    ) -> io::Result<Box<dyn BlockChannel>> {
        self.0.lock().unwrap().threads.push(this_thread());
        Ok(Box::new(NotedChannel { store: self.clone(), done: Batch::new() }))
    }
}

struct NotedChannel {
    store: Noted,
    done: Batch,
}

impl BlockChannel for NotedChannel {
    fn attach_memory(&mut self, _memory: &GuestMemory) -> io::Result<()> {
        self.store.note(None);
        Ok(())
    }

    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        for request in batch.iter_mut() {
            self.store.note(Some((request.operation, request.write_through)));
            request.result = Ok(());
        }
        self.done.append(batch);
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.done);
    }

    fn takes_write_through(&self) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.done.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn the_stage_runs_on_its_threads_and_the_store_on_that_of_the_queue() {
    let store = Noted::default();
    let (device, orders) = told(2, Arc::new(store.clone()));
    let mut harness = Harness::new(&device, 8);
    let threads = orders.opened_on.lock().unwrap().clone();
    assert!(threads.len() == 2 && threads[0] != threads[1], "{threads:?}");
    // The memory of the queue, at each channel of the stage, before any request.
    assert_eq!(store.calls(), [None, None]);
    let requests =
        (0..32).map(|_| harness.request(Operation::Read, BAD, &[(MEMORY, 512)])).collect();
    assert!(harness.run(requests).iter().all(Result::is_ok));
    let seen = orders.seen_on.lock().unwrap().clone();
    assert_eq!(seen.len(), 32);
    assert!(threads.iter().all(|thread| seen.contains(thread)), "a thread has had no request");
    assert!(seen.iter().all(|thread| threads.contains(thread)));
    let here = this_thread();
    assert!(store.0.lock().unwrap().threads.iter().all(|thread| *thread == here));
    assert!(!threads.contains(&here));
}

#[test]
fn a_queue_with_one_request_at_a_time_uses_one_thread() {
    let (device, orders) = told(4, ram());
    for depth in [1, 8] {
        let mut harness = Harness::new(&device, depth);
        for _ in 0..20 {
            let read = harness.request(Operation::Read, BAD, &[(MEMORY, 512)]);
            assert_eq!(harness.run_one(read), Ok(()));
        }
        let mut seen = mem::take(&mut *orders.seen_on.lock().unwrap());
        seen.dedup();
        assert_eq!(seen.len(), 1, "depth {depth}");
    }
}

#[test]
fn flushes_follow_completed_writes_and_durable_writes_stay_durable() {
    let store = Noted::default();
    let (device, _orders) = told(2, Arc::new(store.clone()));
    let mut harness = Harness::new(&device, 8);
    assert!(harness.channel.takes_write_through());
    store.calls();
    for round in 0..50 {
        // Two in flight, on both threads; then a flush on one of them.
        let writes = (0..2_u64)
            .map(|index| {
                let mut write = harness.request(Operation::Write, index * 512, &[(MEMORY, 512)]);
                write.write_through = round % 2 == 0;
                write
            })
            .collect();
        assert!(harness.run(writes).iter().all(Result::is_ok));
        let flush = harness.range_request(Operation::Flush, 0, 0);
        assert_eq!(harness.run_one(flush), Ok(()));
        let write = Some((Operation::Write, round % 2 == 0));
        assert_eq!(store.calls(), [write, write, Some((Operation::Flush, false))]);
    }
}

#[test]
fn a_panic_on_a_thread_fails_its_device_alone() {
    for threads in [1, 2] {
        let device = fault(&[("panic_every", 3)], threads);
        let beside = fault(&[], threads);
        let mut harness = Harness::new(&device, 8);
        let requests = (0..8).map(|_| harness.request(Operation::Read, 0, &[(MEMORY, 512)]));
        let requests = requests.collect();
        let results = harness.run(requests);
        assert!(results.contains(&Err(BlockError::EIO)), "{threads}: {results:?}");
        let failure = device.stages()[0].failure().map(str::to_owned);
        assert_eq!(failure.as_deref(), Some("it has panicked: planned by `panic_every`"));
        // Whichever thread has them, and on another channel, which needs no thread.
        let requests = (0..8).map(|_| harness.request(Operation::Read, 0, &[(MEMORY, 512)]));
        let requests = requests.collect();
        assert_eq!(harness.run(requests), [Err(BlockError::EIO); 8]);
        let mut late = Harness::new(&device, 8);
        let read = late.request(Operation::Read, 0, &[(MEMORY, 512)]);
        assert_eq!(late.run_one(read), Err(BlockError::EIO));
        let flush = late.range_request(Operation::Flush, 0, 0);
        assert_eq!(late.run_one(flush), Ok(()), "the store's");
        assert_eq!(Harness::new(&beside, 1).load(0, 512), [0; 512]);
    }
    assert_eq!(dropped_tags(), 0);
}

/// While a stage computes, another disk of the same sidecore goes on. Without threads it cannot.
#[test]
fn a_stage_that_takes_long_holds_no_other_disk_up() {
    let device = fault(&[("stall_every", 1)], 1);
    let (mut slow, mut quick) = (Harness::new(&device, 1), Harness::new(&ram(), 1));
    let mut most = 0;
    for _ in 0..200 {
        let request = slow.request(Operation::Read, 0, &[(MEMORY, 512)]);
        let (mut batch, mut completed) = (vec![request], Batch::new());
        slow.submit(&mut batch);
        let mut beside = 0;
        until("the stage goes on", || {
            assert_eq!(quick.load(0, 512).len(), 512);
            beside += 1;
            let now = slow.now();
            slow.channel.poll(now, &mut completed);
            !completed.is_empty()
        });
        assert!(completed[0].tag.take().map(Tag::into_bits).is_some());
        most = most.max(beside);
        if most > 1 {
            break;
        }
    }
    // Two milliseconds are time for many. On one thread there is one each time: after the stall.
    assert!(most > 1, "no request of the other disk has ended within a stall");
    let account = &device.stages()[0];
    let counts = account.counts();
    assert!(counts.busy_ns >= 2_000_000 * counts.requests, "{counts:?}");
    assert_eq!(counts.long_turns, 0, "turns in which other disks wait");
    assert!(account.threads().unwrap().ran() > Nanos::ZERO);
}

#[test]
fn a_thread_that_hangs_keeps_its_requests_and_holds_no_other_up() {
    let (device, orders) = told(1, ram());
    let mut harness = Harness::new(&device, 4);
    orders.hang_at(BAD);
    let hung = harness.request(Operation::Read, BAD, &[(MEMORY, 512)]);
    harness.submit(&mut vec![hung]);
    until("the stage hangs", || orders.hanging.load(Ordering::Acquire) == 1);
    // The sidecore goes on: with this queue and with others.
    let mut completed = Batch::new();
    for _ in 0..1_000 {
        let now = harness.now();
        harness.channel.poll(now, &mut completed);
    }
    assert_eq!((completed.len(), harness.in_flight()), (0, 1), "its memory may be written to");
    assert!(harness.channel.waits_since().is_some(), "the thread may need this CPU");
    assert_eq!(Harness::new(&ram(), 1).load(0, 512), [0; 512]);
    // It is reported.
    let account = Arc::clone(&device.stages()[0]);
    let threads = account.threads().unwrap();
    until("the silence is reported", || {
        threads.problem().is_some_and(|problem| problem.contains("\"told-0\" has not answered"))
    });
    // A queue that begins waits for a bounded time, and the next one for none.
    let refused = |device: &Arc<dyn BlockDevice>| {
        let begun = Instant::now();
        let Err(error) = device.open_channel(&CoreContext::default(), 4) else {
            panic!("a channel of a thread that hangs")
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        begun.elapsed()
    };
    assert!(refused(&device) < PATIENCE);
    assert!(refused(&device) < Duration::from_secs(1));
    orders.release();
    until("the request comes back", || {
        let now = harness.now();
        harness.channel.poll(now, &mut completed);
        !completed.is_empty()
    });
    let ended = completed.pop().unwrap().tag.take().map(Tag::into_bits);
    assert!(ended.is_some());
    until("it serves queues again", || {
        device.open_channel(&CoreContext::default(), 4).is_ok() && threads.problem().is_none()
    });
    assert_eq!(Harness::new(&device, 4).load(0, 512), [0; 512]);
}

#[test]
fn the_end_of_a_device_does_not_wait_for_a_thread_that_hangs() {
    let (device, orders) = told(1, ram());
    let account = Arc::clone(&device.stages()[0]);
    orders.hang_at(OPENING);
    let Err(error) = device.open_channel(&CoreContext::default(), 1) else {
        panic!("a channel of a stage that hangs")
    };
    assert!(error.to_string().contains("\"told-0\" has not answered"), "{error}");
    drop(device);
    assert!(account.threads().is_none(), "they have no owner left");
    orders.release();
    // If the drop had waited, the stage would have lost its patience.
    until("the thread drops the stage", || Arc::strong_count(&orders) == 1);
    assert_eq!(account.failure(), None);
}

#[test]
fn threads_end_with_their_last_channel() {
    let (device, _orders) = told(2, ram());
    let account = Arc::clone(&device.stages()[0]);
    let mut harness = Harness::new(&device, 4);
    drop(device);
    assert_eq!(account.threads().map(|threads| threads.count()), Some(2));
    assert_eq!(harness.load(0, 512), [0; 512], "the channel goes on");
    drop(harness);
    assert!(account.threads().is_none());
}

/// Queues come and go on one thread while others are busy there.
#[test]
fn queues_come_and_go_beside_each_other() {
    let (device, _orders) = told(2, ram());
    let queues: Vec<_> = (0..4_u64)
        .map(|number| {
            let device = Arc::clone(&device);
            std::thread::spawn(move || {
                for round in 0..20 {
                    let mut harness = Harness::new(&device, 8);
                    let offset = number * 65_536 + round * 1024;
                    let bytes = sidecore_block_contract::pattern(number * 100 + round, 1024);
                    harness.store(offset, &bytes);
                    assert!(harness.load(offset, 1024) == bytes);
                }
            })
        })
        .collect();
    for queue in queues {
        queue.join().unwrap();
    }
    assert_eq!(dropped_tags(), 0);
}
