//! Signalling a peer's eventfd, without ever waiting for the peer.
//!
//! A write to an eventfd waits while the counter is full, unless the open file has `O_NONBLOCK`
//! (eventfd(2)). The peer can fill the counter and clear the flag at any time, because it shares
//! the open file. No flag applies to one write alone (`RWF_NOWAIT` is for reads). The *kernel*
//! never waits when it signals an eventfd (`eventfd_signal` in fs/eventfd.c): a full counter stays
//! as it is, and the waiters are woken. The kernel does so for a completion in an io_uring with
//! which the eventfd is registered (IORING_REGISTER_EVENTFD, io_uring_register(2), since Linux
//! 5.2). So each of these events is a ring of its own, of the smallest size, and a signal is the
//! submission of one NOP, which completes within io_uring_enter(2).
//!
//! One thing differs from a write. The kernel marks such a wake-up (EPOLL_URING_WAKE,
//! io_uring/eventfd.c), so that a multishot poll of the eventfd by the peer's own io_uring ends
//! with it, which such a poll may do at any time, and has to be renewed.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Once;

use io_uring::{IoUring, opcode};
use sidecore_reactor::{EventFd, Signal};

/// The number of submissions in a ring; the kernel has twice as many completions for it.
const ENTRIES: u32 = 1;

/// Makes a signal for a peer's eventfd, through a ring of its own; costs a descriptor and about 20
/// KiB of the kernel's memory.
///
/// If no ring can be made (`kernel.io_uring_disabled`, a seccomp filter, no memory), the eventfd is
/// signalled by write, and the log says so once: such a host has to trust its VMMs not to fill an
/// eventfd and make it blocking.
///
/// # Errors
/// The descriptor is no eventfd, or the process has no descriptor left.
pub fn peer_event(fd: BorrowedFd<'_>) -> io::Result<Box<dyn Signal>> {
    static WARNING: Once = Once::new();
    let event = EventFd::from_peer(fd.try_clone_to_owned()?)?;
    match PeerEvent::new(event.as_fd()) {
        // From here on the ring keeps the eventfd open.
        Ok(event) => Ok(Box::new(event)),
        Err(error) => {
            WARNING.call_once(|| {
                tracing::warn!(
                    %error,
                    "no io_uring to signal VMMs by: one that blocks its eventfd can block others"
                );
            });
            Ok(Box::new(event))
        }
    }
}

/// A ring whose completions signal the peer's eventfd.
struct PeerEvent {
    ring: IoUring,
    has_logged: bool,
}

impl PeerEvent {
    /// # Errors
    /// The kernel makes no ring, or the descriptor is no eventfd.
    fn new(event: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(ENTRIES)?;
        let mut event_ring = Self { ring, has_logged: false };
        // One submission before the peer can be signalled: with it the kernel allocates the memory
        // of a submission, and keeps it.
        event_ring.submit()?;
        event_ring.ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(event_ring)
    }

    /// Causes one completion, and discards it.
    fn submit(&mut self) -> io::Result<()> {
        let nothing = opcode::Nop::new().build();
        // SAFETY: the entry names no memory.
        //
        // If the queue is full, the kernel has not taken the last entry yet, which then serves for
        // this signal too.
        let _ = unsafe { self.ring.submission().push(&nothing) };
        let submitted = self.ring.submit();
        // Emptied each time, so that the queue of completions never fills.
        self.ring.completion().for_each(drop);
        submitted.map(drop)
    }
}

impl Signal for PeerEvent {
    #[inline]
    fn signal(&mut self) {
        // Entries that the kernel does not take now are submitted with the next signal. The kernel
        // takes all entries, since it needs no memory for them.
        if let Err(error) = self.submit()
            && !std::mem::replace(&mut self.has_logged, true)
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

    /// A generous bound for actions that take microseconds.
    const SOON: Duration = Duration::from_secs(10);

    /// Makes an eventfd that the peer makes blocking after the hand-over.
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

    /// Runs `action` on a thread of its own, and checks that it ends soon.
    fn soon<T: Send + 'static>(action: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, wait) = channel();
        thread::spawn(move || done.send(action()).unwrap());
        wait.recv_timeout(SOON).expect("the action waits")
    }

    #[test]
    fn each_signal_counts_once_and_its_creation_does_not() {
        let (event, mut signal) = blocking();
        assert!(!is_readable(&event, Duration::ZERO));
        for signals in 1..4 {
            (0..signals).for_each(|_| signal.signal());
            assert_eq!(count(&event), signals);
        }
    }

    #[test]
    fn a_full_blocking_counter_blocks_no_thread() {
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
    fn a_hundred_thousand_signals_are_all_counted() {
        let (event, mut signal) = blocking();
        (0..100_000).for_each(|_| signal.signal());
        assert_eq!(count(&event), 100_000);
    }

    #[test]
    fn a_signal_outlives_the_descriptor_and_other_descriptors_are_refused() {
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
