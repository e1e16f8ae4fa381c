//! Bytes and any number of descriptors behind a single descriptor, for a service manager's store
//! (`sd_notify(3)`, `FDSTORE=1`). Such a store returns descriptors in no defined order, and keeps
//! only one of two descriptors of the same open file.
//!
//! A parcel is the receiving end of a socket pair whose other end is closed: its contents wait in
//! the kernel. A parcel can be opened once.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SeekFrom, memfd_create, seek};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::close_aside;
use crate::stream::{Blocking, MAX_FDS, StreamError, receive, send};

/// The largest content of a parcel that [`unpack`] reads, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// The largest number of descriptors that [`unpack`] accepts.
const MAX_PARCEL_FDS: usize = 4096;

/// The text of every message in a parcel. The content is in the descriptors.
const MESSAGE: &[u8] = b"fds";

/// Packs `bytes` and `fds` into a parcel.
///
/// # Errors
/// The kernel has no memory, or refuses to hold so many descriptors (`ETOOMANYREFS`, see
/// `unix(7)`).
pub fn pack(bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<OwnedFd> {
    let (inside, outside, contents) = match empty(bytes) {
        Ok(empty) => empty,
        Err(error) => {
            close_aside(fds);
            return Err(error);
        }
    };
    let all: Vec<OwnedFd> = std::iter::once(contents).chain(fds).collect();
    let sent = all.chunks(MAX_FDS).try_for_each(|some| {
        send(&inside, MESSAGE, some, MAX_FDS, Blocking::Never).map(|_| ()).map_err(into_io)
    });
    // The parcel has duplicates: unless packing failed, none of these closes is a last close.
    match sent {
        Ok(()) => Ok(outside),
        Err(error) => {
            close_aside((outside, all));
            Err(error)
        }
    }
}

/// Makes a parcel without descriptors: its inner end, its outer end, and the file with `bytes`,
/// which has to be sent first.
fn empty(bytes: &[u8]) -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    let mut contents = File::from(memfd_create("sidecore-parcel", MemfdFlags::CLOEXEC)?);
    contents.write_all(bytes)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (inside, outside) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok((inside, outside, contents.into()))
}

/// Opens a parcel. Returns the bytes and the descriptors in their order.
///
/// # Errors
/// The descriptor is no parcel, has been opened before, or is larger than [`pack`] makes one.
pub fn unpack(parcel: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let damaged = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut fds = Vec::new();
    loop {
        let mut message = [0; MESSAGE.len()];
        let mut some = Vec::new();
        let received =
            receive(&parcel, &mut message, &mut some, MAX_FDS, Blocking::Never).map_err(into_io);
        fds.append(&mut some);
        match received {
            Ok(0) => break,
            Ok(count) if message.get(..count) == Some(MESSAGE) && fds.len() <= MAX_PARCEL_FDS => {}
            received => {
                close_aside(fds);
                return Err(received.err().unwrap_or_else(|| damaged("this is no parcel")));
            }
        }
    }
    let mut fds = fds.into_iter();
    let Some(contents) = fds.next() else {
        return Err(damaged("the parcel is empty, or has been opened before"));
    };
    let rest: Vec<OwnedFd> = fds.collect();
    match read(contents) {
        Ok(bytes) => Ok((bytes, rest)),
        Err(error) => {
            close_aside(rest);
            Err(error)
        }
    }
}

/// Reads the file that is the first descriptor of a parcel.
fn read(contents: OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    seek(&contents, SeekFrom::Start(0))?;
    File::from(contents).take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn into_io(error: StreamError) -> io::Error {
    match error {
        StreamError::Io(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn numbered(number: u64) -> OwnedFd {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &number.to_ne_bytes()).unwrap();
        event
    }

    fn number(event: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(event, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn contents_are_unpacked_once_in_their_order() {
        for count in [0, 1, 15, 16, 17, 300] {
            let bytes: Vec<u8> = (0..count * 1000).map(|at| at as u8).collect();
            let parcel = pack(&bytes, (1..=count).map(numbered).collect()).unwrap();
            let (unpacked, fds) = unpack(&parcel).unwrap();
            assert!(unpacked == bytes);
            assert!(fds.iter().map(number).eq(1..=count));
            assert_eq!(unpack(&parcel).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_descriptor_that_is_no_parcel_is_an_error() {
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        assert_eq!(unpack(&other).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        rustix::io::write(&one, b"hello").unwrap();
        assert_eq!(unpack(&other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(unpack(numbered(1)).is_err());
    }
}
