//! A sidecore's thread: pinned, and in its reactor's loop until it is told to stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use sidecore_linux::core_time::ThreadTime;
use sidecore_linux::cpu::PinError;
use sidecore_linux::{Clock, EpollSleeper, cpu};
use sidecore_reactor::{CoreContext, Mailbox, mailbox};
use sidecore_units::{CoreId, Nanos};

use crate::sidecore::{End, EndWatch};
use crate::{Reactor, Sidecore};

/// Deep enough for a request's whole way; only touched pages take memory.
const STACK_BYTES: usize = 512 << 10;

/// Why a sidecore's thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// The kernel refuses what it needs.
    #[error(transparent)]
    Start(io::Error),
    /// It cannot be pinned to its core.
    #[error(transparent)]
    Pin(#[from] PinError),
}

/// A sidecore's thread. Dropping it stops it.
pub struct SidecoreThread {
    sidecore: Sidecore,
    thread: Option<JoinHandle<()>>,
}

impl SidecoreThread {
    /// Starts the thread and waits until it is on its CPU and polls.
    ///
    /// # Errors
    /// See [`ThreadError`].
    pub fn start(name: &str, cpu: Option<CoreId>, clock: &Clock) -> Result<Self, ThreadError> {
        let failed = ThreadError::Start;
        let (post, mailbox) = mailbox().map_err(failed)?;
        let (ready, started) = mpsc::sync_channel(1);
        let end = Arc::new(End::default());
        let run = {
            let (name, clock, watch) = (name.to_owned(), clock.clone(), EndWatch(Arc::clone(&end)));
            move || {
                let reactor = match set_up(cpu, mailbox, clock.clone()) {
                    Ok(reactor) => reactor,
                    Err(error) => return drop(ready.send(Err(error))),
                };
                let time = ThreadTime::of_current_thread().ok().map(Arc::new);
                let _ = ready.send(Ok((reactor.stats(), time)));
                drop(ready);
                poll(&name, reactor, &clock, &watch.0.wanted);
            }
        };
        let thread =
            std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(run);
        let thread = thread.map_err(failed)?;
        let (stats, time) = started
            .recv()
            .unwrap_or_else(|_| Err(failed(io::Error::other("its thread has panicked"))))?;
        let sidecore = Sidecore {
            name: name.to_owned(),
            cpu,
            post,
            stats,
            started_at: clock.now(),
            time,
            lost_percent: Arc::default(),
            end,
        };
        Ok(Self { sidecore, thread: Some(thread) })
    }

    /// The sidecore as other threads see it.
    #[must_use]
    pub fn sidecore(&self) -> &Sidecore {
        &self.sidecore
    }
}

impl Drop for SidecoreThread {
    fn drop(&mut self) {
        self.sidecore.end.wanted.store(true, Ordering::Release);
        // Wakes it, so that it looks; it may be gone already.
        let _ = self.sidecore.post.send(Box::new(|_| {}));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(sidecore = self.sidecore.name, "its thread has panicked");
        }
    }
}

/// On the thread itself: to its CPU, and a reactor with nothing in it.
fn set_up(
    cpu: Option<CoreId>,
    mailbox: Mailbox<EpollSleeper>,
    clock: Clock,
) -> Result<Reactor, ThreadError> {
    if let Some(cpu) = cpu {
        cpu::pin_current_thread(cpu)?;
    }
    let failed = ThreadError::Start;
    // Delays and timeouts are in microseconds, and the kernel's usual slack is fifty of them.
    cpu::set_timer_slack(Nanos(1)).map_err(failed)?;
    let context = CoreContext::new(cpu).with_clock(move || clock.now());
    Reactor::new(context, EpollSleeper::new().map_err(failed)?, mailbox).map_err(failed)
}

fn poll(name: &str, mut reactor: Reactor, clock: &Clock, stop: &AtomicBool) {
    tracing::debug!(sidecore = name, "polling");
    while !stop.load(Ordering::Acquire) {
        if let Err(error) = reactor.turn(&mut || clock.now()) {
            // A sidecore that can neither sleep nor be woken serves nothing. Its devices report
            // that it is gone.
            tracing::error!(sidecore = name, "it cannot go on: {error}");
            return;
        }
    }
    tracing::debug!(sidecore = name, "stopped");
}

#[cfg(test)]
mod tests {
    use sidecore_reactor::Closed;

    use super::*;

    fn start(cpu: Option<u32>) -> Result<SidecoreThread, ThreadError> {
        SidecoreThread::start("sc", cpu.map(CoreId), &Clock::new())
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
        assert!(sidecore.stats().messages.get() >= 1);
        drop(thread);
        assert_eq!(sidecore.ask(|_| ()), Err(Closed));
        assert!(!sidecore.is_lost());
    }

    #[test]
    fn an_unexpected_end_is_noticed() {
        let thread = start(None).unwrap();
        let sidecore = thread.sidecore().clone();
        assert!(!sidecore.is_lost());
        assert_eq!(sidecore.ask(|_| panic!("this panic is part of a test")), Err::<(), _>(Closed));
        // The answer is refused while the thread is still unwinding.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !sidecore.is_lost() {
            assert!(std::time::Instant::now() < deadline, "the end was not noticed");
            std::thread::yield_now();
        }
        drop(thread);
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_an_error_and_leaves_no_thread() {
        let Err(error) = start(Some(1023)) else { panic!("pinned to CPU 1023") };
        assert!(matches!(error, ThreadError::Pin(_)), "{error}");
    }
}
