//! Helpers of the tests: a device that records its calls, and the messages of a front end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_ring::{RingFormat, RingState};
pub use sidecore_spec_virtio::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED, VERSION_1};
pub use sidecore_spec_virtio::vhost_user::PROTOCOL_FEATURES;
use sidecore_virtio::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};

use crate::codec::{Connection, ConnectionError, Received};
use crate::message::{Body, MemoryRegion, Message, NO_FD, Request, VringAddress, VringState};
use crate::session::OFFERED_PROTOCOL;

pub const QUEUES: u16 = 4;
pub const CONFIG: [u8; 60] = [0xC5; 60];
pub const DEVICE_FEATURES: u64 = VERSION_1 | INDIRECT_DESC | EVENT_IDX | RING_PACKED;

/// A call of a [`Recorder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Start { index: u16, state: RingState, format: RingFormat, kick: bool, call: bool },
    Stop { index: u16 },
    SetCall { index: u16, call: bool },
    SetLog { index: u16, log: bool },
    Reset,
}

/// A device without a disk: a running queue only keeps its resources.
pub struct Recorder {
    name: &'static str,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    events: Vec<Event>,
    queues: [Option<(QueueResources, RingState)>; QUEUES as usize],
    broken: bool,
    loss: Option<String>,
    config_generation: u32,
    written: Vec<(u32, Vec<u8>)>,
    maps_at_stop: Vec<String>,
}

impl Recorder {
    pub fn new() -> Arc<Self> {
        Self::named("recorder")
    }

    pub fn named(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns the events since the last call.
    pub fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().events)
    }

    pub fn running(&self) -> Vec<u16> {
        (0..QUEUES).filter(|index| self.state().queues[usize::from(*index)].is_some()).collect()
    }

    /// Advances the ring by `count` requests.
    pub fn serve(&self, index: u16, count: u16) {
        let mut state = self.state();
        let (_, ring) = state.queues[usize::from(index)].as_mut().unwrap();
        ring.next_avail = ring.next_avail.wrapping_add(count);
        ring.next_used = ring.next_used.wrapping_add(count);
    }

    pub fn features_of(&self, index: u16) -> u64 {
        self.state().queues[usize::from(index)].as_ref().unwrap().0.features
    }

    pub fn memory_of(&self, index: u16) -> GuestMemory {
        self.state().queues[usize::from(index)].as_ref().unwrap().0.memory.clone()
    }

    /// Writes to guest memory as a queue does: marks the page in the log, if there is one.
    pub fn mark(&self, index: u16, page: u64) -> bool {
        let state = self.state();
        let (resources, _) = state.queues[usize::from(index)].as_ref().unwrap();
        let log = resources.log.as_ref();
        log.map(|log| log.pages.mark(GuestAddress(page * 4096), 1)).is_some()
    }

    /// Changes the generation of the configuration space.
    pub fn change_config(&self) {
        self.state().config_generation += 1;
    }

    pub fn set_broken(&self) {
        self.state().broken = true;
    }

    /// Sets or clears the loss of answered writes.
    pub fn set_loss(&self, loss: Option<&str>) {
        self.state().loss = loss.map(str::to_owned);
    }

    pub fn written(&self) -> Vec<(u32, Vec<u8>)> {
        self.state().written.clone()
    }

    /// This process's mappings at each stop.
    pub fn maps_at_stop(&self) -> Vec<String> {
        self.state().maps_at_stop.clone()
    }
}

impl VirtioDevice for Recorder {
    fn name(&self) -> &str {
        self.name
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn features(&self) -> u64 {
        DEVICE_FEATURES
    }

    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        let len_bytes = data.len() as u32;
        let start = offset_bytes as usize;
        match CONFIG.get(start..start + data.len()) {
            Some(config) => {
                data.copy_from_slice(config);
                Ok(())
            }
            None => Err(ConfigError::OutOfRange { offset_bytes, len_bytes }),
        }
    }

    fn config_generation(&self) -> u32 {
        self.state().config_generation
    }

    fn write_config(&self, offset_bytes: u32, data: &[u8]) -> Result<(), ConfigError> {
        if offset_bytes != 32 {
            return Err(ConfigError::ReadOnly { offset_bytes });
        }
        self.state().written.push((offset_bytes, data.to_vec()));
        Ok(())
    }

    fn start_queue(
        &self,
        index: u16,
        resources: QueueResources,
        state: RingState,
    ) -> Result<(), StartError> {
        let layout = resources.layout;
        for area in [layout.descriptor_area, layout.driver_area, layout.device_area] {
            resources
                .memory
                .window(area, 64, 4)
                .map_err(|error| StartError::Memory { index, error })?;
        }
        let mut this = self.state();
        this.events.push(Event::Start {
            index,
            state,
            format: layout.format,
            kick: resources.kick.is_some(),
            call: resources.call.is_some(),
        });
        let slot = &mut this.queues[usize::from(index)];
        assert!(slot.is_none(), "queue {index} started twice");
        *slot = Some((resources, state));
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<RingState> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut this = self.state();
        this.maps_at_stop.push(maps);
        this.events.push(Event::Stop { index });
        this.queues[usize::from(index)].take().map(|(_, state)| state)
    }

    fn set_call(&self, index: u16, call: Option<OwnedFd>) {
        let mut this = self.state();
        this.events.push(Event::SetCall { index, call: call.is_some() });
        if let Some((resources, _)) = &mut this.queues[usize::from(index)] {
            resources.call = call;
        }
    }

    fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let mut this = self.state();
        this.events.push(Event::SetLog { index, log: log.is_some() });
        if let Some((resources, _)) = &mut this.queues[usize::from(index)] {
            resources.log = log;
        }
    }

    fn reset(&self) {
        let mut this = self.state();
        assert!(this.queues.iter().all(Option::is_none), "reset with running queues");
        this.broken = false;
        this.events.push(Event::Reset);
    }

    fn broken(&self) -> Option<String> {
        self.state().broken.then(|| "broken by the test".to_owned())
    }

    fn loss(&self) -> Option<String> {
        self.state().loss.clone()
    }
}

/// A front end's end of a socket, with calls that wait.
pub struct Front {
    connection: Connection,
    patience: Duration,
}

impl Front {
    pub fn new(stream: UnixStream) -> Self {
        Self { connection: Connection::new(stream), patience: SOON }
    }

    /// Sets the time to wait for a message.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    fn wait(&self, flags: PollFlags) -> Result<(), ConnectionError> {
        let patience = Timespec::try_from(self.patience).unwrap();
        match poll(&mut [PollFd::new(&self.connection, flags)], Some(&patience)).unwrap() {
            0 => Err(ConnectionError::Stream(io::Error::from(io::ErrorKind::TimedOut).into())),
            _ => Ok(()),
        }
    }

    pub fn send(&mut self, message: Message) -> Result<(), ConnectionError> {
        let mut is_sent = self.connection.send(message)?;
        while !is_sent {
            self.wait(PollFlags::OUT)?;
            is_sent = self.connection.flush()?;
        }
        Ok(())
    }

    /// Receives the next message; `None` at the end of the connection.
    pub fn receive(&mut self) -> Result<Option<Message>, ConnectionError> {
        loop {
            match self.connection.receive()? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Closed => return Ok(None),
                Received::Nothing => self.wait(PollFlags::IN)?,
            }
        }
    }

    /// Returns the socket, for bytes that are no message.
    pub fn stream(&self) -> UnixStream {
        self.connection.as_fd().try_clone_to_owned().unwrap().into()
    }
}

impl AsFd for Front {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// A generous bound for actions that take microseconds.
pub const SOON: Duration = Duration::from_secs(10);

/// A region of `len_bytes` at guest address `guest`, and at [`USER`] + `guest` in the front end.
pub fn region(guest: u64, len_bytes: u64) -> MemoryRegion {
    MemoryRegion {
        guest_address: guest,
        len_bytes,
        user_address: USER + guest,
        file_offset_bytes: 0,
    }
}

pub const USER: u64 = 0x7000_0000_0000;
pub const MEGABYTE: u64 = 1 << 20;

pub fn memfd(name: &str, len_bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(fd.as_fd(), len_bytes).unwrap();
    fd
}

pub fn event() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

pub fn plain(request: Request) -> Message {
    Message::request(request, Body::Empty, Vec::new())
}

pub fn number(request: Request, value: u64) -> Message {
    Message::request(request, Body::U64(value), Vec::new())
}

pub fn vring(request: Request, index: u32, num: u32) -> Message {
    Message::request(request, Body::VringState(VringState { index, num }), Vec::new())
}

/// SET_VRING_KICK, CALL or ERR with an eventfd.
pub fn eventfd(request: Request, index: u64) -> Message {
    Message::request(request, Body::U64(index), vec![event()])
}

/// SET_VRING_KICK, CALL or ERR without an eventfd.
pub fn no_eventfd(request: Request, index: u64) -> Message {
    number(request, index | NO_FD)
}

/// The addresses of ring `index`, in page `index` from guest address `base` on.
pub fn addresses(index: u32, base: u64) -> Message {
    let page = USER + base + u64::from(index) * 4096;
    Message::request(
        Request::SetVringAddr,
        Body::VringAddress(VringAddress {
            index,
            flags: 0,
            descriptor: page,
            available: page + 1024,
            used: page + 2048,
            log: 0,
        }),
        Vec::new(),
    )
}

pub fn memory_table(regions: &[MemoryRegion], name: &str) -> Message {
    let fds = regions.iter().map(|region| memfd(name, region.len_bytes)).collect();
    Message::request(Request::SetMemTable, Body::MemoryTable(regions.to_vec()), fds)
}

pub fn add_region(region: MemoryRegion, name: &str) -> Message {
    Message::request(
        Request::AddMemReg,
        Body::MemoryRegion(region),
        vec![memfd(name, region.len_bytes)],
    )
}

pub fn remove_region(region: MemoryRegion) -> Message {
    Message::request(Request::RemMemReg, Body::MemoryRegion(region), Vec::new())
}

/// The messages of QEMU before the set-up of rings.
pub fn negotiation(driver_features: u64) -> Vec<Message> {
    vec![
        plain(Request::GetFeatures),
        plain(Request::GetProtocolFeatures),
        number(Request::SetProtocolFeatures, OFFERED_PROTOCOL),
        plain(Request::GetQueueNum),
        plain(Request::GetMaxMemSlots),
        plain(Request::SetOwner),
        plain(Request::GetFeatures),
        number(Request::SetFeatures, driver_features | PROTOCOL_FEATURES),
    ]
}

/// The messages of QEMU that start a ring.
pub fn ring_setup(index: u32, size: u32, base: u32) -> Vec<Message> {
    vec![
        vring(Request::SetVringNum, index, size),
        vring(Request::SetVringBase, index, base),
        addresses(index, 0),
        eventfd(Request::SetVringKick, index.into()),
        eventfd(Request::SetVringCall, index.into()),
        vring(Request::SetVringEnable, index, 1).needing_reply(),
    ]
}
