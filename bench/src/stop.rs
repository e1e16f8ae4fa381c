//! Ctrl-C: the experiment ends at the next convenient point, and everything it started is ended and removed as on any
//! other failure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Starts to listen for SIGINT and SIGTERM.
///
/// # Errors
/// The kernel does not let us.
pub fn listen() -> Result<()> {
    let stop = STOP.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(stop)).context("cannot listen for signals")?;
    }
    Ok(())
}

/// Whether to end.
#[must_use]
pub fn is_wanted() -> bool {
    STOP.get().is_some_and(|stop| stop.load(Ordering::Relaxed))
}

/// Fails if the experiment is to end.
///
/// # Errors
/// It is.
pub fn check() -> Result<()> {
    if is_wanted() {
        bail!("interrupted");
    }
    Ok(())
}
