//! Runs the test programs of the workspace, two at a time: in a program that ends with one long
//! test, or waits for a clock, the other cores would be idle.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::jobs::{Ended, Job, Queue};
use crate::shell;
use crate::test_report::Report;
use crate::workspace::Workspace;

/// Text in a test's source which says that nothing may run beside it.
const ALONE_MARK: &str = "sidecore: runs alone";

/// Programs with long tests start first, so that none of them is left over at the end.
const LONG: &[&str] = &["tests/remote.rs", "tests/own.rs", "tests/fairness.rs"];

/// A message of cargo's: an artifact, or one without the fields of an artifact.
#[derive(Deserialize)]
struct Message {
    manifest_path: Option<PathBuf>,
    target: Option<crate::workspace::Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// A program of tests: those of one file in `tests`, or those inside of a library or a binary.
struct Program {
    /// The package's directory, in which its tests run.
    directory: PathBuf,
    /// The source as cargo names it, for instance `unittests src/lib.rs`.
    source: String,
    path: PathBuf,
    alone: bool,
}

/// Builds the tests of the workspace, and runs those that may run beside others, which are all but
/// [`run_alone`]'s.
pub fn run_together(workspace: &Workspace) -> Result<Report> {
    let mut programs = build()?;
    programs.retain(|program| !program.alone);
    programs.sort_by_key(|program| !LONG.contains(&program.source.as_str()));
    let queue = Queue::new(programs.iter().map(|program| program.job(workspace)));
    let mut report = Report::default();
    crate::jobs::run(&[&queue, &queue], |ended| take(&mut report, ended))?;
    report.add(Report::of(shell::cargo().args(["test", "--workspace", "--doc"]))?);
    Ok(report)
}

/// Runs the tests whose sources bear the mark, one after another.
pub fn run_alone(workspace: &Workspace) -> Result<Report> {
    let mut programs = build()?;
    programs.retain(|program| program.alone);
    let mut report = Report::default();
    let queue = Queue::new(programs.iter().map(|program| program.job(workspace)));
    crate::jobs::run(&[&queue], |ended| take(&mut report, ended))?;
    Ok(report)
}

/// Builds the test programs.
fn build() -> Result<Vec<Program>> {
    let mut command = shell::cargo();
    command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let line = shell::describe(&command);
    println!("$ {line}");
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "`{line}` failed ({})", output.status);
    let programs = parse(&String::from_utf8_lossy(&output.stdout))?;
    ensure!(!programs.is_empty(), "`{line}` named no test programs");
    Ok(programs)
}

/// The test programs in cargo's messages.
fn parse(messages: &str) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for line in messages.lines() {
        let message: Message =
            serde_json::from_str(line).with_context(|| format!("cargo printed {line:?}"))?;
        if let Message {
            manifest_path: Some(manifest),
            target: Some(target),
            profile: Some(Profile { test: true }),
            executable: Some(path),
        } = message
        {
            let directory = manifest.parent().unwrap_or(Path::new("")).to_owned();
            let source = target.source.strip_prefix(&directory).unwrap_or(&target.source).display();
            let inside = if target.is_test() { "" } else { "unittests " };
            let source = format!("{inside}{source}");
            let text = std::fs::read_to_string(&target.source)
                .with_context(|| format!("cannot read {}", target.source.display()))?;
            let alone = text.contains(ALONE_MARK);
            programs.push(Program { directory, source, path, alone });
        }
    }
    Ok(programs)
}

impl Program {
    fn job(&self, workspace: &Workspace) -> Job {
        let mut command = Command::new(&self.path);
        // As cargo runs it.
        command.current_dir(&self.directory).env("CARGO_MANIFEST_DIR", &self.directory);
        let path = self.path.strip_prefix(&workspace.root).unwrap_or(&self.path);
        Job::new(format!("{} ({})", self.source, path.display()), command)
    }
}

/// Prints what a program printed, below the line that cargo would print.
fn take(report: &mut Report, ended: &Ended) -> Result<()> {
    let text = format!("     Running {}\n{}", ended.name, ended.output);
    print!("{text}");
    text.lines().for_each(|line| report.read(line));
    if !ended.status.success() {
        bail!("tests failed ({}) in {}", ended.status, ended.name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().display();
        std::fs::create_dir(directory.path().join("tests")).unwrap();
        std::fs::write(directory.path().join("lib.rs"), "// sidecore: runs alone\n").unwrap();
        std::fs::write(directory.path().join("tests/a.rs"), "fn a() {}\n").unwrap();
        let artifact = |kind: &str, source: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"{path}/Cargo.toml","target":
                {{"kind":["{kind}"],"name":"a","src_path":"{path}/{source}"}},"profile":
                {{"test":{test}}},"executable":{executable}}}"#
            )
            .replace('\n', "")
        };
        let messages = [
            artifact("lib", "lib.rs", false, "null"),
            artifact("bin", "main.rs", false, "\"/target/main\""),
            artifact("lib", "lib.rs", true, "\"/target/lib\""),
            artifact("test", "tests/a.rs", true, "\"/target/a\""),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let programs = parse(&messages.join("\n")).unwrap();
        let found: Vec<_> = programs
            .iter()
            .map(|program| (program.source.as_str(), program.path.to_str().unwrap(), program.alone))
            .collect();
        let expected =
            [("unittests lib.rs", "/target/lib", true), ("tests/a.rs", "/target/a", false)];
        assert_eq!(found, expected);
        assert!(parse("not a message").is_err());
    }

    #[test]
    fn a_program_that_fails_is_named() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 'skipped: t: r'; exit 101"]);
        let queue = Queue::new([Job::new("tests/x.rs (deps/x-0)", command)]);
        let mut report = Report::default();
        let error = crate::jobs::run(&[&queue], |ended| take(&mut report, ended)).unwrap_err();
        assert!(error.to_string().contains("tests/x.rs (deps/x-0)"), "{error}");
        assert_eq!(report.skipped, ["x, tests/x.rs: t: r"]);
    }
}
