//! A host: `sidecored` in a network namespace, which can be killed and started again.

use super::config;
use super::net::start_in;
use crate::process::{Event, Running, Source};
use crate::session::Session;
use crate::sidecore::Sidecore;
use crate::text;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sidecore_kit::namespace::Namespace;
use std::path::PathBuf;
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
        let mut host = Host::without_daemon(session, namespace, name);
        host.start_again(session, configuration)?;
        Ok(host)
    }

    fn without_daemon(session: &Session<'_>, namespace: &Namespace, name: &'static str) -> Host {
        let control = config::control(session.directory, name);
        let sidecore = Sidecore::new(session.stage.binaries, &control);
        Host { name, namespace: namespace.pid(), running: None, sidecore }
    }

    /// Starts `sidecore own` with these options, which starts the host's daemon with a
    /// configuration when the host owns the store.
    pub(super) fn candidate(
        session: &mut Session<'_>,
        namespace: &Namespace,
        name: &'static str,
        configuration: &str,
        options: &[&str],
    ) -> Result<Host> {
        let mut host = Host::without_daemon(session, namespace, name);
        let config = host.configure(session, configuration)?;
        let control = config::control(session.directory, name);
        let [own, daemon] = ["sidecore", "sidecored"].map(|of| session.stage.binaries.join(of));
        let mut words = vec![text(&own)?, "--socket", text(&control)?, "own", "disk"];
        words.extend(["--name", name]);
        words.extend(options);
        words.extend(["--", text(&daemon)?, "--config", text(&config)?]);
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        let source = Source::Host(name);
        host.running = Some(start_in(&session.inbox, host.namespace, &words, source)?);
        Ok(host)
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Whether the host's `sidecore own` is in a state.
    pub(super) fn is_candidate(&self, state: &str) -> bool {
        // Without a list, `sidecore own` has just started.
        let list = self.sidecore.json::<Value>(&["list", "--json"]);
        list.is_ok_and(|list| list["own"]["state"] == state)
    }

    /// Lets the host's `sidecore own` hand the store over.
    pub(super) fn hand_over(&self) -> Result<()> {
        let running = self.running.as_ref();
        running.with_context(|| format!("{} has no daemon", self.name))?.hand_over()
    }

    /// Kills all processes of the host.
    pub(super) fn power_off(&mut self, session: &mut Session<'_>) -> Result<()> {
        let keeper = self.namespace;
        self.end(session, |_| kill_all(keeper)).map(drop)
    }

    /// Writes the daemon's configuration.
    fn configure(&self, session: &Session<'_>, configuration: &str) -> Result<PathBuf> {
        let config = session.directory.join(format!("{}.toml", self.name));
        std::fs::write(&config, configuration)
            .with_context(|| format!("cannot write {}", config.display()))?;
        Ok(config)
    }

    /// Starts the daemon of a host without one.
    pub(super) fn start_again(
        &mut self,
        session: &mut Session<'_>,
        configuration: &str,
    ) -> Result<()> {
        let name = self.name;
        let config = self.configure(session, configuration)?;
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

/// Kills all processes in a network namespace but the one that keeps it.
fn kill_all(keeper: u32) -> Result<()> {
    let network = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net"));
    let keeper = keeper.to_string();
    let host = network(&keeper).context("the host's namespace is gone")?;
    for entry in std::fs::read_dir("/proc").context("cannot list the processes")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().filter(|name| *name != keeper) else { continue };
        let Some(process) = pid.parse().ok().and_then(Pid::from_raw) else { continue };
        if network(pid).is_ok_and(|of| of == host) {
            // It fails if the process has just ended.
            let _ = kill_process(process, Signal::KILL);
        }
    }
    Ok(())
}
