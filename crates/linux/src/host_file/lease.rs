//! A lease on a file (fcntl(2), "Leases"): the kernel's promise that no other process has it open,
//! and its notification before another process opens it.
//!
//! A program that opens the file, or truncates it by name, has to wait until the lease is given up
//! or `/proc/sys/fs/lease-break-time` has passed; the holder is notified by a signal. Only the
//! *open file description* of the lease may exist, so all I/O through the filesystem uses
//! duplicates of that one descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sidecore_reactor::EventFd;

use super::watcher::{self, Watcher};
use crate::file::{Owner, try_claim, unclaim};

/// Fcntl commands of linux/fcntl.h that the C library's bindings lack.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
const F_OWNER_TID: libc::c_int = 0;

/// `struct f_owner_ex`.
#[repr(C)]
struct OwnerEx {
    kind: libc::c_int,
    id: libc::pid_t,
}

/// The state of a [`HostFile`](crate::HostFile)'s lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// No other process has the file open.
    Held,
    /// Another process is waiting to open or truncate the file.
    Breaking {
        /// The time when the kernel stops waiting for the holder; never if `None`.
        deadline: Option<Instant>,
    },
    /// The holder has given the lease up.
    Released,
}

/// Returns the time for which the kernel lets a program wait for another process's lease
/// (`/proc/sys/fs/lease-break-time`, 45 s by default); for ever if `None`.
#[must_use]
pub fn lease_break_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap_or_default();
    match text.trim().parse::<u64>() {
        Ok(0) => None,
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        // The kernel's default.
        Err(_) => Some(Duration::from_secs(45)),
    }
}

/// The only open file description, and the lease on it.
#[derive(Debug)]
pub(super) struct Lease {
    file: OwnedFd,
    /// Locked while the kernel's lease is changed, so that no thread compares the two meanwhile.
    state: Mutex<LeaseState>,
    /// Signalled once each time the lease ceases to be held.
    broken: EventFd,
}

impl Owner for Lease {
    /// The lease's own description: no other may exist. The description is registered with the
    /// rings on the device too.
    fn fence(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Lease {
    /// Makes the value without a lease yet.
    pub fn new(file: OwnedFd) -> io::Result<Arc<Self>> {
        let state = Mutex::new(LeaseState::Released);
        Ok(Arc::new(Self { file, state, broken: EventFd::new()? }))
    }

    pub fn broken(&self) -> &EventFd {
        &self.broken
    }

    /// Locks the file as every store does, for programs that check locks and not leases. False if
    /// another description has locked the file.
    pub fn lock(&self, read_only: bool) -> io::Result<bool> {
        try_claim(self.as_fd(), read_only)
    }

    /// Takes the lease; `EAGAIN` if another process has the file open.
    pub fn take(self: &Arc<Self>) -> io::Result<()> {
        let watcher = Watcher::running()?;
        watcher.watch(self);
        let mut state = self.state();
        if *state != LeaseState::Released {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        // Addressed to one thread, and with a signal that queues: see the watcher.
        fcntl(self.as_fd(), F_SETSIG, watcher::signal())?;
        let owner = OwnerEx { kind: F_OWNER_TID, id: watcher.thread() };
        // SAFETY: the descriptor is open and the structure outlives the call.
        if unsafe { libc::fcntl(self.file.as_raw_fd(), F_SETOWN_EX, &raw const owner) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.broken.drain();
        // Always a lease for writing, even for a read-only disk: under a lease for reading other
        // processes could have the file open, and a process that may only read the file can still
        // have its blocks shared or exchanged (FIDEDUPERANGE).
        fcntl(self.as_fd(), libc::F_SETLEASE, libc::F_WRLCK)?;
        *state = LeaseState::Held;
        Ok(())
    }

    /// Gives the lease up; a process that waits for the file continues.
    pub fn release(&self) -> io::Result<()> {
        let mut state = self.state();
        if *state == LeaseState::Released {
            return Ok(());
        }
        *state = LeaseState::Released;
        match fcntl(self.as_fd(), libc::F_SETLEASE, libc::F_UNLCK) {
            // The kernel has taken the lease away.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(()),
            result => result.map(drop),
        }
    }

    /// Returns the lease's state, from the kernel.
    pub fn look(&self) -> LeaseState {
        let mut state = self.state();
        if *state == LeaseState::Held {
            // While the lease is being broken, this is the state that it will get.
            let kind = fcntl(self.as_fd(), libc::F_GETLEASE, 0);
            if !kind.is_ok_and(|kind| kind == libc::F_WRLCK) {
                let deadline = lease_break_time().and_then(|time| Instant::now().checked_add(time));
                *state = LeaseState::Breaking { deadline };
                self.broken.signal();
            }
        }
        *state
    }

    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The close would do both, but not while a ring that is being taken down or a child that is
        // just being forked has a copy of the descriptor.
        let _ = self.release();
        let _ = unclaim(self.as_fd());
    }
}

/// Runs a command that takes and returns a number.
fn fcntl(
    file: BorrowedFd<'_>,
    command: libc::c_int,
    argument: libc::c_int,
) -> io::Result<libc::c_int> {
    // SAFETY: the descriptor is open, and the commands used here touch no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}
