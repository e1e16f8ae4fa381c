//! The connection: what a VMM does to set up a vhost-user disk.

use std::os::fd::AsFd;
use std::path::Path;

use sidecore_ring::{RingFormat, RingState};
use sidecore_spec_virtio::blk::Config;
use sidecore_spec_virtio::vhost_user::{ConfigHeader, Request, protocol};

use crate::arena::Arena;
use crate::config::{BlkConfig, features};
use crate::config_watch::ConfigWatch;
use crate::error::ClientError;
use crate::front_end::{
    self, Agreed, Asked, FrontEnd, Hooks, RingPlan, RingShape, single_region, twice, whole_pages,
};
use crate::options::ClientOptions;
use crate::queue::{BlkQueue, Parts};
use crate::wire::Wire;

/// A disk behind a vhost-user socket. Dropping it hangs up; queues taken out of it keep their
/// memory, and are no longer served.
#[derive(Debug)]
pub struct BlkClient {
    front_end: FrontEnd,
    config: BlkConfig,
    queues: Vec<Option<BlkQueue>>,
}

impl BlkClient {
    /// Connects, negotiates, shares memory and starts the queues.
    ///
    /// # Errors
    /// The device hangs up, refuses or makes no sense; it has fewer queues than asked for; there is
    /// not enough memory; the options contradict themselves.
    pub fn connect(socket: impl AsRef<Path>, options: &ClientOptions) -> Result<Self, ClientError> {
        let (wire, agreed, config) = agree(socket.as_ref(), options)?;
        let plan = Plan::new(options, agreed.features)?;
        let arena = Arena::new(plan.arena_bytes(options.queues), options.huge_pages)?;
        let front_end = FrontEnd { wire, agreed, arena, hooks: Vec::new() };
        let mut client = Self { front_end, config, queues: Vec::new() };
        client.front_end.share_memory(options.regions, options.add_regions)?;
        for index in 0..options.queues {
            let (queue, hooks) = plan.build(&mut client.front_end.arena, options)?;
            client.queues.push(Some(queue));
            client.front_end.hooks.push(hooks);
            client.start_queue(index, RingState::fresh(plan.format).to_vring_base(plan.format))?;
        }
        client.front_end.say_ready()?;
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
        let (wire, agreed, config) = agree(socket.as_ref(), options)?;
        if agreed != self.front_end.agreed {
            let (now, before) = (agreed.features, self.front_end.agreed.features);
            let why = format!("it offers {now:#x} now, and offered {before:#x}");
            return Err(ClientError::Answer { request: "GET_FEATURES", why });
        }
        self.front_end.wire = wire;
        self.config = config;
        self.front_end.share_memory(options.regions, options.add_regions)?;
        for (index, base) in (0..).zip(bases) {
            self.start_queue(index, *base)?;
        }
        self.front_end.say_ready()
    }

    /// The virtio features that both sides have agreed on, see [`features`](crate::features).
    #[must_use]
    pub fn features(&self) -> u64 {
        self.front_end.agreed.features
    }

    /// The protocol features that both sides have agreed on, see [`protocol`].
    #[must_use]
    pub fn protocol_features(&self) -> u64 {
        self.front_end.agreed.protocol
    }

    /// The configuration that the device sent when it was connected to.
    #[must_use]
    pub fn config(&self) -> BlkConfig {
        self.config
    }

    /// Whether the shared memory is on huge pages.
    #[must_use]
    pub fn on_huge_pages(&self) -> bool {
        self.front_end.arena.is_huge()
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
        self.config = read_config(&mut self.front_end.wire, self.front_end.agreed.protocol)?;
        Ok(self.config)
    }

    /// Has the device say when its configuration changes.
    ///
    /// # Errors
    /// The device does not offer it; the socket.
    pub fn watch_config(&mut self) -> Result<ConfigWatch, ClientError> {
        self.front_end.need(protocol::BACKEND_REQ, "BACKEND_REQ")?;
        let (watch, theirs) = ConfigWatch::pair()?;
        self.front_end.wire.tell(Request::SetBackendReqFd, &[], &[theirs.as_fd()])?;
        Ok(watch)
    }

    /// Stops a queue and returns where the device stood in it (GET_VRING_BASE).
    ///
    /// # Errors
    /// The socket.
    pub fn stop_queue(&mut self, index: u16) -> Result<u32, ClientError> {
        self.front_end.stop_queue(index)
    }

    /// Starts a queue where the device is to stand in it.
    ///
    /// # Errors
    /// The socket; no such queue.
    pub fn start_queue(&mut self, index: u16, base: u32) -> Result<(), ClientError> {
        self.front_end.start_queue(index, base)
    }

    /// Enables or disables a queue that is started.
    ///
    /// # Errors
    /// The socket.
    pub fn enable_queue(&mut self, index: u16, enable: bool) -> Result<(), ClientError> {
        self.front_end.enable_queue(index, enable)
    }

    /// The device's status (virtio 1.2, 2.1).
    ///
    /// # Errors
    /// The device has no status; the socket.
    pub fn status(&mut self) -> Result<u8, ClientError> {
        self.front_end.need(protocol::STATUS, "status")?;
        let status = self.front_end.wire.ask_u64(Request::GetStatus)?;
        u8::try_from(status)
            .map_err(|_| ClientError::Answer { request: "GET_STATUS", why: format!("{status:#x}") })
    }

    /// Sets the device's status; zero resets it.
    ///
    /// # Errors
    /// The device has no status; the socket.
    pub fn set_status(&mut self, status: u8) -> Result<(), ClientError> {
        self.front_end.need(protocol::STATUS, "status")?;
        self.front_end.wire.tell_u64(Request::SetStatus, status.into())
    }

    /// Resets the device (RESET_DEVICE): all of its queues stop.
    ///
    /// # Errors
    /// The device cannot be reset; the socket.
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.front_end.need(protocol::RESET_DEVICE, "RESET_DEVICE")?;
        self.front_end.wire.tell(Request::ResetDevice, &[], &[])
    }

    /// Tells the device of its memory again, as SET_MEM_TABLE does when a guest's memory changes
    /// while it runs.
    ///
    /// # Errors
    /// The socket.
    pub fn share_memory_again(&mut self) -> Result<(), ClientError> {
        self.front_end.set_mem_table(&self.front_end.arena.regions(1))
    }

    /// Takes the memory away from the device, region by region (REM_MEM_REG), and gives it back.
    ///
    /// # Errors
    /// The device cannot change regions; the socket.
    pub fn replace_regions(&mut self, regions: u8) -> Result<(), ClientError> {
        self.front_end.need(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
        for region in self.front_end.arena.regions(regions) {
            self.front_end.wire.tell(Request::RemMemReg, &single_region(&region), &[])?;
        }
        self.front_end.add_regions(regions)
    }
}

/// Connects, and agrees on features: virtio's, the protocol's, and what the configuration space
/// says.
fn agree(socket: &Path, options: &ClientOptions) -> Result<(Wire, Agreed, BlkConfig), ClientError> {
    let asked = Asked {
        features: wanted(options),
        protocol: protocol::BACKEND_REQ | protocol::CONFIG,
        queues: options.queues,
        status: options.status,
        timeout: options.timeout,
    };
    let mut config = BlkConfig::default();
    let (wire, agreed) =
        front_end::agree(Wire::connect(socket, asked.timeout)?, &asked, |wire, protocol| {
            config = read_config(wire, protocol)?;
            Ok(())
        })?;
    Ok((wire, agreed, config))
}

/// The sizes of a queue's parts, the same for all queues.
pub(crate) struct Plan {
    ring: RingPlan,
    format: RingFormat,
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
        let Some(buffers_per_slot) = options.max_pieces.checked_add(2) else {
            return wrong("too many pieces");
        };
        let shape = RingShape {
            slots: options.slots,
            buffers_per_slot,
            queue_size: options.queue_size,
            indirect: options.indirect,
        };
        let ring = RingPlan::new(shape, features)?;
        Ok(Self {
            format: ring.format(),
            ring,
            lines_bytes: BlkQueue::lines_bytes(options.slots),
            data_bytes: usize::from(options.slots) * options.slot_bytes as usize,
        })
    }

    pub(crate) fn arena_bytes(&self, queues: u16) -> u64 {
        let parts = [self.lines_bytes, self.data_bytes];
        let data: u64 = parts.iter().map(|part| whole_pages(*part)).sum();
        (self.ring.arena_bytes() + data) * u64::from(queues)
    }

    pub(crate) fn build(
        &self,
        arena: &mut Arena,
        options: &ClientOptions,
    ) -> Result<(BlkQueue, Hooks), ClientError> {
        let (ring, raw, hooks) = self.ring.build(arena)?;
        let lines = arena.give(self.lines_bytes)?;
        let data = arena.give(self.data_bytes)?;
        let queue = BlkQueue::new(Parts {
            ring,
            raw,
            layout: hooks.layout,
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
