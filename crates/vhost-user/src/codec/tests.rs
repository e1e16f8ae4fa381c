use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sidecore_peer::{Codec as _, StreamError};

use super::*;
use crate::message::{Body, Request};
use crate::testing::{Front, event, eventfd, memory_table, number, plain, region};

fn pair() -> (Front, Front) {
    let (front, back) = UnixStream::pair().unwrap();
    (Front::new(front), Front::new(back))
}

fn send_raw(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    assert_eq!(
        sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()),
        Ok(bytes.len())
    );
}

#[test]
fn messages_arrive_one_by_one_with_their_descriptors() {
    let (mut front, mut back) = pair();
    let table = memory_table(&[region(0, 4096), region(4096, 4096)], "connection");
    front.send(plain(Request::GetFeatures)).unwrap();
    let body = table.body.clone();
    front.send(table).unwrap();
    front.send(eventfd(Request::SetVringKick, 1)).unwrap();
    assert_eq!(back.receive().unwrap().unwrap().request, Request::GetFeatures);
    let received = back.receive().unwrap().unwrap();
    assert_eq!(received.body, body);
    assert_eq!(received.fds.len(), 2);
    for fd in &received.fds {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "descriptors are not inherited");
    }
    assert_eq!(back.receive().unwrap().unwrap().fds.len(), 1);
    drop(front);
    assert!(back.receive().unwrap().is_none(), "closed between messages");
}

#[test]
fn a_message_may_arrive_byte_by_byte() {
    let (front, mut back) = pair();
    let bytes = number(Request::SetFeatures, 0x1234).to_bytes();
    let sender = thread::spawn(move || {
        for byte in bytes {
            front.stream().write_all(&[byte]).unwrap();
            thread::sleep(Duration::from_micros(100));
        }
    });
    assert_eq!(back.receive().unwrap().unwrap().body, Body::U64(0x1234));
    sender.join().unwrap();
}

#[test]
fn a_connection_closed_in_mid_message_is_an_error() {
    let bytes = number(Request::SetFeatures, 0).to_bytes();
    for len in [1, 11, 12, 19] {
        let (front, mut back) = pair();
        front.stream().write_all(&bytes[..len]).unwrap();
        drop(front);
        assert!(matches!(back.receive(), Err(ConnectionError::Truncated)), "after {len} bytes");
    }
}

#[test]
fn shutting_the_socket_down_ends_a_wait_in_mid_message() {
    let (front, mut back) = pair();
    let handle = back.stream();
    let receiver = thread::spawn(move || back.receive().map(|message| message.is_some()));
    front.stream().write_all(&number(Request::SetFeatures, 0).to_bytes()[..15]).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert!(!receiver.is_finished());
    handle.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(matches!(receiver.join().unwrap(), Err(ConnectionError::Truncated)));
}

#[test]
fn an_oversized_message_is_refused_by_its_header_alone() {
    let (front, mut back) = pair();
    let header = [1_u32, 1, 1 << 30].map(u32::to_ne_bytes).concat();
    front.stream().write_all(&header).unwrap();
    assert!(matches!(
        back.receive(),
        Err(ConnectionError::Message(MessageError::Oversized { .. }))
    ));
}

fn descriptors_open_on(fd: &OwnedFd) -> usize {
    let inode = rustix::fs::fstat(fd).unwrap();
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let same = |path: std::path::PathBuf| {
        rustix::fs::stat(path)
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (inode.st_dev, inode.st_ino))
    };
    links.filter(|link| same(link.as_ref().unwrap().path())).count()
}

#[test]
fn surplus_descriptors_are_an_error_and_are_closed_with_the_connection() {
    let message = eventfd(Request::SetVringKick, 0).to_bytes();
    for count in [0, 2, 8, 9, 64] {
        let (front, mut back) = pair();
        // A memfd has an inode of its own, so that its duplicates can be counted.
        let fd = crate::testing::memfd("surplus", 1);
        let fds = vec![fd.as_fd(); count];
        send_raw(front.stream(), &message, &fds);
        let error = back.receive().unwrap_err();
        let expected = if count > MAX_FDS { "more than 8" } else { "SET_VRING_KICK with" };
        assert!(error.to_string().starts_with(expected), "{count}: {error}");
        drop(back);
        assert_eq!(descriptors_open_on(&fd), 1, "{count} descriptors");
    }
}

#[test]
fn a_descriptor_of_another_kind_is_kept_until_the_connection_is_dropped() {
    let (front, mut back) = pair();
    let (pipe, sent) = rustix::pipe::pipe().unwrap();
    let message = eventfd(Request::SetVringKick, 0).to_bytes();
    send_raw(front.stream(), &message, &[sent.as_fd()]);
    drop(sent);
    let error = back.receive().unwrap_err();
    assert!(matches!(
        error,
        ConnectionError::Descriptor { message: Request::SetVringKick, number: 1, .. }
    ));
    assert!(error.to_string().contains("but pipe:["), "{error}");
    let hung_up = || {
        let mut fds = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))
            .unwrap()
            > 0
    };
    assert!(!hung_up(), "it is open");
    drop(back);
    assert!(hung_up(), "it is closed");
}

#[test]
fn descriptors_may_come_in_pieces_but_not_in_a_larger_number() {
    let (front, mut back) = pair();
    let bytes = eventfd(Request::SetVringKick, 0).to_bytes();
    let fd = event();
    send_raw(front.stream(), &bytes[..6], &[]);
    send_raw(front.stream(), &bytes[6..], &[fd.as_fd()]);
    assert_eq!(back.receive().unwrap().unwrap().fds.len(), 1);
    for byte in &bytes {
        send_raw(front.stream(), &[*byte], &[fd.as_fd()]);
    }
    assert!(matches!(back.receive(), Err(ConnectionError::Stream(StreamError::TooManyFds { .. }))));
}

#[test]
fn more_descriptors_than_fit_are_not_sent() {
    let (mut front, _back) = pair();
    let fds = (0..=MAX_FDS).map(|_| event()).collect();
    let message = Message::request(Request::Unknown(99), Body::Other(Vec::new()), fds);
    assert!(matches!(
        front.send(message),
        Err(ConnectionError::Stream(StreamError::TooManyFds { .. }))
    ));
}

#[test]
fn writing_to_a_peer_that_is_gone_is_an_error_and_no_signal() {
    let (mut front, back) = pair();
    drop(back);
    assert!(matches!(
        front.send(plain(Request::GetFeatures)),
        Err(ConnectionError::Stream(StreamError::Io(_)))
    ));
}

#[test]
fn a_channel_for_the_back_ends_requests_is_closed_with_the_connection_and_not_before() {
    let (mut front, mut back) = pair();
    let (channel, peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    front
        .send(Message::request(Request::SetBackendReqFd, Body::Empty, vec![channel.into()]))
        .unwrap();
    let received = back.receive().unwrap().unwrap();
    assert_eq!(received.fds.len(), 1);
    // A socket's close may take as long as its peer likes, so a message has only a duplicate.
    drop(received);
    assert_eq!((&peer).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "it is open");
    drop(back);
    assert_eq!((&peer).read(&mut [0]).unwrap(), 0, "it is closed");
}

#[test]
fn a_connection_keeps_a_bounded_number_of_channels() {
    let (mut front, mut back) = pair();
    let (channel, _peer) = UnixStream::pair().unwrap();
    let message = || {
        Message::request(
            Request::SetBackendReqFd,
            Body::Empty,
            vec![channel.try_clone().unwrap().into()],
        )
    };
    for _ in 0..Codec::MAX_SOCKETS {
        front.send(message()).unwrap();
        back.receive().unwrap().unwrap();
    }
    front.send(message()).unwrap();
    assert!(matches!(back.receive(), Err(ConnectionError::TooManySockets { .. })));
}

#[test]
fn a_socket_with_any_other_request_is_refused() {
    let (mut front, mut back) = pair();
    let (channel, _peer) = UnixStream::pair().unwrap();
    front
        .send(Message::request(Request::SetVringCall, Body::U64(0), vec![channel.into()]))
        .unwrap();
    assert!(matches!(back.receive(), Err(ConnectionError::Descriptor { number: 1, .. })));
}
