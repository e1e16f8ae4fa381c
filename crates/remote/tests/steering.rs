//! Requests are executed where there is room, in turns, and without allocating.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::{Rig, TestStore, pattern, request};
use sidecore_block::{Geometry, Limit, Limits, Operation, RamStore};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::Faults;
use sidecore_remote::export::{ClientLimits, ClientShare};
use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, ServerOptions};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const NUMBERS: [usize; 3] = [0, 1, 3];

fn ram() -> Arc<RamStore> {
    Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap())
}

/// Keeps `depth` requests of each client unanswered until each has had `count` of them answered.
fn load(rig: &mut Rig, devices: &[u16], depth: u64, count: usize, len_bytes: u64) {
    let mut answered = vec![0; devices.len()];
    let mut free: Vec<Vec<u64>> = devices.iter().map(|_| (0..depth).collect()).collect();
    while answered.iter().any(|answered| *answered < count) {
        for (client, device) in devices.iter().enumerate() {
            while let Some(tag) = free[client].pop() {
                let operation = if tag % 2 == 0 { Operation::Read } else { Operation::Write };
                let request = request(operation, tag * len_bytes, len_bytes);
                rig.clients[client].client.submit(tag, *device, request).unwrap();
            }
        }
        rig.step();
        for (client, answered) in answered.iter_mut().enumerate() {
            *answered += rig.clients[client].completed.len();
            for (tag, result) in rig.clients[client].completed.drain(..) {
                result.unwrap();
                free[client].push(tag);
            }
        }
    }
    // The rest ends.
    rig.run_until(|rig| rig.clients.iter().all(|client| client.client.unanswered() == 0));
    for client in &mut rig.clients {
        client.completed.clear();
    }
}

fn loaded_rig(helpers: usize, clients: usize) -> (Rig, Vec<u16>) {
    let mut rig = Rig::new(Faults::default(), helpers, ServerOptions::default());
    let mut devices = Vec::new();
    for client in 0..clients {
        rig.add_client(ClientOptions::default());
        rig.add_device(client, "disk", ram());
        devices.push(rig.open(client, "disk"));
    }
    (rig, devices)
}

#[test]
fn requests_spread_over_the_sidecores_and_all_are_answered() {
    for helpers in NUMBERS {
        let (mut rig, mut devices) = loaded_rig(helpers, 0);
        for client in 0..12 {
            rig.add_client(ClientOptions::default());
            let store = TestStore::new();
            store.set(|disk| disk.takes = Nanos::from_micros(20));
            rig.add_device(client, "disk", Arc::new(store));
            devices.push(rig.open(client, "disk"));
        }
        for round in 0..100 {
            load(&mut rig, &devices, 1 + round % 8, 20, 4096);
        }
        let status = rig.export.status();
        let steering = status.steering;
        let executed = steering.executed_here + steering.handed_over;
        assert!(executed >= 24_000);
        // Each of the sidecores has its part.
        let here = steering.executed_here as f64 / executed as f64;
        let even = 1.0 / (helpers + 1) as f64;
        assert!((0.8 * even..=1.2 * even).contains(&here), "{helpers}: {steering:?}");
        assert_eq!(helpers == 0, steering.moves == 0);
        assert_eq!(status.executors.len(), helpers + 1);
        assert_eq!(status.executors.iter().map(|it| it.requests).sum::<u64>(), executed);
        for executor in &status.executors {
            let share = executor.requests as f64 / executed as f64;
            assert!(
                (0.6 * even..=1.4 * even).contains(&share),
                "{helpers}: {:?}",
                status.executors
            );
            assert!((1..=executor.requests).contains(&executor.sub_batches), "{executor:?}");
        }
        assert!(status.devices.iter().all(|device| device.in_flight == 0));
        let counted: u64 = status.devices.iter().map(|device| device.counts.requests).sum();
        assert_eq!(counted, executed);
    }
}

#[test]
fn data_that_another_sidecore_writes_and_reads_are_whole() {
    let mut rig = Rig::new(Faults::default(), 2, ServerOptions::default());
    let mut devices = Vec::new();
    for client in 0..4 {
        rig.add_client(ClientOptions::default());
        rig.add_device(client, "disk", ram());
        devices.push(rig.open(client, "disk"));
    }
    for round in 0..50_u8 {
        for (client, device) in devices.iter().enumerate() {
            let bytes = pattern(round ^ client as u8, 12_288);
            rig.clients[client].fill(0, &bytes);
            let write = request(Operation::Write, u64::from(round) * 12_288, 12_288);
            rig.clients[client].client.submit(0, *device, write).unwrap();
        }
        rig.run_until(|rig| rig.clients.iter().all(|client| client.completed.len() == 1));
        for (client, device) in devices.iter().enumerate() {
            assert_eq!(rig.clients[client].take(0), Some(Ok(())));
            let bytes = rig.read(client, *device, u64::from(round) * 12_288, 12_288);
            assert!(bytes == pattern(round ^ client as u8, 12_288));
        }
    }
    assert!(rig.export.status().steering.handed_over > 50);
}

/// A store sees the requests of its device in the order in which the client has sent them.
#[test]
fn a_devices_requests_keep_their_order() {
    let mut rig = Rig::new(Faults::default(), 2, ServerOptions::default());
    let mut stores = HashMap::new();
    let mut devices = Vec::new();
    for client in 0..3 {
        rig.add_client(ClientOptions::default());
        let store = TestStore::new();
        rig.add_device(client, "disk", Arc::new(store.clone()));
        stores.insert(client, store);
        devices.push(rig.open(client, "disk"));
    }
    for round in 0..100 {
        for (client, device) in devices.iter().enumerate() {
            for tag in 0..(client as u64 + 2) * 5 {
                let write = request(Operation::Write, tag * 4096, 4096);
                rig.clients[client].client.submit(tag, *device, write).unwrap();
            }
            if round % 3 == 0 {
                rig.step();
            }
        }
        rig.run_until(|rig| rig.clients.iter().all(|client| client.client.unanswered() == 0));
        for (client, store) in &stores {
            let count = (*client as u64 + 2) * 5;
            let expected: Vec<u64> = (0..count).map(|tag| tag * 4096).collect();
            store.set(|disk| {
                let seen: Vec<u64> = disk.log.drain(..).map(|(_, offset)| offset).collect();
                assert_eq!(seen, expected);
            });
        }
    }
    assert!(rig.export.status().steering.moves > 0);
}

/// The time until a single request of a victim is answered, in the steps of a simulated clock,
/// while others keep so many unanswered.
fn latencies(flooders: usize, depth: u64, len_bytes: u64) -> Vec<Nanos> {
    let (mut rig, devices) = loaded_rig(0, flooders + 1);
    let (victim, others) = devices.split_last().unwrap();
    let mut free: Vec<Vec<u64>> = others.iter().map(|_| (0..depth).collect()).collect();
    let mut latencies = Vec::new();
    let mut begun = None;
    while latencies.len() < 200 {
        for (client, device) in others.iter().enumerate() {
            while let Some(tag) = free[client].pop() {
                let write = request(Operation::Write, tag * 4096, len_bytes);
                rig.clients[client].client.submit(tag, *device, write).unwrap();
            }
        }
        if begun.is_none() {
            begun = Some(rig.now);
            let read = request(Operation::Read, 0, 4096);
            rig.clients[flooders].client.submit(0, *victim, read).unwrap();
        }
        rig.step();
        for (client, free) in free.iter_mut().enumerate() {
            free.extend(rig.clients[client].completed.drain(..).map(|(tag, _)| tag));
        }
        if rig.clients[flooders].take(0).is_some() {
            latencies.push(rig.now.since(begun.take().unwrap()));
        }
    }
    latencies.sort_unstable();
    latencies
}

/// A step is a poll, whose work is bounded: the wait of a victim is a number of polls.
#[test]
fn a_client_that_floods_does_not_delay_another_one() {
    let alone = latencies(0, 0, 4096);
    for (depth, len_bytes) in [(128, 4096), (32, 65_536)] {
        let beside = latencies(1, depth, len_bytes);
        let p99 = |latencies: &[Nanos]| latencies[latencies.len() * 99 / 100];
        assert!(
            p99(&beside).0 <= 2 * p99(&alone).0,
            "{:?} alone, {:?} beside {depth} of {len_bytes} bytes",
            p99(&alone),
            p99(&beside)
        );
    }
}

/// All frames arrive in one queue. What the IOhost does for a flood in one poll is the least that a
/// victim waits.
#[test]
fn a_poll_is_short_while_several_clients_send_and_long_for_one() {
    for len_bytes in [4096, 16_384] {
        let (mut rig, devices) = loaded_rig(0, 2);
        let mut free: Vec<u64> = (0..128).collect();
        let mut step = |rig: &mut Rig, has_victim: bool| {
            for tag in free.drain(..) {
                let read = request(Operation::Read, tag * 16_384, len_bytes);
                rig.clients[0].client.submit(tag, devices[0], read).unwrap();
            }
            if has_victim && rig.clients[1].client.unanswered() == 0 {
                let read = request(Operation::Read, 0, 4096);
                rig.clients[1].client.submit(0, devices[1], read).unwrap();
            }
            rig.step();
            rig.clients[1].completed.clear();
            let count = rig.clients[0].completed.len();
            free.extend(rig.clients[0].completed.drain(..).map(|(tag, _)| tag));
            count as u64 * len_bytes
        };
        let most = (0..500).map(|_| step(&mut rig, true)).skip(50).max().unwrap();
        assert!((16 << 10..=48 << 10).contains(&most), "{most} bytes in a poll");
        rig.run_for(Nanos::from_millis(20));
        let most = (0..500).map(|_| step(&mut rig, false)).skip(50).max().unwrap();
        assert!(most >= 96 << 10, "{most} bytes in a poll of one client");
    }
}

#[test]
fn steady_requests_allocate_nothing() {
    for helpers in [0, 2] {
        let (mut rig, devices) = loaded_rig(helpers, 3);
        load(&mut rig, &devices, 32, 2000, 4096);
        assert_eq!(counted(&mut rig, &devices, 100_000 / 3 + 1), 0, "with {helpers} helpers");
    }
}

/// Allocations while the IOhost serves so many requests of each client.
fn counted(rig: &mut Rig, devices: &[u16], count: usize) -> u64 {
    let mut answered = 0;
    let mut free: Vec<Vec<u64>> = devices.iter().map(|_| (0..32).collect()).collect();
    let mut allocated = 0;
    while answered < count * devices.len() {
        for (client, device) in devices.iter().enumerate() {
            while let Some(tag) = free[client].pop() {
                let operation = if tag % 2 == 0 { Operation::Read } else { Operation::Write };
                let request = request(operation, tag * 4096, 4096);
                rig.clients[client].client.submit(tag, *device, request).unwrap();
            }
        }
        for client in &mut rig.clients {
            client.poll(rig.now);
        }
        let before = allocations();
        rig.poll_iohost();
        allocated += allocations() - before;
        for (client, free) in free.iter_mut().enumerate() {
            answered += rig.clients[client].completed.len();
            free.extend(rig.clients[client].completed.drain(..).map(|(tag, _)| tag));
        }
    }
    rig.run_until(|rig| rig.clients.iter().all(|client| client.client.unanswered() == 0));
    for client in &mut rig.clients {
        client.completed.clear();
    }
    allocated
}

#[test]
fn the_limits_of_a_client_hold_and_hold_up_no_other_one() {
    let (mut rig, devices) = loaded_rig(0, 2);
    let limit = Limit { per_s: 10_000, burst: 10 };
    let limits = Limits { write_iops: Some(limit), ..Limits::default() };
    let limits = Arc::new(ClientLimits::new(&limits));
    let share = ClientShare { limits: Some(limits), ..ClientShare::default() };
    rig.export.set_share(rig.ids[0], &share).unwrap();
    let begin = rig.now;
    for tag in 0..60 {
        let write = request(Operation::Write, tag * 4096, 4096);
        rig.clients[0].client.submit(tag, devices[0], write).unwrap();
    }
    rig.run_for(Nanos::from_micros(100));
    assert!((10..=12).contains(&rig.clients[0].completed.len()));
    let before = rig.now;
    rig.write(1, devices[1], 0, &pattern(1, 4096));
    assert!(rig.now.since(before) < Nanos::from_micros(50));
    rig.run_until(|rig| rig.clients[0].completed.len() == 60);
    // Fifty of them at ten in a millisecond.
    let took = rig.now.since(begin);
    assert!((Nanos::from_micros(4_900)..Nanos::from_micros(5_200)).contains(&took), "{took:?}");
    // Without limits.
    rig.export.set_share(rig.ids[0], &ClientShare::default()).unwrap();
    let before = rig.now;
    rig.clients[0].completed.clear();
    load(&mut rig, &devices, 60, 200, 4096);
    assert!(rig.now.since(before) < Nanos::from_millis(2));
}

#[test]
fn a_client_has_as_many_requests_under_way_as_its_share_permits() {
    let mut rig = Rig::simple();
    rig.add_client(ClientOptions::default());
    let store = TestStore::new();
    store.set(|disk| disk.holds = true);
    rig.add_device(0, "disk", Arc::new(store.clone()));
    let disk = rig.open(0, "disk");
    rig.export.set_share(rig.ids[0], &ClientShare { slots: 5, ..ClientShare::default() }).unwrap();
    rig.run_for(Nanos::from_millis(1));
    for tag in 0..60 {
        let write = request(Operation::Write, tag * 4096, 4096);
        rig.clients[0].client.submit(tag, disk, write).unwrap();
    }
    rig.run_for(Nanos::from_millis(20));
    assert_eq!(store.get(|disk| disk.held), 5);
    rig.export.set_share(rig.ids[0], &ClientShare { slots: 9, ..ClientShare::default() }).unwrap();
    rig.run_for(Nanos::from_millis(20));
    assert_eq!(store.get(|disk| disk.held), 9);
    store.set(|disk| disk.holds = false);
    rig.run_until(|rig| rig.clients[0].completed.len() == 60);
}
