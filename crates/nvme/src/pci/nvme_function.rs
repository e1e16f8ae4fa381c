//! The PCI function that a controller is: its configuration space, its base address registers, its
//! interrupts.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sidecore_memory::GuestMemory;
use sidecore_reactor::{EventFd, MakeSignal};
use sidecore_ring::nvme::{DoorbellStride, Doorbells};
use sidecore_spec_nvme::pci::CONFIG_BYTES;
use sidecore_units::Nanos;

use crate::controller::{Controller, Limits, Parts};
use crate::handover::Shape;
use crate::inbox::{Inbox, Message, QueueEvent};
use crate::manager::Manager;
use crate::pci::bar::{
    Bar, MAX_QUEUE_PAIRS, MSIX_BAR, MSIX_BAR_BYTES, REGISTERS_BAR, REGISTERS_BAR_BYTES,
};
use crate::pci::config::ConfigSpace;
use crate::pci::msix::Msix;
use crate::pci::{AccessError, BarInfo, Interrupts, MappableArea, PciFunction, Region};
use crate::{
    ControllerWorker, Done, FunctionState, HandOver, HandedOver, Identity, Namespace, QueueHost,
    Statistics, TakeOverError,
};

/// The most rounds of handling replies before the caller returns.
const ROUNDS: usize = 8;

/// The arguments of [`NvmeFunction::new`].
pub struct FunctionSetup {
    /// The name it has in the configuration, for messages.
    pub name: String,
    /// The names and numbers that Identify reports.
    pub identity: Identity,
    /// How many I/O queue pairs the driver may create, at most [`MAX_QUEUE_PAIRS`] and as many as
    /// there are doorbells for.
    pub queue_pairs: u16,
    /// How it interrupts its driver.
    pub interrupts: Interrupts,
    /// The doorbells, which the sidecores look at too, until a client is shown others.
    pub doorbells: Arc<Doorbells>,
    /// Whether the client maps them: then a driver's doorbell is a store that is polled for, the
    /// admin queue's once a millisecond. Otherwise each is a message, and drivers may use shadow
    /// doorbells (Doorbell Buffer Config), 4 bytes apart.
    pub doorbells_are_mapped: bool,
    /// Runs the I/O queues.
    pub host: Arc<dyn QueueHost>,
    /// Reads the activity of the I/O queues.
    pub statistics: Arc<dyn Statistics>,
    /// Manages the subsystem, if this is the physical function.
    pub manager: Option<Arc<dyn Manager>>,
    /// The namespace that is served at first.
    pub namespace: Option<Arc<Namespace>>,
    /// The thread that runs the controller when a queue or the manager has an event for it; `None`
    /// if the caller runs it with [`NvmeFunction::run`].
    pub worker: Option<ControllerWorker>,
    /// Makes what raises the admin queue's interrupts: the thread that serves the client must not
    /// wait for it.
    pub signal: MakeSignal,
}

/// An NVMe controller as a PCI function.
///
/// All that is called here takes its lock, and never for longer than the host needs to start a
/// queue; what waits for requests in flight is answered later.
pub struct NvmeFunction {
    name: String,
    /// As many as there are doorbells for.
    queue_pairs: u16,
    doorbells_are_mapped: bool,
    interrupts: Interrupts,
    /// Time is counted from here.
    start: Instant,
    inbox: Arc<Inbox>,
    core: Mutex<Core>,
}

struct Core {
    controller: Controller,
    config: ConfigSpace,
    msix: Msix,
    /// Receives the exported state.
    reply: Option<HandOver>,
    /// A client may have the doorbells mapped.
    is_shown: bool,
}

impl NvmeFunction {
    /// A function after power on. The host is told what it serves.
    #[must_use]
    pub fn new(setup: FunctionSetup) -> Arc<Self> {
        let FunctionSetup {
            name,
            identity,
            doorbells,
            doorbells_are_mapped,
            host,
            statistics,
            manager,
            ..
        } = setup;
        let interrupts = setup.interrupts;
        let vectors = interrupts.vectors();
        let queue_pairs = doorbells.queue_pairs();
        let limits =
            Limits { queue_pairs: setup.queue_pairs.clamp(1, most_pairs(queue_pairs)), vectors };
        let notifier = setup.worker.as_ref().map(ControllerWorker::notifier);
        let function = Arc::new_cyclic(|this: &Weak<Self>| {
            let this = this.clone();
            let inbox = Inbox::new(Box::new(move || {
                if let Some(notifier) = &notifier {
                    notifier(&this);
                }
            }));
            let parts = Parts {
                identity,
                limits,
                doorbells,
                doorbells_are_mapped,
                host,
                manager,
                statistics,
                inbox: inbox.clone(),
            };
            let core = Core {
                controller: Controller::new(parts),
                config: ConfigSpace::new(interrupts),
                msix: Msix::new(vectors, setup.signal),
                reply: None,
                is_shown: false,
            };
            let (start, core) = (Instant::now(), Mutex::new(core));
            Self { name, queue_pairs, doorbells_are_mapped, interrupts, start, inbox, core }
        });
        if setup.namespace.is_some() {
            function.set_namespace(setup.namespace, Done::ignored());
        }
        function
    }

    /// Handles the messages of queues and manager, and expired timers. Returns the time of the next
    /// run if no event comes before. May wait for a sidecore's turn.
    pub fn run(&self) -> Option<Instant> {
        let deadline = self.enter(|core| core.controller.deadline());
        deadline.and_then(|at| self.start.checked_add(Duration::from(at)))
    }

    /// Sets the served namespace, or that there is none; `done` when the old namespace is not in
    /// use. The change is reported to the driver: a namespace came, went, or has changed, its size
    /// for instance.
    pub fn set_namespace(&self, namespace: Option<Arc<Namespace>>, done: Done) {
        self.enter(|core| core.controller.set_namespace(namespace, done));
    }

    /// Serves a namespace that differs from the present one in its store alone, which the driver
    /// does not notice. The queues are changed apart.
    pub fn adopt_namespace(&self, namespace: Arc<Namespace>) {
        self.enter(|core| core.controller.adopt_namespace(namespace));
    }

    /// Takes a secondary controller online or offline (NVMe base 2.0, 8.26.3), which resets it;
    /// `done` when nothing is in flight. One that is offline cannot be enabled.
    pub fn set_online(&self, online: bool, done: Done) {
        self.enter(|core| core.controller.set_online(online, done));
    }

    /// Whether the controller is in a fatal state (CSTS.CFS), which a reset by the driver ends.
    pub fn is_fatal(&self) -> bool {
        self.enter(|core| core.controller.registers.status.fatal)
    }

    /// How many I/O queue pairs the driver may create from now on, at most [`MAX_QUEUE_PAIRS`];
    /// those that there are stay.
    pub fn set_queue_pairs(&self, queue_pairs: u16) {
        self.enter(|core| {
            core.controller.limits.queue_pairs = queue_pairs.clamp(1, most_pairs(self.queue_pairs))
        });
    }

    /// Queues an event of a queue. Never waits: for sidecores.
    pub fn report(&self, event: QueueEvent) {
        self.inbox.put(Message::Queue(event));
    }

    /// Acts upon the controller, handles the messages that result, and calls the completions that
    /// are ready.
    fn enter<T>(&self, act: impl FnOnce(&mut Core) -> T) -> T {
        let (result, answers, left) = {
            let mut core = self.lock();
            self.handle(&mut core);
            let result = act(&mut core);
            for _ in 0..ROUNDS {
                self.handle(&mut core);
                let now = Nanos::from(self.start.elapsed());
                let has_posted = core.controller.run(now);
                if self.interrupts == Interrupts::Msi {
                    core.obey_masks();
                }
                if has_posted {
                    core.msix.signal_admin();
                }
                // Replies may already be queued: handle those now, the worker thread handles the
                // rest.
                if self.inbox.is_empty() {
                    break;
                }
            }
            let left = core.take_exported(self.shape());
            (result, core.controller.take_answers(), left)
        };
        answers.into_iter().for_each(Done::call);
        if let Some((reply, left)) = left {
            reply(left);
        }
        result
    }

    fn shape(&self) -> Shape {
        Shape {
            queue_pairs: self.queue_pairs,
            doorbells_are_mapped: self.doorbells_are_mapped,
            interrupts: self.interrupts,
        }
    }

    fn handle(&self, core: &mut Core) {
        while let Some(messages) = self.inbox.take() {
            core.controller.handle(messages);
        }
    }

    /// The size of a region; zero if there is no such.
    fn size_bytes(&self, region: Region) -> u64 {
        match region {
            Region::Bar(REGISTERS_BAR) => REGISTERS_BAR_BYTES,
            Region::Bar(MSIX_BAR) if self.interrupts == Interrupts::MsiX => MSIX_BAR_BYTES,
            Region::Bar(_) => 0,
            Region::Config => CONFIG_BYTES as u64,
        }
    }

    /// Nothing that is done under the lock panics half-way.
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    fn reset(&mut self, done: Done) {
        self.config.reset();
        self.msix.reset();
        for vector in 0..self.msix.len() {
            self.update_vector(vector);
        }
        self.controller.reset(done);
    }

    /// The exported state and its receiver, once the export is complete.
    fn take_exported(&mut self, shape: Shape) -> Option<(HandOver, Option<HandedOver>)> {
        let controller = self.controller.take_exported()?;
        let reply = self.reply.take()?;
        let left = controller.and_then(|controller| {
            let (msix, events) = self
                .msix
                .hand_over()
                .inspect_err(|error| tracing::error!(%error, "vectors"))
                .ok()?;
            let config = self.config.values().to_vec();
            let controller = *controller;
            let doorbells = &self.controller.doorbells;
            let file = doorbells.file().try_clone_to_owned();
            let file = file.inspect_err(|error| tracing::error!(%error, "doorbells")).ok()?;
            let doorbell_stride = Some(doorbells.stride().dstrd());
            let state = FunctionState { shape, config, msix, doorbell_stride, controller };
            Some(HandedOver { state, events, doorbells: file })
        });
        Some((reply, left))
    }

    /// Vectors of MSI are masked by the controller's registers (NVMe base 2.0, 3.1.3.3).
    fn obey_masks(&mut self) {
        for vector in self.msix.mask(self.controller.registers.interrupt_mask()) {
            self.update_vector(vector);
        }
    }

    /// Sets the vector's event at its queues.
    fn update_vector(&self, vector: u16) {
        let event = self.msix.duplicate(vector).unwrap_or_else(|error| {
            tracing::warn!(vector, %error, "the queues of an interrupt vector cannot signal it");
            None
        });
        self.controller.host.set_vector(vector, event);
    }

    /// A dword of BAR0 is written.
    fn write_dword(&mut self, offset: u64, value: u32) {
        match Bar::at(offset, self.controller.registers.doorbell_stride()) {
            Bar::Register(offset) => self.controller.write_register(offset, value),
            Bar::Tail(0) => self.controller.write_admin_tail(value),
            Bar::Head(0) => self.controller.write_admin_head(value),
            Bar::Tail(queue) => self.controller.write_tail(queue, value),
            Bar::Head(queue) => self.controller.write_head(queue, value),
            Bar::Hole => self.controller.write_nowhere(),
        }
    }
}

/// As many queue pairs as there are doorbells for, and addresses.
fn most_pairs(queue_pairs: u16) -> u16 {
    queue_pairs.clamp(1, MAX_QUEUE_PAIRS)
}

/// Checks that an access lies in what there is.
fn check(
    region: Region,
    offset_bytes: u64,
    len_bytes: usize,
    size_bytes: u64,
) -> Result<(), AccessError> {
    let len_bytes = len_bytes as u64;
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(AccessError::OutOfRange { region, offset_bytes, len_bytes }),
    }
}

impl PciFunction for NvmeFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn config_bytes(&self) -> u64 {
        CONFIG_BYTES as u64
    }

    fn bar(&self, index: u8) -> Option<BarInfo> {
        let len_bytes = self.size_bytes(Region::Bar(index));
        let mappable = (index == REGISTERS_BAR && self.doorbells_are_mapped).then(|| {
            let core = self.lock();
            let doorbells = &core.controller.doorbells;
            let offset_bytes = doorbells.area_offset_bytes();
            MappableArea {
                offset_bytes,
                len_bytes: (doorbells.len_bytes() as u64)
                    .min(REGISTERS_BAR_BYTES.saturating_sub(offset_bytes)),
                file_offset_bytes: offset_bytes,
            }
        });
        (len_bytes > 0).then_some(BarInfo { len_bytes, mappable })
    }

    fn area_file(&self, index: u8) -> io::Result<OwnedFd> {
        if index != REGISTERS_BAR || !self.doorbells_are_mapped {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut core = self.lock();
        core.is_shown = true;
        core.controller.doorbells.file().try_clone_to_owned()
    }

    fn connect(&self) -> io::Result<()> {
        self.enter(|core| {
            core.controller.begin_client();
            if core.is_shown {
                core.controller.set_doorbells(Arc::new(Doorbells::new(self.queue_pairs)?));
                core.is_shown = false;
            }
            Ok(())
        })
    }

    fn interrupts(&self) -> Interrupts {
        self.interrupts
    }

    fn vectors(&self) -> u16 {
        self.interrupts.vectors()
    }

    fn read(&self, region: Region, offset_bytes: u64, data: &mut [u8]) -> Result<(), AccessError> {
        check(region, offset_bytes, data.len(), self.size_bytes(region))?;
        self.enter(|core| match region {
            // A doorbell's value is undefined when read (NVMe over PCIe transport 1.0, 3.1.2):
            // zeros.
            Region::Bar(REGISTERS_BAR) => core.controller.registers.read(offset_bytes, data),
            Region::Bar(_) => {
                let host = &core.controller.host;
                for (at, byte) in (offset_bytes..).zip(data) {
                    *byte = core.msix.read(at, |vector| host.is_pending(vector));
                }
            }
            Region::Config => {
                let offset = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                core.config.read(offset, data);
            }
        });
        Ok(())
    }

    fn write(&self, region: Region, offset_bytes: u64, data: &[u8]) -> Result<(), AccessError> {
        check(region, offset_bytes, data.len(), self.size_bytes(region))?;
        self.enter(|core| match region {
            Region::Bar(REGISTERS_BAR) => {
                // Only dwords, or pairs of them, are obeyed (NVMe base 2.0, 3.1.1).
                let is_aligned = offset_bytes.is_multiple_of(data.len().max(1) as u64);
                if is_aligned && [4, 8].contains(&data.len()) {
                    for (at, dword) in (offset_bytes..).step_by(4).zip(data.chunks_exact(4)) {
                        let value =
                            u32::from_le_bytes(dword.first_chunk().copied().unwrap_or_default());
                        core.write_dword(at, value);
                    }
                }
            }
            Region::Bar(_) => {
                for vector in core.msix.write(offset_bytes, data) {
                    core.update_vector(vector);
                }
            }
            Region::Config => {
                let offset = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
                if core.config.write(offset, data) == Some(true) {
                    core.reset(Done::ignored());
                }
            }
        });
        Ok(())
    }

    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) -> Result<(), AccessError> {
        if vector >= self.vectors() {
            return Err(AccessError::NoSuchVector { vector: vector.into() });
        }
        let not_an_event = |_| AccessError::NotAnEvent { vector: vector.into() };
        let event = event.map(EventFd::from_peer).transpose().map_err(not_an_event)?;
        self.enter(|core| {
            core.msix.set(vector, event);
            core.update_vector(vector);
        });
        Ok(())
    }

    fn signal(&self, vector: u16) -> Result<(), AccessError> {
        if vector >= self.vectors() {
            return Err(AccessError::NoSuchVector { vector: vector.into() });
        }
        self.lock().msix.signal(vector);
        Ok(())
    }

    fn set_memory(&self, memory: GuestMemory, done: Done) {
        self.enter(|core| core.controller.set_memory(memory, done));
    }

    fn reset(&self, done: Done) {
        self.enter(|core| core.reset(done));
    }

    fn hand_over(&self, reply: HandOver) {
        self.enter(|core| {
            core.reply = Some(reply);
            core.controller.hand_over();
        });
    }

    fn take_over(&self, from: HandedOver, memory: GuestMemory) -> Result<(), TakeOverError> {
        let HandedOver { state, events, doorbells } = from;
        let FunctionState { shape, config, msix, doorbell_stride, controller } = state;
        if shape != self.shape() {
            return Err(TakeOverError::Changed {
                what: "number of queues, way of idling, or kind of interrupts",
            });
        }
        let stride =
            doorbell_stride.map_or(Some(DoorbellStride::HalfPage), DoorbellStride::from_dstrd);
        let doorbells = stride
            .and_then(|stride| Doorbells::from_file(doorbells, self.queue_pairs, stride).ok());
        let doorbells = Arc::new(doorbells.ok_or(TakeOverError::Damaged { what: "doorbells" })?);
        let now = Nanos::from(self.start.elapsed());
        for (vector, event) in events {
            self.set_vector(vector, Some(event))
                .map_err(|_| TakeOverError::Damaged { what: "interrupts" })?;
        }
        self.enter(|core| {
            core.is_shown = true;
            core.config.take_over(&config);
            core.msix.take_over(&msix);
            if self.interrupts == Interrupts::Msi {
                // Before queues are started, which would signal what is masked.
                core.msix.mask(controller.registers.interrupt_mask());
            }
            for vector in 0..core.msix.len() {
                core.update_vector(vector);
            }
            core.controller.take_over(controller, memory, doorbells, now)
        })
    }
}

impl std::fmt::Debug for NvmeFunction {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("NvmeFunction").field("name", &self.name).finish_non_exhaustive()
    }
}
