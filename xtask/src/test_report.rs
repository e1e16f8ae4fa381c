//! Passes on the output of `cargo test` line by line, and keeps the part that a summary needs.

use std::io::{BufRead as _, BufReader, PipeReader};
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// The prefix of a skipped test's line, which verify/skip prints past the harness, because the
/// harness keeps the output of tests that pass.
const SKIPPED: &str = "skipped: ";

/// After this long without output, check whether the command has ended.
const SILENCE: Duration = Duration::from_millis(500);

/// The programs and the skipped tests of one run.
#[derive(Default)]
pub struct Report {
    /// Each test program with its time.
    pub programs: Vec<(String, Duration)>,
    /// Each skipped or ignored test with the reason.
    pub skipped: Vec<String>,
    program: String,
}

impl Report {
    /// Runs a cargo command that runs tests.
    pub fn of(command: &mut Command) -> Result<Self> {
        let line = crate::shell::describe(command);
        println!("$ {line}");
        // One pipe for both streams keeps their order: cargo prints a program's name to one stream,
        // and its tests print to the other.
        let (reader, writer) = std::io::pipe()?;
        let started = command.stdout(writer.try_clone()?).stderr(writer).spawn();
        let mut child =
            started.with_context(|| format!("cannot start `{line}`: is it installed?"))?;
        // The command holds the pipe's writing end, too: without this the output would never end.
        *command = Command::new("true");
        let mut report = Self::default();
        let lines = lines(reader);
        loop {
            match lines.recv_timeout(SILENCE) {
                Ok(text) => {
                    println!("{text}");
                    report.read(&text);
                }
                Err(RecvTimeoutError::Disconnected) => break,
                // A process that a test left running may hold the pipe for ever.
                Err(RecvTimeoutError::Timeout) if child.try_wait()?.is_some() => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        let status = child.wait()?;
        if !status.success() {
            bail!("`{line}` failed ({status})");
        }
        Ok(report)
    }

    /// The report of what a step printed.
    pub fn of_output(step: &str, output: &str) -> Self {
        let mut report = Self { program: step.to_owned(), ..Self::default() };
        output.lines().for_each(|line| report.read(line));
        report
    }

    /// Notes that something did not run, and prints the reason.
    pub fn skip(&mut self, skipped: String) {
        println!("{SKIPPED}{skipped}");
        self.skipped.push(skipped);
    }

    /// Adds the report of another run.
    pub fn add(&mut self, other: Self) {
        self.programs.extend(other.programs);
        self.skipped.extend(other.skipped);
    }

    /// Takes what a summary needs from a line of output.
    pub fn read(&mut self, line: &str) {
        let line = line.trim_start();
        if let Some(program) = program(line) {
            self.program = program;
        } else if let Some(skipped) = skipped(line) {
            self.skipped.push(format!("{}: {skipped}", self.program));
        } else if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored"))
        {
            self.skipped.push(format!(
                "{}: {name}: {}",
                self.program,
                reason.trim_start_matches([',', ' '])
            ));
        } else if let Some(took) = took(line) {
            self.programs.push((self.program.clone(), took));
        }
    }
}

fn lines(reader: PipeReader) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for bytes in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&bytes).into_owned()).is_err() {
                return;
            }
        }
    });
    lines
}

/// The program in cargo's line `Running tests/api.rs (target/debug/deps/api-0123456789abcdef)`.
fn program(line: &str) -> Option<String> {
    if let Some(package) = line.strip_prefix("Doc-tests ") {
        return Some(format!("documentation of {package}"));
    }
    let rest = line.strip_prefix("Running ")?;
    let (source, binary) = rest.rsplit_once(" (")?;
    let name = binary.trim_end_matches(')').rsplit('/').next()?;
    let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
    Some(format!("{name}, {source}"))
}

/// The test and the reason; a harness with one thread has printed the test's name before them.
fn skipped(line: &str) -> Option<&str> {
    let (before, skipped) = line.split_once(SKIPPED)?;
    (before.is_empty() || (before.starts_with("test ") && before.ends_with(" ... ")))
        .then_some(skipped)
}

/// The time in the line that ends a program: `test result: ok. 3 passed; ...; finished in 0.52s`.
fn took(line: &str) -> Option<Duration> {
    let (_, seconds) = line.strip_prefix("test result: ")?.rsplit_once("finished in ")?;
    Duration::try_from_secs_f64(seconds.trim_end_matches('s').parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_have_times_and_skipped_tests_have_reasons() {
        let mut report = Report::default();
        let output = "     Running unittests src/lib.rs \
                      (target/debug/deps/sidecore_linux-0123456789abcdef)\n\
                      test a ... ok\n\
                      test b::c ... ignored, release only\n\
                      skipped: d::e: losetup: no loop devices\n\
                      test d::e ... skipped: d::e: no CPU\n\
                      ok\n\
                      test f ... ok, skipped: nothing\n\
                      test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; \
                      finished in 1.25s\n";
        output.lines().for_each(|line| report.read(line));
        let program = "sidecore_linux, unittests src/lib.rs";
        assert_eq!(report.programs, [(program.to_owned(), Duration::from_millis(1250))]);
        let expected = ["b::c: release only", "d::e: losetup: no loop devices", "d::e: no CPU"];
        assert_eq!(report.skipped, expected.map(|skipped| format!("{program}: {skipped}")));
    }

    #[test]
    fn a_run_that_fails_is_an_error_and_one_that_passes_is_read() {
        let print = |status| {
            format!("echo 'Running tests/x.rs (deps/x-0)'; echo 'skipped: t: r' >&2; exit {status}")
        };
        let report = Report::of(Command::new("sh").args(["-c", &print(0)])).unwrap();
        assert_eq!(report.skipped, ["x, tests/x.rs: t: r"]);
        assert!(Report::of(Command::new("sh").args(["-c", &print(3)])).is_err());
        // A command ends also if it leaves a process with its output open.
        let left =
            Report::of(Command::new("sh").args(["-c", "sleep 600 & echo skipped: t: $!"])).unwrap();
        let pid = left.skipped[0].rsplit(' ').next().unwrap();
        assert!(Command::new("kill").arg(pid).status().unwrap().success());
    }
}
