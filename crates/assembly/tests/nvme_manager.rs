//! A controller's physical function as an NVMe function: its host manages volumes and the functions
//! that serve them.

mod common;
#[path = "common/host.rs"]
mod host;
#[path = "common/manager.rs"]
mod manager;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    ControllerSpec, CrashLogSpec, DeviceSpec, FileOptions, FormatSpec, FrontEndSpec, IdleMode,
    NvmeSpec, SidecoreSpec, Spec, StageKind, StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_assembly::{Assembly, ControllerHandle, ErrorKind};
use sidecore_driver::{NvmeClient, NvmeCommand, NvmeStatus, admin_opcode, register};
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};
use tempfile::TempDir;

use common::{PATIENCE, device, until};
use host::{ADAPTIVE, connect, function, read, write};
use manager::{
    allocated, attach, attached, attachment, create, delete, detach, secondary, virtualization,
};

const STORE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 8 << 20;

/// The positions of the devices in the list.
const ONE: usize = 1;
const TWO: usize = 2;

/// Statuses: type and code.
const OK: u16 = 0;
const INVALID_FIELD: u16 = 0x002;
const INVALID_NAMESPACE: u16 = 0x00B;
const OPERATION_DENIED: u16 = 0x015;
const INVALID_FORMAT: u16 = 0x10A;
const INSUFFICIENT_CAPACITY: u16 = 0x115;
const ALREADY_ATTACHED: u16 = 0x118;
const IS_PRIVATE: u16 = 0x119;
const NOT_ATTACHED: u16 = 0x11A;
const LIST_INVALID: u16 = 0x11C;
const INVALID_CONTROLLER: u16 = 0x11F;
const INVALID_RESOURCE: u16 = 0x122;
const ATTACHMENT_LIMIT: u16 = 0x127;

fn volume(name: &str) -> StoreSpec {
    let spec = VolumeSpec { size_bytes: Some(VOLUME_BYTES), ..VolumeSpec::new("pool", name) };
    StoreSpec::new(name, StoreKind::Volume(spec))
}

/// The physical function and two virtual functions.
fn spec(directory: &Path, idle: IdleMode) -> Spec {
    let path = directory.join("pool.img");
    if !path.exists() {
        std::fs::File::create(&path).unwrap().set_len(STORE_BYTES).unwrap();
    }
    let file = StoreKind::File(FileOptions { direct: false, ..FileOptions::new(path) });
    let pf = StoreKind::PhysicalFunction { controller: "pool".to_owned() };
    Spec {
        sidecores: ["sc0", "sc1"]
            .map(|name| SidecoreSpec { name: name.to_owned(), cpu: None })
            .to_vec(),
        stores: [("below", file), ("pf", pf)]
            .map(|(name, kind)| StoreSpec::new(name, kind))
            .into_iter()
            .chain(["one", "two"].map(volume))
            .collect(),
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            physical_function: true,
            ..ControllerSpec::new("pool", "below")
        }],
        devices: ["pf", "one", "two"].map(|name| function(directory, name, idle)).to_vec(),
        ..Spec::default()
    }
}

/// An assembly and a client of its physical function. Callers bind the elements in this order, and
/// drop them from the last to the first.
fn start(idle: IdleMode) -> (TempDir, Spec, Assembly, NvmeClient) {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), idle);
    let assembly = Assembly::start(&spec).unwrap();
    let pf = connect(&spec.devices[0].socket);
    (directory, spec, assembly, pf)
}

/// A store on an existing volume.
fn showing(volume: &str) -> StoreSpec {
    StoreSpec::new("other", StoreKind::Volume(VolumeSpec::new("pool", volume)))
}

fn pool(assembly: &Assembly) -> Arc<ControllerHandle> {
    assembly.controllers().swap_remove(0)
}

fn volumes(assembly: &Assembly) -> Vec<String> {
    pool(assembly).volumes().unwrap().into_iter().map(|volume| volume.name).collect()
}

fn status(client: &mut NvmeClient, sector: u64) -> NvmeStatus {
    write(client.queue(0).unwrap(), sector, 9)
}

#[test]
fn the_primary_controller_knows_volumes_and_functions() {
    let (directory, spec, assembly, mut pf) = start(IdleMode::Poll);
    let both = 1 << 3 | 1 << 7;
    assert_eq!(pf.controller().optional_admin_commands & both, both);
    assert_eq!(pf.controller().model, "Sidecore physical function");
    assert_eq!(
        pf.active_namespaces().unwrap(),
        [1],
        "the namespace of the physical function is the whole store"
    );
    assert_eq!(pf.namespace().len_bytes(), STORE_BYTES);
    assert_eq!(allocated(&mut pf), [1, 2, 3]);
    assert_eq!(
        (attached(&mut pf, 1), attached(&mut pf, 2), attached(&mut pf, 3)),
        (vec![0], vec![1], vec![2])
    );
    assert_eq!(secondary(&mut pf), [(1, true), (2, true)]);
    let controllers = pf.identify(0x13, 0).unwrap();
    assert_eq!(controllers[..8], [3, 0, 0, 0, 1, 0, 2, 0]);
    // Both hosts see the same namespace.
    let two = connect(&spec.devices[TWO].socket);
    let identified = pf.identify(0x11, 3).unwrap();
    assert_eq!(identified[..8], two.namespace().blocks.to_le_bytes());
    assert_eq!(identified[104..120], two.namespace().nguid);
    let capabilities = pf.identify(0x14, 0).unwrap();
    assert_eq!(capabilities[4], 0, "no resources that could be assigned");
    let capacity = u128::from_le_bytes(pf.identify(1, 0).unwrap()[280..296].try_into().unwrap());
    assert!(capacity > 0 && capacity <= STORE_BYTES.into(), "{capacity}");

    // Changes by the API are seen as well.
    pool(&assembly).snapshot_volume("one", "before").unwrap();
    assert_eq!(allocated(&mut pf), [1, 2, 3, 4]);
    assert_eq!(pf.identify(0x11, 4).unwrap()[99] & 1, 1, "a snapshot is write protected");
    pool(&assembly).delete_volume("before").unwrap();
    assert_eq!(allocated(&mut pf), [1, 2, 3]);
    pool(&assembly).resize_volume("two", 2 * VOLUME_BYTES).unwrap();
    assert_eq!(pf.identify(0x11, 3).unwrap()[..8], (2 * VOLUME_BYTES / 512).to_le_bytes());
    assembly.remove_device("one").unwrap();
    assert_eq!(secondary(&mut pf), [(2, true)]);
    assert!(attached(&mut pf, 2).is_empty());
    assembly.add_device(&spec.devices[ONE], None).unwrap();
    assert_eq!(secondary(&mut pf), [(1, true), (2, true)]);
    // A read-only physical function manages nothing.
    let own = NvmeSpec { model: Some("Acme 9000".to_owned()), ..NvmeSpec::default() };
    let reader = DeviceSpec {
        front_end: FrontEndSpec::Nvme(own),
        read_only: true,
        store: "pf".to_owned(),
        ..function(directory.path(), "r", ADAPTIVE)
    };
    assembly.add_device(&reader, None).unwrap();
    let reader = connect(&reader.socket);
    assert_eq!(reader.controller().optional_admin_commands & both, 0);
    assert_eq!(reader.controller().model, "Acme 9000");
}

#[test]
fn namespaces_are_created_and_deleted() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let (_directory, _, assembly, mut pf) = start(idle);
        assert_eq!(create(&mut pf, 8192, 0), (OK, 4));
        assert_eq!(create(&mut pf, 2048, 0), (OK, 5));
        assert_eq!(volumes(&assembly), ["one", "two", "ns-4", "ns-5"]);
        assert_eq!(pool(&assembly).volume("ns-4").unwrap().size_bytes, 8192 * 512);
        assert_eq!(allocated(&mut pf), [1, 2, 3, 4, 5]);
        assert_eq!((attached(&mut pf, 4), delete(&mut pf, 4)), (vec![], OK));
        assert_eq!(allocated(&mut pf), [1, 2, 3, 5]);
        // The number is free again, but another volume has the name that goes with it.
        pool(&assembly).rename_volume("ns-5", "ns-4").unwrap();
        assert_eq!(create(&mut pf, 2048, 0), (OK, 6));
        assert_eq!(volumes(&assembly), ["one", "two", "ns-4", "ns-6"]);
        // Requests that must fail.
        assert_eq!(create(&mut pf, 8192, 1).0, INVALID_FORMAT, "the store has blocks of 512 bytes");
        assert_eq!(create(&mut pf, 3, 0).0, INVALID_FORMAT, "the controller has blocks of 1 KiB");
        assert_eq!(create(&mut pf, 0, 0).0, INVALID_FIELD);
        assert_eq!(create(&mut pf, u64::MAX >> 10, 0).0, INSUFFICIENT_CAPACITY);
        assert_eq!(delete(&mut pf, 1), OPERATION_DENIED, "the whole store");
        assert_eq!(
            (delete(&mut pf, 2), delete(&mut pf, u32::MAX)),
            (OPERATION_DENIED, OPERATION_DENIED)
        );
        assert_eq!((delete(&mut pf, 77), delete(&mut pf, 0)), (INVALID_FIELD, INVALID_NAMESPACE));
        assert_eq!(volumes(&assembly).len(), 4);
        // All namespaces are deleted when none is attached.
        assert_eq!((detach(&mut pf, 2, 1), detach(&mut pf, 3, 2)), (OK, OK));
        assert_eq!((delete(&mut pf, u32::MAX), volumes(&assembly).len()), (OK, 0));
        assert_eq!(allocated(&mut pf), [1]);
        assert!(pool(&assembly).check().unwrap().clean);
    }
}

#[test]
fn a_function_serves_the_attached_volume() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let (_directory, spec, assembly, mut pf) = start(idle);
        let mut one = connect(&spec.devices[ONE].socket);
        assert_eq!(write(one.queue(0).unwrap(), 8, 1), NvmeStatus::OK);
        let nguid = one.namespace().nguid;
        let set = NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, 0x0B).dword(11, 1 << 8);
        assert!(one.admin().run(set).unwrap().status.is_ok());
        let event =
            one.admin().submit(NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0)).unwrap();

        // The function's host sees the namespace go.
        assert_eq!(detach(&mut pf, 2, 1), OK);
        assert!(one.admin().wait(event).unwrap().status.is_ok());
        assert!(one.active_namespaces().unwrap().is_empty());
        assert_eq!(
            status(&mut one, 8).name(),
            "Invalid Field in Command",
            "the number of no active namespace"
        );
        let report = assembly.devices().swap_remove(ONE);
        assert_eq!((report.volume, report.capacity_bytes), (None, 0));
        assert!(attached(&mut pf, 2).is_empty());
        assert_eq!((detach(&mut pf, 2, 1), detach(&mut pf, 3, 1)), (NOT_ATTACHED, NOT_ATTACHED));

        // And it sees another one come.
        assert_eq!(create(&mut pf, 4096, 0), (OK, 4));
        assert_eq!(attachment(&mut pf, 0, 4, &[1, 2]), IS_PRIVATE);
        assert_eq!((attach(&mut pf, 4, 2), attach(&mut pf, 3, 1)), (ATTACHMENT_LIMIT, IS_PRIVATE));
        assert_eq!((attach(&mut pf, 4, 0), attach(&mut pf, 4, 9)), (LIST_INVALID, LIST_INVALID));
        assert_eq!((attach(&mut pf, 4, 1), attach(&mut pf, 4, 1)), (OK, ALREADY_ATTACHED));
        assert_eq!(attached(&mut pf, 4), [1]);
        assert_eq!(one.active_namespaces().unwrap(), [1]);
        assert_eq!(one.read_namespace().unwrap().len_bytes(), 4096 * 512);
        assert_ne!(one.namespace().nguid, nguid);
        assert_eq!(read(one.queue(0).unwrap(), 8), 0);
        assert_eq!(write(one.queue(0).unwrap(), 8, 4), NvmeStatus::OK);
        let report = assembly.devices().swap_remove(ONE);
        assert_eq!((report.volume.as_deref(), report.capacity_bytes), (Some("ns-4"), 4096 * 512));
        assert_eq!(delete(&mut pf, 4), OPERATION_DENIED);
        // The attached volume grows like any other.
        pool(&assembly).resize_volume("ns-4", 4 << 20).unwrap();
        assert_eq!(one.read_namespace().unwrap().len_bytes(), 4 << 20);

        // The first volume again: its data are there, and no data of the other volume.
        assert_eq!((detach(&mut pf, 4, 1), attach(&mut pf, 2, 1)), (OK, OK));
        assert_eq!(one.read_namespace().unwrap().nguid, nguid);
        assert_eq!(read(one.queue(0).unwrap(), 8), 1);
        assert_eq!(delete(&mut pf, 4), OK);
        // A client that comes later sees the same namespace.
        assert_eq!(
            (detach(&mut pf, 3, 2), detach(&mut pf, 2, 1), attach(&mut pf, 2, 2)),
            (OK, OK, OK)
        );
        let mut two = connect(&spec.devices[TWO].socket);
        assert_eq!(read(two.queue(0).unwrap(), 8), 1);
        assert!(pool(&assembly).check().unwrap().clean);
        assembly.drain();
        assert_eq!(sidecore_block::dropped_tags(), 0);
    }
}

#[test]
fn no_volume_has_two_writers_or_is_deleted_while_it_is_served() {
    let (directory, spec, assembly, mut pf) = start(ADAPTIVE);
    assert_eq!((create(&mut pf, 4096, 0), create(&mut pf, 4096, 0)), ((OK, 4), (OK, 5)));
    // A disk with another front end writes to one of the volumes.
    let other = DeviceSpec { store: "other".to_owned(), ..device(directory.path(), "blk") };
    assembly.add_device(&other, Some(&showing("ns-4"))).unwrap();
    assert_eq!(detach(&mut pf, 2, 1), OK);
    assert_eq!((attach(&mut pf, 4, 1), delete(&mut pf, 4)), (IS_PRIVATE, OPERATION_DENIED));
    // The volume is found under another name, too.
    pool(&assembly).rename_volume("ns-4", "renamed").unwrap();
    assert_eq!((attach(&mut pf, 4, 1), delete(&mut pf, 4)), (IS_PRIVATE, OPERATION_DENIED));
    assert_eq!(assembly.devices()[3].volume.as_deref(), Some("renamed"));
    assembly.remove_device("blk").unwrap();
    assert_eq!(attach(&mut pf, 4, 1), OK);
    // In the other direction: the volume is attached before the disk is added.
    assert!(assembly.add_device(&other, Some(&showing("renamed"))).is_err());
    assert_eq!(pool(&assembly).delete_volume("renamed").unwrap_err().kind, ErrorKind::Conflict);
    // A detached volume can be served by another device, and deleted.
    assembly.add_device(&other, Some(&showing("one"))).unwrap();
    assert_eq!(attach(&mut pf, 2, 1), ATTACHMENT_LIMIT);
    assembly.remove_device("blk").unwrap();
    assert_eq!(delete(&mut pf, 2), OK);
    // A removed device loses its attachment. Added again, it serves its configured volume.
    let mut one = connect(&spec.devices[ONE].socket);
    assert_eq!(status(&mut one, 8), NvmeStatus::OK);
    assembly.remove_device("one").unwrap();
    assert_eq!((attach(&mut pf, 5, 1), delete(&mut pf, 4)), (LIST_INVALID, OK));
    assembly.add_device(&spec.devices[ONE], None).unwrap();
    assert_eq!(assembly.devices().pop().unwrap().volume.as_deref(), Some("one"));
    assert_eq!((allocated(&mut pf), attached(&mut pf, 2)), (vec![1, 2, 3, 5], vec![1]));
}

#[test]
fn secondary_controllers_are_taken_offline_and_online() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let (_directory, spec, assembly, mut pf) = start(idle);
        let mut one = connect(&spec.devices[ONE].socket);
        assert_eq!(write(one.queue(0).unwrap(), 8, 1), NvmeStatus::OK);
        assert_eq!(virtualization(&mut pf, 1, 7), OK);
        assert_eq!(secondary(&mut pf), [(1, false), (2, true)]);
        assert_eq!(one.read_register32(register::CSTS).unwrap(), 2, "fatal, not ready");
        let report = until(&assembly, ONE, |report| report.state == DeviceState::Broken);
        assert!(report.reason.unwrap().contains("offline") && !report.needs_reset);
        one.write_register32(register::CC, 0x0046_0001).unwrap();
        one.transport().reset().unwrap();
        one.write_register32(register::CC, 0x0046_0001).unwrap();
        assert_eq!(
            one.read_register32(register::CSTS).unwrap(),
            2,
            "the controller cannot be enabled"
        );
        drop(one);
        // The neighbour is not disturbed.
        let mut two = connect(&spec.devices[TWO].socket);
        assert_eq!(status(&mut two, 8), NvmeStatus::OK);
        // A function that is offline can get another volume.
        assert_eq!(
            (detach(&mut pf, 2, 1), create(&mut pf, 4096, 0), attach(&mut pf, 4, 1)),
            (OK, (OK, 4), OK)
        );
        assert_eq!(virtualization(&mut pf, 1, 9), OK);
        assert_eq!(secondary(&mut pf), [(1, true), (2, true)]);
        let mut one = connect(&spec.devices[ONE].socket);
        assert_eq!(one.namespace().len_bytes(), 4096 * 512);
        assert_eq!(status(&mut one, 8), NvmeStatus::OK);
        until(&assembly, ONE, |report| report.state == DeviceState::Running);
        assert_eq!(
            (virtualization(&mut pf, 9, 7), virtualization(&mut pf, 0, 7)),
            (INVALID_CONTROLLER, INVALID_CONTROLLER)
        );
        // Queues and vectors cannot be assigned.
        assert_eq!(virtualization(&mut pf, 0, 1), INVALID_RESOURCE);
        assert_eq!(
            (virtualization(&mut pf, 1, 7), virtualization(&mut pf, 1, 8)),
            (OK, INVALID_RESOURCE)
        );
    }
}

#[test]
fn a_subsystem_is_managed_under_load_and_drained_in_the_middle() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let (_directory, spec, assembly, mut pf) = start(idle);
        let mut one = connect(&spec.devices[ONE].socket);
        let mut two = connect(&spec.devices[TWO].socket);
        assert_eq!(create(&mut pf, 4096, 0), (OK, 4));
        let deadline = Instant::now() + PATIENCE;
        std::thread::scope(|scope| {
            // The function loses its volume and gets it back, and fails only in between.
            let swapped = scope.spawn(|| {
                let (mut done, mut refused) = (0, 0);
                while (done < 100 || refused < 10) && Instant::now() < deadline {
                    match status(&mut one, 8).0 & 0x7FF {
                        OK => done += 1,
                        INVALID_FIELD => refused += 1,
                        other => panic!("status {other:#x}"),
                    }
                }
                assert!(done >= 100 && refused >= 10, "{done} done, {refused} refused");
            });
            // The second function keeps its volume all the time.
            let steady = scope.spawn(|| {
                for round in 0..200_u64 {
                    let sector = round % 64 * 8;
                    assert_eq!(write(two.queue(0).unwrap(), sector, round as u8), NvmeStatus::OK);
                    assert_eq!(read(two.queue(0).unwrap(), sector), round as u8);
                }
            });
            while !swapped.is_finished() || !steady.is_finished() {
                assert_eq!((detach(&mut pf, 2, 1), attach(&mut pf, 4, 1)), (OK, OK));
                assert_eq!((detach(&mut pf, 4, 1), attach(&mut pf, 2, 1)), (OK, OK));
                assert_eq!(create(&mut pf, 2048, 0), (OK, 5));
                assert_eq!(delete(&mut pf, 5), OK);
            }
        });
        assert!(pool(&assembly).check().unwrap().clean);
        // These commands are in flight when the assembly ends.
        for namespace in [2, 4] {
            let command =
                NvmeCommand::new(admin_opcode::NAMESPACE_MANAGEMENT, namespace).dword(10, 1);
            pf.admin().submit(command).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| assembly.drain());
            scope.spawn(|| assembly.remove_device("one"));
            scope.spawn(|| drop(pf));
        });
        assert!(pool(&assembly).create_volume("late", 4096, None).is_err());
        drop(assembly);
        let assembly = Assembly::start(&spec).unwrap();
        assert!(pool(&assembly).check().unwrap().clean);
    }
}

/// The host uses the numbers that it knows: new numbers would let it delete the wrong volume.
#[test]
fn numbers_outlive_the_daemon_that_gave_them() {
    let (_directory, spec, assembly, mut pf) = start(IdleMode::Poll);
    let mut one = connect(&spec.devices[ONE].socket);
    assert_eq!(write(one.queue(0).unwrap(), 8, 1), NvmeStatus::OK);
    assert_eq!((create(&mut pf, 4096, 0), create(&mut pf, 2048, 0)), ((OK, 4), (OK, 5)));
    // A rename and a gap, so that names and a new count give other numbers.
    pool(&assembly).rename_volume("ns-5", "a").unwrap();
    assert_eq!(delete(&mut pf, 4), OK);
    let nguid = pf.identify(0x11, 5).unwrap()[104..120].to_vec();
    assert_eq!(detach(&mut pf, 3, 2), OK);
    let mut left = assembly.hand_over();
    drop(assembly);
    assert_eq!(left.len(), 2);
    // Functions are numbered in the order of the devices, too.
    let mut changed = spec.clone();
    changed.devices.swap(ONE, TWO);
    let assembly = Assembly::take_over(&changed, &mut left).unwrap();
    assert_eq!(allocated(&mut pf), [1, 2, 3, 5]);
    assert_eq!(pf.identify(0x11, 5).unwrap()[104..120], nguid);
    assert_eq!((attached(&mut pf, 2), attached(&mut pf, 3)), (vec![1], vec![]));
    assert_eq!(delete(&mut pf, 5), OK);
    assert_eq!(volumes(&assembly), ["one", "two"]);
    assert_eq!(read(one.queue(0).unwrap(), 8), 1);
}

/// The numbers belong to the subsystem: any of its physical functions exports them.
#[test]
fn numbers_are_known_to_a_second_physical_function() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), IdleMode::Poll);
    let second =
        DeviceSpec { store: "pf".to_owned(), ..function(directory.path(), "pf2", IdleMode::Poll) };
    spec.devices.push(second);
    let assembly = Assembly::start(&spec).unwrap();
    let mut pf = connect(&spec.devices[3].socket);
    assert_eq!((create(&mut pf, 4096, 0), create(&mut pf, 2048, 0)), ((OK, 4), (OK, 5)));
    pool(&assembly).rename_volume("ns-5", "a").unwrap();
    assert_eq!(delete(&mut pf, 4), OK);
    let mut left = assembly.hand_over();
    drop(assembly);
    assert_eq!(left.len(), 1);
    let _assembly = Assembly::take_over(&spec, &mut left).unwrap();
    assert_eq!(allocated(&mut pf), [1, 2, 3, 5]);
}

/// A host's command may need the graph that the end of a daemon has locked. Neither waits for the
/// other.
#[test]
fn daemons_end_while_a_host_manages() {
    let (_directory, spec, mut assembly, mut pf) = start(IdleMode::Poll);
    let stop = AtomicBool::new(false);
    let assembly = std::thread::scope(|scope| {
        let managing = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // The result depends on the moment; the command is answered in any case.
                detach(&mut pf, 3, 2);
                attach(&mut pf, 3, 2);
                let (status, namespace) = create(&mut pf, 64, 0);
                if status == OK {
                    delete(&mut pf, namespace);
                }
            }
        });
        for _ in 0..30 {
            let mut left = assembly.hand_over();
            drop(assembly);
            assembly = Assembly::take_over(&spec, &mut left).unwrap();
            if managing.is_finished() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assembly
    });
    assert_eq!(allocated(&mut pf)[..3], [1, 2, 3]);
    assert!(pool(&assembly).check().unwrap().clean);
}

/// Acknowledged writes that could not be made durable are missing under the next daemon. A guest
/// that was resumed would not notice.
#[test]
fn a_client_is_not_exported_if_its_store_loses_writes_at_the_end() {
    let (directory, mut spec, assembly, pf) = start(IdleMode::Poll);
    let log = tempfile::tempdir_in("/dev/shm").unwrap();
    drop((pf, assembly));
    // The next generation can be written, which marks the store as in use, and the one after it
    // cannot (docs/volume-format.md, "Superblock": a slot has four KiB and its generation at byte
    // 32).
    let bytes = std::fs::read(directory.path().join("pool.img")).unwrap();
    let slots = bytes.chunks_exact(4096).take(4);
    let generation =
        slots.map(|slot| u64::from_le_bytes(slot[32..40].try_into().unwrap())).max().unwrap();
    let bad = (generation + 2) * 2 % 4 * 4096;
    let rule = FaultRule {
        affected: Affected::Writes,
        when: When::Touching(bad..bad + 2 * 4096),
        fault: Fault::Eio,
    };
    let stage = StageKind::Fault(FaultPlan { seed: 1, rules: vec![rule] });
    spec.stores.push(StoreSpec::in_front_of("bad", "below", stage));
    spec.controllers[0] = ControllerSpec {
        store: "bad".to_owned(),
        format: None,
        commit_interval: Duration::from_secs(3600),
        ..spec.controllers[0].clone()
    };
    for is_written in [false, true] {
        // Without a log, a write is answered when it is durable, and never lost.
        spec.controllers[0].crash_log = is_written.then(|| CrashLogSpec::new(log.path()));
        let assembly = Assembly::start(&spec).unwrap();
        let mut one = connect(&spec.devices[ONE].socket);
        if is_written {
            assert_eq!(status(&mut one, 8), NvmeStatus::OK);
        }
        let left = assembly.hand_over();
        drop(assembly);
        assert_eq!(
            left.len(),
            usize::from(!is_written),
            "a client is exported if no write is lost"
        );
        drop(left);
        assert!(!one.is_connected());
    }
    drop(directory);
}

/// Attachments and offline states outlive the daemon, with or without connected clients.
#[test]
fn attachments_outlive_the_daemon() {
    let (_directory, spec, assembly, mut pf) = start(IdleMode::Poll);
    let mut one = connect(&spec.devices[ONE].socket);
    assert_eq!((detach(&mut pf, 2, 1), detach(&mut pf, 3, 2)), (OK, OK));
    assert_eq!((attach(&mut pf, 2, 2), attach(&mut pf, 3, 1)), (OK, OK));
    assert_eq!(one.read_namespace().unwrap().id, 1);
    assert_eq!(status(&mut one, 8), NvmeStatus::OK);
    let mut left = assembly.hand_over();
    drop(assembly);
    let assembly = Assembly::take_over(&spec, &mut left).unwrap();
    assert_eq!((attached(&mut pf, 2), attached(&mut pf, 3)), (vec![2], vec![1]));
    assert_eq!(read(one.queue(0).unwrap(), 8), 9);
    assert_eq!(
        connect(&spec.devices[TWO].socket).namespace().nguid,
        pf.identify(0x11, 2).unwrap()[104..120]
    );

    // A function that is detached and offline.
    assert_eq!((detach(&mut pf, 2, 2), virtualization(&mut pf, 2, 7)), (OK, OK));
    let mut left = assembly.hand_over();
    drop(assembly);
    let assembly = Assembly::take_over(&spec, &mut left).unwrap();
    assert!(attached(&mut pf, 2).is_empty());
    assert_eq!(secondary(&mut pf), [(1, true), (2, false)]);
    assert_eq!((virtualization(&mut pf, 2, 9), attach(&mut pf, 2, 2)), (OK, OK));

    // A device that is configured with another volume by now serves that one, and its client is
    // disconnected.
    let mut left = assembly.hand_over();
    drop(assembly);
    let mut changed = spec.clone();
    changed.stores.push(volume("three"));
    changed.devices[ONE].store = "three".to_owned();
    let assembly = Assembly::take_over(&changed, &mut left).unwrap();
    assert!(!one.is_connected());
    assert_eq!(assembly.devices()[ONE].volume.as_deref(), Some("three"));
    assert_eq!((attached(&mut pf, 2), attached(&mut pf, 3)), (vec![2], vec![]));
}

/// The same on a pool that answers only after the next daemon has started. Restoring the functions
/// changes the graph, as the thread that serves late devices does.
#[test]
fn attachments_are_restored_on_a_late_pool() {
    let Some(disk) = SlowDisk::mount(STORE_BYTES as usize) else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), IdleMode::Poll);
    spec.stores[0].kind =
        StoreKind::File(FileOptions { direct: false, ..FileOptions::new(disk.path()) });
    let assembly = Assembly::start(&spec).unwrap();
    let mut pf = connect(&spec.devices[0].socket);
    let mut one = connect(&spec.devices[ONE].socket);
    assert_eq!((detach(&mut pf, 2, 1), detach(&mut pf, 3, 2)), (OK, OK));
    assert_eq!((attach(&mut pf, 2, 2), attach(&mut pf, 3, 1)), (OK, OK));
    let mut left = assembly.hand_over();
    drop(assembly);

    disk.hold(|request| request.operation() != Operation::Init);
    // Released also if an assertion fails, because the end of the assembly waits for the disk.
    let _releaser = disk.releaser();
    let assembly = Arc::new(Assembly::take_over(&spec, &mut left).unwrap());
    assert_eq!(assembly.devices()[ONE].state, DeviceState::Opening);
    assembly.serve_late().unwrap();
    disk.release();
    for device in [ONE, TWO, 0] {
        until(&assembly, device, |report| report.state != DeviceState::Opening);
    }
    assert!(one.is_connected());
    assert_eq!((attached(&mut pf, 2), attached(&mut pf, 3)), (vec![2], vec![1]));
    assert_eq!(one.read_namespace().unwrap().id, 1);
}

/// A command of the host that comes while no daemon runs is carried out when the other clients are
/// resumed, so that they notice its effect.
#[test]
fn a_hosts_command_waits_until_the_other_clients_are_resumed() {
    let (_directory, spec, mut assembly, mut pf) = start(IdleMode::Poll);
    let mut one = connect(&spec.devices[ONE].socket);
    for _ in 0..10 {
        assert_eq!(status(&mut one, 8), NvmeStatus::OK);
        let mut left = assembly.hand_over();
        drop(assembly);
        let offline =
            NvmeCommand::new(admin_opcode::VIRTUALIZATION_MANAGEMENT, 0).dword(10, 1 << 16 | 7);
        assembly = std::thread::scope(|scope| {
            let asked = scope.spawn(|| pf.admin().run(offline).unwrap());
            let assembly = Assembly::take_over(&spec, &mut left).unwrap();
            assert!(asked.join().unwrap().status.is_ok());
            assembly
        });
        assert!(one.is_connected());
        assert_eq!(one.read_register32(register::CSTS).unwrap(), 2, "fatal, not ready");
        assert_eq!(virtualization(&mut pf, 1, 9), OK);
        one.reset_controller().unwrap();
    }
}

/// A function may be taken offline, and reset, while it is exported: its VMM stays connected.
#[test]
fn functions_are_taken_offline_while_daemons_end() {
    let (_directory, spec, mut assembly, mut pf) = start(IdleMode::Poll);
    let mut one = connect(&spec.devices[ONE].socket);
    let stop = AtomicBool::new(false);
    let assembly = std::thread::scope(|scope| {
        let managing = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                virtualization(&mut pf, 1, 7);
                while virtualization(&mut pf, 1, 9) != OK {}
                one.reset_controller().unwrap();
            }
        });
        for _ in 0..25 {
            let mut left = assembly.hand_over();
            drop(assembly);
            assert_eq!(left.len(), 2);
            assembly = Assembly::take_over(&spec, &mut left).unwrap();
            if managing.is_finished() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assembly
    });
    assert_eq!(secondary(&mut pf), [(1, true), (2, true)]);
    assert_eq!(status(&mut one, 8), NvmeStatus::OK);
    drop(assembly);
}
