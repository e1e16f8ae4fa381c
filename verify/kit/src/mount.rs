//! Filesystems that tests mount.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// A mounted filesystem, in a directory of its own. Unmounted when dropped.
#[derive(Debug)]
pub struct Mount(TempDir);

impl Mount {
    /// Mounts a filesystem with these arguments of mount(8), which are all but the directory.
    /// `None`, and the running test is reported as skipped, where the machine permits no mounts.
    ///
    /// # Panics
    /// The program mount is not installed, or there is no directory for temporary files.
    #[must_use]
    pub fn new(arguments: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path().to_str().expect("a path in UTF-8");
        sidecore_skip::run("mount", &[arguments, &[at]].concat())?;
        Some(Self(directory))
    }

    /// Mounts a filesystem in memory with this size.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn tmpfs(len_bytes: u64) -> Option<Self> {
        Self::new(&["-t", "tmpfs", "-o", &format!("size={len_bytes}"), "sidecore-test"])
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl AsRef<Path> for Mount {
    fn as_ref(&self) -> &Path {
        self.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A ring's files are closed some time after the ring, hence lazily.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
