//! A sidecore's thread: pinned, and in its reactor's loop until it is told to stop.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use sidecore_linux::core_time::ThreadTime;
use sidecore_linux::{Clock, EpollSleeper, cpu};
use sidecore_reactor::{Closed, CoreContext, Mailbox, Post, Reactor, ReactorStats, mailbox};
use sidecore_telemetry::CounterSet;
use sidecore_units::{CoreId, Nanos};

use crate::AssemblyError;
use crate::report::SidecoreReport;
use crate::spec::SidecoreSpec;

/// What a sidecore runs.
pub(crate) type DiskReactor = Reactor<EpollSleeper>;

/// Deep enough for a request's whole way; only what is touched takes memory.
const STACK_BYTES: usize = 512 << 10;

/// What others need of a sidecore.
#[derive(Clone)]
pub(crate) struct Sidecore {
    name: String,
    cpu: Option<CoreId>,
    post: Post<EpollSleeper>,
    stats: Arc<ReactorStats>,
    started_at: Nanos,
    /// The kernel's accounts of the thread, if it keeps any.
    time: Option<Arc<ThreadTime>>,
    /// While the core is lost to other work, the percentage of the time that other work took.
    lost_percent: Arc<AtomicU32>,
    end: Arc<End>,
}

/// How a sidecore's thread ends.
#[derive(Default)]
struct End {
    /// It was told to.
    wanted: AtomicBool,
    /// It has, though nobody told it to.
    unwanted: AtomicBool,
}

/// Takes note of the thread's end, also of one by a panic.
struct EndWatch(Arc<End>);

impl Drop for EndWatch {
    fn drop(&mut self) {
        if !self.0.wanted.load(Ordering::Acquire) {
            self.0.unwanted.store(true, Ordering::Release);
        }
    }
}

/// A sidecore's core is lost to other work, how much of it, and the remedy.
pub(crate) struct CoreWarning<'a> {
    sidecore: &'a str,
    cpu: Option<CoreId>,
    percent: u32,
}

impl fmt::Display for CoreWarning<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sidecore, cpu, percent } = self;
        let took = format_args!("other work kept it from running for {percent} % of the time");
        let meanwhile = "Until it has, it sleeps for moments between looks at its disks and does not poll";
        match cpu {
            Some(CoreId(cpu)) => write!(
                f,
                "sidecore \"{sidecore}\" does not have CPU {cpu} for itself: {took}. {meanwhile}; keep other work off \
                 CPU {cpu} (a cpuset, isolcpus={cpu}, IRQ affinity), give the sidecore another `cpu`, or set \
                 `idle = \"adaptive\"` for its disks"
            ),
            None => write!(
                f,
                "sidecore \"{sidecore}\" does not have a CPU for itself: {took}. {meanwhile}; give the sidecore a \
                 `cpu` that nothing else uses, or set `idle = \"adaptive\"` for its disks"
            ),
        }
    }
}

/// A sidecore's thread. Dropping it stops it.
pub(crate) struct SidecoreThread {
    sidecore: Sidecore,
    thread: Option<JoinHandle<()>>,
}

impl Sidecore {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn cpu(&self) -> Option<CoreId> {
        self.cpu
    }

    /// How long the thread ran and waited for its core; `None` if the kernel does not say.
    pub(crate) fn ran_and_waited(&self) -> Option<(Nanos, Nanos)> {
        self.time.as_ref()?.ran_and_waited().ok()
    }

    /// The turns of the reactor so far.
    pub(crate) fn turns(&self) -> u64 {
        self.stats.turns.get()
    }

    /// Other work took this share of the time, 0 to 1: the sidecore pauses from now on.
    pub(crate) fn set_core_lost(&self, share: f64) {
        let percent = (share * 100.0).round().clamp(1.0, 100.0) as u32;
        self.lost_percent.store(percent, Ordering::Relaxed);
        // Mail without captures is no allocation.
        self.tell(|reactor| reactor.set_without_core(true));
    }

    /// The core is free again: the sidecore polls as configured.
    pub(crate) fn set_core_regained(&self) {
        self.tell(|reactor| reactor.set_without_core(false));
        self.lost_percent.store(0, Ordering::Release);
    }

    /// What to say of the core while it is lost.
    pub(crate) fn core_warning(&self) -> Option<CoreWarning<'_>> {
        let percent = self.lost_percent.load(Ordering::Acquire);
        (percent > 0).then_some(CoreWarning { sidecore: &self.name, cpu: self.cpu, percent })
    }

    /// Has something done on the sidecore's thread, and waits for the answer. What is dropped there unanswered was
    /// not done: the sidecore is gone.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut DiskReactor) -> T + Send + 'static,
    ) -> Result<T, Closed> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.post.send(Box::new(move |reactor| {
            // Whoever asked may have stopped waiting.
            let _ = reply.send(question(reactor));
        }))?;
        answer.recv().map_err(|_| Closed)
    }

    /// Has something done on the sidecore's thread, and does not wait. If the sidecore is gone it is dropped.
    pub(crate) fn tell(&self, what: impl FnOnce(&mut DiskReactor) + Send + 'static) {
        let _ = self.post.send(Box::new(what));
    }

    /// Whether it has ended by itself: nothing on it will be served again.
    pub(crate) fn is_lost(&self) -> bool {
        self.end.unwanted.load(Ordering::Acquire)
    }

    /// What it does with its time, as of `now`.
    pub(crate) fn report(&self, now: Nanos) -> SidecoreReport {
        let mut report = SidecoreReport {
            name: self.name.clone(),
            cpu: self.cpu.map(|cpu| cpu.0),
            counts: self.stats.counts(),
            utilisation: 0.0,
            warning: self.core_warning().map(|warning| warning.to_string()),
        };
        report.utilisation = report.utilisation_since(None, now.since(self.started_at).0);
        report
    }
}

impl SidecoreThread {
    /// Starts the thread and waits until it is on its CPU and polls.
    pub(crate) fn start(spec: &SidecoreSpec, clock: &Clock) -> Result<Self, AssemblyError> {
        let failed = |error| AssemblyError::Sidecore { name: spec.name.clone(), error };
        let (post, mailbox) = mailbox().map_err(failed)?;
        let (ready, started) = mpsc::sync_channel(1);
        let end = Arc::new(End::default());
        let run = {
            let (spec, clock, watch) = (spec.clone(), clock.clone(), EndWatch(Arc::clone(&end)));
            move || {
                let reactor = match set_up(&spec, mailbox) {
                    Ok(reactor) => reactor,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                let time = ThreadTime::of_current_thread().ok().map(Arc::new);
                let _ = ready.send(Ok((reactor.stats(), time)));
                drop(ready);
                poll(&spec.name, reactor, &clock, &watch.0.wanted);
            }
        };
        let thread = std::thread::Builder::new().name(spec.name.clone()).stack_size(STACK_BYTES).spawn(run);
        let thread = thread.map_err(failed)?;
        let (stats, time) =
            started.recv().unwrap_or_else(|_| Err(failed(io::Error::other("its thread has panicked"))))?;
        let sidecore = Sidecore {
            name: spec.name.clone(),
            cpu: spec.cpu,
            post,
            stats,
            started_at: clock.now(),
            time,
            lost_percent: Arc::default(),
            end,
        };
        Ok(Self { sidecore, thread: Some(thread) })
    }

    /// What others need of it.
    pub(crate) fn sidecore(&self) -> &Sidecore {
        &self.sidecore
    }
}

impl Drop for SidecoreThread {
    fn drop(&mut self) {
        self.sidecore.end.wanted.store(true, Ordering::Release);
        // Only to wake it; if it is gone already, all the better.
        let _ = self.sidecore.post.send(Box::new(|_| {}));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(sidecore = self.sidecore.name, "its thread has panicked");
        }
    }
}

/// On the thread itself: to its CPU, and a reactor with nothing in it.
fn set_up(spec: &SidecoreSpec, mailbox: Mailbox<EpollSleeper>) -> Result<DiskReactor, AssemblyError> {
    if let Some(cpu) = spec.cpu {
        cpu::pin_current_thread(cpu).map_err(|error| AssemblyError::Pin { name: spec.name.clone(), error })?;
    }
    let failed = |error| AssemblyError::Sidecore { name: spec.name.clone(), error };
    // Delays and timeouts are in microseconds, and the kernel's usual slack is fifty of them.
    cpu::set_timer_slack(Nanos(1)).map_err(failed)?;
    Reactor::new(CoreContext::new(spec.cpu), EpollSleeper::new().map_err(failed)?, mailbox).map_err(failed)
}

fn poll(name: &str, mut reactor: DiskReactor, clock: &Clock, stop: &AtomicBool) {
    tracing::debug!(sidecore = name, "polling");
    while !stop.load(Ordering::Acquire) {
        if let Err(error) = reactor.turn(&mut || clock.now()) {
            // Without a way to sleep or to be woken it is of no use; its devices report that it is gone.
            tracing::error!(sidecore = name, "it cannot go on: {error}");
            return;
        }
    }
    tracing::debug!(sidecore = name, "stopped");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(cpu: Option<u32>) -> Result<SidecoreThread, AssemblyError> {
        let spec = SidecoreSpec { name: "sc".to_owned(), cpu: cpu.map(CoreId) };
        SidecoreThread::start(&spec, &Clock::new())
    }

    #[test]
    fn it_answers_on_its_own_cpu_until_it_is_stopped() {
        let cpu = cpu::allowed_cores().unwrap()[0];
        let thread = start(Some(cpu.0)).unwrap();
        let sidecore = thread.sidecore().clone();
        let cores = sidecore.ask(|reactor| (cpu::allowed_cores().unwrap(), reactor.len())).unwrap();
        assert_eq!(cores, (vec![cpu], 0));
        // Mail is counted when it is done, which is after its answer.
        sidecore.ask(|_| ()).unwrap();
        assert!(sidecore.report(Nanos::MAX).mails >= 1);
        drop(thread);
        assert_eq!(sidecore.ask(|_| ()), Err(Closed));
        assert!(!sidecore.is_lost());
    }

    #[test]
    fn an_end_that_nobody_wanted_is_noticed() {
        let thread = start(None).unwrap();
        let sidecore = thread.sidecore().clone();
        assert!(!sidecore.is_lost());
        assert_eq!(sidecore.ask(|_| panic!("this panic is part of a test")), Err::<(), _>(Closed));
        // The answer is refused while the thread is still unwinding.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !sidecore.is_lost() {
            assert!(std::time::Instant::now() < deadline, "nobody noticed");
            std::thread::yield_now();
        }
        drop(thread);
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_an_error_and_leaves_no_thread() {
        let Err(error) = start(Some(1023)) else { panic!("pinned to CPU 1023") };
        assert!(error.to_string().starts_with("sidecore \"sc\": "), "{error}");
    }
}
