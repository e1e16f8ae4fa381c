//! The block device below a filesystem.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Dev, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{HostExtent, HostFileError};

/// The number of bytes that are compared: a page is a multiple of every block size.
const SAMPLE_BYTES: usize = 4096;

/// Memory for direct I/O.
#[repr(align(4096))]
struct Sample([u8; SAMPLE_BYTES]);

/// An open block device.
#[derive(Debug)]
pub(super) struct Device {
    pub path: PathBuf,
    /// The descriptor, opened with `O_DIRECT`.
    pub file: OwnedFd,
    pub size_bytes: u64,
}

impl Device {
    /// Opens the device below `path`'s filesystem, of number `number`.
    pub fn below(path: &Path, number: Dev, read_only: bool) -> Result<Self, HostFileError> {
        let (device, node) = find(number).ok_or_else(|| HostFileError::NoDevice {
            path: path.into(),
            major: rustix::fs::major(number),
            minor: rustix::fs::minor(number),
        })?;
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        // By descriptor, not by name, so that the checked node is opened. Not exclusively, because
        // the filesystem uses the device.
        let name = format!("/proc/self/fd/{}", node.as_raw_fd());
        let opened =
            rustix::fs::open(name, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
        let file = opened.map_err(|error| refusal(&device, error))?;
        let wrap = |source: Errno| HostFileError::Kernel {
            action: "measure",
            path: device.clone(),
            source: source.into(),
        };
        let size_bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(wrap)?;
        Ok(Self { path: device, file, size_bytes })
    }

    /// Whether the device holds the bytes of `file` at the place of `extent`, by a sample. No data
    /// of the file may be only in memory.
    pub fn agrees(&self, file: &impl AsFd, extent: &HostExtent) -> io::Result<bool> {
        let len = extent.len_bytes.min(SAMPLE_BYTES as u64) as usize;
        let mut through = Box::new(Sample([0; SAMPLE_BYTES]));
        let mut around = Box::new(Sample([1; SAMPLE_BYTES]));
        let (through, around) = (&mut through.0[..len], &mut around.0[..len]);
        let read = rustix::io::pread(file, &mut *through, extent.logical_bytes)?;
        let also_read = rustix::io::pread(&self.file, &mut *around, extent.physical_bytes)?;
        Ok((read, also_read) == (len, len) && through == around)
    }
}

/// The error for a device that cannot be opened.
fn refusal(device: &Path, error: Errno) -> HostFileError {
    let device = device.to_owned();
    match error {
        // The kernel's error if a mounted device may not be written to.
        Errno::BUSY => HostFileError::WriteMounted { device },
        Errno::PERM | Errno::ACCESS => HostFileError::DeviceDenied { device, source: error.into() },
        error => HostFileError::Kernel { action: "open", path: device, source: error.into() },
    }
}

/// Finds the device's node, and opens it with a descriptor that can only be reopened.
fn find(number: Dev) -> Option<(PathBuf, OwnedFd)> {
    let name = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let uevent =
        std::fs::read_to_string(format!("/sys/dev/block/{name}/uevent")).unwrap_or_default();
    let node = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    // By the kernel's name, and by udev's.
    let candidates = node
        .map(|node| Path::new("/dev").join(node))
        .into_iter()
        .chain([Path::new("/dev/block").join(&name)]);
    candidates.into_iter().find_map(|path| {
        let node = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&node).ok()?;
        let is_it = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice
            && stat.st_rdev == number;
        is_it.then_some((path, node))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_device_is_explained() {
        let device = Path::new("/dev/sda");
        let error = refusal(device, Errno::BUSY);
        assert!(error.to_string().contains("bdev_allow_write_mounted=1"), "{error}");
        for errno in [Errno::PERM, Errno::ACCESS] {
            assert!(matches!(refusal(device, errno), HostFileError::DeviceDenied { .. }));
        }
        assert!(matches!(refusal(device, Errno::NXIO), HostFileError::Kernel { .. }));
    }

    #[test]
    fn an_invalid_device_number_is_not_found() {
        // Numbers without a device, as filesystems without one have.
        assert!(find(rustix::fs::makedev(0, 1)).is_none());
        let error = Device::below(Path::new("disk"), rustix::fs::makedev(0, 77), true).unwrap_err();
        assert!(error.to_string().contains("0:77"), "{error}");
    }
}
