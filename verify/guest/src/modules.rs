//! Chooses the kernel modules that the guest needs, and the order in which they load.
//!
//! A module has a section of `key=value` strings, which end with zero bytes, and one of them lists
//! the modules that it depends on. Debian's packages have no `modules.dep` (the kernel's
//! installation makes it), so this code reads the strings.

use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Needed modules, which a kernel may also have built in. A module that is missing and not built in
/// is an error.
const WANTED: [&str; 4] = ["virtio_pci", "virtio_blk", "nvme", "ext4"];
/// Newer kernels have some of these built in. ext4 and dm-crypt request algorithms by their names,
/// not as dependencies; cryptsetup opens a key slot by the kernel's ciphers.
const WANTED_IF_THERE: [&str; 7] =
    ["crc32c_generic", "crc32c", "xts", "ecb", "dm_crypt", "algif_skcipher", "virtio_net"];

/// A module to load: its file name (always `name.ko`) and its decompressed content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    pub(crate) file_name: String,
    pub(crate) content: Vec<u8>,
}

/// The modules in a kernel's directory for its disks and ext4, and `more` of them, each after its
/// dependencies.
pub(crate) fn collect(directory: &Path, more: &[&str]) -> Result<Vec<Module>> {
    let available = list(directory)?;
    let builtin =
        builtin(&fs::read_to_string(directory.join("modules.builtin")).unwrap_or_default());
    let mut loaded = BTreeMap::new();
    let wanted = WANTED.iter().chain(more).filter(|name| !builtin.contains(**name)).copied();
    let wanted: Vec<&str> = WANTED_IF_THERE
        .iter()
        .filter(|name| available.contains_key(**name))
        .copied()
        .chain(wanted)
        .collect();
    let order = order(&wanted, |name| {
        if builtin.contains(name) {
            return Ok(Vec::new());
        }
        let path =
            available.get(name).with_context(|| format!("the kernel has no module {name}"))?;
        let content = read(path)?;
        let dependencies = dependencies(&content);
        loaded.insert(name.to_owned(), content);
        Ok(dependencies)
    })?;
    Ok(order
        .into_iter()
        .filter_map(|name| {
            let content = loaded.remove(&name)?;
            Some(Module { file_name: format!("{name}.ko"), content })
        })
        .collect())
}

/// The content of a module without dependencies.
pub(crate) fn one(directory: &Path, name: &str) -> Result<Vec<u8>> {
    let available = list(directory)?;
    let path = available.get(name).with_context(|| format!("the kernel has no module {name}"))?;
    let content = read(path)?;
    let needed = dependencies(&content);
    ensure!(needed.is_empty(), "the module {name} needs {}", needed.join(", "));
    Ok(content)
}

/// The module's name in dependencies, which has underscores where file names may have dashes.
fn module_name(file_name: &str) -> Option<String> {
    let (stem, rest) = file_name.split_once(".ko")?;
    ["", ".xz", ".zst", ".gz"].contains(&rest).then(|| stem.replace('-', "_"))
}

fn list(directory: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![directory.join("kernel")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)
            .with_context(|| format!("cannot list {}", directory.display()))?
        {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            } else if let Some(name) = entry.file_name().to_str().and_then(module_name) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

fn builtin(listing: &str) -> BTreeSet<String> {
    listing.lines().filter_map(|line| module_name(line.rsplit('/').next()?)).collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path).with_context(|| format!("cannot read {}", path.display())),
    };
    let output = Command::new(tool).arg("-dc").arg(path).stderr(Stdio::inherit()).output();
    let output =
        output.with_context(|| format!("cannot run {tool} to unpack {}", path.display()))?;
    ensure!(output.status.success(), "{tool} could not unpack {}", path.display());
    Ok(output.stdout)
}

/// The modules that a module depends on, including those that it only wants loaded before itself.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"depends=";
    module
        .split(|byte| *byte == 0)
        .filter_map(|word| word.strip_prefix(KEY))
        .flat_map(|names| names.split(|byte| *byte == b','))
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).replace('-', "_"))
        .collect()
}

/// Sorts the wanted modules and their dependencies so that each comes after its dependencies.
fn order(
    wanted: &[&str],
    mut depends: impl FnMut(&str) -> Result<Vec<String>>,
) -> Result<Vec<String>> {
    let mut done = Vec::new();
    let mut started = BTreeSet::new();
    // A name is on the stack first to visit its dependencies, and a second time, after them, to be
    // added itself.
    let mut steps: Vec<(String, bool)> =
        wanted.iter().rev().map(|name| ((*name).to_owned(), false)).collect();
    while let Some((name, seen)) = steps.pop() {
        if seen {
            done.push(name);
        } else if started.insert(name.clone()) {
            let dependencies = depends(&name)?;
            steps.push((name, true));
            steps.extend(dependencies.into_iter().rev().map(|name| (name, false)));
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_the_modules_own_words() {
        assert_eq!(
            dependencies(b"\x7fELF..\0license=GPL\0depends=virtio,virtio-ring\0name=x\0"),
            ["virtio", "virtio_ring"]
        );
        assert!(dependencies(b"depends=\0license=GPL\0").is_empty());
        assert!(dependencies(b"no words").is_empty());
    }

    #[test]
    fn each_module_comes_after_its_dependencies_and_once() {
        let table = |name: &str| -> Result<Vec<String>> {
            let names: &[&str] = match name {
                "blk" => &["virtio", "ring"],
                "pci" => &["ring", "virtio", "modern"],
                "virtio" => &["ring"],
                "ring" | "modern" => &[],
                _ => anyhow::bail!("unknown {name}"),
            };
            Ok(names.iter().map(|name| (*name).to_owned()).collect())
        };
        assert_eq!(
            order(&["pci", "blk"], table).unwrap(),
            ["ring", "virtio", "modern", "pci", "blk"]
        );
        assert!(order(&["other"], table).is_err());
    }

    #[test]
    fn a_cycle_ends() {
        let order =
            order(&["a"], |name| Ok(vec![if name == "a" { "b" } else { "a" }.to_owned()])).unwrap();
        assert_eq!(order, ["b", "a"]);
    }

    #[test]
    fn file_names_become_module_names() {
        assert_eq!(module_name("crc32c-intel.ko.xz").unwrap(), "crc32c_intel");
        assert_eq!(module_name("ext4.ko").unwrap(), "ext4");
        assert_eq!(module_name("modules.order"), None);
        assert!(builtin("kernel/fs/ext4/ext4.ko\nkernel/lib/crc16.ko\n").contains("ext4"));
    }

    #[test]
    fn a_module_that_is_built_in_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        let kernel = root.path().join("kernel/drivers");
        fs::create_dir_all(&kernel).unwrap();
        fs::write(kernel.join("virtio-blk.ko"), b"depends=virtio,built\0").unwrap();
        fs::write(kernel.join("virtio.ko"), b"depends=\0").unwrap();
        fs::write(
            root.path().join("modules.builtin"),
            "kernel/ext4.ko\nkernel/virtio_pci.ko\nkernel/nvme.ko\nkernel/built.ko\n",
        )
        .unwrap();
        let modules = collect(root.path(), &[]).unwrap();
        let names: Vec<&str> = modules.iter().map(|module| module.file_name.as_str()).collect();
        assert_eq!(names, ["virtio.ko", "virtio_blk.ko"]);
    }
}
