//! The command of an owner: its start, its end, and its death at the end of the lease.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use sidecore_cluster::{
    Claim, Closed, Fence, Host, LockFence, Others, RecordFile, Runner, Served, Watch, boot_time,
};
use sidecore_ownership::{Member, Record};
use sidecore_units::Nanos;

use super::guard::Guard;
use super::shown::Shown;
use super::{Signals, say};
use crate::bound;

/// The time between two looks at the command, the lease and signals.
const TICK: Duration = Duration::from_millis(5);
/// The time that the command has for its end in order.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// The time after the end of a command that lost its store, in which the guard sees a fence.
const GUARD_PATIENCE: Duration = Watch::PERIOD.saturating_mul(2);

/// The exit code of a `sidecored` whose disk or volumes are another owner's.
const LOST_STORE: i32 = 5;

/// The end of a candidacy.
pub(super) enum Ended {
    /// The lease has ended, and the command was killed.
    Lease,
    /// Another host has fenced this one, and the command was killed or has ended.
    Fenced(String),
    /// The command has ended by itself, with this exit code.
    Command(u8),
    /// A signal asked for the end.
    Signal,
}

/// The work that tasks of the runner ask the main thread for.
#[derive(Debug)]
enum Wanted {
    Nothing,
    /// Start the command, with the host's lock.
    Start(Served, File),
    /// End it.
    Stop,
}

#[derive(Debug)]
struct Shared {
    wanted: Wanted,
    /// The result of the last start.
    started: Option<Result<(), String>>,
    is_running: bool,
    until: Nanos,
}

/// Runs the command on the main thread for the tasks of a [`Runner`]: the kernel kills the command
/// at the death of the thread that started it.
pub(super) struct Supervisor {
    me: Member,
    fence: Box<dyn Fence>,
    /// The locks of the command's files, also of requests that outlive it.
    local: LockFence,
    record: RecordFile,
    margin: Nanos,
    shared: Mutex<Shared>,
    changed: Condvar,
}

impl Supervisor {
    pub(super) fn new(
        me: Member,
        (fence, local): (Box<dyn Fence>, LockFence),
        record: RecordFile,
        margin: Nanos,
    ) -> Self {
        let shared = Shared {
            wanted: Wanted::Nothing,
            started: None,
            is_running: false,
            until: Nanos::ZERO,
        };
        let (shared, changed) = (Mutex::new(shared), Condvar::new());
        Self { me, fence, local, record, margin, shared, changed }
    }

    /// Whether the command must not run any more.
    fn is_over(&self, until: Nanos) -> bool {
        boot_time().after(self.margin) >= until
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, shared: MutexGuard<'a, Shared>) -> MutexGuard<'a, Shared> {
        self.changed.wait(shared).unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the command as the runner says, until the candidacy ends.
    pub(super) fn run(
        &self,
        command: &[OsString],
        (runner, store): (Runner, &str),
        (signals, shown): (&Signals, &mut Shown),
    ) -> Result<Ended> {
        let mut process: Option<Process> = None;
        let ended = loop {
            shown.show(runner.report());
            if signals.ends() {
                break Ended::Signal;
            }
            if signals.hands_over() {
                runner.hand_over(store);
            }
            if let Some(ended) = self.step(command, &mut process)? {
                break ended;
            }
        };
        // The runner's last tasks need this thread.
        let ending = std::thread::spawn(move || runner.end());
        while !ending.is_finished() {
            self.step(command, &mut process)?;
        }
        Ok(ended)
    }

    /// Waits for a moment, and looks at all that may have changed.
    fn step(&self, command: &[OsString], process: &mut Option<Process>) -> Result<Option<Ended>> {
        let shared = self.lock();
        let waited = self.changed.wait_timeout(shared, TICK);
        let mut shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        if matches!(shared.wanted, Wanted::Start(..))
            && let Wanted::Start(served, lock) =
                std::mem::replace(&mut shared.wanted, Wanted::Nothing)
        {
            let watch = self.fence.watch(&served.by);
            let started = Process::start(command, (&served, watch.is_some()), lock);
            let result = started.map(|mut started| {
                started.guard = watch.map(Guard::start);
                *process = Some(started);
            });
            shared.is_running = result.is_ok();
            shared.started = Some(result.map_err(|error| format!("{error:#}")));
            self.changed.notify_all();
        }
        let Some(running) = process else {
            if matches!(shared.wanted, Wanted::Stop) {
                shared.wanted = Wanted::Nothing;
                self.changed.notify_all();
            }
            return Ok(None);
        };
        let is_over = self.is_over(shared.until);
        let fenced = running.guard.as_mut().and_then(Guard::fault);
        if is_over || fenced.is_some() {
            running.kill();
        } else if matches!(shared.wanted, Wanted::Stop) {
            running.stop();
        }
        let Some(status) = running.ended()? else { return Ok(None) };
        let was_wanted = matches!(shared.wanted, Wanted::Stop);
        if !was_wanted && !is_over && fenced.is_none() && running.may_be_fenced(status) {
            return Ok(None);
        }
        *process = None;
        shared.is_running = false;
        shared.wanted = Wanted::Nothing;
        self.changed.notify_all();
        Ok(match (was_wanted, is_over, fenced) {
            (true, ..) => None,
            (false, true, _) => Some(Ended::Lease),
            (false, false, Some(why)) => Some(Ended::Fenced(why)),
            (false, false, None) => {
                say(&format!("the command has ended by itself: {status}"));
                Some(Ended::Command(code(status)))
            }
        })
    }
}

impl Host for Supervisor {
    fn fence(&self, _: &str, claim: &Claim, others: Others<'_>) -> Result<(), String> {
        self.fence.fence(claim, others)
    }

    fn read_record(&self, _: &str) -> Result<Option<Record>, String> {
        self.record.read()
    }

    fn write_record(&self, _: &str, record: &Record) -> Result<(), String> {
        self.record.write(record)
    }

    fn open(&self, _: &str, served: Served, until: Nanos) -> Result<(), String> {
        let lock = self.local.host_lock.take()?;
        // From here on, a successor's fence fails. One that was done before followed the lease.
        if self.is_over(until) {
            return Err("the lease ended before the command was started".to_owned());
        }
        let mut shared = self.lock();
        shared.until = until;
        (shared.wanted, shared.started) = (Wanted::Start(served, lock), None);
        self.changed.notify_all();
        loop {
            if let Some(started) = shared.started.take() {
                return started;
            }
            shared = self.wait(shared);
        }
    }

    fn close(&self, _: &str) -> Result<Closed, String> {
        let mut shared = self.lock();
        shared.wanted = Wanted::Stop;
        self.changed.notify_all();
        while shared.is_running {
            shared = self.wait(shared);
        }
        let is_over = boot_time() >= shared.until;
        drop(shared);
        if is_over {
            // A look at the locks would take them from a successor, which fences this daemon.
            return Ok(Closed::Left);
        }
        // A command that was killed may have requests in flight.
        let suspects = std::slice::from_ref(&self.me);
        let claim = Claim::new(self.me.clone());
        self.local.fence(&claim, Others { suspects, former: None, owner: None })?;
        Ok(Closed::Idle)
    }

    fn serve_until(&self, _: &str, until: Option<Nanos>) {
        if let Some(until) = until {
            self.lock().until = until;
        }
    }
}

/// The running command. Dropping it kills it.
struct Process {
    child: Child,
    /// Of a fence that can be seen.
    guard: Option<Guard>,
    /// When the end in order was asked for.
    stopped_at: Option<Instant>,
    ended_at: Option<Instant>,
}

impl Process {
    /// The command inherits the lock. If its disks are reserved, it was fenced when one refuses it.
    fn start(
        command: &[OsString],
        (served, reserves): (&Served, bool),
        lock: File,
    ) -> Result<Self> {
        let (program, arguments) = command.split_first().context("there is no COMMAND")?;
        let program = program.to_str().context("the program's name is no UTF-8")?;
        let mut starter = bound::command(program).context("cannot find this program")?;
        // A Ctrl-C in the terminal goes to this process alone.
        starter.args(arguments).process_group(0);
        tell(&mut starter, served, reserves);
        fcntl_setfd(&lock, FdFlags::empty()).context("cannot pass on the host's lock")?;
        let child = starter.spawn().with_context(|| format!("cannot start {program}"))?;
        drop(lock);
        Ok(Self { child, guard: None, stopped_at: None, ended_at: None })
    }

    fn stop(&mut self) {
        if self.ended_at.is_some() {
            return;
        }
        match self.stopped_at {
            None => {
                let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
                self.stopped_at = Some(Instant::now());
            }
            Some(at) if at.elapsed() >= END_PATIENCE => self.kill(),
            Some(_) => {}
        }
    }

    /// Kills the command, and its children that are in its group.
    fn kill(&mut self) {
        // Another process can have its number now.
        if self.ended_at.is_some() {
            return;
        }
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.kill();
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let status = self.child.try_wait().context("cannot wait for the command")?;
        if status.is_some() && self.ended_at.is_none() {
            self.ended_at = Some(Instant::now());
        }
        Ok(status)
    }

    /// Whether a command that has ended may have been fenced, and the guard has not seen it yet: a
    /// daemon ends at the first write that is refused.
    fn may_be_fenced(&self, status: ExitStatus) -> bool {
        self.guard.is_some()
            && status.code() == Some(LOST_STORE)
            && self.ended_at.is_some_and(|at| at.elapsed() < GUARD_PATIENCE)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

/// Tells a command about its ownership.
fn tell(command: &mut Command, served: &Served, reserves: bool) {
    command.env("SIDECORE_EPOCH", served.epoch.to_string());
    command.env("SIDECORE_EPOCH_SERIES", format!("{:016x}", served.number));
    if reserves {
        command.env("SIDECORE_FENCE", "reservation");
    } else {
        command.env_remove("SIDECORE_FENCE");
    }
}

/// The exit code for a status, as in shells.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| signal.saturating_add(128)));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use sidecore_cluster::{HostLock, LateAttempt, NotesFile, ReservationFence};

    use super::*;

    /// A command that has ended, with a guard that sees no fence.
    fn ended(exit: &str) -> (Process, ExitStatus) {
        let me = Member::default();
        let host_lock = HostLock::beside("record".as_ref(), &me);
        let notes = NotesFile::beside("record".as_ref(), &me);
        let fence = ReservationFence {
            disks: Vec::new(),
            time_limit: Duration::ZERO,
            local: LockFence { paths: Vec::new(), host_lock },
            notes,
            late: LateAttempt::default(),
        };
        let mut child = Command::new("sh").args(["-c", exit]).spawn().unwrap();
        child.wait().unwrap();
        let guard = fence.watch(&me).map(Guard::start);
        let mut process = Process { child, guard, stopped_at: None, ended_at: None };
        let status = process.ended().unwrap().unwrap();
        (process, status)
    }

    #[test]
    fn the_exit_code_is_that_of_the_daemon() {
        assert_eq!(LOST_STORE, i32::from(sidecore_assembly::spec::LOST_STORE));
    }

    #[test]
    fn the_command_is_told_its_epoch_and_whether_a_disk_that_refuses_it_is_its_fence() {
        let served = Served { by: Member::default(), epoch: 7, number: 9 };
        for (reserves, fence) in [(true, Some("reservation")), (false, None)] {
            let mut command = Command::new("sidecored");
            tell(&mut command, &served, reserves);
            let told = |name: &str| {
                let found = command.get_envs().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.and_then(|text| text.to_str()))
            };
            assert_eq!(told("SIDECORE_EPOCH"), Some(Some("7")));
            // Without it, a `sidecore own` around this one has another fence.
            assert_eq!(told("SIDECORE_FENCE"), Some(fence));
        }
    }

    #[test]
    fn the_guard_has_time_for_a_look_after_a_command_that_lost_its_store() {
        let (mut process, status) = ended("exit 5");
        assert!(process.may_be_fenced(status));
        let begin = process.ended_at;
        assert_eq!(process.ended().unwrap(), Some(status));
        assert_eq!(process.ended_at, begin, "the time does not begin again");
        process.ended_at = Instant::now().checked_sub(GUARD_PATIENCE);
        assert!(!process.may_be_fenced(status));
        let (process, status) = ended("exit 3");
        assert!(!process.may_be_fenced(status));
        let (mut process, status) = ended("exit 5");
        process.guard = None;
        assert!(!process.may_be_fenced(status));
    }
}
