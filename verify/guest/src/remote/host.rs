//! A host: `sidecored` in a network namespace, which can be killed and started again.

use super::config;
use super::net::start_in;
use crate::process::{Event, Running, Source};
use crate::session::Session;
use crate::sidecore::Sidecore;
use crate::text;
use anyhow::{Context, Result, bail, ensure};
use sidecore_kit::namespace::Namespace;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// The longest time for a daemon's start and for its end.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Host {
    name: &'static str,
    /// The process that keeps the host's namespace.
    namespace: u32,
    running: Option<Running>,
    /// The command line tool, connected to this host's daemon.
    pub(super) sidecore: Sidecore,
}

impl Host {
    /// Starts a host's daemon with a configuration, and waits until it is ready.
    pub(super) fn start(
        session: &mut Session<'_>,
        namespace: &Namespace,
        name: &'static str,
        configuration: &str,
    ) -> Result<Host> {
        let control = config::control(session.directory, name);
        let sidecore = Sidecore::new(session.stage.binaries, &control);
        let mut host = Host { name, namespace: namespace.pid(), running: None, sidecore };
        host.start_again(session, configuration)?;
        Ok(host)
    }

    /// Starts the daemon of a host without one.
    pub(super) fn start_again(
        &mut self,
        session: &mut Session<'_>,
        configuration: &str,
    ) -> Result<()> {
        let name = self.name;
        let config = session.directory.join(format!("{name}.toml"));
        std::fs::write(&config, configuration)
            .with_context(|| format!("cannot write {}", config.display()))?;
        let daemon = session.stage.binaries.join("sidecored");
        let words = [text(&daemon)?, "--config", text(&config)?].map(str::to_owned);
        let source = Source::Host(name);
        self.running = Some(start_in(&session.inbox, self.namespace, &words, source)?);
        let is_outcome = |event: &Event| match event {
            Event::Line(speaker, line) => *speaker == source && line.starts_with("ready:"),
            Event::Closed(closed) => *closed == source,
        };
        match session.inbox.find(Instant::now() + PATIENCE, is_outcome)? {
            Some(Event::Line(..)) => Ok(()),
            Some(Event::Closed(_)) => bail!("the daemon of {name} ended before it was ready"),
            None => bail!("the daemon of {name} was not ready within a minute"),
        }
    }

    /// Kills the daemon.
    pub(super) fn kill(&mut self, session: &mut Session<'_>) -> Result<()> {
        self.end(session, Running::kill).map(drop)
    }

    /// Stops the daemon in order.
    pub(super) fn stop(&mut self, session: &mut Session<'_>) -> Result<()> {
        let status = self.end(session, Running::terminate)?;
        let name = self.name;
        ensure!(status.success(), "the daemon of {name} ended with {status} after SIGTERM");
        Ok(())
    }

    fn end(
        &mut self,
        session: &mut Session<'_>,
        how: impl FnOnce(&Running) -> Result<()>,
    ) -> Result<ExitStatus> {
        let name = self.name;
        let running = self.running.take().with_context(|| format!("{name} has no daemon"))?;
        how(&running)?;
        let deadline = Instant::now() + PATIENCE;
        // The daemon has two outputs.
        for _ in 0..2 {
            let is_closed = session.inbox.wait_closed(Source::Host(name), deadline)?;
            ensure!(is_closed, "the daemon of {name} did not end within a minute");
        }
        running.reap()
    }
}
