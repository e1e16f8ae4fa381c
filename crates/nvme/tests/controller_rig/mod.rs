//! A driver's view of a function: guest memory, an admin queue, and a host that only keeps books.
#![allow(dead_code)]

pub mod host;
pub mod manager;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_block::{Geometry, RamStore};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_nvme::{
    Activity, Command, ControllerWorker, Done, FunctionSetup, Identity, Interrupts, Manager,
    Namespace, NvmeFunction, PciFunction, Region, Status,
};
use sidecore_reactor::EventFd;
use sidecore_ring::nvme::Doorbells;

use host::FakeHost;

/// The guest's memory begins here, and is so large.
pub const BASE: u64 = 0x10_0000;
pub const MEMORY_BYTES: u64 = 4 << 20;

/// Where things are in it.
pub const SUBMISSION: u64 = BASE;
pub const COMPLETION: u64 = BASE + 0x1_0000;
pub const DATA: u64 = BASE + 0x2_0000;
pub const QUEUES: u64 = BASE + 0x10_0000;

/// Entries of the admin queues.
pub const ENTRIES: u32 = 32;

pub const CC: u64 = 0x14;
pub const CSTS: u64 = 0x1C;

/// Enable, with entries of 64 and 16 bytes.
pub const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;

/// A completion, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub id: u16,
    pub result: u32,
    pub status: Status,
    pub sq_head: u16,
}

pub struct Rig {
    pub function: Arc<NvmeFunction>,
    pub host: Arc<FakeHost>,
    pub doorbells: Arc<Doorbells>,
    pub memory: GuestMemory,
    file: OwnedFd,
    stride: u64,
    tail: u32,
    head: u32,
    phase: u16,
    next_id: u16,
    entries: u32,
}

pub fn namespace(megabytes: u64, block_bytes: u32) -> Arc<Namespace> {
    let store = RamStore::new(Geometry::new(megabytes << 20, block_bytes)).unwrap();
    Arc::new(Namespace {
        id: 1,
        store: Arc::new(store),
        block_bytes,
        nguid: [0x5E; 16],
        uuid: [0x5F; 16],
    })
}

/// The properties in which the functions of the tests differ.
pub struct Options {
    pub mapped: bool,
    pub interrupts: Interrupts,
    pub manager: Option<Arc<dyn Manager>>,
    pub worker: Option<ControllerWorker>,
    pub namespace: Option<Arc<Namespace>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mapped: true,
            interrupts: Interrupts::MsiX,
            manager: None,
            worker: None,
            namespace: Some(namespace(1, 512)),
        }
    }
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Options::default())
    }

    /// A function that has memory and is not enabled.
    pub fn with(options: Options) -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY_BYTES).unwrap();
        let memory = GuestMemory::map(vec![region(&file, BASE, MEMORY_BYTES, 0)]).unwrap();
        let host = Arc::new(FakeHost::default());
        let doorbells = Arc::new(Doorbells::new(64).unwrap());
        let mapped = options.mapped;
        let statistics =
            || Activity { read_bytes: 512_001, write_commands: 7, ..Activity::default() };
        let function = NvmeFunction::new(FunctionSetup {
            name: "test".to_owned(),
            identity: Identity {
                serial: "SERIAL".to_owned(),
                model: "Sidecore".to_owned(),
                subsystem_name: "nqn.2014-08.org.example:test".to_owned(),
                controller_id: 1,
            },
            queue_pairs: 64,
            interrupts: options.interrupts,
            doorbells: doorbells.clone(),
            doorbells_are_mapped: mapped,
            host: host.clone(),
            statistics: Arc::new(statistics),
            manager: options.manager,
            namespace: options.namespace,
            worker: options.worker,
            signal: EventFd::peer_signal,
        });
        function.set_memory(memory.clone(), Done::ignored());
        let stride = if mapped { 64 } else { 4 };
        Self {
            function,
            host,
            doorbells,
            memory,
            file,
            stride,
            tail: 0,
            head: 0,
            phase: 1,
            next_id: 0,
            entries: ENTRIES,
        }
    }

    /// A function whose controller is enabled.
    pub fn ready() -> Self {
        Self::ready_with(Options::default())
    }

    pub fn ready_with(options: Options) -> Self {
        let mut rig = Self::with(options);
        rig.enable();
        assert_eq!(rig.read32(CSTS), 1, "it is ready at once");
        rig
    }

    /// As Linux' nvme_pci_configure_admin_queue does.
    pub fn enable(&mut self) {
        self.enable_with(ENTRIES);
    }

    pub fn enable_with(&mut self, entries: u32) {
        self.fill(SUBMISSION, 0, 0x2_0000);
        (self.tail, self.head, self.phase, self.entries) = (0, 0, 1, entries);
        self.write32(0x24, (entries - 1) << 16 | (entries - 1));
        self.write64(0x28, SUBMISSION);
        self.write64(0x30, COMPLETION);
        self.write32(CC, ENABLE);
    }

    pub fn read32(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.function.read(Region::Bar(0), offset, &mut data).unwrap();
        u32::from_le_bytes(data)
    }

    pub fn write32(&self, offset: u64, value: u32) {
        self.function.write(Region::Bar(0), offset, &value.to_le_bytes()).unwrap();
    }

    pub fn write64(&self, offset: u64, value: u64) {
        self.function.write(Region::Bar(0), offset, &value.to_le_bytes()).unwrap();
    }

    pub fn tail_doorbell(&self, queue: u64) -> u64 {
        0x1000 + 2 * queue * self.stride
    }

    pub fn head_doorbell(&self, queue: u64) -> u64 {
        self.tail_doorbell(queue) + self.stride
    }

    pub fn poke(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(GuestAddress(address), bytes, &mut RegionHint::default()).unwrap();
    }

    pub fn peek(&self, address: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.memory
            .read_slice(GuestAddress(address), &mut bytes, &mut RegionHint::default())
            .unwrap();
        bytes
    }

    pub fn fill(&self, address: u64, byte: u8, len_bytes: usize) {
        self.poke(address, &vec![byte; len_bytes]);
    }

    /// A region of the guest's memory, for another table.
    pub fn region(&self, address: u64, len_bytes: u64) -> RegionSpec {
        region(&self.file, address, len_bytes, address - BASE)
    }

    /// Shrinks the file behind the guest's memory to nothing.
    pub fn truncate(&self) {
        ftruncate(&self.file, 0).unwrap();
    }

    /// Puts a command into the queue and writes the doorbell; its identifier.
    pub fn submit(&mut self, command: Command) -> u16 {
        let id = self.queue(command);
        self.ring();
        id
    }

    /// Puts a command into the queue.
    pub fn queue(&mut self, command: Command) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        let dword = command.dword(0) & 0xFFFF | u32::from(self.next_id) << 16;
        self.poke(SUBMISSION + u64::from(self.tail) * 64, command.with_dword(0, dword).bytes());
        self.tail = (self.tail + 1) % self.entries;
        self.next_id
    }

    /// Writes the tail doorbell.
    pub fn ring(&self) {
        self.write32(self.tail_doorbell(0), self.tail);
    }

    /// The next completion, if there is one; the head doorbell is not written.
    pub fn peek_answer(&mut self) -> Option<Answer> {
        let entry = self.peek(COMPLETION + u64::from(self.head) * 16, 16);
        let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        if word(14) & 1 != self.phase {
            return None;
        }
        self.head += 1;
        if self.head == self.entries {
            (self.head, self.phase) = (0, self.phase ^ 1);
        }
        let result = u32::from_le_bytes(entry[..4].try_into().unwrap());
        assert_eq!(word(10), 0, "the admin queue is number 0");
        Some(Answer {
            id: word(12),
            result,
            status: Status::from_field(word(14)),
            sq_head: word(8),
        })
    }

    /// The next completion, if there is one.
    pub fn answer(&mut self) -> Option<Answer> {
        let answer = self.peek_answer()?;
        self.write32(self.head_doorbell(0), self.head);
        Some(answer)
    }

    /// Submits a command that completes at once.
    pub fn admin(&mut self, command: Command) -> Answer {
        let id = self.submit(command);
        let answer = self.answer().expect("no completion");
        assert_eq!(answer.id, id);
        answer
    }

    /// A command that works; its result.
    #[track_caller]
    pub fn ok(&mut self, command: Command) -> u32 {
        let answer = self.admin(command);
        assert_eq!(answer.status, Status::SUCCESS, "{command:?}");
        answer.result
    }

    /// A command that is refused.
    #[track_caller]
    pub fn refused(&mut self, command: Command, status: Status) {
        let answer = self.admin(command);
        assert_eq!(answer.status, status.more(), "{command:?}");
    }

    /// Identify, into [`DATA`].
    pub fn identify(&mut self, structure: u32, nsid: u32) -> Vec<u8> {
        self.fill(DATA, 0xAA, 4096);
        self.ok(identify(structure, nsid));
        self.peek(DATA, 4096)
    }

    /// Get Log Page, into [`DATA`].
    pub fn log_page(&mut self, page: u32, len_bytes: u32) -> Vec<u8> {
        self.fill(DATA, 0xAA, 8192);
        self.ok(get_log_page(page, len_bytes));
        self.peek(DATA, len_bytes as usize)
    }

    /// Creates an I/O completion queue of 64 entries.
    pub fn create_completion_queue(&mut self, id: u16) -> Answer {
        self.admin(create_completion_queue(id))
    }

    /// Creates a submission queue of 64 entries for the completion queue of the same number.
    pub fn create_pair(&mut self, id: u16) {
        self.ok(create_completion_queue(id));
        self.ok(create_submission_queue(id, id));
    }

    pub fn status(&self) -> u32 {
        self.read32(CSTS)
    }
}

fn region(file: &OwnedFd, address: u64, len_bytes: u64, file_offset_bytes: u64) -> RegionSpec {
    RegionSpec {
        guest_address: GuestAddress(address),
        user_address: UserAddress(address),
        len_bytes,
        file: file.try_clone().unwrap(),
        file_offset_bytes,
    }
}

pub fn identify(structure: u32, nsid: u32) -> Command {
    Command::build(0x06, 0, nsid).with_prps(DATA, 0).with_dword(10, structure)
}

pub fn get_log_page(page: u32, len_bytes: u32) -> Command {
    let dwords = len_bytes / 4 - 1;
    Command::build(0x02, 0, 0).with_prps(DATA, DATA + 4096).with_dword(10, page | dwords << 16)
}

pub fn set_features(feature: u32, value: u32) -> Command {
    Command::build(0x09, 0, 0).with_dword(10, feature).with_dword(11, value)
}

pub fn get_features(feature: u32, value: u32) -> Command {
    Command::build(0x0A, 0, 0).with_dword(10, feature).with_dword(11, value)
}

/// With the interrupt vector of its number, modulo 64.
pub fn create_completion_queue(id: u16) -> Command {
    let vector = u32::from(id % 64);
    Command::build(0x05, 0, 0)
        .with_prps(QUEUES + u64::from(id) * 8192, 0)
        .with_dword(10, 63 << 16 | u32::from(id))
        .with_dword(11, vector << 16 | 0b11)
}

pub fn create_submission_queue(id: u16, completion_queue: u16) -> Command {
    Command::build(0x01, 0, 0)
        .with_prps(QUEUES + u64::from(id) * 8192 + 4096, 0)
        .with_dword(10, 63 << 16 | u32::from(id))
        .with_dword(11, u32::from(completion_queue) << 16 | 1)
}

pub fn delete_submission_queue(id: u16) -> Command {
    Command::build(0x00, 0, 0).with_dword(10, id.into())
}

pub fn delete_completion_queue(id: u16) -> Command {
    Command::build(0x04, 0, 0).with_dword(10, id.into())
}

pub fn event_request() -> Command {
    Command::build(0x0C, 0, 0)
}
