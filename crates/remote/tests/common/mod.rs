//! Clients, an IOhost's unit with its helpers, and stores, on one thread and in simulated time.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation, Readiness,
};
use sidecore_link::{EthernetAddress, Faults, Link, LinkAddress, LinkOptions, Network};
use sidecore_memory::{GuestAddress, RegionHint, Segments, SharedPages};
use sidecore_reactor::{CoreContext, IdleMode, Pollable, Polled};
use sidecore_remote::export::{
    ClientId, ClientShare, ClientSpec, Export, ExportedDevice, Helper, Load, helper,
};
use sidecore_remote::{LinkPort, RequestData};
use sidecore_units::Nanos;
use sidecore_vrio::wire::{DATA_HEADER_BYTES, DEVICE_NAME_BYTES};
use sidecore_vrio::{
    Client, ClientOptions, Event, HostOptions, Plain, Request, ServerOptions, VrioStats,
};

pub const IOHOST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 100]);
pub const STEP: Nanos = Nanos::from_micros(2);
pub const DISK_BYTES: u64 = 4 << 20;
/// Buffers of a client: its tags are below.
pub const TAGS: u64 = 256;
const BUFFER_BYTES: u64 = 64 << 10;

/// The buffers of a client's requests, one for each tag.
pub struct Buffers {
    pages: SharedPages,
    lists: Vec<Segments>,
}

impl Buffers {
    fn new() -> Self {
        let pages = SharedPages::new("client", (TAGS * BUFFER_BYTES) as usize).unwrap();
        let lists = (0..TAGS)
            .map(|tag| {
                let mut list = Segments::with_capacity(1);
                list.bind(pages.memory());
                let start = GuestAddress(tag * BUFFER_BYTES);
                list.push(start, BUFFER_BYTES, &mut RegionHint::default()).unwrap();
                list
            })
            .collect();
        Self { pages, lists }
    }
}

impl RequestData for Buffers {
    fn segments(&self, request: u64) -> Option<&Segments> {
        self.lists.get(request as usize)
    }
}

pub fn device_name(name: &str) -> [u8; DEVICE_NAME_BYTES] {
    let mut bytes = [0; DEVICE_NAME_BYTES];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

pub struct TestClient {
    pub client: Client<Plain>,
    pub port: LinkPort<Buffers>,
    pub stats: Arc<VrioStats>,
    pub completed: Vec<(u64, Result<(), BlockError>)>,
}

pub fn client_id(number: u8) -> [u8; 16] {
    [number; 16]
}

pub fn station(number: u8) -> EthernetAddress {
    EthernetAddress([2, 0, 0, 0, 0, number])
}

impl TestClient {
    pub fn new(network: &Network, number: u8, options: ClientOptions) -> Self {
        let link = Box::new(network.link(station(number), &link_options()).unwrap());
        Self::on(link, LinkAddress::Ethernet(IOHOST), number, options)
    }

    /// A client of the IOhost at this address of a link.
    pub fn on(link: Box<dyn Link>, host: LinkAddress, number: u8, options: ClientOptions) -> Self {
        let mut port = LinkPort::new(link, Buffers::new());
        let host = port.peers().name(host);
        let stats = Arc::new(VrioStats::default());
        let options = ClientOptions { client: client_id(number), ..options };
        let client = Client::new(options, host, Plain, Arc::clone(&stats));
        Self { client, port, stats, completed: Vec::with_capacity(TAGS as usize) }
    }

    pub fn poll(&mut self, now: Nanos) {
        self.port.receive(now, 64);
        while let Some(mut frame) = self.port.next_frame() {
            let (from, frame_bytes) = (frame.from, frame.frame_bytes);
            let (head, received) = frame.parts();
            self.client.receive(now, (from, head, frame_bytes), received, &mut self.port);
        }
        self.port.give_back();
        self.client.poll(now, &mut self.port);
        self.port.flush(now);
        while let Some(event) = self.client.next_event() {
            if let Event::Completed { tag, result } = event {
                self.completed.push((tag, result));
            }
        }
    }

    pub fn fill(&mut self, tag: u64, bytes: &[u8]) {
        self.port.data.segments(tag).unwrap().copy_from_slice(0, bytes);
    }

    pub fn bytes(&self, tag: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.port.data.segments(tag).unwrap().copy_to_slice(0, &mut bytes);
        bytes
    }

    pub fn take(&mut self, tag: u64) -> Option<Result<(), BlockError>> {
        let at = self.completed.iter().position(|(done, _)| *done == tag)?;
        Some(self.completed.swap_remove(at).1)
    }
}

pub fn link_options() -> LinkOptions {
    LinkOptions {
        receive_frames: 2048,
        transmit_frames: 512,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    }
}

/// A store whose writes are lost in a power cut unless they were flushed.
pub struct Disk {
    pub bytes: Vec<u8>,
    pub durable: Vec<u8>,
    pub log: Vec<(Operation, u64)>,
    /// Keeps the requests that it is given.
    pub holds: bool,
    /// The time that a request takes.
    pub takes: Nanos,
    pub fails: Option<BlockError>,
    /// Requests that a channel has.
    pub held: usize,
    pub channels: usize,
}

#[derive(Clone)]
pub struct TestStore {
    pub disk: Arc<Mutex<Disk>>,
    pub geometry: Geometry,
}

impl TestStore {
    pub fn new() -> Self {
        let disk = Disk {
            bytes: vec![0; DISK_BYTES as usize],
            durable: vec![0; DISK_BYTES as usize],
            log: Vec::new(),
            holds: false,
            takes: Nanos::ZERO,
            fails: None,
            held: 0,
            channels: 0,
        };
        let geometry = Geometry { volatile_cache: true, ..Geometry::new(DISK_BYTES, 512) };
        Self { disk: Arc::new(Mutex::new(disk)), geometry }
    }

    pub fn set(&self, change: impl FnOnce(&mut Disk)) {
        change(&mut self.disk.lock().unwrap());
    }

    pub fn get<T>(&self, look: impl FnOnce(&Disk) -> T) -> T {
        look(&self.disk.lock().unwrap())
    }

    pub fn operations(&self) -> Vec<Operation> {
        self.get(|disk| disk.log.iter().map(|(operation, _)| *operation).collect())
    }

    pub fn power_cut(&self) {
        self.set(|disk| disk.bytes.clone_from(&disk.durable));
    }
}

impl BlockDevice for TestStore {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(
        &self,
        _core: &CoreContext,
        _depth: usize,
    ) -> io::Result<Box<dyn BlockChannel>> {
        self.disk.lock().unwrap().channels += 1;
        Ok(Box::new(TestChannel { disk: Arc::clone(&self.disk), requests: VecDeque::new() }))
    }
}

struct TestChannel {
    disk: Arc<Mutex<Disk>>,
    requests: VecDeque<(Nanos, Box<BlockRequest>)>,
}

impl BlockChannel for TestChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let mut disk = self.disk.lock().unwrap();
        let end = now.after(disk.takes);
        disk.held += batch.len();
        disk.log.extend(batch.iter().map(|request| (request.operation, request.offset_bytes)));
        self.requests.extend(batch.drain(..).map(|request| (end, request)));
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        let mut disk = self.disk.lock().unwrap();
        if disk.holds {
            return;
        }
        while self.requests.front().is_some_and(|(end, _)| *end <= now)
            && let Some((_, mut request)) = self.requests.pop_front()
        {
            disk.held -= 1;
            request.result = disk.fails.map_or(Ok(()), Err);
            if request.result.is_ok() {
                carry_out(&mut disk, &request);
            }
            completed.push(request);
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.requests.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for TestChannel {
    fn drop(&mut self) {
        self.disk.lock().unwrap().channels -= 1;
        for (_, request) in &mut self.requests {
            request.tag.take().map(sidecore_block::Tag::into_bits);
        }
    }
}

fn carry_out(disk: &mut Disk, request: &BlockRequest) {
    let range = request.offset_bytes as usize..(request.offset_bytes + request.len_bytes) as usize;
    match request.operation {
        Operation::Read => {
            assert_eq!(
                request.segments.copy_from_slice(0, &disk.bytes[range.clone()]),
                range.len()
            );
        }
        Operation::Write => {
            let len = range.len();
            assert_eq!(request.segments.copy_to_slice(0, &mut disk.bytes[range]), len);
        }
        Operation::Flush => disk.durable.clone_from(&disk.bytes),
        Operation::Discard | Operation::WriteZeroes { .. } => disk.bytes[range].fill(0),
    }
}

/// A network with an IOhost and clients.
pub struct Rig {
    pub now: Nanos,
    pub network: Network,
    pub export: Box<Export<Plain>>,
    pub helpers: Vec<Helper>,
    pub clients: Vec<TestClient>,
    pub ids: Vec<ClientId>,
    incarnation: u64,
    pub server: ServerOptions,
    /// Requests that a poll may take.
    pub budget: usize,
}

impl Rig {
    pub fn new(faults: Faults, helpers: usize, server: ServerOptions) -> Self {
        let network = Network::new(7, faults);
        let (export, helpers) = iohost(&network, 1, helpers, server);
        Self {
            now: Nanos::from_millis(1),
            network,
            export,
            helpers,
            clients: Vec::new(),
            ids: Vec::new(),
            incarnation: 1,
            server,
            budget: 32,
        }
    }

    /// A perfect wire, and one sidecore.
    pub fn simple() -> Self {
        Self::new(Faults::default(), 0, ServerOptions::default())
    }

    /// Adds a client, by its number from 0, that is permitted to use one link queue.
    pub fn add_client(&mut self, options: ClientOptions) -> usize {
        let number = self.clients.len();
        let id = self.permit(number);
        self.ids.push(id);
        let options = ClientOptions { life: 1000 + number as u64, ..options };
        self.clients.push(TestClient::new(&self.network, number as u8, options));
        number
    }

    fn permit(&mut self, number: usize) -> ClientId {
        let spec = ClientSpec {
            name: format!("client{number}").into(),
            id: client_id(number as u8),
            queues: 1,
            share: ClientShare::default(),
        };
        self.export.add_client(&spec).unwrap()
    }

    pub fn add_device(&mut self, client: usize, name: &str, store: Arc<dyn BlockDevice>) -> u16 {
        self.export.add_device(self.ids[client], &exported(name, store)).unwrap()
    }

    /// Has a client use its device of this name. Returns its number there.
    pub fn open(&mut self, client: usize, name: &str) -> u16 {
        let number = self.clients[client].client.open(&device_name(name)).unwrap();
        self.run_until(|rig| rig.clients[client].client.is_ready(number));
        number
    }

    /// The IOhost ends at once and another one starts, with the same clients and these devices.
    pub fn restart(&mut self, devices: &[(usize, &str, Arc<dyn BlockDevice>)]) {
        self.incarnation += 1;
        let helpers = self.helpers.len();
        // Its link has to be gone before another one has the address.
        let spare = Network::new(1, Faults::default());
        self.export = iohost(&spare, 1, 0, self.server).0;
        let (export, helpers) = iohost(&self.network, self.incarnation, helpers, self.server);
        (self.export, self.helpers) = (export, helpers);
        self.ids = (0..self.clients.len()).map(|number| self.permit(number)).collect();
        for (client, name, store) in devices {
            self.add_device(*client, name, Arc::clone(store));
        }
    }

    /// One step of time: each side polls once.
    pub fn step(&mut self) {
        for client in &mut self.clients {
            client.poll(self.now);
        }
        self.poll_iohost();
    }

    /// The IOhost's part of a step.
    pub fn poll_iohost(&mut self) {
        assert_ne!(self.export.poll(self.now, self.budget), Polled::Finished);
        for helper in &mut self.helpers {
            helper.poll(self.now, self.budget);
        }
        self.now = self.now.after(STEP);
    }

    pub fn run_until(&mut self, until: impl Fn(&Self) -> bool) {
        let end = self.now.after(Nanos::from_millis(5_000));
        while !until(self) {
            assert!(self.now < end, "it does not happen");
            self.step();
        }
    }

    pub fn run_for(&mut self, time: Nanos) {
        let end = self.now.after(time);
        while self.now < end {
            self.step();
        }
    }

    /// Has a request carried out, and returns how it ended.
    pub fn run(
        &mut self,
        client: usize,
        device: u16,
        tag: u64,
        request: Request,
    ) -> Result<(), BlockError> {
        self.clients[client].client.submit(tag, device, request).unwrap();
        self.run_until(|rig| rig.clients[client].completed.iter().any(|(done, _)| *done == tag));
        self.clients[client].take(tag).unwrap()
    }

    pub fn write(&mut self, client: usize, device: u16, offset_bytes: u64, bytes: &[u8]) {
        self.clients[client].fill(0, bytes);
        let write = request(Operation::Write, offset_bytes, bytes.len() as u64);
        assert_eq!(self.run(client, device, 0, write), Ok(()));
    }

    pub fn read(&mut self, client: usize, device: u16, offset_bytes: u64, len: usize) -> Vec<u8> {
        self.clients[client].fill(1, &vec![0xcc; len]);
        let read = request(Operation::Read, offset_bytes, len as u64);
        assert_eq!(self.run(client, device, 1, read), Ok(()));
        self.clients[client].bytes(1, len)
    }
}

pub fn exported(name: &str, store: Arc<dyn BlockDevice>) -> ExportedDevice {
    ExportedDevice {
        name: name.into(),
        serial: format!("serial of {name}"),
        store,
        read_only: false,
        write_cache: true,
        epoch: 1,
        tenure: Arc::default(),
    }
}

fn iohost(
    network: &Network,
    incarnation: u64,
    helpers: usize,
    server: ServerOptions,
) -> (Box<Export<Plain>>, Vec<Helper>) {
    let link = Box::new(network.link(IOHOST, &link_options()).unwrap());
    iohost_on(link, incarnation, helpers, server)
}

/// An IOhost at a link, and its helpers.
pub fn iohost_on(
    link: Box<dyn Link>,
    incarnation: u64,
    helpers: usize,
    server: ServerOptions,
) -> (Box<Export<Plain>>, Vec<Helper>) {
    let secret = [incarnation, 77];
    let options = HostOptions { incarnation, secret, server, ..HostOptions::default() };
    let (core, load) = (Rc::default(), Arc::new(Load::default()));
    let mut export = Export::new(&core, link, (options, Plain), &load, IdleMode::Poll).unwrap();
    let helpers = (0..helpers)
        .map(|_| {
            let (end, seed) = helper(&Arc::default()).unwrap();
            export.add_helper(end).unwrap();
            Helper::new(&Rc::default(), seed, IdleMode::Poll).unwrap()
        })
        .collect();
    (Box::new(export), helpers)
}

pub fn request(operation: Operation, offset_bytes: u64, len_bytes: u64) -> Request {
    Request { operation, offset_bytes, len_bytes, fua: false }
}

pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 3) as u8 ^ (index / 512) as u8 ^ seed).collect()
}
