//! The client against a controller that is written down in [`super::fake`].

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_units::Sector;

use super::fake::{self, Character, DISK_BYTES, Disk, Report};
use super::*;
use crate::error::ClientError;
use crate::options::Notify;
use crate::request::{Piece, Slot};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn connect(
    character: &Character,
    disk: &Disk,
    options: &NvmeOptions,
) -> (NvmeClient, JoinHandle<Report>) {
    let (transport, thread) = fake::start(character, disk);
    (NvmeClient::over(transport, "/nowhere".into(), options).unwrap(), thread)
}

fn refused(character: &Character, options: &NvmeOptions) -> ClientError {
    let (transport, thread) = fake::start(character, &fake::disk());
    let error =
        NvmeClient::over(transport.clone(), "/nowhere".into(), options).map(drop).unwrap_err();
    transport.hang_up();
    thread.join().unwrap();
    error
}

/// Publishes, and waits for `count` completions.
fn all(queue: &mut NvmeQueue, count: usize) -> Vec<NvmeCompletion> {
    queue.publish().unwrap();
    let mut completions = Vec::new();
    let end = Instant::now() + Duration::from_secs(20);
    while completions.len() < count {
        assert!(Instant::now() < end, "{} of {count}", completions.len());
        look_on(queue);
        queue.poll_completions(&mut completions).unwrap();
    }
    assert_eq!(completions.len(), count);
    completions
}

/// A polling client on a machine of few cores lets the controller have one.
fn look_on(queue: &mut NvmeQueue) {
    if queue.notify() == Notify::Interrupt {
        queue.wait(Duration::from_millis(100)).unwrap();
    } else {
        std::thread::yield_now();
    }
}

fn one(queue: &mut NvmeQueue) -> NvmeCompletion {
    all(queue, 1)[0]
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at * 7 + seed * 13 + at / 512) as u8).collect()
}

fn write_and_read(queue: &mut NvmeQueue, slot: Slot, sector: Sector, len: usize, seed: u64) {
    let data = pattern(seed, len);
    assert_eq!(queue.write_data(slot, 0, &data), len);
    queue.submit_write(slot, sector, len as u32).unwrap();
    assert!(one(queue).status.is_ok());
    queue.write_data(slot, 0, &vec![0xee; len]);
    queue.submit_read(slot, sector, len as u32).unwrap();
    let completion = one(queue);
    assert_eq!((completion.slot, completion.status), (slot, NvmeStatus::OK));
    let mut back = vec![0; len];
    assert_eq!(queue.read_data(slot, 0, &mut back), len);
    assert!(back == data, "what was written is not what was read");
}

#[test]
fn every_way_to_drive_a_queue_moves_the_same_bytes() {
    for (mapped, shadow) in [(true, false), (false, false), (false, true)] {
        for notify in [Notify::Polled, Notify::Interrupt] {
            for (pointers, slot_bytes, block_bytes, regions) in [
                (DataPointers::Prp, 4096, 512, 1),
                (DataPointers::Prp, 8192, 4096, 1),
                (DataPointers::Prp, 1 << 20, 512, 3),
                (DataPointers::Sgl, 64 << 10, 512, 2),
            ] {
                let character = Character { mapped, shadow, block_bytes, ..Character::default() };
                let options = NvmeOptions {
                    queues: 2,
                    slots: 5,
                    notify,
                    pointers,
                    slot_bytes,
                    regions,
                    huge_pages: false,
                    ..NvmeOptions::default()
                };
                let disk = fake::disk();
                let (mut client, thread) = connect(&character, &disk, &options);
                assert_eq!(client.namespace().len_bytes(), DISK_BYTES as u64);
                assert_eq!(client.controller().model, "fake");
                for index in 0..2 {
                    let queue = client.queue(index).unwrap();
                    assert_eq!(queue.has_mapped_doorbells(), mapped);
                    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
                    assert_eq!(slots.len(), 5);
                    for slot in &slots {
                        for len in [4096, slot_bytes as usize, slot_bytes as usize / 2] {
                            let len = len.max(4096);
                            write_and_read(queue, *slot, Sector(64), len, slot.index() as u64);
                        }
                    }
                    let counters = queue.counters();
                    assert_eq!((counters.requests, counters.completions), (30, 30));
                    assert_eq!(counters.kicks == 0, mapped, "{counters:?}");
                    assert_eq!(counters.calls > 0, notify == Notify::Interrupt, "{counters:?}");
                }
                drop(client);
                let report = thread.join().unwrap();
                assert_eq!(report.io_doorbell_messages == 0, mapped);
                assert_eq!(report.dma_maps, usize::from(regions));
            }
        }
    }
}

#[test]
fn a_full_queue_completes_all_of_it_with_one_doorbell_for_each_batch() {
    let character = Character { mapped: false, ..Character::default() };
    let options = NvmeOptions { slots: 100, ..NvmeOptions::default() };
    let (mut client, thread) = connect(&character, &fake::disk(), &options);
    let queue = client.queue(0).unwrap();
    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
    for round in 0..50_u64 {
        for slot in &slots {
            queue
                .submit_read(*slot, Sector((round * 100 + slot.index() as u64) % 1000 * 8), 4096)
                .unwrap();
        }
        assert_eq!(queue.in_flight(), 100);
        assert!(queue.take_slot().is_none());
        assert!(all(queue, 100).iter().all(|completion| completion.status.is_ok()));
    }
    assert_eq!(queue.in_flight(), 0);
    let kicks = queue.counters().kicks;
    assert!((50..=100).contains(&kicks), "{kicks}");
    drop(client);
    assert_eq!(thread.join().unwrap().io_doorbell_messages, kicks);
}

#[test]
fn shadow_doorbells_save_messages_without_a_waiter() {
    // This controller leaves EventIdx at zero: one message for each round of the queue.
    let character = Character { mapped: false, shadow: true, ..Character::default() };
    let options = NvmeOptions { queue_entries: 33, ..NvmeOptions::default() };
    let (mut client, thread) = connect(&character, &fake::disk(), &options);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for seed in 0..330 {
        write_and_read(queue, slot, Sector(8), 4096, seed);
    }
    let kicks = queue.counters().kicks;
    assert!((20..=40).contains(&kicks), "{kicks}");
    drop(client);
    assert_eq!(thread.join().unwrap().io_doorbell_messages, kicks);
}

#[test]
fn the_other_operations() {
    for pointers in [DataPointers::Prp, DataPointers::Sgl] {
        let disk = fake::disk();
        let options = NvmeOptions { slots: 2, pointers, ..NvmeOptions::default() };
        let (mut client, _thread) = connect(&Character::default(), &disk, &options);
        let queue = client.queue(0).unwrap();
        let (slot, other) = (queue.take_slot().unwrap(), queue.take_slot().unwrap());
        write_and_read(queue, slot, Sector(24), 4096, 3);
        queue.submit_flush(slot).unwrap();
        assert!(one(queue).status.is_ok());
        queue.submit_compare(slot, Sector(24), 4096).unwrap();
        assert!(one(queue).status.is_ok());
        queue.submit_compare(slot, Sector(32), 4096).unwrap();
        assert_eq!(one(queue).status, NvmeStatus(0x4285));
        queue.submit_verify(slot, Sector(24), 8).unwrap();
        assert!(one(queue).status.is_ok());

        queue.write_data(other, 0, &[0x77; 512]);
        queue.submit_compare_and_write(slot, other, Sector(24), 512).unwrap();
        assert!(all(queue, 2).iter().all(|completion| completion.status.is_ok()));
        assert_eq!(disk.lock().unwrap()[24 * 512..25 * 512], [0x77; 512]);

        queue.submit_write_zeroes(slot, Sector(24), 1, true).unwrap();
        assert!(one(queue).status.is_ok());
        assert_eq!(disk.lock().unwrap()[24 * 512..25 * 512], [0; 512]);
        assert_ne!(disk.lock().unwrap()[25 * 512..32 * 512], [0; 7 * 512]);
        queue.submit_deallocate(slot, Sector(25), 7).unwrap();
        assert!(one(queue).status.is_ok());
        assert_eq!(disk.lock().unwrap()[25 * 512..32 * 512], [0; 7 * 512]);

        queue.submit_read(slot, Sector(DISK_BYTES as u64 / 512), 512).unwrap();
        let status = one(queue).status;
        assert_eq!(status.to_string(), "LBA Out of Range (0h/80h, do not retry)");
        assert_eq!(queue.counters().completions, 11);
    }
}

#[test]
fn data_in_pieces() {
    let disk = fake::disk();
    let options =
        NvmeOptions { max_pieces: 3, pointers: DataPointers::Sgl, ..NvmeOptions::default() };
    let (mut client, _thread) = connect(&Character::default(), &disk, &options);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write_and_read(queue, slot, Sector(24), 4096, 3);
    queue.write_data(slot, 0, &[0xee; 4096]);
    let piece = |(offset_bytes, len_bytes)| Piece { offset_bytes, len_bytes };
    queue
        .submit_scattered(
            slot,
            io_opcode::READ,
            Sector(24),
            &[(2048, 1024), (0, 500), (512, 12)].map(piece),
        )
        .unwrap();
    assert!(one(queue).status.is_ok());
    let (data, mut back) = (pattern(3, 4096), vec![0; 4096]);
    queue.read_data(slot, 0, &mut back);
    assert_eq!(back[2048..3072], data[..1024]);
    assert_eq!(
        (&back[..500], &back[512..524], back[500]),
        (&data[1024..1524], &data[1524..1536], 0xee)
    );
    for pieces in [&[][..], &[(0, 512); 4], &[(4000, 512)], &[(0, 100)]] {
        let pieces: Vec<Piece> = pieces.iter().copied().map(piece).collect();
        assert!(queue.submit_scattered(slot, io_opcode::READ, Sector(24), &pieces).is_err());
    }
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn an_applications_own_buffer_needs_no_copy() {
    for pointers in [DataPointers::Prp, DataPointers::Sgl] {
        let disk = fake::disk();
        disk.lock().unwrap().copy_from_slice(&pattern(5, DISK_BYTES));
        let options = NvmeOptions { slot_bytes: 32 << 10, pointers, ..NvmeOptions::default() };
        let (mut client, thread) = connect(&Character::default(), &disk, &options);
        let buffer = client.new_buffer(3 << 20).unwrap();
        let other = client.new_buffer(1).unwrap();
        assert_ne!(buffer.address(), other.address());
        let queue = client.queue(0).unwrap();
        let slot = queue.take_slot().unwrap();
        let mut back = vec![0; 32 << 10];
        for (at, len) in [
            (0, 4096),
            (4, 4096),
            (4092, 4096),
            (4092, 8192),
            (2048, 32 << 10),
            (1 << 20, 32 << 10),
        ] {
            queue.submit_read_at(slot, Sector(9), buffer.address() + at, len).unwrap();
            assert!(one(queue).status.is_ok());
            let back = &mut back[..len as usize];
            assert_eq!(buffer.read(at as usize, back), len as usize);
            assert!(
                *back == disk.lock().unwrap()[9 * 512..][..len as usize],
                "{len} bytes at {at}"
            );
            // The slot's own list is made again.
            write_and_read(queue, slot, Sector(128), 32 << 10, at);
        }
        buffer.write(0, &[0x42; 512]);
        queue.submit_write_at(slot, Sector(0), buffer.address(), 512).unwrap();
        assert!(one(queue).status.is_ok());
        assert_eq!(disk.lock().unwrap()[..512], [0x42; 512]);
        client.release_buffer(buffer).unwrap();
        client.remap_memory().unwrap();
        let queue = client.queue(0).unwrap();
        write_and_read(queue, slot, Sector(0), 4096, 1);
        drop(client);
        assert_eq!(thread.join().unwrap().dma_maps, 4);
    }
}

#[test]
fn what_makes_no_sense_is_refused_here() {
    let character = Character { block_bytes: 4096, ..Character::default() };
    let (mut client, _thread) = connect(&character, &fake::disk(), &NvmeOptions::default());
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for (sector, len) in [(0, 8192), (0, 512), (1, 4096), (0, 4095), (0, 0)] {
        assert!(matches!(
            queue.submit_read(slot, Sector(sector), len),
            Err(ClientError::Request(_))
        ));
    }
    assert!(queue.submit_write_zeroes(slot, Sector(0), 4, false).is_err());
    assert!(queue.submit_compare_and_write(slot, slot, Sector(0), 4096).is_err());
    queue.submit_read(slot, Sector(0), 4096).unwrap();
    assert!(queue.submit_read(slot, Sector(0), 4096).is_err(), "in flight");
    queue.release_slot(slot);
    assert!(one(queue).status.is_ok());
    queue.release_slot(slot);
    queue.release_slot(slot);
    assert_eq!(std::iter::from_fn(|| queue.take_slot()).count(), 32);
}

#[test]
fn options_that_contradict_themselves_or_the_controller() {
    let default = NvmeOptions::default;
    for options in [
        NvmeOptions { queues: 0, ..default() },
        NvmeOptions { slots: 0, ..default() },
        NvmeOptions { slot_bytes: 100, ..default() },
        NvmeOptions { slot_bytes: 4 << 20, ..default() },
        NvmeOptions { slot_bytes: 2 << 20, ..default() },
        NvmeOptions { max_pieces: 2, ..default() },
        NvmeOptions { queue_entries: 32, ..default() },
        NvmeOptions { slots: 1024, ..default() },
        NvmeOptions { regions: 200, huge_pages: false, ..default() },
    ] {
        let error = refused(&Character::default(), &options);
        assert!(matches!(error, ClientError::Options(_)), "{options:?}: {error}");
    }
    for (character, options) in [
        (Character { class: [0, 0, 2], ..Character::default() }, default()),
        (Character::default(), NvmeOptions { queues: 9, ..default() }),
        (
            Character { vectors: 2, ..Character::default() },
            NvmeOptions { queues: 2, notify: Notify::Interrupt, ..default() },
        ),
    ] {
        let error = refused(&character, &options);
        assert!(matches!(error, ClientError::Missing { .. }), "{options:?}: {error}");
    }
    let error = refused(&Character { stingy: true, ..Character::default() }, &default());
    let expected = "the controller failed Create I/O Submission Queue with Invalid Queue Size \
                    (1h/02h, do not retry)";
    assert_eq!(error.to_string(), expected);
    let error = refused(&Character { dies: true, ..Character::default() }, &default());
    assert!(matches!(error, ClientError::Fatal), "{error}");
    assert!(matches!(
        NvmeClient::connect("/nowhere/socket", &default()),
        Err(ClientError::Io { .. })
    ));
}

#[test]
fn a_new_connection_goes_on_with_what_was_in_flight_aborted() {
    let disk = fake::disk();
    let character = Character { swallows: true, ..Character::default() };
    let (mut client, thread) =
        connect(&character, &disk, &NvmeOptions { queues: 2, ..NvmeOptions::default() });
    let buffer = client.new_buffer(4096).unwrap();
    let queue = client.queue(1).unwrap();
    let slots = [queue.take_slot().unwrap(), queue.take_slot().unwrap()];
    for slot in slots {
        queue.write_data(slot, 0, &pattern(1, 4096));
        queue.submit_write(slot, Sector(0), 4096).unwrap();
    }
    queue.publish().unwrap();
    assert!(!queue.wait(Duration::from_millis(20)).unwrap());

    let taken = client.take_queue(0).unwrap();
    assert!(matches!(client.reset_controller(), Err(ClientError::Options(_))));
    client.put_queue(taken);
    assert!(client.reconnect().is_err(), "the socket has no listener");
    thread.join().unwrap();

    // Another one, with its doorbells elsewhere.
    let (transport, thread) =
        fake::start(&Character { mapped: false, ..Character::default() }, &disk);
    client.connect_over(transport).unwrap();
    let queue = client.queue(1).unwrap();
    let aborted = all(queue, 2);
    assert!(aborted.iter().all(|completion| completion.status == NvmeStatus::ABORTED_BY_HOST));
    for slot in slots {
        // The data is where it was.
        queue.submit_write(slot, Sector(8), 4096).unwrap();
        assert!(one(queue).status.is_ok());
    }
    queue.submit_read_at(slots[0], Sector(8), buffer.address(), 4096).unwrap();
    assert!(one(queue).status.is_ok());
    let mut back = vec![0; 4096];
    buffer.read(0, &mut back);
    assert!(back == pattern(1, 4096));
    drop(client);
    assert_eq!(thread.join().unwrap().dma_maps, 2);
}

#[test]
fn a_reset_goes_on_with_what_was_in_flight_aborted() {
    let disk = fake::disk();
    let character = Character { swallows: true, ..Character::default() };
    let (mut client, thread) = connect(&character, &disk, &NvmeOptions::default());
    let queue = client.queue(0).unwrap();
    let slots = [queue.take_slot().unwrap(), queue.take_slot().unwrap()];
    for slot in slots {
        queue.submit_read(slot, Sector(0), 4096).unwrap();
    }
    queue.publish().unwrap();
    client.reset_controller().unwrap();
    let queue = client.queue(0).unwrap();
    assert_eq!(queue.in_flight(), 2);
    assert!(queue.submit_read(slots[0], Sector(0), 4096).is_err(), "not before it was taken back");
    let mut aborted = all(queue, 2);
    aborted.sort_by_key(|completion| completion.slot.index());
    assert!(aborted.iter().all(|completion| completion.status == NvmeStatus::ABORTED_BY_HOST));
    assert_eq!((aborted[0].slot, aborted[1].slot, queue.in_flight()), (slots[0], slots[1], 0));
    queue.submit_read(slots[0], Sector(0), 4096).unwrap();
    queue.publish().unwrap();
    client.reset_device().unwrap();
    assert_eq!(one(client.queue(0).unwrap()).status, NvmeStatus::ABORTED_BY_HOST);
    client.shut_down().unwrap();
    drop(client);
    thread.join().unwrap();
}

#[test]
fn a_controller_that_lies_is_found_out() {
    let character = Character { lies: true, ..Character::default() };
    let (mut client, _thread) = connect(&character, &fake::disk(), &NvmeOptions::default());
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(0), 4096).unwrap();
    queue.publish().unwrap();
    assert!(queue.wait(Duration::from_secs(20)).unwrap());
    let error = queue.poll_completions(&mut Vec::new()).unwrap_err();
    assert!(matches!(error, ClientError::NotInFlight { queue: 1, id: 0x100 }), "{error}");
}

#[test]
fn admin_commands_that_wait_do_not_hold_up_others() {
    let (mut client, _thread) =
        connect(&Character::default(), &fake::disk(), &NvmeOptions::default());
    let event = NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0);
    let waiting = client.admin().submit(event).unwrap();
    assert_eq!(client.active_namespaces().unwrap(), [1]);
    let unknown = client.admin().run(NvmeCommand::new(0xc0, 0)).unwrap();
    assert_eq!(unknown.status.name(), "Invalid Command Opcode");
    assert_ne!(unknown.id, waiting);
    assert_eq!(client.admin().poll().unwrap(), None);
    assert_eq!(client.read_register32(register::VS).unwrap(), 0x2_0000);
    assert_eq!(client.transport().version(), (0, 1));
    let denied = client.transport().dma_unmap(0x1234, 4096);
    assert!(matches!(denied, Err(ClientError::Denied { request: "DMA_UNMAP", .. })));
}

#[test]
fn raw_entries_and_doorbells() {
    let (mut client, _thread) =
        connect(&Character::default(), &fake::disk(), &NvmeOptions::default());
    let queue = client.queue(0).unwrap();
    queue.post(&NvmeCommand::new(io_opcode::FLUSH, 1).id(0xabcd).bytes()).unwrap();
    assert_eq!(queue.positions(), (1, 0));
    queue.ring_tail(1).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let completion = loop {
        if let Some(completion) = queue.pop_raw().unwrap() {
            break completion;
        }
        assert!(Instant::now() < end);
        std::thread::yield_now();
    };
    assert_eq!((completion.command_id, completion.sq_id, completion.sq_head), (0xabcd, 1, 1));
    queue.ring_head(1).unwrap();
    assert_eq!(queue.positions(), (1, 1));
}

#[test]
fn requests_allocate_nothing() {
    for (mapped, notify) in
        [(true, Notify::Polled), (true, Notify::Interrupt), (false, Notify::Polled)]
    {
        let character = Character { mapped, ..Character::default() };
        let options = NvmeOptions {
            notify,
            slot_bytes: 16 << 10,
            posted_doorbells: false,
            ..NvmeOptions::default()
        };
        let (mut client, _thread) = connect(&character, &fake::disk(), &options);
        let queue = client.queue(0).unwrap();
        let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
        let mut completions = Vec::with_capacity(slots.len());
        let before = allocations();
        for round in 0..200_u32 {
            for (index, slot) in (0..).zip(&slots) {
                let sector = Sector(index * 32);
                match (round + index as u32) % 4 {
                    0 => queue.submit_read(*slot, sector, 4096),
                    1 => queue.submit_write(*slot, sector, 16 << 10),
                    2 => queue.submit_deallocate(*slot, sector, 8),
                    _ => queue.submit_flush(*slot),
                }
                .unwrap();
            }
            queue.publish().unwrap();
            completions.clear();
            while completions.len() < slots.len() {
                look_on(queue);
                queue.poll_completions(&mut completions).unwrap();
            }
        }
        assert_eq!(allocations() - before, 0, "{mapped} {notify:?}");
    }
}
