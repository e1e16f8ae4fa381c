//! Bytes and file descriptors over a stream socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The largest number of descriptors that one call moves. A protocol may allow fewer.
pub const MAX_FDS: usize = 16;
/// The largest number of descriptors that the kernel moves in one call (SCM_MAX_FD, unix(7)). One
/// receive never returns more, because it ends at the next message with descriptors.
const KERNEL_MAX_FDS: usize = 253;

/// The behaviour of a call that has nothing to receive, or no space to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// The call waits, unless the socket is in non-blocking mode.
    Wait,
    /// The call fails with [`io::ErrorKind::WouldBlock`].
    Never,
}

/// The reason why bytes cannot be moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A system call for the socket failed.
    #[error("socket: {0}")]
    Io(#[from] io::Error),
    /// The message has more file descriptors than the protocol allows.
    #[error("more than {max} file descriptors with one message")]
    TooManyFds {
        /// The limit of the protocol.
        max: usize,
    },
}

impl StreamError {
    /// Whether the call failed only because it would have to wait.
    #[must_use]
    pub fn would_block(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Sends a part of `bytes`, and all of `fds` with the first byte. Returns the number of bytes sent.
///
/// # Errors
/// The socket's error; more than `max_fds` descriptors. A closed peer is an error and no signal.
pub fn send(
    stream: impl AsFd,
    bytes: &[u8],
    fds: &[OwnedFd],
    max_fds: usize,
    blocking: Blocking,
) -> Result<usize, StreamError> {
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, blocking == Blocking::Never);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    // The buffer may have space for more than MAX_FDS, because of its alignment.
    let fits = fds.len() <= max_fds
        && (fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    if !fits {
        return Err(StreamError::TooManyFds { max: max_fds });
    }
    loop {
        match sendmsg(&stream, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map_err(io::Error::from)?),
        }
    }
}

/// Receives up to `bytes.len()` bytes, and appends the descriptors that come with them to `fds`,
/// close-on-exec. Returns the number of bytes; zero at the end of the stream.
///
/// All descriptors are in `fds`, even if there are too many: a close may take as long as the peer
/// likes (see [`Descriptor`](crate::Descriptor)), so the caller decides when and where to close.
/// Only descriptors for which the process has no number left are closed here, by the kernel.
///
/// # Errors
/// The socket's error; more than `max_fds` descriptors in all.
pub fn receive(
    stream: impl AsFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    max_fds: usize,
    blocking: Blocking,
) -> Result<usize, StreamError> {
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    flags.set(RecvFlags::DONTWAIT, blocking == Blocking::Never);
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&stream, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            received => break received.map_err(io::Error::from)?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > max_fds {
        return Err(StreamError::TooManyFds { max: max_fds });
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    fn events(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect()
    }

    #[test]
    fn descriptors_come_with_their_bytes_and_are_not_inherited() {
        let (one, other) = UnixStream::pair().unwrap();
        assert_eq!(send(&one, &[1, 2, 3], &events(MAX_FDS), MAX_FDS, Blocking::Never).unwrap(), 3);
        let (mut bytes, mut fds) = ([0; 8], Vec::new());
        assert_eq!(receive(&other, &mut bytes, &mut fds, MAX_FDS, Blocking::Wait).unwrap(), 3);
        assert_eq!((&bytes[..3], fds.len()), (&[1, 2, 3][..], MAX_FDS));
        assert!(fds.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
    }

    #[test]
    fn a_protocol_may_allow_fewer_descriptors_and_counts_earlier_ones() {
        let (one, other) = UnixStream::pair().unwrap();
        assert!(matches!(
            send(&one, &[0], &events(3), 2, Blocking::Never),
            Err(StreamError::TooManyFds { max: 2 })
        ));
        for _ in 0..2 {
            send(&one, &[0], &events(2), 2, Blocking::Never).unwrap();
        }
        let mut fds = Vec::new();
        receive(&other, &mut [0], &mut fds, 2, Blocking::Never).unwrap();
        let error = receive(&other, &mut [0], &mut fds, 2, Blocking::Never).unwrap_err();
        assert_eq!(error.to_string(), "more than 2 file descriptors with one message");
    }

    #[test]
    fn too_many_descriptors_are_all_handed_over() {
        let (one, other) = UnixStream::pair().unwrap();
        let most = events(KERNEL_MAX_FDS);
        let borrowed: Vec<_> = most.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(KERNEL_MAX_FDS))];
        for _ in 0..2 {
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
            sendmsg(&one, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
        }
        let mut fds = Vec::new();
        for received in [KERNEL_MAX_FDS, 2 * KERNEL_MAX_FDS] {
            let error =
                receive(&other, &mut [0; 2], &mut fds, MAX_FDS, Blocking::Never).unwrap_err();
            assert!(matches!(error, StreamError::TooManyFds { max: MAX_FDS }));
            assert_eq!(fds.len(), received);
        }
    }

    #[test]
    fn a_call_that_would_block_says_so_and_an_end_is_no_bytes() {
        let (one, other) = UnixStream::pair().unwrap();
        let error = receive(&other, &mut [0], &mut Vec::new(), 0, Blocking::Never).unwrap_err();
        assert!(error.would_block());
        drop(one);
        assert_eq!(receive(&other, &mut [0], &mut Vec::new(), 0, Blocking::Never).unwrap(), 0);
        let error = send(&other, &[0], &[], 0, Blocking::Never).unwrap_err();
        assert!(!error.would_block());
    }
}
