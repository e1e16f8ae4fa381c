//! Ctrl-C: the experiment ends at the next convenient point, and all programs and files that it
//! made are removed as on any other failure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Starts to listen for SIGINT and SIGTERM.
///
/// # Errors
/// A signal handler cannot be registered.
pub fn listen() -> Result<()> {
    let stop = STOP.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(stop)).context("cannot listen for signals")?;
    }
    Ok(())
}

/// Whether a signal has asked the experiment to end.
#[must_use]
pub fn is_wanted() -> bool {
    STOP.get().is_some_and(|stop| stop.load(Ordering::Relaxed))
}

/// Fails if a signal has asked the experiment to end.
///
/// # Errors
/// The experiment is to end.
pub fn check() -> Result<()> {
    if is_wanted() {
        bail!("interrupted");
    }
    Ok(())
}
