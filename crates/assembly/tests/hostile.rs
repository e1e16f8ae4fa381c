//! Guests and VMMs that lie, stall or vanish, against a whole assembly. Their device stops with a
//! reason for the operator, the neighbour on the same sidecore is served, and a reset brings the
//! device back.

mod common;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    DeviceSpec, FrontEndSpec, Sector, SidecoreSpec, Spec, StageKind, StoreKind, StoreSpec,
    VirtioBlkSpec,
};
use sidecore_block::dropped_tags;
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Completion, Status};
use sidecore_kit::guest::complete_all;
use sidecore_kit::wait;
use sidecore_ring::driver::{Buffer, RawDescriptor};
use sidecore_spec_virtio::descriptor;
use sidecore_stage_delay::DelayStage;

use common::{PATIENCE, device, until};

const DISK_BYTES: u64 = 1 << 20;
const VICTIM: usize = 0;
const NEIGHBOUR: usize = 1;
const SLOW: usize = 2;
/// DEVICE_NEEDS_RESET (virtio 1.2, 2.1).
const NEEDS_RESET: u8 = 0x40;

/// Three disks on one sidecore; the third delays each request by a millisecond.
fn spec(directory: &Path) -> Spec {
    let own = VirtioBlkSpec {
        queue_size_max: 256,
        packed: true,
        seg_max: Some(16),
        ..VirtioBlkSpec::default()
    };
    let front_end = FrontEndSpec::VirtioBlk(own);
    let device =
        |name| DeviceSpec { queues: 4, front_end: front_end.clone(), ..device(directory, name) };
    let ram = || StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 };
    let store = |name: &str, kind| StoreSpec::new(name, kind);
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![
            store("victim", ram()),
            store("neighbour", ram()),
            store("below", ram()),
            StoreSpec::in_front_of(
                "slow",
                "below",
                StageKind::Delay(DelayStage { delay_us: 1_000 }),
            ),
        ],
        controllers: Vec::new(),
        devices: vec![device("victim"), device("neighbour"), device("slow")],
        ..Spec::default()
    }
}

fn options(packed: bool) -> ClientOptions {
    ClientOptions {
        packed,
        max_pieces: 20,
        slots: 4,
        huge_pages: false,
        ..ClientOptions::default()
    }
}

fn connect(spec: &Spec, device: usize, options: &ClientOptions) -> BlkClient {
    BlkClient::connect(&spec.devices[device].socket, options).unwrap()
}

fn complete(queue: &mut BlkQueue, count: usize) -> Vec<Completion> {
    let completions = complete_all(queue, count);
    for completion in &completions {
        queue.release_slot(completion.slot);
    }
    completions
}

/// Writes a page and reads it back.
fn round_trip(queue: &mut BlkQueue, sector: u64, byte: u8) {
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[byte; 4096]);
    queue.submit_write(slot, Sector(sector), 4096).unwrap();
    assert_eq!(complete(queue, 1)[0].status, Status::Ok);
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[0; 4096]);
    queue.submit_read(slot, Sector(sector), 4096).unwrap();
    assert_eq!(complete(queue, 1)[0].status, Status::Ok);
    let mut page = [0; 4096];
    queue.read_data(slot, 0, &mut page);
    assert_eq!(page, [byte; 4096]);
}

/// Runs `test` while the neighbour's guest works, and checks that the neighbour was never
/// disturbed.
fn beside_a_neighbour(test: impl FnOnce(&Spec, &Assembly)) {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let assembly = Assembly::start(&spec).unwrap();
    let mut neighbour = connect(&spec, NEIGHBOUR, &options(false));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let queue = neighbour.queue(0).unwrap();
            let mut rounds = 0_u32;
            while !stop.load(Ordering::Relaxed) || rounds == 0 {
                round_trip(queue, u64::from(rounds % 200) * 8, rounds as u8);
                rounds += 1;
            }
            rounds
        });
        let result =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&spec, &assembly)));
        stop.store(true, Ordering::Relaxed);
        worker.join().unwrap();
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    assert_eq!(assembly.devices()[NEIGHBOUR].state, DeviceState::Running);
    assembly.drain();
    assert_eq!(dropped_tags(), 0);
}

fn send(queue: &mut BlkQueue, kind: u32, sector: u64, data: &[Buffer]) {
    let slot = queue.take_slot().unwrap();
    queue.submit_chain(slot, kind, Sector(sector), data).unwrap();
    queue.publish().unwrap();
    queue.kick().unwrap();
}

/// The name of the lie, a part of the reported reason, and the lie itself.
type Lie = (&'static str, &'static str, fn(&mut BlkQueue));

/// The guest address of one of the queue's buffers.
fn data(queue: &mut BlkQueue) -> u64 {
    let slot = queue.take_slot().unwrap();
    queue.release_slot(slot);
    queue.data_address(slot)
}

fn chain_of(queue: &mut BlkQueue, more: u16, next: u16) {
    let address = data(queue);
    let entry = RawDescriptor { address, len_bytes: 512, flags: more, next_or_id: next };
    queue.raw_ring().set_descriptor(0, entry);
    queue.raw_ring().set_available_entry(0, 0);
    queue.raw_ring().set_available_index(1);
}

const SPLIT_LIES: &[Lie] = &[
    ("a looping chain", "looping or too long", |queue| {
        chain_of(queue, descriptor::NEXT, 0);
        queue.kick().unwrap();
    }),
    ("an index that jumps", "jumped", |queue| {
        queue.raw_ring().set_available_index(0x4000);
        queue.kick().unwrap();
    }),
    ("a head out of range", "outside its table", |queue| {
        queue.raw_ring().set_available_entry(0, 0x7fff);
        queue.raw_ring().set_available_index(1);
        queue.kick().unwrap();
    }),
    ("indirect, not negotiated", "not negotiated", |queue| {
        chain_of(queue, descriptor::INDIRECT, 0);
        queue.kick().unwrap();
    }),
];

const LIES: &[Lie] = &[
    ("an overlong chain", "looping or too long", |queue| {
        let pieces = vec![Buffer::from_device(data(queue), 128); 20];
        send(queue, 0, 0, &pieces);
    }),
    ("an address out of range", "outside guest memory", |queue| {
        send(queue, 0, 0, &[Buffer::from_device(1 << 50, 512)]);
    }),
    ("an address that overflows", "outside guest memory", |queue| {
        send(queue, 1, 0, &[Buffer::to_device(u64::MAX - 100, 512)]);
    }),
    ("a buffer of zero length", "zero length", |queue| {
        let at = data(queue);
        send(queue, 0, 0, &[Buffer::from_device(at, 0)]);
    }),
    ("a read with data to read", "readable data", |queue| {
        let at = data(queue);
        send(queue, 0, 0, &[Buffer::to_device(at, 512)]);
    }),
    ("readable behind writable", "readable buffer behind", |queue| {
        let at = data(queue);
        send(queue, 0, 0, &[Buffer::from_device(at, 512), Buffer::to_device(at + 512, 512)]);
    }),
    ("a request past the end", "past the capacity", |queue| {
        let at = data(queue);
        send(queue, 0, DISK_BYTES / 512 - 1, &[Buffer::from_device(at, 1024)]);
    }),
];

#[test]
fn each_lie_is_reported_and_a_reset_brings_the_device_back() {
    beside_a_neighbour(|spec, assembly| {
        for packed in [false, true] {
            let lies = LIES.iter().chain(if packed { &[] } else { SPLIT_LIES });
            for (name, reason, lie) in lies {
                let mut client = connect(spec, VICTIM, &options(packed));
                assert_eq!(client.status().unwrap() & NEEDS_RESET, 0, "{name}");
                lie(client.queue(0).unwrap());
                let report = until(assembly, VICTIM, |report| report.state == DeviceState::Broken);
                let said = report.reason.unwrap();
                assert!(said.contains(reason), "{name}: {said}");
                assert!(report.needs_reset);
                assert_eq!(client.status().unwrap() & NEEDS_RESET, NEEDS_RESET, "{name}");
                let queue = client.queue(0).unwrap();
                wait::until(&format!("{name}: the error eventfd"), PATIENCE, || queue.is_broken());
                client.set_status(0).unwrap();
                assert_eq!(client.status().unwrap() & NEEDS_RESET, 0, "{name}: a reset clears it");
                drop(client);
                until(assembly, VICTIM, |report| report.state == DeviceState::Waiting);
                round_trip(connect(spec, VICTIM, &options(packed)).queue(0).unwrap(), 0, 3);
                until(assembly, VICTIM, |report| report.state == DeviceState::Waiting);
            }
        }
    });
}

/// Fills a queue of the slow disk with writes, which stay in flight for a while.
fn in_flight(queue: &mut BlkQueue) -> usize {
    let mut count = 0;
    while let Some(slot) = queue.take_slot() {
        queue.write_data(slot, 0, &[count as u8 + 1; 4096]);
        queue.submit_write(slot, Sector(count as u64 * 8), 4096).unwrap();
        count += 1;
    }
    queue.publish().unwrap();
    count
}

#[test]
fn a_memory_table_that_changes_in_mid_flight_loses_nothing() {
    beside_a_neighbour(|spec, _| {
        for packed in [false, true] {
            let mut client =
                connect(spec, SLOW, &ClientOptions { add_regions: true, ..options(packed) });
            for round in 0..20 {
                let count = in_flight(client.queue(0).unwrap());
                if round % 2 == 0 {
                    client.share_memory_again().unwrap();
                    client.replace_regions(1).unwrap();
                } else {
                    client.replace_regions(1).unwrap();
                }
                let done = complete(client.queue(0).unwrap(), count);
                assert!(done.iter().all(|completion| completion.status == Status::Ok), "{round}");
            }
            round_trip(client.queue(0).unwrap(), 0, 9);
        }
    });
}

#[test]
fn a_reset_and_a_disconnect_in_mid_flight_leave_a_whole_device() {
    beside_a_neighbour(|spec, assembly| {
        for round in 0..10 {
            let mut client = connect(spec, SLOW, &options(false));
            in_flight(client.queue(0).unwrap());
            match round % 3 {
                0 => client.reset().unwrap(),
                1 => client.set_status(0).unwrap(),
                _ => {}
            }
            drop(client);
            let report = until(assembly, SLOW, |report| report.state == DeviceState::Waiting);
            assert_eq!(report.queues_running, 0);
            round_trip(connect(spec, SLOW, &options(false)).queue(0).unwrap(), 512, round);
            until(assembly, SLOW, |report| report.state == DeviceState::Waiting);
        }
    });
}

/// The turns that a sidecore takes in 200 ms without work.
fn turns_while_idle(assembly: &Assembly) -> u64 {
    let before = assembly.stats().sidecores[0].turns;
    // The sleep waits for no event: it is the time in which no turn should happen.
    std::thread::sleep(Duration::from_millis(200));
    assembly.stats().sidecores[0].turns - before
}

#[test]
fn a_vmm_that_stalls_or_starts_some_queues_only_makes_no_sidecore_spin() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let assembly = Assembly::start(&spec).unwrap();
    // The first half of a header, and no second half.
    let mut stalled = UnixStream::connect(&spec.devices[VICTIM].socket).unwrap();
    stalled.write_all(&[1, 0, 0, 0, 1]).unwrap();
    until(&assembly, VICTIM, |report| report.state != DeviceState::Waiting);
    // Firmware uses one of the queues.
    let mut firmware = connect(&spec, NEIGHBOUR, &ClientOptions { queues: 4, ..options(false) });
    for index in [0, 2, 3] {
        firmware.stop_queue(index).unwrap();
    }
    round_trip(firmware.queue(1).unwrap(), 0, 1);
    let turns = turns_while_idle(&assembly);
    assert!(turns < 1_000, "{turns} turns of an idle sidecore in 200 ms");
    round_trip(firmware.queue(1).unwrap(), 0, 2);
    let begin = Instant::now();
    assembly.drain();
    assert!(begin.elapsed() < PATIENCE, "a stalled peer delays no drain");
}

/// Operators look for the reason in the list of devices, not in the log.
#[test]
fn a_disconnect_is_reported_with_its_reason_until_a_client_works_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path());
    let nvme = DeviceSpec {
        front_end: FrontEndSpec::from_word("nvme"),
        ..spec.devices[NEIGHBOUR].clone()
    };
    spec.devices.push(DeviceSpec {
        name: "nvme".to_owned(),
        socket: directory.path().join("nvme.sock"),
        ..nvme
    });
    let assembly = Assembly::start(&spec).unwrap();
    for device in [VICTIM, spec.devices.len() - 1] {
        let mut client = UnixStream::connect(&spec.devices[device].socket).unwrap();
        client.write_all(&[0xff; 64]).unwrap();
        let report = until(&assembly, device, |report| report.disconnect.is_some());
        let disconnect = report.disconnect.unwrap();
        assert!(
            !disconnect.reason.is_empty() && disconnect.at_unix_s > 1_700_000_000,
            "{disconnect:?}"
        );
    }
    assert_eq!(assembly.devices()[NEIGHBOUR].disconnect, None);
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let client = BlkClient::connect(&spec.devices[VICTIM].socket, &options).unwrap();
    until(&assembly, VICTIM, |report| report.disconnect.is_none());
    drop(client);
    until(&assembly, VICTIM, |report| report.state == DeviceState::Waiting);
    assert_eq!(assembly.devices()[VICTIM].disconnect, None);
}
