//! A guest, its memory and its rings; a controller's queues; and the sidecores that serve them,
//! turned by hand.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sidecore_block::{Batch, BlockDevice, BlockRequest, Geometry, Operation, RamStore, Tag};
use sidecore_linux::EpollSleeper;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_nvme::io::{IoOptions, MakeQueue, QueueRunner, QueueSet, SendTask};
use sidecore_nvme::{
    Command, CompletionQueueSetup, Done, Namespace, QueueEvent, QueueHost, QueuesState, StartError,
    Status, SubmissionQueueSetup,
};
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Reactor, Sleeper, Turn, WakeKey, mailbox};
use sidecore_ring::driver::nvme::{CompletionRing, SubmissionRing};
use sidecore_ring::nvme::{Completion, Doorbells};
use sidecore_units::Nanos;

pub const MEMORY_BYTES: u64 = 32 << 20;
pub const DISK_BYTES: u64 = 8 << 20;
pub const BLOCK_BYTES: u64 = 512;
pub const BLOCKS: u64 = DISK_BYTES / BLOCK_BYTES;
/// Where commands' data is, and their lists.
pub const DATA: u64 = 8 << 20;
pub const LISTS: u64 = 4 << 20;
/// A queue's rings: 128 KiB for each number.
const RINGS: u64 = 0x1_0000;
const RING_BYTES: u64 = 0x1_0000;
const PAIRS: u16 = 8;
pub const PAGE: u64 = 4096;
/// A turn's length, and as many turns as anything may take.
const TURN: u64 = 1_000;
const MANY: usize = 20_000;

pub mod op {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0C;
}

/// Sleeps in no time.
pub struct Restless(EpollSleeper);

impl Sleeper for Restless {
    fn watch(&mut self, fd: BorrowedFd<'_>, key: WakeKey) -> io::Result<()> {
        self.0.watch(fd, key)
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.0.unwatch(fd)
    }

    fn wait(&mut self, _timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()> {
        self.0.wait(Some(Nanos::ZERO), woken)
    }
}

thread_local! {
    /// This thread's sidecores: each test has a thread of its own.
    static SIDECORES: RefCell<Vec<Reactor<Restless>>> = const { RefCell::new(Vec::new()) };
}

/// One of them.
struct Runner(usize);

impl QueueRunner for Runner {
    fn start(&self, _id: u16, make: MakeQueue) -> Result<SendTask, StartError> {
        let index = self.0;
        let queue = SIDECORES.with_borrow_mut(|sidecores| {
            let sidecore = &mut sidecores[index];
            let queue = make(sidecore.context())?;
            Ok(sidecore.add(queue).unwrap())
        })?;
        Ok(Arc::new(move |task| {
            SIDECORES.with_borrow_mut(|sidecores| {
                if let Some(queue) = sidecores[index].get_mut(queue) {
                    task(queue);
                }
            });
        }))
    }
}

pub struct Options {
    pub store: Arc<dyn BlockDevice>,
    pub block_bytes: u32,
    pub idle: IdleMode,
    pub sidecores: usize,
    pub flush: fn(&dyn BlockDevice) -> io::Result<()>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            store: ram(false),
            block_bytes: BLOCK_BYTES as u32,
            idle: IdleMode::Poll,
            sidecores: 1,
            flush,
        }
    }
}

pub fn ram(volatile_cache: bool) -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(Geometry { volatile_cache, ..Geometry::new(DISK_BYTES, 512) }).unwrap())
}

/// A handle that says when it was called.
pub fn flag() -> (Done, Arc<AtomicBool>) {
    let called = Arc::new(AtomicBool::new(false));
    let mirror = Arc::clone(&called);
    (Done::new(move || mirror.store(true, Ordering::Relaxed)), called)
}

pub fn is_set(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

pub struct Rig {
    pub memory: GuestMemory,
    pub file: std::fs::File,
    pub set: QueueSet,
    /// Makes another one over all that is the guest's: what a second process has.
    make_set: Box<dyn Fn() -> QueueSet>,
    pub doorbells: Arc<Doorbells>,
    pub events: Arc<Mutex<Vec<QueueEvent>>>,
    pub submissions: BTreeMap<u16, SubmissionRing>,
    pub completions: BTreeMap<u16, CompletionRing>,
    pub now: u64,
    /// Turns that slept.
    pub slept: usize,
    next_id: u16,
    /// Its sidecores, among this thread's.
    first_sidecore: usize,
    sidecores: usize,
}

/// The file of the guest's memory.
pub fn memory_file() -> std::fs::File {
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    file.set_len(MEMORY_BYTES).unwrap();
    file
}

/// The guest's memory, all of `file`.
pub fn map(file: &std::fs::File) -> GuestMemory {
    map_part(file, MEMORY_BYTES)
}

/// Only the first `len_bytes` of it.
pub fn map_part(file: &std::fs::File, len_bytes: u64) -> GuestMemory {
    let region = RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes,
        file: file.try_clone().unwrap().into(),
        file_offset_bytes: 0,
    };
    GuestMemory::map(vec![region]).unwrap()
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    /// Queue pair 1 exists, with 64 entries each and no interrupts.
    pub fn with(options: Options) -> Self {
        let mut rig = Self::bare(options);
        rig.add_completion(1, 64, None);
        rig.add_submission(1, 1, 64);
        rig
    }

    /// No queues.
    pub fn bare(options: Options) -> Self {
        let file = memory_file();
        let memory = map(&file);
        let first_sidecore = SIDECORES.with_borrow_mut(|sidecores| {
            let first = sidecores.len();
            for _ in 0..options.sidecores {
                let (_, mailbox) = mailbox().unwrap();
                sidecores.push(
                    Reactor::new(
                        CoreContext::default(),
                        Restless(EpollSleeper::new().unwrap()),
                        mailbox,
                    )
                    .unwrap(),
                );
            }
            first
        });
        let doorbells = Arc::new(Doorbells::new(PAIRS).unwrap());
        let events = Arc::new(Mutex::new(Vec::new()));
        let sidecores = options.sidecores;
        let make_set = Box::new({
            let (doorbells, events) = (Arc::clone(&doorbells), Arc::clone(&events));
            let namespace = namespace(options.store, options.block_bytes);
            move || {
                let io_options = IoOptions {
                    name: "nvme".to_owned(),
                    queue_pairs: PAIRS,
                    vectors: 4,
                    namespaces: 4,
                    idle: options.idle,
                    doorbells: Arc::clone(&doorbells),
                    flush: options.flush,
                    signal: EventFd::peer_signal,
                };
                let runner =
                    |index| Box::new(Runner(first_sidecore + index)) as Box<dyn QueueRunner>;
                let runners = (0..sidecores).map(runner).collect();
                let reported = Arc::clone(&events);
                let report = Box::new(move |event| reported.lock().unwrap().push(event));
                let set = QueueSet::new(io_options, runners, report).unwrap();
                set.set_namespace(Some(Arc::clone(&namespace)), Done::ignored());
                set
            }
        });
        Self {
            set: make_set(),
            make_set,
            memory,
            file,
            doorbells,
            events,
            submissions: BTreeMap::new(),
            completions: BTreeMap::new(),
            now: 0,
            slept: 0,
            next_id: 0,
            first_sidecore,
            sidecores,
        }
    }

    pub fn completion_setup(
        &self,
        id: u16,
        entries: u32,
        vector: Option<u16>,
    ) -> CompletionQueueSetup {
        let address = GuestAddress(RINGS + u64::from(id) * 2 * RING_BYTES);
        CompletionQueueSetup { id, memory: self.memory.clone(), address, entries, vector }
    }

    pub fn submission_setup(
        &self,
        id: u16,
        completion_queue: u16,
        entries: u32,
    ) -> SubmissionQueueSetup {
        let address = GuestAddress(RINGS + (u64::from(id) * 2 + 1) * RING_BYTES);
        SubmissionQueueSetup { id, completion_queue, memory: self.memory.clone(), address, entries }
    }

    pub fn add_completion(&mut self, id: u16, entries: u32, vector: Option<u16>) {
        let setup = self.completion_setup(id, entries, vector);
        let window = self.memory.guest_window(setup.address, entries as usize * 16, 64).unwrap();
        self.completions.insert(id, CompletionRing::new(window, entries).unwrap());
        self.set.start_completion_queue(setup).unwrap();
    }

    pub fn add_submission(&mut self, id: u16, completion_queue: u16, entries: u32) {
        let setup = self.submission_setup(id, completion_queue, entries);
        let window = self.memory.guest_window(setup.address, entries as usize * 64, 64).unwrap();
        self.submissions.insert(id, SubmissionRing::new(window, entries).unwrap());
        self.set.start_submission_queue(setup).unwrap();
    }

    /// Has the queues left.
    pub fn leave(&mut self) -> Option<QueuesState> {
        let left = Arc::new(Mutex::new(None));
        let leave = Arc::clone(&left);
        self.set.hand_over(Box::new(move |queues| *leave.lock().unwrap() = Some(queues)));
        self.until("the queues are left", |_| left.lock().unwrap().is_some());
        left.lock().unwrap().take().unwrap()
    }

    /// Resumes the queues in a set that knows the exported state alone.
    pub fn take_over(&mut self, queues: &QueuesState) -> Result<(), StartError> {
        let queues = serde_json::from_slice(&serde_json::to_vec(queues).unwrap()).unwrap();
        self.set = (self.make_set)();
        self.set.take_over(&self.memory, &queues)
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(GuestAddress(address), bytes, &mut RegionHint::default()).unwrap();
    }

    pub fn read(&self, address: u64, len_bytes: u64) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes as usize];
        self.memory
            .read_slice(GuestAddress(address), &mut bytes, &mut RegionHint::default())
            .unwrap();
        bytes
    }

    /// A turn of every sidecore.
    pub fn turn(&mut self) {
        self.now += TURN;
        for index in 0..self.sidecores {
            self.turn_one(index);
        }
    }

    /// A turn of one sidecore, in which no time passes.
    pub fn turn_one(&mut self, index: usize) -> Turn {
        let (now, first) = (Nanos(self.now), self.first_sidecore);
        let turn = SIDECORES
            .with_borrow_mut(|sidecores| sidecores[first + index].turn(&mut || now).unwrap());
        self.slept += usize::from(turn == Turn::Slept);
        turn
    }

    /// How many queues all sidecores have.
    pub fn queues(&self) -> usize {
        let first = self.first_sidecore;
        SIDECORES.with_borrow(|sidecores| {
            sidecores[first..][..self.sidecores].iter().map(Reactor::len).sum()
        })
    }

    pub fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MANY {
            if is_so(self) {
                return;
            }
            self.turn();
        }
        panic!("never: {what}");
    }

    pub fn next_id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    /// Queues a command; the controller is not told.
    pub fn push(&mut self, queue: u16, command: &Command) {
        assert!(
            self.submissions.get_mut(&queue).unwrap().push(command.bytes()),
            "submission queue {queue} is full"
        );
    }

    /// Tells the controller.
    pub fn ring(&self, queue: u16) {
        self.doorbells.set_submission_tail(queue, self.submissions[&queue].tail());
    }

    pub fn submit(&mut self, queue: u16, command: &Command) {
        self.push(queue, command);
        self.ring(queue);
    }

    /// Takes a completion, and gives its entry back.
    pub fn take(&mut self, queue: u16) -> Option<Completion> {
        let completion = self.take_quietly(queue)?;
        self.doorbells.set_completion_head(queue, self.completions[&queue].head());
        Some(completion)
    }

    /// Takes a completion, and keeps its entry.
    pub fn take_quietly(&mut self, queue: u16) -> Option<Completion> {
        let completion = self.completions.get_mut(&queue).unwrap().pop()?;
        if let Some(submissions) = self.submissions.get_mut(&completion.sq_id) {
            submissions.set_head(completion.sq_head).unwrap();
        }
        Some(completion)
    }

    /// Waits for a completion of queue pair 1.
    pub fn wait(&mut self) -> Completion {
        let mut taken = None;
        self.until("a completion", |rig| {
            taken = taken.or_else(|| rig.take(1));
            taken.is_some()
        });
        taken.unwrap()
    }

    /// Carries out a command by itself, in queue pair 1.
    pub fn run(&mut self, command: Command) -> Status {
        self.submit(1, &command);
        let completion = self.wait();
        assert_eq!(completion.command_id, command.id());
        assert_eq!(self.take(1), None);
        status(&completion)
    }

    /// A command of so many blocks, its data at [`DATA`], contiguous.
    pub fn command(&mut self, opcode: u8, block: u64, blocks: u64) -> Command {
        self.command_at(opcode, block, blocks, DATA, LISTS)
    }

    /// The same with its data, and its list if it needs one, somewhere else.
    pub fn command_at(
        &mut self,
        opcode: u8,
        block: u64,
        blocks: u64,
        data: u64,
        list: u64,
    ) -> Command {
        let id = self.next_id();
        let len_bytes = blocks * BLOCK_BYTES;
        let pages = (data % PAGE + len_bytes).div_ceil(PAGE);
        let second = (data & !(PAGE - 1)) + PAGE;
        let prp2 = match pages {
            0 | 1 => 0,
            2 => second,
            _ => {
                let entries: Vec<u8> =
                    (0..pages - 1).flat_map(|page| (second + page * PAGE).to_le_bytes()).collect();
                self.write(list, &entries);
                list
            }
        };
        ranged(Command::build(opcode, id, 1), block, blocks).with_prps(data, prp2)
    }

    pub fn event_count(&self) -> usize {
        self.events.lock().unwrap().len()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.set.stop_all(Done::ignored());
            self.until("all queues are gone", |rig| rig.queues() == 0);
            assert_eq!(sidecore_block::dropped_tags(), 0);
        }
    }
}

pub fn namespace(store: Arc<dyn BlockDevice>, block_bytes: u32) -> Arc<Namespace> {
    Arc::new(Namespace { id: 1, store, block_bytes, nguid: [7; 16], uuid: [8; 16] })
}

/// SLBA and NLB.
pub fn ranged(command: Command, block: u64, blocks: u64) -> Command {
    command
        .with_dword(10, block as u32)
        .with_dword(11, (block >> 32) as u32)
        .with_dword(12, u32::try_from(blocks - 1).unwrap())
}

/// The same with more bits in a dword.
pub fn or(command: Command, dword: usize, bits: u32) -> Command {
    command.with_dword(dword, command.dword(dword) | bits)
}

pub fn pattern(seed: u64, len_bytes: u64) -> Vec<u8> {
    (0..len_bytes).map(|at| (seed.wrapping_mul(131) + at / 512 + at) as u8).collect()
}

/// The status of a completion without its More bit, which is set for all errors that the error log
/// has, that is, for all but those that answer the host's question.
pub fn status(completion: &Completion) -> Status {
    const MORE: u16 = 1 << 14;
    let status = Status::from_field(completion.status & !MORE);
    let expected =
        [Status::SUCCESS, Status::COMPARE_FAILURE, Status::FAILED_FUSED, Status::ABORT_REQUESTED]
            .contains(&status);
    assert_eq!(completion.status & MORE == 0, expected, "{status}");
    status
}

/// Flushes a store, in a time of its own.
pub fn flush(store: &dyn BlockDevice) -> io::Result<()> {
    let mut channel = store.open_channel(&CoreContext::default(), 1)?;
    let mut request = BlockRequest::blank(0);
    request.operation = Operation::Flush;
    request.tag = Some(Tag::from_bits(0));
    channel.submit(Nanos::ZERO, &mut vec![request]);
    let mut completed = Batch::new();
    for now in 0.. {
        channel.poll(Nanos(now * TURN), &mut completed);
        if let Some(mut request) = completed.pop() {
            request.tag.take().map(Tag::into_bits);
            return request.result.map_err(io::Error::other);
        }
    }
    unreachable!()
}

/// An interrupt's descriptor and the test's end of it.
pub fn interrupt() -> (EventFd, std::os::fd::OwnedFd) {
    let event = EventFd::new().unwrap();
    let theirs = event.as_fd().try_clone_to_owned().unwrap();
    (event, theirs)
}
