//! The thread that notices when a sidecore does not have its core, and when it has it again. It asks the kernel from
//! outside: a sidecore pays nothing for it.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use sidecore_linux::Clock;
use sidecore_linux::core_time::{CoreTime, ThreadTime, core_times};
use sidecore_reactor::{Contention, CoreChange, CoreSample};
use sidecore_units::CoreId;

use crate::sidecore::Sidecore;

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(250);

/// Watches sidecores until it is dropped.
pub(crate) struct CoreWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    sidecore: Sidecore,
    time: ThreadTime,
    contention: Contention,
    /// Its turns when it was last looked at: one that takes none sleeps.
    turns: u64,
}

impl CoreWatch {
    pub(crate) fn start(sidecores: &[Sidecore], clock: &Clock) -> io::Result<Self> {
        let mut watched: Vec<Watched> = sidecores.iter().map(Watched::new).collect();
        let (stop, stopped) = mpsc::channel::<()>();
        let clock = clock.clone();
        let thread = std::thread::Builder::new().name("core-watch".to_owned()).spawn(move || {
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                look(&mut watched, &clock);
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

/// Looks at those that are awake, or were found without their core.
fn look(watched: &mut [Watched], clock: &Clock) {
    let mut awake: Vec<&mut Watched> =
        watched.iter_mut().filter_map(|one| one.is_of_interest().then_some(one)).collect();
    if awake.is_empty() {
        return;
    }
    let cores: Vec<CoreId> = awake.iter().map(|one| one.sidecore.cpu().unwrap_or(CoreId(u32::MAX))).collect();
    let Ok(times) = core_times(&cores) else { return };
    for (one, core) in awake.iter_mut().zip(times) {
        one.look(core, clock);
    }
}

impl Watched {
    fn new(sidecore: &Sidecore) -> Self {
        let time = ThreadTime::of(sidecore.thread());
        Self { sidecore: sidecore.clone(), time, contention: Contention::default(), turns: 0 }
    }

    fn is_of_interest(&mut self) -> bool {
        let turns = std::mem::replace(&mut self.turns, self.sidecore.turns());
        self.contention.is_lost() || self.turns != turns
    }

    fn look(&mut self, core: CoreTime, clock: &Clock) {
        let Ok((ran, waited)) = self.time.ran_and_waited() else { return };
        let sample = CoreSample { at: clock.now(), waited, stolen: core.stolen, others: core.used.since(ran) };
        let name = self.sidecore.name();
        match self.contention.look(sample) {
            Some(CoreChange::Lost(share)) => {
                let warning = warning(&self.sidecore, share);
                tracing::warn!("{warning}");
                self.sidecore.set_without_core(Some(warning));
            }
            Some(CoreChange::Regained) => {
                tracing::info!(sidecore = name, "it has its core again, and polls as configured");
                self.sidecore.set_without_core(None);
            }
            None => {}
        }
    }
}

fn warning(sidecore: &Sidecore, share: f64) -> String {
    let name = sidecore.name();
    let (core, remedy) = match sidecore.cpu() {
        Some(cpu) => (
            format!("CPU {} for itself", cpu.0),
            format!("keep other work off CPU {} (a cpuset, isolcpus=, IRQ affinity)", cpu.0),
        ),
        None => ("a CPU for itself".to_owned(), "give it a `cpu` that nothing else uses".to_owned()),
    };
    format!(
        "sidecore \"{name}\" does not have {core}: others kept it from running for {:.0} % of the time. Its disks are \
         polled adaptively until it has; {remedy}, or set `idle = \"adaptive\"`",
        share * 100.0
    )
}
