//! Descriptors whose last close waits: only the client that sends one waits for the close.

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
use sidecore_vfio_user::{
    Access, Body, Command, Connection, Message, PciEndpoint, Received, Service, Socket, vfio,
};

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

fn as_surplus(client: &Client, socket: OwnedFd) {
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
        Self {
            directory: tempfile::tempdir().unwrap(),
            service: Service::start(NonZeroUsize::MIN).unwrap(),
        }
    }

    fn serve(&self, name: &str) -> Socket {
        self.serve_function(name, Function::with_area(name, None))
    }

    fn serve_function(&self, name: &str, function: Arc<Function>) -> Socket {
        self.service
            .serve(
                &self.directory.path().join(name),
                Access::default(),
                PciEndpoint(function),
                None,
            )
            .unwrap()
    }
}

/// Sends messages that the service receives only after the last of them was sent and closed at this
/// end, because the service is busy with the command before.
fn send_all(client: &mut Client, function: &Function, sends: impl FnOnce(&mut Client)) {
    function.hold(true);
    client.post((Command::DmaMap, Body::DmaMap(map(1 << 20, PAGE))), vec![memfd(PAGE)]);
    wait_until(|| function.is_held());
    sends(client);
    function.hold(false);
    function.release();
}

/// Sends commands to the other function until this function's client is disconnected.
fn hang_up_beside(first: &mut Client, second: &mut Client) {
    let start = Instant::now();
    loop {
        // The other function has to reply, in every state of the first.
        second.ask((Command::DeviceGetInfo, device_info()), Vec::new());
        match first.connection.receive() {
            Ok(Received::Message(_) | Received::Nothing) => {
                assert!(start.elapsed() < SOON, "the client is not disconnected")
            }
            Ok(Received::Closed) | Err(_) => break,
        }
    }
    for _ in 0..100 {
        second.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
}

/// Checks that only the client that sends such a descriptor waits.
fn waits_alone(sends: impl FnOnce(&Client, OwnedFd)) {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (mut client, mut neighbour) = (Client::start(first.path()), Client::start(second.path()));
    let (socket, end) = lingering();
    send_all(&mut client, &function, |client| sends(client, socket));
    hang_up_beside(&mut client, &mut neighbour);
    // The next client waits until the descriptor is closed.
    let mut next = Client::connect(first.path());
    next.post((Command::Version, version()), Vec::new());
    assert!(next.is_quiet() && first.is_connected());
    drop(end);
    assert_eq!(next.answer().errno, 0);
}

#[test]
fn one_descriptor_too_many() {
    waits_alone(as_surplus);
}

#[test]
fn a_socket_in_place_of_memory() {
    waits_alone(as_memory);
}

#[test]
fn a_socket_in_place_of_an_eventfd() {
    waits_alone(|client, socket| {
        let flags = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
        let set = irqs(flags, vfio::PCI_MSIX_IRQ_INDEX, 0, 2);
        send(client, (Command::DeviceSetIrqs, Body::IrqSet(set)), vec![event(), socket]);
    });
}

#[test]
fn a_socket_with_unreceived_messages() {
    waits_alone(|client, socket| {
        let (sender, receiver) = UnixStream::pair().unwrap();
        sidecore_socket::send(&sender, &[0], &[socket], 1, sidecore_socket::Blocking::Never)
            .unwrap();
        as_surplus(client, receiver.into());
    });
}

#[test]
fn the_last_of_too_many_descriptors() {
    for count in [20, 253] {
        waits_alone(|client, socket| {
            let fds = (1..count).map(|_| event()).chain([socket]).collect();
            send(client, (Command::DeviceGetInfo, device_info()), fds);
        });
    }
}

#[test]
fn a_descriptor_beside_an_unknown_command() {
    waits_alone(|client, socket| {
        send_message(
            client,
            &Message::reply(1, Command::DeviceGetInfo, device_info(), Vec::new()),
            vec![socket],
        );
    });
}

#[test]
fn a_descriptor_beside_bytes_that_are_no_message() {
    waits_alone(|client, socket| {
        let (command, body) = (Command::from_code(u16::MAX), Body::Other(vec![0; 1 << 20]));
        send_message(client, &Message::command(1, command, body, Vec::new()), vec![socket]);
    });
}

#[test]
fn a_gone_client_with_unread_messages_delays_only_its_function() {
    let two = Two::new();
    let (first, second) = (two.serve("first"), two.serve("second"));
    let mut neighbour = Client::start(second.path());
    let client = Client::start(first.path());
    let (socket, end) = lingering();
    // Half a message, so that the service has read a part of it, and then the end.
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
fn messages_that_are_never_received_delay_only_their_function() {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (mut client, mut neighbour) = (Client::start(first.path()), Client::start(second.path()));
    let (socket, end) = lingering();
    // The client is gone when its command can be answered.
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

/// Runs `action` on a thread of its own, and checks that it ends soon.
fn soon(action: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    thread::spawn(move || {
        action();
        done.send(()).unwrap();
    });
    wait.recv_timeout(SOON).expect("the action has not ended");
}

fn stuck(path: &Path, function: &Function, neighbour: &Socket) -> (Client, TcpStream) {
    let (mut client, mut neighbour) = (Client::start(path), Client::start(neighbour.path()));
    let (socket, end) = lingering();
    send_all(&mut client, function, |client| as_surplus(client, socket));
    hang_up_beside(&mut client, &mut neighbour);
    (client, end)
}

#[test]
fn stopping_a_socket_does_not_wait_for_the_close() {
    let two = Two::new();
    let function = Function::with_area("first", None);
    let (first, second) = (two.serve_function("first", function.clone()), two.serve("second"));
    let (_client, end) = stuck(first.path(), &function, &second);
    soon(move || drop(first));
    // The function can be served again.
    let again = two.serve_function("first", function.clone());
    let (_other, other_end) = stuck(again.path(), &function, &second);
    soon(move || drop((two, again, second)));
    drop((end, other_end));
}

#[test]
fn connections_in_the_backlog_delay_nothing_when_the_socket_is_removed() {
    let two = Two::new();
    let (first, second) = (two.serve("first"), two.serve("second"));
    let mut neighbour = Client::start(second.path());
    let _served = Client::start(first.path());
    let waiting = Client::connect(first.path());
    let (socket, end) = lingering();
    as_surplus(&waiting, socket);
    soon(move || drop(first));
    for _ in 0..100 {
        neighbour.ask((Command::DeviceGetInfo, device_info()), Vec::new());
    }
    drop(end);
}
