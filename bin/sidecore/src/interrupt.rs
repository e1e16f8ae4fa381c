//! Signals that end long work: the work checks for them, and then removes its unfinished parts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Whether a signal has asked this program to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Handles the signals instead of the kernel's default. A second signal changes nothing: some
    /// senders send each signal to the process and to its group. SIGQUIT still ends the program at
    /// once.
    pub(crate) fn listen() -> io::Result<Self> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&interrupt.0))?;
        }
        Ok(interrupt)
    }

    /// Whether a signal has come.
    pub(crate) fn has_come(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails if a signal has come.
    pub(crate) fn check(&self) -> Result<()> {
        if self.has_come() {
            bail!("interrupted; the unfinished work was removed");
        }
        Ok(())
    }
}
