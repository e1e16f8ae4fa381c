//! `make test`: everything that must pass before a commit and in CI, the quick checks first.
//!
//! Steps that use one core or wait run beside steps that compute, each as a process of its own
//! ([`Step`]). The benches, and the tests of the release build, have the machine to themselves.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::steps::{Part, Steps};
use crate::test_report::Report;
use crate::workspace::Workspace;
use crate::{bench, demo, foreign, fuzz, install, libvirt, lint, programs, shell, tools};

/// The time for each fuzz target, which has at least half a core in it.
const FUZZ_SECONDS: u32 = 10;

/// The pauses between attempts to fetch.
const FETCH_PAUSES: [Duration; 3] =
    [Duration::from_secs(30), Duration::from_secs(60), Duration::from_secs(120)];

/// The niceness of builds and of fuzzing, which run beside tests and guests.
const YIELDING: &str = "10";

/// Text in a test's source which says that the test must run in release mode, too or only there.
const RELEASE_MARKS: &[&str] = &["sidecore_counting_alloc", "release only"];

/// A step that runs beside others.
#[derive(Clone, Copy, ValueEnum)]
pub enum Step {
    Fetch,
    Clippy,
    Documentation,
    Tests,
    Shipped,
    Bench,
    ReleaseTests,
    Guests,
    RemoteGuests,
    Switch,
    DmCrypt,
    Libvirt,
    Ublk,
    Fuzz,
    Foreign,
}

impl Step {
    /// The step's name, and the remedy if it fails.
    fn described(self) -> (&'static str, &'static str) {
        match self {
            Self::Fetch => (
                "what guests need",
                "see that apt reaches its mirror, then run it alone: cargo xtask step fetch",
            ),
            Self::Clippy => lint::CLIPPY,
            Self::Documentation => lint::DOCUMENTATION,
            Self::Tests => {
                ("tests", "run the failing test alone: cargo test --package PACKAGE NAME")
            }
            Self::Shipped => ("build what ships", "fix what the compiler names"),
            Self::Bench => ("build the bench", "fix what the compiler names"),
            Self::ReleaseTests => ("build tests in release", "fix what the compiler names"),
            Self::Guests => ("guests", "run it alone: cargo xtask demo"),
            Self::RemoteGuests => {
                ("guests of remote disks", "run it alone: cargo xtask demo-remote")
            }
            Self::Switch => ("guests on a switch", "run it alone: cargo xtask demo-net"),
            Self::DmCrypt => ("dm-crypt of a guest", "run it alone: cargo xtask dm-crypt"),
            Self::Libvirt => ("a guest of libvirt's", "run it alone: cargo xtask libvirt"),
            Self::Ublk => ("a block device of a guest's kernel", "run it alone: cargo xtask ublk"),
            Self::Fuzz => (
                "fuzzing, briefly",
                "reproduce with the command above, fix, add the input to the corpus",
            ),
            Self::Foreign => ("machines of other kinds", "run it alone: cargo xtask foreign"),
        }
    }

    /// Whether the step gives way to those beside it.
    fn yields(self) -> bool {
        matches!(
            self,
            Self::Shipped | Self::Bench | Self::ReleaseTests | Self::Fuzz | Self::Foreign
        )
    }

    /// Runs the step in this process.
    pub fn run(self, workspace: &Workspace) -> Result<()> {
        match self {
            Self::Fetch => fetch(workspace),
            Self::Clippy => lint::clippy(workspace),
            Self::Documentation => lint::documentation(),
            Self::Tests => programs::run_together(workspace).map(drop),
            Self::Shipped => bench::build_what_ships(),
            Self::Bench => bench::build(),
            Self::ReleaseTests => release_tests(workspace)?
                .iter_mut()
                .try_for_each(|command| shell::run(command.arg("--no-run"))),
            Self::Guests => {
                demo::run(workspace, &demo::Options { seconds: 1, update_readme: false })
            }
            Self::RemoteGuests => remote_guests(workspace),
            Self::Switch => demo::run_net(workspace),
            Self::DmCrypt => demo::run_encrypted(workspace),
            Self::Libvirt => libvirt::run(workspace),
            Self::Ublk => demo::run_ublk(workspace, &demo::UblkOptions::default()),
            Self::Fuzz => fuzz::run_briefly(workspace, FUZZ_SECONDS),
            Self::Foreign => foreign::run(workspace).map(drop),
        }
    }

    /// The step as a process of this program.
    fn part(self) -> Result<Part> {
        let (name, advice) = self.described();
        let this = std::env::current_exe().context("the path of this program is unknown")?;
        let mut command = if self.yields() {
            let mut command = Command::new("nice");
            command.args(["-n", YIELDING]).arg(this);
            command
        } else {
            Command::new(this)
        };
        let value = self.to_possible_value().context("each step has a name")?;
        command.args(["step", value.get_name()]);
        Ok(Part { name, advice: advice.to_owned(), command })
    }
}

pub fn run(workspace: &Workspace) -> Result<()> {
    let mut steps = Steps::new();
    lint::quick(workspace, &mut steps)?;
    steps.step("tools of the tests", "install the packages that are named", || {
        tools::ensure(tools::OF_TESTS)?;
        tools::ensure(&[tools::CPP_COMPILER])
    })?;
    beside(
        &mut steps,
        &[
            &[Step::Clippy, Step::Documentation, Step::Tests],
            &[Step::Shipped, Step::Bench, Step::ReleaseTests],
            // Hardly computes. Beside the builds there is time to wait for a mirror that is away.
            &[Step::Fetch],
        ],
    )?;
    steps.step("installation", "see `install` in Makefile", || install::check(workspace))?;
    let report = steps.step("tests that run alone", Step::Tests.described().1, || {
        programs::run_alone(workspace)
    })?;
    steps.add(report);
    let alone = "run the failing test alone: cargo test --release --package PACKAGE NAME";
    let report = steps.step("tests in release", alone, || {
        let mut report = Report::default();
        for mut command in release_tests(workspace)? {
            report.add(Report::of(&mut command)?);
        }
        Ok(report)
    })?;
    steps.add(report);
    beside(
        &mut steps,
        &[
            &[
                Step::Guests,
                Step::RemoteGuests,
                Step::Switch,
                Step::DmCrypt,
                Step::Libvirt,
                Step::Ublk,
                Step::Foreign,
            ],
            &[Step::Fuzz],
        ],
    )?;
    steps.step("tiny benches", "run one alone: cargo xtask bench local-block --tiny", || {
        bench::run_tiny(workspace)
    })?;
    steps.summarise();
    Ok(())
}

fn beside(steps: &mut Steps, lanes: &[&[Step]]) -> Result<()> {
    let lane = |lane: &&[Step]| lane.iter().map(|step| step.part()).collect();
    steps.beside(lanes.iter().map(lane).collect::<Result<_>>()?)
}

/// Fetches what guests and machines of other kinds need. A mirror that is away for a while must not
/// fail the tests.
fn fetch(workspace: &Workspace) -> Result<()> {
    let mut pauses = FETCH_PAUSES.iter();
    loop {
        match (demo::fetch(workspace).and_then(|()| foreign::fetch()), pauses.next()) {
            (Err(error), Some(pause)) => {
                println!("    {error:#}; trying again in {} s", pause.as_secs());
                std::thread::sleep(*pause);
            }
            (outcome, _) => return outcome,
        }
    }
}

/// Runs the demo of remote disks, whose hosts are network namespaces.
fn remote_guests(workspace: &Workspace) -> Result<()> {
    if tools::am_root()? {
        demo::run_remote(workspace, &demo::RemoteOptions { seconds: 1, only_client: false })
    } else {
        Report::default().skip("network namespaces take root".to_owned());
        Ok(())
    }
}

/// The commands that test in release mode what bears a mark: the result of those tests depends on
/// code that the optimiser removes or reorders, or on allocations that only debug builds make.
///
/// They name the packages that ship, so that they share what these have built. A package whose
/// tests turn on features would have all others built with these features, too, and so has a
/// command of its own.
fn release_tests(workspace: &Workspace) -> Result<Vec<Command>> {
    let (mut shared, mut commands) = (Vec::new(), Vec::new());
    for package in &workspace.packages {
        let mut tests = Vec::new();
        for target in package.targets.iter().filter(|target| target.is_test()) {
            let source = std::fs::read_to_string(&target.source)
                .with_context(|| format!("cannot read {}", target.source.display()))?;
            if is_marked(&source) {
                tests.extend(["--package", &package.name, "--test", &target.name]);
            }
        }
        if package.has_features_for_tests() && !tests.is_empty() {
            commands.push(release_test(&tests));
        } else {
            shared.extend(tests);
        }
    }
    ensure!(!shared.is_empty(), "no test bears a mark: {}", RELEASE_MARKS.join(", "));
    commands.insert(0, release_test(&shared));
    Ok(commands)
}

fn release_test(tests: &[&str]) -> Command {
    let mut command = shell::cargo();
    command.args(["test", "--release"]).args(bench::SHIPPED).args(tests);
    command
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

    #[test]
    fn each_step_is_a_command_of_its_own_name() {
        let mut names = std::collections::BTreeSet::new();
        for step in Step::value_variants() {
            let part = step.part().unwrap();
            let line = shell::describe(&part.command);
            assert!(line.contains(" step "), "{line}");
            assert!(names.insert(part.name.to_owned()) && names.insert(line), "{}", part.name);
        }
    }
}
