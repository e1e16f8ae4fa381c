//! A client, an IOhost and a store in one thread, with the frames between them in reach.

// Each test file is a crate of its own and uses its part of this.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use sidecore_block::{BlockError, Operation};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, Buffers, SlicePort, Transmit};
use sidecore_vrio::wire::{DEVICE_NAME_BYTES, DeviceEntry, device_flag};
use sidecore_vrio::{
    Client, ClientOptions, Event, Execute, Host, HostOptions, Member, Peer, Plain, Request,
    ServerOptions, VrioCounts, VrioStats,
};

pub const CLIENT: [u8; 16] = *b"the first client";
/// Where the IOhost is, for the client.
pub const HOST: Peer = Peer(1);
pub const DISK_BYTES: usize = 1 << 20;
/// One way over the wire, if a test sets no other time.
pub const HOP: Nanos = Nanos::from_micros(20);

/// A wire in one direction.
#[derive(Default)]
pub struct Wire {
    pub frames: VecDeque<Vec<u8>>,
    /// As a link's ring has it: the last frame is still in the buffer.
    buffer: Vec<u8>,
    len: usize,
    /// Frames that the link has no room for, before it has.
    pub refuses: usize,
    /// Frames that the link has room for; `None` for any number.
    pub room: Option<usize>,
}

impl Transmit for Wire {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        if self.refuses > 0 {
            self.refuses -= 1;
            return None;
        }
        if let Some(room) = &mut self.room {
            *room = room.checked_sub(1)?;
        }
        self.buffer.resize(len_bytes.max(self.buffer.len()), 0xee);
        self.len = len_bytes;
        self.buffer.get_mut(..len_bytes)
    }

    fn commit(&mut self, _to: Peer) {
        self.frames.push_back(self.buffer[..self.len].to_vec());
    }
}

/// A disk whose writes are lost in a power cut unless they were flushed.
pub struct Disk {
    pub bytes: Vec<u8>,
    pub safe: Vec<u8>,
    /// Operations in the order of their execution.
    pub log: Vec<Request>,
    /// The result of the next requests.
    pub fails: Option<BlockError>,
    /// Flushes find no space.
    pub flush_fails: bool,
    /// Reads write nothing.
    pub is_null: bool,
}

/// The name of the device with this number.
pub fn name(number: u16) -> [u8; DEVICE_NAME_BYTES] {
    let mut name = [0; DEVICE_NAME_BYTES];
    name[..4].copy_from_slice(b"disk");
    name[4..6].copy_from_slice(&number.to_be_bytes());
    name
}

pub fn device(number: u16) -> DeviceEntry {
    let flags = device_flag::PRESENT
        | device_flag::VOLATILE_CACHE
        | device_flag::DISCARD
        | device_flag::DISCARD_ZEROES
        | device_flag::WRITE_ZEROES;
    DeviceEntry {
        device: number,
        flags,
        epoch: 1,
        capacity_bytes: DISK_BYTES as u64,
        block_bytes: 512,
        physical_block_bytes: 4096,
        name: name(number),
        ..DeviceEntry::default()
    }
}

pub struct Rig {
    pub now: Nanos,
    /// One way over the wire.
    pub hop: Nanos,
    pub client: Client<Plain>,
    pub client_stats: Arc<VrioStats>,
    pub host: Host<Plain>,
    pub host_stats: Arc<VrioStats>,
    pub host_options: HostOptions,
    pub devices: Vec<DeviceEntry>,
    pub to_host: Wire,
    pub to_client: Wire,
    pub guest: Buffers,
    pub buffers: Buffers,
    pub disk: Disk,
    /// The store keeps what it is given.
    pub holds: bool,
    pub held: VecDeque<Execute>,
    pub completed: Vec<(u64, Result<(), BlockError>)>,
    pub events: Vec<Event>,
}

impl Rig {
    pub fn new(options: ClientOptions, server: ServerOptions) -> Self {
        let host_options =
            HostOptions { incarnation: 77, secret: [5, 6], server, ..HostOptions::default() };
        let client_stats = Arc::new(VrioStats::default());
        let options = ClientOptions { client: CLIENT, ..options };
        let mut client = Client::new(options, HOST, Plain, Arc::clone(&client_stats));
        assert_eq!(client.open(&name(0)), Some(0));
        let host_stats = Arc::new(VrioStats::default());
        let mut rig = Self {
            now: Nanos::from_millis(1),
            hop: HOP,
            client,
            client_stats,
            host: host(host_options, &host_stats),
            host_stats,
            host_options,
            devices: vec![device(0)],
            to_host: Wire::default(),
            to_client: Wire::default(),
            guest: Buffers::default(),
            buffers: Buffers::default(),
            disk: Disk {
                bytes: vec![0; DISK_BYTES],
                safe: vec![0; DISK_BYTES],
                log: Vec::new(),
                fails: None,
                flush_fails: false,
                is_null: false,
            },
            holds: false,
            held: VecDeque::new(),
            completed: Vec::new(),
            events: Vec::new(),
        };
        rig.set_devices();
        rig
    }

    /// A rig whose client has a session and its device.
    pub fn connected(options: ClientOptions, server: ServerOptions) -> Self {
        let mut rig = Self::new(options, server);
        rig.run_until(Nanos::from_millis(50), |rig| rig.client.is_ready(0));
        assert!(rig.client.is_ready(0));
        // Both sides know the round trip.
        rig.run_for(Nanos::from_millis(5));
        rig
    }

    /// The IOhost ends at once and another one starts.
    pub fn restart(&mut self, power_cut: bool) {
        self.host_options.incarnation += 1;
        self.host_options.secret[0] += 1000;
        self.host = host(self.host_options, &self.host_stats);
        self.set_devices();
        self.held.clear();
        if power_cut {
            self.disk.bytes.clone_from(&self.disk.safe);
        }
    }

    /// The IOhost has the devices of the rig.
    pub fn set_devices(&mut self) {
        self.host.set_devices(self.now, 0, &self.devices);
    }

    pub fn poll_client(&mut self) {
        let mut port = SlicePort { wire: &mut self.to_host, data: &mut self.guest };
        self.client.poll(self.now, &mut port);
    }

    pub fn poll_host(&mut self) {
        let mut port = SlicePort { wire: &mut self.to_client, data: &mut self.buffers };
        self.host.poll(self.now, &mut port);
    }

    pub fn client_receives(&mut self, frame: &[u8]) {
        let mut port = SlicePort { wire: &mut self.to_host, data: &mut self.guest };
        let mut arrived = Arrived::new(frame.to_vec());
        port.to_client(&mut self.client, (self.now, HOST), &mut arrived);
    }

    pub fn host_receives(&mut self, from: Peer, frame: &[u8]) {
        let mut port = SlicePort { wire: &mut self.to_client, data: &mut self.buffers };
        let mut arrived = Arrived::new(frame.to_vec());
        port.to_host(&mut self.host, (self.now, from), &mut arrived);
    }

    /// One hop: both sides send, and what they sent arrives.
    pub fn step(&mut self) {
        self.poll_client();
        self.poll_host();
        self.now = self.now.after(self.hop);
        for frame in std::mem::take(&mut self.to_host.frames) {
            self.host_receives(Peer(9), &frame);
        }
        for frame in std::mem::take(&mut self.to_client.frames) {
            self.client_receives(&frame);
        }
        self.execute();
        while let Some(event) = self.client.next_event() {
            match event {
                Event::Completed { tag, result } => self.completed.push((tag, result)),
                other => self.events.push(other),
            }
        }
    }

    /// Lets the store have what is there, unless it holds.
    pub fn execute(&mut self) {
        while let Some(execute) = self.host.next_execute() {
            self.held.push_back(execute);
        }
        while !self.holds
            && let Some(execute) = self.held.pop_front()
        {
            self.finish(execute);
        }
    }

    pub fn finish(&mut self, execute: Execute) {
        let Request { operation, offset_bytes, len_bytes, fua } = execute.request;
        let range = offset_bytes as usize..(offset_bytes + len_bytes) as usize;
        let data = self.buffers.bytes(execute.place);
        self.disk.log.push(execute.request);
        let flush_error = Some(BlockError::NoSpace)
            .filter(|_| self.disk.flush_fails && operation == Operation::Flush);
        if let Some(error) = self.disk.fails.or(flush_error) {
            self.host.complete(execute.ticket, Err(error));
            return;
        }
        match operation {
            Operation::Read if self.disk.is_null => {}
            Operation::Read => data[..range.len()].copy_from_slice(&self.disk.bytes[range]),
            Operation::Write => {
                self.disk.bytes[range.clone()].copy_from_slice(&data[..range.len()]);
                if fua {
                    self.disk.safe[range.clone()].copy_from_slice(&self.disk.bytes[range]);
                }
            }
            Operation::Flush => self.disk.safe.clone_from(&self.disk.bytes),
            Operation::Discard | Operation::WriteZeroes { .. } => self.disk.bytes[range].fill(0),
        }
        self.host.complete(execute.ticket, Ok(()));
    }

    pub fn run_until(&mut self, time: Nanos, until: impl Fn(&Self) -> bool) {
        let end = self.now.after(time);
        while self.now < end && !until(self) {
            self.step();
        }
    }

    pub fn run_for(&mut self, time: Nanos) {
        self.run_until(time, |_| false);
    }

    pub fn submit(&mut self, tag: u64, request: Request) {
        self.client.submit(tag, 0, request).unwrap();
    }

    pub fn write(&mut self, tag: u64, offset_bytes: u64, data: &[u8]) {
        self.guest.bytes(tag)[..data.len()].copy_from_slice(data);
        self.submit(tag, request(Operation::Write, offset_bytes, data.len() as u64));
    }

    /// Runs until this request ends, and returns how.
    pub fn wait(&mut self, tag: u64) -> Result<(), BlockError> {
        self.run_until(Nanos::from_millis(20_000), |rig| {
            rig.completed.iter().any(|(done, _)| *done == tag)
        });
        let at =
            self.completed.iter().position(|(done, _)| *done == tag).expect("the request ends");
        self.completed.remove(at).1
    }

    pub fn read(&mut self, tag: u64, offset_bytes: u64, len: usize) -> Vec<u8> {
        self.submit(tag, request(Operation::Read, offset_bytes, len as u64));
        self.wait(tag).unwrap();
        self.guest.bytes(tag)[..len].to_vec()
    }

    pub fn flush(&mut self, tag: u64) -> Result<(), BlockError> {
        self.submit(tag, Request::FLUSH);
        self.wait(tag)
    }

    pub fn client_counts(&self) -> VrioCounts {
        self.client_stats.counts()
    }

    pub fn host_counts(&self) -> VrioCounts {
        self.host_stats.counts()
    }

    /// How often the store executed this kind of request.
    pub fn executed(&self, operation: Operation) -> usize {
        self.disk.log.iter().filter(|request| request.operation == operation).count()
    }
}

fn host(options: HostOptions, stats: &Arc<VrioStats>) -> Host<Plain> {
    let mut host = Host::new(options, Plain, Arc::clone(stats));
    for queue in 0..2 {
        let member = Member { client: CLIENT, queue };
        assert_eq!(host.add(member, Arc::clone(stats)), Some(queue.into()));
    }
    host
}

pub fn request(operation: Operation, offset_bytes: u64, len_bytes: u64) -> Request {
    Request { operation, offset_bytes, len_bytes, fua: false }
}

pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 3) as u8 ^ (index / 512) as u8 ^ seed).collect()
}
