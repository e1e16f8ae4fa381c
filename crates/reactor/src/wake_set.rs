//! Several wake descriptors behind one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// A descriptor that is readable while one of its members is. The descriptors of a pollable, and of
/// a channel, must stay the same for its life; the members of a set may change.
#[derive(Debug)]
pub struct WakeSet(OwnedFd);

impl WakeSet {
    /// A set without members.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Adds a member, until it is removed or closed.
    ///
    /// # Errors
    /// The kernel has no memory left, or `member` is in the set already.
    pub fn add(&self, member: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.0, member, EventData::new_u64(0), EventFlags::IN)?)
    }

    /// Removes a member. A descriptor that is not a member is ignored.
    pub fn remove(&self, member: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.0, member);
    }
}

impl AsFd for WakeSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::EventFd;

    fn is_readable(set: &WakeSet) -> bool {
        poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
            .unwrap()
            > 0
    }

    #[test]
    fn a_set_is_readable_while_a_member_is() {
        let (set, one, other) =
            (WakeSet::new().unwrap(), EventFd::new().unwrap(), EventFd::new().unwrap());
        set.add(one.as_fd()).unwrap();
        set.add(other.as_fd()).unwrap();
        assert!(!is_readable(&set));
        other.signal();
        assert!(is_readable(&set));
        other.drain();
        assert!(!is_readable(&set));
        one.signal();
        set.remove(one.as_fd());
        set.remove(one.as_fd());
        assert!(!is_readable(&set));
    }
}
