//! The kernel's accounts of a thread and of a core: the time that each ran, waited, and lost to the
//! hypervisor.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use sidecore_units::{CoreId, Nanos};

/// The times of one thread, readable by other threads without disturbing it.
#[derive(Debug)]
pub struct ThreadTime {
    schedstat: File,
}

impl ThreadTime {
    /// Opens the accounts of the calling thread.
    ///
    /// # Errors
    /// The kernel keeps no accounts (`CONFIG_SCHED_INFO`), or `/proc` is not mounted.
    pub fn of_current_thread() -> io::Result<Self> {
        let schedstat = File::open("/proc/thread-self/schedstat")?;
        Ok(Self { schedstat })
    }

    /// Returns the time that the thread ran, and the time that it was ready to run while other
    /// threads ran.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn ran_and_waited(&self) -> io::Result<(Nanos, Nanos)> {
        let mut buffer = [0; 128];
        let len = self.schedstat.read_at(&mut buffer, 0)?;
        buffer.get(..len).and_then(parse_schedstat).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// The use of a core since the machine started, to within a tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreTime {
    /// The time of this machine's threads and interrupts.
    pub used: Nanos,
    /// The time in which the hypervisor below this machine used the core for other work.
    pub stolen: Nanos,
}

/// Enough for the lines of some hundred cores.
const STAT_BYTES: usize = 1 << 16;

/// Reads the times of all cores, repeatedly into the same memory.
#[derive(Debug)]
pub struct CoreTimes {
    stat: File,
    buffer: Box<[u8]>,
    len: usize,
}

impl CoreTimes {
    /// Opens the accounts of all cores.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        let stat = File::open("/proc/stat")?;
        Ok(Self { stat, buffer: vec![0; STAT_BYTES].into_boxed_slice(), len: 0 })
    }

    /// Reads the times of all cores.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn refresh(&mut self) -> io::Result<()> {
        // One read returns the lines of the cores, which come first.
        self.len = self.stat.read_at(&mut self.buffer, 0)?;
        Ok(())
    }

    /// Returns the times of `core` as of the last [`refresh`](Self::refresh); `None` if the kernel
    /// does not list the core.
    #[must_use]
    pub fn of(&self, core: CoreId) -> Option<CoreTime> {
        parse_stat(self.buffer.get(..self.len)?, core)
    }
}

/// Parses `RAN WAITED TIMES`, in nanoseconds (Documentation/scheduler/sched-stats.rst).
fn parse_schedstat(text: &[u8]) -> Option<(Nanos, Nanos)> {
    let mut fields =
        std::str::from_utf8(text).ok()?.split_ascii_whitespace().map(str::parse::<u64>);
    Some((Nanos(fields.next()?.ok()?), Nanos(fields.next()?.ok()?)))
}

/// Parses `cpuN user nice system idle iowait irq softirq steal ...`, in hundredths of a second
/// (proc(5)): `USER_HZ` is 100 on every supported architecture.
fn parse_stat(text: &[u8], core: CoreId) -> Option<CoreTime> {
    let is_the_core = |name: &str| {
        name.strip_prefix("cpu").and_then(|number| number.parse().ok()) == Some(core.0)
    };
    let mut fields = text
        .split(|byte| *byte == b'\n')
        .filter_map(|line| std::str::from_utf8(line).ok())
        .map(str::split_ascii_whitespace)
        .find_map(|mut fields| fields.next().is_some_and(is_the_core).then_some(fields))?;
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
    fn the_kernels_numbers_are_parsed() {
        assert_eq!(parse_schedstat(b"105 22 3\n"), Some((Nanos(105), Nanos(22))));
        assert_eq!(parse_schedstat(b"0\n"), None);
        assert_eq!(parse_schedstat(b"a b c"), None);
        let stat =
            b"cpu  1 1 1 1 1 1 1 1 0 0\ncpu1 9 9 9 9 9 9 9 9 0 0\ncpu10 1 2 3 400 500 6 7 8 0 0\n\
              intr 1\n";
        let expected = CoreTime { used: Nanos(190_000_000), stolen: Nanos(80_000_000) };
        assert_eq!(parse_stat(stat, CoreId(10)), Some(expected));
        assert_eq!(parse_stat(stat, CoreId(2)), None);
        assert_eq!(parse_stat(b"cpu1 9 9", CoreId(1)), None);
    }

    #[test]
    fn another_thread_reads_the_times_of_a_thread_until_that_ends() {
        let (send, receive) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            while ThreadTime::of_current_thread().unwrap().ran_and_waited().unwrap().0
                == Nanos::ZERO
            {}
            send.send(ThreadTime::of_current_thread().unwrap()).unwrap();
        });
        let time = receive.recv().unwrap();
        thread.join().unwrap();
        // The kernel may list a joined thread for a moment.
        while let Ok((ran, _)) = time.ran_and_waited() {
            assert!(ran > Nanos::ZERO);
        }
    }

    #[test]
    fn a_core_that_is_used_is_seen_to_be_used() {
        let core = crate::cpu::allowed_cores().unwrap()[0];
        let mut times = CoreTimes::open().unwrap();
        assert_eq!(times.of(core), None, "nothing has been read yet");
        times.refresh().unwrap();
        assert!(times.of(core).unwrap().used > Nanos::ZERO);
        assert_eq!(times.of(CoreId(u32::MAX)), None);
    }
}
