//! Runs other programs.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The cargo that started this program, so that a `+toolchain` on the command line applies to all.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Prints the command, runs it on this terminal, and fails if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    println!("$ {line}");
    let status =
        command.status().with_context(|| format!("cannot start `{line}`: is it installed?"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs the command silently and returns its output. What it printed as errors becomes a part of
/// the error.
pub fn read(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output =
        command.output().with_context(|| format!("cannot start `{line}`: is it installed?"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed ({}): {}", output.status, errors.trim());
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("`{line}` printed something that is not UTF-8"))
}

/// The command line as a user would type it.
pub fn describe(command: &Command) -> String {
    let program = command.get_program();
    let name = std::path::Path::new(program).file_name().unwrap_or(program);
    let words = std::iter::once(name).chain(command.get_args());
    words.map(OsStr::to_string_lossy).map(quote).collect::<Vec<_>>().join(" ")
}

fn quote(word: impl AsRef<str>) -> String {
    let word = word.as_ref();
    if word.is_empty() || word.contains(|c: char| c.is_whitespace() || "'\"$*;|&<>()".contains(c)) {
        format!("'{}'", word.replace('\'', r"'\''"))
    } else {
        word.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_a_user_would_type_it() {
        let mut command = Command::new("/usr/bin/cargo");
        command.args(["test", "--", "two words"]);
        assert_eq!(describe(&command), "cargo test -- 'two words'");
    }

    #[test]
    fn a_failing_command_is_an_error_that_names_it() {
        let error = run(&mut Command::new("false")).unwrap_err();
        assert!(error.to_string().contains("`false` failed"), "{error}");
    }

    #[test]
    fn what_a_failing_command_printed_is_in_the_error() {
        let error = read(Command::new("sh").args(["-c", "echo oh >&2; false"])).unwrap_err();
        assert!(error.to_string().ends_with(": oh"), "{error}");
    }

    #[test]
    fn a_missing_program_is_an_error_that_names_it() {
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"), "{error}");
    }
}
