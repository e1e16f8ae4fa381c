//! The bring-up of a controller until its queues exist (NVMe base 2.0, 3.5.1).

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use sidecore_spec_nvme::command::{CONTIGUOUS, INTERRUPTS_ENABLED};
use sidecore_spec_nvme::identify::{SGLS_SUPPORTED_MASK, cns, oacs};
use sidecore_spec_nvme::opcode::admin as admin_opcode;
use sidecore_spec_nvme::pci::{self, offset};
use sidecore_spec_nvme::register::{self, cc, csts};
use sidecore_spec_nvme::{feature, vfio};

use super::client::{NvmeClient, map};
use super::command::NvmeCommand;
use super::doorbells::{MappedArea, QueueDoorbells};
use super::identify::{NvmeControllerInfo, NvmeNamespaceInfo};
use super::options::DataPointers;
use super::plan::{ADMIN_ENTRIES, PAGE};
use super::registers::{CC_ENTRY_SIZES, NvmeCapabilities};
use super::transport::{RegionInfo, Transport};
use crate::error::ClientError;
use crate::options::Notify;

/// How often a register is read that is to change.
const REGISTER_NAP: Duration = Duration::from_micros(200);

/// The properties that a device reports before it is configured.
pub(super) struct Probe {
    pub bar: RegionInfo,
    /// The kind of its interrupts.
    pub interrupts: u32,
    pub vectors: u32,
    pub capabilities: NvmeCapabilities,
}

impl NvmeClient {
    /// Waits until CSTS is as wanted, within CAP.TO (half a second at least).
    pub(super) fn wait_for_status(
        &self,
        what: &'static str,
        wanted: impl Fn(u32) -> bool,
    ) -> Result<(), ClientError> {
        let timeout = self.capabilities.timeout().max(Duration::from_millis(500));
        let end = Instant::now() + timeout;
        loop {
            let status = self.read_register32(register::CSTS)?;
            if wanted(status) {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(ClientError::NotReady { what, millis: timeout.as_millis() });
            }
            // One that is being stopped may still say so.
            if status & csts::CFS != 0 && self.read_register32(register::CC)? & cc::EN != 0 {
                return Err(ClientError::Fatal);
            }
            std::thread::sleep(REGISTER_NAP);
        }
    }

    /// Sets up a new connection: DMA, interrupts (of this kind), the function enabled.
    pub(super) fn attach(&mut self, interrupts: u32) -> Result<(), ClientError> {
        map(&self.transport, &self.arena, self.options.regions)?;
        self.buffers.iter().try_for_each(|arena| map(&self.transport, arena, 1))?;
        let events: Vec<BorrowedFd<'_>> = self.events.iter().map(AsFd::as_fd).collect();
        self.transport.set_vectors(interrupts, 0, &events)?;
        enable_pci(&self.transport)
    }

    /// Resets and enables the controller, and creates all queues.
    pub(super) fn start(&mut self) -> Result<(), ClientError> {
        self.enable()?;
        let raw = self.identify(cns::CONTROLLER.into(), 0)?;
        self.controller = NvmeControllerInfo::parse(&raw, self.capabilities.min_page_bytes());
        let limit = self.controller.max_transfer_bytes;
        if limit != 0 && u64::from(self.options.slot_bytes) > limit {
            return Err(ClientError::Options(format!(
                "the controller moves at most {limit} bytes at once (MDTS)"
            )));
        }
        if self.options.pointers == DataPointers::Sgl
            && self.controller.sgl_support & SGLS_SUPPORTED_MASK == 0
        {
            return Err(ClientError::Missing { what: "SGLs" });
        }
        self.find_namespace()?;
        self.ask_for_queues()?;
        let area = MappedArea::new(&self.bar, self.options.map_doorbells)?;
        let has_shadow =
            self.controller.optional_admin_commands & oacs::DOORBELL_BUFFER_CONFIG != 0;
        let shadow = if has_shadow && self.options.shadow_doorbells {
            Some(self.shadow.clone())
        } else {
            None
        };
        // The doorbells first: making them puts the shadow at zero.
        for id in 1..=self.options.queues {
            let doorbells = QueueDoorbells::new(
                id,
                self.capabilities,
                &area,
                shadow.as_ref(),
                &self.transport,
                self.options.posted_doorbells,
            )?;
            let namespace = self.namespace;
            if let Some(queue) = self.queue(id - 1) {
                queue.restart(doorbells, &namespace);
            }
        }
        if let Some(shadow) = shadow {
            let command = NvmeCommand::new(admin_opcode::DOORBELL_BUFFER_CONFIG, 0)
                .prp(shadow.shadow.guest_address, shadow.events.guest_address);
            self.admin.must("Doorbell Buffer Config", command)?;
        }
        (1..=self.options.queues).try_for_each(|id| self.create_queue(id))
    }

    fn enable(&mut self) -> Result<(), ClientError> {
        let configuration = self.read_register32(register::CC)?;
        if configuration & cc::EN != 0 {
            self.write_register32(register::CC, configuration & !cc::EN)?;
        }
        self.wait_for_status("stop", |status| status & csts::RDY == 0 && status & csts::CFS == 0)?;
        self.admin.restart(&self.transport, self.capabilities);
        let [commands, completions] = self.admin.addresses();
        self.write_register32(register::AQA, (ADMIN_ENTRIES - 1) << 16 | (ADMIN_ENTRIES - 1))?;
        self.write_register64(register::ASQ, commands)?;
        self.write_register64(register::ACQ, completions)?;
        self.write_register32(register::CC, CC_ENTRY_SIZES | cc::EN)?;
        self.wait_for_status("get ready", |status| status & csts::RDY != 0)
    }

    fn find_namespace(&mut self) -> Result<(), ClientError> {
        let id = match (self.options.namespace, self.namespace.id) {
            (0, 0) => self.active_namespaces()?.first().copied(),
            // The one from before, after a reset.
            (0, id) | (id, _) => Some(id),
        };
        let id = id.ok_or(ClientError::Missing {
            what: "namespace: attach one, or wait until it is attached",
        })?;
        let (before, now) = (self.namespace, self.identify_namespace(id)?);
        if before.id != 0 && before.block_bytes != now.block_bytes {
            return Err(ClientError::Missing {
                what: "namespace of the format from before: make a new client",
            });
        }
        self.namespace = now;
        Ok(())
    }

    pub(super) fn identify_namespace(&mut self, id: u32) -> Result<NvmeNamespaceInfo, ClientError> {
        let raw = self.identify(cns::NAMESPACE.into(), id)?;
        NvmeNamespaceInfo::parse(id, &raw).filter(|namespace| namespace.metadata_bytes == 0).ok_or(
            ClientError::Missing {
                what: "active namespace of that number, in a format without metadata",
            },
        )
    }

    fn ask_for_queues(&mut self) -> Result<(), ClientError> {
        let wanted = u32::from(self.options.queues) - 1;
        let command = NvmeCommand::new(admin_opcode::SET_FEATURES, 0)
            .dword(10, feature::NUMBER_OF_QUEUES.into())
            .dword(11, wanted << 16 | wanted);
        let granted = self.admin.must("Set Features (Number of Queues)", command)?;
        if granted & 0xffff < wanted || granted >> 16 < wanted {
            return Err(ClientError::Missing { what: "that many queues" });
        }
        Ok(())
    }

    /// Creates the completion and the submission queue of pair `id`, as its [`NvmeQueue`] has them
    /// in memory.
    fn create_queue(&mut self, id: u16) -> Result<(), ClientError> {
        let interrupts = self.options.notify == Notify::Interrupt;
        let Some(queue) = self.queue(id - 1) else { return Ok(()) };
        let at = queue.addresses();
        let size = |entries: u32| (entries - 1) << 16 | u32::from(id);
        let vector = if interrupts { INTERRUPTS_ENABLED | u32::from(id) << 16 } else { 0 };
        let command = NvmeCommand::new(admin_opcode::CREATE_COMPLETION_QUEUE, 0)
            .prp(at.completions, 0)
            .dword(10, size(at.completion_entries))
            .dword(11, CONTIGUOUS | vector);
        self.admin.must("Create I/O Completion Queue", command)?;
        let command = NvmeCommand::new(admin_opcode::CREATE_SUBMISSION_QUEUE, 0)
            .prp(at.commands, 0)
            .dword(10, size(at.command_entries))
            .dword(11, CONTIGUOUS | u32::from(id) << 16);
        self.admin.must("Create I/O Submission Queue", command).map(drop)
    }
}

/// Looks whether the device is an NVMe controller that this driver can drive.
pub(super) fn probe(transport: &Transport) -> Result<Probe, ClientError> {
    let device = transport.device_info()?;
    if device.flags & vfio::DEVICE_FLAGS_PCI == 0 || device.regions <= vfio::PCI_CONFIG_REGION_INDEX
    {
        return Err(ClientError::Missing { what: "PCI function" });
    }
    let mut class = [0; 3];
    transport.region_read(vfio::PCI_CONFIG_REGION_INDEX, offset::CLASS as u64, &mut class)?;
    if class != pci::CLASS_NVME {
        return Err(ClientError::Missing { what: "NVMe controller: its class code is another" });
    }
    let bar = transport.region_info(vfio::PCI_BAR0_REGION_INDEX)?;
    let (interrupts, vectors) = match transport.irq_info(vfio::PCI_MSIX_IRQ_INDEX)?.count {
        0 => (vfio::PCI_MSI_IRQ_INDEX, transport.irq_info(vfio::PCI_MSI_IRQ_INDEX)?.count),
        vectors => (vfio::PCI_MSIX_IRQ_INDEX, vectors),
    };
    let mut raw = [0; 8];
    transport.region_read(vfio::PCI_BAR0_REGION_INDEX, register::CAP, &mut raw)?;
    let capabilities = NvmeCapabilities(u64::from_le_bytes(raw));
    if capabilities.min_page_bytes() > PAGE as u64 {
        return Err(ClientError::Missing { what: "memory pages of 4 KiB" });
    }
    Ok(Probe { bar, interrupts, vectors, capabilities })
}

pub(super) fn enable_pci(transport: &Transport) -> Result<(), ClientError> {
    let mut command = [0; 2];
    transport.region_read(vfio::PCI_CONFIG_REGION_INDEX, offset::COMMAND as u64, &mut command)?;
    let command = u16::from_le_bytes(command) | pci::command::MEMORY | pci::command::BUS_MASTER;
    transport.region_write(
        vfio::PCI_CONFIG_REGION_INDEX,
        offset::COMMAND as u64,
        &command.to_le_bytes(),
    )
}
