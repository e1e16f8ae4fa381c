//! One io_uring, with the best features that the kernel has.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{EnterFlags, IoUring, squeue};

/// The index of the registered file: each ring serves one file. The fence is the next index.
pub(crate) const FILE: io_uring::types::Fixed = io_uring::types::Fixed(0);

/// A completion: the submission's `user_data`, and its result (a count, or a negative errno).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub user_data: u64,
    pub result: i32,
}

/// A ring for one thread and one file.
pub(crate) struct Ring {
    ring: IoUring,
    /// Whether an unexpected error was logged, which would repeat with every poll.
    has_logged: bool,
}

impl Ring {
    /// Makes a ring for `depth` submissions to `file`. The kernel keeps `fence` open until the last
    /// submission has completed, even if this process has ended.
    pub fn new(file: BorrowedFd<'_>, fence: BorrowedFd<'_>, depth: u32) -> io::Result<Self> {
        let ring = build(depth).map_err(explain)?;
        ring.submitter().register_files(&[file.as_raw_fd(), fence.as_raw_fd()])?;
        Ok(Self { ring, has_logged: false })
    }

    /// Queues an entry for the next [`Ring::enter`].
    ///
    /// # Safety
    /// All memory that the entry names must stay valid, and unused by others, until the entry's
    /// completion has been reaped.
    ///
    /// # Panics
    /// The ring has space for fewer submissions.
    #[inline]
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller guarantees it.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "a channel has at most one submission per slot");
    }

    /// Submits the queued entries, and lets the kernel do its pending work on this thread. Entries
    /// that the kernel does not take stay queued: the kernel is short of memory, and gets them
    /// again.
    #[inline]
    pub fn enter(&mut self) {
        // Always with GETEVENTS, so that completions that have arrived meanwhile need no system
        // call of their own.
        let to_submit = self.ring.submission().len();
        self.enter_kernel(to_submit, 0);
    }

    /// Blocks until a completion arrives.
    pub fn wait(&mut self) -> io::Result<()> {
        let to_submit = self.ring.submission().len();
        // SAFETY: the arguments are plain numbers.
        let entered = unsafe {
            self.ring.submitter().enter::<libc::sigset_t>(
                to_submit as u32,
                1,
                EnterFlags::GETEVENTS.bits(),
                None,
            )
        };
        match entered {
            Err(error) if !is_transient(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Submits the queued entries and lets the kernel do its pending work on this thread, in one
    /// system call, or in none if there is neither. Returns whether there was a call.
    #[inline]
    pub fn turn(&mut self) -> bool {
        let submissions = self.ring.submission();
        let to_submit = submissions.len();
        let has_work = to_submit > 0 || submissions.taskrun() || submissions.cq_overflow();
        drop(submissions);
        if has_work {
            self.enter_kernel(to_submit, 0);
        }
        has_work
    }

    /// Whether there are completions, or pending work in the kernel that may cause some.
    pub fn is_ready(&mut self) -> bool {
        if !self.ring.completion().is_empty() {
            return true;
        }
        let submissions = self.ring.submission();
        submissions.taskrun() || submissions.cq_overflow()
    }

    /// Moves the completions that are there to `completions`, within its capacity, without a system
    /// call.
    #[inline]
    pub fn take(&mut self, completions: &mut Vec<Completion>) {
        let room = completions.capacity() - completions.len();
        let queued = self.ring.completion().take(room);
        completions.extend(
            queued.map(|entry| Completion { user_data: entry.user_data(), result: entry.result() }),
        );
    }

    /// Whether entries wait for the next [`Ring::enter`].
    #[inline]
    pub fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Moves the completions to `completions`, within its capacity. Enters the kernel only if
    /// completions are pending there.
    #[inline]
    pub fn reap(&mut self, completions: &mut Vec<Completion>) {
        if self.ring.completion().is_empty() {
            let submissions = self.ring.submission();
            if !submissions.taskrun() && !submissions.cq_overflow() {
                return;
            }
            drop(submissions);
            self.enter_kernel(0, 0);
        }
        self.take(completions);
    }

    #[inline]
    fn enter_kernel(&mut self, to_submit: usize, min_complete: u32) {
        // SAFETY: the arguments are plain numbers.
        let entered = unsafe {
            self.ring.submitter().enter::<libc::sigset_t>(
                to_submit as u32,
                min_complete,
                EnterFlags::GETEVENTS.bits(),
                None,
            )
        };
        if let Err(error) = entered
            && !is_transient(&error)
            && !std::mem::replace(&mut self.has_logged, true)
        {
            tracing::error!(%error, "io_uring_enter failed: requests will not complete");
        }
    }

    /// Reserves the indices of `count` buffers.
    pub fn register_sparse_buffers(&mut self, count: u32) -> io::Result<()> {
        self.ring.submitter().register_buffers_sparse(count)
    }

    /// Pins `buffer` as number `index`, for I/O without a look-up of its pages. Returns an error if
    /// the kernel refuses to pin the memory.
    ///
    /// # Safety
    /// The memory must stay mapped until it is unregistered.
    pub unsafe fn register_buffer(&mut self, index: u32, buffer: libc::iovec) -> io::Result<()> {
        // SAFETY: the caller guarantees it.
        unsafe { self.ring.submitter().register_buffers_update(index, &[buffer], None) }
    }

    pub fn unregister_buffers(&mut self) -> io::Result<()> {
        self.ring.submitter().unregister_buffers()
    }
}

impl AsFd for Ring {
    /// Readable while the ring has completions, or pending work that causes some.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns its descriptor, and `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// Whether entering the kernel may succeed later.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

fn build(depth: u32) -> io::Result<IoUring> {
    let entries = depth.next_power_of_two();
    // From 6.0 and 5.19: completions are finished on this thread, when it enters the kernel in any
    // case or sleeps, and never by interrupting it. Older kernels interrupt.
    //
    // Not IORING_SETUP_DEFER_TASKRUN (6.1), which finishes completions in io_uring_enter only: it
    // is no faster here, and pending completions do not wake a thread that sleeps in epoll on the
    // ring.
    let cooperative = || {
        let mut builder = IoUring::builder();
        builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag().dontfork();
        builder
    };
    cooperative()
        .setup_single_issuer()
        .build(entries)
        .or_else(|error| if_unknown(error, || cooperative().build(entries)))
        .or_else(|error| if_unknown(error, || IoUring::builder().dontfork().build(entries)))
}

fn if_unknown(error: io::Error, next: impl FnOnce() -> io::Result<IoUring>) -> io::Result<IoUring> {
    if error.raw_os_error() == Some(libc::EINVAL) { next() } else { Err(error) }
}

fn explain(error: io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has no io_uring",
        Some(libc::EPERM) => {
            "io_uring is disabled (sysctl kernel.io_uring_disabled, or a seccomp filter)"
        }
        Some(libc::ENOMEM) => "no memory for an io_uring (ulimit -l, on kernels before 5.12)",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{hint}: {error}"))
}
