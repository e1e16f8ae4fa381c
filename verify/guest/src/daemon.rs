//! `sidecored` as the demo runs it: started, stopped and restarted by `sidecore keep`, as by a
//! service manager.

use crate::process::{Event, Inbox, Running, Source};
use crate::sidecore::Sidecore;
use anyhow::{Context, Result, bail, ensure};
use sidecore_kit::namespace::Namespace;
use std::ffi::OsStr;
use std::path::Path;
use std::time::{Duration, Instant};

/// The daemon's lines, and its end.
const SOURCE: Source = Source::Host("sidecored");

pub(crate) struct Daemon {
    running: Running,
    /// The command line tool, connected to the daemon.
    pub(crate) sidecore: Sidecore,
}

impl Daemon {
    /// Writes the configuration into `directory`, starts the daemon with it, in a network namespace
    /// or in this process's, and waits until the daemon serves.
    pub(crate) fn start(
        inbox: &mut Inbox,
        (binaries, namespace): (&Path, Option<&Namespace>),
        directory: &Path,
        sidecore: Sidecore,
        configuration: &str,
    ) -> Result<Daemon> {
        let config = directory.join("sidecored.toml");
        std::fs::write(&config, configuration)
            .with_context(|| format!("cannot write {}", config.display()))?;
        // `sidecore keep` keeps the exported connections, and ends with the daemon.
        let (keeper, daemon) = (binaries.join("sidecore"), binaries.join("sidecored"));
        let target = namespace.map(|namespace| namespace.pid().to_string());
        let mut words: Vec<&OsStr> = Vec::new();
        if let Some(target) = &target {
            words.extend(["nsenter", "--net", "--target", target, "--"].map(OsStr::new));
        }
        words.extend([
            keeper.as_os_str(),
            "keep".as_ref(),
            "--".as_ref(),
            daemon.as_os_str(),
            "--config".as_ref(),
            config.as_os_str(),
        ]);
        let (program, words) = words.split_first().context("no command")?;
        let running = Running::start(inbox, program, words.iter().copied(), SOURCE, SOURCE)?;
        let daemon = Daemon { running, sidecore };
        daemon.wait_ready(inbox)?;
        Ok(daemon)
    }

    /// Restarts the daemon; the new one resumes the connections of the old one's guests.
    pub(crate) fn restart(&self, inbox: &mut Inbox) -> Result<()> {
        self.running.hang_up()?;
        self.wait_ready(inbox)
    }

    fn wait_ready(&self, inbox: &mut Inbox) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_outcome = |event: &Event| match event {
            Event::Line(SOURCE, line) => line.starts_with("ready:"),
            Event::Closed(source) => *source == SOURCE,
            Event::Line(..) => false,
        };
        match inbox.find(deadline, is_outcome)? {
            Some(Event::Line(..)) => Ok(()),
            Some(Event::Closed(_)) => bail!("sidecored ended before it was ready"),
            None => bail!("sidecored was not ready within a minute"),
        }
    }

    /// Stops the daemon as a service manager would, and checks its exit status.
    pub(crate) fn stop(self, inbox: &mut Inbox) -> Result<()> {
        self.running.terminate()?;
        let deadline = Instant::now() + Duration::from_secs(60);
        // The daemon has two outputs. A later daemon's outputs close later, so they cannot be
        // mistaken.
        let gone = inbox.wait_closed(SOURCE, deadline)? && inbox.wait_closed(SOURCE, deadline)?;
        ensure!(gone, "sidecored did not end within a minute of SIGTERM");
        let status = self.running.reap()?;
        ensure!(status.success(), "sidecored ended with {status} after SIGTERM");
        Ok(())
    }
}
