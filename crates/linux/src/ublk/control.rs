//! Control commands: one at a time, each waits for the kernel's answer.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::Duration;

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use super::partitions::UblkPartitions;
use super::wire::{self, Argument, RawParameters, UblkInfo, UblkParameters, ublk_flag};

const DEVICE: &str = "/dev/ublk-control";

/// The features without which no device is served: its requests must survive this process.
const NEEDED: u64 =
    ublk_flag::USER_RECOVERY | ublk_flag::USER_RECOVERY_REISSUE | ublk_flag::CMD_IOCTL_ENCODE;

/// The time between two looks at whether a command is to be given up.
const LOOK: Duration = Duration::from_millis(50);

/// Why a device cannot be made or served.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The module is not loaded.
    #[error(
        "the kernel has no {DEVICE}; load its module with `modprobe ublk_drv` (Linux 6.5 or later, \
         built with CONFIG_BLK_DEV_UBLK)"
    )]
    NoModule,
    /// The process may not use the control device.
    #[error("{DEVICE} cannot be opened: {0}; run the daemon as root, or with CAP_SYS_ADMIN")]
    Open(io::Error),
    /// The kernel is too old.
    #[error(
        "this kernel's ublk has not all that recovery needs (features {features:#x}); use Linux \
         6.5 or later"
    )]
    Features {
        /// The features that it has.
        features: u64,
    },
    /// A command failed.
    #[error("the kernel's ublk refuses {command} for device {number}: {error}")]
    Command {
        /// The command's name in the kernel.
        command: &'static str,
        /// The number of the device.
        number: u32,
        /// The kernel's error.
        error: io::Error,
    },
}

impl UblkError {
    /// The kernel's error number, if a command failed.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Command { error, .. } => error.raw_os_error(),
            _ => None,
        }
    }
}

/// The control device of ublk.
#[derive(Debug)]
pub struct UblkControl {
    device: File,
    features: u64,
}

impl UblkControl {
    /// Opens the control device, and checks that the kernel's ublk has all that is needed.
    ///
    /// # Errors
    /// See [`UblkError`].
    pub fn open() -> Result<Self, UblkError> {
        let device = OpenOptions::new().read(true).write(true).open(DEVICE);
        let device = device.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => UblkError::NoModule,
            _ => UblkError::Open(error),
        })?;
        let mut control = Self { device, features: 0 };
        let (features, _) = match control.exchange(wire::GET_FEATURES, "GET_FEATURES", 0, 0_u64) {
            Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => (0, 0),
            answer => answer?,
        };
        if features & NEEDED != NEEDED {
            return Err(UblkError::Features { features });
        }
        control.features = features;
        Ok(control)
    }

    /// The number of queues with which a device can be recovered at any point.
    ///
    /// Before Linux 6.15, START_USER_RECOVERY dereferences a null pointer if some queues of the
    /// device have fetched and others have not, as they are after a server was killed while it
    /// recovered the device. One queue fetches all its tags in one system call, which a signal does
    /// not interrupt. ("ublk: move device reset into ublk_ch_release()", Ming Lei, April 2025. The
    /// flag is of the next release, the first one that later kernels can be recognized by.)
    #[must_use]
    pub fn queues_max(&self) -> u16 {
        queues_max(self.features)
    }

    /// How a start of a device is to read its partitions.
    ///
    /// Linux before 6.19 reads them within START_DEV, with the device's mutex held, which every
    /// other command takes. If the server is killed meanwhile, the read waits for the next server,
    /// whose recovery waits for the mutex: neither ends, nor does the killed process, which holds
    /// its files. ("ublk: scan partition in async way", Ming Lei, December 2025. The flag is of
    /// Linux 7.0, the first one by which such kernels can be recognized.)
    #[must_use]
    pub fn partitions(&self) -> UblkPartitions {
        partitions(self.features)
    }

    /// The device of this number; `None` if there is none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn info(&self, number: u32) -> Result<Option<UblkInfo>, UblkError> {
        match self.exchange(wire::GET_DEV_INFO, "GET_DEV_INFO", number, UblkInfo::default()) {
            Ok((info, _)) => Ok(Some(info)),
            Err(error) if matches!(error.errno(), Some(libc::ENODEV | libc::EINVAL)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a device whose requests survive this process. Returns what the kernel has made, which
    /// may have fewer queues.
    ///
    /// # Errors
    /// The kernel's.
    pub fn add(&self, wanted: UblkInfo) -> Result<UblkInfo, UblkError> {
        let info = wanted.served_by(own_pid(), NEEDED);
        let (made, _) = self.exchange(wire::ADD_DEV, "ADD_DEV", wanted.number, info)?;
        Ok(made)
    }

    /// Sets the size and the properties of a device that is not started.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_parameters(&self, number: u32, set: UblkParameters) -> Result<(), UblkError> {
        self.exchange(wire::SET_PARAMS, "SET_PARAMS", number, set.to_raw()).map(drop)
    }

    /// The size and the properties of a device.
    ///
    /// # Errors
    /// The kernel's.
    pub fn parameters(&self, number: u32) -> Result<UblkParameters, UblkError> {
        let blank = RawParameters::blank();
        let (raw, _) = self.exchange(wire::GET_PARAMS, "GET_PARAMS", number, blank)?;
        Ok(UblkParameters::of_raw(&raw))
    }

    /// Starts a device: waits until all its queues have fetched their requests, shows the block
    /// device, and reads its partitions, which the queues have to serve meanwhile. `gives_up` is
    /// asked from time to time whether to stop waiting.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if the wait was given up.
    pub fn start(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        let argument = Argument { data: own_pid() as u64, ..Argument::default() };
        self.command(wire::START_DEV, "START_DEV", number, argument, gives_up).map(drop)
    }

    /// Stops a device: its requests end, and the block device vanishes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn stop(&self, number: u32) -> Result<(), UblkError> {
        self.command(wire::STOP_DEV, "STOP_DEV", number, Argument::default(), &|| false).map(drop)
    }

    /// Removes a device. Waits until no queue of it is open.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if the wait was given up.
    pub fn delete(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.command(wire::DEL_DEV, "DEL_DEV", number, Argument::default(), gives_up).map(drop)
    }

    /// Whether the size of a device can change while it is used.
    #[must_use]
    pub fn can_resize(&self) -> bool {
        self.features & ublk_flag::UPDATE_SIZE != 0
    }

    /// Gives a device that is used another size.
    ///
    /// # Errors
    /// The kernel's.
    pub fn resize(&self, number: u32, capacity_bytes: u64) -> Result<(), UblkError> {
        let argument = Argument { data: capacity_bytes >> 9, ..Argument::default() };
        self.command(wire::UPDATE_SIZE, "UPDATE_SIZE", number, argument, &|| false).map(drop)
    }

    /// Begins to take over a device whose process has ended. EBUSY until the kernel has cleaned up
    /// after that process.
    ///
    /// # Errors
    /// The kernel's.
    pub fn begin_recovery(&self, number: u32) -> Result<(), UblkError> {
        let (code, name) = (wire::START_USER_RECOVERY, "START_USER_RECOVERY");
        self.command(code, name, number, Argument::default(), &|| false).map(drop)
    }

    /// Ends a recovery: waits until all queues have fetched, and lets the requests go on.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if the wait was given up.
    pub fn end_recovery(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        let argument = Argument { data: own_pid() as u64, ..Argument::default() };
        let (code, name) = (wire::END_USER_RECOVERY, "END_USER_RECOVERY");
        self.command(code, name, number, argument, gives_up).map(drop)
    }

    /// Carries out a command with a structure that the kernel reads, writes or both. Such commands
    /// do not wait for requests.
    fn exchange<T: Copy>(
        &self,
        code: u32,
        name: &'static str,
        number: u32,
        value: T,
    ) -> Result<(T, i32), UblkError> {
        let mut value = Box::new(value);
        let address = std::ptr::from_mut(value.as_mut()).addr() as u64;
        // The kernel writes to it without the compiler's knowledge.
        std::ptr::from_mut(value.as_mut()).expose_provenance();
        let argument = Argument { address, len: size_of::<T>() as u16, data: 0 };
        let result = self.command(code, name, number, argument, &|| false)?;
        Ok((*std::hint::black_box(value), result))
    }

    /// Carries out a command. The memory that `argument` names must be valid until the command has
    /// ended, which without `gives_up` is before the return.
    fn command(
        &self,
        code: u32,
        name: &'static str,
        number: u32,
        argument: Argument,
        gives_up: &dyn Fn() -> bool,
    ) -> Result<i32, UblkError> {
        let failed = |error| UblkError::Command { command: name, number, error };
        let mut ring: IoUring<Entry128, cqueue::Entry> =
            IoUring::builder().build(1).map_err(failed)?;
        let entry = opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), code)
            .cmd(wire::control_command(number, argument))
            .build();
        // SAFETY: the memory of the argument outlives the command, as the caller promises; the
        // device is open as long as `self`.
        let pushed = unsafe { ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring is empty");
        let look = Timespec::new().nsec(LOOK.subsec_nanos());
        loop {
            if let Some(completion) = ring.completion().next() {
                return match completion.result() {
                    result @ 0.. => Ok(result),
                    errno => Err(failed(io::Error::from_raw_os_error(errno.saturating_neg()))),
                };
            }
            if gives_up() {
                return Err(failed(io::Error::from_raw_os_error(libc::ECANCELED)));
            }
            match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&look)) {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                    // The kernel is short of memory. The command may have begun, so its memory has
                    // to stay.
                    std::thread::sleep(LOOK);
                }
                _ => {}
            }
        }
    }
}

/// The numbers of the kernel's devices, by the names of their `ublkcN` in `/dev`. Empty if the
/// directory cannot be read.
#[must_use]
pub fn ublk_numbers(dev: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(dev).into_iter().flatten().filter_map(Result::ok);
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    let mut numbers: Vec<_> =
        entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    numbers.sort_unstable();
    numbers
}

fn queues_max(features: u64) -> u16 {
    if features & ublk_flag::QUIESCE == 0 { 1 } else { u16::MAX }
}

fn partitions(features: u64) -> UblkPartitions {
    if features & ublk_flag::NO_AUTO_PART_SCAN == 0 {
        UblkPartitions::NotRead
    } else {
        UblkPartitions::Read
    }
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_cannot_recover_several_queues_get_one() {
        // The features of Linux 6.12 and of 6.16.
        assert_eq!(queues_max(0x3ff), 1);
        assert_eq!(queues_max(0x3fff), u16::MAX);
    }

    #[test]
    fn kernels_that_read_partitions_with_the_mutex_held_read_none() {
        // The features of Linux 6.12 and of 7.0.
        assert_eq!(partitions(0x3ff), UblkPartitions::NotRead);
        assert_eq!(partitions(0x7_ffff), UblkPartitions::Read);
    }

    #[test]
    fn devices_are_found_by_the_names_of_their_nodes() {
        let dev = tempfile::tempdir().unwrap();
        for name in ["ublkc12", "ublkc3", "ublkb4", "ublkc", "ublkc-1", "ublk-control", "null"] {
            std::fs::write(dev.path().join(name), "").unwrap();
        }
        assert_eq!(ublk_numbers(dev.path()), [3, 12]);
        assert!(ublk_numbers(&dev.path().join("missing")).is_empty());
    }

    #[test]
    fn a_missing_module_is_named_with_its_remedy() {
        if std::path::Path::new(DEVICE).exists() {
            return;
        }
        let error = UblkControl::open().unwrap_err().to_string();
        assert!(error.contains("modprobe ublk_drv"), "{error}");
    }
}
