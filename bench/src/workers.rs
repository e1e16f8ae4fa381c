//! The kernel's own workers, which carry out the requests of some disks.

use std::fs;
use std::path::Path;
use std::time::Duration;

use sidecore_units::CoreId;

use crate::process::schedstat;

const CORES: &str = "/sys/devices/virtual/workqueue/cpumask";
const GROUP: &str = "/proc/self/autogroup";

/// The change of niceness by which an experiment takes priority over other work.
pub const AHEAD: i32 = -10;

/// Keeps the kernel's unbound workers on one core, and gives up this program's priority over them
/// there, until dropped.
///
/// A thread that polls a core makes a worker that is woken there wait for the end of the time
/// slice, which is thousands of times longer than a request takes. Even a thread that yields does
/// so, if the scheduler gives it more weight.
#[derive(Debug)]
pub struct Confined {
    before: Option<String>,
    /// The niceness of this session among others (sched(7), the autogroup feature).
    group_nice: Option<i32>,
}

impl Confined {
    /// Moves the workers to `core`, if the process has the privilege, and undoes [`AHEAD`].
    #[must_use]
    pub fn to(core: CoreId) -> Self {
        let before = fs::read_to_string(CORES).ok().map(|mask| mask.trim().to_owned());
        let mask = format!("{:x}", 1_u64 << core.0);
        let _ = rustix::process::nice(-AHEAD);
        let group_nice = group_nice().filter(|nice| *nice < 0 && fs::write(GROUP, "0").is_ok());
        Self { before: before.filter(|_| fs::write(CORES, mask).is_ok()), group_nice }
    }

    /// Whether the workers are confined.
    #[must_use]
    pub fn is_confined(&self) -> bool {
        self.before.is_some()
    }
}

/// Parses `/autogroup-25 nice -20`.
fn group_nice() -> Option<i32> {
    fs::read_to_string(GROUP).ok()?.trim().rsplit(' ').next()?.parse().ok()
}

impl Drop for Confined {
    fn drop(&mut self) {
        let _ = rustix::process::nice(AHEAD);
        if let Some(nice) = self.group_nice {
            let _ = fs::write(GROUP, nice.to_string());
        }
        if let Some(before) = &self.before
            && let Err(error) = fs::write(CORES, before)
        {
            eprintln!("error: {error}: write {before} to {CORES} by hand");
        }
    }
}

/// The time that all threads on this machine have run so far, except those of `ours`, the kernel's
/// workers and the interrupts that serve them, and the time for which the hypervisor below gave
/// this machine's cores to others.
///
/// Where workers must get a core from the threads that wait for them, a thread that is kept off its
/// core is no sign of a disturbance; other work on the core is one.
#[must_use]
pub fn other_cpu_time(ours: &[u32]) -> Duration {
    let Ok(processes) = fs::read_dir("/proc") else { return Duration::ZERO };
    let mut total = stolen_time();
    for process in processes.flatten() {
        let id = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if id.is_none_or(|id| ours.contains(&id)) || is_worker(&process.path()) {
            continue;
        }
        // A thread may end between the two reads.
        for task in fs::read_dir(process.path().join("task")).into_iter().flatten().flatten() {
            if let Ok(text) = fs::read_to_string(task.path().join("schedstat")) {
                total += schedstat(&text, 0);
            }
        }
    }
    total
}

fn is_worker(process: &Path) -> bool {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    name.starts_with("kworker/") || name.starts_with("ksoftirqd/")
}

/// The eighth number of the first line of /proc/stat (proc_stat(5)), in ticks of 10 ms.
fn stolen_time() -> Duration {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = text.split_whitespace().nth(8).and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    Duration::from_millis(10).saturating_mul(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_our_own_threads_is_left_out() {
        let me = std::process::id();
        let all = other_cpu_time(&[]);
        assert!(all > Duration::ZERO);
        // More time than all other threads can take meanwhile.
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(20) {
            std::hint::black_box(0);
        }
        assert!(other_cpu_time(&[]) > all);
        assert!(other_cpu_time(&[me]) < other_cpu_time(&[]));
    }
}
