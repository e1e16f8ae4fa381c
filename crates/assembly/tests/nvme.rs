//! NVMe functions of a running assembly, with a real driver.

mod common;
#[path = "common/graph.rs"]
mod graph;
#[path = "common/host.rs"]
mod host;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    FrontEndSpec, IdleMode, NvmeSpec, Sector, Spec, StageKind, StoreKind, StoreSpec, VolumeSpec,
};
use sidecore_assembly::{Assembly, ControllerHandle};
use sidecore_driver::{
    ClientError, Notify, NvmeClient, NvmeCommand, NvmeOptions, NvmeQueue, NvmeStatus, admin_opcode,
    io_opcode, register,
};
use sidecore_kit::guest::complete;
use sidecore_kit::wait;
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, When};

use common::{PATIENCE, until};
use graph::{DISK_BYTES, queue, spec};
use host::{ADAPTIVE, PAGE, connect, connect_as, flush, read, write};

/// Asynchronous Event Configuration, and its bit for namespaces.
const EVENT_CONFIGURATION: u32 = 0x0B;
const NAMESPACE_NOTICES: u32 = 1 << 8;
/// The result of the event's completion: a notice, namespace attribute changed, log page 04h.
const NAMESPACE_CHANGED: u32 = 0x0004_0002;
const CHANGED_NAMESPACES: u32 = 0x04;

fn pool(assembly: &Assembly) -> Arc<ControllerHandle> {
    assembly.controllers().swap_remove(0)
}

#[test]
fn written_data_is_read_from_every_store_in_every_idle_mode() {
    for idle in [IdleMode::Poll, ADAPTIVE, IdleMode::Interrupt] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["mem", "file", "one"]);
        let assembly = Assembly::start(&spec).unwrap();
        for (index, device) in spec.devices.iter().enumerate() {
            for (notify, byte) in [(Notify::Polled, 1), (Notify::Interrupt, 2)] {
                let mut client =
                    connect_as(&device.socket, &NvmeOptions { notify, ..NvmeOptions::default() });
                assert_eq!(client.namespace().len_bytes(), DISK_BYTES);
                let queue = queue(&mut client);
                assert_eq!(queue.has_mapped_doorbells(), idle == IdleMode::Poll);
                for sector in [0, 8, DISK_BYTES / 512 - 8] {
                    assert_eq!(write(queue, sector, byte), NvmeStatus::OK);
                }
                flush(queue);
                for sector in [0, 8, DISK_BYTES / 512 - 8] {
                    assert_eq!(read(queue, sector), byte, "{} at {sector}", device.name);
                }
                assert_eq!(read(queue, 512), 0, "a block that was never written reads as zeros");
                until(&assembly, index, |report| report.state == DeviceState::Running);
            }
        }
        assembly.drain();
        assert_eq!(std::fs::read(directory.path().join("file.img")).unwrap()[4096], 2);
    }
}

/// Sends requests until one of them has needed a kick: the sidecore may have been awake for all
/// requests so far.
fn kick(assembly: &Assembly, queue: &mut NvmeQueue) {
    let sleeps = || assembly.stats().sidecores[0].sleeps;
    let before = sleeps();
    read(queue, 0);
    if queue.counters().kicks == 0 {
        wait::until("the sidecore sleeps", PATIENCE, || sleeps() > before);
        read(queue, 0);
    }
    let sent = queue.counters().kicks;
    let counted = assembly.stats().devices[0].queues[0].kicks;
    assert!(counted > 0 && counted <= sent, "{counted}, {sent} sent");
}

#[test]
fn reports_and_counters_follow_a_function() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), ADAPTIVE, &["one", "mem"]);
    let wide = &mut spec.devices[1];
    (wide.queues, wide.sidecores, wide.idle) =
        (4, vec!["sc0".to_owned(), "sc1".to_owned()], IdleMode::Poll);
    wide.read_only = true;
    wide.front_end =
        FrontEndSpec::Nvme(NvmeSpec { block_bytes: Some(4096), ..NvmeSpec::default() });
    let assembly = Assembly::start(&spec).unwrap();
    let waiting = assembly.devices().swap_remove(0);
    assert_eq!((waiting.state, waiting.queues_running), (DeviceState::Waiting, 0));
    let mut client = connect(&spec.devices[0].socket);
    let running = until(&assembly, 0, |report| report.state == DeviceState::Running);
    let names = (running.front_end.as_str(), running.store.as_str(), running.store_type.as_str());
    assert_eq!(names, ("nvme", "one", "volume"));
    assert_eq!(
        (running.controller.as_deref(), running.volume.as_deref()),
        (Some("pool"), Some("one"))
    );
    assert_eq!(
        (running.capacity_bytes, running.block_bytes, running.read_only),
        (DISK_BYTES, 512, false)
    );
    assert_eq!((running.queues, running.queues_running, running.idle.as_str()), (1, 1, "adaptive"));
    assert_eq!((running.reason, running.needs_reset), (None, false));

    let queue = queue(&mut client);
    for sector in 0..10 {
        write(queue, sector * 8, 1);
        read(queue, sector * 8);
    }
    flush(queue);
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(DISK_BYTES / 512), 512).unwrap();
    assert!(!complete(queue).status.is_ok());
    let stats = assembly.stats();
    let [counted] = &stats.devices[0].queues[..] else { panic!("{stats:?}") };
    assert_eq!((counted.index, counted.reads, counted.writes, counted.flushes), (1, 10, 10, 1));
    assert_eq!(
        (counted.bytes_read, counted.bytes_written, counted.bytes),
        (40_960, 40_960, 81_920)
    );
    assert_eq!((counted.rejected, counted.errors), (1, 0), "{counted:?}");
    assert!(counted.latency_ns.count >= 21, "{counted:?}");
    kick(&assembly, queue);

    // The driver creates as many queue pairs as it likes; they are spread over the sidecores in
    // turn.
    let options = NvmeOptions { queues: 3, ..NvmeOptions::default() };
    let mut wide = connect_as(&spec.devices[1].socket, &options);
    let report = until(&assembly, 1, |report| report.queues_running == 3);
    assert_eq!((report.queues, report.block_bytes, report.read_only), (4, 512, true));
    assert_eq!(wide.namespace().block_bytes, 4096);
    assert!(stats.devices[1].queues.is_empty(), "unused queues are left out");
    let refused = write(wide.queue(2).unwrap(), 0, 1);
    assert_eq!(refused.name(), "Namespace is Write Protected", "{refused:?}");
    assert_eq!(read(wide.queue(2).unwrap(), 0), 0);
    let on: Vec<u64> = assembly.stats().sidecores.iter().map(|sidecore| sidecore.queues).collect();
    assert_eq!(on.iter().sum::<u64>(), 4, "{on:?}");
    drop((client, wide));
    until(&assembly, 0, |report| report.state == DeviceState::Waiting);
    let after = assembly.stats();
    assert_eq!(after.devices[0].queues[0].writes, 10, "counters outlive connections");
}

#[test]
fn a_volume_grows_and_its_guest_is_notified() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["one"]);
        let assembly = Assembly::start(&spec).unwrap();
        let mut client = connect(&spec.devices[0].socket);
        let set = NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, EVENT_CONFIGURATION);
        assert!(client.admin().run(set.dword(11, NAMESPACE_NOTICES)).unwrap().status.is_ok());
        let event =
            client.admin().submit(NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0)).unwrap();
        let beyond = DISK_BYTES / 512;
        assert_eq!(write(queue(&mut client), beyond, 1).name(), "LBA Out of Range");

        pool(&assembly).resize_volume("one", 2 * DISK_BYTES).unwrap();
        let completion = client.admin().wait(event).unwrap();
        assert_eq!((completion.result, completion.status), (NAMESPACE_CHANGED, NvmeStatus::OK));
        let mut changed = [0; 4096];
        let get = NvmeCommand::new(admin_opcode::GET_LOG_PAGE, u32::MAX);
        let get = get.dword(10, CHANGED_NAMESPACES | (4096 / 4 - 1) << 16);
        assert!(client.admin().read(get, &mut changed).unwrap().status.is_ok());
        assert_eq!(changed[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(client.read_namespace().unwrap().len_bytes(), 2 * DISK_BYTES);
        assert_eq!(write(queue(&mut client), beyond, 1), NvmeStatus::OK);
        assert_eq!((read(queue(&mut client), beyond), read(queue(&mut client), 0)), (1, 0));
        assert_eq!(assembly.devices()[0].capacity_bytes, 2 * DISK_BYTES);

        // The same under load, without a failed command.
        let mut busy = client.take_queue(0).unwrap();
        let (ends, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let round = rounds.load(Ordering::Relaxed);
                    assert_eq!(write(&mut busy, round % 100 * 8, round as u8), NvmeStatus::OK);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            let loaded = reaches(&rounds, 1);
            let steps: Vec<u64> = (3..10).map(|step| step * DISK_BYTES).collect();
            let sizes = steps.iter().map(|size_bytes| {
                let resized = pool(&assembly).resize_volume("one", *size_bytes).is_ok();
                client
                    .read_namespace()
                    .ok()
                    .filter(|_| resized)
                    .map(|namespace| namespace.len_bytes())
            });
            let sizes: Vec<_> = sizes.collect();
            ends.store(true, Ordering::Relaxed);
            assert!(loaded);
            assert_eq!(sizes, steps.into_iter().map(Some).collect::<Vec<_>>());
        });
    }
}

/// Writes pages until the function is removed, and counts the acknowledged writes.
fn write_until_gone(client: &mut NvmeClient, acknowledged: &AtomicU64) {
    let mut queue = client.take_queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    let mut completions = Vec::new();
    'busy: for count in 0_u64.. {
        queue.write_data(slot, 0, &[count as u8 | 1; PAGE]);
        queue.submit_write(slot, Sector(count % 64 * 8), PAGE as u32).unwrap();
        if queue.publish().is_err() {
            break;
        }
        for looks in 1_u64.. {
            if queue.poll_completions(&mut completions).unwrap() > 0 {
                break;
            }
            // With mapped doorbells the client does not notice that they are polled no longer.
            if looks.is_multiple_of(1000) && client.read_register32(register::CSTS).is_err() {
                break 'busy;
            }
            std::thread::yield_now();
        }
        assert_eq!(completions.pop().unwrap().status, NvmeStatus::OK);
        acknowledged.fetch_add(1, Ordering::Relaxed);
    }
    client.put_queue(queue);
}

/// Waits until the count has reached `least`; false after [`PATIENCE`].
fn reaches(count: &AtomicU64, least: u64) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while count.load(Ordering::Relaxed) < least && Instant::now() < deadline {
        std::thread::yield_now();
    }
    count.load(Ordering::Relaxed) >= least
}

#[test]
fn a_busy_function_is_removed_and_comes_back() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["mem", "file", "one"]);
        let assembly = Assembly::start(&spec).unwrap();
        for device in &spec.devices[1..] {
            let mut client = connect(&device.socket);
            let acknowledged = AtomicU64::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| write_until_gone(&mut client, &acknowledged));
                let is_busy = reaches(&acknowledged, 100);
                assembly.remove_device(&device.name).unwrap();
                assert!(is_busy && !device.socket.exists());
            });
            assert!(matches!(client.read_namespace(), Err(ClientError::HungUp { .. })));
            assert!(assembly.devices().iter().all(|other| other.name != device.name));
            assembly.add_device(device, None).unwrap();
            client.reconnect().unwrap();
            let queue = queue(&mut client);
            // The command that was in flight at the removal.
            assert_eq!(complete(queue).status, NvmeStatus::ABORTED_BY_HOST);
            assert_ne!(read(queue, 0), 0);
            assert_eq!(write(queue, 0, 7), NvmeStatus::OK);
        }
        let mut neighbour = connect(&spec.devices[0].socket);
        assert_eq!(write(queue(&mut neighbour), 0, 1), NvmeStatus::OK);
    }
}

#[test]
fn a_drain_ends_busy_functions_and_keeps_what_was_written() {
    for idle in [IdleMode::Poll, IdleMode::Interrupt] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["file", "one", "slow"]);
        let assembly = Assembly::start(&spec).unwrap();
        let counts: Vec<AtomicU64> = spec.devices.iter().map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for (device, count) in spec.devices.iter().zip(&counts) {
                scope.spawn(|| write_until_gone(&mut connect(&device.socket), count));
            }
            let are_busy = counts.iter().all(|count| reaches(count, 3));
            assembly.drain();
            assert!(are_busy, "{counts:?}");
        });
        assert_eq!(sidecore_block::dropped_tags(), 0);
        drop(assembly);
        let _assembly = Assembly::start(&spec).unwrap();
        for (device, count) in spec.devices.iter().zip(counts).take(2) {
            let mut client = connect(&device.socket);
            let last = count.into_inner() - 1;
            // The next page may have been written as well.
            assert_eq!(read(queue(&mut client), last % 64 * 8), last as u8 | 1, "{}", device.name);
        }
    }
}

#[test]
fn functions_of_one_controller_neither_see_nor_manage_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), IdleMode::Poll, &["one", "two"]);
    let _assembly = Assembly::start(&spec).unwrap();
    let [mut one, mut two] = [0, 1].map(|index: usize| connect(&spec.devices[index].socket));
    assert_eq!(write(queue(&mut one), 8, 1), NvmeStatus::OK);
    assert_eq!(write(queue(&mut two), 8, 2), NvmeStatus::OK);
    assert_eq!(write(queue(&mut two), 80, 3), NvmeStatus::OK);
    assert_eq!(
        (read(queue(&mut one), 8), read(queue(&mut one), 80), read(queue(&mut two), 8)),
        (1, 0, 2)
    );

    assert_ne!(one.controller().subsystem, two.controller().subsystem);
    assert_ne!(one.namespace().nguid, two.namespace().nguid);
    for client in [&mut one, &mut two] {
        assert_eq!(client.controller().namespaces, 1);
        assert_eq!(client.active_namespaces().unwrap(), [1]);
        // OACS: neither Namespace Management nor Virtualization Management.
        assert_eq!(client.controller().optional_admin_commands & (1 << 3 | 1 << 7), 0);
        for opcode in [
            admin_opcode::NAMESPACE_MANAGEMENT,
            admin_opcode::NAMESPACE_ATTACHMENT,
            admin_opcode::VIRTUALIZATION_MANAGEMENT,
        ] {
            for selection in 0..16 {
                let command = NvmeCommand::new(opcode, 1).dword(10, selection);
                let status = client.admin().write(command, &[0; 4096]).unwrap().status;
                assert_eq!(status.name(), "Invalid Command Opcode", "{opcode:#x}, {selection}");
            }
        }
        // The subsystem's namespaces, and its secondary controllers.
        for cns in [0x10, 0x11, 0x14, 0x15] {
            assert!(client.identify(cns, 0).is_err(), "CNS {cns:#x}");
        }
        let queue = queue(client);
        let slot = queue.take_slot().unwrap();
        for nsid in [0, 2, 3, u32::MAX] {
            let command = NvmeCommand::new(io_opcode::READ, nsid).blocks(8, 8);
            queue.submit(slot, command.prp(queue.data_address(slot), 0)).unwrap();
            assert_eq!(complete(queue).status.name(), "Invalid Namespace or Format", "{nsid}");
        }
        queue.release_slot(slot);
    }
}

/// Error Information: an entry is 64 bytes.
const ERROR_INFORMATION: u32 = 0x01;

fn error_log(client: &mut NvmeClient) -> [u8; 128] {
    let mut log = [0; 128];
    let get =
        NvmeCommand::new(admin_opcode::GET_LOG_PAGE, 0).dword(10, 31 << 16 | ERROR_INFORMATION);
    assert!(client.admin().read(get, &mut log).unwrap().status.is_ok());
    log
}

#[test]
fn a_shutdown_flushes_and_errors_are_logged() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), IdleMode::Poll, &["bad", "one"]);
    let rule =
        FaultRule { affected: Affected::Flushes, when: When::EveryNth(1), fault: Fault::Eio };
    let stage = StageKind::Fault(FaultPlan { seed: 1, rules: vec![rule] });
    spec.stores.push(StoreSpec::in_front_of("bad", "file", stage));
    let assembly = Assembly::start(&spec).unwrap();
    for (device, is_bad) in spec.devices.iter().zip([true, false]) {
        let mut client = connect(&device.socket);
        assert_eq!(write(queue(&mut client), 8, 7), NvmeStatus::OK);
        client.shut_down().unwrap();
        client.reset_controller().unwrap();
        let log = error_log(&mut client);
        // No queue's command, with the status Write Fault.
        let expected = if is_bad { [1, 0xFF, 0xFF, 0x00, 0x05] } else { [0; 5] };
        assert_eq!([log[0], log[8], log[9], log[12], log[13]], expected, "{}", device.name);

        let refused = write(queue(&mut client), DISK_BYTES / 512, 1);
        assert_eq!(refused.name(), "LBA Out of Range");
        assert!(refused.more() && refused.do_not_retry());
        let log = error_log(&mut client);
        assert_eq!((log[0], log[8], log[31]), (1 + u8::from(is_bad), 1, io_opcode::WRITE));
        assert_eq!(log[16..24], (DISK_BYTES / 512).to_le_bytes());
        assert_eq!(read(queue(&mut client), 8), 7);
    }
    assembly.drain();
}

#[test]
fn names_stay_the_same_and_belong_to_volumes() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), IdleMode::Poll, &["one", "two", "mem", "file"]);
    let names = |spec: &Spec| {
        let assembly = Assembly::start(spec).unwrap();
        let names: Vec<_> = spec
            .devices
            .iter()
            .map(|device| {
                let client = connect(&device.socket);
                let controller = client.controller().clone();
                (client.namespace().nguid, controller.serial, controller.subsystem)
            })
            .collect();
        drop(assembly);
        names
    };
    let before = names(&spec);
    assert_eq!(names(&spec), before);
    for (index, name) in before.iter().enumerate() {
        assert_ne!(name.0, [0; 16]);
        assert!(name.2.starts_with("nqn."), "{name:?}");
        for other in &before[..index] {
            assert!(
                name.0 != other.0 && name.1 != other.1 && name.2 != other.2,
                "{name:?} and {other:?}"
            );
        }
    }
    // The device has another name and serves the same volume, which is renamed. A new volume has
    // the old name.
    spec.devices[0].name = "other".to_owned();
    spec.devices[0].serial = Some("S123".to_owned());
    let assembly = Assembly::start(&spec).unwrap();
    pool(&assembly).rename_volume("one", "renamed").unwrap();
    pool(&assembly).create_volume("one", DISK_BYTES, None).unwrap();
    drop(assembly);
    assert_ne!(names(&spec)[0].0, before[0].0);
    spec.stores[3].kind = StoreKind::Volume(VolumeSpec::new("pool", "renamed"));
    let after = names(&spec);
    assert_eq!((after[0].0, after[0].1.as_str()), (before[0].0, "S123"));
    assert_eq!(after[1..], before[1..]);
}
