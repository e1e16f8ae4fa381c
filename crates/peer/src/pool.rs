//! A bounded number of threads for work that may wait: mapping, closing, starting and stopping.
//!
//! A thread whose job takes longer than [`PATIENCE`] does not count: another one takes its place,
//! so that queued jobs do not wait for it. Each socket has at most one job at a time, so that even
//! peers that make all their jobs wait for ever cause no more threads than sockets.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The time for which a running job counts as short.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// A closure that may wait.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The threads, and the jobs that are queued for them.
pub(crate) struct Pool {
    /// The largest number of threads, not counting those with long jobs.
    limit: usize,
    state: Mutex<State>,
    queued: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The start times of running jobs, by their numbers.
    running: BTreeMap<u64, Instant>,
    next: u64,
    threads: usize,
    is_closed: bool,
}

impl State {
    fn idle(&self) -> usize {
        self.threads.saturating_sub(self.running.len())
    }

    /// Whether a job is queued for which no thread is idle.
    fn is_behind(&self) -> bool {
        self.jobs.len() > self.idle()
    }

    /// Whether another thread has to be started.
    fn needs_a_thread(&self, now: Instant, limit: usize) -> bool {
        let short =
            self.running.values().filter(|since| now.saturating_duration_since(**since) < PATIENCE);
        self.is_behind() && self.idle().saturating_add(short.count()) < limit
    }
}

impl Pool {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), queued: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job, and starts a thread if necessary.
    pub(crate) fn run(self: &Arc<Self>, now: Instant, job: Job) {
        self.state().jobs.push_back(job);
        self.queued.notify_one();
        self.start_threads(now);
    }

    /// Starts missing threads. If true, jobs are queued all the same: call again after
    /// [`PATIENCE`].
    pub(crate) fn start_threads(self: &Arc<Self>, now: Instant) -> bool {
        loop {
            {
                let mut state = self.state();
                if !state.needs_a_thread(now, self.limit) {
                    return state.is_behind();
                }
                state.threads = state.threads.saturating_add(1);
            }
            let pool = Arc::clone(self);
            if let Err(error) =
                thread::Builder::new().name("peer-job".to_owned()).spawn(move || pool.serve())
            {
                tracing::error!(%error, "cannot start a thread for jobs that may wait");
                let mut state = self.state();
                state.threads = state.threads.saturating_sub(1);
                return true;
            }
        }
    }

    /// Runs jobs: the main function of a thread.
    fn serve(&self) {
        while let Some((number, job)) = self.take() {
            let running = Running { pool: self, number };
            job();
            drop(running);
        }
    }

    /// Takes a job, and waits for one if necessary; `None` ends the thread.
    fn take(&self) -> Option<(u64, Job)> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                let number = state.next;
                state.next = state.next.wrapping_add(1);
                state.running.insert(number, Instant::now());
                return Some((number, job));
            }
            // This thread replaced another one, which is available again.
            if state.is_closed || state.threads > self.limit {
                state.threads = state.threads.saturating_sub(1);
                return None;
            }
            state = self.queued.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the threads after their running jobs, without waiting for them.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.queued.notify_all();
    }

    /// Runs the first queued job on this thread. False if no job is queued.
    #[cfg(test)]
    pub(crate) fn run_next(&self) -> bool {
        let job = self.state().jobs.pop_front();
        job.map(|job| job()).is_some()
    }
}

/// A running job. The drop removes it, also while its panic unwinds.
struct Running<'a> {
    pool: &'a Pool,
    number: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.running.remove(&self.number);
        if thread::panicking() {
            state.threads = state.threads.saturating_sub(1);
            tracing::error!("a job for a peer has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn state(threads: usize, since: &[Instant], jobs: usize) -> State {
        let running = (0..).zip(since.iter().copied()).collect();
        let jobs = (0..jobs).map(|_| Box::new(|| {}) as Job).collect();
        State { jobs, running, threads, ..State::default() }
    }

    #[test]
    fn a_thread_is_missing_when_all_others_have_long_jobs() {
        let start = Instant::now();
        let late = start + PATIENCE;
        assert!(!state(0, &[], 0).needs_a_thread(start, 2));
        assert!(state(0, &[], 1).needs_a_thread(start, 2));
        assert!(!state(1, &[], 1).needs_a_thread(start, 2), "an idle thread takes the job");
        assert!(state(1, &[start], 1).needs_a_thread(start, 2));
        let full = state(2, &[start, start], 1);
        assert!(!full.needs_a_thread(start, 2));
        assert!(full.is_behind());
        assert!(full.needs_a_thread(late, 2));
        assert!(state(3, &[start, start, late], 1).needs_a_thread(late, 2));
        assert!(!state(4, &[start, start, late, late], 1).needs_a_thread(late, 2));
        assert!(!state(2, &[start, start], 0).is_behind(), "nothing is queued");
    }

    #[test]
    fn a_job_that_never_ends_delays_no_other() {
        let pool = Pool::new(1);
        let (release, blocked) = channel::<()>();
        let (begun, begins) = channel();
        let now = Instant::now();
        pool.run(
            now,
            Box::new(move || {
                begun.send(()).unwrap();
                let _ = blocked.recv_timeout(6 * SOON);
            }),
        );
        begins.recv_timeout(SOON).unwrap();
        let (done, wait) = channel();
        pool.run(now, Box::new(move || done.send(()).unwrap()));
        assert!(pool.start_threads(now - PATIENCE), "the first job still counts as short");
        assert!(!pool.start_threads(Instant::now() + PATIENCE));
        wait.recv_timeout(SOON).unwrap();
        drop(release);
        pool.close();
    }

    #[test]
    fn a_panic_takes_a_thread_and_not_the_pool() {
        let pool = Pool::new(1);
        pool.run(Instant::now(), Box::new(|| panic!("on purpose")));
        let (done, wait) = channel();
        pool.run(Instant::now(), Box::new(move || done.send(()).unwrap()));
        while wait.try_recv().is_err() {
            pool.start_threads(Instant::now());
            thread::yield_now();
        }
        pool.close();
    }
}
