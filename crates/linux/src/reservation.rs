//! Persistent reservations of SCSI and NVMe disks, by the kernel's ioctls
//! (Documentation/block/pr.rst and include/uapi/linux/pr.h in the kernel's source).
//!
//! A host *registers* a key at a disk, and *reserves* the disk with it. Here a reservation is
//! always one of type *write exclusive, registrants only*: hosts that are registered write, others
//! get a reservation conflict (EBADE), and all read. A registered host *preempts* another one's
//! key: its registration is gone, its commands in flight are aborted, and a reservation that it
//! held is the preempting host's.
//!
//! The kernel asks the disk to keep registrations over a loss of power with each registration
//! (APTPL of SPC-4, PTPL of NVMe). A disk that cannot keep them refuses the registration.

#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::ioctl::{Opcode, opcode};

/// `PR_WRITE_EXCLUSIVE_REG_ONLY`: type 5 of SCSI, type 3 of NVMe.
const WRITE_EXCLUSIVE_REGISTRANTS_ONLY: u32 = 3;
/// `PR_FL_IGNORE_KEY`.
const IGNORE_KEY: u32 = 1;
/// An old key that is ignored.
const ANY_KEY: u64 = 1;

/// Has a directory for each block device, by its numbers.
const BLOCK_DEVICES: &str = "/sys/dev/block";
/// Has a directory for each disk, by its name.
const DISKS: &str = "/sys/block";

/// `PR_STS_RESERVATION_CONFLICT`, which is SCSI's status.
const CONFLICT: i32 = 0x18;
/// `PR_STS_IOERR`: also a unit attention, after which the disk takes the same command.
const DEVICE_ERROR: i32 = 0x2;
/// Linux before 6.3 returns NVMe's own status, with bits that say how to go on.
const NVME_CONFLICT: i32 = 0x83;
const NVME_STATUS: i32 = 0x7ff;

/// The attempts at a command to a disk that has something else to say first, and at a list of keys.
const ATTEMPTS: usize = 4;
/// The keys for which the first read has room, and the most that the kernel returns.
const KEYS: u32 = 64;
const KEYS_MAX: u32 = 1 << 16;

/// `struct pr_reservation`.
#[repr(C)]
struct RawReservation {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_registration`.
#[repr(C)]
struct RawRegistration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    padding: u32,
}

/// `struct pr_preempt`.
#[repr(C)]
struct RawPreempt {
    old_key: u64,
    new_key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_clear`.
#[repr(C)]
struct RawClear {
    key: u64,
    flags: u32,
    padding: u32,
}

/// `struct pr_read_keys`.
#[repr(C)]
struct RawKeys {
    generation: u32,
    count: u32,
    keys: u64,
}

/// `struct pr_read_reservation`.
#[repr(C)]
#[derive(Default)]
struct RawHeld {
    key: u64,
    generation: u32,
    kind: u32,
}

const REGISTER: Opcode = opcode::write::<RawRegistration>(b'p', 200);
const RESERVE: Opcode = opcode::write::<RawReservation>(b'p', 201);
const PREEMPT_AND_ABORT: Opcode = opcode::write::<RawPreempt>(b'p', 204);
const CLEAR: Opcode = opcode::write::<RawClear>(b'p', 205);
const READ_KEYS: Opcode = opcode::read_write::<RawKeys>(b'p', 206);
const READ_RESERVATION: Opcode = opcode::read::<RawHeld>(b'p', 207);

/// Why a disk has not carried out an order about reservations.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// The disk cannot be opened.
    #[error("cannot open {path}: {error}; look whether the disk is there, and run this as root")]
    Open {
        /// The disk's path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// There are no reservations of files.
    #[error("{0} is no block device: reservations are of whole SCSI and NVMe disks")]
    NotADisk(PathBuf),
    /// A map of device mapper: a path group of multipath, or a logical volume.
    #[error(
        "{0} is a device of device mapper, whose paths register one by one: name the disk below it \
         if it has a single path, or choose another fence"
    )]
    Mapped(PathBuf),
    /// Neither the disk nor its driver knows reservations.
    #[error(
        "{0} knows no persistent reservations: use a SCSI or NVMe disk that has them, or another \
         fence"
    )]
    Unsupported(PathBuf),
    /// A partition, or a process without privilege.
    #[error(
        "the kernel allows no reservation of {0}: name the whole disk and not a partition, and run \
         as root"
    )]
    NotAllowed(PathBuf),
    /// The disk refuses a parameter of the command.
    #[error(
        "{0} refuses the reservation: it has none, or cannot keep registrations over a loss of \
         power, which the kernel asks for; use another disk or another fence"
    )]
    Refused(PathBuf),
    /// The key is not registered, or the reservation is another host's.
    #[error(
        "{0} answers that the reservation conflicts: another host has it, or has ended this one's \
         registration; `sidecore reservation show` lists the keys"
    )]
    Conflict(PathBuf),
    /// The disk or the path to it failed.
    #[error(
        "{path} failed with status {status:#x}: look at the kernel's log, the disk and the path to \
         it"
    )]
    Device {
        /// The disk's path.
        path: PathBuf,
        /// `PR_STS_*` of the kernel, or a status of SCSI or NVMe.
        status: i32,
    },
    /// The kernel knows no identity of the disk that other hosts know it by.
    #[error(
        "the kernel shows no WWID of {0}: choose another fence, because other hosts could not tell \
         which disk this host has reserved"
    )]
    Unnamed(PathBuf),
    /// Another block device of this host leads to the same disk.
    #[error(
        "{other} is the same disk as {path}, and processes of this host could write through it: \
         use NVMe's own multipath (nvme_core.multipath=Y), or a single path"
    )]
    Twin {
        /// The disk's path.
        path: PathBuf,
        /// The other device.
        other: PathBuf,
    },
    /// More keys than the kernel can show.
    #[error(
        "{path} has {count} registrations, and the kernel shows {KEYS_MAX}: end those of other \
         programs, or use another disk"
    )]
    TooManyKeys {
        /// The disk's path.
        path: PathBuf,
        /// The number of registrations.
        count: u32,
    },
    /// The list of keys never fits into the room that the last look asked for.
    #[error("{0} has more registrations at each read: end the program that makes them")]
    Growing(PathBuf),
    /// The kernel failed.
    #[error("{path}: {error}: look at the kernel's log, the disk and the path to it")]
    Kernel {
        /// The disk's path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// The action of [`on_reservation_conflict`].
static ON_CONFLICT: OnceLock<fn()> = OnceLock::new();

/// Sets the action, once for this process, that is taken on a store's request that fails because
/// another host has reserved the disk. It runs before the request is answered: a daemon that was
/// fenced ends in it, because an error would be an answer.
pub fn on_reservation_conflict(action: fn()) {
    let _ = ON_CONFLICT.set(action);
}

/// Takes the action.
pub(crate) fn act_on_conflict() {
    if let Some(action) = ON_CONFLICT.get() {
        action();
    }
}

/// The registrations of a disk, and its reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReservation {
    /// The keys of all registrations; a key is there once for each path.
    pub keys: Vec<u64>,
    /// The holder's key, if the disk is reserved.
    pub holder: Option<u64>,
    /// Whether the reservation's type is write exclusive, registrants only.
    pub is_write_exclusive: bool,
}

/// A disk whose reservation this host wants.
#[derive(Debug)]
pub struct ReservedDisk {
    path: PathBuf,
    file: File,
}

impl ReservedDisk {
    /// Opens a disk. Nothing is sent to it.
    ///
    /// # Errors
    /// The path cannot be opened for writing, or is no block device, or one of device mapper.
    pub fn open(path: &Path) -> Result<Self, ReservationError> {
        let wrong = |error| ReservationError::Open { path: path.to_owned(), error };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(wrong)?;
        let metadata = file.metadata().map_err(wrong)?;
        if !metadata.file_type().is_block_device() {
            return Err(ReservationError::NotADisk(path.to_owned()));
        }
        if is_mapped(Path::new(BLOCK_DEVICES), metadata.rdev()) {
            return Err(ReservationError::Mapped(path.to_owned()));
        }
        Ok(Self { path: path.to_owned(), file })
    }

    /// The identity of the disk (its WWID), by which all hosts know it.
    ///
    /// # Errors
    /// The kernel knows none, or has another block device of this disk.
    pub fn id(&self) -> Result<String, ReservationError> {
        self.id_among(Path::new(DISKS), self.number()?)
    }

    /// The other block devices of this host that lead to the same disk, by its identity.
    ///
    /// # Errors
    /// The kernel failed.
    pub fn twins(&self) -> Result<Vec<PathBuf>, ReservationError> {
        Ok(twins(Path::new(DISKS), self.number()?).1)
    }

    fn number(&self) -> Result<u64, ReservationError> {
        let number = self.file.metadata().map(|metadata| metadata.rdev());
        number.map_err(|error| ReservationError::Kernel { path: self.path.clone(), error })
    }

    fn id_among(&self, disks: &Path, number: u64) -> Result<String, ReservationError> {
        let (id, twins) = twins(disks, number);
        if id.is_empty() {
            return Err(ReservationError::Unnamed(self.path.clone()));
        }
        match twins.into_iter().next() {
            None => Ok(id),
            Some(other) => Err(ReservationError::Twin { path: self.path.clone(), other }),
        }
    }

    /// Fails if the disk knows no reservations. `unused` is a random key, which no host has.
    ///
    /// # Errors
    /// The disk or the kernel has no reservations, or failed.
    pub fn probe(&self, unused: u64) -> Result<(), ReservationError> {
        // Replacing a key that is not registered conflicts, and changes nothing.
        match self.answers(unused) {
            // SCSI disks refuse a command that they do not know.
            Err(ReservationError::Device { status: DEVICE_ERROR, path }) => {
                Err(ReservationError::Unsupported(path))
            }
            answered => answered,
        }
    }

    /// Fails if the disk does not answer orders. `key` is this host's or no host's, and stays so.
    ///
    /// # Errors
    /// The disk or the kernel failed.
    pub fn answers(&self, key: u64) -> Result<(), ReservationError> {
        match self.register(key, key) {
            // This host does not have the key.
            Err(ReservationError::Conflict(_)) => Ok(()),
            registered => registered,
        }
    }

    /// Registers this host with `new`, in place of the key `old`, or of none if `old` is 0. A key
    /// `new` of 0 ends a registration at a SCSI disk, and at NVMe is a registration.
    ///
    /// # Errors
    /// [`ReservationError::Conflict`] if this host has not the key `old`, and had not when this
    /// was called.
    pub fn register(&self, old: u64, new: u64) -> Result<(), ReservationError> {
        let mut raw = RawRegistration { old_key: old, new_key: new, flags: 0, padding: 0 };
        // SAFETY: the command reads the structure, which has no pointers, and writes nothing.
        let attempt = || unsafe { order::<{ REGISTER }, _>(&self.file, &mut raw) };
        self.judge_registration((old, new), attempt)
    }

    /// Registers this host with `new` in place of any key.
    ///
    /// # Errors
    /// The disk or the kernel failed.
    pub fn register_in_place_of_any(&self, new: u64) -> Result<(), ReservationError> {
        match self.send_registration((0, new), 0) {
            // NVMe replaces a key only if the driver is given one, also if it is ignored.
            Err(ReservationError::Conflict(_)) => {
                self.send_registration((ANY_KEY, new), IGNORE_KEY)
            }
            registered => registered,
        }
    }

    fn send_registration(
        &self,
        (old_key, new_key): (u64, u64),
        flags: u32,
    ) -> Result<(), ReservationError> {
        self.send::<{ REGISTER }, _>(RawRegistration { old_key, new_key, flags, padding: 0 })
    }

    /// Reserves the disk: write exclusive, registrants only. The holder can do so again.
    ///
    /// # Errors
    /// [`ReservationError::Conflict`] if this host has not registered `key`, or another holds the
    /// reservation.
    pub fn reserve(&self, key: u64) -> Result<(), ReservationError> {
        let kind = WRITE_EXCLUSIVE_REGISTRANTS_ONLY;
        self.send::<{ RESERVE }, _>(RawReservation { key, kind, flags: 0 })
    }

    /// Ends all registrations with the key `other`, aborts the commands of their hosts, and takes
    /// the reservation over if one of these hosts holds it. This host has registered `mine`.
    ///
    /// # Errors
    /// [`ReservationError::Conflict`] if no host has registered `other`, or this one has not
    /// registered `mine`. After any other error, the registrations may be gone and the commands not
    /// be aborted: a second order would conflict and not say so, and none is sent.
    pub fn preempt_and_abort(&self, other: u64, mine: u64) -> Result<(), ReservationError> {
        let kind = WRITE_EXCLUSIVE_REGISTRANTS_ONLY;
        // The kernel's documentation has it the other way round; its drivers put `old_key` where
        // SCSI and NVMe have the key of the host that preempts (sd_pr_preempt, nvme_pr_preempt).
        let mut raw = RawPreempt { old_key: mine, new_key: other, kind, flags: 0 };
        // SAFETY: the command reads the structure, which has no pointers, and writes nothing.
        self.judge_once(|| unsafe { order::<PREEMPT_AND_ABORT, _>(&self.file, &mut raw) })
    }

    /// Ends the reservation and all registrations. This host has registered `key`.
    ///
    /// # Errors
    /// The disk or the kernel failed.
    pub fn clear(&self, key: u64) -> Result<(), ReservationError> {
        self.send::<{ CLEAR }, _>(RawClear { key, flags: 0, padding: 0 })
    }

    /// Reads the registrations and the reservation; `None` if the kernel cannot (before Linux
    /// 6.19).
    ///
    /// # Errors
    /// The disk or the kernel failed.
    pub fn read(&self) -> Result<Option<DiskReservation>, ReservationError> {
        let read = |keys: &mut [u64]| {
            let count = u32::try_from(keys.len()).unwrap_or(KEYS_MAX);
            let mut raw = RawKeys { generation: 0, count, keys: keys.as_mut_ptr() as u64 };
            // SAFETY: the kernel writes at most `count` keys, for which `keys` has room.
            self.judge(|| unsafe { order::<READ_KEYS, _>(&self.file, &mut raw) })?;
            Ok(raw.count)
        };
        let Some(keys) = self.read_keys(read)? else { return Ok(None) };
        let mut held = RawHeld::default();
        // SAFETY: the kernel writes the structure and nothing else.
        self.judge(|| unsafe { order::<{ READ_RESERVATION }, _>(&self.file, &mut held) })?;
        Ok(Some(DiskReservation {
            keys,
            holder: (held.kind != 0).then_some(held.key),
            is_write_exclusive: held.kind == WRITE_EXCLUSIVE_REGISTRANTS_ONLY,
        }))
    }

    /// Reads all keys. `read` returns the number of keys that there are.
    fn read_keys(
        &self,
        mut read: impl FnMut(&mut [u64]) -> Result<u32, ReservationError>,
    ) -> Result<Option<Vec<u64>>, ReservationError> {
        let mut keys = vec![0; KEYS as usize];
        let mut count = match read(&mut keys) {
            // Drivers answer an order that they do not know with EINVAL, too.
            Err(ReservationError::Unsupported(_) | ReservationError::Refused(_)) => {
                return Ok(None);
            }
            read => read?,
        };
        for _ in 0..ATTEMPTS {
            if count as usize <= keys.len() {
                break;
            }
            if count > KEYS_MAX {
                return Err(ReservationError::TooManyKeys { path: self.path.clone(), count });
            }
            keys.resize(count as usize, 0);
            count = read(&mut keys)?;
        }
        if count as usize > keys.len() {
            return Err(ReservationError::Growing(self.path.clone()));
        }
        keys.truncate(count as usize);
        Ok(Some(keys))
    }

    fn send<const CODE: Opcode, T>(&self, mut value: T) -> Result<(), ReservationError> {
        // SAFETY: these commands read the structure, which has no pointers, and write nothing.
        self.judge(|| unsafe { order::<CODE, _>(&self.file, &mut value) })
    }

    /// The result of an order that a disk can get again.
    fn judge(&self, mut attempt: impl FnMut() -> io::Result<i32>) -> Result<(), ReservationError> {
        let mut judged = self.judge_once(&mut attempt);
        for _ in 1..ATTEMPTS {
            if !matches!(judged, Err(ReservationError::Device { status: DEVICE_ERROR, .. })) {
                break;
            }
            judged = self.judge_once(&mut attempt);
        }
        judged
    }

    /// The result of a registration. An order that has replaced the key conflicts with itself if
    /// it is sent again: then it has failed, and may have been carried out.
    fn judge_registration(
        &self,
        (old, new): (u64, u64),
        mut attempt: impl FnMut() -> io::Result<i32>,
    ) -> Result<(), ReservationError> {
        let mut sent = 0;
        let judged = self.judge(|| {
            sent += 1;
            attempt()
        });
        match judged {
            Err(ReservationError::Conflict(path)) if sent > 1 && old != new => {
                Err(ReservationError::Device { path, status: DEVICE_ERROR })
            }
            judged => judged,
        }
    }

    fn judge_once(
        &self,
        attempt: impl FnOnce() -> io::Result<i32>,
    ) -> Result<(), ReservationError> {
        let status = attempt();
        let path = self.path.clone();
        Err(match status {
            Ok(0) => return Ok(()),
            Ok(status) if status == CONFLICT || status & NVME_STATUS == NVME_CONFLICT => {
                ReservationError::Conflict(path)
            }
            Ok(status) => ReservationError::Device { path, status },
            Err(error) => match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOTTY) => ReservationError::Unsupported(path),
                Some(libc::EPERM | libc::EACCES) => ReservationError::NotAllowed(path),
                Some(libc::EINVAL) => ReservationError::Refused(path),
                Some(libc::EBADE) => ReservationError::Conflict(path),
                _ => ReservationError::Kernel { path, error },
            },
        })
    }
}

/// The identity of the disk with this number, and the other block devices that have it; none if the
/// disk has no identity.
fn twins(disks: &Path, number: u64) -> (String, Vec<PathBuf>) {
    let numbers = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let entries = std::fs::read_dir(disks).into_iter().flatten().flatten();
    let (own, others): (Vec<PathBuf>, Vec<PathBuf>) =
        entries.map(|entry| entry.path()).partition(|disk| line(disk, "dev") == numbers);
    let id = own.first().map(|disk| wwid(disk)).unwrap_or_default();
    // The paths below a device of NVMe's own multipath are hidden, and cannot be opened.
    let is_twin =
        |disk: &&PathBuf| !id.is_empty() && wwid(disk) == id && line(disk, "hidden") != "1";
    let device = |disk: &PathBuf| {
        // A name in sysfs has '!' for a '/' (`cciss!c0d0`).
        let name = disk.file_name().unwrap_or_default().to_string_lossy().replace('!', "/");
        Path::new("/dev").join(name)
    };
    let twins = others.iter().filter(is_twin).map(device).collect();
    (id, twins)
}

/// The identity of a disk: NVMe's attribute, or SCSI's.
fn wwid(disk: &Path) -> String {
    let own = line(disk, "wwid");
    if own.is_empty() { line(disk, "device/wwid") } else { own }
}

/// An attribute in sysfs, as one line; empty if there is none.
fn line(directory: &Path, attribute: &str) -> String {
    let text = std::fs::read_to_string(directory.join(attribute)).unwrap_or_default();
    text.trim().replace(char::is_control, "_")
}

/// Whether the block device with this number is device mapper's.
fn is_mapped(devices: &Path, number: u64) -> bool {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    devices.join(format!("{major}:{minor}/dm/uuid")).exists()
}

/// Sends a command. The result is that of the disk: 0, or the reason why it refuses.
///
/// # Safety
/// `value` is the structure of the command `CODE`, and its pointers are valid for it.
unsafe fn order<const CODE: Opcode, T>(file: &File, value: &mut T) -> io::Result<i32> {
    // SAFETY: see above; the structure lives until the call returns.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), CODE as _, std::ptr::from_mut(value)) };
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}
