//! A daemon leaves its clients to the next one: what a client is doing goes on, and nothing of it
//! fails.

use std::os::fd::OwnedFd;

use sidecore_assembly::LeftDevice;

use super::stale::{Kept, is_disturbed};
use super::*;

/// Where a device's parts are, which outlive daemons.
struct Place {
    directory: tempfile::TempDir,
    idle: IdleMode,
}

impl Place {
    fn new(idle: IdleMode) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Made once: what is in it is to stay.
        let _ = file(directory.path());
        Self { directory, idle }
    }

    fn spec(&self) -> Spec {
        let path = self.directory.path().join("disk.img");
        let kind = StoreKind::File(FileOptions { direct: false, ..FileOptions::new(&path) });
        spec(self.directory.path(), self.idle, 512, kind)
    }

    fn connect(&self, options: &NvmeOptions) -> NvmeClient {
        let options = NvmeOptions { huge_pages: false, ..options.clone() };
        NvmeClient::connect(self.directory.path().join("disk.sock"), &options).unwrap()
    }

    /// The next daemon.
    fn restart(&self, assembly: Assembly) -> Assembly {
        let mut left = assembly.hand_over();
        assert_eq!(left.len(), 1);
        drop(assembly);
        Assembly::take_over(&self.spec(), &mut left).unwrap()
    }
}

#[test]
fn no_request_fails_while_daemons_come_and_go() {
    for (idle, notify, shadow_doorbells) in [
        (IdleMode::Poll, Notify::Polled, false),
        (IdleMode::Poll, Notify::Interrupt, false),
        (ADAPTIVE, Notify::Interrupt, false),
        (ADAPTIVE, Notify::Interrupt, true),
        (IdleMode::Interrupt, Notify::Polled, true),
    ] {
        let place = Place::new(idle);
        let mut assembly = Assembly::start(&place.spec()).unwrap();
        let mut client = place.connect(&NvmeOptions {
            queues: 4,
            notify,
            shadow_doorbells,
            ..NvmeOptions::default()
        });
        let mut queues: Vec<NvmeQueue> =
            (0..2).map(|index| client.take_queue(index).unwrap()).collect();
        let stop = AtomicBool::new(false);
        let (assembly, queues) = std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for (number, mut queue) in queues.drain(..).enumerate() {
                let stop = &stop;
                workers.push(scope.spawn(move || {
                    let slots: Vec<Slot> = std::iter::from_fn(|| queue.take_slot()).collect();
                    let base = Sector(number as u64 * 8192);
                    let mut rounds = 0_u64;
                    while !stop.load(Ordering::Relaxed) || rounds < 20 {
                        round_trip_at(&mut queue, &slots, base, rounds);
                        rounds += 1;
                    }
                    queue
                }));
            }
            // Its messages come at any time, and wait for the daemon that is not there.
            let remapping = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    client.remap_memory().unwrap();
                }
            });
            for _ in 0..12 {
                assembly = place.restart(assembly);
                if remapping.is_finished()
                    || workers.iter().any(std::thread::ScopedJoinHandle::is_finished)
                {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
            (assembly, workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<_>>())
        });
        queues.into_iter().for_each(|queue| client.put_queue(queue));
        assert!(client.is_connected());
        // The next daemon resets as well as the first.
        client.reset_controller().unwrap();
        let queue = client.queue(2).unwrap();
        let slot = queue.take_slot().unwrap();
        write_and_read(queue, slot, Sector(0), 4096, 3);
        drop(assembly);
    }
}

#[test]
fn what_the_host_has_set_and_waits_for_is_still_so() {
    let place = Place::new(IdleMode::Poll);
    let assembly = Assembly::start(&place.spec()).unwrap();
    let mut client = place.connect(&NvmeOptions { queues: 2, ..NvmeOptions::default() });
    let run = |client: &mut NvmeClient, command| client.admin().run(command).unwrap();
    let over = |threshold: u32| {
        NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, 0x04).dword(11, threshold)
    };
    assert!(run(&mut client, over(333)).status.is_ok());
    // An error for the log, and a request for an event that comes after the restart.
    assert!(
        !run(&mut client, NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, 0xEE))
            .status
            .is_ok()
    );
    let event =
        client.admin().submit(NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0)).unwrap();
    let errors = |client: &mut NvmeClient| {
        // The first entry of the log, all of it.
        let mut page = [0; 64];
        let command = NvmeCommand::new(admin_opcode::GET_LOG_PAGE, 0).dword(10, 15 << 16 | 0x01);
        assert!(client.admin().read(command, &mut page).unwrap().status.is_ok());
        page
    };
    // Host Read Commands and Host Write Commands.
    let commands = |client: &mut NvmeClient| {
        let mut page = [0; 512];
        let command =
            NvmeCommand::new(admin_opcode::GET_LOG_PAGE, u32::MAX).dword(10, 127 << 16 | 0x02);
        assert!(client.admin().read(command, &mut page).unwrap().status.is_ok());
        (page[64], page[80])
    };
    let slot = client.queue(1).unwrap().take_slot().unwrap();
    write_and_read(client.queue(1).unwrap(), slot, Sector(0), 4096, 7);
    let before = errors(&mut client);
    assert_eq!(before[0], 1);

    let assembly = place.restart(assembly);
    let assembly = place.restart(assembly);

    let got = run(&mut client, NvmeCommand::new(admin_opcode::GET_FEATURES, 0).dword(10, 0x04));
    assert_eq!((got.result, got.status), (333, NvmeStatus::OK));
    assert_eq!(errors(&mut client), before);
    assert_eq!(commands(&mut client), (1, 1));
    client.queue(0).unwrap().ring_tail(9999).unwrap();
    let told = client.admin().wait(event).unwrap();
    assert_eq!((told.result, told.status), (0x0001_0100, NvmeStatus::OK));
    client.queue(0).unwrap().ring_tail(0).unwrap();
    write_and_read(client.queue(1).unwrap(), slot, Sector(0), 4096, 1);
    assert_eq!(commands(&mut client), (2, 2));
    client.reset_device().unwrap();
    write_and_read(client.queue(1).unwrap(), slot, Sector(0), 4096, 2);
    drop(assembly);
}

/// The doorbell memory goes with its client over restarts, and no further.
#[test]
fn a_restart_shows_no_client_the_memory_of_another() {
    let place = Place::new(IdleMode::Poll);
    let socket = place.directory.path().join("disk.sock");
    let options = NvmeOptions { queues: 4, ..NvmeOptions::default() };
    let mut assembly = Assembly::start(&place.spec()).unwrap();
    let mut gone = vec![Kept::by_a_client_of(&socket)];
    for restarts in [0, 1, 2] {
        let mut client = place.connect(&options);
        for _ in 0..restarts {
            assembly = place.restart(assembly);
        }
        assert!(!is_disturbed(&mut client, &gone), "after {restarts} restarts");
        drop(client);
        gone.push(Kept::by_a_client_of(&socket));
    }
    let inodes: std::collections::BTreeSet<_> = gone.iter().map(|kept| kept.inode).collect();
    assert_eq!(inodes.len(), gone.len());
    drop(assembly);
}

#[test]
fn what_was_in_memory_is_not_left() {
    let place = Place::new(IdleMode::Poll);
    let ram = StoreKind::Ram { size_bytes: DISK_BYTES, block_bytes: 512 };
    let assembly =
        Assembly::start(&spec(place.directory.path(), IdleMode::Poll, 512, ram)).unwrap();
    let client = place.connect(&NvmeOptions::default());
    assert!(assembly.hand_over().is_empty());
    drop(assembly);
    assert!(!client.is_connected());
}

#[test]
fn another_configuration_is_not_gone_on_with() {
    let other_queues = |spec: &mut Spec| spec.devices[0].queues = 2;
    let other_idle = |spec: &mut Spec| spec.devices[0].idle = IdleMode::Interrupt;
    let other_blocks = |spec: &mut Spec| crate::own(spec).block_bytes = Some(4096);
    let other_store = |spec: &mut Spec| {
        spec.stores[0].name = "other".to_owned();
        spec.devices[0].store = "other".to_owned();
    };
    let other_interrupts = |spec: &mut Spec| crate::own(spec).interrupts = Interrupts::Msi;
    let changes: [&dyn Fn(&mut Spec); 5] =
        [&other_queues, &other_idle, &other_interrupts, &other_blocks, &other_store];
    for change in changes {
        let place = Place::new(IdleMode::Poll);
        let assembly = Assembly::start(&place.spec()).unwrap();
        let client = place.connect(&NvmeOptions::default());
        let mut left = assembly.hand_over();
        drop(assembly);
        let mut spec = place.spec();
        change(&mut spec);
        let _assembly = Assembly::take_over(&spec, &mut left).unwrap();
        assert!(!client.is_connected());
        let mut next = place.connect(&NvmeOptions { queues: 2, ..NvmeOptions::default() });
        let slot = next.queue(0).unwrap().take_slot().unwrap();
        write_and_read(next.queue(0).unwrap(), slot, Sector(0), 4096, 1);
    }
}

/// A daemon that cannot start leaves what it was to go on with for the next try.
#[test]
fn a_start_that_fails_costs_nothing() {
    let place = Place::new(IdleMode::Poll);
    let assembly = Assembly::start(&place.spec()).unwrap();
    let mut client = place.connect(&NvmeOptions::default());
    let mut left = assembly.hand_over();
    drop(assembly);
    let disk = place.directory.path().join("disk.img");
    std::fs::rename(&disk, disk.with_extension("away")).unwrap();
    assert!(Assembly::take_over(&place.spec(), &mut left).is_err());
    std::fs::rename(disk.with_extension("away"), &disk).unwrap();
    let _assembly = Assembly::take_over(&place.spec(), &mut left).unwrap();
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    write_and_read(client.queue(0).unwrap(), slot, Sector(0), 4096, 1);
}

/// The kept state may come back damaged: the client is lost then, and nothing else.
#[test]
fn a_damaged_state_costs_the_client_only() {
    let place = Place::new(IdleMode::Poll);
    let assembly = Assembly::start(&place.spec()).unwrap();
    let client = place.connect(&NvmeOptions { queues: 2, ..NvmeOptions::default() });
    let mut left = assembly.hand_over();
    drop(assembly);
    let LeftDevice { name, state, fds } = left.remove(0);
    let copy = |fds: &[OwnedFd]| fds.iter().map(|fd| fd.try_clone().unwrap()).collect::<Vec<_>>();
    let start = |state: Vec<u8>, fds: Vec<OwnedFd>| {
        let mut left = vec![LeftDevice { name: name.clone(), state, fds }];
        drop(Assembly::take_over(&place.spec(), &mut left).unwrap());
    };
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = (random ^ random >> 12).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ random << 25;
        random
    };
    for _ in 0..150 {
        let mut damaged = state.clone();
        for _ in 0..=next() % 3 {
            let at = usize::try_from(next()).unwrap_or(usize::MAX) % damaged.len();
            // Mostly digits: those are numbers still.
            damaged[at] = if damaged[at].is_ascii_digit() {
                b'0' + (next() % 10) as u8
            } else {
                next() as u8
            };
        }
        start(damaged, copy(&fds));
    }
    start(state[..state.len() / 2].to_vec(), copy(&fds));
    for count in 0..fds.len() {
        start(state.clone(), copy(&fds[..count]));
        // All there, in another order.
        let mut turned = copy(&fds);
        turned.rotate_left(count + 1);
        start(state.clone(), turned);
    }
    drop(client);
}
