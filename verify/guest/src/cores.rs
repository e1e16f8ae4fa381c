//! Chooses the sidecore's CPU. A sidecore needs a core for itself, so the guest gets the other
//! CPUs.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

pub(crate) struct Cores {
    /// The last CPU that this process may use; `None` if the guest would have no CPU then.
    pub(crate) sidecore: Option<usize>,
    allowed: CpuSet,
}

impl Cores {
    pub(crate) fn divide() -> Result<Cores> {
        let allowed = sched_getaffinity(None).context("cannot ask which CPUs may be used")?;
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu));
        Ok(Cores { sidecore: last.filter(|_| allowed.count() > 1), allowed })
    }

    /// Calls `act` on all CPUs but the sidecore's. Processes that `act` starts inherit this
    /// restriction.
    pub(crate) fn elsewhere<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut others = self.allowed;
        if let Some(cpu) = self.sidecore {
            others.unset(cpu);
        }
        sched_setaffinity(None, &others).context("cannot keep the guest off the sidecore's CPU")?;
        let result = act();
        sched_setaffinity(None, &self.allowed).context("cannot return to all CPUs")?;
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sidecores_cpu_is_kept_from_others_and_only_for_a_while() {
        let cores = Cores::divide().unwrap();
        let count = || sched_getaffinity(None).unwrap().count();
        let before = count();
        let during = cores.elsewhere(|| Ok(sched_getaffinity(None)?)).unwrap();
        assert!(during.count() > 0);
        assert!(cores.sidecore.is_none_or(|cpu| !during.is_set(cpu)));
        assert_eq!(count(), before);
    }
}
