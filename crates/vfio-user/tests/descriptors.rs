//! The server leaks no descriptor, in every course of a connection. A process of its own, because
//! the test counts all descriptors.

mod common;

use std::io::Write;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use common::*;
use sidecore_memory::reaper::wait_until_reaped;
use sidecore_vfio_user::{Body, Command, MAX_FDS, Message, Service, vfio};

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

const EVENTFD: u32 = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;

fn events(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| event()).collect()
}

/// Maps four pages and sets nine vectors, of which the server keeps eight.
fn send_valid_commands(client: &mut Client) {
    for page in 0..4 {
        let dma_map = (Command::DmaMap, Body::DmaMap(map(page * PAGE, PAGE)));
        assert_eq!(client.ask(dma_map, vec![memfd(PAGE)]).errno, 0);
    }
    let set = (Command::DeviceSetIrqs, Body::IrqSet(irqs(EVENTFD, vfio::PCI_MSIX_IRQ_INDEX, 0, 8)));
    assert_eq!(client.ask(set, events(8)).errno, 0);
    let set = (Command::DeviceSetIrqs, Body::IrqSet(irqs(EVENTFD, vfio::PCI_ERR_IRQ_INDEX, 0, 1)));
    assert_eq!(client.ask(set, events(1)).errno, 0);
    let reply = client.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), vec![]);
    assert_eq!(reply.fds.len(), 1);
    drop(reply);
}

fn send_invalid_commands(client: &mut Client) {
    assert_ne!(client.ask(read(0, 0, 8), events(MAX_FDS)).errno, 0);
    assert_ne!(
        client.ask((Command::DmaMap, Body::DmaMap(map(0, PAGE))), vec![memfd(PAGE)]).errno,
        0
    );
    assert_ne!(client.ask((Command::DmaMap, Body::DmaMap(map(1 << 30, PAGE))), events(1)).errno, 0);
    assert_ne!(
        client.ask((Command::Unknown(77), Body::Other(vec![1; 99])), events(MAX_FDS)).errno,
        0
    );
    let set =
        (Command::DeviceSetIrqs, Body::IrqSet(irqs(EVENTFD, vfio::PCI_MSIX_IRQ_INDEX, 10, 3)));
    assert_ne!(client.ask(set, vec![event(), event(), memfd(0)]).errno, 0);
}

#[test]
fn no_descriptor_leaks() {
    let directory = tempfile::tempdir().unwrap();
    let before = open_descriptors();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    let function = Function::new();
    let socket = serve(&service, &directory, "socket", &function);
    let serving = open_descriptors();
    for round in 0..20 {
        let mut client = Client::start(socket.path());
        send_valid_commands(&mut client);
        // The client's end, the server's, the vectors and the maps. The server may be about to
        // close the descriptor that it has just sent.
        wait_until(|| open_descriptors() == serving + 2 + 8 + 4);
        send_invalid_commands(&mut client);
        wait_until_reaped();
        assert_eq!(open_descriptors(), serving + 2 + 8 + 4);
        // Ends of the connection, also within a message and with descriptors in flight.
        match round % 4 {
            0 => {}
            1 => drop(
                client.post((Command::DmaMap, Body::DmaMap(map(1 << 30, PAGE))), vec![memfd(PAGE)]),
            ),
            2 => {
                // A command with descriptors whose payload never comes.
                let mut bytes = Vec::new();
                Message::command(1, Command::DmaMap, Body::DmaMap(map(0, PAGE)), vec![])
                    .write(&mut bytes);
                bytes[4..8].copy_from_slice(&40_u32.to_ne_bytes());
                let short = Message::command(
                    1,
                    Command::DmaMap,
                    Body::Other(vec![0; 200]),
                    events(MAX_FDS),
                );
                client.post_message(short);
                let mut stream =
                    UnixStream::from(client.connection.as_fd().try_clone_to_owned().unwrap());
                stream.write_all(&bytes[..20]).unwrap();
            }
            _ => {
                function.hold(true);
                client.post((Command::DmaMap, Body::DmaMap(map(1 << 30, PAGE))), vec![memfd(PAGE)]);
                wait_until(|| function.is_held());
                function.hold(false);
                function.release();
            }
        }
        drop(client);
        wait_until(|| !socket.is_connected());
        wait_until_reaped();
        assert_eq!(open_descriptors(), serving, "round {round}");
    }
    drop((socket, service, function));
    // A background thread closes the listener; no caller waits for that.
    wait_until(|| open_descriptors() == before);
}
