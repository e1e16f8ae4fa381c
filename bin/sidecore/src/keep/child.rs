//! The command as a process.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context as _, Result};
use command_fds::{CommandFdExt as _, FdMapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getppid, getrlimit, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, setrlimit,
};

use super::kept::Kept;
use super::{CANNOT_RUN, say};

/// The number of the first descriptor that is handed over.
const FIRST: RawFd = 3;

/// What a manager above says to this process, and not to the command.
const NOT_INHERITED: [&str; 6] =
    ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PIDFDID"];

/// A running command. Dropped before its end was seen, it is killed.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    pidfd: OwnedFd,
}

impl Child {
    /// Starts it with a copy of everything that is kept.
    pub(super) fn start(command: &[OsString], socket: &Path, kept: &Kept) -> Result<Self> {
        // The variable with the process's own number can only be set in that process, so this
        // program starts itself, and that becomes the command: see `become_command`.
        let mut starter = Command::new("/proc/self/exe");
        starter.args(["keep", "--child-of"]).arg(std::process::id().to_string()).arg("--").args(command);
        starter.stdin(Stdio::null());
        // A Ctrl-C in the terminal is for us, or the command would get two signals for one.
        starter.process_group(0);
        for variable in NOT_INHERITED {
            starter.env_remove(variable);
        }
        starter.env("NOTIFY_SOCKET", socket).env("FDSTORE", kept.max().to_string());
        if !kept.is_empty() {
            starter.env("LISTEN_FDS", kept.len().to_string()).env("LISTEN_FDNAMES", kept.names());
        }
        let mut process = spawn_with(&mut starter, kept).context("cannot start a process for the command")?;
        match pidfd_open(Pid::from_child(&process), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { process, pidfd }),
            Err(error) => {
                let _ = process.kill();
                let _ = process.wait();
                Err(error).context("cannot watch the command")
            }
        }
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// Asks it to end.
    pub(super) fn terminate(&self) -> Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::TERM) {
            // It has ended already.
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot send a signal to the command"),
        }
    }

    /// Whether there is an exit status to collect.
    pub(super) fn has_ended(&self) -> Result<bool> {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())));
        Ok(ready.context("cannot watch the command")? > 0)
    }

    /// Collects the exit status.
    pub(super) fn wait(&mut self) -> Result<ExitStatus> {
        self.process.wait().context("cannot wait for the command")
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Neither does anything to a process whose status has been collected.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a process that has a copy of everything that is kept, from the first number on.
///
/// [`Command`] learns through a pipe of its own whether its exec failed. Had that a number which is
/// mapped in the child, a failure would be written into a descriptor that is kept. It has not: as
/// many copies as there are numbers to map have the lowest that were free, so that none of those is
/// free any more when the pipe is made.
fn spawn_with(command: &mut Command, kept: &Kept) -> Result<std::process::Child> {
    let mappings = (FIRST..).zip(kept.copies()?);
    let mappings = mappings.map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
    command.fd_mappings(mappings)?;
    Ok(command.spawn()?)
}

/// What the new process does, with everything in its place: becomes the command, with this
/// process's number in `$LISTEN_PID`, and a SIGTERM at the end of its parent, however that comes.
/// Returns if there is no such command.
pub(super) fn become_command(parent: i32, command: &[OsString]) -> ExitCode {
    let Some((program, arguments)) = command.split_first() else {
        return ExitCode::from(CANNOT_RUN);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::TERM)) {
        say(&format!("the command will outlive this program if that is killed: {error}"));
    }
    // It may have ended before the line above.
    if getppid() != Pid::from_raw(parent) {
        return ExitCode::FAILURE;
    }
    let mut error = become_program(program, arguments);
    if error.kind() == io::ErrorKind::NotFound
        && let Some(beside) = beside_this_program(program)
    {
        error = become_program(beside.as_os_str(), arguments);
    }
    say(&format!("cannot run {}: {error}", program.display()));
    ExitCode::from(CANNOT_RUN)
}

fn become_program(program: &OsStr, arguments: &[OsString]) -> io::Error {
    let mut command = Command::new(program);
    command.args(arguments);
    if std::env::var_os("LISTEN_FDS").is_some() {
        command.env("LISTEN_PID", std::process::id().to_string());
    }
    command.exec()
}

/// The program of this name in the directory of this one: `sidecored` is installed beside
/// `sidecore`, and that directory need not be in `$PATH`. `None` for a path.
fn beside_this_program(program: &OsStr) -> Option<PathBuf> {
    let is_name = Path::new(program).file_name() == Some(program);
    let beside = std::env::current_exe().ok()?.with_file_name(program);
    (is_name && beside.is_file()).then_some(beside)
}

/// Each descriptor is open twice while the command is started, which inherits the limit.
pub(super) fn raise_file_limit(max: usize) {
    let limit = getrlimit(Resource::Nofile);
    let wanted = u64::try_from(max).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(64);
    let wanted = limit.maximum.map_or(wanted, |maximum| wanted.min(maximum));
    if limit.current.is_some_and(|current| current < wanted)
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
    {
        say(&format!("the limit of open files stays at {:?}: {error}", limit.current));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Seek as _};

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    #[ignore = "needs a process of its own, in which the other one runs it"]
    fn a_program_that_is_not_there() {
        let mut kept = Kept::new(64);
        let mut files = Vec::new();
        // Numbers that are free again, as after a descriptor was forgotten.
        let gaps: Vec<File> = (0..32).map(|_| File::open("/dev/null").unwrap()).collect();
        for _ in 0..64 {
            let file = File::from(memfd_create("kept", MemfdFlags::CLOEXEC).unwrap());
            kept.add(None, file.try_clone().unwrap().into()).unwrap();
            files.push(file);
        }
        drop(gaps);
        let started = spawn_with(&mut Command::new("/no/such/program"), &kept);
        for file in &mut files {
            let mut bytes = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut bytes).unwrap();
            assert!(bytes.is_empty(), "a kept file has {bytes:?}");
        }
        assert!(started.is_err(), "a program that is not there was started");
    }

    #[test]
    fn a_failed_start_is_noticed_and_writes_into_nothing_that_is_kept() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "keep::child::tests::a_program_that_is_not_there", "--ignored", "--test-threads=1"]);
        let output = alone.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }
}
