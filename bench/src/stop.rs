//! Ctrl-C: the experiment ends at the next convenient point, and everything it started is ended and removed as on any
//! other failure.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static STOP: AtomicBool = AtomicBool::new(false);

/// Starts to listen for SIGINT and SIGTERM.
///
/// # Errors
/// The kernel does not let us.
pub fn listen() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let (mut interrupt, mut terminate) =
        runtime.block_on(async { anyhow::Ok((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)) })?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            });
            STOP.store(true, Ordering::Relaxed);
        })
        .context("cannot listen for signals")?;
    Ok(())
}

/// Whether to end.
#[must_use]
pub fn is_wanted() -> bool {
    STOP.load(Ordering::Relaxed)
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
