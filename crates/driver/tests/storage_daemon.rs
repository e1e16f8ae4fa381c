//! The driver against qemu-storage-daemon's vhost-user-blk export: an independent device, and so a
//! check of the driver that shares nothing with this project's own devices.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sidecore_driver::{
    BlkClient, BlkQueue, ClientOptions, Notify, Operation, Piece, Slot, Status, features,
};
use sidecore_kit::guest::complete;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use sidecore_units::Sector;

const DISK_BYTES: u64 = 16 << 20;

/// A storage daemon with a disk of zeros, which ends with the test.
struct Daemon {
    _process: Process,
    directory: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        std::fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        let socket = directory.path().join("socket");
        let process = Command::new("qemu-storage-daemon")
            .args([
                "--blockdev",
                &format!("file,node-name=disk,filename={},discard=unmap", disk.display()),
            ])
            .args([
                "--export",
                &format!(
                    "vhost-user-blk,id=disk,node-name=disk,writable=on,num-queues=4,addr.type=unix,\
                     addr.path={}",
                    socket.display()
                ),
            ])
            .spawn()
            .expect("qemu-storage-daemon is installed (`make test` does that)");
        let daemon = Self { _process: process.into(), directory };
        // The socket's file is there before its listener is.
        wait::succeed(Duration::from_secs(10), || UnixStream::connect(daemon.socket()));
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 7 + seed * 13 + at / 512) as u8).collect()
}

fn write_and_read(queue: &mut BlkQueue, slot: Slot, seed: u64) {
    let data = pattern(seed, 4096);
    let sector = Sector(seed * 8);
    queue.write_data(slot, 0, &data);
    queue.submit_write(slot, sector, 4096).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    queue.write_data(slot, 0, &[0xee; 4096]);
    queue.submit_read(slot, sector, 4096).unwrap();
    let completion = complete(queue);
    assert_eq!((completion.status, completion.slot), (Status::Ok, slot));
    let mut back = vec![0; 4096];
    assert_eq!(queue.read_data(slot, 0, &mut back), 4096);
    assert!(back == data, "what was written is not what was read");
}

fn connect(socket: &Path, options: &ClientOptions) -> BlkClient {
    BlkClient::connect(socket, options).unwrap()
}

#[test]
fn every_way_to_drive_a_ring_moves_the_same_bytes() {
    let daemon = Daemon::start();
    for notify in [Notify::Polled, Notify::Interrupt] {
        for (event_idx, indirect, regions) in
            [(false, false, 1), (true, false, 2), (true, true, 1), (false, true, 3)]
        {
            // 6 MiB of buffers, so that there is something to split into regions.
            let options = ClientOptions {
                notify,
                event_idx,
                indirect,
                regions,
                slots: 48,
                slot_bytes: 128 << 10,
                ..ClientOptions::default()
            };
            let mut client = connect(&daemon.socket(), &options);
            assert_eq!(client.config().capacity_sectors, DISK_BYTES / 512);
            assert_eq!(client.features() & features::EVENT_IDX != 0, event_idx);
            let queue = client.queue(0).unwrap();
            let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
            assert_eq!(slots.len(), 48);
            for round in 0..3 {
                for slot in &slots {
                    write_and_read(queue, *slot, slot.index() as u64 + round);
                }
            }
            let counters = queue.counters();
            assert_eq!((counters.requests, counters.completions), (288, 288));
            if notify == Notify::Interrupt {
                assert!(counters.calls > 0, "{counters:?}");
            }
        }
    }
}

#[test]
fn a_full_queue_completes_all_of_it() {
    let daemon = Daemon::start();
    let mut client =
        connect(&daemon.socket(), &ClientOptions { slots: 128, ..ClientOptions::default() });
    let queue = client.queue(0).unwrap();
    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
    for round in 0..200_u64 {
        for slot in &slots {
            queue
                .submit_read(*slot, Sector((round * 128 + slot.index() as u64) % 1000 * 8), 4096)
                .unwrap();
        }
        queue.publish().unwrap();
        let mut completions = Vec::new();
        while completions.len() < 128 {
            assert!(queue.wait(Duration::from_secs(10)).unwrap());
            queue.poll_completions(&mut completions).unwrap();
        }
        assert!(completions.iter().all(|completion| completion.status == Status::Ok));
    }
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn the_other_operations() {
    let daemon = Daemon::start();
    let options = ClientOptions { max_pieces: 3, slots: 2, ..ClientOptions::default() };
    let mut client = connect(&daemon.socket(), &options);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_and_read(queue, slot, 3);

    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);

    let pieces = [(2048, 1024), (0, 512), (512, 512)]
        .map(|(offset_bytes, len_bytes)| Piece { offset_bytes, len_bytes });
    queue.submit_scattered(slot, Operation::Read, Sector(24), &pieces).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    let (data, mut back) = (pattern(3, 4096), vec![0; 4096]);
    queue.read_data(slot, 0, &mut back);
    assert_eq!((&back[2048..3072], &back[0..1024]), (&data[0..1024], &data[1024..2048]));

    queue.submit_write_zeroes(slot, Sector(24), 4, false).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    queue.submit_read(slot, Sector(24), 4096).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    queue.read_data(slot, 0, &mut back);
    assert!(back[..2048].iter().all(|byte| *byte == 0) && back[2048..] == data[2048..]);

    queue.submit_discard(slot, Sector(24), 8).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);

    queue.submit_get_id(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);

    queue.submit_read(slot, Sector(DISK_BYTES / 512), 4096).unwrap();
    assert_eq!(complete(queue).status, Status::IoError);
    queue.submit_chain(slot, 77, Sector(0), &[]).unwrap();
    assert_eq!(complete(queue).status, Status::Unsupported);

    assert!(queue.submit_read(slot, Sector(0), 8192).is_err(), "larger than the slot");
    queue.submit_read(slot, Sector(0), 512).unwrap();
    assert!(queue.submit_read(slot, Sector(0), 512).is_err(), "in flight");
    assert_eq!(complete(queue).status, Status::Ok);
}

#[test]
fn queues_work_side_by_side_in_threads_of_their_own() {
    let daemon = Daemon::start();
    let options =
        ClientOptions { queues: 4, notify: Notify::Interrupt, ..ClientOptions::default() };
    let mut client = connect(&daemon.socket(), &options);
    std::thread::scope(|scope| {
        for index in 0..4 {
            let mut queue = client.take_queue(index).unwrap();
            scope.spawn(move || {
                let slot = queue.take_slot().unwrap();
                for round in 0..50 {
                    write_and_read(&mut queue, slot, u64::from(index) * 100 + round);
                }
            });
        }
    });
    assert!(client.queue(0).is_none());
}

#[test]
fn a_stopped_queue_says_where_it_stands_and_goes_on_from_there() {
    let daemon = Daemon::start();
    let mut client = connect(&daemon.socket(), &ClientOptions::default());
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for seed in 0..5 {
        write_and_read(queue, slot, seed);
    }
    let base = client.stop_queue(0).unwrap();
    assert_eq!(base, 10);
    client.start_queue(0, base).unwrap();
    write_and_read(client.queue(0).unwrap(), slot, 9);
    client.share_memory_again().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, 10);
}

#[test]
fn what_the_device_has_not_got_is_left_out_or_refused() {
    let daemon = Daemon::start();
    let mut client =
        connect(&daemon.socket(), &ClientOptions { packed: true, ..ClientOptions::default() });
    assert_eq!(client.features() & features::RING_PACKED, 0);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_and_read(queue, slot, 1);
    drop(client);
    assert!(
        BlkClient::connect(
            daemon.socket(),
            &ClientOptions { queues: 5, ..ClientOptions::default() }
        )
        .is_err()
    );
    assert!(BlkClient::connect("/nowhere/socket", &ClientOptions::default()).is_err());
}
