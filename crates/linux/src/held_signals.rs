//! Signals to end that are held back for some time.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// SIGTERM and SIGINT do not reach this thread, nor the threads that it starts meanwhile, which
/// keep the mask. The signals stay pending, and are delivered when this value is dropped.
#[derive(Debug)]
pub struct HeldSignals {
    before: libc::sigset_t,
    /// Makes the type `!Send`, because a mask belongs to its thread.
    of_this_thread: PhantomData<*const ()>,
}

impl HeldSignals {
    /// Holds the signals back from now on. Call before other threads are started: each of them
    /// could receive a signal.
    ///
    /// # Errors
    /// The kernel's error, for which no reason is known.
    pub fn hold() -> io::Result<Self> {
        let mut before = MaybeUninit::uninit();
        // SAFETY: an all-zero set is valid, and owned here; pthread_sigmask writes the previous
        // mask to `before`, which has the same size.
        let error = unsafe {
            let mut held: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut held);
            libc::sigaddset(&raw mut held, libc::SIGTERM);
            libc::sigaddset(&raw mut held, libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, before.as_mut_ptr())
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: the call has succeeded, and so has written `before`.
        Ok(Self { before: unsafe { before.assume_init() }, of_this_thread: PhantomData })
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: the kernel has returned this mask for this thread, which the value has not left.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}
