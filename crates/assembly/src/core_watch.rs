//! A thread that detects sidecores which lose their cores to other work, and which regain them. The
//! thread reads the kernel's accounts from outside, at no cost for the sidecore.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use sidecore_linux::Clock;
use sidecore_linux::core_time::CoreTimes;
use sidecore_reactor::{Contention, CoreChange, CoreSample};
use sidecore_sidecore::Sidecore;

/// The time between two readings of the accounts.
const PERIOD: Duration = Duration::from_millis(250);

/// Watches sidecores, on a thread that its drop ends.
pub(crate) struct CoreWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    sidecore: Sidecore,
    contention: Contention,
    /// The sidecore's turns at the last look: a sidecore without new turns sleeps.
    turns: u64,
}

impl CoreWatch {
    pub(crate) fn start(sidecores: &[Sidecore], clock: &Clock) -> io::Result<Self> {
        let mut times = CoreTimes::open()?;
        let watch = |sidecore: &Sidecore| Watched {
            sidecore: sidecore.clone(),
            contention: Contention::default(),
            turns: 0,
        };
        let mut watched: Vec<Watched> = sidecores.iter().map(watch).collect();
        let (stop, stopped) = mpsc::channel::<()>();
        let clock = clock.clone();
        let thread =
            std::thread::Builder::new().name("core-watch".to_owned()).spawn(move || {
                while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                    look(&mut watched, &mut times, &clock);
                }
            })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for CoreWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches the sidecores' cores has panicked");
        }
    }
}

/// Looks at sidecores that are awake, and at those that have lost their cores. Allocates nothing.
fn look(watched: &mut [Watched], times: &mut CoreTimes, clock: &Clock) {
    let mut is_fresh = false;
    for watched in watched.iter_mut().filter_map(|watched| watched.is_active().then_some(watched)) {
        if !is_fresh && times.refresh().is_err() {
            return;
        }
        is_fresh = true;
        watched.look(times, clock);
    }
}

impl Watched {
    fn is_active(&mut self) -> bool {
        let turns = std::mem::replace(&mut self.turns, self.sidecore.stats().turns.get());
        self.contention.is_lost() || self.turns != turns
    }

    fn look(&mut self, times: &CoreTimes, clock: &Clock) {
        let Some((ran, waited)) = self.sidecore.ran_and_waited() else { return };
        let core = self.sidecore.cpu().and_then(|cpu| times.of(cpu)).unwrap_or_default();
        let sample = CoreSample {
            at: clock.now(),
            waited,
            stolen: core.stolen,
            others: core.used.since(ran),
        };
        match self.contention.look(sample) {
            Some(CoreChange::Lost(share)) => {
                self.sidecore.set_core_lost(share);
                if let Some(warning) = self.sidecore.core_warning() {
                    tracing::warn!("{warning}");
                }
            }
            Some(CoreChange::Regained) => {
                self.sidecore.set_core_regained();
                tracing::info!(
                    sidecore = self.sidecore.name(),
                    "the CPU is free again, so the sidecore's devices are served as configured"
                );
            }
            None => {}
        }
    }
}
