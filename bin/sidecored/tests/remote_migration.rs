//! Two VMhosts of one IOhost that have the same device, for a guest that migrates between them: one
//! of them writes.

mod common;

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use sidecore_control::report::DeviceState;
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_kit::guest::{complete, complete_all};
use sidecore_kit::wait;
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, data, flush, lose, pause, read, submit, write};

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 16 << 20;
const VMHOSTS: [&str; 2] = ["vmhost1", "vmhost2"];

/// An IOhost with a device for both clients, each on a link of its own.
fn iohost(shared: &Path) -> String {
    let shared = shared.display();
    let mut text = format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{shared}/keys\"\n[[sidecore]]\n\
         name = \"io0\"\n"
    );
    for client in VMHOSTS {
        text += &format!(
            "[[link]]\nname = \"to-{client}\"\ntype = \"memory\"\nsocket = \
             \"{shared}/{client}.sock\"\n[[client]]\nname = \"{client}\"\nlinks = \
             [\"to-{client}\"]\n"
        );
    }
    text + &format!(
        "[[store]]\nname = \"file\"\ntype = \"file\"\npath = \"{shared}/disk.img\"\ndirect = \
         false\n[[device]]\nname = \"disk\"\nfront_end = \"vrio\"\nclient = \"vmhost1\"\n\
         migrates_to = [\"vmhost2\"]\nstore = \"file\"\n"
    )
}

fn vmhost(shared: &Path, client: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/{client}.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"{client}\"\n\
         [[store]]\nname = \"disk\"\ntype = \"remote\"\niohost = \"io1\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"disk\"\nsocket = \"vd0.sock\"\n",
        shared.display()
    )
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

/// The IOhost and its VMhosts, with the device attached to both.
fn hosts() -> (TempDir, Daemon, [Daemon; 2]) {
    let shared = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(shared.path().join("disk.img")).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    let iohost = start(&iohost(shared.path()));
    let vmhosts = VMHOSTS.map(|client| start(&vmhost(shared.path(), client)));
    for host in &vmhosts {
        wait::until("the disk at a VMhost", SOON, || {
            host.client().devices().unwrap()[0].state == DeviceState::Waiting
        });
    }
    (shared, iohost, vmhosts)
}

fn connect(vmhost: &Daemon) -> BlkClient {
    let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
    BlkClient::connect(vmhost.directory.path().join("vd0.sock"), &options).unwrap()
}

/// The last step of a migration that the destination takes before it is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// QEMU connects.
    Connects,
    /// Its rings start, as for the destination's firmware or a look at the partition table.
    Reads,
    /// The source's guest has stopped.
    SourceStops,
    /// The guest runs at the destination, and has not written.
    Runs,
}

const STEPS: [Step; 4] = [Step::Connects, Step::Reads, Step::SourceStops, Step::Runs];

/// Kills the IOhost's daemon, and starts it again.
fn restart(iohost: Daemon, config: &str) -> Daemon {
    iohost.signal(Signal::KILL);
    let Daemon { mut child, directory } = iohost;
    child.wait_for_end(SOON).unwrap();
    Daemon::start(directory, config)
}

#[test]
fn a_migration_that_is_cancelled_at_any_step_gives_the_disk_back_also_if_the_iohost_was_away() {
    let (shared, mut iohost, [source, destination]) = hosts();
    let config = self::iohost(shared.path());
    let mut round = 0;
    for dies in [false, true] {
        for last in STEPS {
            let mut guest = connect(&source);
            let queue = guest.queue(0).unwrap();
            let slot_at_source = queue.take_slot().unwrap();
            round += 1;
            // Answered, and covered by no flush.
            assert!(writes(queue, slot_at_source, round), "{last:?}");
            if last == Step::Connects {
                drop(connect(&destination));
            }
            let mut guest = Some(guest);
            let mut other = (last > Step::Connects).then(|| connect(&destination));
            if let Some(other) = &mut other {
                let theirs = other.queue(0).unwrap();
                let slot = theirs.take_slot().unwrap();
                let expected = data(1, round, BLOCK);
                if last >= Step::SourceStops {
                    // The stop of a guest that migrates is answered when the disk is flushed. This
                    // client keeps no log of a migration, and so flushes itself: otherwise the
                    // source would send its write to the next IOhost, and take the disk by it.
                    let mut guest = guest.take().unwrap();
                    flush(guest.queue(0).unwrap(), slot_at_source);
                    guest.stop_queue(0).unwrap();
                }
                if dies {
                    iohost = restart(iohost, &config);
                }
                assert!(read(theirs, slot, 1, BLOCK) == expected, "{last:?}");
                if last == Step::Runs {
                    flush(theirs, slot);
                    assert!(read(theirs, slot, 1, BLOCK) == expected, "{last:?}");
                }
            } else if dies {
                iohost = restart(iohost, &config);
            }
            drop(other);
            let mut guest = guest.unwrap_or_else(|| connect(&source));
            let queue = guest.queue(0).unwrap();
            let slot = queue.take_slot().unwrap();
            assert!(read(queue, slot, 1, BLOCK) == data(1, round, BLOCK), "{last:?}, {dies}");
            round += 1;
            assert!(writes(queue, slot, round), "{last:?}, {dies}: the source has lost the disk");
            flush(queue, slot);
        }
    }
}

/// Whether a write succeeds.
fn writes(queue: &mut BlkQueue, slot: Slot, round: u64) -> bool {
    submit(queue, slot, 1, data(1, round, BLOCK));
    complete(queue).status == Status::Ok
}

#[test]
fn the_host_whose_guest_started_last_and_writes_is_the_only_one_that_writes() {
    let (_shared, _iohost, [source, destination]) = hosts();
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    write(queue, slot, 1, data(1, 1, BLOCK));
    flush(queue, slot);

    // A guest that waits at the destination may read, and does not take the disk by that.
    let mut other = connect(&destination);
    let theirs = other.queue(0).unwrap();
    let their_slot = theirs.take_slot().unwrap();
    assert!(read(theirs, their_slot, 1, BLOCK) == data(1, 1, BLOCK));
    write(queue, slot, 1, data(1, 2, BLOCK));

    // The guest writes there: no write of the source is executed any more, and no read.
    assert!(writes(theirs, their_slot, 3));
    assert!(!writes(queue, slot, 4), "the source has lost the disk");
    queue.submit_read(slot, sidecore_units::Sector(8), BLOCK).unwrap();
    assert_eq!(complete(queue).status, Status::IoError);
    flush(queue, slot);
    assert!(read(theirs, their_slot, 1, BLOCK) == data(1, 3, BLOCK));
    drop(guest);

    // It goes back, as after a migration that was cancelled late.
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert!(read(queue, slot, 1, BLOCK) == data(1, 3, BLOCK));
    assert!(writes(theirs, their_slot, 5), "nothing was written at the source yet");
    assert!(writes(queue, slot, 6));
    assert!(!writes(theirs, their_slot, 7));
    flush(theirs, their_slot);
    assert!(read(queue, slot, 1, BLOCK) == data(1, 6, BLOCK));
}

/// The guest of a migration stops while its IOhost is away: the stop is answered when the requests
/// are, and no write is lost. The VMhost's other clients do not wait.
#[test]
fn a_guest_that_stops_while_the_iohost_is_away_moves_with_all_of_its_writes_once_it_is_back() {
    let (shared, mut iohost, [source, destination]) = hosts();
    let config = self::iohost(shared.path());
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..3).map(|_| queue.take_slot().unwrap()).collect();
    // Answered, and covered by no flush.
    write(queue, slots[0], 1, data(1, 1, BLOCK));
    pause(&iohost);
    submit(queue, slots[1], 2, data(2, 1, BLOCK));
    submit(queue, slots[2], 3, data(3, 1, BLOCK));
    queue.publish().unwrap();
    lose(&mut iohost, &source, 2);
    let _iohost = std::thread::scope(|scope| {
        let stop = scope.spawn(move || guest.stop_queue(0).map(|base| (guest, base)));
        // Its API and the other VMhost answer meanwhile.
        assert_eq!(source.client().devices().unwrap().len(), 1);
        assert_eq!(destination.client().devices().unwrap().len(), 1);
        assert!(!stop.is_finished(), "a stop that leaves writes without an answer would lose them");
        let iohost = Daemon::start(iohost.directory, &config);
        let (mut guest, base) = stop.join().unwrap().unwrap();
        assert_eq!(base, 3, "all three requests were taken and answered");
        let done = complete_all(guest.queue(0).unwrap(), 2);
        assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
        iohost
    });
    let mut guest = connect(&destination);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for index in 1..=3 {
        assert!(read(queue, slot, index, BLOCK) == data(index, 1, BLOCK), "block {index}");
    }
    assert!(writes(queue, slot, 2));
    flush(queue, slot);
}

/// The VMM is killed while the IOhost is away: the device is free for the next one once the IOhost
/// is back, and its requests were executed or not, each as a whole.
#[test]
fn a_vmm_that_ends_while_the_iohost_is_away_leaves_a_device_for_the_next_one() {
    let (shared, mut iohost, [source, _destination]) = hosts();
    let config = self::iohost(shared.path());
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..2).map(|_| queue.take_slot().unwrap()).collect();
    write(queue, slots[0], 1, data(1, 1, BLOCK));
    write(queue, slots[0], 2, data(2, 1, BLOCK));
    pause(&iohost);
    submit(queue, slots[1], 2, data(2, 2, BLOCK));
    queue.publish().unwrap();
    lose(&mut iohost, &source, 1);
    drop(guest);
    assert_eq!(source.client().devices().unwrap().len(), 1);
    let _iohost = Daemon::start(iohost.directory, &config);
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    assert!(read(queue, slot, 1, BLOCK) == data(1, 1, BLOCK), "an answered write is lost");
    let second = read(queue, slot, 2, BLOCK);
    assert!([1, 2].iter().any(|round| second == data(2, *round, BLOCK)), "a torn write");
    assert!(writes(queue, slot, 3));
    flush(queue, slot);
}

/// The VMM is killed while the IOhost is away, and its guest is started at the other VMhost,
/// without a migration. The first VMhost finds the IOhost last, and disturbs the guest in nothing.
#[test]
fn a_guest_whose_vmm_was_killed_while_the_iohost_was_away_starts_elsewhere_and_keeps_its_writes() {
    let (shared, mut iohost, [source, destination]) = hosts();
    let config = self::iohost(shared.path());
    let mut guest = connect(&source);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..2).map(|_| queue.take_slot().unwrap()).collect();
    // Answered, and covered by no flush.
    write(queue, slots[0], 1, data(1, 1, BLOCK));
    pause(&iohost);
    submit(queue, slots[1], 2, data(2, 1, BLOCK));
    queue.publish().unwrap();
    lose(&mut iohost, &source, 1);
    drop(guest);
    let device = |host: &Daemon| host.client().remote().unwrap().iohosts[0].devices[0].clone();
    wait::until("its unanswered write is given up", SOON, || device(&source).in_flight == 0);
    assert_eq!(device(&source).kept_writes, 1, "an IOhost that lives on would flush it");
    pause(&source);
    let _iohost = Daemon::start(iohost.directory, &config);
    let mut guest = connect(&destination);
    let queue = guest.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    for index in 1..=2 {
        write(queue, slot, index, data(index, 2, BLOCK));
    }
    flush(queue, slot);
    source.child.signal(Signal::CONT).unwrap();
    wait::until("the source has a session", SOON, || {
        let report = source.client().remote().unwrap();
        let connected = report.iohosts.iter().all(|iohost| iohost.state == "connected");
        connected && device(&source).ready && device(&source).kept_writes == 0
    });
    for index in 1..=2 {
        assert!(read(queue, slot, index, BLOCK) == data(index, 2, BLOCK), "block {index}");
    }
    assert!(writes(queue, slot, 3), "the destination has lost the disk");
    let metrics = source.client().metrics(false).unwrap();
    let abandoned = "sidecore_iohost_abandoned_writes_total{iohost=\"io1\"} 1";
    assert!(metrics.contains(abandoned), "{metrics}");
}
