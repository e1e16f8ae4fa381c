//! The programs that the tests need beside Rust. On Debian and its kin, the missing ones are
//! installed.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::shell;

/// A program, its package and its purpose.
#[derive(Clone, Copy)]
pub struct Tool {
    program: &'static str,
    /// The package of Debian.
    package: &'static str,
    purpose: &'static str,
}

impl Tool {
    /// A program, or the path of a file, with its package of Debian.
    pub const fn new(program: &'static str, package: &'static str, purpose: &'static str) -> Self {
        Self { program, package, purpose }
    }
}

/// Compiles libFuzzer's runtime.
pub const CPP_COMPILER: Tool =
    Tool { program: "c++", package: "g++", purpose: "building the fuzz targets" };

/// The programs that tests start: filesystem makers, image tools, and a storage daemon, which
/// Debian packages with QEMU.
pub const OF_TESTS: &[Tool] = &[
    Tool { program: "mkfs.ext4", package: "e2fsprogs", purpose: "tests of host files" },
    Tool { program: "mkfs.xfs", package: "xfsprogs", purpose: "tests of host files" },
    Tool { program: "mkfs.btrfs", package: "btrfs-progs", purpose: "tests of host files" },
    Tool { program: "ip", package: "iproute2", purpose: "tests of links" },
    Tool { program: "unshare", package: "util-linux", purpose: "tests of links" },
    Tool { program: "etcd", package: "etcd-server", purpose: "tests of failover" },
    Tool { program: "etcdctl", package: "etcd-client", purpose: "tests of failover" },
    Tool { program: "openssl", package: "openssl", purpose: "tests of failover" },
    Tool { program: "tshark", package: "tshark", purpose: "tests of Wireshark's dissector" },
    Tool { program: "cryptsetup", package: "cryptsetup-bin", purpose: "tests of encrypted disks" },
    Tool { program: "qemu-img", package: "qemu-utils", purpose: "tests of import and export" },
    Tool {
        program: "qemu-storage-daemon",
        package: "qemu-system-common",
        purpose: "tests of the driver",
    },
];

/// The programs that experiments need for their peers, beside those that they fetch on their own,
/// with the name of the experiment.
pub const OF_BENCHES: &[(&str, Tool)] = &[
    ("remote-block", Tool::new("nbdkit", "nbdkit", "a peer of remote-block")),
    ("stages", Tool::new("cryptsetup", "cryptsetup-bin", "the header of a peer of stages")),
];

/// Installs the missing tools, and prints their names.
pub fn ensure(tools: &[Tool]) -> Result<()> {
    let missing: Vec<Tool> =
        tools.iter().copied().filter(|tool| !is_installed(tool.program)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for tool in &missing {
        println!("    {} is missing, for {}: package {}", tool.program, tool.purpose, tool.package);
    }
    let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    if !is_installed("apt-get") {
        bail!("there is no apt-get to install them with: install {} yourself", packages.join(", "));
    }
    shell::run(apt()?.arg("update"))?;
    shell::run(apt()?.args(["install", "--yes", "--no-install-recommends"]).args(&packages))
}

/// The version that deny.toml is written for.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// Builds cargo-deny if it is missing. Without optimisation, because it runs for a second.
pub fn ensure_cargo_deny() -> Result<()> {
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    if is_installed("cargo-deny") || home.is_some_and(|home| home.join("bin/cargo-deny").is_file())
    {
        return Ok(());
    }
    println!("    cargo-deny is missing, for checking the dependencies");
    shell::run(shell::cargo().args(["install", "--locked", "--debug", CARGO_DENY]))
}

/// Whether this process runs as root.
pub fn am_root() -> Result<bool> {
    Ok(shell::read(Command::new("id").arg("-u"))?.trim() == "0")
}

/// An `apt-get` command that runs as root and asks no questions.
fn apt() -> Result<Command> {
    let mut command = if am_root()? { Command::new("env") } else { Command::new("sudo") };
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet"]);
    command.args(sidecore_guest::PATIENT_APT);
    Ok(command)
}

/// Whether a program is in the path, or a file is there.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A user's path often lacks the system's own tools.
    let system = ["/usr/sbin", "/sbin"].map(Into::into);
    std::env::split_paths(&path)
        .chain(system)
        .any(|directory| Path::new(&directory).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installed_program_is_found_and_a_missing_one_is_not() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program-here"));
    }

    #[test]
    fn a_complete_set_of_tools_needs_no_installation() {
        let shell = Tool { program: "sh", package: "dash", purpose: "everything" };
        ensure(&[shell]).unwrap();
    }
}
