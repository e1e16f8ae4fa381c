//! `make test`: everything that must pass before a commit and in CI, the quick checks first.

use anyhow::{Context, Result};

use crate::steps::Steps;
use crate::test_report::Report;
use crate::workspace::Workspace;
use crate::{bench, demo, foreign, fuzz, install, libvirt, lint, shell, tools};

/// The time for all fuzz targets together.
const FUZZ_SECONDS: u32 = 60;

/// Text in a test's source which says that the test must run in release mode, too or only there.
const RELEASE_MARKS: &[&str] = &["sidecore_counting_alloc", "release only"];

pub fn run(workspace: &Workspace) -> Result<()> {
    let mut steps = Steps::new();
    lint::check(workspace, &mut steps)?;
    steps.step("build what ships", "fix what the compiler names", bench::build_what_ships)?;
    steps.step("installation", "see `install` in Makefile", || install::check(workspace))?;
    steps.step("tools of the tests", "install the packages that are named", || {
        tools::ensure(tools::OF_TESTS)
    })?;
    let alone = "run the failing test alone: cargo test --package PACKAGE NAME";
    let report =
        steps.step("tests", alone, || Report::of(shell::cargo().args(["test", "--workspace"])))?;
    steps.add(report);
    let alone = "run the failing test alone: cargo test --release --package PACKAGE NAME";
    let report = steps.step("tests in release", alone, || test_in_release(workspace))?;
    steps.add(report);
    let report =
        steps.step("machines of other kinds", "run it alone: cargo xtask foreign", || {
            foreign::run(workspace)
        })?;
    steps.add(report);
    steps.step("guests", "run it alone: cargo xtask demo", || {
        demo::run(workspace, &demo::Options { seconds: 1, update_readme: false })
    })?;
    let report =
        steps.step("guests of remote disks", "run it alone: cargo xtask demo-remote", || {
            remote_guests(workspace)
        })?;
    steps.add(report);
    steps.step("guests on a switch", "run it alone: cargo xtask demo-net", || {
        demo::run_net(workspace)
    })?;
    steps.step("dm-crypt of a guest", "run it alone: cargo xtask dm-crypt", || {
        demo::run_encrypted(workspace)
    })?;
    steps.step("a guest of libvirt's", "run it alone: cargo xtask libvirt", || {
        libvirt::run(workspace)
    })?;
    steps.step("a block device of a guest's kernel", "run it alone: cargo xtask ublk", || {
        demo::run_ublk(workspace, &demo::UblkOptions::default())
    })?;
    steps.step(
        "fuzzing, briefly",
        "reproduce with the command above, fix, add the input to the corpus",
        || fuzz::run_briefly(workspace, FUZZ_SECONDS),
    )?;
    steps.step(
        "tiny benches",
        "run one alone: cargo xtask bench local-block --tiny",
        bench::run_tiny,
    )?;
    steps.summarise();
    Ok(())
}

/// Runs the demo of remote disks, whose hosts are network namespaces.
fn remote_guests(workspace: &Workspace) -> Result<Report> {
    let mut report = Report::default();
    if tools::am_root()? {
        demo::run_remote(workspace, &demo::RemoteOptions { seconds: 1 })?;
    } else {
        report.skipped.push("cargo xtask demo-remote: network namespaces take root".to_owned());
    }
    Ok(report)
}

/// Runs the integration tests that bear a mark in release mode: their result depends on code that
/// the optimiser removes or reorders, or on allocations that only debug builds make.
fn test_in_release(workspace: &Workspace) -> Result<Report> {
    let mut command = shell::cargo();
    command.args(["test", "--release"]);
    let mut found = false;
    for package in &workspace.packages {
        for target in package.targets.iter().filter(|target| target.is_test()) {
            let source = std::fs::read_to_string(&target.source)
                .with_context(|| format!("cannot read {}", target.source.display()))?;
            if is_marked(&source) {
                command.args(["--package", &package.name, "--test", &target.name]);
                found = true;
            }
        }
    }
    if !found {
        println!("    no test bears a mark");
        return Ok(Report::default());
    }
    Report::of(&mut command)
}

fn is_marked(source: &str) -> bool {
    RELEASE_MARKS.iter().any(|mark| source.contains(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_marks_itself_for_release() {
        assert!(is_marked("use sidecore_counting_alloc::allocations;"));
        assert!(is_marked("#[cfg_attr(debug_assertions, ignore = \"release only\")]"));
        assert!(!is_marked("#[test]\nfn f() {}"));
    }
}
