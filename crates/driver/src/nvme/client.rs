//! The controller: finding it, enabling it, and creating its queues.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::event::EventfdFlags;
use sidecore_spec_nvme::identify::{BYTES as IDENTIFY_BYTES, cns};
use sidecore_spec_nvme::opcode::admin as admin_opcode;
use sidecore_spec_nvme::{register, vfio};

use super::admin::NvmeAdmin;
use super::bring_up::{Probe, enable_pci, probe};
use super::buffer::DmaBuffer;
use super::command::NvmeCommand;
use super::doorbells::{MappedArea, QueueDoorbells, ShadowBuffers};
use super::identify::{NvmeControllerInfo, NvmeNamespaceInfo};
use super::options::NvmeOptions;
use super::plan::Plan;
use super::queue::NvmeQueue;
use super::registers::{
    CC_SHUTDOWN, CC_SHUTDOWN_MASK, CSTS_SHUTDOWN_COMPLETE, CSTS_SHUTDOWN_MASK, NvmeCapabilities,
};
use super::transport::{RegionInfo, Transport};
use crate::arena::Arena;
use crate::error::ClientError;
use crate::options::Notify;

/// Applications' buffers are apart from the rest, so that an overrun meets nothing.
const BUFFER_GAP_BYTES: u64 = 1 << 30;

/// An NVMe controller behind a vfio-user socket. Dropping it hangs up, which resets the controller;
/// queues taken out of it keep their memory, and are no longer served.
#[derive(Debug)]
pub struct NvmeClient {
    socket: PathBuf,
    pub(super) options: NvmeOptions,
    pub(super) transport: Transport,
    pub(super) bar: RegionInfo,
    pub(super) capabilities: NvmeCapabilities,
    pub(super) arena: Arena,
    pub(super) buffers: Vec<Arena>,
    next_buffer_at: u64,
    pub(super) admin: NvmeAdmin,
    /// The events that vectors signal: the admin queue's, and one for each queue that wants
    /// interrupts.
    pub(super) events: Vec<OwnedFd>,
    pub(super) shadow: ShadowBuffers,
    pub(super) controller: NvmeControllerInfo,
    pub(super) namespace: NvmeNamespaceInfo,
    queues: Vec<Option<NvmeQueue>>,
}

impl NvmeClient {
    /// Connects, shares memory, enables the controller, and creates its I/O queue pairs.
    ///
    /// # Errors
    /// The socket has no listener; the device is no NVMe controller, refuses or makes no sense; it
    /// has fewer queues, vectors or namespaces than asked for; there is not enough memory; the
    /// options contradict themselves.
    pub fn connect(socket: impl AsRef<Path>, options: &NvmeOptions) -> Result<Self, ClientError> {
        let socket = socket.as_ref().to_owned();
        let transport = Transport::connect(&socket, options.timeout)?;
        Self::over(transport, socket, options)
    }

    pub(crate) fn over(
        transport: Transport,
        socket: PathBuf,
        options: &NvmeOptions,
    ) -> Result<Self, ClientError> {
        let Probe { bar, interrupts, vectors, capabilities } = probe(&transport)?;
        let plan = Plan::new(options, capabilities)?;
        let interrupting = if options.notify == Notify::Interrupt { options.queues } else { 0 };
        if vectors < u32::from(interrupting) + 1 {
            return Err(ClientError::Missing { what: "an interrupt vector for each queue" });
        }
        let mut arena = Arena::new(plan.arena_bytes(options), options.huge_pages)?;
        let first = arena.regions(options.regions).first().map_or(0, |region| region.len_bytes);
        if first < plan.contiguous_bytes(options.queues) {
            return Err(ClientError::Options(
                "the queues do not fit the first of so many regions".to_owned(),
            ));
        }
        let parts = plan.lay_out(&mut arena, options)?;
        let events = (0..=interrupting).map(|_| eventfd()).collect::<Result<Vec<_>, _>>()?;
        let admin = NvmeAdmin::new(
            parts.admin,
            &transport,
            capabilities,
            twice(&events[0])?,
            options.timeout,
        )?;
        let mut queues = Vec::new();
        for (id, parts) in (1..).zip(parts.queues) {
            let event = events.get(usize::from(id)).map(twice).transpose()?;
            let doorbells = QueueDoorbells::new(
                id,
                capabilities,
                &MappedArea::new(&bar, false)?,
                None,
                &transport,
                false,
            )?;
            queues.push(Some(NvmeQueue::new(id, parts, &plan, options, doorbells, event)?));
        }
        let [shadow, events_part] = parts.shadow;
        let next_buffer_at = arena.end().next_multiple_of(BUFFER_GAP_BYTES) + BUFFER_GAP_BYTES;
        let nothing = [0; IDENTIFY_BYTES];
        let mut client = Self {
            socket,
            options: options.clone(),
            transport,
            bar,
            capabilities,
            arena,
            buffers: Vec::new(),
            next_buffer_at,
            admin,
            events,
            shadow: ShadowBuffers { shadow, events: events_part },
            controller: NvmeControllerInfo::parse(&nothing, capabilities.min_page_bytes()),
            namespace: NvmeNamespaceInfo::NONE,
            queues,
        };
        client.attach(interrupts)?;
        client.start()?;
        Ok(client)
    }

    /// Connects again, after the device has hung up or was restarted, and starts everything anew
    /// over the same memory. Requests that were in flight complete as
    /// [`ABORTED_BY_HOST`](super::NvmeStatus::ABORTED_BY_HOST): they may have been carried out or
    /// not.
    ///
    /// # Errors
    /// As [`NvmeClient::connect`]; a queue was taken out and not put back
    /// ([`NvmeClient::put_queue`]); the namespace has changed its format. It may be tried again.
    pub fn reconnect(&mut self) -> Result<(), ClientError> {
        self.need_all_queues()?;
        self.transport.hang_up();
        let transport = Transport::connect(&self.socket, self.options.timeout)?;
        self.connect_over(transport)
    }

    pub(crate) fn connect_over(&mut self, transport: Transport) -> Result<(), ClientError> {
        let probe = probe(&transport)?;
        if probe.vectors < self.events.len() as u32 {
            return Err(ClientError::Missing { what: "an interrupt vector for each queue" });
        }
        let (old, new) = (self.capabilities, probe.capabilities);
        let fits = new.max_entries() >= old.max_entries()
            && new.doorbell_stride_bytes() <= old.doorbell_stride_bytes();
        if !fits {
            return Err(ClientError::Missing {
                what: "queues as large as before: make a new client",
            });
        }
        (self.transport, self.bar, self.capabilities) = (transport, probe.bar, new);
        self.attach(probe.interrupts)?;
        self.start()
    }

    /// Resets the controller (CC.EN) and creates the queues anew; in-flight requests end as in
    /// [`NvmeClient::reconnect`].
    ///
    /// # Errors
    /// As [`NvmeClient::reconnect`].
    pub fn reset_controller(&mut self) -> Result<(), ClientError> {
        self.need_all_queues()?;
        self.start()
    }

    /// Resets the device (DEVICE_RESET) and starts it anew; in-flight requests end as in
    /// [`NvmeClient::reconnect`].
    ///
    /// # Errors
    /// As [`NvmeClient::reconnect`].
    pub fn reset_device(&mut self) -> Result<(), ClientError> {
        self.need_all_queues()?;
        self.transport.reset()?;
        enable_pci(&self.transport)?;
        self.start()
    }

    /// Deletes the queues and shuts the controller down (CC.SHN), so that everything that was
    /// written is durable. It is of use again after [`NvmeClient::reset_controller`].
    ///
    /// # Errors
    /// The socket; it does not get there in time.
    pub fn shut_down(&mut self) -> Result<(), ClientError> {
        for queue in 1..=self.options.queues {
            self.delete_queue(queue)?;
        }
        let configuration = self.read_register32(register::CC)? & !CC_SHUTDOWN_MASK;
        self.write_register32(register::CC, configuration | CC_SHUTDOWN)?;
        self.wait_for_status("shut down", |status| {
            status & CSTS_SHUTDOWN_MASK == CSTS_SHUTDOWN_COMPLETE
        })
    }

    /// Deletes one I/O queue pair (1, 2, and so on); the controller finishes or aborts what it has
    /// of it first.
    ///
    /// # Errors
    /// There is none, or the socket.
    pub fn delete_queue(&mut self, queue: u16) -> Result<(), ClientError> {
        let delete = |opcode| NvmeCommand::new(opcode, 0).dword(10, queue.into());
        let admin = &mut self.admin;
        admin.must("Delete I/O Submission Queue", delete(admin_opcode::DELETE_SUBMISSION_QUEUE))?;
        admin
            .must("Delete I/O Completion Queue", delete(admin_opcode::DELETE_COMPLETION_QUEUE))
            .map(drop)
    }

    /// Whether the device has not hung up. Queues with mapped doorbells do not notice by
    /// themselves: their requests are then just not completed. [`NvmeClient::reconnect`] is what
    /// helps.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.transport.is_connected()
    }

    /// The controller's answer to Identify.
    #[must_use]
    pub fn controller(&self) -> &NvmeControllerInfo {
        &self.controller
    }

    /// The namespace that the queues use, as it was when last looked at.
    #[must_use]
    pub fn namespace(&self) -> NvmeNamespaceInfo {
        self.namespace
    }

    /// Looks at the namespace again, after it was resized for instance.
    ///
    /// # Errors
    /// The namespace is gone, or the socket.
    pub fn read_namespace(&mut self) -> Result<NvmeNamespaceInfo, ClientError> {
        self.namespace = self.identify_namespace(self.namespace.id)?;
        Ok(self.namespace)
    }

    /// The active namespaces' numbers, up to 1024 of them.
    ///
    /// # Errors
    /// The socket, or the controller fails the command.
    pub fn active_namespaces(&mut self) -> Result<Vec<u32>, ClientError> {
        let raw = self.identify(cns::ACTIVE_NAMESPACES.into(), 0)?;
        let (entries, _) = raw.as_chunks();
        Ok(entries
            .iter()
            .map(|entry| u32::from_le_bytes(*entry))
            .take_while(|id| *id != 0)
            .collect())
    }

    /// Identify with any CNS, for any namespace.
    ///
    /// # Errors
    /// The socket, or the controller fails the command.
    pub fn identify(
        &mut self,
        cns: u32,
        namespace: u32,
    ) -> Result<Box<[u8; IDENTIFY_BYTES]>, ClientError> {
        let mut raw = Box::new([0; IDENTIFY_BYTES]);
        let command = NvmeCommand::new(admin_opcode::IDENTIFY, namespace).dword(10, cns);
        self.admin.must_read("Identify", command, &mut raw[..])?;
        Ok(raw)
    }

    /// The controller's limits (CAP).
    #[must_use]
    pub fn capabilities(&self) -> NvmeCapabilities {
        self.capabilities
    }

    /// Whether the shared memory is on huge pages.
    #[must_use]
    pub fn on_huge_pages(&self) -> bool {
        self.arena.is_huge()
    }

    /// Queue pair `index`, from 0, if there is one and it was not taken out.
    pub fn queue(&mut self, index: u16) -> Option<&mut NvmeQueue> {
        self.queues.get_mut(usize::from(index))?.as_mut()
    }

    /// Takes queue pair `index` out, for a thread of its own. The client must outlive its use.
    pub fn take_queue(&mut self, index: u16) -> Option<NvmeQueue> {
        self.queues.get_mut(usize::from(index))?.take()
    }

    /// Puts a queue pair back that was taken out of this client.
    pub fn put_queue(&mut self, queue: NvmeQueue) {
        let index = usize::from(queue.id()).wrapping_sub(1);
        if let Some(place @ None) = self.queues.get_mut(index) {
            *place = Some(queue);
        }
    }

    /// The admin queue, for any command.
    pub fn admin(&mut self) -> &mut NvmeAdmin {
        &mut self.admin
    }

    /// The device under the controller: regions, interrupts, DMA, and raw messages.
    #[must_use]
    pub fn transport(&self) -> &Transport {
        &self.transport
    }

    /// Reads 32 bits of BAR0, see [`register`](super::register).
    ///
    /// # Errors
    /// The socket, or there is nothing.
    pub fn read_register32(&self, offset_bytes: u64) -> Result<u32, ClientError> {
        let mut bytes = [0; 4];
        self.transport.region_read(vfio::PCI_BAR0_REGION_INDEX, offset_bytes, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads 64 bits of BAR0.
    ///
    /// # Errors
    /// The socket, or there is nothing.
    pub fn read_register64(&self, offset_bytes: u64) -> Result<u64, ClientError> {
        let mut bytes = [0; 8];
        self.transport.region_read(vfio::PCI_BAR0_REGION_INDEX, offset_bytes, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes 32 bits of BAR0.
    ///
    /// # Errors
    /// The socket, or there is nothing.
    pub fn write_register32(&self, offset_bytes: u64, value: u32) -> Result<(), ClientError> {
        self.transport.region_write(vfio::PCI_BAR0_REGION_INDEX, offset_bytes, &value.to_le_bytes())
    }

    /// Writes 64 bits of BAR0.
    ///
    /// # Errors
    /// The socket, or there is nothing.
    pub fn write_register64(&self, offset_bytes: u64, value: u64) -> Result<(), ClientError> {
        self.transport.region_write(vfio::PCI_BAR0_REGION_INDEX, offset_bytes, &value.to_le_bytes())
    }

    /// Makes a buffer that requests can move data from and to directly. It stays mapped, across
    /// reconnects as well, until it is [released](NvmeClient::release_buffer).
    ///
    /// # Errors
    /// There is not enough memory, or the device takes no more regions.
    pub fn new_buffer(&mut self, len_bytes: usize) -> Result<DmaBuffer, ClientError> {
        let mut arena =
            Arena::new_at(self.next_buffer_at, len_bytes as u64, self.options.huge_pages)?;
        let buffer = DmaBuffer::new(&mut arena, len_bytes)?;
        map(&self.transport, &arena, 1)?;
        self.next_buffer_at = arena.end().next_multiple_of(BUFFER_GAP_BYTES) + BUFFER_GAP_BYTES;
        self.buffers.push(arena);
        Ok(buffer)
    }

    /// Takes a buffer away from the controller.
    ///
    /// # Errors
    /// The socket.
    pub fn release_buffer(&mut self, buffer: DmaBuffer) -> Result<(), ClientError> {
        let at = self.buffers.iter().position(|arena| arena.contains(buffer.address()));
        if let Some(arena) = at.map(|at| self.buffers.swap_remove(at)) {
            unmap(&self.transport, &arena, 1)?;
        }
        Ok(())
    }

    /// Takes all memory but applications' buffers away from the device and gives it back, as a VMM
    /// does that moves its guest's memory. Requests in flight are finished or wait.
    ///
    /// # Errors
    /// The device refuses.
    pub fn remap_memory(&mut self) -> Result<(), ClientError> {
        unmap(&self.transport, &self.arena, self.options.regions)?;
        map(&self.transport, &self.arena, self.options.regions)
    }

    fn need_all_queues(&self) -> Result<(), ClientError> {
        match self.queues.iter().position(Option::is_none) {
            None => Ok(()),
            Some(index) => {
                Err(ClientError::Options(format!("queue {index} is taken out: put it back first")))
            }
        }
    }
}

impl Drop for NvmeClient {
    fn drop(&mut self) {
        // Queues that were taken out have the connection as well.
        self.transport.hang_up();
    }
}

pub(super) fn map(transport: &Transport, arena: &Arena, regions: u8) -> Result<(), ClientError> {
    let each = arena.regions(regions);
    each.iter().try_for_each(|region| {
        transport.dma_map(
            region.guest_address,
            region.len_bytes,
            arena.file(),
            region.file_offset_bytes,
        )
    })
}

fn unmap(transport: &Transport, arena: &Arena, regions: u8) -> Result<(), ClientError> {
    arena
        .regions(regions)
        .iter()
        .try_for_each(|region| transport.dma_unmap(region.guest_address, region.len_bytes))
}

fn eventfd() -> Result<OwnedFd, ClientError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(ClientError::io("eventfd"))
}

fn twice(event: &OwnedFd) -> Result<OwnedFd, ClientError> {
    event.try_clone().map_err(|source| ClientError::Io { what: "eventfd", source })
}
