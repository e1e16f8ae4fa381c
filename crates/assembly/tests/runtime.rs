//! Devices that are added and removed while an assembly runs.

mod common;

use std::path::Path;

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    DeviceSpec, FileOptions, Sector, SidecoreSpec, Spec, StageKind, StoreKind, StoreSpec,
};
use sidecore_assembly::{Assembly, AssemblyError};
use sidecore_driver::{BlkClient, Status};
use sidecore_kit::guest::{self, connect, read, write};
use sidecore_stage_delay::DelayStage;

use common::{device, until};

const DISK_BYTES: u64 = 1 << 20;

fn store(name: &str, kind: StoreKind) -> StoreSpec {
    StoreSpec::new(name, kind)
}

fn ram(name: &str) -> StoreSpec {
    store(name, StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 })
}

/// A disk in memory, and a file without a device.
fn spec(directory: &Path) -> Spec {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
    Spec {
        sidecores: ["sc0", "sc1"]
            .map(|name| SidecoreSpec { name: name.to_owned(), cpu: None })
            .to_vec(),
        stores: vec![ram("mem"), store("file", StoreKind::File(FileOptions::new(path)))],
        controllers: Vec::new(),
        devices: vec![device(directory, "mem")],
        ..Spec::default()
    }
}

fn complete(client: &mut BlkClient) -> Status {
    let queue = client.queue(0).unwrap();
    let completion = guest::complete(queue);
    queue.release_slot(completion.slot);
    completion.status
}

fn names(assembly: &Assembly) -> Vec<String> {
    assembly.devices().into_iter().map(|device| device.name).collect()
}

#[test]
fn a_device_is_added_served_and_removed_while_its_neighbour_works() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path());
    let assembly = Assembly::start(&spec).unwrap();
    let mut neighbour = connect(&spec.devices[0].socket);
    assert_eq!(write(&mut neighbour, 8, 1), Status::Ok);

    let file = DeviceSpec { sidecores: Vec::new(), ..device(directory.path(), "file") };
    assembly.add_device(&file, None).unwrap();
    assert_eq!(names(&assembly), ["mem", "file"]);
    // On the sidecore with the fewest queues.
    assert_eq!(assembly.devices()[1].sidecores, ["sc1"]);
    assert_eq!(assembly.stats().devices[1].name, "file");
    let mut client = connect(&file.socket);
    assert_eq!(write(&mut client, 8, 2), Status::Ok);
    until(&assembly, 1, |report| report.state == DeviceState::Running);
    assert_eq!((read(&mut client, 8), read(&mut neighbour, 8)), (2, 1));

    assembly.remove_device("file").unwrap();
    assert!(!file.socket.exists());
    assert_eq!(names(&assembly), ["mem"]);
    assert_eq!(read(&mut neighbour, 8), 1);
    // The file was flushed and closed: it can be opened again by the name of its store.
    assembly.add_device(&file, None).unwrap();
    assert_eq!(read(&mut connect(&file.socket), 8), 2);
    assert_eq!(std::fs::read(directory.path().join("disk.img")).unwrap()[4096], 2);
}

#[test]
fn a_store_that_comes_with_a_device_goes_with_the_last_one() {
    let directory = tempfile::tempdir().unwrap();
    let assembly = Assembly::start(&spec(directory.path())).unwrap();
    let (one, two) = (device(directory.path(), "one"), device(directory.path(), "two"));
    let (one, two) = (
        DeviceSpec { store: "new".to_owned(), ..one },
        DeviceSpec { store: "new".to_owned(), ..two },
    );
    assembly.add_device(&one, Some(&ram("new"))).unwrap();
    assembly.add_device(&two, None).unwrap();
    assert_eq!(write(&mut connect(&one.socket), 8, 3), Status::Ok);
    assembly.remove_device("one").unwrap();
    assert_eq!(read(&mut connect(&two.socket), 8), 3);
    assembly.remove_device("two").unwrap();
    let error = assembly.add_device(&one, None).unwrap_err();
    assert_eq!(error.to_string(), "device \"one\" names store \"new\", which does not exist");
    assembly.add_device(&one, Some(&ram("new"))).unwrap();
    assert_eq!(read(&mut connect(&one.socket), 8), 0);
}

#[test]
fn a_refused_addition_has_a_reason_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let assembly = Assembly::start(&spec(path)).unwrap();
    let message = |device: &DeviceSpec, store: Option<&StoreSpec>| {
        assembly.add_device(device, store).expect_err("it was added").to_string()
    };
    let new = device(path, "new");
    let named = |store: &str| DeviceSpec { store: store.to_owned(), ..new.clone() };
    assert_eq!(
        message(&device(path, "mem"), None),
        "there is a device \"mem\" already; choose another name"
    );
    let same_socket = DeviceSpec { socket: path.join("./mem.sock"), ..named("mem") };
    assert!(message(&same_socket, None).contains("is the socket of device \"mem\""));
    assert_eq!(
        message(&named("mem"), Some(&ram("mem"))),
        "there is a store \"mem\" already; choose another name"
    );
    assert!(message(&named("no"), None).contains("names store \"no\""));
    let lost = DeviceSpec { sidecores: vec!["no".to_owned()], ..named("mem") };
    assert!(message(&lost, None).contains("names sidecore \"no\""));
    let nowhere = DeviceSpec { socket: path.join("no/such/new.sock"), ..named("file") };
    assert!(message(&nowhere, None).starts_with("device \"new\": "));
    let circle = StoreSpec::in_front_of("new", "new", StageKind::Delay(DelayStage::default()));
    assert!(matches!(assembly.add_device(&new, Some(&circle)), Err(AssemblyError::Cycle { .. })));
    assert_eq!(message(&new, None), "device \"new\" names store \"new\", which does not exist");
    // A second writer to the file is refused, also through a stage in front of it.
    assembly.add_device(&device(path, "file"), None).unwrap();
    let slow = StoreSpec::in_front_of("slow", "file", StageKind::Delay(DelayStage::default()));
    assert!(
        message(&named("slow"), Some(&slow))
            .contains("device \"file\" writes to store \"slow\" too")
    );
    assembly.add_device(&DeviceSpec { read_only: true, ..named("slow") }, Some(&slow)).unwrap();
    assembly.remove_device("new").unwrap();
    assert_eq!(names(&assembly), ["mem", "file"]);

    assert_eq!(assembly.remove_device("no").unwrap_err().to_string(), "there is no device \"no\"");
    assembly.drain();
    assert!(matches!(assembly.add_device(&new, None), Err(AssemblyError::Ending)));
}

#[test]
fn a_removal_waits_for_requests_in_flight_and_succeeds_once() {
    let directory = tempfile::tempdir().unwrap();
    let assembly = Assembly::start(&spec(directory.path())).unwrap();
    let slow =
        StoreSpec::in_front_of("slow", "mem", StageKind::Delay(DelayStage { delay_us: 50_000 }));
    let device = device(directory.path(), "slow");
    assembly.add_device(&device, Some(&slow)).unwrap();
    let mut client = connect(&device.socket);
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[9; 4096]);
    queue.submit_write(slot, Sector(8), 4096).unwrap();
    queue.publish().unwrap();
    until(&assembly, 1, |report| report.counters.batches == 1);
    let results: Vec<_> = std::thread::scope(|scope| {
        let removals: Vec<_> =
            (0..4).map(|_| scope.spawn(|| assembly.remove_device("slow").is_ok())).collect();
        removals.into_iter().map(|removal| removal.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|removed| **removed).count(), 1);
    assert_eq!(complete(&mut client), Status::Ok);
    assert_eq!(sidecore_block::dropped_tags(), 0);
}
