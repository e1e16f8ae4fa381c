//! The filesystems, and the files on them, that can be bypassed.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, opcode};

use super::HostFileError;

/// A filesystem that never moves blocks by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ext4,
    Xfs,
}

/// A filesystem that moves blocks with every write.
const MOVES: &str =
    "it writes blocks to a new place each time (copy on write), so a mapping does not last";
/// A filesystem without a device.
const NO_DEVICE: &str = "there is no block device of this machine's below it";

/// The refused filesystems: `f_type` of statfs(2), name, and reason.
const REFUSED: &[(u64, &str, &str)] = &[
    (0x9123_683e, "btrfs", MOVES),
    (0xca45_1a4e, "bcachefs", MOVES),
    (0x2fc1_2fc1, "zfs", MOVES),
    (0xf2f5_2010, "f2fs", MOVES),
    (0x0102_1994, "tmpfs", NO_DEVICE),
    (0x8584_58f6, "ramfs", NO_DEVICE),
    (0x6969, "nfs", NO_DEVICE),
    (0xff53_4d42, "cifs", NO_DEVICE),
    (0xfe53_4d42, "smb", NO_DEVICE),
    (0x00c3_6400, "ceph", NO_DEVICE),
    (0x6573_5546, "fuse", NO_DEVICE),
    (0x794c_7630, "overlayfs", "its files lie in other filesystems"),
];

/// `FS_*_FL` of linux/fs.h, as returned by FS_IOC_GETFLAGS.
mod flag {
    pub const COMPR: u32 = 0x4;
    pub const IMMUTABLE: u32 = 0x10;
    pub const APPEND: u32 = 0x20;
    pub const ENCRYPT: u32 = 0x800;
    pub const JOURNAL_DATA: u32 = 0x4000;
    pub const EXTENT: u32 = 0x8_0000;
    pub const VERITY: u32 = 0x10_0000;
    pub const DAX: u32 = 0x200_0000;
    pub const INLINE_DATA: u32 = 0x1000_0000;
}

/// The refused properties of a file, by the flags of statx(2) and FS_IOC_GETFLAGS: description and
/// remedy.
const PROPERTIES: &[(StatxAttributes, u32, &str, &str)] = &[
    (StatxAttributes::ENCRYPTED, flag::ENCRYPT, "is encrypted by its filesystem", COPY),
    (StatxAttributes::COMPRESSED, flag::COMPR, "is compressed by its filesystem", COPY),
    (
        StatxAttributes::VERITY,
        flag::VERITY,
        "is protected by fs-verity, which would not check direct reads",
        COPY,
    ),
    (
        StatxAttributes::DAX,
        flag::DAX,
        "is accessed as memory (DAX)",
        "switch DAX off for it (chattr -x)",
    ),
    (StatxAttributes::IMMUTABLE, flag::IMMUTABLE, "is immutable", "allow changes (chattr -i)"),
    (StatxAttributes::APPEND, flag::APPEND, "can only be appended to", "allow changes (chattr -a)"),
    (StatxAttributes::empty(), flag::JOURNAL_DATA, "has its data journaled", JOURNAL),
    (
        StatxAttributes::empty(),
        flag::INLINE_DATA,
        "lies inside its inode (inline_data)",
        "make it larger (truncate)",
    ),
];

const COPY: &str = "copy it to a place where new files are not";

/// After a crash the journal would write old data over data that bypassed the filesystem.
const JOURNAL: &str = "after a crash, the journal would overwrite what went around it; mount with \
                       data=ordered, and chattr -j the file";

/// Fails unless the file is a regular file on a filesystem that can be bypassed.
pub(super) fn check_filesystem(file: BorrowedFd<'_>, path: &Path) -> Result<Kind, HostFileError> {
    let wrap = |source: Errno| HostFileError::Kernel {
        action: "inspect",
        path: path.into(),
        source: source.into(),
    };
    let stat = rustix::fs::fstat(file).map_err(wrap)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(HostFileError::NotRegular { path: path.into() });
    }
    // The kernel's numbers have 32 bits; the field's size and sign vary.
    let magic = rustix::fs::fstatfs(file).map_err(wrap)?.f_type as u64 & 0xffff_ffff;
    match magic {
        0xef53 => return Ok(Kind::Ext4),
        0x5846_5342 => return Ok(Kind::Xfs),
        _ => {}
    }
    let known = REFUSED.iter().find(|(number, ..)| *number == magic);
    let (name, why) = match known {
        Some((_, name, why)) => ((*name).to_owned(), *why),
        None => (format!("a filesystem of type {magic:#x}"), "its placement of blocks is unknown"),
    };
    Err(HostFileError::Filesystem { path: path.into(), name, why })
}

/// Fails if the file is encrypted, immutable or the like, as far as this is known without opening
/// it.
pub(super) fn check_attributes(file: BorrowedFd<'_>, path: &Path) -> Result<(), HostFileError> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
    let stat = stat.map_err(|source| HostFileError::Kernel {
        action: "inspect",
        path: path.into(),
        source: source.into(),
    })?;
    refuse(path, stat.stx_attributes, 0)
}

/// Fails if the open file's flags do not allow bypassing its filesystem.
pub(super) fn check_flags(
    file: BorrowedFd<'_>,
    kind: Kind,
    path: &Path,
) -> Result<(), HostFileError> {
    let wrap = |source: Errno| HostFileError::Kernel {
        action: "inspect",
        path: path.into(),
        source: source.into(),
    };
    let flags = rustix::fs::ioctl_getflags(file).map_err(wrap)?.bits();
    refuse(path, StatxAttributes::empty(), flags)?;
    match kind {
        Kind::Ext4 => {
            if flags & flag::EXTENT == 0 {
                return Err(HostFileError::Property {
                    path: path.into(),
                    property: "keeps its blocks in a table, not in extents",
                    remedy: "copy it on an ext4 with the feature extent",
                });
            }
            if journals_data(file) {
                let property = "is on a filesystem that journals data (data=journal)";
                return Err(HostFileError::Property {
                    path: path.into(),
                    property,
                    remedy: JOURNAL,
                });
            }
        }
        Kind::Xfs => {
            // SAFETY: the kernel writes one structure of this layout.
            let get = unsafe { Getter::<{ FS_IOC_FSGETXATTR }, Xattr>::new() };
            // SAFETY: as above.
            let xattr = unsafe { rustix::ioctl::ioctl(file, get) }.map_err(wrap)?;
            if xattr.xflags & XFLAG_REALTIME != 0 {
                return Err(HostFileError::Property {
                    path: path.into(),
                    property: "lies on the filesystem's realtime device",
                    remedy: "copy it to a directory without rtinherit",
                });
            }
        }
    }
    Ok(())
}

fn refuse(path: &Path, attributes: StatxAttributes, flags: u32) -> Result<(), HostFileError> {
    let found = PROPERTIES
        .iter()
        .find(|(attribute, flag, ..)| attributes.intersects(*attribute) || flags & flag != 0);
    match found {
        None => Ok(()),
        Some((.., property, remedy)) => {
            Err(HostFileError::Property { path: path.into(), property, remedy })
        }
    }
}

/// Whether ext4 is mounted with data=journal. `/proc/mounts` does not show the option if it is the
/// filesystem's own default. (From Linux 6.1 on, such files also report that they have no direct
/// I/O.)
fn journals_data(file: BorrowedFd<'_>) -> bool {
    let Ok(stat) = rustix::fs::fstat(file.as_fd()) else { return false };
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let Ok(device) = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")) else {
        return false;
    };
    let Some(name) = device.file_name() else { return false };
    let options = std::fs::read_to_string(Path::new("/proc/fs/ext4").join(name).join("options"));
    options.is_ok_and(|options| options.lines().any(|line| line.trim() == "data=journal"))
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Xattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

const FS_IOC_FSGETXATTR: Opcode = opcode::read::<Xattr>(b'X', 31);
const XFLAG_REALTIME: u32 = 1;
