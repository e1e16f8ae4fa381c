//! Processes that end with the process that started them, however that one ends.

use std::env;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Set in the environment of a process that is to become another program: the number of the process that started it.
const BOUND: &str = "SIDECORE_BOUND_TO";
/// The exit code if there is no such program, as shells have it.
pub(crate) const NOT_FOUND: u8 = 127;
/// The exit code if the program cannot be executed.
pub(crate) const NOT_RUN: u8 = 126;

/// Has the kernel send `signal` to this process when `parent`, which started it, has died.
pub(crate) fn end_with(parent: &OsStr, signal: Signal) -> io::Result<()> {
    set_parent_process_death_signal(Some(signal))?;
    // The parent may have died before: the kernel sends nothing then.
    let is_there = getppid().is_some_and(|pid| *parent == *pid.as_raw_nonzero().to_string());
    if is_there { Ok(()) } else { Err(io::Error::other("the process that started this one has ended")) }
}

/// A program that the kernel kills when this process has died. The program is executed by this one, in
/// [`become_program`]: its exit code is [`NOT_FOUND`] or [`NOT_RUN`], with the error on its standard error, if it cannot.
pub(crate) fn command(program: &str) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.env(BOUND, std::process::id().to_string()).arg(program);
    Ok(command)
}

/// Executes the program that [`command`] names; returns only if there is none, or on an error.
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
