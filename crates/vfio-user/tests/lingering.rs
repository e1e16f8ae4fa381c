//! Descriptors whose last close waits: whoever sends one waits for it, and nobody else.

mod common;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use common::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sidecore_vfio_user::{Access, Body, Command, Connection, Message, PciEndpoint, Received, Service, Socket, vfio};

/// Sends a message with any number of descriptors, and closes them.
fn send(client: &Client, ask: (Command, Body), fds: Vec<OwnedFd>) {
    send_message(client, &Message::command(99, ask.0, ask.1, Vec::new()), fds);
}

fn send_message(client: &Client, message: &Message, fds: Vec<OwnedFd>) {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    send_bytes(client, &bytes, fds);
}

fn send_bytes(client: &Client, bytes: &[u8], fds: Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    sendmsg(&client.connection, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT).unwrap();
}

fn surplus(client: &Client, socket: OwnedFd) {
    send(client, (Command::DeviceGetInfo, device_info()), vec![event(), socket]);
}

fn as_memory(client: &Client, socket: OwnedFd) {
    send(client, (Command::DmaMap, Body::DmaMap(map(0, PAGE))), vec![socket]);
}

struct Two {
    directory: tempfile::TempDir,
    service: Service,
}

impl Two {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), service: Service::start(NonZeroUsize::MIN).unwrap() }
    }

    fn serve(&self, name: &str) -> Socket {
        self.serve_function(name, Function::with_area(name, None))
    }

    fn serve_function(&self, name: &str, function: Arc<Function>) -> Socket {
        self.service.serve(&self.directory.path().join(name), Access::default(), PciEndpoint(function), None).unwrap()
    }
}

/// Sends what is not received before all of it is sent, and closed at this end: the command before has to be done first.
fn send_all(client: &mut Client, function: &Function, sends: impl FnOnce(&mut Client)) {
    function.hold(true);
    client.post((Command::DmaMap, Body::DmaMap(map(1 << 20, PAGE))), vec![memfd(PAGE)]);
    wait_until(|| function.is_held());
    sends(client);
    function.hold(false);
    function.release();
}

/// Asks the other function until this one's client has been hung up on.
fn hang_up_beside(first: &mut Client, second: &mut Client) {
    let start = Instant::now();
    loop {
        // It has to be answered, whatever becomes of the first one.
        second.ask((Command::DeviceGetInfo, device_info()), Vec::new());
        match first.connection.receive() {
            Ok(Received::Message(_) | Received::Nothing) => assert!(start.elapsed() < SOON, "it is not hung up on"),
            Ok(Received::Closed) | Err(_) => break,
        }
    }
    for _ in 0..100 {
        second.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
}

/// A client that sends this waits, and nobody else does.
fn waits_alone(sends: impl FnOnce(&Client, OwnedFd)) {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (mut client, mut neighbour) = (Client::start(first.path()), Client::start(second.path()));
    let (socket, end) = lingering();
    send_all(&mut client, &function, |client| sends(client, socket));
    hang_up_beside(&mut client, &mut neighbour);
    // The next client waits until it is closed.
    let mut next = Client::connect(first.path());
    next.post((Command::Version, version()), Vec::new());
    assert!(next.is_quiet() && first.is_connected());
    drop(end);
    assert_eq!(next.answer().errno, 0);
}

#[test]
fn a_descriptor_too_many() {
    waits_alone(surplus);
}

#[test]
fn memory_that_is_none() {
    waits_alone(as_memory);
}

#[test]
fn an_interrupt_that_is_none() {
    waits_alone(|client, socket| {
        let flags = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
        let set = irqs(flags, vfio::PCI_MSIX_IRQ_INDEX, 0, 2);
        send(client, (Command::DeviceSetIrqs, Body::IrqSet(set)), vec![event(), socket]);
    });
}

#[test]
fn a_socket_with_what_nobody_has_received() {
    waits_alone(|client, socket| {
        let (sender, receiver) = UnixStream::pair().unwrap();
        sidecore_socket::send(&sender, &[0], &[socket], 1, sidecore_socket::Blocking::Never).unwrap();
        surplus(client, receiver.into());
    });
}

#[test]
fn the_last_of_more_than_a_message_has() {
    for count in [20, 253] {
        waits_alone(|client, socket| {
            let fds = (1..count).map(|_| event()).chain([socket]).collect();
            send(client, (Command::DeviceGetInfo, device_info()), fds);
        });
    }
}

#[test]
fn one_beside_what_is_no_command() {
    waits_alone(|client, socket| {
        send_message(client, &Message::reply(1, Command::DeviceGetInfo, device_info(), Vec::new()), vec![socket]);
    });
}

#[test]
fn one_beside_what_is_no_message() {
    waits_alone(|client, socket| {
        let (command, body) = (Command::from_code(u16::MAX), Body::Other(vec![0; 1 << 20]));
        send_message(client, &Message::command(1, command, body, Vec::new()), vec![socket]);
    });
}

#[test]
fn a_client_that_leaves_what_nobody_has_read_holds_up_its_function_only() {
    let two = Two::new();
    let (first, second) = (two.serve("first"), two.serve("second"));
    let mut neighbour = Client::start(second.path());
    let client = Client::start(first.path());
    let (socket, end) = lingering();
    // Half a message, so that a part of it is with the function, and then the end.
    let mut bytes = Vec::new();
    Message::command(99, Command::DmaMap, Body::DmaMap(map(0, PAGE)), Vec::new()).write(&mut bytes);
    send_bytes(&client, &bytes[..20], vec![socket]);
    drop(client);
    let mut next = Client::connect(first.path());
    next.post((Command::Version, version()), Vec::new());
    for _ in 0..1000 {
        neighbour.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
    assert!(next.is_quiet());
    drop(end);
    assert_eq!(next.answer().errno, 0);
}

#[test]
fn what_is_not_received_any_more_holds_up_its_function_only() {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (mut client, mut neighbour) = (Client::start(first.path()), Client::start(second.path()));
    let (socket, end) = lingering();
    // When the command before can be answered there is nobody to answer to.
    send_all(&mut client, &function, |client| {
        as_memory(client, socket);
        client.connection = Connection::new(UnixStream::pair().unwrap().0);
    });
    let mut next = Client::connect(first.path());
    next.post((Command::Version, version()), Vec::new());
    for _ in 0..1000 {
        neighbour.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
    assert!(next.is_quiet());
    drop(end);
    assert_eq!(next.answer().errno, 0);
}

/// Does something on a thread of its own, which is to be soon over.
fn soon(what: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    thread::spawn(move || {
        what();
        done.send(()).unwrap();
    });
    wait.recv_timeout(SOON).expect("it is not over");
}

fn stuck(path: &Path, function: &Function, neighbour: &Socket) -> (Client, TcpStream) {
    let (mut client, mut neighbour) = (Client::start(path), Client::start(neighbour.path()));
    let (socket, end) = lingering();
    send_all(&mut client, function, |client| surplus(client, socket));
    hang_up_beside(&mut client, &mut neighbour);
    (client, end)
}

#[test]
fn nobody_waits_for_it_to_stop() {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (_client, end) = stuck(first.path(), &function, &second);
    soon(move || drop(first));
    // It can be served again.
    let again = two.serve_function("first", function.clone());
    let (_other, other_end) = stuck(again.path(), &function, &second);
    soon(move || drop((two, again, second)));
    drop((end, other_end));
}

#[test]
fn what_waits_in_the_backlog_holds_up_nobody_when_the_socket_goes() {
    let two = Two::new();
    let (first, second) = (two.serve("first"), two.serve("second"));
    let mut neighbour = Client::start(second.path());
    let _served = Client::start(first.path());
    let waiting = Client::connect(first.path());
    let (socket, end) = lingering();
    surplus(&waiting, socket);
    soon(move || drop(first));
    for _ in 0..100 {
        neighbour.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
    drop(end);
}
