//! Notes Ctrl-C and the other signals of a terminal or a service manager. A program checks for them
//! between and during its steps, so that every guard can clean up.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static RAISED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// A signal has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted; everything that was started has been stopped")
    }
}

impl std::error::Error for Interrupted {}

/// Notes SIGINT and SIGTERM from now on. They no longer end this process.
///
/// # Errors
/// The kernel's.
pub fn listen() -> io::Result<()> {
    [SIGINT, SIGTERM].into_iter().try_for_each(listen_to)
}

/// Notes SIGHUP, too, even if this process was started to ignore it.
///
/// # Errors
/// The kernel's.
pub fn listen_to_hang_up() -> io::Result<()> {
    listen_to(SIGHUP)
}

fn listen_to(signal: i32) -> io::Result<()> {
    signal_hook::flag::register(signal, Arc::clone(RAISED.get_or_init(Arc::default))).map(drop)
}

/// Fails once a signal has arrived.
///
/// # Errors
/// Exactly then.
pub fn check() -> Result<(), Interrupted> {
    let is_raised = RAISED.get().is_some_and(|raised| raised.load(Ordering::Relaxed));
    if is_raised { Err(Interrupted) } else { Ok(()) }
}
