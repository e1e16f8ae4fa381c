//! The machine's cores, and pinning a thread to one of them.

use std::io;

use rustix::thread::CpuSet;
use sidecore_units::{CoreId, Nanos};

/// The reason why a thread could not be pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The machine does not have the core, or the core is offline.
    #[error("there is no core {core}; online are {online}")]
    NoSuchCore {
        /// The core that was requested.
        core: CoreId,
        /// The online cores, as the kernel lists them: `0-3,8`.
        online: String,
    },
    /// The core exists, but a cpuset keeps this process off it.
    #[error("core {core} is online, but this process may not use it (cpuset)")]
    NotAllowed {
        /// The core that was requested.
        core: CoreId,
    },
    /// The system call failed for another reason.
    #[error("cannot pin the thread to core {core}: {source}")]
    Kernel {
        /// The core that was requested.
        core: CoreId,
        /// The error of the system call.
        source: io::Error,
    },
}

/// Returns the cores that the calling thread may run on, in ascending order: the part of the
/// machine that `taskset` or a container allows. Call before pinning.
///
/// # Errors
/// The kernel's error; a machine with more cores than `CpuSet` holds (1024).
pub fn allowed_cores() -> io::Result<Vec<CoreId>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|core| set.is_set(*core))
        .filter_map(|core| u32::try_from(core).ok())
        .map(CoreId)
        .collect())
}

/// Pins the calling thread to `core`.
///
/// # Errors
/// The core does not exist, or the process may not use it.
pub fn pin_current_thread(core: CoreId) -> Result<(), PinError> {
    let online = || std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let no_such_core = || PinError::NoSuchCore { core, online: online().trim().to_owned() };
    let index = core.0 as usize;
    if index >= CpuSet::MAX_CPU {
        return Err(no_such_core());
    }
    let mut set = CpuSet::new();
    set.set(index);
    match rustix::thread::sched_setaffinity(None, &set) {
        Ok(()) => Ok(()),
        // The kernel has one error for both reasons (sched_setaffinity(2)).
        Err(rustix::io::Errno::INVAL) if lists(&online(), core) => {
            Err(PinError::NotAllowed { core })
        }
        Err(rustix::io::Errno::INVAL) => Err(no_such_core()),
        Err(error) => Err(PinError::Kernel { core, source: error.into() }),
    }
}

/// Sets how late the kernel may wake the calling thread to save power; Linux' default of 50 us is
/// longer than most of a sidecore's deadlines.
///
/// # Errors
/// The kernel's error.
pub fn set_timer_slack(slack: Nanos) -> io::Result<()> {
    // Zero would mean "back to the default" (PR_SET_TIMERSLACK(2const)).
    let slack_ns = libc::c_ulong::try_from(slack.0.max(1)).unwrap_or(libc::c_ulong::MAX);
    // SAFETY: this prctl takes a number and touches no memory.
    if unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, slack_ns, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether `core` is in the kernel's list (`0-3,8`).
fn lists(list: &str, core: CoreId) -> bool {
    list.trim().split(',').any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        matches!(
            (first.parse::<u32>(), last.parse::<u32>()),
            (Ok(first), Ok(last)) if (first..=last).contains(&core.0)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_on_its_core() {
        std::thread::spawn(|| {
            let core = *allowed_cores().unwrap().last().unwrap();
            pin_current_thread(core).unwrap();
            assert_eq!(allowed_cores().unwrap(), vec![core]);
            assert_eq!(rustix::thread::sched_getcpu(), core.0 as usize);
            set_timer_slack(Nanos(1)).unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_core_that_does_not_exist_is_named() {
        for core in [CoreId(1023), CoreId(u32::MAX)] {
            let error = pin_current_thread(core).unwrap_err();
            assert!(matches!(error, PinError::NoSuchCore { .. }), "{error}");
            assert!(error.to_string().contains("online are 0"), "{error}");
        }
    }

    #[test]
    fn the_kernels_list_is_parsed() {
        for core in [0, 3, 8] {
            assert!(lists("0-3,8\n", CoreId(core)));
        }
        for core in [4, 7, 9] {
            assert!(!lists("0-3,8\n", CoreId(core)));
        }
        assert!(!lists("", CoreId(0)));
    }
}
