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

/// The number of the first descriptor that the command gets.
const FIRST: RawFd = 3;

/// Variables by which a manager above addresses this process, and not the command.
const NOT_INHERITED: [&str; 6] = [
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PIDFDID",
];

/// A running command. Dropping it kills the command if its end has not been seen.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    pidfd: OwnedFd,
}

impl Child {
    /// Starts the command with copies of all kept descriptors.
    pub(super) fn start(command: &[OsString], socket: &Path, kept: &Kept) -> Result<Self> {
        // Only a process itself can set the variable with its own number, so this program starts
        // itself, and the new process becomes the command: see `become_command`.
        let mut starter = Command::new("/proc/self/exe");
        starter
            .args(["keep", "--child-of"])
            .arg(std::process::id().to_string())
            .arg("--")
            .args(command);
        starter.stdin(Stdio::null());
        // A Ctrl-C in the terminal goes to this process alone, or the command would get two signals
        // for it.
        starter.process_group(0);
        for variable in NOT_INHERITED {
            starter.env_remove(variable);
        }
        starter.env("NOTIFY_SOCKET", socket).env("FDSTORE", kept.max().to_string());
        if !kept.is_empty() {
            starter.env("LISTEN_FDS", kept.len().to_string()).env("LISTEN_FDNAMES", kept.names());
        }
        let mut process =
            spawn_with(&mut starter, kept).context("cannot start a process for the command")?;
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

    /// Sends SIGTERM to the command.
    pub(super) fn terminate(&self) -> Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::TERM) {
            // The command has ended already.
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
        // Both calls do nothing to a process whose status has been collected.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a process with copies of all kept descriptors, from the number [`FIRST`] on.
///
/// [`Command`] learns through a pipe of its own whether its exec failed. If the pipe had a number
/// that is mapped in the child, a failure would be written into a kept descriptor. The pipe has no
/// such number: the copies take the lowest free numbers, and there are as many copies as numbers to
/// map, so that no number to map is free when the pipe is made.
fn spawn_with(command: &mut Command, kept: &Kept) -> Result<std::process::Child> {
    let mappings = (FIRST..).zip(kept.copies()?);
    let mappings =
        mappings.map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
    command.fd_mappings(mappings)?;
    Ok(command.spawn()?)
}

/// Runs in the new process when all descriptors are in place: becomes the command, with this
/// process's number in `$LISTEN_PID`, and with a SIGTERM at any end of the parent. Returns only on
/// an error.
pub(super) fn become_command(parent: i32, command: &[OsString]) -> ExitCode {
    let Some((program, arguments)) = command.split_first() else {
        return ExitCode::from(CANNOT_RUN);
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::TERM)) {
        say(&format!("the command will outlive this program if that is killed: {error}"));
    }
    // The parent may have ended before the call above.
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

/// Raises the limit of open files, which the command inherits: each descriptor is open twice while
/// the command is started.
pub(super) fn raise_file_limit(max: usize) {
    let limit = getrlimit(Resource::Nofile);
    let wanted = u64::try_from(max).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(64);
    let wanted = limit.maximum.map_or(wanted, |maximum| wanted.min(maximum));
    if limit.current.is_some_and(|current| current < wanted)
        && let Err(error) =
            setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
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
    #[ignore = "the test below runs it in a process of its own"]
    fn a_program_that_is_not_there() {
        let mut kept = Kept::new(64);
        let mut files = Vec::new();
        // Closed below, so that their numbers are free again, as after a descriptor was removed.
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
    fn a_failed_start_is_noticed_and_writes_into_no_kept_file() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args([
            "--exact",
            "keep::child::tests::a_program_that_is_not_there",
            "--ignored",
            "--test-threads=1",
        ]);
        let output = alone.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }
}
