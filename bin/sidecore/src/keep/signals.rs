//! Signals as descriptors to poll.

use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

/// Streams that become readable when a signal has come.
#[derive(Debug)]
pub(super) struct Signals {
    end: UnixStream,
    restart: UnixStream,
}

impl Signals {
    /// Handles the signals instead of the kernel's default.
    pub(super) fn listen() -> io::Result<Self> {
        Ok(Self { end: on(&[SIGTERM, SIGINT])?, restart: on(&[SIGHUP])? })
    }

    pub(super) fn end(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    pub(super) fn restart(&self) -> BorrowedFd<'_> {
        self.restart.as_fd()
    }

    /// Whether a signal has asked for the end since the last call.
    pub(super) fn take_end(&mut self) -> bool {
        drain(&mut self.end)
    }

    /// Whether a signal has asked for a restart since the last call.
    pub(super) fn take_restart(&mut self) -> bool {
        drain(&mut self.restart)
    }
}

fn on(signals: &[i32]) -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    reader.set_nonblocking(true)?;
    for signal in signals {
        pipe::register(*signal, writer.try_clone()?)?;
    }
    Ok(reader)
}

/// Reads the stream until it is empty. Several signals at once count as one: some senders send each
/// signal to the process and to its group.
fn drain(stream: &mut UnixStream) -> bool {
    let (mut bytes, mut any) = ([0; 64], false);
    loop {
        match stream.read(&mut bytes) {
            Ok(1..) => any = true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => return any,
        }
    }
}
