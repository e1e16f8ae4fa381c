//! Exported clients that the next daemon cannot resume.

#[allow(dead_code, reason = "it uses a part")]
mod common;
#[path = "common/host.rs"]
mod host;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use sidecore_assembly::Assembly;
use sidecore_assembly::spec::{FileOptions, IdleMode, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_vfio_user::{Body, Command, Data, Message, RegionAccess, Version};

use common::PATIENCE;
use host::{connect, function, read, write};

/// Longer than any test here takes.
const LINGER: Duration = Duration::from_secs(60);

/// Functions in front of files.
fn spec(directory: &Path, names: &[&str]) -> Spec {
    let store = |name: &&str| {
        let path = directory.join(format!("{name}.img"));
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        }
        let kind = StoreKind::File(FileOptions { direct: false, ..FileOptions::new(path) });
        StoreSpec::new(*name, kind)
    };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: names.iter().map(store).collect(),
        controllers: Vec::new(),
        devices: names.iter().map(|name| function(directory, name, IdleMode::Poll)).collect(),
        ..Spec::default()
    }
}

/// A socket whose last close waits until the other end, which is returned too, is dropped.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (end, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket.into(), end)
}

fn post(stream: &mut UnixStream, command: Command, body: Body) {
    let mut bytes = Vec::new();
    Message::command(1, command, body, Vec::new()).write(&mut bytes);
    stream.write_all(&bytes).unwrap();
}

/// A client that reads no answers, so that its messages are no longer received. The last message
/// carries a lingering socket.
fn client_that_does_not_read(path: &Path) -> (UnixStream, TcpStream) {
    let mut stream = UnixStream::connect(path).unwrap();
    post(
        &mut stream,
        Command::Version,
        Body::Version(Version { major: 0, minor: 1, data: Vec::new() }),
    );
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    for _ in 0..60 {
        let access =
            RegionAccess { offset_bytes: 0, region: 0, count: 64 << 10, data: Data::empty() };
        post(&mut stream, Command::RegionRead, Body::RegionAccess(access));
    }
    let (socket, end) = lingering();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [socket.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&stream, &[IoSlice::new(&[0; 4])], &mut control, SendFlags::empty()).unwrap();
    (stream, end)
}

/// Runs `action` on a thread of its own, and fails if it takes long.
fn soon<T: Send + 'static>(action: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = channel();
    std::thread::spawn(move || done.send(action()));
    wait.recv_timeout(PATIENCE).expect("the action takes too long")
}

#[test]
fn a_lost_clients_descriptors_delay_no_daemon() {
    // Three reasons: the device is removed, has another front end, or its state cannot be read.
    for case in 0..3 {
        let directory = tempfile::tempdir().unwrap();
        let both = spec(directory.path(), &["one", "two"]);
        let assembly = Assembly::start(&both).unwrap();
        let (client, end) = client_that_does_not_read(&both.devices[0].socket);
        let mut other = connect(&both.devices[1].socket);
        let mut left = soon(move || assembly.hand_over());
        assert_eq!(left.len(), 2);
        let next = match case {
            0 => spec(directory.path(), &["two"]),
            1 => {
                let mut next = both.clone();
                next.devices[0].front_end =
                    sidecore_assembly::spec::FrontEndSpec::from_word("virtio-blk");
                next
            }
            _ => {
                let one = left.iter_mut().find(|left| left.name == "one").unwrap();
                one.state.truncate(10);
                both.clone()
            }
        };
        let assembly = soon(move || Assembly::take_over(&next, &mut left).unwrap());
        assert_eq!(write(other.queue(0).unwrap(), 8, 7).0, 0);
        assert_eq!(read(other.queue(0).unwrap(), 8), 7);
        drop((client, end));
        drop(assembly);
    }
}

/// The client has mapped the old doorbells. A device that polls new doorbells would never see its
/// commands.
#[test]
fn a_client_without_its_doorbells_is_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), &["one"]);
    let assembly = Assembly::start(&spec).unwrap();
    let client = connect(&spec.devices[0].socket);
    let mut left = assembly.hand_over();
    drop(assembly);
    *left[0].fds.last_mut().unwrap() =
        rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let assembly = Assembly::take_over(&spec, &mut left).unwrap();
    assert!(!client.is_connected());
    let mut next = connect(&spec.devices[0].socket);
    assert_eq!(write(next.queue(0).unwrap(), 8, 7).0, 0);
    drop(assembly);
}

/// A disabled controller has no queues, whatever the state contains.
#[test]
fn a_disabled_controller_starts_no_queues() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), &["one"]);
    let assembly = Assembly::start(&spec).unwrap();
    let client = connect(&spec.devices[0].socket);
    let mut left = assembly.hand_over();
    drop(assembly);
    let state = String::from_utf8(left[0].state.clone()).unwrap();
    assert!(state.contains(r#""rest":"Ready""#));
    left[0].state = state.replace(r#""rest":"Ready""#, r#""rest":"Disabled""#).into_bytes();
    let assembly = Assembly::take_over(&spec, &mut left).unwrap();
    drop(client);
    let mut next = connect(&spec.devices[0].socket);
    assert_eq!(write(next.queue(0).unwrap(), 8, 7).0, 0);
    drop(assembly);
}
