//! Installs the programs that the demo needs and the machine lacks, by apt.

use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use std::path::PathBuf;
use std::process::Command;

/// The programs with their Debian packages.
const NEEDED: [(&str, &str); 11] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("fio", "fio"),
    ("nvme", "nvme-cli"),
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("grep", "grep"),
    // Links the hosts of the demo of remote disks.
    ("ip", "iproute2"),
    ("cryptsetup", "cryptsetup-bin"),
    // Debian 13 compresses its kernel modules.
    ("xz", "xz-utils"),
    ("ldd", "libc-bin"),
    ("objcopy", "binutils"),
];

/// Options that let apt wait out a mirror that does not answer for some minutes: each attempt has a
/// time limit of 30 seconds, and pauses between them grow to as much.
pub const PATIENT_APT: [&str; 2] = ["-o", "Acquire::Retries=6"];

/// Administrators' programs are often missing from a user's PATH.
const ALSO_SEARCHED: [&str; 6] =
    ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin"];

/// The path of a program, if it is installed.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(ALSO_SEARCHED.iter().map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// The path of a program; an error if it is not installed.
pub(crate) fn require(program: &str) -> Result<PathBuf> {
    find(program).with_context(|| format!("{program} is not installed"))
}

pub(crate) fn missing_packages(progress: &Progress) -> Result<()> {
    packages(&NEEDED, progress)
}

/// Installs the packages whose programs (or files, given by their paths) are missing.
pub(crate) fn packages(needed: &[(&str, &str)], progress: &Progress) -> Result<()> {
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| find(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    ensure!(
        find("apt-get").is_some(),
        "{} missing, and there is no apt-get to install them with; the demo needs Debian 12 or 13, \
         or these programs: {}",
        missing.join(", "),
        needed.iter().map(|(program, _)| *program).collect::<Vec<_>>().join(", ")
    );
    progress.say(format!("installing {}", missing.join(", ")));
    let install = |missing: &[&str]| {
        let mut arguments = vec!["install", "--yes", "--quiet", "--no-install-recommends"];
        arguments.extend(missing);
        apt_get(&arguments)
    };
    if !install(&missing)? {
        // A fresh machine has no package lists, and an old one has outdated ones.
        progress.say("refreshing the package lists");
        update()?;
        ensure!(
            install(&missing)?,
            "apt-get could not install {}; its messages above say why",
            missing.join(", ")
        );
    }
    for (program, package) in needed {
        ensure!(
            find(program).is_some(),
            "{package} is installed, but {program} is nowhere to be found"
        );
    }
    Ok(())
}

pub(crate) fn update() -> Result<()> {
    ensure!(apt_get(&["update", "--quiet"])?, "apt-get update failed; its messages above say why");
    Ok(())
}

/// Runs apt-get as root; true if it succeeded.
fn apt_get(arguments: &[&str]) -> Result<bool> {
    // Variables are set by env(1), because sudo drops the environment.
    let prefix: &[&str] = if rustix::process::geteuid().is_root() {
        &["env"]
    } else if find("sudo").is_some() {
        &["sudo", "env"]
    } else {
        bail!(
            "packages can be installed by root only, and there is no sudo; run: apt-get {}",
            arguments.join(" ")
        );
    };
    let status = Command::new(prefix[0])
        .args(&prefix[1..])
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "Dpkg::Use-Pty=0"])
        .args(PATIENT_APT)
        .args(arguments)
        .status()
        .context("cannot run apt-get")?;
    Ok(status.success())
}
