//! Guests of virtio disks are served over a restart of the daemon, on the same connection.

#[allow(dead_code, reason = "it uses a part")]
mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    FileOptions, Sector, SidecoreSpec, Spec, StageKind, StoreKind, StoreSpec,
};
use sidecore_assembly::{Assembly, LeftDevice};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Notify, Status};
use sidecore_kit::{guest, wait};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};

use common::{PATIENCE, device, until};

const PAGE: usize = 4096;
const PAGES: u64 = 256;

fn spec(directory: &Path) -> Spec {
    let path = directory.join("disk.img");
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(PAGES * PAGE as u64).unwrap();
    }
    let kind = StoreKind::File(FileOptions { direct: false, ..FileOptions::new(path) });
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![StoreSpec::new("disk", kind)],
        controllers: Vec::new(),
        devices: vec![device(directory, "disk")],
        ..Spec::default()
    }
}

/// Starts the next daemon with no more than a service manager keeps.
fn restart(assembly: Assembly, spec: &Spec) -> Assembly {
    let mut left = assembly.hand_over();
    drop(assembly);
    assert_eq!(left.len(), 1);
    assert!(!spec.devices[0].socket.exists(), "the socket goes with its daemon");
    let LeftDevice { name, state, fds } = left.remove(0);
    Assembly::take_over(spec, &mut vec![LeftDevice { name, state, fds }]).unwrap()
}

fn complete(queue: &mut BlkQueue) {
    assert_eq!(guest::complete(queue).status, Status::Ok);
}

/// Writes pages with new contents and reads them back, until `stop` is set.
fn verify(queue: &mut BlkQueue, seed: u64, stop: &AtomicBool, rounds: &AtomicU64) {
    let mut written = [None::<u8>; PAGES as usize];
    let mut number = seed;
    while !stop.load(Ordering::Relaxed) {
        number =
            number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (page, byte) = ((number >> 33) % PAGES, (number >> 48) as u8);
        let sector = Sector(page * PAGE as u64 / 512);
        let slot = queue.take_slot().unwrap();
        if let Some(before) = written[page as usize] {
            queue.submit_read(slot, sector, PAGE as u32).unwrap();
            complete(queue);
            let mut data = [0; PAGE];
            queue.read_data(slot, 0, &mut data);
            assert_eq!(data, [before; PAGE], "page {page}");
        }
        queue.write_data(slot, 0, &[byte; PAGE]);
        queue.submit_write(slot, sector, PAGE as u32).unwrap();
        complete(queue);
        queue.release_slot(slot);
        written[page as usize] = Some(byte);
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_guest_reads_its_writes_over_restarts() {
    for kind in 0..4 {
        let (packed, notify) =
            (kind % 2 == 1, if kind < 2 { Notify::Polled } else { Notify::Interrupt });
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path());
        let mut assembly = Some(Assembly::start(&spec).unwrap());
        let options =
            ClientOptions { packed, notify, huge_pages: false, ..ClientOptions::default() };
        let mut client = BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
        let mut queue = client.take_queue(0).unwrap();
        let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| verify(&mut queue, 1 + u64::from(packed), &stop, &rounds));
            for _ in 0..5 {
                // At an arbitrary moment of the guest's work.
                let before = rounds.load(Ordering::Relaxed);
                wait::until("the guest is served", PATIENCE, || {
                    rounds.load(Ordering::Relaxed) >= before + 200 || guest.is_finished()
                });
                let next = restart(assembly.take().unwrap(), &spec);
                assert_eq!(next.devices()[0].state, DeviceState::Running);
                assembly = Some(next);
            }
            stop.store(true, Ordering::Relaxed);
            guest.join().unwrap();
        });
        // The connection is the first one still, and its messages are answered.
        assert_eq!(client.status().unwrap() & 4, 4, "DRIVER_OK");
        client.share_memory_again().unwrap();
        verify(&mut queue, 7, &AtomicBool::new(true), &rounds);
        let slot = queue.take_slot().unwrap();
        queue.submit_read(slot, Sector(0), PAGE as u32).unwrap();
        complete(&mut queue);
        queue.release_slot(slot);
        drop(assembly);
    }
}

/// The next daemon opens the stage again.
#[test]
fn a_disk_whose_stage_has_panicked_is_handed_over() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path());
    let (affected, when) = (Affected::Reads, When::EveryNth(2));
    let rules = vec![FaultRule { affected, when, fault: Fault::Panic }];
    spec.stores[0].stages = vec![StageKind::Fault(FaultPlan { seed: 0, rules }).into()];
    let mut assembly = Assembly::start(&spec).unwrap();
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let mut client = BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
    for byte in 1..=3 {
        assert_eq!(guest::write(&mut client, 8, byte), Status::Ok);
        assert_eq!(guest::read(&mut client, 8), byte);
        let queue = client.queue(0).unwrap();
        for _ in 0..2 {
            let slot = queue.take_slot().unwrap();
            queue.submit_read(slot, Sector(8), PAGE as u32).unwrap();
            assert_eq!(guest::complete(queue).status, Status::IoError);
            queue.release_slot(slot);
        }
        let report = &assembly.devices()[0];
        assert_eq!(report.state, DeviceState::Broken);
        let reason = report.reason.as_ref().unwrap();
        assert!(reason.ends_with("restart the daemon, which opens it again"), "{reason}");
        assembly = restart(assembly, &spec);
        assert_eq!(assembly.devices()[0].state, DeviceState::Running);
    }
    assert_eq!(client.status().unwrap() & 4, 4, "DRIVER_OK");
}

/// The guest would see a device with other properties: its client is disconnected, and may connect
/// again.
#[test]
fn a_client_of_a_changed_disk_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let assembly = Assembly::start(&spec).unwrap();
    let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
    let mut client = BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
    let mut left = assembly.hand_over();
    drop(assembly);
    let mut other = spec.clone();
    other.devices[0].read_only = true;
    let assembly = Assembly::take_over(&other, &mut left).unwrap();
    assert!(client.status().is_err(), "the client is disconnected");
    until(&assembly, 0, |report| report.state == DeviceState::Waiting);
    BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
}

/// A snapshot that was changed or cut starts no queue with state that is not the client's.
#[test]
fn a_client_with_an_invalid_state_is_disconnected() {
    for (from, to) in [
        (r#""size":"#, r#""size":7"#),
        (r#""len_bytes":"#, r#""len_bytes":9"#),
        (r#""kick":{"Eventfd":"#, r#""kick":{"Eventfd":99"#),
        (r#""regions":[["#, r#""regions":[[["#),
        (r#""offered":"#, r#""offered":1"#),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path());
        let assembly = Assembly::start(&spec).unwrap();
        let options = ClientOptions { huge_pages: false, ..ClientOptions::default() };
        let mut client = BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
        let mut left = assembly.hand_over();
        drop(assembly);
        let state = String::from_utf8(left[0].state.clone()).unwrap();
        assert!(state.contains(from), "{from} in {state}");
        left[0].state = state.replace(from, to).into_bytes();
        let assembly = Assembly::take_over(&spec, &mut left).unwrap();
        assert!(client.status().is_err(), "{to}: the client is disconnected");
        until(&assembly, 0, |report| report.state == DeviceState::Waiting);
        BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
    }
}
