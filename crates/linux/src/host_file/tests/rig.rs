//! Real filesystems for tests: in memory, on loop devices, mounted in a private namespace, and
//! removed when dropped or when the test is killed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use sidecore_kit::mount::Mount;
use sidecore_skip::{run, skip};

/// The way to make a filesystem.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub kind: &'static str,
    pub size_mib: u64,
    pub make: &'static [&'static str],
    /// Options of ext4's tune2fs, if there are any.
    pub tune: &'static [&'static str],
    pub mount: &'static str,
}

pub const EXT4: Recipe = Recipe {
    kind: "ext4",
    size_mib: 96,
    make: &["-q", "-b", "4096", "-E", "nodiscard"],
    tune: &[],
    mount: "noatime",
};
/// The smallest blocks: four in a page.
pub const EXT4_1K: Recipe = Recipe { make: &["-q", "-b", "1024", "-E", "nodiscard"], ..EXT4 };
pub const XFS: Recipe =
    Recipe { kind: "xfs", size_mib: 320, make: &["-q", "-K"], tune: &[], mount: "noatime" };

/// A mounted filesystem. Unmounted when dropped.
pub struct Rig {
    pub device: PathBuf,
    /// The kernel removes the device after its last use: its number may be another test's by then.
    is_detached: bool,
    /// `None` until the device has its filesystem.
    mount: Option<Mount>,
}

impl Rig {
    /// Makes the filesystem; `None`, and a message, if this machine or user cannot.
    pub fn new(recipe: Recipe) -> Option<Self> {
        let content = tempfile::tempfile_in("/dev/shm").ok()?;
        content.set_len(recipe.size_mib << 20).unwrap();
        Self::over(&content, |device| {
            let mut arguments = recipe.make.to_vec();
            arguments.push(device);
            run(&format!("mkfs.{}", recipe.kind), &arguments)?;
            if !recipe.tune.is_empty() {
                run("tune2fs", &[recipe.tune, &[device]].concat())?;
            }
            Some(())
        })?
        .mount(recipe.mount)
    }

    /// Returns the device as after a crash at this moment, mounted anew.
    pub fn after_a_crash(&self, mount: &str) -> Option<Self> {
        let content = tempfile::tempfile_in("/dev/shm").ok()?;
        // Bypasses the device's page cache, where the filesystem keeps data that it has not written
        // yet.
        let device =
            rustix::fs::open(&self.device, rustix::fs::OFlags::DIRECT, rustix::fs::Mode::empty())
                .map(File::from)
                .unwrap();
        #[repr(align(4096))]
        struct Aligned([u8; 1 << 18]);
        let mut piece = Box::new(Aligned([0; 1 << 18]));
        let mut at = 0;
        loop {
            let read = device.read_at(&mut piece.0, at).unwrap();
            if read == 0 {
                break;
            }
            if piece.0[..read].iter().any(|byte| *byte != 0) {
                content.write_all_at(&piece.0[..read], at).unwrap();
            }
            at += read as u64;
        }
        content.set_len(at).unwrap();
        Self::over(&content, |_| Some(()))?.mount(mount)
    }

    fn over(content: &File, prepare: impl FnOnce(&str) -> Option<()>) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip("only root can mount");
            return None;
        }
        hide_mounts();
        let name =
            format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(content));
        let device = PathBuf::from(run("losetup", &["--find", "--show", &name])?);
        let rig = Self { device, is_detached: false, mount: None };
        prepare(rig.device.to_str()?)?;
        Some(rig)
    }

    fn mount(mut self, options: &str) -> Option<Self> {
        let device = self.device.to_str()?;
        self.mount = Some(Mount::new(&["-o", options, device])?);
        self.is_detached = true;
        run("losetup", &["--detach", device])?;
        Some(self)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.mount.as_ref().expect("a mounted filesystem").path().join(name)
    }

    /// Makes a file of `len_bytes` that is one hole.
    pub fn sparse(&self, name: &str, len_bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        path
    }

    /// Makes a file with these bytes.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        drop(self.mount.take());
        if !self.is_detached {
            let _ = Command::new("losetup").arg("--detach").arg(&self.device).output();
        }
    }
}

/// Gives this thread, and the programs that it starts, mounts of their own, which end with the
/// thread.
fn hide_mounts() {
    // SAFETY: the call concerns this thread only, and touches no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return;
    }
    // SAFETY: changes the propagation of this thread's own mounts; the names are constants, and
    // without a mount the other arguments are not read.
    unsafe {
        libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            std::ptr::null(),
        );
    }
}
