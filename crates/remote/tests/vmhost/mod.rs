//! A client's session, and an IOhost with disks in memory, in one thread.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice as _, BlockError, BlockRequest, Operation, Tag,
};
use sidecore_block_contract::{guest_memory, pattern, request};
use sidecore_link::{EthernetAddress, Faults, Link, LinkAddress, LinkOptions, Network};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, Segments, SharedPages};
use sidecore_reactor::{Arm, CoreContext, IdleMode, Pollable, Polled, Unit};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session, SessionOptions, WaitsFor};
use sidecore_remote::{LinkPort, RequestData};
use sidecore_units::Nanos;
use sidecore_vrio::port::Plain;
use sidecore_vrio::wire::{DATA_HEADER_BYTES, DeviceEntry, device_flag};
use sidecore_vrio::{
    ClientOptions, Execute, Host, HostOptions, Member, OnDisconnect, Request, ServerOptions,
};

pub const CLIENT: [u8; 16] = *b"the first client";
pub const DISK_BYTES: usize = 4 << 20;
pub const VMHOST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
pub const IOHOST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 2]);
/// One step of the simulated time.
pub const STEP: Nanos = Nanos::from_micros(2);
/// The third region of the contract's guest memory.
pub const SCRATCH: u64 = 0x1_0000_0000;

const FLAGS: u32 = device_flag::PRESENT
    | device_flag::VOLATILE_CACHE
    | device_flag::DISCARD
    | device_flag::DISCARD_ZEROES
    | device_flag::WRITE_ZEROES;

/// The entry of a device, by its name.
pub fn entry(number: u16, name: &str) -> DeviceEntry {
    let mut entry = DeviceEntry {
        device: number,
        flags: FLAGS,
        epoch: 1,
        capacity_bytes: DISK_BYTES as u64,
        block_bytes: 512,
        physical_block_bytes: 4096,
        ..DeviceEntry::default()
    };
    entry.name[..name.len()].copy_from_slice(name.as_bytes());
    entry.serial[..name.len()].copy_from_slice(name.as_bytes());
    entry
}

/// A disk whose writes are lost in a power cut unless they were flushed.
#[derive(Clone)]
pub struct Disk {
    pub bytes: Vec<u8>,
    pub durable: Vec<u8>,
    /// Requests by their kinds: reads, writes, flushes, others.
    pub executed: [u64; 4],
    pub fails: Option<BlockError>,
}

impl Disk {
    fn new() -> Self {
        let bytes = vec![0; DISK_BYTES];
        Self { durable: bytes.clone(), bytes, executed: [0; 4], fails: None }
    }

    fn execute(&mut self, request: &Request, data: &Segments) -> Result<(), BlockError> {
        let Request { operation, offset_bytes, len_bytes, fua } = *request;
        let range = offset_bytes as usize..(offset_bytes + len_bytes) as usize;
        let kind = match operation {
            Operation::Read => 0,
            Operation::Write => 1,
            Operation::Flush => 2,
            _ => 3,
        };
        self.executed[kind] += 1;
        if let Some(error) = self.fails {
            return Err(error);
        }
        match operation {
            Operation::Read => {
                data.copy_from_slice(0, &self.bytes[range]);
            }
            Operation::Write => {
                data.copy_to_slice(0, &mut self.bytes[range.clone()]);
                if fua {
                    self.durable[range.clone()].copy_from_slice(&self.bytes[range]);
                }
            }
            Operation::Flush => self.durable.copy_from_slice(&self.bytes),
            Operation::Discard | Operation::WriteZeroes { .. } => self.bytes[range].fill(0),
        }
        Ok(())
    }
}

/// The buffers of the host's slots.
#[derive(Default)]
pub struct Buffers {
    pages: Vec<SharedPages>,
    lists: HashMap<u64, Segments>,
}

impl Buffers {
    fn list(&mut self, place: u64) -> &Segments {
        let pages = &mut self.pages;
        self.lists.entry(place).or_insert_with(|| {
            let memory = SharedPages::new("slot", 64 << 10).unwrap();
            let mut list = Segments::with_capacity(1);
            list.bind(memory.memory());
            list.push(GuestAddress(0), 64 << 10, &mut RegionHint::default()).unwrap();
            pages.push(memory);
            list
        })
    }
}

impl RequestData for Buffers {
    fn segments(&self, request: u64) -> Option<&Segments> {
        self.lists.get(&request)
    }
}

/// An IOhost on one link, with all disks in memory.
pub struct TestHost {
    pub host: Host<Plain>,
    pub port: LinkPort<Buffers>,
    pub disks: Vec<Disk>,
    pub entries: Vec<DeviceEntry>,
    /// The store keeps what it is given.
    pub holds: bool,
    held: Vec<Execute>,
    wake: OwnedFd,
    now: Nanos,
    idle: IdleMode,
    stopped: Option<Box<dyn FnOnce(()) + Send>>,
}

impl TestHost {
    pub fn new(link: Box<dyn Link>, incarnation: u64, entries: &[DeviceEntry]) -> Self {
        let disks = entries.iter().map(|_| Disk::new()).collect();
        Self::with_disks(link, incarnation, entries, disks)
    }

    pub fn with_disks(
        link: Box<dyn Link>,
        incarnation: u64,
        entries: &[DeviceEntry],
        disks: Vec<Disk>,
    ) -> Self {
        let options = HostOptions {
            incarnation,
            secret: [incarnation, 7],
            server: ServerOptions::default(),
            ..HostOptions::default()
        };
        let mut host = Host::new(options, Plain, Arc::default());
        let place = host.add(Member { client: CLIENT, queue: 0 }, Arc::default()).unwrap();
        host.set_devices(Nanos::ZERO, place, entries);
        let wake = link.wake_fd().try_clone_to_owned().unwrap();
        let mut buffers = Buffers::default();
        for slot in 0..128 {
            buffers.list(slot);
        }
        Self {
            host,
            port: LinkPort::new(link, buffers),
            disks,
            entries: entries.to_vec(),
            holds: false,
            held: Vec::new(),
            wake,
            now: Nanos::ZERO,
            idle: IdleMode::Adaptive { spin: Nanos::from_micros(50) },
            stopped: None,
        }
    }

    pub fn set_devices(&mut self, entries: &[DeviceEntry]) {
        self.entries = entries.to_vec();
        self.host.set_devices(self.now, 0, entries);
    }

    pub fn turn(&mut self, now: Nanos) -> usize {
        self.now = now;
        let mut work = self.port.receive(now, 64);
        while let Some(mut arrived) = self.port.next_frame() {
            let (from, frame_bytes) = (arrived.from, arrived.frame_bytes);
            let (head, received) = arrived.parts();
            self.host.receive(now, (from, head, frame_bytes), received, &mut self.port);
        }
        while let Some(execute) = self.host.next_execute() {
            self.held.push(execute);
        }
        if !self.holds {
            for execute in self.held.drain(..) {
                let disk = self.entries.iter().position(|entry| entry.device == execute.device);
                let disk = &mut self.disks[disk.unwrap()];
                let list = self.port.data.segments(execute.place).unwrap();
                let result = disk.execute(&execute.request, list);
                self.host.complete(execute.ticket, result);
                work += 1;
            }
        }
        self.host.poll(now, &mut self.port);
        self.port.flush(now);
        work
    }
}

impl Pollable for TestHost {
    fn poll(&mut self, now: Nanos, _budget: usize) -> Polled {
        let work = self.turn(now);
        if self.stopped.is_some() {
            return Polled::Finished;
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.idle
    }

    fn arm(&mut self) -> Arm {
        if self.host.deadline().is_some_and(|at| at <= self.now) {
            return Arm::WorkPending;
        }
        self.port.arm()
    }

    fn disarm(&mut self) {
        self.port.disarm();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wake.as_fd());
    }

    fn on_wake(&mut self) {
        self.port.on_wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        self.host.deadline().into_iter().chain(self.port.deadline()).min()
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn finish(mut self: Box<Self>) {
        if let Some(stopped) = self.stopped.take() {
            drop(self);
            stopped(());
        }
    }
}

impl Unit for TestHost {
    type State = ();

    fn stop(&mut self, stopped: Box<dyn FnOnce(()) + Send>) {
        self.stopped = Some(stopped);
    }
}

pub fn link_options() -> LinkOptions {
    LinkOptions { receive_frames: 512, transmit_frames: 512, ..LinkOptions::new(DATA_HEADER_BYTES) }
}

pub fn session_options(address: LinkAddress) -> SessionOptions {
    SessionOptions {
        client: ClientOptions {
            client: CLIENT,
            life: 3,
            on_disconnect: OnDisconnect::Stall,
            ..ClientOptions::default()
        },
        address,
        idle: IdleMode::Poll,
    }
}

/// A queue of the client, and its guest.
pub struct Queue {
    pub memory: GuestMemory,
    pub channel: Box<dyn BlockChannel>,
    pub batch: Batch,
    pub completed: Batch,
}

/// A session and an IOhost on a simulated network, in simulated time.
pub struct Rig {
    pub now: Nanos,
    pub network: Network,
    pub core: CoreContext,
    pub iohost: Iohost,
    pub session: Session<Plain>,
    /// `None` while it is down.
    pub host: Option<TestHost>,
    pub incarnation: u64,
    pub queues: Vec<Queue>,
    pub openings: Vec<Opening>,
    pub stores: Vec<RemoteStore>,
}

impl Rig {
    pub fn new(seed: u64, faults: Faults, entries: &[DeviceEntry]) -> Self {
        Self::with(seed, faults, entries, session_options(LinkAddress::Ethernet(IOHOST)))
    }

    pub fn with(
        seed: u64,
        faults: Faults,
        entries: &[DeviceEntry],
        options: SessionOptions,
    ) -> Self {
        let network = Network::new(seed, faults);
        let core = CoreContext::default();
        let iohost = Iohost::new("io1").unwrap();
        let link = network.link(VMHOST, &link_options()).unwrap();
        let session = Session::new(&core, &iohost, Box::new(link), Plain, &options).unwrap();
        let link = network.link(IOHOST, &link_options()).unwrap();
        let host = Some(TestHost::new(Box::new(link), 100, entries));
        Self {
            now: Nanos::from_millis(1),
            network,
            core,
            iohost,
            session,
            host,
            incarnation: 100,
            queues: Vec::new(),
            openings: Vec::new(),
            stores: Vec::new(),
        }
    }

    /// A rig with one device `disk1` that is open, and a queue on the session's sidecore.
    pub fn with_disk(seed: u64, faults: Faults) -> Self {
        let mut rig = Self::new(seed, faults, &[entry(0, "disk1")]);
        rig.open("disk1");
        rig.add_queue(0, true, 32);
        rig
    }

    pub fn step(&mut self) {
        self.session.poll(self.now, 32);
        if let Some(host) = &mut self.host {
            host.turn(self.now);
        }
        for queue in &mut self.queues {
            queue.channel.exchange(self.now, &mut queue.batch, &mut queue.completed);
        }
        self.now = self.now.after(STEP);
    }

    pub fn run_until(&mut self, what: &str, until: impl Fn(&Self) -> bool) {
        let end = self.now.after(Nanos::from_millis(60_000));
        while !until(self) {
            assert!(self.now < end, "{what}: not within a minute");
            self.step();
            if self.host.is_none() {
                // Only timers: no step is missed.
                self.now = self.now.after(Nanos::from_micros(100));
            }
        }
    }

    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now.after(time);
        while self.now < end {
            self.step();
        }
    }

    /// Opens a device, and returns the number of its store.
    pub fn open(&mut self, name: &str) -> usize {
        let opening = Opening::new(&self.iohost, name).unwrap();
        self.finish(opening)
    }

    /// Waits for an opening, and returns the number of its store.
    pub fn finish(&mut self, opening: Opening) -> usize {
        self.run_until("open", |_| {
            let status = opening.status();
            status.entry.is_some() && status.waiting.is_none()
        });
        let Ok(Ok(store)) = opening.wait(Some(std::time::Duration::ZERO)) else {
            panic!("not opened");
        };
        self.stores.push(store);
        self.stores.len() - 1
    }

    /// Adds a queue on the session's sidecore or on another one.
    pub fn add_queue(&mut self, store: usize, is_local: bool, depth: usize) -> usize {
        let other = CoreContext::default();
        let core = if is_local { &self.core } else { &other };
        let channel = self.stores[store].open_channel(core, depth).unwrap();
        self.queues.push(Queue {
            memory: guest_memory(),
            channel,
            batch: Batch::new(),
            completed: Batch::new(),
        });
        self.queues.len() - 1
    }

    pub fn status(&self, store: usize) -> Option<WaitsFor> {
        self.stores[store].status().waiting.map(|waiting| waiting.waits_for)
    }

    /// Ends the IOhost at once, with the power if `power_cut`. Its disks are what remains.
    pub fn kill(&mut self, power_cut: bool) -> Vec<Disk> {
        let mut disks = self.host.take().unwrap().disks;
        if power_cut {
            for disk in &mut disks {
                disk.bytes.clone_from(&disk.durable);
            }
        }
        disks
    }

    pub fn revive(&mut self, entries: &[DeviceEntry], disks: Vec<Disk>) {
        self.incarnation += 1;
        let link = self.network.link(IOHOST, &link_options()).unwrap();
        self.host = Some(TestHost::with_disks(Box::new(link), self.incarnation, entries, disks));
    }

    /// Makes a request of a queue whose data are at `SCRATCH` + `at`.
    pub fn request(
        &self,
        queue: usize,
        tag: u64,
        operation: Operation,
        (offset_bytes, len_bytes): (u64, u64),
        at: u64,
    ) -> Box<BlockRequest> {
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        let pieces = [(SCRATCH + at, len_bytes)];
        let pieces = if has_data { &pieces[..] } else { &[] };
        let mut request = request(&self.queues[queue].memory, operation, offset_bytes, pieces);
        request.len_bytes = len_bytes;
        request.taken_at = self.now;
        request.tag = Some(Tag::from_bits(tag));
        request
    }

    pub fn poke(&self, queue: usize, at: u64, bytes: &[u8]) {
        let memory = &self.queues[queue].memory;
        let address = GuestAddress(SCRATCH + at);
        memory.write_slice(address, bytes, &mut RegionHint::default()).unwrap();
    }

    pub fn peek(&self, queue: usize, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let memory = &self.queues[queue].memory;
        let address = GuestAddress(SCRATCH + at);
        memory.read_slice(address, &mut bytes, &mut RegionHint::default()).unwrap();
        bytes
    }

    /// Runs one request of a queue to its end.
    pub fn run(&mut self, queue: usize, request: Box<BlockRequest>) -> Result<(), BlockError> {
        self.queues[queue].batch.push(request);
        self.wait(queue)
    }

    /// Waits for the next request of a queue to end.
    pub fn wait(&mut self, queue: usize) -> Result<(), BlockError> {
        self.run_until("a request", |rig| !rig.queues[queue].completed.is_empty());
        let mut request = self.queues[queue].completed.remove(0);
        request.tag.take().map(Tag::into_bits);
        request.result
    }

    pub fn write(&mut self, queue: usize, offset: u64, seed: u64, len: usize) -> Vec<u8> {
        let bytes = pattern(seed, len);
        self.poke(queue, 0, &bytes);
        let write = self.request(queue, 1, Operation::Write, (offset, len as u64), 0);
        assert_eq!(self.run(queue, write), Ok(()));
        bytes
    }

    pub fn read(&mut self, queue: usize, offset: u64, len: usize) -> Vec<u8> {
        self.poke(queue, 0, &vec![0xa5; len]);
        let read = self.request(queue, 1, Operation::Read, (offset, len as u64), 0);
        assert_eq!(self.run(queue, read), Ok(()));
        self.peek(queue, 0, len)
    }

    pub fn flush(&mut self, queue: usize) -> Result<(), BlockError> {
        let flush = self.request(queue, 1, Operation::Flush, (0, 0), 0);
        self.run(queue, flush)
    }
}

thread_local! {
    /// The rig of [`Pumped`] stores.
    pub static RIG: RefCell<Option<Rig>> = const { RefCell::new(None) };
}

/// A store of this thread's rig, whose channels let the rig run.
pub struct Pumped {
    pub store: usize,
    pub is_local: bool,
}

impl sidecore_block::BlockDevice for Pumped {
    fn geometry(&self) -> sidecore_block::Geometry {
        RIG.with_borrow(|rig| rig.as_ref().unwrap().stores[self.store].geometry())
    }

    fn open_channel(
        &self,
        _core: &CoreContext,
        depth: usize,
    ) -> std::io::Result<Box<dyn BlockChannel>> {
        let other = CoreContext::default();
        RIG.with_borrow(|rig| {
            let rig = rig.as_ref().unwrap();
            let core = if self.is_local { &rig.core } else { &other };
            let inner = rig.stores[self.store].open_channel(core, depth)?;
            Ok(Box::new(PumpedChannel(inner, Rc::new(()))) as _)
        })
    }
}

struct PumpedChannel(Box<dyn BlockChannel>, Rc<()>);

fn pump() {
    RIG.with_borrow_mut(|rig| rig.as_mut().unwrap().step());
}

impl BlockChannel for PumpedChannel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        let now = RIG.with_borrow(|rig| rig.as_ref().unwrap().now);
        self.0.submit(now, batch);
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        pump();
        let now = RIG.with_borrow(|rig| rig.as_ref().unwrap().now);
        self.0.poll(now, completed);
    }

    fn takes_write_through(&self) -> bool {
        self.0.takes_write_through()
    }

    fn readiness(&self) -> sidecore_block::Readiness {
        sidecore_block::Readiness::polled(self.0.readiness().in_flight)
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.0.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
