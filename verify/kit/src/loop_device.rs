//! Loop devices over the files of a test.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device. The kernel removes it after drop, once no program uses it.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Makes a device over a file, with further options of losetup(8). `None`, and the running test
    /// is reported as skipped, where the machine has none.
    ///
    /// # Panics
    /// The program losetup is not installed, or the path is not UTF-8.
    #[must_use]
    pub fn over(file: &Path, options: &[&str]) -> Option<Self> {
        let file = file.to_str().expect("a path in UTF-8");
        let arguments = [&["--find", "--show"], options, &[file]].concat();
        Some(Self(sidecore_skip::run("losetup", &arguments)?.into()))
    }

    /// The device's node.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
