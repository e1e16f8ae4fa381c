//! The threads of a stage.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sidecore_block::{StageError, StageThreads};
use sidecore_linux::Clock;
use sidecore_sidecore::{Sidecore, SidecoreThread};
use sidecore_units::Nanos;

/// The longest time that a sidecore waits for a thread of a stage, when a queue begins.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// A thread that has not answered for this time is reported.
const SILENCE: Duration = Duration::from_secs(1);

/// A thread of a stage: a sidecore of its own, on any core, that sleeps without work.
pub(crate) struct Thread {
    pub(crate) sidecore: Sidecore,
    /// A queue has waited for it in vain, and it has done nothing since.
    is_silent: Arc<AtomicBool>,
    ping: Mutex<Ping>,
}

/// A message that the thread answers as soon as it looks at its mail.
#[derive(Default)]
struct Ping {
    /// The time of the last one, until its answer has been seen.
    sent_at: Option<Instant>,
    is_answered: Arc<AtomicBool>,
}

impl Thread {
    fn new(sidecore: Sidecore) -> Self {
        Self { sidecore, is_silent: Arc::default(), ping: Mutex::default() }
    }

    /// Begins to wait for the thread. A thread that has not answered before is not waited for
    /// again, so that no more than one queue pays for it.
    ///
    /// # Errors
    /// The thread is silent.
    pub(crate) fn begin_wait(&self) -> io::Result<()> {
        if self.is_silent.load(Ordering::Acquire) {
            return Err(self.timed_out());
        }
        Ok(())
    }

    /// Notes that the thread has not answered in time. Its next mail says that it is back.
    pub(crate) fn timed_out(&self) -> io::Error {
        if !self.is_silent.swap(true, Ordering::AcqRel) {
            let is_silent = Arc::clone(&self.is_silent);
            self.sidecore.tell(move |_| is_silent.store(false, Ordering::Release));
        }
        let name = self.sidecore.name();
        let seconds = PATIENCE.as_secs();
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the stage's thread \"{name}\" has not answered for {seconds} s"),
        )
    }

    /// The time for which the thread has answered no message, if that is too long.
    fn silence(&self) -> Option<Duration> {
        let mut ping = self.ping.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sent_at) = ping.sent_at
            && !ping.is_answered.load(Ordering::Acquire)
        {
            return Some(sent_at.elapsed()).filter(|silence| *silence >= SILENCE);
        }
        let is_answered = Arc::new(AtomicBool::new(false));
        *ping = Ping { sent_at: Some(Instant::now()), is_answered: Arc::clone(&is_answered) };
        self.sidecore.tell(move |_| is_answered.store(true, Ordering::Release));
        None
    }
}

/// The threads of a stage. The last owner's drop ends them, and does not wait for them.
pub(crate) struct Threads {
    threads: Vec<Arc<Thread>>,
    /// Taken by the drop.
    running: Vec<SidecoreThread>,
    /// The number of channels that were opened.
    opened: AtomicUsize,
}

impl Threads {
    /// Starts `count` threads of a stage of type `word`.
    pub(crate) fn start(word: &'static str, count: usize) -> Result<Self, StageError> {
        let clock = Clock::new();
        let start =
            |number: usize| SidecoreThread::start(&format!("{word}-{number}"), None, &clock);
        let running: Result<Vec<_>, _> = (0..count).map(start).collect();
        let running = running.map_err(|error| StageError {
            stage: word,
            reason: format!("its `threads` cannot be started: {error}"),
        })?;
        let threads = running.iter().map(|thread| Arc::new(Thread::new(thread.sidecore().clone())));
        Ok(Self { threads: threads.collect(), running, opened: AtomicUsize::new(0) })
    }

    /// The threads for a queue, of `depth`: each of them, if the queue has a request for each. They
    /// begin with another one for each queue, which has the requests of a queue that has few.
    pub(crate) fn of_queue(&self, depth: usize) -> impl Iterator<Item = &Arc<Thread>> {
        let first = self.opened.fetch_add(1, Ordering::Relaxed);
        let first = first.checked_rem(self.threads.len()).unwrap_or(0);
        let count = self.threads.len().min(depth.max(1));
        self.threads.iter().cycle().skip(first).take(count)
    }
}

impl StageThreads for Threads {
    fn count(&self) -> usize {
        self.threads.len()
    }

    fn ran(&self) -> Nanos {
        let ran = self.threads.iter().filter_map(|thread| thread.sidecore.ran_and_waited());
        ran.fold(Nanos::ZERO, |sum, (ran, _)| sum.after(ran))
    }

    fn problem(&self) -> Option<String> {
        self.threads.iter().find_map(|thread| {
            let name = thread.sidecore.name();
            if thread.sidecore.is_lost() {
                return Some(format!(
                    "the stage's thread \"{name}\" has ended, the log says why, and its requests \
                     never end; restart the daemon"
                ));
            }
            let seconds = thread.silence()?.as_secs();
            Some(format!(
                "the stage's thread \"{name}\" has not answered for {seconds} s, and its requests \
                 wait; if it does not come back, restart the daemon"
            ))
        })
    }
}

impl Drop for Threads {
    /// The thread that drops may be a sidecore, and a stage may hang.
    fn drop(&mut self) {
        let running = std::mem::take(&mut self.running);
        let ending = std::thread::Builder::new().name("stage-end".to_owned());
        if let Err(error) = ending.spawn(move || drop(running)) {
            tracing::error!("no thread ends those of a stage: {error}");
        }
    }
}
