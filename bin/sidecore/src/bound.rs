//! Processes that end with their parent process, also if the parent is killed.

use std::env;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// An environment variable of a process that is to become another program: the number of its parent
/// process.
const BOUND: &str = "SIDECORE_BOUND_TO";
/// The exit code if the program does not exist, as in shells.
pub(crate) const NOT_FOUND: u8 = 127;
/// The exit code if the program cannot be executed.
pub(crate) const NOT_RUN: u8 = 126;

/// Asks the kernel to send `signal` to this process at the death of `parent`, which started it.
pub(crate) fn end_with(parent: &OsStr, signal: Signal) -> io::Result<()> {
    set_parent_process_death_signal(Some(signal))?;
    // The parent may have died before the call: the kernel sends no signal then.
    let is_there = getppid().is_some_and(|pid| *parent == *pid.as_raw_nonzero().to_string());
    if is_there {
        Ok(())
    } else {
        Err(io::Error::other("the process that started this one has ended"))
    }
}

/// Makes a command that the kernel kills at the death of this process. The command starts this
/// program again, which executes `program` in [`become_program`]. On an error there, the exit code
/// is [`NOT_FOUND`] or [`NOT_RUN`], and the error is on the standard error.
pub(crate) fn command(program: &str) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.env(BOUND, std::process::id().to_string()).arg(program);
    Ok(command)
}

/// Executes the program of a [`command`]. Returns `None` if this process was not started for that,
/// and an exit code on an error.
pub(crate) fn become_program() -> Option<ExitCode> {
    let parent = env::var_os(BOUND)?;
    let mut words = env::args_os().skip(1);
    let error = match end_with(&parent, Signal::KILL) {
        Ok(()) => Command::new(words.next()?).args(words).env_remove(BOUND).exec(),
        Err(error) => error,
    };
    eprintln!("{error}");
    Some(ExitCode::from(if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN }))
}
