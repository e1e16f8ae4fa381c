//! A driver with arbitrary behaviour on an NVMe function: registers, configuration space, admin
//! commands over memory that changes and goes away, while queues and the manager answer late. The
//! function must not panic, must keep its promised order towards its queues, and must complete
//! every reset.
//!
//! The input is a sequence of steps: each has a kind (1 byte) and its arguments; numbers are
//! little-endian. 0: a write of 4 bytes to BAR0: offset (2), shifted left by 2, and value (4). 1: a
//! command: its 64 bytes, put at the tail, and the doorbell. 2: bytes into the guest's memory:
//! offset (3), size (1), the bytes. 3: a write of any size at any place: region (1), offset (3),
//! size (1), the bytes. 4: a read likewise. 5: the held answers are sent. 6: the memory changes
//! (1). 7: an event from outside (1). 8: the controller is enabled as a driver does it. From 240
//! on: stores to the doorbells that the client has mapped: queue (1), tail (4), head (4). 255:
//! another client.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_block::{Geometry, RamStore};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_nvme::{
    Activity, AllocatedNamespace, CompletionQueueSetup, CreateNamespace, Done, FlexibleResources,
    FunctionSetup, Identity, Interrupts, Manager, Namespace, NvmeFunction, PciFunction, QueueEvent,
    QueueHost, Region, Reply, Resource, SecondaryController, StartError, SubmissionQueueSetup,
};
use sidecore_reactor::EventFd;
use sidecore_ring::nvme::{DoorbellStride, Doorbells};

const MEMORY_BYTES: u64 = 1 << 20;
const ENTRIES: u32 = 16;
const COMPLETIONS: u64 = 0x1000;

/// A queue host that holds its answers, and asserts the order of calls.
#[derive(Default)]
struct Host(Mutex<Books>);

#[derive(Default)]
struct Books {
    completion: BTreeSet<u16>,
    submission: BTreeMap<u16, u16>,
    held: Vec<Held>,
    flushing: bool,
}

enum Held {
    Done(Done),
    Flush(Done),
    Reply(Reply, u32),
    Abort(Box<dyn FnOnce(bool) + Send>),
}

impl Host {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    fn hold(&self, done: Done) {
        self.books().held.push(Held::Done(done));
    }

    fn release(&self) {
        let held = std::mem::take(&mut self.books().held);
        for held in held {
            match held {
                Held::Done(done) => done.call(),
                Held::Flush(done) => {
                    self.books().flushing = false;
                    done.call();
                }
                Held::Reply(reply, value) => reply.ok(value),
                Held::Abort(reply) => reply(true),
            }
        }
    }
}

impl QueueHost for Host {
    fn start_completion_queue(&self, setup: CompletionQueueSetup) -> Result<(), StartError> {
        let window =
            setup.memory.window(UserAddress(setup.address.0), setup.entries as usize * 16, 4096);
        window.map_err(|error| StartError::Memory { id: setup.id, error })?;
        assert!(setup.id > 0 && setup.vector.is_none_or(|vector| vector < 64));
        assert!(self.books().completion.insert(setup.id), "started twice");
        Ok(())
    }

    fn start_submission_queue(&self, setup: SubmissionQueueSetup) -> Result<(), StartError> {
        let window =
            setup.memory.window(UserAddress(setup.address.0), setup.entries as usize * 64, 4096);
        window.map_err(|error| StartError::Memory { id: setup.id, error })?;
        let mut books = self.books();
        assert!(setup.id > 0 && books.completion.contains(&setup.completion_queue));
        assert!(
            books.submission.insert(setup.id, setup.completion_queue).is_none(),
            "started twice"
        );
        Ok(())
    }

    fn stop_submission_queue(&self, id: u16, done: Done) {
        self.books().submission.remove(&id).expect("stopped without being started");
        self.hold(done);
    }

    fn stop_completion_queue(&self, id: u16, done: Done) {
        assert!(self.books().submission.values().all(|used| *used != id), "in use");
        assert!(self.books().completion.remove(&id), "stopped without being started");
        self.hold(done);
    }

    fn stop_all(&self, done: Done) {
        self.books().submission.clear();
        self.books().completion.clear();
        self.hold(done);
    }

    fn set_memory(&self, _memory: &GuestMemory, done: Done) {
        self.hold(done);
    }

    fn set_vector(&self, vector: u16, _event: Option<OwnedFd>) {
        assert!(vector < 64);
    }

    fn is_pending(&self, vector: u16) -> bool {
        vector & 1 == 0
    }

    fn set_namespace(&self, _namespace: Option<Arc<Namespace>>, done: Done) {
        self.hold(done);
    }

    fn flush(&self, done: Done) {
        let mut books = self.books();
        assert!(!std::mem::replace(&mut books.flushing, true), "two flushes at once");
        books.held.push(Held::Flush(done));
    }

    fn set_coalescing(&self, _threshold: u16, _time_us: u32) {}

    fn set_vector_coalescing(&self, vector: u16, _enabled: bool) {
        assert!(vector < 64);
    }

    fn abort(&self, queue: u16, _command: u16, reply: Box<dyn FnOnce(bool) + Send>) {
        let mut books = self.books();
        assert!(books.submission.contains_key(&queue) || !books.held.is_empty(), "no such queue");
        books.held.push(Held::Abort(reply));
    }

    fn set_doorbells(&self, _doorbells: Arc<Doorbells>) {
        let books = self.books();
        assert!(
            books.submission.is_empty() && books.completion.is_empty(),
            "they look at other doorbells"
        );
    }

    fn kick(&self, queue: u16) {
        let books = self.books();
        assert!(books.submission.contains_key(&queue) || books.completion.contains(&queue));
    }

    fn set_shadow_doorbells(&self, _pages: Option<(GuestAddress, GuestAddress)>) {}
}

/// A manager that answers when the host does.
struct Subsystem(Arc<Host>);

impl Subsystem {
    fn hold(&self, reply: Reply, value: u32) {
        self.0.books().held.push(Held::Reply(reply, value));
    }
}

impl Manager for Subsystem {
    fn allocated(&self) -> Vec<AllocatedNamespace> {
        let namespace = |id| AllocatedNamespace {
            id,
            capacity_bytes: 1 << 20,
            block_bytes: 512,
            nguid: [1; 16],
            read_only: false,
            controllers: vec![2],
        };
        (2..4).map(namespace).collect()
    }

    fn max_namespaces(&self) -> u32 {
        4
    }

    fn capacity(&self) -> (u128, u128) {
        (1 << 30, 1 << 20)
    }

    fn secondary_controllers(&self) -> Vec<SecondaryController> {
        let controller = |id| SecondaryController {
            id,
            online: id == 2,
            virtual_function: id,
            queues: 0,
            interrupts: 0,
        };
        (2..4).map(controller).collect()
    }

    fn flexible(&self, resource: Resource) -> Option<FlexibleResources> {
        (resource == Resource::Queue).then(FlexibleResources::default)
    }

    fn create(&self, namespace: CreateNamespace, reply: Reply) {
        assert!(namespace.capacity_bytes > 0 && [512, 4096].contains(&namespace.block_bytes));
        self.hold(reply, 4);
    }

    fn delete(&self, namespace: Option<u32>, reply: Reply) {
        assert_ne!(namespace, Some(1));
        self.hold(reply, 0);
    }

    fn attach(&self, _namespace: u32, controllers: Vec<u16>, reply: Reply) {
        assert!(!controllers.is_empty());
        self.hold(reply, 0);
    }

    fn detach(&self, _namespace: u32, controllers: Vec<u16>, reply: Reply) {
        assert!(!controllers.is_empty());
        self.hold(reply, 0);
    }

    fn set_online(&self, _controller: u16, _online: bool, reply: Reply) {
        self.hold(reply, 0);
    }

    fn assign(&self, _controller: u16, _resource: Resource, count: u16, reply: Reply) {
        self.hold(reply, count.into());
    }

    fn allocate(&self, _resource: Resource, count: u16, reply: Reply) {
        self.hold(reply, count.into());
    }
}

/// Reads the input; zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let count = N.min(self.0.len());
        let (taken, rest) = self.0.split_at(count);
        bytes[..count].copy_from_slice(taken);
        self.0 = rest;
        bytes
    }

    fn byte(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn offset(&mut self) -> u64 {
        let [low, middle, high] = self.array();
        u64::from(u32::from_le_bytes([low, middle, high, 0]))
    }

    fn bytes(&mut self) -> Vec<u8> {
        let count = usize::from(self.byte()).min(self.0.len());
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken.to_vec()
    }
}

/// Steps from here on are stores to mapped doorbells, of which the function is not notified; the
/// last step is another client.
const STORES: u8 = 240;
const CONNECTS: u8 = 255;

struct Driver {
    function: Arc<NvmeFunction>,
    host: Arc<Host>,
    file: OwnedFd,
    memory: GuestMemory,
    tail: u32,
    stride: u64,
    /// The doorbells that the client maps, if it may.
    doorbells: Option<Doorbells>,
}

impl Driver {
    fn new(managed: bool, mapped: bool) -> Self {
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY_BYTES).unwrap();
        let host = Arc::new(Host::default());
        let manager: Arc<dyn Manager> = Arc::new(Subsystem(host.clone()));
        let function = NvmeFunction::new(FunctionSetup {
            name: "fuzz".to_owned(),
            identity: Identity {
                serial: "1".to_owned(),
                model: "fuzz".to_owned(),
                subsystem_name: "nqn.2014-08.org.example:fuzz".to_owned(),
                controller_id: 1,
            },
            queue_pairs: 64,
            interrupts: if mapped { Interrupts::MsiX } else { Interrupts::Msi },
            doorbells: Arc::new(Doorbells::new(64).unwrap()),
            doorbells_are_mapped: mapped,
            host: host.clone(),
            statistics: Arc::new(Activity::default),
            manager: managed.then_some(manager),
            namespace: Some(namespace()),
            worker: None,
            signal: EventFd::peer_signal,
        });
        let memory = GuestMemory::map(vec![region(&file, 0, MEMORY_BYTES)]).unwrap();
        function.set_memory(memory.clone(), Done::ignored());
        let stride = if mapped { 64 } else { 4 };
        let mut driver = Self { function, host, file, memory, tail: 0, stride, doorbells: None };
        driver.connect();
        driver
    }

    /// Connects a client, which maps the doorbells if it may. An earlier client keeps its own.
    fn connect(&mut self) {
        self.function.connect().unwrap();
        let file = self.function.area_file(0).ok();
        self.doorbells =
            file.map(|file| Doorbells::from_file(file, 64, DoorbellStride::Line).unwrap());
    }

    fn write32(&self, offset: u64, value: u32) {
        let _ = self.function.write(Region::Bar(0), offset, &value.to_le_bytes());
    }

    fn poke(&self, offset: u64, bytes: &[u8]) {
        let _ = self.memory.write_slice(
            GuestAddress(offset % MEMORY_BYTES),
            bytes,
            &mut RegionHint::default(),
        );
    }

    fn enable(&mut self) {
        self.tail = 0;
        self.write32(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.write32(0x28, 0);
        self.write32(0x30, COMPLETIONS as u32);
        self.write32(0x14, 1 | 6 << 16 | 4 << 20);
    }

    fn step(&mut self, input: &mut Input) {
        let byte = input.byte();
        let step = if byte >= STORES { byte } else { byte % 9 };
        match step {
            0 => {
                let offset = u64::from(u16::from_le_bytes(input.array())) << 2;
                self.write32(offset, u32::from_le_bytes(input.array()));
            }
            1 => {
                self.poke(u64::from(self.tail) * 64, &input.array::<64>());
                self.tail = (self.tail + 1) % ENTRIES;
                self.write32(0x1000, self.tail);
                // The driver has seen all completion entries.
                self.write32(0x1000 + self.stride, self.tail);
            }
            2 => {
                let offset = input.offset();
                self.poke(offset, &input.bytes());
            }
            3 => {
                let (region, offset) = (region_of(input.byte()), input.offset());
                let _ = self.function.write(region, offset, &input.bytes());
            }
            4 => {
                let (region, offset) = (region_of(input.byte()), input.offset());
                let mut data = vec![0; usize::from(input.byte())];
                let _ = self.function.read(region, offset, &mut data);
            }
            5 => {
                self.host.release();
                self.function.run();
            }
            6 => self.change_memory(input.byte()),
            7 => self.outside(input.byte()),
            CONNECTS => {
                self.function.reset(Done::ignored());
                self.host.release();
                self.function.run();
                self.connect();
            }
            STORES.. => {
                let (queue, tail, head) =
                    (u16::from(input.byte() % 65), input.array(), input.array());
                if let Some(doorbells) = &self.doorbells {
                    doorbells.set_submission_tail(queue, u32::from_le_bytes(tail));
                    doorbells.set_completion_head(queue, u32::from_le_bytes(head));
                }
            }
            _ => self.enable(),
        }
    }

    fn change_memory(&self, how: u8) {
        let half = MEMORY_BYTES / 2;
        let specs = match how % 4 {
            0 => vec![],
            1 => vec![region(&self.file, 0, half)],
            2 => vec![region(&self.file, 0, half), region(&self.file, half, half)],
            _ => vec![region(&self.file, 0, MEMORY_BYTES)],
        };
        self.function.set_memory(GuestMemory::map(specs).unwrap(), Done::ignored());
    }

    fn outside(&self, what: u8) {
        match what % 8 {
            0 => self.function.set_namespace(None, Done::ignored()),
            1 => self.function.set_namespace(Some(namespace()), Done::ignored()),
            2 => self.function.reset(Done::ignored()),
            3 => self.function.set_online(false, Done::ignored()),
            4 => self.function.set_online(true, Done::ignored()),
            5 => self.function.report(QueueEvent::InvalidDoorbellValue { queue: 1 }),
            6 => self.function.report(QueueEvent::Fatal { queue: 1 }),
            _ => self.function.set_queue_pairs(what.into()),
        }
        self.function.run();
    }
}

fn region(file: &OwnedFd, start: u64, len_bytes: u64) -> RegionSpec {
    RegionSpec {
        guest_address: GuestAddress(start),
        user_address: UserAddress(start),
        len_bytes,
        file: file.try_clone().unwrap(),
        file_offset_bytes: start,
    }
}

fn namespace() -> Arc<Namespace> {
    let store = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    Arc::new(Namespace { id: 1, store, block_bytes: 512, nguid: [1; 16], uuid: [2; 16] })
}

fn region_of(byte: u8) -> Region {
    match byte % 4 {
        0 => Region::Bar(0),
        1 => Region::Bar(4),
        2 => Region::Config,
        _ => Region::Bar(byte),
    }
}

fuzz_target!(|input: &[u8]| {
    let mut input = Input(input);
    let flags = input.byte();
    let mut driver = Driver::new(flags & 1 != 0, flags & 2 != 0);
    driver.enable();
    while !input.0.is_empty() {
        driver.step(&mut input);
    }
    // The function must become idle from any state.
    let over = Arc::new(AtomicBool::new(false));
    let seen = over.clone();
    driver.function.reset(Done::new(move || seen.store(true, Ordering::Relaxed)));
    driver.host.release();
    driver.function.run();
    assert!(over.load(Ordering::Relaxed), "the reset is not over");
    driver.host.release();
    let books = driver.host.books();
    assert!(
        books.submission.is_empty() && books.completion.is_empty(),
        "queues run after the reset"
    );
});
