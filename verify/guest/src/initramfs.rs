//! Builds the guest's only filesystem: busybox, fio and a few more programs with their libraries,
//! the kernel's modules, and the scripts. The image is cached under a hash of all its inputs.

use crate::cpio::Archive;
use crate::download::Kernel;
use crate::modules::{self, Module};
use crate::progress::Progress;
use crate::{install, text};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The scripts, by their paths in the guest.
const SCRIPTS: [(&str, &str); 12] = [
    ("/init", include_str!("../guest/init.sh")),
    ("/parts/candidate.sh", include_str!("../guest/candidate.sh")),
    ("/parts/client.sh", include_str!("../guest/client.sh")),
    ("/parts/disk.sh", include_str!("../guest/disk.sh")),
    ("/parts/lease.sh", include_str!("../guest/lease.sh")),
    ("/parts/measure.sh", include_str!("../guest/measure.sh")),
    ("/parts/net.sh", include_str!("../guest/net.sh")),
    ("/parts/nvme.sh", include_str!("../guest/nvme.sh")),
    ("/parts/orders.sh", include_str!("../guest/orders.sh")),
    ("/parts/reservation.sh", include_str!("../guest/reservation.sh")),
    ("/parts/ublk.sh", include_str!("../guest/ublk.sh")),
    ("/parts/writer.sh", include_str!("../guest/writer.sh")),
];
/// The host's programs in the image, by their paths in the guest. The guest needs an option of GNU
/// grep that busybox's grep lacks, so it has both.
const PROGRAMS: [(&str, &str); 6] = [
    ("/bin/fio", "fio"),
    ("/sbin/mkfs.ext4", "mkfs.ext4"),
    ("/sbin/e2fsck", "e2fsck"),
    ("/sbin/nvme", "nvme"),
    ("/bin/grep-gnu", "grep"),
    ("/sbin/cryptsetup", "cryptsetup"),
];
/// Increased when this code makes another image from the same inputs.
const LAYOUT: u32 = 5;

/// The parts of an image that other guests do not have.
#[derive(Default)]
pub(crate) struct Extra<'a> {
    /// Programs, by their paths in the guest.
    pub(crate) programs: Vec<(&'a str, PathBuf)>,
    /// A program that needs no libraries, and its path in the guest.
    pub(crate) static_program: Option<(&'a str, PathBuf)>,
    /// Modules that are loaded at the start, after those that they depend on.
    pub(crate) modules: &'a [&'a str],
    /// A module that the guest's script loads itself.
    pub(crate) module: Option<&'a str>,
}

pub(crate) fn build(
    cache: &Path,
    kernel: &Kernel,
    busybox: &Path,
    extra: &Extra<'_>,
    progress: &Progress,
) -> Result<PathBuf> {
    let mut programs: Vec<(&str, PathBuf)> = PROGRAMS
        .iter()
        .map(|(inside, name)| Ok((*inside, install::require(name)?)))
        .collect::<Result<_>>()?;
    programs.extend(extra.programs.iter().cloned());
    let mut libraries = BTreeSet::new();
    for (_, program) in &programs {
        libraries.extend(shared_libraries(program)?);
    }
    // The C library loads libgcc when a thread of cryptsetup ends, which no listing shows. This
    // program needs it, too.
    libraries.extend(shared_libraries(&std::env::current_exe()?)?);

    // The hash has a file's name, size and time. To read all of the contents would take longer than
    // the cache saves.
    let mut hasher = DefaultHasher::new();
    (LAYOUT, SCRIPTS, &kernel.version, extra.modules, extra.module).hash(&mut hasher);
    let files =
        libraries.iter().chain(programs.iter().map(|(_, program)| program)).map(PathBuf::as_path);
    let static_program = extra.static_program.as_ref().map(|(_, program)| program.as_path());
    let files = files.chain([busybox, kernel.image.as_path()]).chain(static_program);
    for file in files {
        let metadata =
            fs::metadata(file).with_context(|| format!("cannot look at {}", file.display()))?;
        (file, metadata.size(), metadata.mtime(), metadata.mtime_nsec()).hash(&mut hasher);
    }
    let path = cache.join(format!("initramfs-{:016x}.cpio", hasher.finish()));
    if path.is_file() {
        return Ok(path);
    }

    progress.say("building the guest's image");
    forget_older(cache)?;
    let modules = modules::collect(&kernel.modules, extra.modules)?;
    let mut output = tempfile::Builder::new().prefix("initramfs-").tempfile_in(cache)?;
    let mut archive = Archive::new(BufWriter::new(output.as_file_mut()));
    for (inside, script) in SCRIPTS {
        archive.file(inside, 0o755, script.as_bytes())?;
    }
    add(&mut archive, "/bin/busybox", busybox)?;
    for (inside, program) in programs.iter().chain(&extra.static_program) {
        add(&mut archive, inside, program)?;
    }
    for library in &libraries {
        add(&mut archive, text(library)?, library)?;
    }
    // Without this file, mkfs prints a warning on every run.
    archive.file("/etc/mtab", 0o644, b"")?;
    archive.file("/modules/order", 0o644, order(&modules).as_bytes())?;
    for module in &modules {
        archive.file(&format!("/modules/{}", module.file_name), 0o644, &module.content)?;
    }
    if let Some(name) = extra.module {
        let content = modules::one(&kernel.modules, name)?;
        archive.file(&format!("/modules/{name}.ko"), 0o644, &content)?;
    }
    archive.finish()?.flush()?;
    output.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn order(modules: &[Module]) -> String {
    modules.iter().map(|module| format!("{}\n", module.file_name)).collect()
}

fn add<W: Write>(archive: &mut Archive<W>, inside: &str, file: &Path) -> Result<()> {
    let content = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(archive.file(inside, 0o755, &content)?)
}

/// Removes older images.
fn forget_older(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(|name| name.starts_with("initramfs-")) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    ensure!(output.status.success(), "ldd could not list the libraries of {}", program.display());
    let listing = String::from_utf8_lossy(&output.stdout);
    ensure!(!listing.contains("not found"), "{} lacks libraries:\n{listing}", program.display());
    Ok(parse_ldd(&listing))
}

/// The libraries that ldd lists, by the paths that it prints: the loader expects a library under
/// the same path in the guest.
fn parse_ldd(listing: &str) -> Vec<PathBuf> {
    listing
        .lines()
        .filter_map(|line| {
            let place = line.split_once("=>").map_or(line, |(_, place)| place);
            let path = place.split_whitespace().next()?;
            path.starts_with('/').then(|| PathBuf::from(path))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_found_in_the_listing() {
        let listing = "\tlinux-vdso.so.1 (0x00007f64)\n\tlibc.so.6 => \
                       /lib/x86_64-linux-gnu/libc.so.6 (0x00007f64)\n\
                       \t/lib64/ld-linux-x86-64.so.2 (0x00007f64)\n";
        let expected =
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(parse_ldd(listing), expected);
        assert!(parse_ldd("\tstatically linked\n").is_empty());
    }
}
