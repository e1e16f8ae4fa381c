//! A guest's disk at a VMhost, and the IOhost that has it.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use sidecore_driver::{BlkQueue, Slot, Status};
use sidecore_kit::guest::{complete, complete_all};
use sidecore_kit::wait;
use sidecore_units::Sector;

use super::Daemon;

/// The size of a write.
pub const BLOCK: u32 = 4096;
const SOON: Duration = Duration::from_secs(60);

/// An IOhost with a device on a file, for the client `vmhost`.
pub fn iohost(shared: &Path, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n{keys}\
         [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{0}/disk.img\"\ndirect = false\n\
         [[device]]\nname = \"disk1\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\nstore = \
         \"disk\"\n",
        shared.display()
    )
}

/// A VMhost with a guest's disk that is the IOhost's device.
pub fn vmhost(shared: &Path, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n[[sidecore]]\nname = \
         \"vm1\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{keys}\
         [[store]]\nname = \"r1\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \"disk1\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"r1\"\nsocket = \"vd0.sock\"\nqueues = 2\n\
         sidecores = [\"vm0\", \"vm1\"]\n",
        shared.display()
    )
}

/// Data of so many bytes that differ in each sector, block and round.
pub fn data(index: u64, round: u64, bytes: u32) -> Vec<u8> {
    (0..u64::from(bytes)).map(|at| (at / 512 + at % 7 + index * 7 + round * 31 + 1) as u8).collect()
}

pub fn submit(queue: &mut BlkQueue, slot: Slot, index: u64, bytes: Vec<u8>) {
    queue.write_data(slot, 0, &bytes);
    let sector = Sector(index * u64::from(bytes.len() as u32) / 512);
    queue.submit_write(slot, sector, bytes.len() as u32).unwrap();
}

pub fn write(queue: &mut BlkQueue, slot: Slot, index: u64, bytes: Vec<u8>) {
    submit(queue, slot, index, bytes);
    assert_eq!(complete(queue).status, Status::Ok);
}

pub fn read(queue: &mut BlkQueue, slot: Slot, index: u64, bytes: u32) -> Vec<u8> {
    queue.write_data(slot, 0, &vec![0xee; bytes as usize]);
    queue.submit_read(slot, Sector(index * u64::from(bytes) / 512), bytes).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
    let mut back = vec![0; bytes as usize];
    queue.read_data(slot, 0, &mut back);
    back
}

pub fn flush(queue: &mut BlkQueue, slot: Slot) {
    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, Status::Ok);
}

/// Kills the IOhost so many times, with a block written by each slot: half of the writes are
/// answered, the others are in flight. `start` starts the next IOhost, and `file` reads its store.
/// No request fails, and each write is there. Returns the last IOhost.
pub fn survives_kills(
    queue: &mut BlkQueue,
    slots: &[Slot],
    mut iohost: Daemon,
    kills: u64,
    (start, file): (impl Fn() -> Daemon, impl Fn() -> Vec<u8>),
) -> Daemon {
    let (count, half) = (slots.len() as u64, slots.len() / 2);
    for round in 1..=kills {
        for (index, slot) in (0..count).zip(slots) {
            submit(queue, *slot, index, data(index, round, BLOCK));
            if index + 1 == half as u64 {
                let done = complete_all(queue, half);
                assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
                iohost.child.signal(Signal::KILL).unwrap();
            }
        }
        queue.publish().unwrap();
        iohost.child.wait_for_end(Duration::from_secs(60)).unwrap();
        iohost = start();
        let done = complete_all(queue, slots.len() - half);
        assert!(done.iter().all(|done| done.status == Status::Ok), "round {round}: {done:?}");
        for index in 0..count {
            let back = read(queue, slots[0], index, BLOCK);
            assert!(back == data(index, round, BLOCK), "round {round}, {index}");
        }
        flush(queue, slots[0]);
        let file = file();
        for index in 0..count {
            let at = (index * u64::from(BLOCK)) as usize;
            assert!(file[at..][..BLOCK as usize] == data(index, round, BLOCK), "round {round}");
        }
    }
    iohost
}

/// Stops a daemon, with all of its threads: the signal alone is sent before the last one stops.
pub fn pause(daemon: &Daemon) {
    daemon.child.signal(Signal::STOP).unwrap();
    let pid = Pid::from_child(&daemon.child);
    let stopped = waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED).unwrap();
    assert!(stopped.is_some_and(|status| status.stopped()));
}

/// Kills the IOhost's daemon, and waits until a VMhost has noticed that, with so many requests that
/// have no answer.
pub fn lose(iohost: &mut Daemon, vmhost: &Daemon, in_flight: u64) {
    iohost.child.signal(Signal::KILL).unwrap();
    iohost.child.wait_for_end(SOON).unwrap();
    let control = vmhost.client();
    wait::until("the IOhost is away, and requests wait for it", SOON, || {
        let report = control.remote().unwrap();
        let devices = report.iohosts.iter().flat_map(|iohost| &iohost.devices);
        report.iohosts.iter().any(|iohost| iohost.state == "away")
            && devices.map(|device| device.in_flight).sum::<u64>() == in_flight
    });
}
