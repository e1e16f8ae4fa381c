//! Machines of other kinds, in QEMU's user mode: the remote channel connects them with this one
//! (vRIO, section 5, "Heterogeneity").
//!
//! On each of them a client uses a disk of an IOhost that runs here. On s390x, whose byte order is
//! the other one, the tests of the wire format, of the engines and of the peers' trust run, too.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::shell;
use crate::test_report::Report;
use crate::tools::{self, Tool};
use crate::workspace::Workspace;

/// A kind of machine, and the programs for it.
struct Machine {
    /// Rust's name for it.
    target: &'static str,
    /// The variables of cargo and of the crate `cc` that name its linker and its compiler.
    variables: [&'static str; 2],
    linker: &'static str,
    /// The variable of cargo with the command that runs its programs.
    runner: &'static str,
    emulator: &'static str,
    /// The directory of its C library.
    library: &'static str,
    tools: &'static [Tool],
    tests: &'static [(&'static str, &'static [&'static str])],
}

const MACHINES: &[Machine] = &[
    Machine {
        target: "s390x-unknown-linux-gnu",
        variables: ["CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_LINKER", "CC_s390x_unknown_linux_gnu"],
        linker: "s390x-linux-gnu-gcc",
        runner: "CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_RUNNER",
        emulator: "qemu-s390x",
        library: "/usr/s390x-linux-gnu",
        tools: &[
            Tool::new("qemu-s390x", "qemu-user", "running programs of s390x"),
            Tool::new("s390x-linux-gnu-gcc", "gcc-s390x-linux-gnu", "linking them"),
            Tool::new(
                "/usr/s390x-linux-gnu/lib/crt1.o",
                "libc6-dev-s390x-cross",
                "linking them with a C library",
            ),
        ],
        tests: TESTS,
    },
    Machine {
        target: "aarch64-unknown-linux-gnu",
        variables: [
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
            "CC_aarch64_unknown_linux_gnu",
        ],
        linker: "aarch64-linux-gnu-gcc",
        runner: "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
        emulator: "qemu-aarch64",
        library: "/usr/aarch64-linux-gnu",
        tools: &[
            Tool::new("qemu-aarch64", "qemu-user", "running programs of aarch64"),
            Tool::new("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu", "linking them"),
            Tool::new(
                "/usr/aarch64-linux-gnu/lib/crt1.o",
                "libc6-dev-arm64-cross",
                "linking them with a C library",
            ),
        ],
        // Its byte order is that of the tests on this machine.
        tests: &[],
    },
];

/// The tests whose code sees bytes of the wire. Others of these packages count allocations, or
/// start programs of this machine.
const TESTS: &[(&str, &[&str])] = &[
    (
        "sidecore-vrio",
        &[
            "--lib",
            "--test",
            "bundles",
            "--test",
            "conversations",
            "--test",
            "hostile",
            "--test",
            "members",
            "--test",
            "packets",
            "--test",
            "sessions",
        ],
    ),
    ("sidecore-trust", &["--lib", "--test", "handshake", "--test", "sessions"]),
];

/// Fetches and installs what [`run`] needs, as far as it can be had.
pub fn fetch() -> Result<()> {
    MACHINES.iter().try_for_each(|machine| match machine.lacks_library()? {
        None => tools::ensure(machine.tools),
        Some(_) => Ok(()),
    })
}

/// Runs the tests of each machine, or reports why it cannot.
pub fn run(workspace: &Workspace) -> Result<Report> {
    let mut report = Report::default();
    for machine in MACHINES {
        if let Some(reason) = machine.lacks_library()? {
            report.skip(reason);
            continue;
        }
        tools::ensure(machine.tools)?;
        let target = workspace.target.join("foreign");
        for (package, tests) in machine.tests {
            let mut command = machine.cargo("test", &target);
            report.add(Report::of(command.args(["--package", package]).args(*tests))?);
        }
        report.add(machine.serve(&target)?);
    }
    Ok(report)
}

impl Machine {
    /// The reason why there is no standard library of the target, after an attempt to install it.
    fn lacks_library(&self) -> Result<Option<String>> {
        let sysroot = shell::read(Command::new("rustc").args(["--print", "sysroot"]))?;
        let libraries = Path::new(sysroot.trim()).join("lib/rustlib");
        if libraries.join(self.target).join("lib").is_dir() {
            return Ok(None);
        }
        if !tools::is_installed("rustup") {
            let reason = format!("without rustup, there is no Rust library of {}", self.target);
            return Ok(Some(reason));
        }
        let added = shell::run(Command::new("rustup").args(["target", "add", self.target]));
        Ok(added.err().map(|error| format!("{error:#}")))
    }

    /// A command of cargo for this machine. Its programs are optimised, because emulation is slow,
    /// and tests with random cases have fewer for the same reason.
    fn cargo(&self, subcommand: &str, target: &Path) -> Command {
        let mut command = shell::cargo();
        command.args([subcommand, "--target", self.target, "--target-dir"]).arg(target);
        command.envs(self.variables.map(|variable| (variable, self.linker)));
        command.env(self.runner, self.run_by());
        command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1").env("CARGO_PROFILE_DEV_DEBUG", "0");
        command.env("PROPTEST_CASES", "32");
        command
    }

    /// The words in front of a program.
    fn run_by(&self) -> String {
        format!("{} -L {}", self.emulator, self.library)
    }

    /// Runs a client of this kind against an IOhost of this machine.
    fn serve(&self, target: &Path) -> Result<Report> {
        let mut build = self.cargo("build", target);
        shell::run(build.args(["--package", "sidecore-trust", "--example", "remote_client"]))?;
        let built: PathBuf = [self.target, "debug", "examples", "remote_client"].iter().collect();
        let mut test = shell::cargo();
        // Of the whole workspace, so that what was built for its tests is used.
        test.args(["test", "--workspace", "--test", "foreign", "--", "--ignored"]);
        test.env("SIDECORE_FOREIGN_EMULATOR", self.run_by());
        Report::of(test.env("SIDECORE_FOREIGN_CLIENT", target.join(built)))
    }
}
