//! `sidecored` as the demo runs it: started, ended and restarted as a service manager would, or by one (`sidecore keep`).

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
        // Whoever keeps what it leaves also ends when it has ended.
        let (keeper, daemon) = (binaries.join("sidecore"), binaries.join("sidecored"));
        let words = ["keep".as_ref(), "--".as_ref(), daemon.as_os_str(), "--config".as_ref(), config.as_os_str()];
        let running = Running::start(inbox, keeper.as_os_str(), words, Source::Daemon, Source::Daemon)?;
        let daemon = Daemon { running, sidecore };
        daemon.wait_ready(inbox)?;
        Ok(daemon)
    }

    /// Ends the daemon and starts it again, which goes on with the guests of the one before.
    pub(crate) fn restart(&self, inbox: &mut Inbox<'_>) -> Result<()> {
        self.running.hang_up()?;
        self.wait_ready(inbox)
    }

    fn wait_ready(&self, inbox: &mut Inbox<'_>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match inbox.next(deadline)? {
                Some(Event::Line(Source::Daemon, line)) if line.starts_with("ready:") => return Ok(()),
                Some(Event::Closed(Source::Daemon)) => bail!("sidecored ended before it was ready"),
                Some(_) => {}
                None => bail!("sidecored was not ready within a minute"),
            }
        }
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
