//! `sidecored` as the demo runs it: one process, started and ended as a service manager would.

use crate::process::{Event, Inbox, Running, Source};
use crate::sidecore::Sidecore;
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) struct Daemon {
    running: Running,
    /// The command line tool that talks to it.
    pub(crate) sidecore: Sidecore,
}

impl Daemon {
    /// Starts the daemon with a configuration that is written into `directory`, and waits until it serves.
    pub(crate) fn start(
        inbox: &mut Inbox<'_>,
        binaries: &Path,
        directory: &Path,
        sidecore: Sidecore,
        configuration: &str,
    ) -> Result<Daemon> {
        let config = directory.join("sidecored.toml");
        std::fs::write(&config, configuration).with_context(|| format!("cannot write {}", config.display()))?;
        let program = binaries.join("sidecored");
        let arguments = ["--config".as_ref(), config.as_os_str()];
        let running = Running::start(inbox, program.as_os_str(), arguments, Source::Daemon, Source::Daemon)?;
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match inbox.next(deadline)? {
                Some(Event::Line(Source::Daemon, line)) if line.starts_with("ready:") => break,
                Some(Event::Closed(Source::Daemon)) => bail!("sidecored ended before it was ready"),
                Some(_) => {}
                None => bail!("sidecored was not ready within a minute"),
            }
        }
        Ok(Daemon { running, sidecore })
    }

    /// Ends the daemon as a service manager would, and checks that it goes in order.
    pub(crate) fn stop(self, inbox: &mut Inbox<'_>) -> Result<()> {
        self.running.terminate()?;
        let deadline = Instant::now() + Duration::from_secs(60);
        // Both of its outputs; a next daemon's are told apart from them by coming later.
        let gone = inbox.wait_closed(Source::Daemon, deadline)? && inbox.wait_closed(Source::Daemon, deadline)?;
        ensure!(gone, "sidecored did not end within a minute of SIGTERM");
        let status = self.running.reap()?;
        ensure!(status.success(), "sidecored ended with {status} after SIGTERM");
        Ok(())
    }
}
