//! Drivers and VMMs that vanish, fail and misbehave, and the NVMe functions that they use.

mod common;
#[path = "common/graph.rs"]
mod graph;
#[path = "common/host.rs"]
mod host;

use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{DeviceSpec, IdleMode, Sector};
use sidecore_driver::{NvmeOptions, NvmeStatus, register, vfio};

use common::until;
use graph::{queue, spec};
use host::{ADAPTIVE, PAGE, connect, connect_as, read, write};

/// Pseudo-random numbers that are the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn a_client_vanishes_with_commands_in_flight_and_nothing_is_torn() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["slow"]);
        let assembly = Assembly::start(&spec).unwrap();
        let socket = &spec.devices[0].socket;
        for round in 1..4_u8 {
            let mut client = connect(socket);
            let queue = queue(&mut client);
            let before = assembly.devices()[0].counters.batches;
            for page in 0..16 {
                let slot = queue.take_slot().unwrap();
                queue.write_data(slot, 0, &[round; PAGE]);
                queue.submit_write(slot, Sector(page * 8), PAGE as u32).unwrap();
            }
            queue.publish().unwrap();
            until(&assembly, 0, |report| report.counters.batches > before);
            assert_eq!(queue.in_flight(), 16);
            drop(client);
            // The function is served when the commands in flight are done. Each page is old or new,
            // and never a mixture.
            let mut client = connect(socket);
            let queue = graph::queue(&mut client);
            for page in 0..16 {
                let byte = read(queue, page * 8);
                assert!([round - 1, round].contains(&byte), "{byte} in round {round}");
                assert_eq!(write(queue, page * 8, round), NvmeStatus::OK);
            }
        }
        assert_eq!(sidecore_block::dropped_tags(), 0);
    }
}

/// Breaks the rules of driver and VMM at random for a while.
fn misbehave(device: &DeviceSpec, random: &mut Random) {
    // A new connection works, whatever the last one has done.
    let mut client =
        connect_as(&device.socket, &NvmeOptions { queues: 2, ..NvmeOptions::default() });
    for id in 0..100_u16 {
        let queue = client.queue(id % 2).unwrap();
        let mut entry = [0; 64];
        entry
            .chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        if random.next().is_multiple_of(2) {
            // An existing command, for the function's namespace, with data at any address.
            entry[0] = [0, 1, 2, 5, 8, 9, 0xC][random.next() as usize % 7];
            entry[4..8].copy_from_slice(&[1, 0, 0, 0]);
            entry[40..48].copy_from_slice(&(random.next() % 1000).to_le_bytes());
        }
        let _ = queue.post(&entry);
        let _ = queue.publish();
        if random.next().is_multiple_of(8) {
            let _ = queue.ring_tail(random.next() as u32);
            let _ = queue.ring_head(random.next() as u32 % 300);
        }
        let _ = queue.pop_raw();
        match random.next() % 16 {
            0 => drop(client.admin().post(&entry)),
            1 => drop(client.admin().ring_tail(random.next() as u32 % 64)),
            2 => drop(client.write_register32(register::CC, random.next() as u32)),
            3 => drop(client.write_register32(register::CC, 0x0046_0001)),
            4 => drop(client.write_register64(random.next() % 0x40, random.next())),
            5 => drop(client.transport().region_write(
                vfio::PCI_BAR0_REGION_INDEX,
                random.next() % (1 << 20),
                &[0xFF; 4],
            )),
            6 => drop(client.transport().region_write(
                vfio::PCI_CONFIG_REGION_INDEX,
                random.next() % 256,
                &entry[..4],
            )),
            7 => drop(client.transport().region_write(
                vfio::PCI_BAR4_REGION_INDEX,
                random.next() % 8192,
                &entry[..16],
            )),
            8 => drop(client.remap_memory()),
            _ => {}
        }
    }
    if random.next().is_multiple_of(2) {
        let _ = client.transport().reset();
    }
}

#[test]
fn a_hostile_host_harms_itself_alone() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = spec(directory.path(), idle, &["mem", "one", "two"]);
        spec.devices.iter_mut().for_each(|device| device.queues = 2);
        let assembly = Assembly::start(&spec).unwrap();
        let [good, bad, also_bad] = &spec.devices[..] else { panic!("three devices") };
        let mut neighbour = connect(&good.socket);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let neighbour = scope.spawn(|| {
                let queue = queue(&mut neighbour);
                let mut rounds = 0_u64;
                while !ends.load(Ordering::Relaxed) || rounds < 100 {
                    let sector = rounds % 200 * 8;
                    assert_eq!(write(queue, sector, rounds as u8), NvmeStatus::OK);
                    assert_eq!(read(queue, sector), rounds as u8);
                    rounds += 1;
                }
            });
            let hostile_hosts = [(bad, 1), (also_bad, 2)].map(|(device, seed)| {
                scope.spawn(move || {
                    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ seed);
                    (0..50).for_each(|_| misbehave(device, &mut random));
                })
            });
            let results = hostile_hosts.map(|host| host.join());
            ends.store(true, Ordering::Relaxed);
            neighbour.join().unwrap();
            results.into_iter().for_each(Result::unwrap);
        });
        assert_eq!(assembly.devices()[0].state, DeviceState::Running);
        assert!(assembly.devices()[1..].iter().all(|device| device.counters.rejected > 0));
        // A driver that behaves is served on the same functions.
        for device in [bad, also_bad] {
            let mut client = connect(&device.socket);
            assert_eq!(write(queue(&mut client), 8, 5), NvmeStatus::OK);
            assert_eq!(read(queue(&mut client), 8), 5);
        }
        assert_eq!(sidecore_block::dropped_tags(), 0);
        assembly.drain();
    }
}

#[test]
fn a_fatal_state_is_reported_and_ends_with_a_reset() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), ADAPTIVE, &["mem"]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec.devices[0].socket);
    client.write_register32(register::CC, 0).unwrap();
    // The admin queue is outside of guest memory.
    client.write_register64(register::ASQ, 0xffff_0000_0000).unwrap();
    client.write_register32(register::CC, 0x0046_0001).unwrap();
    let broken = until(&assembly, 0, |report| report.state == DeviceState::Broken);
    assert!(broken.needs_reset && broken.reason.unwrap().contains("fatal"));
    client.reset_controller().unwrap();
    until(&assembly, 0, |report| report.state == DeviceState::Running && !report.needs_reset);
    // No command was in flight at the reset.
    assert_eq!(write(queue(&mut client), 8, 5), NvmeStatus::OK);
}
