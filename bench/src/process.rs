//! A program under measurement: started on its core, frozen while other programs run, and ended in
//! any case.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use sidecore_kit::process::{self, tied_to_this_process};
use sidecore_units::CoreId;

use crate::{stop, workers};

const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// A running program.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: process::Process,
    log: PathBuf,
}

impl Process {
    /// Starts `command` on `cores`, with all of its output going to a file in `directory`. The
    /// program dies with this one, also if this one is killed.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(
        name: &str,
        cores: &[CoreId],
        command: &[String],
        directory: &Path,
    ) -> Result<Self> {
        let log = directory.join(format!("{name}.log"));
        let output =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
        let mut taskset = tied_to_this_process("taskset".as_ref());
        taskset.args(["--cpu-list", &cores.join(",")]).args(command);
        taskset.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = process::Process::start(&mut taskset)
            .with_context(|| format!("cannot start {name}: taskset (util-linux) is needed"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Waits until `is_ready` accepts the program's output so far.
    ///
    /// # Errors
    /// The program ends, or is not ready within half a minute; the error has its output.
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

    /// All output of the program so far.
    #[must_use]
    pub fn output(&self) -> String {
        std::fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Stops the program's threads, which frees its core.
    ///
    /// # Errors
    /// The program has ended.
    pub fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::STOP)?;
        let end = Instant::now() + STOP_TIMEOUT;
        // Each thread stops at its own next chance.
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

    /// Continues a frozen program.
    ///
    /// # Errors
    /// The program has ended.
    pub fn thaw(&mut self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Kills the program and reaps it.
    ///
    /// # Errors
    /// A system call fails.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The CPU time of all the program's threads so far.
    ///
    /// # Errors
    /// The program has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        Ok(self.threads("schedstat")?.iter().map(|text| schedstat(text, 0)).sum())
    }

    /// The time for which the program's threads were ready to run and waited for a core so far.
    fn waits(&self) -> Result<Duration> {
        Ok(self.threads("schedstat")?.iter().map(|text| schedstat(text, 1)).sum())
    }

    /// Ends the program by SIGTERM.
    ///
    /// # Errors
    /// The program does not end and had to be killed, or it failed.
    pub fn end(mut self) -> Result<()> {
        self.thaw()?;
        self.signal(Signal::TERM)?;
        let Some(status) = self.child.wait_for_end(STOP_TIMEOUT)? else {
            bail!("{} does not end when asked to:\n{}", self.name, self.output());
        };
        if !status.success() {
            bail!("{} ended badly ({status}):\n{}", self.name, self.output());
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.child.signal(signal).with_context(|| format!("{} is gone", self.name))
    }

    /// The state letter of each thread (proc(5)).
    fn states(&self) -> Result<Vec<char>> {
        let state = |text: String| {
            text.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap_or('?')
        };
        Ok(self.threads("stat")?.into_iter().map(state).collect())
    }

    fn threads(&self, file: &str) -> Result<Vec<String>> {
        let directory = format!("/proc/{}/task", self.child.id());
        let tasks =
            std::fs::read_dir(&directory).with_context(|| format!("{} is gone", self.name))?;
        // A thread may end between the two reads.
        Ok(tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join(file)).ok())
            .collect())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = self.signal(Signal::TERM);
        let _ = self.thaw();
        // A child that still runs after that is killed.
        let _ = self.child.wait_for_end(STOP_TIMEOUT);
    }
}

/// Parses a field of schedstat: time on a core, time waited for one, turns on one (Linux,
/// Documentation/scheduler/sched-stats).
pub(crate) fn schedstat(text: &str, field: usize) -> Duration {
    Duration::from_nanos(
        text.split_whitespace().nth(field).and_then(|number| number.parse().ok()).unwrap_or(0),
    )
}

/// Watches whether this thread and a program had their cores for themselves: on a machine with
/// other work, a run that waited measures that work.
///
/// Start and ask a watch while the program is frozen: the kernel's numbers are up to date only for
/// a thread that does not run.
#[derive(Debug)]
pub struct Watch {
    since: Instant,
    own_waits: Duration,
    waits: Duration,
    cpu: Duration,
    others: Option<Duration>,
}

impl Watch {
    /// Starts to watch this thread and all threads of `process`.
    ///
    /// # Errors
    /// The program has ended.
    pub fn start(process: Option<&Process>) -> Result<Self> {
        let (waits, cpu) = waits_and_cpu(process)?;
        Ok(Self { own_waits: own_waits(), waits, cpu, others: None, since: Instant::now() })
    }

    /// Starts a watch for a program whose requests the kernel's workers carry out, on a core that
    /// they get from the program. Waiting is no loss then; the share counts the CPU time of all
    /// other threads of the machine.
    ///
    /// # Errors
    /// As [`Watch::start`].
    pub fn start_with_workers(process: Option<&Process>) -> Result<Self> {
        let others = Some(workers::other_cpu_time(&own_pids(process)));
        Ok(Self { others, ..Self::start(process)? })
    }

    /// The share of the time since the start that this thread and the same program spent waiting
    /// for a core; with workers, the share that other threads ran.
    ///
    /// # Errors
    /// The program has ended.
    pub fn share(&self, process: Option<&Process>) -> Result<f64> {
        let elapsed = self.since.elapsed();
        if let Some(before) = self.others {
            let lost = workers::other_cpu_time(&own_pids(process)).saturating_sub(before);
            return Ok(lost.as_secs_f64() / elapsed.as_secs_f64().max(1e-9));
        }
        let (waits, cpu) = waits_and_cpu(process)?;
        // Threads of a program may wait for each other on its one core: the core withheld no more
        // than this.
        let lost = waits
            .saturating_sub(self.waits)
            .min(elapsed.saturating_sub(cpu.saturating_sub(self.cpu)));
        let lost = own_waits().saturating_sub(self.own_waits) + lost;
        Ok(lost.as_secs_f64() / elapsed.as_secs_f64().max(1e-9))
    }
}

/// Runs a job. Returns its result and the share of its time that this thread waited for its core.
///
/// # Errors
/// The job fails.
pub fn watched<T>(job: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let watch = Watch::start(None)?;
    let result = job()?;
    Ok((result, watch.share(None)?))
}

/// The process ids of this program and of the watched one.
fn own_pids(process: Option<&Process>) -> Vec<u32> {
    std::iter::once(std::process::id()).chain(process.map(|process| process.child.id())).collect()
}

fn own_waits() -> Duration {
    schedstat(&std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default(), 1)
}

fn waits_and_cpu(process: Option<&Process>) -> Result<(Duration, Duration)> {
    process.map_or(Ok((Duration::ZERO, Duration::ZERO)), |process| {
        Ok((process.waits()?, process.cpu_time()?))
    })
}
