//! Child processes that end with the program that started them.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::wait;

/// A child process, killed and reaped on drop.
#[derive(Debug)]
pub struct Process(Child);

impl From<Child> for Process {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Process {
    /// Starts a program.
    ///
    /// # Errors
    /// The kernel's, with the program's name.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let started = command.spawn();
        started.map(Self).map_err(|error| cannot_start(command.get_program(), &error))
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The process has ended and was reaped.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.0), signal)?)
    }

    /// Waits for the end of the process; `None` if it still runs after `patience`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait_for_end(&mut self, patience: Duration) -> io::Result<Option<ExitStatus>> {
        let ended = wait::attempts(patience, || match self.0.try_wait() {
            Ok(Some(status)) => Ok(Ok(status)),
            Ok(None) => Err(()),
            Err(error) => Ok(Err(error)),
        });
        ended.ok().transpose()
    }

    /// Reads the first line of a piped standard output, and closes the pipe.
    ///
    /// # Errors
    /// The output is not piped, or was read before.
    pub fn first_line(&mut self) -> io::Result<String> {
        let stdout = self.0.stdout.take().ok_or(io::ErrorKind::NotConnected)?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        Ok(line)
    }

    /// Reads a piped standard error until all processes that share it have ended. Empty if it is
    /// not piped, or was read before.
    ///
    /// # Errors
    /// The output is not UTF-8.
    pub fn complaint(&mut self) -> io::Result<String> {
        let mut text = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut text)?;
        }
        Ok(text)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail if the process has ended and was reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program to its end, without input, and returns its standard output without the space
/// around it.
///
/// # Errors
/// The program is not installed or fails; the error has its standard error.
pub fn output_of(program: &str, arguments: &[&str]) -> io::Result<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| cannot_start(program.as_ref(), &error))?;
    if !output.status.success() {
        let (words, said) = (arguments.join(" "), String::from_utf8_lossy(&output.stderr));
        return Err(io::Error::other(format!(
            "{program} {words} failed ({}): {}",
            output.status,
            said.trim()
        )));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cannot_start(program: &OsStr, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot start {}: {error}", program.to_string_lossy()))
}

/// A command for `program` that the kernel kills when this process ends, for any reason, by
/// setpriv(1), which replaces itself with the program. A machine without setpriv runs the program
/// alone.
#[must_use]
pub fn tied_to_this_process(program: &OsStr) -> Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_installed = |directory: &Path| directory.join("setpriv").is_file();
    if !std::env::split_paths(&path).any(|directory| is_installed(&directory)) {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = tied_to_this_process("sh".as_ref());
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process::start(&mut command).unwrap()
    }

    #[test]
    fn the_output_is_read_and_the_end_awaited() {
        let mut process = shell("echo up; echo no >&2; exit 3");
        assert_eq!(process.first_line().unwrap(), "up\n");
        assert_eq!(process.complaint().unwrap(), "no\n");
        assert_eq!(process.wait_for_end(Duration::from_secs(60)).unwrap().unwrap().code(), Some(3));
    }

    #[test]
    fn a_process_that_runs_on_ends_with_its_guard() {
        let mut process = shell("echo up; exec sleep 600");
        process.first_line().unwrap();
        assert_eq!(process.wait_for_end(Duration::ZERO).unwrap(), None);
        let pid = process.id();
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_program_that_fails_is_an_error_with_its_complaint() {
        assert_eq!(output_of("echo", &["two", "words"]).unwrap(), "two words");
        let error = output_of("sh", &["-c", "echo why >&2; exit 3"]).unwrap_err().to_string();
        assert!(error.starts_with("sh -c") && error.ends_with("why"), "{error}");
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = Process::start(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"), "{error}");
    }
}
