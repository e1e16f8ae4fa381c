//! Other names of the same bytes: the file behind a loop device, a loop device over a file, a disk
//! and its partitions, devices that are stacked on a device.
//!
//! A lock is on one file or one device node, and the kernel does not look further. So a store looks
//! for claims on every overlapping file and device that sysfs shows. Overlaps that sysfs does not
//! show, or that may not be opened, are not found.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Dev, FileType, OFlags, Stat};

use super::claim::{access, is_claimed};

/// More than the height of every stack of devices; bounds a search in a sysfs with errors.
const MAX_OBJECTS: usize = 1024;

/// A file or a block device, by the kernel's identity of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    File { device: Dev, inode: u64 },
    Device(Dev),
}

impl Object {
    fn of(stat: &Stat) -> Self {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => Self::Device(stat.st_rdev),
            _ => Self::File { device: stat.st_dev, inode: stat.st_ino },
        }
    }
}

/// An object that overlaps with a store, and a path that leads to it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Overlap {
    object: Object,
    path: PathBuf,
    /// Whether a loop device is in between: then the kernel does not know that an exclusive open of
    /// one concerns the other.
    through_loop: bool,
}

/// Returns a file or device that overlaps with the file of this `stat` and is in use: by another
/// store or, if this one writes, exclusively by the kernel.
pub(super) fn in_use(stat: &Stat, read_only: bool) -> Option<PathBuf> {
    overlaps(Object::of(stat))
        .into_iter()
        .find(|overlap| is_used(overlap, read_only))
        .map(|overlap| overlap.path)
}

/// Returns a block device that is made of this one, or of a partition of it: a loop device, or one
/// of another driver. The kernel can write through it also when no process has it open.
#[must_use]
pub fn stacked_on(path: &Path) -> Option<PathBuf> {
    let object = Object::of(&rustix::fs::stat(path).ok()?);
    let mut found = Vec::new();
    if matches!(object, Object::Device(_)) {
        above(object, false, &Loop::all(), &mut found);
    }
    let is_partition = |overlap: &Overlap| match overlap.object {
        Object::Device(number) => sysfs(number).join("partition").exists(),
        Object::File { .. } => false,
    };
    found.into_iter().find(|overlap| !is_partition(overlap)).map(|overlap| overlap.path)
}

fn is_used(overlap: &Overlap, read_only: bool) -> bool {
    let flags = access(true);
    let opened = rustix::fs::open(&overlap.path, flags, rustix::fs::Mode::empty());
    let Ok(file) = opened else { return false };
    // The path may name another file by now.
    if !rustix::fs::fstat(&file).is_ok_and(|stat| Object::of(&stat) == overlap.object) {
        return false;
    }
    if is_claimed(file.as_fd(), read_only).unwrap_or(false) {
        return true;
    }
    // Mounted, or used by another driver.
    let exclusive =
        || rustix::fs::open(&overlap.path, flags | OFlags::EXCL, rustix::fs::Mode::empty());
    !read_only && overlap.through_loop && matches!(exclusive(), Err(rustix::io::Errno::BUSY))
}

/// Returns every file and device that shares bytes with `object`.
fn overlaps(object: Object) -> Vec<Overlap> {
    let loops = Loop::all();
    let mut found = Vec::new();
    below(object, &loops, &mut found);
    let mut above = Vec::new();
    self::above(object, false, &loops, &mut above);
    // Loop devices over the same file, if they map common bytes of it.
    if let Object::Device(number) = object
        && let Some(own) = loops.iter().find(|other| other.number == number)
    {
        let same = |other: &&Loop| {
            other.number != number && other.backing == own.backing && other.meets(own)
        };
        for other in loops.iter().filter(same) {
            add(other.number, true, &loops, &mut above);
        }
    }
    found.extend(above);
    found
}

/// Finds the objects that contain `object`.
fn below(object: Object, loops: &[Loop], found: &mut Vec<Overlap>) {
    let Object::Device(number) = object else { return };
    let mut next: Vec<(Object, PathBuf)> = Vec::new();
    if let Some(own) = loops.iter().find(|other| other.number == number) {
        next.push((own.backing, own.path.clone()));
    }
    let directory = sysfs(number);
    if directory.join("partition").exists()
        && let Some(disk) = number_in(&directory.join(".."))
    {
        next.extend(node(disk).map(|path| (Object::Device(disk), path)));
    }
    for slave in numbers_below(&directory.join("slaves")) {
        next.extend(node(slave).map(|path| (Object::Device(slave), path)));
    }
    for (object, path) in next {
        if found.len() < MAX_OBJECTS && found.iter().all(|known| known.object != object) {
            found.push(Overlap { object, path, through_loop: false });
            below(object, loops, found);
        }
    }
}

/// Finds the objects inside `object`, which itself may have been reached through a loop device.
fn above(object: Object, through_loop: bool, loops: &[Loop], found: &mut Vec<Overlap>) {
    for over in loops.iter().filter(|other| other.backing == object) {
        add(over.number, true, loops, found);
    }
    let Object::Device(number) = object else { return };
    let directory = sysfs(number);
    let partitions = entries(&directory).filter(|entry| entry.join("partition").exists());
    let partitions = partitions.filter_map(|entry| number_in(&entry));
    for number in partitions.chain(numbers_below(&directory.join("holders"))) {
        add(number, through_loop, loops, found);
    }
}

fn add(number: Dev, through_loop: bool, loops: &[Loop], found: &mut Vec<Overlap>) {
    let object = Object::Device(number);
    if found.len() < MAX_OBJECTS && found.iter().all(|known| known.object != object) {
        found.extend(node(number).map(|path| Overlap { object, path, through_loop }));
        above(object, through_loop, loops, found);
    }
}

/// A loop device that is set up.
#[derive(Debug)]
struct Loop {
    number: Dev,
    /// The object that the loop device maps, and a path to it.
    backing: Object,
    path: PathBuf,
    /// The part that is mapped: its start and its length; length 0 for the rest of the object.
    offset_bytes: u64,
    limit_bytes: u64,
}

impl Loop {
    fn all() -> Vec<Self> {
        let is_loop = |entry: &PathBuf| entry.join("loop").is_dir();
        entries(Path::new("/sys/block"))
            .filter(is_loop)
            .filter_map(|entry| Self::look(&entry))
            .collect()
    }

    fn look(entry: &Path) -> Option<Self> {
        let number = number_in(entry)?;
        let read = |name: &str| std::fs::read_to_string(entry.join("loop").join(name)).ok();
        let bytes = |name| read(name).and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        let path = PathBuf::from(read("backing_file")?.trim_end_matches('\n'));
        // From the driver; by name if the device may not be opened.
        let backing = status(number)
            .or_else(|| rustix::fs::stat(&path).ok().map(|stat| Object::of(&stat)))?;
        Some(Self {
            number,
            backing,
            path,
            offset_bytes: bytes("offset"),
            limit_bytes: bytes("sizelimit"),
        })
    }

    /// Whether both loop devices map some of the same bytes.
    fn meets(&self, other: &Self) -> bool {
        let end = |of: &Self| {
            if of.limit_bytes == 0 {
                u64::MAX
            } else {
                of.offset_bytes.saturating_add(of.limit_bytes)
            }
        };
        self.offset_bytes < end(other) && other.offset_bytes < end(self)
    }
}

/// The backing object of a loop device (`LOOP_GET_STATUS64`, linux/loop.h).
fn status(number: Dev) -> Option<Object> {
    const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05 as libc::Ioctl;
    /// `struct loop_info64`, of which the first fields are used.
    #[repr(C)]
    struct Info {
        device: u64,
        inode: u64,
        backing_device: u64,
        rest: [u8; 208],
    }
    let device =
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(node(number)?).ok()?;
    let mut info = Info { device: 0, inode: 0, backing_device: 0, rest: [0; 208] };
    // SAFETY: the descriptor is open, and the structure, which outlives the call, has the size that
    // the driver fills in.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) } != 0 {
        return None;
    }
    // The encoding of stat(2).
    Some(match info.backing_device {
        0 => Object::File { device: info.device, inode: info.inode },
        number => Object::Device(number),
    })
}

/// Returns the sysfs directory of a block device.
fn sysfs(number: Dev) -> PathBuf {
    let name =
        format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    // Resolved, so that `..` is a partition's disk.
    std::fs::canonicalize(&name).unwrap_or_else(|_| name.into())
}

/// Returns the node of a block device, by the kernel's name for it.
fn node(number: Dev) -> Option<PathBuf> {
    let uevent = std::fs::read_to_string(sysfs(number).join("uevent")).ok()?;
    Some(Path::new("/dev").join(uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?))
}

fn number_in(directory: &Path) -> Option<Dev> {
    let text = std::fs::read_to_string(directory.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn numbers_below(directory: &Path) -> impl Iterator<Item = Dev> {
    entries(directory).filter_map(|entry| number_in(&entry))
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(directory).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}
