//! Tests that a machine cannot run.
//!
//! A machine may lack a privilege or a part of its kernel: then the test is skipped, and prints a
//! line that `make test` lists at its end. A missing program is no reason to skip, because programs
//! can be installed (`make test` does that): then the test fails.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::io::Write as _;
use std::process::Command;

/// Programs whose request the kernel may not support, or may refuse this user.
const MAY_FAIL: [&str; 5] = ["addpart", "chattr", "losetup", "mount", "swapon"];

/// Prints that the running test is skipped, and why.
pub fn skip(reason: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test's thread");
    // Not by a macro: the harness keeps the macros' output of tests that pass.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
}

/// The trimmed output of a program. If the program fails and is one of `MAY_FAIL`, the test is
/// reported as skipped and the result is `None`.
///
/// # Panics
/// The program is not installed, or fails for another reason.
#[must_use]
pub fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| {
        panic!("{program}: {error}: install it, or run `make test`, which does")
    });
    if output.status.success() {
        return Some(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let reason = format!(
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    assert!(MAY_FAIL.contains(&program), "{reason}");
    skip(reason);
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_programs_output_is_returned() {
        assert_eq!(run("echo", &["two", "words"]).unwrap(), "two words");
    }

    #[test]
    #[should_panic(expected = "install it")]
    fn a_program_that_is_missing_fails_the_test() {
        let _ = run("no-such-program-here", &[]);
    }

    #[test]
    #[should_panic(expected = "false")]
    fn a_program_that_needs_nothing_special_must_not_fail() {
        let _ = run("false", &[]);
    }
}
