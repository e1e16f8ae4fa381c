//! Checks `make install`: each file is where a packager expects it, and the installed programs run.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::Workspace;
use crate::{links, shell};

const PREFIX: &str = "/usr";
/// The directory of the files for guests.
const GUESTS: &str = "usr/lib/sidecore/guest";

/// Whether a program of 64 bits names a dynamic loader (ELF, program header PT_INTERP).
fn has_interpreter(elf: &[u8]) -> bool {
    const INTERPRETER: [u8; 4] = 3_u32.to_le_bytes();
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at + length).unwrap_or_default();
        bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    let (start, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|index| {
        let at = start + index * size;
        elf.get(at..at + 4) == Some(&INTERPRETER)
    })
}

/// Installs the release build into an empty directory, and runs the programs from there.
pub fn check(workspace: &Workspace) -> Result<()> {
    let root = workspace.target.join("installed");
    if root.exists() {
        std::fs::remove_dir_all(&root)?;
    }
    install(workspace, &root, &workspace.target.join("release"))?;
    for (directory, program) in
        [("usr/bin", "sidecored"), ("usr/bin", "sidecore"), (GUESTS, "sidecore-guest-tune")]
    {
        let path = root.join(directory).join(program);
        let printed = shell::read(Command::new(&path).arg("--version"))?;
        ensure!(printed.starts_with(program), "{program} --version printed {printed:?}");
        let needs_libraries = has_interpreter(&std::fs::read(&path)?);
        ensure!(
            directory != GUESTS || !needs_libraries,
            "{program} needs a dynamic loader, which a guest may lack: see `build` in Makefile"
        );
    }
    std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}

/// Runs `make install` as a packager does, and checks the files that it makes.
fn install(workspace: &Workspace, root: &Path, build: &Path) -> Result<()> {
    let variable = |name: &str, value: &Path| format!("{name}={}", value.display());
    let make = [
        "install".to_owned(),
        variable("DESTDIR", root),
        format!("PREFIX={PREFIX}"),
        variable("BUILD", build),
    ];
    shell::read(Command::new("make").arg("--silent").args(make).current_dir(&workspace.root))?;
    for (file, mode) in [
        ("usr/bin/sidecored", 0o755),
        ("usr/bin/sidecore", 0o755),
        ("usr/lib/systemd/system/sidecored.service", 0o644),
        ("usr/lib/sidecore/guest/sidecore-guest-tune", 0o755),
        ("usr/lib/sidecore/guest/sidecore-guest-tune.service", 0o644),
        ("usr/share/sidecore/sidecore-vrio.lua", 0o644),
        ("usr/share/doc/sidecore/README.md", 0o644),
        ("usr/share/doc/sidecore/docs/config.md", 0o644),
    ] {
        use std::os::unix::fs::PermissionsExt as _;
        let metadata = std::fs::metadata(root.join(file))
            .with_context(|| format!("`make install` made no {file}"))?;
        ensure!(
            metadata.permissions().mode() & 0o777 == mode,
            "{file} has mode {:o}",
            metadata.permissions().mode()
        );
    }
    links::check_tree(&root.join("usr/share/doc/sidecore"))
        .context("an installed page has a link to a file that is not installed")?;
    let unit = std::fs::read_to_string(root.join("usr/lib/systemd/system/sidecored.service"))?;
    let starts = "ExecStart=/usr/bin/sidecored --config /etc/sidecore/disks.toml";
    ensure!(unit.lines().any(|line| line == starts), "the unit does not have the line {starts}");
    let variable = unit.lines().find(|line| line.contains('@'));
    ensure!(variable.is_none(), "the unit has an unknown variable: {variable:?}");
    let stray: Vec<PathBuf> = std::fs::read_dir(root)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    ensure!(stray == [root.join("usr")], "`make install` writes outside of PREFIX: {stray:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_installation_is_complete_and_needs_the_programs() {
        let workspace = Workspace::load().unwrap();
        let (root, build) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        install(&workspace, root.path(), build.path()).unwrap_err();
        assert!(std::fs::read_dir(root.path()).unwrap().next().is_none(), "half an installation");
        for program in ["sidecored", "sidecore", "sidecore-guest-tune"] {
            use std::os::unix::fs::PermissionsExt as _;
            let path = build.path().join(program);
            std::fs::write(&path, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        install(&workspace, root.path(), build.path()).unwrap();
        let uninstall = [
            "uninstall".to_owned(),
            format!("DESTDIR={}", root.path().display()),
            format!("PREFIX={PREFIX}"),
        ];
        shell::read(
            Command::new("make").arg("--silent").args(uninstall).current_dir(&workspace.root),
        )
        .unwrap();
        assert!(crate::tidy::rust_files(root.path()).unwrap().is_empty());
        assert!(
            !root.path().join("usr/bin/sidecore").exists()
                && !root.path().join("usr/share/doc/sidecore").exists()
                && !root.path().join("usr/share/sidecore").exists()
                && !root.path().join(GUESTS).exists()
        );
    }

    #[test]
    fn a_program_with_a_loader_is_told_from_one_without() {
        let this = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(has_interpreter(&this));
        assert!(!has_interpreter(b"\x7fELF"));
    }
}
