//! The thread that is notified of broken leases.
//!
//! The kernel notifies the holder of a lease only by a signal. The signal is addressed to this one
//! thread (`F_OWNER_TID`), which has all signals blocked and fetches them with sigtimedwait(2): no
//! handler is installed, no system call of another thread is interrupted, and all other signals of
//! the process are delivered to other threads as before.
//!
//! The signal is only a hint: the thread asks the kernel which leases are being broken
//! (`F_GETLEASE`). So correctness does not depend on one signal per event. A real-time signal is
//! used all the same, because if their queue is full, the kernel sends a SIGIO instead, which
//! cannot be lost; and the thread checks by itself every second, well within the default limit of
//! forty-five.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};

use super::lease::Lease;

/// The time between two checks of the leases without a signal.
static PERIOD: libc::timespec = libc::timespec { tv_sec: 1, tv_nsec: 0 };

/// The number of the real-time signal. Every one would do, because it is sent to one thread only.
const REAL_TIME_SIGNAL: libc::c_int = 9;

/// The thread, which runs until the end of the process once it is needed.
#[derive(Debug)]
pub(super) struct Watcher {
    thread: libc::pid_t,
    leases: Arc<Mutex<Vec<Weak<Lease>>>>,
}

/// The number of signals, for tests: a checked lease does not show the check's cause.
#[cfg(test)]
pub(super) static SIGNALS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

static RUNNING: Mutex<Option<Arc<Watcher>>> = Mutex::new(None);

impl Watcher {
    /// Returns the process's watcher, and starts it at the first call.
    pub fn running() -> io::Result<Arc<Self>> {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = running.as_ref() {
            return Ok(Arc::clone(watcher));
        }
        let watcher = Arc::new(Self::start()?);
        *running = Some(Arc::clone(&watcher));
        Ok(watcher)
    }

    fn start() -> io::Result<Self> {
        let leases = Arc::new(Mutex::new(Vec::new()));
        let (send, receive) = mpsc::sync_channel(1);
        let watched = Arc::clone(&leases);
        std::thread::Builder::new().name("lease-watcher".to_owned()).spawn(move || {
            // Blocked before the first signal can be addressed to the thread: an unblocked signal
            // would end the process.
            let blocked = block_all_signals();
            // SAFETY: the call takes no argument, and never fails.
            let thread = blocked.map(|()| unsafe { libc::gettid() });
            let is_ready = thread.is_ok();
            if send.send(thread).is_err() || !is_ready {
                return;
            }
            loop {
                wait_for_signal();
                look(&watched);
            }
        })?;
        let thread = receive.recv().map_err(io::Error::other)??;
        Ok(Self { thread, leases })
    }

    /// The thread to which signals are addressed.
    pub fn thread(&self) -> libc::pid_t {
        self.thread
    }

    /// Checks this lease, too, for as long as it has another holder.
    pub fn watch(&self, lease: &Arc<Lease>) {
        let lease = Arc::downgrade(lease);
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if !leases.iter().any(|known| known.ptr_eq(&lease)) {
            leases.push(lease);
        }
    }
}

/// The number of the expected signal.
pub(super) fn signal() -> libc::c_int {
    libc::SIGRTMIN() + REAL_TIME_SIGNAL
}

fn look(leases: &Mutex<Vec<Weak<Lease>>>) {
    let mut leases = leases.lock().unwrap_or_else(PoisonError::into_inner);
    leases.retain(|lease| lease.strong_count() > 0);
    let live: Vec<_> = leases.iter().filter_map(Weak::upgrade).collect();
    // This may drop the last reference to a lease.
    drop(leases);
    for lease in live {
        lease.look();
    }
}

fn block_all_signals() -> io::Result<()> {
    // SAFETY: an all-zero set is valid, sigfillset makes it full, and the mask is this thread's
    // own.
    let error = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Waits for a signal or for the time of the next check.
fn wait_for_signal() {
    // SAFETY: an all-zero set is valid; everything outlives the calls; the signal's details are not
    // requested.
    unsafe {
        let mut awaited: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut awaited);
        libc::sigaddset(&raw mut awaited, signal());
        libc::sigaddset(&raw mut awaited, libc::SIGIO);
        let signal =
            libc::sigtimedwait(&raw const awaited, std::ptr::null_mut(), &raw const PERIOD);
        #[cfg(test)]
        SIGNALS.fetch_add(u64::from(signal > 0), std::sync::atomic::Ordering::SeqCst);
        let _ = signal;
    }
}
