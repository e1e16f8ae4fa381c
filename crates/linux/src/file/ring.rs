//! One io_uring, set up as well as the kernel can.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{EnterFlags, IoUring, squeue};

/// The index of the registered file: each ring serves one. The fence is behind it.
pub(super) const FILE: io_uring::types::Fixed = io_uring::types::Fixed(0);

/// A completion: the submission's `user_data`, and its result (a count, or a negative errno).
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    pub user_data: u64,
    pub result: i32,
}

/// A ring for one thread and one file.
pub(super) struct Ring {
    ring: IoUring,
    /// Whether an error that should not be has been logged: it would come again with every poll.
    complained: bool,
}

impl Ring {
    /// A ring with room for `depth` submissions, on `file`. `fence` stays open
    /// until the last of them has completed, also if this process has ended.
    pub fn new(file: BorrowedFd<'_>, fence: BorrowedFd<'_>, depth: u32) -> io::Result<Self> {
        let ring = build(depth).map_err(explain)?;
        ring.submitter().register_files(&[file.as_raw_fd(), fence.as_raw_fd()])?;
        Ok(Self { ring, complained: false })
    }

    /// Queues a submission, to be handed over by [`Ring::enter`].
    ///
    /// # Safety
    /// All memory that the entry names must stay valid, and ours, until its
    /// completion has been reaped.
    ///
    /// # Panics
    /// More submissions than the ring was made for.
    #[inline]
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the caller's.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "a channel has at most one submission per slot");
    }

    /// Hands what is queued to the kernel, and lets it finish what it has to finish on this thread.
    /// What the kernel does not take stays queued: it is short of memory, and is asked again.
    #[inline]
    pub fn enter(&mut self) {
        // Always with GETEVENTS: completions that have arrived meanwhile cost
        // no system call of their own then.
        let to_submit = self.ring.submission().len();
        self.enter_kernel(to_submit, 0);
    }

    /// Blocks until there is a completion.
    pub fn wait(&mut self) -> io::Result<()> {
        let to_submit = self.ring.submission().len();
        // SAFETY: no argument beyond the numbers.
        let entered = unsafe {
            self.ring.submitter().enter::<libc::sigset_t>(to_submit as u32, 1, EnterFlags::GETEVENTS.bits(), None)
        };
        match entered {
            Err(error) if !is_transient(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether submissions wait for the next [`Ring::enter`].
    #[inline]
    pub fn has_queued(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Moves the completions there are to `completions`, as far as it has
    /// capacity. Enters the kernel only if that is where they are.
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
        let room = completions.capacity() - completions.len();
        let queued = self.ring.completion().take(room);
        completions.extend(queued.map(|entry| Completion { user_data: entry.user_data(), result: entry.result() }));
    }

    #[inline]
    fn enter_kernel(&mut self, to_submit: usize, min_complete: u32) {
        // SAFETY: no argument beyond the numbers.
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
            && !std::mem::replace(&mut self.complained, true)
        {
            tracing::error!(%error, "io_uring_enter failed: requests will not complete");
        }
    }

    /// Makes room for `count` buffers.
    pub fn register_sparse_buffers(&mut self, count: u32) -> io::Result<()> {
        self.ring.submitter().register_buffers_sparse(count)
    }

    /// Pins `buffer` for I/O without a look-up of its pages, as number `index`;
    /// returns an error if the kernel does not want to pin that much.
    ///
    /// # Safety
    /// It must stay mapped until it is unregistered.
    pub unsafe fn register_buffer(&mut self, index: u32, buffer: libc::iovec) -> io::Result<()> {
        // SAFETY: the caller's.
        unsafe { self.ring.submitter().register_buffers_update(index, &[buffer], None) }
    }

    pub fn unregister_buffers(&mut self) -> io::Result<()> {
        self.ring.submitter().unregister_buffers()
    }
}

impl AsFd for Ring {
    /// Readable while there are completions, or work that ends in some.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns its descriptor, and `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// Whether entering the kernel can be tried again later.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

fn build(depth: u32) -> io::Result<IoUring> {
    let entries = depth.next_power_of_two();
    // From 6.0 and 5.19: completions are finished on this thread, when it enters the kernel anyway
    // or sleeps, and never by interrupting it. Before that, as it comes.
    //
    // Not IORING_SETUP_DEFER_TASKRUN (6.1), which finishes them in
    // io_uring_enter only: it gains nothing here, and a thread that sleeps in
    // epoll on the ring is not woken by what is still to be finished.
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
        Some(libc::EPERM) => "io_uring is disabled (sysctl kernel.io_uring_disabled, or a seccomp filter)",
        Some(libc::ENOMEM) => "no memory for an io_uring (ulimit -l, on kernels before 5.12)",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{hint}: {error}"))
}
