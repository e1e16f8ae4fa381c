use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use sidecore_socket::{Blocking, StreamError, send};

use super::*;
use crate::data::Data;
use crate::message::{ACCESS_BYTES, Body, MAX_TRANSFER_BYTES, RegionAccess};
use sidecore_spec_nvme::vfio_user::Command;

fn pair() -> (Connection, Connection) {
    let (one, other) = UnixStream::pair().unwrap();
    (Connection::new(one), Connection::new(other))
}

fn raw() -> (UnixStream, Connection) {
    let (one, other) = UnixStream::pair().unwrap();
    (one, Connection::new(other))
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn reset(id: u16, fds: Vec<OwnedFd>) -> Message {
    Message::command(id, Command::DeviceReset, Body::Empty, fds)
}

fn write_access(len: usize) -> Message {
    let data = Data::from(vec![7; len].as_slice());
    let access = RegionAccess { offset_bytes: 0, region: 0, count: len as u32, data };
    Message::command(9, Command::RegionWrite, Body::RegionAccess(access), Vec::new())
}

fn bytes_of(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    bytes
}

#[track_caller]
fn receive(connection: &mut Connection) -> Message {
    match connection.receive().unwrap() {
        Received::Message(message) => message,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn no_message(connection: &mut Connection) {
    assert!(matches!(connection.receive(), Ok(Received::Nothing)));
}

#[test]
fn messages_keep_their_order_and_their_own_descriptors() {
    let (mut one, mut other) = pair();
    no_message(&mut other);
    for count in [0, 1, 16, 0, 3] {
        assert!(one.send(reset(count, (0..count).map(|_| event()).collect())).unwrap());
    }
    for count in [0, 1, 16, 0, 3] {
        let message = receive(&mut other);
        assert_eq!((message.id, message.fds.len()), (count, count.into()));
    }
    no_message(&mut other);
    drop(one);
    assert!(matches!(other.receive(), Ok(Received::Closed)));
}

#[test]
fn a_message_may_come_a_byte_at_a_time() {
    let (mut peer, mut connection) = raw();
    let bytes = [bytes_of(&write_access(20)), bytes_of(&reset(5, Vec::new()))].concat();
    let mut received = Vec::new();
    for byte in bytes {
        peer.write_all(&[byte]).unwrap();
        match connection.receive().unwrap() {
            Received::Message(message) => received.push(message),
            Received::Nothing => {}
            Received::Closed => panic!("closed"),
        }
    }
    assert_eq!(received.len(), 2);
    assert_eq!(received[0].body, write_access(20).body);
    assert_eq!(received[1].id, 5);
}

#[test]
fn an_end_within_a_message_is_no_end_between_two() {
    let bytes = bytes_of(&write_access(20));
    for len in 1..bytes.len() {
        let (mut peer, mut connection) = raw();
        peer.write_all(&bytes[..len]).unwrap();
        no_message(&mut connection);
        peer.shutdown(Shutdown::Write).unwrap();
        assert!(
            matches!(connection.receive(), Err(ConnectionError::Truncated)),
            "after {len} bytes"
        );
    }
}

#[test]
fn sizes_without_sense_are_refused_before_their_payload() {
    for size in [0_u32, 15, (HEADER_BYTES + ACCESS_BYTES + MAX_TRANSFER_BYTES) as u32 + 1, u32::MAX]
    {
        let (mut peer, mut connection) = raw();
        let mut bytes = bytes_of(&write_access(0));
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        peer.write_all(&bytes).unwrap();
        assert!(matches!(connection.receive(), Err(ConnectionError::Message(_))), "{size}");
    }
}

#[test]
fn too_many_descriptors_are_refused() {
    let (mut one, _other) = pair();
    let error = one.send(reset(0, (0..=MAX_FDS).map(|_| event()).collect())).unwrap_err();
    assert!(matches!(error, ConnectionError::Stream(StreamError::TooManyFds { .. })));

    // With one byte of a message after the other, more come together than one may have.
    let (peer, mut connection) = raw();
    let bytes = bytes_of(&reset(0, Vec::new()));
    let fds: Vec<OwnedFd> = (0..10).map(|_| event()).collect();
    send(&peer, &bytes[..1], &fds, MAX_FDS, Blocking::Never).unwrap();
    no_message(&mut connection);
    send(&peer, &bytes[1..2], &fds, MAX_FDS, Blocking::Never).unwrap();
    assert!(matches!(
        connection.receive(),
        Err(ConnectionError::Stream(StreamError::TooManyFds { .. }))
    ));
}

#[test]
fn a_descriptor_that_no_message_has_is_named_and_kept_until_the_connection_is_dropped() {
    let (mut one, mut other) = pair();
    let (pipe, sent) = rustix::pipe::pipe().unwrap();
    let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    one.send(reset(0, vec![event(), memory])).unwrap();
    assert_eq!(receive(&mut other).fds.len(), 2);
    one.send(reset(1, vec![event(), sent])).unwrap();
    let error = other.receive().unwrap_err();
    assert!(matches!(
        error,
        ConnectionError::Descriptor { message: Command::DeviceReset, number: 2, .. }
    ));
    let text = error.to_string();
    assert!(
        text.starts_with("descriptor 2 of DEVICE_RESET is neither") && text.contains("but pipe:["),
        "{text}"
    );
    let hung_up = || {
        let mut fds = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))
            .unwrap()
            > 0
    };
    assert!(!hung_up(), "it is open");
    drop(other);
    assert!(hung_up(), "it is closed");
}

#[test]
fn an_unread_message_is_kept_and_continued_where_it_stopped() {
    let (mut peer, mut connection) = raw();
    let large = MAX_TRANSFER_BYTES;
    let mut sent = 0;
    while connection.send(write_access(large)).unwrap() {
        sent += 1;
        assert!(sent < 1000, "the socket takes everything");
    }
    assert!(!connection.flush().unwrap());
    assert!(matches!(connection.send(reset(1, Vec::new())), Err(ConnectionError::Busy)));
    let each = bytes_of(&write_access(large));
    for _ in 0..=sent {
        let mut bytes = vec![0; each.len()];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += peer.read(&mut bytes[filled..]).unwrap();
            connection.flush().unwrap();
        }
        assert_eq!(bytes, each);
    }
    assert!(connection.flush().unwrap());
    assert!(connection.send(reset(1, Vec::new())).unwrap());
}

#[test]
fn a_peer_that_has_gone_is_an_error_and_no_signal() {
    let (mut one, other) = pair();
    drop(other);
    assert!(matches!(
        one.send(reset(0, Vec::new())),
        Err(ConnectionError::Stream(StreamError::Io(_)))
    ));
}
