//! Signalling an eventfd that belongs to a peer, without ever waiting for that peer.
//!
//! A write to an eventfd waits while its counter is full, unless the open file has `O_NONBLOCK`
//! (eventfd(2)), and the peer can fill the one and clear the other at any time: the file is shared
//! with it. There is no flag for one write alone (`RWF_NOWAIT` is for reads). When the *kernel*
//! signals an eventfd it never waits (`eventfd_signal` in fs/eventfd.c): it leaves a counter that
//! is full as it is, and wakes. It does so for a completion in an io_uring that the eventfd is
//! registered with (IORING_REGISTER_EVENTFD, io_uring_register(2), since Linux 5.2). So each of
//! these events is a ring of its own, as small as can be, and to signal it is to submit one NOP,
//! which completes within io_uring_enter(2).
//!
//! One thing differs from a write. The kernel marks such a wake-up (EPOLL_URING_WAKE,
//! io_uring/eventfd.c), so that a multishot poll of the eventfd by an io_uring of the peer's ends
//! with it, as one may at any time, and has to be renewed.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Once;

use io_uring::{IoUring, opcode};
use sidecore_reactor::{EventFd, Signal};

/// Submissions that a ring has room for; the kernel makes twice as many completions of it.
const ENTRIES: u32 = 1;

/// Makes what signals a peer's eventfd, by a ring of its own; costs a descriptor and about 20 KiB
/// of the kernel's memory.
///
/// Where there can be no ring (`kernel.io_uring_disabled`, a seccomp filter, no memory), it is
/// signalled by write, and the log says so once: such a host has to trust its VMMs not to fill an
/// eventfd and make it blocking.
///
/// # Errors
/// It is no eventfd, or no descriptor is to be had.
pub fn peer_event(fd: BorrowedFd<'_>) -> io::Result<Box<dyn Signal>> {
    static WARNING: Once = Once::new();
    let event = EventFd::from_peer(fd.try_clone_to_owned()?)?;
    match PeerEvent::new(event.as_fd()) {
        // The ring holds the eventfd from here on.
        Ok(event) => Ok(Box::new(event)),
        Err(error) => {
            WARNING.call_once(|| {
                tracing::warn!(%error, "no io_uring to signal VMMs by: one that blocks its eventfd can block others");
            });
            Ok(Box::new(event))
        }
    }
}

/// A ring whose completions signal the peer's eventfd.
struct PeerEvent {
    ring: IoUring,
    complained: bool,
}

impl PeerEvent {
    /// # Errors
    /// The kernel makes no ring, or this is no eventfd.
    fn new(event: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(ENTRIES)?;
        let mut event_ring = Self { ring, complained: false };
        // One submission before there is a peer to signal: with it the kernel allocates the memory
        // of a submission, and keeps it.
        event_ring.submit()?;
        event_ring.ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(event_ring)
    }

    /// Has one completion posted, and forgets it.
    fn submit(&mut self) -> io::Result<()> {
        let nothing = opcode::Nop::new().build();
        // SAFETY: the entry names no memory.
        //
        // There is no room if the kernel has not taken the last one, which is as good as this one
        // then.
        let _ = unsafe { self.ring.submission().push(&nothing) };
        let submitted = self.ring.submit();
        // The queue of completions never fills.
        self.ring.completion().for_each(drop);
        submitted.map(drop)
    }
}

impl Signal for PeerEvent {
    #[inline]
    fn signal(&mut self) {
        // Entries that the kernel does not take now, it gets with the next signal. It takes all,
        // since it needs no memory for it.
        if let Err(error) = self.submit()
            && !std::mem::replace(&mut self.complained, true)
        {
            tracing::error!(%error, "a peer's eventfd was not signalled");
        }
    }
}

impl fmt::Debug for PeerEvent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PeerEvent").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
    use rustix::fs::OFlags;

    use super::*;

    /// A generous bound for what takes microseconds.
    const SOON: Duration = Duration::from_secs(10);

    /// The peer's end, which blocks: it sees to that after we have got it.
    fn blocking() -> (OwnedFd, Box<dyn Signal>) {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let signal = peer_event(event.as_fd()).unwrap();
        assert!(format!("{signal:?}").contains("PeerEvent"), "no ring here: {signal:?}");
        rustix::fs::fcntl_setfl(&event, OFlags::empty()).unwrap();
        (event, signal)
    }

    fn count(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    fn is_readable(event: &OwnedFd, timeout: Duration) -> bool {
        let timeout = Timespec::try_from(timeout).unwrap();
        poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    }

    /// Does something on a thread of its own, which is to be soon over.
    fn soon<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, wait) = channel();
        thread::spawn(move || done.send(what()).unwrap());
        wait.recv_timeout(SOON).expect("it waits")
    }

    #[test]
    fn each_signal_counts_once_and_making_it_counts_nothing() {
        let (event, mut signal) = blocking();
        assert!(!is_readable(&event, Duration::ZERO));
        for signals in 1..4 {
            (0..signals).for_each(|_| signal.signal());
            assert_eq!(count(&event), signals);
        }
    }

    #[test]
    fn a_full_counter_that_blocks_holds_up_no_thread() {
        let (event, mut signal) = blocking();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        signal = soon(move || {
            (0..1000).for_each(|_| signal.signal());
            signal
        });
        assert!(count(&event) >= u64::MAX - 1);
        signal.signal();
        assert_eq!(count(&event), 1);
    }

    #[test]
    fn a_sleeper_is_woken_by_every_signal_on_any_thread() {
        let (event, signal) = blocking();
        let (ask, asked) = channel();
        let signaller = thread::spawn(move || {
            let mut signal = signal;
            asked.iter().for_each(|()| signal.signal());
        });
        for _ in 0..1000 {
            ask.send(()).unwrap();
            assert!(is_readable(&event, SOON));
            assert_eq!(count(&event), 1);
        }
        drop(ask);
        signaller.join().unwrap();
    }

    #[test]
    fn a_hundred_thousand_signals_are_all_there() {
        let (event, mut signal) = blocking();
        (0..100_000).for_each(|_| signal.signal());
        assert_eq!(count(&event), 100_000);
    }

    #[test]
    fn it_outlives_the_descriptor_and_anything_else_is_refused() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let sent = event.try_clone().unwrap();
        let mut signal = peer_event(sent.as_fd()).unwrap();
        drop(sent);
        signal.signal();
        assert_eq!(count(&event), 1);
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        assert!(peer_event(pipe.as_fd()).is_err());
        assert!(PeerEvent::new(pipe.as_fd()).is_err(), "the kernel knows as well");
    }
}
