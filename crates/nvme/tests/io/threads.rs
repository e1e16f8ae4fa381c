//! Two sidecores with threads of their own, and two guests that count on one block by Compare and
//! Write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, yield_now};

use sidecore_linux::{Clock, EpollSleeper};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_nvme::io::{IoOptions, MakeQueue, QueueRunner, QueueSet, SendTask};
use sidecore_nvme::{
    Command, CompletionQueueSetup, Done, QueueHost, StartError, Status, SubmissionQueueSetup,
};
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Post, Reactor, mailbox};
use sidecore_ring::driver::nvme::{CompletionRing, SubmissionRing};
use sidecore_ring::nvme::Doorbells;
use sidecore_units::Nanos;

use crate::rig::{MEMORY_BYTES, flush, map, memory_file, namespace, op, or, ram, ranged, status};

const ENTRIES: u32 = 16;
const INCREMENTS: u64 = 400;

struct Sidecore {
    post: Post<EpollSleeper>,
}

impl QueueRunner for Sidecore {
    fn start(&self, _id: u16, make: MakeQueue) -> Result<SendTask, StartError> {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let mail = Box::new(move |reactor: &mut Reactor<EpollSleeper>| {
            let queue = make(reactor.context());
            let _ = reply.send(queue.map(|queue| reactor.add(queue).unwrap()));
        });
        self.post.send(mail).map_err(|_| StartError::SidecoreGone)?;
        let queue = answer.recv().map_err(|_| StartError::SidecoreGone)??;
        let post = self.post.clone();
        Ok(Arc::new(move |task| {
            let _ = post.send(Box::new(move |reactor| {
                if let Some(queue) = reactor.get_mut(queue) {
                    task(queue);
                }
            }));
        }))
    }
}

fn start(stop: &Arc<AtomicBool>) -> (Sidecore, JoinHandle<()>) {
    let (post, mailbox) = mailbox().unwrap();
    let stop = Arc::clone(stop);
    let thread = std::thread::spawn(move || {
        let clock = Clock::new();
        let mut reactor =
            Reactor::new(CoreContext::default(), EpollSleeper::new().unwrap(), mailbox).unwrap();
        while !stop.load(Ordering::Relaxed) || !reactor.is_empty() {
            reactor.turn(&mut || clock.now()).unwrap();
            yield_now();
        }
    });
    (Sidecore { post }, thread)
}

/// A guest with a queue pair of its own.
struct Guest<'a> {
    number: u16,
    memory: GuestMemory,
    submissions: SubmissionRing,
    completions: CompletionRing,
    doorbells: &'a Doorbells,
    set: &'a QueueSet,
}

impl Guest<'_> {
    fn address(&self, index: u64) -> u64 {
        MEMORY_BYTES / 2 + u64::from(self.number) * 0x1_0000 + index * 4096
    }

    /// Carries out commands together; their statuses, in the order of completion.
    fn run(&mut self, commands: &[Command]) -> Vec<Status> {
        for command in commands {
            assert!(self.submissions.push(command.bytes()));
        }
        self.doorbells.set_submission_tail(self.number, self.submissions.tail());
        self.set.kick(self.number);
        let mut statuses = Vec::new();
        while statuses.len() < commands.len() {
            let Some(completion) = self.completions.pop() else {
                yield_now();
                continue;
            };
            self.submissions.set_head(completion.sq_head).unwrap();
            self.doorbells.set_completion_head(self.number, self.completions.head());
            statuses.push(status(&completion));
        }
        statuses
    }

    fn put(&self, index: u64, value: u64) {
        let address = GuestAddress(self.address(index));
        self.memory.write_slice(address, &value.to_le_bytes(), &mut RegionHint::default()).unwrap();
    }

    fn command(&self, opcode: u8, index: u64) -> Command {
        ranged(Command::build(opcode, index as u16, 1), 0, 8).with_prps(self.address(index), 0)
    }

    fn value(&mut self) -> u64 {
        assert_eq!(self.run(&[self.command(op::READ, 0)]), [Status::SUCCESS]);
        let bytes = self
            .memory
            .read_array(GuestAddress(self.address(0)), &mut RegionHint::default())
            .unwrap();
        u64::from_le_bytes(bytes)
    }

    fn count(&mut self) {
        let mut done = 0;
        while done < INCREMENTS {
            let value = self.value();
            self.put(1, value);
            self.put(2, value + 1);
            let compare = or(self.command(op::COMPARE, 1), 0, 1 << 8);
            let write = or(self.command(op::WRITE, 2), 0, 2 << 8);
            match self.run(&[compare, write])[..] {
                [Status::SUCCESS, Status::SUCCESS] => done += 1,
                [Status::COMPARE_FAILURE, Status::FAILED_FUSED] => {}
                ref other => panic!("{other:?}"),
            }
        }
    }
}

/// A guest with a queue of its own, which is started.
fn guest<'a>(
    number: u16,
    memory: &GuestMemory,
    doorbells: &'a Doorbells,
    set: &'a QueueSet,
) -> Guest<'a> {
    let at = |index: u64| GuestAddress(0x10_0000 * u64::from(number) + index * 0x1_0000);
    let (id, memory) = (number, memory.clone());
    let setup = CompletionQueueSetup { id, memory, address: at(0), entries: ENTRIES, vector: None };
    let completions = memory_window(&setup.memory, at(0), 16);
    let completions = CompletionRing::new(completions, ENTRIES).unwrap();
    let submissions = memory_window(&setup.memory, at(1), 64);
    let submissions = SubmissionRing::new(submissions, ENTRIES).unwrap();
    let memory = setup.memory.clone();
    set.start_completion_queue(setup).unwrap();
    let (completion_queue, address) = (id, at(1));
    let setup = SubmissionQueueSetup { id, completion_queue, memory, address, entries: ENTRIES };
    let memory = setup.memory.clone();
    set.start_submission_queue(setup).unwrap();
    Guest { number, memory, submissions, completions, doorbells, set }
}

#[test]
fn no_count_is_lost() {
    let file = memory_file();
    let memory = map(&file);
    for idle in
        [IdleMode::Poll, IdleMode::Adaptive { spin: Nanos::from_micros(1) }, IdleMode::Interrupt]
    {
        let stop = Arc::new(AtomicBool::new(false));
        let (sidecores, threads): (Vec<_>, Vec<_>) = (0..2).map(|_| start(&stop)).unzip();
        let doorbells = Arc::new(Doorbells::new(2).unwrap());
        let options = IoOptions {
            name: "nvme".to_owned(),
            queue_pairs: 2,
            vectors: 1,
            namespaces: 1,
            idle,
            doorbells: Arc::clone(&doorbells),
            flush,
            signal: EventFd::peer_signal,
        };
        let posts: Vec<_> = sidecores.iter().map(|sidecore| sidecore.post.clone()).collect();
        let runners = sidecores
            .into_iter()
            .map(|sidecore| Box::new(sidecore) as Box<dyn QueueRunner>)
            .collect();
        let set = QueueSet::new(options, runners, Box::new(|event| panic!("{event:?}"))).unwrap();
        set.set_namespace(Some(namespace(ram(false), 512)), Done::ignored());
        let mut guests = [1, 2].map(|number| guest(number, &memory, &doorbells, &set));
        std::thread::scope(|scope| {
            for guest in &mut guests {
                scope.spawn(|| guest.count());
            }
        });
        assert_eq!(guests[0].value(), 2 * INCREMENTS, "{idle:?}");
        let (sent, gone) = std::sync::mpsc::channel();
        set.stop_all(Done::new(move || sent.send(()).unwrap()));
        gone.recv().unwrap();
        stop.store(true, Ordering::Relaxed);
        for (post, thread) in posts.into_iter().zip(threads) {
            // Only to wake it.
            let _ = post.send(Box::new(|_| {}));
            thread.join().unwrap();
        }
    }
}

fn memory_window(
    memory: &GuestMemory,
    address: GuestAddress,
    entry_bytes: usize,
) -> sidecore_memory::Window {
    memory.guest_window(address, ENTRIES as usize * entry_bytes, 64).unwrap()
}
