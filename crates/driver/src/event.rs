//! The eventfds by which a device calls.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::ClientError;

/// Reads and so resets a non-blocking eventfd.
pub(crate) fn drain(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    match rustix::io::read(event, &mut count) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

/// Sleeps until the event comes, or a signal; false if `end` came first.
pub(crate) fn wait(event: &OwnedFd, end: Instant, what: &'static str) -> Result<bool, ClientError> {
    let left = end.saturating_duration_since(Instant::now());
    let limit = Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    match poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&limit)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(ClientError::io(what)(errno)),
    }
}

/// Whether the event is set; it stays so.
pub(crate) fn is_set(event: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(event, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}
