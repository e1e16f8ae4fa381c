//! A driver that sends what SPDK's NVMe driver over vfio-user sends, byte for byte (SPDK 26.09:
//! lib/vfio_user/host and lib/nvme/nvme_vfio_user.c): payloads padded to `argsz`, message
//! identifiers that are all zero, a descriptor with DMA_UNMAP too, and every doorbell, the admin
//! queue's among them, stored to the page at 0x1000 of BAR0.

use sidecore_driver::RawMessage;
use sidecore_kit::wait;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_ring::driver::nvme::DoorbellWords;

use super::*;

const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const DMA_UNMAP: u16 = 3;
const GET_INFO: u16 = 4;
const GET_REGION_INFO: u16 = 5;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;

const BAR0: u32 = 0;
const CONFIG: u32 = 7;

/// The driver's memory: its own addresses are what the device is told.
const MEMORY_AT: u64 = 0x2000_0020_0000;
const MEMORY_BYTES: u64 = 2 << 20;
const ADMIN_COMMANDS: u64 = 0;
const ADMIN_COMPLETIONS: u64 = 0x1_0000;
const COMMANDS: u64 = 0x2_0000;
const COMPLETIONS: u64 = 0x3_0000;
const DATA: u64 = 0x4_0000;
/// The driver's own numbers of entries.
const ADMIN_ENTRIES: u32 = 256;
const ENTRIES: u32 = 256;

/// One queue pair of the driver's.
struct Pair {
    id: u16,
    commands_at: u64,
    completions_at: u64,
    entries: u32,
    tail: u32,
    head: u32,
    phase: u16,
}

impl Pair {
    fn new(id: u16, commands_at: u64, completions_at: u64, entries: u32) -> Self {
        Self { id, commands_at, completions_at, entries, tail: 0, head: 0, phase: 1 }
    }
}

struct Driver {
    transport: Transport,
    memory: GuestMemory,
    file: std::fs::File,
    doorbells: Option<DoorbellWords>,
    stride_bytes: usize,
}

impl Driver {
    fn connect(socket: &Path) -> Self {
        let file = std::fs::File::from(
            rustix::fs::memfd_create("driver", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
        );
        file.set_len(MEMORY_BYTES).unwrap();
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: MEMORY_BYTES,
            file: file.try_clone().unwrap().into(),
            file_offset_bytes: 0,
        }])
        .unwrap();
        let transport = Transport::connect_raw(socket, PATIENCE).unwrap();
        Self { transport, memory, file, doorbells: None, stride_bytes: 0 }
    }

    /// Sends a request, all of whose header but command and size is zero, and takes the reply.
    fn ask(&self, command: u16, payload: &[u8], with_file: bool) -> RawMessage {
        let mut message = vec![0; 16];
        message[2..4].copy_from_slice(&command.to_le_bytes());
        message[4..8].copy_from_slice(&(16 + payload.len() as u32).to_le_bytes());
        message.extend_from_slice(payload);
        let files = if with_file { vec![self.file.as_fd()] } else { Vec::new() };
        self.transport.send_raw(&message, &files).unwrap();
        let reply = self.transport.receive_raw().unwrap();
        assert_eq!((reply.command, reply.flags & 0xF, reply.error), (command, 1, 0), "{reply:?}");
        reply
    }

    /// VERSION without version data, DEVICE_GET_INFO, and each region's info with a payload of
    /// 4,064 bytes.
    fn set_up(&mut self) {
        assert_eq!(self.ask(VERSION, &[0, 0, 1, 0], false).body[..2], [0, 0]);
        let info = self.ask(GET_INFO, &words(&[16, 0, 0, 0]), false);
        let regions = u32_at(&info.body, 8);
        assert_eq!(regions, 9);
        for index in 0..regions {
            let mut request = vec![0; 4064];
            request[..12].copy_from_slice(&words(&[4064, 0, index]));
            let mut info = self.ask(GET_REGION_INFO, &request, false);
            assert!(info.body.len() <= 4096);
            let is_mappable = u32_at(&info.body, 4) & 1 << 2 != 0;
            assert_eq!(
                (info.files.len(), is_mappable),
                (usize::from(index == BAR0), index == BAR0)
            );
            if let Some(file) = info.files.pop() {
                self.map_area(&info.body, file);
            }
        }
        let map = [words(&[32, 3]), longs(&[0, MEMORY_AT, MEMORY_BYTES])].concat();
        self.ask(DMA_MAP, &map, true);
    }

    /// Maps the one area whole, and takes the page at 0x1000 of it.
    fn map_area(&mut self, info: &[u8], file: std::os::fd::OwnedFd) {
        let (region_bytes, region_offset, capability) =
            (u64_at(info, 16), u64_at(info, 24), u32_at(info, 12) as usize);
        assert_eq!(
            (u32_at(info, capability), u32_at(info, capability + 8)),
            (1 | 1 << 16, 1),
            "one sparse area"
        );
        let (offset, len_bytes) = (u64_at(info, capability + 16), u64_at(info, capability + 24));
        assert!(
            offset <= 0x1000 && offset + len_bytes >= 0x2000 && offset + len_bytes <= region_bytes
        );
        let area = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(offset),
            user_address: UserAddress(offset),
            len_bytes,
            file,
            file_offset_bytes: region_offset + offset,
        }]);
        let page = area.unwrap().guest_window(GuestAddress(0x1000), 0x1000, 4096).unwrap();
        self.doorbells = Some(DoorbellWords::new(page).unwrap());
    }

    fn region_read(&self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let reply =
            self.ask(REGION_READ, &[longs(&[offset]), words(&[region, count])].concat(), false);
        reply.body[16..].to_vec()
    }

    fn region_write(&self, region: u32, offset: u64, data: &[u8]) {
        let head = [longs(&[offset]), words(&[region, data.len() as u32])].concat();
        self.ask(REGION_WRITE, &[&head[..], data].concat(), false);
    }

    /// Bus mastering on, interrupts off, and the controller enabled with its admin queue.
    fn enable(&mut self) -> Pair {
        let command = self.region_read(CONFIG, 4, 2);
        self.region_write(CONFIG, 4, &[command[0] | 0x04, command[1] | 0x04]);
        let capabilities = u64_at(&self.region_read(BAR0, register::CAP, 8), 0);
        self.stride_bytes = 4 << (capabilities >> 32 & 0xF);
        let admin = Pair::new(0, ADMIN_COMMANDS, ADMIN_COMPLETIONS, ADMIN_ENTRIES);
        self.region_write(BAR0, register::ASQ, &longs(&[MEMORY_AT + ADMIN_COMMANDS]));
        self.region_write(BAR0, register::ACQ, &longs(&[MEMORY_AT + ADMIN_COMPLETIONS]));
        let entries = ADMIN_ENTRIES - 1;
        self.region_write(BAR0, register::AQA, &words(&[entries << 16 | entries]));
        self.region_write(BAR0, register::CC, &words(&[1 | 6 << 16 | 4 << 20]));
        self.until("it is ready", |driver| {
            u32_at(&driver.region_read(BAR0, register::CSTS, 4), 0) & 1 != 0
        });
        admin
    }

    /// Puts a command into a queue, stores its doorbell, and polls for the completion: its result.
    fn run(&self, pair: &mut Pair, command: NvmeCommand) -> u32 {
        let hint = &mut RegionHint::default();
        let at = pair.commands_at + u64::from(pair.tail) * 64;
        self.memory.write_slice(GuestAddress(at), &command.bytes(), hint).unwrap();
        pair.tail = (pair.tail + 1) % pair.entries;
        let doorbell = 2 * usize::from(pair.id) * self.stride_bytes;
        assert!(doorbell + self.stride_bytes < 0x1000, "queue {} is not on the page", pair.id);
        let doorbells = self.doorbells.as_ref().unwrap();
        doorbells.store(doorbell, pair.tail);
        let mut entry = [0; 16];
        self.until("it completes", |driver| {
            let at = GuestAddress(pair.completions_at + u64::from(pair.head) * 16);
            driver.memory.read_slice(at, &mut entry, &mut RegionHint::default()).unwrap();
            u16::from_le_bytes([entry[14], entry[15]]) & 1 == pair.phase
        });
        pair.head += 1;
        if pair.head == pair.entries {
            (pair.head, pair.phase) = (0, pair.phase ^ 1);
        }
        doorbells.store(doorbell + self.stride_bytes, pair.head);
        assert_eq!(u16::from_le_bytes([entry[14], entry[15]]) >> 1, 0, "{command:?}");
        u32_at(&entry, 0)
    }

    fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        wait::until(what, PATIENCE, || is_so(self));
    }

    fn create_pair(&self, admin: &mut Pair, id: u16) -> Pair {
        let place = u64::from(id % 2) * 0x8000;
        let (commands_at, completions_at) = (COMMANDS + place, COMPLETIONS + place);
        let size = (ENTRIES - 1) << 16 | u32::from(id);
        let completion_queue = NvmeCommand::new(admin_opcode::CREATE_COMPLETION_QUEUE, 0)
            .prp(MEMORY_AT + completions_at, 0)
            .dword(10, size)
            .dword(11, 1);
        let submission_queue = NvmeCommand::new(admin_opcode::CREATE_SUBMISSION_QUEUE, 0)
            .prp(MEMORY_AT + commands_at, 0)
            .dword(10, size)
            .dword(11, u32::from(id) << 16 | 1);
        self.run(admin, completion_queue);
        self.run(admin, submission_queue);
        Pair::new(id, commands_at, completions_at, ENTRIES)
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Attaches, identifies, writes and reads through the last and the first queue of the page, and
/// detaches.
#[test]
fn a_driver_that_rings_everything_on_one_page_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let store = StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 };
    let mut spec = spec(directory.path(), IdleMode::Poll, 512, store);
    spec.devices[0].queues = 31;
    spec.devices[0].sidecores = vec!["sc0".to_owned()];
    let function = Function::start(directory, &spec);
    let mut driver = Driver::connect(&function.socket());
    driver.set_up();
    let mut admin = driver.enable();
    let identify =
        NvmeCommand::new(admin_opcode::IDENTIFY, 0).prp(MEMORY_AT + DATA, 0).dword(10, 1);
    driver.run(&mut admin, identify);
    let mut serial = [0; 11];
    driver
        .memory
        .read_slice(GuestAddress(DATA + 4), &mut serial, &mut RegionHint::default())
        .unwrap();
    assert_eq!(&serial, b"driver-test");
    let queues =
        NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, 7).dword(11, 30 << 16 | 30);
    assert_eq!(driver.run(&mut admin, queues), 30 << 16 | 30);

    for id in [31, 1] {
        let mut pair = driver.create_pair(&mut admin, id);
        let data = pattern(u64::from(id), 4096);
        let hint = &mut RegionHint::default();
        // Once round the queue.
        for block in 0..u64::from(ENTRIES) {
            driver.memory.write_slice(GuestAddress(DATA), &data, hint).unwrap();
            let transfer = |opcode, at| {
                NvmeCommand::new(opcode, 1)
                    .prp(MEMORY_AT + at, 0)
                    .dword(10, block as u32 * 8)
                    .dword(12, 7)
            };
            driver.run(&mut pair, transfer(io_opcode::WRITE, DATA));
            driver.run(&mut pair, transfer(io_opcode::READ, DATA + 4096));
            let mut back = vec![0; 4096];
            driver.memory.read_slice(GuestAddress(DATA + 4096), &mut back, hint).unwrap();
            assert!(back == data);
        }
    }
    let unmap = [words(&[24, 0]), longs(&[MEMORY_AT, MEMORY_BYTES])].concat();
    driver.ask(DMA_UNMAP, &unmap, true);
}
