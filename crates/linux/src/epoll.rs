//! Sleeping in epoll.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use sidecore_reactor::{Sleeper, WakeKey};
use sidecore_units::Nanos;

/// The largest number of descriptors that one wait reports; the next wait reports more, because the
/// watch is level-triggered.
const MAX_EVENTS: usize = 64;

/// A reactor's sleeper on Linux.
#[derive(Debug)]
pub struct EpollSleeper {
    epoll: OwnedFd,
    events: Box<[libc::epoll_event; MAX_EVENTS]>,
    /// Whether the kernel has `epoll_pwait2` (5.11), which takes nanoseconds.
    nanoseconds: bool,
}

impl EpollSleeper {
    /// Makes a sleeper without watched descriptors.
    ///
    /// # Errors
    /// Too many descriptors are open.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            events: Box::new([libc::epoll_event { events: 0, u64: 0 }; MAX_EVENTS]),
            nanoseconds: true,
        })
    }

    /// Waits for at most `timeout`, and returns the number of readable descriptors.
    fn wait_kernel(&mut self, timeout: Option<Nanos>) -> io::Result<usize> {
        if self.nanoseconds {
            match self.pwait2(timeout) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    self.nanoseconds = false
                }
                answer => return answer,
            }
        }
        // Rounded up: a thread that wakes before the deadline would spin until it.
        let timeout_ms = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.0.div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
        });
        // SAFETY: `events` has room for MAX_EVENTS entries.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                MAX_EVENTS as libc::c_int,
                timeout_ms,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// The system call itself: the C library has a wrapper only since glibc 2.35, and rustix rounds
    /// to milliseconds.
    fn pwait2(&mut self, timeout: Option<Nanos>) -> io::Result<usize> {
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.0 / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: (timeout.0 % 1_000_000_000) as libc::c_long,
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `events` has room for MAX_EVENTS entries, `timeout` is null
        // or outlives the call, and there is no signal mask.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                MAX_EVENTS,
                timeout,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

impl Sleeper for EpollSleeper {
    fn watch(&mut self, fd: BorrowedFd<'_>, key: WakeKey) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(key.0), epoll::EventFlags::IN)?;
        Ok(())
    }

    fn unwatch(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        epoll::delete(&self.epoll, fd)?;
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Nanos>, woken: &mut Vec<WakeKey>) -> io::Result<()> {
        let count = match self.wait_kernel(timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            answer => answer?,
        };
        // An error or hang-up is reported too, for the owner to handle.
        woken.extend(self.events.iter().take(count).map(|event| WakeKey(event.u64)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use super::*;
    use sidecore_reactor::EventFd;

    #[test]
    fn a_signal_wakes_with_its_key_until_it_is_drained() {
        let mut sleeper = EpollSleeper::new().unwrap();
        let (quiet, loud) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        sleeper.watch(quiet.as_fd(), WakeKey(1)).unwrap();
        sleeper.watch(loud.as_fd(), WakeKey(u64::MAX)).unwrap();
        loud.signal();
        for _ in 0..2 {
            let mut woken = Vec::new();
            sleeper.wait(None, &mut woken).unwrap();
            assert_eq!(woken, [WakeKey(u64::MAX)], "level-triggered");
        }
        assert_eq!(loud.drain(), 1);
        let mut woken = Vec::new();
        sleeper.wait(Some(Nanos::ZERO), &mut woken).unwrap();
        assert!(woken.is_empty());
    }

    #[test]
    fn an_unwatched_descriptor_causes_no_wakeup() {
        let mut sleeper = EpollSleeper::new().unwrap();
        let event = EventFd::new().unwrap();
        assert!(sleeper.unwatch(event.as_fd()).is_err());
        sleeper.watch(event.as_fd(), WakeKey(7)).unwrap();
        assert!(sleeper.watch(event.as_fd(), WakeKey(8)).is_err(), "once only");
        event.signal();
        sleeper.unwatch(event.as_fd()).unwrap();
        let mut woken = Vec::new();
        sleeper.wait(Some(Nanos::ZERO), &mut woken).unwrap();
        assert!(woken.is_empty());
    }

    #[test]
    fn a_timeout_is_exact_with_and_without_nanoseconds() {
        for nanoseconds in [true, false] {
            let mut sleeper = EpollSleeper::new().unwrap();
            sleeper.nanoseconds = nanoseconds;
            let start = Instant::now();
            sleeper.wait(Some(Nanos::from_micros(1_500)), &mut Vec::new()).unwrap();
            assert!(start.elapsed() >= Duration::from_micros(1_500), "{:?}", start.elapsed());
        }
    }

    #[test]
    fn a_signal_handler_interrupts_without_an_error() {
        extern "C" fn ignore(_: libc::c_int) {}
        // SAFETY: the handler does nothing; the action is zeroed but for it.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as *const () as usize;
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
        }
        // SAFETY: names the calling thread.
        let sleeping = unsafe { libc::pthread_self() };
        let alarm = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            // SAFETY: the sleeping thread joins this one before it ends.
            assert_eq!(unsafe { libc::pthread_kill(sleeping, libc::SIGUSR2) }, 0);
        });
        let mut sleeper = EpollSleeper::new().unwrap();
        let start = Instant::now();
        let mut woken = Vec::new();
        sleeper.wait(Some(Nanos::from_millis(10_000)), &mut woken).unwrap();
        assert!(woken.is_empty());
        assert!(start.elapsed() < Duration::from_secs(5));
        alarm.join().unwrap();
    }
}
