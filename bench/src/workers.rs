//! The kernel's own workers, which carry out the requests of some disks.

use std::fs;
use std::time::Duration;

use sidecore_units::CoreId;

use crate::process::schedstat;

const CORES: &str = "/sys/devices/virtual/workqueue/cpumask";
const GROUP: &str = "/proc/self/autogroup";

/// What an experiment that wants to be ahead of everything else adds to its niceness.
pub const AHEAD: i32 = -10;

/// Keeps the kernel's unbound workers on one core, and us from being ahead of them there, until it is dropped.
///
/// A thread that polls a core for itself makes a worker that is woken there wait for the end of its time slice, which is
/// thousands of times longer than a request takes; and even one that yields, if it is worth more to the scheduler.
#[derive(Debug)]
pub struct Confined {
    before: Option<String>,
    /// The niceness that our session had among others (sched(7), the autogroup feature).
    group_nice: Option<i32>,
}

impl Confined {
    /// Keeps them on `core`, if we may, and undoes what [`AHEAD`] did.
    #[must_use]
    pub fn to(core: CoreId) -> Self {
        let before = fs::read_to_string(CORES).ok().map(|mask| mask.trim().to_owned());
        let mask = format!("{:x}", 1_u64 << core.0);
        let _ = rustix::process::nice(-AHEAD);
        let group_nice = group_nice().filter(|nice| *nice < 0 && fs::write(GROUP, "0").is_ok());
        Self { before: before.filter(|_| fs::write(CORES, mask).is_ok()), group_nice }
    }

    /// Whether they are there.
    #[must_use]
    pub fn is_confined(&self) -> bool {
        self.before.is_some()
    }
}

/// `/autogroup-25 nice -20`.
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

/// How long all of them, present and still there, have run so far.
#[must_use]
pub fn cpu_time() -> Duration {
    let Ok(processes) = fs::read_dir("/proc") else { return Duration::ZERO };
    let mut total = Duration::ZERO;
    for process in processes.flatten() {
        let path = process.path();
        let is_worker = fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("kworker/u"));
        if is_worker && let Ok(text) = fs::read_to_string(path.join("schedstat")) {
            total += schedstat(&text, 0);
        }
    }
    total
}
