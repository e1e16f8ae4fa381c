//! Signals to end that wait until it is their time.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// SIGTERM and SIGINT do not reach this thread, nor those that it starts
/// meanwhile, which go on so. They wait, and come when this is dropped.
#[derive(Debug)]
pub struct HeldSignals {
    before: libc::sigset_t,
    /// A mask is its thread's own.
    of_this_thread: PhantomData<*const ()>,
}

impl HeldSignals {
    /// Holds them from now on. To be called before there are other threads:
    /// any of them could take one.
    ///
    /// # Errors
    /// The kernel's; there is no reason known.
    pub fn hold() -> io::Result<Self> {
        let mut before = MaybeUninit::uninit();
        // SAFETY: an all-zero set is valid, and its own; pthread_sigmask
        // writes the mask that was there to `before`, which is as large.
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
        // SAFETY: it has succeeded, and so written it.
        Ok(Self { before: unsafe { before.assume_init() }, of_this_thread: PhantomData })
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: the mask is one that the kernel gave for this thread, which this has not left.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}
