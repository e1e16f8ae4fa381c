//! Disks of the host's kernel for the length of an experiment, in memory, and a filesystem on one.
//!
//! FAST'12 and NeSC measured on ramdisks. Each disk and each mount is removed when it is dropped.
//! If this program is killed, loop devices and their files go with the programs that use them: the
//! files are unlinked, and the kernel clears a loop device at its last close. A mount may stay, and
//! a zram disk does.
//!
//! Disks that are compared must have memory of the same kind. Single pages of a tmpfs may lie
//! anywhere, and those of its first file lay more favourably: large reads from one loop device were
//! seen to take 1.7 times as long as from the next. Loop devices are therefore made of huge pages.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::FallocateFlags;
use sidecore_kit::process::output_of;

/// The kind of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A loop device over a file on tmpfs: the kernel's workers carry its requests out.
    Loop,
    /// zram: the thread that makes a request carries it out.
    Zram,
}

/// A disk of the host's kernel.
#[derive(Debug)]
pub struct HostDisk {
    /// The device, for instance `/dev/loop0`.
    pub path: PathBuf,
    keep: Keep,
}

#[derive(Debug)]
enum Keep {
    /// The device exists until this file is closed.
    Open(#[allow(dead_code)] File),
    /// The number of a zram disk.
    Number(u32),
}

/// A filesystem in memory, on huge pages as far as there are any.
#[derive(Debug)]
pub struct Tmpfs {
    path: PathBuf,
    is_mounted: bool,
}

impl Tmpfs {
    /// Mounts a tmpfs at `path`, a directory that is made.
    ///
    /// # Errors
    /// The process is not root's.
    pub fn new(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path)?;
        output_of(
            "mount",
            &["-t", "tmpfs", "-o", "huge=always,size=100%", "sidecore-bench", text(path)?],
        )?;
        Ok(Self { path: path.to_owned(), is_mounted: true })
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts the filesystem lazily: it ends with the last file that is open on it.
    ///
    /// # Errors
    /// The kernel refuses to unmount.
    pub fn detach(&mut self) -> Result<()> {
        detach(&self.path, &mut self.is_mounted)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        end(&self.path, &mut self.is_mounted);
    }
}

fn detach(path: &Path, is_mounted: &mut bool) -> Result<()> {
    if *is_mounted {
        output_of("umount", &["--lazy", text(path)?])?;
        *is_mounted = false;
    }
    Ok(())
}

fn end(path: &Path, is_mounted: &mut bool) {
    if let Err(error) = detach(path, is_mounted) {
        eprintln!("error: {error:#}: unmount {} by hand", path.display());
    }
}

const ZRAM_CONTROL: &str = "/sys/class/zram-control";

impl HostDisk {
    /// Makes a disk of `bytes`, zero everywhere. `directory` is on a [`Tmpfs`].
    ///
    /// # Errors
    /// The process is not root's; the kernel has no such devices; too little memory.
    pub fn new(kind: Kind, directory: &Path, bytes: u64) -> Result<Self> {
        match kind {
            Kind::Loop => Self::on_loop(directory, bytes),
            Kind::Zram => Self::on_zram(bytes),
        }
    }

    fn on_loop(directory: &Path, bytes: u64) -> Result<Self> {
        let backing = directory.join("disk");
        let file =
            File::create(&backing).with_context(|| format!("cannot make {}", backing.display()))?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .context("no room for a loop device")?;
        let attached =
            output_of("losetup", &["--find", "--show", "--direct-io=on", text(&backing)?]);
        let _ = std::fs::remove_file(&backing);
        let path = PathBuf::from(attached?.trim());
        let open = File::open(&path);
        // While the device is open, this only tells the kernel to clear it at its last close.
        output_of("losetup", &["--detach", text(&path)?])?;
        let open = open.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { keep: Keep::Open(open), path })
    }

    fn on_zram(bytes: u64) -> Result<Self> {
        let number =
            std::fs::read_to_string(Path::new(ZRAM_CONTROL).join("hot_add")).context("no zram")?;
        let number: u32 = number.trim().parse().context("not a zram disk's number")?;
        let disk =
            Self { path: PathBuf::from(format!("/dev/zram{number}")), keep: Keep::Number(number) };
        std::fs::write(format!("/sys/block/zram{number}/disksize"), bytes.to_string())
            .context("no room for zram")?;
        Ok(disk)
    }
}

impl Drop for HostDisk {
    fn drop(&mut self) {
        let Keep::Number(number) = self.keep else { return };
        let remove = || {
            std::fs::write(format!("/sys/block/zram{number}/reset"), "1")?;
            std::fs::write(Path::new(ZRAM_CONTROL).join("hot_remove"), number.to_string())
        };
        // A filesystem that was just unmounted, or a program that just ended, may hold the disk for
        // a moment.
        let mut last = Ok(());
        for _ in 0..200 {
            last = remove();
            if last.is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        if let Err(error) = last {
            eprintln!("error: {error}: reset and remove {} by hand", self.path.display());
        }
    }
}

/// A mounted ext4 on a disk.
#[derive(Debug)]
pub struct Ext4 {
    /// The mount point.
    pub path: PathBuf,
    is_mounted: bool,
    device: HostDisk,
}

impl Ext4 {
    /// Makes a filesystem on `device` and mounts it at `path`, a directory that is made.
    ///
    /// # Errors
    /// The process is not root's; mkfs.ext4 is not installed.
    pub fn new(device: HostDisk, path: &Path) -> Result<Self> {
        // Leaves no initialization for the background, where it would disturb measurements.
        let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
        output_of("mkfs.ext4", &["-q", "-F", "-b", "4096", "-E", options, text(&device.path)?])?;
        std::fs::create_dir_all(path)?;
        output_of("mount", &["-t", "ext4", text(&device.path)?, text(path)?])?;
        Ok(Self { path: path.to_owned(), device, is_mounted: true })
    }

    /// The device below the filesystem.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device.path
    }

    /// Makes a file of `bytes` with every block written.
    ///
    /// # Errors
    /// The filesystem has too little space.
    pub fn written_file(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        use std::io::Write;
        let path = self.path.join(name);
        let mut file = File::create(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        let piece = vec![0x5a_u8; 1 << 20];
        let mut left = bytes;
        while left > 0 {
            let count = left.min(piece.len() as u64);
            file.write_all(&piece[..usize::try_from(count)?])?;
            left -= count;
        }
        file.sync_all()?;
        Ok(path)
    }

    /// Unmounts the filesystem lazily: it ends with the last file that is open on it.
    ///
    /// # Errors
    /// The kernel refuses to unmount.
    pub fn detach(&mut self) -> Result<()> {
        detach(&self.path, &mut self.is_mounted)
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        end(&self.path, &mut self.is_mounted);
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("not a name in UTF-8")
}
