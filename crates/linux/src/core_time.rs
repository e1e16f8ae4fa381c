//! What the kernel counts about a thread and a core: who ran, and who had to wait.

use std::io;
use std::path::PathBuf;

use sidecore_units::{CoreId, Nanos};

/// The calling thread's number, for [`ThreadTime`].
#[must_use]
pub fn thread_number() -> u32 {
    // Thread numbers are positive.
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// Reads a thread's times from another thread of the process, without disturbing it.
#[derive(Debug)]
pub struct ThreadTime {
    path: PathBuf,
}

impl ThreadTime {
    /// Of the thread of this process with this number.
    #[must_use]
    pub fn of(thread: u32) -> Self {
        Self { path: format!("/proc/self/task/{thread}/schedstat").into() }
    }

    /// For how long it ran, and for how long it could have run while others did.
    ///
    /// # Errors
    /// The thread is gone, or the kernel does not count (`CONFIG_SCHED_INFO`).
    pub fn ran_and_waited(&self) -> io::Result<(Nanos, Nanos)> {
        let text = std::fs::read_to_string(&self.path)?;
        parse_schedstat(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "schedstat has other fields"))
    }
}

/// How long a core was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreTime {
    /// By anybody on this machine, interrupts included.
    pub used: Nanos,
    /// By something else than this machine, if that is a virtual one.
    pub stolen: Nanos,
}

/// How long each of `cores` was used since the machine started, to within a tick.
///
/// # Errors
/// The kernel's.
pub fn core_times(cores: &[CoreId]) -> io::Result<Vec<CoreTime>> {
    let text = std::fs::read_to_string("/proc/stat")?;
    Ok(cores.iter().map(|core| parse_stat(&text, *core).unwrap_or_default()).collect())
}

/// `RAN WAITED TIMES`, in nanoseconds (Documentation/scheduler/sched-stats.rst).
fn parse_schedstat(text: &str) -> Option<(Nanos, Nanos)> {
    let mut fields = text.split_ascii_whitespace().map(str::parse::<u64>);
    Some((Nanos(fields.next()?.ok()?), Nanos(fields.next()?.ok()?)))
}

/// `cpuN user nice system idle iowait irq softirq steal ...`, in hundredths of a second (proc(5)): `USER_HZ` is 100
/// on every architecture that this runs on.
fn parse_stat(text: &str, core: CoreId) -> Option<CoreTime> {
    let name = format!("cpu{}", core.0);
    let mut fields = text
        .lines()
        .map(str::split_ascii_whitespace)
        .find_map(|mut fields| (fields.next() == Some(&name)).then_some(fields))?;
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let (user, nice, system, _idle, _iowait) = (ticks()?, ticks()?, ticks()?, ticks()?, ticks()?);
    let (irq, softirq, steal) = (ticks()?, ticks()?, ticks()?);
    let time = |ticks: u64| Nanos(ticks.saturating_mul(10_000_000));
    let used = [user, nice, system, irq, softirq].into_iter().fold(0, u64::saturating_add);
    Some(CoreTime { used: time(used), stolen: time(steal) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_understood() {
        assert_eq!(parse_schedstat("105 22 3\n"), Some((Nanos(105), Nanos(22))));
        assert_eq!(parse_schedstat("0\n"), None);
        assert_eq!(parse_schedstat("a b c"), None);
        let stat = "cpu  1 1 1 1 1 1 1 1 0 0\ncpu1 9 9 9 9 9 9 9 9 0 0\ncpu10 1 2 3 400 500 6 7 8 0 0\nintr 1\n";
        let expected = CoreTime { used: Nanos(190_000_000), stolen: Nanos(80_000_000) };
        assert_eq!(parse_stat(stat, CoreId(10)), Some(expected));
        assert_eq!(parse_stat(stat, CoreId(2)), None);
        assert_eq!(parse_stat("cpu1 9 9", CoreId(1)), None);
    }

    #[test]
    fn a_thread_that_runs_is_seen_to_run_by_another() {
        let thread = ThreadTime::of(thread_number());
        let before = thread.ran_and_waited().unwrap().0;
        let seen = std::thread::spawn(move || thread.ran_and_waited().unwrap().0).join().unwrap();
        assert!(seen >= before && seen > Nanos::ZERO);
        let core = crate::cpu::allowed_cores().unwrap()[0];
        assert!(core_times(&[core]).unwrap()[0].used > Nanos::ZERO);
    }
}
