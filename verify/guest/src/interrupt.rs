//! Notes Ctrl-C and the other signals of a terminal or a service manager. The run checks for them
//! between and during its steps, so that every guard can clean up.

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct Interrupt {
    raised: Arc<AtomicBool>,
    registrations: Vec<signal_hook::SigId>,
}

impl Interrupt {
    pub(crate) fn watch() -> Result<Interrupt> {
        let raised = Arc::new(AtomicBool::new(false));
        let mut registrations = Vec::new();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let registration = signal_hook::flag::register(signal, Arc::clone(&raised));
            registrations.push(registration.context("cannot handle signals")?);
        }
        Ok(Interrupt { raised, registrations })
    }

    /// Fails once a signal has arrived.
    pub(crate) fn check(&self) -> Result<()> {
        if self.raised.load(Ordering::Relaxed) {
            bail!("interrupted; everything that was started has been stopped");
        }
        Ok(())
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for registration in self.registrations.drain(..) {
            signal_hook::low_level::unregister(registration);
        }
    }
}
