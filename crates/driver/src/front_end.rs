//! The set-up that all vhost-user devices share: features, memory, rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::EventfdFlags;
use sidecore_memory::{GuestAddress, UserAddress};
use sidecore_ring::driver::{DriverRing, IndirectTables, RawRing, RingAreas};
use sidecore_ring::{RingFormat, RingLayout};
use sidecore_spec_virtio::status;
use sidecore_spec_virtio::vhost_user::{
    MAX_FDS, MemoryRegion, MemoryTableHeader, Request, SingleMemoryRegion, VringAddress,
    VringState, protocol,
};

use crate::arena::{Arena, Part, Region};
use crate::config::features;
use crate::error::ClientError;
use crate::wire::Wire;

/// The wishes of a client of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Virtio features.
    pub features: u64,
    /// Protocol features beside those that every client wants.
    pub protocol: u64,
    /// Queues, by the device's count of them; 1 does not ask.
    pub queues: u16,
    /// Whether to negotiate VHOST_USER_PROTOCOL_F_STATUS.
    pub status: bool,
    pub timeout: Duration,
}

/// The features that both sides have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub features: u64,
    pub protocol: u64,
}

/// The VMM's side of a connection.
#[derive(Debug)]
pub(crate) struct FrontEnd {
    pub wire: Wire,
    pub agreed: Agreed,
    pub arena: Arena,
    /// Those of each ring.
    pub hooks: Vec<Hooks>,
}

/// The settings of one queue that the device was sent, kept to start it again.
#[derive(Debug)]
pub(crate) struct Hooks {
    pub layout: RingLayout,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
}

impl FrontEnd {
    pub(crate) fn say_ready(&mut self) -> Result<(), ClientError> {
        if self.agreed.protocol & protocol::STATUS == 0 {
            return Ok(());
        }
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.wire.tell_u64(Request::SetStatus, all.into())
    }

    /// Stops a queue and returns where the device stood in it (GET_VRING_BASE).
    ///
    /// # Errors
    /// The socket.
    pub(crate) fn stop_queue(&mut self, index: u16) -> Result<u32, ClientError> {
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
    pub(crate) fn start_queue(&mut self, index: u16, base: u32) -> Result<(), ClientError> {
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
    pub(crate) fn enable_queue(&mut self, index: u16, enable: bool) -> Result<(), ClientError> {
        self.wire.tell_queue(Request::SetVringEnable, index, enable.into())
    }

    pub(crate) fn need(&self, feature: u64, what: &'static str) -> Result<(), ClientError> {
        if self.agreed.protocol & feature == 0 {
            Err(ClientError::Missing { what })
        } else {
            Ok(())
        }
    }

    /// Tells the device of the memory in `count` regions, one by one if `one_by_one`.
    pub(crate) fn share_memory(&mut self, count: u8, one_by_one: bool) -> Result<(), ClientError> {
        let regions = self.arena.regions(count);
        if one_by_one || regions.len() > MAX_FDS {
            self.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
            return self.add_regions(count);
        }
        self.set_mem_table(&regions)
    }

    pub(crate) fn add_regions(&mut self, regions: u8) -> Result<(), ClientError> {
        for region in self.arena.regions(regions) {
            self.wire.tell(Request::AddMemReg, &single_region(&region), &[self.arena.file()])?;
        }
        Ok(())
    }

    pub(crate) fn set_mem_table(&mut self, regions: &[Region]) -> Result<(), ClientError> {
        let header =
            MemoryTableHeader { regions: u32::try_from(regions.len()).unwrap_or(u32::MAX) };
        let mut body = Vec::from(header.encode());
        regions.iter().for_each(|region| body.extend_from_slice(&wire_region(region).encode()));
        let files: Vec<BorrowedFd<'_>> = regions.iter().map(|_| self.arena.file()).collect();
        self.wire.tell(Request::SetMemTable, &body, &files)
    }
}

/// Agrees on features. `configure` is called between the protocol's features and virtio's.
pub(crate) fn agree(
    mut wire: Wire,
    asked: &Asked,
    configure: impl FnOnce(&mut Wire, u64) -> Result<(), ClientError>,
) -> Result<(Wire, Agreed), ClientError> {
    let offered = wire.ask_u64(Request::GetFeatures)?;
    if offered & features::PROTOCOL_FEATURES == 0 {
        return Err(ClientError::Missing { what: "protocol features" });
    }
    let protocol = negotiate_protocol(&mut wire, asked)?;
    wire.tell(Request::SetOwner, &[], &[])?;
    configure(&mut wire, protocol)?;
    let features = offered & asked.features;
    if asked.queues > 1
        && (protocol & protocol::MQ == 0
            || wire.ask_u64(Request::GetQueueNum)? < asked.queues.into())
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
    Ok((wire, Agreed { features, protocol }))
}

fn negotiate_protocol(wire: &mut Wire, asked: &Asked) -> Result<u64, ClientError> {
    let offered = wire.ask_u64(Request::GetProtocolFeatures)?;
    let mut wanted = asked.protocol
        | protocol::MQ
        | protocol::REPLY_ACK
        | protocol::RESET_DEVICE
        | protocol::CONFIGURE_MEM_SLOTS;
    if asked.status {
        wanted |= protocol::STATUS;
    }
    let granted = offered & wanted;
    wire.tell_u64(Request::SetProtocolFeatures, granted)?;
    if granted & protocol::REPLY_ACK != 0 {
        wire.acknowledge();
    }
    Ok(granted)
}

/// The slots of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingShape {
    pub slots: u16,
    pub buffers_per_slot: u16,
    /// Entries of the ring; zero for as many as the slots need.
    pub queue_size: u16,
    /// Indirect descriptors, if the device has them.
    pub indirect: bool,
}

/// The sizes of a ring's parts.
pub(crate) struct RingPlan {
    format: RingFormat,
    size: u16,
    areas: RingAreas,
    slots: u16,
    buffers_per_slot: u16,
    event_idx: bool,
    indirect: bool,
    tables_bytes: usize,
}

impl RingPlan {
    pub(crate) fn new(shape: RingShape, features: u64) -> Result<Self, ClientError> {
        let RingShape { slots, buffers_per_slot, queue_size, indirect } = shape;
        let indirect = indirect && features & features::INDIRECT_DESC != 0;
        let format = if features & features::RING_PACKED != 0 {
            RingFormat::Packed
        } else {
            RingFormat::Split
        };
        let entries_per_slot = if indirect { 1 } else { buffers_per_slot };
        let entries = slots.checked_mul(entries_per_slot).and_then(u16::checked_next_power_of_two);
        let size = match (queue_size, entries) {
            (0, Some(entries)) => entries,
            (0, None) => {
                let why = "more slots and pieces than the largest ring has entries";
                return Err(ClientError::Options(why.to_owned()));
            }
            (size, _) => size,
        };
        Ok(Self {
            format,
            size,
            areas: RingAreas::of(format, size),
            slots,
            buffers_per_slot,
            event_idx: features & features::EVENT_IDX != 0,
            indirect,
            tables_bytes: if indirect { IndirectTables::bytes(slots, buffers_per_slot) } else { 0 },
        })
    }

    pub(crate) fn format(&self) -> RingFormat {
        self.format
    }

    pub(crate) fn arena_bytes(&self) -> u64 {
        whole_pages(self.areas.total_bytes) + whole_pages(self.tables_bytes)
    }

    /// Makes the ring, with its eventfds.
    pub(crate) fn build(
        &self,
        arena: &mut Arena,
    ) -> Result<(DriverRing, RawRing, Hooks), ClientError> {
        let rings = arena.give(self.areas.total_bytes)?;
        let tables = if self.indirect { Some(arena.give(self.tables_bytes)?) } else { None };
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
            DriverRing::new(arena.memory(), &layout, self.slots, self.buffers_per_slot, tables)?;
        let raw = RawRing::new(arena.memory(), &layout)?;
        let hooks = Hooks { layout, kick: eventfd()?, call: eventfd()?, error: eventfd()? };
        Ok((ring, raw, hooks))
    }
}

fn eventfd() -> Result<OwnedFd, ClientError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(ClientError::io("eventfd"))
}

pub(crate) fn twice(fd: &OwnedFd) -> Result<OwnedFd, ClientError> {
    fd.try_clone().map_err(|source| ClientError::Io { what: "eventfd", source })
}

/// Bytes of a part of the arena, which is on pages of its own.
pub(crate) fn whole_pages(len_bytes: usize) -> u64 {
    (len_bytes as u64).next_multiple_of(sidecore_units::PAGE_BYTES)
}

fn wire_region(region: &Region) -> MemoryRegion {
    let Region { guest_address, len_bytes, user_address, file_offset_bytes } = *region;
    MemoryRegion { guest_address, len_bytes, user_address, file_offset_bytes }
}

/// The body of ADD_MEM_REG and REM_MEM_REG.
pub(crate) fn single_region(region: &Region) -> [u8; SingleMemoryRegion::BYTES] {
    SingleMemoryRegion { region: wire_region(region) }.encode()
}
