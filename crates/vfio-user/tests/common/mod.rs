//! A function that records its calls, a client, and the messages that QEMU sends.
#![allow(dead_code, reason = "each test uses a part")]

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_memory::GuestMemory;
use sidecore_nvme::{AccessError, BarInfo, Done, Interrupts, MappableArea, PciFunction, Region};
use sidecore_vfio_user::{
    Access, Body, Command, Connection, Data, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, IrqSet,
    Message, PciEndpoint, Received, RegionAccess, RegionInfo, Service, Socket, Version, vfio,
};
use tempfile::TempDir;

/// Serves a function on a socket of this name.
pub fn serve(
    service: &Service,
    directory: &TempDir,
    name: &str,
    function: &Arc<Function>,
) -> Socket {
    let endpoint = PciEndpoint(Arc::clone(function) as _);
    service.serve(&directory.path().join(name), Access::default(), endpoint, None).unwrap()
}

/// A generous bound for actions that take microseconds.
pub const SOON: Duration = Duration::from_secs(10);
pub const PAGE: u64 = 4096;
pub const BAR_BYTES: u64 = 0x1_0000;
pub const CONFIG_BYTES: u64 = 4096;
pub const VECTORS: u16 = 40;
/// The mappable area's offset in the register, and in its file.
pub const AREA: (u64, u64) = (0x2000, 0x4000);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The number of regions, and their bytes.
    Memory(usize, u64),
    Reset,
    Vector(u16, bool),
    Signal(u16),
    Write(Region, u64, Vec<u8>),
}

struct State {
    bar: Vec<u8>,
    config: Vec<u8>,
    vectors: Vec<Option<OwnedFd>>,
    memory: GuestMemory,
    events: Vec<Event>,
    held: Option<Done>,
    outstanding: bool,
}

/// A function whose registers are memory.
pub struct Function {
    name: String,
    doorbells: OwnedFd,
    area: Option<(u64, u64)>,
    holds: AtomicBool,
    has_msi: AtomicBool,
    /// Whether the function refuses clients.
    pub refuses: AtomicBool,
    /// The number of clients that have connected.
    pub connections: AtomicUsize,
    state: Mutex<State>,
    this: std::sync::Weak<Self>,
}

impl Function {
    pub fn new() -> Arc<Self> {
        Self::with_area("fake", Some((AREA.0, AREA.0)))
    }

    /// Makes a function whose doorbells are at `area.0` of the register and at `area.1` of their
    /// file.
    pub fn with_area(name: &str, area: Option<(u64, u64)>) -> Arc<Self> {
        let doorbells = memfd_create("doorbells", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&doorbells, BAR_BYTES).unwrap();
        let state = Mutex::new(State {
            bar: vec![0; BAR_BYTES as usize],
            config: (0..CONFIG_BYTES).map(|byte| byte as u8).collect(),
            vectors: (0..VECTORS).map(|_| None).collect(),
            memory: GuestMemory::empty(),
            events: Vec::new(),
            held: None,
            outstanding: false,
        });
        Arc::new_cyclic(|this| Self {
            name: name.into(),
            doorbells,
            area,
            holds: AtomicBool::new(false),
            has_msi: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            state,
            this: this.clone(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// From now on no call completes before [`Function::release`].
    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, Ordering::SeqCst);
    }

    /// From now on the vectors are MSI's, instead of MSI-X's.
    pub fn use_msi(&self) {
        self.has_msi.store(true, Ordering::SeqCst);
    }

    /// Whether a call waits for [`Function::release`].
    pub fn is_held(&self) -> bool {
        self.state().held.is_some()
    }

    /// Completes the call that waits.
    pub fn release(&self) {
        let held = self.state().held.take().expect("a call waits");
        held.call();
    }

    pub fn events(&self) -> Vec<Event> {
        self.state().events.clone()
    }

    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    pub fn memory(&self) -> GuestMemory {
        self.state().memory.clone()
    }

    pub fn assigned(&self) -> Vec<u16> {
        (0..)
            .zip(&self.state().vectors)
            .filter_map(|(vector, event)| event.as_ref().map(|_| vector))
            .collect()
    }

    /// Completes a call, or keeps it. The sessions never make two calls at once.
    fn later(&self, done: Done) {
        let mut state = self.state();
        assert!(!state.outstanding, "two calls at once");
        state.outstanding = true;
        let this = self.this.clone();
        let done = Done::new(move || {
            if let Some(this) = this.upgrade() {
                this.state().outstanding = false;
            }
            done.call();
        });
        if self.holds.load(Ordering::SeqCst) {
            state.held = Some(done);
        } else {
            drop(state);
            done.call();
        }
    }
}

fn place(
    region: Region,
    offset_bytes: u64,
    len: usize,
    room: usize,
) -> Result<std::ops::Range<usize>, AccessError> {
    let error = AccessError::OutOfRange { region, offset_bytes, len_bytes: len as u64 };
    let start = usize::try_from(offset_bytes).map_err(|_| error)?;
    let end = start.checked_add(len).filter(|end| *end <= room).ok_or(error)?;
    Ok(start..end)
}

impl PciFunction for Function {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_bytes(&self) -> u64 {
        CONFIG_BYTES
    }

    fn bar(&self, index: u8) -> Option<BarInfo> {
        let area = |(offset_bytes, file_offset_bytes)| MappableArea {
            offset_bytes,
            len_bytes: AREA.1,
            file_offset_bytes,
        };
        match index {
            0 => Some(BarInfo { len_bytes: BAR_BYTES, mappable: self.area.map(area) }),
            4 => Some(BarInfo { len_bytes: 8192, mappable: None }),
            _ => None,
        }
    }

    fn area_file(&self, index: u8) -> io::Result<OwnedFd> {
        assert_eq!(index, 0);
        self.doorbells.try_clone()
    }

    fn connect(&self) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(rustix::io::Errno::NOMEM.into());
        }
        self.connections.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn interrupts(&self) -> Interrupts {
        if self.has_msi.load(Ordering::SeqCst) { Interrupts::Msi } else { Interrupts::MsiX }
    }

    fn vectors(&self) -> u16 {
        VECTORS
    }

    fn read(&self, region: Region, offset_bytes: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let state = self.state();
        let none = Vec::new();
        let bytes = match region {
            Region::Bar(0) => &state.bar,
            Region::Config => &state.config,
            Region::Bar(_) => &none,
        };
        let place = place(region, offset_bytes, data.len(), bytes.len())?;
        data.copy_from_slice(&bytes[place]);
        Ok(())
    }

    fn write(&self, region: Region, offset_bytes: u64, data: &[u8]) -> Result<(), AccessError> {
        let mut state = self.state();
        let mut none = Vec::new();
        let bytes = match region {
            Region::Bar(0) => &mut state.bar,
            Region::Config => &mut state.config,
            Region::Bar(_) => &mut none,
        };
        let place = place(region, offset_bytes, data.len(), bytes.len())?;
        bytes[place].copy_from_slice(data);
        state.events.push(Event::Write(region, offset_bytes, data.to_vec()));
        Ok(())
    }

    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) -> Result<(), AccessError> {
        let mut state = self.state();
        let number = u32::from(vector);
        if let Some(event) = &event {
            let link = std::fs::read_link(format!(
                "/proc/self/fd/{}",
                std::os::fd::AsRawFd::as_raw_fd(event)
            ))
            .unwrap();
            if link.as_os_str() != "anon_inode:[eventfd]" {
                return Err(AccessError::NotAnEvent { vector: number });
            }
        }
        let slot = state
            .vectors
            .get_mut(usize::from(vector))
            .ok_or(AccessError::NoSuchVector { vector: number })?;
        let before = std::mem::replace(slot, event);
        let now = slot.is_some();
        if before.is_some() || now {
            state.events.push(Event::Vector(vector, now));
        }
        Ok(())
    }

    fn signal(&self, vector: u16) -> Result<(), AccessError> {
        let mut state = self.state();
        state
            .vectors
            .get(usize::from(vector))
            .ok_or(AccessError::NoSuchVector { vector: vector.into() })?;
        state.events.push(Event::Signal(vector));
        Ok(())
    }

    fn set_memory(&self, memory: GuestMemory, done: Done) {
        let mut state = self.state();
        state.events.push(Event::Memory(memory.region_count(), memory.len_bytes()));
        state.memory = memory;
        drop(state);
        self.later(done);
    }

    fn reset(&self, done: Done) {
        self.state().events.push(Event::Reset);
        self.later(done);
    }
}

/// Longer than every test takes.
pub const LINGER: Duration = Duration::from_secs(60);

/// A socket whose last close waits, and the other end, whose drop ends the wait.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (end, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket.into(), end)
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

pub fn memfd(len_bytes: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len_bytes).unwrap();
    file
}

/// The version and capabilities that QEMU sends.
pub fn version() -> Body {
    let data = concat!(
        r#"{"capabilities": {"migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "#,
        r#""max_msg_fds": 16, "max_data_xfer_size": 1048576, "max_dma_maps": 65535, "#,
        r#""pgsizes": 4096, "write_multiple": true}}"#,
        "\0"
    );
    Body::Version(Version { major: 0, minor: 0, data: data.into() })
}

pub fn map(address: u64, len_bytes: u64) -> DmaMap {
    let flags = vfio::DMA_MAP_FLAG_READ | vfio::DMA_MAP_FLAG_WRITE;
    DmaMap { argsz: 32, flags, offset_bytes: 0, address, len_bytes }
}

pub fn unmap(address: u64, len_bytes: u64) -> DmaUnmap {
    DmaUnmap { argsz: 24, flags: 0, address, len_bytes }
}

pub fn device_info() -> Body {
    Body::DeviceInfo(DeviceInfo { argsz: 16, flags: 0, regions: 0, irqs: 0 })
}

pub fn region_info(index: u32, argsz: u32) -> Body {
    Body::RegionInfo(RegionInfo {
        argsz,
        flags: 0,
        index,
        len_bytes: 0,
        offset_bytes: 0,
        areas: Vec::new(),
    })
}

pub fn irq_info(index: u32) -> Body {
    Body::IrqInfo(IrqInfo { argsz: 16, flags: 0, index, count: 0 })
}

pub fn irqs(flags: u32, index: u32, start: u32, count: u32) -> IrqSet {
    IrqSet { argsz: 20, flags, index, start, count, data: Vec::new() }
}

pub fn read(region: u32, offset_bytes: u64, count: u32) -> (Command, Body) {
    let access = RegionAccess { offset_bytes, region, count, data: Data::empty() };
    (Command::RegionRead, Body::RegionAccess(access))
}

pub fn write(region: u32, offset_bytes: u64, data: &[u8]) -> (Command, Body) {
    let access =
        RegionAccess { offset_bytes, region, count: data.len() as u32, data: Data::from(data) };
    (Command::RegionWrite, Body::RegionAccess(access))
}

/// A client's end of a socket, with calls that wait.
pub struct Client {
    pub connection: Connection,
    next: u16,
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        Self::over(Connection::new(UnixStream::connect(path).unwrap()))
    }

    pub fn over(connection: Connection) -> Self {
        Self { connection, next: 1 }
    }

    /// Connects and negotiates the version.
    pub fn start(path: &Path) -> Self {
        let mut client = Self::connect(path);
        let reply = client.ask((Command::Version, version()), Vec::new());
        assert!(matches!(reply.body, Body::Version(_)), "{reply:?}");
        client
    }

    fn wait(&self, flags: PollFlags, timeout: Duration) -> bool {
        let timeout = Timespec::try_from(timeout).unwrap();
        poll(&mut [PollFd::new(&self.connection, flags)], Some(&timeout)).unwrap() > 0
    }

    /// Sends without waiting for a reply. Returns the message's number.
    pub fn post(&mut self, (command, body): (Command, Body), fds: Vec<OwnedFd>) -> u16 {
        let id = self.next;
        self.next += 1;
        self.post_message(Message::command(id, command, body, fds));
        id
    }

    pub fn post_message(&mut self, message: Message) {
        let mut sent = self.connection.send(message).unwrap();
        while !sent {
            assert!(self.wait(PollFlags::OUT, SOON));
            sent = self.connection.flush().unwrap();
        }
    }

    /// Receives the next reply.
    pub fn answer(&mut self) -> Message {
        loop {
            match self.connection.receive().unwrap() {
                Received::Message(message) => return message,
                Received::Nothing => assert!(self.wait(PollFlags::IN, SOON), "no answer"),
                Received::Closed => panic!("closed"),
            }
        }
    }

    /// Whether no message comes for a while.
    pub fn is_quiet(&mut self) -> bool {
        let quiet = !self.wait(PollFlags::IN, Duration::from_millis(30));
        quiet && matches!(self.connection.receive(), Ok(Received::Nothing))
    }

    pub fn ask(&mut self, ask: (Command, Body), fds: Vec<OwnedFd>) -> Message {
        let command = ask.0;
        let id = self.post(ask, fds);
        let reply = self.answer();
        assert!(reply.flags.reply);
        assert_eq!((reply.id, reply.command), (id, command));
        reply
    }

    /// Waits for the other end to hang up.
    pub fn is_hung_up(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < SOON {
            match self.connection.receive() {
                Ok(Received::Nothing) => drop(self.wait(PollFlags::IN, SOON)),
                Ok(Received::Message(_)) => {}
                Ok(Received::Closed) => return true,
                // The other end resets the connection if it has not read everything that was sent.
                Err(_) => return true,
            }
        }
        false
    }
}

pub fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < SOON, "the condition never held");
        std::thread::sleep(Duration::from_millis(1));
    }
}
