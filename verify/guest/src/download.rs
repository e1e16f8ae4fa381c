//! Fetches the guest's kernel and busybox as Debian packages and unpacks them into the cache.
//! Nothing is installed: the host's own kernel and busybox do not change.

use crate::install;
use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's metapackage of the newest kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";

/// A kernel in the cache.
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    pub(crate) modules: PathBuf,
}

/// The guest's kernel, fetched unless it is in the cache.
pub(crate) fn kernel(cache: &Path, progress: &Progress) -> Result<Kernel> {
    let root = cache.join("kernel");
    if let Some(kernel) = find_kernel(&root) {
        return Ok(kernel);
    }
    progress.say("fetching the guest's kernel");
    unpack_into(&root, |unpack| {
        // The metapackage depends on the image; newer releases have the modules in packages of
        // their own.
        let mut wanted = VecDeque::from([KERNEL.to_owned()]);
        let mut seen = BTreeSet::new();
        while let Some(package) = wanted.pop_front() {
            if !seen.insert(package.clone()) {
                continue;
            }
            if package != KERNEL {
                unpack(&package)?;
            }
            wanted.extend(kernel_dependencies(&dependencies(&package)?));
        }
        Ok(())
    })?;
    find_kernel(&root)
        .with_context(|| format!("the packages of {KERNEL} brought no kernel with modules"))
}

/// A statically linked busybox, fetched unless it is in the cache.
pub(crate) fn busybox(cache: &Path, progress: &Progress) -> Result<PathBuf> {
    let root = cache.join("busybox");
    let find = || {
        ["usr/bin/busybox", "bin/busybox"]
            .iter()
            .map(|path| root.join(path))
            .find(|path| path.is_file())
    };
    if let Some(busybox) = find() {
        return Ok(busybox);
    }
    progress.say("fetching the guest's busybox");
    unpack_into(&root, |unpack| unpack("busybox-static"))?;
    find().context("the package busybox-static brought no busybox")
}

/// The newest kernel in a directory with unpacked packages. They have the image in `boot`, or
/// beside the modules, as Debian's packages of Linux 7 do.
pub(crate) fn find_kernel(root: &Path) -> Option<Kernel> {
    let kernel_of = |modules: PathBuf| {
        let version = modules.file_name()?.to_str()?.to_owned();
        let in_boot = root.join("boot").join(format!("vmlinuz-{version}"));
        let image = [in_boot, modules.join("vmlinuz")].into_iter().find(|path| path.is_file())?;
        Some(Kernel { image, modules, version })
    };
    let directories = ["lib/modules", "usr/lib/modules"].iter().map(|path| root.join(path));
    let entries = directories.filter_map(|path| fs::read_dir(path).ok()).flatten().flatten();
    entries.filter_map(|entry| kernel_of(entry.path())).max_by(|a, b| a.version.cmp(&b.version))
}

/// Lets `fill` unpack packages into a directory that gets its name only when it is complete.
fn unpack_into(
    root: &Path,
    fill: impl FnOnce(&dyn Fn(&str) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let parent = root.parent().context("the cache has no parent directory")?;
    let work = tempfile::Builder::new().prefix("unpacking-").tempdir_in(parent)?;
    let tree = work.path().join("tree");
    fs::create_dir(&tree)?;
    let unpack = |package: &str| -> Result<()> {
        let packages = tempfile::Builder::new().prefix("package-").tempdir_in(work.path())?;
        if !download(package, packages.path())? {
            install::update()?;
            ensure!(
                download(package, packages.path())?,
                "apt-get could not download {package}; its messages above say why"
            );
        }
        for entry in fs::read_dir(packages.path())? {
            let status = Command::new("dpkg-deb").arg("-x").arg(entry?.path()).arg(&tree).status();
            ensure!(
                status.context("cannot run dpkg-deb")?.success(),
                "dpkg-deb could not unpack {package}"
            );
        }
        Ok(())
    };
    fill(&unpack)?;
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    fs::rename(&tree, root).with_context(|| format!("cannot create {}", root.display()))
}

fn download(package: &str, into: &Path) -> Result<bool> {
    let mut command = Command::new("apt-get");
    command.args(install::PATIENT_APT).args(["download", "-qq", package]).current_dir(into);
    if rustix::process::geteuid().is_root() {
        // apt's own user may not write here; without this option apt warns.
        command.args(["-o", "APT::Sandbox::User=root"]);
    }
    Ok(command.status().context("cannot run apt-get; the demo needs Debian 12 or 13")?.success())
}

/// The output of apt about a package's dependencies.
fn dependencies(package: &str) -> Result<String> {
    let ask = || -> Result<Option<String>> {
        let output = Command::new("apt-cache")
            .args(["depends", package])
            .output()
            .context("cannot run apt-cache")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok((output.status.success() && text.contains("Depends:")).then_some(text))
    };
    if let Some(text) = ask()? {
        return Ok(text);
    }
    install::update()?;
    match ask()? {
        Some(text) => Ok(text),
        None => bail!("apt knows no package {package}; the demo needs Debian 12 or 13"),
    }
}

/// The packages with parts of a kernel, among the dependencies that apt lists.
fn kernel_dependencies(listing: &str) -> Vec<String> {
    listing
        .lines()
        .filter_map(|line| line.trim().trim_start_matches('|').strip_prefix("Depends:"))
        .map(|package| package.trim().to_owned())
        .filter(|package| {
            ["linux-image-", "linux-modules-", "linux-binary-"]
                .iter()
                .any(|p| package.starts_with(p))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_packages_are_told_from_other_dependencies() {
        let listing = "linux-image-6.1.0-9-cloud-amd64\n  Depends: kmod\n  Depends: linux-base\n \
                       |Depends: initramfs-tools\n  Depends: linux-modules-6.1.0-9-cloud-amd64\n  \
                       Recommends: linux-image-other\n  Breaks: linux-image-old\n";
        assert_eq!(kernel_dependencies(listing), ["linux-modules-6.1.0-9-cloud-amd64"]);
    }

    #[test]
    fn a_kernel_is_found_in_either_layout() {
        let root = tempfile::tempdir().unwrap();
        assert!(find_kernel(root.path()).is_none());
        fs::create_dir_all(root.path().join("boot")).unwrap();
        fs::write(root.path().join("boot/vmlinuz-6.12.1"), "").unwrap();
        assert!(find_kernel(root.path()).is_none(), "a kernel without its modules is of no use");
        fs::create_dir_all(root.path().join("lib/modules/6.12.1")).unwrap();
        let kernel = find_kernel(root.path()).unwrap();
        assert_eq!(kernel.version, "6.12.1");
        assert!(kernel.modules.ends_with("lib/modules/6.12.1"));
        fs::create_dir_all(root.path().join("usr/lib/modules/6.12.1")).unwrap();
        assert!(find_kernel(root.path()).unwrap().modules.ends_with("usr/lib/modules/6.12.1"));
        let modules = root.path().join("usr/lib/modules/7.3.4");
        fs::create_dir_all(&modules).unwrap();
        assert_eq!(find_kernel(root.path()).unwrap().version, "6.12.1");
        fs::write(modules.join("vmlinuz"), "").unwrap();
        let newer = find_kernel(root.path()).unwrap();
        assert_eq!((newer.version.as_str(), newer.image), ("7.3.4", modules.join("vmlinuz")));
    }
}
