//! The programs that the tests need beside Rust. On Debian and its kin, missing ones are installed.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::shell;

/// A program, where it comes from and what it is for.
#[derive(Clone, Copy)]
pub struct Tool {
    program: &'static str,
    /// Debian's package.
    package: &'static str,
    purpose: &'static str,
}

/// Compiles libFuzzer's runtime.
pub const CPP_COMPILER: Tool = Tool { program: "c++", package: "g++", purpose: "building the fuzz targets" };

/// What tests start: filesystems, images, and a storage daemon (Debian has it in a package of QEMU's).
pub const OF_TESTS: &[Tool] = &[
    Tool { program: "mkfs.ext4", package: "e2fsprogs", purpose: "tests of host files" },
    Tool { program: "mkfs.xfs", package: "xfsprogs", purpose: "tests of host files" },
    Tool { program: "mkfs.btrfs", package: "btrfs-progs", purpose: "tests of host files" },
    Tool { program: "qemu-img", package: "qemu-utils", purpose: "tests of import and export" },
    Tool { program: "qemu-storage-daemon", package: "qemu-system-common", purpose: "tests of the driver" },
];

/// Installs what is missing, and says so.
pub fn ensure(tools: &[Tool]) -> Result<()> {
    let missing: Vec<Tool> = tools.iter().copied().filter(|tool| !is_installed(tool.program)).collect();
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

/// The version whose checks deny.toml is written for.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// Builds cargo-deny if it is missing, without optimisation: it runs for a second.
pub fn ensure_cargo_deny() -> Result<()> {
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    if is_installed("cargo-deny") || home.is_some_and(|home| home.join("bin/cargo-deny").is_file()) {
        return Ok(());
    }
    println!("    cargo-deny is missing, for checking the dependencies");
    shell::run(shell::cargo().args(["install", "--locked", "--debug", CARGO_DENY]))
}

/// apt-get as root, without questions.
fn apt() -> Result<Command> {
    let am_root = shell::read(Command::new("id").arg("-u"))?.trim() == "0";
    let mut command = if am_root { Command::new("env") } else { Command::new("sudo") };
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet"]);
    Ok(command)
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A user's path often lacks the system's own tools.
    let system = ["/usr/sbin", "/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(system).any(|directory| Path::new(&directory).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_installed_is_found_and_what_is_not_is_not() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program-here"));
    }

    #[test]
    fn nothing_missing_means_nothing_to_do() {
        let shell = Tool { program: "sh", package: "dash", purpose: "everything" };
        ensure(&[shell]).unwrap();
    }
}
