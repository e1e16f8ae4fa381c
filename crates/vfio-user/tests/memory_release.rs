//! The thread that serves all sockets never frees a client's memory itself. A process of its own,
//! because the test blocks the reaper.

mod common;

use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};

use common::*;
use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_memory::reaper::{wait_until_reaped, when_reaped};
use sidecore_vfio_user::{Access, Body, Command, DmaMap, PciEndpoint, Service, vfio};

const BYTES: u64 = 64 << 20;

/// A file with all of its pages, which only its last descriptor or mapping keeps.
fn populated(name: &str) -> OwnedFd {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES).unwrap();
    file
}

/// Whether this process still has a descriptor of the file `name`.
fn is_open(name: &str) -> bool {
    let name = format!("/memfd:{name} ");
    let links = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.unwrap().path().read_link().ok());
    links.into_iter().any(|link| link.to_string_lossy().starts_with(&name))
}

fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(&format!("/memfd:{name} "))
}

/// Blocks the reaper until the sender is dropped.
fn block_reaper(until: Receiver<()>) {
    let (begun, begins) = channel();
    when_reaped(move || {
        begun.send(()).unwrap();
        let _ = until.recv_timeout(6 * SOON);
    });
    begins.recv_timeout(SOON).unwrap();
}

fn dma_map(address: u64) -> (Command, Body) {
    (Command::DmaMap, Body::DmaMap(map(address, BYTES)))
}

/// Sends refused commands, one of each kind, and a map that is no place for a driver's data.
fn send_memory_for_nothing(client: &mut Client) {
    let set = irqs(
        vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER,
        vfio::PCI_MSIX_IRQ_INDEX,
        0,
        2,
    );
    let unaligned = (Command::DmaMap, Body::DmaMap(map(1, BYTES)));
    let too_large = (Command::DmaMap, Body::DmaMap(map(0, 2 * BYTES)));
    let read_only = DmaMap {
        flags: vfio::DMA_MAP_FLAG_READ | vfio::DMA_MAP_FLAG_MMAP,
        ..map(BYTES << 8, BYTES)
    };
    let asks = [
        (unaligned, vec![populated("unaligned")], false),
        (too_large, vec![populated("too-large")], false),
        ((Command::DeviceSetIrqs, Body::IrqSet(set)), vec![event(), populated("no-event")], false),
        (read(0, 0, 8), vec![populated("for-a-read")], false),
        ((Command::Unknown(77), Body::Other(vec![1; 99])), vec![populated("for-nothing")], false),
        ((Command::DmaMap, Body::DmaMap(read_only)), vec![populated("read-only")], true),
    ];
    for (ask, fds, succeeds) in asks {
        assert_eq!(client.ask(ask, fds).errno == 0, succeeds);
    }
}

#[test]
fn a_large_memory_of_a_gone_client_delays_no_other_client() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    let sockets = ["leaving", "neighbour"].map(|name| {
        let function = Function::with_area(name, None);
        (
            service
                .serve(
                    &directory.path().join(name),
                    Access::default(),
                    PciEndpoint(function.clone()),
                    None,
                )
                .unwrap(),
            function,
        )
    });
    let [(socket, _), (neighbours, _)] = &sockets;
    let mut neighbour = Client::start(neighbours.path());
    let mut client = Client::start(socket.path());
    let (let_go, until) = channel();
    block_reaper(until);

    send_memory_for_nothing(&mut client);
    // Memory that the client unmaps, and memory that is still mapped when the client goes.
    for (at, name) in [(0, "unmapped"), (1, "left-behind")] {
        assert_eq!(client.ask(dma_map(at * BYTES), vec![populated(name)]).errno, 0);
    }
    // With a descriptor, as SPDK sends an unmap.
    let unmap = (Command::DmaUnmap, Body::DmaUnmap(unmap(0, BYTES)));
    assert_eq!(client.ask(unmap, vec![populated("with-an-unmap")]).errno, 0);
    drop(client);
    wait_until(|| !socket.is_connected());

    let refused =
        ["unaligned", "too-large", "no-event", "for-a-read", "for-nothing", "with-an-unmap"];
    for name in refused.into_iter().chain(["read-only", "unmapped", "left-behind"]) {
        assert!(is_open(name), "{name}: closed by the thread that serves all sockets");
    }
    for name in ["unmapped", "left-behind"] {
        assert!(is_mapped(name), "{name}");
    }
    // Meanwhile the service serves all others, and the function's next client.
    for client in [&mut neighbour, &mut Client::start(socket.path())] {
        assert_eq!(client.ask(read(0, 0, 8), vec![]).errno, 0);
        assert_eq!(client.ask(dma_map(0), vec![populated("next")]).errno, 0);
    }
    drop(let_go);
    wait_until_reaped();
    for name in refused.into_iter().chain(["read-only", "unmapped", "left-behind"]) {
        assert!(!is_open(name) && !is_mapped(name), "{name}");
    }
}
