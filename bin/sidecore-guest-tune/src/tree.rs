//! Small files of the kernel and of `/etc`, below a root that tests replace.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Longer files are none of the kernel's settings.
const LONGEST: u64 = 1 << 16;

/// A tree of files: the guest's own, or a test's.
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Tree {
        Tree { root: root.into() }
    }

    /// The path on this machine of a path in the tree.
    fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a file without the space around it; `None` if it does not exist, or cannot be
    /// read.
    pub(crate) fn read(&self, path: &str) -> Option<String> {
        self.content(path).map(|text| text.trim().to_owned())
    }

    /// The text of a file.
    pub(crate) fn content(&self, path: &str) -> Option<String> {
        let mut text = String::new();
        File::open(self.place(path)).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
        Some(text)
    }

    /// The number in a file.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.place(path).exists()
    }

    /// The names in a directory, sorted; none if it does not exist.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.place(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The last name in the path that a link leads to.
    pub(crate) fn target(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.place(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// Sets a file of the kernel, which exists.
    pub(crate) fn set(&self, path: &str, value: &str) -> Result<()> {
        fs::write(self.place(path), value)
            .with_context(|| format!("cannot write {value} into {path}"))
    }

    /// Replaces a file of the system at once, and makes its directory.
    pub(crate) fn replace(&self, path: &str, content: &str) -> Result<()> {
        let place = self.place(path);
        let act = || -> std::io::Result<()> {
            fs::create_dir_all(place.parent().unwrap_or(Path::new("/")))?;
            let new = place.with_extension("new");
            fs::write(&new, content)?;
            File::open(&new)?.sync_all()?;
            fs::rename(&new, &place)
        };
        act().with_context(|| format!("cannot write {path}"))
    }

    pub(crate) fn remove(&self, path: &str) -> Result<()> {
        fs::remove_file(self.place(path)).with_context(|| format!("cannot remove {path}"))
    }
}
