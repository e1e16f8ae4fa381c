//! Ctrl-C, and its relatives from a terminal or a service manager: noted here, and looked at between and during the
//! steps, so that every guard on the way out gets to clean up.

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

    /// An error once a signal has come.
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
