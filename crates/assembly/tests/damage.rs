//! Damaged metadata under a running assembly: one volume of a pool is lost, the other volumes are
//! served, and a repair gives back the rest.

mod common;

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use sidecore_assembly::offline::{GiveUp, RepairOptions};
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    ControllerSpec, CrashLogSpec, DeviceSpec, FileOptions, FormatSpec, SidecoreSpec, Spec,
    StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_assembly::{Assembly, ErrorKind, offline};
use sidecore_driver::Status;
use sidecore_kit::guest::{connect, flush, read, write};

use common::device;

const STORE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 8 << 20;
const NODE_BYTES: usize = 4096;

fn image(directory: &Path) -> PathBuf {
    directory.join("pool.img")
}

/// A pool on a file, and a device in front of each of these volumes, which are created with the
/// pool.
fn spec(directory: &Path, volumes: &[&str]) -> Spec {
    let path = image(directory);
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(STORE_BYTES).unwrap();
    }
    let volume = |name: &&str| {
        let kind = StoreKind::Volume(VolumeSpec {
            size_bytes: Some(VOLUME_BYTES),
            ..VolumeSpec::new("pool", *name)
        });
        StoreSpec::new(*name, kind)
    };
    let below = StoreSpec::new("below", StoreKind::File(FileOptions::new(path)));
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: [below].into_iter().chain(volumes.iter().map(volume)).collect(),
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            ..ControllerSpec::new("pool", "below")
        }],
        devices: volumes
            .iter()
            .map(|name| DeviceSpec { store: (*name).to_owned(), ..device(directory, name) })
            .collect(),
        ..Spec::default()
    }
}

/// Damages the newest node of this kind (1: the catalogue, 2: extents) and owner.
fn damage(directory: &Path, kind: u8, owner: u64) {
    let file = std::fs::File::options().read(true).write(true).open(image(directory)).unwrap();
    let bytes = std::fs::read(image(directory)).unwrap();
    let word = |node: &[u8], at: usize| u64::from_le_bytes(node[at..at + 8].try_into().unwrap());
    let nodes = bytes.chunks_exact(NODE_BYTES).enumerate().filter(|(_, node)| {
        node.starts_with(b"SCVOLNOD") && node[8] == kind && word(node, 16) == owner
    });
    let (index, _) = nodes.max_by_key(|(_, node)| word(node, 24)).unwrap();
    file.write_all_at(b"damage", (index * NODE_BYTES + 70) as u64).unwrap();
}

fn carry_out() -> RepairOptions {
    RepairOptions { carry_out: true, ..RepairOptions::default() }
}

/// A pool with volumes of these names, numbered from 1 on, each with one page written.
fn pool(directory: &Path, names: &[&str]) -> Spec {
    let spec = spec(directory, names);
    let assembly = Assembly::start(&spec).unwrap();
    for (device, value) in spec.devices.iter().zip(1..) {
        let mut guest = connect(&device.socket);
        assert_eq!(write(&mut guest, 8, value), Status::Ok);
        flush(&mut guest);
    }
    drop(assembly);
    spec
}

/// The volumes of a damaged pool are read, and written where they have blocks of their own. They
/// get no new blocks.
fn check_frozen(assembly: &Assembly, good: &Path) {
    let controller = assembly.controllers().swap_remove(0);
    let mut good = connect(good);
    assert_eq!(read(&mut good, 8), 1);
    assert_eq!(write(&mut good, 8, 9), Status::Ok);
    flush(&mut good);
    assert_eq!(write(&mut good, 4096, 1), Status::IoError);
    let refused = controller.create_volume("new", 1 << 20, None).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Failed);
    assert!(refused.message.contains("volume repair"), "{refused}");
    let events = controller.report().events;
    assert!(events.iter().any(|event| event.what.contains("gives out no blocks")), "{events:?}");
    assert_eq!(assembly.remove_device("bad").map_err(|error| error.to_string()), Ok(()));
}

#[test]
fn one_damaged_volume_keeps_no_other_from_being_served_and_is_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let spec = pool(path, &["good", "bad", "other"]);
    damage(path, 2, 2);

    let assembly = Assembly::start(&spec).unwrap();
    let reports = assembly.devices();
    let bad = &reports[1];
    assert_eq!((bad.name.as_str(), bad.state), ("bad", DeviceState::Broken));
    let reason = bad.reason.as_deref().unwrap();
    assert!(
        reason.contains("volume \"bad\" is damaged") && reason.contains("volume repair"),
        "{reason}"
    );
    assert!(!bad.needs_reset && !spec.devices[1].socket.exists());
    assert!(
        reports[0].warnings.iter().any(|warning| warning.contains("gives out no blocks")),
        "{reports:?}"
    );
    let controller = assembly.controllers().swap_remove(0);
    let damaged: Vec<bool> =
        controller.volumes().unwrap().iter().map(|volume| volume.damaged).collect();
    assert_eq!(damaged, [false, true, false]);
    let report = controller.report();
    assert!(report.read_only && report.reason.unwrap().contains("checksum"));

    check_frozen(&assembly, &spec.devices[0].socket);
    drop(controller);
    drop(assembly);

    // Without `carry_out` the file is unchanged.
    let before = std::fs::read(image(path)).unwrap();
    let plan = offline::repair(&image(path), &RepairOptions::default()).unwrap();
    assert!(plan.needed && plan.decided && !plan.done);
    assert_eq!((plan.lost_volumes, plan.losses.len()), (0, 1));
    assert_eq!((plan.losses[0].volume.as_str(), plan.losses[0].size_bytes), ("bad", VOLUME_BYTES));
    assert!(std::fs::read(image(path)).unwrap() == before);
    let repair = offline::repair(&image(path), &carry_out()).unwrap();
    assert!(repair.done && repair.generation == plan.generation + 1);
    assert!(offline::check(&image(path)).unwrap().clean);
    assert!(!offline::repair(&image(path), &RepairOptions::default()).unwrap().needed);

    let assembly = Assembly::start(&spec).unwrap();
    assert!(
        assembly
            .devices()
            .iter()
            .all(|report| report.reason.is_none() && report.warnings.is_empty())
    );
    for (device, value) in spec.devices.iter().zip([9, 0, 3]) {
        let mut guest = connect(&device.socket);
        assert_eq!(read(&mut guest, 8), value, "{}", device.name);
        assert_eq!(write(&mut guest, 4096, 5), Status::Ok);
        flush(&mut guest);
    }
    drop(assembly);
    assert!(offline::check(&image(path)).unwrap().clean);
}

#[test]
fn a_damaged_catalogue_breaks_all_devices_and_is_never_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let spec = pool(path, &["one", "two"]);
    damage(path, 1, 0);
    // The start creates missing volumes, unless damage may hide some.
    let assembly = Assembly::start(&spec).unwrap();
    for report in assembly.devices() {
        assert_eq!(report.state, DeviceState::Broken);
        assert!(report.reason.unwrap().contains("volume repair"));
    }
    drop(assembly);
    let plan = offline::repair(&image(path), &RepairOptions::default()).unwrap();
    assert_eq!((plan.lost_volumes, plan.lost_numbers), (2, vec![(1, 2)]));
}

#[test]
fn a_repair_after_a_killed_daemon_needs_accept_loss() {
    let (directory, log) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let killed = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), &["good", "bad"]);
    spec.controllers[0].crash_log = Some(CrashLogSpec::new(log.path()));
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[1].socket);
    assert_eq!(write(&mut guest, 8, 1), Status::Ok);
    flush(&mut guest);
    // The copy is as after a SIGKILL.
    let path = killed.path();
    std::fs::copy(image(directory.path()), image(path)).unwrap();
    drop(assembly);
    damage(path, 2, 2);
    let before = std::fs::read(image(path)).unwrap();

    let error = offline::repair(&image(path), &carry_out()).unwrap_err().to_string();
    assert!(
        error.contains("its daemon has not ended in order") && error.contains("--accept-loss"),
        "{error}"
    );
    assert!(std::fs::read(image(path)).unwrap() == before);
    assert!(offline::repair(&image(path), &RepairOptions::default()).unwrap().needed);
    let accepted = RepairOptions { accept_loss: true, ..carry_out() };
    assert!(offline::repair(&image(path), &accepted).unwrap().done);
    std::fs::write(image(path), &before).unwrap();
    let error = offline::format(&image(path), &FormatSpec::default(), GiveUp::Contents)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("its daemon has not ended in order") && error.contains("--accept-loss"),
        "{error}"
    );
    assert!(std::fs::read(image(path)).unwrap() == before);
    offline::format(&image(path), &FormatSpec::default(), GiveUp::Unreplayed).unwrap();
    // After an orderly end no loss has to be accepted.
    damage(directory.path(), 2, 2);
    assert!(offline::repair(&image(directory.path()), &carry_out()).unwrap().done);
    offline::format(&image(directory.path()), &FormatSpec::default(), GiveUp::Contents).unwrap();
}

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}

#[test]
fn a_removal_after_the_end_starts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = pool(directory.path(), &["good", "bad"]);
    damage(directory.path(), 2, 2);
    spec.sidecores[0].name = "again".to_owned();
    spec.devices.iter_mut().for_each(|device| device.sidecores = vec!["again".to_owned()]);
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(threads("again"), 1);
    assembly.drain();
    assert_eq!(threads("again"), 0);
    assert!(assembly.remove_device("bad").is_err());
    assert_eq!(threads("again"), 0);
}
