//! The surroundings of a run: a directory, a sparse file for the pool, a daemon, and the guests on
//! its disks. All of it is removed, however the run ends.

use crate::config::{POOL_MIB, Places};
use crate::console::{self, Message};
use crate::cores::Cores;
use crate::daemon::Daemon;
use crate::emulator::Emulator;
use crate::process::{Event, Inbox, Running, Source};
use crate::progress::Progress;
use crate::qemu::{Accelerator, Equipment, Machine};
use crate::qmp::Qmp;
use crate::sidecore::Sidecore;
use anyhow::{Context, Result, bail};
use sidecore_kit::interrupt;
use sidecore_kit::namespace::Namespace;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The parts that all runs share.
pub(crate) struct Stage<'a> {
    pub(crate) accelerator: Accelerator,
    /// The installed QEMU.
    pub(crate) qemu: &'a Emulator,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) binaries: &'a Path,
    /// The directory for the pool's file, on a real disk with enough space.
    pub(crate) scratch: &'a Path,
    pub(crate) progress: &'a Progress,
}

/// Whether an event is a message of the guest, or ends the run. `gone` are the guests that may end.
fn matters(event: &Event, name: &str, gone: &[&str]) -> bool {
    match event {
        Event::Line(Source::Guest(speaker), line) => {
            let failed = || matches!(console::parse(line), Ok(Some(Message::Failed { .. })));
            *speaker == name || failed()
        }
        Event::Line(..) => false,
        Event::Closed(Source::Host(_)) => true,
        Event::Closed(Source::Guest(ended) | Source::Qemu(ended)) => !gone.contains(ended),
    }
}

/// A run.
pub(crate) struct Session<'a> {
    pub(crate) stage: &'a Stage<'a>,
    title: String,
    /// The directory for sockets and logs.
    pub(crate) directory: &'a Path,
    /// The pool's store.
    pub(crate) pool: &'a Path,
    pub(crate) inbox: Inbox,
    cores: Cores,
    /// The namespace of daemons, unless it is this process's.
    pub(crate) namespace: Option<Namespace>,
    /// Guests that were told to power off.
    gone: Vec<&'static str>,
}

impl<'a> Session<'a> {
    /// Does a run. If it fails, the error has the last lines of all processes.
    pub(crate) fn hold<T>(
        stage: &Stage<'_>,
        title: &str,
        act: impl FnOnce(&mut Session<'_>) -> Result<T>,
    ) -> Result<T> {
        // On tmpfs, as `/run` is: a controller's log is beside the control socket.
        let directory = tempfile::Builder::new()
            .prefix("sidecore-demo-")
            .tempdir_in("/dev/shm")
            .context("cannot create a directory")?;
        let pool = tempfile::Builder::new()
            .prefix("demo-pool-")
            .suffix(".img")
            .tempfile_in(stage.scratch)
            .and_then(|file| file.as_file().set_len(POOL_MIB << 20).map(|()| file.into_temp_path()))
            .with_context(|| format!("cannot create a file in {}", stage.scratch.display()))?;
        let mut session = Session {
            stage,
            title: title.to_owned(),
            directory: directory.path(),
            pool: &pool,
            inbox: Inbox::new(),
            cores: Cores::divide()?,
            namespace: None,
            gone: Vec::new(),
        };
        act(&mut session).map_err(|error| session.explain(error))
    }

    pub(crate) fn say(&self, what: impl AsRef<str>) {
        self.stage.progress.say(format!("{}: {}", self.title, what.as_ref()));
    }

    /// Lets guests have all CPUs: the run has more daemons than it could keep CPUs for.
    pub(crate) fn share_cores(&mut self) {
        self.cores.sidecore = None;
    }

    /// Starts the daemon with a configuration for this run's paths.
    pub(crate) fn daemon(
        &mut self,
        configure: impl FnOnce(&Places<'_>) -> Result<String>,
    ) -> Result<Daemon> {
        let control = self.control();
        let sidecore_cpu = self.cores.sidecore;
        let places =
            Places { directory: self.directory, pool: self.pool, control: &control, sidecore_cpu };
        let configuration = configure(&places)?;
        let sidecore = self.sidecore();
        Daemon::start(
            &mut self.inbox,
            (self.stage.binaries, self.namespace.as_ref()),
            self.directory,
            sidecore,
            &configuration,
        )
    }

    /// Boots a guest with settings for the script that it runs.
    pub(crate) fn boot(
        &mut self,
        name: &'static str,
        emulator: &Emulator,
        equipment: &Equipment<'_>,
        settings: &str,
    ) -> Result<Running> {
        let machine = Machine {
            name,
            emulator,
            accelerator: self.stage.accelerator,
            kernel: self.stage.kernel,
            initramfs: self.stage.initramfs,
            kernel_log: &self.kernel_log(name),
            control: &self.qemu_control(name),
            equipment,
            settings: settings.to_owned(),
        };
        self.say(format!("booting the {name} guest"));
        self.cores.elsewhere(|| machine.start(&self.inbox))
    }

    /// Connects to the control socket of a guest's QEMU. Only guests with ports have one.
    pub(crate) fn qmp(&self, name: &str) -> Result<Qmp> {
        Qmp::connect(&self.qemu_control(name))
    }

    /// The next message of a guest; `None` if the deadline passes first. Messages of other guests
    /// wait for the calls that ask for them. Fails if the daemon or another guest fails meanwhile.
    pub(crate) fn next_message(
        &mut self,
        name: &'static str,
        deadline: Instant,
    ) -> Result<Option<String>> {
        loop {
            let gone = &self.gone;
            let matters = |event: &Event| matters(event, name, gone);
            match self.inbox.find(deadline, matters)? {
                Some(Event::Line(Source::Guest(speaker), line)) => match console::parse(&line)? {
                    Some(_) if speaker == name => return Ok(Some(line)),
                    Some(Message::Failed { why }) => bail!("in the {speaker} guest: {why}"),
                    _ => {}
                },
                Some(Event::Line(..)) => {}
                Some(Event::Closed(Source::Host(name))) => {
                    bail!("{name} ended while a guest was using it")
                }
                Some(Event::Closed(Source::Guest(gone) | Source::Qemu(gone))) => {
                    bail!("the {gone} guest's QEMU ended before the guest had finished")
                }
                None => return Ok(None),
            }
        }
    }

    /// Waits until a guest that powers off is gone; `false` if it is not by the deadline.
    pub(crate) fn wait_for_power_off(
        &mut self,
        name: &'static str,
        deadline: Instant,
    ) -> Result<bool> {
        self.gone.push(name);
        self.inbox.wait_closed(Source::Guest(name), deadline)
    }

    /// The command line tool for this run's daemon.
    pub(crate) fn sidecore(&self) -> Sidecore {
        Sidecore::new(self.stage.binaries, &self.control())
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    fn qemu_control(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.qmp"))
    }

    fn kernel_log(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.log"))
    }

    fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        if interrupt::check().is_err() {
            return error;
        }
        let mut tail = String::new();
        for name in crate::guest::NAMES {
            let kernel = std::fs::read(self.kernel_log(name)).unwrap_or_default();
            let kernel = String::from_utf8_lossy(&kernel);
            let lines: Vec<&str> =
                kernel.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            for line in &lines[lines.len().saturating_sub(15)..] {
                tail.push_str(&format!("\n  Kernel of {name}: {line}"));
            }
        }
        error.context(format!("the {} run failed{}{tail}", self.title, self.inbox.last_words()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Acts on a run with these events.
    fn with(events: Vec<Event>, act: impl FnOnce(&mut Session<'_>) -> Result<()>) {
        let (qemu, progress) = (Emulator { command: Vec::new() }, Progress::start());
        let scratch = tempfile::tempdir().unwrap();
        let stage = Stage {
            accelerator: Accelerator::Tcg,
            qemu: &qemu,
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            binaries: Path::new("/b"),
            scratch: scratch.path(),
            progress: &progress,
        };
        let run = |session: &mut Session<'_>| {
            events.into_iter().for_each(|event| session.inbox.post(event));
            act(session)
        };
        Session::hold(&stage, "test", run).unwrap();
    }

    fn line(guest: &'static str, text: &str) -> Event {
        Event::Line(Source::Guest(guest), text.to_owned())
    }

    #[test]
    fn a_message_waits_while_another_guest_is_asked() {
        let events = vec![
            line("one", "SIDECORE value a 1"),
            line("two", "noise"),
            line("two", "SIDECORE value b 2"),
            line("one", "SIDECORE finished order"),
        ];
        with(events, |session| {
            let deadline = Instant::now() + Duration::from_secs(20);
            let mut next = |name| session.next_message(name, deadline).unwrap().unwrap();
            assert_eq!(next("two"), "SIDECORE value b 2");
            assert_eq!(next("one"), "SIDECORE value a 1");
            assert_eq!(next("one"), "SIDECORE finished order");
            Ok(())
        });
    }

    #[test]
    fn another_guests_failure_and_end_are_errors_at_once() {
        let deadline = Instant::now() + Duration::from_secs(20);
        let failed = vec![line("one", "SIDECORE failed no disk")];
        with(failed, |session| {
            let error = session.next_message("two", deadline).unwrap_err().to_string();
            assert_eq!(error, "in the one guest: no disk");
            Ok(())
        });
        let ended = vec![line("two", "SIDECORE done"), Event::Closed(Source::Qemu("one"))];
        with(ended, |session| {
            assert_eq!(session.next_message("two", deadline).unwrap().unwrap(), "SIDECORE done");
            assert!(session.wait_for_power_off("two", Instant::now()).is_ok_and(|gone| !gone));
            let error = session.next_message("two", deadline).unwrap_err().to_string();
            assert!(error.contains("the one guest's QEMU ended"), "{error}");
            Ok(())
        });
    }
}
