//! A program under measurement: started on its core, frozen while the other one runs, and ended whatever happens.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use sidecore_units::CoreId;

use crate::{stop, workers};

const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// A running program.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` on `cores`, all of its output going to a file in `directory`. It dies with us, even if we are
    /// killed.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(name: &str, cores: &[CoreId], command: &[String], directory: &Path) -> Result<Self> {
        let log = directory.join(format!("{name}.log"));
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "taskset", "--cpu-list", &cores.join(",")])
            .args(command)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {name}: setpriv and taskset (util-linux) are needed"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Waits until `is_ready`, given the program's output so far, says so.
    ///
    /// # Errors
    /// The program ends, or is not ready for half a minute; the error has its output.
    pub fn wait_until(&mut self, is_ready: impl Fn(&str) -> bool) -> Result<()> {
        let end = Instant::now() + START_TIMEOUT;
        loop {
            stop::check()?;
            let output = self.output();
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}):\n{output}", self.name);
            }
            if is_ready(&output) {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("{} is not ready after {} s:\n{output}", self.name, START_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What it has printed.
    #[must_use]
    pub fn output(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Takes it off its core, without ending it.
    ///
    /// # Errors
    /// It has ended.
    pub fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::STOP)?;
        let end = Instant::now() + STOP_TIMEOUT;
        // Every thread stops at its own next chance.
        while !self.states()?.iter().all(|state| *state == 'T') {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}):\n{}", self.name, self.output());
            }
            if Instant::now() > end {
                bail!("{} does not freeze", self.name);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// It has ended.
    pub fn thaw(&mut self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Ends it at once, and waits until it is gone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The CPU time of all its threads so far.
    ///
    /// # Errors
    /// It has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        Ok(self.threads("schedstat")?.iter().map(|text| schedstat(text, 0)).sum())
    }

    /// How long its threads were ready to run and had to wait for a core so far.
    fn waits(&self) -> Result<Duration> {
        Ok(self.threads("schedstat")?.iter().map(|text| schedstat(text, 1)).sum())
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// It does not, and had to be killed; or it failed.
    pub fn end(mut self) -> Result<()> {
        self.thaw()?;
        self.signal(Signal::TERM)?;
        let Some(status) = self.reap(STOP_TIMEOUT) else {
            bail!("{} does not end when asked to:\n{}", self.name, self.output());
        };
        if !status.success() {
            bail!("{} ended badly ({status}):\n{}", self.name, self.output());
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        rustix::process::kill_process(pid, signal).with_context(|| format!("{} is gone", self.name))
    }

    fn reap(&mut self, within: Duration) -> Option<std::process::ExitStatus> {
        let end = Instant::now() + within;
        while Instant::now() < end {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// The state letter of each thread (proc(5)).
    fn states(&self) -> Result<Vec<char>> {
        let state = |text: String| text.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap_or('?');
        Ok(self.threads("stat")?.into_iter().map(state).collect())
    }

    fn threads(&self, file: &str) -> Result<Vec<String>> {
        let directory = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(&directory).with_context(|| format!("{} is gone", self.name))?;
        // A thread may end between the two looks.
        Ok(tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join(file)).ok()).collect())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = self.signal(Signal::TERM);
        let _ = self.thaw();
        if self.reap(STOP_TIMEOUT).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Time on a core, time waited for one, turns on one (Linux, Documentation/scheduler/sched-stats).
pub(crate) fn schedstat(text: &str, field: usize) -> Duration {
    Duration::from_nanos(text.split_whitespace().nth(field).and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// Watches whether this thread and a program had their cores for themselves: on a machine that does other work as well,
/// a run that had to wait measures that work.
///
/// To be started and asked while the program is frozen: only of a thread that does not run are the kernel's numbers up
/// to date.
#[derive(Debug)]
pub struct Watch {
    since: Instant,
    own_waits: Duration,
    waits: Duration,
    cpu: Duration,
    strangers: Option<Duration>,
}

impl Watch {
    /// Starts to watch this thread, and all threads of `process`.
    ///
    /// # Errors
    /// The program has ended.
    pub fn start(process: Option<&Process>) -> Result<Self> {
        let (waits, cpu) = waits_and_cpu(process)?;
        Ok(Self { own_waits: own_waits(), waits, cpu, strangers: None, since: Instant::now() })
    }

    /// The same where the kernel's workers do a part of the work, on a core that they have to be given: what counts is
    /// what others than those took of the machine.
    ///
    /// # Errors
    /// As [`Watch::start`].
    pub fn start_with_workers(process: Option<&Process>) -> Result<Self> {
        let strangers = Some(workers::strangers_time(&us(process)));
        Ok(Self { strangers, ..Self::start(process)? })
    }

    /// The share of the time since then that was lost in waiting for a core, by the same thread and program; or that
    /// others had.
    ///
    /// # Errors
    /// The program has ended.
    pub fn share(&self, process: Option<&Process>) -> Result<f64> {
        let elapsed = self.since.elapsed();
        if let Some(before) = self.strangers {
            let lost = workers::strangers_time(&us(process)).saturating_sub(before);
            return Ok(lost.as_secs_f64() / elapsed.as_secs_f64().max(1e-9));
        }
        let (waits, cpu) = waits_and_cpu(process)?;
        // A program's threads may wait for each other on its one core: no more was lost than the core did not give it.
        let lost = waits.saturating_sub(self.waits).min(elapsed.saturating_sub(cpu.saturating_sub(self.cpu)));
        let lost = own_waits().saturating_sub(self.own_waits) + lost;
        Ok(lost.as_secs_f64() / elapsed.as_secs_f64().max(1e-9))
    }
}

/// A job's result, and the share of its time that this thread waited for its core.
///
/// # Errors
/// Those of the job.
pub fn watched<T>(job: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let watch = Watch::start(None)?;
    let result = job()?;
    Ok((result, watch.share(None)?))
}

/// This program and the one that it watches.
fn us(process: Option<&Process>) -> Vec<u32> {
    std::iter::once(std::process::id()).chain(process.map(|process| process.child.id())).collect()
}

fn own_waits() -> Duration {
    schedstat(&std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default(), 1)
}

fn waits_and_cpu(process: Option<&Process>) -> Result<(Duration, Duration)> {
    process.map_or(Ok((Duration::ZERO, Duration::ZERO)), |process| Ok((process.waits()?, process.cpu_time()?)))
}
