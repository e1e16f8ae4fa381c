//! The driver against this project's own NVMe functions, over their sockets, with sidecores of
//! their own.

mod handover;
mod one_page;
mod stale;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sidecore_assembly::Assembly;
use sidecore_assembly::spec::{
    DeviceSpec, FileOptions, FrontEndSpec, IdleMode, Interrupts, Nanos, NvmeSpec, SidecoreSpec,
    Spec, StoreKind, StoreSpec,
};
use sidecore_driver::{
    ClientError, DataPointers, Notify, NvmeClient, NvmeCommand, NvmeCompletion, NvmeOptions,
    NvmeQueue, NvmeStatus, Piece, Slot, Transport, admin_opcode, io_opcode, register,
};
use sidecore_kit::guest::{complete, complete_all};
use sidecore_kit::wait;
use sidecore_units::Sector;

const DISK_BYTES: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

struct Function {
    assembly: Assembly,
    directory: tempfile::TempDir,
}

fn spec(directory: &Path, idle: IdleMode, block_bytes: u32, kind: StoreKind) -> Spec {
    Spec {
        sidecores: ["sc0", "sc1"]
            .map(|name| SidecoreSpec { name: name.to_owned(), cpu: None })
            .to_vec(),
        stores: vec![StoreSpec::new("disk", kind)],
        controllers: Vec::new(),
        devices: vec![DeviceSpec {
            front_end: FrontEndSpec::Nvme(NvmeSpec {
                block_bytes: Some(block_bytes),
                ..NvmeSpec::default()
            }),
            name: "disk".to_owned(),
            store: "disk".to_owned(),
            socket: directory.join("disk.sock"),
            queues: 4,
            sidecores: vec!["sc0".to_owned(), "sc1".to_owned()],
            idle,
            serial: Some("driver-test".to_owned()),
            ..DeviceSpec::default()
        }],
        ..Spec::default()
    }
}

/// The settings that the function alone has.
fn own(spec: &mut Spec) -> &mut NvmeSpec {
    match &mut spec.devices[0].front_end {
        FrontEndSpec::Nvme(own) => own,
        other => panic!("{other:?}"),
    }
}

impl Function {
    fn new(idle: IdleMode, block_bytes: u32) -> Self {
        Self::over(idle, block_bytes, |_| StoreKind::Ram {
            size_bytes: DISK_BYTES,
            block_bytes: 512,
        })
    }

    /// In front of a store, which may have a file in the directory.
    fn over(idle: IdleMode, block_bytes: u32, kind: impl FnOnce(&Path) -> StoreKind) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kind = kind(directory.path());
        let spec = spec(directory.path(), idle, block_bytes, kind);
        Self::start(directory, &spec)
    }

    fn start(directory: tempfile::TempDir, spec: &Spec) -> Self {
        Self { assembly: Assembly::start(spec).unwrap(), directory }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("disk.sock")
    }

    fn connect(&self, options: &NvmeOptions) -> NvmeClient {
        NvmeClient::connect(self.socket(), &NvmeOptions { huge_pages: false, ..options.clone() })
            .unwrap()
    }
}

const ADAPTIVE: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(50) };

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 7 + seed * 13 + at / 512) as u8).collect()
}

fn write_and_read(queue: &mut NvmeQueue, slot: Slot, sector: Sector, len: usize, seed: u64) {
    let data = pattern(seed, len);
    queue.write_data(slot, 0, &data);
    queue.submit_write(slot, sector, len as u32).unwrap();
    assert_eq!(complete(queue), NvmeCompletion { slot, status: NvmeStatus::OK });
    queue.write_data(slot, 0, &vec![0xee; len]);
    queue.submit_read(slot, sector, len as u32).unwrap();
    assert_eq!(complete(queue), NvmeCompletion { slot, status: NvmeStatus::OK });
    let mut back = vec![0; len];
    assert_eq!(queue.read_data(slot, 0, &mut back), len);
    assert!(back == data, "what was written is not what was read");
}

/// Identify, of namespace 1.
fn identify(client: &mut NvmeClient, structure: u32) -> Vec<u8> {
    let mut data = vec![0; 4096];
    let command = NvmeCommand::new(admin_opcode::IDENTIFY, 1).dword(10, structure);
    assert!(client.admin().read(command, &mut data).unwrap().status.is_ok());
    data
}

/// Its UUID is of version 8 and the same after a restart; and what deallocated blocks read as is
/// the store's truth.
#[test]
fn a_namespace_says_what_it_is() {
    let ram = |_: &Path| StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 };
    let null = |_: &Path| StoreKind::Null { size_bytes: DISK_BYTES, block_bytes: 512 };
    let kinds = [(ram as fn(&Path) -> StoreKind, 0b1001), (null, 0), (file, 0b1001)];
    let mut uuids = Vec::new();
    for (kind, deallocation) in kinds {
        let mut seen = Vec::new();
        for _ in 0..2 {
            let function = Function::over(ADAPTIVE, 512, kind);
            let mut client = function.connect(&NvmeOptions::default());
            assert_eq!(identify(&mut client, 0)[33], deallocation, "DLFEAT");
            let list = identify(&mut client, 3);
            assert_eq!(list[20..24], [3, 16, 0, 0], "the UUID is behind the NGUID");
            let uuid = list[24..40].to_vec();
            assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (8, 0b10));
            seen.push(uuid);
        }
        assert_eq!(seen[0], seen[1]);
        uuids.append(&mut seen);
    }
    assert_ne!(uuids[0], uuids[2]);
}

#[test]
fn a_function_with_msi_interrupts_as_well() {
    let directory = tempfile::tempdir().unwrap();
    let store = StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 };
    let mut spec = spec(directory.path(), ADAPTIVE, 512, store);
    own(&mut spec).interrupts = Interrupts::Msi;
    let function = Function::start(directory, &spec);
    let mut client = function.connect(&NvmeOptions {
        queues: 4,
        notify: Notify::Interrupt,
        ..NvmeOptions::default()
    });
    for index in 0..4 {
        let queue = client.queue(index).unwrap();
        let slot = queue.take_slot().unwrap();
        write_and_read(queue, slot, Sector(64), 512, u64::from(index));
        queue.take_calls();
        assert!(queue.counters().calls > 0);
    }
}

#[test]
fn every_way_to_drive_a_queue_moves_the_same_bytes() {
    for idle in [IdleMode::Poll, ADAPTIVE, IdleMode::Interrupt] {
        let function = Function::new(idle, 512);
        for notify in [Notify::Polled, Notify::Interrupt] {
            for (pointers, slot_bytes, shadow_doorbells, posted_doorbells, regions) in [
                (DataPointers::Prp, 4096, true, true, 1),
                (DataPointers::Prp, 8192, false, false, 1),
                (DataPointers::Sgl, 64 << 10, true, false, 2),
                (DataPointers::Prp, 1 << 20, false, true, 3),
            ] {
                let options = NvmeOptions {
                    queues: 2,
                    slots: 5,
                    notify,
                    pointers,
                    slot_bytes,
                    shadow_doorbells,
                    posted_doorbells,
                    regions,
                    ..NvmeOptions::default()
                };
                let mut client = function.connect(&options);
                assert_eq!(client.namespace().len_bytes(), DISK_BYTES);
                assert_eq!(client.controller().serial, "driver-test");
                for index in 0..2 {
                    let queue = client.queue(index).unwrap();
                    assert_eq!(queue.has_mapped_doorbells(), idle == IdleMode::Poll);
                    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
                    assert_eq!(slots.len(), 5);
                    for slot in slots {
                        for len in [512, slot_bytes as usize, slot_bytes as usize / 2] {
                            write_and_read(queue, slot, Sector(64), len, slot.index() as u64);
                        }
                    }
                    queue.take_calls();
                    let counters = queue.counters();
                    assert_eq!((counters.requests, counters.completions), (30, 30));
                    if idle == IdleMode::Poll {
                        assert_eq!(counters.kicks, 0, "{counters:?}");
                    }
                    if notify == Notify::Interrupt {
                        assert!(counters.calls > 0, "{counters:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn full_queues_side_by_side_in_threads_of_their_own() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let function = Function::new(idle, 4096);
        let options = NvmeOptions {
            queues: 4,
            slots: 64,
            notify: Notify::Interrupt,
            ..NvmeOptions::default()
        };
        let mut client = function.connect(&options);
        std::thread::scope(|scope| {
            for index in 0..4 {
                let mut queue = client.take_queue(index).unwrap();
                scope.spawn(move || {
                    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
                    assert_eq!(slots.len(), 64);
                    for round in 0..20_u64 {
                        for slot in &slots {
                            let sector = (u64::from(index) * 64 + slot.index() as u64) * 8;
                            queue.write_data(*slot, 0, &sector.wrapping_add(round).to_le_bytes());
                            queue.submit_write(*slot, Sector(sector), 4096).unwrap();
                        }
                        assert!(
                            complete_all(&mut queue, 64)
                                .iter()
                                .all(|completion| completion.status.is_ok())
                        );
                        for slot in &slots {
                            queue.write_data(*slot, 0, &[0; 8]);
                            let sector = (u64::from(index) * 64 + slot.index() as u64) * 8;
                            queue.submit_read(*slot, Sector(sector), 4096).unwrap();
                        }
                        assert!(
                            complete_all(&mut queue, 64)
                                .iter()
                                .all(|completion| completion.status.is_ok())
                        );
                        for slot in &slots {
                            let mut back = [0; 8];
                            queue.read_data(*slot, 0, &mut back);
                            let sector = (u64::from(index) * 64 + slot.index() as u64) * 8;
                            assert_eq!(u64::from_le_bytes(back), sector + round);
                        }
                    }
                    assert_eq!(queue.in_flight(), 0);
                });
            }
        });
    }
}

#[test]
fn the_other_operations() {
    let function = Function::new(IdleMode::Poll, 512);
    for pointers in [DataPointers::Prp, DataPointers::Sgl] {
        let pieces = if pointers == DataPointers::Sgl { 3 } else { 1 };
        let options =
            NvmeOptions { slots: 2, pointers, max_pieces: pieces, ..NvmeOptions::default() };
        let mut client = function.connect(&options);
        let queue = client.queue(0).unwrap();
        let (slot, other) = (queue.take_slot().unwrap(), queue.take_slot().unwrap());
        write_and_read(queue, slot, Sector(24), 4096, 3);
        queue.submit_flush(slot).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.submit_verify(slot, Sector(24), 8).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.submit_compare(slot, Sector(24), 4096).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.write_data(slot, 4095, &[0x55]);
        queue.submit_compare(slot, Sector(24), 4096).unwrap();
        assert_eq!(complete(queue).status.name(), "Compare Failure");

        // Fused: refused first, then done.
        queue.write_data(slot, 0, &[1; 512]);
        queue.write_data(other, 0, &[2; 512]);
        queue.submit_compare_and_write(slot, other, Sector(24), 512).unwrap();
        let names: Vec<&str> =
            complete_all(queue, 2).iter().map(|completion| completion.status.name()).collect();
        assert_eq!(names, ["Compare Failure", "Command Aborted due to Failed Fused Command"]);
        queue.write_data(slot, 0, &pattern(3, 512));
        queue.submit_compare_and_write(slot, other, Sector(24), 512).unwrap();
        assert!(complete_all(queue, 2).iter().all(|completion| completion.status.is_ok()));
        queue.submit_read(slot, Sector(24), 4096).unwrap();
        assert!(complete(queue).status.is_ok());
        let mut back = vec![0; 4096];
        queue.read_data(slot, 0, &mut back);
        assert!(back[..512] == [2; 512] && back[512..] == pattern(3, 4096)[512..]);

        if pointers == DataPointers::Sgl {
            let piece = |(offset_bytes, len_bytes)| Piece { offset_bytes, len_bytes };
            let pieces = [(2048, 1024), (1, 500), (512, 12)].map(piece);
            queue.submit_scattered(slot, io_opcode::READ, Sector(25), &pieces).unwrap();
            assert!(complete(queue).status.is_ok());
            queue.read_data(slot, 0, &mut back);
            let data = &pattern(3, 4096)[512..];
            assert_eq!((&back[2048..3072], &back[1..501]), (&data[..1024], &data[1024..1524]));
            assert_eq!(back[512..524], data[1524..1536]);
        }

        queue.submit_write_zeroes(slot, Sector(24), 4, true).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.submit_deallocate(slot, Sector(28), 4).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.submit_read(slot, Sector(24), 4096).unwrap();
        assert!(complete(queue).status.is_ok());
        queue.read_data(slot, 0, &mut back);
        assert!(back.iter().all(|byte| *byte == 0), "a RAM store's freed blocks read as zeros");

        queue.submit_read(slot, Sector(DISK_BYTES / 512), 512).unwrap();
        assert_eq!(complete(queue).status.name(), "LBA Out of Range");
        queue.submit(slot, NvmeCommand::new(0x7f, 1)).unwrap();
        assert_eq!(complete(queue).status.name(), "Invalid Command Opcode");
        queue.submit(slot, NvmeCommand::new(io_opcode::FLUSH, 77)).unwrap();
        assert_eq!(complete(queue).status.name(), "Invalid Namespace or Format");
    }
}

#[test]
fn an_applications_own_buffer_needs_no_copy() {
    let function = Function::new(IdleMode::Poll, 512);
    for pointers in [DataPointers::Prp, DataPointers::Sgl] {
        let options = NvmeOptions { slot_bytes: 64 << 10, pointers, ..NvmeOptions::default() };
        let mut client = function.connect(&options);
        let buffer = client.new_buffer(1 << 20).unwrap();
        let data = pattern(9, 1 << 20);
        buffer.write(0, &data);
        let queue = client.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        for (at, len) in
            [(0, 4096), (4, 4096), (4092, 4608), (2048, 64 << 10), (0x8_0000, 64 << 10)]
        {
            queue.submit_write_at(slot, Sector(9), buffer.address() + at, len).unwrap();
            assert!(complete(queue).status.is_ok());
            queue.submit_read(slot, Sector(9), len).unwrap();
            assert!(complete(queue).status.is_ok());
            let mut back = vec![0; len as usize];
            queue.read_data(slot, 0, &mut back);
            assert!(back == data[at as usize..][..len as usize], "{len} bytes at {at}");
        }
        let address = buffer.address();
        client.release_buffer(buffer).unwrap();
        let queue = client.queue(0).unwrap();
        queue.submit_read_at(slot, Sector(9), address, 4096).unwrap();
        assert!(!complete(queue).status.is_ok(), "it is not there any more");
        write_and_read(queue, slot, Sector(9), 4096, 1);
    }
}

#[test]
fn a_controller_is_reset_and_shut_down_in_every_way() {
    for idle in [IdleMode::Poll, IdleMode::Interrupt] {
        let function = Function::new(idle, 512);
        let mut client = function.connect(&NvmeOptions { queues: 2, ..NvmeOptions::default() });
        let slot = client.queue(1).unwrap().take_slot().unwrap();
        for round in 0..5 {
            write_and_read(client.queue(1).unwrap(), slot, Sector(8), 4096, round);
            client.reset_controller().unwrap();
            write_and_read(client.queue(1).unwrap(), slot, Sector(8), 4096, round);
            client.reset_device().unwrap();
            write_and_read(client.queue(1).unwrap(), slot, Sector(8), 4096, round);
            client.shut_down().unwrap();
            client.reset_controller().unwrap();
            // With something under way.
            let queue = client.queue(1).unwrap();
            queue.submit_read(slot, Sector(8), 4096).unwrap();
            queue.publish().unwrap();
            client.reset_controller().unwrap();
            assert_eq!(complete(client.queue(1).unwrap()).status, NvmeStatus::ABORTED_BY_HOST);
        }
    }
}

/// A store that answers when it likes.
fn file(directory: &Path) -> StoreKind {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
    StoreKind::File(FileOptions { direct: false, ..FileOptions::new(&path) })
}

/// As Linux resets a controller that works: all queues are deleted at once, and then it is
/// disabled.
#[test]
fn a_controller_is_reset_under_load() {
    for (idle, in_file) in [
        (IdleMode::Poll, false),
        (IdleMode::Poll, true),
        (ADAPTIVE, true),
        (IdleMode::Interrupt, false),
    ] {
        let function =
            if in_file { Function::over(idle, 512, file) } else { Function::new(idle, 512) };
        let mut client = function.connect(&NvmeOptions { queues: 4, ..NvmeOptions::default() });
        let slots: Vec<Vec<Slot>> = (0..4)
            .map(|index| std::iter::from_fn(|| client.queue(index)?.take_slot()).collect())
            .collect();
        let transport = client.transport().clone();
        std::thread::scope(|scope| {
            // Meanwhile the VMM maps and unmaps something else.
            scope.spawn(|| map_and_unmap(&transport));
            reset_under_load(&mut client, &slots);
        });
        round_trip(client.queue(3).unwrap(), &slots[3], 1);
    }
}

fn map_and_unmap(transport: &Transport) {
    const ADDRESS: u64 = 1 << 44;
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    file.set_len(1 << 20).unwrap();
    for _ in 0..100 {
        transport.dma_map(ADDRESS, 1 << 20, file.as_fd(), 0).unwrap();
        std::thread::yield_now();
        transport.dma_unmap(ADDRESS, 1 << 20).unwrap();
        std::thread::yield_now();
    }
}

fn reset_under_load(client: &mut NvmeClient, slots: &[Vec<Slot>]) {
    for round in 0..30_u64 {
        for (index, slots) in (0..).zip(slots) {
            let queue = client.queue(index).unwrap();
            for slot in slots {
                queue.submit_write(*slot, Sector(slot.index() as u64 * 8), 4096).unwrap();
            }
            queue.publish().unwrap();
        }
        if round % 3 != 0 {
            let delete = |opcode, queue: u32| NvmeCommand::new(opcode, 0).dword(10, queue);
            for opcode in
                [admin_opcode::DELETE_SUBMISSION_QUEUE, admin_opcode::DELETE_COMPLETION_QUEUE]
            {
                let all: Vec<u16> = (1..=4)
                    .map(|queue| client.admin().submit(delete(opcode, queue)).unwrap())
                    .collect();
                for id in all {
                    assert_eq!(client.admin().wait(id).unwrap().status, NvmeStatus::OK);
                }
            }
        }
        if round % 2 == 0 { client.reset_controller() } else { client.reset_device() }.unwrap();
        for (index, slots) in (0..).zip(slots) {
            let aborted = complete_all(client.queue(index).unwrap(), slots.len());
            assert!(
                aborted.iter().all(|completion| completion.status == NvmeStatus::ABORTED_BY_HOST)
            );
        }
    }
}

#[test]
fn clients_come_and_go_and_come_back() {
    let function = Function::new(IdleMode::Poll, 512);
    let mut client = function.connect(&NvmeOptions::default());
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    for round in 0..5 {
        write_and_read(client.queue(0).unwrap(), slot, Sector(8), 4096, round);
        let queue = client.queue(0).unwrap();
        queue.submit_read(slot, Sector(8), 4096).unwrap();
        queue.publish().unwrap();
        client.reconnect().unwrap();
        assert_eq!(complete(client.queue(0).unwrap()).status, NvmeStatus::ABORTED_BY_HOST);
    }
    drop(client);
    // The next one is served when the last one's memory is gone.
    let mut client = function.connect(&NvmeOptions::default());
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, Sector(8), 4096, 7);
}

#[test]
fn a_client_outlives_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), IdleMode::Poll, 512, file(directory.path()));
    let assembly = Assembly::start(&spec).unwrap();
    let socket = directory.path().join("disk.sock");
    let options = NvmeOptions { huge_pages: false, ..NvmeOptions::default() };
    let mut client = NvmeClient::connect(&socket, &options).unwrap();
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, Sector(8), 4096, 7);
    let queue = client.queue(0).unwrap();
    queue.submit_flush(slot).unwrap();
    assert!(complete(queue).status.is_ok());
    assert!(client.is_connected());
    drop(assembly);
    assert!(!client.is_connected());
    assert!(matches!(client.read_namespace(), Err(ClientError::HungUp { .. })));
    assert!(client.reconnect().is_err());
    let _assembly = Assembly::start(&spec).unwrap();
    client.reconnect().unwrap();
    assert!(client.is_connected());
    let queue = client.queue(0).unwrap();
    queue.submit_read(slot, Sector(8), 4096).unwrap();
    assert!(complete(queue).status.is_ok());
    let mut back = vec![0; 4096];
    queue.read_data(slot, 0, &mut back);
    assert!(back == pattern(7, 4096));
}

/// Writes and reads a block with every slot at once.
fn round_trip(queue: &mut NvmeQueue, slots: &[Slot], seed: u64) {
    round_trip_at(queue, slots, Sector(0), seed);
}

/// The same, from that sector on.
fn round_trip_at(queue: &mut NvmeQueue, slots: &[Slot], base: Sector, seed: u64) {
    let sector = |slot: &Slot| Sector(base.0 + slot.index() as u64 * 8);
    for slot in slots {
        queue.write_data(*slot, 0, &pattern(seed + sector(slot).0, 4096));
        queue.submit_write(*slot, sector(slot), 4096).unwrap();
    }
    assert!(complete_all(queue, slots.len()).iter().all(|completion| completion.status.is_ok()));
    for slot in slots {
        queue.write_data(*slot, 0, &[0xee; 4096]);
        queue.submit_read(*slot, sector(slot), 4096).unwrap();
    }
    assert!(complete_all(queue, slots.len()).iter().all(|completion| completion.status.is_ok()));
    for slot in slots {
        let mut back = vec![0; 4096];
        queue.read_data(*slot, 0, &mut back);
        assert!(back == pattern(seed + sector(slot).0, 4096), "slot {slot:?}");
    }
}

#[test]
fn memory_moves_under_load_and_no_request_fails() {
    for (idle, notify, shadow_doorbells) in [
        (IdleMode::Poll, Notify::Polled, false),
        (ADAPTIVE, Notify::Interrupt, false),
        (ADAPTIVE, Notify::Interrupt, true),
    ] {
        let function = Function::new(idle, 512);
        let mut client =
            function.connect(&NvmeOptions { notify, shadow_doorbells, ..NvmeOptions::default() });
        let mut queue = client.take_queue(0).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
                let mut rounds = 0_u64;
                while !stop.load(Ordering::Relaxed) || rounds < 50 {
                    round_trip(&mut queue, &slots, rounds);
                    rounds += 1;
                }
            });
            for _ in 0..30 {
                client.remap_memory().unwrap();
                if worker.is_finished() {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

/// An invalid doorbell value is reported by an event, and affects no other queue.
#[test]
fn hostile_doorbells_and_commands() {
    let function = Function::new(IdleMode::Poll, 512);
    let mut client = function.connect(&NvmeOptions { queues: 2, ..NvmeOptions::default() });
    let event =
        client.admin().submit(NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0)).unwrap();
    let bad = client.queue(0).unwrap();
    for value in [9999, u32::MAX, 0x1_0000] {
        bad.ring_tail(value).unwrap();
    }
    let told = client.admin().wait(event).unwrap();
    // Error status, Invalid Doorbell Write Value, to be found in the error log.
    assert_eq!((told.result, told.status), (0x0001_0100, NvmeStatus::OK));
    let good = client.queue(1).unwrap();
    let slot = good.take_slot().unwrap();
    write_and_read(good, slot, Sector(0), 4096, 1);
    // The doorbell's right value brings the queue back.
    let bad = client.queue(0).unwrap();
    bad.ring_tail(0).unwrap();
    let slot = bad.take_slot().unwrap();
    write_and_read(bad, slot, Sector(0), 4096, 1);

    // Sixty-four bytes of anything are completed with something.
    let queue = client.queue(0).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for id in 0..500_u16 {
        let mut entry = [0; 64];
        for word in entry.chunks_exact_mut(8) {
            state = (state ^ state >> 12).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ state << 25;
            word.copy_from_slice(&state.to_le_bytes());
        }
        // Not fused, which would wait for its other half.
        entry[1] &= !3;
        entry[2..4].copy_from_slice(&id.to_le_bytes());
        queue.post(&entry).unwrap();
        queue.publish().unwrap();
        let missing = || format!("{entry:02x?} is not completed");
        let completion = wait::succeed(PATIENCE, || queue.pop_raw().unwrap().ok_or_else(missing));
        assert_eq!((completion.command_id, completion.sq_id), (id, 1));
        let (_, head) = queue.positions();
        queue.ring_head(head).unwrap();
    }
    client.reset_controller().unwrap();
    let queue = client.queue(0).unwrap();
    write_and_read(queue, slot, Sector(0), 4096, 2);
    assert_eq!(client.read_register32(register::CSTS).unwrap(), 1);
}

#[test]
fn a_server_survives_messages_that_make_no_sense() {
    let function = Function::new(IdleMode::Poll, 512);
    let mut client = function.connect(&NvmeOptions::default());
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, Sector(0), 4096, 1);
    let transport = client.transport();
    assert!(transport.region_info(99).is_err() && transport.irq_info(99).is_err());
    assert!(transport.region_read(0, 1 << 20, &mut [0; 4]).is_err());
    assert!(transport.dma_unmap(0x77, 4096).is_err());
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    assert!(transport.dma_map(u64::MAX - 4095, 4096, file.as_fd(), 0).is_err());
    write_and_read(client.queue(0).unwrap(), slot, Sector(0), 4096, 2);
    drop(client);

    // A header that promises four gigabytes, and nothing else.
    let raw = Transport::connect_raw(function.socket(), PATIENCE).unwrap();
    raw.send_raw(&[&[1, 0, 1, 0][..], &u32::MAX.to_le_bytes(), &[0; 8]].concat(), &[]).unwrap();
    assert!(matches!(raw.receive_raw(), Err(ClientError::HungUp { .. })));
    drop(raw);
    let mut client = function.connect(&NvmeOptions::default());
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, Sector(0), 4096, 3);
    drop(client);
    function.assembly.drain();
}
