//! The connection: what a VMM does to set up a vhost-user disk.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::EventfdFlags;
use sidecore_memory::{GuestAddress, UserAddress};
use sidecore_ring::driver::{DriverRing, IndirectTables, RawRing, RingAreas};
use sidecore_ring::{RingFormat, RingLayout, RingState};
use sidecore_spec_virtio::blk::Config;
use sidecore_spec_virtio::status;
use sidecore_spec_virtio::vhost_user::{
    ConfigHeader, MAX_FDS, MemoryRegion, MemoryTableHeader, Request, SingleMemoryRegion,
    VringAddress, VringState, protocol,
};

use crate::arena::{Arena, Part, Region};
use crate::config::{BlkConfig, features};
use crate::config_watch::ConfigWatch;
use crate::error::ClientError;
use crate::options::ClientOptions;
use crate::queue::{BlkQueue, Parts};
use crate::wire::Wire;

/// A disk behind a vhost-user socket. Dropping it hangs up; queues taken out of it keep their
/// memory, and are no longer served.
#[derive(Debug)]
pub struct BlkClient {
    wire: Wire,
    features: u64,
    protocol: u64,
    config: BlkConfig,
    arena: Arena,
    queues: Vec<Option<BlkQueue>>,
    hooks: Vec<Hooks>,
}

/// The settings of one queue that the device was sent, kept to start it again.
#[derive(Debug)]
pub(crate) struct Hooks {
    pub layout: RingLayout,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
}

impl BlkClient {
    /// Connects, negotiates, shares memory and starts the queues.
    ///
    /// # Errors
    /// The device hangs up, refuses or makes no sense; it has fewer queues than asked for; there is
    /// not enough memory; the options contradict themselves.
    pub fn connect(socket: impl AsRef<Path>, options: &ClientOptions) -> Result<Self, ClientError> {
        let (wire, features, protocol, config) = agree(socket.as_ref(), options)?;
        let plan = Plan::new(options, features)?;
        let arena = Arena::new(plan.arena_bytes(options.queues), options.huge_pages)?;
        let mut client =
            Self { wire, features, protocol, config, arena, queues: Vec::new(), hooks: Vec::new() };
        client.share_memory(options)?;
        for index in 0..options.queues {
            let (queue, hooks) = plan.build(&mut client.arena, options)?;
            client.queues.push(Some(queue));
            client.hooks.push(hooks);
            client.start_queue(index, RingState::fresh(plan.format).to_vring_base(plan.format))?;
        }
        client.say_ready()?;
        Ok(client)
    }

    /// Connects again, as a VMM does whose guest has outlived the device: with the same memory and
    /// rings, of which queue `index` goes on at `bases[index]`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); the device offers something else by now.
    pub fn reconnect(
        &mut self,
        socket: impl AsRef<Path>,
        options: &ClientOptions,
        bases: &[u32],
    ) -> Result<(), ClientError> {
        let (wire, features, protocol, config) = agree(socket.as_ref(), options)?;
        if (features, protocol) != (self.features, self.protocol) {
            let why = format!("it offers {features:#x} now, and offered {:#x}", self.features);
            return Err(ClientError::Answer { request: "GET_FEATURES", why });
        }
        self.wire = wire;
        self.config = config;
        self.share_memory(options)?;
        for (index, base) in (0..).zip(bases) {
            self.start_queue(index, *base)?;
        }
        self.say_ready()
    }

    fn say_ready(&mut self) -> Result<(), ClientError> {
        if self.protocol & protocol::STATUS == 0 {
            return Ok(());
        }
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.wire.tell_u64(Request::SetStatus, all.into())
    }

    /// The virtio features that both sides have agreed on, see [`features`](crate::features).
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The protocol features that both sides have agreed on, see [`protocol`].
    #[must_use]
    pub fn protocol_features(&self) -> u64 {
        self.protocol
    }

    /// The configuration that the device sent when it was connected to.
    #[must_use]
    pub fn config(&self) -> BlkConfig {
        self.config
    }

    /// Whether the shared memory is on huge pages.
    #[must_use]
    pub fn on_huge_pages(&self) -> bool {
        self.arena.is_huge()
    }

    /// Queue `index`, if there is one and it was not taken out.
    pub fn queue(&mut self, index: u16) -> Option<&mut BlkQueue> {
        self.queues.get_mut(usize::from(index))?.as_mut()
    }

    /// Takes queue `index` out, for a thread of its own. The client must outlive its use.
    pub fn take_queue(&mut self, index: u16) -> Option<BlkQueue> {
        self.queues.get_mut(usize::from(index))?.take()
    }

    /// Reads the configuration space again.
    ///
    /// # Errors
    /// The socket.
    pub fn read_config(&mut self) -> Result<BlkConfig, ClientError> {
        self.config = read_config(&mut self.wire, self.protocol)?;
        Ok(self.config)
    }

    /// Has the device say when its configuration changes.
    ///
    /// # Errors
    /// The device does not offer it; the socket.
    pub fn watch_config(&mut self) -> Result<ConfigWatch, ClientError> {
        self.need(protocol::BACKEND_REQ, "BACKEND_REQ")?;
        let (watch, theirs) = ConfigWatch::pair()?;
        self.wire.tell(Request::SetBackendReqFd, &[], &[theirs.as_fd()])?;
        Ok(watch)
    }

    /// Stops a queue and returns where the device stood in it (GET_VRING_BASE).
    ///
    /// # Errors
    /// The socket.
    pub fn stop_queue(&mut self, index: u16) -> Result<u32, ClientError> {
        let body = crate::wire::queue_state(index, 0);
        let answer = self.wire.ask(Request::GetVringBase, &body)?;
        let wrong =
            |why: &str| ClientError::Answer { request: "GET_VRING_BASE", why: why.to_owned() };
        let answer =
            <&[u8; VringState::BYTES]>::try_from(&answer[..]).map_err(|_| wrong("not 8 bytes"))?;
        let answer = VringState::decode(answer);
        if answer.index != u32::from(index) {
            return Err(wrong("another queue"));
        }
        Ok(answer.num)
    }

    /// Starts a queue where the device is to stand in it.
    ///
    /// # Errors
    /// The socket; no such queue.
    pub fn start_queue(&mut self, index: u16, base: u32) -> Result<(), ClientError> {
        let hooks = self
            .hooks
            .get(usize::from(index))
            .ok_or(ClientError::Missing { what: "such queue" })?;
        let layout = &hooks.layout;
        let wire = &mut self.wire;
        wire.tell_queue(Request::SetVringNum, index, layout.size.into())?;
        wire.tell_queue(Request::SetVringBase, index, base)?;
        let addresses = VringAddress {
            index: index.into(),
            flags: 0,
            descriptor: layout.descriptor_area.0,
            used: layout.device_area.0,
            available: layout.driver_area.0,
            log: 0,
        };
        wire.tell(Request::SetVringAddr, &addresses.encode(), &[])?;
        let number = u64::from(index).to_le_bytes();
        wire.tell(Request::SetVringErr, &number, &[hooks.error.as_fd()])?;
        wire.tell(Request::SetVringCall, &number, &[hooks.call.as_fd()])?;
        wire.tell(Request::SetVringKick, &number, &[hooks.kick.as_fd()])?;
        wire.tell_queue(Request::SetVringEnable, index, 1)
    }

    /// Enables or disables a queue that is started.
    ///
    /// # Errors
    /// The socket.
    pub fn enable_queue(&mut self, index: u16, enable: bool) -> Result<(), ClientError> {
        self.wire.tell_queue(Request::SetVringEnable, index, enable.into())
    }

    /// The device's status (virtio 1.2, 2.1).
    ///
    /// # Errors
    /// The device has no status; the socket.
    pub fn status(&mut self) -> Result<u8, ClientError> {
        self.need(protocol::STATUS, "status")?;
        let status = self.wire.ask_u64(Request::GetStatus)?;
        u8::try_from(status)
            .map_err(|_| ClientError::Answer { request: "GET_STATUS", why: format!("{status:#x}") })
    }

    /// Sets the device's status; zero resets it.
    ///
    /// # Errors
    /// The device has no status; the socket.
    pub fn set_status(&mut self, status: u8) -> Result<(), ClientError> {
        self.need(protocol::STATUS, "status")?;
        self.wire.tell_u64(Request::SetStatus, status.into())
    }

    /// Resets the device (RESET_DEVICE): all of its queues stop.
    ///
    /// # Errors
    /// The device cannot be reset; the socket.
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.need(protocol::RESET_DEVICE, "RESET_DEVICE")?;
        self.wire.tell(Request::ResetDevice, &[], &[])
    }

    /// Tells the device of its memory again, as SET_MEM_TABLE does when a guest's memory changes
    /// while it runs.
    ///
    /// # Errors
    /// The socket.
    pub fn share_memory_again(&mut self) -> Result<(), ClientError> {
        self.set_mem_table(&self.arena.regions(1))
    }

    /// Takes the memory away from the device, region by region (REM_MEM_REG), and gives it back.
    ///
    /// # Errors
    /// The device cannot change regions; the socket.
    pub fn replace_regions(&mut self, regions: u8) -> Result<(), ClientError> {
        self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
        for region in self.arena.regions(regions) {
            self.wire.tell(Request::RemMemReg, &single_region(&region), &[])?;
        }
        self.add_regions(regions)
    }

    fn need(&self, feature: u64, what: &'static str) -> Result<(), ClientError> {
        if self.protocol & feature == 0 { Err(ClientError::Missing { what }) } else { Ok(()) }
    }

    fn share_memory(&mut self, options: &ClientOptions) -> Result<(), ClientError> {
        let regions = self.arena.regions(options.regions);
        if options.add_regions || regions.len() > MAX_FDS {
            self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
            return self.add_regions(options.regions);
        }
        self.set_mem_table(&regions)
    }

    fn add_regions(&mut self, regions: u8) -> Result<(), ClientError> {
        for region in self.arena.regions(regions) {
            self.wire.tell(Request::AddMemReg, &single_region(&region), &[self.arena.file()])?;
        }
        Ok(())
    }

    fn set_mem_table(&mut self, regions: &[Region]) -> Result<(), ClientError> {
        let header =
            MemoryTableHeader { regions: u32::try_from(regions.len()).unwrap_or(u32::MAX) };
        let mut body = Vec::from(header.encode());
        regions.iter().for_each(|region| body.extend_from_slice(&wire_region(region).encode()));
        let files: Vec<BorrowedFd<'_>> = regions.iter().map(|_| self.arena.file()).collect();
        self.wire.tell(Request::SetMemTable, &body, &files)
    }
}

/// Connects, and agrees on features: virtio's, the protocol's, and what the configuration space
/// says.
fn agree(
    socket: &Path,
    options: &ClientOptions,
) -> Result<(Wire, u64, u64, BlkConfig), ClientError> {
    let mut wire = Wire::connect(socket, options.timeout)?;
    let offered = wire.ask_u64(Request::GetFeatures)?;
    if offered & features::PROTOCOL_FEATURES == 0 {
        return Err(ClientError::Missing { what: "protocol features" });
    }
    let protocol = negotiate_protocol(&mut wire, options)?;
    wire.tell(Request::SetOwner, &[], &[])?;
    let config = read_config(&mut wire, protocol)?;
    let features = offered & wanted(options);
    if options.queues > 1
        && (protocol & protocol::MQ == 0
            || wire.ask_u64(Request::GetQueueNum)? < options.queues.into())
    {
        return Err(ClientError::Missing { what: "that many queues" });
    }
    if protocol & protocol::STATUS != 0 {
        wire.tell_u64(Request::SetStatus, (status::ACKNOWLEDGE | status::DRIVER).into())?;
    }
    wire.tell_u64(Request::SetFeatures, features)?;
    if protocol & protocol::STATUS != 0 {
        let bits = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        wire.tell_u64(Request::SetStatus, bits.into())?;
    }
    Ok((wire, features, protocol, config))
}

/// The sizes of a queue's parts, the same for all queues.
pub(crate) struct Plan {
    format: RingFormat,
    size: u16,
    areas: RingAreas,
    buffers_per_slot: u16,
    event_idx: bool,
    indirect: bool,
    tables_bytes: usize,
    lines_bytes: usize,
    data_bytes: usize,
}

impl Plan {
    pub(crate) fn new(options: &ClientOptions, features: u64) -> Result<Self, ClientError> {
        let wrong = |why: &str| Err(ClientError::Options(why.to_owned()));
        if options.queues == 0 || options.slots == 0 || options.max_pieces == 0 {
            return wrong("queues, slots and pieces are at least one");
        }
        if options.slot_bytes == 0 || !options.slot_bytes.is_multiple_of(512) {
            return wrong("a slot's buffer is a multiple of 512 bytes");
        }
        let indirect = options.indirect && features & features::INDIRECT_DESC != 0;
        let format = if features & features::RING_PACKED != 0 {
            RingFormat::Packed
        } else {
            RingFormat::Split
        };
        let Some(buffers_per_slot) = options.max_pieces.checked_add(2) else {
            return wrong("too many pieces");
        };
        let entries_per_slot = if indirect { 1 } else { buffers_per_slot };
        let entries =
            options.slots.checked_mul(entries_per_slot).and_then(u16::checked_next_power_of_two);
        let size = match (options.queue_size, entries) {
            (0, Some(entries)) => entries,
            (0, None) => return wrong("more slots and pieces than the largest ring has entries"),
            (size, _) => size,
        };
        Ok(Self {
            format,
            size,
            areas: RingAreas::of(format, size),
            buffers_per_slot,
            event_idx: features & features::EVENT_IDX != 0,
            indirect,
            tables_bytes: if indirect {
                IndirectTables::bytes(options.slots, buffers_per_slot)
            } else {
                0
            },
            lines_bytes: BlkQueue::lines_bytes(options.slots),
            data_bytes: usize::from(options.slots) * options.slot_bytes as usize,
        })
    }

    pub(crate) fn arena_bytes(&self, queues: u16) -> u64 {
        let parts = [self.areas.total_bytes, self.tables_bytes, self.lines_bytes, self.data_bytes];
        let queue: u64 = parts
            .iter()
            .map(|part| (*part as u64).next_multiple_of(sidecore_units::PAGE_BYTES))
            .sum();
        queue * u64::from(queues)
    }

    pub(crate) fn build(
        &self,
        arena: &mut Arena,
        options: &ClientOptions,
    ) -> Result<(BlkQueue, Hooks), ClientError> {
        let rings = arena.give(self.areas.total_bytes)?;
        let tables = if self.indirect { Some(arena.give(self.tables_bytes)?) } else { None };
        let lines = arena.give(self.lines_bytes)?;
        let data = arena.give(self.data_bytes)?;
        let layout = RingLayout {
            format: self.format,
            size: self.size,
            descriptor_area: UserAddress(rings.user_address),
            driver_area: UserAddress(rings.user_address + self.areas.driver_offset_bytes as u64),
            device_area: UserAddress(rings.user_address + self.areas.device_offset_bytes as u64),
            event_idx: self.event_idx,
            indirect: self.indirect,
        };
        let tables = tables.map(|Part { window, guest_address, .. }| IndirectTables {
            window,
            guest_address: GuestAddress(guest_address),
        });
        let ring =
            DriverRing::new(arena.memory(), &layout, options.slots, self.buffers_per_slot, tables)?;
        let raw = RawRing::new(arena.memory(), &layout)?;
        let eventfd = || {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(ClientError::io("eventfd"))
        };
        let twice = |fd: &OwnedFd| {
            fd.try_clone().map_err(|source| ClientError::Io { what: "eventfd", source })
        };
        let hooks = Hooks { layout, kick: eventfd()?, call: eventfd()?, error: eventfd()? };
        let queue = BlkQueue::new(Parts {
            ring,
            raw,
            layout,
            lines,
            data,
            slot_bytes: options.slot_bytes,
            max_pieces: options.max_pieces,
            kick: twice(&hooks.kick)?,
            call: twice(&hooks.call)?,
            error: twice(&hooks.error)?,
            notify: options.notify,
            like_kernel: options.like_kernel,
        });
        Ok((queue, hooks))
    }
}

fn negotiate_protocol(wire: &mut Wire, options: &ClientOptions) -> Result<u64, ClientError> {
    let offered = wire.ask_u64(Request::GetProtocolFeatures)?;
    let mut wanted = protocol::MQ
        | protocol::REPLY_ACK
        | protocol::BACKEND_REQ
        | protocol::CONFIG
        | protocol::RESET_DEVICE
        | protocol::CONFIGURE_MEM_SLOTS;
    if options.status {
        wanted |= protocol::STATUS;
    }
    let granted = offered & wanted;
    wire.tell_u64(Request::SetProtocolFeatures, granted)?;
    if granted & protocol::REPLY_ACK != 0 {
        wire.acknowledge();
    }
    Ok(granted)
}

/// The features to accept where they are offered.
pub(crate) fn wanted(options: &ClientOptions) -> u64 {
    let mut wanted = features::SEG_MAX
        | features::RO
        | features::BLK_SIZE
        | features::FLUSH
        | features::TOPOLOGY
        | features::DISCARD
        | features::WRITE_ZEROES
        | features::PROTOCOL_FEATURES
        | features::VERSION_1;
    let optional = [
        (options.queues > 1, features::MQ),
        (options.packed, features::RING_PACKED),
        (options.event_idx, features::EVENT_IDX),
        (options.indirect, features::INDIRECT_DESC),
    ];
    for (asked, feature) in optional {
        if asked {
            wanted |= feature;
        }
    }
    wanted & !options.refuse_features
}

/// GET_CONFIG: offset, size and flags, then the bytes, both ways. A device without it is one of
/// unknown size.
fn read_config(wire: &mut Wire, protocol: u64) -> Result<BlkConfig, ClientError> {
    if protocol & protocol::CONFIG == 0 {
        return Ok(BlkConfig::default());
    }
    let header = ConfigHeader { offset_bytes: 0, size_bytes: Config::BYTES as u32, flags: 0 };
    let answer =
        wire.ask(Request::GetConfig, &[&header.encode()[..], &[0; Config::BYTES]].concat())?;
    let raw = answer.get(ConfigHeader::BYTES..).and_then(|raw| raw.try_into().ok());
    raw.map(|raw| BlkConfig::from(Config::decode(raw))).ok_or_else(|| ClientError::Answer {
        request: "GET_CONFIG",
        why: format!("{} bytes", answer.len()),
    })
}

fn wire_region(region: &Region) -> MemoryRegion {
    let Region { guest_address, len_bytes, user_address, file_offset_bytes } = *region;
    MemoryRegion { guest_address, len_bytes, user_address, file_offset_bytes }
}

/// The body of ADD_MEM_REG and REM_MEM_REG.
fn single_region(region: &Region) -> [u8; SingleMemoryRegion::BYTES] {
    SingleMemoryRegion { region: wire_region(region) }.encode()
}
