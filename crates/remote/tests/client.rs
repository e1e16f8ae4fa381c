//! Requests of queues through a session to an IOhost and back, on a simulated network.

mod vmhost;

use std::time::Duration;

use sidecore_block::{BlockDevice as _, BlockError, Operation, Tag, dropped_tags};
use sidecore_block_contract::pattern;
use sidecore_link::{Faults, Link as _, LinkAddress, dropped_frames};
use sidecore_reactor::{Arm, CoreContext, Pollable as _, Polled, Unit as _};
use sidecore_remote::client::{DrainReport, Iohost, OpenError, Opening, Session, WaitsFor};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_vrio::port::Plain;
use sidecore_vrio::wire::{DeviceEntry, device_flag};
use sidecore_vrio::{ClientOptions, OnDisconnect};
use vmhost::{IOHOST, Rig, TestHost, VMHOST, entry, link_options, session_options};

const MS: Nanos = Nanos::from_millis(1);

fn bad_wire() -> Faults {
    Faults { lost: 50_000, doubled: 50_000, overtaken: 100_000, ..Faults::default() }
}

#[test]
fn long_requests_go_in_parts_and_come_back_as_one() {
    for faults in [Faults::default(), bad_wire()] {
        let mut rig = Rig::with_disk(1, faults);
        let len = 1 << 20;
        let bytes = rig.write(0, 4096, 1, len);
        assert_eq!(rig.read(0, 4096, len), bytes);
        let disk = &rig.host.as_ref().unwrap().disks[0];
        assert!(disk.bytes[4096..][..len] == bytes);
        assert_eq!(disk.executed[1], 16, "each part once");
        assert_eq!(rig.iohost.stats().counts().splits, 2 * 15);
        // A long request that ends past the device is refused whole.
        let end = vmhost::DISK_BYTES as u64;
        let write = rig.request(0, 1, Operation::Write, (end - (512 << 10), 1 << 20), 0);
        assert_eq!(rig.run(0, write), Err(BlockError::OutOfBounds));
        assert_eq!(rig.host.as_ref().unwrap().disks[0].executed[1], 16);
    }
}

#[test]
fn a_part_that_fails_fails_the_request_once() {
    let mut rig = Rig::with_disk(1, Faults::default());
    rig.host.as_mut().unwrap().disks[0].fails = Some(BlockError::NoSpace);
    let write = rig.request(0, 1, Operation::Write, (0, 1 << 20), 0);
    assert_eq!(rig.run(0, write), Err(BlockError::NoSpace));
    rig.host.as_mut().unwrap().disks[0].fails = None;
    rig.run_for(Nanos::from_millis(5));
    assert!(rig.queues[0].completed.is_empty());
    assert_eq!(rig.read(0, 0, 512), [0; 512]);
}

#[test]
fn a_write_through_is_one_round_trip_and_durable() {
    let mut rig = Rig::with_disk(1, Faults::default());
    let bytes = pattern(3, 4096);
    rig.poke(0, 0, &bytes);
    let mut write = rig.request(0, 1, Operation::Write, (0, 4096), 0);
    write.write_through = true;
    assert_eq!(rig.run(0, write), Ok(()));
    let disk = &rig.host.as_ref().unwrap().disks[0];
    assert!(disk.durable[..4096] == bytes);
    assert_eq!(disk.executed, [0, 1, 0, 0], "no flush");
}

/// Random requests of two queues, one of which is on another sidecore, against a model.
fn random_requests(seed: u64, faults: Faults) {
    let mut rig = Rig::new(seed, faults, &[entry(0, "disk1"), entry(1, "disk2")]);
    let (one, two) = (rig.open("disk1"), rig.open("disk2"));
    rig.add_queue(one, true, 8);
    rig.add_queue(two, false, 8);
    let mut models = [vec![0_u8; vmhost::DISK_BYTES], vec![0_u8; vmhost::DISK_BYTES]];
    let mut random = seed;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 33) % below
    };
    for round in 0..60 {
        // Requests of a round do not overlap: each has its own 256 KiB of the disk and of memory.
        for (queue, model) in models.iter_mut().enumerate() {
            for slot in 0..8_u64 {
                let blocks = 1 + draw(if round % 5 == 0 { 512 } else { 16 });
                let base = slot * (256 << 10);
                let offset = base + draw(513 - blocks) * 512;
                let (len, at) = (blocks * 512, (slot * (256 << 10)) & 0x1f_ffff);
                let range = offset as usize..(offset + len) as usize;
                let operation = match draw(6) {
                    0..=2 => Operation::Write,
                    3 | 4 => Operation::Read,
                    _ => Operation::WriteZeroes { may_unmap: true },
                };
                match operation {
                    Operation::Write => {
                        let bytes = pattern(round * 100 + slot, len as usize);
                        rig.poke(queue, at, &bytes);
                        model[range].copy_from_slice(&bytes);
                    }
                    Operation::Read => rig.poke(queue, at, &vec![0xa5; len as usize]),
                    _ => model[range].fill(0),
                }
                let tag = slot << 32 | u64::from(operation == Operation::Read);
                let request = rig.request(queue, tag, operation, (offset, len), at);
                rig.queues[queue].batch.push(request);
            }
        }
        rig.run_until("a round", |rig| rig.queues.iter().all(|queue| queue.completed.len() == 8));
        for (queue, model) in models.iter().enumerate() {
            for mut request in std::mem::take(&mut rig.queues[queue].completed) {
                assert_eq!(request.result, Ok(()));
                let tag = request.tag.take().unwrap().into_bits();
                if tag & 1 == 1 {
                    let at = ((tag >> 32) * (256 << 10)) & 0x1f_ffff;
                    let read = rig.peek(queue, at, request.len_bytes as usize);
                    let range = request.offset_bytes as usize
                        ..(request.offset_bytes + request.len_bytes) as usize;
                    assert!(read == model[range], "seed {seed}, round {round}");
                }
            }
        }
    }
    let disks = &rig.host.as_ref().unwrap().disks;
    assert!(disks[0].bytes == models[0] && disks[1].bytes == models[1], "seed {seed}");
    let counts = rig.iohost.stats().counts();
    assert!(counts.local_requests >= 480 && counts.handed_over >= 480, "{counts:?}");
    if faults.lost > 0 {
        assert!(rig.iohost.vrio_stats().counts().retransmissions > 0);
    }
    drop(rig);
    assert_eq!((dropped_tags(), dropped_frames()), (0, 0));
}

#[test]
fn every_read_returns_what_was_written_on_two_devices_and_two_sidecores() {
    random_requests(1, Faults::default());
    for seed in 2..6 {
        random_requests(seed, bad_wire());
    }
}

#[test]
fn an_iohost_that_dies_and_comes_back_has_every_answered_write() {
    let entries = [entry(0, "disk1")];
    let mut rig = Rig::with_disk(4, bad_wire());
    let mut model = vec![0_u8; 1 << 20];
    for round in 0..4_u64 {
        for index in 0..16_u64 {
            let offset = (index * 7 + round) % 16 * (64 << 10);
            let bytes = rig.write(0, offset, round * 100 + index, 64 << 10);
            model[offset as usize..][..64 << 10].copy_from_slice(&bytes);
            if index == 5 {
                assert_eq!(rig.flush(0), Ok(()));
            }
        }
        let disks = rig.kill(true);
        rig.run_until("waits", |rig| rig.status(0) == Some(WaitsFor::Iohost));
        let waiting = rig.stores[0].status().waiting.unwrap();
        assert!(waiting.since < rig.now);
        // A request meanwhile waits, and is the first to see what was sent again.
        let read = rig.request(0, 1, Operation::Read, (0, 1 << 20), 0);
        rig.queues[0].batch.push(read);
        rig.run_for(Nanos::from_millis(100));
        assert!(rig.queues[0].completed.is_empty());
        rig.revive(&entries, disks);
        assert_eq!(rig.wait(0), Ok(()));
        assert!(rig.peek(0, 0, 1 << 20) == model, "round {round}");
        assert_eq!(rig.status(0), None);
    }
    assert!(rig.iohost.vrio_stats().counts().replayed >= 4 * 10);
    assert_eq!(rig.iohost.stats().counts().device_waits, 5, "at the start, and four times");
}

/// The VMM of a guest is killed while its IOhost is away.
#[test]
fn an_iohost_that_comes_back_gets_nothing_of_a_user_that_is_gone_and_all_of_the_next_one() {
    for is_local in [true, false] {
        let entries = [entry(0, "disk1")];
        let mut rig = Rig::new(11, Faults::default(), &entries);
        let store = rig.open("disk1");
        rig.add_queue(store, is_local, 32);
        rig.write(0, 0, 1, 4096);
        let write = |rig: &mut Rig| {
            let request = rig.request(0, 2, Operation::Write, (8192, 4096), 0);
            rig.queues[0].batch.push(request);
        };
        let disks = rig.kill(true);
        write(&mut rig);
        rig.run_for(MS);
        assert!(rig.stores[store].loss().is_none() && rig.queues[0].completed.is_empty());
        rig.stores[store].user_gone();
        assert!(rig.stores[store].loss().is_some(), "at once, for a VMM that connects again");
        assert_eq!(rig.wait(0), Err(BlockError::EIO), "nothing waits for its IOhost");
        let missing = "1 of its last user, which is gone, were not flushed";
        assert!(rig.stores[store].loss().unwrap().starts_with(missing));
        write(&mut rig);
        assert_eq!(rig.wait(0), Err(BlockError::EIO));
        rig.revive(&entries, disks);
        rig.run_until("a session", |rig| rig.status(store).is_none());
        rig.run_for(MS);
        let executed = rig.host.as_ref().unwrap().disks[0].executed;
        assert_eq!(executed, [0, 1, 0, 0], "no more than before");
        assert!(rig.stores[store].loss().unwrap().starts_with(missing), "they are missing");
        assert_eq!(rig.iohost.vrio_stats().counts().abandoned, 1);
        let next = rig.add_queue(store, is_local, 32);
        rig.run_for(MS);
        assert_eq!(rig.stores[store].loss(), None, "the next one relies on nothing");
        let bytes = rig.write(next, 0, 3, 4096);
        let disks = rig.kill(true);
        rig.revive(&entries, disks);
        assert!(rig.read(next, 0, 4096) == bytes, "its writes are kept as ever");
    }
}

/// The IOhost lives on: it has the writes of a user that is gone, and flushes them.
#[test]
fn the_writes_of_a_user_that_is_gone_are_flushed_and_then_none_is_missing() {
    let mut rig = Rig::with_disk(12, Faults::default());
    let bytes = rig.write(0, 0, 1, 4096);
    rig.stores[0].user_gone();
    rig.run_until("a flush", |rig| rig.stores[0].loss().is_none());
    assert!(rig.host.as_ref().unwrap().disks[0].durable[..4096] == bytes);
    assert_eq!(rig.iohost.vrio_stats().counts().abandoned, 0);
}

/// A device with a local queue and another one, whose requests fail after this time.
fn failing_after(time: Nanos, entries: &[DeviceEntry]) -> Rig {
    let mut options = session_options(LinkAddress::Ethernet(IOHOST));
    options.client = ClientOptions { on_disconnect: OnDisconnect::Fail(time), ..options.client };
    let mut rig = Rig::with(5, Faults::default(), entries, options);
    rig.open("disk1");
    rig.add_queue(0, true, 4);
    rig.add_queue(0, false, 4);
    rig
}

#[test]
fn requests_fail_after_the_time_that_was_set_and_not_before() {
    let entries = [entry(0, "disk1")];
    let fail_after = Nanos::from_millis(3_000);
    let mut rig = failing_after(fail_after, &entries);
    let bytes = rig.write(0, 0, 1, 1 << 16);
    let disks = rig.kill(false);
    let killed_at = rig.now;
    for queue in 0..2 {
        let read = rig.request(queue, 1, Operation::Read, (0, 1 << 18), 0);
        rig.queues[queue].batch.push(read);
    }
    rig.run_until("the error", |rig| !rig.queues[0].completed.is_empty());
    assert!(rig.now.since(killed_at) >= fail_after, "{:?}", rig.now.since(killed_at));
    let timed_out = Err(BlockError::Io { errno: 110 });
    assert_eq!((rig.wait(0), rig.wait(1)), (timed_out, timed_out));
    // New ones fail at once.
    let read = rig.request(0, 1, Operation::Read, (0, 512), 0);
    let before = rig.now;
    assert_eq!(rig.run(0, read), timed_out);
    assert!(rig.now.since(before) < MS);
    rig.revive(&entries, disks);
    rig.run_until("it is back", |rig| rig.status(0).is_none());
    assert_eq!(rig.read(0, 0, 1 << 16), bytes);
}

#[test]
fn requests_fail_after_that_time_also_in_a_session_without_their_device() {
    let entries = [entry(0, "disk1")];
    let fail_after = Nanos::from_millis(1_500);
    let mut rig = failing_after(fail_after, &entries);
    let bytes = rig.write(0, 0, 1, 1 << 16);
    let killed_at = rig.now;
    let disks = rig.kill(true);
    for queue in 0..2 {
        let write = rig.request(queue, 1, Operation::Write, (1 << 18, 4096), 0);
        rig.queues[queue].batch.push(write);
    }
    rig.run_for(Nanos::from_millis(1_200));
    rig.revive(&[entry(0, "disk2")], disks);
    rig.run_until("no device", |rig| rig.status(0) == Some(WaitsFor::Device));
    assert!(rig.queues.iter().all(|queue| queue.completed.is_empty()));
    let timed_out = Err(BlockError::Io { errno: 110 });
    assert_eq!((rig.wait(0), rig.wait(1)), (timed_out, timed_out));
    let waited = rig.now.since(killed_at);
    assert!((fail_after..fail_after.after(Nanos::from_millis(50))).contains(&waited), "{waited:?}");
    let flush = rig.request(1, 1, Operation::Flush, (0, 0), 0);
    let before = rig.now;
    assert_eq!(rig.run(1, flush), timed_out, "it covers what the IOhost has lost");
    assert!(rig.now.since(before) < MS);
    // It comes in this session, and gets what was answered; what has failed is not sent.
    rig.host.as_mut().unwrap().set_devices(&entries);
    rig.run_until("it is back", |rig| rig.status(0).is_none());
    assert_eq!(rig.read(0, 0, 1 << 16), bytes);
    assert_eq!(rig.read(0, 1 << 18, 4096), [0; 4096]);
    assert_eq!(rig.flush(0), Ok(()));
    // It goes away in a session: what is unanswered fails, and what comes later after that time.
    rig.host.as_mut().unwrap().set_devices(&[entry(0, "disk2")]);
    rig.run_until("no device", |rig| rig.status(0) == Some(WaitsFor::Device));
    let before = rig.now;
    let read = rig.request(0, 1, Operation::Read, (0, 512), 0);
    assert_eq!(rig.run(0, read), timed_out);
    assert!(rig.now.since(before) > Nanos::from_millis(1_400));
}

/// The drain of the only session.
fn drain(rig: &Rig) -> Option<DrainReport> {
    rig.session.report().drain
}

#[test]
fn a_drained_iohost_has_each_answered_write_and_no_request() {
    for (seed, faults) in [(31, Faults::default()), (32, bad_wire())] {
        let mut rig = Rig::with_disk(seed, faults);
        rig.add_queue(0, false, 4);
        let bytes = rig.write(0, 0, 1, 1 << 16);
        let write = rig.request(1, 1, Operation::Write, (1 << 20, 1 << 20), 0);
        rig.queues[1].batch.push(write);
        rig.host.as_mut().unwrap().holds = true;
        rig.run_for(MS);
        rig.iohost.drain(true);
        rig.run_for(Nanos::from_millis(50));
        let unanswered = DrainReport { unanswered: 1, kept_writes: 1, error: None };
        assert_eq!(drain(&rig), Some(unanswered));
        // New requests of both queues are held, the flush of a guest too.
        for queue in 0..2 {
            let flush = rig.request(queue, 2, Operation::Flush, (0, 0), 0);
            rig.queues[queue].batch.push(flush);
        }
        rig.host.as_mut().unwrap().holds = false;
        assert_eq!(rig.wait(1), Ok(()));
        rig.run_until("the drain", |rig| drain(rig) == Some(DrainReport::default()));
        assert_eq!(rig.status(0), Some(WaitsFor::OwnDrain));
        let disk = &rig.host.as_ref().unwrap().disks[0];
        assert!(disk.durable == disk.bytes && disk.durable[..1 << 16] == bytes, "seed {seed}");
        let executed = disk.executed;
        rig.run_for(Nanos::from_millis(50));
        assert_eq!(rig.host.as_ref().unwrap().disks[0].executed, executed, "nothing comes");
        assert_eq!(rig.session.report().in_flight, 2);
        // The IOhost is taken away and comes back: the drain lasts.
        let disks = rig.kill(true);
        rig.run_until("it is away", |rig| rig.status(0) == Some(WaitsFor::Iohost));
        rig.revive(&[entry(0, "disk1")], disks);
        rig.run_until("it is back", |rig| rig.status(0) == Some(WaitsFor::OwnDrain));
        assert!(rig.queues.iter().all(|queue| queue.completed.is_empty()));
        rig.iohost.drain(false);
        assert_eq!((rig.wait(0), rig.wait(1)), (Ok(()), Ok(())));
        assert_eq!((drain(&rig), rig.status(0)), (None, None));
        assert_eq!(rig.read(0, 0, 1 << 16), bytes);
        assert_eq!(rig.iohost.vrio_stats().counts().replayed, 0);
    }
}

#[test]
fn a_drain_names_the_error_of_its_flush() {
    let mut rig = Rig::with_disk(33, Faults::default());
    rig.write(0, 0, 1, 4096);
    rig.host.as_mut().unwrap().disks[0].fails = Some(BlockError::NoSpace);
    rig.iohost.drain(true);
    rig.run_until("the error", |rig| {
        drain(rig).is_some_and(|drain| drain.error == Some(BlockError::NoSpace))
    });
    assert!(!drain(&rig).unwrap().is_complete());
    rig.host.as_mut().unwrap().disks[0].fails = None;
    rig.iohost.drain(false);
    // The guest learns of it by its next flush.
    assert_eq!(rig.flush(0), Err(BlockError::NoSpace));
    assert_eq!(rig.flush(0), Ok(()));
}

#[test]
fn held_requests_fail_after_the_time_that_was_set_once_the_iohost_is_away() {
    let fail_after = Nanos::from_millis(3_000);
    let mut options = session_options(LinkAddress::Ethernet(IOHOST));
    options.client =
        ClientOptions { on_disconnect: OnDisconnect::Fail(fail_after), ..options.client };
    let mut rig = Rig::with(34, Faults::default(), &[entry(0, "disk1")], options);
    rig.open("disk1");
    rig.add_queue(0, true, 4);
    rig.iohost.drain(true);
    let read = rig.request(0, 1, Operation::Read, (0, 4096), 0);
    rig.run_until("the drain", |rig| drain(rig) == Some(DrainReport::default()));
    rig.queues[0].batch.push(read);
    rig.run_for(Nanos::from_millis(3_500));
    assert!(rig.queues[0].completed.is_empty(), "the IOhost is there");
    drop(rig.kill(false));
    let killed_at = rig.now;
    assert_eq!(rig.wait(0), Err(BlockError::Io { errno: 110 }));
    let waited = rig.now.since(killed_at);
    assert!(waited.0 > fail_after.0 / 2 && waited.0 < 2 * fail_after.0, "{waited:?}");
}

#[test]
fn a_device_is_opened_in_any_order_of_starts() {
    let mut rig = Rig::new(6, Faults::default(), &[]);
    let link = rig.kill(false);
    drop(link);
    let opening = Opening::new(&rig.iohost, "disk1").unwrap();
    assert_eq!(Opening::new(&rig.iohost, "disk1").err(), Some(OpenError::InUse));
    rig.run_for(Nanos::from_millis(20));
    let waiting = opening.status().waiting.unwrap();
    assert_eq!(waiting.waits_for, WaitsFor::Handshake);
    let Ok(Err(opening)) = opening.wait(Some(Duration::ZERO)) else { panic!("it is not open") };
    // The IOhost comes, without the device.
    rig.revive(&[], Vec::new());
    rig.run_until("the device", |_| {
        opening.status().waiting.map(|waiting| waiting.waits_for) == Some(WaitsFor::Device)
    });
    assert_eq!(opening.status().waiting.unwrap().since, waiting.since, "it waits since then");
    let disks = rig.kill(false);
    assert!(disks.is_empty());
    rig.revive(&[entry(0, "other"), entry(1, "disk1")], Vec::new());
    rig.run_until("it is open", |_| opening.status().waiting.is_none());
    let Ok(Ok(store)) = opening.wait(Some(Duration::ZERO)) else { panic!("it is open") };
    assert_eq!(
        (store.iohost(), store.device(), store.serial().as_str()),
        ("io1", "disk1", "disk1")
    );
    let geometry = store.geometry();
    assert_eq!(
        (geometry.capacity_bytes, geometry.block_bytes, geometry.physical_block_bytes),
        (vmhost::DISK_BYTES as u64, 512, 4096)
    );
    assert!(geometry.volatile_cache && geometry.discard && !geometry.read_only);
    drop(store);
    // The same name may be opened again.
    assert!(Opening::new(&rig.iohost, "disk1").is_ok());
}

#[test]
fn a_queue_keeps_its_device_open() {
    let mut rig = Rig::with_disk(12, Faults::default());
    drop(rig.stores.pop());
    let bytes = rig.write(0, 0, 1, 4096);
    assert_eq!(Opening::new(&rig.iohost, "disk1").err(), Some(OpenError::InUse));
    assert_eq!(rig.read(0, 0, 4096), bytes);
    rig.queues.clear();
    rig.run_for(MS);
    assert!(Opening::new(&rig.iohost, "disk1").is_ok());
}

#[test]
fn an_opening_is_cancelled_by_another_thread_and_ends_with_its_session() {
    let iohost = Iohost::new("io1").unwrap();
    for name in ["", "zero\0", &"x".repeat(65)] {
        assert_eq!(Opening::new(&iohost, name).err(), Some(OpenError::Name));
    }
    let opening = Opening::new(&iohost, "disk1").unwrap();
    let canceller = opening.canceller();
    let waiter = std::thread::spawn(move || opening.wait(None).map(|_| ()));
    canceller.cancel();
    assert_eq!(waiter.join().unwrap(), Err(OpenError::Cancelled));
    drop(canceller);
    let opening = Opening::new(&iohost, "disk1").unwrap();
    let waiter = std::thread::spawn(move || opening.wait(None).map(|_| ()));
    let network = sidecore_link::Network::new(1, Faults::default());
    let link = network.link(VMHOST, &link_options()).unwrap();
    let core = CoreContext::default();
    let options = session_options(LinkAddress::Ethernet(IOHOST));
    let mut session = Session::new(&core, &iohost, Box::new(link), Plain, &options).unwrap();
    session.poll(MS, 32);
    let link = network.link(VMHOST, &link_options()).unwrap();
    assert!(Session::new(&core, &iohost, Box::new(link), Plain, &options).is_err());
    drop(session);
    assert_eq!(waiter.join().unwrap(), Err(OpenError::Ended));
    assert_eq!(Opening::new(&iohost, "disk1").err(), Some(OpenError::Ended));
}

#[test]
fn a_device_that_grows_has_the_new_size_and_does_not_shrink() {
    let mut rig = Rig::with_disk(7, Faults::default());
    let end = vmhost::DISK_BYTES as u64;
    let beyond = rig.request(0, 1, Operation::Read, (end, 4096), 0);
    assert_eq!(rig.run(0, beyond), Err(BlockError::OutOfBounds));
    let grown = DeviceEntry { capacity_bytes: 2 * vmhost::DISK_BYTES as u64, ..entry(0, "disk1") };
    rig.host.as_mut().unwrap().set_devices(&[grown]);
    rig.run_until("it has grown", |rig| {
        rig.stores[0].status().entry.unwrap().capacity_bytes == grown.capacity_bytes
    });
    assert_eq!(rig.stores[0].geometry().capacity_bytes, grown.capacity_bytes);
    assert_eq!(rig.status(0), None);
    rig.host.as_mut().unwrap().disks[0].bytes.resize(2 * vmhost::DISK_BYTES, 0);
    let bytes = rig.write(0, end, 1, 4096);
    assert_eq!(rig.read(0, end, 4096), bytes);
    // The first size is less than the one that the guest knows now.
    rig.host.as_mut().unwrap().set_devices(&[entry(0, "disk1")]);
    rig.run_until("the refusal", |rig| {
        rig.status(0) == Some(WaitsFor::SameDevice("it has shrunk"))
    });
    assert_eq!(rig.stores[0].geometry().capacity_bytes, grown.capacity_bytes);
}

#[test]
fn a_device_that_comes_back_as_another_one_is_refused_until_it_is_as_it_was() {
    let good = entry(0, "disk1");
    let changes = [
        DeviceEntry { block_bytes: 4096, ..good },
        DeviceEntry { capacity_bytes: good.capacity_bytes / 2, ..good },
        DeviceEntry { flags: good.flags | device_flag::READ_ONLY, ..good },
        DeviceEntry { serial: [7; 20], ..good },
    ];
    for changed in changes {
        let mut rig = Rig::with_disk(8, Faults::default());
        let bytes = rig.write(0, 0, 1, 4096);
        let disks = rig.kill(false);
        rig.run_until("it is away", |rig| rig.status(0).is_some());
        rig.revive(&[changed], disks);
        let read = rig.request(0, 1, Operation::Read, (0, 4096), 0);
        rig.queues[0].batch.push(read);
        rig.run_until("the refusal", |rig| matches!(rig.status(0), Some(WaitsFor::SameDevice(_))));
        rig.run_for(Nanos::from_millis(20));
        assert!(rig.queues[0].completed.is_empty(), "the request waits: {changed:?}");
        let disks = rig.kill(false);
        assert_eq!(disks[0].executed[0], 0, "nothing was read from another device");
        rig.revive(&[good], disks);
        assert_eq!(rig.wait(0), Ok(()));
        assert_eq!(rig.peek(0, 0, 4096), bytes);
    }
}

#[test]
fn requests_of_an_abandoned_device_fail_and_reach_no_other_one() {
    let mut rig = Rig::new(10, Faults::default(), &[entry(0, "disk1"), entry(1, "disk2")]);
    let opening = Opening::new(&rig.iohost, "disk1").unwrap();
    let canceller = opening.canceller();
    rig.finish(opening);
    for is_local in [true, false] {
        rig.add_queue(0, is_local, 4);
    }
    let disks = rig.kill(false);
    rig.run_until("it is away", |rig| rig.status(0).is_some());
    for queue in 0..2 {
        // One that the session has, long enough for several parts, and a flush.
        let write = rig.request(queue, 1, Operation::Write, (0, 1 << 20), 0);
        let flush = rig.request(queue, 2, Operation::Flush, (0, 0), 0);
        rig.queues[queue].batch.extend([write, flush]);
    }
    rig.run_for(Nanos::from_millis(2));
    assert!(rig.queues.iter().all(|queue| queue.completed.is_empty()));
    canceller.abandon();
    rig.run_until("they fail", |rig| rig.queues.iter().all(|queue| queue.completed.len() == 2));
    for mut request in rig.queues.iter_mut().flat_map(|queue| std::mem::take(&mut queue.completed))
    {
        assert_eq!(request.result, Err(BlockError::EIO));
        request.tag.take().map(Tag::into_bits);
    }
    // The next device of the session has the number of the former one.
    rig.revive(&[entry(0, "disk1"), entry(1, "disk2")], disks);
    rig.open("disk2");
    for queue in 0..2 {
        let write = rig.request(queue, 3, Operation::Write, (0, 4096), 0);
        assert_eq!(rig.run(queue, write), Err(BlockError::EIO));
    }
    rig.run_for(Nanos::from_millis(5));
    let disks = &rig.host.as_ref().unwrap().disks;
    assert!(disks.iter().all(|disk| disk.executed == [0; 4]));
}

#[test]
fn a_session_stops_when_its_queues_are_gone_and_tells_the_iohost() {
    let mut rig = Rig::with_disk(9, Faults::default());
    rig.add_queue(0, false, 4);
    rig.write(1, 0, 1, 4096);
    let (stopped, state) = std::sync::mpsc::channel();
    rig.session.stop(Box::new(move |()| stopped.send(()).unwrap()));
    // A queue that is still there is refused, and keeps the session.
    for queue in 0..2 {
        let read = rig.request(queue, 1, Operation::Read, (0, 512), 0);
        assert_eq!(rig.run(queue, read), Err(BlockError::EIO));
    }
    rig.queues.clear();
    assert_eq!(rig.session.poll(rig.now, 32), Polled::Finished);
    let Rig { session, mut host, now, stores, iohost, .. } = rig;
    Box::new(session).finish();
    state.try_recv().unwrap();
    let host = host.as_mut().unwrap();
    host.turn(now.after(MS));
    assert_eq!(host.host.session(0).unwrap().session(), 0, "the IOhost has ended it, too");
    assert!(stores[0].open_channel(&CoreContext::default(), 1).is_err());
    assert_eq!(stores[0].status().waiting.unwrap().waits_for, WaitsFor::Session);
    drop((stores, iohost));
    assert_eq!(dropped_tags(), 0);
}

#[test]
fn a_session_without_work_sleeps_and_is_woken_by_frames_commands_and_requests() {
    let mut rig = Rig::with_disk(10, Faults::default());
    rig.run_for(Nanos::from_millis(5));
    let arm = |rig: &mut Rig| {
        for _ in 0..1000 {
            match rig.session.arm() {
                Arm::WorkPending => rig.step(),
                other => return other,
            }
        }
        panic!("it never sleeps")
    };
    assert_eq!(arm(&mut rig), Arm::Armed);
    assert!(rig.session.deadline().unwrap() > rig.now, "only the next keepalive");
    // A request of its own sidecore is on the wire at once, and the unit has to poll.
    let read = rig.request(0, 1, Operation::Read, (0, 512), 0);
    rig.queues[0].batch.push(read);
    let sidecore_queue = &mut rig.queues[0];
    sidecore_queue.channel.submit(rig.now, &mut sidecore_queue.batch);
    assert_eq!(rig.session.deadline(), Some(Nanos::ZERO));
    rig.session.disarm();
    assert_eq!(rig.wait(0), Ok(()));
    // A command of another thread.
    assert_eq!(arm(&mut rig), Arm::Armed);
    let opening = Opening::new(&rig.iohost, "disk2").unwrap();
    assert!(has_signal(&rig));
    rig.session.on_wake();
    rig.session.disarm();
    rig.run_for(Nanos::from_millis(1));
    assert!(opening.status().waiting.is_some());
    assert!(!has_signal(&rig), "a signal that stays would keep the sidecore awake");
}

/// Whether one of the session's descriptors is readable.
fn has_signal(rig: &Rig) -> bool {
    let mut readable = false;
    rig.session.wake_fds(&mut |fd| {
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        readable |= rustix::event::poll(&mut fds, Some(&now)).unwrap() > 0;
    });
    readable
}

/// Sends random frames of all kinds to the session.
fn send_garbage(rig: &mut Rig) {
    let mut link = rig.network.link(IOHOST, &link_options()).unwrap();
    let mut random = 1_u64;
    for round in 0..20_000_u64 {
        let mut frame = [0_u8; 200];
        for byte in &mut frame {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *byte = (random >> 56) as u8;
        }
        frame[0] = 1;
        frame[1] = (round % 16) as u8;
        frame[28] = (round % 250) as u8;
        frame[29] = 0;
        let mut buffers = Vec::new();
        link.buffers(LinkAddress::Ethernet(VMHOST), 1, &mut buffers);
        let Some(buffer) = buffers.first_mut() else { panic!("the wire is full") };
        buffer.pieces().write(link.memory(), 0, &frame);
        buffer.address(LinkAddress::Ethernet(VMHOST), 30 + (round % 170) as usize);
        link.send(rig.now, &mut buffers);
        rig.session.poll(rig.now, 64);
        rig.now = rig.now.after(Nanos::from_micros(3));
    }
}

/// An IOhost that sends anything: random frames, and its own good ones damaged and cut short.
#[test]
fn a_hostile_iohost_harms_only_the_data_of_requests() {
    let faults = Faults { damaged: 300_000, cut_short: 100_000, ..bad_wire() };
    let mut rig = Rig::with_disk(11, Faults::default());
    // Memory beside the requests' data.
    let guard = pattern(99, 64 << 10);
    rig.poke(0, 1 << 20, &guard);
    rig.network.set_faults(faults);
    let mut done = 0;
    for round in 0..400_u64 {
        let (operation, len) = match round % 3 {
            0 => (Operation::Write, 128 << 10),
            1 => (Operation::Read, 128 << 10),
            _ => (Operation::Read, 512),
        };
        if rig.queues[0].channel.readiness().in_flight < 16 {
            let request = rig.request(0, round, operation, (round % 8 * 4096, len), 0);
            rig.queues[0].batch.push(request);
        }
        rig.run_for(Nanos::from_micros(500));
        for mut request in std::mem::take(&mut rig.queues[0].completed) {
            request.tag.take().map(Tag::into_bits);
            done += 1;
        }
    }
    assert!(rig.peek(0, 1 << 20, guard.len()) == guard, "memory of no request was written to");
    // Answers that were never asked for, of every kind, wrong sizes included.
    rig.network.set_faults(Faults::default());
    drop(rig.kill(false));
    send_garbage(&mut rig);
    assert!(rig.iohost.vrio_stats().counts().frames_received > 20_000);
    assert!(rig.peek(0, 1 << 20, guard.len()) == guard);
    // A good one after it.
    rig.host = Some({
        let link = rig.network.link(IOHOST, &link_options()).unwrap();
        TestHost::new(Box::new(link), 500, &[entry(0, "disk1")])
    });
    rig.run_until("all requests end", |rig| {
        rig.queues[0].channel.readiness().in_flight == 0 && rig.status(0).is_none()
    });
    for mut request in std::mem::take(&mut rig.queues[0].completed) {
        request.tag.take().map(Tag::into_bits);
        done += 1;
    }
    assert!(done > 10, "{done}");
    let bytes = rig.write(0, 0, 1, 1 << 17);
    assert_eq!(rig.read(0, 0, 1 << 17), bytes);
}
