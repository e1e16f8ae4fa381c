//! An assembly with guest drivers in the same process.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    FileOptions, Sector, SidecoreSpec, Spec, StageKind, StageSpec, StoreKind, StoreSpec, Values,
};
use sidecore_assembly::{Assembly, AssemblyError};
use sidecore_driver::{BlkClient, BlkQueue, ClientError, ClientOptions, Completion, Status};
use sidecore_kit::guest;
use sidecore_stage_delay::DelayStage;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};

use common::{device, until};

fn ram(name: &str, size_bytes: u64) -> StoreSpec {
    StoreSpec::new(name, StoreKind::Ram { size_bytes, block_bytes: 512 })
}

/// Stores, and a device of the same name in front of each.
fn spec(directory: &Path, stores: Vec<StoreSpec>) -> Spec {
    Spec {
        sidecores: ["sc0", "sc1"]
            .map(|name| SidecoreSpec { name: name.to_owned(), cpu: None })
            .to_vec(),
        devices: stores.iter().map(|store| device(directory, &store.name)).collect(),
        stores,
        controllers: Vec::new(),
        ..Spec::default()
    }
}

fn connect(spec: &Spec, device: usize) -> BlkClient {
    let options = ClientOptions {
        queues: spec.devices[device].queues,
        huge_pages: false,
        ..ClientOptions::default()
    };
    BlkClient::connect(&spec.devices[device].socket, &options).unwrap()
}

fn complete(queue: &mut BlkQueue) -> Completion {
    let completion = guest::complete(queue);
    queue.release_slot(completion.slot);
    completion
}

fn write(queue: &mut BlkQueue, sector: u64, byte: u8) -> Status {
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[byte; 4096]);
    queue.submit_write(slot, Sector(sector), 4096).unwrap();
    complete(queue).status
}

fn read(queue: &mut BlkQueue, sector: u64) -> (Status, u8) {
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(sector), 4096).unwrap();
    let status = complete(queue).status;
    let mut data = [0; 4096];
    queue.read_data(slot, 0, &mut data);
    assert!(data.iter().all(|byte| *byte == data[0]));
    (status, data[0])
}

#[test]
fn a_disk_waits_runs_and_waits_again_and_keeps_its_contents_and_counters() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), vec![ram("mem", 1 << 20)]);
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(assembly.devices()[0].state, DeviceState::Waiting);
    {
        let mut client = connect(&spec, 0);
        assert_eq!(client.config().capacity_sectors, 2048);
        let report = until(&assembly, 0, |report| report.state == DeviceState::Running);
        assert_eq!(report.queues_running, 1);
        assert_eq!(assembly.stats().sidecores[0].queues, 1);
        let queue = client.queue(0).unwrap();
        assert_eq!(write(queue, 8, 7), Status::Ok);
        assert_eq!(read(queue, 8), (Status::Ok, 7));
    }
    until(&assembly, 0, |report| report.state == DeviceState::Waiting);
    let mut client = connect(&spec, 0);
    assert_eq!(read(client.queue(0).unwrap(), 8), (Status::Ok, 7));

    // Counters are published a moment after the completion.
    let counters = until(&assembly, 0, |report| report.counters.latency_ns.count == 3).counters;
    assert_eq!((counters.requests, counters.reads, counters.writes), (3, 2, 1));
    assert_eq!((counters.bytes_read, counters.bytes_written, counters.bytes), (8192, 4096, 12288));
    assert!(counters.latency_ns.p50 > 0 && counters.latency_ns.p50 <= counters.latency_ns.max);
}

#[test]
fn a_disk_of_sixty_four_queues_serves_each_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), vec![ram("mem", 1 << 20)]);
    spec.devices[0].queues = 64;
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec, 0);
    for index in 0..64 {
        let queue = client.queue(index).unwrap();
        assert_eq!(write(queue, u64::from(index) * 8, index as u8), Status::Ok);
        assert_eq!(read(queue, u64::from(index) * 8), (Status::Ok, index as u8));
    }
    let report = until(&assembly, 0, |report| report.counters.requests == 128);
    assert_eq!(report.queues_running, 64);
}

#[test]
fn queues_are_spread_over_the_sidecores() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), vec![ram("mem", 1 << 20)]);
    spec.devices[0].queues = 3;
    spec.devices[0].sidecores = vec!["sc0".to_owned(), "sc1".to_owned()];
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec, 0);
    for index in 0..3 {
        assert_eq!(write(client.queue(index).unwrap(), u64::from(index) * 8, 1), Status::Ok);
    }
    let queues: Vec<u64> =
        assembly.stats().sidecores.iter().map(|sidecore| sidecore.queues).collect();
    assert_eq!(queues, [2, 1]);
    assert!(assembly.stats().devices[0].queues.iter().all(|queue| queue.requests == 1));
}

#[test]
fn stores_are_stacked_and_fail_as_planned() {
    let directory = tempfile::tempdir().unwrap();
    let bad =
        FaultRule { affected: Affected::All, when: When::Touching(4096..8192), fault: Fault::Eio };
    let stores = vec![
        ram("mem", 1 << 20),
        StoreSpec::in_front_of(
            "bad",
            "mem",
            StageKind::Fault(FaultPlan { seed: 0, rules: vec![bad] }),
        ),
        StoreSpec::in_front_of("slow", "bad", StageKind::Delay(DelayStage { delay_us: 20_000 })),
    ];
    let spec = spec(directory.path(), stores);
    let assembly = Assembly::start(&spec).unwrap();
    let (mut mem, mut slow) = (connect(&spec, 0), connect(&spec, 2));
    let before = Instant::now();
    assert_eq!(write(slow.queue(0).unwrap(), 0, 3), Status::Ok);
    // The delay counts from the start of the sidecore's turn, which may have been late.
    assert!(before.elapsed() >= Duration::from_millis(10));
    assert_eq!(read(mem.queue(0).unwrap(), 0), (Status::Ok, 3));
    assert_eq!(read(slow.queue(0).unwrap(), 8).0, Status::IoError);
    until(&assembly, 2, |report| report.counters.errors == 1);
    let slow = &assembly.devices()[2];
    assert_eq!(
        (slow.store_type.as_str(), &slow.stages[..]),
        ("delay", &["delay".to_owned(), "fault".to_owned()][..])
    );
}

#[test]
fn requests_pass_the_stages_of_a_store_in_their_order() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let fault = |affected, when| {
        let rules = vec![FaultRule { affected, when, fault: Fault::Eio }];
        StageKind::Fault(FaultPlan { seed: 0, rules }).into()
    };
    // A request that the first stage refuses is not counted by the second one.
    let stages = vec![
        fault(Affected::All, When::Touching(4096..8192)),
        fault(Affected::Writes, When::EveryNth(2)),
        StageKind::Delay(DelayStage::default()).into(),
    ];
    let bottoms = [
        ("file", StoreKind::File(FileOptions::new(&image))),
        ("ram", StoreKind::Ram { size_bytes: 1 << 20, block_bytes: 512 }),
    ];
    let staged = |(name, kind)| StoreSpec { stages: stages.clone(), ..StoreSpec::new(name, kind) };
    let spec = spec(directory.path(), bottoms.map(staged).into());
    let assembly = Assembly::start(&spec).unwrap();
    for (device, name) in ["file", "ram"].into_iter().enumerate() {
        let report = &assembly.devices()[device];
        assert_eq!(
            (report.store_type.as_str(), report.stages.join(",").as_str()),
            (name, "fault,fault,delay")
        );
        let mut client = connect(&spec, device);
        let queue = client.queue(0).unwrap();
        let statuses = [8, 0, 8, 0].map(|sector| write(queue, sector, 7));
        assert_eq!(statuses, [Status::IoError, Status::Ok, Status::IoError, Status::IoError]);
        assert_eq!(read(queue, 0), (Status::Ok, 7));
        assert_eq!(read(queue, 8).0, Status::IoError);
    }
    assembly.drain();
    assert_eq!(std::fs::read(&image).unwrap()[..4096], [7; 4096]);
}

#[test]
fn a_drain_finishes_requests_in_flight_and_flushes_files() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let stores = vec![
        StoreSpec::new("disk", StoreKind::File(FileOptions::new(&image))),
        StoreSpec::in_front_of("slow", "disk", StageKind::Delay(DelayStage { delay_us: 200_000 })),
    ];
    let mut spec = spec(directory.path(), stores);
    spec.devices.remove(0);
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec, 0);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[9; 4096]);
    queue.submit_write(slot, Sector(0), 4096).unwrap();
    queue.publish().unwrap();
    // The request is in flight in the store for a while.
    until(&assembly, 0, |report| report.counters.batches == 1);
    assembly.drain();
    let mut completions = Vec::new();
    assert_eq!(queue.poll_completions(&mut completions).unwrap(), 1);
    assert_eq!(completions[0].status, Status::Ok);
    assert_eq!(std::fs::read(&image).unwrap()[..4096], [9; 4096]);
    assert!(!spec.devices[0].socket.exists());
    // Reports outlive the drain, and a second drain does nothing.
    assert_eq!(assembly.devices()[0].state, DeviceState::Waiting);
    assembly.drain();
    assert_eq!(assembly.stats().devices[0].queues[0].writes, 1);
}

#[test]
fn a_guest_that_breaks_its_disk_harms_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), vec![ram("one", 1 << 20), ram("two", 1 << 20)]);
    let assembly = Assembly::start(&spec).unwrap();
    let (mut one, mut two) = (connect(&spec, 0), connect(&spec, 1));
    assert_eq!(write(one.queue(0).unwrap(), 0, 1), Status::Ok);
    let queue = one.queue(0).unwrap();
    // More available entries than the ring has.
    queue.raw_ring().set_available_index(0x4000);
    queue.kick().unwrap();
    let report = until(&assembly, 0, |report| report.state == DeviceState::Broken);
    assert!(report.needs_reset);
    assert!(report.reason.unwrap().starts_with("queue 0: "));
    assert_eq!(write(two.queue(0).unwrap(), 0, 2), Status::Ok);
    assert_eq!(assembly.devices()[1].state, DeviceState::Running);
    // The next guest finds the disk intact.
    drop(one);
    until(&assembly, 0, |report| report.state == DeviceState::Waiting);
    assert_eq!(read(connect(&spec, 0).queue(0).unwrap(), 0), (Status::Ok, 1));
}

#[test]
fn a_ring_larger_than_allowed_is_not_started() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), vec![ram("mem", 1 << 20)]);
    let assembly = Assembly::start(&spec).unwrap();
    let options = ClientOptions { queue_size: 512, huge_pages: false, ..ClientOptions::default() };
    let refused = match BlkClient::connect(&spec.devices[0].socket, &options) {
        Err(_) => true,
        // The start of a queue is not answered; the connection ends.
        Ok(mut client) => client.read_config().is_err(),
    };
    assert!(refused);
    until(&assembly, 0, |report| report.state == DeviceState::Waiting);
    let mut client = connect(&spec, 0);
    assert_eq!(write(client.queue(0).unwrap(), 0, 1), Status::Ok);
}

/// One guest writes to a store, another one sees it through a stage that refuses writes.
#[test]
fn a_read_only_stage_protects_a_store_that_is_shared() {
    let directory = tempfile::tempdir().unwrap();
    let stage = StageSpec::from_values("read-only", &Values::default()).unwrap();
    let stores = vec![ram("mem", 1 << 20), StoreSpec::in_front_of("shown", "mem", stage)];
    let spec = spec(directory.path(), stores);
    let assembly = Assembly::start(&spec).unwrap();
    let (mut writer, mut reader) = (connect(&spec, 0), connect(&spec, 1));
    assert_eq!(write(writer.queue(0).unwrap(), 0, 3), Status::Ok);
    assert_eq!(write(reader.queue(0).unwrap(), 0, 4), Status::IoError);
    assert_eq!(read(reader.queue(0).unwrap(), 0), (Status::Ok, 3));
    let reports = assembly.devices();
    assert!(reports[1].read_only && !reports[0].read_only);
    assert_eq!(reports[1].stages, ["read-only"]);
}

#[test]
fn a_read_only_disk_is_read_only_on_a_writable_store() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), vec![ram("mem", 1 << 20)]);
    spec.devices[0].read_only = true;
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec, 0);
    assert_ne!(write(client.queue(0).unwrap(), 0, 1), Status::Ok);
    assert_eq!(read(client.queue(0).unwrap(), 0), (Status::Ok, 0));
    assert!(assembly.devices()[0].read_only);
}

#[test]
fn a_refused_start_has_a_reason_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let good = || spec(directory.path(), vec![ram("mem", 1 << 20)]);
    let message = |spec: &Spec| -> String {
        match Assembly::start(spec) {
            Ok(_) => panic!("started"),
            Err(error) => error.to_string(),
        }
    };

    let mut spec = good();
    spec.devices[0].store = "no".to_owned();
    assert_eq!(message(&spec), "device \"mem\" names store \"no\", which does not exist");
    let mut spec = good();
    spec.devices[0].sidecores = vec!["no".to_owned()];
    assert_eq!(message(&spec), "device \"mem\" names sidecore \"no\", which does not exist");
    spec.devices[0].sidecores.clear();
    assert_eq!(message(&spec), "device \"mem\": it has no sidecore");
    let mut spec = good();
    spec.stores[0] = StoreSpec::in_front_of("mem", "mem", StageKind::Delay(DelayStage::default()));
    assert!(matches!(Assembly::start(&spec), Err(AssemblyError::Cycle { .. })));
    let mut spec = good();
    spec.stores[0].kind = StoreKind::File(FileOptions::new("/no/such"));
    assert!(message(&spec).contains("/no/such"));
    let mut spec = good();
    spec.devices[0].queues = 65;
    assert!(message(&spec).contains("1 to 64 queues"));
    // The second device's socket fails after the first device has been served.
    let mut spec = self::spec(directory.path(), vec![ram("one", 1 << 20), ram("two", 1 << 20)]);
    spec.devices[1].socket = directory.path().join("no/such/new.sock");
    assert!(message(&spec).starts_with("device \"two\": "));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    assert!(matches!(
        BlkClient::connect(&spec.devices[0].socket, &ClientOptions::default()),
        Err(ClientError::Io { .. })
    ));
}
