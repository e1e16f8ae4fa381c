//! A VMM that dies with much memory delays no other VMM. The test has a process of its own because
//! it delays the reaper.

#[allow(dead_code, reason = "it uses a part")]
mod common;
#[path = "common/graph.rs"]
mod graph;
#[path = "common/host.rs"]
mod host;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;

use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::IdleMode;
use sidecore_driver::NvmeStatus;
use sidecore_memory::reaper::{wait_until_reaped, when_reaped};

use common::{PATIENCE, until};
use graph::{queue, spec};
use host::{ADAPTIVE, connect, read, write};

const BYTES: u64 = 256 << 20;
const ADDRESS: u64 = 1 << 44;

fn populated(name: &str) -> OwnedFd {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES).unwrap();
    file
}

fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

#[test]
fn neighbours_are_served_while_a_dead_guests_memory_is_still_mapped() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        // One sidecore, and one thread for both sockets.
        let spec = spec(directory.path(), idle, &["mem", "one"]);
        let assembly = Assembly::start(&spec).unwrap();
        let mut client = connect(&spec.devices[0].socket);
        let mut neighbour = connect(&spec.devices[1].socket);
        let name = format!("a-large-guest-{idle:?}").replace(' ', "");
        let file = populated(&name);
        client.transport().dma_map(ADDRESS, BYTES, file.as_fd(), 0).unwrap();
        drop(file);
        // The sidecore has used all of the memory, and is the last to release it.
        assert_eq!(write(queue(&mut client), 8, 1), NvmeStatus::OK);

        let (release, held) = channel::<()>();
        let (begun, begins) = channel();
        when_reaped(move || {
            begun.send(()).unwrap();
            let _ = held.recv_timeout(3 * PATIENCE);
        });
        begins.recv_timeout(PATIENCE).unwrap();
        drop(client);
        until(&assembly, 0, |report| report.state == DeviceState::Waiting);
        assert!(is_mapped(&name), "a sidecore or the sockets' thread has unmapped it");
        for byte in 0..100 {
            assert_eq!(write(queue(&mut neighbour), 8, byte), NvmeStatus::OK);
        }
        // The sockets are served as well, and the function accepts its next client.
        neighbour.read_namespace().unwrap();
        let mut next = connect(&spec.devices[0].socket);
        assert_eq!((read(queue(&mut next), 8), read(queue(&mut neighbour), 8)), (1, 99));
        assert!(is_mapped(&name));
        drop(release);
        wait_until_reaped();
        assert!(!is_mapped(&name), "the memory is still mapped");
        drop((next, neighbour));
        assembly.drain();
    }
}
